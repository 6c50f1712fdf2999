"""Attention in both directions within packed sequences: values, windows, and bits that depend on nothing but the sequence."""

import math

import pytest
import torch

from headrace import kernels
from headrace.kernels import cpu
from headrace.kernels.torch_fallback import attend_padded

LENGTHS = [1, 40, 0, 17, 16, 300, 2]


def packed(lengths, num_q_heads, num_kv_heads, head_dim):
    """q, k, v as slices of one projection, and row_starts."""
    tokens = sum(lengths)
    qkv = torch.randn(tokens, (num_q_heads + 2 * num_kv_heads) * head_dim)
    parts = qkv.split([num_q_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim], dim=1)
    q, k, v = (part.unflatten(1, (-1, head_dim)) for part in parts)
    return q, k, v, starts_of(lengths)


def starts_of(lengths):
    return torch.tensor([0, *lengths], dtype=torch.int32).cumsum(0, dtype=torch.int32)


def reference(q, k, v, row_starts, scale, window):
    """The same in float64, sequence by sequence."""
    group = q.shape[1] // k.shape[1]
    out = torch.empty(q.shape, dtype=torch.float64)
    for begin, end in zip(row_starts.tolist(), row_starts.tolist()[1:], strict=False):
        rows = slice(begin, end)
        wide_k, wide_v = (x[rows].double().repeat_interleave(group, dim=1) for x in (k, v))
        scores = torch.einsum("qhd,khd->hqk", q[rows].double(), wide_k) * scale
        place = torch.arange(end - begin)
        if window:
            scores = scores.masked_fill((place[:, None] - place).abs() > window, -math.inf)
        out[rows] = torch.einsum("hqk,khd->qhd", scores.softmax(-1), wide_v)
    return out


@pytest.mark.parametrize("window", [0, 1, 24, 270])
@pytest.mark.parametrize(
    ("num_q_heads", "num_kv_heads", "head_dim"),
    [(3, 3, 32), (2, 2, 8), (4, 2, 24), (1, 1, 64), (2, 1, 128), (2, 2, 80)],
)
def test_packed_attention_matches_float64(implementation, num_q_heads, num_kv_heads, head_dim, window):
    q, k, v, row_starts = packed(LENGTHS, num_q_heads, num_kv_heads, head_dim)
    scale = head_dim**-0.5

    got = kernels.packed_attention(q, k, v, row_starts, scale, window=window)

    assert got.shape == q.shape
    assert got.is_contiguous()
    assert torch.allclose(got.double(), reference(q, k, v, row_starts, scale, window), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("window", [0, 30])
@pytest.mark.parametrize("head_dim", [16, 24, 64])
def test_rounded_attention_is_that_of_rounded_numbers(implementation, head_dim, window):
    q, k, v, row_starts = packed(LENGTHS, 2, 2, head_dim)
    scale = head_dim**-0.5

    got = kernels.packed_attention(q, k, v, row_starts, scale, window=window, rounded=True)

    want = reference(q, k.bfloat16(), v.bfloat16(), row_starts, scale, window)
    # Weights of at most 1 and queries are rounded to 8 bits.
    assert torch.allclose(got.double(), want, rtol=0, atol=2**-8 * v.abs().max())
    assert not torch.equal(got, kernels.packed_attention(q, k, v, row_starts, scale, window=window))


@pytest.mark.parametrize("rounded", [False, True], ids=["float", "bf16"])
@pytest.mark.parametrize("window", [0, 20])
def test_a_sequence_has_the_same_bits_alone_and_among_others(implementation, rounded, window):
    q, k, v, row_starts = packed(LENGTHS, 4, 2, 32)

    together = kernels.packed_attention(q, k, v, row_starts, 0.2, window=window, rounded=rounded)

    for begin, end in zip(row_starts.tolist(), row_starts.tolist()[1:], strict=False):
        rows = slice(begin, end)
        alone = kernels.packed_attention(
            q[rows], k[rows], v[rows], starts_of([end - begin]), 0.2, window=window, rounded=rounded
        )
        assert torch.equal(together[rows], alone)


def test_a_nan_stays_in_its_sequence(implementation):
    q, k, v, row_starts = packed([20, 20, 20], 2, 2, 32)
    want = kernels.packed_attention(q, k, v, row_starts, 0.2)
    k[25, 0, 3] = v[30, 1, 2] = torch.nan

    got = kernels.packed_attention(q, k, v, row_starts, 0.2)

    assert torch.equal(got[:20], want[:20])
    assert torch.equal(got[40:], want[40:])
    assert got[20:40, 0].isnan().all()
    assert got[20:40, 1, 2].isnan().all()


@pytest.mark.parametrize("window", [0, 24])
def test_padded_batches_of_a_device_give_the_same(one_torch_thread, window):
    q, k, v, row_starts = packed(LENGTHS, 4, 2, 32)

    got = attend_padded(q, k, v, row_starts.tolist(), 0.2, window)

    assert got.is_contiguous()
    assert torch.allclose(got.double(), reference(q, k, v, row_starts, 0.2, window), rtol=1e-5, atol=2e-6)


def test_no_tokens_and_no_sequences_are_allowed(implementation):
    q, k, v, _ = packed([], 2, 2, 32)
    for lengths in ([], [0, 0]):
        assert kernels.packed_attention(q, k, v, starts_of(lengths), 0.2).shape == (0, 2, 32)


def test_arguments_that_do_not_fit_are_refused(implementation):
    q, k, v, row_starts = packed([3, 4], 4, 2, 32)
    for bad in ([0, 3], [1, 7], [0, 8, 7], [0, 5, 3, 7]):
        with pytest.raises(ValueError, match="row_starts"):
            kernels.packed_attention(q, k, v, torch.tensor(bad, dtype=torch.int32), 0.2)
    with pytest.raises(ValueError, match="evenly"):
        kernels.packed_attention(q[:, :3], k, v, row_starts, 0.2)
    with pytest.raises(ValueError, match="not \\[tokens"):
        kernels.packed_attention(q, k, v[:5], row_starts, 0.2)
    with pytest.raises(ValueError, match="window"):
        kernels.packed_attention(q, k, v, row_starts, 0.2, window=-1)


@pytest.mark.parametrize("rounded", [False, True], ids=["float", "bf16"])
def test_thread_counts_and_wide_instruction_sets_give_equal_bits(native, rounded):
    q, k, v, row_starts = packed(LENGTHS, 4, 2, 48)
    results = []
    for isa in [isa for isa, reason in cpu.isas() if not reason and isa != "baseline"]:
        cpu.select_isa(isa)
        for threads in (1, 2, 5):
            kernels.set_num_threads(threads)
            results.append(kernels.packed_attention(q, k, v, row_starts, 0.2, window=50, rounded=rounded))
    assert all(torch.equal(result, results[0]) for result in results)
