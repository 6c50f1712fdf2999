// The fields of a body, from its JSON schema.

import { h } from './dom.js';

/** A list of the fields of `schema`, the required ones first; what is nested is made when it is opened. components: of the OpenAPI document. */
export function fieldsOf(schema, components) {
  const found = resolved(schema, components);
  const required = new Set(found.required ?? []);
  const fields = Object.entries(found.properties ?? {}).sort(([a], [b]) => required.has(b) - required.has(a));
  return h('ul', { class: 'fields' }, fields.map(([name, field]) => h('li', {},
    h('code', {}, name), ' ', h('span', { class: 'faint' }, notesOf(field, required.has(name), components)),
    objectsIn(field, components).map((inner) => nested(inner, components)))));
}

/** What the schema says of itself, or '': paragraphs, without the ends of lines within them. */
export function aboutOf(schema, components) {
  return (resolved(schema, components).description ?? '').replace(/([^\n])\n(?!\n)/g, '$1 ');
}

function nested(schema, components) {
  const details = h('details', {}, h('summary', {}, schema.title ?? 'Fields'));
  details.addEventListener('toggle', () => {
    if (details.childNodes.length > 1) return;
    details.append(h('p', { class: 'faint about' }, aboutOf(schema, components)), fieldsOf(schema, components));
  });
  return details;
}

function resolved(schema, components) {
  const name = schema.$ref?.split('/').at(-1);
  return name ? { title: name, ...components.schemas[name] } : schema;
}

function notesOf(field, isRequired, components) {
  const notes = [typeOf(field, components)];
  if (isRequired) notes.push('required');
  if (field.default !== undefined && field.default !== null) notes.push(`default ${JSON.stringify(field.default)}`);
  return notes.join(' · ');
}

/** "number from 0 to 1 | null" */
function typeOf(schema, components) {
  if (schema.anyOf) return [...new Set(schema.anyOf.map((one) => typeOf(one, components)))].join(' | ');
  if (schema.enum) return schema.enum.map((value) => JSON.stringify(value)).join(' | ');
  const { type, items } = resolved(schema, components);
  if (type === 'array') return items && Object.keys(items).length ? `list of ${typeOf(items, components)}` : 'list';
  if (type === 'number' || type === 'integer') return type + boundsOf(schema);
  return type ?? 'any value';
}

function boundsOf({ minimum, maximum, exclusiveMinimum, exclusiveMaximum }) {
  const isSaid = (bound) => bound !== undefined && Math.abs(bound) < 2 ** 62; // every number has the bounds of 64 bits
  const bounds = [];
  if (isSaid(exclusiveMinimum)) bounds.push(`above ${exclusiveMinimum}`);
  else if (isSaid(minimum)) bounds.push(`from ${minimum}`);
  if (isSaid(exclusiveMaximum)) bounds.push(`below ${exclusiveMaximum}`);
  else if (isSaid(maximum)) bounds.push(`to ${maximum}`);
  return bounds.map((bound) => ` ${bound}`).join('');
}

/** The objects with fields of their own that a field may hold, alone or in a list. */
function objectsIn(schema, components) {
  const found = resolved(schema, components);
  if (found.anyOf) return found.anyOf.flatMap((one) => objectsIn(one, components));
  if (found.type === 'array' && found.items) return objectsIn(found.items, components);
  return found.properties ? [found] : [];
}
