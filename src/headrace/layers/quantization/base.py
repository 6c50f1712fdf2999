"""The base classes of weight formats, their registry, and the joining of parts that are stored in different formats.

The facts about a format that need no torch are a row of `headrace.checkpoint.weight_formats`. Runs in the thread that loads the model.
"""

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import ClassVar, TypeVar

import torch

from headrace import kernels
from headrace.checkpoint.quantized_matrix import BlockMatrix, QuantizedMatrix, in_one_grid, stack
from headrace.checkpoint.weight_formats import FINEST_STORED, FORMATS, FormatFacts, Scheme
from headrace.kernels import PackedLinear

# Quantised at a time: the temporaries stay in the processor's cache.
_CHUNK_ELEMENTS = 1 << 18
_ROWS_ON_A_GPU = 4096

Part = torch.Tensor | QuantizedMatrix | BlockMatrix  # rows of a weight, or a bias, as they are loaded
Calibrator = Callable[[torch.Tensor, torch.Tensor], QuantizedMatrix]
"""Rounds a weight float32[n, k] so that its products change least for the inputs seen: the second argument is the sum of x x^T over those
inputs, float32[k, k]. k is a multiple of 32."""


class WeightFormat(ABC):
    """How linear layers keep their weights. Each format has one instance, which holds no state. name: of its row in `FORMATS`."""

    name: ClassVar[Scheme]

    @property
    def facts(self) -> FormatFacts:
        return FORMATS[self.name]

    @abstractmethod
    def pack(self, parts: Sequence[Part], bias: torch.Tensor | None, dtype: torch.dtype) -> PackedLinear:
        """Pack the rows of all parts as one weight, on the device of the parts.

        parts: [n, k] each, of any float dtype; stored matrices only if `facts.codes` is not None. bias: [sum of n].
        dtype: of weights that stay floats.
        """


class IntegerFormat(WeightFormat):
    @abstractmethod
    def nearest(self, weight: torch.Tensor) -> QuantizedMatrix:
        """Round float32[n, k] to the nearest codes. The codes and scales of a row depend on that row alone."""

    @property
    def calibrator(self) -> Calibrator | None:
        """Rounds better than `nearest` when inputs of the layer are known; None for a format that does without."""
        return None

    def quantize(self, weight: torch.Tensor) -> QuantizedMatrix:
        """Apply `nearest` to a weight [n, k] of any float dtype, a few rows at a time, on its device."""
        num_rows = max(1, _CHUNK_ELEMENTS // weight.shape[1]) if weight.device.type == "cpu" else _ROWS_ON_A_GPU
        return stack([self.nearest(rows.to(torch.float32)) for rows in weight.split(num_rows)])

    def join(self, parts: Sequence[Part]) -> QuantizedMatrix:
        """One matrix with the rows of all parts. Float parts are quantised first: to `facts.rounds_to`, unless a part is stored in another
        format. Parts of different formats are all converted to FINEST_STORED; otherwise stored parts stay unchanged."""
        target = self.facts.rounds_to or self.name
        stored = {part.scheme for part in parts if isinstance(part, QuantizedMatrix)}
        rounding = integer_format(target) if stored <= {target} else self
        matrices = []
        for part in parts:
            assert not isinstance(part, BlockMatrix), "blocks of a file in another format"
            matrices.append(part if isinstance(part, QuantizedMatrix) else rounding.quantize(part))
        if len({matrix.scheme for matrix in matrices}) > 1:
            finest = integer_format(FINEST_STORED)
            matrices = [
                matrix if matrix.scheme == finest.name else finest.quantize(matrix.dequantize()) for matrix in matrices
            ]
        return stack(matrices)

    def pack(self, parts: Sequence[Part], bias: torch.Tensor | None, dtype: torch.dtype) -> PackedLinear:
        return kernels.pack_linear(self.join(parts), bias)


def pack_as_stored(
    own: WeightFormat, parts: Sequence[Part], bias: torch.Tensor | None, dtype: torch.dtype
) -> PackedLinear:
    """Pack the rows of all parts in the precision that their checkpoint has. own: the format that has its codes.

    Parts in floats, or in codes that have no one grid in common, make all of the product floats: in float32 if any has codes.
    """
    matrices = [part for part in parts if isinstance(part, QuantizedMatrix)]
    if len(matrices) == len(parts) and (grid := in_one_grid(matrices)) is not None:
        return own.pack(grid, bias, dtype)
    floats = [part if isinstance(part, torch.Tensor) else part.dequantize() for part in parts]
    return weight_format("none").pack(floats, bias, torch.float32 if matrices else dtype)


_Format = TypeVar("_Format", bound=WeightFormat)
_REGISTERED: dict[Scheme, WeightFormat] = {}


def register(format_class: type[_Format]) -> type[_Format]:
    assert format_class.name not in _REGISTERED, format_class.name
    _REGISTERED[format_class.name] = format_class()
    return format_class


def weight_format(name: Scheme) -> WeightFormat:
    return _REGISTERED[name]


def integer_format(name: Scheme) -> IntegerFormat:
    """The format with that name, which must be an `IntegerFormat`."""
    found = _REGISTERED[name]
    assert isinstance(found, IntegerFormat), name
    return found


def stack_floats(parts: Sequence[Part]) -> torch.Tensor:
    """The rows of all parts, which are tensors."""
    tensors = [part for part in parts if isinstance(part, torch.Tensor)]
    assert len(tensors) == len(parts), "a quantised part in a float layer"
    return tensors[0] if len(tensors) == 1 else torch.cat(tensors)
