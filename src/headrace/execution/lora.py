"""The adapters in memory, and the adapter of each row of a step.

Owns loading an adapter into a model's linear layers, as a whole or not at all, and removing it. Does not choose what is loaded or
evicted: the front end does. `rows` runs in the thread that runs the steps, `load` in one of its own, `unload` in either. Each of several
ranks has a pool with its part of each adapter; `rank_jobs` lets them `stage` and `enter` it together.
"""

import threading
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate

import torch

from headrace import kernels
from headrace.checkpoint.lora import WEIGHTS_NAME, LoraCheckpoint, ModuleNames
from headrace.errors import ModelError
from headrace.kernels import LoraFactors, LoraPart, LoraRows
from headrace.kernels.packing import Rows
from headrace.layers.linear import Linear, LinearAdapters, LoraStep
from headrace.layers.weight import Placement
from headrace.models.spec import CausalLM

_HEAD = "lm_head"
_EXPERTS = ".experts."
_NAMES_IN_A_MESSAGE = 3
_NOT_OF_OWN_ROWS = "adapters are not supported with --enable-dp-attention: start the server without it"


@dataclass(frozen=True, slots=True)
class _Target:
    """One projection in a linear layer; `layer` may contain several. is_here: other ranks may have the layer instead."""

    layer: Linear
    projection: str
    is_here: bool


@dataclass(frozen=True, slots=True)
class StagedAdapter:
    """An adapter that was read and checked, and that no request can use yet. fingerprint: of its files; content: of every byte of them."""

    lora_id: int
    fingerprint: str
    content: str
    factors: Mapping[Linear, LoraFactors]


class LoraPool:
    """At most `max_loras` adapters on the linear layers of a model.

    rename: maps tensor names of other checkpoints of the family to the model's (`ModelSpec.renaming`). One adapter is loaded at a
    time, not counting loads that were given up.
    """

    def __init__(
        self, model: CausalLM, placement: Placement, max_loras: int, max_rank: int, rename: Callable[[str], str] = str
    ) -> None:
        self._refusal = _NOT_OF_OWN_ROWS if placement.whole_attention else ""
        self.step = LoraStep()
        self._max_loras = max_loras
        self._max_rank = max_rank
        self._placement = placement
        self._rename = rename
        self._loaded: dict[int, list[LinearAdapters]] = {}
        self._contents: dict[int, str] = {}
        self._loading: set[int] = set()
        self._lock = threading.Lock()
        self._targets: dict[str, _Target] = {}
        for weight in model.weights():
            module = weight.name.removesuffix(".weight")
            if isinstance(weight.layer, Linear) and module != weight.name:
                self._targets[module] = _Target(weight.layer, module.rpartition(".")[2], not weight.is_elsewhere)

    def __contains__(self, lora_id: int) -> bool:
        return lora_id in self._loaded

    def __len__(self) -> int:
        return len(self._loaded)

    def load(self, lora_id: int, path: str, fingerprint: str = "") -> str:
        """Load the adapter in the folder `path`, whose files must have this fingerprint (empty = any). Returns the fingerprint.

        Raises ModelError; then nothing has changed.
        """
        staged = self.stage(lora_id, path, fingerprint)
        self.enter(staged)
        return staged.fingerprint

    def stage(self, lora_id: int, path: str, fingerprint: str = "") -> StagedAdapter:
        """The slow part of `load`. Then comes `enter`, or `unload`, which forgets it."""
        assert lora_id > 0, lora_id
        if self._refusal:
            raise ModelError(self._refusal)
        with self._lock:
            assert lora_id not in self._loaded, lora_id
            self._check_room()
            self._loading.add(lora_id)
        try:
            # Without the lock: a hanging file system delays only this adapter.
            checkpoint = LoraCheckpoint(path)
            found = checkpoint.fingerprint()
            if not found.startswith(fingerprint):
                raise ModelError("its files have changed since it was loaded; unload it and load it again")
            factors, content = self._read(checkpoint), checkpoint.content()
            if checkpoint.fingerprint() != found:
                raise ModelError("its files changed while they were read; load it again")
            return StagedAdapter(lora_id, found, content, factors)
        except BaseException:
            with self._lock:
                self._loading.discard(lora_id)
            raise

    def content(self, lora_id: int) -> str:
        """Hash of every byte of an adapter's files; empty if it is not loaded."""
        return self._contents.get(lora_id, "")

    def is_loading(self, lora_id: int) -> bool:
        """Whether an adapter is being read, or was read and not yet entered, and nobody has unloaded it."""
        return lora_id in self._loading

    def _check_room(self) -> None:
        if len(self._loaded) >= self._max_loras:
            raise ModelError(f"there is no room for another adapter: --max-loras {self._max_loras} has been reached")

    def enter(self, staged: StagedAdapter) -> None:
        """The quick part of `load`: enter the whole adapter, or nothing. Called between two steps, if several ranks enter it together."""
        lora_id = staged.lora_id
        with self._lock:
            if lora_id not in self._loading:
                raise ModelError("the adapter was unloaded while it was read")
            self._loading.discard(lora_id)
            self._check_room()
            touched = []
            for layer, of_layer in staged.factors.items():
                if layer.adapters is None:
                    layer.adapters = LinearAdapters(self.step)
                layer.adapters.by_id[lora_id] = of_layer
                touched.append(layer.adapters)
            # Last, since from now on sequences may use it.
            self._contents[lora_id] = staged.content
            self._loaded[lora_id] = touched

    def unload(self, lora_id: int) -> None:
        """Remove an adapter that no step in flight uses, or that is still being read. Unknown ids are ignored."""
        with self._lock:
            self._loading.discard(lora_id)
            self._contents.pop(lora_id, None)
            for adapters in self._loaded.pop(lora_id, ()):
                del adapters.by_id[lora_id]

    def rows(self, lora_ids: Sequence[int], row_starts: Sequence[int]) -> LoraRows | None:
        """The step's rows grouped by adapter; None if all use the base model.

        lora_ids: of each sequence of the step. Sequence i has the rows row_starts[i] .. row_starts[i + 1]. Raises AssertionError for an
        adapter that is not loaded.
        """
        if not any(lora_ids):
            return None
        parts: defaultdict[int, list[int]] = defaultdict(list)
        for i, lora_id in enumerate(lora_ids):
            if lora_id:
                assert lora_id in self._loaded, f"adapter {lora_id} is not loaded"
                parts[lora_id] += range(row_starts[i], row_starts[i + 1])
        groups: list[tuple[int, Rows]] = []
        for lora_id, numbers in parts.items():
            chosen: Rows = slice(numbers[0], numbers[-1] + 1)
            if numbers[-1] - numbers[0] >= len(numbers):
                chosen = torch.tensor(numbers, device=self._placement.device)
            groups.append((lora_id, chosen))
        return LoraRows(row_starts[-1], tuple(groups))

    def _read(self, checkpoint: LoraCheckpoint) -> dict[Linear, LoraFactors]:
        """The factors by layer: of B the rows of this rank's outputs, of A the columns of its inputs.

        Everything is checked and converted before anything is kept.
        """
        names: dict[tuple[str, str], str] = {}
        for (module, side), name in checkpoint.modules.items():
            ours = self._rename(f"{module}.weight").removesuffix(".weight")
            if (ours, side) in names:
                raise ModelError(f"{WEIGHTS_NAME}: tensors {names[ours, side]} and {name} are both {side} of {ours}")
            names[ours, side] = name
        wanted = self._wanted(checkpoint)
        expected = {(module, side) for module in wanted for side in "AB"}
        foreign = sorted(names[key] for key in names if key not in expected)
        if foreign:
            raise ModelError(
                f"{WEIGHTS_NAME}: tensors that do not belong to a supported linear layer in target_modules ({len(foreign)}): "
                f"{_some(foreign)}"
            )
        missing = sorted(f"{module}.lora_{side}.weight" for module, side in expected - names.keys())
        if missing:
            raise ModelError(f"{WEIGHTS_NAME}: missing tensors ({len(missing)}): {_some(missing)}")
        by_layer: dict[Linear, list[str]] = {}
        for module in wanted:
            self._check_shapes(checkpoint, module, names)
            if self._targets[module].is_here:
                by_layer.setdefault(self._targets[module].layer, []).append(module)
        return {layer: self._factors(checkpoint, layer, modules, names) for layer, modules in by_layer.items()}

    def _wanted(self, checkpoint: LoraCheckpoint) -> list[str]:
        """Modules that the adapter changes, in the model's order."""
        config = checkpoint.config
        wanted = [module for module in self._targets if module != _HEAD and config.wants(module)]
        for module in wanted:
            if _EXPERTS in module:
                raise ModelError(f"adapters on experts are not supported, and this one targets {module}")
        for name in (_HEAD, "embed_tokens"):
            if isinstance(config.targets, ModuleNames) and name in config.targets.names:
                raise ModelError(f"adapters on {name} are not supported, and this one targets it")
        if not wanted:
            raise ModelError("target_modules matches no linear layer of the model")
        return wanted

    def _check_shapes(self, checkpoint: LoraCheckpoint, module: str, names: dict[tuple[str, str], str]) -> None:
        target, rank = self._targets[module], checkpoint.config.rank_of(module)
        if rank > self._max_rank:
            raise ModelError(
                f"the adapter has rank {rank} on {module}; this server allows at most {self._max_rank} (--max-lora-rank)"
            )
        outputs, inputs = target.layer.shape(target.projection)
        shapes = {"A": (rank, inputs), "B": (outputs, rank)}
        for side, shape in shapes.items():
            name = names[module, side]
            if checkpoint.shape(name) != shape:
                raise ModelError(
                    f"{WEIGHTS_NAME}: {name} is {list(checkpoint.shape(name))}, but the model and the rank require {list(shape)}"
                )

    def _factors(
        self, checkpoint: LoraCheckpoint, layer: Linear, modules: list[str], names: dict[tuple[str, str], str]
    ) -> LoraFactors:
        config = checkpoint.config

        def place(values: torch.Tensor) -> torch.Tensor:
            return values.to(device=self._placement.device, dtype=self._placement.compute_dtype).contiguous()

        ends = list(accumulate(config.rank_of(module) for module in modules))
        parts = []
        for end, module in zip(ends, modules, strict=True):
            # The scale is multiplied into B, which saves a product per step and differs from peft by one float32 rounding.
            rows, _ = layer.own(self._targets[module].projection)
            scaled = checkpoint.tensor(names[module, "B"])[rows] * config.scale_of(module)
            parts.append(
                LoraPart(
                    ranks=slice(end - config.rank_of(module), end),
                    columns=layer.columns(self._targets[module].projection),
                    b=kernels.pack_linear(place(scaled)),
                )
            )
        _, inputs = layer.own(self._targets[modules[0]].projection)
        a = torch.cat([checkpoint.tensor(names[module, "A"])[:, inputs] for module in modules])
        return LoraFactors(kernels.pack_linear(place(a)), tuple(parts))


def _some(names: Sequence[str]) -> str:
    more = ", ..." if len(names) > _NAMES_IN_A_MESSAGE else ""
    return ", ".join(names[:_NAMES_IN_A_MESSAGE]) + more
