"""The Triton attention backend against float64, over mixed steps; and what its deterministic mode promises, bit for bit."""

import itertools
from dataclasses import dataclass

import pytest
import torch

from headrace.attention.base import AttentionLayerSpec, KvShape, StepRows
from headrace.attention.select import make_backend

# float32 sums over at most 300 keys, exp2 for exp.
TOLERANCE = 2e-5
# One rounding to float16 of the result, and of the weights.
HALF_TOLERANCE = 3e-3
NUM_SLOTS = 2048
STRIDE = 384  # slots of a sequence


@dataclass(frozen=True)
class Case:
    """rows: (prefix, new tokens) of each."""

    num_q_heads: int
    num_kv_heads: int
    head_dim: int
    rows: tuple[tuple[int, int], ...]
    window: int = 0
    soft_cap: float = 0.0
    page_size: int = 1


GRID = [
    Case(1, 1, 64, ((0, 1),)),
    Case(2, 2, 64, ((0, 5), (300, 1), (37, 1), (16, 20), (130, 3))),
    Case(4, 1, 80, ((140, 1), (0, 33)), soft_cap=7.0, page_size=16),
    Case(8, 1, 128, ((200, 70),)),
    Case(8, 2, 96, ((63, 1), (64, 1), (65, 2)), window=50),
    Case(6, 2, 64, ((0, 90), (290, 1)), window=33, soft_cap=3.0, page_size=16),
    Case(8, 1, 256, ((40, 2), (99, 1), (0, 1)), page_size=16),
    Case(3, 1, 16, ((0, 130),), window=100),
    Case(16, 1, 64, ((300, 1),), window=200, page_size=16),
]


class Sequences:
    """A backend whose pool holds NaN but for the sequences' prefixes, which lie in scattered pages."""

    def __init__(self, device: torch.device, case: Case, *, deterministic: bool = False, dtype=torch.float32) -> None:
        self.case, self.device, self.dtype = case, device, dtype
        self.layer = AttentionLayerSpec(
            0, case.num_q_heads, case.num_kv_heads, case.head_dim, case.head_dim**-0.5, case.window, case.soft_cap
        )
        self.backend = make_backend("triton", deterministic=deterministic)
        pool = self.backend.make_kv_pool(
            KvShape(1, case.num_kv_heads, case.head_dim, dtype), NUM_SLOTS, case.page_size, device
        )
        self.k, self.v = pool.k[0], pool.v[0]
        self.pages = torch.randperm(NUM_SLOTS // 16, generator=torch.Generator().manual_seed(0))
        self.clear()

    def clear(self) -> None:
        self.k.fill_(torch.nan)
        self.v.fill_(torch.nan)

    def slots(self, sequence: int) -> torch.Tensor:
        mine = self.pages[sequence * STRIDE // 16 : (sequence + 1) * STRIDE // 16]
        return (mine[:, None] * 16 + torch.arange(16)).flatten().to(torch.int32)

    def keep(self, sequence: int, qkv: tuple[torch.Tensor, ...], length: int) -> None:
        """K and V of the first `length` positions are in the pool."""
        index = self.slots(sequence)[:length].long().to(self.device)
        self.k[index] = qkv[1][:length].to(self.device, self.dtype)
        self.v[index] = qkv[2][:length].to(self.device, self.dtype)

    def step(self, rows: list[tuple[int, int, int, tuple[torch.Tensor, ...]]]) -> list[torch.Tensor]:
        """rows: (sequence, start, count, (q, k, v) of the whole sequence). Returns what each row gives, on the CPU."""
        starts, counts = [row[1] for row in rows], [row[2] for row in rows]
        ends = [start + count for start, count in zip(starts, counts, strict=True)]
        table = torch.stack([self.slots(row[0])[: max(ends)] for row in rows])
        pages = None
        if self.case.page_size > 1:
            pages = (table[:, :: self.case.page_size] // self.case.page_size).contiguous()
            table = torch.empty(0, 0, dtype=torch.int32)

        def place(tensor: torch.Tensor) -> torch.Tensor:
            return tensor.to(self.device)

        self.backend.prepare(
            StepRows(
                starts=starts,
                counts=counts,
                positions=place(torch.cat([torch.arange(a, b) for a, b in zip(starts, ends, strict=True)]).int()),
                seq_lens=place(torch.tensor(ends, dtype=torch.int32)),
                row_starts=place(torch.tensor([0, *itertools.accumulate(counts)], dtype=torch.int32)),
                out_slots=place(torch.cat([self.slots(row[0])[row[1] : row[1] + row[2]] for row in rows])),
                slots=place(table),
                pages=None if pages is None else place(pages),
            )
        )
        # q, k and v as slices of one projection, as layers give them.
        heads = [torch.cat([row[3][part][row[1] : row[1] + row[2]] for row in rows]) for part in range(3)]
        joined = place(torch.cat([x.flatten(1) for x in heads], dim=1)).to(self.dtype)
        sizes = [x.shape[1] * x.shape[2] for x in heads]
        q, k, v = (x.unflatten(1, (-1, self.case.head_dim)) for x in joined.split(sizes, dim=1))
        return list(self.backend.forward(q, k, v, self.layer).cpu().split(counts))


def random_qkv(case: Case, length: int, seed: int) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(seed)
    return tuple(
        torch.randn(length, heads, case.head_dim, generator=generator)
        for heads in (case.num_q_heads, case.num_kv_heads, case.num_kv_heads)
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


def run_case(device: torch.device, case: Case, *, deterministic: bool, dtype: torch.dtype) -> float:
    """The largest error of a mixed step, over all its rows."""
    cache = Sequences(device, case, deterministic=deterministic, dtype=dtype)
    rows, wants = [], []
    for sequence, (prefix, count) in enumerate(case.rows):
        qkv = tuple(x.to(dtype).float() for x in random_qkv(case, prefix + count, sequence))
        cache.keep(sequence, qkv, prefix)
        rows.append((sequence, prefix, count, qkv))
        wants.append(exact(qkv, cache.layer)[prefix:])
    got = cache.step(rows)
    return max((g.double() - want).abs().max().item() for g, want in zip(got, wants, strict=True))


@pytest.mark.parametrize("case", GRID, ids=str)
def test_a_mixed_step_gives_what_float64_gives(triton_device: torch.device, case: Case):
    assert run_case(triton_device, case, deterministic=False, dtype=torch.float32) < TOLERANCE


@pytest.mark.parametrize("case", [GRID[1], GRID[5]], ids=str)
def test_so_does_the_deterministic_mode(triton_device: torch.device, case: Case):
    assert run_case(triton_device, case, deterministic=True, dtype=torch.float32) < TOLERANCE


@pytest.mark.parametrize("case", [GRID[2], GRID[4]], ids=str)
def test_float16_is_off_by_its_rounding(triton_device: torch.device, case: Case):
    assert run_case(triton_device, case, deterministic=False, dtype=torch.float16) < HALF_TOLERANCE


@pytest.mark.gpu
@pytest.mark.parametrize("case", GRID, ids=str)
def test_bfloat16_is_off_by_its_rounding(triton_device: torch.device, case: Case):
    if triton_device.type != "cuda":
        pytest.skip("needs a GPU: Triton's interpreter gives wrong results in bfloat16")
    assert run_case(triton_device, case, deterministic=False, dtype=torch.bfloat16) < 8 * HALF_TOLERANCE


@pytest.mark.parametrize("window", [0, 40])
def test_deterministic_bits_depend_on_neither_neighbours_chunks_nor_splits(
    triton_device: torch.device, ordered_dots: None, window: int, monkeypatch: pytest.MonkeyPatch
):
    # Splits of one key block: as many merges as possible in few keys.
    monkeypatch.setattr("headrace.kernels.triton.attention.plan.DETERMINISTIC_SPLIT", 32)
    case = Case(4, 2, 128, (), window=window)
    length, other = random_qkv(case, 80, 0), random_qkv(case, 70, 1)
    whole = Sequences(triton_device, case, deterministic=True).step([(0, 0, 80, length)])[0]
    cache = Sequences(triton_device, case, deterministic=True)
    cache.keep(1, other, 69)
    chunks, start = [], 0

    for count in (1, 3, 30, 1, 44, 1):
        rows = [(0, start, count, length)]
        if start:
            rows.insert(0, (1, 69, 1, other))
        chunks.append(cache.step(rows)[-1])
        start += count

    assert start == 80
    assert torch.equal(torch.cat(chunks), whole)


def test_a_split_decode_has_splits(triton_device: torch.device, monkeypatch: pytest.MonkeyPatch):
    """The grid above would not notice if everything ran in one split."""
    from headrace.kernels.triton.attention import decode

    counts = []
    count_splits = decode.num_splits
    monkeypatch.setattr(decode, "num_splits", lambda *args: counts.append(count_splits(*args)) or counts[-1])

    error = run_case(triton_device, Case(2, 1, 256, ((300, 1),)), deterministic=False, dtype=torch.float32)

    assert error < TOLERANCE
    assert counts[0] > 2


@pytest.mark.gpu
def test_an_fp8_cache_holds_what_torch_would_round_to(triton_device: torch.device):
    if triton_device.type != "cuda" or torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs a GPU with fp8: Triton's interpreter drops carries when it rounds to fp8")
    from headrace.kernels.triton import attention

    _, k, v = random_qkv(Case(4, 2, 64, ()), 100, 0)
    v[3] = 1000.0  # beyond the range: becomes its end
    pools = [torch.zeros(128, 2, 64, dtype=torch.float8_e4m3fn, device=triton_device) for _ in range(2)]
    slots = torch.arange(100, dtype=torch.int32, device=triton_device) + 7

    attention.write_kv(k.to(triton_device), v.to(triton_device), *pools, slots)

    for pool, x in zip(pools, (k, v), strict=True):
        want = x.clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
        assert torch.equal(pool[7:107].cpu().view(torch.uint8), want.view(torch.uint8))


def test_an_fp8_cache_gives_what_its_values_give(triton_device: torch.device):
    if triton_device.type == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs a GPU with fp8")
    from headrace.kernels.triton import attention

    q, k, v = random_qkv(Case(4, 2, 64, ()), 100, 0)
    pools = [x.to(triton_device, torch.float8_e4m3fn) for x in (k, v)]
    stored = [pool.cpu().float() for pool in pools]
    slots = torch.arange(100, dtype=torch.int32, device=triton_device)
    plan = attention.Plan(
        table=slots[None],
        page_size=1,
        seq_lens=torch.tensor([100], dtype=torch.int32, device=triton_device),
        row_starts=torch.tensor([0, 1], dtype=torch.int32, device=triton_device),
        num_tokens=1,
        max_keys=100,
        has_single=True,
        has_longer=False,
        deterministic=False,
        num_processors=4,
    )

    got = attention.attend(q[99:].to(triton_device).half(), *pools, plan, 0.125, window=0, soft_cap=0.0)

    layer = AttentionLayerSpec(0, 4, 2, 64, 0.125)
    want = exact((q.half(), *stored), layer)[99:]
    torch.testing.assert_close(got.cpu().flatten(1).double(), want, atol=HALF_TOLERANCE / 10, rtol=0.0)


def test_rows_that_pad_a_graph_write_nothing_and_harm_nobody(triton_device: torch.device):
    from headrace.kernels.triton import attention

    k = torch.randn(3, 1, 64, device=triton_device)
    pool = torch.zeros(8, 1, 64, device=triton_device)
    slots = torch.tensor([2, -1, 5], dtype=torch.int32, device=triton_device)

    attention.write_kv(k, k, pool, pool.clone(), slots)

    want = torch.zeros_like(pool)
    want[[2, 5]] = k[[0, 2]]
    assert torch.equal(pool, want)
    plan = attention.Plan(
        table=torch.full((2, 8), 2, dtype=torch.int32, device=triton_device),
        page_size=1,
        seq_lens=torch.tensor([1, 0], dtype=torch.int32, device=triton_device),
        row_starts=torch.tensor([0, 1, 2], dtype=torch.int32, device=triton_device),
        num_tokens=2,
        max_keys=8,
        has_single=True,
        has_longer=False,
        deterministic=False,
        num_processors=4,
    )
    out = attention.attend(k[:2], pool, pool, plan, 1.0, window=0, soft_cap=0.0)
    assert torch.equal(out, torch.stack([k[0], torch.zeros_like(k[0])]))


@pytest.mark.parametrize(
    ("dtype", "pool_dtype"),
    [
        (torch.float32, torch.float32),
        (torch.float16, torch.float16),
        (torch.float16, torch.float8_e4m3fn),
        (torch.float32, torch.float8_e4m3fn),
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("num_q_heads", "num_kv_heads", "head_dim", "half"),
    [(9, 3, 64, 32), (4, 4, 80, 40), (20, 2, 128, 32), (1, 1, 16, 8), (72, 9, 96, 36)],
)
@pytest.mark.parametrize("has_norms", [False, True])
def test_norms_rotation_and_write_in_one_launch_are_one_after_the_other(
    triton_device: torch.device,
    dtype: torch.dtype,
    pool_dtype: torch.dtype,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    half: int,
    has_norms: bool,
):
    from headrace.kernels.triton import attention, rows

    fp8 = pool_dtype == torch.float8_e4m3fn
    if fp8 and triton_device.type == "cuda" and torch.cuda.get_device_capability() < (8, 9):
        pytest.skip("needs a GPU with fp8")
    sizes = [heads * head_dim for heads in (num_q_heads, num_kv_heads, num_kv_heads)]
    joined = torch.randn(5, sum(sizes)).to(triton_device, dtype) * (300 if fp8 else 1)
    positions = torch.tensor([0, 3, 90, 1, 99], dtype=torch.int32, device=triton_device)
    slots = torch.tensor([6, 2, -1, 0, 7], dtype=torch.int32, device=triton_device)
    angles = torch.randn(100, half, device=triton_device)
    cos, sin = angles.cos(), angles.sin()
    got, want = (
        [torch.zeros(8, num_kv_heads, head_dim, device=triton_device).to(pool_dtype) for _ in "kv"] for _ in "gw"
    )
    heads = [x.unflatten(1, (-1, head_dim)) for x in joined.clone().split(sizes, dim=1)]

    norms = tuple(torch.rand(head_dim, device=triton_device) + 0.5 for _ in "qk")

    attention.rotate_write_kv(*heads, positions, cos, sin, *got, slots, (*norms, 1e-5) if has_norms else None)

    q, k, v = (x.unflatten(1, (-1, head_dim)) for x in joined.split(sizes, dim=1))
    if has_norms:
        q, k = (
            rows.rms_norm(x.reshape(-1, head_dim), norm, 1e-5, None).view(x.shape)
            for x, norm in zip((q, k), norms, strict=True)
        )
    rows.rotary(q, k, positions, cos, sin)
    attention.write_kv(k, v, *want, slots)
    # Compiled, the two may fuse other products, and the norm of a head may add in another order: one bit more or less before the rounding.
    exact = triton_device.type == "cpu" and not has_norms
    tolerance = 0.0 if exact else 0.13 if fp8 else 2e-3
    for g, w in zip((heads[0], *got), (q, *want), strict=True):
        torch.testing.assert_close(g.float(), w.float(), atol=tolerance / 50, rtol=tolerance)
    assert not got[0][[1, 3, 4, 5]].float().any(), "slots that no token has"
    assert got[1][[0, 2, 6, 7]].float().any(dim=2).all()


@pytest.mark.parametrize(
    ("num_q_heads", "num_kv_heads", "head_dim", "half", "window", "num_processors", "has_norms"),
    [
        (9, 3, 64, 32, 0, 4, False),
        (20, 2, 128, 32, 9, 4, True),
        (4, 4, 80, 40, 0, 400, True),
        (8, 2, 16, 8, 9, 400, False),
    ],
)
def test_a_decode_step_rotates_and_writes_as_the_launch_before_it_would(
    triton_device: torch.device,
    num_q_heads: int,
    num_kv_heads: int,
    head_dim: int,
    half: int,
    window: int,
    num_processors: int,
    has_norms: bool,
):
    from headrace.kernels.triton import attention

    sizes = [heads * head_dim for heads in (num_q_heads, num_kv_heads, num_kv_heads)]
    joined = torch.randn(4, sum(sizes), device=triton_device)
    lengths = torch.tensor([1, 300, 40, 129], dtype=torch.int32, device=triton_device)
    table = torch.randperm(1200, device=triton_device)[: 4 * 300].view(4, 300).int()
    slots = table.gather(1, (lengths - 1).long()[:, None])[:, 0].contiguous()
    angles = torch.randn(300, half, device=triton_device)
    cos, sin = angles.cos(), angles.sin()
    weights = tuple(torch.rand(head_dim, device=triton_device) + 0.5 for _ in "qk")
    norms = (*weights, 1e-5) if has_norms else None
    pools = [torch.randn(1200, num_kv_heads, head_dim, device=triton_device) for _ in "kv"]
    plan = attention.Plan(
        table=table,
        page_size=1,
        seq_lens=lengths,
        row_starts=torch.arange(5, dtype=torch.int32, device=triton_device),
        num_tokens=4,
        max_keys=300,
        has_single=True,
        has_longer=False,
        deterministic=False,
        num_processors=num_processors,
    )

    found = []
    for at_once in (True, False):
        q, k, v = (x.unflatten(1, (-1, head_dim)) for x in joined.clone().split(sizes, dim=1))
        own = [pool.clone() for pool in pools]
        new = attention.NewKeys(k, v, lengths - 1, cos, sin, slots, norms)
        if not at_once:
            attention.rotate_write_kv(q, *new[:5], *own, slots, norms)
        out = attention.attend(q, *own, plan, 0.1, window=window, soft_cap=0.0, new=new if at_once else None)
        found.append((out, *own))
    for got, want in zip(*found, strict=True):
        torch.testing.assert_close(got, want, atol=1e-5, rtol=1e-5)
    changed = (found[0][1] != pools[0]).any(dim=2).any(dim=1).nonzero()[:, 0]
    assert sorted(changed.tolist()) == sorted(slots.tolist())


def test_heads_that_are_not_side_by_side_are_refused(triton_device: torch.device):
    from headrace.kernels.triton import attention

    k = torch.zeros(2, 64, 3, device=triton_device).transpose(1, 2)
    pool = torch.zeros(8, 3, 64, device=triton_device)
    with pytest.raises(ValueError, match="side by side"):
        attention.write_kv(k, k, pool, pool, torch.zeros(2, dtype=torch.int32))
