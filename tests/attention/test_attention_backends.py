"""Every attention backend that there is, against float64 over one grid, and the bits of a row against its surroundings.

A backend is left out of what it refuses here, with its reason. Triton's kernels are interpreted where there is no GPU; more of them is in
tests/kernels.
"""

import contextlib
import itertools
from dataclasses import replace
from importlib.util import find_spec
from typing import get_args, get_type_hints

import pytest
import torch

from headrace import kernels
from headrace.attention.base import AttentionBackend, AttentionLayerSpec, KvPool, KvShape, StepRows
from headrace.attention.cpu import CpuAttention
from headrace.attention.select import BACKENDS, backend_named
from headrace.attention.torch_native import KEY_BLOCK, TorchNativeAttention, attend_whole
from headrace.attention.triton import TritonAttention
from headrace.config.resolve import AttentionNeeds
from headrace.config.server_args import ServerArgs
from headrace.kernels.cpu import why_not
from headrace.kernels.packing import rotate_heads, rotation_size
from headrace.kernels.registry import prefer

CPU = torch.device("cpu")
Backend = type[AttentionBackend]
NEEDS = AttentionNeeds(
    device="cpu",
    native_kernels=not why_not(),
    head_dim=64,
    kv_cache_dtype="float32",
    page_size=None,
    deterministic=True,
)
# float32 sums over at most 300 keys, and exp by another routine.
TOLERANCE = 2e-5

GRID = [
    # num_q_heads, num_kv_heads, head_dim, window, soft_cap
    (1, 1, 16, 0, 0.0),
    (9, 3, 64, 0, 0.0),
    (5, 1, 32, 33, 0.0),
    (4, 4, 80, 0, 7.0),
    (14, 2, 48, 5, 3.0),
    (2, 2, 128, 200, 0.0),
]


def preferring(backend: Backend) -> contextlib.AbstractContextManager[None]:
    """Within it a backend of interpreted kernels serves on a CPU, too."""
    return prefer("triton") if backend is TritonAttention else contextlib.nullcontext()


def reasons_here(backend: Backend, needs: AttentionNeeds) -> list[str]:
    with preferring(backend):
        return backend.reasons_against(needs)


SERVING = [backend for backend in BACKENDS if not reasons_here(backend, NEEDS)]
VERIFIED = [backend for backend in SERVING if "cpu" in backend.verified]
over_serving = pytest.mark.parametrize("backend", SERVING, ids=lambda backend: backend.name)
over_verified = pytest.mark.parametrize("backend", VERIFIED, ids=lambda backend: backend.name)
"""Only of these the bits are tested: an interpreter's bits mean nothing."""


def skip_unless_it_serves(backend: Backend, head_dim: int, dtype: torch.dtype) -> None:
    needs = replace(NEEDS, head_dim=head_dim, kv_cache_dtype=str(dtype).removeprefix("torch."))
    if reasons := reasons_here(backend, needs):
        assert "cpu" not in backend.verified, f"{backend.name} is verified here but refuses: {reasons}"
        pytest.skip(f"{backend.name}: {'; '.join(reasons)}")


class Cache:
    """A backend with one layer and sequences in scattered pages."""

    def __init__(
        self,
        backend: Backend,
        shape: tuple[int, int, int, int, float],
        dtype: torch.dtype = torch.float32,
        page_size: int | None = None,
    ) -> None:
        num_q_heads, num_kv_heads, head_dim, window, soft_cap = shape
        self.backend = backend()
        self.layer = AttentionLayerSpec(0, num_q_heads, num_kv_heads, head_dim, head_dim**-0.5, window, soft_cap)
        self.page_size = page_size or backend.page_size
        self.pool: KvPool = self.backend.make_kv_pool(
            KvShape(1, num_kv_heads, head_dim, dtype), 2048, self.page_size, CPU
        )

    def slots(self, sequence: int) -> torch.Tensor:
        if self.page_size == 1:
            slots = torch.randperm(2048, generator=torch.Generator().manual_seed(0))
            return slots[sequence * 512 : sequence * 512 + 512].to(torch.int32)
        pages = torch.randperm(128, generator=torch.Generator().manual_seed(0))[sequence * 32 : sequence * 32 + 32]
        return (pages[:, None] * 16 + torch.arange(16)).flatten().to(torch.int32)

    def step(
        self, rows: list[tuple[int, int, tuple[torch.Tensor, ...]]], last_keys: torch.Tensor | None = None
    ) -> list[torch.Tensor]:
        """rows: (sequence, start, (q, k, v) of the new positions). last_keys: see `StepRows`."""
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
                last_keys=last_keys,
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


def exact(
    qkv: tuple[torch.Tensor, ...], layer: AttentionLayerSpec, last_keys: torch.Tensor | None = None
) -> torch.Tensor:
    """Attention in float64, one softmax; causal without last_keys."""
    group = layer.num_q_heads // layer.num_kv_heads
    q, k, v = (x.double().transpose(0, 1) for x in qkv)
    k, v = k.repeat_interleave(group, 0), v.repeat_interleave(group, 0)
    scores = q @ k.transpose(1, 2) * layer.scale
    if layer.soft_cap:
        scores = layer.soft_cap * torch.tanh(scores / layer.soft_cap)
    distance = torch.arange(q.shape[1])[:, None] - torch.arange(q.shape[1])[None, :]
    places = torch.arange(q.shape[1])
    hidden = places[None, :] > (places if last_keys is None else last_keys)[:, None]
    if layer.sliding_window:
        hidden |= distance >= layer.sliding_window
    return (torch.softmax(scores.masked_fill(hidden, -torch.inf), -1) @ v).transpose(0, 1).flatten(1)


def part(qkv: tuple[torch.Tensor, ...], start: int, end: int) -> tuple[torch.Tensor, ...]:
    return tuple(x[start:end] for x in qkv)


@over_serving
@pytest.mark.parametrize("shape", GRID, ids=str)
@pytest.mark.parametrize("length", [1, 16, 300])
def test_a_prompt_gives_what_float64_gives(backend: Backend, shape: tuple[int, int, int, int, float], length: int):
    cache, qkv = Cache(backend, shape), random_qkv(length, shape)

    got = cache.step([(0, 0, qkv)])[0]

    torch.testing.assert_close(got, exact(qkv, cache.layer).float(), atol=TOLERANCE, rtol=TOLERANCE)


def in_bytes(x: torch.Tensor) -> torch.Tensor:
    """Each head rounded to bytes by its own scale."""
    values, scales = kernels.quantize_rows(x.reshape(-1, x.shape[-1]), group=x.shape[-1])
    return (values * scales).view(x.shape)


@over_serving
def test_an_int16_cache_is_closer_to_float64_than_bfloat16(backend: Backend):
    shape, errors = GRID[1], {}
    for dtype in (torch.bfloat16, torch.int16):
        skip_unless_it_serves(backend, shape[2], dtype)
        cache, qkv = Cache(backend, shape, dtype), random_qkv(300, shape)
        got = cache.step([(0, 0, qkv)])[0]
        errors[dtype] = (got - exact(qkv, cache.layer)).square().mean().sqrt()

    assert errors[torch.int16] < errors[torch.bfloat16] / 2
    assert errors[torch.int16] < 4e-4


@over_serving
@pytest.mark.parametrize("shape", GRID, ids=str)
def test_an_int8_cache_gives_what_float64_gives_over_its_values(
    backend: Backend, shape: tuple[int, int, int, int, float]
):
    skip_unless_it_serves(backend, shape[2], torch.int8)
    cache, (q, k, v) = Cache(backend, shape, torch.int8), random_qkv(300, shape)
    stored = [rotate_heads(in_bytes(rotate_heads(k))) / rotation_size(k.shape[-1]), in_bytes(v)]

    got = cache.step([(0, 0, (q, k, v))])[0]

    error = (got - exact((q, *stored), cache.layer)).abs()
    # The native kernels round weights to 254ths of the largest: a step, or some, of values up to 4. They round queries, too.
    assert error.max() < (0.04 if backend.name == "cpu" else 1e-5)
    assert error.square().mean().sqrt() < (3e-3 if backend.name == "cpu" else 1e-6)


@over_verified
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8])
@pytest.mark.parametrize("shape", GRID[1:5], ids=str)
def test_bits_depend_on_neither_chunks_nor_neighbours(
    backend: Backend, dtype: torch.dtype, shape: tuple[int, int, int, int, float]
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


@over_verified
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.int8, torch.int16])
@pytest.mark.parametrize("shape", GRID, ids=str)
def test_bits_do_not_depend_on_the_page_size(
    backend: Backend, dtype: torch.dtype, shape: tuple[int, int, int, int, float]
):
    qkv, other = random_qkv(300, shape), random_qkv(21, shape, seed=1)
    want = Cache(backend, shape, dtype, page_size=16).step([(0, 0, qkv), (1, 0, other)])

    cache = Cache(backend, shape, dtype, page_size=1)
    first = cache.step([(0, 0, part(qkv, 0, 270))])[0]
    rest, beside = cache.step([(0, 270, part(qkv, 270, 300)), (1, 0, other)])

    assert torch.equal(torch.cat([first, rest]), want[0])
    assert torch.equal(beside, want[1])


def seeing_ahead(length: int, *images: range) -> torch.Tensor:
    """Tokens of an image see all of it."""
    last = torch.arange(length, dtype=torch.int32)
    for image in images:
        last[image.start : image.stop] = image.stop - 1
    return last


AHEAD = pytest.mark.parametrize(
    "backend", [backend for backend in VERIFIED if backend.sees_ahead], ids=lambda backend: backend.name
)


@AHEAD
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
@pytest.mark.parametrize("shape", GRID, ids=str)
def test_tokens_may_see_those_after_them(backend: Backend, shape: tuple[int, int, int, int, float], dtype: torch.dtype):
    skip_unless_it_serves(backend, shape[2], dtype)
    qkv, other = random_qkv(300, shape), random_qkv(20, shape, seed=1)
    last = seeing_ahead(300, range(20, 41), range(50, 280))

    cache = Cache(backend, shape, dtype)
    whole = cache.step([(0, 0, qkv)], last)[0]

    if dtype == torch.float32:
        torch.testing.assert_close(whole, exact(qkv, cache.layer, last).float(), atol=TOLERANCE, rtol=TOLERANCE)
    # Chunks end where images do; other rows change no bit, nor does what was there of the image already.
    cache, got = Cache(backend, shape, dtype), []
    for start, end in [(0, 41), (41, 45), (45, 280), (280, 300)]:
        beside = torch.cat([torch.arange(20, dtype=torch.int32), last[start:end]])
        got.append(cache.step([(1, 0, other), (0, start, part(qkv, start, end))], beside)[-1])
    again = cache.step([(0, 60, part(qkv, 60, 300))], last[60:])[0]
    assert torch.equal(torch.cat(got), whole)
    assert torch.equal(again, whole[60:])


def test_nobody_sees_what_is_not_there():
    cache, qkv = Cache(CpuAttention, GRID[1]), random_qkv(10, GRID[1])
    for last in ([*range(9), 10], [*range(9), 8], [5, 4, *range(2, 10)]):
        with pytest.raises(ValueError, match="cannot see keys up to"):
            cache.step([(0, 0, qkv)], torch.tensor(last, dtype=torch.int32))


@pytest.mark.parametrize("dtype", [torch.float32, torch.int8])
@pytest.mark.parametrize("shape", GRID, ids=str)
def test_the_path_of_other_devices_gives_the_same(shape: tuple[int, int, int, int, float], dtype: torch.dtype):
    cache, qkv = Cache(TorchNativeAttention, shape, dtype), random_qkv(150, shape)
    want = cache.step([(0, 0, qkv)])[0][90:]

    q, layer = qkv[0][90:], cache.layer
    if dtype == torch.int8:  # the cache holds keys that are rotated
        q, layer = rotate_heads(q), replace(layer, scale=layer.scale / rotation_size(layer.head_dim))
    got = attend_whole(q, cache.pool.k[0], cache.pool.v[0], cache.slots(0)[:150], 90, layer)

    torch.testing.assert_close(got.flatten(1), want, atol=TOLERANCE, rtol=TOLERANCE)


@over_serving
@pytest.mark.parametrize("dtype", [torch.float32, torch.int8, torch.int16])
def test_what_others_left_in_a_page_does_not_leak(backend: Backend, dtype: torch.dtype):
    shape = (4, 2, 32, 0, 0.0)
    skip_unless_it_serves(backend, 32, dtype)
    qkv = random_qkv(21, shape)
    clean = Cache(backend, shape, dtype).step([(0, 0, qkv)])[0]
    dirty = Cache(backend, shape, dtype)
    for tensor in (*dirty.pool.k, *dirty.pool.v):
        tensor.fill_(torch.nan if dtype.is_floating_point else -1)  # integers of -1 are scales of NaN

    assert torch.equal(dirty.step([(0, 0, qkv)])[0], clean)


@over_serving
@pytest.mark.parametrize(("dtype", "head_bytes"), [(torch.bfloat16, 64), (torch.int8, 36), (torch.int16, 68)])
def test_a_pool_starts_as_zeros_and_counts_its_bytes(backend: Backend, dtype: torch.dtype, head_bytes: int):
    shape = KvShape(2, 3, 32, dtype)

    skip_unless_it_serves(backend, 32, dtype)
    pool = backend().make_kv_pool(shape, 64, backend.page_size, CPU)

    assert not any(tensor.any() for tensor in (*pool.k, *pool.v))
    assert pool.num_bytes == 64 * shape.bytes_per_token == 64 * 2 * 2 * 3 * head_bytes


def test_the_backends_have_the_names_of_the_command_line_and_say_what_they_are():
    hint = get_type_hints(ServerArgs)["attention_backend"]

    assert {backend.name for backend in BACKENDS} == set(get_args(hint)) - {"auto"}
    assert len({backend.name for backend in BACKENDS}) == len(BACKENDS)
    for backend in BACKENDS:
        assert backend.page_size in (1, 16)
        assert backend.verified <= {"cpu", "cuda"}
        assert backend_named(backend.name) is backend


GPU = replace(NEEDS, device="cuda", native_kernels=False, kv_cache_dtype="bfloat16", deterministic=False)
ODD = replace(GPU, head_dim=72, kv_cache_dtype="float16", page_size=1)
LAPTOP = replace(NEEDS, native_kernels=True)


@pytest.mark.parametrize(
    ("backend", "needs", "word"),
    [
        # a word of the reason
        ("cpu", ODD, "cuda"),
        ("cpu", ODD, "float16"),
        ("cpu", ODD, "head_dim"),
        ("cpu", replace(LAPTOP, head_dim=528, kv_cache_dtype="int8"), "int8"),
        ("torch_native", replace(LAPTOP, head_dim=70, kv_cache_dtype="int8"), "int8"),
        ("torch_native", replace(GPU, deterministic=True), "depend on the batch"),
        ("torch_native", replace(GPU, kv_cache_dtype="float8_e4m3fn"), "fp8"),
        ("triton", LAPTOP, "for tests"),
        ("triton", replace(GPU, head_dim=264), "head_dim"),
        ("triton", replace(GPU, kv_cache_dtype="int8"), "int8"),
        ("triton", replace(GPU, kv_cache_dtype="int16"), "int16"),
        ("flashinfer", LAPTOP, "CUDA only"),
        ("flashinfer", replace(GPU, head_dim=80), "head_dim"),
        ("flashinfer", replace(GPU, kv_cache_dtype="float32"), "float32"),
        ("flashinfer", replace(GPU, deterministic=True), "depend on the batch"),
    ],
)
def test_a_backend_says_what_it_cannot(backend: str, needs: AttentionNeeds, word: str):
    assert any(word in reason for reason in backend_named(backend).reasons_against(needs))


def test_a_backend_has_nothing_against_what_it_serves():
    assert backend_named("torch_native").reasons_against(ODD) == []
    assert backend_named("cpu").reasons_against(LAPTOP) == []
    if find_spec("triton") is not None:
        needs = replace(GPU, deterministic=True, kv_cache_dtype="float16")
        assert backend_named("triton").reasons_against(needs) == []
    if find_spec("flashinfer") is None:
        assert any("not installed" in reason for reason in backend_named("flashinfer").reasons_against(GPU))
