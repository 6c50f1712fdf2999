"""The result of a step: which ids belong to which row."""

from itertools import pairwise

import numpy as np
import pytest

from headrace.messages.step import one_id_a_row


@pytest.mark.parametrize("token_ids", [[], [5], [5, 0, 7], [-1], [-1, 4, -1, -1, 6], [3, -1]])
def test_a_row_has_its_id_or_none(token_ids):
    ids, id_starts = one_id_a_row(token_ids)

    assert ids.dtype == id_starts.dtype == np.int32
    rows = [ids[begin:end].tolist() for begin, end in pairwise(id_starts.tolist())]
    assert rows == [[i] if i >= 0 else [] for i in token_ids]
