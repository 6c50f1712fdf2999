// Requests to the server: the key, errors, streams, and whether the server can be reached.

const KEY = 'headrace.key';
const BASE = new URL('..', location.href);
const RETRY_MS = 1000;

export class ApiError extends Error {
  constructor(message, status = 0, code = '') {
    super(message);
    this.status = status;
    this.code = code;
  }
}

export const key = {
  get: () => sessionStorage.getItem(KEY) ?? '',
  set: (value) => (value ? sessionStorage.setItem(KEY, value) : sessionStorage.removeItem(KEY)),
};

let askForKey = async () => null;
let asking = null;
const watchers = new Set();
let online = true;

/** ask(message): resolves to a key, or null if the user gives none. */
export function onKeyNeeded(ask) {
  askForKey = ask;
}

/** watch(online) is called when the server comes or goes. */
export function onConnection(watch) {
  watchers.add(watch);
}

function setOnline(now) {
  if (now === online) return;
  online = now;
  watchers.forEach((watch) => watch(now));
  if (!now) waitForServer();
}

async function waitForServer() {
  for (;;) {
    await new Promise((resolve) => setTimeout(resolve, RETRY_MS));
    try {
      if ((await fetch(new URL('ready', BASE), { cache: 'no-store' })).ok) return setOnline(true);
    } catch {
      // still away
    }
  }
}

/** The one prompt for a key, however many requests wait for it. */
export function newKey(message) {
  asking ??= askForKey(message).finally(() => (asking = null));
  return asking;
}

/** The address of a path relative to the server's root. */
export const urlOf = (path) => String(new URL(path, BASE));

/**
 * The reply to a request. body: sent as JSON; text: sent as it is, instead. quiet: no key is asked for after a
 * 401. raw: errors are replies, too, unless another key helps. Throws ApiError, and AbortError by way of signal.
 */
export async function request(path, { body, text = body === undefined ? undefined : JSON.stringify(body), signal, quiet = false, raw = false, method } = {}) {
  for (;;) {
    const used = key.get();
    const headers = used ? { Authorization: `Bearer ${used}` } : {};
    if (text !== undefined) headers['Content-Type'] = 'application/json';
    let reply;
    try {
      reply = await fetch(urlOf(path), {
        method: method ?? (text === undefined ? 'GET' : 'POST'),
        headers,
        body: text,
        signal,
        cache: 'no-store',
      });
    } catch (error) {
      if (error.name === 'AbortError') throw error;
      setOnline(false);
      throw new ApiError('The server cannot be reached.');
    }
    if (reply.ok || (raw && reply.status !== 401)) return reply;
    if (reply.status !== 401 || quiet) throw await errorOf(reply);
    // Another request may have brought a new key meanwhile.
    if (key.get() === used) {
      const given = await newKey(used ? 'The server does not accept this key.' : 'The server needs a key.');
      if (given === null && raw) return reply;
      if (given === null) throw await errorOf(reply);
      key.set(given);
    }
  }
}

export async function getJson(path, options) {
  return (await request(path, options)).json();
}

async function errorOf(reply) {
  let message = `${reply.status} ${reply.statusText}`.trim();
  let code = '';
  try {
    const { error } = await reply.json();
    message = error.message ?? message;
    code = error.code ?? '';
  } catch {
    // not JSON: a proxy's page
  }
  return new ApiError(message, reply.status, code);
}

/** The objects of an event stream, until [DONE]. Throws ApiError if it reports an error, or ends without. */
export async function* events(reply) {
  const reader = reply.body.pipeThrough(new TextDecoderStream()).getReader();
  let rest = '';
  try {
    for (;;) {
      let part;
      try {
        part = await reader.read();
      } catch (error) {
        if (error.name === 'AbortError') throw error;
        part = { done: true };
      }
      if (part.done) {
        setOnline(false);
        throw new ApiError('The connection was lost before the reply was complete.');
      }
      const frames = (rest + part.value).split('\n\n');
      rest = frames.pop();
      for (const frame of frames) {
        if (frame[0] === ':') continue; // a comment
        const data = frame.replace(/^data: ?/, '');
        if (data === '[DONE]') return;
        const event = JSON.parse(data);
        if (event.error) throw new ApiError(event.error.message, 0, event.error.code ?? '');
        yield event;
      }
    }
  } finally {
    reader.cancel().catch(() => {});
  }
}
