// Images and sounds of the next message: chosen, pasted or dropped, and shown above its box until they are sent.

import { byId, h, say, toast } from './dom.js';
import { EXTENSIONS, IMAGES, counted, kindOf, read, typeOf, view } from './media.js';

const REFUSALS = { image: 'This model does not support images.', sound: 'This model does not support audio.' };
const READ = { image: 'no PNG, JPEG, WEBP, GIF or BMP image', sound: 'no WAV, FLAC, OGG or MP3 sound' };
const ACCEPTED = { image: IMAGES, sound: EXTENSIONS };
const input = byId('input');
const list = h('ul', { class: 'waiting-media', 'aria-label': 'Images and sounds of the next message', hidden: true });
const chooser = h('input', { type: 'file', multiple: true, onchange: choose });
const caption = h('span');
const button = h('label', { class: 'button', hidden: true }, caption, chooser);
let isStarted = false;
let takes = []; // kinds
let waiting = []; // {item, element}

/** Show the button for what the model takes, and listen. takes: {image, sound}. */
export function show(modelTakes) {
  takes = Object.keys(READ).filter((kind) => modelTakes[kind]);
  if (!isStarted) {
    isStarted = true;
    byId('composer').before(list);
    byId('send').before(button);
    input.addEventListener('paste', paste);
    document.addEventListener('dragover', (event) => hasFiles(event) && event.preventDefault());
    document.addEventListener('drop', drop);
  }
  button.hidden = !takes.length;
  button.title = `Or paste or drop ${takes.map((kind) => ({ image: 'an image', sound: 'a sound' })[kind]).join(' or ')}`;
  caption.textContent = takes.length > 1 ? 'File' : { image: 'Image', sound: 'Sound' }[takes[0]];
  chooser.accept = takes.flatMap((kind) => ACCEPTED[kind]).join();
  for (const one of [...waiting]) if (!takes.includes(one.item.kind)) drain(one);
}

export const hasSome = () => waiting.length > 0;

/** What waits, undefined if nothing does; then nothing waits. */
export function take() {
  const items = waiting.map(({ item }) => item);
  for (const one of [...waiting]) drain(one);
  return items.length ? items : undefined;
}

function drain(one) {
  waiting.splice(waiting.indexOf(one), 1);
  one.element.remove();
  list.hidden = !waiting.length;
}

async function choose() {
  await add([...chooser.files]);
  chooser.value = '';
}

function paste(event) {
  const { files } = event.clipboardData;
  // A copied table or text may come with a picture of itself.
  if (!files.length || event.clipboardData.getData('text/plain')) return;
  event.preventDefault();
  add([...files]);
}

/** Dropped on a box for files it is that box's; on another page than the chat it is nobody's. */
const hasFiles = (event) => event.dataTransfer.types.includes('Files') && !event.target.closest?.('input[type="file"]');

function drop(event) {
  if (!hasFiles(event)) return;
  event.preventDefault(); // or the browser would leave the page for the file
  if (!byId('chat-page').hidden) add([...event.dataTransfer.files]);
}

async function add(files) {
  const notes = new Set();
  for (const file of files) {
    try {
      const type = await typeOf(file);
      const kind = kindOf(type);
      if (!kind) notes.add(`${file.name} is not sent: ${takes.length ? `it is ${takes.map((one) => READ[one]).join(' and ')}` : 'this model takes text only'}.`);
      else if (!takes.includes(kind)) notes.add(REFUSALS[kind]);
      else wait({ kind, name: file.name, url: await read(file, type) });
    } catch (error) {
      notes.add(`${file.name} cannot be read: ${error.message}`);
    }
  }
  notes.forEach((note) => toast(note));
  if (!takes.length) return;
  if (waiting.length) say(`${counted(waiting.map(({ item }) => item))} ${waiting.length > 1 ? 'go' : 'goes'} with the next message`);
  input.focus();
}

function wait(item) {
  const one = { item };
  one.element = h('li', {}, view(item),
    h('button', { type: 'button', class: 'small', 'aria-label': `Remove ${item.name}`, onclick: () => remove(one) }, '×'));
  waiting.push(one);
  list.append(one.element);
  list.hidden = false;
}

function remove(one) {
  const at = waiting.indexOf(one);
  drain(one);
  say(`Removed ${one.item.name}`);
  (list.querySelectorAll('button')[Math.min(at, waiting.length - 1)] ?? input).focus();
}
