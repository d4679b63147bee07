"use strict";
// Elements are made of text alone: nothing that a model or a data file wrote becomes markup.

function element(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (value !== false && value !== null && value !== undefined) {
      made.setAttribute(name, value === true ? "" : value);
    }
  }
  made.append(...children.filter((child) => child !== null && child !== undefined));
  return made;
}

function note(text) {
  return element("p", { class: "note" }, text);
}

function labelled(text, control) {
  return element("label", {}, text, control);
}

function select(options, value, onchange) {
  const items = options.map(([key, text]) =>
    element("option", { value: key, selected: key === value }, text));
  return element("select", { onchange: (event) => onchange(event.target.value) }, ...items);
}

function search(placeholder, value, oninput) {
  return element("input", {
    type: "search", placeholder, value, "aria-label": placeholder,
    oninput: (event) => oninput(event.target.value),
  });
}

function checkbox(checked, onchange) {
  return element("input", {
    type: "checkbox", checked, onchange: (event) => onchange(event.target.checked),
  });
}

function table(heads, rows, attributes = {}) {
  const head = element("tr", {}, ...heads.map(([text, kind]) =>
    element("th", { class: kind, scope: "col" }, text)));
  return element("table", attributes, element("thead", {}, head), element("tbody", {}, ...rows));
}

function dot(colour) {
  const made = element("span", { class: "dot" });
  made.style.background = colour;
  return made;
}

// Four significant digits, as the console has them.
function number(value) {
  if (typeof value !== "number" || !isFinite(value)) return "";
  if (Math.abs(value) >= 10000) return Math.round(value).toLocaleString("en");
  return String(Number(value.toPrecision(4)));
}
