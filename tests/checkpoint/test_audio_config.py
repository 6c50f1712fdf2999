"""Configs of audio models: defaults are transformers', and what is not served leaves the model without audio, not broken."""

import copy
from typing import Any

import pytest
import transformers

from headrace.checkpoint import families
from headrace.checkpoint.model_config import parse_hf_config, read_audio
from headrace.errors import ModelError

CONFIGS: dict[str, dict[str, Any]] = {"qwen2_audio": {"model_type": "qwen2_audio", "audio_config": {}}}
TEXT = {"model_type": "qwen2", "num_hidden_layers": 2}
VALUES = (None, True, 0, -1, 7, 3.5, 1e400, "x", "", [], [1], {}, {"a": 1})


@pytest.mark.parametrize("name", CONFIGS)
def test_defaults_are_those_of_transformers(name: str):
    audio, reason = read_audio(CONFIGS[name])
    theirs = transformers.AutoConfig.for_model(**copy.deepcopy(CONFIGS[name]))

    assert audio is not None
    assert not reason
    assert audio.family == name
    assert audio.audio_token_id == theirs.audio_token_id
    assert audio.num_mel_bins == theirs.audio_config.num_mel_bins
    assert audio.max_positions == theirs.audio_config.max_source_positions
    tower, config = audio.tower, theirs.audio_config
    assert (tower.hidden_size, tower.num_layers) == (config.hidden_size, config.num_hidden_layers)
    assert (tower.num_heads, tower.intermediate_size) == (config.num_attention_heads, config.intermediate_size)
    assert tower.head_dim * tower.num_heads == config.hidden_size
    assert tower.hidden_act == config.activation_function


def test_every_family_has_a_case():
    assert set(CONFIGS) == set(families.all_families().audio)


@pytest.mark.parametrize("name", CONFIGS)
def test_a_wrong_value_is_a_model_error_or_makes_deaf(name: str):
    inner = {"d_model", "encoder_layers", "encoder_attention_heads", "encoder_ffn_dim", "activation_function"}
    inner |= {"num_mel_bins", "max_source_positions", "scale_embedding"}
    outer = {"audio_token_index", "audio_token_id", "audio_config"}
    for inside, keys in ((True, inner), (False, outer)):
        for key in sorted(keys):
            for value in VALUES:
                config = copy.deepcopy(CONFIGS[name])
                (config["audio_config"] if inside else config)[key] = value
                try:
                    audio, reason = read_audio(config)
                except ModelError:
                    continue
                assert (audio is None) == bool(reason) or key == "audio_config"


@pytest.mark.parametrize("key", ["audio_token_id", "audio_token_index"])
def test_both_spellings_of_the_token_are_read(key: str):
    audio, _ = read_audio(CONFIGS["qwen2_audio"] | {key: 5})
    assert audio is not None
    assert audio.audio_token_id == 5


@pytest.mark.parametrize(
    ("model_type", "inner", "why"),
    [
        ("qwen2_audio", {"activation_function": "swish"}, "activation_function is 'swish'"),
        ("voxtral", {}, "audio of model type 'voxtral' is not supported; supported: qwen2_audio"),
    ],
)
def test_a_model_whose_ears_are_not_served_is_read_without_them(model_type: str, inner: dict[str, Any], why: str):
    model = parse_hf_config({"model_type": model_type, "audio_config": inner, "text_config": TEXT})

    assert model.audio is None
    assert why in model.audio_unsupported_reason
    assert not model.vision_unsupported_reason
    assert model.model_type == "qwen2"


def test_a_model_that_hears_is_a_text_model_with_ears():
    untied = {"tie_word_embeddings": False}
    config = CONFIGS["qwen2_audio"] | {"text_config": TEXT | untied} | untied
    model = parse_hf_config(config)

    assert model.audio is not None
    assert model.media is None
    assert not model.vision_unsupported_reason
    assert not model.audio_unsupported_reason
    assert model.model_type == "qwen2"
    assert not model.tie_word_embeddings
    assert parse_hf_config(model.as_file()) == model


def test_a_model_with_eyes_and_ears_that_are_not_served_has_both_reasons():
    text = {"model_type": "gemma3_text"}
    model = parse_hf_config(
        {"model_type": "gemma3n", "vision_config": {}, "audio_config": {}, "text_config": text}, origin="config.json"
    )

    assert (model.media, model.audio) == (None, None)
    assert "images of model type 'gemma3n'" in model.vision_unsupported_reason
    assert "audio of model type 'gemma3n'" in model.audio_unsupported_reason
