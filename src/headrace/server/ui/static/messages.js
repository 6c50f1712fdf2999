// How a message looks, and what can be done with it. Knows no requests: `actions` does what the buttons say.

import { copy, h, seconds, short } from './dom.js';
import { markdown } from './markdown.js';

const NAMES = { user: 'You', assistant: 'Assistant', tool: 'Tool result' };
const ENDINGS = { stopped: 'stopped', interrupted: 'interrupted', length: 'the limit of tokens is reached', abort: 'aborted by the server' };

/**
 * The view of one message. actions: select(node), edit(node, text, media), regenerate(node), goOn(node), answerCalls(node, results), isLast(node).
 * `update()` shows what is new while it streams.
 */
export class MessageView {
  constructor(conversation, node, actions) {
    this.conversation = conversation;
    this.node = node;
    this.actions = actions;
    this.showsTokens = Boolean(conversation.settings.logprobs);
    this.reasoning = null;
    this.body = h('div', { class: 'body' });
    this.foot = h('div', { class: 'foot' });
    const title = node.tool_name ? `Result of ${node.tool_name}` : NAMES[node.role];
    const name = h('h2', {}, title);
    this.element = h('article', { class: `message ${node.role}`, 'aria-label': title }, h('div', { class: 'head' }, name, this.branches()), this.body, this.foot);
    this.element.dataset.node = node.id;
    this.update();
  }

  get isRunning() {
    return this.node.finish === 'running';
  }

  /** "‹ 2/3 ›" */
  branches() {
    const siblings = this.conversation.siblings(this.node);
    if (siblings.length < 2) return null;
    const at = siblings.indexOf(this.node.id);
    const go = (step, label, sign) => h('button', {
      type: 'button', class: 'small', 'aria-label': label, 'data-action': label, disabled: !siblings[at + step],
      onclick: () => this.actions.select(this.conversation.nodes[siblings[at + step]], label),
    }, sign);
    return h('span', { class: 'branches', role: 'group', 'aria-label': `Version ${at + 1} of ${siblings.length}` },
      go(-1, 'Previous version', '‹'), h('span', {}, `${at + 1}/${siblings.length}`), go(1, 'Next version', '›'));
  }

  update() {
    const { node } = this;
    this.element.setAttribute('aria-busy', String(this.isRunning));
    this.element.classList.toggle('running', this.isRunning);
    if (node.reasoning) this.showReasoning();
    const parts = this.reasoning ? [this.reasoning] : [];
    if (node.media) parts.push((this.media ??= boxOf('media', (media, box) => media.show(box, node.media))));
    if (node.role !== 'assistant') parts.push(node.content && h('div', { class: 'plain' }, node.content));
    else if (this.showsTokens && node.tokens?.length && !this.isRunning) parts.push(boxOf('tokens', ({ tokenView }, box) => box.append(tokenView(node.tokens))));
    else if (node.isJson) parts.push(h('pre', { class: 'json' }, node.content));
    else if (node.content) parts.push(h('div', { class: 'markdown' }, markdown(node.content)));
    for (const call of node.tool_calls ?? []) if (call) parts.push(callView(call));
    if (this.isRunning && !node.content && !node.reasoning && !node.tool_calls) parts.push(h('p', { class: 'waiting' }, node.waits || '…'));
    if (node.error) parts.push(h('p', { class: 'error', role: 'alert' }, node.error));
    // A block that the reader has opened or focused stays the same element.
    const kept = this.body.firstChild === this.reasoning && this.reasoning ? 1 : 0;
    while (this.body.childNodes.length > kept) this.body.lastChild.remove();
    this.body.append(...parts.slice(kept).filter(Boolean));
    if (!this.isRunning) this.showFoot();
  }

  showReasoning() {
    if (!this.reasoning) {
      this.reasoningText = h('div', { class: 'plain' });
      this.summary = h('summary');
      this.reasoning = h('details', { class: 'fold' }, this.summary, this.reasoningText);
    }
    const isThinking = this.isRunning && !this.node.content && !this.node.tool_calls;
    this.summary.textContent = isThinking ? 'Reasoning …' : 'Reasoning';
    this.reasoningText.textContent = this.node.reasoning;
  }

  showFoot() {
    const { node } = this;
    const button = (label, onclick, props = {}) => h('button', { type: 'button', class: 'small', 'data-action': label, onclick, ...props }, label);
    const buttons = [];
    if (node.role !== 'tool') buttons.push(button('Copy', () => copy(node.content)), button('Edit', () => this.edit()));
    if (node.role === 'assistant') {
      buttons.push(button(node.error ? 'Try again' : 'Regenerate', () => this.actions.regenerate(node)));
      const isCut = ['length', 'stopped', 'interrupted', 'edited'].includes(node.finish) || (node.finish === 'failed' && node.content);
      if (isCut && node.content && !node.tool_calls && !node.reasoning && !node.isJson && this.actions.isLast(node)) {
        buttons.push(button('Continue', () => this.actions.goOn(node)));
      }
      if (node.tokens?.length) {
        buttons.push(button('Probabilities', () => {
          this.showsTokens = !this.showsTokens;
          this.update();
          this.foot.querySelector('[aria-pressed]').focus();
        }, { 'aria-pressed': String(this.showsTokens) }));
      }
    }
    if (node.rid) buttons.push(h('a', { class: 'small', href: `#dashboard/${encodeURIComponent(node.rid)}` }, 'Timeline'));
    this.foot.replaceChildren(...buttons, h('span', { class: 'stats' }, statsOf(node)));
    const open = (node.tool_calls ?? []).length && !node.children.length && this.actions.isLast(node);
    if (open) this.body.append(this.resultsForm());
  }

  edit() {
    const { node } = this;
    const isUser = node.role === 'user';
    const box = h('textarea', { value: node.content, rows: Math.min(12, node.content.split('\n').length + 1), 'aria-label': isUser ? 'Edit your message' : 'Edit the reply' });
    const leave = () => {
      this.update();
      this.foot.querySelector('[data-action="Edit"]').focus();
    };
    const left = [...(node.media ?? [])];
    const media = left.length ? boxOf('media', ({ choose }, element) => choose(element, left, box)) : null;
    const save = () => this.actions.edit(node, box.value, left);
    const form = h('form', { class: 'edit' }, media, box, h('div', { class: 'row' },
      h('button', { type: 'submit', class: 'primary' }, isUser ? 'Send' : 'Save'), h('button', { type: 'button', onclick: leave }, 'Cancel')));
    form.addEventListener('submit', (event) => {
      event.preventDefault();
      save();
    });
    form.addEventListener('keydown', (event) => {
      if (event.key === 'Escape') {
        event.stopPropagation();
        leave();
      } else if (event.key === 'Enter' && (event.ctrlKey || event.metaKey)) save();
    });
    this.body.replaceChildren(form);
    this.foot.replaceChildren();
    box.focus();
  }

  resultsForm() {
    const calls = this.node.tool_calls;
    const boxes = calls.map((call) => h('textarea', { rows: 2, required: true, placeholder: 'What the tool returns' }));
    const form = h('form', { class: 'results' },
      calls.map((call, index) => h('label', {}, `Result of ${call.function.name}`, boxes[index])),
      h('div', { class: 'row' }, h('button', { type: 'submit', class: 'primary' }, calls.length > 1 ? 'Send results' : 'Send result')));
    form.addEventListener('submit', (event) => {
      event.preventDefault();
      this.actions.answerCalls(this.node, boxes.map((box) => box.value));
    });
    return form;
  }
}

/** A box, which is filled when the module that draws in it is there: 'media' (images and sounds) or 'tokens'. */
function boxOf(name, fill) {
  const box = h('div', { class: name === 'media' ? name : '' });
  import(`./${name}.js`).then((module) => fill(module, box), () => box.append(`The ${name} cannot be shown: the server cannot be reached.`));
  return box;
}

function callView(call) {
  let text = call.function.arguments;
  try {
    text = JSON.stringify(JSON.parse(text), null, 2);
  } catch {
    // it has not all arrived
  }
  return h('details', { class: 'fold call' }, h('summary', {}, 'Call of ', h('code', {}, call.function.name)), h('pre', {}, text));
}

function statsOf(node) {
  const { stats = {} } = node;
  const parts = [];
  if (stats.prompt_tokens !== undefined) {
    parts.push(`${short(stats.prompt_tokens)} tokens in${stats.cached_tokens ? ` (${short(stats.cached_tokens)} cached)` : ''}`, `${short(stats.completion_tokens)} out`);
  }
  if (stats.rate) parts.push(`${short(stats.rate)} tokens/s`);
  if (stats.ttft_s) parts.push(`first after ${seconds(stats.ttft_s)}`);
  if (ENDINGS[node.finish]) parts.push(ENDINGS[node.finish]);
  return parts.join(' · ');
}
