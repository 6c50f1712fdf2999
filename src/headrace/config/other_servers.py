"""How options of SGLang and vLLM are written here.

`table()` has what is spelled differently, is already so, or is not supported: the rows of other_servers.toml. An option that is not in it and has
one of ours' name means the same as ours (docs/coming-from-sglang.md and docs/coming-from-vllm.md name the exceptions). `config.translate` reads
it; tests/repo/option_pages.py makes the tables of those two pages from it. The file is read when the first option that is not ours is looked up.
"""

import functools
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import msgspec

Server = Literal["sglang", "vllm"]


@dataclass(frozen=True, slots=True)
class Alias:
    """An option that one or more of ours say as well.

    sets: fields of ServerArgs and their values as typed; None = the value that is given. The option is a switch if no value is None.
    says: what differs; logged when the option is used.
    """

    servers: tuple[Server, ...]
    names: tuple[str, ...]
    sets: Mapping[str, str | None]
    says: str = ""

    @property
    def is_switch(self) -> bool:
        return None not in self.sets.values()


@dataclass(frozen=True, slots=True)
class Already:
    """An option that asks for what is already so: accepted with a line of log.

    values: those that are accepted; none = the option is a switch. says: how it is here. otherwise: why other values are refused.
    unless: field and value of ours that contradict the option.
    """

    servers: tuple[Server, ...]
    names: tuple[str, ...]
    says: str
    values: tuple[str, ...] = ()
    otherwise: str = ""
    unless: tuple[str, str] | None = None


@dataclass(frozen=True, slots=True)
class Refused:
    """An option that is not supported; so are all that begin with a name that ends in a dash. says: the nearest of ours, or how it is here."""

    servers: tuple[Server, ...]
    names: tuple[str, ...]
    says: str


Entry = Alias | Already | Refused


class _Row(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """A row of the file: names of options under `sglang`, `vllm` or `both`, and one of `is` (ours, as typed, with VALUE for what is given),
    `already` and `refused`, which are `says` of the entry."""

    sglang: str = ""
    vllm: str = ""
    both: str = ""
    is_: str = msgspec.field(default="", name="is")
    says: str = ""
    already: str = ""
    values: tuple[str, ...] = ()
    otherwise: str = ""
    unless: tuple[str, str] | None = None
    refused: str = ""

    def entry(self) -> Entry:
        assert [bool(self.sglang), bool(self.vllm), bool(self.both)].count(True) == 1, self
        assert [bool(self.is_), bool(self.already), bool(self.refused)].count(True) == 1, self
        servers: tuple[Server, ...] = ("sglang", "vllm") if self.both else ("sglang",) if self.sglang else ("vllm",)
        names = tuple((self.sglang or self.vllm or self.both).split())
        if self.is_:
            sets: dict[str, str | None] = {}
            for word in self.is_.split():
                if word.startswith("--"):
                    sets[field := word[2:].replace("-", "_")] = "true"
                else:
                    sets[field] = None if word == "VALUE" else word
            return Alias(servers, names, sets, self.says)
        if self.already:
            return Already(servers, names, self.already, self.values, self.otherwise, self.unless)
        return Refused(servers, names, self.refused)


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
    "speculative_algorithm": {"NGRAM": "ngram", "STANDALONE": "draft", "EAGLE3": "eagle3"},
}
"""Values of options of ours, by field, as others write them."""

CHECKPOINT_FORMATS = ("awq", "awq_marlin", "gptq", "gptq_marlin", "gguf", "compressed-tensors")
"""Values of --quantization that say what a checkpoint is: accepted, since checkpoints are served in the format that they have."""

LISTS: Mapping[str, str] = {
    "lora_paths": r"[^-].*=.*",
    "cuda_graph_bs": r"\d+",
    "allow_origins": r"[a-z][a-z0-9+.-]*://.*|local-apps",
    "served_model_name": r"[^-].*",
}
"""Fields whose option takes several words or a JSON list elsewhere, and one word with commas here; and what further words look like."""


COUNTS = frozenset({"context_length", "max_prefill_tokens"})
"""Fields whose aliases also take `32k` (thousands) and `32K` (times 1,024)."""


@functools.cache
def table() -> tuple[Entry, ...]:
    """Every entry, in the order of the pages."""
    file = Path(__file__).with_suffix(".toml")
    rows = msgspec.convert(tomllib.loads(file.read_text(encoding="utf-8"))["options"], type=tuple[_Row, ...])
    return tuple(row.entry() for row in rows)


@functools.cache
def _by_name() -> dict[str, Entry]:
    return {name: entry for entry in table() for name in entry.names}


def find(name: str) -> Entry | None:
    """The entry of an option as typed, e.g. `--max-model-len`; an exact name comes before a prefix."""
    found = _by_name()
    prefixes = (entry for prefix, entry in found.items() if prefix.endswith("-") and name.startswith(prefix))
    return found.get(name) or next(prefixes, None)


def names() -> list[str]:
    """Every name, prefixes left out."""
    return [name for name in _by_name() if not name.endswith("-")]
