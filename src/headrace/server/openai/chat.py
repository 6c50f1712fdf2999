"""Chat completions: `POST /v1/chat/completions`. Owns the chunks and the reply; `chat_request` checks the messages and tools, `server/chat/` renders,
tokenizes and reads the output. Runs in the event loop that serves HTTP.
"""

from collections.abc import AsyncGenerator
from dataclasses import dataclass, field

import msgspec

from headrace.frontend.sample_update import SampleUpdate
from headrace.frontend.slots import slot_of
from headrace.parsers.base import Arguments, Event, Reasoning, Text, ToolCall
from headrace.server.chat.calls import ChatCall, chat_call
from headrace.server.chat.choice_stream import ChoiceStream, FoldedReply, fold
from headrace.server.chat.conversation import Conversation, refused, unsupported
from headrace.server.chat.custom_tools import InputReader, input_of
from headrace.server.context import Asker
from headrace.server.http import LongList, encode_json
from headrace.server.openai.base import (
    NOT_ENDED,
    ChunkWriter,
    CompletionTokensDetails,
    Generation,
    OpenAIServingBase,
    Usage,
)
from headrace.server.openai.chat_request import asked_thinking, conversation_of, predicted_text
from headrace.server.openai.fields import check_num_logprobs
from headrace.server.openai.logprobs import chat_logprobs, new_places, prompt_logprobs
from headrace.server.openai.protocol import AS_MANY_AS_FIT, ChatCompletionRequest, refuse_unsupported


@dataclass(slots=True)
class ChatGeneration(Generation[ChatCompletionRequest]):
    chat: ChatCall = field(kw_only=True)
    choices: dict[int, ChoiceStream] = field(default_factory=dict)

    @property
    def notes(self) -> list[str]:
        budget = "reasoning.max_tokens" if self.request.thinking is None else "thinking.budget_tokens"
        _, ignored = asked_thinking(self.request)
        return [*self.request.noted, *ignored, *self.chat.notes(self.request.limit_field, budget)]

    def events(self, update: SampleUpdate) -> list[Event]:
        choice = self.choices.get(update.index)
        if choice is None:
            choice = self.choices[update.index] = self.chat.choice()
        return choice.push(update)

    def logprobs(self, update: SampleUpdate) -> dict[str, LongList | None]:
        as_id = bool(self.request.return_tokens_as_token_ids)
        content = chat_logprobs(self.chat.context.model.tokenizer, new_places(update, self.request), as_id)
        return {"content": LongList(content), "refusal": None}

    def ending(self, update: SampleUpdate) -> dict[str, str | int | None]:
        """See Generation; after the events of the update."""
        assert update.finish is not None, "it has ended"
        reason = self.chat.reason(update.finish, self.choices[update.index])
        if reason == "tool_calls" and self.request.functions:
            reason = "function_call"
        return Generation.ending(self, update) | {"finish_reason": reason}


class ChatServing(OpenAIServingBase[ChatCompletionRequest, ChatGeneration]):
    request_type = ChatCompletionRequest
    id_prefix = "chatcmpl-"
    object_name = "chat.completion"
    prompt_field = "messages"

    def _check(self, request: ChatCompletionRequest) -> None:
        self.context.check_tokenizer("messages")
        refuse_unsupported(request)
        if request.add_special_tokens:
            raise unsupported("add_special_tokens", "cannot be set: the chat template adds them")
        if request.continue_final_message and request.add_generation_prompt:
            raise refused(
                "add_generation_prompt",
                "and continue_final_message exclude each other: the last message goes on, or a new one begins",
            )
        if request.top_logprobs and not request.logprobs:
            raise refused("top_logprobs", "needs logprobs: true")
        check_num_logprobs("top_logprobs", request.top_logprobs)

    async def convert(self, request: ChatCompletionRequest) -> ChatGeneration:
        context_length = self.context.model.context_length

        def read() -> Conversation:
            self._check(request)
            return conversation_of(request, context_length)

        conversation = await self.context.beside_others(read)
        generation_id = self.new_id(request)
        chat = await chat_call(
            self.context,
            conversation,
            request.sampling_params(request.max_new_tokens),
            shorten=lambda ids: request.truncated(ids, context_length),
            rid=generation_id,
            prediction=predicted_text(request.prediction),
            **request.call_fields(),
        )
        return ChatGeneration(request, chat.call, generation_id, chat.limit, chat=chat)

    def ending(self, generation: ChatGeneration, updates: list[SampleUpdate], usage: Usage) -> dict[str, object]:
        request = generation.request
        reply: dict[str, object] = {"usage": self.total_usage(generation, usage), "prompt_logprobs": None}
        if request.return_token_ids:
            reply["prompt_token_ids"] = generation.call.input_ids
        if request.prompt_logprobs is not None:
            reply["prompt_logprobs"] = prompt_logprobs(self.context.model.tokenizer, request, updates[0])
        return reply

    def total_usage(self, generation: ChatGeneration, usage: Usage) -> Usage:
        """With the tokens of reasoning, if the model's output has any."""
        if generation.chat.format is None or not generation.chat.format.has_reasoning:
            return usage
        count = sum(choice.num_reasoning_tokens for choice in generation.choices.values())
        details = usage.completion_tokens_details or CompletionTokensDetails()
        details = msgspec.structs.replace(details, reasoning_tokens=count)
        return msgspec.structs.replace(usage, completion_tokens_details=details)

    def choice(self, generation: ChatGeneration, update: SampleUpdate) -> dict[str, object]:
        request = generation.request
        logprobs = generation.logprobs(update) if request.logprobs and update.logprobs is not None else None
        message = _message(fold(generation.events(update)), request, generation.chat.conversation.custom_names)
        choice: dict[str, object] = {
            "index": update.index,
            "message": message,
            "logprobs": logprobs,
            **generation.ending(update),
        }
        return choice | {"token_ids": update.ids} if request.return_token_ids else choice

    def updates(self, asker: Asker, generation: ChatGeneration) -> AsyncGenerator[SampleUpdate, None]:
        request = generation.request
        slot = slot_of(request.id_slot)
        return generation.chat.updates(asker, request.output_limit == AS_MANY_AS_FIT, slot=slot)

    def chunk_writer(self, generation: ChatGeneration) -> "ChatChunks":
        return ChatChunks(generation)


def _message(reply: FoldedReply, request: ChatCompletionRequest, custom_names: frozenset[str]) -> dict[str, object]:
    """The message of a reply that is not streamed. Content is null only beside tool calls. custom_names: tools that take a text."""
    reasoning = reply.reasoning if request.shows_reasoning else None
    message: dict[str, object] = {
        "role": "assistant",
        "content": reply.content if reply.content or not reply.calls else None,
        "reasoning_content": reasoning,
        "refusal": None,
    }
    if reasoning is not None:
        message["reasoning"] = reasoning
    if reply.calls and request.functions:
        message["function_call"] = {"name": reply.calls[0].name, "arguments": reply.calls[0].arguments}
    elif reply.calls:
        message["tool_calls"] = [
            {"id": call.id, "type": "custom", "custom": {"name": call.name, "input": input_of(call.arguments)}}
            if call.name in custom_names
            else {"id": call.id, "type": "function", "function": {"name": call.name, "arguments": call.arguments}}
            for call in reply.calls
        ]
    return message


# Clients read `reasoning_content` of every delta.
_NO_REASONING = b',"reasoning_content":null}'
_FIRST_DELTA = b'{"role":"assistant","content":""' + _NO_REASONING
_EMPTY_DELTA = b'{"reasoning_content":null}'


class ChatChunks(ChunkWriter):
    """Chunks of a chat: for each choice the role, then deltas of its events, the last with the finish reason."""

    def __init__(self, generation: ChatGeneration) -> None:
        super().__init__(generation, "chat.completion.chunk")
        self.generation = generation
        self.request = generation.request
        self.prompt_ids = generation.call.input_ids
        self.started: set[int] = set()
        self.shows_reasoning = generation.request.shows_reasoning
        # Reasoning that is kept until it is complete, by choice.
        self.kept: dict[int, list[str]] | None = {} if generation.request.stream_reasoning is False else None
        self.custom_names = generation.chat.conversation.custom_names
        # Readers of the calls of custom tools, by choice and call.
        self.inputs: dict[int, dict[int, InputReader]] = {}

    def delta(self, update: SampleUpdate) -> bytes:
        """The role before the first delta, then a chunk for each event. A choice that ends without more text gets an empty delta."""
        frames, index = b"", update.index
        if index not in self.started:
            self.started.add(index)
            prompt = b',"prompt_token_ids":' + encode_json(self.prompt_ids) if self.wants_ids else b""
            tail = self.tail(update, with_ids=False, beside=prompt)
            frames = self._chunk(index, _FIRST_DELTA, b"null", NOT_ENDED, tail)
        if update.progress is not None:
            frames += self._chunk(index, _EMPTY_DELTA, b"null", NOT_ENDED, self.progress_tail(update.progress))
            if update.is_progress:
                return frames
        deltas = self._deltas(index, self.generation.events(update), update.finish is not None)
        logprobs = b"null"
        if self.request.wants_logprobs and update.logprobs is not None and update.logprobs.output:
            logprobs = encode_json(self.generation.logprobs(update))
        if not deltas and (logprobs != b"null" or (self.wants_ids and bool(update.ids))):
            deltas = [b'{"content":"","reasoning_content":null}']
        if not deltas:
            if update.finish is None:
                return frames
            deltas = [_EMPTY_DELTA]
        *others, last = deltas
        for delta in others:
            frames += self._chunk(index, delta, b"null", NOT_ENDED, self.tail(update, with_ids=False))
        end = NOT_ENDED if update.finish is None else encode_json(self.generation.ending(update))[1:-1]
        return frames + self._chunk(index, last, logprobs, end, self.tail(update))

    def _deltas(self, index: int, events: list[Event], ended: bool) -> list[bytes]:
        if not self.shows_reasoning:
            events = [event for event in events if not isinstance(event, Reasoning)]
        elif self.kept is not None:
            events = self._with_whole_reasoning(self.kept.setdefault(index, []), events, ended)
        if self.request.functions:
            return [delta for event in events if (delta := _function_delta(event))]
        if not self.custom_names:
            return [_delta(event) for event in events]
        readers = self.inputs.setdefault(index, {})
        deltas = [self._custom_delta(readers, event) for event in events]
        if ended:
            deltas += [_input_delta(call, reader.finish()) for call, reader in readers.items()]
        return [delta for delta in deltas if delta]

    def _custom_delta(self, readers: dict[int, InputReader], event: Event) -> bytes:
        """The delta of an event where tools may be custom; empty if there is nothing new to say."""
        match event:
            case ToolCall(index, call_id, name) if name in self.custom_names:
                readers[index] = InputReader()
                begun = b'"id":%b,"type":"custom","custom":{"name":%b,"input":""}'
                return _call_delta(index, begun % (encode_json(call_id), encode_json(name)))
            case Arguments(index, text) if index in readers:
                return _input_delta(index, readers[index].push(text))
            case _:
                return _delta(event)

    @staticmethod
    def _with_whole_reasoning(kept: list[str], events: list[Event], ended: bool) -> list[Event]:
        shown: list[Event] = []
        for event in [*events, None] if ended else events:
            if isinstance(event, Reasoning):
                kept.append(event.text)
                continue
            if kept:
                shown.append(Reasoning("".join(kept)))
                kept.clear()
            if event is not None:
                shown.append(event)
        return shown

    def _chunk(self, index: int, delta: bytes, logprobs: bytes, ending: bytes, tail: bytes) -> bytes:
        return b'%b%d,"delta":%b,"logprobs":%b,%b%b' % (
            self.choice_head,
            index,
            delta,
            logprobs,
            ending,
            tail,
        )


def _delta(event: Event) -> bytes:
    match event:
        case Text(text):
            return b'{"content":%b,"reasoning_content":null}' % encode_json(text)
        case Reasoning(text):
            shown = encode_json(text)
            return b'{"reasoning_content":%b,"reasoning":%b}' % (shown, shown)
        case ToolCall(index, call_id, name):
            begun = b'"id":%b,"type":"function","function":{"name":%b,"arguments":""}'
            return _call_delta(index, begun % (encode_json(call_id), encode_json(name)))
        case Arguments(index, text):
            return _call_delta(index, b'"function":{"arguments":%b}' % encode_json(text))


def _call_delta(index: int, fields: bytes) -> bytes:
    return b'{"tool_calls":[{"index":%d,%b}]%b' % (index, fields, _NO_REASONING)


def _function_delta(event: Event) -> bytes:
    """The delta of an event where a call is shown as `function_call`; empty for what belongs to a second call."""
    match event:
        case ToolCall(0, _, name):
            return b'{"function_call":{"name":%b,"arguments":""}' % encode_json(name) + _NO_REASONING
        case Arguments(0, text):
            return b'{"function_call":{"arguments":%b}' % encode_json(text) + _NO_REASONING
        case ToolCall() | Arguments():
            return b""
        case _:
            return _delta(event)


def _input_delta(index: int, text: str) -> bytes:
    return _call_delta(index, b'"custom":{"input":%b}' % encode_json(text)) if text else b""
