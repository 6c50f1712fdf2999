"""Flattened buckets: many tensors as one, in the body of an update."""

import base64
import json

import pytest
import torch
from safetensors.torch import save
from weights_harness import engine_of, fresh, tensors_of, tokens

from headrace.errors import ModelError
from headrace.weight_sync.bucket import pack, unpack

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float64": torch.float64}
NAMED = [
    ("a", torch.arange(3, dtype=torch.bfloat16)),
    ("b", torch.ones(2, 2)),
    ("empty", torch.empty(0, 4)),
    ("one", torch.tensor(5.0)),
]


def unpacked(flat, metadata):
    return unpack({"flattened_tensor": flat}, {"metadata": metadata}, DTYPES)


def test_what_is_packed_comes_back():
    again = unpacked(*pack(NAMED))
    assert [name for name, _ in again] == [name for name, _ in NAMED]
    for (_, want), (_, got) in zip(NAMED, again, strict=True):
        assert got.dtype == want.dtype
        assert torch.equal(got, want)


def test_indices_count_elements_of_the_flat_tensor_whatever_its_type():
    flat = torch.arange(6, dtype=torch.float32)
    parts = [{"name": "a", "shape": [2, 2], "dtype": "torch.float32", "start_idx": 2, "end_idx": 6, "numel": 4}]
    [(name, tensor)] = unpacked(flat, json.dumps(parts))
    assert name == "a"
    assert tensor.tolist() == [[2.0, 3.0], [4.0, 5.0]]


PART = {"name": "a", "shape": [2], "dtype": "float32", "start_idx": 0, "end_idx": 8}


@pytest.mark.parametrize(
    "change, why",
    [
        ({"end_idx": 7}, "needs 8 bytes"),
        ({"start_idx": 4, "end_idx": 2}, "needs 8 bytes"),
        ({"start_idx": 8, "end_idx": 16}, "needs 8 bytes"),
        ({"start_idx": -1}, "metadata"),
        ({"shape": [-2]}, "metadata"),
        ({"shape": [2**40, 2**40, 2**40]}, "needs"),
        ({"dtype": "object"}, "known: float32"),
    ],
)
def test_parts_that_do_not_fit_are_named(change, why):
    with pytest.raises(ModelError, match=why):
        unpacked(torch.zeros(8, dtype=torch.uint8), json.dumps([PART | change]))


def test_what_is_no_bucket():
    with pytest.raises(ModelError, match="called flattened_tensor"):
        unpack({"a": torch.zeros(4)}, {}, DTYPES)
    for metadata in ({}, {"metadata": "{"}):
        with pytest.raises(ModelError, match="metadata"):
            unpack({"flattened_tensor": torch.zeros(4)}, metadata, DTYPES)


def test_a_bucket_is_served(old, new):
    want_old, want_new = fresh(old), fresh(new)
    with engine_of(old) as engine:
        flat, metadata = pack(list(tensors_of(new).items()))
        file = save({"flattened_tensor": flat}, {"metadata": metadata})
        assert not engine._update_from_tensors([file], False, None).success  # it was not said to be one
        assert tokens(engine) == want_old
        assert engine.update_weights_from_bucket(flat, metadata, weight_version="2")[0]
        assert tokens(engine) == want_new
        assert engine.internal_state().weight_version == "2"
        success, message = engine.update_weights_from_bucket(flat[:-4], metadata)
        assert not success
        assert "bytes" in message


def test_pickled_tensors_are_refused_with_what_to_send(old):
    with engine_of(old) as engine:
        reply = engine._update_from_tensors([base64.b64decode("gASVCgAAAAAAAAB9lIwBYZRLAXMu")], False, None)
        assert not reply.success
        assert "safetensors.torch.save" in reply.message
