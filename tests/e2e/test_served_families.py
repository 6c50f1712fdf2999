"""Families are served by the path of `headrace serve`, not only by their model's code: `bench/families.py` with a few types."""

from pathlib import Path

import pytest

from bench import families


@pytest.mark.parametrize(
    "model_type, outcome, detail",
    [
        # The oldest classes with an output projection are called ...LMHeadModel, which is no bare model.
        ("gpt2", "runs", ""),
        ("openai-gpt", "refused", "attend 0 times through transformers' attention interface"),
        ("ctrl", "refused", "its output projection is tied to the embedding and has a bias"),
        ("xlnet", "refused", "max_position_embeddings is -1"),
    ],
)
def test_a_family_runs_or_is_refused_for_what_it_is(model_type: str, outcome: str, detail: str, tmp_path: Path):
    result = families.attempt(model_type, tmp_path)

    assert result.outcome == outcome, result.detail
    assert detail in result.detail
