"""Vision encoders beside GGUF models: which file is taken, and what is refused. What they compute: `tests/e2e/test_e2e_mmproj.py`."""

import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from test_gguf import write_gguf

from headrace.checkpoint.files import best_mmprojs
from headrace.checkpoint.gguf import GgufFile
from headrace.checkpoint.gguf_mmproj import AUTO, media_files
from headrace.checkpoint.source import dummy_checkpoint, open_checkpoint
from headrace.errors import ModelError

SIZE, TOWER = 64, 32
TEXT: dict[str, Any] = {
    "llama.context_length": 128,
    "llama.embedding_length": SIZE,
    "llama.block_count": 1,
    "llama.feed_forward_length": 96,
    "llama.attention.head_count": 4,
    "llama.attention.layer_norm_rms_epsilon": 1e-5,
    "tokenizer.ggml.tokens": ["<unk>", "a", "<image>"],
    "tokenizer.ggml.unknown_token_id": 0,
}
VISION: dict[str, Any] = {
    "clip.projector_type": "mlp",
    "clip.has_vision_encoder": True,
    "clip.vision.image_size": 28,
    "clip.vision.patch_size": 14,
    "clip.vision.embedding_length": TOWER,
    "clip.vision.feed_forward_length": 48,
    "clip.vision.block_count": 1,
    "clip.vision.attention.head_count": 2,
    "clip.vision.attention.layer_norm_epsilon": 1e-5,
    "clip.vision.image_mean": [0.5, 0.5, 0.5],
    "clip.vision.image_std": [0.5, 0.25, 0.5],
}
SHAPES = {
    "v.class_embd": (TOWER,),
    "v.patch_embd.weight": (TOWER, 3, 14, 14),
    "v.position_embd.weight": (5, TOWER),
    **{f"v.pre_ln.{kind}": (TOWER,) for kind in ("weight", "bias")},
    **{f"v.blk.0.{part}.{kind}": (TOWER,) for part in ("ln1", "ln2") for kind in ("weight", "bias")},
    **{f"v.blk.0.attn_{part}.weight": (TOWER, TOWER) for part in ("q", "k", "v", "out")},
    **{f"v.blk.0.attn_{part}.bias": (TOWER,) for part in ("q", "k", "v", "out")},
    "v.blk.0.ffn_up.weight": (48, TOWER),
    "v.blk.0.ffn_up.bias": (48,),
    "v.blk.0.ffn_down.weight": (TOWER, 48),
    "v.blk.0.ffn_down.bias": (TOWER,),
    "mm.0.weight": (SIZE, TOWER),
    "mm.0.bias": (SIZE,),
    "mm.2.weight": (SIZE, SIZE),
    "mm.2.bias": (SIZE,),
}


def text_model(folder: Path, name: str = "m-Q4_K_M.gguf", **changes: Any) -> Path:
    return write_gguf(folder / name, {"token_embd.weight": np.ones((3, SIZE), np.float32)}, TEXT | changes)


def encoder(
    folder: Path, name: str, metadata: dict[str, Any] | None = None, arch: str = "clip", **tensors: Any
) -> Path:
    made = {name: np.full(shape, 0.5, np.float32) for name, shape in SHAPES.items()} | tensors
    keys = {key: value for key, value in (VISION | (metadata or {})).items() if value is not None}
    return write_gguf(folder / name, {name: tensor for name, tensor in made.items() if tensor is not None}, keys, arch)


@pytest.mark.parametrize(
    ("names", "taken"),
    [
        (["mmproj-m-f16.gguf", "mmproj-m-bf16.gguf", "mmproj-m-f32.gguf"], "mmproj-m-f16.gguf"),
        (["mmproj-F32.gguf", "mmproj-BF16.gguf"], "mmproj-BF16.gguf"),
        (["m.mmproj-Q8_0.gguf", "m.mmproj-f32.gguf"], "m.mmproj-f32.gguf"),
        (["llava-v1.5-7b-mmproj-Q4_0.gguf"], "llava-v1.5-7b-mmproj-Q4_0.gguf"),
    ],
)
def test_the_one_beside_the_model_is_taken_in_the_best_precision(names: list[str], taken: str, tmp_path: Path):
    for name in names:
        encoder(tmp_path, name)
    path = text_model(tmp_path)

    checkpoint = open_checkpoint(path)

    assert best_mmprojs(names) == [taken]
    assert [file.name for file in checkpoint.files()] == [path.name, taken]
    assert checkpoint.config.media is not None
    assert checkpoint.notes[-1] == f"vision encoder: {taken} (25 F32)"
    assert open_checkpoint(tmp_path).path == path  # the folder means the same
    assert dummy_checkpoint(path).config.media == checkpoint.config.media


def test_a_file_of_any_name_and_place_is_taken_if_it_is_named(tmp_path: Path):
    (tmp_path / "elsewhere").mkdir()
    named = encoder(tmp_path / "elsewhere", "vision.gguf")
    path = text_model(tmp_path)
    encoder(tmp_path, "mmproj-f16.gguf")

    assert open_checkpoint(path, str(named)).files() == [path, named]
    text_alone = open_checkpoint(path, "none")
    assert text_alone.files() == [path]
    assert text_alone.config.media is None
    assert media_files(path, "none") is None


def test_what_the_file_says_reaches_the_processor_and_the_config(tmp_path: Path):
    encoder(tmp_path, "mmproj.gguf", {"clip.use_gelu": True})

    found = media_files(text_model(tmp_path), AUTO)

    assert found is not None
    assert found.config["image_token_index"] == 2
    assert found.config["vision_config"]["hidden_act"] == "gelu"
    assert (found.processor["image_mean"], found.processor["image_std"]) == ([0.5, 0.5, 0.5], [0.5, 0.25, 0.5])
    assert found.processor["crop_size"] == {"height": 28, "width": 28}


def test_those_of_several_models_are_named(tmp_path: Path):
    for name in ("mmproj-one-f16.gguf", "mmproj-other-f32.gguf"):
        encoder(tmp_path, name)

    with pytest.raises(ModelError, match=r"--mmproj none: mmproj-one-f16\.gguf, mmproj-other-f32\.gguf"):
        open_checkpoint(text_model(tmp_path))


def test_one_of_another_model_in_the_folder_does_no_harm(tmp_path: Path):
    wide = encoder(tmp_path, "mmproj-wide-f16.gguf", **{"mm.2.weight": np.ones((80, SIZE), np.float32)})
    path = text_model(tmp_path)

    assert open_checkpoint(path).config.media is None
    assert "gives 80 elements for each token, and the text model takes 64" in open_checkpoint(path).notes[-1]
    assert "gives 80 elements" in open_checkpoint(path).config.vision_unsupported_reason
    with pytest.raises(ModelError, match=r"mmproj-wide-f16\.gguf is of another model than m-Q4_K_M\.gguf: it gives 80"):
        open_checkpoint(path, str(wide))
    encoder(tmp_path, "mmproj-m-f32.gguf")
    assert [file.name for file in open_checkpoint(path).files()] == [path.name, "mmproj-m-f32.gguf"]


def test_a_vocabulary_without_a_token_for_images_takes_one_that_no_text_has(tmp_path: Path):
    found = encoder(tmp_path, "mmproj-f16.gguf")
    path = text_model(tmp_path, **{"tokenizer.ggml.tokens": ["<unk>", "a", "b"]})

    media = open_checkpoint(path).config.media
    assert media is not None
    assert media.image_token_id == 0
    # Beside another model the file may be that one's.
    text_model(tmp_path, "another.gguf")
    assert "may be of another model of its folder" in open_checkpoint(path).config.vision_unsupported_reason
    assert open_checkpoint(path, str(found)).config.media is not None


def test_a_snapshot_keeps_it_at_its_top(tmp_path: Path):
    snapshot = tmp_path / "snapshots" / ("0" * 40)
    (snapshot / "Q4_K_M").mkdir(parents=True)
    top = encoder(snapshot, "mmproj-F16.gguf")
    path = text_model(snapshot / "Q4_K_M")

    assert open_checkpoint(path).files() == [path, top]


@pytest.mark.parametrize(
    ("changes", "why"),
    [
        ({"clip.projector_type": "resampler"}, "projector type 'resampler' is not supported; known: gemma3, .*mlp"),
        ({"clip.projector_type": 3}, "projector type 3 is not supported"),
        ({"clip.projector_type": "gemma3"}, "goes with text models of architecture gemma3, and .* is of 'llama'"),
        ({"clip.vision.block_count": 2**31}, "clip.vision.block_count is 2147483648"),
        ({"clip.vision.patch_size": None}, "clip.vision.patch_size is missing"),
        ({"clip.vision.patch_size": 56}, "an image of 28 pixels has no patch of 56"),
        ({"clip.vision.attention.head_count": 5}, "5 heads cannot share 32 elements"),
        ({"clip.vision.image_mean": [float("nan")] * 3}, "image_mean is nan; expected a number"),
        ({"clip.vision.image_mean": [0.5]}, "image_mean is .*expected three numbers"),
        ({"clip.vision.image_std": [0.0] * 3}, "image_std has a 0"),
        ({"clip.vision.image_std": "wide"}, "expected a list of float"),
        ({"clip.vision.feature_layer": [0, 1]}, "names several layers"),
        ({"clip.vision.feature_layer": [5]}, "vision_feature_layer is 5, but the tower has 1 layers"),
        ({"clip.vision.mm_patch_merge_type": "spatial_unpad", "clip.vision.image_grid_pinpoints": [28]}, "expected a height"),
    ],
)  # fmt: skip
def test_metadata_that_cannot_be_is_refused_by_name(changes: dict[str, Any], why: str, tmp_path: Path):
    path = text_model(tmp_path)
    bad = encoder(tmp_path, "mmproj-f16.gguf", changes)

    with pytest.raises(ModelError, match=rf"mmproj-f16\.gguf.*{why}") as refused:
        open_checkpoint(path, str(bad))
    assert "\n" not in refused.value.message
    # The one that is found by itself leaves the model without images, and says why.
    assert open_checkpoint(path).config.vision_unsupported_reason == refused.value.message


@pytest.mark.parametrize(
    ("tensors", "why"),
    [
        ({"mm.2.weight": None}, r"tensor mm\.2\.weight is missing"),
        ({"mm.2.weight": np.ones(SIZE, np.float32)}, r"mm\.2\.weight has 1 dimensions"),
        ({"v.blk.0.ffn_up.weight": None}, r"v\.blk\.0\.ffn_up\.weight is missing"),
        ({"resampler.query": np.ones((2, 2), np.float32)}, r"resampler\.query is not known"),
    ],
)
def test_tensors_that_cannot_be_are_refused_by_name(tensors: dict[str, Any], why: str, tmp_path: Path):
    bad = encoder(tmp_path, "mmproj-f16.gguf", **tensors)

    with pytest.raises(ModelError, match=rf"mmproj-f16\.gguf.*{why}"):
        open_checkpoint(text_model(tmp_path), str(bad))


def test_values_that_are_no_numbers_are_refused_when_they_are_read(tmp_path: Path):
    encoder(tmp_path, "mmproj-f16.gguf", **{"mm.0.bias": np.full(SIZE, np.nan, np.float32)})
    checkpoint = open_checkpoint(text_model(tmp_path))

    with pytest.raises(
        ModelError, match=r"mmproj-f16\.gguf: tensor multi_modal_projector\.linear_1\.bias contains NaN"
    ):
        for _ in checkpoint.iter_tensors(check_finite=True):
            pass


def test_every_truncation_is_refused_by_name_or_leaves_text_alone(tmp_path: Path):
    path, whole = text_model(tmp_path), encoder(tmp_path, "whole.gguf").read_bytes()
    cut = tmp_path / "mmproj-f16.gguf"
    for size in range(0, len(whole) - 64, len(whole) // 60):
        cut.write_bytes(whole[:size])
        with pytest.raises(ModelError, match=r"mmproj-f16\.gguf"):
            open_checkpoint(path, str(cut))
        assert "mmproj-f16.gguf" in open_checkpoint(path).config.vision_unsupported_reason


def test_flipped_bits_of_the_header_never_crash(tmp_path: Path):
    path, whole = text_model(tmp_path), encoder(tmp_path, "whole.gguf")
    flipped = tmp_path / "flipped.gguf"
    header = min(tensor.offset for tensor in GgufFile(whole).tensors.values())
    data = whole.read_bytes()
    refusals = []
    for at in range(24, header, 5):
        flipped.write_bytes(data[:at] + bytes([data[at] ^ 1 << at % 8]) + data[at + 1 :])
        try:
            open_checkpoint(path, str(flipped)).tensor_names()
        except ModelError as error:
            refusals.append(error.message)
    assert len(refusals) > 100
    assert not any("\n" in message for message in refusals)


def test_what_is_no_vision_encoder_is_refused(tmp_path: Path):
    path = text_model(tmp_path)
    with pytest.raises(ModelError, match=r"--mmproj .*nowhere\.gguf: there is no such file"):
        open_checkpoint(path, str(tmp_path / "nowhere.gguf"))
    with pytest.raises(
        ModelError, match=r"m-Q4_K_M\.gguf is no vision encoder: its architecture is 'llama', not 'clip'"
    ):
        open_checkpoint(path, str(path))
    with pytest.raises(ModelError, match=r"mmproj-f16\.gguf is a vision encoder; name the text model"):
        open_checkpoint(encoder(tmp_path, "mmproj-f16.gguf"))
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "config.json").write_text("{}")
    shutil.copy(path, folder / "model.safetensors")
    for open_folder in (open_checkpoint, dummy_checkpoint):
        with pytest.raises(ModelError, match="--mmproj is for GGUF files, which folder is not"):
            open_folder(folder, str(path))
