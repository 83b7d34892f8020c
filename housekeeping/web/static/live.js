// Asks for this page again every few seconds and exchanges the parts that changed; forms are left alone.
"use strict";
const EVERY_MS = 3000;

async function look() {
  try {
    const answer = await fetch(location.href, { headers: { Accept: "text/html" }, redirect: "error" });
    const page = new DOMParser().parseFromString(await answer.text(), "text/html");
    for (const part of document.querySelectorAll("[data-live]")) {
      const fresh = page.getElementById(part.id);
      const inUse = part.contains(document.activeElement);
      if (fresh && !inUse && fresh.innerHTML !== part.innerHTML) part.innerHTML = fresh.innerHTML;
    }
    document.body.classList.remove("stale");
  } catch {
    // The server is away: what is shown grows old, and says so.
    document.body.classList.add("stale");
  }
  setTimeout(look, document.hidden ? 10 * EVERY_MS : EVERY_MS);
}
setTimeout(look, EVERY_MS);
