"""LoRA adapters as peft saves them: adapter_config.json beside adapter_model.safetensors.

Owns the format: what its config says, which of it can be served, the names of its tensors. Does not know the model (`headrace.execution.lora`
fits one to it). Runs in the thread that loads an adapter; torch is imported when the first tensor is asked for.

Format: https://huggingface.co/docs/peft/developer_guides/checkpoint
LoRA: E. Hu et al., "LoRA: Low-Rank Adaptation of Large Language Models", 2021, arXiv:2106.09685. rsLoRA: D. Kalajdzievski, 2023, arXiv:2312.03732.
"""

import math
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from headrace.checkpoint.model_config import read_json_object
from headrace.checkpoint.safetensors_file import SafetensorsFile
from headrace.errors import ModelError

if TYPE_CHECKING:
    import torch

T = TypeVar("T")

CONFIG_NAME = "adapter_config.json"
WEIGHTS_NAME = "adapter_model.safetensors"

_PREFIX = "base_model.model."
_SUFFIXES = {".lora_A.weight": "A", ".lora_B.weight": "B"}
_FLOATS = {"F32": "float32", "F16": "float16", "BF16": "bfloat16"}
_LAYER = re.compile(r"(?:^|\.)layers\.(\d+)\.")

# Keys that, when set, make the adapter something else than W + scale * B A on whole linear layers.
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
# Initialisations that subtract from the base weights, so that the adapter fits no unchanged model.
_CHANGES_BASE = ("pissa", "olora", "corda", "loftq")


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """What adapter_config.json says.

    targets: names of modules, or a regular expression over them. rank_pattern, alpha_pattern: exceptions by pattern of a module's name.
    layers: indices of the layers it is limited to; empty = all.
    """

    rank: int
    alpha: float
    rank_stabilized: bool
    targets: tuple[str, ...] | str
    exclude: tuple[str, ...] | str
    rank_pattern: dict[str, int]
    alpha_pattern: dict[str, float]
    layers: frozenset[int]

    def wants(self, module: str) -> bool:
        """Whether peft would put an adapter on the linear layer `module` (not the output projection) of the model."""
        if self.exclude and _named(self.exclude, module):
            return False
        if isinstance(self.targets, str) and self.targets.lower() == "all-linear":
            found = True
        else:
            found = _named(self.targets, module)
        if not found or not self.layers:
            return found
        layer = _LAYER.search(module)
        return layer is not None and int(layer[1]) in self.layers

    def rank_of(self, module: str) -> int:
        """Rank of the adapter on `module`."""
        return _exception(self.rank_pattern, module, self.rank)

    def scale_of(self, module: str) -> float:
        """What B A is multiplied by on `module`."""
        rank, alpha = self.rank_of(module), _exception(self.alpha_pattern, module, self.alpha)
        return alpha / math.sqrt(rank) if self.rank_stabilized else alpha / rank


class LoraCheckpoint:
    """An adapter's folder, its config and the header of its weights checked. Raises ModelError, naming files and no folder.

    modules: the module of the model and the tensor's name in the file for A and B, by (module, "A" | "B").
    """

    def __init__(self, path: Path | str) -> None:
        path = Path(path)
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
                raise ModelError(f"{WEIGHTS_NAME}: tensor {name} is no part of a LoRA on a linear layer")
            if entry.dtype not in _FLOATS:
                raise ModelError(f"{WEIGHTS_NAME}: tensor {name} is {entry.dtype}; served are {', '.join(_FLOATS)}")
            self.modules[name.removeprefix(_PREFIX).removesuffix(suffix), _SUFFIXES[suffix]] = name

    def shape(self, name: str) -> tuple[int, ...]:
        """Shape of the tensor `name` of the file."""
        return self._file.entries[name].shape

    def tensor(self, name: str) -> "torch.Tensor":
        """A copy of the tensor in float32. Raises ModelError when it holds NaN or infinity."""
        import torch

        entry = self._file.entries[name]
        data = bytearray(self._file.buffer[entry.offset : entry.offset + entry.num_bytes])
        values = torch.frombuffer(data, dtype=getattr(torch, _FLOATS[entry.dtype])).reshape(entry.shape).float()
        if not bool(torch.isfinite(values).all()):
            raise ModelError(f"{WEIGHTS_NAME}: tensor {name} holds NaN or infinity")
        return values


def parse_lora_config(raw: dict[str, Any]) -> LoraConfig:
    """The settings of an adapter_config.json. Raises ModelError for what is wrong, and by name for what is not served."""
    if raw.get("peft_type") != "LORA":
        raise ModelError(f"{CONFIG_NAME}: peft_type is {raw.get('peft_type')!r:.40}; only LORA is served")
    for key, what in _REFUSED.items():
        if raw.get(key):
            raise ModelError(f"{CONFIG_NAME}: {what} is not supported")
    if raw.get("bias", "none") != "none":
        raise ModelError(f"{CONFIG_NAME}: bias {raw['bias']!r:.40} is not supported: trained biases are not served")
    if raw.get("task_type") not in (None, "CAUSAL_LM"):
        raise ModelError(f"{CONFIG_NAME}: task_type is {raw['task_type']!r:.40}; only CAUSAL_LM is served")
    start = raw.get("init_lora_weights", True)
    if isinstance(start, str) and start.lower().startswith(_CHANGES_BASE):
        raise ModelError(
            f"{CONFIG_NAME}: init_lora_weights {start!r:.40} changed the base weights, which is not supported; convert it to a plain LoRA"
        )
    layers = raw.get("layers_to_transform")
    listed = [] if layers is None else layers if isinstance(layers, list) else [layers]
    if not all(type(layer) is int for layer in listed):
        raise ModelError(f"{CONFIG_NAME}: layers_to_transform must be layer indices")
    targets = _modules(raw, "target_modules")
    if not targets:
        raise ModelError(f"{CONFIG_NAME}: target_modules is empty")
    return LoraConfig(
        rank=_rank("r", raw.get("r")),
        alpha=_alpha("lora_alpha", raw.get("lora_alpha")),
        rank_stabilized=bool(raw.get("use_rslora")),
        targets=targets,
        exclude=_modules(raw, "exclude_modules"),
        rank_pattern={key: _rank("rank_pattern", value) for key, value in _patterns(raw, "rank_pattern").items()},
        alpha_pattern={key: _alpha("alpha_pattern", value) for key, value in _patterns(raw, "alpha_pattern").items()},
        layers=frozenset(listed),
    )


def _named(names: tuple[str, ...] | str, module: str) -> bool:
    if isinstance(names, str):
        return re.fullmatch(names, module) is not None
    return any(module == name or module.endswith(f".{name}") for name in names)


def _exception(patterns: dict[str, T], module: str, default: T) -> T:
    """The value of the first pattern that ends the module's name at a dot, as peft looks it up."""
    return next((value for key, value in patterns.items() if re.match(rf"(.*\.)?({key})$", module)), default)


def _modules(raw: dict[str, Any], key: str) -> tuple[str, ...] | str:
    """A list of names, or a pattern that is checked to be one."""
    value = raw.get(key)
    if value is None:
        return ()
    if isinstance(value, str):
        _check_pattern(key, value)
        return value
    if not isinstance(value, list) or not all(isinstance(name, str) and name for name in value):
        raise ModelError(f"{CONFIG_NAME}: {key} must be a list of names or a pattern")
    return tuple(value)


def _patterns(raw: dict[str, Any], key: str) -> dict[str, Any]:
    value = raw.get(key) or {}
    if not isinstance(value, dict):
        raise ModelError(f"{CONFIG_NAME}: {key} must be an object")
    for pattern in value:
        _check_pattern(key, pattern)
    return value


def _check_pattern(key: str, pattern: str) -> None:
    try:
        re.compile(pattern)
    except (re.error, RecursionError, OverflowError):
        raise ModelError(f"{CONFIG_NAME}: {key} holds {pattern!r:.60}, which is no regular expression") from None


def _rank(key: str, value: object) -> int:
    if type(value) is not int or value < 1:
        raise ModelError(f"{CONFIG_NAME}: {key} must be a whole number of at least 1, got {value!r:.40}")
    return value


def _alpha(key: str, value: object) -> float:
    if not isinstance(value, int | float) or isinstance(value, bool) or not math.isfinite(value):
        raise ModelError(f"{CONFIG_NAME}: {key} must be a number, got {value!r:.40}")
    return float(value)
