"""Layers between attentions as compiled functions: the hidden states of the layers op by op."""

import pytest
import torch

from headrace import kernels
from headrace.attention.base import ReadTokens, StepRows
from headrace.attention.select import BACKENDS
from headrace.attention.torch_native import TorchNativeAttention
from headrace.checkpoint.model_config import parse_hf_config
from headrace.config.machine import DeviceFacts
from headrace.config.resolve import resolve
from headrace.config.server_args import ServerArgs
from headrace.errors import ConfigError
from headrace.execution.load_weights import fill_random
from headrace.layers.weight import Placement
from headrace.models.decoder import DecoderLM
from headrace.models.registry import model_class_for
from headrace.models.spec import kv_shape

# float32 sums in another order.
TOLERANCE = 1e-5
SIZES = {
    "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "vocab_size": 90, "max_position_embeddings": 64,
}  # fmt: skip
CPU = torch.device("cpu")


def build(model_type: str, **changes) -> tuple[DecoderLM, TorchNativeAttention]:
    config = parse_hf_config({"model_type": model_type, **SIZES, **changes})
    model = model_class_for(config).build(config, Placement(CPU, torch.float32, 64))
    fill_random(model.weights(), 0)
    for weight in model.weights():
        if weight.init != "normal":  # neutral norms and biases would hide one that is left out
            weight.load(torch.rand(weight.shape, generator=torch.Generator().manual_seed(len(weight.name))))
    attention = TorchNativeAttention()
    attention.make_kv_pool(kv_shape(config, torch.float32), 64, 1, CPU)
    return model, attention


def hidden_states(
    model: DecoderLM, attention: TorchNativeAttention, start: int, count: int, reads: ReadTokens | None = None
) -> torch.Tensor:
    """Of positions start .. start + count - 1 of one sequence, or of those that are read."""
    positions = torch.arange(start, start + count, dtype=torch.int32)
    rows = StepRows(
        [start], [count], positions, torch.tensor([start + count]), torch.tensor([0, count]), positions,
        torch.arange(start + count, dtype=torch.int32)[None],
    )  # fmt: skip
    attention.prepare(rows)
    with torch.inference_mode():
        return model.forward(model.embed(positions % 90), positions, attention, reads)


@pytest.mark.parametrize("model_type", ["llama", "qwen2", "qwen3", "gemma3_text"])
def test_compiled_pieces_give_the_hidden_states_of_the_layers(model_type):
    with kernels.prefer("torch"):
        model, attention = build(model_type)
        want = [hidden_states(model, attention, 0, 20), hidden_states(model, attention, 20, 1)]

        assert model.compile_pieces(backend="eager") == ""
        got = [hidden_states(model, attention, 0, 20), hidden_states(model, attention, 20, 1)]

        for a, b in zip(got, want, strict=True):
            torch.testing.assert_close(a, b, atol=TOLERANCE, rtol=TOLERANCE)
            assert not torch.equal(a, torch.zeros_like(a))
        last = hidden_states(model, attention, 0, 20, ReadTokens(torch.tensor([18, 19]), [0, 2]))
        torch.testing.assert_close(last, want[0][18:], atol=TOLERANCE, rtol=TOLERANCE)


def test_weights_that_were_replaced_are_the_ones_that_compute():
    with kernels.prefer("torch"):
        model, attention = build("llama")
        assert model.compile_pieces(backend="eager") == ""
        before = hidden_states(model, attention, 0, 5)
        for weight in model.weights():
            if weight.name.endswith("down_proj.weight"):
                weight.load(torch.zeros(weight.shape))

        model.fuse(attention)

        changed = hidden_states(model, attention, 0, 5)
        model._pieces = None
        torch.testing.assert_close(changed, hidden_states(model, attention, 0, 5), atol=TOLERANCE, rtol=TOLERANCE)
        assert not torch.allclose(changed, before, atol=TOLERANCE)


def test_experts_are_not_compiled():
    moe = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 16}
    with kernels.prefer("torch"):
        model, _ = build("qwen3_moe", **moe)

        assert "mixture of experts" in model.compile_pieces(backend="eager")


@pytest.mark.parametrize(
    ("device", "options", "message"),
    [("cpu", {}, "for GPUs"), ("cuda", {"quantization": "fp8"}, "quantised weights")],
)
def test_compiling_is_refused_where_it_makes_no_sense(device, options, message):
    facts = DeviceFacts(True, True, "", 2, cuda_bfloat16=True, cuda_capability=(9, 0))
    config = parse_hf_config({"model_type": "llama", **SIZES})

    with pytest.raises(ConfigError, match=message):
        resolve(ServerArgs(device=device, enable_torch_compile=True, **options), config, facts, BACKENDS)
