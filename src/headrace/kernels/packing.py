"""Layouts that kernels and their callers share: packed weights, of a linear layer, a mixture of experts and adapters, and the pages of the KV cache.

Owns the shapes, the table of layouts, the reordering of float weights at load time, and how the native code is given them. Does not own the
layouts of integer weights (`quantized_packing`) nor memory: the KV pool allocates its tensors from `kv_cache_shapes`, the loader keeps what is
packed. Runs in whatever thread loads the model.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch

from headrace.checkpoint.quantized_matrix import walsh_hadamard
from headrace.checkpoint.weight_formats import KERNEL_GROUP, WIDE_GROUP, Rounding, Scheme

PAGE_SIZE = 16
"""Tokens in a page of the KV cache."""

PACKED_COLUMNS = 32
"""Output columns of one block of a packed weight."""

Layout = Literal[
    "native_bf16",
    "native_bf16_pairs",
    "native_f16",
    "native_f32",
    "native_int16",
    "native_int8",
    "native_int8_rotated",
    "native_int8_fast",
    "native_int4",
    "native_int4_min",
    "native_gguf",
    "torch",
    "torch_bf16",
    "torch_int8",
    "torch_int8_rotated",
    "torch_int8_fast",
    "torch_int16",
    "torch_fp8",
    "torch_int4",
]


FLOAT_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.float16: 2}
"""FloatType of csrc/cpu/ops.h, by dtype."""

NATIVE_FLOATS: dict[Layout, torch.dtype] = {
    "native_f32": torch.float32,
    "native_bf16": torch.bfloat16,
    "native_f16": torch.float16,
}
"""Layouts whose products round nothing."""

FLOAT_LAYOUTS: frozenset[Layout] = frozenset((*NATIVE_FLOATS, "native_bf16_pairs", "torch", "torch_bf16"))


@dataclass(frozen=True, slots=True)
class QuantizedLayout:
    """A layout of codes for the native kernels. kernel: its QuantScheme in csrc/cpu/ops.h. minimums: the scales are followed by minimums."""

    kernel: int
    scheme: Scheme
    minimums: bool = False


QUANTIZED_LAYOUTS: dict[Layout, QuantizedLayout] = {
    "native_int8": QuantizedLayout(0, "int8"),
    "native_int8_fast": QuantizedLayout(1, "int8-fast"),
    "native_int4": QuantizedLayout(2, "int4"),
    "native_int4_min": QuantizedLayout(3, "int4", minimums=True),
    "native_int16": QuantizedLayout(4, "int16"),
    "native_int8_rotated": QuantizedLayout(6, "int8-rotated"),
}

QUANT_SCHEMES: dict[str, int] = {
    **{layout: quantized.kernel for layout, quantized in QUANTIZED_LAYOUTS.items()},
    "native_bf16_pairs": 5,
    "native_gguf": 7,
}
"""QuantScheme of csrc/cpu/ops.h, by layout: those whose products round their input."""

_AS_THEY_ARE = frozenset((bool, float, int, tuple))

ROUNDINGS: dict[Layout, Rounding] = {
    "torch_int8": Rounding(8, KERNEL_GROUP),
    "torch_int8_rotated": Rounding(8, KERNEL_GROUP, rotated=True),
    "torch_int8_fast": Rounding(8, WIDE_GROUP, rotated=True),
    "torch_int16": Rounding(16, WIDE_GROUP),
}
"""How torch rounds the input of a linear layer, by layout."""

KV_TYPES = {torch.float32: 0, torch.bfloat16: 1, torch.int8: 2, torch.int16: 4}
"""KvType of csrc/cpu/ops.h, by dtype of the KV cache."""
_BF16_PRODUCTS = 3

MAX_INT_HEAD_DIM = 512
"""Of a quantised KV cache."""


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """A linear layer's weight in the layout of the implementation that will run it.

    data: native_bf16: bf16[ceil(n / 32), k, 16, 2], pair j holds columns j and j + 16; native_f32 and native_f16: [ceil(n / 32), k, 32];
        native_bf16_pairs: bf16[ceil(n / 32), ceil(k / 32) * 16, 32, 2], pairs of elements of a row; activations are rounded to bfloat16.
        torch: [n, k] as given (float32 on CPU). Columns and elements beyond n and k are 0. The native_int layouts: uint8,
        `quantized_packing`; native_gguf: uint8, `gguf_packing`. torch_int8, torch_int8_rotated, torch_int8_fast, torch_int16: float32[n, k], the
        weights, rotated where activations are; these are rounded as ROUNDINGS says; torch_bf16: the same, to bfloat16. torch_fp8, torch_int4: of a
        GPU, see `torch_quantized`.
    bias: the native layouts: float32, n rounded up to 32 elements; the others: [n]. column_scales: the native_int layouts: float32,
        n rounded up to 32 elements, a factor of each column.
    """

    n: int
    k: int
    layout: Layout
    data: torch.Tensor
    bias: torch.Tensor | None
    column_scales: torch.Tensor | None = None

    @property
    def native(self) -> tuple[int, ...]:
        """As `_native.Decoder` takes it."""
        address, *others = as_native(self.data, self.column_scales, self.bias)
        return address, self.format, *others, self.n, self.k

    @property
    def format(self) -> int:
        """QuantScheme of csrc/cpu/ops.h or, below 0, the FloatType of a native layout."""
        return QUANT_SCHEMES[self.layout] if self.layout in QUANT_SCHEMES else -1 - FLOAT_TYPES[self.data.dtype]

    @property
    def num_bytes(self) -> int:
        tensors = (self.data, self.bias, self.column_scales)
        return sum(tensor.numel() * tensor.element_size() for tensor in tensors if tensor is not None)


def itemsize(packed: PackedLinear) -> float:
    """Bytes of a weight, those of padding and scales included."""
    return packed.data.nbytes / (packed.n * packed.k)


def as_native(*arguments: Any) -> list[Any]:
    """Arguments of a native call: numbers as they are, of a tensor its address, 0 for None."""
    return [x if type(x) in _AS_THEY_ARE else 0 if x is None else x.data_ptr() for x in arguments]


def check_contiguous(what: str, x: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """ValueError unless `x` is a contiguous tensor of this dtype and shape on the CPU."""
    if x.dtype != dtype or x.shape != shape or not x.is_contiguous() or x.device.type != "cpu":
        raise ValueError(
            f"{what} must be contiguous {dtype} {list(shape)} on CPU, "
            f"got {x.dtype} {list(x.shape)} with strides {x.stride()} on {x.device}"
        )


def check_bias(bias: torch.Tensor | None, n: int) -> None:
    """ValueError unless bias is [n] or None."""
    if bias is not None and tuple(bias.shape) != (n,):
        raise ValueError(f"pack_linear: bias must be [{n}], got shape {tuple(bias.shape)}")


def padded_bias(bias: torch.Tensor | None, n: int) -> torch.Tensor | None:
    """The bias [n] as native layouts have it."""
    if bias is None:
        return None
    return torch.nn.functional.pad(bias.to(torch.float32), (0, -n % PACKED_COLUMNS)).contiguous()


def check_linear(weight: torch.Tensor, bias: torch.Tensor | None) -> None:
    """ValueError unless weight is [n, k], bfloat16, float16 or float32, and bias [n] or None."""
    if weight.dim() != 2:
        raise ValueError(f"pack_linear: weight must be [n, k], got shape {tuple(weight.shape)}")
    if weight.dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise ValueError(f"pack_linear: weight must be bfloat16, float16 or float32, got {weight.dtype}")
    check_bias(bias, weight.shape[0])


def pack_native(weight: torch.Tensor, bias: torch.Tensor | None) -> PackedLinear:
    """Pack a CPU weight [n, k] for the native kernel, in its own dtype."""
    n, k = weight.shape
    bias, padding = padded_bias(bias, n), -n % PACKED_COLUMNS
    blocks = (n + padding) // PACKED_COLUMNS
    if weight.dtype == torch.bfloat16:
        padded = torch.nn.functional.pad(weight, (0, 0, 0, padding)) if padding else weight
        data = padded.reshape(blocks, 2, 16, k).permute(0, 3, 2, 1).contiguous()
        return PackedLinear(n, k, "native_bf16", data, bias)
    padded = torch.nn.functional.pad(weight, (0, 0, 0, padding))
    data = padded.reshape(blocks, PACKED_COLUMNS, k).permute(0, 2, 1).contiguous()
    return PackedLinear(n, k, "native_f16" if weight.dtype == torch.float16 else "native_f32", data, bias)


def pack_native_pairs(weight: torch.Tensor, bias: torch.Tensor | None) -> PackedLinear:
    """Pack a CPU weight [n, k] for the native kernel that rounds its input to bfloat16; the weight is rounded to it, too."""
    n, k = weight.shape
    more = -k % KERNEL_GROUP
    padded = torch.nn.functional.pad(weight.to(torch.bfloat16), (0, more, 0, -n % PACKED_COLUMNS))
    data = padded.reshape(-1, PACKED_COLUMNS, (k + more) // 2, 2).permute(0, 2, 1, 3).contiguous()
    return PackedLinear(n, k, "native_bf16_pairs", data, padded_bias(bias, n))


def pack_torch(weight: torch.Tensor, bias: torch.Tensor | None) -> PackedLinear:
    """Keep the weight as it is; on CPU as float32, where the activations are float32."""
    n, k = weight.shape
    if weight.device.type == "cpu":
        weight = weight.to(torch.float32)
        bias = None if bias is None else bias.to(torch.float32)
    return PackedLinear(n, k, "torch", weight.contiguous(), bias)


@dataclass(frozen=True, slots=True)
class PackedExperts:
    """Packed weights by expert: gate_up [2 * intermediate_size, hidden_size], gate first, and down [hidden_size, intermediate_size].

    table: of native layouts int64[num_experts, 2, 5], csrc/cpu/ops.h's ExpertWeight of each; of layout torch int64[num_experts, 2], their
    addresses, on their device; else None. The addresses are those of the tensors kept here: after weights are reloaded, a new one is needed.
    """

    gate_up: tuple[PackedLinear, ...]
    down: tuple[PackedLinear, ...]
    activation: Literal["silu", "gelu_tanh"]
    table: torch.Tensor | None

    @property
    def hidden_size(self) -> int:
        return self.gate_up[0].k

    @property
    def intermediate_size(self) -> int:
        return self.down[0].k


def pack_experts(
    gate_up: Sequence[PackedLinear], down: Sequence[PackedLinear], activation: Literal["silu", "gelu_tanh"]
) -> PackedExperts:
    """Experts 0, 1, ... for `ops.moe`; no copy is made. The layouts may differ as long as one implementation reads them all.

    ValueError when there are none, or sizes or implementations differ.
    """
    if not gate_up or len(gate_up) != len(down):
        raise ValueError(f"moe: {len(gate_up)} gate_up weights and {len(down)} down weights")
    hidden, intermediate = gate_up[0].k, down[0].k
    every = [*gate_up, *down]
    is_native = not every[0].layout.startswith("torch")
    for up, out in zip(gate_up, down, strict=True):
        if (up.n, up.k, out.n, out.k) != (2 * intermediate, hidden, hidden, intermediate):
            raise ValueError(
                f"moe: experts of [{up.n}, {up.k}] and [{out.n}, {out.k}] beside {hidden} and {intermediate}"
            )
    if any(weight.layout.startswith("torch") == is_native for weight in every):
        raise ValueError(f"moe: layouts {sorted({weight.layout for weight in every})} do not go together")
    table = None
    if is_native:
        table = torch.tensor([[_row(up), _row(out)] for up, out in zip(gate_up, down, strict=True)], dtype=torch.int64)
    elif all(weight.layout == "torch" for weight in every):
        addresses = [[up.data.data_ptr(), out.data.data_ptr()] for up, out in zip(gate_up, down, strict=True)]
        table = torch.tensor(addresses, dtype=torch.int64, device=every[0].data.device)
    return PackedExperts(tuple(gate_up), tuple(down), activation, table)


def _row(packed: PackedLinear) -> list[int]:
    data = packed.data
    # Of blocks of 32 columns, or their entries in a table.
    row_bytes = 8 if packed.layout == "native_gguf" else data.numel() * data.element_size() // data.shape[0]
    return as_native(data, row_bytes, packed.format, packed.column_scales, packed.bias)


Rows = slice | torch.Tensor
"""Rows of a matrix: a range, or their indices int64[n]."""


@dataclass(frozen=True, slots=True)
class LoraPart:
    """B of one projection, [columns, rank], with the scale in it. ranks: its part of A's output. columns: its part of the layer's output."""

    ranks: slice
    columns: slice
    b: PackedLinear


@dataclass(frozen=True, slots=True)
class LoraFactors:
    """An adapter on one linear layer: the A of all its projections stacked, [sum of ranks, in_size], and their Bs."""

    a: PackedLinear
    parts: tuple[LoraPart, ...]


@dataclass(frozen=True, slots=True)
class LoraRows:
    """Rows of a step by adapter; rows of the base model are in no group. num_rows: of the step."""

    num_rows: int
    groups: tuple[tuple[int, Rows], ...]


def check_rotation(cos: torch.Tensor, sin: torch.Tensor, head_dim: int) -> None:
    """ValueError unless the tables of `ops.rotary` are for heads of this size."""
    if cos.shape != sin.shape or 2 * cos.shape[1] > head_dim:
        raise ValueError(f"rotary: cos {tuple(cos.shape)} and sin {tuple(sin.shape)} do not fit head_dim {head_dim}")


def check_packed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, window: int) -> None:
    """ValueError unless the arguments of `ops.packed_attention`, of three dimensions each, fit one another."""
    tokens, num_q_heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    if k.shape != v.shape or tuple(k.shape) != (tokens, num_kv_heads, head_dim):
        raise ValueError(
            f"packed_attention: q is {tuple(q.shape)}, k is {tuple(k.shape)}, v is {tuple(v.shape)}: not [tokens, heads, head_dim]"
        )
    if num_kv_heads == 0 or num_q_heads % num_kv_heads:
        raise ValueError(f"packed_attention: {num_q_heads} query heads do not share {num_kv_heads} KV heads evenly")
    if window < 0:
        raise ValueError(f"packed_attention: the window must not be negative, got {window}")


def kv_type(cache: torch.Tensor, rounded: bool) -> int:
    """KvType of attention over a K or V cache. rounded: see `ops.paged_attention`; ValueError unless the cache is bfloat16."""
    if not rounded:
        return KV_TYPES[cache.dtype]
    if cache.dtype != torch.bfloat16:
        raise ValueError(f"attention: products of bfloat16 take a bfloat16 KV cache, not {cache.dtype}")
    return _BF16_PRODUCTS


def kv_cache_shapes(
    num_pages: int, num_kv_heads: int, head_dim: int, dtype: torch.dtype
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shapes of the K and the V cache of one layer.

    float32: K [num_pages, num_kv_heads, head_dim, 16], V [num_pages, num_kv_heads, 16, head_dim]. bfloat16: K [num_pages, num_kv_heads,
    head_dim / 2, 16, 2], two elements of a token side by side, V [num_pages, num_kv_heads, 8, head_dim, 2], those of two tokens.
    int8: both [num_pages, num_kv_heads, head_dim + 4, 16], the bytes and behind them 16 float32 scales; int16: the same with head_dim + 2;
    see `int_parts`. The owner fills both with zeros before first use.
    ValueError for another dtype or a head_dim that is not a multiple of 16, or beyond 512 for integers.
    """
    if head_dim <= 0 or head_dim % 16:
        raise ValueError(f"head_dim must be a multiple of 16, got {head_dim}")
    if dtype in (torch.int8, torch.int16):
        if head_dim > MAX_INT_HEAD_DIM:
            raise ValueError(f"a quantised KV cache takes head_dim up to {MAX_INT_HEAD_DIM}, got {head_dim}")
        return ((num_pages, num_kv_heads, head_dim + 4 // dtype.itemsize, PAGE_SIZE),) * 2
    if dtype == torch.bfloat16:
        page = num_pages, num_kv_heads
        return (*page, head_dim // 2, PAGE_SIZE, 2), (*page, PAGE_SIZE // 2, head_dim, 2)
    if dtype == torch.float32:
        return (num_pages, num_kv_heads, head_dim, PAGE_SIZE), (num_pages, num_kv_heads, PAGE_SIZE, head_dim)
    raise ValueError(f"the KV cache is bfloat16, float32, int16 or int8, got {dtype}")


def rotation_size(head_dim: int) -> int:
    """How many elements `rotate_heads` mixes: the largest power of two that divides head_dim."""
    return head_dim & -head_dim


def rotate_heads(x: torch.Tensor) -> torch.Tensor:
    """x float32[..., head_dim] in blocks of `rotation_size` elements, each times a matrix of 1 and -1: a Walsh-Hadamard transform.

    An int8 cache keeps keys in this form (S. Ashkboos et al., "QuaRot: Outlier-Free 4-Bit Inference in Rotated LLMs", 2024): the few large
    channels of keys are spread over all, so that one scale serves them. Twice is times the size, and so is the product of a rotated
    query with a rotated key. The sums are taken in the order of csrc/cpu/rotation.h: the bits are the same.
    """
    return walsh_hadamard(x, rotation_size(x.shape[-1]))


@dataclass(frozen=True, slots=True)
class IntParts:
    """Views into a pair of int8 or int16 caches, token o of a page at [..., o, ...]. width: 4 or 2 elements, which fill 32 bits.

    k: [num_pages, num_kv_heads, head_dim / width, 16, width], int16, or uint8: 128 more than the rounded element of what `rotate_heads`
    gives. v: int8 or int16[num_pages, num_kv_heads, 16 / width, head_dim, width], token o at [o // width, :, o % width].
    k_scales, v_scales: float32[num_pages, num_kv_heads, 16].
    """

    width: int
    k: torch.Tensor
    v: torch.Tensor
    k_scales: torch.Tensor
    v_scales: torch.Tensor


def int_parts(k_cache: torch.Tensor, v_cache: torch.Tensor) -> IntParts:
    pages, heads, rows, _ = k_cache.shape
    width = 4 // k_cache.itemsize
    head_dim = rows - width
    keys, values = k_cache[:, :, :head_dim], v_cache[:, :, :head_dim]
    return IntParts(
        width,
        (keys.view(torch.uint8) if width == 4 else keys).view(pages, heads, head_dim // width, PAGE_SIZE, width),
        values.view(pages, heads, PAGE_SIZE // width, head_dim, width),
        k_cache.view(torch.float32)[:, :, head_dim:].view(pages, heads, PAGE_SIZE),
        v_cache.view(torch.float32)[:, :, head_dim:].view(pages, heads, PAGE_SIZE),
    )


def kv_cache_geometry(op: str, k_cache: torch.Tensor, v_cache: torch.Tensor) -> tuple[int, int, int]:
    """(num_pages, num_kv_heads, head_dim) of a pair of caches; ValueError unless they are laid out as `kv_cache_shapes` says."""
    is_paired = v_cache.dtype == torch.bfloat16
    if v_cache.dim() == 4 + is_paired and k_cache.dtype == v_cache.dtype and k_cache.dtype in KV_TYPES:
        num_pages, num_kv_heads, rows, size = v_cache.shape[:4]
        head_dim = size if v_cache.dtype.is_floating_point else rows - 4 // v_cache.itemsize
        if (
            head_dim > 0
            and head_dim % 16 == 0
            and (tuple(k_cache.shape), tuple(v_cache.shape))
            == kv_cache_shapes(num_pages, num_kv_heads, head_dim, k_cache.dtype)
            and k_cache.is_contiguous()
            and v_cache.is_contiguous()
        ):
            return num_pages, num_kv_heads, head_dim
    raise ValueError(
        f"{op}: caches must be contiguous, bfloat16, float32, int16 or int8, laid out by kv_cache_shapes, "
        f"got K {k_cache.dtype} {tuple(k_cache.shape)}, V {v_cache.dtype} {tuple(v_cache.shape)}"
    )
