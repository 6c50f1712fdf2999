"""What the requests and replies of these routes share. Runs in the event loop that serves HTTP."""

import re
from collections.abc import Iterable
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from headrace.errors import RequestError
from headrace.frontend.sample_update import SampleUpdate
from headrace.server.context import ServingContext
from headrace.server.openai.base import PromptTokensDetails

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
        return {
            "rid": rid,
            "truncate_prompt_tokens": self._most_tokens(truncates),
            "truncation_side": self._cut_side(),
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

    def _most_tokens(self, truncates: bool) -> int | None:
        if self.truncate_prompt_tokens is not None:
            if self.truncate is False:
                raise RequestError("truncate is false, but truncate_prompt_tokens is set", "truncate")
            return self.truncate_prompt_tokens
        return -1 if (truncates if self.truncate is None else self.truncate) else None

    def _cut_side(self) -> str:
        sides = {side.lower() for side in (self.truncation_side, self.truncation_direction) if side is not None}
        if len(sides) > 1:
            raise RequestError("truncation_side and truncation_direction differ: give one of them", "truncation_side")
        return sides.pop() if sides else "right"

    def shown_model(self, context: ServingContext) -> str:
        """The model's name in the reply: that of the request, or of the served model if it gives none."""
        return context.shown_model(self.model)


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
