"""Requests for what belongs between a prompt and a suffix, and `POST /infill` of llama.cpp's server, which editors' plug-ins ask for what belongs
at the cursor. Runs in the event loop that serves HTTP.
"""

import uuid
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Annotated

import msgspec
from msgspec import Meta

from headrace.errors import RequestError
from headrace.frontend.sample_update import SampleUpdate
from headrace.frontend.slots import slot_of
from headrace.messages.requests import GenerateReqInput
from headrace.sampling.params import SamplingParams
from headrace.server.chat.conversation import unsupported
from headrace.server.context import ServingContext
from headrace.server.error_forms import renaming
from headrace.server.http import Exchange, Headers, encode_json
from headrace.server.notes import HeaderNotes, OutputLimit
from headrace.server.sse import failure_frames, frame, stream_reply
from headrace.text.fill_in_middle import FillInMiddle


@dataclass(frozen=True, slots=True)
class Middle:
    """How the model fills in the middle, and the tokens of the suffix."""

    how: FillInMiddle
    suffix: list[int]

    def around(self, prefixes: Sequence[int | list[int]], begins: bool = True) -> list[int | list[int]]:
        """The prompt of a prefix, or one for each of a list of prefixes. begins: as a text of this model begins."""
        if prefixes and isinstance(prefixes[0], list):
            return [self.how.prompt(prefix, self.suffix, begins) for prefix in prefixes if isinstance(prefix, list)]
        return [*self.how.prompt([index for index in prefixes if isinstance(index, int)], self.suffix, begins)]


def stopping(sampling: SamplingParams, how: FillInMiddle) -> SamplingParams:
    """The same parameters, for an output that ends with the middle."""
    if sampling.ignore_eos:
        return sampling
    return msgspec.structs.replace(sampling, stop_token_ids=[*(sampling.stop_token_ids or []), *sorted(how.ends)])


def fill_in_middle(context: ServingContext, param: str) -> FillInMiddle:
    """How the served model does it. param: the field that asks for it. Raises RequestError if it does not."""
    context.check_tokenizer(param)
    found = FillInMiddle.of(context.model.tokenizer)
    if found is None:
        message = f"{param}: this model does not fill in the middle: its tokenizer has no tokens such as <|fim_prefix|>"
        raise unsupported(param, message)
    return found


async def middle_of(context: ServingContext, suffix: str) -> Middle:
    """What a request with a suffix needs. Special tokens that the suffix spells out are text. Raises RequestError."""
    how = fill_in_middle(context, "suffix")
    context.check_text_length("suffix", len(suffix))
    return Middle(how, await context.in_text_thread(lambda: context.model.tokenizer.encode(suffix, False)))


AS_MANY_AS_FIT = -1
RESERVED_TOKENS = 256
"""Kept free for the output if the request gives no limit; the rest of the context may be filled with other files."""

_renamed = renaming(
    {"max_new_tokens": "n_predict", "repetition_penalty": "repeat_penalty", "input_ids": "input_prefix"}
)


class InfillFile(msgspec.Struct, frozen=True, kw_only=True):
    """A part of another file. Fields that are not listed (`time`) are labels of the client's own."""

    text: str
    filename: str = "tmp"


class InfillRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of /infill.

    prompt: the beginning of the middle. input_extra: what stands before all else. n_predict: -1 = as many as fit. response_fields: only these of
    the reply; a / leads into an object. The last six fields tune what only llama.cpp's server has, and are accepted without effect.
    """

    input_prefix: str
    input_suffix: str
    input_extra: list[InfillFile] | None = None
    prompt: str | None = None
    model: str = ""
    stream: bool | None = None
    n_predict: Annotated[int | None, Meta(extra_json_schema={"minimum": -1})] = None
    temperature: Annotated[float | None, Meta(extra_json_schema={"minimum": 0})] = None
    top_k: int | None = None
    top_p: Annotated[float | None, Meta(extra_json_schema={"exclusiveMinimum": 0, "maximum": 1})] = None
    min_p: Annotated[float | None, Meta(extra_json_schema={"minimum": 0, "maximum": 1})] = None
    repeat_penalty: Annotated[float | None, Meta(extra_json_schema={"exclusiveMinimum": 0, "maximum": 2})] = None
    presence_penalty: Annotated[float | None, Meta(extra_json_schema={"minimum": -2, "maximum": 2})] = None
    frequency_penalty: Annotated[float | None, Meta(extra_json_schema={"minimum": -2, "maximum": 2})] = None
    stop: str | list[str] | None = None
    seed: Annotated[int | None, Meta(extra_json_schema={"minimum": -1})] = None
    response_fields: list[str] | None = None
    samplers: object | None = None
    id_slot: object | None = None
    cache_prompt: object | None = None
    n_indent: object | None = None
    t_max_prompt_ms: object | None = None
    t_max_predict_ms: object | None = None

    def sampling_params(self, max_new_tokens: int | None) -> SamplingParams:
        """Under the runtime's names."""
        return SamplingParams(
            max_new_tokens=max_new_tokens,
            temperature=self.temperature,
            top_k=self.top_k,
            top_p=self.top_p,
            min_p=self.min_p,
            repetition_penalty=self.repeat_penalty,
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            stop=self.stop,
            seed=self.seed,
        )


async def infill(noted: HeaderNotes, exchange: Exchange) -> None:
    """The text between prefix and suffix, in the shape of llama.cpp's completions."""
    request = await exchange.read_json(InfillRequest)
    context, rid = exchange.context, f"infill-{uuid.uuid4().hex}"
    how = fill_in_middle(context, "input_suffix")
    before, after, start = request.input_prefix, request.input_suffix, request.prompt or ""
    files = [(one.filename, one.text) for one in request.input_extra or ()]
    context.check_text_length("input_prefix", sum(map(len, (before, after, start, *chain(*files)))))
    wanted = request.n_predict if request.n_predict is not None and request.n_predict >= 0 else RESERVED_TOKENS
    length = context.model.context_length
    room = max(1, length - min(wanted, length // 2))
    tokenizer = context.model.tokenizer
    ids = await context.in_text_thread(lambda: how.prompt_with_files(tokenizer, before, after, start, files, room))
    exchange.name_request(rid)
    asked = None if request.n_predict == AS_MANY_AS_FIT else request.n_predict
    limit = OutputLimit(asked, length, length - len(ids))
    notes = [f"n_predict={limit.least_room}"] if limit.may_be_lowered else []
    call = GenerateReqInput(
        input_ids=[*ids],
        sampling_params=stopping(request.sampling_params(limit.strict), how),
        rid=rid,
        stream=bool(request.stream),
        lora_path=context.adapter_of(request.model),
    )
    updates = context.frontend.generate_request(
        call,
        default_max_new_tokens=limit.default(length),
        caller=exchange.caller,
        slot=slot_of(request.id_slot),
    )

    def shown(update: SampleUpdate) -> dict[str, object]:
        return _chosen(request, _reply(context.model.name, update))

    def frames(update: SampleUpdate) -> bytes:
        return frame(encode_json(shown(update))) + (b"" if update.finish is None else failure_frames(update.finish))

    def headers() -> Headers:
        return noted.headers(notes)

    try:
        if request.stream:
            await stream_reply(exchange, updates, frames, bytes, done=b"", renamed=_renamed, headers=headers)
            return
        (update,) = await exchange.all_of(updates)
        update.raise_failure()
        await exchange.reply_json(shown(update), headers=headers())
    except RequestError as error:
        raise _renamed(error) from None


def _reply(model: str, update: SampleUpdate) -> dict[str, object]:
    """What is new, and after the last the counts and times."""
    usage, finish = update.usage, update.finish
    reply: dict[str, object] = {
        "index": update.index,
        "content": update.text,
        "tokens": [],
        "stop": finish is not None,
        "id_slot": -1,
        "tokens_predicted": usage.completion_tokens,
        "tokens_evaluated": usage.prompt_tokens,
    }
    if finish is None:
        return reply
    word = finish.matched if isinstance(finish.matched, str) else ""
    return reply | {
        "model": model,
        "prompt": "",
        "has_new_line": "\n" in update.text,
        "truncated": False,
        "stop_type": "word" if word else "limit" if finish.type == "length" else "eos",
        "stopping_word": word,
        "tokens_cached": usage.cached_tokens,
        "timings": _timings(update),
    }


def _timings(update: SampleUpdate) -> dict[str, float]:
    usage, times = update.usage, update.times
    spans = {
        "prompt": (usage.prompt_tokens - usage.cached_tokens, times.prompt_s),
        "predicted": (usage.completion_tokens, times.output_s),
    }
    found: dict[str, float] = {"cache_n": usage.cached_tokens}
    for name, (count, seconds) in spans.items():
        found |= {
            f"{name}_n": count,
            f"{name}_ms": 1000 * seconds,
            f"{name}_per_token_ms": 1000 * seconds / count if count else 0.0,
            f"{name}_per_second": count / seconds if seconds else 0.0,
        }
    return found


def _chosen(request: InfillRequest, reply: dict[str, object]) -> dict[str, object]:
    """The fields of the reply that the client asks for, under the names by which it does."""
    if not request.response_fields:
        return reply
    chosen: dict[str, object] = {}
    for path in request.response_fields:
        value: object = reply
        for name in path.split("/"):
            value = value.get(name) if isinstance(value, dict) else None
        if value is not None:
            chosen[path] = value
    return chosen
