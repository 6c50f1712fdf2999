"""Mixtures of experts: right against float64 expert by expert, for every kind of weight; a row's bits its own."""

import pytest
import torch

from headrace import kernels
from headrace.checkpoint.quantized_matrix import QuantizedMatrix
from headrace.checkpoint.weight_formats import FORMATS, names_on_cpu
from headrace.kernels import PackedExperts, cpu
from headrace.kernels.packing import QUANTIZED_LAYOUTS, ROUNDINGS
from headrace.layers.quantization import integer_format

KINDS = ["float32", "bfloat16", "float16", "rounded to bfloat16", *names_on_cpu()]
# (num_experts, top_k, hidden_size, intermediate_size): sizes that fill neither blocks of 32 columns nor groups of 32 elements, and some
# whose rows are rotated in blocks of 128 and of 32.
SHAPES = [(1, 1, 128, 96), (5, 3, 40, 24), (9, 2, 97, 70), (130, 8, 16, 8)]


def packed(weight: torch.Tensor, kind: str) -> kernels.PackedLinear:
    if kind == "rounded to bfloat16":
        return kernels.pack_linear(weight, rounded=True)
    matrix: torch.Tensor | QuantizedMatrix
    matrix = (
        weight.to(getattr(torch, kind))
        if kind in ("float32", "bfloat16", "float16")
        else integer_format(kind).quantize(weight)
    )  # type: ignore[arg-type]
    return kernels.pack_linear(matrix, torch.linspace(-1, 1, weight.shape[0]) if kind == "int8" else None)


def make(kind: str, num_experts: int, hidden: int, intermediate: int, activation="silu") -> PackedExperts:
    """Random experts; those of kind int8 have biases."""
    generator = torch.Generator().manual_seed(1)

    def weight(n: int, k: int) -> kernels.PackedLinear:
        return packed(torch.randn(n, k, generator=generator) / k**0.5, kind)

    gate_up = [weight(2 * intermediate, hidden) for _ in range(num_experts)]
    return kernels.pack_experts(gate_up, [weight(hidden, intermediate) for _ in range(num_experts)], activation)


def routed(rows: int, num_experts: int, top_k: int, hidden: int) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """x, ids and shares; half of the rows prefer the first experts, so some experts have many rows and some none."""
    x, scores = torch.randn(rows, hidden), torch.rand(rows, num_experts)
    scores[::2, :top_k] += 1.0
    shares, ids = scores.topk(top_k)
    return x, ids, shares


def through(x: torch.Tensor, linear: kernels.PackedLinear) -> torch.Tensor:
    """float64 product of what the kernel multiplies."""
    seen = (x.bfloat16() if linear.layout in ("native_bf16_pairs", "torch_bf16") else x).double()
    quantized = QUANTIZED_LAYOUTS.get(linear.layout)
    rounding = ROUNDINGS.get(linear.layout) if quantized is None else FORMATS[quantized.scheme].activations
    if rounding is not None:
        values, scales = kernels.quantize_rows(x, group=rounding.group, bits=rounding.bits, rotated=rounding.rotated)
        seen = values.double() * scales.double().repeat_interleave(rounding.group, 1)[:, : x.shape[1]]
    stored = kernels.packed_rows(linear, slice(0, linear.n))
    weight = stored.values() if isinstance(stored, QuantizedMatrix) else linear.data if rounding else stored
    bias = 0.0 if linear.bias is None else linear.bias[: linear.n].double()
    return seen @ weight.double().T + bias


def reference(x: torch.Tensor, ids: torch.Tensor, shares: torch.Tensor, experts: PackedExperts) -> torch.Tensor:
    out = torch.zeros(x.shape, dtype=torch.float64)
    for expert in range(len(experts.gate_up)):
        rows, ranks = torch.where(ids == expert)
        gate, up = through(x[rows], experts.gate_up[expert]).chunk(2, dim=1)
        if experts.activation == "silu":
            activated = torch.nn.functional.silu(gate) * up
        else:
            activated = torch.nn.functional.gelu(gate, approximate="tanh") * up
        out.index_add_(0, rows, through(activated.float(), experts.down[expert]) * shares[rows, ranks, None].double())
    return out


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_matches_float64_expert_by_expert(implementation, shape, kind):
    num_experts, top_k, hidden, intermediate = shape
    experts = make(kind, num_experts, hidden, intermediate)
    for rows in (1, 3, 40) if num_experts < 100 else (3,):
        x, ids, shares = routed(rows, num_experts, top_k, hidden)

        got = kernels.moe(x, ids, shares, experts)

        want = reference(x, ids, shares, experts)
        assert got.shape == (rows, hidden)
        # float32 sums of a few hundred terms of order 1. An activation that float32 rounds to another byte moves by 1/127 of its group.
        tolerance = 2e-5 if kind in ("float32", "bfloat16", "float16") else 0.01
        assert (got - want).abs().max() <= tolerance * (1.0 + want.abs().max())


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_alone_equals_the_row_in_any_batch(implementation, kind):
    experts = make(kind, 7, 72, 40)
    x, ids, shares = routed(420, 7, 3, 72)
    whole = kernels.moe(x, ids, shares, experts)

    for begin, end in ((0, 1), (1, 2), (100, 107), (13, 400), (419, 420)):
        assert torch.equal(kernels.moe(x[begin:end], ids[begin:end], shares[begin:end], experts), whole[begin:end])
    order = torch.randperm(420)
    assert torch.equal(kernels.moe(x[order], ids[order], shares[order], experts), whole[order])


@pytest.mark.parametrize("kind", KINDS)
def test_thread_counts_and_wide_instruction_sets_give_equal_bits(native, kind):
    experts = make(kind, 6, 200, 96, "gelu_tanh")
    x, ids, shares = routed(50, 6, 2, 200)
    results = []
    for isa in [isa for isa, reason in cpu.isas() if not reason and isa != "baseline"]:
        cpu.select_isa(isa)
        for threads in (1, 2, 5):
            kernels.set_num_threads(threads)
            results.append(kernels.moe(x, ids, shares, experts))
    assert all(torch.equal(result, results[0]) for result in results)
    torch.testing.assert_close(results[0], reference(x, ids, shares, experts).float(), atol=0.01, rtol=0.01)


def test_more_rows_than_are_computed_at_once_give_the_bits_of_parts(native):
    # 20,000 pairs of 16 experts: 90 MB between the products, which are made in several passes.
    experts = make("bfloat16", 16, 256, 512)
    x, ids, shares = routed(5000, 16, 4, 256)
    whole = kernels.moe(x, ids, shares, experts)
    for begin in (0, 2499, 4990):
        part = slice(begin, begin + 10)
        assert torch.equal(kernels.moe(x[part], ids[part], shares[part], experts), whole[part])


def test_experts_of_different_precisions_go_together(native):
    mixed = [make(kind, 1, 64, 32) for kind in KINDS]
    experts = kernels.pack_experts([e.gate_up[0] for e in mixed], [e.down[0] for e in reversed(mixed)], "silu")
    x, ids, shares = routed(30, len(KINDS), 2, 64)
    torch.testing.assert_close(
        kernels.moe(x, ids, shares, experts), reference(x, ids, shares, experts).float(), atol=0.01, rtol=0.01
    )


def test_no_rows_give_no_rows_and_strided_rows_are_fine(implementation):
    experts = make("float32", 4, 32, 16)
    x, ids, shares = routed(6, 4, 2, 64)
    assert kernels.moe(x[:0, :32], ids[:0], shares[:0], experts).shape == (0, 32)
    want = kernels.moe(x[:, 32:].contiguous(), ids, shares, experts)
    assert torch.equal(kernels.moe(x[:, 32:], ids, shares, experts), want)


@pytest.mark.parametrize("unknown", [4, -2])
def test_an_unknown_expert_is_refused(implementation, unknown):
    experts = make("float32", 4, 32, 16)
    x, ids, shares = routed(3, 4, 2, 32)
    ids[1, 1] = unknown
    with pytest.raises(ValueError, match=r"moe: .*expert"):
        kernels.moe(x, ids, shares, experts)


@pytest.mark.parametrize("kind", KINDS)
def test_experts_that_are_left_out_add_nothing(implementation, kind):
    """As a rank does that has experts 3 to 6 of 9: with its own alone, and with shares of 0 for the others."""
    experts = make(kind, 9, 72, 40)
    own = kernels.pack_experts(experts.gate_up[3:7], experts.down[3:7], "silu")
    x, ids, shares = routed(50, 9, 3, 72)
    is_own = (ids >= 3) & (ids < 7)
    assert (is_own.sum(1) == 0).any()

    got = kernels.moe(x, torch.where(is_own, ids - 3, -1), shares, own)

    assert torch.equal(got, kernels.moe(x, ids, torch.where(is_own, shares, 0.0), experts))
    assert not kernels.moe(x, torch.full_like(ids, -1), shares, own).any()


def test_what_does_not_fit_is_refused(native):
    good = make("float32", 2, 32, 16)
    x, ids, shares = routed(3, 2, 1, 32)
    with pytest.raises(ValueError, match="expert_ids"):
        kernels.moe(x, ids[:2], shares[:2], good)
    with pytest.raises(ValueError, match="int64"):
        kernels.moe(x, ids.int(), shares, good)
    with pytest.raises(ValueError, match="experts of"):
        kernels.pack_experts([good.gate_up[0], make("float32", 1, 32, 8).gate_up[0]], good.down, "silu")
    with pytest.raises(ValueError, match="gate_up weights and 1 down"):
        kernels.pack_experts(good.gate_up, good.down[:1], "silu")
    with kernels.prefer("torch"):
        other = make("float32", 1, 32, 16)
    with pytest.raises(ValueError, match="do not go together"):
        kernels.pack_experts([good.gate_up[0], other.gate_up[0]], good.down, "silu")
