// The API page: the routes of openapi.json, and a form to try each of them.

import { ApiError, getJson } from './api.js';
import { byId, h } from './dom.js';
import { OperationView } from './operation.js';

const page = byId('api-page');
const views = new Map(); // id of an operation -> its view, with what was typed into it
let list = null; // the operations, once they are known
let wanted = '';
let shown = '';

/** Show the operation with this id; '' is the list alone. */
export async function open(id) {
  wanted = id;
  if (!list && !(await load())) return;
  if (wanted === id) show(id);
}

export function close() {}

async function load() {
  try {
    const description = await getJson('openapi.json');
    if (!list) {
      list = operationsOf(description);
      byId('routes').replaceChildren(...routesOf(description.tags.map((tag) => tag.name)));
    }
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    const why = error.status === 404 ? 'This server does not describe its API (--disable-openapi).' : error.message;
    page.classList.add('chosen');
    byId('operation').replaceChildren(h('p', { class: 'error', role: 'alert' }, why),
      h('div', {}, h('button', { type: 'button', onclick: () => open(wanted) }, 'Try again')));
  }
  return list !== null;
}

/** Browsers send no body with GET: of a route that takes one, the other methods are shown. */
function operationsOf({ paths, components }) {
  return Object.entries(paths).flatMap(([path, methods]) => Object.entries(methods)
    .filter(([method, operation]) => method !== 'get' || !operation.requestBody)
    .map(([method, operation]) => ({ ...operation, path, method: method.toUpperCase(), components })));
}

/** What the list of routes consists of. */
function routesOf(tags) {
  const filter = h('input', { type: 'search', placeholder: 'chat, cache, POST …' });
  const items = list.map((operation) => {
    const { method, path, summary, operationId } = operation;
    const item = h('li', {}, h('a', { href: `#api/${operationId}`, title: summary }, h('span', { class: 'method' }, method), h('code', {}, path)));
    item.dataset.words = `${method} ${path} ${summary}`.toLowerCase();
    item.dataset.tag = operation.tags[0];
    return item;
  });
  const sections = tags.map((tag) => h('section', {}, h('h3', {}, tag), h('ul', {}, items.filter((item) => item.dataset.tag === tag))));
  const none = h('p', { class: 'faint', role: 'status' });
  filter.addEventListener('input', () => {
    const words = filter.value.toLowerCase().split(/\s+/);
    for (const item of items) item.hidden = !words.every((word) => item.dataset.words.includes(word));
    for (const section of sections) section.hidden = !section.querySelector('li:not([hidden])');
    none.textContent = items.every((item) => item.hidden) ? 'No route has these words.' : '';
  });
  return [h('label', { class: 'faint' }, 'Filter', filter), none, ...sections];
}

function show(id) {
  const operation = list.find((one) => one.operationId === id);
  if (operation && !views.has(id)) views.set(id, new OperationView(operation));
  const view = views.get(id);
  const linkTo = (one) => (one ? document.querySelector(`#routes a[href="#api/${one}"]`) : null);
  linkTo(shown)?.removeAttribute('aria-current');
  page.classList.toggle('chosen', Boolean(view));
  byId('operation').replaceChildren(view ? view.element : h('p', { class: 'faint' }, `${list.length} routes. Choose one to see its fields and to try it.`));
  if (view) {
    linkTo(id).setAttribute('aria-current', 'true');
    view.title.focus();
  } else linkTo(shown)?.focus();
  shown = view ? id : '';
}
