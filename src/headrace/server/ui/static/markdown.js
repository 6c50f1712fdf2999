// Markdown of a model as nodes. HTML in it is shown as text; images become links, so that no other host is ever asked.

import { Marked } from './vendor/marked.esm.js';
import './vendor/purify.min.js';
import { copy, h } from './dom.js';

const ENTITIES = { '&': '&amp;', '<': '&lt;', '>': '&gt;', '"': '&quot;' };
const escape = (text) => text.replace(/[&<>"]/g, (char) => ENTITIES[char]);

// Formulas as LaTeX writes them are shown as they are: their backslashes, stars and lines mean nothing to Markdown. A single $ may be money.
const FORMULA = /^(?:\\\(.+?\\\)|\\\[.+?\\\]|\$\$.+?\$\$|\$(?=[^$\n]*[\\^_])\S(?:[^$\n]*[^\s$])?\$(?!\d)|\\[()[\]])/s;
const FORMULA_LINES = /^ {0,3}(?:\\\[.+?\\\]|\$\$.+?\$\$) *(?:\n+|$)/s;

const asWritten = (name, level, pattern, start) => ({
  name,
  level,
  start: (text) => start.exec(text)?.index,
  tokenizer: (text) => {
    const found = pattern.exec(text);
    return found ? { type: name, raw: found[0] } : undefined;
  },
  renderer: ({ raw }) => (level === 'block' ? `<p>${lines(raw.trim())}</p>` : lines(raw)),
});
const lines = (text) => escape(text).replace(/\n/g, '<br>');

const marked = new Marked({
  gfm: true,
  breaks: true,
  extensions: [asWritten('formulaLines', 'block', FORMULA_LINES, /(?<=\n) {0,3}(?:\\\[|\$\$)/), asWritten('formula', 'inline', FORMULA, /\\[()[\]]|\$/)],
  renderer: {
    html: ({ text }) => escape(text),
    image: ({ href, text }) => `<a href="${escape(href)}">${escape(text || href)}</a>`,
    checkbox: ({ checked }) => (checked ? '☑ ' : '☐ '),
  },
});

const CLEAN = {
  ALLOWED_TAGS: ('p br hr strong em del code pre blockquote ul ol li h1 h2 h3 h4 h5 h6 ' +
    'table thead tbody tr th td a').split(' '),
  ALLOWED_ATTR: ['href', 'title', 'start', 'align'],
  ALLOWED_URI_REGEXP: /^(?:https?|mailto):/i,
  ALLOW_DATA_ATTR: false,
  ALLOW_ARIA_ATTR: false,
  RETURN_DOM_FRAGMENT: true,
};

/** A fragment. */
export function markdown(text) {
  const fragment = globalThis.DOMPurify.sanitize(marked.parse(text), CLEAN);
  for (const link of fragment.querySelectorAll('a')) {
    link.target = '_blank';
    link.rel = 'noopener noreferrer';
  }
  // Headings of a reply stand below the page's own.
  for (const heading of fragment.querySelectorAll('h1, h2, h3, h4, h5, h6')) {
    const level = Math.min(6, Number(heading.tagName[1]) + 2);
    heading.replaceWith(h(`h${level}`, {}, ...heading.childNodes));
  }
  for (const wide of fragment.querySelectorAll('pre, table')) scrollable(wide);
  return fragment;
}

/** A block of code, or a table, in a box that scrolls. */
function scrollable(block) {
  const isCode = block.tagName === 'PRE';
  const box = h('div', { class: 'wide', tabIndex: 0, role: 'group', 'aria-label': isCode ? 'Code' : 'Table' });
  block.replaceWith(box);
  box.append(block);
  if (isCode) {
    const text = block.textContent;
    const button = h('button', { type: 'button', class: 'small copy', onclick: () => copy(text) }, 'Copy');
    box.before(h('div', { class: 'code-head' }, button));
  }
}
