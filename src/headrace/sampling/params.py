"""Sampling parameters: as requested (`SamplingParams`) and as used (`ResolvedSamplingParams`).

Owns the names, defaults and bounds of the sampling parameters (docs/python.md). No torch: the front end and the scheduler import it.
Validation is visible in the type: only `SamplingParams.resolve` makes a `ResolvedSamplingParams`.
"""

import math
from collections.abc import Sequence, Set, Sized
from itertools import chain
from typing import TypeVar

import msgspec

from headrace.errors import RequestError
from headrace.messages.grammar import GrammarSpec
from headrace.sampling.grammar_fields import GrammarFields

T = TypeVar("T", int, float)

GREEDY_BELOW = 1e-6
"""A temperature below this means greedy: dividing logits by it would overflow float32."""

MIN_REPETITION_PENALTY = 1e-5
"""Logits are divided by the penalty: a smaller one would overflow float32."""

MAX_STOP_STRINGS = 32
MAX_STOP_LENGTH = 4096
MAX_STOP_CHARS = 8192
"""Most characters of all stop strings of a sample together, and of all its bad words."""
MAX_STOP_TOKEN_IDS = 1024
MAX_LOGIT_BIAS = 1024
MAX_BAD_WORDS = 256
MAX_TOP_LOGPROBS = 256
LOGGED_GRAMMAR_CHARS = 200
MAX_SEQUENCES = 16
MAX_SEQUENCE_TOKENS = 64
MAX_SEED = 2**63 - 1
NO_SEED = -1
"""What llama.cpp's clients send for 'no seed'."""


class GenerationDefaults(msgspec.Struct, frozen=True):
    """Defaults from the model's generation_config; None = not set."""

    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None


class ThinkingBudget(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """At most `num_tokens` tokens of reasoning, then `end_id` if nothing else forbids it.

    end_ids: other tokens that end reasoning. begins: sequences of token ids, of which each begins reasoning. is_open: the prompt ends within it.
    Tokens that begin and end reasoning are not counted.
    """

    num_tokens: int
    end_id: int
    end_ids: tuple[int, ...] = ()
    begins: tuple[tuple[int, ...], ...] = ()
    is_open: bool = False

    def check(self, vocab_size: int) -> None:
        """Raises RequestError for values out of bounds."""
        name = "thinking_budget"
        if self.num_tokens < 0:
            raise RequestError(f"{name}.num_tokens must be at least 0, got {self.num_tokens}", name)
        sizes = [len(self.end_ids), *map(len, self.begins)]
        if len(self.begins) > MAX_SEQUENCES or max(sizes) > MAX_SEQUENCE_TOKENS or not all(self.begins):
            raise RequestError(
                f"{name}: at most {MAX_SEQUENCES} sequences, with 1 to {MAX_SEQUENCE_TOKENS} ids each", name
            )
        check_vocabulary(name, [self.end_id, *self.end_ids, *chain.from_iterable(self.begins)], vocab_size)


class SamplingParams(GrammarFields, frozen=True, kw_only=True, omit_defaults=True, forbid_unknown_fields=True):
    """Parameters as requested. None, or an empty string, list or object, means not set: the value of generation_config applies, then our default.

    top_k: 0 and -1 = off. sampling_seed: SGLang's name for `seed`; -1 = none. What the output must match: see `GrammarFields`.
    """

    max_new_tokens: int | None = None
    min_new_tokens: int = 0
    stop: str | list[str] | None = None
    stop_token_ids: list[int] | None = None
    stop_regex: str | list[str] | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    typical_p: float | None = None
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float | None = None
    n: int = 1
    ignore_eos: bool = False
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    no_stop_trim: bool = False
    logit_bias: dict[str, float] | None = None
    bad_words: list[str] | None = None
    allowed_token_ids: list[int] | None = None
    thinking_budget: ThinkingBudget | None = None
    seed: int | None = None
    sampling_seed: int | None = None
    stream_interval: int | None = None

    def stop_strings(self) -> tuple[str, ...]:
        return _as_tuple(self.stop)

    def stop_patterns(self) -> tuple[str, ...]:
        return _as_tuple(self.stop_regex)

    def check_sizes(self, vocab_size: int) -> None:
        """Raises RequestError if a field has too many items or characters. Checks only lengths."""
        for name, given in (("stop", self.stop), ("stop_regex", self.stop_regex)):
            listed = [given] if isinstance(given, str) else given or []
            _at_most(MAX_STOP_STRINGS, listed, name, "strings")
            longest = max(map(len, listed), default=0)
            _require(longest <= MAX_STOP_LENGTH, name, f"{name} is longer than {MAX_STOP_LENGTH} characters")
        # Each bad word is tokenized in two ways: at the start of a text and after a space.
        _at_most(MAX_BAD_WORDS // 2, self.bad_words, "bad_words", "words")
        for name, strings in (("stop", self.stop_strings()), ("bad_words", self.bad_words or [])):
            num_chars = sum(map(len, strings))
            _require(
                num_chars <= MAX_STOP_CHARS,
                name,
                f"the strings of {name} have {num_chars} characters together, at most {MAX_STOP_CHARS}",
            )
        _at_most(MAX_STOP_TOKEN_IDS, self.stop_token_ids, "stop_token_ids", "ids")
        _at_most(vocab_size, self.allowed_token_ids, "allowed_token_ids", "ids")
        _at_most(MAX_LOGIT_BIAS, self.logit_bias, "logit_bias", "entries")

    def _checked_max_new_tokens(self, default: int, room_tokens: int) -> int:
        """`max_new_tokens`; if not set, `default` or what the context has room for. Checks it and `min_new_tokens`. Raises RequestError."""
        wanted = self.max_new_tokens
        most = min(default, room_tokens) if wanted is None else wanted
        _require(most >= 0, "max_new_tokens", f"max_new_tokens must be at least 0, got {most}")
        _require(
            most <= room_tokens,
            "max_new_tokens",
            f"max_new_tokens is {most} but only {room_tokens} tokens of the context are left after the prompt",
        )
        _require(
            0 <= self.min_new_tokens <= most,
            "min_new_tokens",
            f"min_new_tokens must be between 0 and max_new_tokens ({most}), got {self.min_new_tokens}",
        )
        return most

    def _asked_seed(self) -> int | None:
        """The seed, from either field name; None = none. Raises RequestError."""
        given = {}
        for name, value in (("seed", self.seed), ("sampling_seed", self.sampling_seed)):
            if value is not None and value != NO_SEED:
                _require(0 <= value <= MAX_SEED, name, f"{name} must be between 0 and 2**63 - 1, got {value}")
                given[name] = value
        _require(len(set(given.values())) < 2, "sampling_seed", "seed and sampling_seed differ: give one of them")
        return next(iter(given.values()), None)

    def resolve(
        self,
        *,
        defaults: GenerationDefaults,
        vocab_size: int,
        default_max_new_tokens: int,
        room_tokens: int,
        bad_word_ids: Sequence[Sequence[int]],
        grammar: GrammarSpec | None,
        seed: int,
        max_n: int,
    ) -> "ResolvedSamplingParams":
        """Check every bound and fill in what is not set.

        defaults: of the model's generation_config. default_max_new_tokens: of this endpoint.
        room_tokens: context length minus prompt length, >= 0.
        bad_word_ids: `bad_words` tokenized by the caller. grammar: what `grammar_spec` gave. seed: used if the request sets none.
        Raises RequestError that names the parameter.
        """
        temperature = _first(self.temperature, defaults.temperature, 1.0)
        top_p = _first(self.top_p, defaults.top_p, 1.0)
        top_k = _first(self.top_k, defaults.top_k, -1) or -1  # 0 is off, too
        min_p = _first(self.min_p, defaults.min_p, 0.0)
        repetition_penalty = _first(self.repetition_penalty, defaults.repetition_penalty, 1.0)
        typical_p = _first(self.typical_p, 1.0)
        _between("temperature", temperature, 0.0, math.inf)
        _between("top_p", top_p, 0.0, 1.0, low_open=True)
        _require(top_k == -1 or 1 <= top_k < 2**31, "top_k", f"top_k must be -1 or 0 (off) or at least 1, got {top_k}")
        _between("min_p", min_p, 0.0, 1.0)
        _between("typical_p", typical_p, 0.0, 1.0, low_open=True)
        _between("frequency_penalty", self.frequency_penalty, -2.0, 2.0)
        _between("presence_penalty", self.presence_penalty, -2.0, 2.0)
        _between("repetition_penalty", repetition_penalty, 0.0, 2.0, low_open=True)
        _require(
            repetition_penalty >= MIN_REPETITION_PENALTY,
            "repetition_penalty",
            f"repetition_penalty must be at least {MIN_REPETITION_PENALTY:g}, got {repetition_penalty}",
        )
        _require(1 <= self.n <= max_n, "n", f"n must be between 1 and {max_n}, got {self.n}")
        max_new_tokens = self._checked_max_new_tokens(default_max_new_tokens, room_tokens)
        asked_seed = self._asked_seed()
        if self.stream_interval is not None:
            _require(1 <= self.stream_interval <= 4096, "stream_interval", "stream_interval must be between 1 and 4096")
        self.check_sizes(vocab_size)
        for name, strings in (("stop", self.stop_strings()), ("stop_regex", self.stop_patterns())):
            _require(all(strings), name, f"{name} must not be empty")
        stop_token_ids = _ids("stop_token_ids", self.stop_token_ids, vocab_size)
        allowed = _ids("allowed_token_ids", self.allowed_token_ids, vocab_size)
        if self.thinking_budget is not None:
            self.thinking_budget.check(vocab_size)
        _require(
            len(bad_word_ids) <= MAX_BAD_WORDS,
            "bad_words",
            f"at most {MAX_BAD_WORDS} bad words, got {len(bad_word_ids)}",
        )
        return ResolvedSamplingParams(
            max_new_tokens=max_new_tokens,
            min_new_tokens=self.min_new_tokens,
            stop=self.stop_strings(),
            stop_regex=self.stop_patterns(),
            stop_token_ids=stop_token_ids,
            temperature=0.0 if temperature < GREEDY_BELOW else temperature,
            top_p=top_p,
            top_k=min(top_k, vocab_size),
            min_p=min_p,
            typical_p=typical_p,
            frequency_penalty=self.frequency_penalty,
            presence_penalty=self.presence_penalty,
            repetition_penalty=repetition_penalty,
            ignore_eos=self.ignore_eos,
            logit_bias=_logit_bias(self.logit_bias, vocab_size),
            bad_words=tuple(tuple(ids) for ids in bad_word_ids),
            allowed_token_ids=allowed,
            thinking_budget=self.thinking_budget,
            seed=seed if asked_seed is None else asked_seed,
            stream_interval=self.stream_interval or 0,
            skip_special_tokens=self.skip_special_tokens,
            spaces_between_special_tokens=self.spaces_between_special_tokens,
            no_stop_trim=self.no_stop_trim,
            grammar=grammar,
        )


class ResolvedSamplingParams(msgspec.Struct, frozen=True, kw_only=True, omit_defaults=True):
    """Checked parameters of one sample, every field set.

    temperature 0.0 = greedy. top_k -1 = off. stream_interval 0 = the server's. `allowed_token_ids` empty = all.
    bad_words: token id sequences that must not appear. logit_bias: (token id, bias) pairs. grammar: what the output must match; None = anything.
    """

    max_new_tokens: int
    seed: int
    min_new_tokens: int = 0
    stop: tuple[str, ...] = ()
    stop_regex: tuple[str, ...] = ()
    stop_token_ids: tuple[int, ...] = ()
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    typical_p: float = 1.0
    frequency_penalty: float = 0.0
    presence_penalty: float = 0.0
    repetition_penalty: float = 1.0
    ignore_eos: bool = False
    logit_bias: tuple[tuple[int, float], ...] = ()
    bad_words: tuple[tuple[int, ...], ...] = ()
    allowed_token_ids: tuple[int, ...] = ()
    thinking_budget: ThinkingBudget | None = None
    stream_interval: int = 0
    skip_special_tokens: bool = True
    spaces_between_special_tokens: bool = True
    no_stop_trim: bool = False
    grammar: GrammarSpec | None = None

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0.0

    def described(self) -> str:
        """As JSON for the log, with only the beginning of a grammar's text."""
        grammar = self.grammar
        if grammar is None or len(grammar.text) <= LOGGED_GRAMMAR_CHARS:
            return msgspec.json.encode(self).decode()
        text = f"{grammar.text[:LOGGED_GRAMMAR_CHARS]}... ({len(grammar.text)} characters)"
        cut = msgspec.structs.replace(self, grammar=msgspec.structs.replace(grammar, text=text))
        return msgspec.json.encode(cut).decode()

    def check_allowed(self, eos_token_ids: Set[int]) -> None:
        """Raises RequestError if none of the allowed tokens can be sampled. eos_token_ids: of the model."""
        if not self.allowed_token_ids:
            return
        forbidden = {ids[0] for ids in self.bad_words if len(ids) == 1}
        if self.min_new_tokens:
            forbidden.update(self.stop_token_ids, () if self.ignore_eos else eos_token_ids)
        if forbidden.issuperset(self.allowed_token_ids):
            raise RequestError(
                "allowed_token_ids: bad_words and min_new_tokens together forbid every one of these tokens",
                "allowed_token_ids",
            )


def _first(*values: T | None) -> T:
    return next(v for v in values if v is not None)


def _as_tuple(value: str | list[str] | None) -> tuple[str, ...]:
    if not value:
        return ()
    return (value,) if isinstance(value, str) else tuple(value)


def _require(holds: bool, param: str, message: str) -> None:
    if not holds:
        raise RequestError(message, param)


def _at_most(limit: int, items: Sized | None, param: str, what: str) -> None:
    if items is not None and len(items) > limit:
        raise RequestError(f"at most {limit} {what} in {param}, got {len(items)}", param)


def _between(param: str, value: float, low: float, high: float, low_open: bool = False) -> None:
    inside = math.isfinite(value) and (low < value if low_open else low <= value) and value <= high
    bounds = f"{'(' if low_open else '['}{low:g}, {high:g}]" if high != math.inf else f"finite and at least {low:g}"
    _require(inside, param, f"{param} must be {'in ' if high != math.inf else ''}{bounds}, got {value}")


def check_vocabulary(param: str, ids: Sequence[int], vocab_size: int) -> None:
    """Raises RequestError that names the first id that is not one of the vocabulary."""
    if ids and (min(ids) < 0 or max(ids) >= vocab_size):
        wrong = next(token_id for token_id in ids if not 0 <= token_id < vocab_size)
        raise RequestError(f"{param}: {wrong} is not a token id (0 to {vocab_size - 1})", param)


def _ids(param: str, ids: list[int] | None, vocab_size: int) -> tuple[int, ...]:
    check_vocabulary(param, ids or (), vocab_size)
    return tuple(dict.fromkeys(ids or ()))


def _logit_bias(bias: dict[str, float] | None, vocab_size: int) -> tuple[tuple[int, float], ...]:
    if not bias:
        return ()
    pairs = []
    for key, value in bias.items():
        _require(
            key.isascii() and key.isdigit() and len(key) < 10,
            "logit_bias",
            f"logit_bias: {key[:20]!r} is not a token id",
        )
        _require(int(key) < vocab_size, "logit_bias", f"logit_bias: {key} is not a token id (0 to {vocab_size - 1})")
        _between("logit_bias", value, -100.0, 100.0)
        pairs.append((int(key), value))
    return tuple(pairs)
