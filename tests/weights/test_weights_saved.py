"""Weights that serve, written to the operator's folder and served again."""

import json
from pathlib import Path

import pytest
from weights_harness import engine_of, fresh, tokens

from headrace.checkpoint.weight_formats import names_on_cpu


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_what_is_saved_is_what_serves(dtype, old, new, tmp_path, monkeypatch):
    monkeypatch.setattr("headrace.execution.weight_files.PART_BYTES", 100_000)
    with engine_of(old, dtype=dtype, save_dir=str(tmp_path)) as engine:
        assert engine.update_weights_from_disk(new)[0]
        want = tokens(engine)
        success, message = engine.save_sharded_state("step-7")
        assert success, message
        assert str(tmp_path) not in message
    folder = tmp_path / "step-7"
    assert len(list(folder.glob("model-rank-0-part-*.safetensors"))) > 1
    assert json.loads((folder / "config.json").read_text())["hidden_size"] == 64
    assert [path.name for path in tmp_path.iterdir()] == ["step-7"]
    again = {"dtype": dtype, "load_format": "sharded_state", "tokenizer_path": old}
    assert want == fresh(str(folder), **again) == fresh(new, dtype=dtype)


def test_only_new_folders_below_the_operators(old, tmp_path):
    (tmp_path / "there").mkdir()
    with engine_of(old, save_dir=str(tmp_path)) as engine:
        for name in ("there", "", "..", ".hidden", "a/b", "/tmp/x", "x" * 65, "a\n"):
            success, _ = engine.save_sharded_state(name)
            assert not success, name
        assert [path.name for path in tmp_path.iterdir()] == ["there"]
        assert tokens(engine)


@pytest.mark.parametrize("name", names_on_cpu())
def test_weights_that_were_quantised_at_load_are_not_saved(name, old, tmp_path):
    with engine_of(old, save_dir=str(tmp_path), quantization=name) as engine:
        success, message = engine.save_sharded_state("x")
    assert not success
    assert f"quantised to {name}" in message
    assert "headrace quantize" in message
    assert not list(tmp_path.iterdir())


def test_what_cannot_be_saved_is_refused(old, tmp_path):
    with engine_of(old) as engine:
        assert "--save-dir" in engine.save_sharded_state("x")[1]
    (tmp_path / "file").write_text("")
    with engine_of(old, save_dir=str(tmp_path / "file")) as engine:
        success, message = engine.save_sharded_state("x")
        assert not success
        assert "could not be written" in message
    assert [path.name for path in Path(tmp_path).iterdir()] == ["file"]
