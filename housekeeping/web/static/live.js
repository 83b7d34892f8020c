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

// Whether two nodes are the same element: by id if there is one, else by kind.
function same(old, fresh) {
  return old.nodeType === fresh.nodeType && old.nodeName === fresh.nodeName && (old.id || "") === (fresh.id || "");
}

function update(old, fresh) {
  if (old.nodeType !== Node.ELEMENT_NODE) {
    if (old.nodeValue !== fresh.nodeValue) old.nodeValue = fresh.nodeValue;
    return;
  }
  if (old.isEqualNode(fresh) || (old.nodeName === "FORM" && inUse(old))) return;
  for (const { name } of [...old.attributes]) if (!fresh.hasAttribute(name)) old.removeAttribute(name);
  for (const { name, value } of fresh.attributes) if (old.getAttribute(name) !== value) old.setAttribute(name, value);
  updateChildren(old, fresh);
}

function updateChildren(old, fresh) {
  const wanted = new Set([...fresh.children].map((each) => each.id).filter(Boolean));
  const kept = (node) => node.nodeName === "FORM" && inUse(node);
  let next = old.firstChild;
  for (const child of [...fresh.childNodes]) {
    // Remove elements that are gone first, so that the elements behind them are moved and not rebuilt.
    while (next && !same(next, child) && next.id && !wanted.has(next.id) && !kept(next)) {
      const removed = next;
      next = next.nextSibling;
      removed.remove();
    }
    const match = child.id ? [...old.children].find((each) => same(each, child)) : null;
    if (next && same(next, child)) {
      update(next, child);
      next = next.nextSibling;
    } else if (match) {
      while (next && next !== match && !kept(next) && !(next.id && wanted.has(next.id))) {
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
    if (!kept(removed)) removed.remove();
  }
}

function showStatus(text) {
  const message = text && `${text} This page shows the state of ${last.toISOString().slice(11, 19)} UTC.`;
  if (serverStatus.textContent !== message) serverStatus.textContent = message;
  document.body.classList.toggle("stale", Boolean(text));
}

async function refresh() {
  try {
    const response = await fetch(location.href, { redirect: "manual", signal: AbortSignal.timeout(ANSWER_MS) });
    if (response.type === "opaqueredirect") showStatus("You are no longer logged in.");
    else if (!response.ok) showStatus(`The dashboard answers with an error (${response.status}).`);
    else {
      const page = new DOMParser().parseFromString(await response.text(), "text/html");
      for (const part of document.querySelectorAll("[data-live]")) {
        const fresh = page.getElementById(part.id);
        if (fresh) update(part, fresh);
      }
      document.title = page.title;
      last = new Date();
      showStatus("");
    }
  } catch {
    showStatus("The dashboard does not answer.");
  }
  setTimeout(refresh, document.hidden ? 10 * EVERY_MS : EVERY_MS);
}
setTimeout(refresh, EVERY_MS);
