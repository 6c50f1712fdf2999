"""Where the sampling values of a silent request come from."""

import gguf
import numpy as np
import pytest

from headrace.checkpoint.names import resolve_model
from headrace.checkpoint.sampling_defaults import UNKNOWN_GGUF, SamplingDefaults, from_generation_config, from_gguf
from headrace.checkpoint.source import open_checkpoint
from headrace.errors import ModelError


def stated(defaults: SamplingDefaults) -> dict[str, float]:
    """What is not off."""
    off = SamplingDefaults().values()
    return {name: value for name, value in defaults.values().items() if value != off[name]}


def general(**keys: object) -> dict[str, object]:
    """GGUF metadata of these keys of `general.`."""
    return {f"general.{key}": value for key, value in keys.items()}


def test_the_model_of_the_readme_has_the_defaults_of_its_card():
    defaults = open_checkpoint(resolve_model("smollm2")).config.sampling_defaults

    assert stated(defaults) == {"temperature": 0.2, "top_p": 0.9}
    assert defaults.summary() == "temperature 0.2, top_p 0.9 (SmolLM2's model card)"


@pytest.mark.parametrize(
    ("keys", "want"),
    [
        ({"basename": "SmolLM2", "size_label": "1.7B"}, {"temperature": 0.2, "top_p": 0.9}),
        ({"basename": "Qwen3", "size_label": "0.6B"}, {"temperature": 0.6, "top_p": 0.95, "top_k": 20}),
        (
            {"basename": "Qwen3", "size_label": "4B", "version": "2507", "finetune": "Instruct"},
            {"temperature": 0.7, "top_p": 0.8, "top_k": 20},
        ),
        (
            {"basename": "Qwen2.5", "size_label": "0.5B", "finetune": "Instruct"},
            {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.1},
        ),
        (
            {"name": "Qwen2.5 Coder 7B Instruct"},
            {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.05},
        ),
        ({"basename": "gemma-3", "size_label": "270M", "finetune": "it"}, {"top_p": 0.95, "top_k": 64}),
        ({"name": "google_gemma-3-1b-it"}, {"top_p": 0.95, "top_k": 64}),
        ({"basename": "Meta-Llama-3.1", "size_label": "8B"}, {"temperature": 0.6, "top_p": 0.9}),
        ({"name": "Llama 3.2 1B Instruct"}, {"temperature": 0.6, "top_p": 0.9}),
        ({"basename": "DeepSeek-R1-Distill-Qwen", "size_label": "1.5B"}, {"temperature": 0.6, "top_p": 0.95}),
        ({"basename": "Mistral-Nemo", "finetune": "Instruct"}, {"temperature": 0.3}),
    ],
)
def test_a_known_model_has_the_published_defaults(keys, want):
    assert stated(from_gguf(general(**keys), "m.gguf")) == want


@pytest.mark.parametrize(
    "keys", [{}, {"name": "Hermes 3 of somebody"}, {"name": 5}, {"basename": "Qwen3", "finetune": "Base"}]
)
def test_an_unknown_model_in_a_gguf_file_has_sane_defaults(keys):
    defaults = from_gguf(general(**keys), "m.gguf")

    assert defaults == UNKNOWN_GGUF
    assert stated(defaults) == {"temperature": 0.7, "top_p": 0.9}


def test_what_the_gguf_file_states_comes_before_the_card(tmp_path):
    writer = gguf.GGUFWriter(tmp_path / "m.gguf", "llama")
    writer.add_string("general.basename", "smollm2")
    writer.add_sampling_temp(0.55)
    writer.add_sampling_top_k(0)
    writer.add_sampling_penalty_repeat(1.1)
    writer.add_sampling_mirostat(2)
    for key, value in {
        "block_count": 1,
        "embedding_length": 8,
        "attention.head_count": 2,
        "context_length": 16,
    }.items():
        writer.add_uint32(f"llama.{key}", value)
    writer.add_uint32("llama.feed_forward_length", 16)
    writer.add_float32("llama.attention.layer_norm_rms_epsilon", 1e-5)
    writer.add_tensor("token_embd.weight", np.zeros((4, 8), np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()

    defaults = open_checkpoint(tmp_path / "m.gguf").config.sampling_defaults

    assert stated(defaults) == {"temperature": 0.55, "repetition_penalty": 1.1}
    assert defaults.origin == "the GGUF file's general.sampling"
    assert defaults.not_followed == ("mirostat 2",)


@pytest.mark.parametrize("off", [0, None])
def test_top_k_turned_off_in_the_generation_config_is_not_a_default(off):
    defaults = from_generation_config({"top_k": off, "top_p": 1.0, "do_sample": True, "max_new_tokens": 5})

    assert (stated(defaults), defaults.top_k) == ({}, None)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("repetition_penalty", 0.0),
        ("repetition_penalty", 2.5),
        ("repetition_penalty", float("nan")),
        ("temperature", -1.0),
        ("temperature", float("inf")),
        ("temperature", True),
        ("top_p", 0.0),
        ("top_p", 1.5),
        ("top_k", -7),
        ("top_k", "40"),
        ("top_k", "\ud800"),
        ("min_p", 2.0),
        ("min_p", [0.1]),
    ],
)
def test_defaults_that_would_fail_every_request_are_refused_at_load(name, value):
    key = {"temperature": "temp", "repetition_penalty": "penalty_repeat"}.get(name, name)

    with pytest.raises(ModelError, match=rf"generation_config\.json: {name}"):
        from_generation_config({name: value})
    with pytest.raises(ModelError, match=rf"m\.gguf: general\.sampling\.{key}"):
        from_gguf(general(**{f"sampling.{key}": value}), "m.gguf")


def test_wishes_that_are_not_followed_are_named_and_neutral_ones_are_not():
    wished = from_generation_config(
        {"num_beams": 4, "do_sample": False, "suppress_tokens": [5], "no_repeat_ngram_size": 3, "temperature": 0.5}
    )
    neutral = from_generation_config(
        {"num_beams": 1, "do_sample": True, "suppress_tokens": [], "no_repeat_ngram_size": 0, "penalty_alpha": None}
        | {"typical_p": 1.0, "constraints": False, "bos_token_id": 1, "transformers_version": "5", "max_length": 20}
    )

    assert wished.not_followed == ("do_sample false", "num_beams 4", "no_repeat_ngram_size 3", "suppress_tokens [5]")
    assert neutral.not_followed == ()


def test_a_model_that_brings_none_says_so():
    assert from_generation_config({}).summary() == "temperature 1 (the model brings none)"
