// Lets a chart be read interval by interval. Each chart is one tab stop; the arrow keys move within it. Without this
// script, the pointer shows the same values, and so does the table.
"use strict";
const STEP = 8;

const intervalOf = (slot) => slot.querySelector("title").textContent.split(": ")[0];

function readable(svg) {
  const readout = svg.closest("figure").querySelector(".readout");
  let slots = [];
  let chosen = -1;
  let interval = null; // the chosen one; null: the last one, also of a refreshed page

  function choose(place) {
    slots[chosen]?.classList.remove("chosen");
    chosen = Math.min(Math.max(place, 0), slots.length - 1);
    interval = chosen === slots.length - 1 ? null : intervalOf(slots[chosen]);
    slots[chosen].classList.add("chosen");
    const text = slots[chosen].querySelector("title").textContent;
    svg.setAttribute("aria-valuenow", chosen);
    svg.setAttribute("aria-valuetext", text);
    readout.textContent = text;
  }

  // Also after a refresh, which may have moved the intervals.
  function read() {
    slots = [...svg.querySelectorAll(".slot")];
    choose(interval === null ? slots.length - 1 : slots.findIndex((each) => intervalOf(each) === interval));
  }

  svg.setByScript = ["role", "tabindex", "aria-valuemin", "aria-valuemax", "aria-valuenow", "aria-valuetext"];
  read();
  svg.setAttribute("role", "slider");
  svg.setAttribute("tabindex", "0");
  svg.setAttribute("aria-valuemin", 0);
  svg.setAttribute("aria-valuemax", slots.length - 1);
  document.addEventListener("refreshed", read);
  svg.addEventListener("keydown", (event) => {
    const to = {
      ArrowLeft: chosen - 1, ArrowDown: chosen - 1, ArrowRight: chosen + 1, ArrowUp: chosen + 1,
      PageDown: chosen - STEP, PageUp: chosen + STEP, Home: 0, End: slots.length - 1,
    }[event.key];
    if (to === undefined || event.altKey || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    choose(to);
  });
  for (const kind of ["pointermove", "pointerdown"]) svg.addEventListener(kind, (event) => {
    const place = slots.indexOf(event.target.closest(".slot"));
    if (place >= 0) choose(place);
  });
}

document.querySelectorAll("figure .axes svg").forEach(readable);
