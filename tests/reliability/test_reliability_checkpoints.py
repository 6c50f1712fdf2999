"""Checkpoints that are broken are refused before anything is served, naming the file and the tensor."""

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from reliability_harness import START_S, Server, write_tiny_model
from safetensors.torch import load_file, save_file

from headrace.config.server_args import ServerArgs
from headrace.errors import ModelError
from headrace.execution.build import build_worker

TENSOR = "model.layers.1.mlp.up_proj.weight"
WEIGHTS = "model.safetensors"


@pytest.fixture(scope="module")
def whole(tiny_model: Path) -> Path:
    return tiny_model


@pytest.fixture(scope="module")
def sharded(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_tiny_model(tmp_path_factory.mktemp("sharded") / "model", max_shard_size="200KB")


def build(folder: Path) -> None:
    args = ServerArgs(model_path=str(folder), device="cpu", max_total_tokens=256, context_length=128, num_threads=1)
    worker, _ = build_worker(args)
    worker.close()


def truncate(folder: Path) -> None:
    content = (folder / WEIGHTS).read_bytes()
    (folder / WEIGHTS).write_bytes(content[: len(content) * 2 // 3])


def zero_file(folder: Path) -> None:
    (folder / WEIGHTS).write_bytes(bytes((folder / WEIGHTS).stat().st_size))


def flip(at: int) -> Callable[[Path], None]:
    def flip_bit(folder: Path) -> None:
        content = bytearray((folder / WEIGHTS).read_bytes())
        content[at] ^= 0x40
        (folder / WEIGHTS).write_bytes(content)

    return flip_bit


def change_tensor(change: Callable[[torch.Tensor], torch.Tensor | None]) -> Callable[[Path], None]:
    def rewrite(folder: Path) -> None:
        tensors = load_file(folder / WEIGHTS)
        changed = change(tensors.pop(TENSOR))
        save_file(tensors | ({} if changed is None else {TENSOR: changed}), folder / WEIGHTS)

    return rewrite


def change_config(**changes: Any) -> Callable[[Path], None]:
    def rewrite(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | changes))

    return rewrite


BROKEN: dict[str, tuple[Callable[[Path], None], str]] = {
    "truncated": (truncate, WEIGHTS),
    "zero-filled file": (zero_file, WEIGHTS),
    "header length flipped": (flip(6), WEIGHTS),
    "header text flipped": (flip(9), WEIGHTS),
    "no weights": (lambda folder: (folder / WEIGHTS).unlink(), "safetensors"),
    "tensor missing": (change_tensor(lambda tensor: None), TENSOR),
    "tensor transposed": (change_tensor(lambda tensor: tensor.T.contiguous()), TENSOR),
    "tensor of integers": (change_tensor(lambda tensor: tensor.to(torch.int64)), TENSOR),
    "tensor zero-filled": (change_tensor(torch.zeros_like), TENSOR),
    "config of another width": (change_config(intermediate_size=256), "mlp"),
    "config of more layers": (change_config(num_hidden_layers=3), "model.layers.2"),
    "config of an unknown kind": (change_config(model_type="nonesuch"), "nonesuch"),
}


@pytest.mark.parametrize("name", BROKEN)
def test_a_broken_checkpoint_is_refused_by_name(whole: Path, tmp_path: Path, name: str):
    damage, named = BROKEN[name]
    folder = Path(shutil.copytree(whole, tmp_path / "model"))
    damage(folder)
    with pytest.raises(ModelError) as refused:
        build(folder)
    assert named in refused.value.message


def test_missing_shards_and_indexes_are_refused_by_name(sharded: Path, tmp_path: Path):
    build(sharded)
    for name in ("model-00002-of", "model.safetensors.index.json"):
        folder = Path(shutil.copytree(sharded, tmp_path / name))
        next(folder.glob(f"{name}*")).unlink()
        with pytest.raises(ModelError) as refused:
            build(folder)
        assert name in refused.value.message


@pytest.mark.parametrize(
    "damage, named", [(truncate, WEIGHTS), (lambda f: (f / "tokenizer.json").unlink(), "tokenizer")]
)
def test_the_server_refuses_in_one_line(whole: Path, tmp_path: Path, damage: Callable[[Path], None], named: str):
    folder = Path(shutil.copytree(whole, tmp_path / "model"))
    damage(folder)
    with Server(folder, ("--log-level", "error")) as server:
        assert server.wait(START_S) == 2
        (line,) = server.log().splitlines()
        assert server.ipc_directories() == []
    assert named in line
