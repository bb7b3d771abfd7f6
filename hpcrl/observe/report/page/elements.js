"use strict";
// What all parts of the page share: elements, numbers, colours, the tip under the pointer.

const DATA = JSON.parse(document.getElementById("data").textContent);
const PALETTE = ["#3b6fd8", "#d9692a", "#2e9e68", "#b04fc4", "#c43b52", "#7a7f1e", "#1f97a8", "#8a6a4a"];
const KIND_COLOURS = {
  generate: "#3b8fd8", wait: "#e0b13c", train: "#2e9e68", publish: "#9a5fd0", colocation: "#5f7f8f", pause: "#d94f4f", checkpoint: "#8a6a4a",
  evaluate: "#1fa8a0", score: "#c46fb0", environment: "#d98a4a", idle: "#c9ced6", load: "#7f8da3", other: "#a9b4a2", absent: "#00000000",
};
const USE_COLOURS = {
  training: "#2e9e68", generation: "#3b8fd8", scoring: "#c46fb0", evaluation: "#1fa8a0", saving: "#8a6a4a", starting: "#7f8da3", waiting: "#e0b13c",
  lost: "#c0262d", idle: "#c9ced6", "not recorded yet": "#a9b4a2",
};
const OUTCOME_COLOURS = { done: "#1a7f45", interrupted: "#c98a16", cancelled: "#7f8da3", running: "#3b6fd8" };

/** Make an element: attributes, `on*` handlers, and children, of which texts stay texts. */
function el(tag, attributes = {}, ...children) {
  const made = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name.startsWith("on")) made.addEventListener(name.slice(2), value);
    else if (name === "style") made.style.cssText = value;
    else if (value === true) made.setAttribute(name, "");
    else if (value !== false && value != null) made.setAttribute(name, value);
  }
  made.append(...children.flat().filter((child) => child != null));
  return made;
}

function number(value) {
  if (value == null) return "–";
  const size = Math.abs(value);
  if (size !== 0 && (size < 1e-3 || size >= 1e7)) return value.toExponential(2).replace(/\.?0+e/, "e");
  return String(Number(value.toPrecision(size >= 1e4 ? 6 : 4)));
}

function duration(seconds) {
  const size = Math.abs(seconds);
  if (size < 1) return `${Math.round(1000 * seconds)} ms`;
  if (size < 60) return `${Number(seconds.toFixed(size < 10 ? 2 : 1))} s`;
  const whole = Math.round(size), h = Math.floor(whole / 3600), m = Math.floor(whole / 60) % 60, s = String(whole % 60).padStart(2, "0");
  return (seconds < 0 ? "-" : "") + (h ? `${h}:${String(m).padStart(2, "0")}:${s}` : `${m}:${s}`);
}

/** Return a time in seconds since 1970 as date and time of this place. */
function when(seconds) {
  const time = new Date(1000 * seconds), two = (value) => String(value).padStart(2, "0");
  return `${time.getFullYear()}-${two(time.getMonth() + 1)}-${two(time.getDate())} ${two(time.getHours())}:${two(time.getMinutes())}:${two(time.getSeconds())}`;
}

const colour = (at) => PALETTE[at % PALETTE.length];
const style = (name) => getComputedStyle(document.documentElement).getPropertyValue(name).trim();
const outcomeColour = (kind) => OUTCOME_COLOURS[kind] || "#c0262d";

function dot(at) {
  return DATA.runs.length > 1 ? el("i", { class: "dot", style: `background:${colour(at)}` }) : null;
}

function showTip(event, text) {
  const tip = document.getElementById("tip");
  tip.hidden = !text;
  if (!text) return;
  tip.textContent = text;
  const box = tip.getBoundingClientRect();
  tip.style.left = `${Math.max(4, Math.min(event.clientX + 12, innerWidth - box.width - 8))}px`;
  tip.style.top = `${event.clientY + 18 + box.height > innerHeight ? event.clientY - box.height - 10 : event.clientY + 18}px`;
}

/** Call `draw` with a canvas's width in CSS pixels now, and whenever that changes. */
function onWidth(element, draw) {
  let last = 0;
  new ResizeObserver(() => {
    const width = Math.floor(element.clientWidth);
    if (width && width !== last) draw((last = width));
  }).observe(element);
}

/** Return the context of a canvas that is sharp on the screen, cleared. */
function prepared(canvas, width, height) {
  const ratio = devicePixelRatio || 1;
  canvas.width = width * ratio;
  canvas.height = height * ratio;
  canvas.style.width = `${width}px`;
  canvas.style.height = `${height}px`;
  const context = canvas.getContext("2d");
  context.scale(ratio, ratio);
  return context;
}

/** Return round numbers between two, about so many. */
function ticks(low, high, count) {
  const raw = (high - low) / count || 1, power = 10 ** Math.floor(Math.log10(raw));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= raw);
  const found = [];
  for (let at = Math.ceil(low / step) * step; at <= high + 1e-9 * step; at += step) found.push(Number(at.toPrecision(12)));
  return found;
}

/** Make a picker of one of the runs; null where there is only one. */
function runPicker(change) {
  if (DATA.runs.length < 2) return null;
  const options = DATA.runs.map((run, at) => el("option", { value: at }, run.name));
  return el("div", { class: "tools" }, el("label", {}, "Run", el("select", { onchange: (event) => change(Number(event.target.value)) }, options)));
}
