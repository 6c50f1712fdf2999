"""Layers against independent formulas, and the independence of a row from its neighbours."""

import copy
from typing import Any

import pytest
import torch
import transformers
from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

from headrace import kernels
from headrace.checkpoint.model_config import MoeConfig, parse_hf_config
from headrace.errors import ConfigError, ModelError
from headrace.layers.embedding import Embedding
from headrace.layers.linear import Linear
from headrace.layers.logits import LogitsHead
from headrace.layers.mlp import GatedMlp, SparseMoe
from headrace.layers.norm import LayerNorm, RMSNorm
from headrace.layers.rotary import inverse_frequencies
from headrace.layers.weight import Placement

PLACEMENT = Placement(torch.device("cpu"), torch.float32, 64)
HALF = Placement(torch.device("cpu"), torch.bfloat16, 64)
# float32 sums of at most 100 terms of order 1.
TOLERANCE = 1e-5


@pytest.fixture(params=["native", "torch"], autouse=True)
def implementation(request):
    with kernels.prefer(request.param):
        yield request.param


def fill(layer: Any, prefix: str = "", seed: int = 0) -> dict[str, torch.Tensor]:
    """Random weights by name."""
    generator = torch.Generator().manual_seed(seed)
    given = {}
    for weight in layer.weights(prefix):
        given[weight.name] = torch.randn(weight.shape, generator=generator)
        weight.load(given[weight.name])
    return given


@pytest.mark.parametrize("placement", [PLACEMENT, HALF])
@pytest.mark.parametrize("bias", [False, True])
def test_a_fused_linear_is_its_parts_side_by_side(placement: Placement, bias: bool):
    layer = Linear(33, {"q": 40, "k": 7, "v": 7}, placement, bias=bias)
    given = {name: t.to(placement.weight_dtype).float() for name, t in fill(layer).items()}
    x = torch.randn(5, 33)

    parts = layer(x).split((40, 7, 7), dim=1)

    for part, name in zip(parts, ("q", "k", "v"), strict=True):
        want = x @ given[f"{name}.weight"].T + (given[f"{name}.bias"] if bias else 0)
        torch.testing.assert_close(part, want, atol=10 * TOLERANCE, rtol=TOLERANCE)
    for weight in layer.weights(""):
        assert torch.equal(weight.read().float(), given[weight.name]), weight.name


def test_weights_can_be_loaded_again():
    layer = Linear(16, {"a": 3, "b": 4}, PLACEMENT)
    fill(layer)
    given = fill(layer, seed=1)

    assert all(torch.equal(weight.read(), given[weight.name]) for weight in layer.weights(""))


def test_norm_offset_is_added_to_what_is_stored():
    plain, offset = RMSNorm(24, 1e-6, PLACEMENT), RMSNorm(24, 1e-6, PLACEMENT, unit_offset=1.0)
    given = fill(offset, "norm")["norm.weight"]
    next(plain.weights("norm")).load(given + 1)
    x = torch.randn(3, 24)

    assert torch.equal(plain(x), offset(x))
    assert torch.equal(next(offset.weights("norm")).read(), given)


def test_a_norm_with_residual_adds_first_and_keeps_the_sum():
    norm = RMSNorm(24, 1e-6, PLACEMENT)
    fill(norm)
    x, residual = torch.randn(3, 24), torch.randn(3, 24)
    total = x + residual

    assert torch.equal(norm(x, residual), norm(total))
    assert torch.equal(residual, total)


@pytest.mark.parametrize("bias", [False, True])
def test_a_layer_norm_is_the_one_of_torch(bias: bool):
    norm = LayerNorm(24, 1e-5, HALF, bias=bias)
    given = fill(norm, "norm")
    x, residual = torch.randn(3, 24), torch.randn(3, 24)
    want = torch.nn.functional.layer_norm(x + residual, (24,), given["norm.weight"], given.get("norm.bias"))

    torch.testing.assert_close(norm(x, residual), want, atol=TOLERANCE, rtol=TOLERANCE)
    assert {weight.name: weight.read().tolist() for weight in norm.weights("norm")} == {
        name: tensor.tolist() for name, tensor in given.items()
    }


def test_a_tied_embedding_loads_the_output_projection():
    head = Linear(16, {"lm_head": 50}, PLACEMENT)
    embedding = Embedding(50, 16, PLACEMENT, scale=2.0, tied=head)
    table = fill(embedding, "embed")["embed.weight"]
    x = torch.randn(2, 16)

    torch.testing.assert_close(embedding(torch.tensor([7, 0])), 2 * table[[7, 0]])
    torch.testing.assert_close(head(x), x @ table.T, atol=TOLERANCE, rtol=TOLERANCE)
    assert list(LogitsHead(head, tied=True).weights("")) == []


def test_soft_capped_logits_do_not_depend_on_how_many_rows_there_are():
    projection = Linear(16, {"lm_head": 53}, PLACEMENT)
    fill(projection)
    head, plain, hidden = LogitsHead(projection, soft_cap=3.0), LogitsHead(projection), torch.randn(9, 16)

    rows = head(hidden)

    torch.testing.assert_close(rows, 3 * torch.tanh(plain(hidden) / 3))
    assert all(torch.equal(head(hidden[i : i + 1])[0], rows[i]) for i in range(9))


@pytest.mark.parametrize(
    ("act", "function"),
    [
        ("silu", torch.nn.functional.silu),
        ("gelu_pytorch_tanh", lambda x: torch.nn.functional.gelu(x, approximate="tanh")),
    ],
)
def test_a_gated_mlp_is_down_of_act_of_gate_times_up(act: str, function):
    mlp = GatedMlp(24, 40, act, PLACEMENT)
    given = fill(mlp, "mlp")
    x = torch.randn(5, 24) / 10

    gated = function(x @ given["mlp.gate_proj.weight"].T) * (x @ given["mlp.up_proj.weight"].T)
    torch.testing.assert_close(mlp(x), gated @ given["mlp.down_proj.weight"].T, atol=1e-4, rtol=1e-4)


def test_an_unknown_activation_is_refused_by_name():
    with pytest.raises(ModelError, match="relu2"):
        GatedMlp(8, 8, "relu2", PLACEMENT)


@pytest.mark.parametrize("norm_topk_prob", [False, True])
def test_experts_add_up_by_their_shares_and_rows_stay_apart(norm_topk_prob: bool):
    config = MoeConfig(num_experts=6, num_experts_per_tok=3, intermediate_size=24, norm_topk_prob=norm_topk_prob)
    moe = SparseMoe(16, config, "silu", PLACEMENT)
    given = fill(moe, "mlp")
    x = torch.randn(11, 16) / 4

    got = moe(x)

    shares = torch.softmax(x @ given["mlp.gate.weight"].T, -1)
    for row in range(11):
        best = shares[row].topk(3)
        total = best.values.sum() if norm_topk_prob else 1.0
        want = torch.zeros(16)
        for share, expert in zip(best.values, best.indices.tolist(), strict=True):
            gate, up, down = (given[f"mlp.experts.{expert}.{name}_proj.weight"] for name in ("gate", "up", "down"))
            want += share / total * (torch.nn.functional.silu(x[row] @ gate.T) * (x[row] @ up.T) @ down.T)
        torch.testing.assert_close(got[row], want, atol=1e-4, rtol=1e-4)
        assert torch.equal(moe(x[row : row + 1])[0], got[row])


def test_experts_that_are_loaded_again_are_used_from_then_on():
    config = MoeConfig(num_experts=3, num_experts_per_tok=2, intermediate_size=24)
    loaded_twice, loaded_once = SparseMoe(16, config, "silu", PLACEMENT), SparseMoe(16, config, "silu", PLACEMENT)
    x = torch.randn(4, 16)
    fill(loaded_twice)
    before = loaded_twice(x)

    fill(loaded_twice, seed=1)
    fill(loaded_once, seed=1)

    assert torch.equal(loaded_twice(x), loaded_once(x))
    assert not torch.equal(loaded_twice(x), before)


def test_observers_of_experts_see_the_rows_that_are_routed_to_them():
    config = MoeConfig(num_experts=3, num_experts_per_tok=1, intermediate_size=24)
    moe = SparseMoe(16, config, "silu", PLACEMENT)
    given = fill(moe)
    x = torch.randn(9, 16)
    want = moe(x)
    seen: dict[str, torch.Tensor] = {}
    for weight in moe.weights(""):
        if weight.name in (".experts.1.up_proj.weight", ".experts.1.down_proj.weight"):
            assert weight.layer is not None
            weight.layer.observer = lambda rows, name=weight.name: seen.update({name: rows.clone()})

    assert torch.equal(moe(x), want)

    chosen = (x @ given[".gate.weight"].T).argmax(1) == 1
    assert torch.equal(seen[".experts.1.up_proj.weight"], x[chosen])
    assert seen[".experts.1.down_proj.weight"].shape == (int(chosen.sum()), 24)


ROPES: dict[str, dict[str, Any]] = {
    "default": {},
    "linear": {"factor": 3.0},
    "llama3": {
        "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 64,
    },
    "yarn": {"factor": 4.0, "original_max_position_embeddings": 64},
    "yarn-mscale": {
        "factor": 4.0, "original_max_position_embeddings": 64, "mscale": 0.7, "mscale_all_dim": 0.4, "beta_fast": 16,
    },
    "dynamic": {"factor": 2.0},
    "longrope": {
        "short_factor": [1.0] * 8, "long_factor": [2.0] * 8, "original_max_position_embeddings": 64, "factor": 4.0,
    },
}  # fmt: skip


@pytest.mark.parametrize("name", ROPES)
@pytest.mark.parametrize("longest", [64, 256])
def test_frequencies_are_those_of_transformers_for_the_longest_sequence(name: str, longest: int):
    kind = name.split("-")[0]
    trained = 256 if kind == "dynamic" else 128
    parameters = {"rope_type": kind, "rope_theta": 10000.0, **ROPES[name]}
    config = {
        "model_type": "llama", "hidden_size": 32, "num_attention_heads": 2, "head_dim": 16,
        "max_position_embeddings": trained, "rope_parameters": parameters,
    }  # fmt: skip
    rope = parse_hf_config(copy.deepcopy(config)).rope
    theirs = transformers.LlamaConfig(**{key: value for key, value in config.items() if key != "model_type"})

    got, factor = inverse_frequencies(rope, 16, trained, longest)

    if kind == "default":
        want, want_factor = 1.0 / 10000 ** (torch.arange(0, 16, 2) / 16), 1.0
    else:
        want, want_factor = ROPE_INIT_FUNCTIONS[kind](theirs, seq_len=longest)
    torch.testing.assert_close(got, want, atol=0, rtol=1e-6)
    assert factor == pytest.approx(want_factor)


def test_dynamic_scaling_is_not_served_beyond_the_trained_length():
    rope = parse_hf_config(
        {
            "model_type": "llama", "hidden_size": 32, "num_attention_heads": 2, "max_position_embeddings": 128,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 10000.0, "factor": 2.0},
        }
    ).rope  # fmt: skip

    with pytest.raises(ConfigError, match="beyond 128 tokens; serve at most 128, not 129"):
        inverse_frequencies(rope, 16, 128, 129)
