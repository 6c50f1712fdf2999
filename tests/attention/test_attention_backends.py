"""Every attention backend against float64 over one grid, and the bits of a row against its surroundings."""

import itertools
from dataclasses import replace
from importlib.util import find_spec

import pytest
import torch

from headrace import kernels
from headrace.attention.base import AttentionBackend, AttentionLayerSpec, KvPool, KvShape, StepRows
from headrace.attention.select import PREFERENCE, make_backend, preferred_page_size, reasons_against
from headrace.attention.torch_native import KEY_BLOCK, attend_whole
from headrace.config.resolve import AttentionNeeds
from headrace.kernels.cpu import why_not

CPU = torch.device("cpu")
BACKENDS = ["torch_native", *([] if why_not() else ["cpu"])]
# float32 sums over at most 300 keys, and exp by another routine.
TOLERANCE = 2e-5

GRID = [
    # num_q_heads, num_kv_heads, head_dim, window, soft_cap
    (1, 1, 16, 0, 0.0),
    (9, 3, 64, 0, 0.0),
    (5, 1, 32, 33, 0.0),
    (4, 4, 80, 0, 7.0),
    (14, 2, 48, 5, 3.0),
    (8, 8, 128, 200, 0.0),
]


class Cache:
    """A backend with one layer and sequences in scattered pages."""

    def __init__(
        self,
        name: str,
        shape: tuple[int, int, int, int, float],
        dtype: torch.dtype = torch.float32,
        page_size: int | None = None,
    ) -> None:
        num_q_heads, num_kv_heads, head_dim, window, soft_cap = shape
        self.backend: AttentionBackend = make_backend(name)
        self.layer = AttentionLayerSpec(0, num_q_heads, num_kv_heads, head_dim, head_dim**-0.5, window, soft_cap)
        self.page_size = page_size or preferred_page_size(name)
        self.pool: KvPool = self.backend.make_kv_pool(
            KvShape(1, num_kv_heads, head_dim, dtype), 2048, self.page_size, CPU
        )

    def slots(self, sequence: int) -> torch.Tensor:
        if self.page_size == 1:
            slots = torch.randperm(2048, generator=torch.Generator().manual_seed(0))
            return slots[sequence * 512 : sequence * 512 + 512].to(torch.int32)
        pages = torch.randperm(128, generator=torch.Generator().manual_seed(0))[sequence * 32 : sequence * 32 + 32]
        return (pages[:, None] * 16 + torch.arange(16)).flatten().to(torch.int32)

    def step(self, rows: list[tuple[int, int, tuple[torch.Tensor, ...]]]) -> list[torch.Tensor]:
        """rows: (sequence, start, (q, k, v) of the new positions)."""
        starts, counts = [start for _, start, _ in rows], [len(new[0]) for _, _, new in rows]
        longest = max(s + c for s, c in zip(starts, counts, strict=True))
        lengths = torch.tensor([s + c for s, c in zip(starts, counts, strict=True)], dtype=torch.int32)
        self.backend.prepare(
            StepRows(
                starts=starts,
                counts=counts,
                positions=torch.cat([torch.arange(s, s + c) for s, c in zip(starts, counts, strict=True)]).int(),
                seq_lens=lengths,
                row_starts=torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32),
                out_slots=torch.cat([self.slots(i)[s : s + len(new[0])] for i, s, new in rows]),
                slots=torch.stack([self.slots(i)[:longest] for i, _, _ in rows]),
            )
        )
        q, k, v = (torch.cat([new[part] for _, _, new in rows]) for part in range(3))
        return list(self.backend.forward(q, k, v, self.layer).split(counts))


def random_qkv(length: int, shape: tuple[int, int, int, int, float], seed: int = 0) -> tuple[torch.Tensor, ...]:
    num_q_heads, num_kv_heads, head_dim, _, _ = shape
    generator = torch.Generator().manual_seed(seed)
    return tuple(
        torch.randn(length, heads, head_dim, generator=generator) for heads in (num_q_heads, num_kv_heads, num_kv_heads)
    )


def exact(qkv: tuple[torch.Tensor, ...], layer: AttentionLayerSpec) -> torch.Tensor:
    """Causal attention in float64, one softmax."""
    group = layer.num_q_heads // layer.num_kv_heads
    q, k, v = (x.double().transpose(0, 1) for x in qkv)
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    scores = q @ k.transpose(1, 2) * layer.scale
    if layer.soft_cap:
        scores = layer.soft_cap * torch.tanh(scores / layer.soft_cap)
    distance = torch.arange(q.shape[1])[:, None] - torch.arange(q.shape[1])[None, :]
    hidden = (distance < 0) | (distance >= layer.sliding_window if layer.sliding_window else distance < 0)
    return (torch.softmax(scores.masked_fill(hidden, -torch.inf), -1) @ v).transpose(0, 1).flatten(1)


def part(qkv: tuple[torch.Tensor, ...], start: int, end: int) -> tuple[torch.Tensor, ...]:
    return tuple(x[start:end] for x in qkv)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", GRID, ids=str)
@pytest.mark.parametrize("length", [1, 16, 130, 300])
def test_a_prompt_gives_what_float64_gives(backend: str, shape: tuple[int, int, int, int, float], length: int):
    cache, qkv = Cache(backend, shape), random_qkv(length, shape)

    got = cache.step([(0, 0, qkv)])[0]

    torch.testing.assert_close(got, exact(qkv, cache.layer).float(), atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("shape", GRID, ids=str)
def test_an_int8_cache_gives_what_float64_gives_over_its_values(backend: str, shape: tuple[int, int, int, int, float]):
    cache, (q, k, v) = Cache(backend, shape, torch.int8), random_qkv(300, shape)
    stored = []
    for x in (k, v):
        values, scales = kernels.quantize_rows(x.reshape(-1, x.shape[-1]), group=x.shape[-1])
        stored.append((values * scales).view(x.shape))

    got = cache.step([(0, 0, (q, k, v))])[0]

    error = (got - exact((q, *stored), cache.layer)).abs()
    # The native kernels round weights to 254ths of the largest: a step, or some, of values up to 4.
    assert error.max() < (0.03 if backend == "cpu" else 1e-5)
    assert error.square().mean().sqrt() < (3e-3 if backend == "cpu" else 1e-6)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("shape", GRID[1:5], ids=str)
def test_bits_depend_on_neither_chunks_nor_neighbours(
    backend: str, dtype: torch.dtype, shape: tuple[int, int, int, int, float]
):
    length = KEY_BLOCK * 2 + 9
    qkv, other = random_qkv(length, shape), random_qkv(50, shape, seed=1)
    whole = Cache(backend, shape, dtype).step([(0, 0, qkv)])[0]
    cache, chunks, start = Cache(backend, shape, dtype), [], 0

    for size in [3, 16, 100, 1, 1, 30, length - 151]:
        rows = [(0, start, part(qkv, start, start + size))]
        if start:
            rows.insert(0, (1, 0, other))
        chunks.append(cache.step(rows)[-1])
        start += size

    assert torch.equal(torch.cat(chunks), whole)


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("shape", GRID, ids=str)
def test_bits_do_not_depend_on_the_page_size(backend: str, dtype: torch.dtype, shape: tuple[int, int, int, int, float]):
    qkv, other = random_qkv(300, shape), random_qkv(21, shape, seed=1)
    want = Cache(backend, shape, dtype, page_size=16).step([(0, 0, qkv), (1, 0, other)])

    cache = Cache(backend, shape, dtype, page_size=1)
    first = cache.step([(0, 0, part(qkv, 0, 270))])[0]
    rest, beside = cache.step([(0, 270, part(qkv, 270, 300)), (1, 0, other)])

    assert torch.equal(torch.cat([first, rest]), want[0])
    assert torch.equal(beside, want[1])


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
@pytest.mark.parametrize("shape", GRID, ids=str)
def test_the_path_of_other_devices_gives_the_same(shape: tuple[int, int, int, int, float], dtype: torch.dtype):
    cache, qkv = Cache("torch_native", shape, dtype), random_qkv(150, shape)
    want = cache.step([(0, 0, qkv)])[0][90:]

    got = attend_whole(qkv[0][90:], cache.pool.k[0], cache.pool.v[0], cache.slots(0)[:150], 90, cache.layer)

    torch.testing.assert_close(got.flatten(1), want, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
@pytest.mark.parametrize("backend", BACKENDS)
def test_what_others_left_in_a_page_does_not_leak(backend: str, dtype: torch.dtype):
    shape = (4, 2, 32, 0, 0.0)
    qkv = random_qkv(21, shape)
    clean = Cache(backend, shape, dtype).step([(0, 0, qkv)])[0]
    dirty = Cache(backend, shape, dtype)
    for tensor in (*dirty.pool.k, *dirty.pool.v):
        tensor.fill_(-1 if dtype == torch.int8 else torch.nan)  # bytes of -1 are scales of NaN

    assert torch.equal(dirty.step([(0, 0, qkv)])[0], clean)


@pytest.mark.parametrize(("dtype", "head_bytes"), [(torch.bfloat16, 64), (torch.int8, 36)])
@pytest.mark.parametrize("backend", BACKENDS)
def test_a_pool_starts_as_zeros_and_counts_its_bytes(backend: str, dtype: torch.dtype, head_bytes: int):
    shape = KvShape(2, 3, 32, dtype)

    pool = make_backend(backend).make_kv_pool(shape, 64, preferred_page_size(backend), CPU)

    assert not any(tensor.any() for tensor in (*pool.k, *pool.v))
    assert pool.num_bytes == 64 * shape.bytes_per_token == 64 * 2 * 2 * 3 * head_bytes


NEEDS = AttentionNeeds(device="cpu", native_kernels=True, head_dim=64, kv_cache_dtype="bfloat16", page_size=None)


def test_the_reference_serves_everything_and_the_native_one_says_why_not():
    odd = AttentionNeeds(device="cuda", native_kernels=False, head_dim=72, kv_cache_dtype="float16", page_size=1)

    assert reasons_against("torch_native", odd) == []
    assert reasons_against("cpu", NEEDS) == []
    reasons = reasons_against("cpu", odd)
    assert [any(word in reason for reason in reasons) for word in ("cuda", "float16", "head_dim")] == [True] * 3
    for backend, head_dim in (("cpu", 528), ("torch_native", 70)):
        needs = AttentionNeeds("cpu", True, head_dim, "int8", None)
        assert any("int8" in reason for reason in reasons_against(backend, needs))
    assert set(PREFERENCE) == {"cpu", "flashinfer", "triton", "torch_native"}


def test_gpu_backends_say_what_they_cannot():
    gpu = replace(NEEDS, device="cuda", native_kernels=False)
    refusals = [
        # backend, what is asked, a word of the reason
        ("triton", NEEDS, "for tests"),
        ("triton", replace(gpu, head_dim=264), "head_dim"),
        ("triton", replace(gpu, kv_cache_dtype="int8"), "int8"),
        ("flashinfer", NEEDS, "CUDA only"),
        ("flashinfer", replace(gpu, head_dim=80), "head_dim"),
        ("flashinfer", replace(gpu, kv_cache_dtype="float32"), "float32"),
        ("flashinfer", replace(gpu, deterministic=True), "depend on the batch"),
        ("torch_native", replace(gpu, deterministic=True), "depend on the batch"),
        ("torch_native", replace(gpu, kv_cache_dtype="float8_e4m3fn"), "fp8"),
    ]
    for backend, needs, word in refusals:
        assert any(word in reason for reason in reasons_against(backend, needs)), (backend, needs)
    if find_spec("flashinfer") is None:
        assert any("not installed" in reason for reason in reasons_against("flashinfer", gpu))
    if find_spec("triton") is not None:
        assert reasons_against("triton", replace(gpu, deterministic=True, kv_cache_dtype="float16")) == []
