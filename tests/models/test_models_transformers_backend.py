"""The fallback: architectures that we have no file for give transformers' logits through our attention, or are refused."""

import json
from pathlib import Path

import msgspec
import pytest
import torch
import transformers
from model_harness import BACKENDS, MAX_POSITIONS, open_runner, random_tokens, save_tiny, tiny_config
from safetensors.torch import load_file, save_file

from headrace.checkpoint import families
from headrace.checkpoint.model_config import ModelConfig, parse_hf_config
from headrace.errors import ModelError
from headrace.models import transformers_backend
from headrace.models.registry import model_class_for
from headrace.models.transformers_backend import TransformersLM
from headrace.models.transformers_names import read_names

TOLERANCE = 2e-4
PROMPT = random_tokens(70, seed=1)

_SHAPE = {
    "vocab_size": 199,
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": MAX_POSITIONS,
    "bos_token_id": 1,
    "eos_token_id": 2,
    "pad_token_id": 0,
}
_MIXTURE = {**_SHAPE, "num_experts": 4, "num_experts_per_tok": 2}
OTHERS = {
    "gpt2": {
        "vocab_size": 199,
        "n_embd": 64,
        "n_layer": 2,
        "n_head": 4,
        "n_positions": MAX_POSITIONS,
        "bos_token_id": 1,
        "eos_token_id": 2,
    },
    "opt": {key: value for key, value in _SHAPE.items() if key != "num_key_value_heads"}
    | {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "olmoe": _MIXTURE,
    "phimoe": {**_SHAPE, "sliding_window": 21, "num_local_experts": 4, "num_experts_per_tok": 2},
    "moshi": {**_SHAPE, "sliding_window": 21},  # a window that its code does not use
    "granitemoe": {**_SHAPE, "num_local_experts": 4, "num_experts_per_tok": 2},
    "gpt_neox": {key: value for key, value in _SHAPE.items() if key != "num_key_value_heads"},
    "olmo2": _SHAPE,
    # Families with layers of other kinds, in models without them; the first as Granite 4.0 dense.
    "granitemoehybrid": {
        **_SHAPE,
        "layer_types": ["attention"] * 2,
        "num_local_experts": 0,
        "num_experts_per_tok": 0,
        "shared_intermediate_size": 96,
        "position_embedding_type": "rope",
        "tie_word_embeddings": True,
        "embedding_multiplier": 2.0,
        "logits_scaling": 3.0,
        "residual_multiplier": 0.5,
        "attention_multiplier": 0.2,
    },
    "minimax": {**_SHAPE, "layer_types": ["full_attention"] * 2, "num_local_experts": 4, "head_dim": 16},
    "phi3": _SHAPE,
    "stablelm": _SHAPE,
    "granite": {**_SHAPE, "logits_scaling": 3.0, "embedding_multiplier": 2.0, "attention_multiplier": 0.2},
    "cohere2": {**_SHAPE, "sliding_window": 21, "head_dim": 16, "layer_types": ["sliding_attention", "full_attention"]},
    "ernie4_5": {**_SHAPE, "use_bias": True},  # one of ours, with what it has not
    "gemma2": {
        **_SHAPE,
        "sliding_window": 21,
        "head_dim": 16,
        "query_pre_attn_scalar": 24,
        "attn_logit_softcapping": 5.0,
        "final_logit_softcapping": 10.0,
    },
}


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("model_type", OTHERS)
def test_other_architectures_give_the_logits_of_transformers(model_type: str, backend: str, tmp_path: Path):
    config = transformers.AutoConfig.for_model(model_type, **OTHERS[model_type])
    reference = save_tiny(config, tmp_path)
    # As checkpoints spell what transformers has renamed since.
    written = json.loads((tmp_path / "config.json").read_text())
    spelled = {name: value for name, value in OTHERS[model_type].items() if name == "layer_types"}
    (tmp_path / "config.json").write_text(json.dumps(written | spelled))
    runner = open_runner(tmp_path, backend)

    whole = runner.chunks(0, PROMPT, [])
    chunked = runner.chunks(1, PROMPT, [33, 17] + [1] * 20)
    batched = runner.step([(2, 0, PROMPT[:9]), (3, 0, PROMPT)])

    with torch.inference_mode():
        want = reference(torch.tensor([PROMPT])).logits[0]
    torch.testing.assert_close(whole, want, atol=TOLERANCE, rtol=TOLERANCE)
    torch.testing.assert_close(chunked, want, atol=TOLERANCE, rtol=TOLERANCE)
    torch.testing.assert_close(batched[1], want, atol=TOLERANCE, rtol=TOLERANCE)


def test_a_family_of_ours_can_be_served_by_transformers_instead(tmp_path: Path):
    save_tiny(tiny_config("qwen3"), tmp_path)

    ours = open_runner(tmp_path, "torch_native").chunks(0, PROMPT, [])
    theirs = open_runner(tmp_path, "torch_native", impl="transformers").chunks(0, PROMPT, [])

    torch.testing.assert_close(theirs, ours, atol=TOLERANCE, rtol=TOLERANCE)


@pytest.mark.parametrize("backend", BACKENDS)
def test_its_kv_cache_may_be_int8(backend: str, tmp_path: Path):
    save_tiny(tiny_config("qwen3"), tmp_path)
    ours, theirs = (
        open_runner(tmp_path, backend, impl=impl, kv_dtype=torch.int8).chunks(0, PROMPT, [33, 17] + [1] * 20)
        for impl in ("auto", "transformers")
    )

    # A last bit may carry a byte of the cache over to the next one, a step of 1/127.
    torch.testing.assert_close(theirs, ours, atol=2e-2, rtol=0)


@pytest.mark.parametrize(
    ("model_type", "config", "reason"),
    [
        (
            "deepseek_v3",
            {**_SHAPE, "q_lora_rank": 16, "kv_lora_rank": 16, "n_routed_experts": 4, "n_group": 1, "topk_group": 1},
            "layer 0 attends with 4",
        ),
        (
            "falcon",
            {"vocab_size": 199, "hidden_size": 64, "num_attention_heads": 4, "num_hidden_layers": 2},
            "cannot be replaced",
        ),
        (
            "codegen",
            {"vocab_size": 199, "n_embd": 64, "n_layer": 2, "n_head": 4, "rotary_dim": 8, "n_positions": MAX_POSITIONS},
            "its 2 layers attend 0 times",
        ),
        (
            "gpt_oss",
            {
                **_SHAPE,
                "head_dim": 16,
                "num_local_experts": 4,
                "num_experts_per_tok": 2,
                "layer_types": ["full_attention"] * 2,
            },
            "attention sinks",
        ),
        (
            "gemma3n_text",
            {
                **_SHAPE,
                "head_dim": 16,
                "hidden_size_per_layer_input": 16,
                "vocab_size_per_layer_input": 199,
                "laurel_rank": 8,
                "num_kv_shared_layers": 0,
                "activation_sparsity_pattern": [0.0, 0.0],
            },
            "uses token ids for more",
        ),
        ("lfm2", {**_SHAPE, "layer_types": ["conv", "full_attention"]}, "layers of kind conv"),
        (
            "mamba",
            {"vocab_size": 199, "hidden_size": 64, "num_hidden_layers": 2, "state_size": 8},
            "layers of kind linear",
        ),
        ("bloom", {"vocab_size": 199, "hidden_size": 64, "n_layer": 2, "n_head": 4}, "takes no position_ids"),
    ],
)
def test_what_is_not_plain_attention_is_refused_in_one_true_line(
    model_type: str, config: dict[str, object], reason: str, tmp_path: Path, monkeypatch
):
    """By its structure: also families that the table of names does not have."""
    monkeypatch.setattr(families, "_LACKS", {})
    save_tiny(transformers.AutoConfig.for_model(model_type, **config), tmp_path)

    with pytest.raises(ModelError, match=rf"model type {model_type} .*{reason}") as refusal:
        open_runner(tmp_path, "torch_native")
    assert "\n" not in refusal.value.message


def test_a_module_that_looks_back_by_its_kind_is_refused_before_weights_are_read(tmp_path: Path, monkeypatch):
    """A family with attention and, in the same layer, a convolution."""
    save_tiny(tiny_config("llama"), tmp_path)
    made = transformers_backend._instance

    def with_convolution(config: ModelConfig, dtype: torch.dtype) -> torch.nn.Module:
        model = made(config, dtype)
        model.model.layers[0].mlp.conv = torch.nn.Conv1d(4, 4, 3)
        return model

    monkeypatch.setattr(transformers_backend, "_instance", with_convolution)
    with pytest.raises(ModelError, match="model type llama cannot be served: beside attention it has Conv1d"):
        open_runner(tmp_path, "torch_native", impl="transformers")


def test_whatever_looks_back_without_attention_is_found_by_what_it_does(tmp_path: Path):
    save_tiny(tiny_config("llama"), tmp_path)
    model = open_runner(tmp_path, "torch_native", impl="transformers").model
    assert isinstance(model, TransformersLM)
    model.check()

    model._model.model.layers[1].mlp.register_forward_hook(lambda module, args, out: out + 0.1 * out.roll(1, dims=1))

    with pytest.raises(ModelError, match="sees earlier tokens"):
        model.check()


def test_names_without_the_prefix_of_the_base_model_are_found(tmp_path: Path):
    """As the tensors of gpt2 are published."""
    save_tiny(transformers.AutoConfig.for_model("gpt2", **OTHERS["gpt2"]), tmp_path)
    want = open_runner(tmp_path, "torch_native").chunks(0, PROMPT, [])
    file = tmp_path / "model.safetensors"
    tensors = {name.removeprefix("transformer."): tensor.clone() for name, tensor in load_file(file).items()}
    save_file(tensors | {"h.0.attn.bias": torch.ones(1, 1, 8, 8)}, file)

    assert torch.equal(open_runner(tmp_path, "torch_native").chunks(0, PROMPT, []), want)


def test_experts_are_weights_of_their_own(tmp_path: Path):
    """So that no more than one is read at a time, and a trainer may send them one by one."""
    save_tiny(transformers.AutoConfig.for_model("olmoe", **OTHERS["olmoe"]), tmp_path)
    stored = load_file(tmp_path / "model.safetensors")
    model = open_runner(tmp_path, "torch_native").model
    weights = {weight.name: weight for weight in model.weights()}
    name = "model.layers.1.mlp.experts.2.up_proj.weight"
    other = "model.layers.1.mlp.experts.2.gate_proj.weight"

    assert set(weights) == set(stored)
    assert torch.equal(weights[name].read(), stored[name])
    (keeper,) = weights[name].keepers
    keeper.restore(keeper.staged({weights[name].part: 2 * stored[name]}))
    assert torch.equal(weights[name].read(), 2 * stored[name])
    assert torch.equal(weights[other].read(), stored[other])


def test_stored_tensors_that_would_be_converted_otherwise_are_refused(tmp_path: Path):
    config = transformers.AutoConfig.for_model("hrm_text", **_SHAPE)
    with torch.device("meta"):
        model = transformers.AutoModelForCausalLM.from_config(config)

    with pytest.raises(ModelError, match=r"model type hrm_text cannot be served: .*\(Chunk\)"):
        read_names(model)


def _config(model_type: str = "llama", **changes: object):
    return msgspec.structs.replace(parse_hf_config({"model_type": "llama", **_SHAPE, **changes}), model_type=model_type)


@pytest.mark.parametrize(
    ("config", "impl", "message"),
    [
        (_config(quantization_config={"quant_method": "eetq"}), "auto", "quant_method eetq"),
        (_config(model_type="unheard_of"), "headrace", "unheard_of has no implementation in Headrace"),
        (_config(model_type="x", auto_map={"AutoModel": "m.M"}), "auto", "its own code"),
        (_config(model_type="x", layer_types=["chunked_attention"] * 2), "auto", "chunks"),
    ],
)
def test_what_cannot_be_served_is_refused_from_its_config(config, impl, message):
    with pytest.raises(ModelError, match=message):
        model_class_for(config, impl)


def test_an_architecture_that_transformers_does_not_know_is_a_model_error(tmp_path: Path):
    save_tiny(tiny_config("llama"), tmp_path)
    file = tmp_path / "config.json"
    file.write_text(file.read_text().replace('"model_type": "llama"', '"model_type": "unheard_of"'))

    with pytest.raises(ModelError, match="unheard_of"):
        open_runner(tmp_path, "torch_native")
