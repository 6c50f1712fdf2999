"""All layers of a decoder as one native call: the common block, over packed weights and the paged KV cache.

The call runs the same kernels in the same order as the layers would one by one, so both give the same bits. Made by the thread that loads the
model, called by the one that runs it.
"""

from dataclasses import dataclass
from typing import Literal, Protocol

import torch

from headrace.errors import ExecutionError
from headrace.kernels import cpu, registry
from headrace.kernels.packing import PackedLinear, as_native, check_contiguous, kv_cache_shapes, kv_type


@dataclass(frozen=True, slots=True)
class DecoderLayerSpec:
    """One layer: norm, qkv, (head norms,) rotation, attention, out, (norm,) norm, gate_up, gate, down(, norm).

    Norm weights are float32 as they are applied, None where the layer has none. qkv stacks the projections of q, k and v, gate_up
    those of gate and up. activation: of the gate, the same in all layers. cos, sin: float32[max_positions, rotary_dim / 2].
    scale, window, softcap: see `ops.paged_attention`.
    """

    attention_norm: torch.Tensor
    qkv: PackedLinear
    head_norms: tuple[torch.Tensor, torch.Tensor] | None
    cos: torch.Tensor
    sin: torch.Tensor
    scale: float
    window: int
    softcap: float
    out: PackedLinear
    after_attention: torch.Tensor | None
    mlp_norm: torch.Tensor
    gate_up: PackedLinear
    activation: Literal["silu", "gelu_tanh"]
    down: PackedLinear
    after_mlp: torch.Tensor | None

    @property
    def linears(self) -> tuple[PackedLinear, PackedLinear, PackedLinear, PackedLinear]:
        return self.qkv, self.out, self.gate_up, self.down


@dataclass(frozen=True, slots=True)
class DecoderSpec:
    """A decoder between embedding and output projection, or some layers of it in a row. final_norm: None = the last layer is not among them."""

    layers: tuple[DecoderLayerSpec, ...]
    final_norm: torch.Tensor | None
    eps: float
    num_q_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def hidden_size(self) -> int:
        return self.layers[0].attention_norm.numel()


def why_not(spec: DecoderSpec) -> str:
    """Why `FusedDecoder` cannot run this decoder here, or ""."""
    if not registry.runs_native():
        return cpu.why_not() or "another implementation than the native kernels is preferred"
    for index, layer in enumerate(spec.layers):
        for linear in layer.linears:
            if not linear.layout.startswith("native"):
                return f"layer {index} has weights of layout {linear.layout}"
    return ""


PHASES = ("norm", "qkv", "heads", "attention", "out", "gate_up", "activation", "down", "reduce")
"""Phase of csrc/cpu/decoder.h, in its order. heads: head norms, rotation and the KV write. Linears quantise their input, too.
reduce: sums over ranks."""


class Sparsity(Protocol):
    """See `attention.sparsity.DoubleSparsity`."""

    @property
    def num_channels(self) -> int: ...
    @property
    def num_pages(self) -> int: ...
    @property
    def orders(self) -> tuple[torch.Tensor, ...]: ...


RECENT_PAGES = 4
"""Of the pages that sparse attention chooses, so many are the last ones, that of the position itself included."""


class RankGroup(Protocol):
    """Ranks that each have a part of the weights of the same layers, and run the same steps."""

    @property
    def address(self) -> int | None:
        """Of the `_native.RankGroup`; None if there is none, and then the layers cannot be fused."""


class FusedDecoder:
    """A decoder bound to the KV cache of its layers. Keeps every tensor it reads alive.

    It keeps the addresses of the weights: make a new one after weights have been loaded again.
    """

    def __init__(
        self,
        spec: DecoderSpec,
        k_caches: list[torch.Tensor],
        v_caches: list[torch.Tensor],
        *,
        rounded: bool = False,
        group: RankGroup | None = None,
        halves_from: int = 0,
        sparsity: Sparsity | None = None,
    ) -> None:
        """k_caches, v_caches: one each layer, laid out by `packing.kv_cache_shapes`. rounded: see `ops.paged_attention`.

        group: the layers have a rank's part of the heads and of the intermediate size; what `out` and `down` give is summed over the ranks.
        halves_from: given, in a step of so many rows (2 or more) one half is computed while the other is summed; the bits are the same.

        sparsity: order the channels of queries and keys, and let positions from `sparse_first` of a call on attend to few pages.

        ValueError when anything does not fit.
        """
        reason = why_not(spec)
        native = cpu.load()
        if reason or native is None:
            raise ValueError(f"the fused decoder cannot run: {reason}")
        self._spec = spec
        self._caches = (k_caches, v_caches)
        self._group = group
        _check(spec, k_caches, v_caches)
        self._decoder = native.Decoder(
            spec.hidden_size,
            spec.layers[0].down.k,
            spec.num_q_heads,
            spec.num_kv_heads,
            spec.head_dim,
            spec.eps,
            spec.layers[0].activation == "gelu_tanh",
            kv_type(k_caches[0], rounded),
            k_caches[0].shape[0],
            *as_native(spec.final_norm),
        )
        for layer, k_cache, v_cache in zip(spec.layers, k_caches, v_caches, strict=True):
            rotation = layer.cos, layer.sin, 2 * layer.cos.shape[1], layer.cos.shape[0]
            attention = layer.scale, layer.window, layer.softcap, k_cache, v_cache
            mlp = layer.mlp_norm, layer.gate_up.native, layer.down.native, layer.after_mlp
            self._decoder.add_layer(
                *as_native(layer.attention_norm, layer.qkv.native, *(layer.head_norms or (None, None)), *rotation),
                *as_native(*attention, layer.out.native, layer.after_attention, *mlp),
            )
        self._orders = () if sparsity is None else sparsity.orders
        if sparsity is not None:
            for order in self._orders:
                check_contiguous("decoder: order", order, torch.int32, (spec.num_kv_heads, spec.head_dim))
            self._decoder.set_sparse(
                sparsity.num_channels, sparsity.num_pages, RECENT_PAGES, [order.data_ptr() for order in self._orders]
            )
        if group is not None:
            assert group.address is not None, "ranks without a native group run the layers one by one"
            self._decoder.set_group(group.address, halves_from)

    def __call__(
        self,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        out_slots: torch.Tensor,
        page_table: torch.Tensor,
        seq_lens: torch.Tensor,
        q_starts: torch.Tensor,
        read_starts: torch.Tensor | None = None,
        sparse_first: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Run all layers and the final norm; without one, what the layers add is added to the rows.

        hidden: float32[tokens, hidden_size], what the first layer takes; overwritten. positions, out_slots: int32[tokens].
        page_table, seq_lens, q_starts: see `ops.paged_attention`. read_starts: int32[num_seqs + 1]; of sequence i the last
        read_starts[i + 1] - read_starts[i] rows are read, None: all. sparse_first: int32[num_seqs], see `__init__`.
        Returns float32[rows that are read, hidden_size]. ValueError when a
        size, position, slot, start or page does not fit; then no KV is written. ExecutionError when the group is broken.
        """
        tokens, (num_seqs, max_pages) = hidden.shape[0], page_table.shape
        check_contiguous("decoder: hidden", hidden, torch.float32, (tokens, self._spec.hidden_size))
        check_contiguous("decoder: positions", positions, torch.int32, (tokens,))
        check_contiguous("decoder: out_slots", out_slots, torch.int32, (tokens,))
        check_contiguous("decoder: page_table", page_table, torch.int32, (num_seqs, max_pages))
        check_contiguous("decoder: seq_lens", seq_lens, torch.int32, (num_seqs,))
        check_contiguous("decoder: q_starts", q_starts, torch.int32, (num_seqs + 1,))
        num_read = tokens
        if read_starts is None:
            read_starts = q_starts
        else:
            check_contiguous("decoder: read_starts", read_starts, torch.int32, (num_seqs + 1,))
            num_read = int(read_starts[-1])
        out = torch.empty(num_read, self._spec.hidden_size)
        try:
            step = (
                *as_native(hidden, out, tokens, positions, out_slots, page_table, max_pages),
                *as_native(seq_lens, q_starts, read_starts, num_seqs),
            )
            if sparse_first is None:
                self._decoder.forward(*step)
            else:
                check_contiguous("decoder: sparse_first", sparse_first, torch.int32, (num_seqs,))
                assert self._orders, "sparse_first without sparsity"
                self._decoder.forward_sparse(*step, sparse_first.data_ptr())
        except RuntimeError as error:
            if self._group is None:
                raise
            raise ExecutionError(f"the group of ranks is broken: {error}") from None
        return out

    def phase_seconds(self) -> dict[str, float]:
        """Seconds spent in each of PHASES since the last call."""
        return dict(zip(PHASES, self._decoder.phase_seconds(), strict=True))


def _check(spec: DecoderSpec, k_caches: list[torch.Tensor], v_caches: list[torch.Tensor]) -> None:
    """ValueError unless every tensor has the size and precision that the native call takes for granted."""
    head_dim = spec.head_dim
    q_size, kv_size = spec.num_q_heads * head_dim, spec.num_kv_heads * head_dim
    if not spec.layers or spec.num_q_heads % spec.num_kv_heads:
        raise ValueError(
            f"decoder: {len(spec.layers)} layers, {spec.num_q_heads} q heads, {spec.num_kv_heads} KV heads"
        )
    if len(k_caches) != len(spec.layers) or len(v_caches) != len(spec.layers):
        raise ValueError(f"decoder: {len(spec.layers)} layers but {len(k_caches)} K and {len(v_caches)} V caches")
    hidden = spec.hidden_size
    if spec.final_norm is not None:
        check_contiguous("decoder: final_norm", spec.final_norm, torch.float32, (hidden,))
    intermediate = spec.layers[0].down.k
    dtype, num_pages = k_caches[0].dtype, k_caches[0].shape[0]
    k_shape, v_shape = kv_cache_shapes(num_pages, spec.num_kv_heads, head_dim, dtype)
    sizes = ((q_size + 2 * kv_size, hidden), (hidden, q_size), (2 * intermediate, hidden), (hidden, intermediate))
    for layer, k_cache, v_cache in zip(spec.layers, k_caches, v_caches, strict=True):
        check_contiguous("decoder: K cache", k_cache, dtype, k_shape)
        check_contiguous("decoder: V cache", v_cache, dtype, v_shape)
        for name, linear, size in zip(("qkv", "out", "gate_up", "down"), layer.linears, sizes, strict=True):
            if (linear.n, linear.k) != size:
                raise ValueError(f"decoder: {name} is [{linear.n}, {linear.k}], not {list(size)}")
        for norm in (layer.attention_norm, layer.mlp_norm, layer.after_attention, layer.after_mlp):
            if norm is not None:
                check_contiguous("decoder: norm", norm, torch.float32, (hidden,))
        for norm in layer.head_norms or ():
            check_contiguous("decoder: head norm", norm, torch.float32, (head_dim,))
        check_contiguous("decoder: cos", layer.cos, torch.float32, tuple(layer.cos.shape))
        check_contiguous("decoder: sin", layer.sin, torch.float32, tuple(layer.cos.shape))
        if layer.activation != spec.layers[0].activation:
            raise ValueError(f"decoder: layers with {layer.activation} and with {spec.layers[0].activation}")
        if layer.cos.dim() != 2 or 2 * layer.cos.shape[1] > head_dim or layer.window < 0 or layer.softcap < 0:
            raise ValueError(
                f"decoder: cos {tuple(layer.cos.shape)}, head_dim {head_dim}, window {layer.window}, softcap {layer.softcap}"
            )
