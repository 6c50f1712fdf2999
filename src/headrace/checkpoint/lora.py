"""LoRA adapters in peft's format: which features are supported, and the names of tensors. Does not know the model (`headrace.execution.lora`).

Runs in the thread that loads an adapter. Format: https://huggingface.co/docs/peft/developer_guides/checkpoint. LoRA: E. Hu et al., 2021,
arXiv:2106.09685. rsLoRA: D. Kalajdzievski, 2023, arXiv:2312.03732.
"""

import hashlib
import math
import re
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import re2

from headrace.checkpoint.files import read_json_object
from headrace.checkpoint.safetensors_file import SafetensorsFile
from headrace.checkpoint.weight_cache import files_fingerprint
from headrace.errors import ModelError

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"

_PREFIX = "base_model.model."
_SUFFIXES = {".lora_A.weight": "A", ".lora_B.weight": "B"}
_FLOATS = ("F32", "F16", "BF16")
_PATTERN_MEMORY_BYTES = 1 << 20
_MAX_PATTERNS = 1024
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")

# Keys that, if set, make the adapter something other than W + scale * B A on whole linear layers.
_REFUSED = {
    "use_dora": "DoRA",
    "use_qalora": "QALoRA",
    "modules_to_save": "modules_to_save (whole layers beside the adapter)",
    "lora_bias": "lora_bias (a bias on B)",
    "layer_replication": "layer_replication",
    "target_parameters": "target_parameters",
    "trainable_token_indices": "trainable_token_indices",
    "alora_invocation_tokens": "alora_invocation_tokens (an adapter that is on for a part of the prompt)",
    "fan_in_fan_out": "fan_in_fan_out",
    "layers_pattern": "layers_pattern",
    "arrow_config": "arrow_config",
}
# Others train a head beside the adapter.
_TASKS = (None, "CAUSAL_LM", "FEATURE_EXTRACTION")
# Initialisations that change the base weights, so that the adapter does not fit the original model.
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq")


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """The settings of adapter_config.json.

    targets: names of modules, or a regular expression over them; None = every linear layer. rank_pattern, alpha_pattern: exceptions by
    pattern of a module's name. layers: indices of the layers it is limited to; empty = all.
    """

    rank: int
    alpha: float
    rank_stabilized: bool
    targets: "ModuleNames | ModulePattern | None"
    exclude: "ModuleNames | ModulePattern"
    rank_pattern: "tuple[tuple[ModulePattern, int], ...]"
    alpha_pattern: "tuple[tuple[ModulePattern, float], ...]"
    layers: frozenset[int]

    def wants(self, module: str) -> bool:
        """Whether peft would put an adapter on the linear layer `module` (not the output projection) of the model."""
        if self.exclude.has(module):
            return False
        found = self.targets is None or self.targets.has(module)
        if not found or not self.layers:
            return found
        layer = _LAYER.search(module)
        return layer is not None and int(layer[1]) in self.layers

    def rank_of(self, module: str) -> int:
        return _exception(self.rank_pattern, module, self.rank)

    def scale_of(self, module: str) -> float:
        rank, alpha = self.rank_of(module), _exception(self.alpha_pattern, module, self.alpha)
        return alpha / math.sqrt(rank) if self.rank_stabilized else alpha / rank


@dataclass(frozen=True, slots=True)
class ModuleNames:
    names: frozenset[str]

    def has(self, module: str) -> bool:
        """Whether the module's name is one of them, or ends in one after a dot."""
        parts = module.split(".")
        return any(".".join(parts[at:]) in self.names for at in range(len(parts)))


class ModulePattern:
    """A regular expression of an adapter's config over the names of modules. Runs in RE2, which takes linear time: with a backtracking engine, one
    pattern could block the process forever."""

    __slots__ = ("_compiled",)

    def __init__(self, key: str, pattern: str, any_parent: bool = False) -> None:
        """any_parent: what comes before a dot in the name may be anything. Raises ModelError for syntax that RE2 does not support."""
        options = re2.Options()
        options.log_errors = False
        options.max_mem = _PATTERN_MEMORY_BYTES
        options.never_capture = True
        try:
            # Compiled alone first, so that its brackets must match.
            compiled = re2.compile(pattern, options)
            self._compiled = re2.compile(rf"(?:.*\.)?(?:{pattern})", options) if any_parent else compiled
        except (re2.error, UnicodeEncodeError):
            raise ModelError(
                f"{CONFIG_NAME}: {key} holds {pattern!r:.60}, which is not a regular expression in RE2 syntax "
                "(no look-around, no back references); list the names of the modules instead"
            ) from None

    def has(self, module: str) -> bool:
        return self._compiled.fullmatch(module) is not None


class LoraCheckpoint:
    """An adapter's folder, with its config and the header of its weights checked. Raises ModelError, which names files but not the folder. modules:
    the module of the model and the tensor's name in the file for A and B, by (module, "A" | "B")."""

    def __init__(self, path: Path | str) -> None:
        self._path = path = Path(path)
        if not path.is_dir():
            raise ModelError("the adapter's path is not a folder that can be read")
        self.config = parse_lora_config(read_json_object(path / CONFIG_NAME))
        if not (path / WEIGHTS_NAME).is_file():
            pickled = any(path.glob("adapter_model.*"))
            hint = "; pickled weights are not read, save the adapter as safetensors" if pickled else ""
            raise ModelError(f"{WEIGHTS_NAME} is missing{hint}")
        self._file = SafetensorsFile(path / WEIGHTS_NAME)
        self.modules: dict[tuple[str, str], str] = {}
        for name, entry in self._file.entries.items():
            suffix = next((suffix for suffix in _SUFFIXES if name.endswith(suffix)), None)
            if suffix is None or not name.startswith(_PREFIX):
                raise ModelError(f"{WEIGHTS_NAME}: tensor {name} is not part of a LoRA on a linear layer")
            if entry.dtype not in _FLOATS:
                raise ModelError(f"{WEIGHTS_NAME}: tensor {name} is {entry.dtype}; supported are {', '.join(_FLOATS)}")
            self.modules[name.removeprefix(_PREFIX).removesuffix(suffix), _SUFFIXES[suffix]] = name

    def fingerprint(self) -> str:
        """Fingerprint of the adapter's files as they are now; see `weight_cache.files_fingerprint`. Raises ModelError."""
        try:
            return files_fingerprint([self._path / CONFIG_NAME, self._path / WEIGHTS_NAME], {})
        except OSError as error:
            raise ModelError(f"the adapter's files cannot be read: {error.strerror}") from error

    def content(self) -> str:
        """Hash of every byte of the adapter's files as they are now. Raises ModelError."""
        found = hashlib.sha256()
        try:
            for name in (CONFIG_NAME, WEIGHTS_NAME):
                with (self._path / name).open("rb") as file:
                    found.update(hashlib.file_digest(file, "sha256").digest())
        except OSError as error:
            raise ModelError(f"the adapter's files cannot be read: {error.strerror}") from error
        return found.hexdigest()

    def shape(self, name: str) -> tuple[int, ...]:
        return self._file.entries[name].shape

    def tensor(self, name: str) -> "torch.Tensor":
        import torch

        values = self._file.tensor(name).to(torch.float32, copy=True)
        if not bool(torch.isfinite(values).all()):
            raise ModelError(f"{WEIGHTS_NAME}: tensor {name} contains NaN or infinity")
        return values


def parse_lora_config(raw: dict[str, Any]) -> LoraConfig:
    if raw.get("peft_type") != "LORA":
        raise ModelError(f"{CONFIG_NAME}: peft_type is {raw.get('peft_type')!r:.40}; only LORA is supported")
    for key, what in _REFUSED.items():
        if raw.get(key):
            raise ModelError(f"{CONFIG_NAME}: {what} is not supported")
    if raw.get("bias", "none") != "none":
        raise ModelError(f"{CONFIG_NAME}: bias {raw['bias']!r:.40} is not supported (trained biases)")
    if raw.get("task_type") not in _TASKS:
        raise ModelError(
            f"{CONFIG_NAME}: task_type is {raw['task_type']!r:.40}; only CAUSAL_LM and FEATURE_EXTRACTION are supported"
        )
    start = raw.get("init_lora_weights", True)
    if isinstance(start, str) and start.lower().startswith(_CHANGES_BASE):
        raise ModelError(
            f"{CONFIG_NAME}: init_lora_weights {start!r:.40} changed the base weights, which is not supported; convert it to a plain LoRA"
        )
    layers = raw.get("layers_to_transform")
    listed = [] if layers is None else layers if isinstance(layers, list) else [layers]
    if not all(type(layer) is int for layer in listed):
        raise ModelError(f"{CONFIG_NAME}: layers_to_transform must be layer indices")
    targets = raw.get("target_modules")
    if not targets:
        raise ModelError(f"{CONFIG_NAME}: target_modules is empty")
    is_all = isinstance(targets, str) and targets.lower() == "all-linear"
    return LoraConfig(
        rank=_rank("r", raw.get("r")),
        alpha=_alpha("lora_alpha", raw.get("lora_alpha")),
        rank_stabilized=bool(raw.get("use_rslora")),
        targets=None if is_all else _modules(raw, "target_modules"),
        exclude=_modules(raw, "exclude_modules"),
        rank_pattern=_patterns(raw, "rank_pattern", _rank),
        alpha_pattern=_patterns(raw, "alpha_pattern", _alpha),
        layers=frozenset(listed),
    )


def _exception(patterns: tuple[tuple[ModulePattern, T], ...], module: str, default: T) -> T:
    """The value of the first pattern that ends the module's name at a dot, as peft looks it up."""
    return next((value for pattern, value in patterns if pattern.has(module)), default)


def _modules(raw: dict[str, Any], key: str) -> ModuleNames | ModulePattern:
    value = raw.get(key)
    if value is None:
        return ModuleNames(frozenset())
    if isinstance(value, str):
        return ModulePattern(key, value)
    if not isinstance(value, list) or not all(isinstance(name, str) and name for name in value):
        raise ModelError(f"{CONFIG_NAME}: {key} must be a list of names or a pattern")
    return ModuleNames(frozenset(value))


def _patterns(raw: dict[str, Any], key: str, read: Callable[[str, object], T]) -> tuple[tuple[ModulePattern, T], ...]:
    value = raw.get(key) or {}
    if not isinstance(value, dict):
        raise ModelError(f"{CONFIG_NAME}: {key} must be an object")
    if len(value) > _MAX_PATTERNS:
        raise ModelError(f"{CONFIG_NAME}: {key} holds {len(value)} patterns, at most {_MAX_PATTERNS}")
    return tuple((ModulePattern(key, pattern, any_parent=True), read(key, each)) for pattern, each in value.items())


def _rank(key: str, value: object) -> int:
    if type(value) is not int or value < 1:
        raise ModelError(f"{CONFIG_NAME}: {key} must be a whole number of at least 1, got {value!r:.40}")
    return value


def _alpha(key: str, value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise ModelError(f"{CONFIG_NAME}: {key} must be a number, got {value!r:.40}")
    return float(value)
