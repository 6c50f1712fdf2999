// A conversation as a file.

import { download } from './dom.js';

const TITLES = { user: 'You', assistant: 'Assistant', tool: 'Tool result' };

function nameOf(conversation) {
  return conversation.title.replace(/[^\p{L}\p{N}]+/gu, '-').replace(/^-|-$/g, '').slice(0, 40) || 'conversation';
}

/** All branches and settings. */
export function exportJson(conversation) {
  download(`${nameOf(conversation)}.json`, 'application/json', JSON.stringify(conversation, null, 1));
}

/** The visible path. */
export function exportMarkdown(conversation) {
  download(`${nameOf(conversation)}.md`, 'text/markdown', asMarkdown(conversation));
}

export function asMarkdown(conversation) {
  const parts = [`# ${conversation.title}`];
  if (conversation.settings.system) parts.push('## System', conversation.settings.system);
  for (const node of conversation.path()) {
    parts.push(`## ${TITLES[node.role]}`);
    if (node.reasoning) parts.push(node.reasoning.replace(/^/gm, '> '));
    for (const item of node.media ?? []) parts.push(mediaAsMarkdown(item));
    if (node.content) parts.push(node.role === 'tool' ? fenced(node.content) : node.content);
    for (const call of node.tool_calls ?? []) parts.push(fenced(`${call.function.name}(${call.function.arguments})`));
  }
  return parts.join('\n\n') + '\n';
}

function mediaAsMarkdown({ kind, name, url }) {
  if (!url) return kind === 'image' ? '*An image that was not kept*' : '*A sound that was not kept*';
  return kind === 'image' ? `![image](${url})` : `[${name.replace(/[\\[\]]/g, '\\$&')}](${url})`;
}

function fenced(text) {
  const longest = Math.max(2, ...(text.match(/`+/g) ?? []).map((ticks) => ticks.length));
  const fence = '`'.repeat(longest + 1);
  return `${fence}\n${text}\n${fence}`;
}
