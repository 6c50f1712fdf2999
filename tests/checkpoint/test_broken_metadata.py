"""Files with wrong values in them: always a ModelError in one line, never another error."""

import random
import struct
from collections.abc import Callable
from typing import TypeVar

import gguf
import numpy as np
import pytest

from headrace.checkpoint.model_config import load_model_config, parse_hf_config
from headrace.checkpoint.quantized_formats import stored_format
from headrace.checkpoint.source import open_checkpoint
from headrace.errors import ModelError
from headrace.text.tokenizers import load_tokenizer

T = TypeVar("T")
CONFIGS = {
    "llama": {"model_type": "llama", "num_hidden_layers": 2},
    "gemma3_text": {"model_type": "gemma3_text", "sliding_window": 16},
    "qwen2": {"model_type": "qwen2", "use_sliding_window": True, "sliding_window": 5},
    "qwen3_moe": {"model_type": "qwen3_moe"},
}
KEYS = (
    *(
        "model_type",
        "architectures",
        "text_config",
        "vocab_size",
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
    ),
    *(
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "max_position_embeddings",
        "rms_norm_eps",
        "hidden_act",
    ),
    *("tie_word_embeddings", "sliding_window", "layer_types", "rope_parameters", "rope_scaling", "rope_theta"),
    *("rope_local_base_freq", "partial_rotary_factor", "bos_token_id", "eos_token_id", "pad_token_id", "num_experts"),
    *("num_local_experts", "num_experts_per_tok", "moe_intermediate_size", "norm_topk_prob", "decoder_sparse_step"),
    *("mlp_only_layers", "shared_expert_intermediate_size", "dtype", "attention_bias", "qkv_bias", "mlp_bias"),
    *("attn_logit_softcapping", "query_pre_attn_scalar", "use_sliding_window", "max_window_layers"),
    *("sliding_window_pattern", "quantization_config", "original_max_position_embeddings"),
)
VALUES = (
    *(
        None,
        5,
        -1,
        0,
        "x",
        "",
        [],
        [1],
        ["a"],
        {},
        {"a": 1},
        True,
        False,
        1.5,
        1 << 70,
        -(1 << 70),
        10**400,
        [None],
        [[1]],
    ),
    *(float("inf"), float("nan"), {"type": 5}, {"rope_type": []}, {"rope_type": "linear", "factor": 10**400}),
    *({"rope_theta": "x"}, {"rope_theta": 0}, {"full_attention": 3}, {"full_attention": {"rope_theta": []}}),
)


def refusal(use: Callable[[T], object], given: T) -> str:
    """The message of the ModelError; "" when there is none. Any other error goes on."""
    try:
        use(given)
    except ModelError as error:
        return error.message
    return ""


def read(raw: dict[str, object]) -> None:
    """All that is made of a config.json."""
    config = parse_hf_config(raw)
    stored_format(config.quantization)
    assert config.attention_scale > 0


@pytest.mark.parametrize("family", CONFIGS)
@pytest.mark.parametrize("key", KEYS)
def test_any_value_of_any_key_makes_a_model_or_one_line(family: str, key: str):
    for value in VALUES:
        line = refusal(read, CONFIGS[family] | {key: value})
        assert "\n" not in line, (value, line)


@pytest.mark.parametrize(
    ("change", "line"),
    [
        ({"architectures": 5}, "config.json: architectures is 5; expected a list of names"),
        ({"quantization_config": [1]}, r"config.json: quantization_config is \[1\]; expected an object"),
        (
            {"num_experts": 8, "num_experts_per_tok": 2, "mlp_only_layers": 3},
            "mlp_only_layers is 3; expected a list of numbers",
        ),
        ({"partial_rotary_factor": "x"}, "partial_rotary_factor is 'x'; expected a finite number"),
        ({"rope_theta": 0}, "rope_theta is 0; expected a number above 0"),
        ({"rope_theta": 10**400}, "rope_theta is 1000.*; expected a finite number"),
        ({"rope_scaling": {"type": "yarn", "factor": 2.0, "beta_fast": []}}, "beta_fast of the rope parameters is "),
        (
            {"rope_scaling": {"type": "yarn", "factor": 2.0, "beta_fast": "x"}},
            "beta_fast of the rope parameters is 'x'",
        ),
        ({"head_dim": 1 << 30}, "head_dim is 1073741824; heads of more than 4096"),
        ({"query_pre_attn_scalar": -1}, "query_pre_attn_scalar is -1; expected a number above 0"),
    ],
)
def test_the_line_names_file_and_key(change, line):
    with pytest.raises(ModelError, match=line):
        parse_hf_config(CONFIGS["llama"] | change)


@pytest.mark.parametrize(
    ("config", "line"),
    [
        (
            {"model_type": "olmo2", "hidden_size": "x"},
            "config.json: transformers does not accept it as a config of olmo2: .*hidden_size",
        ),
        (
            {"model_type": "gpt2", "n_head": [4]},
            "config.json: transformers does not accept it as a config of gpt2: .*n_head",
        ),
        ({"model_type": "granite", "rope_parameters": 5}, r"config\.json"),
    ],
)
def test_what_the_config_classes_of_transformers_refuse_is_one_line(config, line):
    with pytest.raises(ModelError, match=line) as refusal:
        parse_hf_config(config)
    assert "\n" not in refusal.value.message


def test_infinity_as_transformers_writes_it_is_read(tmp_path):
    (tmp_path / "config.json").write_text(
        '{"model_type": "llama", "time_step_limit": [0.0, {"__float__": "Infinity"}], "odd": {"__float__": "x"}}'
    )

    raw = load_model_config(tmp_path).raw

    assert (raw["time_step_limit"], raw["odd"]) == ([0.0, float("inf")], {"__float__": "x"})


_METADATA = {
    "llama.block_count": 1,
    "llama.embedding_length": 8,
    "llama.feed_forward_length": 16,
    "llama.context_length": 64,
    "llama.attention.head_count": 2,
    "llama.attention.head_count_kv": 2,
    "llama.attention.key_length": 4,
    "llama.attention.value_length": 4,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "llama.rope.freq_base": 10000.0,
    "llama.rope.dimension_count": 4,
    "llama.rope.scaling.type": "yarn",
    "llama.rope.scaling.factor": 2.0,
    "llama.rope.scaling.original_context_length": 32,
    "llama.expert_count": 0,
    "tokenizer.ggml.model": "gpt2",
    "tokenizer.ggml.pre": "smollm",
    "tokenizer.ggml.tokens": ["a", "b", "ab", "<s>"],
    "tokenizer.ggml.token_type": [1, 1, 1, 3],
    "tokenizer.ggml.merges": ["a b"],
    "tokenizer.ggml.bos_token_id": 3,
    "tokenizer.ggml.eos_token_id": 3,
    "tokenizer.ggml.padding_token_id": 3,
    "tokenizer.ggml.add_bos_token": False,
    "tokenizer.ggml.add_space_prefix": False,
    "tokenizer.chat_template": "{{ messages }}",
    "general.name": "n",
    "general.basename": "b",
    "general.alignment": 32,
    "general.sampling.temp": 0.5,
}


def gguf_file(path, changes=None):
    """A llama of one layer without its layer, with a tokenizer; good enough to be opened."""
    writer = gguf.GGUFWriter(path, "llama")
    kinds = {str: "string", bool: "bool", int: "int64", float: "float32", list: "array"}
    for key, value in (_METADATA | (changes or {})).items():
        getattr(writer, f"add_{kinds[type(value)]}")(key, value)
    writer.add_tensor("token_embd.weight", np.ones((4, 8), np.float32))
    writer.add_tensor("output_norm.weight", np.ones(8, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def use(path):
    """Everything that a start reads of the file before the model is built."""
    checkpoint = open_checkpoint(path)
    for name in checkpoint.tensor_names():
        checkpoint.tensor(name)
    load_tokenizer(path)


def test_the_gguf_file_that_is_broken_below_is_a_good_one(tmp_path):
    use(gguf_file(tmp_path / "m.gguf"))


@pytest.mark.parametrize("key", _METADATA)
def test_any_type_of_any_gguf_key_makes_a_model_or_one_line(key, tmp_path):
    for value in ("x", "", 0, -1, 7, 1 << 40, 1.5, float("nan"), True, [1, 2], ["a", "b"], [[1], [2]], [1.5]):
        path = gguf_file(tmp_path / "m.gguf", {key: value})
        line = refusal(use, path)
        assert not line or ("m.gguf" in line and "\n" not in line), (value, line)


@pytest.mark.parametrize("length", [2**63, 2**64 - 1, 2**63 - 1, 2**32])
@pytest.mark.parametrize("kind", [4, 8, 9])
def test_lengths_of_arrays_that_no_file_has_are_refused(length, kind, tmp_path):
    key = b"x.list"
    head = struct.pack("<4sIQQ", b"GGUF", 3, 0, 1) + struct.pack("<Q", len(key)) + key
    path = tmp_path / "m.gguf"
    path.write_bytes(head + struct.pack("<IIQ", 9, kind, length) + bytes(64))
    with pytest.raises(ModelError, match=r"m\.gguf is not a usable GGUF file"):
        open_checkpoint(path)

    # One string of that length in an array of one.
    path.write_bytes(head + struct.pack("<IIQQ", 9, 8, 1, length) + bytes(64))
    with pytest.raises(ModelError, match=r"m\.gguf is not a usable GGUF file"):
        open_checkpoint(path)


def test_any_number_anywhere_in_a_gguf_header_makes_a_model_or_one_line(tmp_path):
    whole = gguf_file(tmp_path / "good.gguf").read_bytes()
    draw, path = random.Random(5), tmp_path / "m.gguf"
    numbers = (0, 1, 255, 2**31 - 1, 2**31, 2**32 - 1, 2**63 - 1, 2**63, 2**64 - 1)
    for _ in range(800):
        broken, at, size = bytearray(whole), draw.randrange(4, len(whole) - 200), draw.choice((4, 8))
        broken[at : at + size] = struct.pack("<Q", draw.choice(numbers))[:size]
        path.write_bytes(broken)
        assert "\n" not in refusal(use, path)
