// Reloads this page every few seconds and updates it in place. Focus and scroll position stay, and a form that is being
// filled in is not changed.
"use strict";
const EVERY_MS = 3000;
const ANSWER_MS = 15000;
const serverStatus = document.getElementById("answers");
let last = new Date();

function inUse(form) {
  const touched = (field) => field.type !== "hidden" && field.value !== field.defaultValue;
  return form.contains(document.activeElement) || [...form.elements].some((each) => each.name && touched(each));
}

// Whether a form stays as it is. The next page is then read in full, because the form may have to change later.
let keptForms = 0;

function isKept(node) {
  if (node.nodeName !== "FORM" || !inUse(node)) return false;
  keptForms += 1;
  return true;
}

// Whether two nodes are the same element: by id if there is one, else by kind.
function same(old, fresh) {
  return old.nodeType === fresh.nodeType && old.nodeName === fresh.nodeName && (old.id || "") === (fresh.id || "");
}

function update(old, fresh) {
  if (old.nodeType !== Node.ELEMENT_NODE) {
    if (old.nodeValue !== fresh.nodeValue) old.nodeValue = fresh.nodeValue;
    return;
  }
  if (old.isEqualNode(fresh)) return;
  if (isKept(old)) return;
  // What the reader has opened stays open, and what another script has set stays set.
  const stays = (name) => (name === "open" && old.nodeName === "DETAILS") || old.setByScript?.includes(name);
  for (const { name } of [...old.attributes]) if (!fresh.hasAttribute(name) && !stays(name)) old.removeAttribute(name);
  for (const { name, value } of fresh.attributes) {
    if (old.getAttribute(name) !== value && !stays(name)) old.setAttribute(name, value);
  }
  updateChildren(old, fresh);
}

function updateChildren(old, fresh) {
  const wanted = new Set([...fresh.children].map((each) => each.id).filter(Boolean));
  let next = old.firstChild;
  for (const child of [...fresh.childNodes]) {
    // Remove elements that are gone first, so that the elements behind them are moved and not rebuilt.
    while (next && !same(next, child) && next.id && !wanted.has(next.id) && !isKept(next)) {
      const removed = next;
      next = next.nextSibling;
      removed.remove();
    }
    const match = child.id ? [...old.children].find((each) => same(each, child)) : null;
    if (next && same(next, child)) {
      update(next, child);
      next = next.nextSibling;
    } else if (match) {
      while (next && next !== match && !isKept(next) && !(next.id && wanted.has(next.id))) {
        const removed = next;
        next = next.nextSibling;
        removed.remove();
      }
      if (next === match) next = match.nextSibling;
      else if (!match.contains(document.activeElement)) old.insertBefore(match, next);
      update(match, child);
    } else {
      old.insertBefore(document.importNode(child, true), next);
    }
  }
  while (next) {
    const removed = next;
    next = next.nextSibling;
    if (!isKept(removed)) removed.remove();
  }
}

// Ages are computed here, so that a page that differs only in them need not be sent again.
const clock = document.getElementById("at");
let shownAt = performance.now();

function inWords(seconds) {
  const units = [["s", 1, 60], ["min", 60, 60], ["h", 3600, 48], ["d", 86400, Infinity]];
  const [unit, size] = units.find(([, size, limit]) => Math.round((seconds / size) * 10) / 10 < limit);
  return `${(seconds / size).toLocaleString("en", { maximumFractionDigits: 1 })} ${unit}`;
}

function showAges() {
  if (!clock) return;
  const now = new Date(Date.parse(clock.dateTime) + performance.now() - shownAt);
  clock.textContent = `${now.toISOString().slice(0, 19).replace("T", " ")} UTC`;
  for (const each of document.querySelectorAll("time.ago")) {
    const seconds = (now - Date.parse(each.dateTime)) / 1000;
    const age = seconds < 0 ? `in ${inWords(-seconds)}` : `${inWords(seconds)} ago`;
    each.textContent = Math.abs(seconds) <= 1 ? "just now" : age;
  }
}

function alerts() {
  return new Map([...document.querySelectorAll("[data-alert]")].map(({ dataset }) => [dataset.alert, dataset.subject]));
}

// Screen readers announce only alerts that began, changed or ended.
function announce(before, after) {
  const said = [];
  for (const [name, subject] of after) {
    if (!before.has(name)) said.push(subject ? `Alert ${name}: ${subject}` : `Alert ${name}`);
    else if (before.get(name) !== subject) said.push(`Alert ${name}, now: ${subject}`);
  }
  for (const name of before.keys()) if (!after.has(name)) said.push(`No longer: ${name}`);
  if (said.length) document.getElementById("changes-said").textContent = said.join(". ");
}

function showStatus(text) {
  const message = text && `${text} This page shows the state of ${last.toISOString().slice(11, 19)} UTC.`;
  if (serverStatus.textContent !== message) serverStatus.textContent = message;
  document.body.classList.toggle("stale", Boolean(text));
}

let etag = "";

async function refresh() {
  try {
    // Confirmations are for the next page that is opened, and not for a refresh.
    const headers = { "X-Refresh": "1", ...(etag && { "If-None-Match": etag }) };
    const options = { headers, cache: "no-store", redirect: "manual", signal: AbortSignal.timeout(ANSWER_MS) };
    const response = await fetch(location.href, options);
    if (response.status === 304) {
      showAges();
      last = new Date();
      showStatus("");
    } else if (response.type === "opaqueredirect") showStatus("You are no longer logged in.");
    else if (!response.ok) showStatus(`The dashboard answers with an error (${response.status}).`);
    else {
      const page = new DOMParser().parseFromString(await response.text(), "text/html");
      const before = alerts();
      keptForms = 0;
      for (const part of document.querySelectorAll("[data-live]")) {
        const fresh = page.getElementById(part.id);
        if (fresh) update(part, fresh);
      }
      document.dispatchEvent(new Event("refreshed"));
      announce(before, alerts());
      document.title = page.title;
      shownAt = performance.now();
      etag = (!keptForms && response.headers.get("ETag")) || "";
      last = new Date();
      showStatus("");
    }
  } catch {
    showStatus("The dashboard does not answer.");
  }
  setTimeout(refresh, document.hidden ? 10 * EVERY_MS : EVERY_MS);
}
setTimeout(refresh, EVERY_MS);
