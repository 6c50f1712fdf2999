"""Logprobs: values, order, and independence of the batch."""

import numpy as np
import pytest
import torch

from headrace.messages.requests import LogprobSpec
from headrace.sampling.logprobs import prompt_logprobs, token_logprobs

SPEC = LogprobSpec(0, top_num=5, token_ids=(3, 0))


def log_softmax(logits: np.ndarray) -> np.ndarray:
    x = logits.astype(np.float64)
    return x - x.max(-1, keepdims=True) - np.log(np.exp(x - x.max(-1, keepdims=True)).sum(-1, keepdims=True))


def logits_of(rows: int, size: int = 1003) -> torch.Tensor:
    return torch.from_numpy(np.random.default_rng(1).standard_normal((rows, size)).astype(np.float32) * 4)


def floats(data: bytes, *shape: int) -> np.ndarray:
    return np.frombuffer(data, dtype="<f4").reshape(shape)


def ints(data: bytes, *shape: int) -> np.ndarray:
    return np.frombuffer(data, dtype="<i4").reshape(shape)


def test_values_are_the_log_softmax():
    logits = logits_of(7)
    ids = np.arange(7) * 11
    block = prompt_logprobs(logits, ids, SPEC)
    want = log_softmax(logits.numpy())
    rows = np.arange(7)
    # float32 rounding of the result; the sum itself is exact to 2**-40.
    np.testing.assert_allclose(floats(block.values, 7), want[rows, ids], rtol=1e-6, atol=1e-6)
    np.testing.assert_allclose(floats(block.picked, 7, 2), want[:, [3, 0]], rtol=1e-6, atol=1e-6)
    order = np.argsort(-logits.numpy(), axis=1, kind="stable")[:, :5]
    assert ints(block.top_ids, 7, 5).tolist() == order.tolist()
    np.testing.assert_allclose(floats(block.top_values, 7, 5), want[rows[:, None], order], rtol=1e-6, atol=1e-6)
    assert ints(block.token_ids, 7).tolist() == ids.tolist()


@pytest.mark.parametrize("chunk", [1, 2, 3, 5])
def test_any_chunking_gives_the_same_bytes(chunk):
    logits, ids = logits_of(9), np.arange(9)
    whole = prompt_logprobs(logits, ids, SPEC)
    parts = [prompt_logprobs(logits[i : i + chunk].clone(), ids[i : i + chunk], SPEC) for i in range(0, 9, chunk)]
    for name in ("token_ids", "values", "top_ids", "top_values", "picked"):
        assert b"".join(getattr(part, name) for part in parts) == getattr(whole, name)


def test_a_sampled_token_has_the_bytes_it_would_have_in_a_prompt():
    logits = logits_of(3)
    assert token_logprobs(logits[1], 42, SPEC) == prompt_logprobs(logits[1:2].clone(), [42], SPEC)


def test_equal_logits_are_ordered_by_id():
    block = token_logprobs(torch.zeros(500), 9, LogprobSpec(0, top_num=4))
    assert ints(block.top_ids, 4).tolist() == [0, 1, 2, 3]


def test_impossible_tokens_have_minus_infinity():
    row = torch.full((8,), -torch.inf)
    row[5] = 1.0
    block = token_logprobs(row, 5, LogprobSpec(0, top_num=3, token_ids=(0,)))
    assert floats(block.values, 1).tolist() == [0.0]
    assert floats(block.picked, 1).tolist() == [-np.inf]
    assert ints(block.top_ids, 3).tolist() == [5, 0, 1]
    assert floats(block.top_values, 3).tolist() == [0.0, -np.inf, -np.inf]


def test_more_alternatives_than_tokens_are_filled_up_and_foreign_ids_are_nan():
    block = token_logprobs(torch.tensor([0.0, 1.0]), 1, LogprobSpec(0, top_num=4, token_ids=(7, -3)))
    assert ints(block.top_ids, 4).tolist() == [1, 0, -1, -1]
    assert np.isnan(floats(block.top_values, 4)).tolist() == [False, False, True, True]
    assert np.isnan(floats(block.picked, 2)).all()


def test_a_row_with_nan_gives_nan_and_leaves_the_others():
    logits = logits_of(3)
    want = prompt_logprobs(logits[2:], [2], SPEC)
    logits[0, 4] = torch.nan
    logits[1] = -torch.inf
    block = prompt_logprobs(logits, [0, 1, 2], SPEC)
    assert np.isnan(floats(block.values, 3)).tolist() == [True, True, False]
    assert block.values[8:] == want.values


def test_no_rows_give_an_empty_block():
    assert prompt_logprobs(logits_of(3)[:0], [], SPEC).values == b""
