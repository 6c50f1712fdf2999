"""A call of an embedding model or a classifier (`EmbeddingReqInput`): its inputs, and the tokens of each as the scheduler gets them.

Owns the shape of such a call, and the checks that need the number of tokens; `prompts` and `tokenize` do the same for calls that generate.
Large calls are split in a thread.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

from headrace.checkpoint.pooling import PoolingConfig
from headrace.config.server_args import ServerArgs
from headrace.errors import ContextLengthError, RequestError
from headrace.frontend.inputs import PromptInput, check_text, id_lists, is_large, only_input
from headrace.frontend.prompts import (
    MAX_CALL_BYTES,
    Call,
    CallLimits,
    PromptInputs,
    check_routing,
    namespaces_of,
    refuse_text,
    rids_of,
)
from headrace.frontend.records import RequestLog
from headrace.frontend.request_state import CallState, engine_request
from headrace.messages.control import ReadyInfo
from headrace.messages.packing import pack_int32
from headrace.messages.requests import EmbeddingReqInput, PoolTask, PromptContent, Room, TokenizedGenerateReqInput
from headrace.text.batch_tokenizer import AsyncDynamicBatchTokenizer
from headrace.turns import Turns


@dataclass(frozen=True, slots=True)
class Cut:
    """How inputs are brought to a length: at most `most_tokens`, special tokens included, by leaving out tokens of this side. None: they are not."""

    most_tokens: int | None = None
    side: Literal["right", "left"] = "right"


@dataclass(frozen=True, slots=True)
class PooledPrompt:
    """One input of a call. The fields are those of `Prompt`. dimensions: see `PoolTask`."""

    rid: str
    given: PromptInput
    namespace: str
    adapter: str
    dimensions: int
    cut: Cut
    num_samples: ClassVar[int] = 1
    room: ClassVar[Room | None] = None


def split_pooled_call(
    obj: EmbeddingReqInput, limits: CallLimits, pooling: PoolingConfig, cuts_dimensions: bool
) -> Call[PooledPrompt]:
    """Check the shape of a call, and distribute its fields over its inputs. Raises RequestError naming the field.

    cuts_dimensions: whether `dimensions` may be below the model's.
    """
    check_routing(obj, limits)
    inputs = _inputs(obj, limits)
    if inputs.count > limits.max_samples:
        raise RequestError(
            f"the request has {inputs.count} inputs; this server queues at most {limits.max_samples}", "text"
        )
    num_bytes = sum(given.most_bytes(limits.context_length) for given in inputs.given)
    if num_bytes > MAX_CALL_BYTES:
        raise RequestError(
            f"the inputs of this request take {num_bytes} bytes together; the limit is {MAX_CALL_BYTES}: send fewer at once",
            "text",
        )
    if pooling.task == "embed" and any(given.second is not None for given in inputs.given):
        raise RequestError(
            "text: this model makes embeddings of single texts; pairs are for models that score them", "text"
        )
    dimensions = _dimensions(obj.dimensions, pooling, cuts_dimensions)
    cut = _asked_cut(obj, limits.context_length)
    namespaces = namespaces_of(obj, inputs)
    adapters = inputs.spread("lora_path", obj.lora_path, str)
    call_rid, rids = rids_of(obj.rid, inputs)
    prompts = tuple(
        PooledPrompt(rids[i], inputs.given[i], namespaces[i], adapters[i] or "", dimensions, cut)
        for i in range(inputs.count)
    )
    return Call(call_rid, prompts, inputs.is_batch)


def _inputs(obj: EmbeddingReqInput, limits: CallLimits) -> PromptInputs:
    name, value = only_input(obj, "text", "input_ids")
    if isinstance(value, list) and type(value[0]) is not int and len(value) > limits.max_prompts:
        raise RequestError(f"at most {limits.max_prompts} inputs in one request, got {len(value)}", name)
    if obj.input_ids is not None:
        if obj.is_cross_encoder_request:
            raise RequestError("is_cross_encoder_request: pairs are given as text", "is_cross_encoder_request")
        lists, is_batch = id_lists(obj.input_ids, limits.vocab_size)
        return PromptInputs([PromptInput(ids=ids) for ids in lists], is_batch)
    if not limits.has_tokenizer:
        refuse_text("text")
    assert obj.text is not None
    return _texts(obj.text, obj.is_cross_encoder_request)


def _texts(text: str | list[str | list[str]], is_pair: bool) -> PromptInputs:
    """The texts, or pairs of texts. is_pair: a list of two strings is one pair."""
    if is_pair:
        if not isinstance(text, list):
            raise RequestError(
                "text must be a pair of strings, or a list of pairs, with is_cross_encoder_request", "text"
            )
        if all(isinstance(item, str) for item in text):
            return PromptInputs([_pair(text)], False)
        return PromptInputs([_pair(item) for item in text], True)
    if not isinstance(text, list):
        return PromptInputs([_one(text)], False)
    return PromptInputs([_pair(item) if isinstance(item, list) else _one(item) for item in text], True)


def _one(text: object) -> PromptInput:
    if not isinstance(text, str):
        raise RequestError("text must be a string, a list of strings, or a list of pairs of strings", "text")
    check_text("text", text)
    return PromptInput(text=text)


def _pair(item: object) -> PromptInput:
    match item:
        case [str(first), str(second)]:
            check_text("text", first)
            check_text("text", second)
            return PromptInput(text=first, second=second)
        case _:
            raise RequestError("text: a pair is a list of two strings, the query and the document", "text")


def _dimensions(asked: int | None, pooling: PoolingConfig, cuts: bool) -> int:
    """As `PoolTask` has them. Raises RequestError."""
    if asked is None:
        return 0
    if pooling.task != "embed":
        raise RequestError("dimensions: this model classifies; only embeddings can be shortened", "dimensions")
    if not 1 <= asked <= pooling.dimensions:
        raise RequestError(f"dimensions must be between 1 and {pooling.dimensions}, got {asked}", "dimensions")
    if asked == pooling.dimensions:
        return 0
    if not cuts:
        raise RequestError(
            f"dimensions: this model was not made for shorter embeddings than {pooling.dimensions} "
            "(it is no Matryoshka model; the server's operator can allow it with --allow-dimensions)",
            "dimensions",
        )
    return asked


def _asked_cut(obj: EmbeddingReqInput, context_length: int) -> Cut:
    name, asked = "truncate_prompt_tokens", obj.truncate_prompt_tokens
    if asked is None:
        return Cut()
    if asked != -1 and not 1 <= asked <= context_length:
        raise RequestError(f"{name} must be -1 or between 1 and {context_length}, got {asked}", name)
    return Cut(context_length if asked == -1 else asked, obj.truncation_side)


def texts_of(prompts: Sequence[PooledPrompt]) -> list[str | tuple[str, str]]:
    return [
        (prompt.given.text, prompt.given.second) if prompt.given.second is not None else prompt.given.text
        for prompt in prompts
        if prompt.given.text is not None
    ]


class PooledTokenizer:
    def __init__(
        self,
        args: ServerArgs,
        ready: ReadyInfo,
        pooling: PoolingConfig,
        tokenizer: AsyncDynamicBatchTokenizer,
        checks: Turns,
        request_log: RequestLog,
    ) -> None:
        self._pooling = pooling
        self._tokenizer = tokenizer
        self._checks = checks
        self._request_log = request_log
        self._cuts_dimensions = pooling.matryoshka or args.allow_dimensions
        self._most_tokens = min(ready.context_length, ready.max_total_tokens)
        self._task = PoolTask(reads_all=pooling.pooling != "last")

    async def split(self, obj: EmbeddingReqInput, limits: CallLimits) -> Call[PooledPrompt]:
        """See `split_pooled_call`. A call with many inputs is checked in a thread, so that it does not block other calls."""
        arguments = obj, limits, self._pooling, self._cuts_dimensions
        if not is_large(obj):
            return split_pooled_call(*arguments)
        return await self._checks.run(lambda: split_pooled_call(*arguments))

    async def tokenize(
        self, call: Call[PooledPrompt], obj: EmbeddingReqInput, state: CallState
    ) -> list[TokenizedGenerateReqInput]:
        """Tokenize and check every input. Returns a request for each sample of `state`. Raises RequestError; then nothing is to be sent."""
        cut = call.prompts[0].cut
        if cut.most_tokens is not None:
            cut = Cut(min(cut.most_tokens, self._most_tokens), cut.side)
        texts = texts_of(call.prompts)
        if self._pooling.lower_case:
            texts = [text.lower() if isinstance(text, str) else (text[0].lower(), text[1].lower()) for text in texts]
        encoded = iter(await self._tokenizer.encode_whole(texts, cut.most_tokens, cut.side) if texts else ())
        requests = []
        for index, (prompt, sample) in enumerate(zip(call.prompts, state.samples, strict=True)):
            if prompt.given.ids is not None:
                content = PromptContent(pack_int32(_cut(prompt.given.ids, cut)))
            else:
                content = next(encoded)
            place = f"input {index}" if call.is_list else "the input"
            self._check(content, prompt.given.field, place)
            sample.num_prompt_tokens = content.num_tokens
            sample.logged_input = self._request_log.input_of(prompt.given, content)
            task = PoolTask(prompt.dimensions, self._task.reads_all) if prompt.dimensions else self._task
            requests.append(engine_request(sample, content, task, namespace=prompt.namespace, priority=obj.priority))
        return requests

    def _check(self, content: PromptContent, field: str, place: str) -> None:
        """place: what messages call it. Raises RequestError."""
        num_tokens, most = content.num_tokens, self._most_tokens
        if not num_tokens:
            raise RequestError(f"{place} has no tokens, so there is nothing to make a vector of", field)
        if num_tokens > most:
            remedy = "input, or have it cut with truncate_prompt_tokens"
            raise ContextLengthError(field, most, f"{place} has {num_tokens} tokens", remedy)


def _cut(ids: list[int], cut: Cut) -> list[int]:
    if cut.most_tokens is None or len(ids) <= cut.most_tokens:
        return ids
    return ids[: cut.most_tokens] if cut.side == "right" else ids[-cut.most_tokens :]
