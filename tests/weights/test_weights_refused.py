"""An update that is wrong in any way changes nothing: the old weights serve on, bit for bit."""

import json
import os
import shutil
from pathlib import Path

import pytest
import torch
from weights_harness import engine_of, fresh, tensors_of, tokens

from headrace.errors import RequestError

Q_PROJ = "model.layers.1.self_attn.q_proj.weight"


@pytest.fixture(scope="module")
def engine(old):
    with engine_of(old) as engine:
        yield engine


@pytest.fixture(scope="module")
def want(old):
    return fresh(old)


def weights(engine):
    names = [Q_PROJ, "model.embed_tokens.weight", "lm_head.weight", "model.norm.weight"]
    return [engine.get_weights_by_name(name, 3) for name in names]


GOOD = torch.ones(64, 64)
BAD_TENSORS = {
    "unknown name": ([("model.layers.9.self_attn.q_proj.weight", GOOD)], "the model has no weight"),
    "wrong shape": ([(Q_PROJ, torch.ones(64, 63))], r"is \[64, 63\], not \[64, 64\]"),
    "integers": ([(Q_PROJ, torch.ones(64, 64, dtype=torch.int32))], "is int32, not float64"),
    "NaN": ([(Q_PROJ, torch.full((64, 64), torch.nan))], "NaN or infinity"),
    "one of two is wrong": ([("model.norm.weight", torch.ones(64)), (Q_PROJ, torch.ones(3))], r"is \[3\]"),
    "nothing": ([], "no tensors"),
}


@pytest.mark.parametrize("kind", BAD_TENSORS)
def test_bad_tensors(kind, engine, want):
    named, why = BAD_TENSORS[kind]
    before = weights(engine)
    success, message = engine.update_weights_from_tensor(named, weight_version="bad")
    assert not success
    with pytest.raises(AssertionError, match=why):
        raise AssertionError(message)
    assert weights(engine) == before
    assert tokens(engine) == want
    assert engine.internal_state().weight_version == "default"


def test_bytes_that_are_no_safetensors_file(engine, want):
    reply = engine._update_from_tensors([b"\x80\x05" + bytes(100)], False, None)
    assert not reply.success
    assert "pickled objects are not accepted" in reply.message
    assert tokens(engine) == want
    with pytest.raises(RequestError, match="twice"):
        engine.update_weights_from_tensor([(Q_PROJ, GOOD), (Q_PROJ, GOOD)])
    with pytest.raises(RequestError, match="not a tensor"):
        engine.update_weights_from_tensor([(Q_PROJ, [1.0])])


def truncate(folder: Path) -> None:
    file = folder / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])


def zero(folder: Path) -> None:
    file = folder / "model.safetensors"
    data = bytearray(file.read_bytes())
    data[-4 * 64 * 64 :] = bytes(4 * 64 * 64)
    header = int.from_bytes(data[:8], "little") + 8
    file.write_bytes(data[:header] + bytes(len(data) - header))


def change(**fields):
    def do(folder: Path) -> None:
        file = folder / "config.json"
        file.write_text(json.dumps(json.loads(file.read_text()) | fields))

    return do


BAD_CHECKPOINTS = {
    "truncated": (truncate, "truncated"),
    "zero-filled": (zero, "zero-filled"),
    "no weights": (lambda folder: (folder / "model.safetensors").unlink(), "safetensors"),
    "no config": (lambda folder: (folder / "config.json").unlink(), "config.json"),
    "other sizes": (change(intermediate_size=128), "not of the served model"),
    "other constants": (change(rms_norm_eps=0.5), "rms_norm_eps"),
}


@pytest.mark.parametrize("kind", BAD_CHECKPOINTS)
def test_bad_checkpoints(kind, engine, want, new, copy_of):
    spoil, why = BAD_CHECKPOINTS[kind]
    folder = copy_of(new)
    spoil(folder)
    before = weights(engine)
    success, message = engine.update_weights_from_disk(str(folder))
    assert not success
    assert why in message
    assert str(folder.parent) not in message
    assert weights(engine) == before
    assert tokens(engine) == want


def fifo(name):
    def do(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        os.mkfifo(folder / name)

    return do


@pytest.mark.parametrize("name", ["config.json", "model.safetensors", "model.gguf", ""])
def test_what_is_no_file_is_refused_and_not_waited_for(name, engine, want, new, tmp_path):
    path = tmp_path / "copy"
    if name == "model.gguf":
        path.mkdir()
    elif name:
        shutil.copytree(new, path)
    fifo(name)(path) if name else os.mkfifo(path)
    for given in (str(path), "/dev/zero"):
        success, _ = engine.update_weights_from_disk(given)
        assert not success
    assert tokens(engine) == want


def test_a_switch_that_fails_halfway_goes_back(engine, want, new, monkeypatch):
    from headrace.models.decoder import DecoderLM

    fuse, calls = DecoderLM.fuse, []

    def fail_once(model, attention):
        calls.append(model)
        if len(calls) == 1:
            raise RuntimeError("no room")
        return fuse(model, attention)

    monkeypatch.setattr(DecoderLM, "fuse", fail_once)
    success, message = engine.update_weights_from_disk(new)
    assert not success
    assert "internal error" in message
    assert tokens(engine) == want
    assert len(calls) == 2


def test_a_tied_projection_must_be_the_embedding(old_tied, new_tied):
    embedding = tensors_of(new_tied)["model.embed_tokens.weight"]
    with engine_of(old_tied) as engine:
        both = [("model.embed_tokens.weight", embedding), ("lm_head.weight", embedding.clone())]
        assert engine.update_weights_from_tensor(both)[0]
        for named in ([both[1]], [both[0], ("lm_head.weight", embedding + 1)]):
            success, message = engine.update_weights_from_tensor(named)
            assert not success
            assert "tied" in message


def test_reading_a_weight(engine, old):
    tensors = tensors_of(old)
    assert engine.get_weights_by_name(Q_PROJ, 2) == tensors[Q_PROJ][:2].tolist()
    assert engine.get_weights_by_name("model.norm.weight", 5) == tensors["model.norm.weight"][:5].tolist()
    with pytest.raises(RequestError, match="no weight 'nothing'"):
        engine.get_weights_by_name("nothing")
