// Which page is on view, light or dark, the prompt for a key, and the drawers of small screens.

import { key, newKey, onConnection, onKeyNeeded } from './api.js';
import { openChat, startChat } from './chat.js';
import { byId, say, style, toast } from './dom.js';

const THEME = 'headrace.theme';
const THEMES = ['auto', 'light', 'dark'];

function showTheme(theme) {
  document.documentElement.dataset.theme = theme;
  byId('theme').textContent = { auto: '◐', light: '☀', dark: '☾' }[theme];
  byId('theme').setAttribute('aria-label', `Colours: ${theme}`);
  byId('theme').title = `Colours: ${theme}`;
}

let theme = THEMES.includes(localStorage.getItem(THEME)) ? localStorage.getItem(THEME) : 'auto';
showTheme(theme);
byId('theme').addEventListener('click', () => {
  theme = THEMES[(THEMES.indexOf(theme) + 1) % THEMES.length];
  localStorage.setItem(THEME, theme);
  showTheme(theme);
  say(`Colours: ${theme}`);
});

onKeyNeeded((message) => new Promise((resolve) => {
  const dialog = byId('key-dialog');
  byId('key-message').textContent = message;
  byId('key-input').value = '';
  byId('key-form').onsubmit = (event) => {
    event.preventDefault();
    dialog.close(byId('key-input').value.trim());
  };
  byId('key-cancel').onclick = () => dialog.close('');
  dialog.onclose = () => resolve(dialog.returnValue || null);
  dialog.returnValue = '';
  dialog.showModal();
}));

byId('key').addEventListener('click', async () => {
  const given = await newKey('It is kept until this tab is closed.');
  if (given === null) return;
  key.set(given);
  location.reload();
});

onConnection((online) => {
  byId('offline').hidden = online;
  say(online ? 'The server is back' : 'The server cannot be reached');
});

for (const button of document.querySelectorAll('[data-drawer]')) {
  const drawer = byId(button.dataset.drawer);
  const set = (open) => {
    drawer.classList.toggle('open', open);
    button.setAttribute('aria-expanded', String(open));
  };
  button.addEventListener('click', () => {
    set(!drawer.classList.contains('open'));
    if (drawer.classList.contains('open')) drawer.querySelector('button, input, select, textarea')?.focus();
  });
  drawer.addEventListener('keydown', (event) => {
    if (event.key !== 'Escape' || !drawer.classList.contains('open')) return;
    event.stopPropagation();
    set(false);
    button.focus();
  });
  addEventListener('hashchange', () => set(false));
}

// By their names in the address. The chat is there from the start; the others are loaded when opened, and export open(rest) and close().
const TITLES = { chat: 'Headrace', dashboard: 'Headrace dashboard', api: 'Headrace API' };
const LOADERS = {
  dashboard: () => Promise.all([import('./dashboard.js'), style('dashboard.css')]),
  api: () => Promise.all([import('./explorer.js'), style('explorer.css')]),
};
let opened = null;
let turn = 0; // of the latest change

async function route() {
  const [first, part = ''] = location.hash.slice(1).split(/\/(.*)/);
  let rest = '';
  try {
    rest = decodeURIComponent(part);
  } catch {
    // an address that this page did not write
  }
  const page = Object.hasOwn(TITLES, first) ? first : 'chat';
  for (const name of Object.keys(TITLES)) {
    byId(`${name}-page`).hidden = name !== page;
    if (name === page) byId(`nav-${name}`).setAttribute('aria-current', 'page');
    else byId(`nav-${name}`).removeAttribute('aria-current');
  }
  for (const button of document.querySelectorAll('[data-drawer]')) button.hidden = page !== 'chat';
  document.title = TITLES[page];
  opened?.close();
  opened = null;
  const mine = ++turn;
  if (page === 'chat') return openChat(rest);
  try {
    const [module] = await LOADERS[page]();
    if (mine !== turn) return;
    opened = module;
  } catch {
    return toast('This page cannot be loaded: the server cannot be reached.');
  }
  opened.open(rest);
}

// Not a link: the address names the page.
byId('skip').addEventListener('click', () => document.querySelector('main:not([hidden] *, [hidden])').focus());
addEventListener('hashchange', route);
startChat();
route();
