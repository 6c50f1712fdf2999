"""The reference attention backend: plain torch, any device, any page size, any head size.

Owns a slot-addressed pool [num_slots, num_kv_heads, head_dim] per layer, with 4 more bytes for a head's float32 scale if it is
int8 or int16; keys in int8 are rotated (`kernels.packing.rotate_heads`). Runs in the thread that runs the model.

On CPU every matrix product has one fixed shape: 16 queries, aligned by their absolute position, against 128 keys, aligned at
position 0, with the softmax carried from block to block (M. Milakov and N. Gimelshein, "Online normalizer calculation for softmax",
2018). A row's bits then cannot depend on the chunk it came in. On other devices each sequence is one product and one softmax.
"""

from copy import copy
from dataclasses import replace
from typing import Literal

import torch

from headrace import kernels
from headrace.attention.base import AttentionBackend, AttentionLayerSpec, KvPool, KvShape, StepAttention, StepRows
from headrace.config.resolve import AttentionNeeds
from headrace.kernels.packing import rotate_heads, rotation_size

QUERY_TILE = 16
KEY_BLOCK = 128
assert KEY_BLOCK % QUERY_TILE == 0, "a tile must end in the block in which it begins, or chunks would see other blocks"

_SCALE_BYTES = 4  # a float32 after the integers of a head

# Finite, so that a block without a visible key leaves exp(-inf - m) == 0 and not NaN.
_LOWEST = -1e30


class TorchNativeAttention(AttentionBackend):
    """Plain torch; the reference for other backends."""

    name = "torch_native"
    verified = frozenset({"cpu", "cuda"})
    sees_ahead = True
    _pool: KvPool
    _rows: StepRows

    @classmethod
    def reasons_against(cls, needs: AttentionNeeds) -> list[str]:
        reasons = []
        if needs.kv_cache_dtype in ("int8", "int16") and needs.head_dim % 4:
            reasons.append(
                f"head_dim must be a multiple of 4 for an {needs.kv_cache_dtype} KV cache, not {needs.head_dim}"
            )
        if needs.kv_cache_dtype == "float8_e4m3fn":
            reasons.append("it has no fp8 KV cache")
        if needs.deterministic and needs.device != "cpu":
            reasons.append(f"on {needs.device} its bits depend on the batch")
        return reasons

    def make_kv_pool(self, shape: KvShape, num_slots: int, page_size: int, device: torch.device) -> KvPool:
        """Zero-filled [num_slots, num_kv_heads, head_dim] for K and for V of each layer; int8: head_dim + 4, int16: head_dim + 2."""
        more = 0 if shape.dtype.is_floating_point else _SCALE_BYTES // shape.dtype.itemsize
        size = (num_slots, shape.num_kv_heads, shape.head_dim + more)
        self._pool = KvPool.zeros(shape, (size, size), num_slots, page_size, device)
        return self._pool

    def prepare(self, rows: StepRows) -> None:
        self._rows = rows

    def part(self, tokens: slice) -> tuple[StepAttention, slice]:
        own, rows = self._rows.part(tokens)
        view = copy(self)
        view.prepare(own)
        return view, rows

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: AttentionLayerSpec) -> torch.Tensor:
        k_cache, v_cache = self._pool.k[layer.layer_id], self._pool.v[layer.layer_id]
        if k_cache.dtype == torch.int8:
            q, k = rotate_heads(q.float()), rotate_heads(k.float())
            layer = replace(layer, scale=layer.scale / rotation_size(layer.head_dim))
        _write(k_cache, self._rows.out_slots, k)
        _write(v_cache, self._rows.out_slots, v)
        attend = attend_tiled if q.device.type == "cpu" else attend_whole
        out = torch.empty(q.shape, dtype=q.dtype, device=q.device)
        begin, last_keys = 0, self._rows.last_keys
        for row, (start, count) in enumerate(zip(self._rows.starts, self._rows.counts, strict=True)):
            slots = self._rows.slots[row, : start + count]
            if last_keys is None:
                last = torch.arange(start, start + count, device=self._rows.positions.device)
            else:
                last = last_keys[begin : begin + count].long()
            out[begin : begin + count] = attend(q[begin : begin + count], k_cache, v_cache, slots, start, layer, last)
            begin += count
        return out.view(q.shape[0], -1)


def attend_tiled(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    start: int,
    layer: AttentionLayerSpec,
    last: torch.Tensor,
) -> torch.Tensor:
    """Attention of one sequence's queries, q float32[count, num_q_heads, head_dim] at positions start .. start + count - 1.

    slots: int32[start + count]. last: int64[count], the last key that each query sees. Returns the shape of q.
    """
    end = start + q.shape[0]
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    first_block = _first_position(start - start % QUERY_TILE, layer) // KEY_BLOCK
    keys, values = {}, {}
    for block in range(first_block, (end - 1) // KEY_BLOCK + 1):
        keys[block] = _gather(k_cache, slots, block).permute(1, 2, 0).contiguous()
        values[block] = _gather(v_cache, slots, block).permute(1, 0, 2).contiguous()
    group = layer.num_q_heads // layer.num_kv_heads
    for tile_start in range(start - start % QUERY_TILE, end, QUERY_TILE):
        low, high = max(tile_start, start), min(tile_start + QUERY_TILE, end)
        tile = q.new_zeros(QUERY_TILE, layer.num_q_heads, layer.head_dim)
        tile[low - tile_start : high - tile_start] = q[low - start : high - start]
        # Rows of the tile that are no queries see the keys of the first block, so that no sum is zero.
        tile_last = torch.full((QUERY_TILE,), tile_start + QUERY_TILE - 1, device=q.device)
        tile_last[low - tile_start : high - tile_start] = last[low - start : high - start]
        last_block = int(tile_last[: high - tile_start].max()) // KEY_BLOCK
        # [num_kv_heads, group * QUERY_TILE, head_dim]: the queries that share a KV head side by side
        grouped = tile.view(QUERY_TILE, layer.num_kv_heads, group, layer.head_dim).permute(1, 2, 0, 3)
        grouped = grouped.reshape(layer.num_kv_heads, group * QUERY_TILE, layer.head_dim)
        largest = q.new_full((layer.num_kv_heads, group * QUERY_TILE, 1), _LOWEST)
        total = torch.zeros_like(largest)
        weighted = torch.zeros_like(grouped)
        for block in range(_first_position(tile_start, layer) // KEY_BLOCK, last_block + 1):
            hidden = _hidden_keys(tile_start, tile_last, block * KEY_BLOCK, layer.sliding_window).repeat(group, 1)
            scores = _capped(torch.bmm(grouped, keys[block]) * layer.scale, layer.soft_cap)
            scores = scores.masked_fill(hidden, -torch.inf)
            new_largest = torch.maximum(largest, scores.amax(-1, keepdim=True))
            weights = torch.exp(scores - new_largest)
            decay = torch.exp(largest - new_largest)
            total = total * decay + weights.sum(-1, keepdim=True)
            weighted = weighted * decay + torch.bmm(weights, values[block])
            largest = new_largest
        done = (weighted / total).view(layer.num_kv_heads, group, QUERY_TILE, layer.head_dim).permute(2, 0, 1, 3)
        done = done.reshape(QUERY_TILE, layer.num_q_heads, layer.head_dim)
        out[low - start : high - start] = done[low - tile_start : high - tile_start]
    return out


def attend_whole(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    slots: torch.Tensor,
    start: int,
    layer: AttentionLayerSpec,
    last: torch.Tensor | None = None,
) -> torch.Tensor:
    """Like `attend_tiled`, over all keys at once, softmax in float32."""
    count, length = q.shape[0], slots.shape[0]
    group = layer.num_q_heads // layer.num_kv_heads
    keys = _read(k_cache, slots).to(q.dtype).permute(1, 2, 0)
    values = _read(v_cache, slots).to(q.dtype).permute(1, 0, 2)
    grouped = q.reshape(count, layer.num_kv_heads, group, layer.head_dim).permute(1, 2, 0, 3)
    grouped = grouped.reshape(layer.num_kv_heads, group * count, layer.head_dim)
    scores = _capped(torch.bmm(grouped, keys).float() * layer.scale, layer.soft_cap)
    query = torch.arange(start, start + count, device=q.device)[:, None]
    key = torch.arange(length, device=q.device)[None, :]
    hidden = key > (query if last is None else last[:, None])
    if layer.sliding_window:
        hidden |= key <= query - layer.sliding_window
    weights = torch.softmax(scores.masked_fill(hidden.repeat(group, 1), -torch.inf), dim=-1).to(q.dtype)
    done = torch.bmm(weights, values).view(layer.num_kv_heads, group, count, layer.head_dim)
    return done.permute(2, 0, 1, 3).reshape(count, layer.num_q_heads, layer.head_dim)


def _first_position(position: int, layer: AttentionLayerSpec) -> int:
    """The first key that a query at `position` sees."""
    return max(0, position - layer.sliding_window + 1) if layer.sliding_window else 0


def _gather(cache: torch.Tensor, slots: torch.Tensor, block: int) -> torch.Tensor:
    """float32[KEY_BLOCK, num_kv_heads, head_dim] of the positions of a block; zeros beyond the sequence.

    Slots beyond the sequence belong to other sequences or are free, and may contain anything, even NaN.
    """
    inside = slots[block * KEY_BLOCK : (block + 1) * KEY_BLOCK]
    found = _read(cache, inside)
    gathered = found.new_zeros((KEY_BLOCK, *found.shape[1:]), dtype=torch.float32)
    gathered[: inside.shape[0]] = found
    return gathered


def _write(cache: torch.Tensor, slots: torch.Tensor, x: torch.Tensor) -> None:
    """Store x [tokens, num_kv_heads, head_dim] at slots, rounded to the dtype of the cache."""
    if cache.dtype.is_floating_point:
        cache[slots] = x.to(cache.dtype)
        return
    head_dim = x.shape[-1]
    bits: Literal[8, 16] = 8 if cache.dtype == torch.int8 else 16
    values, scales = kernels.quantize_rows(x.float().reshape(-1, head_dim), group=head_dim, bits=bits)
    cache[slots, :, :head_dim] = values.view(x.shape)
    cache.view(torch.float32)[slots, :, -1] = scales.view(x.shape[:-1])


def _read(cache: torch.Tensor, slots: torch.Tensor) -> torch.Tensor:
    """The values stored at slots, [len(slots), num_kv_heads, head_dim]: float32 for a quantised cache, else the cache's dtype."""
    stored = cache[slots]
    if cache.dtype.is_floating_point:
        return stored
    return stored[..., : -_SCALE_BYTES // cache.itemsize] * stored.view(torch.float32)[..., -1:]


def _hidden_keys(tile_start: int, last: torch.Tensor, block_start: int, window: int) -> torch.Tensor:
    """bool[QUERY_TILE, KEY_BLOCK]: keys after the last one that the query sees, or before its window."""
    query = torch.arange(tile_start, tile_start + QUERY_TILE, device=last.device)[:, None]
    key = torch.arange(block_start, block_start + KEY_BLOCK, device=last.device)[None, :]
    hidden = key > last[:, None]
    return hidden | (key <= query - window) if window else hidden


def _capped(scores: torch.Tensor, soft_cap: float) -> torch.Tensor:
    return torch.tanh(scores / soft_cap) * soft_cap if soft_cap else scores
