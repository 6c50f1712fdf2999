"""Paged attention and the KV cache: right against float64, decode equals extend bit for bit."""

from dataclasses import dataclass, field, replace
from itertools import pairwise
from math import e, log2

import pytest
import torch
from references import remembered

from headrace import kernels
from headrace.kernels import cpu
from headrace.kernels.packing import rotate_heads, rotation_size

PAGE = kernels.PAGE_SIZE
LOG2_E = log2(e)
TOLERANCE = 3e-6  # float32 softmax over unit-variance values: outputs below ~4 in size, a few units in the last place
# Over a cache of integers the native kernels take a query as integers, a scale for 64 elements, and a row's weights of a block of 256
# keys, times the scales of V: over int8 in 254ths of the largest, what is rounded off being given to the key 16 further on, over int16 in
# 32760ths of it or 261900ths of their sum. The reference rounds both, too; where it rounds a weight the other way, that is a step.
BLOCK = 256
KV_LIMITS = {torch.int8: 127, torch.int16: 8191}
QUERY_LIMITS = {torch.int8: 127, torch.int16: 4095}
STEPS = {torch.int8: 1 / 254, torch.int16: 1 / 8191}
MEAN_ERRORS = {torch.int8: 2e-4, torch.int16: 2e-5}  # what rounding to bytes costs is 10 times as much
DTYPES = [torch.bfloat16, torch.float32, torch.int8, torch.int16]
# A bfloat16 cache, and queries and weights rounded to bfloat16, too: the weights by up to 2^-9 of themselves.
ROUNDED = "rounded"
ROUNDED_TOLERANCE = 2**-7


@dataclass
class Sequences:
    """Some sequences in one cache; whatever they do not own of it holds NaN."""

    keys: list[torch.Tensor]  # as the cache rounded them, [length, kv_heads, head_dim]
    values: list[torch.Tensor]
    k_cache: torch.Tensor
    v_cache: torch.Tensor
    page_table: torch.Tensor
    written: list[tuple[torch.Tensor, torch.Tensor]] = field(default_factory=list)  # keys and values before rounding
    is_rounded: bool = False


def i32(values) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


def slots_of(page_table: torch.Tensor, sequence: int, length: int) -> torch.Tensor:
    positions = torch.arange(length)
    return (page_table[sequence, positions // PAGE] * PAGE + positions % PAGE).to(torch.int32)


def make_sequences(lengths, kv_heads, head_dim, dtype) -> Sequences:
    if dtype == ROUNDED:
        return replace(make_sequences(lengths, kv_heads, head_dim, torch.bfloat16), is_rounded=True)
    pages = [-(-length // PAGE) for length in lengths]
    num_pages = sum(pages) + 3
    k_shape, v_shape = kernels.kv_cache_shapes(num_pages, kv_heads, head_dim, dtype)
    k_cache, v_cache = torch.empty(k_shape, dtype=dtype), torch.empty(v_shape, dtype=dtype)
    page_table = torch.full((len(lengths), max(pages) + 1), -1, dtype=torch.int32)
    free = torch.randperm(num_pages).to(torch.int32)
    for sequence in range(len(lengths)):
        page_table[sequence, : pages[sequence]], free = free[: pages[sequence]], free[pages[sequence] :]
    new = [(torch.randn(length, kv_heads, head_dim), torch.randn(length, kv_heads, head_dim)) for length in lengths]
    keys, values = [rounded_keys(k, dtype).double() for k, _ in new], [rounded(v, dtype).double() for _, v in new]
    s = Sequences(keys, values, k_cache, v_cache, page_table, new)
    write(s)
    return s


def write(s: Sequences) -> None:
    """Everything into the cache, again when another implementation is to write it."""
    # As integers, -1 everywhere makes every scale a NaN.
    junk = -1 if s.k_cache.dtype in KV_LIMITS else torch.nan
    s.k_cache.fill_(junk)
    s.v_cache.fill_(junk)
    for sequence, (k, v) in enumerate(s.written):
        kernels.write_kv(k, v, s.k_cache, s.v_cache, slots_of(s.page_table, sequence, len(k)))


def rounded(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """What a cache of `dtype` holds of x, in float32."""
    if dtype not in KV_LIMITS:
        return x.to(dtype).float()
    if dtype == torch.int16:
        scales = next_power_of_2(x.abs().amax(-1, keepdim=True) / 8191)
        return (x / scales).round() * scales
    values, scales = in_integers(x, KV_LIMITS[dtype])
    return values * scales


def next_power_of_2(x: torch.Tensor) -> torch.Tensor:
    fraction, exponent = torch.frexp(x)
    return torch.ldexp(torch.ones_like(x), exponent - (fraction == 0.5).int())


def in_integers(x: torch.Tensor, limit: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Values and scales in float32."""
    largest = x.abs().amax(-1, keepdim=True)
    return (x * (torch.full_like(largest, limit) / largest)).round(), largest / limit


def rounded_keys(k: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """The same of keys, which an int8 cache rotates before it rounds them."""
    if dtype == torch.int16:
        values, scales = in_integers(k, 8191)
        return values * scales
    if dtype != torch.int8:
        return rounded(k, dtype)
    values, scales = in_integers(rotate_heads(k), 127)
    return rotate_heads(values) * (scales / rotation_size(k.shape[-1]))


def assert_close(out, q, keys, values, implementation, dtype, first_position, scale, window, softcap) -> None:
    want = reference(q, keys, values, first_position, scale, window, softcap)
    if dtype == ROUNDED:
        powers = q * torch.tensor(scale * LOG2_E)  # native scores are powers of 2; the cap comes after rounding
        error = (out - reference(powers.bfloat16() / LOG2_E, keys, values, first_position, 1.0, window, softcap)).abs()
        assert error.max() < ROUNDED_TOLERANCE
        assert error.square().mean().sqrt() < 2e-3
        return
    # A capped score has the size of the cap, and its rounding is a relative error of the weight.
    rounding = TOLERANCE + softcap * 2**-23
    if dtype not in KV_LIMITS or implementation == "torch":
        assert (out - want).abs().max() < rounding
        return
    error = (out - reference(q, keys, values, first_position, scale, window, softcap, integers=dtype)).abs()
    assert error.max() < 5 * STEPS[dtype]
    assert error.mean() < MEAN_ERRORS[dtype]
    assert (out - want).square().mean().sqrt() < STEPS[dtype]


@remembered
def reference(q, keys, values, first_position, scale, window, softcap, integers=None) -> torch.Tensor:
    """In float64. integers: with queries and weights rounded as over a cache of that dtype."""
    group = q.shape[1] // keys.shape[1]
    k, v = keys.repeat_interleave(group, 1), values.repeat_interleave(group, 1)
    if integers == torch.int8:
        q = rotate_heads(rounded_queries(rotate_heads(q), integers)) / rotation_size(q.shape[-1])
    elif integers == torch.int16:
        q = rounded_queries(q, integers)
    scores = torch.einsum("thd,lhd->htl", q.double(), k) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    distance = first_position + torch.arange(q.shape[0])[:, None] - torch.arange(k.shape[0])
    hidden = (distance < 0) | ((distance >= window) if window else False)
    scores = scores.masked_fill(hidden, -torch.inf)
    weights = scores.softmax(-1) if integers is None else weights_in_integers(scores, v, integers)
    return torch.einsum("htl,lhd->thd", weights, v)


def rounded_queries(q: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """In float64, rounded in groups of 64 elements as over a cache of that dtype."""
    limit = float(QUERY_LIMITS[dtype])
    groups = torch.nn.functional.pad(q, (0, -q.shape[-1] % 64)).unflatten(-1, (-1, 64))
    largest = groups.abs().amax(-1, keepdim=True).clamp_min(1e-30)
    groups = (groups * (limit / largest)).round().double() * (largest / limit)
    return groups.flatten(-2)[..., : q.shape[-1]]


def weights_in_integers(scores: torch.Tensor, v: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Weights of scores [heads, rows, length], in float64, as the native kernels have them over the values v of a cache of that dtype.

    See csrc/cpu/attention_int.h, also for the logarithm of a scale, which is 0.0861 more than Mitchell's.
    """
    length = scores.shape[-1]
    v_scale = (v.abs().amax(-1).T / KV_LIMITS[dtype])[:, None]  # [heads, 1, length]
    if dtype == torch.int16:
        v_scale = next_power_of_2(v_scale)
    log = v_scale.float().view(torch.int32).double() * 2**-23 - 127 + (0.0861 if dtype == torch.int8 else 0)
    padded = torch.nn.functional.pad(scores * LOG2_E + log, (0, -length % BLOCK), value=-torch.inf)
    powers = padded.unflatten(-1, (-1, BLOCK // 16, 16))
    top = powers.amax((-2, -1), keepdim=True).clamp_min(-1e30)
    levels = log2(254 if dtype == torch.int8 else 32760)
    products = exp2_to_13_bits(powers - top + levels) * torch.nn.functional.pad(
        v_scale * 2**-log, (0, -length % BLOCK)
    ).unflatten(-1, (-1, BLOCK // 16, 16))
    step = 2 ** (top - top.amax(-3, keepdim=True))
    if dtype == torch.int8:
        total = products.cumsum(-2).round()
        rounded_weights = total.diff(dim=-2, prepend=torch.zeros_like(total[..., :1, :]))
    else:
        share = (2**15 * 261900 / products.sum((-2, -1), keepdim=True)).floor().clamp_max(2**15) / 2**15
        rounded_weights = (products.round() * share + 0.5).floor() / share
    sums = (products * step).flatten(2)[..., :length] / v_scale
    return (rounded_weights * step).flatten(2)[..., :length] / v_scale / sums.sum(-1, keepdim=True)


def exp2_to_13_bits(x: torch.Tensor) -> torch.Tensor:
    """The polynomial of csrc/cpu/attention_products.h."""
    n = x.clamp_min(-126).round()
    r = x.clamp_min(-126) - n
    p = 0.99992806 + r * (0.69326097 + r * (0.24261113 + r * 0.05517167))
    return torch.where(x < -126, 0.0, p * 2**n)


def attend(s: Sequences, q, lengths, q_lens, scale, **options) -> torch.Tensor:
    starts = torch.tensor([0, *q_lens]).cumsum(0).to(torch.int32)
    return kernels.paged_attention(
        q, s.k_cache, s.v_cache, s.page_table, i32(lengths), starts, scale, rounded=s.is_rounded, **options
    )


# query heads, KV heads, head_dim, window, softcap
CASES = [
    (1, 1, 64, 0, 0.0),
    (9, 3, 64, 0, 0.0),
    (4, 4, 80, 0, 0.0),
    (14, 2, 96, 100, 0.0),
    (8, 2, 128, 0, 30.0),
    (8, 4, 256, 300, 50.0),
    (32, 8, 64, 1, 0.0),
    (32, 1, 16, 17, 0.0),
    (7, 7, 48, 0, 0.0),
]
PREFIXES = [0, 1, 15, 16, 200, 255, 256, 1024, 1100]


@pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "f32", "int8", "int16"])
@pytest.mark.parametrize("case", CASES, ids=str)
def test_matches_float64_over_mixed_batches(implementations, case, dtype):
    heads, kv_heads, head_dim, window, softcap = case
    q_lens = [1, 5, 33, 1, 70, 16, 2, 40, 3]
    lengths = [prefix + rows for prefix, rows in zip(PREFIXES, q_lens, strict=True)]
    torch.manual_seed(0)
    s = make_sequences(lengths, kv_heads, head_dim, dtype)
    q = torch.randn(sum(q_lens), heads, head_dim)
    scale = head_dim**-0.5

    for implementation in implementations:
        write(s)
        parts = attend(s, q, lengths, q_lens, scale, window=window, softcap=softcap).split(q_lens)

        for i, (out, mine) in enumerate(zip(parts, q.split(q_lens), strict=True)):
            keys, values = s.keys[i], s.values[i]
            assert_close(out, mine, keys, values, implementation, dtype, PREFIXES[i], scale, window, softcap)


@pytest.mark.parametrize("case", [(3, 1, 64, 0, 0.0), (4, 2, 80, 40, 20.0), (1, 1, 16, 0, 0.0)], ids=str)
def test_products_of_bfloat16_match_float64(implementation, case):
    heads, kv_heads, head_dim, window, softcap = case
    lengths, q_lens = [1, 20, 300, 531, 1030], [1, 20, 7, 1, 1]
    s = make_sequences(lengths, kv_heads, head_dim, ROUNDED)
    q = torch.randn(sum(q_lens), heads, head_dim)

    parts = attend(s, q, lengths, q_lens, head_dim**-0.5, window=window, softcap=softcap).split(q_lens)

    for i, (out, mine) in enumerate(zip(parts, q.split(q_lens), strict=True)):
        first = lengths[i] - q_lens[i]
        assert_close(out, mine, s.keys[i], s.values[i], implementation, ROUNDED, first, head_dim**-0.5, window, softcap)


@pytest.mark.parametrize("case", [(6, 2, 64, 0, 0.0), (4, 4, 80, 40, 20.0)], ids=str)
def test_products_of_bfloat16_do_not_depend_on_the_chunk(native, case):
    heads, kv_heads, head_dim, window, softcap = case
    s = make_sequences([1300], kv_heads, head_dim, ROUNDED)
    q = torch.randn(1300, heads, head_dim)
    options = {"window": window, "softcap": softcap}
    whole = attend(s, q, [1300], [1300], 0.125, **options)
    for start in range(0, 1300, 97):
        end = min(1300, start + 97)
        assert torch.equal(attend(s, q[start:end], [end], [end - start], 0.125, **options), whole[start:end])
    for position in (0, 1, 15, 16, 255, 256, 700, 1023, 1024, 1299):
        alone = attend(s, q[position : position + 1], [position + 1], [1], 0.125, **options)
        assert torch.equal(alone[0], whole[position])


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8], ids=["f32", "int8"])
def test_products_of_bfloat16_take_a_cache_of_bfloat16(implementation, dtype):
    s = replace(make_sequences([20], 1, 64, dtype), is_rounded=True)
    with pytest.raises(ValueError, match="bfloat16 KV cache"):
        attend(s, torch.randn(3, 2, 64), [20], [3], 1.0)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8, torch.int16], ids=["bf16", "int8", "int16"])
@pytest.mark.parametrize("case", [(9, 3, 64, 0, 0.0), (4, 4, 80, 40, 20.0), (8, 1, 128, 1500, 0.0)], ids=str)
def test_decode_equals_extend_and_chunked_equals_whole(implementation, case, dtype):
    heads, kv_heads, head_dim, window, softcap = case
    length = {"torch": 600, "baseline": 1300}.get(implementation, 2200)
    s = make_sequences([length], kv_heads, head_dim, dtype)
    q = torch.randn(length, heads, head_dim)
    options = {"window": window, "softcap": softcap}
    scale = head_dim**-0.5
    whole = attend(s, q, [length], [length], scale, **options)

    edges = [*range(0, 1067, 97), 1067, 1067 + 512, length]  # many odd chunks, then two that take in several blocks
    for start, end in pairwise(sorted({min(edge, length) for edge in edges})):
        got = attend(s, q[start:end], [end], [end - start], scale, **options)
        assert torch.equal(got, whole[start:end])
    for position in [0, 1, 15, 16, 255, 256, 300, 599, 1023, 1024, 2047, 2100, 2199]:
        if position < length:
            alone = attend(s, q[position : position + 1], [position + 1], [1], scale, **options)
            assert torch.equal(alone[0], whole[position])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8], ids=["bf16", "int8"])
@pytest.mark.parametrize(
    "case", [(8, 2, 64, 0, 0.0), (4, 4, 80, 0, 0.0), (3, 1, 256, 700, 0.0), (6, 2, 128, 0, 20.0)], ids=str
)
def test_a_prefix_of_4096_is_extended_right(implementation, case, dtype):
    heads, kv_heads, head_dim, window, softcap = case
    s = make_sequences([4101], kv_heads, head_dim, dtype)
    q = torch.randn(5, heads, head_dim)
    scale = head_dim**-0.5

    out = attend(s, q, [4101], [5], scale, window=window, softcap=softcap)

    assert_close(out, q, s.keys[0], s.values[0], implementation, dtype, 4096, scale, window, softcap)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8], ids=["bf16", "int8"])
def test_a_long_prefix_decodes_right_and_alone_equals_batched(native, dtype):
    lengths = [4097, 3, 2500, 1024, 1025]
    s = make_sequences(lengths, 2, 64, dtype)
    q = torch.randn(len(lengths), 6, 64)
    batched = attend(s, q, lengths, [1] * len(lengths), 0.125)
    for i, length in enumerate(lengths):
        only = [1 if j == i else 0 for j in range(len(lengths))]
        alone = attend(s, q[i : i + 1], lengths, only, 0.125)
        assert torch.equal(alone[0], batched[i])
        keys, values = s.keys[i], s.values[i]
        assert_close(alone, q[i : i + 1], keys, values, "native", dtype, length - 1, 0.125, 0, 0.0)


# Of each sequence: its length, whose first pages it has, and how many of them.
FAMILIES: dict[str, list[tuple[int, int, int]]] = {
    "one prefix": [(1060, 0, 0), *[(1041 + 7 * i, 0, 64) for i in range(11)]],
    "across splits, with different ends": [(2300, 0, 0), (1300, 0, 70), (1800, 0, 100), (2050, 0, 128), (1025, 0, 64)],
    "too little in common": [(600, 0, 0), (600, 0, 15), (40, 0, 2)],
    "two prefixes and one alone": [(700, 0, 0), (900, 1, 0), (650, 0, 40), (800, 1, 40), (500, 4, 0), (520, 1, 20)],
    "a stranger between relatives": [(1500, 0, 0), (40, 0, 0), (700, 0, 20), (1500, 0, 90), (1400, 0, 85)],
    "a whole sequence in another": [(512, 0, 0), (513, 0, 32), (1024, 0, 32), (257, 0, 16)],
}


@pytest.mark.parametrize("num_threads", [1, 3])
@pytest.mark.parametrize("dtype", [*DTYPES, ROUNDED], ids=["bf16", "f32", "int8", "int16", "rounded"])
@pytest.mark.parametrize("window", [0, 300])
@pytest.mark.parametrize("family", FAMILIES)
def test_sequences_that_begin_with_the_same_pages_decode_as_if_alone(native, family, window, dtype, num_threads):
    rows = FAMILIES[family]
    lengths = [length for length, _, _ in rows]
    s = make_sequences(lengths, 2, 64, dtype)
    for i, (_, whose, num_pages) in enumerate(rows):
        s.page_table[i, :num_pages] = s.page_table[whose, :num_pages]
    # One in the middle extends by several tokens meanwhile.
    q_lens = [5 if i == 1 else 1 for i in range(len(rows))]
    q = torch.randn(sum(q_lens), 6, 64)
    kernels.set_num_threads(num_threads)

    together = attend(s, q, lengths, q_lens, 0.125, window=window).split(q_lens)

    for i, mine in enumerate(q.split(q_lens)):
        only = [q_lens[i] if j == i else 0 for j in range(len(rows))]
        assert torch.equal(attend(s, mine, lengths, only, 0.125, window=window), together[i])


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.int8, torch.int16, ROUNDED], ids=["bf16", "int8", "int16", "rounded"]
)
def test_thread_counts_and_wide_instruction_sets_give_equal_bits(native, dtype):
    lengths, q_lens = [3000, 40, 1500], [1, 40, 60]
    s = make_sequences(lengths, 2, 80, dtype)
    q = torch.randn(sum(q_lens), 8, 80)
    results = []
    for isa in [isa for isa, reason in cpu.isas() if not reason and isa != "baseline"]:
        cpu.select_isa(isa)
        for threads in (1, 2, 16):
            kernels.set_num_threads(threads)
            results.append(attend(s, q, lengths, q_lens, 0.1, softcap=25.0))
            for i, row in ((0, 0), (2, 100)):
                only = [1 if j == i else 0 for j in range(3)]
                assert torch.equal(attend(s, q[row : row + 1], lengths, only, 0.1, softcap=25.0)[0], results[0][row])
    assert all(torch.equal(result, results[0]) for result in results)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.int8], ids=["bf16", "int8"])
def test_pages_before_the_window_are_not_read(implementation, dtype):
    s = make_sequences([700], 2, 64, dtype)
    q = torch.randn(2, 4, 64)
    want = attend(s, q, [700], [2], 0.125, window=64)
    s.page_table[0, : (698 - 63) // PAGE] = -1
    assert torch.equal(attend(s, q, [700], [2], 0.125, window=64), want)


def test_queries_may_be_slices_of_one_projection(implementation):
    s = make_sequences([50], 1, 64, torch.float32)
    qkv = torch.randn(50, 5 * 64)
    q = qkv[:, : 3 * 64].view(50, 3, 64)
    assert torch.equal(attend(s, q, [50], [50], 0.125), attend(s, q.contiguous(), [50], [50], 0.125))


def test_large_scores_do_not_overflow(implementation):
    s = make_sequences([300], 1, 64, torch.float32)
    q = torch.randn(300, 1, 64) * 100
    out = attend(s, q, [300], [300], 1.0)
    # Scores reach some thousands, where a float32 holds them to about 1e-4 of a weight.
    assert (out - reference(q, s.keys[0], s.values[0], 0, 1.0, 0, 0.0)).abs().max() < 1e-2


@pytest.mark.parametrize(
    "dtype", [torch.bfloat16, torch.int8, torch.int16, ROUNDED], ids=["bf16", "int8", "int16", "rounded"]
)
def test_a_nan_query_gives_nan_and_only_there(implementation, dtype):
    s = make_sequences([90], 2, 64, dtype)
    q = torch.randn(90, 4, 64)
    clean = attend(s, q, [90], [90], 0.125)
    q[40, 1, 5] = torch.nan
    out = attend(s, q, [90], [90], 0.125)
    assert out[40, 1].isnan().all()
    out[40, 1] = clean[40, 1]
    assert torch.equal(out, clean)


def test_no_sequences_and_no_rows(implementation):
    s = make_sequences([20], 1, 64, torch.bfloat16)
    assert attend(s, torch.empty(0, 2, 64), [20], [0], 1.0).shape == (0, 2, 64)
    empty = kernels.paged_attention(
        torch.empty(0, 2, 64), s.k_cache, s.v_cache, s.page_table[:0], i32([]), i32([0]), 1.0
    )
    assert empty.shape == (0, 2, 64)


@pytest.mark.parametrize(
    ("lengths", "starts", "message"),
    [([20], [0, 4], "q_starts"), ([2], [0, 3], "3 query rows"), ([2000], [0, 3], "pages of the table")],
)
def test_lengths_that_do_not_fit_are_refused(implementation, lengths, starts, message):
    s = make_sequences([20], 1, 64, torch.bfloat16)
    with pytest.raises(ValueError, match=message):
        kernels.paged_attention(
            torch.randn(3, 2, 64), s.k_cache, s.v_cache, s.page_table, i32(lengths), i32(starts), 1.0
        )


def test_a_page_outside_the_cache_is_refused(implementation):
    s = make_sequences([20], 1, 64, torch.bfloat16)
    s.page_table[0, 1] = 99
    with pytest.raises(ValueError, match="not in"):
        attend(s, torch.randn(3, 2, 64), [20], [3], 1.0)


def test_native_attention_refuses_foreign_layouts(native):
    s = make_sequences([20], 2, 64, torch.bfloat16)
    q = torch.randn(3, 4, 64)
    with pytest.raises(ValueError, match="do not share"):
        attend(s, torch.randn(3, 3, 64), [20], [3], 1.0)
    with pytest.raises(ValueError, match="kv_cache_shapes"):
        kernels.paged_attention(q, s.v_cache, s.v_cache, s.page_table, i32([20]), i32([0, 3]), 1.0)
    with pytest.raises(ValueError, match="int32"):
        kernels.paged_attention(q, s.k_cache, s.v_cache, s.page_table.long(), i32([20]), i32([0, 3]), 1.0)
    with pytest.raises(ValueError, match="multiple of 16"):
        kernels.kv_cache_shapes(1, 1, 72, torch.bfloat16)
    with pytest.raises(ValueError, match="up to 512"):
        kernels.kv_cache_shapes(1, 1, 528, torch.int8)
    eight = make_sequences([20], 2, 64, torch.int8)
    with pytest.raises(ValueError, match="kv_cache_shapes"):
        attend(eight, torch.randn(3, 4, 80), [20], [3], 1.0)


# An infinite key may have a score of minus infinity, and then no weight.
@pytest.mark.parametrize("dtype", KV_LIMITS, ids=["int8", "int16"])
@pytest.mark.parametrize(("where", "kind"), [("k", "nan"), ("v", "nan"), ("v", "inf")])
def test_what_is_not_finite_stays_so_in_a_cache_of_integers(implementation, where, kind, dtype):
    shape, _ = kernels.kv_cache_shapes(2, 2, 64, dtype)
    k_cache, v_cache = torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)
    k, v = torch.randn(2, 30, 2, 64)
    {"k": k, "v": v}[where][7, 1, 5] = float(kind)
    kernels.write_kv(k, v, k_cache, v_cache, i32(range(30)))
    s = Sequences([], [], k_cache, v_cache, i32([[0, 1]]))

    out = attend(s, torch.randn(1, 4, 64), [30], [1], 0.125)[0]

    assert not out[2:].isfinite().any()
    assert out[:2].isfinite().all()


@pytest.mark.parametrize("head_dim", [64, 128, 512])
@pytest.mark.parametrize("dtype", KV_LIMITS, ids=["int8", "int16"])
def test_the_largest_sums_of_integers_fit(native, dtype, head_dim):
    # Every product of queries and keys is the largest there is, and so is every product of weights and values.
    shape, _ = kernels.kv_cache_shapes(64, 1, head_dim, dtype)
    k_cache, v_cache = torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)
    ones = torch.ones(1024, 1, head_dim)
    kernels.write_kv(ones, ones, k_cache, v_cache, i32(range(1024)))
    q = torch.ones(5, 3, head_dim)
    s = Sequences([], [], k_cache, v_cache, i32([list(range(64))]))
    for isa in [isa for isa, reason in cpu.isas() if not reason]:
        cpu.select_isa(isa)

        assert (attend(s, q, [1024], [5], 1.0) - 1).abs().max() < 1e-3
        assert (attend(s, -q, [1024], [5], 1.0) - 1).abs().max() < 1e-3


@pytest.mark.parametrize("dtype", KV_LIMITS, ids=["int8", "int16"])
def test_a_cache_of_integers_holds_each_head_by_its_own_scale(implementation, dtype):
    shape, _ = kernels.kv_cache_shapes(4, 3, 48, dtype)
    k_cache, v_cache = torch.zeros(shape, dtype=dtype), torch.zeros(shape, dtype=dtype)
    size = torch.logspace(-6, 6, 40)[:, None, None]
    k, v = torch.randn(40, 3, 48) * size, torch.randn(40, 3, 48) / size
    k[11], v[12, 1] = 0.0, 1e-35
    slots = torch.randperm(4 * PAGE)[:40].to(torch.int32)
    slots[5] = -1

    kernels.write_kv(k, v, k_cache, v_cache, slots)
    written = slots >= 0
    got_k, got_v = kernels.gather_kv(k_cache, v_cache, slots[written])

    finite_k, finite_v = rounded_keys(k, dtype).nan_to_num(0.0), rounded(v, dtype)
    finite_v[12, 1] = 0.0
    assert torch.equal(got_k, finite_k[written])
    assert torch.equal(got_v, finite_v[written])
    everywhere = torch.arange(4 * PAGE, dtype=torch.int32)
    others = everywhere[~torch.isin(everywhere, slots)]
    assert not any(x.any() for x in kernels.gather_kv(k_cache, v_cache, others))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "f32"])
def test_the_cache_gives_back_what_was_written(implementation, dtype):
    k_shape, v_shape = kernels.kv_cache_shapes(7, 3, 48, dtype)
    k_cache, v_cache = torch.zeros(k_shape, dtype=dtype), torch.zeros(v_shape, dtype=dtype)
    kv = torch.randn(40, 2 * 3 * 48) * 1e3
    k, v = kv[:, : 3 * 48].view(40, 3, 48), kv[:, 3 * 48 :].view(40, 3, 48)
    k[0, 0, 0], v[0, 0, 0], k[1, 1, 1] = torch.nan, torch.inf, 3.4e38
    slots = torch.randperm(7 * PAGE)[:40].to(torch.int32)
    skipped = slots.clone()
    skipped[5:9] = -1

    kernels.write_kv(k, v, k_cache, v_cache, skipped)
    got_k, got_v = kernels.gather_kv(k_cache, v_cache, slots)

    written = skipped >= 0
    assert torch.equal(got_k[written].nan_to_num(1.0), k.to(dtype).float()[written].nan_to_num(1.0))
    assert got_k[0, 0, 0].isnan()
    assert torch.equal(got_v[written], v.to(dtype).float()[written])
    assert not got_k[~written].any()
    everywhere = torch.arange(7 * PAGE, dtype=torch.int32)
    others = everywhere[~torch.isin(everywhere, skipped)]
    assert not kernels.gather_kv(k_cache, v_cache, others)[0].any()


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8], ids=["f32", "int8"])
def test_a_slot_outside_the_cache_is_refused_and_nothing_is_written(implementation, dtype):
    k_shape, v_shape = kernels.kv_cache_shapes(2, 1, 64, dtype)
    k_cache, v_cache = torch.zeros(k_shape, dtype=dtype), torch.zeros(v_shape, dtype=dtype)
    with pytest.raises(ValueError, match="slot"):
        kernels.write_kv(torch.ones(2, 1, 64), torch.ones(2, 1, 64), k_cache, v_cache, i32([0, 32]))
    assert not k_cache.any()
    assert not v_cache.any()
