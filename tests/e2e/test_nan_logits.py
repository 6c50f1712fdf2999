"""A model that gives NaN logits after one token: requests with that token end with an error in words, and change nothing for their neighbours."""

import shutil
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from engines import (
    FILTERED,
    GREEDY,
    PENALISED,
    SEEDED,
    Case,
    answer_of,
    make_cases,
    one_by_one,
    outputs_together,
    running_engine,
)
from safetensors.torch import load_file, save_file

from headrace.api.engine import Engine
from headrace.errors import ExecutionError

BAD_ID = 4321
SAYS = "the model produced NaN or no finite logits"
HELD = {"regex": "[a-z]+", "temperature": 0.0, "max_new_tokens": 6}
NEIGHBOURS = make_cases(
    [1, 17, 130], {"greedy": GREEDY, "seeded": SEEDED, "filtered": FILTERED, "penalised": PENALISED}
)
NEIGHBOURS += [Case("held", [5, 6, 7], HELD)]
# The token stands in the prompt, at its end, in its first chunk, or is drawn on the way.
BAD = [
    Case("greedy", [5, BAD_ID], GREEDY),
    Case("seeded", [BAD_ID, 5, 6], SEEDED),
    Case("filtered, all logprobs", [5, BAD_ID, 6], FILTERED, 0),
    Case("penalised, logprobs", [5, BAD_ID], PENALISED, -1),
    Case("held", [BAD_ID, 9], HELD),
    Case("long", [BAD_ID, *range(100, 180)], GREEDY),
]
SCORED = Case("scored", [5, BAD_ID, *range(100, 180)], {"max_new_tokens": 0}, 0)
DRAWN = Case("drawn", [5, 6, 7, 8], GREEDY | {"logit_bias": {str(BAD_ID): 100.0}})

OPTIONS: dict[str, dict[str, Any]] = {
    "native kernels": {},
    "torch, no overlap": {"disable_native_kernels": True, "disable_overlap_schedule": True},
    "pages of one token, used again": {"page_size": 1, "max_total_tokens": 640, "chunked_prefill_size": 16},
    "a draft model": {"speculative_algorithm": "draft"},
}


@pytest.fixture(scope="module")
def model(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    """A file in which every number is finite; one is too large for bfloat16, in which the model runs."""
    folder = tmp_path_factory.mktemp("bad") / "model"
    shutil.copytree(tiny_model, folder)
    tensors = load_file(folder / "model.safetensors")
    tensors["model.embed_tokens.weight"][BAD_ID, 3] = torch.finfo(torch.float32).max
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return str(folder)


@pytest.fixture(scope="module", params=list(OPTIONS.values()), ids=list(OPTIONS))
def engine(request: pytest.FixtureRequest, model: str) -> Iterator[Engine]:
    options = {"dtype": "bfloat16", **request.param}
    if options.get("speculative_algorithm") == "draft":
        options["speculative_draft_model_path"] = model
    with running_engine(model, **options) as engine:
        yield engine


def test_requests_with_nan_logits_end_with_an_error_and_their_neighbours_go_on(engine: Engine) -> None:
    alone = one_by_one(engine, NEIGHBOURS)
    engine.flush_cache()
    cases = [*NEIGHBOURS[:5], *BAD, *NEIGHBOURS[5:], SCORED, DRAWN]
    for _ in range(2):  # then in the pages that held NaN
        outputs = dict(zip((id(case) for case in cases), outputs_together(engine, cases), strict=True))
        for case in (*BAD, SCORED):
            reason = outputs[id(case)]["meta_info"]["finish_reason"]
            assert reason == {"type": "abort", "message": SAYS, "status_code": 500}, case.name
            assert outputs[id(case)]["output_ids"] == []
        drawn = outputs[id(DRAWN)]
        assert (drawn["output_ids"], drawn["meta_info"]["finish_reason"]["message"]) == ([BAD_ID], SAYS)
        assert {case.name: answer_of(outputs[id(case)]) for case in NEIGHBOURS} == alone
    with pytest.raises(ExecutionError, match=SAYS):
        engine.generate(input_ids=[BAD_ID], sampling_params=GREEDY)
