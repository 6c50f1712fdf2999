"""The fallback: architectures that we have no file for give transformers' logits through our attention, or are refused."""

from pathlib import Path

import pytest
import torch
import transformers
from model_harness import BACKENDS, MAX_POSITIONS, open_runner, random_tokens, save_tiny, tiny_config

from headrace.checkpoint.model_config import parse_hf_config
from headrace.errors import ModelError
from headrace.models.spec import model_class_for

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
OTHERS = {
    "gpt_neox": {key: value for key, value in _SHAPE.items() if key != "num_key_value_heads"},
    "olmo2": _SHAPE,
    "phi3": _SHAPE,
    "stablelm": _SHAPE,
    "granite": {**_SHAPE, "logits_scaling": 3.0, "embedding_multiplier": 2.0, "attention_multiplier": 0.2},
    "cohere2": {**_SHAPE, "sliding_window": 21, "head_dim": 16, "layer_types": ["sliding_attention", "full_attention"]},
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
    ("model_type", "config"),
    [
        ("opt", {**_SHAPE, "ffn_dim": 96, "word_embed_proj_dim": 64}),
        (
            "deepseek_v3",
            {**_SHAPE, "q_lora_rank": 16, "kv_lora_rank": 16, "n_routed_experts": 4, "n_group": 1, "topk_group": 1},
        ),
    ],
)
def test_attention_of_another_kind_is_refused_with_the_reason(
    model_type: str, config: dict[str, object], tmp_path: Path
):
    save_tiny(transformers.AutoConfig.for_model(model_type, **config), tmp_path)

    with pytest.raises(ModelError, match=rf"{model_type}|layer 0"):
        open_runner(tmp_path, "torch_native")


def _config(**changes: object):
    return parse_hf_config({"model_type": "llama", **_SHAPE, **changes})


@pytest.mark.parametrize(
    ("config", "impl", "message"),
    [
        (_config(quantization_config={"quant_method": "bitsandbytes"}), "auto", "quant_method bitsandbytes"),
        (_config(model_type="unheard_of"), "headrace", "unheard_of has no implementation of ours"),
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
