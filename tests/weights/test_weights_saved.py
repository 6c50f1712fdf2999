"""Weights that serve, written to the operator's folder and served again."""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from weights_harness import engine_of, fresh, tensors_of, tokens

from headrace.checkpoint.weight_formats import names_on_cpu
from headrace.errors import RequestError


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
    (tmp_path / "link").symlink_to("nowhere")
    with engine_of(old, save_dir=str(tmp_path)) as engine:
        for name in ("there", "", "..", ".hidden", "a/b", "/tmp/x", "x" * 65, "a\n", "link"):
            success, _ = engine.save_sharded_state(name)
            assert not success, name
        assert {path.name for path in tmp_path.iterdir()} == {"there", "link"}
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


@pytest.mark.parametrize("kind", ["old", "old_tied"])
def test_what_is_saved_by_sglangs_name_joins_to_the_tensors_of_the_checkpoint(kind, request, tmp_path, monkeypatch):
    """Read by the library of the format."""
    model = request.getfixturevalue(kind)
    monkeypatch.setattr("headrace.execution.weight_files.PART_BYTES", 100_000)
    names = "model-rank-{rank}-part-{part}.safetensors"
    with engine_of(model, save_dir=str(tmp_path)) as engine:
        engine.collective_rpc("save_sharded_model", path="whole", pattern=names, max_size=5 << 30)
        engine.collective_rpc("save_sharded_model", params={"path": "again"})
    for name in ("whole", "again"):
        files = sorted((tmp_path / name).glob("*.safetensors"))
        assert {file.name for file in files} == {names.format(rank=0, part=part) for part in range(len(files))}
        assert len(files) > 1
        saved = {key: value for file in files for key, value in load_file(file).items()}
        there = tensors_of(model)
        assert saved.keys() == there.keys()
        assert all(torch.equal(saved[key], there[key]) for key in there)


def test_only_operations_of_the_table_can_be_called(old, tmp_path):
    with engine_of(old, save_dir=str(tmp_path)) as engine:
        assert engine.collective_rpc("slow_down")["message"] == "full speed"
        assert engine.collective_rpc("cache_tree", max_nodes=1)["data"]
        for name, fields, says in [
            (
                "run_once",
                {},
                "there is no operation 'run_once'; there are cache_tree, .*save_sharded_model, .*slow_down",
            ),
            ("__class__", {}, "there is no operation"),
            ("flush_cache", {}, "there is no operation"),  # it has no route in the table: `flush_cache()`
            ("slow_down", {"seconds": 1}, "unknown field 'seconds'"),
            ("slow_down", {"forward_sleep_time": 11}, "10"),
            ("save_remote_model", {"url": "s3://x"}, "weights are not sent; save_sharded_model"),
            ("save_sharded_model", {"path": "../x"}, "name of a new folder below --save-dir"),
            ("save_sharded_model", {"path": "x", "pattern": "{rank}.pt"}, "model-rank-{rank}-part-{part}.safetensors"),
            ("save_sharded_model", {"path": "x", "max_size": 5}, "bytes"),
        ]:
            with pytest.raises(RequestError, match=says):
                engine.collective_rpc(name, **fields)
        assert not list(tmp_path.iterdir())
