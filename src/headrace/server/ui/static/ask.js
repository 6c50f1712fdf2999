// One reply: from a path of messages to the request, and from its stream into a node.

import { ApiError, events, request } from './api.js';

const NUMBERS = ['temperature', 'top_p', 'top_k', 'min_p', 'max_tokens', 'seed', 'repetition_penalty', 'frequency_penalty', 'presence_penalty'];
const TOP = 5;

/** The body of the request for a reply after `nodes`. Throws ApiError if a box of the settings holds no JSON. */
export function bodyFor(nodes, settings) {
  const body = { messages: [], stream: true, stream_options: { include_usage: true }, return_progress: true };
  if (settings.system?.trim()) body.messages.push({ role: 'system', content: settings.system });
  body.messages.push(...nodes.filter((node) => !isEmpty(node)).map(messageOf));
  if (settings.model) body.model = settings.model;
  for (const name of NUMBERS) {
    if (typeof settings[name] === 'number') body[name] = settings[name];
  }
  const stop = (settings.stop ?? '').split('\n').filter(Boolean);
  if (stop.length) body.stop = stop;
  if (settings.reasoning_effort) body.reasoning_effort = settings.reasoning_effort;
  const schema = parsed(settings.schema, 'JSON schema');
  if (schema !== undefined) body.response_format = { type: 'json_schema', json_schema: { name: 'reply', strict: true, schema } };
  const tools = parsed(settings.tools, 'tools');
  if (tools !== undefined) {
    if (!Array.isArray(tools)) throw new ApiError('The tools are not a JSON list.');
    body.tools = tools;
    // "Always" is meant for what the user says: after a result the model may answer.
    const isAnswered = settings.tool_choice === 'required' && nodes.at(-1)?.role === 'tool';
    if (settings.tool_choice && settings.tool_choice !== 'auto' && !isAnswered) body.tool_choice = settings.tool_choice;
  }
  if (settings.logprobs) Object.assign(body, { logprobs: true, top_logprobs: TOP });
  return body;
}

/** The value of a box; undefined if it is empty. */
export function parsed(text, name) {
  if (!text?.trim()) return undefined;
  try {
    return JSON.parse(text);
  } catch (error) {
    throw new ApiError(`The ${name} is not valid JSON: ${error.message}`);
  }
}

function isEmpty(node) {
  return node.role === 'assistant' && !node.content && !node.tool_calls?.length;
}

function messageOf(node) {
  if (node.role === 'tool') return { role: 'tool', tool_call_id: node.tool_call_id, content: node.content };
  const parts = (node.media ?? []).filter(({ url }) => url).map(partOf);
  const text = node.content ? [{ type: 'text', text: node.content }] : [];
  const message = { role: node.role, content: parts.length ? [...parts, ...text] : node.content };
  if (node.reasoning) message.reasoning_content = node.reasoning;
  if (node.tool_calls?.length) message.tool_calls = node.tool_calls;
  return message;
}

function partOf({ kind, url }) {
  if (kind === 'image') return { type: 'image_url', image_url: { url } };
  const [, type, data] = /^data:audio\/(\w+);base64,(.*)/.exec(url);
  return { type: 'input_audio', input_audio: { data, format: type === 'mpeg' ? 'mp3' : type } };
}

/** Stream the reply into `node`; `changed` is called after each event. Throws what `request` throws. */
export async function stream(node, body, signal, changed) {
  const began = performance.now();
  let first = 0;
  const reply = await request('v1/chat/completions', { body, signal });
  for await (const event of events(reply)) {
    node.rid = event.id;
    const { processed, total } = event.prompt_progress ?? {};
    node.waits = processed < total && `Reading the prompt: ${processed} of ${total} tokens`;
    const choice = event.choices[0];
    if (choice) {
      const { delta } = choice;
      if (!first && (delta.content || delta.reasoning_content || delta.tool_calls)) first = performance.now();
      node.content += delta.content ?? '';
      if (delta.reasoning_content) node.reasoning = (node.reasoning ?? '') + delta.reasoning_content;
      for (const part of delta.tool_calls ?? []) addCall(node, part);
      for (const token of choice.logprobs?.content ?? []) addToken(node, token);
      if (choice.finish_reason) node.finish = choice.finish_reason;
    }
    if (event.usage) {
      const last = performance.now();
      const { prompt_tokens, completion_tokens, prompt_tokens_details } = event.usage;
      node.stats = { prompt_tokens, completion_tokens, cached_tokens: prompt_tokens_details?.cached_tokens ?? null };
      if (first) node.stats.ttft_s = (first - began) / 1000;
      if (first && completion_tokens > 1 && last > first) node.stats.rate = (completion_tokens - 1) / ((last - first) / 1000);
    }
    changed();
  }
}

function addCall(node, part) {
  node.tool_calls ??= [];
  const call = (node.tool_calls[part.index] ??= { id: '', type: 'function', function: { name: '', arguments: '' } });
  if (part.id) call.id = part.id;
  call.function.name += part.function?.name ?? '';
  call.function.arguments += part.function?.arguments ?? '';
}

function addToken(node, token) {
  node.tokens ??= [];
  const others = (token.top_logprobs ?? []).map(({ token: text, logprob }) => [text, round(logprob)]);
  node.tokens.push([token.token, round(token.logprob), others]);
}

const round = (value) => Math.round(value * 1e4) / 1e4;
