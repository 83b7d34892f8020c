// Asks for this page again every few seconds and changes, in place, what has changed: what has the focus keeps it,
// the page stays where it was scrolled to, and a form that somebody is filling in is left alone.
"use strict";
const EVERY_MS = 3000;
const ANSWER_MS = 15000;
const answers = document.getElementById("answers");
let last = new Date();

function inUse(form) {
  const touched = (field) => field.type !== "hidden" && field.value !== field.defaultValue;
  return form.contains(document.activeElement) || [...form.elements].some((each) => each.name && touched(each));
}

// Of two neighbours the same thing: by id where there is one, else by its place and kind.
function same(old, fresh) {
  return old.nodeType === fresh.nodeType && old.nodeName === fresh.nodeName && (old.id || "") === (fresh.id || "");
}

function follow(old, fresh) {
  if (old.nodeType !== Node.ELEMENT_NODE) {
    if (old.nodeValue !== fresh.nodeValue) old.nodeValue = fresh.nodeValue;
    return;
  }
  if (old.isEqualNode(fresh) || (old.nodeName === "FORM" && inUse(old))) return;
  for (const { name } of [...old.attributes]) if (!fresh.hasAttribute(name)) old.removeAttribute(name);
  for (const { name, value } of fresh.attributes) if (old.getAttribute(name) !== value) old.setAttribute(name, value);
  followChildren(old, fresh);
}

function followChildren(old, fresh) {
  const wanted = new Set([...fresh.children].map((each) => each.id).filter(Boolean));
  const kept = (node) => node.nodeName === "FORM" && inUse(node);
  let next = old.firstChild;
  for (const child of [...fresh.childNodes]) {
    // What stands here and does not come again goes, so that what stands behind it moves up and is not made anew.
    while (next && !same(next, child) && next.id && !wanted.has(next.id) && !kept(next)) {
      const gone = next;
      next = next.nextSibling;
      gone.remove();
    }
    const there = child.id ? [...old.children].find((each) => same(each, child)) : null;
    if (next && same(next, child)) {
      follow(next, child);
      next = next.nextSibling;
    } else if (there) {
      while (next && next !== there && !kept(next) && !(next.id && wanted.has(next.id))) {
        const gone = next;
        next = next.nextSibling;
        gone.remove();
      }
      if (next === there) next = there.nextSibling;
      else if (!there.contains(document.activeElement)) old.insertBefore(there, next);
      follow(there, child);
    } else {
      old.insertBefore(document.importNode(child, true), next);
    }
  }
  while (next) {
    const gone = next;
    next = next.nextSibling;
    if (!kept(gone)) gone.remove();
  }
}

function say(text) {
  const said = text && `${text} What is shown is of ${last.toISOString().slice(11, 19)} UTC.`;
  if (answers.textContent !== said) answers.textContent = said;
  document.body.classList.toggle("stale", Boolean(text));
}

async function look() {
  try {
    const answer = await fetch(location.href, { redirect: "manual", signal: AbortSignal.timeout(ANSWER_MS) });
    if (answer.type === "opaqueredirect") say("You are no longer logged in.");
    else if (!answer.ok) say(`The dashboard answers with an error (${answer.status}).`);
    else {
      const page = new DOMParser().parseFromString(await answer.text(), "text/html");
      for (const part of document.querySelectorAll("[data-live]")) {
        const fresh = page.getElementById(part.id);
        if (fresh) follow(part, fresh);
      }
      document.title = page.title;
      last = new Date();
      say("");
    }
  } catch {
    say("The dashboard does not answer.");
  }
  setTimeout(look, document.hidden ? 10 * EVERY_MS : EVERY_MS);
}
setTimeout(look, EVERY_MS);
