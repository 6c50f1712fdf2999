"""Checkpoints are read whole and exactly, or refused naming the file and the tensor."""

import json
from dataclasses import replace

import gguf
import numpy as np
import pytest
import torch
from safetensors.torch import save_file

from headrace.checkpoint.names import resolve_model
from headrace.checkpoint.source import dummy_checkpoint, open_checkpoint
from headrace.config.server_args import ServerArgs
from headrace.errors import ModelError
from headrace.execution.model_source import open_model, read_model_config
from headrace.processes.model_files import open_tokenizer
from headrace.text.tokenizers import load_tokenizer

CONFIG = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 1,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 40,
    "tie_word_embeddings": True,
}


def tiny_weights():
    generator = torch.Generator().manual_seed(3)
    return {
        "model.embed_tokens.weight": torch.randn(40, 64, generator=generator),
        "model.norm.weight": torch.ones(64, dtype=torch.bfloat16),
        "model.layers.0.mlp.up_proj.weight": torch.randn(96, 64, generator=generator).half(),
    }


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    save_file(tiny_weights(), tmp_path / "model.safetensors")
    return tmp_path


@pytest.fixture
def sharded(tmp_path):
    (tmp_path / "config.json").write_text(json.dumps(CONFIG))
    weight_map = {}
    for number, (name, tensor) in enumerate(tiny_weights().items(), start=1):
        file = f"model-{number:05}-of-00003.safetensors"
        save_file({name: tensor}, tmp_path / file)
        weight_map[name] = file
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return tmp_path


@pytest.mark.parametrize("kind", ["folder", "sharded"])
def test_every_tensor_comes_once_with_its_values_and_dtype(kind, request):
    checkpoint = open_checkpoint(request.getfixturevalue(kind))

    pairs = list(checkpoint.iter_tensors(check_finite=True))

    assert [name for name, _ in pairs] == checkpoint.tensor_names()
    assert len(pairs) == 3
    for name, tensor in pairs:
        want = tiny_weights()[name]
        assert tensor.dtype == want.dtype
        assert torch.equal(tensor, want)
        assert checkpoint.shape(name) == tuple(want.shape)
    assert checkpoint.total_bytes == sum(tensor.nbytes for _, tensor in pairs)


def test_writing_to_a_loaded_tensor_leaves_the_file_alone(folder):
    before = (folder / "model.safetensors").read_bytes()

    for _, tensor in open_checkpoint(folder).iter_tensors():
        tensor.zero_()

    assert (folder / "model.safetensors").read_bytes() == before


def test_every_truncation_is_refused_naming_the_file(folder):
    file = folder / "model.safetensors"
    whole = file.read_bytes()
    for size in range(0, len(whole), 509):
        file.write_bytes(whole[:size])
        with pytest.raises(ModelError, match=r"model\.safetensors"):
            open_checkpoint(folder)


def test_a_truncated_tensor_is_named(folder):
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-1])

    with pytest.raises(ModelError, match=r"model\.safetensors.*tensor model\.\S+ lacks 1 of its"):
        open_checkpoint(folder)


def write_safetensors(path, header, data=b""):
    text = json.dumps(header).encode() if isinstance(header, dict) else header
    path.write_bytes(len(text).to_bytes(8, "little") + text + data)


@pytest.mark.parametrize(
    ("header", "data", "why"),
    [
        (b"not json", b"", "not JSON"),
        (b"[1]", b"", "not a JSON object"),
        ({"w": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}, bytes(4), "w of F32"),
        ({"w": {"dtype": "F31", "shape": [1], "data_offsets": [0, 4]}}, bytes(4), "dtype F31"),
        ({"w": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}, bytes(4), "shape"),
        ({"w": {"dtype": "F32", "shape": [1], "data_offsets": [4, 8]}}, bytes(8), "does not start"),
        ({"w": {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}}, bytes(9), "5 bytes follow"),
        ({"w": {"dtype": "F32", "shape": [1]}}, bytes(4), "malformed"),
        ({"w": 1}, b"", "malformed"),
        (
            {
                "v": {"dtype": "F32", "shape": [2], "data_offsets": [0, 8]},
                "w": {"dtype": "F32", "shape": [2], "data_offsets": [4, 12]},
            },
            bytes(12),
            "w does not start where tensor v ends",
        ),
        (
            b'{"w":{"dtype":"U8","shape":[0],"data_offsets":[0,0]},"w":{"dtype":"U8","shape":[0],"data_offsets":[0,0]}}',
            b"",
            "twice",
        ),
    ],
)
def test_a_broken_header_is_refused_with_the_reason(folder, header, data, why):
    write_safetensors(folder / "model.safetensors", header, data)

    with pytest.raises(ModelError, match=why):
        open_checkpoint(folder)


def test_a_missing_shard_is_named(sharded):
    (sharded / "model-00002-of-00003.safetensors").unlink()

    with pytest.raises(ModelError, match=r"model-00002-of-00003\.safetensors is missing"):
        open_checkpoint(sharded)


def test_a_missing_index_is_named(sharded):
    (sharded / "model.safetensors.index.json").unlink()

    with pytest.raises(ModelError, match=r"index\.json is missing"):
        open_checkpoint(sharded)


def test_a_tensor_that_only_the_index_has_is_named(sharded):
    file = sharded / "model.safetensors.index.json"
    index = json.loads(file.read_text())
    index["weight_map"]["model.layers.0.lost.weight"] = "model-00001-of-00003.safetensors"
    file.write_text(json.dumps(index))

    with pytest.raises(
        ModelError, match=r"model-00001-of-00003\.safetensors has no tensor model\.layers\.0\.lost\.weight"
    ):
        open_checkpoint(sharded)


def test_a_tensor_in_two_shards_is_named(sharded):
    save_file(tiny_weights(), sharded / "model-00003-of-00003.safetensors")

    with pytest.raises(ModelError, match=r"tensor model\.embed_tokens\.weight is in both"):
        open_checkpoint(sharded)


@pytest.mark.parametrize("target", ["../outside.safetensors", "/etc/passwd", "weights.bin"])
def test_an_index_cannot_point_outside_the_folder(sharded, target):
    (sharded / "model.safetensors.index.json").write_text(json.dumps({"weight_map": {"w": target}}))

    with pytest.raises(ModelError, match="not a safetensors file of the folder"):
        open_checkpoint(sharded)


def test_pickled_weights_are_refused(folder):
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")

    with pytest.raises(ModelError, match="pickled"):
        open_checkpoint(folder)


@pytest.mark.parametrize("value", [float("nan"), float("inf"), -float("inf")])
@pytest.mark.parametrize("name", list(tiny_weights()))
def test_a_number_that_is_not_finite_is_found(folder, name, value):
    weights = tiny_weights()
    weights[name].view(-1)[5] = value
    save_file(weights, folder / "model.safetensors")

    with pytest.raises(ModelError, match=f"model.safetensors: tensor {name} contains NaN or infinity"):
        list(open_checkpoint(folder).iter_tensors(check_finite=True))


def test_a_zero_filled_matrix_is_found_and_a_zero_row_is_not(folder):
    weights = tiny_weights()
    weights["model.embed_tokens.weight"][0] = 0
    save_file(weights, folder / "model.safetensors")
    assert len(list(open_checkpoint(folder).iter_tensors())) == 3

    weights["model.embed_tokens.weight"][:] = 0
    save_file(weights, folder / "model.safetensors")
    with pytest.raises(ModelError, match=r"model\.embed_tokens\.weight.*zero-filled"):
        list(open_checkpoint(folder).iter_tensors())


def test_a_dummy_has_a_config_and_no_tensors(folder):
    for path in (folder, folder / "config.json"):
        checkpoint = dummy_checkpoint(path)
        assert checkpoint.config.hidden_size == 64
        assert list(checkpoint.iter_tensors()) == []


def test_a_path_that_is_no_checkpoint_says_what_is_expected(tmp_path):
    (tmp_path / "notes.txt").write_text("hello")
    for path, why in (
        (tmp_path, "neither config.json"),
        (tmp_path / "notes.txt", "neither a folder"),
        (tmp_path / "x", "no checkpoint"),
    ):
        with pytest.raises(ModelError, match=why):
            open_checkpoint(path)


# --- GGUF


def llama_cpp_order(weight, num_heads):
    """The reordering of llama.cpp's converter for q and k of the llama architecture."""
    rows = weight.shape[0]
    return weight.reshape(num_heads, 2, rows // num_heads // 2, -1).swapaxes(1, 2).reshape(weight.shape)


def write_model(path, arch, tensors, metadata):
    writer = gguf.GGUFWriter(path, arch)
    for key, value in {
        "block_count": 1,
        "context_length": 128,
        "embedding_length": 64,
        "feed_forward_length": 96,
    }.items():
        writer.add_uint32(f"{arch}.{key}", value)
    writer.add_uint32(f"{arch}.attention.head_count", 4)
    writer.add_uint32(f"{arch}.attention.head_count_kv", 2)
    writer.add_float32(f"{arch}.attention.layer_norm_rms_epsilon", 1e-6)
    for key, value in metadata.items():
        writer.add_uint32(f"{arch}.{key}", value)
    for name, (values, kind) in tensors.items():
        data = gguf.quants.quantize(values.astype(np.float32), gguf.GGMLQuantizationType[kind])
        writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType[kind])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


@pytest.mark.parametrize("kind", ["F32", "F16", "BF16", "Q8_0"])
def test_llama_q_and_k_come_in_hugging_face_order(tmp_path, kind):
    rng = np.random.default_rng(1)
    query, key = rng.standard_normal((64, 64)), rng.standard_normal((32, 64))
    tensors = {
        "token_embd.weight": (rng.standard_normal((40, 64)), kind),
        "blk.0.attn_q.weight": (llama_cpp_order(query, 4), kind),
        "blk.0.attn_k.weight": (llama_cpp_order(key, 2), kind),
        "blk.0.attn_q.bias": (llama_cpp_order(query[:, 0], 4), "F32"),
    }
    checkpoint = open_checkpoint(write_model(tmp_path / "m.gguf", "llama", tensors, {}))

    loaded = dict(checkpoint.iter_tensors())

    tolerance = {"F32": 1e-6, "F16": 2e-3, "BF16": 2e-2, "Q8_0": 2e-2}[kind]  # half a step of the type at |x| < 4
    names = {"q_proj.weight": query, "k_proj.weight": key, "q_proj.bias": query[:, 0]}
    for name, want in names.items():
        got = loaded[f"model.layers.0.self_attn.{name}"]
        np.testing.assert_allclose(got.float().numpy(), want, atol=tolerance)
    assert checkpoint.config.attention_bias
    matrix = checkpoint.quantized("model.layers.0.self_attn.q_proj.weight")
    if kind == "Q8_0":
        assert matrix is not None
        np.testing.assert_array_equal(
            matrix.dequantize().numpy(), loaded["model.layers.0.self_attn.q_proj.weight"].numpy()
        )
    else:
        assert matrix is None


def test_qwen2_is_not_reordered_and_untied_when_it_has_an_output_matrix(tmp_path):
    query = np.random.default_rng(1).standard_normal((64, 64))
    tensors = {
        "token_embd.weight": (query, "F32"),
        "output.weight": (query, "F32"),
        "blk.0.attn_q.weight": (query, "F32"),
    }
    checkpoint = open_checkpoint(write_model(tmp_path / "m.gguf", "qwen2", tensors, {}))

    np.testing.assert_allclose(checkpoint.tensor("model.layers.0.self_attn.q_proj.weight").numpy(), query, rtol=1e-6)
    assert not checkpoint.config.tie_word_embeddings
    assert checkpoint.tensor_names()[1] == "lm_head.weight"


def test_gemma3_norms_lose_the_one_that_the_file_adds(tmp_path):
    embedding = np.random.default_rng(1).standard_normal((40, 64))
    parts = ["attn_norm", "attn_q_norm", "attn_k_norm", "post_attention_norm", "ffn_norm", "post_ffw_norm"]
    tensors = {"token_embd.weight": (embedding, "F32"), "output_norm.weight": (np.full(64, 1.5), "F32")}
    tensors |= {f"blk.0.{part}.weight": (np.full(64, 1.25), "F32") for part in parts}
    metadata = {"attention.sliding_window": 16, "attention.key_length": 64, "attention.value_length": 64}
    checkpoint = open_checkpoint(write_model(tmp_path / "m.gguf", "gemma3", tensors, metadata))

    loaded = dict(checkpoint.iter_tensors())

    assert torch.equal(loaded["model.norm.weight"], torch.full((64,), 0.5))
    layer = {name.removeprefix("model.layers.0.") for name in loaded if "layers" in name}
    assert layer == {
        "input_layernorm.weight",
        "post_attention_layernorm.weight",
        "pre_feedforward_layernorm.weight",
        "post_feedforward_layernorm.weight",
        "self_attn.q_norm.weight",
        "self_attn.k_norm.weight",
    }
    assert torch.equal(loaded["model.layers.0.input_layernorm.weight"], torch.full((64,), 0.25))


def test_stacked_experts_come_one_by_one(tmp_path):
    rng = np.random.default_rng(1)
    stacked = rng.standard_normal((3, 32, 64))
    tensors = {
        "token_embd.weight": (rng.standard_normal((40, 64)), "F32"),
        "blk.0.ffn_up_exps.weight": (stacked, "Q8_0"),
    }
    metadata = {"expert_count": 3, "expert_used_count": 2, "expert_feed_forward_length": 32}
    checkpoint = open_checkpoint(write_model(tmp_path / "m.gguf", "qwen3moe", tensors, metadata))

    for expert in range(3):
        name = f"model.layers.0.mlp.experts.{expert}.up_proj.weight"
        assert checkpoint.shape(name) == (32, 64)
        np.testing.assert_allclose(checkpoint.tensor(name).numpy(), stacked[expert], atol=2e-2)  # Q8_0 at |x| < 4
        matrix = checkpoint.quantized(name)
        assert matrix is not None
        assert (matrix.scheme, matrix.shape) == ("int8", (32, 64))
    assert checkpoint.config.moe is not None
    assert checkpoint.config.moe.num_experts == 3


def llama3_divisors(factor):
    wavelength = 2 * np.pi * 10000.0 ** (np.arange(0, 16, 2) / 16)
    smooth = np.clip((8192 / wavelength - 1) / 3, 0, 1)
    return 1 / ((1 - smooth) / factor + smooth)


def test_the_rope_factors_of_llama3_become_its_config(tmp_path):
    embedding = np.random.default_rng(1).standard_normal((40, 64))
    tensors = {"token_embd.weight": (embedding, "F32"), "rope_freqs.weight": (llama3_divisors(8.0), "F32")}
    path = write_model(tmp_path / "m.gguf", "llama", tensors, {})

    checkpoint = open_checkpoint(path)

    assert checkpoint.config.rope.rope_type == "llama3"
    assert checkpoint.config.rope.scaling["factor"] == 8.0
    assert checkpoint.tensor_names() == ["model.embed_tokens.weight"]


def test_unknown_rope_factors_are_refused(tmp_path):
    embedding = np.random.default_rng(1).standard_normal((40, 64))
    tensors = {"token_embd.weight": (embedding, "F32"), "rope_freqs.weight": (np.arange(1.0, 9.0), "F32")}

    with pytest.raises(ModelError, match=r"rope_freqs\.weight"):
        open_checkpoint(write_model(tmp_path / "m.gguf", "llama", tensors, {}))


def test_an_unknown_tensor_or_architecture_is_refused_by_name(tmp_path):
    embedding = np.random.default_rng(1).standard_normal((40, 64))
    tensors = {"token_embd.weight": (embedding, "F32"), "blk.0.odd.weight": (embedding, "F32")}
    with pytest.raises(ModelError, match=r"blk\.0\.odd\.weight"):
        open_checkpoint(write_model(tmp_path / "m.gguf", "llama", tensors, {}))
    with pytest.raises(ModelError, match="'rwkv'"):
        open_checkpoint(write_model(tmp_path / "n.gguf", "rwkv", tensors, {}))


def test_smollm2_opens_by_name_with_its_shapes():
    checkpoint = open_checkpoint(resolve_model("smollm2"))
    config = checkpoint.config

    assert (config.model_type, config.num_layers, config.hidden_size) == ("llama", 30, 576)
    assert (config.num_q_heads, config.num_kv_heads, config.head_dim) == (9, 3, 64)
    assert (config.rope.theta, config.rms_norm_eps, config.tie_word_embeddings) == (100000.0, 1e-5, True)
    assert (config.eos_token_ids, config.bos_token_id, config.vocab_size) == ((2, 0, 4), 1, 49152)
    assert len(checkpoint.tensor_names()) == 272
    assert checkpoint.shape("model.embed_tokens.weight") == (49152, 576)
    matrix = checkpoint.quantized("model.layers.3.self_attn.q_proj.weight")
    assert matrix is not None
    assert (matrix.scheme, matrix.shape) == ("int4", (576, 576))


@pytest.mark.parametrize("where", ["sha256-1f7e", "folder"])
def test_a_gguf_file_needs_no_suffix_and_may_be_alone_in_a_folder(where, tmp_path):
    """Ollama's blobs are named by their sum. Every reader of a model sees the same file."""
    file = resolve_model("smollm2")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "model.gguf").symlink_to(file)
    (tmp_path / "folder" / "mmproj-model.gguf").write_bytes(b"GGUF")
    (tmp_path / "sha256-1f7e").symlink_to(file)
    args = ServerArgs(model_path=str(tmp_path / where))

    assert read_model_config(args).num_layers == 30
    assert open_tokenizer(args).encode("The") == open_tokenizer(ServerArgs(model_path=str(file))).encode("The")
    assert open_model(args).kind == "gguf"
    assert open_model(replace(args, load_format="dummy")).config.num_layers == 30


def test_a_folder_with_several_gguf_files_lists_them(tmp_path):
    for name in ("a-Q4_0.gguf", "a-Q8_0.gguf"):
        (tmp_path / name).write_bytes(b"GGUF")

    for read in (open_checkpoint, lambda path: resolve_model(str(path)), load_tokenizer):
        with pytest.raises(ModelError, match=r"2 GGUF files.*a-Q4_0\.gguf, a-Q8_0\.gguf"):
            read(tmp_path)
