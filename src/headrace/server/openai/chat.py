"""Chat completions: `POST /v1/chat/completions`.

Owns the checks of messages, the prompt made from them and the chat chunks. Rendering and tokenizing run in a thread; the rest in
the event loop that serves HTTP.
"""

import functools
import re
from collections.abc import Sequence

from headrace.errors import ContextLengthError, RequestError
from headrace.frontend.sample_update import LogprobItem, SampleUpdate
from headrace.messages.neutral import is_empty
from headrace.messages.requests import GenerateReqInput
from headrace.server.context import ServingContext
from headrace.server.http import encode_json
from headrace.server.openai.base import (
    NOT_ENDED,
    ChunkWriter,
    Ending,
    Generation,
    NewLogprobs,
    OpenAIServingBase,
    Usage,
    finite_logprob,
)
from headrace.server.openai.protocol import MAX_LOGPROBS, ROLES, ChatCompletionRequest, ChatMessage, refuse_unsupported
from headrace.server.openai.token_details import logprob_options, prompt_logprobs, truncated
from headrace.text.batch_tokenizer import refuse_too_long
from headrace.text.chat_templates import RESERVED_KWARGS
from headrace.text.tokenizers import Tokenizer

_MESSAGE_FIELDS_NOT_YET = (
    "audio",
    "tool_calls",
    "tool_call_id",
    "function_call",
    "refusal",
    "annotations",
    "prefix",
    "partial",
)
_PART_FIELDS_NOT_YET = ("image_url", "input_audio", "file", "refusal")


class ChatServing(OpenAIServingBase[ChatCompletionRequest]):
    """Handler of /v1/chat/completions."""

    id_prefix = "chatcmpl-"
    prompt_field = "messages"

    def __init__(self, context: ServingContext) -> None:
        super().__init__(context, ChatCompletionRequest)
        # Limited to the room in the context.
        self.default_max_tokens = context.model.context_length

    def validate(self, request: ChatCompletionRequest) -> None:
        """Raises RequestError for what is not supported, contradictory parameters and bad messages."""
        self.context.check_tokenizer("messages")
        refuse_unsupported(request)
        if request.add_special_tokens:
            raise RequestError(
                "add_special_tokens cannot be set: the chat template adds them",
                "add_special_tokens",
                "unsupported_parameter",
            )
        if request.top_logprobs is not None:
            if request.top_logprobs and not request.logprobs:
                raise RequestError("top_logprobs needs logprobs: true", "top_logprobs")
            if not 0 <= request.top_logprobs <= MAX_LOGPROBS:
                message = f"top_logprobs must be between 0 and {MAX_LOGPROBS}, got {request.top_logprobs}"
                raise RequestError(message, "top_logprobs")
        check_messages(request.messages, self.context.model.context_length)
        if request.continue_final_message and request.messages[-1].role != "assistant":
            raise RequestError(
                "continue_final_message needs a last message of the role assistant", "continue_final_message"
            )

    async def convert(self, request: ChatCompletionRequest) -> Generation[ChatCompletionRequest]:
        """Render and tokenize the messages. Without a limit, the output may fill the context."""
        ids = await self.context.in_text_thread(lambda: chat_prompt_ids(self.context, request))
        ids = truncated(ids, request, self.context.model.context_length)
        generation_id = self.new_id(request)
        call = GenerateReqInput(
            input_ids=list(ids),
            sampling_params=request.sampling_params(request.output_limit),
            rid=generation_id,
            stream=bool(request.stream),
            **logprob_options(request),
            priority=request.priority,
            cache_salt=request.cache_salt,
            lora_path=request.lora_path,
            session_params=request.session_params,
        )
        return Generation(request, call, generation_id)

    def response(
        self, generation: Generation[ChatCompletionRequest], updates: list[SampleUpdate], usage: Usage
    ) -> object:
        """A `chat.completion` object."""
        request = generation.request
        details: dict[str, object] = {}
        if request.return_token_ids:
            details["prompt_token_ids"] = generation.call.input_ids
        if request.prompt_logprobs is not None:
            details["prompt_logprobs"] = prompt_logprobs(self.context.model.tokenizer, request, updates[0])
        return {
            "id": generation.id,
            "object": "chat.completion",
            "created": generation.created,
            "model": generation.request.model,
            "system_fingerprint": self.fingerprint,
            "choices": [self._choice(generation, update) for update in updates],
            "usage": usage,
            **details,
        }

    def _choice(self, generation: Generation[ChatCompletionRequest], update: SampleUpdate) -> object:
        assert update.finish is not None, "it has ended"
        logprobs = None
        if generation.request.logprobs:
            logprobs = chat_logprobs(self.context.model.tokenizer, NewLogprobs.of(update, generation.request))
        message = {"role": "assistant", "content": update.text, "reasoning_content": None, "refusal": None}
        ending = Ending.of(update.finish, generation.request)
        choice = {"index": update.index, "message": message, "logprobs": logprobs, **ending.fields()}
        return choice | {"token_ids": update.ids} if generation.request.return_token_ids else choice

    def chunk_writer(self, generation: Generation[ChatCompletionRequest]) -> "ChatChunks":
        """See `ChatChunks`."""
        return ChatChunks(self, generation)


_FIRST_DELTA = b'{"role":"assistant","content":"","reasoning_content":null}'


class ChatChunks(ChunkWriter):
    """Chunks of a chat: for each choice the role, then content deltas, the last with the finish reason."""

    def __init__(self, serving: ChatServing, generation: Generation[ChatCompletionRequest]) -> None:
        super().__init__(generation, "chat.completion.chunk", generation.request.model, serving.fingerprint)
        self.tokenizer = serving.context.model.tokenizer
        self.request = generation.request
        self.prompt_ids = generation.call.input_ids
        self.started: set[int] = set()

    def delta(self, update: SampleUpdate, ending: Ending | None) -> bytes:
        """The role before the first delta, then the new text. A choice that ends without more text gets an empty delta."""
        frames, index = b"", update.index
        if index not in self.started:
            self.started.add(index)
            prompt = b',"prompt_token_ids":' + encode_json(self.prompt_ids) if self.wants_ids else b""
            tail = self.tail(update, with_ids=False, beside=prompt)
            frames = self._chunk(index, _FIRST_DELTA, b"null", NOT_ENDED, tail)
        text = update.text
        logprobs = b"null"
        if self.request.wants_logprobs:
            new = NewLogprobs.of(update, self.request)
            if new.tokens:
                logprobs = encode_json(chat_logprobs(self.tokenizer, new))
        has_news = bool(text) or logprobs != b"null" or (self.wants_ids and bool(update.ids))
        if not has_news and ending is None:
            return frames
        delta = b'{"content":%b,"reasoning_content":null}' % encode_json(text) if has_news else b"{}"
        end = NOT_ENDED if ending is None else ending.json()
        return frames + self._chunk(index, delta, logprobs, end, self.tail(update))

    def _chunk(self, index: int, delta: bytes, logprobs: bytes, ending: bytes, tail: bytes) -> bytes:
        return b'%b%d,"delta":%b,"logprobs":%b,%b%b' % (
            self.choice_head,
            index,
            delta,
            logprobs,
            ending,
            tail,
        )


def chat_logprobs(tokenizer: Tokenizer, new: NewLogprobs) -> dict[str, object]:
    """The logprobs object of a chat choice."""
    content = []
    for position, entry in enumerate(new.tokens):
        alternatives = (new.alternatives[position] if position < len(new.alternatives) else None) or []
        shown = _token(tokenizer, entry)
        shown["top_logprobs"] = [_token(tokenizer, alternative) for alternative in alternatives]
        content.append(shown)
    return {"content": content, "refusal": None}


def _token(tokenizer: Tokenizer, entry: LogprobItem) -> dict[str, object]:
    value, token_id, text = entry
    shown = text if text is not None else tokenizer.decode([token_id], False)
    raw = tokenizer.token_bytes(token_id) if tokenizer.fixed_bytes else shown.encode(errors="replace")
    return {"token": shown, "logprob": finite_logprob(value), "bytes": list(raw)}


def check_messages(messages: Sequence[ChatMessage], context_length: int) -> None:
    """Raises RequestError that names the unsupported or invalid message."""
    if not messages:
        raise RequestError("messages is empty", "messages")
    if len(messages) > context_length:
        raise ContextLengthError("messages", context_length, f"there are {len(messages)} messages")
    for number, message in enumerate(messages):
        where = f"messages[{number}]"
        if message.role in ("tool", "function"):
            raise RequestError(f"{where}.role: {message.role} messages are not supported yet", f"{where}.role")
        if message.role not in ROLES:
            shown = message.role[:50]
            raise RequestError(f"{where}.role must be one of {', '.join(ROLES)}, got {shown!r}", f"{where}.role")
        for name in _MESSAGE_FIELDS_NOT_YET:
            if not is_empty(getattr(message, name)):
                raise RequestError(f"{where}.{name} is not supported yet", f"{where}.{name}", "unsupported_parameter")
        if message.reasoning_content and message.role != "assistant":
            raise RequestError(f"{where}.reasoning_content belongs to the role assistant", f"{where}.reasoning_content")
        if message.content is None or message.content == []:
            raise RequestError(f"{where}.content is missing", f"{where}.content")
        if isinstance(message.content, list):
            for place, part in enumerate(message.content):
                if part.type != "text":
                    shown = part.type[:50]
                    raise RequestError(
                        f"{where}.content[{place}]: parts of type {shown!r} are not supported yet, only text",
                        f"{where}.content[{place}].type",
                        "unsupported_parameter",
                    )
                if part.text is None:
                    raise RequestError(f"{where}.content[{place}].text is missing", f"{where}.content[{place}].text")
                for name in _PART_FIELDS_NOT_YET:
                    if not is_empty(getattr(part, name)):
                        field = f"{where}.content[{place}].{name}"
                        raise RequestError(f"{field} does not belong to a part of type text", field)


def chat_prompt_ids(context: ServingContext, request: ChatCompletionRequest) -> list[int]:
    """Token ids of the rendered messages. Raises RequestError, including when the model has no template."""
    template = context.model.chat_template
    if template is None:
        raise RequestError("this model has no chat template: use /v1/completions, or start with --chat-template")
    context.check_text_length("messages", sum(_num_chars(message) for message in request.messages))
    known = RESERVED_KWARGS | _words(template.source)
    given = request.chat_template_kwargs or {}
    kwargs = {name: value for name, value in given.items() if name in known or not is_empty(value)}
    # Reserved names are refused with their own message when the template is rendered.
    if unknown := kwargs.keys() - known:
        shown = sorted(unknown)[0][:100]
        raise RequestError(
            f"chat_template_kwargs: this model's chat template does not use {shown!r}",
            "chat_template_kwargs",
            "unsupported_parameter",
        )
    if request.reasoning_effort is not None:
        # If the template uses neither name it has no effect, as on SGLang and vLLM.
        thinks = request.reasoning_effort != "none"
        for name, value in (("reasoning_effort", request.reasoning_effort), ("enable_thinking", thinks)):
            if name in known:
                kwargs.setdefault(name, value)
    rendered = template.render(
        [template_message(message, template.content_parts) for message in request.messages],
        add_generation_prompt=request.add_generation_prompt is not False and not request.continue_final_message,
        continue_final_message=bool(request.continue_final_message),
        kwargs=kwargs,
    )
    context.check_text_length("messages", len(rendered.text))
    refuse_too_long(context.model.tokenizer, rendered.text, context.model.context_length, "messages")
    return context.model.tokenizer.encode_rendered(rendered)


@functools.lru_cache(maxsize=8)
def _words(source: str) -> frozenset[str]:
    """All words in the source of a template that look like names."""
    return frozenset(re.findall(r"\w+", source))


def _num_chars(message: ChatMessage) -> int:
    content = message.content
    if isinstance(content, list):
        return sum(len(part.text or "") for part in content)
    return len(content or "") + len(message.reasoning_content or message.reasoning or "")


def template_message(message: ChatMessage, keep_parts: bool) -> dict[str, object]:
    """A message in the form for templates: `developer` becomes `system`; text parts are joined by newlines unless kept."""
    shown: dict[str, object] = {"role": "system" if message.role == "developer" else message.role}
    if isinstance(message.content, list):
        parts = [part.text or "" for part in message.content]
        shown["content"] = [{"type": "text", "text": text} for text in parts] if keep_parts else "\n".join(parts)
    else:
        shown["content"] = message.content
    if message.name is not None:
        shown["name"] = message.name
    reasoning = message.reasoning_content if message.reasoning_content is not None else message.reasoning
    if reasoning is not None:
        shown["reasoning_content"] = reasoning
    return shown
