// Small plots, drawn as SVG by hand.

import { h, svg } from './dom.js';

const WIDTH = 240;
const HEIGHT = 60;
const NAMES = ['', 'second'];

/** A figure with its latest value and a plot of the last ones. show: number -> text. most: the top of the scale; null = of the data. */
export class Tile {
  constructor(title, { show, most = null, lines = [title] }) {
    Object.assign(this, { title, show, most, lines });
    this.value = h('span', { class: 'value' }, '–');
    this.scale = h('span', { class: 'scale' });
    this.marks = lines.map((_, index) => svg('path', { class: `line ${NAMES[index]}` }));
    this.area = svg('path', { class: 'area' });
    this.plot = svg('svg', { viewBox: `0 0 ${WIDTH} ${HEIGHT}`, preserveAspectRatio: 'none', 'aria-hidden': 'true' }, this.area, ...this.marks);
    const legend = lines.length > 1 ? h('span', { class: 'legend' }, lines.map((line, index) => h('span', { class: NAMES[index] }, line))) : null;
    this.element = h('figure', { class: 'tile' }, h('figcaption', {}, title, legend), this.value, h('div', { class: 'plot' }, this.plot, this.scale));
  }

  /** history: one list of values per line, oldest first, null = not known; each fills the width from the right. length: of a full list. */
  update(history, length) {
    this.value.textContent = history.map((values) => this.show(values.at(-1) ?? null)).join(' / ');
    const known = history.flat().filter((value) => value !== null);
    const top = this.most ?? niceTop(Math.max(0, ...known));
    this.scale.textContent = known.length ? this.show(top) : '';
    history.forEach((values, index) => this.marks[index].setAttribute('d', pathOf(values, length, top)));
    this.area.setAttribute('d', areaOf(history[0], length, top));
  }
}

function point(values, index, length, top) {
  const x = WIDTH - ((values.length - 1 - index) * WIDTH) / (length - 1);
  const y = HEIGHT - 1 - ((HEIGHT - 2) * Math.min(values[index], top)) / (top || 1);
  return `${x.toFixed(1)} ${y.toFixed(1)}`;
}

function pathOf(values, length, top) {
  let path = '';
  values.forEach((value, index) => {
    if (value === null) return;
    const begins = index === 0 || values[index - 1] === null;
    path += `${begins ? 'M' : 'L'}${point(values, index, length, top)}`;
    if (begins && (values[index + 1] ?? null) === null) path += 'h.1'; // a single value is a dot
  });
  return path;
}

function areaOf(values, length, top) {
  const filled = values.map((value) => value ?? 0);
  if (filled.length < 2) return '';
  const begin = WIDTH - ((filled.length - 1) * WIDTH) / (length - 1);
  return `M${begin.toFixed(1)} ${HEIGHT}L${filled.map((_, index) => point(filled, index, length, top)).join('L')}L${WIDTH} ${HEIGHT}Z`;
}

/** The next of 1, 2, 5, 10, 20 ... */
function niceTop(value) {
  if (value <= 0) return 1;
  const power = 10 ** Math.floor(Math.log10(value));
  return [1, 2, 5, 10].map((step) => step * power).find((step) => step >= value);
}

const PHASES = [['received', 'tokenized', 'preparing'], ['tokenized', 'admitted', 'waiting'], ['admitted', 'first_token', 'prompt'], ['first_token', 'finished', 'output']];

/** The phases of a request as a bar. events: of its timeline; end: seconds since its arrival. */
export function phaseBar(events, end) {
  const first = (name) => events.find((event) => event.event === name)?.at_s;
  const parts = [];
  let from = 0;
  let pending = 'preparing';
  for (const [, until, name] of PHASES) {
    pending = name;
    const at = first(until);
    if (at === undefined) continue; // the scheduler tells its part when the sample has ended
    parts.push([name, from, Math.max(from, at)]);
    from = Math.max(from, at);
  }
  if (from < end && !first('finished')) parts.push([pending === 'output' && first('first_token') === undefined ? 'waiting' : pending, from, end]);
  const whole = Math.max(end, from) || 1;
  const bar = svg('svg', { viewBox: '0 0 1000 24', preserveAspectRatio: 'none', class: 'phases', 'aria-hidden': 'true' });
  for (const [name, start, stop] of parts) {
    bar.append(svg('rect', { class: name, x: (1000 * start) / whole, width: Math.max(1, (1000 * (stop - start)) / whole), height: 24 }));
  }
  return { bar, parts };
}
