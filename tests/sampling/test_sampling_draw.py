"""top-k, top-p, min-p and the draw, against a float64 reference that sorts everything."""

import math
from typing import NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace import kernels
from headrace.kernels import cpu
from headrace.kernels.drawing import ONE
from headrace.sampling.draw import TEMPERATURES, uniform
from headrace.sampling.logprobs import largest


class Filters(NamedTuple):
    """What the op draws a row by. top_k 0 = off."""

    temperature: float
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0


FILTERS = [
    Filters(1.0),
    Filters(0.6, top_k=20, top_p=0.95),
    Filters(1.3, top_k=7),
    Filters(1.0, top_p=0.5),
    Filters(0.8, top_p=0.95),
    Filters(1.0, top_p=0.999),
    Filters(1.0, min_p=0.1),
    Filters(2.0, top_p=0.9, min_p=0.02),
    Filters(1.0, top_k=300, top_p=0.7, min_p=0.01),
    Filters(1.0, top_k=1),
    Filters(1.0, top_p=1e-9),
    Filters(1e-6),
    Filters(1e300),
]


def reference_probabilities(logits: np.ndarray, f: Filters) -> np.ndarray:
    """float64[V]: the distribution after temperature, top-k, top-p, min-p, by definition."""
    scaled = (logits.astype(np.float64) - logits.max()) / f.temperature
    p = np.exp(scaled) / np.exp(scaled).sum()
    order = np.lexsort((np.arange(len(p)), -logits))
    kept = order[: f.top_k or len(p)]
    p_k = p[kept] / p[kept].sum()
    kept = kept[np.concatenate(([0.0], np.cumsum(p_k)[:-1])) < f.top_p]
    kept = kept[p[kept] >= f.min_p * p.max()]
    result = np.zeros_like(p)
    result[kept] = p[kept] / p[kept].sum()
    return result


def reference_draw(probabilities: np.ndarray, u: float) -> tuple[int, float]:
    """The id, and how close u is to the edge of that id's interval."""
    ends = np.cumsum(probabilities)
    return int(np.searchsorted(ends, u * ends[-1], side="right")), float(np.abs(ends - u).min())


def draw(rows: np.ndarray | torch.Tensor, filters: list[Filters], u) -> list[int]:
    """The op over rows float32[n, V], with numbers u."""
    logits = rows if isinstance(rows, torch.Tensor) else torch.from_numpy(rows)
    low, high = TEMPERATURES
    return kernels.draw(
        logits,
        torch.tensor([min(max(f.temperature, low), high) for f in filters], dtype=torch.float32),
        torch.tensor([f.top_k for f in filters]),
        torch.tensor([f.top_p for f in filters], dtype=torch.float64),
        torch.tensor([math.ceil(f.min_p * ONE) for f in filters]),
        torch.tensor(np.asarray(u), dtype=torch.float64),
    ).tolist()


def draw_row(row: np.ndarray, f: Filters, u: float) -> int:
    return draw(row[None], [f], [u])[0]


def each_implementation(run) -> list:
    """What `run` gives on torch and on every instruction set that this machine has."""
    with kernels.prefer("torch"):
        results = [run()]
    isas = [isa for isa, reason in cpu.isas() if not reason] if cpu.load() is not None else []
    for isa in isas:
        cpu.select_isa(isa)
        results.append(run())
    if isas:
        cpu.select_isa(isas[0])
    return results


def random_logits(seed: int, size: int = 5003, scale: float = 2.0) -> np.ndarray:
    return (np.random.default_rng(seed).standard_normal(size) * scale).astype(np.float32)


@pytest.mark.parametrize("f", FILTERS, ids=str)
def test_the_token_is_the_one_of_the_reference(f):
    compared = 0
    for seed in range(40):
        logits = random_logits(seed)
        u = float(uniform([seed], [3])[0])
        want, margin = reference_draw(reference_probabilities(logits, f), u)
        got = draw_row(logits, f, u)
        if margin > 1e-6:  # nearer to an edge, float32 exponentials may decide otherwise than float64 ones
            assert got == want
            compared += 1
    assert compared >= 30


def test_every_implementation_gives_the_same_tokens_together_and_alone():
    for size in (1, 15, 16, 17, 511, 513, 5003, 70000):
        table = torch.from_numpy(np.stack([random_logits(seed, size) for seed in range(len(FILTERS))]))
        table[:, size // 2 + 1 :: 7] = -torch.inf
        table[3] = table[3].round()  # ties
        table[5] = 0.25
        u = uniform(range(len(FILTERS)), [1] * len(FILTERS))

        together = each_implementation(lambda table=table, u=u: draw(table, FILTERS, u))

        assert all(ids == together[0] for ids in together)
        alone = [draw_row(row, f, x) for row, f, x in zip(table.numpy(), FILTERS, u, strict=True)]
        assert alone == together[0]
        assert all(value > -np.inf for value in table[range(len(FILTERS)), together[0]])


def test_weights_sum_to_the_same_integers_everywhere_and_are_the_exponentials():
    table = torch.from_numpy(np.stack([random_logits(seed, 3001, scale=6.0) for seed in range(5)]))
    table[1, 7:900] = -torch.inf

    results = each_implementation(lambda: kernels.exp_sums(table))

    want = (table.double() - table.double().amax(1, keepdim=True)).exp().sum(1) * ONE
    for peaks, sums in results:
        assert torch.equal(peaks, table.amax(1))
        assert torch.equal(sums, results[0][1])
        # Two units in the last place of float32, and less than one for each logit that is cut off to an integer.
        assert ((sums.double() - want).abs() <= want * 2.0**-22 + 3001).all()


def test_rows_that_cannot_be_sampled_or_are_not_wanted_give_minus_one():
    rows = np.zeros((6, 700), dtype=np.float32)
    rows[0, 699], rows[1, 3], rows[4] = np.nan, np.inf, -np.inf
    rows[2:4, 5] = 2.0
    off = torch.zeros(6, dtype=torch.int64)
    temperatures = torch.tensor([1.0, 0.0, 0.0, -1.0, 1.0, 1.0])

    results = each_implementation(
        lambda: kernels.draw(
            torch.from_numpy(rows), temperatures, off, torch.ones(6).double(), off, torch.full((6,), 0.5).double()
        ).tolist()
    )

    assert all(ids == [-1, -1, 5, -1, -1, 350] for ids in results)


def test_sizes_that_do_not_fit_are_refused():
    if cpu.load() is None:
        pytest.skip(cpu.why_not())
    one = torch.ones(1)
    with pytest.raises(ValueError, match="top_k must be"):
        kernels.draw(torch.ones(1, 4), one, one, one.double(), one.long(), one.double())
    with pytest.raises(ValueError, match="logits must be"):
        kernels.exp_sums(torch.ones(2, 0))


@pytest.mark.gpu
def test_a_gpu_gives_the_tokens_of_the_cpu():
    if not torch.cuda.is_available():
        pytest.skip("needs a GPU")
    table = torch.from_numpy(np.stack([random_logits(seed) for seed in range(len(FILTERS))]))
    u = uniform(range(len(FILTERS)), [1] * len(FILTERS))
    assert draw(table.cuda(), FILTERS, u) == draw(table, FILTERS, u)


@pytest.mark.parametrize("f", [f for f in FILTERS if 0.5 < f.temperature < 3.0 and f.top_k != 1], ids=str)
def test_frequencies_match_the_distribution(f):
    logits = random_logits(11, size=600)
    num_draws = 4000
    u = uniform([2026] * num_draws, range(num_draws))
    counts = np.bincount(draw(torch.from_numpy(logits).expand(num_draws, -1), [f] * num_draws, u), minlength=600)
    p = reference_probabilities(logits, f)
    assert counts[p == 0].sum() == 0
    # Pearson's test; ids that expect fewer than 5 draws share one bin. 5 standard deviations: never by chance with these seeds.
    common = p * num_draws >= 5
    observed = np.append(counts[common], counts[~common].sum())
    expected = np.append(p[common], p[~common].sum()) * num_draws
    observed, expected = observed[expected > 0], expected[expected > 0]
    chi_square = ((observed - expected) ** 2 / expected).sum()
    degrees = max(len(expected) - 1, 1)
    assert chi_square < degrees + 5 * np.sqrt(2 * degrees)


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.sampled_from([-np.inf, -1.0, -0.0, 0.0, 0.5, 0.5000001, 3.0]), min_size=1, max_size=300),
    st.integers(1, 300),
)
def test_largest_is_the_head_of_the_full_order(values, k):
    row = np.array(values, dtype=np.float32)
    k = min(k, len(row))
    want = [i for i in np.lexsort((np.arange(len(row)), -row)) if row[i] > -np.inf][:k]
    assert largest(row, k).tolist() == want


@settings(max_examples=150, deadline=None)
@given(
    st.lists(st.sampled_from([-np.inf, -40.0, -1.0, 0.0, 0.01, 1.0, 1.0, 5.0]), min_size=2, max_size=700),
    st.sampled_from(FILTERS),
    st.floats(0.0, 1.0, exclude_max=True),
)
def test_ties_and_masks_never_give_a_token_that_is_filtered_out(values, f, u):
    row = np.array([*values, 0.0], dtype=np.float32)
    results = each_implementation(lambda: draw_row(row, f, u))
    got = results[0]
    assert 0 <= got < len(row)
    assert results == [got] * len(results)
    # The edge of top-p may fall either way by rounding when predecessors weigh exactly top_p: allow one more token there.
    looser = Filters(f.temperature, f.top_k, min(1.0, f.top_p * (1 + 1e-6)), f.min_p * (1 - 1e-6))
    assert reference_probabilities(row, looser)[got] > 0


def test_equal_logits_keep_the_lower_ids():
    row = np.zeros(1000, dtype=np.float32)
    drawn = {draw_row(row, Filters(1.0, top_k=3), u) for u in np.linspace(0, 0.9999, 100)}
    assert drawn == {0, 1, 2}
    drawn = {draw_row(row, Filters(1.0, top_p=0.0035), u) for u in np.linspace(0, 0.9999, 100)}
    assert drawn == {0, 1, 2, 3}
