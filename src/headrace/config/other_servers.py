"""Options as SGLang, vLLM and llama.cpp's server write them, translated to ours: words of a command line, and entries of a file.

`table()` has what is spelled differently, is already so, or is not supported: the rows of other_servers.toml. An option that is not in it and has
one of ours' name means the same as ours (docs/coming-from-sglang.md and docs/coming-from-vllm.md name the exceptions).
tests/repo/option_pages.py makes the tables of those two pages from it. The file is read when the first option that is not ours is looked up.
Pure but for that: what is to be logged is returned.
"""

import functools
import json
import re
import tomllib
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import msgspec

from headrace.config.server_options import flag
from headrace.errors import ConfigError

TRUE, FALSE = ("true", "1", "yes", "on"), ("false", "0", "no", "off")
"""A switch's values in words."""


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A row of the file: options as named by `sglang`, `vllm`, `both` or `llama_cpp`, and one of three things that they are here.

    is_: ours, as typed, with VALUE for what is given; without one the option is a switch. times: their unit in ours.
    says: what differs; logged when the option is used.
    already: how it is here, of options that ask for what is already so; logged. values: those that are accepted; none = a switch. otherwise: why
    other values are refused. unless: field and value of ours that contradict the option.
    refused: the nearest of ours, or how it is here, of options that are not supported, and of all that begin with a name that ends in a dash.
    """

    sglang: str = ""
    vllm: str = ""
    both: str = ""
    llama_cpp: str = ""
    is_: str = msgspec.field(default="", name="is")
    times: int = 1
    says: str = ""
    already: str = ""
    values: tuple[str, ...] = ()
    otherwise: str = ""
    unless: tuple[str, str] | None = None
    refused: str = ""

    def __post_init__(self) -> None:
        assert [bool(self.sglang), bool(self.vllm), bool(self.both), bool(self.llama_cpp)].count(True) == 1, self
        assert [bool(self.is_), bool(self.already), bool(self.refused)].count(True) == 1, self

    @property
    def names(self) -> list[str]:
        return (self.sglang or self.vllm or self.both or self.llama_cpp).split()

    @property
    def sets(self) -> dict[str, str | None]:
        """Fields of ServerArgs and their values as typed; None = the value that is given."""
        sets: dict[str, str | None] = {}
        for word in self.is_.split():
            if word.startswith("--"):
                sets[name := word[2:].replace("-", "_")] = "true"
            else:
                sets[name] = None if word == "VALUE" else word
        return sets


VALUES: Mapping[str, Mapping[str, str]] = {
    "dtype": {
        "half": "float16",
        "fp16": "float16",
        "bf16": "bfloat16",
        "float": "float32",
        "fp32": "float32",
    },
    "kv_cache_dtype": {"fp8": "fp8_e4m3"},
    "model_impl": {"sglang": "headrace", "vllm": "headrace"},
    "load_balance_method": {"auto": "round_robin", "total_requests": "shortest_queue"},
    "attention_backend": {
        "FLASHINFER": "flashinfer",
        "TRITON_ATTN": "triton",
        "TORCH_SDPA": "torch_native",
    },
    "sampling_defaults": {"auto": "model", "vllm": "openai"},
    "kv_cache_write": {"write_through": "through", "write_through_selective": "through", "write_back": "back"},
    "speculative_algorithm": {"NGRAM": "ngram", "STANDALONE": "draft", "EAGLE3": "eagle3", "none": "off"},
}
"""Values of options of ours, by field, as others write them."""

DROPPED: Mapping[str, tuple[str, str]] = {
    "attention_backend": (
        "the fastest backend for the model on this device runs instead; /server_info names it: attention_backend",
        "aiter ascend compressed cpu_attn cutedsl_mla cutlass_mla dsa dsv4 dual_chunk_flash_attn fa3 fa4 flash_attn flash_attn_diffkv "
        "flash_attn_mla flash_attn_mla_sparse flashinfer_mla flashinfer_mla_sparse flashmla flashmla_sparse flex_attention hpc_attn hpc_ops "
        "intel_amx intel_xpu minicpm_flashattn minicpm_flashinfer mlu nsa rocm_aiter_fa rocm_aiter_mla rocm_aiter_mla_sparse "
        "rocm_aiter_triton_mla rocm_aiter_unified_attn rocm_attn tokenspeed_mla tree_attn triton_attn_diffkv triton_mla trtllm_mha trtllm_mla "
        "wave xpu_mla_sparse",
    ),
    "quantization": (
        "checkpoints are served in the format that they have",
        "auto-round awq awq_marlin compressed-tensors fbgemm_fp8 gptq gptq_marlin hqq modelopt modelopt_fp4 quark torchao",
    ),
    "disaggregation_transfer_backend": ("KV goes over tcp", "ascend mooncake mori"),
}
"""By field, what is logged of values that are accepted and change nothing, and these in small letters: kernels and ways of
KV that are not here, formats that the checkpoint's own config names."""

LISTS: Mapping[str, str] = {
    "lora_paths": r"[^-].*=.*",
    "cuda_graph_bs": r"\d+",
    "allow_origins": r"[a-z][a-z0-9+.-]*://.*|local-apps",
    "served_model_name": r"[^-].*",
}
"""Fields whose option takes several words or a JSON list elsewhere, and one word with commas here; and what further words look like."""


COUNTS = frozenset({"context_length", "max_prefill_tokens"})
"""Fields whose aliases also take `32k` (thousands) and `32K` (times 1,024)."""


def is_dropped(field_name: str, value: str) -> bool:
    """Whether a value of a field of ours is accepted without effect."""
    return field_name in DROPPED and value.lower() in DROPPED[field_name][1].split()


@functools.cache
def table() -> tuple[Entry, ...]:
    file = Path(__file__).with_suffix(".toml")
    return msgspec.convert(tomllib.loads(file.read_text(encoding="utf-8"))["options"], type=tuple[Entry, ...])


@functools.cache
def _by_name() -> dict[str, Entry]:
    return {name: entry for entry in table() for name in entry.names}


def find(name: str) -> Entry | None:
    """The entry of an option as typed, e.g. `--max-model-len`; an exact name comes before a prefix."""
    found = _by_name()
    prefixes = (entry for prefix, entry in found.items() if prefix.endswith("-") and name.startswith(prefix))
    return found.get(name) or next(prefixes, None)


@dataclass(slots=True)
class Translation:
    """words: ours. notes: lines to log. unless: (option, field, value) of accepted options that a value of ours contradicts. names: further words of
    --served-model-name."""

    words: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    unless: list[tuple[str, str, str]] = field(default_factory=list)
    names: list[str] = field(default_factory=list)


def check_unless(unless: Sequence[tuple[str, str, str]], chosen: Mapping[str, Any]) -> None:
    """Raises ConfigError when an option that was accepted as already so is contradicted. chosen: our fields."""
    for option, name, value in unless:
        if str(chosen.get(name)).lower() == value:
            given = flag(name) if value == "true" else f"{flag(name)} {value}"
            raise ConfigError(f"{option} cannot be combined with {given}")


def translate(words: Sequence[str], own: Mapping[str, bool], takes_word: bool = False) -> Translation:
    """The words of a command line in our options.

    own: our options as typed, and whether each takes a value. takes_word: the command has an argument that is no option, such as a model. Unknown
    options stay as they are. Raises ConfigError for an option that is known not to be supported.
    """
    done = Translation()
    rest = deque(words)
    has_word = False
    while rest:
        word = rest.popleft()
        if word == "--":
            done.words += [word, *rest]
            break
        if not word.startswith("-") or word == "-":
            done.words.append(word)
            has_word = True
            continue
        name, equals, value = word.partition("=")
        if name not in own and name.startswith("--"):
            name = name.replace("_", "-")
        if name in own:
            _own(name, value if equals else None, own[name], rest, done)
        elif not _translated(name, value if equals else None, rest, own, done):
            done.words.append(word)
    has_model = has_word or not {"--model-path", "--model", "-m"}.isdisjoint(done.words)
    if takes_word and done.names and not has_model:
        # The last of several words of --served-model-name is the command's argument: `serve --served-model-name a MODEL`.
        at = done.words.index(flag("served_model_name")) + 1
        done.words[at] = done.words[at].removesuffix("," + done.names[-1])
        done.words.append(done.names[-1])
    return done


def _take(rest: deque[str], pattern: str = ".*") -> str | None:
    """The next word, if there is one and it matches."""
    return rest.popleft() if rest and re.fullmatch(pattern, rest[0], re.DOTALL) else None


def _own(name: str, value: str | None, takes_value: bool, rest: deque[str], done: Translation) -> None:
    if not takes_value:
        done.words.append(name if value is None else f"{name}={value}")
        return
    value = _take(rest) if value is None else value
    if value is None:
        done.words.append(name)
        return
    _set(name.lstrip("-").replace("-", "_"), name, value, rest, done)


def _set(field_name: str, option: str, value: str, rest: deque[str], done: Translation) -> None:
    """Append one of our options with a value, as we write it."""
    if is_dropped(field_name, value):
        done.notes.append(f"{option} {value}: {DROPPED[field_name][0]}")
        return
    if field_name in LISTS:
        value = _joined(option, value)
        while (more := _take(rest, LISTS[field_name])) is not None:
            value += "," + more
            if field_name == "served_model_name":
                done.names.append(more)
    value = VALUES.get(field_name, {}).get(value, value)
    done.words += [option, value]


def _joined(option: str, text: str) -> str:
    """A JSON list of texts or numbers with commas between them; any other text as it is."""
    if not text.startswith("["):
        return text
    try:
        items = json.loads(text)
    except json.JSONDecodeError as error:
        raise ConfigError(f"{option} is not JSON: {error}") from error
    if not all(isinstance(item, str | int) for item in items):
        raise ConfigError(f"{option} takes a list of texts or numbers, got {text:.80}")
    return ",".join(map(str, items))


def _translated(name: str, value: str | None, rest: deque[str], own: Mapping[str, bool], done: Translation) -> bool:
    """Translate an option that is not ours; False if it is unknown or not for this command."""
    entry, asked = find(name), True
    if entry is None and name.startswith("--no-"):
        entry, asked = find("--" + name.removeprefix("--no-")), False
    if entry is None or not all(flag(field_name) in own for field_name in entry.sets):
        return False
    if entry.refused and asked:
        raise ConfigError(f"{name} is not an option here: {entry.refused}")
    if entry.is_:
        _alias(entry, name, value, asked, rest, done)
    elif entry.already:
        _already(entry, name, value, asked, rest, done)
    return True


def _alias(entry: Entry, name: str, value: str | None, asked: bool, rest: deque[str], done: Translation) -> None:
    sets = entry.sets
    if None not in sets.values():
        if not _is_on(name, value, rest, asked):
            return
        value = ""
    elif value is None:
        value = _take(rest)
    if value is None:
        raise ConfigError(f"{name} needs a value")
    if COUNTS.intersection(sets):
        value = _count(value)
    if entry.times > 1:
        value = _times(name, value, entry.times)
    for field_name, fixed in sets.items():
        if fixed == "true":
            done.words.append(flag(field_name))
        else:
            _set(field_name, flag(field_name), value if fixed is None else fixed, rest, done)
    if entry.says:
        done.notes.append(f"{name}: {entry.says}")


def _count(text: str) -> str:
    """`25.6k` -> `25600`, `2K` -> `2048`; any other text as it is."""
    if found := re.fullmatch(r"(\d+(?:\.\d+)?)([kKmMgG])", text):
        step = 1000 if found[2].islower() else 1024
        return str(int(float(found[1]) * step ** ("kmg".index(found[2].lower()) + 1)))
    return text


def _times(name: str, text: str, times: int) -> str:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1e9:
        raise ConfigError(f"{name} takes a number of at least 0, got {text!r:.80}")
    return str(round(value * times))


def _already(entry: Entry, name: str, value: str | None, asked: bool, rest: deque[str], done: Translation) -> None:
    if entry.values:
        value = _take(rest) if value is None else value
        if value is None:
            raise ConfigError(f"{name} needs a value")
        if value not in entry.values:
            raise ConfigError(f"{name} {value:.80} is not possible here: {entry.otherwise}")
        done.notes.append(f"{name} {value}: {entry.already}")
    elif _is_on(name, value, rest, asked):
        done.notes.append(f"{name}: {entry.already}")
    elif entry.unless is None:
        raise ConfigError(
            f"{name}{f'={value}' if value else ''} is not possible here: {entry.otherwise or entry.already}"
        )
    else:
        field_name, opposite = entry.unless
        done.words += {"true": [flag(field_name)], "false": [flag(f"no_{field_name}")]}.get(
            opposite, [flag(field_name), opposite]
        )
        return
    if entry.unless is not None:
        done.unless.append((name, *entry.unless))


def _is_on(name: str, value: str | None, rest: deque[str], asked: bool) -> bool:
    """Whether a switch is turned on: `--x`, `--x=true`, `--x True`, and not `--no-x`."""
    if value is None:
        value = _take(rest, "[Tt]rue|[Ff]alse") or "true"
    if value.lower() not in TRUE + FALSE:
        raise ConfigError(f"{name} takes true or false, got {value!r:.80}")
    return asked == (value.lower() in TRUE)
