// The settings beside a conversation: system prompt, sampling, schema, tools.

import { parsed } from './ask.js';
import { byId, h } from './dom.js';

const NUMBERS = [
  ['temperature', 'Temperature', { min: 0, step: 'any' }],
  ['top_p', 'Top p', { min: 0, max: 1, step: 'any' }],
  ['top_k', 'Top k', { min: -1, step: 1 }],
  ['min_p', 'Min p', { min: 0, max: 1, step: 'any' }],
  ['max_tokens', 'Most tokens', { min: 1, step: 1 }],
  ['seed', 'Seed', { step: 1 }],
  ['repetition_penalty', 'Repetition penalty', { min: 0, max: 2, step: 'any' }],
  ['frequency_penalty', 'Frequency penalty', { min: -2, max: 2, step: 'any' }],
  ['presence_penalty', 'Presence penalty', { min: -2, max: 2, step: 'any' }],
];
const DEFAULTS = { seed: 'random', frequency_penalty: '0', presence_penalty: '0' };
const SCHEMA = '{\n  "type": "object",\n  "properties": {"answer": {"type": "string"}},\n  "required": ["answer"]\n}';
const TOOLS = '[{"type": "function", "function": {\n  "name": "get_weather",\n  "parameters": {"type": "object",\n    "properties": {"city": {"type": "string"}},\n    "required": ["city"]}}}]';

/** The panel. changed(): a value of `settings` has changed. */
export class Panel {
  constructor(changed) {
    this.changed = changed;
    this.settings = {};
    this.fields = new Map();
    this.model = h('select', { id: 'model' });
    this.effort = this.select('reasoning_effort', [['', 'as the model likes'], ...['none', 'low', 'medium', 'high'].map((v) => [v, v])]);
    this.choice = this.select('tool_choice', [['auto', 'if it likes'], ['required', 'always'], ['none', 'never']]);
    this.model.addEventListener('change', () => this.set('model', this.model.value));
    byId('panel-fields').append(
      h('label', {}, 'Model', this.model),
      h('label', {}, 'System prompt', this.text('system', 4)),
      fold('Sampling', h('div', { class: 'grid' }, NUMBERS.map(([name, label, bounds]) => h('label', {}, label, this.number(name, bounds)))),
        h('label', {}, 'Stop texts, one per line', this.text('stop', 2)),
        h('label', {}, 'Reasoning effort', this.effort),
        h('label', { class: 'check' }, this.check('logprobs'), 'Token probabilities')),
      fold('JSON schema', ...this.json('schema', 'JSON schema of the reply', SCHEMA)),
      fold('Tools', ...this.json('tools', 'Tools, a JSON list', TOOLS), h('label', {}, 'The model calls them', this.choice)),
    );
  }

  set(name, value) {
    if (value === '' || value === null || value === false) delete this.settings[name];
    else this.settings[name] = value;
    this.changed();
  }

  text(name, rows) {
    return this.keep(name, h('textarea', { rows, oninput: (event) => this.set(name, event.target.value) }));
  }

  number(name, bounds) {
    const input = h('input', { type: 'number', inputMode: 'decimal', ...bounds });
    input.addEventListener('input', () => this.set(name, input.value === '' ? null : input.valueAsNumber));
    return this.keep(name, input);
  }

  select(name, options) {
    const box = h('select', {}, options.map(([value, label]) => h('option', { value }, label)));
    box.addEventListener('change', () => this.set(name, box.value));
    return this.keep(name, box);
  }

  check(name) {
    return this.keep(name, h('input', { type: 'checkbox', onchange: (event) => this.set(name, event.target.checked) }));
  }

  /** A box for JSON, which says at once what is wrong with it. */
  json(name, label, example) {
    const problem = h('p', { class: 'error', id: `${name}-problem`, hidden: true });
    const box = h('textarea', { rows: 8, class: 'code', placeholder: example, spellcheck: false, 'aria-describedby': problem.id });
    const check = () => {
      try {
        parsed(box.value, label);
        problem.hidden = true;
      } catch (error) {
        problem.textContent = error.message;
        problem.hidden = false;
      }
      box.setAttribute('aria-invalid', String(!problem.hidden));
    };
    box.check = check;
    box.addEventListener('input', () => {
      check();
      this.set(name, box.value);
    });
    return [h('label', {}, label, this.keep(name, box)), problem];
  }

  keep(name, field) {
    this.fields.set(name, field);
    return field;
  }

  /** Show these settings; changes are written into them. */
  show(settings) {
    this.settings = settings;
    for (const [name, field] of this.fields) {
      const value = settings[name];
      if (field.type === 'checkbox') field.checked = Boolean(value);
      else field.value = value ?? (field.tagName === 'SELECT' ? field.options[0].value : '');
      field.check?.();
    }
    this.model.value = settings.model ?? '';
    if (this.model.selectedIndex < 0) this.model.selectedIndex = 0;
  }

  /** What the server says about its models: /model_info, and the names of /v1/models. */
  showModels(info, names) {
    this.model.replaceChildren(...names.map((name, index) => h('option', { value: index ? name : '' }, name)));
    this.model.value = this.settings.model ?? '';
    if (this.model.selectedIndex < 0) this.model.selectedIndex = 0;
    const defaults = { ...DEFAULTS, max_tokens: info.default_max_tokens ?? 'as fit', ...info.sampling_defaults };
    for (const [name] of NUMBERS) this.fields.get(name).placeholder = defaults[name] ?? '';
    byId('model-about').textContent = `${info.served_model_name}, context of ${info.context_length.toLocaleString('en')} tokens` +
      (info.sampling_defaults.origin ? `; sampling defaults of ${info.sampling_defaults.origin}` : '');
  }
}

function fold(title, ...children) {
  return h('details', { class: 'section' }, h('summary', {}, title), ...children);
}
