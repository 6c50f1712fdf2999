// Images of the next message: chosen, pasted or dropped, and shown above its box until they are sent.

import { byId, h, say, style, toast } from './dom.js';

const KINDS = ['image/png', 'image/jpeg', 'image/webp', 'image/gif', 'image/bmp'];
const input = byId('input');
const list = h('ul', { class: 'waiting-images', 'aria-label': 'Images of the next message', hidden: true });
const chooser = h('input', { type: 'file', accept: KINDS.join(), multiple: true, onchange: choose });
const button = h('label', { class: 'button', title: 'Or paste or drop an image', hidden: true }, 'Image', chooser);
let isStarted = false;
let sees = false;
let waiting = []; // {name, url}

/** Show the button, if the model sees, and listen. */
export async function show(modelSees) {
  sees = modelSees;
  if (!isStarted) {
    isStarted = true;
    await style('images.css');
    byId('composer').before(list);
    byId('send').before(button);
    input.addEventListener('paste', paste);
    document.addEventListener('dragover', (event) => hasFiles(event) && event.preventDefault());
    document.addEventListener('drop', drop);
  }
  button.hidden = !sees;
  if (!sees) take();
}

export const hasSome = () => waiting.length > 0;

/** The URLs of the images that wait; then none waits. */
export function take() {
  const urls = waiting.map(({ url }) => url);
  waiting = [];
  draw();
  return urls;
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
  if (!sees) return toast('This model does not see images.');
  for (const file of files) {
    if (!KINDS.includes(file.type)) {
      toast(`${file.name} is not sent: it is no PNG, JPEG, WEBP, GIF or BMP image.`);
      continue;
    }
    try {
      waiting.push({ name: file.name, url: await read(file) });
    } catch (error) {
      toast(`${file.name} cannot be read: ${error.message}`);
    }
  }
  draw();
  if (waiting.length) say(`${waiting.length === 1 ? '1 image goes' : `${waiting.length} images go`} with the next message`);
  input.focus();
}

function read(file) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file);
  });
}

function draw() {
  list.hidden = !waiting.length;
  list.replaceChildren(...waiting.map((image) => h('li', {},
    h('img', { src: image.url, alt: image.name }),
    h('button', { type: 'button', class: 'small', 'aria-label': `Remove ${image.name}`, onclick: () => remove(image) }, '×'))));
}

function remove(image) {
  const at = waiting.indexOf(image);
  waiting.splice(at, 1);
  draw();
  say(`Removed ${image.name}`);
  (list.querySelectorAll('button')[Math.min(at, waiting.length - 1)] ?? input).focus();
}
