"""How layers name, load and return their weights: `Weight`, one Hugging Face tensor of one layer, and `Placement`, device and precision of models."""

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, fields, replace
from functools import partial
from typing import Literal, Protocol, cast

import torch

from headrace.checkpoint.quantized_matrix import StoredMatrix
from headrace.checkpoint.weight_formats import Scheme
from headrace.distributed.base import ALL_LAYERS, WHOLE, Shard, Stage, length
from headrace.kernels.packing import PackedLinear
from headrace.layers.quantization import WeightFormat, weight_format

Kept = Mapping[str, torch.Tensor | int | str | None]  # the converted weights that a layer keeps, by field
Parts = Mapping[str, torch.Tensor | StoredMatrix]  # new tensors of one layer, by `Weight.part`


def fields_of(packed: PackedLinear) -> Kept:
    return {field.name: getattr(packed, field.name) for field in fields(packed)}


class Keeper(Protocol):
    """A layer that converts the weights it loads, and can take converted ones instead.

    Kept weights are never written once a step may read them: new weights are made beside the old ones, then the layer switches to them.
    """

    def kept(self) -> Kept:
        """The converted weights; available once they have been loaded."""

    def restore(self, kept: Kept) -> None:
        """Take the result of `kept` or `staged`, without a copy, instead of loading. Quick; called between two steps."""

    def staged(self, parts: Parts) -> Kept:
        """The converted weights with these parts in place of the current ones, as copies, never `parts` themselves. Changes nothing. Slow."""


class Observable(Protocol):
    """A layer that passes its input to an observer, if it has one, before it computes."""

    observer: Callable[[torch.Tensor], None] | None


@dataclass(frozen=True, slots=True)
class Weight:
    """One tensor of a checkpoint and the layer that needs it.

    name, shape: as Hugging Face has them. load: takes a tensor of this shape, any float dtype, and keeps a converted copy or, if
    nothing changes, the tensor itself. read: returns it in Hugging Face's layout, in the precision that is kept.
    init: initialisation without a checkpoint. itemsize: bytes per kept element, a fraction for quantised weights.
    load_quantized: takes a quantised tensor instead, if the layer can compute with it; else None.
    layer: the linear layer whose matrix this is, for calibration; None for any other tensor.
    keepers: the layers that convert this tensor; it need not be loaded if all of them have been restored. Empty: it cannot be replaced
    while the model serves. part: its name in the keepers, which may also keep other weights.
    own: by dimension, what this rank keeps of it and `read` returns; of a dimension that is not listed, all. Empty parts: nothing, see
    `elsewhere`. tied_name: of the output projection if that is the same tensor.
    """

    name: str
    shape: tuple[int, ...]
    load: Callable[[torch.Tensor], None]
    read: Callable[[], torch.Tensor]
    init: Literal["normal", "ones", "zeros"] = "normal"
    itemsize: float = 4
    load_quantized: Callable[[StoredMatrix], None] | None = None
    layer: Observable | None = None
    keepers: tuple[Keeper, ...] = ()
    part: str = ""
    own: tuple[slice, ...] = ()
    tied_name: str = ""

    @property
    def num_bytes(self) -> float:
        return math.prod(self.own_shape) * self.itemsize

    @property
    def whole_bytes(self) -> float:
        """Bytes that are kept by all ranks together, those of weights that every rank has whole counted once."""
        return math.prod(self.shape) * self.itemsize

    @property
    def own_shape(self) -> tuple[int, ...]:
        return (*map(length, self.own), *self.shape[len(self.own) :])

    @property
    def is_elsewhere(self) -> bool:
        return NOTHING in self.keepers


class RowLayer(Protocol):
    def __call__(self, x: torch.Tensor, /) -> torch.Tensor:
        """x [rows, in_size] -> [rows, out_size], each row by itself."""

    def weights(self, prefix: str, /) -> Iterator[Weight]:
        """Its tensors, whose names begin so."""


NamedLayer = tuple[RowLayer, str]
"""A layer and the prefix of its tensors' names."""


class _Nothing:
    """The `Keeper` of weights that are elsewhere."""

    def kept(self) -> Kept:
        return {}

    def restore(self, kept: Kept) -> None:
        pass

    def staged(self, parts: Parts) -> Kept:
        return {}


NOTHING: Keeper = _Nothing()


def elsewhere(weight: Weight) -> Weight:
    """A weight that only other ranks keep: it has a name and a shape here, so that checkpoints and updates are checked as a whole."""
    own = tuple(slice(0, 0) for _ in weight.shape)
    return replace(
        weight,
        load=lambda tensor: None,
        read=lambda: torch.empty((0,) * len(own)),
        load_quantized=None,
        keepers=(NOTHING,),
        own=own,
    )


@dataclass(frozen=True, slots=True)
class Placement:
    """Device and precision of a model, and how its linear layers compute.

    max_positions: longest supported sequence, in tokens; tables by position have this many rows. quantization: of linear layers.
    shard: the part of each layer that this process has; stage: the layers that it has. whole_experts: of a mixture, some whole experts instead
    of a part of each. whole_attention: attention is not split: each rank has all of its weights, and the KV of other sequences.
    composed_positions: most tokens of images in a step, of a model that has three positions for each of them.
    keeps_floats: layers that a quantised checkpoint has in floats stay floats, but for the output projection.
    """

    device: torch.device
    weight_dtype: torch.dtype
    max_positions: int
    quantization: Scheme = "none"
    shard: Shard = WHOLE
    stage: Stage = ALL_LAYERS
    whole_experts: bool = False
    whole_attention: bool = False
    composed_positions: int = 0
    keeps_floats: bool = False

    @property
    def format(self) -> WeightFormat:
        return weight_format(self.quantization)

    @property
    def compute_dtype(self) -> torch.dtype:
        """dtype of activations: float32 on CPU, whatever the weights are; elsewhere the weights' own."""
        return torch.float32 if self.device.type == "cpu" else self.weight_dtype

    @property
    def unquantized(self) -> "Placement":
        """For a layer that must stay exact, such as a router."""
        return replace(self, quantization="none")

    @property
    def experts(self) -> "Placement":
        return replace(self, shard=WHOLE) if self.whole_experts else self

    @property
    def attention(self) -> "Placement":
        return replace(self, shard=WHOLE) if self.whole_attention else self

    @property
    def head(self) -> "Placement":
        """For the output projection: it decides every token, so a format may give it more bits, and on a GPU it keeps all 16."""
        if self.device.type != "cpu":
            return self.unquantized
        return replace(self, quantization=self.format.facts.head or self.quantization, keeps_floats=False)

    def place(self, tensor: torch.Tensor) -> torch.Tensor:
        """A matrix on the device in the weights' dtype."""
        return tensor.to(device=self.device, dtype=self.weight_dtype)


class TensorKeeper:
    """A `Keeper` of tensors that stay tensors: each is kept by its `Weight.part`, in float32. tensors: those that are kept now, by part."""

    def __init__(self, placement: Placement) -> None:
        self._device = placement.device
        self.tensors: dict[str, torch.Tensor] = {}

    def own(self, tensor: torch.Tensor) -> torch.Tensor:
        """What is kept of a tensor: a copy."""
        return tensor.to(device=self._device, dtype=torch.float32, copy=True)

    def changed(self) -> None:
        """Called when other tensors are kept."""

    def weight_of(
        self, part: str, name: str, shape: tuple[int, ...], init: Literal["normal", "ones", "zeros"] = "normal"
    ) -> Weight:
        """A tensor of the checkpoint that is kept as this part."""
        load, read = partial(self._load, part), partial(self._read, part)
        return Weight(name, shape, load, read, init, keepers=(self,), part=part)

    def kept(self) -> Kept:
        return dict(self.tensors)

    def restore(self, kept: Kept) -> None:
        self.tensors = cast(dict[str, torch.Tensor], dict(kept))
        self.changed()

    def staged(self, parts: Parts) -> Kept:
        return self.tensors | {part: self.own(cast(torch.Tensor, tensor)) for part, tensor in parts.items()}

    def _load(self, part: str, tensor: torch.Tensor) -> None:
        self.tensors[part] = self.own(tensor)
        self.changed()

    def _read(self, part: str) -> torch.Tensor:
        return self.tensors[part]
