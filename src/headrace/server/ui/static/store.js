// Conversations as trees of messages, kept in localStorage. Nothing leaves the browser.

import { randomId } from './dom.js';

const CHAT = 'headrace.chat.';
const META = 'headrace.meta.';
const SETTINGS = 'headrace.settings';
const opened = new Map();
const removed = new WeakSet();

/**
 * A tree: an edited or regenerated message is a sibling of the one before. `chosen` names the child on the visible path, by parent ('' = root).
 *
 * A node has id, parent, children, role (user, assistant, tool), content; a user's may have media (of media.js), an assistant's reasoning, tool_calls, tokens
 * ([text, logprob, [[text, logprob], ...]]), stats, finish, error.
 */
export class Conversation {
  constructor(data) {
    Object.assign(this, data);
  }

  static create(settings) {
    const now = Date.now();
    const data = { version: 1, id: randomId(), title: '', created: now, updated: now, settings, nodes: {}, roots: [], chosen: {} };
    const made = new Conversation(data);
    opened.set(made.id, made);
    return made;
  }

  /** null if there is none, or it cannot be read. */
  static open(id) {
    if (!opened.has(id)) {
      try {
        opened.set(id, new Conversation({ ...checked(JSON.parse(localStorage.getItem(CHAT + id))), id }));
      } catch {
        return null;
      }
    }
    return opened.get(id);
  }

  get isEmpty() {
    return this.roots.length === 0;
  }

  siblings(node) {
    return node.parent ? this.nodes[node.parent].children : this.roots;
  }

  /** The visible messages. */
  path() {
    const found = [];
    let id = this.chosen[''];
    while (id) {
      found.push(this.nodes[id]);
      id = this.chosen[id];
    }
    return found;
  }

  /** The messages before `node`. */
  before(node) {
    const found = [];
    for (let id = node.parent; id; id = this.nodes[id].parent) found.unshift(this.nodes[id]);
    return found;
  }

  /** A new message after `parent` (null: the first one), on the visible path. */
  add(parent, fields) {
    const node = { id: randomId(), parent: parent?.id ?? '', children: [], created: Date.now(), ...fields };
    this.nodes[node.id] = node;
    this.siblings(node).push(node.id);
    this.chosen[node.parent] = node.id;
    if (!this.title && node.role === 'user') this.title = node.content.trim().slice(0, 60) || 'Untitled';
    return node;
  }

  select(node) {
    this.chosen[node.parent] = node.id;
  }

  /** Forget a message without continuation, for another version of it. */
  drop(node) {
    const siblings = this.siblings(node);
    siblings.splice(siblings.indexOf(node.id), 1);
    delete this.nodes[node.id];
    delete this.chosen[node.parent];
  }

  /** Returns what is not kept because the browser's storage is full, '' if all is. */
  save() {
    if (removed.has(this)) return '';
    this.updated = Date.now();
    if (this.write()) return '';
    // Probabilities take the most room, and are the least loss.
    for (const node of Object.values(this.nodes)) delete node.tokens;
    if (this.write()) return '';
    return this.write((name, value) => (name === 'media' ? value.map((item) => ({ ...item, url: null })) : value)) ? 'images and sounds of this conversation are' : 'this conversation is';
  }

  /** Returns whether there was room. */
  write(replacer) {
    try {
      localStorage.setItem(CHAT + this.id, JSON.stringify(this, replacer));
      localStorage.setItem(META + this.id, JSON.stringify({ title: this.title, updated: this.updated }));
      return true;
    } catch {
      return false;
    }
  }

  /** Also one that cannot be read. */
  static remove(id) {
    if (opened.has(id)) removed.add(opened.get(id)); // a reply that still runs must not bring it back
    localStorage.removeItem(CHAT + id);
    localStorage.removeItem(META + id);
    opened.delete(id);
  }
}

/** Read a conversation again when it is next opened: another tab has changed it. Returns its id. */
export function forget(storageKey) {
  const id = storageKey?.startsWith(CHAT) ? storageKey.slice(CHAT.length) : '';
  opened.delete(id);
  return id;
}

/** All conversations, the latest first. One key each, so that two tabs do not overwrite each other's list. */
export function conversations() {
  const found = [];
  for (let i = 0; i < localStorage.length; i++) {
    const name = localStorage.key(i);
    if (!name.startsWith(META)) continue;
    try {
      found.push({ id: name.slice(META.length), ...JSON.parse(localStorage.getItem(name)) });
    } catch {
      // not ours
    }
  }
  return found.sort((a, b) => b.updated - a.updated);
}

export function lastSettings() {
  try {
    return JSON.parse(localStorage.getItem(SETTINGS)) ?? {};
  } catch {
    return {};
  }
}

export function keepSettings(settings) {
  try {
    localStorage.setItem(SETTINGS, JSON.stringify(settings));
  } catch {
    // full: the next conversation begins with older settings
  }
}

/** An exported conversation under a new id. Throws Error if it is none. */
export function imported(text) {
  const data = checked(JSON.parse(text));
  const made = new Conversation({ ...data, id: randomId(), updated: Date.now() });
  opened.set(made.id, made);
  return made;
}

const ROLES = ['user', 'assistant', 'tool'];
const URLS = { image: /^data:image\//, sound: /^data:audio\/\w+;base64,/ };

const isText = (value) => typeof value === 'string';
const isNumber = (value) => value === null || typeof value === 'number'; // JSON writes an infinite one as null
const isObject = (value) => typeof value === 'object' && value !== null && !Array.isArray(value);
const isEvery = (isOne) => (value) => Array.isArray(value) && value.every(isOne);

/** What the fields of a node hold that it need not have. */
const FIELDS = {
  ...Object.fromEntries(['reasoning', 'finish', 'error', 'rid', 'tool_name', 'tool_call_id'].map((name) => [name, isText])),
  stats: (value) => isObject(value) && Object.values(value).every(isNumber),
  media: isEvery(({ kind, name, url }) => isText(name) && (url === null || URLS[kind].test(url))),
  tool_calls: isEvery((call) => isText(call.function.name) && isText(call.function.arguments)),
  tokens: isEvery(([text, logprob, others]) => isText(text) && isNumber(logprob) && isEvery((pair) => isText(pair[0]))(others)),
};

/** The conversation, if its tree and its messages are sound; else an Error. */
function checked(data) {
  try {
    if (!isSound(data)) throw new Error();
  } catch {
    throw new Error('this is not a conversation of this page');
  }
  for (const node of Object.values(data.nodes)) {
    if (node.finish === 'running') node.finish = 'interrupted'; // the page was closed meanwhile
  }
  return data;
}

/** Fields that are null count as not there. May also throw. */
function isSound({ version, title, nodes, roots, chosen, settings }) {
  return version === 1 && isText(title) && isObject(settings) && isObject(chosen) && isObject(nodes) && isEvery((id) => nodes[id].parent === '')(roots) &&
    Object.entries(nodes).every(([id, node]) => {
      tidy(node);
      return node.id === id && ROLES.includes(node.role) && isText(node.content) &&
        Object.entries(FIELDS).every(([name, holds]) => !(name in node) || holds(node[name])) &&
        (node.parent === '' ? roots : nodes[node.parent].children).includes(id) &&
        isEvery((child) => nodes[child].parent === id)(node.children);
    }) &&
    Object.entries(chosen).every(([parent, id]) => nodes[id].parent === parent) && !hasCircle(nodes);
}

function tidy(node) {
  // Kept before there were sounds.
  if (node.images) node.media = node.images.map((url) => ({ kind: 'image', name: 'Image', url }));
  delete node.images;
  for (const name of Object.keys(FIELDS)) if (node[name] === null) delete node[name];
  node.tool_calls = node.tool_calls?.filter(Boolean); // a stream may leave gaps
  if (!node.tool_calls) delete node.tool_calls;
}

function hasCircle(nodes) {
  let count = 0;
  const pending = Object.values(nodes).filter((node) => !node.parent);
  while (pending.length) {
    const node = pending.pop();
    count += 1;
    pending.push(...node.children.map((id) => nodes[id]));
  }
  return count !== Object.keys(nodes).length;
}
