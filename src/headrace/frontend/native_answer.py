"""The native replies: the dict {text, output_ids, meta_info[, index]} of /generate and `Engine.generate`, and {embedding, meta_info[, index]} of
/encode and `Engine.encode` (docs/http-api.md).

Made from a `SampleUpdate`; nothing else reads such a dict. Pure functions, and `NativeStream`, which belongs to one call.
"""

from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any

import msgspec

from headrace.frontend.sample_update import SampleLogprobs, SampleUpdate, finite
from headrace.media_kinds import MediaKind
from headrace.messages.outputs import FinishReason, SpeculationCounts
from headrace.messages.packing import unpack_float32

NativeAnswer = dict[str, Any]
encode = msgspec.json.Encoder().encode

_POOLED_META = (
    "id",
    "finish_reason",
    "prompt_tokens",
    "cached_tokens",
    "weight_version",
    "weight_versions",
    "e2e_latency",
    "queue_time",
)


class NativeStream:
    """Makes the replies of a streaming call. incremental: each has only new output, otherwise all output of its sample so far."""

    def __init__(self, incremental: bool) -> None:
        self._incremental = incremental
        self._so_far: dict[int, tuple[str, list[int], SampleLogprobs | None]] = {}

    def answer(self, update: SampleUpdate) -> NativeAnswer:
        text, ids, logprobs = update.text, update.ids, update.logprobs
        if not self._incremental and not update.is_progress:
            if (before := self._so_far.get(update.index)) is not None:
                text, ids = before[0] + text, before[1] + ids
                logprobs = logprobs.following(before[2]) if logprobs is not None and before[2] is not None else None
            self._so_far[update.index] = text, ids, logprobs
        return _answer(update, text, ids, logprobs)


def whole_answer(
    updates: Sequence[SampleUpdate], beside: NativeAnswer | None = None
) -> NativeAnswer | list[NativeAnswer]:
    """The reply of a call that does not stream: of its only sample, or a list of all in order. beside: more fields of each."""
    answers = [native_answer(update) | (beside or {}) for update in updates]
    return answers if updates[0].is_listed else answers[0]


def answer_pieces(updates: Sequence[SampleUpdate], beside: NativeAnswer) -> Iterator[bytes]:
    """`whole_answer` as JSON in pieces, for one that is long."""
    begin = b"[" if updates[0].is_listed else b""
    for update in updates:
        answer = native_answer(msgspec.structs.replace(update, logprobs=None, hidden_states=None)) | beside
        meta = answer.pop("meta_info")
        yield begin + encode(answer)[:-1] + b',"meta_info":' + encode(meta)[:-1]
        lists = [*_logprob_lists(update.logprobs)] if update.logprobs is not None else []
        if update.hidden_states is not None:
            lists.append(("hidden_states", _hidden_rows(update.hidden_states, update.hidden_size)))
        for name, parts in lists:
            before = b",%b:[" % encode(name)
            for part in filter(None, parts):
                yield before + encode(part)[1:-1]
                before = b","
            yield b"]" if before == b"," else before + b"]"
        yield b"}}"
        begin = b","
    if updates[0].is_listed:
        yield b"]"


def pooled_answers(updates: Sequence[SampleUpdate]) -> NativeAnswer | list[NativeAnswer]:
    """The reply of a call whose inputs became vectors: of its only input, or a list of all in order."""
    answers = [pooled_answer(update) for update in updates]
    return answers if updates[0].is_listed else answers[0]


def pooled_answer(update: SampleUpdate) -> NativeAnswer:
    """The reply for one input; `embedding` is None if it failed, and then the finish reason says why."""
    meta = _meta_info(update)
    answer: NativeAnswer = {
        "embedding": unpack_float32(update.pooled) if update.pooled is not None else None,
        "meta_info": {name: meta[name] for name in _POOLED_META if name in meta},
    }
    if update.is_listed:
        answer["index"] = update.index
    return answer


def native_answer(update: SampleUpdate) -> NativeAnswer:
    return _answer(update, update.text, update.ids, update.logprobs)


def _answer(update: SampleUpdate, text: str, ids: list[int], logprobs: SampleLogprobs | None) -> NativeAnswer:
    answer: NativeAnswer = {"text": text, "output_ids": ids, "meta_info": _meta_info(update)}
    for name, parts in _logprob_lists(logprobs) if logprobs is not None else ():
        answer["meta_info"][name] = [*chain.from_iterable(parts)]
    if update.mean_logprob is not None:
        answer["meta_info"]["normalized_prompt_logprob"] = finite(update.mean_logprob)
    if update.hidden_states is not None:
        answer["meta_info"]["hidden_states"] = [
            *chain.from_iterable(_hidden_rows(update.hidden_states, update.hidden_size))
        ]
    if update.progress is not None:
        answer["prompt_progress"] = msgspec.structs.asdict(update.progress)
    if update.is_listed:
        answer["index"] = update.index
    return answer


def _meta_info(update: SampleUpdate) -> dict[str, Any]:
    usage, times = update.usage, update.times
    meta: dict[str, Any] = {
        "id": update.rid,
        "finish_reason": _finish_reason(update.finish) if update.finish is not None else None,
        "prompt_tokens": usage.prompt_tokens,
        "completion_tokens": usage.completion_tokens,
        "cached_tokens": usage.cached_tokens,
        "weight_version": update.weight_version,
        "num_retractions": update.num_retractions,
        "e2e_latency": times.e2e_s,
        "queue_time": times.queue_s,
        "ttft": times.ttft_s,
        "decode_throughput": times.decode_throughput,
    }
    meta |= {kind.tokens_field: count for kind in MediaKind if (count := usage.media_tokens.get(kind))}
    if update.versions:
        meta["weight_versions"] = [msgspec.structs.asdict(one) for one in update.versions]
    if update.speculation is not None:
        meta |= _speculation(update.speculation)
    return meta


def _speculation(counts: SpeculationCounts) -> dict[str, Any]:
    """With SGLang's names. spec_accept_length: tokens that a step with draft tokens gives on average; None before the first."""
    return {
        "spec_verify_ct": counts.num_steps,
        "spec_draft_token_num": counts.num_drafted,
        "spec_accept_token_num": counts.num_right,
        "spec_accept_length": counts.accept_length or None,
        "spec_accept_rate": counts.num_right / counts.num_drafted if counts.num_drafted else None,
    }


def _logprob_lists(logprobs: SampleLogprobs) -> Iterator[tuple[str, Iterator[list[Any]]]]:
    """The name of each list of logprobs, and the list in parts."""
    sides = ("input", logprobs.prompt), ("output", logprobs.output)
    for side, all_of in sides:
        yield f"{side}_token_logprobs", (part.tokens for part in all_of.parts())
    if logprobs.output.top_ids is not None:
        for side, all_of in sides:
            yield f"{side}_top_logprobs", (part.top or [] for part in all_of.parts())
    if logprobs.output.picked_ids is not None:
        for side, all_of in sides:
            yield f"{side}_token_ids_logprobs", (part.picked or [] for part in all_of.parts())


def _hidden_rows(states: bytes, hidden_size: int) -> Iterator[list[list[float]]]:
    row_bytes = 4 * max(1, hidden_size)
    return ([unpack_float32(states[at : at + row_bytes])] for at in range(0, len(states), row_bytes))


def _finish_reason(finish: FinishReason) -> dict[str, Any]:
    match finish.type:
        case "stop":
            return {"type": "stop", "matched": finish.matched}
        case "length":
            return {"type": "length", "length": finish.length}
        case "abort":
            return {"type": "abort", "message": finish.message, "status_code": finish.status_code}
