// The dashboard: what the server does now, once a second while it is on view.

import { ApiError, getJson, key, newKey, request } from './api.js';
import { byId, h, say, seconds, short, svg } from './dom.js';
import { growth, mean, parseMetrics, quantiles, total } from './metrics.js';
import { phaseBar, Tile } from './plots.js';

const PERIOD_MS = 1000;
const KEPT = 121; // readings in a plot
const WINDOW = 15; // readings for latencies and the hit rate
const SHARES = [0.5, 0.95];

const percent = (value) => (value === null ? '–' : `${Number((100 * value).toPrecision(3))} %`);
const TILES = {
  output: new Tile('Output tokens/s', { show: short }),
  prompt: new Tile('Prompt tokens/s', { show: short }),
  running: new Tile('Running', { show: short }),
  waiting: new Tile('Waiting', { show: short }),
  kv: new Tile('KV cache in use', { show: percent, most: 1 }),
  hits: new Tile('Prefix cache hits', { show: percent, most: 1 }),
  ttft: new Tile('First token after', { show: seconds, lines: ['50 %', '95 %'] }),
  itl: new Tile('Between tokens', { show: seconds, lines: ['50 %', '95 %'] }),
};
const history = Object.fromEntries(Object.keys(TILES).map((name) => [name, TILES[name].lines.map(() => [])]));
const readings = [];
const refused = new Map(); // path -> the key that was refused for it
const rows = new Map(); // rid -> row of the table
let isOpen = false;
let isPaused = false;
let timer = 0;
let shown = ''; // rid of the request whose timeline is on view

byId('tiles').append(...Object.values(TILES).map((tile) => tile.element));
byId('pause').addEventListener('click', () => {
  isPaused = !isPaused;
  byId('pause').setAttribute('aria-pressed', String(isPaused));
  if (!isPaused) look();
});
byId('more-key').addEventListener('click', async () => {
  const given = await newKey('Requests and replicas need an API key, the scheduler’s counters the admin key.');
  if (given === null) return;
  key.set(given);
  look();
});
byId('tree-look').addEventListener('click', async () => {
  const trees = await read('cache_tree?max_depth=12&max_nodes=300');
  if (trees) byId('tree').replaceChildren(...trees.data.map(treeView));
  say('The tree of cached prefixes is shown');
});
document.addEventListener('visibilitychange', () => isOpen && !document.hidden && look());

/** Begin to look; rid: of the request to show. */
export function open(rid) {
  isOpen = true;
  shown = rid;
  byId('request').hidden = !rid;
  byId('request-body').replaceChildren();
  const shows = isPaused && rid ? showRequest(rid) : look();
  shows.then(() => rid && byId('request-title').focus());
}

export function close() {
  isOpen = false;
}

async function look() {
  clearTimeout(timer);
  if (!isOpen || isPaused || document.hidden) return;
  const [metrics, loads, state, requests] = await Promise.all([
    readMetrics(), read('v1/loads'), read('internal_state'), read('v1/requests?limit=100'), shown && showRequest(shown),
  ]);
  if (metrics || loads) note(metrics, loads?.loads ?? null);
  if (loads) showReplicas(loads.loads);
  if (state) showState(state);
  if (requests) showRequests(requests.data);
  byId('replicas-box').hidden = !loads;
  byId('requests-box').hidden = !requests;
  byId('state-box').hidden = !state;
  byId('tree-box').hidden = !state;
  byId('needs-key').hidden = refused.size === 0;
  clearTimeout(timer);
  if (isOpen) timer = setTimeout(look, PERIOD_MS);
}

/** The JSON of a route; null if the server cannot be reached or does not accept this key for it. */
async function read(path) {
  if (refused.has(path) && refused.get(path) === key.get()) return null;
  try {
    const found = await getJson(path, { quiet: true });
    refused.delete(path);
    return found;
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    if (error.status === 401) refused.set(path, key.get());
    return null;
  }
}

let hasMetrics = true;

async function readMetrics() {
  if (!hasMetrics) return null;
  try {
    return parseMetrics(await (await request('metrics', { quiet: true })).text());
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    if (error.status === 404) hasMetrics = false; // --disable-metrics
    return null;
  }
}

/** Add one reading to the plots. */
function note(metrics, loads) {
  const now = metrics ? fromMetrics(metrics) : fromLoads(loads);
  for (const [name, tile] of Object.entries(TILES)) {
    const values = Array.isArray(now[name]) ? now[name] : [now[name] ?? null];
    history[name].forEach((line, index) => {
      line.push(values[index] ?? null);
      if (line.length > KEPT) line.shift();
    });
    tile.update(history[name], KEPT);
  }
}

function fromMetrics(metrics) {
  const now = { time: performance.now(), metrics };
  const last = readings.at(-1);
  readings.push(now);
  if (readings.length > WINDOW) readings.shift();
  const old = readings[0].metrics;
  const rate = (name) => (last ? growth(last.metrics, metrics, name) / ((now.time - last.time) / 1000) : null);
  const queried = growth(old, metrics, 'prefix_query_tokens_total');
  return {
    output: rate('generation_tokens_total'),
    prompt: rate('prompt_tokens_total'),
    running: total(metrics, 'num_running_reqs'),
    waiting: total(metrics, 'num_queue_reqs') + total(metrics, 'num_grammar_queue_reqs'),
    kv: mean(metrics, 'token_usage'),
    hits: queried ? growth(old, metrics, 'cached_tokens_total') / queried : null,
    ttft: quantiles(old, metrics, 'time_to_first_token_seconds', SHARES),
    itl: quantiles(old, metrics, 'inter_token_latency_seconds', SHARES),
  };
}

function fromLoads(loads) {
  const sum = (name) => loads.reduce((all, load) => all + load[name], 0);
  return {
    output: sum('gen_throughput'),
    running: sum('num_running_reqs'),
    waiting: sum('num_waiting_reqs') + sum('num_grammar_queue_reqs'),
    kv: sum('num_used_tokens') / (sum('max_total_tokens') || 1),
    hits: sum('cache_hit_rate') / (loads.length || 1),
  };
}

function showReplicas(loads) {
  byId('replicas').replaceChildren(...loads.map((load) => h('tr', {}, [
    load.dp_rank, load.num_running_reqs, load.num_waiting_reqs + load.num_grammar_queue_reqs,
    `${short(load.num_used_tokens)} of ${short(load.max_total_tokens)}`, percent(load.cache_hit_rate), short(load.gen_throughput),
  ].map((value) => h('td', {}, String(value))))));
}

function showState(state) {
  const { pool, frontend } = state;
  const facts = [
    ['Steps', short(state.num_steps)],
    ['In the model', seconds(state.forward_s)],
    ['In the scheduler', seconds(state.host_s)],
    ['KV tokens free', short(pool.free_tokens)],
    ['KV tokens cached', short(pool.evictable_tokens)],
    ['KV tokens in use', short(pool.leased_tokens)],
    ['Finished', short(state.num_finished)],
    ['Aborted', short(state.num_aborted)],
    ['Retractions', short(state.num_retracted)],
    ['Grammars compiled', short(state.grammars.num_compiled)],
    ['Sessions', short(frontend.num_sessions ?? 0)],
    ['Restarts', short(frontend.num_restarts ?? 0)],
  ];
  const { num_steps: steps, num_drafted: guessed, num_right: right } = state.speculation;
  if (steps) facts.push(['Draft tokens', short(guessed)], ['Of them accepted', percent(right / guessed)]);
  if (state.paused) facts.push(['Paused', state.paused]);
  byId('state').replaceChildren(...facts.map(([name, value]) => h('div', {}, h('dt', {}, name), h('dd', {}, value))));
}

/** Rows stay the same elements, so that focus and selections survive. */
function showRequests(list) {
  const body = byId('requests');
  const seen = new Set();
  let before = body.firstChild;
  for (const item of list) {
    if (seen.has(item.rid)) continue; // two keys may use the same rid
    seen.add(item.rid);
    let row = rows.get(item.rid);
    if (!row) {
      row = h('tr', {}, h('td', {}, h('a', { href: `#dashboard/${encodeURIComponent(item.rid)}` }, item.rid)), Array.from({ length: 7 }, () => h('td')));
      rows.set(item.rid, row);
    }
    const tokens = `${short(item.prompt_tokens)}${item.cached_tokens ? ` (${short(item.cached_tokens)})` : ''}`;
    const values = [new Date(item.created * 1000).toLocaleTimeString(), item.finish_reason ?? item.state, tokens, short(item.completion_tokens), seconds(item.queue_time_s), seconds(item.ttft_s), seconds(item.e2e_s)];
    row.className = item.state;
    values.forEach((value, index) => {
      const cell = row.children[index + 1];
      if (cell.textContent !== value) cell.textContent = value;
    });
    if (row !== before) body.insertBefore(row, before);
    else before = before.nextSibling;
  }
  for (const [rid, row] of rows) {
    if (seen.has(rid)) continue;
    row.remove();
    rows.delete(rid);
  }
  byId('no-requests').hidden = list.length > 0;
}

/** A replica's tree as nested lists, closed below the first branches. Each bar is as long as its prefix: dark what it adds. */
function treeView(tree) {
  const below = new Map();
  const nodes = tree.nodes.map((node) => ({ ...node, start: node.parent < 0 ? 0 : null }));
  nodes.forEach((node, index) => {
    if (node.parent >= 0) node.start = nodes[node.parent].start + nodes[node.parent].num_tokens;
    below.set(node.parent, [...(below.get(node.parent) ?? []), index]);
  });
  const longest = Math.max(1, ...nodes.map((node) => node.start + node.num_tokens));
  const list = (parent, depth) => h('ul', { class: 'tree' }, (below.get(parent) ?? []).map((index) => item(index, depth)));
  function item(index, depth) {
    const node = nodes[index];
    const bar = svg('svg', { viewBox: '0 0 1000 10', preserveAspectRatio: 'none', 'aria-hidden': 'true' },
      svg('rect', { class: 'before', width: (1000 * node.start) / longest, height: 10 }),
      svg('rect', { class: node.num_leases ? 'pinned' : 'own', x: (1000 * node.start) / longest, width: Math.max(3, (1000 * node.num_tokens) / longest), height: 10 }));
    const shown = below.get(index)?.length ?? 0;
    const notes = [`${short(node.num_tokens)} tokens`];
    if (node.num_leases) notes.push(`in use by ${node.num_leases}`);
    if (node.num_children) notes.push(`${node.num_children} ${node.num_children > 1 ? 'branches' : 'branch'}${shown < node.num_children ? `, ${shown} shown` : ''}`);
    const label = h('span', {}, notes.join(' · '));
    if (!shown) return h('li', {}, h('div', { class: 'node' }, bar, label));
    return h('li', {}, h('details', { open: depth < 1 }, h('summary', { class: 'node' }, bar, label), list(index, depth + 1)));
  }
  const about = `Replica ${tree.dp_rank}: ${short(tree.num_nodes)} nodes with ${short(tree.num_tokens)} tokens` + (nodes.length < tree.num_nodes ? `; ${nodes.length} shown` : '');
  return h('section', { 'aria-label': `Replica ${tree.dp_rank}` }, h('p', { class: 'faint' }, about), list(-1, 0));
}

async function showRequest(rid) {
  let samples;
  try {
    samples = (await getJson(`v1/requests/${encodeURIComponent(rid)}`, { quiet: true })).data;
  } catch (error) {
    if (!(error instanceof ApiError)) throw error;
    if (rid === shown && !byId('request-body').childNodes.length) byId('request-body').replaceChildren(h('p', { class: 'error' }, error.message));
    return;
  }
  if (rid !== shown) return;
  byId('request-title').textContent = `Request ${rid}`;
  const text = JSON.stringify(samples);
  const isEnded = !samples.some(isLive);
  if (isEnded && byId('request-body').dataset.shown === text) return;
  byId('request-body').dataset.shown = text;
  byId('request-body').replaceChildren(...samples.map(sampleView));
}

const isLive = (sample) => sample.state === 'waiting' || sample.state === 'running';

function sampleView(sample) {
  const last = sample.events.at(-1).at_s;
  const end = isLive(sample) ? Math.max(last, Date.now() / 1000 - sample.created) : last;
  const { bar, parts } = phaseBar(sample.events, end);
  const legend = h('ul', { class: 'legend' }, parts.map(([name, from, until]) => h('li', { class: name }, `${name} ${seconds(until - from)}`)));
  const about = `${sample.rid}: ${sample.finish_reason ?? sample.state}, ${short(sample.prompt_tokens)} tokens in, ${short(sample.completion_tokens)} out` +
    (sample.finish_message ? `: ${sample.finish_message}` : '');
  const events = sample.events.map(({ event, at_s, ...counts }) => h('tr', {}, h('td', {}, seconds(at_s)), h('td', {}, event.replaceAll('_', ' ')),
    h('td', {}, Object.entries(counts).map(([name, value]) => `${short(value)} ${name.replaceAll('_', ' ').replace('num ', '')}`).join(', '))));
  return h('section', { 'aria-label': sample.rid }, h('p', {}, about), bar, legend,
    h('table', {}, h('thead', {}, h('tr', {}, ['After', 'Event', 'Of'].map((name) => h('th', { scope: 'col' }, name)))), h('tbody', {}, events)));
}

say('Dashboard');
