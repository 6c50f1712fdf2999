"""Attention over an int16 cache: the bits of a model of its arithmetic, in numpy, on every instruction set that has fused multiply-adds."""

from dataclasses import dataclass

import numpy as np
import pytest
import torch

from headrace import kernels
from headrace.kernels import cpu
from headrace.kernels.packing import int_parts

F = np.float32
BLOCK, SPLIT, LANES, GROUP = 256, 1024, 16, 64
FINE = [
    1.326472731307149e-3,
    9.671512991189957e-3,
    5.550733581185341e-2,
    2.402224242687225e-1,
    6.931470036506653e-1,
    1.0,
]
COARSE = [5.517167e-2, 2.4261113e-1, 6.9326097e-1, 0.99992806]
"""The polynomials of vexp2 and vexp2_to_13_bits."""


def fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a b + c of float32 with one rounding: in float64 rounded to odd, then to nearest (Boldo and Melquiond, 2008)."""
    product, wide = np.multiply(a, b, dtype=np.float64), np.asarray(c, np.float64)
    high = product + wide
    back = high - product
    low = (product - (high - back)) + (wide - back)  # what `high` lost (Knuth's TwoSum)
    is_even = np.asarray(high).view(np.int64) % 2 == 0
    return np.where((low != 0) & is_even, np.nextafter(high, np.where(low > 0, np.inf, -np.inf)), high).astype(F)


def exp2(x: np.ndarray, coefficients: list[float]) -> np.ndarray:
    n = np.rint(np.maximum(x, F(-126)))
    r, p = x - n, F(coefficients[0])
    for coefficient in coefficients[1:]:
        p = fma(p, r, F(coefficient))
    return np.where(x < F(-126), F(0), np.ldexp(p, n.astype(np.int32))).astype(F)


def sum_of(lanes: np.ndarray) -> np.float32:
    while len(lanes) > 1:
        lanes = lanes[: len(lanes) // 2] + lanes[len(lanes) // 2 :]
    return F(lanes[0])


@dataclass
class State:
    """The running softmax of a row."""

    top: np.float32
    total: np.float32
    values: np.ndarray


@dataclass
class Words:
    """Keys and values of one head as the cache holds them: words int64[length, head_dim], scales float32[length]."""

    k: np.ndarray
    v: np.ndarray
    k_scales: np.ndarray
    v_scales: np.ndarray


def attend(q: np.ndarray, words: Words, scale: np.float32) -> np.ndarray:
    """The last position's output, of one head."""
    total = State(F(-np.inf), F(0), np.zeros(len(q), F))
    for begin in range(0, len(words.k), SPLIT):
        state = State(F(-np.inf), F(0), np.zeros(len(q), F))
        for first in range(begin, min(begin + SPLIT, len(words.k)), BLOCK):
            add_block(
                state, q, words, slice(first, min(first + BLOCK, len(words.k))), F(scale * F(1.44269504088896341))
            )
        if total.total == 0:
            total = state
            continue
        top = max(total.top, state.top)
        before, part = exp2(total.top - top, FINE), exp2(state.top - top, FINE)
        values = fma(part, state.values, before * total.values)
        total = State(top, total.total * before + state.total * part, values)
    return total.values * (F(1) / total.total)


def add_block(state: State, q: np.ndarray, words: Words, keys: slice, scale: np.float32) -> None:
    v_scales = words.v_scales[keys]
    logs = fma(v_scales.view(np.int32).astype(F), F(2.0**-23), F(-127))
    inverses = F(1) / v_scales
    scores = logs
    for begin in range(0, len(q), GROUP):
        group = q[begin : begin + GROUP]
        largest = np.abs(group).max()
        integers = np.rint(group * (F(4095) / largest)).astype(np.int64)
        dots = words.k[keys, begin : begin + GROUP] @ integers
        assert np.abs(dots).max() < 2**31
        scores = fma(dots.astype(F), (largest / F(4095) * scale) * words.k_scales[keys], scores)
    block = scores.max()
    top = max(state.top, block)
    factor = exp2(state.top - top, FINE) if np.isfinite(state.top) else F(0)
    fraction = exp2(block - top, FINE)
    weights = exp2(scores - (block - F(14.9996477)), COARSE)
    sums, wholes = np.zeros((2, LANES), F)
    for j in range(0, len(weights), LANES):
        some = slice(j, min(j + LANES, len(weights)))
        lanes = slice(0, some.stop - j)
        sums[lanes] = fma(weights[some], inverses[some], sums[lanes])
        wholes[lanes] += weights[some]
    integers, weight_scale = np.rint(weights).astype(np.int64), fraction * (F(1) / F(32760))
    state.total = state.total * factor + sum_of(sums) * weight_scale
    share = F(261900) / sum_of(wholes)
    if share < 1:
        share = int(share * F(2**15))
        integers, weight_scale = (integers * share + 2**14) >> 15, weight_scale * (F(2**15) / F(share))
    assert (np.abs(words.v[keys]) * integers[:, None]).sum(0).max() < 2**31
    state.values = fma((integers @ words.v[keys]).astype(F), weight_scale, state.values * factor)
    state.top = top


@pytest.mark.parametrize("head_dim", [64, 80])
def test_every_instruction_set_gives_the_bits_of_the_model(native, head_dim):
    length, num_pages = 2500, 157
    shape, _ = kernels.kv_cache_shapes(num_pages, 1, head_dim, torch.int16)
    k_cache, v_cache = torch.zeros(shape, dtype=torch.int16), torch.zeros(shape, dtype=torch.int16)
    # Sizes of keys and values differ, as do those of their elements.
    sizes = torch.logspace(-1, 1, length)[torch.randperm(length)][:, None, None]
    k, v = torch.randn(length, 1, head_dim) * torch.logspace(-1, 1, head_dim), torch.randn(length, 1, head_dim) * sizes
    kernels.write_kv(k, v, k_cache, v_cache, torch.arange(length, dtype=torch.int32))
    parts = int_parts(k_cache, v_cache)
    words = Words(
        parts.k[:, 0].permute(0, 2, 1, 3).reshape(-1, head_dim)[:length].numpy().astype(np.int64),
        parts.v[:, 0].permute(0, 1, 3, 2).reshape(-1, head_dim)[:length].numpy().astype(np.int64),
        parts.k_scales[:, 0].reshape(-1)[:length].numpy(),
        parts.v_scales[:, 0].reshape(-1)[:length].numpy(),
    )
    assert np.array_equal(np.abs(words.k).max(1), np.full(length, 8191))
    q, table = torch.randn(1, 2, head_dim), torch.arange(num_pages, dtype=torch.int32)[None]
    for keys in (1, 17, 255, 256, 300, 1024, 1100, 2500):
        lengths, starts = torch.tensor([keys], dtype=torch.int32), torch.tensor([0, 1], dtype=torch.int32)
        seen = Words(words.k[:keys], words.v[:keys], words.k_scales[:keys], words.v_scales[:keys])
        want = np.stack([attend(head, seen, F(0.125)) for head in q[0].numpy()])
        for isa in [isa for isa, reason in cpu.isas() if not reason and isa != "baseline"]:
            cpu.select_isa(isa)
            got = kernels.paged_attention(q, k_cache, v_cache, table, lengths, starts, 0.125)
            assert np.array_equal(got[0].numpy().view(np.int32), want.view(np.int32)), (isa, keys)
