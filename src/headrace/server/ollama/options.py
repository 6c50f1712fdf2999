"""Ollama's options as sampling parameters.

Owns what each option means here, and Ollama's defaults. Pure functions, run in the event loop that serves HTTP.
"""

import re

from headrace.checkpoint.sampling_defaults import SamplingDefaults
from headrace.errors import RequestError
from headrace.sampling.params import SamplingParams
from headrace.server.ollama.protocol import OllamaOptions

TEMPERATURE, TOP_K, TOP_P = 0.8, 40, 0.9
"""Ollama's defaults, for requests that name no value and models that bring none."""

_PENALTIES = ("repeat_penalty", "presence_penalty", "frequency_penalty")
_REPEAT_LAST_N = 64
"""Ollama's default. It means all tokens here, and so do larger numbers."""
_DURATION = re.compile(r"[-+]?(0|((\d+\.?\d*|\.\d+)(ns|us|µs|ms|s|m|h))+)")
_NEUTRAL: dict[str, tuple[object, ...]] = {
    "mirostat": (None, 0),
    "vocab_only": (None, False),
    "embedding_only": (None, False),
    "rope_frequency_base": (None, 0.0),
    "rope_frequency_scale": (None, 0.0, 1.0),
}
"""Options that are not supported, with the values that ask for nothing. mirostat_tau and mirostat_eta mean nothing without mirostat."""


def sampling_params(
    options: OllamaOptions, defaults: SamplingDefaults, json_schema: dict[str, object] | None
) -> SamplingParams:
    """The sampling parameters of a request. defaults: of the model. json_schema: what the output must match.

    Options about loading a model (num_gpu, num_thread, use_mmap ...) have no effect: it is loaded already. Neither has num_keep: nothing is ever
    dropped from the context. Raises RequestError that names the option.
    """
    check_options(options)
    penalised = options.repeat_last_n != 0
    return SamplingParams(
        max_new_tokens=_limit(options.num_predict),
        stop=options.stop,
        seed=options.seed,
        temperature=_first(options.temperature, defaults.temperature, TEMPERATURE),
        top_k=int(_first(options.top_k, defaults.top_k, TOP_K)),
        top_p=_first(options.top_p, defaults.top_p, TOP_P),
        min_p=options.min_p,
        typical_p=options.typical_p,
        repetition_penalty=options.repeat_penalty if penalised else 1.0,
        presence_penalty=(options.presence_penalty or 0.0) if penalised else 0.0,
        frequency_penalty=(options.frequency_penalty or 0.0) if penalised else 0.0,
        json_schema=json_schema,
    )


def option_notes(options: OllamaOptions, context_length: int) -> list[str]:
    """The options that get another value, for the reply's header: see `server/notes.py`."""
    asked = options.num_ctx
    return [f"options.num_ctx={context_length}"] if asked is not None and asked > context_length else []


def check_options(options: OllamaOptions) -> None:
    """Raises RequestError for an option that is not supported."""
    for name, neutral in _NEUTRAL.items():
        if getattr(options, name) not in neutral:
            raise _unsupported(name, "is not supported")
    if not any(
        getattr(options, name) not in (None, neutral) for name, neutral in zip(_PENALTIES, (1, 0, 0), strict=True)
    ):
        return
    if options.penalize_newline is False:
        raise _unsupported("penalize_newline", "false is not supported: newlines are penalised like any other text")
    if options.repeat_last_n not in (None, 0, -1) and options.repeat_last_n < _REPEAT_LAST_N:
        message = f"must be -1 (all tokens), 0 (no penalty), or at least {_REPEAT_LAST_N}: penalties count all tokens, not the last ones"
        raise _unsupported("repeat_last_n", message)


def check_keep_alive(keep_alive: str | float | None) -> None:
    """Raises RequestError for what is no duration."""
    if isinstance(keep_alive, str) and keep_alive and not _DURATION.fullmatch(keep_alive):
        message = f'keep_alive must be a number of seconds or a duration such as "5m", got {keep_alive[:50]!r}'
        raise RequestError(message, "keep_alive")


def _limit(num_predict: int | None) -> int | None:
    """The most output tokens; None = as many as fit: 0 and -1 mean no limit, -2 a full context."""
    if num_predict is None or -2 <= num_predict <= 0:
        return None
    if num_predict < 0:
        raise RequestError(f"options.num_predict must be at least -2, got {num_predict}", "options.num_predict")
    return num_predict


def _first(*values: float | None) -> float:
    return next(value for value in values if value is not None)


def _unsupported(name: str, why: str) -> RequestError:
    return RequestError(f"options.{name} {why}", f"options.{name}", "unsupported_parameter")
