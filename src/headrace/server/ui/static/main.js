// Which page is on view, light or dark, the prompt for a key, and the drawers of small screens.

import { key, newKey, onConnection, onKeyNeeded } from './api.js';
import { openChat, startChat } from './chat.js';
import { byId, say } from './dom.js';

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

let dashboard = null;

async function route() {
  const [page, part = ''] = location.hash.slice(1).split(/\/(.*)/);
  let rest = '';
  try {
    rest = decodeURIComponent(part);
  } catch {
    // an address that this page did not write
  }
  const isDashboard = page === 'dashboard';
  byId('chat-page').hidden = isDashboard;
  byId('dashboard-page').hidden = !isDashboard;
  for (const button of document.querySelectorAll('[data-drawer]')) button.hidden = isDashboard;
  byId(isDashboard ? 'nav-dashboard' : 'nav-chat').setAttribute('aria-current', 'page');
  byId(isDashboard ? 'nav-chat' : 'nav-dashboard').removeAttribute('aria-current');
  document.title = isDashboard ? 'Headrace dashboard' : 'Headrace';
  dashboard?.closeDashboard();
  if (!isDashboard) return openChat(rest);
  dashboard ??= await import('./dashboard.js');
  if (location.hash.startsWith('#dashboard')) dashboard.openDashboard(rest);
}

// Not a link: the address names the page.
byId('skip').addEventListener('click', () => document.querySelector('main:not([hidden] *, [hidden])').focus());
addEventListener('hashchange', route);
startChat();
route();
