// The chat page: the conversation on view, the list of all, and the replies that run.

import { getJson, onConnection } from './api.js';
import { bodyFor, stream } from './ask.js';
import { byId, h, say, toast } from './dom.js';
import { MessageView } from './messages.js';
import { Panel } from './panel.js';
import { Conversation, conversations, forget, imported, keepSettings, lastSettings } from './store.js';

const log = byId('log');
const input = byId('input');
const runs = new Map(); // conversation id -> {node, controller}
const views = new Map(); // node id -> MessageView, of what is on view
let current = Conversation.create(lastSettings());
let lost = ''; // what does not fit into the storage
let waiting = null; // the module, once the model is known
let hasAsked = false; // about the models
let wantsEnd = true; // the reader is at the end, and wants to stay there

const panel = new Panel(() => {
  keepSettings(current.settings);
  if (!current.isEmpty) save(current);
});

const actions = {
  select(node, action) {
    current.select(node);
    save(current);
    show();
    focusIn(node, action);
  },
  edit(node, text, media) {
    if (runs.has(current.id)) return toast('A reply is being written: stop it first.');
    const parent = current.nodes[node.parent] ?? null;
    const edited = current.add(parent, { role: node.role, content: text, media: media.length ? media : undefined, finish: node.role === 'assistant' ? 'edited' : undefined });
    if (node.role === 'user') reply(current, edited);
    else {
      save(current);
      show();
      focusIn(edited, 'Edit');
    }
  },
  regenerate(node) {
    if (runs.has(current.id)) return toast('A reply is being written: stop it first.');
    const parent = current.nodes[node.parent] ?? null;
    if (node.error && !node.content && !node.children.length) current.drop(node);
    reply(current, parent);
  },
  goOn(node) {
    if (runs.has(current.id)) return toast('A reply is being written: stop it first.');
    reply(current, null, node);
  },
  answerCalls(node, results) {
    let parent = node;
    node.tool_calls.forEach((call, index) => {
      parent = current.add(parent, { role: 'tool', tool_call_id: call.id, tool_name: call.function.name, content: results[index] });
    });
    reply(current, parent);
  },
  isLast: (node) => current.path().at(-1) === node,
};

function focusIn(node, action) {
  const element = views.get(node.id)?.element;
  const wanted = element?.querySelector(`[data-action="${action}"]:not(:disabled)`) ?? element?.querySelector('button:not(:disabled)');
  wanted?.focus();
}

function save(conversation) {
  const before = lost;
  lost = conversation.save();
  if (lost && lost !== before) toast(`The storage of this browser is full: ${lost} not kept. Delete old ones.`);
  showList();
}

/** Show the visible path anew. */
function show() {
  views.clear();
  const path = current.path();
  log.replaceChildren(...path.map((node) => {
    const view = new MessageView(current, node, actions);
    views.set(node.id, view);
    return view.element;
  }));
  byId('welcome').hidden = path.length > 0;
  byId('export').hidden = path.length === 0;
  panel.show(current.settings);
  showRunning();
  scrollToEnd(true);
}

function showRunning() {
  const isRunning = runs.has(current.id);
  const hadFocus = document.activeElement === byId('stop');
  byId('stop').hidden = !isRunning;
  if (hadFocus && !isRunning) input.focus({ preventScroll: true });
  byId('send').hidden = isRunning;
}

function showList() {
  const list = conversations();
  byId('conversations').replaceChildren(...list.map(({ id, title }) => h('li', {},
    h('a', { href: `#chat/${id}`, 'aria-current': id === current.id ? 'true' : null }, runs.has(id) ? '● ' : '', title || 'Untitled'),
    h('button', { type: 'button', class: 'small', 'aria-label': `Delete ${title || 'Untitled'}`, onclick: () => remove(id, title) }, '×'))));
  byId('no-conversations').hidden = list.length > 0;
}

function remove(id, title) {
  if (!confirm(`Delete “${title || 'Untitled'}” from this browser?`)) return;
  runs.get(id)?.controller.abort();
  Conversation.remove(id);
  if (id === current.id) location.hash = '#chat/new';
  showList();
  byId('new').focus();
}

function scrollToEnd(always = false) {
  const box = byId('scroll');
  if (always || wantsEnd) box.scrollTop = box.scrollHeight;
}

/** Ask for a reply after `parent`, or for the rest of the reply `begun`, and show it as it comes. */
async function reply(conversation, parent, begun = null) {
  const node = begun ?? conversation.add(parent, { role: 'assistant', content: '' });
  node.finish = 'running';
  delete node.error;
  const controller = new AbortController();
  runs.set(conversation.id, { node, controller });
  wantsEnd = true;
  save(conversation);
  const hadFocus = log.contains(document.activeElement);
  if (conversation === current) show();
  if (hadFocus) byId('stop').focus();
  say('The reply is being written');
  let pending = 0;
  let cost = 0;
  const refresh = () => {
    pending = 0;
    const began = performance.now();
    views.get(node.id)?.update();
    if (conversation === current) scrollToEnd();
    cost = performance.now() - began;
  };
  try {
    const before = conversation.before(node);
    const body = bodyFor(begun ? [...before, node] : before, conversation.settings);
    if (begun) body.continue_final_message = true;
    node.isJson = Boolean(body.response_format);
    // A long reply is drawn less often, so that drawing takes a fifth of the time at most.
    await stream(node, body, controller.signal, () => (pending ||= setTimeout(refresh, Math.max(30, 4 * cost))));
    if (node.finish === 'running') node.finish = 'stop';
  } catch (error) {
    const isStopped = error.name === 'AbortError';
    node.finish = isStopped ? 'stopped' : 'failed';
    if (!isStopped) node.error = error.message;
    if (!isStopped && !error.status && error.status !== 0) console.error(error);
  } finally {
    clearTimeout(pending);
    delete node.waits;
    runs.delete(conversation.id);
    save(conversation);
    refresh();
    if (conversation === current) showRunning();
    say(node.error ?? `${node.finish === 'stopped' ? 'Stopped.' : 'The reply is complete.'} ${node.content.slice(0, 1000)}`);
  }
}

function send() {
  const text = input.value;
  if (!(text.trim() || waiting?.hasSome()) || runs.has(current.id)) return;
  const last = current.path().at(-1) ?? null;
  if (last?.tool_calls?.length) return toast('Send the results of the calls first, or regenerate the reply.');
  const isNew = current.isEmpty;
  const node = current.add(last, { role: 'user', content: text, media: waiting?.take() });
  input.value = '';
  fit();
  reply(current, node);
  if (isNew) history.replaceState(null, '', `#chat/${current.id}`);
}

/** The box is as high as its text, up to a limit of the style sheet. */
function fit() {
  input.style.height = 'auto';
  input.style.height = `${input.scrollHeight + 2}px`;
}

/** Show a conversation by its id; '' is the one on view, 'new' an empty one. */
export function openChat(id) {
  if (id === 'new' || (id && !Conversation.open(id))) {
    if (conversations().some((one) => one.id === id)) toast('This conversation cannot be read.');
    const { ...settings } = current.settings;
    current = Conversation.create(settings);
    history.replaceState(null, '', '#chat');
    input.focus();
  } else if (id) current = Conversation.open(id);
  showList();
  show();
  if (!hasAsked) askAboutModels();
}

async function askAboutModels() {
  hasAsked = true;
  try {
    const [info, models] = await Promise.all([getJson('model_info'), getJson('v1/models')]);
    panel.showModels(info, models.data.map((model) => model.id));
    byId('no-template').hidden = info.has_chat_template || !info.is_generation;
    byId('no-chat').hidden = info.is_generation;
    for (const id of ['invitation', 'composer']) byId(id).hidden = !info.is_generation;
    waiting ??= await import('./waiting.js');
    waiting.show({ image: info.has_image_understanding, sound: info.has_audio_understanding });
  } catch (error) {
    byId('model-about').textContent = error.message;
  }
}

export function startChat() {
  byId('composer').addEventListener('submit', (event) => {
    event.preventDefault();
    send();
  });
  input.addEventListener('input', fit);
  input.addEventListener('keydown', (event) => {
    if (event.key !== 'Enter' || event.shiftKey || event.isComposing) return;
    event.preventDefault();
    send();
  });
  const stop = () => runs.get(current.id)?.controller.abort();
  byId('stop').addEventListener('click', () => {
    stop();
    input.focus();
  });
  document.addEventListener('keydown', (event) => event.key === 'Escape' && !document.querySelector('dialog[open]') && stop());
  byId('scroll').addEventListener('scroll', ({ target }) => {
    wantsEnd = target.scrollHeight - target.scrollTop - target.clientHeight < 60;
  });
  byId('new').addEventListener('click', () => (location.hash = '#chat/new'));
  byId('export-json').addEventListener('click', async () => (await import('./export.js')).exportJson(current));
  byId('export-markdown').addEventListener('click', async () => (await import('./export.js')).exportMarkdown(current));
  byId('import').addEventListener('change', async ({ target }) => {
    try {
      const made = imported(await target.files[0].text());
      save(made);
      location.hash = `#chat/${made.id}`;
    } catch (error) {
      toast(`The file cannot be read: ${error.message}`);
    }
    target.value = '';
  });
  addEventListener('pagehide', () => runs.forEach((run, id) => Conversation.open(id)?.save()));
  addEventListener('storage', ({ key }) => {
    showList();
    const id = key?.replace(/^.*\./, '');
    if (runs.has(id) || (id === current.id && log.querySelector('form'))) return;
    if (forget(key) === current.id && Conversation.open(current.id)) openChat(current.id);
  });
  onConnection((online) => online && hasAsked && askAboutModels());
}
