"""Tensors as a safetensors file: read back by the library of that name."""

import numpy as np
import pytest
import torch
from safetensors.torch import load

from headrace.errors import RequestError
from headrace.messages.packing import safetensors_parts


def test_tensors_and_arrays_are_read_back_as_they_were():
    torch.manual_seed(0)
    tensors = {
        "plain": torch.randn(300, 40),
        "transposed": torch.randn(30, 50).t(),
        "half": torch.randn(7).to(torch.bfloat16),
        "one": torch.tensor(3.0),
        "none": torch.empty(0, 4),
    }
    arrays = {"array": np.arange(10000, dtype=np.float32), "columns": np.arange(12, dtype=np.int64).reshape(3, 4).T}

    # Joined only after every part was made: a part must keep what it is a view of.
    data = b"".join(safetensors_parts([*tensors.items(), *arrays.items()]))

    read = load(data)
    assert read.keys() == tensors.keys() | arrays.keys()
    for name, tensor in tensors.items():
        assert torch.equal(read[name], tensor), name
    for name, array in arrays.items():
        assert np.array_equal(read[name].numpy(), array), name


def test_what_cannot_be_sent_is_named():
    with pytest.raises(RequestError, match="twice"):
        list(safetensors_parts([("a", torch.ones(1)), ("a", torch.ones(1))]))
    with pytest.raises(RequestError, match="complex64"):
        list(safetensors_parts([("a", torch.ones(1, dtype=torch.complex64))]))
    with pytest.raises(RequestError, match="list"):
        list(safetensors_parts([("a", [1.0])]))
