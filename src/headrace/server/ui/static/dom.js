// Small helpers for the document. No state but the live region's.

/** An element. props: `class`, `on<event>` handlers, `data-`/`aria-` attributes and properties; children: nodes, strings, null. */
export function h(tag, props = {}, ...children) {
  const element = document.createElement(tag);
  setProps(element, props);
  element.append(...children.flat().filter((child) => child !== null && child !== undefined && child !== false));
  return element;
}

const SVG = 'http://www.w3.org/2000/svg';

/** The same for SVG. */
export function svg(tag, props = {}, ...children) {
  const element = document.createElementNS(SVG, tag);
  for (const [name, value] of Object.entries(props)) element.setAttribute(name, value);
  element.append(...children);
  return element;
}

function setProps(element, props) {
  for (const [name, value] of Object.entries(props)) {
    if (value === null || value === undefined) continue;
    if (name.startsWith('on')) element.addEventListener(name.slice(2), value);
    else if (name === 'class') element.className = value;
    else if (name in element && !name.includes('-')) element[name] = value;
    else element.setAttribute(name, value);
  }
}

export const byId = (id) => document.getElementById(id);

const sheets = new Map();

/** Load a style sheet, once. Resolves when it applies. */
export function style(name) {
  if (!sheets.has(name)) {
    sheets.set(name, new Promise((resolve, reject) => document.head.append(h('link', { rel: 'stylesheet', href: name, onload: resolve, onerror: reject }))));
  }
  return sheets.get(name);
}

/** Tell screen readers. */
export function say(text) {
  byId('status').textContent = text;
}

/** A note at the bottom of the window for a few seconds; screen readers get it. */
export function toast(text) {
  const note = h('div', { class: 'toast' }, text);
  byId('toasts').append(note);
  setTimeout(() => note.remove(), 6000);
}

export async function copy(text) {
  let isDone = true;
  try {
    await navigator.clipboard.writeText(text); // only in secure contexts: https and localhost
  } catch {
    const box = h('textarea', { value: text, class: 'offscreen', 'aria-hidden': 'true' });
    document.body.append(box);
    box.select();
    isDone = document.execCommand('copy');
    box.remove();
  }
  toast(isDone ? 'Copied' : 'This browser does not let the page copy.');
}

export function download(name, type, text) {
  const link = h('a', { href: URL.createObjectURL(new Blob([text], { type })), download: name });
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 10000);
}

export function randomId() {
  // crypto.randomUUID exists in secure contexts only.
  return Array.from(crypto.getRandomValues(new Uint8Array(8)), (byte) => byte.toString(16).padStart(2, '0')).join('');
}

/** 1234567 -> "1.23 M"; null -> "–". */
export function short(number, digits = 3) {
  if (number === null || number === undefined || Number.isNaN(number)) return '–';
  for (const [unit, size] of [['G', 1e9], ['M', 1e6], ['k', 1e4]]) {
    if (Math.abs(number) >= size) return `${Number((number / (unit === 'k' ? 1e3 : size)).toPrecision(digits))} ${unit}`;
  }
  return String(Number(number.toPrecision(Math.max(digits, String(Math.trunc(number)).length))));
}

/** Seconds for people: "12 ms", "1.25 s". */
export function seconds(value) {
  if (value === null || value === undefined || !Number.isFinite(value)) return '–';
  if (value < 0.9995) return `${Number((value * 1000).toPrecision(3))} ms`;
  return `${Number(value.toPrecision(3))} s`;
}
