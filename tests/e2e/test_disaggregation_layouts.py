"""A prefill and a decode engine with other ranks and page sizes: the KV of one serves the other, or it is refused in words."""

import itertools
import re
import shutil
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from engines import GREEDY, free_port, random_ids, running_engine
from safetensors.torch import load_file, save_file

from headrace import Engine
from headrace.errors import RequestError

TWO: dict[str, Any] = {"tp_size": 2, "single_process": False}
SCATTERED: dict[str, Any] = {"attention_backend": "torch_native"}
PROMPTS = [random_ids(count, seed=count) for count in (1, 63, 100, 400)]
PROMPTS.append([*PROMPTS[3][:330], 7, 8])
"""The last one's beginning is in the cache of the decode side."""

pytestmark = pytest.mark.usefixtures("patient")
rooms = itertools.count(1)


def room_at(port: int) -> dict[str, Any]:
    return {"bootstrap_host": "127.0.0.1", "bootstrap_port": port, "bootstrap_room": next(rooms)}


def ask(prefill: Engine, decode: Engine, port: int, **call: Any) -> tuple[Any, int]:
    """The answer, as from a router, and the prompt tokens that the decode side has computed; again until the KV has been transferred: processes of
    several ranks take each other for dead on a busy machine."""
    with ThreadPoolExecutor(1) as threads:
        for _ in range(50):
            before, room = decode.internal_state(), room_at(port)
            sent = threads.submit(prefill.generate, **call, **room)
            answer = decode.generate(**call, **room)
            sent.result()
            after = decode.internal_state()
            if after.transfer.rooms > before.transfer.rooms:
                return answer, after.computed_prefill_tokens - before.computed_prefill_tokens
            decode.flush_cache()
    raise AssertionError("the KV never came")


def refusal(decode: Engine, port: int, call: dict[str, Any]) -> str:
    for _ in range(50):
        try:
            decode.generate(**call, **room_at(port))
        except RequestError as error:
            return str(error)
    raise AssertionError("never refused")


@pytest.mark.parametrize(
    ("prefill", "decode"),
    [
        (TWO, {}),
        (SCATTERED | {"page_size": 1}, SCATTERED | TWO | {"page_size": 16}),
    ],
    ids=["two ranks to one", "one to two, pages of 1 to 16"],
)
def test_tokens_are_those_of_one_server(tiny_uneven_model: str, prefill: dict[str, Any], decode: dict[str, Any]):
    """Logprobs differ by rounding: numbers of ranks add in another order."""
    port, exact = free_port(), {"dtype": "float32", "kv_cache_dtype": "float32"}
    call = {"sampling_params": GREEDY, "return_logprob": True}
    with ExitStack() as stack:
        first = running_engine(
            tiny_uneven_model, disaggregation_mode="prefill", disaggregation_bootstrap_port=port, **exact, **prefill
        )
        second = running_engine(tiny_uneven_model, disaggregation_mode="decode", **exact, **decode)
        alone = running_engine(tiny_uneven_model, **exact, **{**decode, "tp_size": 1, "single_process": True})
        engines = [stack.enter_context(one) for one in (first, second, alone)]
        for ids in PROMPTS:
            (got, computed), want = (
                ask(*engines[:2], port, input_ids=ids, **call),
                engines[2].generate(input_ids=ids, **call),
            )
            assert got["output_ids"] == want["output_ids"]
            gave, wanted = ([one[0] for one in answer["meta_info"]["output_token_logprobs"]] for answer in (got, want))
            assert gave == pytest.approx(wanted, abs=1e-4)
            assert computed == 0


def test_other_weights_are_refused_with_other_ranks_too(tiny_model: str, tmp_path: Path):
    other, port = shutil.copytree(tiny_model, tmp_path / "other"), free_port()
    tensors = load_file(other / "model.safetensors")
    tensors["model.layers.0.mlp.up_proj.weight"][3, 5] += 1
    save_file(tensors, other / "model.safetensors", metadata={"format": "pt"})
    call = {"input_ids": PROMPTS[0], "sampling_params": GREEDY}
    with running_engine(
        tiny_model, disaggregation_mode="prefill", disaggregation_bootstrap_port=port, **TWO
    ) as prefill:
        with running_engine(str(other), disaggregation_mode="decode") as decode:
            assert re.search(r"checkpoint: .* computes the prompt", refusal(decode, port, call))
        with running_engine(tiny_model, disaggregation_mode="decode") as decode:
            ask(prefill, decode, port, **call)
            decode.update_weights_from_disk(str(other))
            assert re.search(r"updated: .* goes on", refusal(decode, port, call))
