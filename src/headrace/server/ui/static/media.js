// Images and sounds of messages: what a file is, and how it looks. Loaded once the model is known, or when there is something to show.
//
// An item is {kind: 'image' or 'sound', name, url}; url: a data: URL, null = not kept.

import { h, style } from './dom.js';

export const IMAGES = ['image/png', 'image/jpeg', 'image/webp', 'image/gif', 'image/bmp'];
export const EXTENSIONS = ['.wav', '.flac', '.ogg', '.oga', '.opus', '.mp3'];

// Systems have several names for the types of sounds, and know some by none. The last: a frame of layer III.
const STARTS = { wav: /^RIFF.{4}WAVE/s, flac: /^fLaC/, ogg: /^OggS/, mpeg: /^ID3|^\xff[\xe2\xe3\xf2\xf3\xfa\xfb]/ };

await style('media.css');

/** The type of a file that is an image, or whose first bytes are those of a sound; '' of any other. */
export async function typeOf(file) {
  if (IMAGES.includes(file.type)) return file.type;
  const start = String.fromCharCode(...new Uint8Array(await file.slice(0, 12).arrayBuffer()));
  const found = Object.keys(STARTS).find((name) => STARTS[name].test(start));
  return found ? `audio/${found}` : '';
}

export const kindOf = (type) => ({ image: 'image', audio: 'sound' })[type.split('/')[0]];

/** The file as a data: URL of this type. */
export function read(file, type) {
  return new Promise((resolve, reject) => {
    const reader = new FileReader();
    reader.onload = () => resolve(reader.result);
    reader.onerror = () => reject(reader.error);
    reader.readAsDataURL(file.slice(0, file.size, type));
  });
}

/** E.g. "1 image and 2 sounds". */
export function counted(items) {
  const counts = ['image', 'sound'].map((kind) => [kind, items.filter((item) => item.kind === kind).length]);
  return counts.filter(([, count]) => count).map(([kind, count]) => `${count} ${kind}${count > 1 ? 's' : ''}`).join(' and ');
}

export function view({ kind, name, url }, alt = name) {
  if (!url) return h('p', { class: 'faint' }, kind === 'image' ? 'An image that was too large to keep' : `${name}, a sound that was too large to keep`);
  if (kind === 'image') return h('img', { src: url, alt });
  return h('div', { class: 'sound' }, h('span', { title: name }, name), h('audio', { controls: true, src: url, 'aria-label': name }));
}

/** Fill `box` with the items of a message. */
export function show(box, items) {
  const names = called(items);
  box.replaceChildren(...items.map((item, at) => view(item, names[at])));
}

/** Fill `box` with items, each with a button that takes it out of `left`. field: focused when none is left. */
export function choose(box, left, field) {
  const names = called(left);
  const remove = (at) => {
    left.splice(at, 1);
    choose(box, left, field);
    (box.querySelectorAll('button')[Math.min(at, left.length - 1)] ?? field).focus();
  };
  box.replaceChildren(...left.map((item, at) => h('div', { class: 'removable' }, view(item, names[at]),
    h('button', { type: 'button', class: 'small', 'aria-label': `Remove ${names[at]}`, onclick: () => remove(at) }, '×'))));
}

/** Images by their numbers, sounds by their names. */
function called(items) {
  let count = 0;
  return items.map(({ kind, name }) => (kind === 'image' ? `Image ${(count += 1)}` : name));
}
