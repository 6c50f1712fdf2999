"""What a format of quantised safetensors says of itself, and the arithmetic that several of them share: from packed codes to a matrix.

Owns the way from a layer's tensors to a `QuantizedMatrix` of the same weights, or to floats where our kernels have no such codes. Does not own
which format a checkpoint has (`registry`) nor the files (`checkpoint.huggingface`). Runs in whichever process loads the model; torch is imported
when the first tensor is read.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from headrace.checkpoint.quantized_matrix import BlockMatrix, QuantizedMatrix
from headrace.checkpoint.weight_formats import KERNEL_GROUP, Scheme
from headrace.errors import ModelError

if TYPE_CHECKING:
    import torch


class TensorSource(Protocol):
    """The tensors of a checkpoint by name. dtype: its safetensors name. metadata: of the file that holds a tensor."""

    def stored_shape(self, name: str) -> tuple[int, ...]: ...

    def stored_dtype(self, name: str) -> str: ...

    def stored_tensor(self, name: str) -> "torch.Tensor": ...

    def metadata(self, name: str) -> Mapping[str, str]: ...


@dataclass(frozen=True, slots=True)
class Parts:
    """The tensors of one quantised layer. names: of the tensors, by what follows `<layer>.` in them."""

    layer: str
    names: Mapping[str, str]
    source: TensorSource

    def __contains__(self, suffix: str) -> bool:
        return suffix in self.names

    def shape(self, suffix: str) -> tuple[int, ...]:
        return self.source.stored_shape(self._name(suffix))

    def dtype(self, suffix: str) -> str:
        return self.source.stored_dtype(self._name(suffix))

    def matrix_shape(self, suffix: str) -> tuple[int, int]:
        shape = self.shape(suffix)
        if len(shape) != 2:
            raise self.fault(suffix, f"is {list(shape)}, expected a matrix")
        return shape[0], shape[1]

    def metadata(self, suffix: str) -> Mapping[str, str]:
        return self.source.metadata(self._name(suffix))

    def tensor(self, suffix: str, dtypes: tuple[str, ...], *shapes: tuple[int, ...]) -> "torch.Tensor":
        """The tensor. Raises ModelError unless it has one of these dtypes and, if there are any, one of these shapes."""
        if self.dtype(suffix) not in dtypes:
            raise self.fault(suffix, f"is {self.dtype(suffix)}, expected {' or '.join(dtypes)}")
        if shapes and self.shape(suffix) not in shapes:
            wanted = " or ".join(str(list(shape)) for shape in shapes)
            raise self.fault(suffix, f"is {list(self.shape(suffix))}, expected {wanted}")
        return self.source.stored_tensor(self._name(suffix))

    def floats(self, suffix: str, *shapes: tuple[int, ...]) -> "torch.Tensor":
        """As `tensor`, of any float dtype of 16 bits or more, in float32."""
        return self.tensor(suffix, FLOATS, *shapes).float()

    def scalar(self, suffix: str) -> "torch.Tensor":
        """float32[] of a tensor with one element."""
        return self.floats(suffix, (), (1,), (1, 1)).reshape(())

    def fault(self, suffix: str, why: str) -> ModelError:
        return ModelError(f"tensor {self.layer}.{suffix} {why}")

    def _name(self, suffix: str) -> str:
        if suffix not in self.names:
            raise ModelError(f"quantised layer {self.layer} has no {suffix}")
        return self.names[suffix]


FLOATS = ("F32", "F16", "BF16")
FLOAT8 = ("F8_E4M3", "F8_E5M2")
POWERS = ("U8", "F8_E8M0")
"""Scales that are powers of two."""


class QuantizedFormat(ABC):
    """One way to store a matrix as several tensors `<layer>.<suffix>`; an instance holds what a checkpoint's config says.

    suffixes: of the tensors that `read` uses. telling: any of these makes a layer a quantised one. unused: those of tensors that nothing here
    needs, such as scales of activations, which are rounded with scales of their own. needed: those that every layer must have. scheme: how a model
    with such matrices computes; none: they are dequantised. described: for the start-up summary.
    """

    suffixes: ClassVar[tuple[str, ...]]
    telling: ClassVar[tuple[str, ...]]
    unused: ClassVar[tuple[str, ...]] = ()
    needed: ClassVar[tuple[str, ...]] = ()
    scheme: Scheme
    described: str

    @abstractmethod
    def shape(self, parts: Parts) -> tuple[int, int]:
        """(n, k) of the matrix."""

    def required(self, parts: Parts) -> tuple[str, ...]:
        """The suffixes that a layer with these parts must have."""
        return self.needed

    @abstractmethod
    def read(self, parts: Parts) -> "QuantizedMatrix | torch.Tensor":
        """The matrix, or its weights in float32 if our kernels do not have its codes. Raises ModelError when its tensors are not what the format
        says."""

    def blocks(self, parts: Parts) -> BlockMatrix | None:
        """The matrix bit for bit in the blocks of a type of GGUF, where `scheme` is gguf; None for any other. Raises as `read`."""
        return None


def group_size_of(method: str, group_size: Any) -> int:
    """The value of a config, -1 for a whole row. Raises ModelError for what is none."""
    if type(group_size) is not int or (group_size != -1 and group_size <= 0):
        raise ModelError(
            f"{method} checkpoints with group_size {group_size!s:.80} are not supported; -1 and positive ones are"
        )
    return group_size


def is_kernel_group(group_size: int) -> bool:
    """Whether kernels have groups of this size, -1 = a whole row."""
    return group_size == -1 or group_size % KERNEL_GROUP == 0


def group_of(parts: Parts, k: int, group_size: int) -> int:
    """Elements of a row that share a scale. group_size: of the config, -1 = a whole row."""
    size = k if group_size == -1 else group_size
    if size <= 0 or k % size:
        raise ModelError(f"{parts.layer}: rows of {k} are not divided by groups of {size}")
    return size


def unpacked(words: "torch.Tensor", bits: int) -> "torch.Tensor":
    """Codes uint8[..., m * 32 / bits] of int32[..., m], or of as many bytes: one after the other from the lowest bit on, across words. The last axis
    has whole words of codes: 32 m is a multiple of 8 bits."""
    import torch

    data: torch.Tensor = words.contiguous().view(torch.uint8)
    if 8 % bits == 0:
        shifts = torch.arange(0, 8, bits, dtype=torch.uint8)
        codes: torch.Tensor = data.unsqueeze(-1) >> shifts & 2**bits - 1
        return codes.flatten(-2)
    # Eight codes fill as many bytes as a code has bits.
    eights = data.reshape(*data.shape[:-1], -1, bits).long()
    together = sum((eights[..., i] << 8 * i for i in range(1, bits)), eights[..., 0])
    wide: torch.Tensor = together.unsqueeze(-1) >> torch.arange(0, 8 * bits, bits) & 2**bits - 1
    return wide.to(torch.uint8).flatten(-2)


def integers(
    codes: "torch.Tensor", bits: int, scales: "torch.Tensor", zeros: "torch.Tensor | int", size: int
) -> "QuantizedMatrix | torch.Tensor":
    """The matrix of scale * (code - zero), exactly: 4-bit codes for up to 4 bits, 8-bit ones if every code - zero is one; else float32[n, k].

    codes: uint8[n, k], below 2^bits. scales: float32[n, k / size]; zeros: the same, or one for all. size: of a group.
    """
    import torch

    zeros = torch.full_like(scales, zeros) if isinstance(zeros, int) else zeros
    if size % KERNEL_GROUP and size == codes.shape[1]:
        groups = -(-size // KERNEL_GROUP)
        scales, zeros, size = scales.expand(-1, groups), zeros.expand(-1, groups), KERNEL_GROUP
    if size % KERNEL_GROUP:
        return _dequantized(codes, scales, zeros, size)
    scales = scales.contiguous()
    scheme: Scheme = "int4" if bits <= 4 else "int8"
    zero = 8 if scheme == "int4" else 128
    moved = _moved(codes, zero - zeros, size, 2 * zero - 1)
    if moved is not None:
        return QuantizedMatrix(scheme, moved, scales, None, size)
    if scheme == "int4":
        return QuantizedMatrix(scheme, codes, scales, (scales * zeros).contiguous(), size)
    return _dequantized(codes, scales, zeros, size)


def _moved(codes: "torch.Tensor", by: "torch.Tensor", size: int, largest: int) -> "torch.Tensor | None":
    """codes + by as uint8, None unless all are integers from 0 to `largest`. by: of each group of `size`."""
    import torch

    if not by.numel() or bool((by == 0).all()):
        return codes.contiguous()
    if not bool(torch.isfinite(by).all()) or not bool((by == by.round()).all()) or bool((by.abs() > 256).any()):
        return None
    moved = codes.to(torch.int16).add_(_spread(by.to(torch.int16), size, codes.shape[1]))
    low, high = torch.aminmax(moved)
    return moved.to(torch.uint8) if int(low) >= 0 and int(high) <= largest else None


def _spread(values: "torch.Tensor", size: int, k: int) -> "torch.Tensor":
    return values.repeat_interleave(size, dim=1)[:, :k]


def _dequantized(codes: "torch.Tensor", scales: "torch.Tensor", zeros: "torch.Tensor", size: int) -> "torch.Tensor":
    k = codes.shape[1]
    return codes.float().sub_(_spread(zeros, size, k)).mul_(_spread(scales, size, k))


def ordered(
    parts: Parts,
    suffix: str,
    codes: "torch.Tensor",
    bits: int,
    scales: "torch.Tensor",
    zeros: "torch.Tensor | int",
    lowest: int = 0,
) -> "QuantizedMatrix | torch.Tensor":
    """As `integers`. If the layer has a tensor of this suffix, it is the group of each column, and where columns of a group are not side by side, the
    matrix is float32[n, k]. lowest: -1 where that stands for no order."""
    import torch

    k, groups = codes.shape[1], scales.shape[1]
    if suffix in parts:
        order = parts.tensor(suffix, ("I32", "I64"), (k,)).long()
        if int(order.min()) < lowest or int(order.max()) >= groups:
            raise parts.fault(suffix, f"names groups beyond the {groups} that there are")
        if int(order.min()) >= 0 and not torch.equal(order, torch.arange(k) // (k // groups)):
            values = codes.float().sub_(zeros if isinstance(zeros, int) else zeros[:, order])
            return values.mul_(scales[:, order])
    return integers(codes, bits, scales, zeros, k // groups)


_DOUBLED = (0, 1, 2, 3, 4, 6, 8, 12)
"""Twice the values of E2M1 (OCP Microscaling Formats 1.0, table 5), by the code without its sign."""


def doubled_fp4(packed: "torch.Tensor") -> "torch.Tensor":
    """Twice the values int8[n, k] of E2M1 codes uint8[n, k / 2], the even element in the low nibble."""
    import torch

    values = torch.tensor([*_DOUBLED, *(-value for value in _DOUBLED)], dtype=torch.int8)
    codes = torch.arange(256)
    return looked_up(packed, torch.stack((values[codes & 15], values[codes >> 4]), dim=1)).flatten(-2)


def looked_up(packed: "torch.Tensor", pairs: "torch.Tensor") -> "torch.Tensor":
    """[..., 2], the two values of each byte. packed: uint8[...]. pairs: [256, 2]."""
    return pairs.index_select(0, packed.reshape(-1).int()).reshape(*packed.shape, 2)


def power_scales(parts: Parts, suffix: str, *shapes: tuple[int, ...]) -> "torch.Tensor":
    """Scales in E8M0, 2^(code - 127), as float32; NaN for 255, as the format says."""
    import torch

    codes = parts.tensor(suffix, POWERS, *shapes).view(torch.uint8)
    values = torch.ldexp(torch.ones(codes.shape), codes.to(torch.int32) - 127)
    return values.masked_fill_(codes == 255, torch.nan)
