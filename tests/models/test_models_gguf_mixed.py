"""Models of GGUF files whose matrices have different types: within a product, beside floats, and over two ranks."""

from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from model_harness import open_runner
from test_models_gguf_types import (
    GGUF_NAMES,
    HIDDEN,
    MATRICES,
    PROMPT,
    TOLERANCE,
    VOCAB,
    needs_native,
    save_gguf,
    transformers_logits,
)

from headrace import Engine
from headrace.checkpoint.source import open_checkpoint
from headrace.distributed.base import Shard
from headrace.execution.load_weights import straddled
from headrace.models.registry import model_class_for

SAMPLING = {"temperature": 0, "max_new_tokens": 6, "ignore_eos": True}
OPTIONS = {"quantization": "gguf", "skip_tokenizer_init": True, "max_total_tokens": 512, "log_level": "error"}


def kinds(*names: str) -> list[gguf.GGMLQuantizationType]:
    return [gguf.GGMLQuantizationType[name] for name in names]


@pytest.mark.parametrize(
    "names",
    [
        ("Q6_K", "Q4_K", "Q5_K", "Q6_K", "IQ4_XS"),
        ("Q5_K", "IQ2_XXS", "IQ3_S", "Q5_K", "IQ3_XXS"),
        ("Q4_K", "F16", "Q8_0", "BF16"),
    ],
    ids="-".join,
)
def test_a_file_that_mixes_types_is_dequantised_to_its_values(names: tuple[str, ...], tmp_path: Path):
    values = save_gguf(tmp_path / "model.gguf", *kinds(*names))

    got = open_runner(tmp_path / "model.gguf", "torch_native").chunks(0, PROMPT, [])

    want = transformers_logits(values)
    torch.testing.assert_close(got, want, atol=TOLERANCE * float(want.abs().max()), rtol=TOLERANCE)


@needs_native
def test_a_file_with_types_without_kernels_in_one_product_runs_in_its_own_bits(tmp_path: Path):
    """As files of two to three bits mix them: q, k and v of IQ2_XXS, IQ3_S and Q5_K."""
    values = save_gguf(tmp_path / "model.gguf", *kinds("Q5_K", "IQ2_XXS", "IQ3_S", "Q5_K", "IQ3_XXS"))

    runner = open_runner(tmp_path / "model.gguf", "torch_native", quantization="gguf")

    want, got = transformers_logits(values), runner.chunks(0, PROMPT, [])
    assert float((got - want).norm() / want.norm()) < 0.05
    for weight in runner.model.weights():
        if weight.name.endswith(("q_proj.weight", "k_proj.weight", "v_proj.weight")):
            assert torch.equal(weight.read(), values[GGUF_NAMES[weight.name.split(".")[-2]]]), weight.name


@needs_native
def test_an_embedding_of_floats_beside_an_output_projection_of_its_own(tmp_path: Path):
    """Lookups and logits each read the table that is theirs."""
    path, head = tmp_path / "model.gguf", torch.randn(VOCAB, HIDDEN, generator=torch.Generator().manual_seed(1)).half()
    values = save_gguf(path, *kinds("F16", "Q4_K"))
    with_tensor(path, tmp_path / "untied.gguf", "output.weight", head.numpy())

    runner = open_runner(tmp_path / "untied.gguf", "torch_native", quantization="gguf")

    floats = open_runner(tmp_path / "untied.gguf", "torch_native")
    want, got = floats.chunks(0, PROMPT, []), runner.chunks(0, PROMPT, [])
    assert float((got - want).norm() / want.norm()) < 0.05
    weights = {weight.name: weight for weight in runner.model.weights()}
    assert torch.equal(weights["model.embed_tokens.weight"].read().float(), values["token_embd.weight"])
    assert torch.equal(weights["lm_head.weight"].read().float(), head.float())


def with_tensor(path: Path, copy: Path, name: str, values: np.ndarray) -> None:
    """A copy of a file with one tensor more."""
    writer, reader = gguf.GGUFWriter(copy, "qwen2"), gguf.GGUFReader(path)
    for key, field in reader.fields.items():
        if not key.startswith("GGUF.") and key != "general.architecture":
            writer.add_key_value(key, field.contents(), field.types[0])
    for tensor in reader.tensors:
        writer.add_tensor(tensor.name, tensor.data, raw_dtype=tensor.tensor_type)
    writer.add_tensor(name, values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


@needs_native
def test_two_ranks_in_the_bits_of_a_file_answer_as_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    """Half of what attention gives is half a block of 256, so that matrix has blocks of 32."""
    monkeypatch.setitem(MATRICES, "token_embd", (2 * VOCAB, HIDDEN))
    path = tmp_path / "model.gguf"
    save_gguf(path, *kinds("Q6_K", "Q4_K", "Q5_K", "Q6_K", "Q5_0", "Q3_K", "Q2_K", "Q4_K"))
    found = []
    for size in (1, 2):
        with Engine(
            model_path=str(path), tp_size=size, num_threads=size, single_process=size == 1, **OPTIONS
        ) as engine:
            answer = engine.generate(input_ids=PROMPT, sampling_params=SAMPLING, return_logprob=True)
            found.append((answer["output_ids"], answer["meta_info"]["output_token_logprobs"]))

    assert found[0][0] == found[1][0]
    for one, two in zip(found[0][1], found[1][1], strict=True):
        assert one[0] == pytest.approx(two[0], abs=0.05)


@needs_native
def test_a_block_that_two_ranks_share_is_dequantised(tmp_path: Path, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setitem(MATRICES, "token_embd", (2 * VOCAB, HIDDEN))
    values = save_gguf(tmp_path / "model.gguf", *kinds("Q4_K"))

    model = open_runner(tmp_path / "model.gguf", "torch_native", quantization="gguf", shard=Shard(1, 2)).model

    weights = {weight.name.split(".")[-2]: weight for weight in model.weights()}
    whole = values["blk.0.attn_output.weight"]
    assert torch.equal(weights["o_proj"].read(), whole[:, whole.shape[1] // 2 :])
    checkpoint = open_checkpoint(tmp_path / "model.gguf")
    assert straddled(model.weights(), checkpoint, model_class_for(checkpoint.config, "auto")) == {"Q4_K": 1}


@needs_native
def test_weights_in_the_bits_of_a_file_are_not_saved(tmp_path: Path):
    path = tmp_path / "model.gguf"
    save_gguf(path, *kinds("Q4_K"))
    with Engine(model_path=str(path), single_process=True, save_dir=str(tmp_path), **OPTIONS) as engine:
        saved, why = engine.save_sharded_state("copy")

    assert not saved
    assert "quantised to gguf when they were loaded cannot be saved" in why
