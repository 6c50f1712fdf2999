"""Every size of a model follows from its config, so the models of narrower configs are parts of the whole one: what each rank would hold if
the model were split over several."""

from collections.abc import Callable, Sequence
from typing import Any

import msgspec
import pytest
import torch
from model_harness import BACKENDS, CPU, FAMILIES, tiny_config

from headrace.attention.base import StepRows
from headrace.attention.select import make_backend
from headrace.checkpoint.model_config import ModelConfig, MoeConfig, parse_hf_config
from headrace.layers.moe import SparseMoe
from headrace.layers.rotary import Rotary
from headrace.layers.weight import Placement, Weight
from headrace.models.decoder import Attention, BlockOptions, gated_mlp
from headrace.models.registry import model_class_for
from headrace.models.spec import kv_shape

PLACEMENT = Placement(CPU, torch.float32, 64)
# float32 sums of at most 100 terms of order 1, in another order.
TOLERANCE = 1e-5
NUM_TOKENS = 20


def resized(config: ModelConfig, kv_heads: int, intermediate: int, vocabulary: int) -> ModelConfig:
    """The same kind of model with other widths and 4 query heads for each KV head."""
    moe = config.moe and msgspec.structs.replace(config.moe, intermediate_size=intermediate)
    return msgspec.structs.replace(
        config,
        num_kv_heads=kv_heads,
        num_q_heads=4 * kv_heads,
        intermediate_size=intermediate,
        vocab_size=vocabulary,
        moe=moe,
    )


def whole_and_parts(family: str) -> tuple[ModelConfig, list[ModelConfig]]:
    """Parts that are not equally wide: two of three KV heads, and one."""
    config = parse_hf_config(tiny_config(family).to_dict())
    return resized(config, 3, 96, 199), [resized(config, 2, 64, 100), resized(config, 1, 32, 99)]


def dimension_of_cut(whole: Weight, parts: Sequence[Weight]) -> int | None:
    """The dimension in which the parts lie side by side in the whole; None when each has all of it."""
    narrower = [dim for dim, size in enumerate(whole.shape) if any(part.shape[dim] != size for part in parts)]
    assert len(narrower) <= 1, (whole.name, whole.shape, [part.shape for part in parts])
    assert all(sum(part.shape[dim] for part in parts) == whole.shape[dim] for dim in narrower), whole.name
    return narrower[0] if narrower else None


@pytest.mark.parametrize("family", FAMILIES)
def test_the_matrices_of_a_model_are_those_of_narrower_models_side_by_side(family: str):
    config, parts = whole_and_parts(family)
    build = model_class_for(config, "headrace").build
    of_parts = zip(*(build(part, PLACEMENT).weights() for part in parts), strict=True)

    cuts = {}
    for weight, pieces in zip(build(config, PLACEMENT).weights(), of_parts, strict=True):
        assert [piece.name for piece in pieces] == [weight.name] * len(parts)
        cuts[weight.name] = dimension_of_cut(weight, pieces)

    matrices = {name: cut for name, cut in cuts.items() if not name.endswith((".bias", "norm.weight", ".gate.weight"))}
    by_input = ("o_proj.weight", "down_proj.weight", ".w2.weight")
    assert matrices == {name: int(name.endswith(by_input)) for name in matrices}
    assert all(cut is None for name, cut in cuts.items() if name.endswith(("norm.weight", ".gate.weight")))
    assert kv_shape(config, torch.float32).bytes_per_token == sum(
        kv_shape(part, torch.float32).bytes_per_token for part in parts
    )


def filled(
    make: Callable[[ModelConfig], Any], config: ModelConfig, parts: Sequence[ModelConfig]
) -> tuple[Any, list[Any]]:
    """The layer of the whole config with random weights, and those of the parts with their pieces of them."""
    whole, pieces = make(config), [make(part) for part in parts]
    generator = torch.Generator().manual_seed(0)
    for weight, *of_pieces in zip(whole.weights("x"), *(piece.weights("x") for piece in pieces), strict=True):
        tensor = torch.randn(weight.shape, generator=generator) / weight.shape[-1] ** 0.5
        weight.load(tensor)
        dim = dimension_of_cut(weight, of_pieces)
        cut = [tensor] * len(parts) if dim is None else tensor.split([piece.shape[dim] for piece in of_pieces], dim)
        for piece, part in zip(of_pieces, cut, strict=True):
            piece.load(part)
    return whole, pieces


def rotary(config: ModelConfig) -> Rotary:
    return Rotary(config.rope, config.head_dim, config.max_position_embeddings, PLACEMENT)


def attended(layer: Attention, config: ModelConfig, backend: str, x: torch.Tensor) -> torch.Tensor:
    """The layer's output for one prompt in an empty cache."""
    attention = make_backend(backend)
    attention.make_kv_pool(kv_shape(config, torch.float32), 32, 16, CPU)
    positions = torch.arange(NUM_TOKENS, dtype=torch.int32)
    step = StepRows(
        starts=[0],
        counts=[NUM_TOKENS],
        positions=positions,
        seq_lens=torch.tensor([NUM_TOKENS], dtype=torch.int32),
        row_starts=torch.tensor([0, NUM_TOKENS], dtype=torch.int32),
        out_slots=positions,
        slots=positions[None],
    )
    attention.prepare(step)
    return layer(x, positions, attention)


@pytest.mark.parametrize("backend", BACKENDS)
@torch.inference_mode()
def test_the_outputs_of_narrower_attentions_add_up(backend: str):
    config, parts = whole_and_parts("llama")
    options = BlockOptions(qkv_bias=True, qk_norm=True)
    whole, pieces = filled(lambda c: Attention(c, 0, options, rotary(c), PLACEMENT), config, parts)
    x = torch.randn(NUM_TOKENS, config.hidden_size, generator=torch.Generator().manual_seed(1))

    outputs = [attended(piece, part, backend, x) for piece, part in zip(pieces, parts, strict=True)]

    torch.testing.assert_close(sum(outputs), attended(whole, config, backend, x), atol=TOLERANCE, rtol=TOLERANCE)


def dense(config: ModelConfig) -> Any:
    return gated_mlp(config, 0, PLACEMENT)


def experts(config: ModelConfig) -> Any:
    moe = MoeConfig(num_experts=4, num_experts_per_tok=2, intermediate_size=config.intermediate_size)
    return SparseMoe(config.hidden_size, moe, config.hidden_act, PLACEMENT)


@pytest.mark.parametrize("make", [dense, experts])
@torch.inference_mode()
def test_the_outputs_of_narrower_feed_forward_layers_add_up(make: Callable[[ModelConfig], Any]):
    config, parts = whole_and_parts("llama")
    whole, pieces = filled(make, config, parts)
    x = torch.randn(NUM_TOKENS, config.hidden_size, generator=torch.Generator().manual_seed(1))

    torch.testing.assert_close(sum(piece(x) for piece in pieces), whole(x), atol=TOLERANCE, rtol=TOLERANCE)
