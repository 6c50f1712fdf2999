"""How much a chat shall think, in the words of every API that clients speak: OpenAI, SGLang, vLLM, llama.cpp, OpenRouter, Anthropic, Ollama.

Owns what these fields mean together; `server/chat/` says what a model makes of it. Pure functions, run in the event loop that serves HTTP.
"""

from dataclasses import dataclass

from headrace.errors import RequestError
from headrace.server.openai.protocol import ChatCompletionRequest, ReasoningFields, ThinkingFields

_BUDGETS = ("thinking_budget", "thinking_token_budget", "thinking_budget_tokens", "reasoning_budget_tokens")
"""The limit of reasoning, as we, vLLM and llama.cpp call it."""

_TRUE = ("1", "true", "yes", "y", "on")


@dataclass(frozen=True, slots=True)
class AskedThinking:
    """What a request asks for. thinking: None = as the template does. budget: None = no limit. is_hint: a budget that cannot be kept is noted,
    not refused. notes: fields that had no effect, or another value."""

    effort: str | None
    thinking: bool | None
    budget: int | None
    is_hint: bool
    notes: tuple[str, ...]


def asked_thinking(request: ChatCompletionRequest) -> AskedThinking:
    """What the fields of a chat mean together. Raises RequestError that names the one at fault."""
    reasoning, thinking = request.reasoning or ReasoningFields(), request.thinking or ThinkingFields()
    notes = [
        f"{name}.{member}"
        for name, given, members in (
            ("reasoning", reasoning, ("summary", "generate_summary")),
            ("thinking", thinking, ("clear_thinking", "display")),
        )
        for member in members
        if getattr(given, member) is not None
    ]
    level = request.think if isinstance(request.think, str) and request.think else None
    efforts = {"reasoning.effort": reasoning.effort, "reasoning_effort": request.reasoning_effort, "think": level}
    effort = next((value for value in efforts.values() if value not in (None, "default")), None)
    notes += [
        name if effort is None else f"{name}={effort}" for name, value in efforts.items() if value not in (None, effort)
    ]
    switch = _switch(request, reasoning, thinking)
    budget, is_hint = _budget(request), False
    wishes = {"reasoning.max_tokens": reasoning.max_tokens, "thinking.budget_tokens": thinking.budget_tokens}
    for name, value in wishes.items():
        if value is None:
            continue
        if value < 0:
            raise RequestError(f"{name} must be at least 0, got {value}", name)
        if budget is None:
            budget, is_hint = value, True
            switch = True if switch is None and effort is None else switch
        elif budget != value:
            notes.append(f"{name}={budget}")
    return AskedThinking(effort, switch, budget, is_hint, tuple(notes))


def _switch(request: ChatCompletionRequest, reasoning: ReasoningFields, thinking: ThinkingFields) -> bool | None:
    """Whether the model shall think; None = not said. Raises RequestError if two fields contradict each other."""
    enabled = reasoning.enabled
    given = {
        "reasoning.enabled": enabled.strip().lower() in _TRUE if isinstance(enabled, str) else enabled,
        "thinking.type": {"enabled": True, "disabled": False}.get(thinking.type or ""),
        "think": request.think if isinstance(request.think, bool) else True if request.think else None,
    }
    said = {name: value for name, value in given.items() if value is not None}
    if len(set(said.values())) > 1:
        names = list(said)
        raise RequestError(f"{names[0]} and {names[-1]} contradict each other: give one of them", names[-1])
    return next(iter(said.values()), None)


def _budget(request: ChatCompletionRequest) -> int | None:
    """The limit of reasoning that must be kept; None = no limit. Raises RequestError."""
    given = {name: value for name in _BUDGETS if (value := getattr(request, name)) is not None}
    for name, value in given.items():
        if value < -1:
            raise RequestError(f"{name} must be -1 (no limit) or at least 0, got {value}", name)
    if len(set(given.values())) > 1:
        names = list(given)
        raise RequestError(f"{names[0]} and {names[1]} differ: give one of them", names[1])
    value = next(iter(given.values()), -1)
    return None if value == -1 else value
