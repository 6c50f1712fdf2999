// The tokens of a reply, shaded by probability. Hover, or the arrow keys, show what else was likely.

import { h, randomId } from './dom.js';

const percent = (logprob) => `${Number((100 * Math.exp(logprob)).toPrecision(3))} %`;
const visible = (text) => (text.trim() ? text : JSON.stringify(text).replace(/^" +"$/, '"␣"'));

/** tokens: see `Conversation`. */
export function tokenView(tokens) {
  const id = `tokens-${randomId()}`;
  const tip = h('div', { class: 'tip', hidden: true });
  const options = tokens.map(([text, logprob], index) => {
    const option = h('span', { class: 'token', id: `${id}-${index}`, role: 'option', 'aria-selected': 'false' }, text);
    option.setAttribute('aria-label', `${visible(text)}: ${percent(logprob)}`);
    option.style.setProperty('--p', Math.exp(logprob).toFixed(4));
    option.dataset.index = index;
    return option;
  });
  const list = h('div', { class: 'tokens', tabIndex: 0, role: 'listbox', 'aria-label': 'Tokens of the reply with their probabilities' }, options);
  const box = h('div', { class: 'token-box' }, list, tip);
  let active = -1;

  function show(index) {
    options[active]?.setAttribute('aria-selected', 'false');
    active = index;
    const option = options[index];
    tip.hidden = !option;
    if (!option) return list.removeAttribute('aria-activedescendant');
    option.setAttribute('aria-selected', 'true');
    list.setAttribute('aria-activedescendant', option.id);
    const [text, logprob, others] = tokens[index];
    const rows = others.some(([other]) => other === text) ? others : [[text, logprob], ...others];
    tip.replaceChildren(h('table', {}, rows.map(([other, value]) =>
      h('tr', { class: other === text ? 'picked' : '' }, h('td', {}, visible(other)), h('td', {}, percent(value))))));
    const room = box.clientWidth - tip.offsetWidth;
    const at = option.getClientRects()[0] ?? option.getBoundingClientRect();
    const origin = box.getBoundingClientRect();
    tip.style.left = `${Math.max(0, Math.min(room, at.left - origin.left))}px`;
    tip.style.top = `${at.bottom - origin.top + 4}px`;
  }

  list.addEventListener('mouseover', (event) => event.target.dataset.index && show(Number(event.target.dataset.index)));
  list.addEventListener('mouseleave', () => show(-1));
  list.addEventListener('focus', () => list.matches(':focus-visible') && show(0));
  list.addEventListener('blur', () => show(-1));
  list.addEventListener('keydown', (event) => {
    const step = { ArrowRight: 1, ArrowDown: 1, ArrowLeft: -1, ArrowUp: -1 }[event.key];
    if (step) show(Math.max(0, Math.min(options.length - 1, active + step)));
    else if (event.key === 'Home') show(0);
    else if (event.key === 'End') show(options.length - 1);
    else return;
    event.preventDefault();
    options[active].scrollIntoView({ block: 'nearest' });
  });
  return box;
}
