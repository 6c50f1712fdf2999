"""Checkpoints whose matrices are float8 with scales beside them."""

import json

import pytest
import torch
from safetensors.torch import save_file

from headrace.checkpoint.quantized_formats import stored_format
from headrace.checkpoint.source import open_checkpoint
from headrace.errors import ModelError

BLOCKS = {"quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [128, 128]}
WHOLE = {"quant_method": "fp8"}


def save(folder, tensors, settings):
    config = {"model_type": "llama", "hidden_size": 64, "num_attention_heads": 4, "quantization_config": settings}
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")


def codes(n: int, k: int) -> torch.Tensor:
    return torch.randn(n, k, generator=torch.Generator().manual_seed(0)).to(torch.float8_e4m3fn)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_blocks_have_a_scale_each_and_the_last_ones_may_be_smaller(tmp_path, dtype):
    values, scales = codes(200, 300), torch.tensor([[1.0, 2.0, 0.5], [0.25, 4.0, 8.0]], dtype=dtype)
    norm = torch.ones(64, dtype=torch.bfloat16)
    save(tmp_path, {"a.weight": values, "a.weight_scale_inv": scales, "norm.weight": norm}, BLOCKS)

    checkpoint = open_checkpoint(tmp_path)

    assert sorted(checkpoint.tensor_names()) == ["a.weight", "norm.weight"]
    assert checkpoint.total_bytes == 200 * 300 * 4 + 64 * 2
    got = checkpoint.tensor("a.weight")
    want = torch.empty(200, 300)
    for i in range(200):
        for j in (0, 127, 128, 255, 256, 299):
            want[i, j] = values[i, j].float() * scales[i // 128, j // 128].float()
            assert got[i, j] == want[i, j]
    assert torch.equal(checkpoint.tensor("norm.weight"), norm)


def test_a_matrix_may_have_one_scale(tmp_path):
    save(tmp_path, {"a.weight": codes(16, 32), "a.weight_scale": torch.tensor(0.5)}, WHOLE)

    assert torch.equal(open_checkpoint(tmp_path).tensor("a.weight"), codes(16, 32).float() * 0.5)


@pytest.mark.parametrize(
    ("tensors", "settings", "message"),
    [
        ({"a.weight": codes(16, 32)}, BLOCKS, "a.weight is F8_E4M3 without the scales"),
        (
            {"a.weight": codes(16, 32), "a.weight_scale_inv": torch.ones(2, 1)},
            BLOCKS,
            r"is \[2, 1\], expected \[1, 1\]",
        ),
        ({"a.weight_scale_inv": torch.ones(1, 1)}, BLOCKS, "layer a has no weight"),
        ({"a.weight": codes(16, 32), "a.weight_scale": torch.ones(5)}, WHOLE, "one for each of 16 rows"),
    ],
)
def test_parts_that_do_not_fit_are_refused(tmp_path, tensors, settings, message):
    save(tmp_path, tensors, settings)

    with pytest.raises(ModelError, match=message):
        open_checkpoint(tmp_path).tensor("a.weight")


@pytest.mark.parametrize(
    ("change", "word"), [({"activation_scheme": "no"}, "no"), ({"weight_block_size": [0, 1]}, "weight_block")]
)
def test_settings_that_are_not_served_are_refused_by_name(change, word):
    with pytest.raises(ModelError, match=word):
        stored_format({**BLOCKS, **change})
