"""ModelConfig says what transformers says, for every spelling of a config.json."""

import json

import pytest

from headrace.checkpoint.model_config import load_model_config, parse_hf_config
from headrace.errors import ModelError

TINY = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
}


@pytest.mark.parametrize(
    "name",
    [
        "Llama",
        "Mistral",
        "Mixtral",
        "Qwen2",
        "Qwen3",
        "Qwen2Moe",
        "Qwen3Moe",
        "Gemma",
        "Gemma2",
        "Gemma3Text",
        "Phi3",
        "Ernie4_5",
    ],
)
def test_an_almost_empty_config_has_the_defaults_of_transformers(name):
    import transformers

    reference = getattr(transformers, f"{name}Config")()

    config = parse_hf_config({"model_type": reference.model_type})

    assert config.hidden_size == reference.hidden_size
    assert config.num_layers == reference.num_hidden_layers
    assert config.num_q_heads == reference.num_attention_heads
    assert config.num_kv_heads == reference.num_key_value_heads
    head_dim = getattr(reference, "head_dim", None) or reference.hidden_size // reference.num_attention_heads
    assert config.head_dim == head_dim
    assert config.intermediate_size == reference.intermediate_size
    assert config.vocab_size == reference.vocab_size
    assert config.max_position_embeddings == reference.max_position_embeddings
    assert config.rms_norm_eps == reference.rms_norm_eps
    assert config.tie_word_embeddings == reference.tie_word_embeddings
    assert config.hidden_act == (getattr(reference, "hidden_activation", None) or reference.hidden_act)
    assert config.bos_token_id == reference.bos_token_id
    assert config.eos_token_ids == (() if reference.eos_token_id is None else (reference.eos_token_id,))
    if getattr(reference, "layer_types", None):
        assert list(config.layer_types) == reference.layer_types
    rope = reference.rope_parameters
    assert config.rope.theta == rope.get("full_attention", rope)["rope_theta"]
    if "sliding_attention" in rope:
        assert config.rope_for(0).theta == rope["sliding_attention"]["rope_theta"]
    if config.moe is not None:
        num_experts = reference.num_local_experts if name == "Mixtral" else reference.num_experts
        assert config.moe.num_experts == num_experts
        assert config.moe.num_experts_per_tok == reference.num_experts_per_tok
    for key in ("attn_logit_softcapping", "final_logit_softcapping"):
        assert getattr(config, key) == getattr(reference, key, None)


@pytest.mark.parametrize(
    "rope_keys",
    [
        {"rope_theta": 5e5, "rope_scaling": {"type": "linear", "factor": 2.0}},
        {"rope_theta": 5e5, "rope_scaling": {"rope_type": "linear", "factor": 2.0}},
        {"rope_parameters": {"rope_theta": 5e5, "rope_type": "linear", "factor": 2.0}},
    ],
)
def test_every_spelling_of_rope_means_the_same(rope_keys):
    rope = parse_hf_config(TINY | rope_keys).rope

    assert (rope.theta, rope.rope_type, rope.scaling) == (5e5, "linear", {"factor": 2.0})


def test_gemma3_has_one_rope_for_each_kind_of_layer_in_both_spellings():
    base = {"model_type": "gemma3_text", "num_hidden_layers": 7, "sliding_window": 512}
    scaling = {"rope_type": "linear", "factor": 8.0}
    old = parse_hf_config(base | {"rope_theta": 1e6, "rope_local_base_freq": 1e4, "rope_scaling": scaling})
    per_layer = {
        "full_attention": {"rope_theta": 1e6, **scaling},
        "sliding_attention": {"rope_theta": 1e4, "rope_type": "default"},
    }
    new = parse_hf_config(base | {"rope_parameters": per_layer})

    for config in (old, new):
        assert config.layer_types == ("sliding_attention",) * 5 + ("full_attention", "sliding_attention")
        assert (config.rope_for(5).rope_type, config.rope_for(5).theta) == ("linear", 1e6)
        assert (config.rope_for(6).rope_type, config.rope_for(6).theta) == ("default", 1e4)


def test_a_multimodal_gemma3_is_flattened_to_its_text_model():
    text = {"model_type": "gemma3_text", "hidden_size": 320, "num_hidden_layers": 6}

    config = parse_hf_config(
        {"model_type": "gemma3", "text_config": text, "torch_dtype": "bfloat16", "eos_token_id": [1, 106]}
    )

    assert (config.model_type, config.hidden_size, config.dtype) == ("gemma3_text", 320, "bfloat16")
    assert config.eos_token_ids == (1, 106)


def test_llama3_scaling_keeps_its_parameters_and_refuses_to_miss_one():
    scaling = {
        "rope_type": "llama3",
        "factor": 8.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }

    rope = parse_hf_config(TINY | {"rope_scaling": scaling}).rope

    assert rope.scaling == {key: value for key, value in scaling.items() if key != "rope_type"}
    del scaling["low_freq_factor"]
    with pytest.raises(ModelError, match="low_freq_factor"):
        parse_hf_config(TINY | {"rope_scaling": scaling})


def test_experts_sit_in_the_layers_that_the_config_says():
    moe = parse_hf_config(
        {"model_type": "qwen3_moe", "num_hidden_layers": 4, "decoder_sparse_step": 2, "mlp_only_layers": [3]}
    ).moe

    assert moe is not None
    assert [moe.is_sparse(layer) for layer in range(4)] == [False, True, False, False]


def test_generation_config_gives_sampling_defaults_and_more_ends(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(TINY | {"eos_token_id": 2}))
    (tmp_path / "generation_config.json").write_text(
        json.dumps({"eos_token_id": [2, 7], "temperature": 0.6, "top_k": 20})
    )

    config = load_model_config(tmp_path)

    assert config.eos_token_ids == (2, 7)
    assert (config.sampling_defaults.temperature, config.sampling_defaults.top_k) == (0.6, 20)
    assert config.sampling_defaults.top_p is None


@pytest.mark.parametrize("name", ["Llama", "Qwen3"])
def test_heads_that_are_null_are_those_of_the_queries(name):
    import transformers

    sizes = {"hidden_size": 96, "num_attention_heads": 6, "num_key_value_heads": None}
    reference = getattr(transformers, f"{name}Config")(**sizes)

    config = parse_hf_config({"model_type": reference.model_type} | sizes)

    assert config.num_kv_heads == reference.num_key_value_heads == 6


@pytest.mark.parametrize(
    ("change", "named"),
    [
        ({"hidden_size": 0}, "hidden_size"),
        ({"num_hidden_layers": "2"}, "num_hidden_layers"),
        ({"vocab_size": True}, "vocab_size"),
        ({"num_key_value_heads": 3}, "4 query heads"),
        ({"rms_norm_eps": float("nan")}, "rms_norm_eps"),
        ({"rope_scaling": {"type": "bent"}}, "bent"),
        ({"rope_scaling": {"type": "yarn"}}, "factor"),
        ({"layer_types": ["full_attention"]}, "layer_types"),
        ({"layer_types": ["odd", "odd"]}, "layer_types"),
        ({"eos_token_id": "</s>"}, "eos_token_id"),
        ({"model_type": None}, "model_type"),
        ({"text_config": {"model_type": ["llama"]}}, "model_type"),
    ],
)
def test_values_that_make_no_model_are_refused_by_name(change, named):
    with pytest.raises(ModelError, match=named):
        parse_hf_config(TINY | change)


@pytest.mark.parametrize("content", ["", "{", "[]", "\x00\xff", "[" * 100_000])
def test_a_broken_config_file_is_refused_by_name(tmp_path, content):
    (tmp_path / "config.json").write_text(content)

    with pytest.raises(ModelError, match=r"config\.json"):
        load_model_config(tmp_path)


def test_a_missing_config_file_is_refused_by_name(tmp_path):
    with pytest.raises(ModelError, match=r"config\.json is missing"):
        load_model_config(tmp_path)
