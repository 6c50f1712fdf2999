// One route of the API: its parameters, an editor for its body, and the reply as it comes.

import { ApiError, key, request, urlOf } from './api.js';
import { parsed } from './ask.js';
import { copy, h, say, seconds, short } from './dom.js';
import { aboutOf, fieldsOf } from './schema.js';

const JSON_TYPE = 'application/json';
const ACCESS = { bearer: 'Needs a key, if the server has one.', admin: 'Needs the admin key, if the server has one.' };

/** The form of an operation of openapi.json, which also has its path, method and the components of the document. */
export class OperationView {
  constructor(operation) {
    this.operation = operation;
    this.controller = null; // of the request under way
    const { path, method, summary, security, parameters } = operation;
    const [scheme] = Object.keys(security[0] ?? {});
    this.inputs = new Map(parameters.map((parameter) => [parameter, inputOf(parameter)]));
    this.title = h('h2', { tabIndex: -1 }, h('span', { class: 'method' }, method), ' ', h('code', {}, path));
    this.sendButton = h('button', { type: 'submit', class: 'primary' }, 'Send');
    this.stopButton = h('button', { type: 'button', hidden: true, onclick: () => this.controller.abort() }, 'Stop');
    this.reply = h('section', { class: 'reply', 'aria-label': 'Reply' });
    const form = h('form', { onsubmit: (event) => {
      event.preventDefault();
      this.send();
    } },
      h('div', { class: 'parameters' }, [...this.inputs].map(([parameter, input]) => h('label', {}, parameter.name, input))),
      this.editor(),
      h('div', { class: 'row' }, this.sendButton, this.stopButton,
        h('button', { type: 'button', onclick: () => copy(this.curl()) }, 'Copy as curl')));
    form.addEventListener('keydown', (event) => {
      if (event.key === 'Enter' && (event.ctrlKey || event.metaKey)) form.requestSubmit();
    });
    this.element = h('article', {}, h('a', { class: 'narrow', href: '#api' }, '‹ All routes'), this.title,
      h('p', {}, `${summary}. `, h('span', { class: 'faint' }, ACCESS[scheme] ?? 'Open to all.')), form, this.reply, this.fields());
  }

  get content() {
    return this.operation.requestBody?.content[JSON_TYPE];
  }

  /** The box for the body, with the examples to choose from; null for a route without a body. */
  editor() {
    if (!this.content) return null;
    const examples = Object.entries(this.content.examples ?? {}).map(([title, { value }]) => [title, JSON.stringify(value, null, 2)]);
    const id = `${this.operation.operationId}-problem`;
    const problem = h('p', { class: 'error', id, hidden: true });
    this.body = h('textarea', { class: 'code body', rows: 12, spellcheck: false, 'aria-describedby': id, title: 'Ctrl and Enter send', oninput: () => check() });
    const check = () => {
      problem.textContent = '';
      try {
        parsed(this.body.value, 'body');
      } catch (error) {
        problem.textContent = error.message;
      }
      problem.hidden = !problem.textContent;
      this.body.setAttribute('aria-invalid', String(!problem.hidden));
    };
    const show = (number) => {
      this.body.value = examples[number]?.[1] ?? '{}';
      check();
    };
    show(0);
    const choice = h('select', { onchange: ({ target }) => show(target.selectedIndex) }, examples.map(([title]) => h('option', {}, title)));
    return [examples.length > 1 ? h('label', {}, 'Example', choice) : null, h('label', {}, 'Body', this.body), problem];
  }

  fields() {
    if (!this.content) return null;
    const { components } = this.operation;
    const { schema } = this.content;
    return h('details', { class: 'section' }, h('summary', {}, 'Fields of the body'),
      h('p', { class: 'faint about' }, aboutOf(schema, components)), fieldsOf(schema, components));
  }

  /** The path with its parameters, relative to the server's root. */
  target() {
    let path = this.operation.path.slice(1);
    const query = new URLSearchParams();
    for (const [{ name, in: place }, input] of this.inputs) {
      if (place === 'path') path = path.replace(`{${name}}`, encodeURIComponent(input.value));
      else if (input.value) query.set(name, input.value);
    }
    return query.size ? `${path}?${query}` : path;
  }

  /** The request as a command; the key is not written into it. */
  curl() {
    const { method } = this.operation;
    const parts = ['curl', quoted(urlOf(this.target()))];
    if (method !== (this.body ? 'POST' : 'GET')) parts.push('-X', method);
    if (key.get()) parts.push('-H "Authorization: Bearer $HEADRACE_API_KEY"');
    if (this.body) parts.push('-H', quoted(`Content-Type: ${JSON_TYPE}`), '-d', quoted(this.body.value));
    return parts.join(' ');
  }

  async send() {
    this.controller?.abort();
    const controller = (this.controller = new AbortController());
    this.show(true);
    const status = h('p', {}, 'Waiting for the reply …');
    this.reply.replaceChildren(h('h3', {}, 'Reply'), status);
    try {
      const began = performance.now();
      const reply = await request(this.target(), { method: this.operation.method, text: this.body?.value, signal: controller.signal, raw: true });
      await this.read(reply, began, status);
      say(`The reply is complete: ${reply.status}`);
    } catch (error) {
      const isStopped = error.name === 'AbortError';
      if (!isStopped && !(error instanceof ApiError) && !(error instanceof TypeError)) throw error;
      const why = isStopped ? 'Stopped.' : error instanceof ApiError ? error.message : 'The connection was lost.';
      this.reply.append(h('p', { class: isStopped ? 'faint' : 'error', role: 'alert' }, why));
    } finally {
      if (this.controller === controller) this.show(false);
    }
  }

  show(isRunning) {
    const hadFocus = document.activeElement === this.stopButton;
    this.stopButton.hidden = !isRunning;
    if (hadFocus && !isRunning) this.sendButton.focus();
  }

  /** Show the reply while it comes. began: when the request was sent, in milliseconds. */
  async read(reply, began, status) {
    const first = performance.now();
    const text = document.createTextNode('');
    const box = h('pre', { tabIndex: 0, role: 'group', 'aria-label': 'Body of the reply' }, text);
    const headers = [...reply.headers].map(([name, value]) => h('li', {}, `${name}: ${value}`));
    let numBytes = 0;
    const tell = (isComplete) => status.replaceChildren(
      h('span', { class: reply.ok ? 'ok' : 'failed' }, `${reply.status} ${reply.statusText}`.trim()),
      ` · ${short(numBytes)} bytes · begun after ${seconds((first - began) / 1000)}`,
      isComplete ? ` · complete after ${seconds((performance.now() - began) / 1000)}` : '');
    tell(false);
    this.reply.append(h('details', {}, h('summary', {}, 'Headers'), h('ul', { class: 'headers' }, headers)), box);
    const decoder = new TextDecoder();
    const reader = reply.body.getReader();
    for (;;) {
      const { done, value } = await reader.read();
      if (done) break;
      const isAtEnd = box.scrollHeight - box.scrollTop - box.clientHeight < 40;
      text.appendData(decoder.decode(value, { stream: true }));
      if (isAtEnd) box.scrollTop = box.scrollHeight;
      numBytes += value.length;
      tell(false);
    }
    if (reply.headers.get('content-type')?.startsWith(JSON_TYPE)) {
      text.data = indented(text.data);
      box.scrollTop = 0;
    }
    box.hidden = !text.data;
    tell(true);
  }
}

function inputOf({ in: place, schema }) {
  const words = schema.anyOf?.map((one) => one.type).join(' or ') ?? schema.type ?? '';
  return h('input', { required: place === 'path', placeholder: schema.default ?? words, autocomplete: 'off' });
}

function indented(text) {
  try {
    return JSON.stringify(JSON.parse(text, asWritten), null, 2);
  } catch {
    return text; // it was cut off
  }
}

/** Numbers keep all their digits, where the browser can do that. */
function asWritten(name, value, context) {
  return typeof value === 'number' && JSON.rawJSON && context ? JSON.rawJSON(context.source) : value;
}

const quoted = (text) => `'${text.replaceAll("'", "'\\''")}'`;
