"""The types of the arguments of `Engine` and `Runtime`.

Owns no defaults and no checks: those are of the structs that the arguments become. A test compares the names and types with theirs.
"""

from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict

Messages = Sequence[Mapping[str, Any]]
"""Messages of a chat completion: `{"role": ..., "content": ...}`."""

Tools = Sequence[Mapping[str, Any]]
"""Tools of a chat completion: `{"type": "function", "function": {"name", "description", "parameters"}}`."""


class ChatOptions(TypedDict, total=False):
    """Fields of a chat completion, those that are usual from Python; see docs/http-api.md. None = not set."""

    # sampling
    max_tokens: int | None
    min_tokens: int | None
    temperature: float | None
    top_p: float | None
    top_k: int | None
    min_p: float | None
    frequency_penalty: float | None
    presence_penalty: float | None
    repetition_penalty: float | None
    seed: int | None
    stop: str | list[str] | None
    stop_regex: str | list[str] | None
    stop_token_ids: list[int] | None
    ignore_eos: bool | None
    no_stop_trim: bool | None
    skip_special_tokens: bool | None
    logit_bias: dict[str, float] | None
    bad_words: list[str] | None
    allowed_token_ids: list[int] | None
    # what the reply must match
    response_format: dict[str, Any] | None
    json_schema: str | dict[str, object] | bool | None
    regex: str | None
    ebnf: str | None
    lark: str | None
    choice: list[str] | None
    structural_tag: str | dict[str, object] | None
    grammar_after: str | None
    # tools and reasoning
    tool_choice: str | dict[str, object] | None
    parallel_tool_calls: bool | None
    reasoning_effort: Literal["none", "minimal", "low", "medium", "high", "xhigh", "max"] | None
    thinking_budget: int | None
    separate_reasoning: bool | None
    stream_reasoning: bool | None
    include_reasoning: bool | None
    # the prompt
    chat_template_kwargs: dict[str, object] | None
    continue_final_message: bool | None
    add_generation_prompt: bool | None
    truncate_prompt_tokens: int | None
    # routing
    model: str
    lora_path: str | None
    session_params: dict[str, Any] | None
    rid: str | None
    priority: int | None
    cache_salt: str | None
