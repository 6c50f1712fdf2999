"""Copies of the weights in force: whole, of what was loaded, as few as promised, and gone with their server."""

import json
import os
import shutil
from pathlib import Path

import numpy
import pytest
from safetensors.numpy import save_file
from test_gguf_mmproj import encoder, text_model

from headrace.checkpoint import copies
from headrace.checkpoint.copies import Copies, copy_checkpoint
from headrace.checkpoint.source import open_checkpoint
from headrace.checkpoint.weight_cache import content_of
from headrace.config.server_args import ServerArgs
from headrace.execution.model_source import args_of_update, open_model
from headrace.execution.setup import fingerprint_of
from headrace.messages.weights import UpdateFromDisk


@pytest.fixture
def model(tmp_path: Path) -> Path:
    folder = tmp_path / "model"
    folder.mkdir()
    config = {"model_type": "llama", "architectures": ["LlamaForCausalLM"], "hidden_size": 8, "intermediate_size": 8}
    more = {"num_hidden_layers": 1, "num_attention_heads": 1, "vocab_size": 8, "max_position_embeddings": 8}
    (folder / "config.json").write_text(json.dumps(config | more))
    save_file({"model.norm.weight": numpy.ones(64, numpy.float32)}, folder / "model.safetensors")
    return folder


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HEADRACE_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "updates"


def parts(path: Path) -> tuple[Path, list[Path]]:
    return path, open_checkpoint(path).files()


def fingerprint(path: Path) -> str:
    return content_of(fingerprint_of(open_checkpoint(path)))


def wait_until_only(folder: Path, names: set[str]) -> None:
    while {entry.name for entry in folder.iterdir()} != names:
        os.sched_yield()


def test_a_copy_is_served_like_the_checkpoint_and_does_not_change_with_it(model: Path, cache: Path, tmp_path: Path):
    served = tmp_path / "served"
    shutil.copytree(model, served)
    (served / "optimizer.pt").write_bytes(b"large")
    kept = Copies(True)
    target = kept.next_path()
    assert not os.path.exists(target)
    copy_checkpoint(*parts(served), target, clones_only=False)
    before = fingerprint(served)
    with (served / "model.safetensors").open("r+b") as file:  # in place, as a trainer may
        file.seek(-64, os.SEEK_END)
        file.write(bytes(range(64)))
    assert fingerprint(Path(target)) == before != fingerprint(served)
    assert not (Path(target) / "optimizer.pt").exists()
    kept.close()


@pytest.mark.parametrize("name", ["mmproj-F16.gguf", "eyes.gguf", "model.gguf"])
def test_a_copy_has_the_vision_encoder_that_the_option_names(name: str, cache: Path, tmp_path: Path):
    (tmp_path / "text").mkdir()
    (tmp_path / "other").mkdir()
    named = encoder(tmp_path / "other", name)
    args = ServerArgs(model_path=str(text_model(tmp_path / "text", "model.gguf")), mmproj=str(named))
    kept = Copies(True)
    checkpoint = open_model(args)
    copy_checkpoint(checkpoint.path, checkpoint.files(), target := kept.next_path(), clones_only=False)
    before = content_of(fingerprint_of(checkpoint))
    named.write_bytes(b"another")
    again = open_model(args_of_update(args, UpdateFromDisk(target)))
    assert content_of(fingerprint_of(again)) == before
    assert again.config.media is not None
    kept.close()


def test_one_copy_is_kept_and_none_after_the_end(model: Path, cache: Path):
    kept = Copies(True)
    first, second = kept.next_path(), kept.next_path()
    for target in (first, second):
        copy_checkpoint(*parts(model), target, clones_only=False)
    kept.keep_only(second)
    folder = Path(first).parent
    wait_until_only(folder, {"lock", Path(second).name})
    assert folder.stat().st_mode & 0o077 == 0
    kept.close()
    assert not folder.exists()
    assert kept.next_path() == ""


def test_what_a_killed_server_left_goes_and_what_another_has_stays(model: Path, cache: Path):
    (cache / "killed").mkdir(parents=True)
    (cache / "killed" / "lock").touch()
    other = Copies(True)
    Path(other.next_path()).mkdir()
    living = {entry.name for entry in cache.iterdir()} - {"killed"}
    kept = Copies(True)
    own = Path(kept.next_path()).parent.name
    wait_until_only(cache, living | {own})
    other.close()
    kept.close()


def test_without_room_or_without_shared_blocks_there_is_none_and_the_log_says_so(
    model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    kept = Copies(True)
    monkeypatch.setattr(copies, "MAX_SHARE", 0.0)
    copy_checkpoint(*parts(model), target := kept.next_path(), clones_only=False)
    assert os.listdir(Path(target).parent) == ["lock"]
    assert "are more than half" in caplog.text
    monkeypatch.undo()
    monkeypatch.setattr(copies, "_FICLONE", 0)  # no such operation
    copy_checkpoint(*parts(model), target, clones_only=True)
    assert os.listdir(Path(target).parent) == ["lock"]
    assert caplog.text.count("no copy of the new weights is kept") == 2
    kept.close()


def test_a_cache_that_cannot_be_written_is_no_reason_to_fail(
    cache: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
):
    cache.parent.write_text("not a folder")
    assert Copies(True).next_path() == ""
    assert "the cache cannot be written" in caplog.text
    assert Copies(False).next_path() == ""
