"""Splits a call (`GenerateReqInput`) into single prompts, where every field is a scalar; `pooled` does so for an `EmbeddingReqInput`.

Owns the shape of a call: which fields may be lists, how they are distributed over the prompts, which are refused by name. Pure functions,
in a thread for large calls.
"""

import uuid
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Generic, NoReturn, TypeVar, cast

from headrace.config.web import PrefillHosts
from headrace.errors import RequestError
from headrace.frontend.inputs import (
    PromptInput,
    check_num_prompts,
    check_text,
    check_token_ids,
    given_inputs,
)
from headrace.frontend.rooms import DisaggregationMode, rooms_of
from headrace.messages.grammar import GrammarSpec
from headrace.messages.namespaces import of_request
from headrace.messages.requests import CallInput, GenerateReqInput, Room, SessionParams
from headrace.sampling.params import MAX_TOP_LOGPROBS, SamplingParams
from headrace.text.stop import MAX_STOP_PATTERNS, compile_stop_patterns

T = TypeVar("T")

MAX_RID_LENGTH = 512
MAX_KEY_LENGTH = 4096
MAX_PREDICTION_CHARACTERS = 65536
"""What comes after them is not looked at."""
MAX_TOKEN_IDS_LOGPROB = 1024
MAX_PRIORITY = 2**31 - 1
MAX_CALL_BYTES = 64 << 20
"""Most bytes to send to the scheduler for one call; every sample carries its prompt and parameters."""

_KINDS: dict[type, tuple[str, str]] = {
    bool: ("a boolean", "booleans"),
    int: ("an integer", "integers"),
    str: ("a string", "strings"),
    SamplingParams: ("an object", "objects"),
    SessionParams: ("an object", "objects"),
}
"""What messages call a value of a type, and several."""


@dataclass(frozen=True, slots=True)
class CallLimits:
    """Limits for checking a call.

    processors: names of the server's custom logit processors. uses_priority: whether the schedule policy uses priorities.
    num_replicas: of --dp-size. has_tokenizer: False = token ids only. uses_predictions: as draft tokens.
    has_grammars: False = --grammar-backend none. context_length: in tokens. has_experts: the model is a mixture.
    disaggregation, bootstrap_port, prefill_hosts: of the options of these names.
    """

    vocab_size: int
    hidden_size: int
    max_n: int
    max_prompts: int
    max_samples: int
    context_length: int
    processors: frozenset[str] = frozenset()
    uses_priority: bool = False
    num_replicas: int = 1
    has_tokenizer: bool = True
    uses_predictions: bool = False
    has_grammars: bool = True
    has_experts: bool = False
    disaggregation: DisaggregationMode = "null"
    bootstrap_port: int = 0
    prefill_hosts: PrefillHosts = field(default_factory=PrefillHosts)


@dataclass(frozen=True, slots=True)
class Prompt:
    """One prompt of a call.

    rid: of this prompt. given: what it contains. logprob_start_len: -1 = logprobs of outputs only. namespace: see TokenizedGenerateReqInput.
    session: the one that the prompt continues. adapter: its name; empty = the base model. grammar: what its outputs must match; None = anything.
    prediction: text that its output may contain, or empty. room: of its first sample, with --disaggregation-mode. wants_mean_logprob: of its own
    tokens.
    """

    rid: str
    given: PromptInput
    sampling: SamplingParams
    return_logprob: bool
    logprob_start_len: int
    top_logprobs_num: int
    token_ids_logprob: tuple[int, ...]
    return_hidden_states: bool
    custom_logit_processor: str
    namespace: str
    session: SessionParams | None = None
    adapter: str = ""
    grammar: GrammarSpec | None = None
    prediction: str = ""
    room: Room | None = None
    wants_mean_logprob: bool = False

    @property
    def num_samples(self) -> int:
        return self.sampling.n


P = TypeVar("P")


@dataclass(frozen=True, slots=True)
class Call(Generic[P]):
    """A checked call. is_list: whether the answer is a list (the input was one, or n > 1). rid: of the whole call."""

    rid: str
    prompts: tuple[P, ...]
    is_list: bool


def split_call(obj: GenerateReqInput, limits: CallLimits) -> Call[Prompt]:
    """Check the shape of a call and distribute its fields over its prompts.

    The time does not depend on `n`. Raises RequestError naming the field.
    """
    if obj.return_progress and not obj.stream:
        message = "return_progress needs stream: true: a reply that comes at once has no progress"
        raise RequestError(message, "return_progress")
    check_routing(obj, limits)
    check_num_prompts(obj, limits.max_prompts)
    inputs = PromptInputs(*given_inputs(obj, limits.vocab_size, limits.hidden_size))
    samplings = _samplings(obj, inputs, limits)
    grammars = _grammars(samplings, limits)
    multiple = any(sampling.n > 1 for sampling in samplings)
    means = inputs.spread("return_normalized_logprob", obj.return_normalized_logprob, bool)
    wanted, starts, tops, picked = _logprobs(obj, inputs, multiple, limits.vocab_size)
    refuse_routed_experts(
        any(inputs.spread("return_routed_experts", obj.return_routed_experts, bool)), limits.has_experts
    )
    hidden = inputs.spread("return_hidden_states", obj.return_hidden_states, bool)
    processors = _processors(obj, inputs, limits.processors)
    namespaces = namespaces_of(obj, inputs)
    sessions = _sessions(obj, inputs, samplings)
    adapters = inputs.spread("lora_path", obj.lora_path, str)
    predictions = _predictions(obj, inputs, limits)
    rooms = rooms_of(
        obj, [sampling.n for sampling in samplings], limits.disaggregation, limits.bootstrap_port, limits.prefill_hosts
    )
    call_rid, rids = rids_of(obj.rid, inputs)
    prompts = tuple(
        Prompt(
            rid=rids[i],
            given=inputs.given[i],
            sampling=samplings[i],
            return_logprob=wanted[i],
            logprob_start_len=max(starts[i], 0) if means[i] else starts[i],
            top_logprobs_num=tops[i],
            token_ids_logprob=picked[i],
            return_hidden_states=hidden[i],
            custom_logit_processor=processors[i] or "",
            namespace=namespaces[i],
            session=sessions[i],
            adapter=adapters[i] or "",
            grammar=grammars[i],
            prediction=predictions[i],
            room=rooms[i],
            wants_mean_logprob=means[i],
        )
        for i in range(inputs.count)
    )
    _check_cost(prompts, limits.context_length)
    return Call(call_rid, prompts, inputs.is_batch or multiple)


def check_routing(obj: CallInput, limits: CallLimits) -> None:
    """Raises RequestError for a replica that does not exist and for a priority that is out of range or not used."""
    field = "data_parallel_rank" if obj.routed_dp_rank is None else "routed_dp_rank"
    if obj.data_parallel_rank not in (None, obj.replica):
        raise RequestError("routed_dp_rank and data_parallel_rank differ: give one of them", "data_parallel_rank")
    if obj.replica is not None and not 0 <= obj.replica < limits.num_replicas:
        raise RequestError(
            f"{field} is {obj.replica}, but the replicas are numbered 0 to {limits.num_replicas - 1}", field
        )
    if obj.priority is not None and not -MAX_PRIORITY <= obj.priority <= MAX_PRIORITY:
        raise RequestError(
            f"priority must be between -{MAX_PRIORITY} and {MAX_PRIORITY}, got {obj.priority}", "priority"
        )
    if obj.priority and not limits.uses_priority:
        raise RequestError("priority needs a server started with --schedule-policy priority", "priority")


def _check_cost(prompts: Sequence[Prompt], context_length: int) -> None:
    """Raises RequestError when the messages of all samples together exceed MAX_CALL_BYTES."""
    num_bytes = sum(prompt.sampling.n * _sample_bytes(prompt, context_length) for prompt in prompts)
    if num_bytes > MAX_CALL_BYTES:
        raise RequestError(
            f"the samples of this request take {num_bytes} bytes together; the limit is {MAX_CALL_BYTES}: "
            "reduce n, or send the prompts one by one",
            "n",
        )


def _sample_bytes(prompt: Prompt, context_length: int) -> int:
    """Approximate upper bound of the bytes that one sample of `prompt` takes in a message."""
    sampling = prompt.sampling
    strings = (*sampling.stop_strings(), *sampling.stop_patterns(), *(sampling.bad_words or ()), prompt.namespace)
    numbers = (sampling.stop_token_ids, sampling.allowed_token_ids, prompt.token_ids_logprob, sampling.logit_bias)
    return (
        prompt.given.most_bytes(context_length)
        + 4 * sum(map(len, strings))
        + 16 * sum(len(items) for items in numbers if items)
        + (_most_utf8_bytes(prompt.grammar.text) if prompt.grammar is not None else 0)
        + 4 * min(_most_utf8_bytes(prompt.prediction), context_length)
    )


def _most_utf8_bytes(text: str) -> int:
    """Upper bound of its bytes as UTF-8, in constant time; exact for ASCII."""
    return len(text) if text.isascii() else 4 * len(text)


def refuse_routed_experts(asked: bool, has_experts: bool) -> None:
    """Raises RequestError if a mixture is asked which experts it chose for a request. A model without experts has none to return."""
    if asked and has_experts:
        message = "return_routed_experts: a reply does not say which experts were chosen; /start_expert_distribution_record counts them"
        raise RequestError(message, "return_routed_experts", "unsupported_parameter")


def refuse_text(param: str) -> NoReturn:
    """Raises RequestError for a field that needs a tokenizer, which this server does not have."""
    message = f"{param}: this server has no tokenizer (--skip-tokenizer-init): it takes and gives token ids only"
    raise RequestError(message, param, "no_tokenizer")


def _check_ids_only(obj: GenerateReqInput, samplings: Sequence[SamplingParams]) -> None:
    if obj.text is not None:
        refuse_text("text")
    if obj.return_text_in_logprobs:
        refuse_text("return_text_in_logprobs")
    for sampling in samplings:
        for name in ("stop", "stop_regex", "bad_words"):
            if getattr(sampling, name):
                refuse_text(name)


@dataclass(slots=True)
class PromptInputs:
    given: Sequence[PromptInput]
    is_batch: bool

    @property
    def count(self) -> int:
        return len(self.given)

    def spread(self, name: str, value: T | list[T] | Sequence[T | None] | None, kind: type[T]) -> list[T]:
        """One value per prompt of the field `name`. A None (where the field allows one) stays None.

        value: one for all prompts, or a list of one per prompt. Raises RequestError.
        """
        if not isinstance(value, list):
            if value is not None and type(value) is not kind:
                raise RequestError(f"{name} must be {_KINDS[kind][0]}, got {value!r:.40}", name)
            return [cast(T, value)] * self.count
        if not self.is_batch:
            raise RequestError(f"{name} is a list, but there is one prompt", name)
        if len(value) != self.count:
            raise RequestError(
                f"{name}: the number of items ({len(value)}) must equal the number of prompts ({self.count})", name
            )
        for item in value:
            if item is not None and type(item) is not kind:
                raise RequestError(f"{name} must be a list of {_KINDS[kind][1]}, got {item!r:.40}", name)
        return cast("list[T]", value)


def _samplings(obj: GenerateReqInput, inputs: PromptInputs, limits: CallLimits) -> list[SamplingParams]:
    given = inputs.spread("sampling_params", obj.sampling_params, SamplingParams)
    samplings = [sampling or SamplingParams() for sampling in given]
    for sampling in samplings:
        _check_sampling(sampling, limits)
    if not limits.has_tokenizer:
        _check_ids_only(obj, samplings)
    _check_patterns(samplings)
    num_samples = sum(sampling.n for sampling in samplings)
    if num_samples > limits.max_samples:
        raise RequestError(
            f"the request has {num_samples} samples; this server queues at most {limits.max_samples}", "n"
        )
    return samplings


def _check_sampling(sampling: SamplingParams, limits: CallLimits) -> None:
    """The checks needed before any work per sample or per string; `resolve` checks the rest."""
    if type(sampling.n) is not int or not 1 <= sampling.n <= limits.max_n:
        raise RequestError(f"n must be between 1 and {limits.max_n}, got {sampling.n}", "n")
    sampling.check_sizes(limits.vocab_size)
    words = sampling.bad_words or []
    for name, strings in (("stop", sampling.stop_strings()), ("bad_words", words)):
        for text in strings:
            check_text(name, text)
    if not all(words):
        raise RequestError("bad_words must not be empty", "bad_words")


def _check_patterns(samplings: Sequence[SamplingParams]) -> None:
    """Check the number of stop patterns of all prompts: each distinct one is compiled, here and in the scheduler."""
    different = dict.fromkeys(sampling.stop_patterns() for sampling in samplings)
    num_patterns = sum(map(len, different))
    if num_patterns > MAX_STOP_PATTERNS:
        raise RequestError(f"{num_patterns} stop patterns in one request; at most {MAX_STOP_PATTERNS}", "stop_regex")
    for patterns in different:
        compile_stop_patterns(patterns)


def _grammars(samplings: Sequence[SamplingParams], limits: CallLimits) -> list[GrammarSpec | None]:
    """The grammar of each prompt; None = none. Raises RequestError for one that is not well-formed, and if this server has none."""
    # Prompts that share their parameters share the grammar, which may be large.
    different = {id(sampling): sampling for sampling in samplings}
    specs = {key: sampling.grammar_spec() for key, sampling in different.items()}
    for spec in filter(None, specs.values()):
        if not limits.has_tokenizer:
            refuse_text(spec.field)
        if not limits.has_grammars:
            message = f"{spec.field}: this server constrains no outputs (--grammar-backend none)"
            raise RequestError(message, spec.field, "unsupported_parameter")
    return [specs[id(sampling)] for sampling in samplings]


def _processors(obj: GenerateReqInput, inputs: PromptInputs, known: frozenset[str]) -> list[str]:
    """The custom logit processor of each prompt. Raises RequestError for one that is not `known`."""
    processors = inputs.spread("custom_logit_processor", obj.custom_logit_processor, str)
    for processor in processors:
        if processor and processor not in known:
            raise RequestError(
                "custom_logit_processor does not name a processor of this server "
                f"({', '.join(sorted(known)) or 'it has none'})",
                "custom_logit_processor",
            )
    return processors


def _predictions(obj: GenerateReqInput, inputs: PromptInputs, limits: CallLimits) -> list[str]:
    """The text that the output of each prompt may contain; empty where it gives no draft tokens. Raises RequestError."""
    predictions = inputs.spread("prediction", obj.prediction, str)
    if not limits.uses_predictions:
        return [""] * inputs.count
    for text in filter(None, predictions):
        if not limits.has_tokenizer:
            refuse_text("prediction")
        check_text("prediction", text, len(text))
    return [(text or "")[:MAX_PREDICTION_CHARACTERS] for text in predictions]


def _sessions(
    obj: GenerateReqInput, inputs: PromptInputs, samplings: Sequence[SamplingParams]
) -> list[SessionParams | None]:
    given = inputs.spread("session_params", obj.session_params, SessionParams)
    sessions = [session if session != SessionParams() else None for session in given]
    for session, sampling, prompt in zip(sessions, samplings, inputs.given, strict=True):
        if session is not None and sampling.n > 1:
            raise RequestError("session_params: a request of a session has one sample (n = 1)", "session_params")
        if session is not None and not prompt.only_tokens:
            raise RequestError("session_params: sessions hold only tokens", "session_params")
    return sessions


_MEAN = ("return_normalized_logprob", "normalized_logprob_start_len")
_LogprobLists = tuple[list[bool], list[int], list[int], list[tuple[int, ...]]]


def _logprobs(obj: GenerateReqInput, inputs: PromptInputs, multiple: bool, vocab_size: int) -> _LogprobLists:
    """The fields of `Prompt` for logprobs, in their order. multiple: whether a prompt has several samples. Raises RequestError."""
    wanted = inputs.spread("return_logprob", obj.return_logprob, bool)
    older = obj.normalized_logprob_start_len
    starts = inputs.spread("logprob_start_len", obj.logprob_start_len if older is None else older, int)
    tops = inputs.spread("top_logprobs_num", obj.top_logprobs_num, int)
    picked, picked_per_prompt = _picked_ids(obj, inputs, vocab_size)
    if multiple:
        for name in (*_MEAN, "return_logprob", "logprob_start_len", "top_logprobs_num"):
            if isinstance(getattr(obj, name), list):
                raise RequestError(f"{name} must be one value, not a list, when n > 1", name)
        if picked_per_prompt:
            raise RequestError("token_ids_logprob must be one list of ids when n > 1", "token_ids_logprob")
    for want, start, top, ids in zip(wanted, starts, tops, picked, strict=True):
        _check_logprobs(want, start, top, ids, vocab_size)
    return wanted, starts, tops, picked


def _check_logprobs(wanted: bool, start: int, top: int, picked: tuple[int, ...], vocab_size: int) -> None:
    if start < -1:
        raise RequestError(f"logprob_start_len must be at least -1, got {start}", "logprob_start_len")
    most = min(MAX_TOP_LOGPROBS, vocab_size)
    if not 0 <= top <= most:
        raise RequestError(f"top_logprobs_num must be between 0 and {most}, got {top}", "top_logprobs_num")
    if wanted:
        return
    for name, given in (("top_logprobs_num", top), ("token_ids_logprob", picked)):
        if given:
            raise RequestError(f"{name} needs return_logprob", name)


def _picked_ids(obj: GenerateReqInput, inputs: PromptInputs, vocab_size: int) -> tuple[list[tuple[int, ...]], bool]:
    """`token_ids_logprob` for each prompt, and whether it was given per prompt."""
    name = "token_ids_logprob"
    value = obj.token_ids_logprob
    if not value:
        return [()] * inputs.count, False
    per_prompt = isinstance(value[0], list)
    if any(isinstance(item, list) != per_prompt for item in value):
        raise RequestError(f"{name} mixes token ids and lists of token ids", name)
    lists = cast("list[list[int]]", value if per_prompt else [value])
    for ids in lists:
        if len(ids) > MAX_TOKEN_IDS_LOGPROB:
            raise RequestError(f"{name}: at most {MAX_TOKEN_IDS_LOGPROB} ids, got {len(ids)}", name)
        check_token_ids(name, ids, vocab_size)
    unique = [tuple(dict.fromkeys(ids)) for ids in lists]
    if not per_prompt:
        return unique * inputs.count, False
    if not inputs.is_batch or len(unique) != inputs.count:
        raise RequestError(
            f"{name}: the number of lists ({len(unique)}) must equal the number of prompts ({inputs.count})", name
        )
    return unique, True


def rids_of(given: str | list[str] | None, inputs: PromptInputs) -> tuple[str, list[str]]:
    """Rid of the call and of each prompt. One rid for a batch names its prompts `rid/0`, `rid/1` ..."""
    if not given:
        given = None
    if isinstance(given, list):
        inputs.spread("rid", given, str)
        for rid in given:
            _check_rid(rid)
        if len(set(given)) != len(given):
            raise RequestError("rid: the same rid appears twice in one request", "rid")
        return uuid.uuid4().hex, given
    if given is not None:
        _check_rid(given)
    rid = given if given is not None else uuid.uuid4().hex
    return rid, [f"{rid}/{i}" for i in range(inputs.count)] if inputs.is_batch else [rid]


def _check_rid(rid: str) -> None:
    if not isinstance(rid, str) or not rid:
        raise RequestError("rid must be a non-empty string", "rid")
    check_text("rid", rid, MAX_RID_LENGTH)


def namespaces_of(obj: CallInput, inputs: PromptInputs) -> list[str]:
    """The namespace of each prompt, from its two keys. Raises RequestError."""
    if obj.extra_key is None and obj.cache_salt is None:
        return [""] * inputs.count
    extra_keys = inputs.spread("extra_key", obj.extra_key, str)
    salts = inputs.spread("cache_salt", obj.cache_salt, str)
    for name, keys in (("extra_key", extra_keys), ("cache_salt", salts)):
        for key in filter(None, keys):
            check_text(name, key, MAX_KEY_LENGTH)
    return [of_request(extra_key, salt) for extra_key, salt in zip(extra_keys, salts, strict=True)]
