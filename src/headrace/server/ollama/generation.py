"""`POST /api/chat` and `POST /api/generate`. Runs in the event loop that serves HTTP."""

import re
import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import msgspec

from headrace.errors import RequestError
from headrace.frontend.sample_update import SampleUpdate
from headrace.grammar.schema_walk import with_one_of_as_any_of
from headrace.messages.requests import GenerateReqInput
from headrace.sampling.params import SamplingParams
from headrace.server.chat.calls import chat_call
from headrace.server.chat.choice_stream import ChoiceStream
from headrace.server.context import ServingContext
from headrace.server.fill_in_middle import middle_of
from headrace.server.http import Exchange, Headers
from headrace.server.notes import HeaderNotes
from headrace.server.ollama.bodies import read_body
from headrace.server.ollama.chat_request import checked_think, conversation_of
from headrace.server.ollama.models import full_name
from headrace.server.ollama.options import check_keep_alive, option_notes, sampling_params
from headrace.server.ollama.protocol import (
    OllamaChatRequest,
    OllamaGenerateRequest,
    OllamaGeneration,
    OllamaMessage,
    OllamaOptions,
)
from headrace.server.ollama.reply import NDJSON, Kind, ReplyWriter, error_line
from headrace.server.output_limit import OutputLimit
from headrace.server.sse import stream_reply

MAX_LOGPROBS = 20

_CHAT = msgspec.json.Decoder(OllamaChatRequest)
_GENERATE = msgspec.json.Decoder(OllamaGenerateRequest)
_NAMES = {
    "max_new_tokens": "options.num_predict",
    "repetition_penalty": "options.repeat_penalty",
    "input_ids": "prompt",
    "json_schema": "format",
    "response_format": "format",
}
_NAME = re.compile(rf"\b({'|'.join(_NAMES)})\b")
_NOT_SUPPORTED = ("template", "context", "width", "height", "steps")
_INSTEAD = {
    "template": "; raw takes a prompt that is complete",
    "context": "; send the conversation to /api/chat",
}
_JSON_OBJECT: dict[str, object] = {"type": "object"}


@dataclass(frozen=True, slots=True)
class _Run:
    """A request that is ready to be generated. choice: the reader of its output. limit: of its tokens."""

    id: str
    updates: AsyncGenerator[SampleUpdate, None]
    choice: ChoiceStream
    limit: OutputLimit


class OllamaGenerationAPI:
    """Handlers of the two routes."""

    def __init__(self, context: ServingContext, noted: HeaderNotes) -> None:
        self.context = context
        self._noted = noted

    async def chat(self, exchange: Exchange) -> None:
        """The next message of a conversation."""
        body, unknown = await read_body(exchange, _CHAT)
        if not body.messages:
            await self._unasked(exchange, body, "chat", unknown)
            return
        try:
            self.context.check_tokenizer("messages")
            run = await self._chat_run(exchange, body, body.messages, body.tools or [])
            await self._answer(exchange, body, "chat", run, unknown)
        except RequestError as error:
            raise _renamed(error) from None

    async def generate(self, exchange: Exchange) -> None:
        """What follows a prompt: as the user's only message, or with `raw` as it is. So it is for models without a chat template, too.

        With a suffix: what belongs between the two.
        """
        body, unknown = await read_body(exchange, _GENERATE)
        for name in _NOT_SUPPORTED:
            if getattr(body, name) not in (None, "", [], 0):
                message = f"{name} is not supported{_INSTEAD.get(name, '')}"
                raise RequestError(message, name, "unsupported_parameter")
        if not body.prompt and not body.suffix:
            await self._unasked(exchange, body, "generate", unknown)
            return
        is_raw = body.raw or body.suffix or (self.context.model.chat_template is None and not body.system)
        try:
            self.context.check_tokenizer("prompt")
            if is_raw and body.images:
                raise RequestError("images: a raw prompt takes none; they need a chat template", "images")
            if is_raw:
                run = await self._raw_run(exchange, body, body.prompt or "")
            else:
                messages = [OllamaMessage(role="system", content=body.system)] if body.system else []
                messages.append(OllamaMessage(role="user", content=body.prompt or "", images=body.images))
                run = await self._chat_run(exchange, body, messages, [])
            await self._answer(exchange, body, "generate", run, unknown)
        except RequestError as error:
            raise _renamed(error) from None

    async def _unasked(self, exchange: Exchange, body: OllamaGeneration, kind: Kind, unknown: list[str]) -> None:
        """A request for nothing loads a model in Ollama, or unloads it with keep_alive 0. Here it is always loaded."""
        self.context.adapter_of(body.model)
        check_keep_alive(body.keep_alive)
        unloads = body.keep_alive in (0, "0", "0s", "0m", "0h")
        reply = self._writer(body, kind, ChoiceStream(None, None)).unasked("unload" if unloads else "load")
        await exchange.reply_json(reply, headers=self._noted.headers([*unknown, *self._option_notes(body)]))

    async def _chat_run(
        self, exchange: Exchange, body: OllamaGeneration, messages: list[OllamaMessage], tools: list[dict[str, object]]
    ) -> _Run:
        model, run_id = self.context.model, _new_id()
        adapter = self.context.adapter_of(body.model)
        reasons = model.output_format is not None and model.output_format.has_reasoning
        think = checked_think(body.think, reasons)
        call = await chat_call(
            self.context,
            conversation_of(messages, tools, think, model.context_length),
            self._sampling(body),
            rid=run_id,
            stream=body.stream is not False,
            lora_path=adapter,
            **_logprob_options(body),
        )
        has_no_limit = body.options is not None and body.options.num_predict is not None
        return _Run(run_id, call.updates(exchange, may_fill_context=has_no_limit), call.choice(), call.limit)

    async def _raw_run(self, exchange: Exchange, body: OllamaGenerateRequest, prompt: str) -> _Run:
        context, run_id = self.context, _new_id()
        if body.system:
            raise RequestError("system: a raw prompt has no system message", "system")
        if body.think:
            raise RequestError("think: a raw prompt decides itself whether the model reasons", "think")
        adapter = context.adapter_of(body.model)
        context.check_text_length("prompt", len(prompt))
        sampling = self._sampling(body)
        tokenizer, middle = context.model.tokenizer, await middle_of(context, body.suffix) if body.suffix else None
        ids: Any = await context.in_text_thread(lambda: tokenizer.encode(prompt, middle is None, middle is None))
        if middle is not None:
            ids, sampling = middle.around(ids), middle.ending(sampling)
        limit, room = (
            OutputLimit(sampling.max_new_tokens, context.model.context_length),
            context.model.context_length - len(ids),
        )
        if limit.asked is not None and limit.asked > room > 0:
            sampling = msgspec.structs.replace(sampling, max_new_tokens=room)
            limit.lowered_to = room
        call = GenerateReqInput(
            input_ids=list(ids),
            sampling_params=sampling,
            rid=run_id,
            stream=body.stream is not False,
            lora_path=adapter,
            **_logprob_options(body),
        )
        updates = context.frontend.generate_request(
            call, default_max_new_tokens=context.model.context_length, caller=exchange.caller
        )
        return _Run(run_id, updates, ChoiceStream(None, None), limit)

    def _sampling(self, body: OllamaGeneration) -> SamplingParams:
        """Also checks the fields that have no effect. Raises RequestError."""
        check_keep_alive(body.keep_alive)
        model = self.context.model
        options = body.options or OllamaOptions()
        return sampling_params(options, model.sampling_defaults, _json_schema(body.format))

    def _option_notes(self, body: OllamaGeneration) -> list[str]:
        return option_notes(body.options or OllamaOptions(), self.context.model.context_length)

    async def _answer(
        self, exchange: Exchange, body: OllamaGeneration, kind: Kind, run: _Run, unknown: list[str]
    ) -> None:
        exchange.name_request(run.id)

        def headers() -> Headers:
            return self._noted.headers([*unknown, *self._option_notes(body), *run.limit.notes("options.num_predict")])

        writer = self._writer(body, kind, run.choice)
        if body.stream is not False:
            await stream_reply(
                exchange,
                run.updates,
                writer.lines,
                bytes,
                done=b"",
                failed=error_line,
                renamed=_renamed,
                headers=headers,
                content_type=NDJSON,
                ping=b"",
            )
            return
        async with exchange.until_client_leaves(), aclosing(run.updates) as updates:
            (update,) = [update async for update in updates]
        await exchange.reply_json(writer.whole(update), headers=headers())

    def _writer(self, body: OllamaGeneration, kind: Kind, choice: ChoiceStream) -> ReplyWriter:
        name = body.model or full_name(self.context.model.name)
        return ReplyWriter(name, kind, choice, self.context.model.tokenizer, bool(body.logprobs))


def _new_id() -> str:
    return f"ollama-{uuid.uuid4().hex}"


def _json_schema(asked: str | dict[str, object] | None) -> dict[str, object] | None:
    """What `format` asks for; None = any text."""
    match asked:
        case None | "":
            return None
        case "json":
            return _JSON_OBJECT
        case str():
            raise RequestError(f'format must be "json" or a JSON schema (an object), got {asked[:50]!r}', "format")
        case _:
            return with_one_of_as_any_of(asked) or None


def _logprob_options(body: OllamaGeneration) -> dict[str, Any]:
    count = body.top_logprobs or 0
    if count and not body.logprobs:
        raise RequestError("top_logprobs needs logprobs: true", "top_logprobs")
    if not 0 <= count <= MAX_LOGPROBS:
        raise RequestError(f"top_logprobs must be between 0 and {MAX_LOGPROBS}, got {count}", "top_logprobs")
    if not body.logprobs:
        return {}
    return {"return_logprob": True, "top_logprobs_num": count, "return_text_in_logprobs": True}


def _renamed(error: RequestError) -> RequestError:
    """The error with our own parameter names replaced by Ollama's."""
    if error.param in _NAMES:
        error.param = _NAMES[error.param]
    error.message = _NAME.sub(lambda found: _NAMES[found[0]], error.message)
    return error
