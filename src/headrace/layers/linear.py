"""Linear layers: one product for all projections that share an input (q, k, v; gate, up), and the adapters on it.

Runs in the thread that runs the model; parts are loaded in any thread, and other threads add and remove adapters, one at a time.
"""

import threading
from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from itertools import accumulate
from typing import Any, cast

import torch

from headrace import kernels
from headrace.checkpoint.quantized_matrix import StoredMatrix
from headrace.distributed.base import length
from headrace.errors import ModelError
from headrace.kernels import LoraFactors, LoraRows, PackedLinear
from headrace.kernels.packing import FLOAT_LAYOUTS, itemsize
from headrace.layers.quantization.base import Part, pack_as_stored, stack_floats
from headrace.layers.weight import Kept, Parts, Placement, Weight, fields_of


@dataclass(slots=True)
class LoraStep:
    """What all layers share. rows: of the current step; None if no row uses an adapter."""

    rows: LoraRows | None = None


@dataclass(slots=True)
class LinearAdapters:
    """by_id: factors of the adapters that target this layer."""

    step: LoraStep
    by_id: dict[int, LoraFactors] = field(default_factory=dict)

    def add(self, y: torch.Tensor, x: torch.Tensor) -> None:
        if self.step.rows is not None:
            kernels.lora_delta(y, x, self.step.rows, self.by_id)


class Linear:
    """y = x @ W^T + b, where W stacks the weights of one or more projections of the same input.

    outputs: size of each projection by its Hugging Face name, in the order of y's columns. The stack is packed when its last part
    has been loaded, so a model is usable once every weight has been. unbiased: projections that have no bias where the others do; their part of
    b is 0.
    own_outputs: by projection, the outputs that this rank computes; own_inputs: the inputs that it has, and then y is the sum over the ranks.
    Without them it has all. in_size and outputs are those of the whole layer; the attributes of the same names are this rank's.
    """

    def __init__(
        self,
        in_size: int,
        outputs: Mapping[str, int],
        placement: Placement,
        *,
        bias: bool = False,
        unbiased: Collection[str] = (),
        own_outputs: Mapping[str, slice] | None = None,
        own_inputs: slice | None = None,
    ) -> None:
        self._whole = {name: (size, in_size) for name, size in outputs.items()}
        self._rows = {name: slice(0, size) for name, size in outputs.items()} | dict(own_outputs or {})
        self._inputs = slice(0, in_size) if own_inputs is None else own_inputs
        self._group = None if own_inputs is None else placement.shard.group
        self.in_size = length(self._inputs)
        self.outputs = outputs = {name: length(rows) for name, rows in self._rows.items()}
        self._biased = tuple(name for name in outputs if bias and name not in unbiased)
        self._placement = placement
        ends = list(accumulate(self.outputs.values()))
        self._columns = {name: slice(end - size, end) for end, (name, size) in zip(ends, outputs.items(), strict=True)}
        self._parts: dict[str, Part] = {}
        self._parts_lock = threading.Lock()
        self._packed: PackedLinear
        self._is_packed = False
        self.observer: Callable[[torch.Tensor], None] | None = None
        self.adapters: LinearAdapters | None = None

    @property
    def packed(self) -> PackedLinear:
        """The stack in the layout of the kernels; available once every part has been loaded."""
        return self._packed

    def __call__(self, x: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        """x [rows, in_size] -> [rows, sum(outputs)], in `out` when given."""
        if self.observer is not None:
            self.observer(x)
        y = kernels.linear(x, self._packed, out)
        if self.adapters is not None:
            self.adapters.add(y, x)
        if self._group is not None:
            self._group.all_reduce(y)
        return y

    @property
    def _itemsize(self) -> float:
        facts = self._placement.format.facts
        # A file has many types.
        if (facts.blocks or self._placement.keeps_floats) and self._is_packed:
            return itemsize(self._packed)
        return facts.itemsize(self._placement.weight_dtype.itemsize)

    @property
    def num_outputs(self) -> int:
        return sum(size for size, _ in self._whole.values())

    def columns(self, projection: str) -> slice:
        return self._columns[projection]

    def shape(self, projection: str) -> tuple[int, int]:
        return self._whole[projection]

    def own(self, projection: str) -> tuple[slice, slice]:
        return self._rows[projection], self._inputs

    def weights(self, prefix: str) -> Iterator[Weight]:
        """`<prefix><projection>.weight`, and `.bias` where there is one."""
        for name, shape in self._whole.items():
            load = partial(self._load, f"{name}.weight")
            yield Weight(
                f"{prefix}{name}.weight",
                shape,
                load,
                partial(self._read_weight, name),
                itemsize=self._itemsize,
                load_quantized=load if self._placement.format.facts.keeps_stored else None,
                layer=self,
                keepers=(self,),
                part=f"{name}.weight",
                own=self.own(name),
            )
            if name in self._biased:
                yield Weight(
                    f"{prefix}{name}.bias",
                    shape[:1],
                    partial(self._load, f"{name}.bias"),
                    partial(self._read_bias, name),
                    init="zeros",
                    itemsize=self._placement.weight_dtype.itemsize,
                    keepers=(self,),
                    part=f"{name}.bias",
                    own=self.own(name)[:1],
                )

    def kept(self) -> Kept:
        return fields_of(self._packed)

    def restore(self, kept: Kept) -> None:
        self._packed, self._is_packed = PackedLinear(**cast(Any, kept)), True

    def staged(self, parts: Parts) -> Kept:
        """See `Keeper`: the whole stack, in which projections that are not in `parts` stay the same, bit for bit."""
        whole = {part: self._placed(part, tensor) for part, tensor in parts.items()}
        for name in self.outputs:
            if f"{name}.weight" not in whole:
                whole[f"{name}.weight"] = self._present_weight(name)
            if name in self._biased and f"{name}.bias" not in whole:
                whole[f"{name}.bias"] = self._read_bias(name)
        in_floats = self._placement.keeps_floats and self._packed.layout in FLOAT_LAYOUTS
        packed = self._pack(whole, self._packed.data.dtype) if in_floats else self._pack(whole)
        kept = dict(fields_of(packed))
        given = {tensor.untyped_storage().data_ptr() for tensor in parts.values() if isinstance(tensor, torch.Tensor)}
        if packed.data.untyped_storage().data_ptr() in given:
            # Nothing had to be converted, so the tensor, or this rank's rows of it, was kept unchanged.
            kept["data"] = packed.data.clone()
        return kept

    def _placed(self, part: str, tensor: Part) -> Part:
        tensor = self._own(part, tensor)
        if isinstance(tensor, StoredMatrix):
            return tensor.to(self._placement.device)
        # A weight that will be quantised is not rounded to bfloat16 first.
        if self._placement.format.facts.quantizes and tensor.dim() == 2:
            return tensor.to(self._placement.device)
        return self._placement.place(tensor)

    def _own(self, part: str, tensor: Part) -> Part:
        if self._placement.shard.is_whole:
            return tensor
        name, _, kind = part.rpartition(".")
        rows, inputs = self._rows[name], self._inputs
        if isinstance(tensor, StoredMatrix):
            return tensor.rows(rows.start, rows.stop).columns(inputs.start, inputs.stop)
        if kind == "weight":
            return tensor[rows, inputs].contiguous()
        # A sum over ranks has the bias once.
        once = self._group is None or self._placement.shard.leads
        return tensor[rows] if once else torch.zeros_like(tensor[rows])

    def _load(self, part: str, tensor: Part) -> None:
        placed = self._placed(part, tensor)
        with self._parts_lock:
            self._parts[part] = placed
            if len(self._parts) < len(self.outputs) + len(self._biased):
                return
            parts, self._parts = self._parts, {}
        dtype = self._placement.weight_dtype if self._placement.keeps_floats else None
        self._packed, self._is_packed = self._pack(parts, dtype), True

    def _pack(self, parts: Mapping[str, Part], floats: torch.dtype | None = None) -> PackedLinear:
        """floats: the dtype of parts that are to stay floats; None = they are rounded to the format."""
        weights = [parts[f"{name}.weight"] for name in self.outputs]
        bias = None
        if self._biased:
            sizes = self.outputs.items()
            biases = [parts.get(f"{name}.bias", self._placement.place(torch.zeros(size))) for name, size in sizes]
            bias = stack_floats(biases)
        if floats is not None:
            return pack_as_stored(self._placement.format, weights, bias, floats)
        return self._placement.format.pack(weights, bias, self._placement.weight_dtype)

    def _present_weight(self, name: str) -> Part:
        """A projection exactly as it is kept."""
        rows = kernels.packed_rows(self._packed, self._columns[name])
        if rows is None:
            scheme, others = self._placement.quantization, ", ".join(self.outputs)
            raise ModelError(f"{name} shares a product of {scheme} weights with {others}: replace them together")
        return rows

    def _read_weight(self, name: str) -> torch.Tensor:
        rows = kernels.packed_rows(self._packed, self._columns[name])
        if rows is None:
            rows = kernels.unpack_linear(self._packed)[self._columns[name]]
        return (rows.dequantize() if isinstance(rows, StoredMatrix) else rows).to(self._placement.weight_dtype)

    def _read_bias(self, name: str) -> torch.Tensor:
        assert self._packed.bias is not None, name
        return self._packed.bias[self._columns[name]].to(self._placement.weight_dtype)
