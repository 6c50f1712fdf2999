"""What the routes of this folder share: fields of requests, what the served model can do, vectors as JSON, long replies in pieces.

Runs in the event loop that serves HTTP.
"""

import base64
import math
import re
import sys
from array import array
from collections.abc import Iterable, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from headrace.checkpoint.pooling import PoolingConfig
from headrace.errors import RequestError
from headrace.frontend.sample_update import SampleUpdate
from headrace.frontend.tokenize import WRONG_KIND
from headrace.messages.packing import unpack_float32
from headrace.server.context import ServedModel, ServingContext
from headrace.server.http import Exchange
from headrace.server.openai.base import PromptTokensDetails

_CANNOT = {
    "embed": "makes no embeddings",
    "classify": "does not classify",
    None: "makes no embeddings and does not classify",
}


def _kind_and_routes(pooling: PoolingConfig | None) -> tuple[str, str]:
    if pooling is None:
        return "a model that generates text", "/v1/chat/completions or /v1/completions"
    if pooling.task == "embed":
        return "an embedding model", "/v1/embeddings"
    kind = "a cross-encoder" if pooling.is_pair else "a reward model" if pooling.dimensions == 1 else "a classifier"
    return kind, "/v1/rerank or /v1/score" if scores_pairs(pooling) else "/classify"


def described(model: ServedModel) -> str:
    """The kind of a model, with the name of its architecture: "an embedding model (BertModel)"."""
    shown = f" ({model.architectures[0]})" if model.architectures else ""
    return f"{_kind_and_routes(model.pooling)[0]}{shown}"


def wrong_kind(model: ServedModel, cannot: str) -> RequestError:
    """The error for a request that the model cannot serve. cannot: what it does not do, such as "does not generate text"."""
    message = f"this model {cannot}: it is {described(model)}; use {_kind_and_routes(model.pooling)[1]}"
    return RequestError(message, "model", WRONG_KIND)


def pooling_of(model: ServedModel, task: Literal["embed", "classify"] | None = None) -> PoolingConfig:
    """What it makes of a text. Raises RequestError if that is more text, or not what `task` says."""
    if model.pooling is None or task not in (None, model.pooling.task):
        raise wrong_kind(model, _CANNOT[task])
    return model.pooling


async def refuse_to_generate(exchange: Exchange) -> None:
    """The handler of routes that generate, for a model that does not."""
    raise wrong_kind(exchange.context.model, "does not generate text")


def check_normalize(asked: bool | None, pooling: PoolingConfig) -> None:
    """Raises RequestError unless the embeddings are as asked; None = as they are."""
    if asked not in (None, pooling.normalize):
        always = "always" if pooling.normalize else "never"
        raise RequestError(f"normalize: the embeddings of this model are {always} normalized", "normalize")


def scores_pairs(pooling: PoolingConfig | None) -> bool:
    """Whether it gives one score to a query and a document."""
    return pooling is not None and pooling.task == "classify" and pooling.is_pair and pooling.dimensions == 1


_OUR_NAME = re.compile(r"^(text|input_ids)\b")

GivenInput = Annotated[str | list[str | int | list[int]], Meta(extra_json_schema={"minItems": 1})]
"""A text, texts, token ids, or lists of token ids."""


class PooledRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fields of all these routes; None = not set.

    model: "" and "default" mean the served model. truncate_prompt_tokens, truncation_side: vLLM's; of a longer input only so many tokens are
    read, -1 = as many as the model reads. truncate, truncation_direction: TEI's; true is the same as -1. user: accepted without effect.
    """

    model: str = ""
    user: str | None = None
    truncate_prompt_tokens: Annotated[int | None, Meta(extra_json_schema={"minimum": -1})] = None
    truncation_side: Literal["left", "right"] | None = None
    truncate: bool | None = None
    truncation_direction: Literal["left", "right", "Left", "Right"] | None = None
    rid: str | None = None
    priority: int | None = None
    lora_path: str | None = None
    cache_salt: str | None = None
    routed_dp_rank: Annotated[int | None, Meta(extra_json_schema={"minimum": 0})] = None
    data_parallel_rank: Annotated[int | None, Meta(extra_json_schema={"minimum": 0})] = None

    def call_fields(self, context: ServingContext, rid: str, truncates: bool = False) -> dict[str, Any]:
        """These fields as those of an `EmbeddingReqInput`. truncates: the route's default of `truncate`. Raises RequestError, NotFoundError."""
        most = self.truncate_prompt_tokens
        if most is None and (truncates if self.truncate is None else self.truncate):
            most = -1
        elif most is not None and self.truncate is False:
            raise RequestError("truncate is false, but truncate_prompt_tokens is set", "truncate")
        sides = {side.lower() for side in (self.truncation_side, self.truncation_direction) if side is not None}
        if len(sides) > 1:
            raise RequestError("truncation_side and truncation_direction differ: give one of them", "truncation_side")
        return {
            "rid": rid,
            "truncate_prompt_tokens": most,
            "truncation_side": sides.pop() if sides else "right",
            **self.routing_fields(context),
        }

    def routing_fields(self, context: ServingContext) -> dict[str, Any]:
        """Those that generation has, too. Raises RequestError, NotFoundError."""
        return {
            "priority": self.priority,
            "lora_path": context.chosen_adapter(self.model, self.lora_path),
            "cache_salt": self.cache_salt,
            "routed_dp_rank": self.routed_dp_rank,
            "data_parallel_rank": self.data_parallel_rank,
        }


class PooledUsage(msgspec.Struct, frozen=True, omit_defaults=True):
    """Token counts of a reply; special tokens count. prompt_tokens_details: if any were found in the prefix cache."""

    prompt_tokens: int
    total_tokens: int
    prompt_tokens_details: PromptTokensDetails | None = None


def usage_of(context: ServingContext, updates: Iterable[SampleUpdate]) -> PooledUsage:
    """The tokens of all inputs, and of the outputs of a model that generates."""
    num_tokens = num_output = num_cached = 0
    for update in updates:
        num_tokens += update.usage.prompt_tokens
        num_output += update.usage.completion_tokens
        num_cached += update.usage.cached_tokens
    details = PromptTokensDetails(num_cached) if num_cached and context.args.enable_cache_report else None
    return PooledUsage(num_tokens, num_tokens + num_output, details)


def given_input(param: str, given: str | list[str | int | list[int]]) -> dict[str, Any]:
    """`text` or `input_ids` of an `EmbeddingReqInput`. Raises RequestError."""
    if isinstance(given, str):
        return {"text": given}
    if not given:
        raise RequestError(f"{param} is empty", param)
    kinds = set(map(type, given))
    if len(kinds) > 1:
        raise RequestError(f"{param} mixes texts, token ids and lists of token ids", param)
    return {"text": given} if kinds == {str} else {"input_ids": given}


def renamed(error: RequestError, param: str) -> RequestError:
    """The error with our own names of the inputs replaced by `param`."""
    if error.param in ("text", "input_ids"):
        error.message = _OUR_NAME.sub(param, error.message)
        error.param = param
    return error


def vector_json(pooled: bytes, as_base64: bool = False) -> str | list[float]:
    """float32[n] bytes as JSON holds them: a list of numbers, or base64 of the little-endian bytes."""
    return base64.b64encode(pooled).decode() if as_base64 else unpack_float32(pooled)


def normalized(pooled: bytes) -> bytes:
    """The vector with length 1; one of length 0 stays as it is."""
    values = unpack_float32(pooled)
    length = math.sqrt(math.fsum(value * value for value in values))
    if length == 0.0:
        return pooled
    unit = array("f", [value / length for value in values])
    if sys.byteorder == "big":
        unit.byteswap()
    return unit.tobytes()


def sigmoid(logit: float) -> float:
    """1 / (1 + e^-x), without an overflow for a large |x|."""
    if logit >= 0:
        return 1.0 / (1.0 + math.exp(-logit))
    power = math.exp(logit)
    return power / (1.0 + power)


def softmax(logits: Sequence[float]) -> list[float]:
    """Probabilities that add up to 1."""
    top = max(logits)
    powers = [math.exp(logit - top) for logit in logits]
    total = math.fsum(powers)
    return [power / total for power in powers]
