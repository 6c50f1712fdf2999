"""Configs of encoders: every spelling gives the same sizes, and what is not served is refused by the name of its key."""

from typing import Any

import pytest
import transformers

from headrace.checkpoint.families import all_families
from headrace.checkpoint.model_config import parse_hf_config
from headrace.errors import ModelError


@pytest.mark.parametrize("model_type", sorted(all_families().encoders))
def test_what_a_config_leaves_out_is_as_in_transformers(model_type: str):
    theirs = transformers.AutoConfig.for_model(model_type)

    ours = parse_hf_config({"model_type": model_type})

    assert ours.encoder is not None
    assert (ours.hidden_size, ours.num_layers, ours.num_q_heads, ours.vocab_size, ours.pad_token_id) == (
        theirs.hidden_size,
        theirs.num_hidden_layers,
        theirs.num_attention_heads,
        theirs.vocab_size,
        theirs.pad_token_id,
    )
    width = theirs.hidden_dim if model_type == "distilbert" else theirs.intermediate_size
    assert (ours.intermediate_size, ours.encoder.num_positions) == (width, theirs.max_position_embeddings)
    assert ours.max_position_embeddings == theirs.max_position_embeddings - ours.encoder.first_position
    assert ours.encoder.first_position == (2 if "roberta" in model_type or model_type == "camembert" else 0)


@pytest.mark.parametrize("model_type", sorted(all_families().encoders))
def test_a_config_that_transformers_writes_is_the_same_as_one_of_defaults(model_type: str):
    written = transformers.AutoConfig.for_model(model_type).to_dict()

    assert parse_hf_config(written).encoder == parse_hf_config({"model_type": model_type}).encoder


def test_modernbert_of_before_transformers_5_is_read_as_it_is_written_now():
    old = {
        "model_type": "modernbert",
        "num_hidden_layers": 5,
        "global_attn_every_n_layers": 2,
        "global_rope_theta": 80000.0,
        "local_rope_theta": 5000.0,
        "local_attention": 32,
    }
    now = transformers.AutoConfig.for_model(**old).to_dict()
    assert "rope_parameters" in now

    encoder = parse_hf_config(old).encoder

    assert encoder is not None
    assert encoder == parse_hf_config(now).encoder
    assert encoder.layer_types == ("full_attention", "sliding_attention") * 2 + ("full_attention",)
    assert encoder.rope is not None
    assert encoder.rope_local is not None
    assert (encoder.rope.theta, encoder.rope_local.theta, encoder.window) == (80000.0, 5000.0, 16)


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "relative positions": (
        {"model_type": "bert", "position_embedding_type": "relative_key"},
        "position_embedding_type",
    ),
    "a decoder": ({"model_type": "bert", "is_decoder": True}, "is_decoder"),
    "heads that do not fit": ({"model_type": "bert", "num_attention_heads": 7}, "7 heads"),
    "no epsilon": ({"model_type": "roberta", "layer_norm_eps": 0}, "layer_norm_eps"),
    "too few positions": ({"model_type": "roberta", "max_position_embeddings": 2}, "max_position_embeddings"),
    "another kind of layer": (
        {"model_type": "modernbert", "num_hidden_layers": 1, "layer_types": ["chunked_attention"]},
        "layer_types",
    ),
    "too few kinds of layers": ({"model_type": "modernbert", "layer_types": ["full_attention"]}, "layer_types"),
    "another pooling": ({"model_type": "modernbert", "classifier_pooling": "max"}, "classifier_pooling"),
    "an encoder that we do not have": ({"model_type": "deberta-v2"}, "encoders: bert, camembert"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_is_not_served_is_named(name: str):
    config, message = REFUSED[name]

    with pytest.raises(ModelError, match=message):
        parse_hf_config(config)
