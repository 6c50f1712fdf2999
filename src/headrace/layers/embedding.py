"""Token embedding. Runs in the thread that runs the model."""

from collections.abc import Iterator
from typing import Any, cast

import torch

from headrace import kernels
from headrace.checkpoint.quantized_matrix import BlockMatrix, StoredMatrix
from headrace.distributed.base import length
from headrace.kernels import PackedLinear
from headrace.kernels.packing import itemsize
from headrace.layers.linear import Linear
from headrace.layers.weight import Keeper, Kept, Parts, Placement, Weight, fields_of

VOCABULARY_UNIT = 64  # ids in a unit of `vocabulary_part`: ranks' parts end where the kernels' blocks of columns do


class Embedding:
    """table[ids] * scale. Each rank has the rows of some ids, and the sum over the ranks is the output.

    tied: the output projection that shares this table. A lookup then reads the projection's packed weight, and there is no table.
    If the projection has codes, there is a table in the weights' dtype: it costs memory but no time, since a lookup reads only one row.
    A table in the blocks of a GGUF file stays in them.
    """

    def __init__(
        self, vocab_size: int, size: int, placement: Placement, *, scale: float = 1.0, tied: Linear | None = None
    ) -> None:
        self._shape = (vocab_size, size)
        self._scale = scale
        self._placement = placement
        self._tied = tied
        self._own = vocabulary_part(vocab_size, placement)
        self._shared = tied if placement.head.format.facts.is_a_table else None
        self._table: torch.Tensor | PackedLinear | None = None

    def __call__(self, ids: torch.Tensor) -> torch.Tensor:
        """ids int[tokens] -> [tokens, size] in the compute dtype, a fresh tensor."""
        table = self._table if self._shared is None else self._shared.packed
        assert table is not None, "not loaded"
        group = self._placement.shard.group
        if group is None:
            return kernels.embedding(ids, table, self._scale)
        local = ids - self._own.start
        others = (local < 0) | (local >= length(self._own))
        rows = kernels.embedding(local.masked_fill_(others, 0), table, self._scale)
        rows.masked_fill_(others.unsqueeze(1), 0)
        group.all_reduce(rows)
        return rows

    def weights(self, prefix: str) -> Iterator[Weight]:
        head = None if self._tied is None else next(self._tied.weights(""))
        own: tuple[Keeper, ...] = () if self._shared is not None else (self,)
        yield Weight(
            f"{prefix}.weight",
            self._shape,
            self._load,
            self._read,
            itemsize=(self._itemsize if own else 0) + (0 if head is None else head.itemsize),
            load_quantized=self._load_stored if self._takes_stored(head) else None,
            keepers=own if self._tied is None else (*own, self._tied),
            part="weight" if head is None else head.part,
            own=(self._own,),
            tied_name="" if head is None else head.name,
        )

    @property
    def _itemsize(self) -> float:
        return itemsize(self._table) if isinstance(self._table, PackedLinear) else self._placement.weight_dtype.itemsize

    def _takes_stored(self, head: Weight | None) -> bool:
        return self._placement.format.facts.blocks if head is None else head.load_quantized is not None

    def kept(self) -> Kept:
        assert self._table is not None, "not loaded"
        return fields_of(self._table) if isinstance(self._table, PackedLinear) else {"table": self._table}

    def restore(self, kept: Kept) -> None:
        self._table = cast(torch.Tensor, kept["table"]) if "table" in kept else PackedLinear(**cast(Any, kept))

    def staged(self, parts: Parts) -> Kept:
        (tensor,) = parts.values()
        if not isinstance(tensor, torch.Tensor):
            tensor = tensor.dequantize()
        table = tensor[self._own].to(device=self._placement.device, dtype=self._placement.weight_dtype, copy=True)
        return {"table": table.contiguous()}

    def _read(self) -> torch.Tensor:
        if self._shared is None:
            assert self._table is not None, "not loaded"
            if isinstance(self._table, PackedLinear):
                return kernels.unpack_linear(self._table).to(self._placement.weight_dtype)
            return self._table
        return kernels.unpack_linear(self._shared.packed).to(self._placement.weight_dtype)

    def _load(self, tensor: torch.Tensor) -> None:
        if self._shared is None:
            self._table = self._placement.place(tensor[self._own]).contiguous()
        if self._tied is not None:
            next(self._tied.weights("")).load(tensor)

    def _load_stored(self, matrix: StoredMatrix) -> None:
        if self._shared is None:
            own = matrix.rows(self._own.start, self._own.stop)
            if isinstance(own, BlockMatrix) and own.type.block_values > 1:
                self._table = kernels.pack_blocks([own], None)
            elif isinstance(own, BlockMatrix):
                self._table = own.dequantize().contiguous()
            else:
                self._table = self._placement.place(own.dequantize())
        if self._tied is not None:
            load = next(self._tied.weights("")).load_quantized
            assert load is not None, self._placement
            load(matrix)


def vocabulary_part(vocab_size: int, placement: Placement) -> slice:
    """The ids whose rows of the embedding and of the output projection a rank has."""
    return placement.shard.part(vocab_size, VOCABULARY_UNIT)
