"""The ops of `headrace.kernels.ops` in plain torch: for machines without the native kernels, and for other devices.

See there for what each does. Same checks of indices, by torch itself. On CPU `linear` and `paged_attention` compute in tiles of a fixed shape,
so that a row's bits do not depend on the rows beside it; on other devices they are whole-tensor calls. Runs where it is called.
"""

from collections.abc import Mapping
from dataclasses import replace
from itertools import pairwise

import torch
import torch.nn.functional as F

from headrace.checkpoint.quantized_matrix import QuantizedMatrix, rotated_rows
from headrace.kernels.drawing import draw, exp_sums
from headrace.kernels.packing import (
    PAGE_SIZE,
    ROUNDINGS,
    LoraFactors,
    LoraRows,
    PackedExperts,
    PackedLinear,
    check_linear,
    check_packed,
    check_rotation,
    int_parts,
    kv_type,
    pack_torch,
    rotate_heads,
    rotation_size,
)
from headrace.kernels.quantized_packing import QUANT_LIMITS, check_quantized, pack_torch_quantized
from headrace.kernels.registry import for_layout
from headrace.kernels.torch_quantized import PRODUCTS, pack_codes

__all__ = ["draw", "exp_sums"]

TILE_ROWS = 16
KEY_BLOCK = 256
LOG2_E = 1.4426950408889634


def pack_linear(weight: torch.Tensor | QuantizedMatrix, bias: torch.Tensor | None, rounded: bool) -> PackedLinear:
    if isinstance(weight, QuantizedMatrix):
        check_quantized(weight, bias)
        return pack_torch_quantized(weight, bias) if weight.codes.device.type == "cpu" else pack_codes(weight, bias)
    check_linear(weight, bias)
    if rounded:
        return replace(pack_torch(weight.to(torch.bfloat16), bias), layout="torch_bf16")
    return pack_torch(weight, bias)


def linear(x: torch.Tensor, packed: PackedLinear, out: torch.Tensor | None, accumulate: bool) -> torch.Tensor:
    """On CPU always GEMMs of 16 rows, the last padded with zeros."""
    if x.dim() != 2 or x.shape[1] != packed.k:
        raise ValueError(f"linear: x must be [rows, {packed.k}], got {tuple(x.shape)}")
    if accumulate and out is None:
        raise ValueError("linear: accumulate needs out")
    if out is not None and tuple(out.shape) != (x.shape[0], packed.n):
        raise ValueError(f"linear: out must be {(x.shape[0], packed.n)}, got {tuple(out.shape)}")
    if packed.layout in PRODUCTS:
        y = PRODUCTS[packed.layout](x, packed)
        if packed.bias is not None:
            y += packed.bias.to(y.dtype)
        return y if out is None else out.add_(y) if accumulate else out.copy_(y)
    if packed.layout == "torch_bf16":
        x = x.to(torch.bfloat16).to(x.dtype)
    elif packed.layout != "torch":
        rounding = ROUNDINGS[packed.layout]
        values, scales = quantize_rows(x, rounding.group, rounding.bits, rounding.rotated)
        x = values * scales.repeat_interleave(rounding.group, dim=1)[:, : packed.k]
    if x.device.type == "cpu":
        y = _in_row_tiles(x, packed.data)
        if packed.bias is not None:
            y += packed.bias
    else:
        bias = None if packed.bias is None else packed.bias.to(x.dtype)
        y = F.linear(x, packed.data.to(x.dtype), bias)
    return y if out is None else out.add_(y) if accumulate else out.copy_(y)


def quantize_rows(x: torch.Tensor, group: int, bits: int, rotated: bool = False) -> tuple[torch.Tensor, torch.Tensor]:
    rows, k = x.shape
    x = rotated_rows(x) if rotated else x
    groups, limit = -(-k // group), QUANT_LIMITS[bits]
    padded = F.pad(x, (0, groups * group - k)).reshape(rows, groups, group)
    largest = padded.abs().amax(dim=2, keepdim=True)
    # Below 1e-30 the inverse would overflow; of NaN and infinity only the scale tells.
    # A tensor over a tensor: torch takes a number over a tensor as the number times a reciprocal, which rounds twice.
    inverse = torch.full_like(largest, limit) / largest
    inverse = torch.where((largest > 1e-30) & largest.isfinite(), inverse, 0.0)
    values = (padded * inverse).round().nan_to_num(0.0).to(torch.int8 if bits == 8 else torch.int16)
    return values.flatten(1)[:, :k], largest[..., 0] / limit


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, residual: torch.Tensor | None) -> torch.Tensor:
    """The reduction runs in float32."""
    x = _with_residual(x, residual)
    wide = x.float()
    inverse = torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps)
    return (wide * inverse * weight.float()).to(x.dtype)


def layer_norm(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, eps: float, residual: torch.Tensor | None
) -> torch.Tensor:
    """The reduction runs in float32."""
    x, bias = _with_residual(x, residual), None if bias is None else bias.float()
    return F.layer_norm(x.float(), (weight.numel(),), weight.float(), bias, eps).to(x.dtype)


def _with_residual(x: torch.Tensor, residual: torch.Tensor | None) -> torch.Tensor:
    return x if residual is None else residual.add_(x)


def moe(x: torch.Tensor, expert_ids: torch.Tensor, shares: torch.Tensor, experts: PackedExperts) -> torch.Tensor:
    num_experts, (rows, top_k) = len(experts.gate_up), expert_ids.shape
    if x.device.type == "cpu" and rows and not -1 <= int(expert_ids.min()) <= int(expert_ids.max()) < num_experts:
        raise ValueError(f"moe: an expert id is not in [-1, {num_experts}): {expert_ids.min()} .. {expert_ids.max()}")
    gate = silu_mul if experts.activation == "silu" else gelu_tanh_mul
    results = x.new_zeros(rows, top_k, experts.hidden_size)
    for expert in torch.unique(expert_ids).tolist():
        if expert < 0:
            continue
        at_rows, ranks = torch.where(expert_ids == expert)
        inner = gate(linear(x[at_rows], experts.gate_up[expert], None, False))
        results[at_rows, ranks] = linear(inner, experts.down[expert], None, False)
    results *= shares.to(x.dtype).unsqueeze(2)
    out = torch.zeros_like(x)
    for rank in range(top_k):
        out += results[:, rank]
    return out


def route(logits: torch.Tensor, top_k: int, renormalise: bool) -> tuple[torch.Tensor, torch.Tensor]:
    shares, ids = torch.topk(torch.softmax(logits.float(), dim=-1), top_k, dim=-1)
    return shares / shares.sum(dim=-1, keepdim=True) if renormalise else shares, ids


def rotary(q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> None:
    check_rotation(cos, sin, q.shape[-1])
    half, index = cos.shape[1], positions.long()
    c, s = cos[index].unsqueeze(1), sin[index].unsqueeze(1)
    for x in (q, k):
        a, b = x[..., :half].float(), x[..., half : 2 * half].float()
        x[..., :half], x[..., half : 2 * half] = (a * c - b * s).to(x.dtype), (b * c + a * s).to(x.dtype)


def silu_mul(x: torch.Tensor) -> torch.Tensor:
    gate, up = _halves("silu_mul", x)
    return F.silu(gate) * up


def gelu_tanh_mul(x: torch.Tensor) -> torch.Tensor:
    gate, up = _halves("gelu_tanh_mul", x)
    return F.gelu(gate, approximate="tanh") * up


def gelu_mul(x: torch.Tensor) -> torch.Tensor:
    gate, up = _halves("gelu_mul", x)
    return F.gelu(gate) * up


def gelu(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x)


def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


def embedding(ids: torch.Tensor, table: torch.Tensor | PackedLinear, scale: float) -> torch.Tensor:
    """float32 on CPU, the table's dtype elsewhere."""
    if isinstance(table, PackedLinear):
        if table.layout not in ("torch", "torch_bf16", "torch_int8"):
            raise ValueError(f"embedding: a table of layout {table.layout} cannot be looked up")
        table = table.data
    if ids.device.type == "cpu" and ids.numel() and not 0 <= int(ids.min()) <= int(ids.max()) < table.shape[0]:
        raise ValueError(f"embedding: id {int(ids.min())} or {int(ids.max())} is not in [0, {table.shape[0]})")
    rows = F.embedding(ids.long(), table)
    if rows.device.type == "cpu":
        rows = rows.float()
    return rows if scale == 1.0 else rows * scale


def write_kv(
    k: torch.Tensor, v: torch.Tensor, k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor
) -> None:
    written = slots >= 0
    if not bool(written.all()):
        k, v, slots = k[written], v[written], slots[written]
    _check_slots("write_kv", slots, v_cache)
    pages, offsets = slots.long() // PAGE_SIZE, slots.long() % PAGE_SIZE
    if not k_cache.dtype.is_floating_point:
        parts = int_parts(k_cache, v_cache)
        rotates = k_cache.dtype == torch.int8
        keys, k_scales = quantize_heads(rotate_heads(k.float()) if rotates else k, k_cache.dtype)
        parts.k_scales[pages, :, offsets] = k_scales / rotation_size(k.shape[-1]) if rotates else k_scales
        values, parts.v_scales[pages, :, offsets] = quantize_values(v, v_cache.dtype)
        parts.k[pages, :, :, offsets] = (keys.view(torch.uint8) ^ 128 if rotates else keys).unflatten(
            -1, (-1, parts.width)
        )
        parts.v[pages, :, offsets // parts.width, :, offsets % parts.width] = values
        return
    if k_cache.dtype == torch.bfloat16:
        k_cache[pages, :, :, offsets] = k.bfloat16().unflatten(-1, (-1, 2))
        v_cache[pages, :, offsets // 2, :, offsets % 2] = v.bfloat16()
        return
    k_cache[pages, :, :, offsets] = k.to(k_cache.dtype)
    v_cache[pages, :, offsets] = v.to(v_cache.dtype)


def gather_kv(k_cache: torch.Tensor, v_cache: torch.Tensor, slots: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    _check_slots("gather_kv", slots, v_cache)
    pages, offsets = slots.long() // PAGE_SIZE, slots.long() % PAGE_SIZE
    if not k_cache.dtype.is_floating_point:
        parts = int_parts(k_cache, v_cache)
        keys = parts.k[pages, :, :, offsets].flatten(-2)
        if k_cache.dtype == torch.int8:
            keys = rotate_heads((keys ^ 128).view(torch.int8).float())
        values = parts.v[pages, :, offsets // parts.width, :, offsets % parts.width]
        return (
            keys * parts.k_scales[pages, :, offsets].unsqueeze(-1),
            values * parts.v_scales[pages, :, offsets].unsqueeze(-1),
        )
    if k_cache.dtype == torch.bfloat16:
        k, v = k_cache[pages, :, :, offsets].flatten(-2), v_cache[pages, :, offsets // 2, :, offsets % 2]
        return k.float(), v.float()
    return k_cache[pages, :, :, offsets].float(), v_cache[pages, :, offsets].float()


def quantize_heads(x: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """x [tokens, heads, head_dim] as integers and float32 scales [tokens, heads]: what a KV cache of that dtype holds of it."""
    values, scales = quantize_rows(x.reshape(-1, x.shape[-1]).float(), x.shape[-1], 8 * dtype.itemsize)
    return values.view(x.shape), scales.view(x.shape[:-1])


def quantize_values(v: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """`quantize_heads` of values, whose scales are the next powers of 2 in an int16 cache; of NaN and infinity only the scale tells."""
    if dtype == torch.int8:
        return quantize_heads(v, dtype)
    largest = v.float().abs().amax(-1)
    bits = (largest / QUANT_LIMITS[16]).view(torch.int32)
    scales = torch.where(largest.isfinite(), ((bits + 0x7FFFFF) & ~0x7FFFFF).view(torch.float32), torch.nan)
    inverse = torch.where(largest > 1e-30, 1.0 / scales, 0.0).nan_to_num(0.0)
    return (v.float() * inverse.unsqueeze(-1)).round().nan_to_num(0.0).to(dtype), scales


def paged_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    seq_lens: torch.Tensor,
    q_starts: torch.Tensor,
    scale: float,
    window: int,
    softcap: float,
    rounded: bool,
    last_keys: torch.Tensor | None,
) -> torch.Tensor:
    """Per sequence, tiles of 16 rows of one KV head against blocks of 256 keys aligned at position 0, with an online softmax."""
    if rounded:
        kv_type(k_cache, rounded)  # raises
    out = torch.zeros_like(q, memory_format=torch.contiguous_format)
    starts = q_starts.tolist()
    if starts[0] != 0 or starts[-1] != q.shape[0]:
        raise ValueError(f"paged_attention: q_starts must run from 0 to {q.shape[0]}, got {starts[0]} to {starts[-1]}")
    for sequence, length in enumerate(seq_lens.tolist()):
        begin, end = starts[sequence], starts[sequence + 1]
        if begin == end:
            continue
        first_position = length - (end - begin)
        if first_position < 0 or length > page_table.shape[1] * PAGE_SIZE:
            raise ValueError(
                f"paged_attention: sequence {sequence}: {end - begin} query rows, {length} keys, "
                f"{page_table.shape[1]} pages of the table"
            )
        last = _last_keys(sequence, first_position, length, None if last_keys is None else last_keys[begin:end])
        # What lies before the first row's window may have been given away: it is neither read nor trusted.
        first_block = (max(0, first_position - window + 1) if window else 0) // KEY_BLOCK
        positions = torch.arange(first_block * KEY_BLOCK, length, device=q.device)
        if window:
            positions = positions.clamp(min=max(0, first_position - window + 1))
        slots = page_table[sequence, positions // PAGE_SIZE] * PAGE_SIZE + positions % PAGE_SIZE
        k, v = gather_kv(k_cache, v_cache, slots)
        queries = q[begin:end].float() * scale
        if rounded:
            queries = (queries * LOG2_E).bfloat16().float() / LOG2_E
        attended = _attend(queries, k, v, first_position, first_block * KEY_BLOCK, window, softcap, rounded, last)
        out[begin:end] = attended.to(q.dtype)
    return out


def _last_keys(sequence: int, first_position: int, length: int, given: torch.Tensor | None) -> torch.Tensor:
    """int64[rows]: the last key that each row of a sequence sees. Raises ValueError when those that are given do not fit."""
    positions = torch.arange(first_position, length)
    if given is None:
        return positions
    last = given.cpu().long()
    if (last < positions).any() or (last >= length).any() or (last.diff() < 0).any():
        raise ValueError(f"paged_attention: sequence {sequence}: rows cannot see keys up to {last.tolist()}")
    return last


def packed_attention(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    row_starts: torch.Tensor,
    scale: float,
    window: int,
    rounded: bool,
) -> torch.Tensor:
    """On CPU as `paged_attention`, sequence by sequence."""
    check_packed(q, k, v, window)
    starts = _checked_starts(row_starts, q.shape[0])
    if q.device.type != "cpu":
        return attend_padded(q, k, v, starts, scale, window)
    if rounded:
        q, k, v = ((q.float() * scale * LOG2_E).bfloat16().float() / LOG2_E, k.bfloat16().float(), v.bfloat16().float())
    else:
        q = q.float() * scale
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    for begin, end in pairwise(starts):
        if begin < end:
            rows = slice(begin, end)
            out[rows] = _attend(q[rows], k[rows], v[rows], 0, 0, window, 0.0, rounded)
    return out


def _checked_starts(row_starts: torch.Tensor, tokens: int) -> list[int]:
    starts: list[int] = row_starts.tolist()
    if not starts or starts[0] != 0 or starts[-1] != tokens or any(a > b for a, b in pairwise(starts)):
        raise ValueError(f"packed_attention: row_starts must run from 0 to {tokens} and never fall, got {starts}")
    return starts


def attend_padded(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, starts: list[int], scale: float, window: int
) -> torch.Tensor:
    """`packed_attention` on another device: sequences of similar lengths as one padded batch each."""
    out = torch.empty_like(q, memory_format=torch.contiguous_format)
    groups: dict[int, list[int]] = {}
    for index, (begin, end) in enumerate(pairwise(starts)):
        if begin < end:
            groups.setdefault((end - begin - 1).bit_length(), []).append(index)
    for members in groups.values():
        begins = torch.tensor([starts[i] for i in members], device=q.device)
        lengths = torch.tensor([starts[i + 1] - starts[i] for i in members], device=q.device)
        longest = max(starts[i + 1] - starts[i] for i in members)
        place = torch.arange(longest, device=q.device)
        is_token = place < lengths[:, None]
        rows = begins[:, None] + torch.minimum(place, lengths[:, None] - 1)
        seen = is_token[:, None, None]
        if window:
            # A row of padding sees the last token, at the least: its result is not used, but must not be of nothing.
            near = (place[:, None] - place).abs() <= window
            seen = (seen & near) | ~is_token[:, None, :, None]
        queries, keys, values = (x[rows].transpose(1, 2) for x in (q, k, v))
        attended = F.scaled_dot_product_attention(
            queries, keys, values, attn_mask=seen, scale=scale, enable_gqa=q.shape[1] != k.shape[1]
        )
        out[rows[is_token]] = attended.transpose(1, 2)[is_token]
    return out


def argmax(x: torch.Tensor) -> torch.Tensor:
    # torch does not say which of several maxima argmax gives: take the lowest index that equals the maximum.
    is_top = x == x.max(dim=-1, keepdim=True).values
    index = torch.arange(x.shape[1], device=x.device).expand_as(x)
    lowest = torch.where(is_top, index, x.shape[1]).min(dim=-1).values
    return torch.where(x.isnan().any(dim=-1), -1, lowest)


def _in_row_tiles(x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
    """x [rows, k] @ weight [n, k]^T as GEMMs of TILE_ROWS rows."""
    rows = x.shape[0]
    y = torch.empty(rows, weight.shape[0])
    tile = torch.zeros(TILE_ROWS, x.shape[1])
    for start in range(0, rows, TILE_ROWS):
        count = min(TILE_ROWS, rows - start)
        tile[:count] = x[start : start + count]
        tile[count:] = 0.0
        y[start : start + count] = F.linear(tile, weight)[:count]
    return y


def _attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    first_position: int,
    first_key: int,
    window: int,
    softcap: float,
    rounded: bool,
    last_keys: torch.Tensor | None = None,
) -> torch.Tensor:
    """q [rows, heads, head_dim], scaled; k, v [keys, kv_heads, head_dim] from position first_key -> [rows, heads, head_dim].

    last_keys: int64[rows], as in `paged_attention`; None = every row sees every key that its window reaches, as in `packed_attention`.
    """
    rows, heads, head_dim = q.shape
    num_kv_heads = k.shape[1]
    group = heads // num_kv_heads
    keys = k.shape[0]
    padding = (0, 0, 0, 0, 0, -keys % KEY_BLOCK)
    k_blocks = F.pad(k, padding).transpose(0, 1).contiguous()
    v_blocks = F.pad(v, padding).transpose(0, 1).contiguous()
    # [kv_heads, rows * group, head_dim], cut into tiles of TILE_ROWS, the last padded.
    grouped = q.reshape(rows, num_kv_heads, group, head_dim).transpose(0, 1).reshape(num_kv_heads, -1, head_dim)
    num_rows = grouped.shape[1]
    tiled = F.pad(grouped, (0, 0, 0, -num_rows % TILE_ROWS))
    position = first_position + torch.arange(tiled.shape[1], device=q.device) // group
    last_key = None
    if last_keys is not None:
        last_key = F.pad(
            last_keys.repeat_interleave(group), (0, tiled.shape[1] - num_rows), value=int(last_keys[-1])
        ).to(q.device)
    out = torch.empty_like(tiled)
    for start in range(0, tiled.shape[1], TILE_ROWS):
        tile = tiled[:, start : start + TILE_ROWS].contiguous()
        tile_position = position[start : start + TILE_ROWS]
        top = torch.full((num_kv_heads, TILE_ROWS, 1), -torch.inf, device=q.device)
        total = torch.zeros(num_kv_heads, TILE_ROWS, 1, device=q.device)
        values = torch.zeros_like(tile)
        tile_last = None if last_key is None else last_key[start : start + TILE_ROWS]
        end = keys if tile_last is None else min(keys, int(tile_last[-1]) + 1 - first_key)
        for block in range(0, end, KEY_BLOCK):
            scores = torch.bmm(tile, k_blocks[:, block : block + KEY_BLOCK].transpose(1, 2))
            if softcap:
                scores = softcap * torch.tanh(scores / softcap)
            key = first_key + torch.arange(block, block + KEY_BLOCK, device=q.device)
            distance = tile_position[:, None] - key
            if tile_last is None:
                seen = key < first_key + keys
                seen = seen & (distance.abs() <= window) if window else seen.expand_as(distance)
            else:
                seen = key <= tile_last[:, None]
                seen = seen & (distance < window) if window else seen
            scores = scores.masked_fill(~seen, -torch.inf)
            new_top = torch.maximum(top, scores.amax(-1, keepdim=True))
            shift = new_top.masked_fill(new_top == -torch.inf, 0.0)
            weights = torch.exp(scores - shift)
            if rounded:
                weights = weights.bfloat16().float()
            factor = torch.exp(top - shift)
            total = total * factor + weights.sum(-1, keepdim=True)
            values = values * factor + torch.bmm(weights, v_blocks[:, block : block + KEY_BLOCK])
            top = new_top
        out[:, start : start + TILE_ROWS] = values / total
    return out[:, :num_rows].reshape(num_kv_heads, rows, group, head_dim).transpose(0, 1).reshape(rows, heads, head_dim)


def _halves(op: str, x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    if x.dim() != 2 or x.shape[1] % 2:
        raise ValueError(f"{op}: x must be [rows, 2 * size], got {tuple(x.shape)}")
    size = x.shape[1] // 2
    return x[:, :size], x[:, size:]


def _check_slots(op: str, slots: torch.Tensor, v_cache: torch.Tensor) -> None:
    limit = v_cache.shape[0] * PAGE_SIZE
    if slots.device.type == "cpu" and slots.numel() and not 0 <= int(slots.min()) <= int(slots.max()) < limit:
        raise ValueError(f"{op}: slot {int(slots.min())} or {int(slots.max())} is not in [0, {limit})")


def lora_delta(y: torch.Tensor, x: torch.Tensor, rows: LoraRows, adapters: Mapping[int, LoraFactors]) -> None:
    """Two products per adapter, by whichever `linear` reads its factors' layout."""
    if x.shape[0] != rows.num_rows or y.shape[0] != rows.num_rows:
        raise ValueError(f"lora_delta: {rows.num_rows} rows in the step, x has {x.shape[0]}, y has {y.shape[0]}")
    for lora_id, chosen in rows.groups:
        factors = adapters.get(lora_id)
        if factors is None:
            continue
        inner = for_layout(factors.a.layout, "linear", x.device.type)(x[chosen], factors.a, None, False)
        for part in factors.parts:
            y[chosen, part.columns] += for_layout(part.b.layout, "linear", x.device.type)(
                inner[:, part.ranks], part.b, None, False
            )
