"""Weights that several ranks share: every rank takes up its part, between the same two steps, or none does."""

import os
import re
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from typing import Any

import pytest
import torch
from engines import running_engine
from rank_processes import follower_of
from weights_harness import GREEDY, LONG, PROMPTS, engine_of, fresh, tensors_of, tokens

from headrace.api.engine import Engine
from headrace.errors import RequestError
from headrace.weight_sync.sender import WeightSender, describe

TWO: dict[str, Any] = {
    "single_process": False,
    "num_threads": 2,
    "max_total_tokens": 2048,
    "dtype": "float32",
}


@pytest.fixture(scope="module")
def answers(old, new):
    return fresh(old), fresh(new)


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("saved")


@pytest.fixture(scope="module", params=["tp_size", "pp_size"])
def size(request):
    """The option that makes ranks."""
    return {request.param: 2}


@pytest.fixture(scope="module")
def ranks(old, folder, size):
    with running_engine(old, save_dir=str(folder), **size, **TWO) as engine:
        yield engine


def test_the_server_tells_the_bytes_of_all_ranks(ranks, old):
    with engine_of(old) as one:
        want = one.get_server_info()
    found = ranks.get_server_info()
    assert [found[name] for name in ("weight_bytes", "kv_bytes")] == [
        want[name] for name in ("weight_bytes", "kv_bytes")
    ]


def served(engine: Engine) -> list[list[int]]:
    return tokens(engine)


def test_a_checkpoint_replaces_the_weights_while_requests_run(ranks, old, new, answers):
    for folder, want in ((new, answers[1]), (old, answers[0])):
        stream = ranks.generate(input_ids=PROMPTS[0], sampling_params=LONG, stream=True)
        next(stream)
        assert ranks.update_weights_from_disk(folder, weight_version=folder)[0]
        *_, last = stream
        assert len(last["output_ids"]) == LONG["max_new_tokens"]
        assert served(ranks) == want
    assert ranks.generate(input_ids=PROMPTS[0], sampling_params=GREEDY)["meta_info"]["weight_version"] == old


@pytest.mark.parametrize("count", [1, 1000], ids=["one layer at a time", "all at once"])
def test_tensors_replace_the_weights(count, ranks, old, new, answers):
    for folder, want in ((new, answers[1]), (old, answers[0])):
        named = list(tensors_of(folder).items())
        size = max(1, len(named) // 4) if count == 1 else count
        for begin in range(0, len(named), size):
            assert ranks.update_weights_from_tensor(named[begin : begin + size])[0]
        assert served(ranks) == want


@contextmanager
def trained(engine: Engine, name: str) -> Iterator[Callable[..., tuple[bool, str]]]:
    """Sends named tensors to the engine, as its trainer, and returns the engine's answer."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    with ThreadPoolExecutor(1) as trainer:
        joining = trainer.submit(WeightSender, "127.0.0.1", port, 2, name, timeout_s=20.0)
        assert engine.init_weights_update_group("127.0.0.1", port, 1, 2, name, "gloo", timeout_s=20.0)[0]
        sender = joining.result()

        def update(named: list[tuple[str, torch.Tensor]], bucketed: bool) -> tuple[bool, str]:
            sent = trainer.submit(sender.send, named, bucketed=bucketed)
            answer = engine.update_weights_from_distributed(*describe(named), name, bucketed=bucketed)
            sent.result()
            return answer

        yield update
        assert engine.destroy_weights_update_group(name)[0]
        sender.close()


@pytest.mark.parametrize("bucketed", [False, True], ids=["one by one", "bucketed"])
def test_what_a_trainer_sends_reaches_all_ranks(bucketed, ranks, old, new, answers):
    with trained(ranks, f"group-{bucketed}") as update:
        for folder, want in ((new, answers[1]), (old, answers[0])):
            assert update(list(tensors_of(folder).items()), bucketed)[0]
            assert served(ranks) == want


@pytest.mark.parametrize("tp_size", [1, 2])
def test_tensors_of_other_dtypes_are_refused_by_name(tp_size, ranks, old, answers):
    """safetensors files cannot hold all of them, and the group stays."""
    with ExitStack() as engines:
        engine = ranks if tp_size > 1 else engines.enter_context(engine_of(old))
        with trained(engine, "dtypes") as update:
            for dtype in ("float8_e4m3fn", "complex64", "uint16", "int32"):
                named = [("model.norm.weight", torch.ones(64).to(getattr(torch, dtype)))]
                success, message = update(named, True)
                assert not success
                assert f"model.norm.weight is {dtype}, not float64, float32, float16 or bfloat16" in message
            assert update(list(tensors_of(old).items()), True)[0]
        assert served(engine) == answers[0]


def test_what_one_rank_refuses_changes_nothing(ranks, new, answers, tmp_path):
    before = served(ranks)
    success, message = ranks.update_weights_from_tensor([("model.norm.weight", torch.ones(3))])
    assert not success
    assert "not [64]" in message
    assert not ranks.update_weights_from_disk(str(tmp_path))[0]
    assert served(ranks) == before == answers[0]


def test_memory_of_all_ranks_is_released_and_taken_back(ranks, old, answers):
    with engine_of(old) as one:
        wanted = {tag: released(one, [tag]) for tag in ("weights", "kv_cache")}
    found = {tag: released(ranks, [tag]) for tag in ("weights", "kv_cache")}
    assert found["kv_cache"] == wanted["kv_cache"]
    # Each rank of --tp-size has all the norms and, of an embedding that is not tied, all rows.
    assert wanted["weights"] <= found["weights"] < 2 * wanted["weights"]
    assert released(ranks, ["kv_cache", "weights"]) == sum(found.values())
    assert served(ranks) == answers[0]


def released(engine: Engine, tags: list[str]) -> int:
    """Release memory, take it back, and return how many bytes were said."""
    texts = [act(tags) for act in (engine.release_memory_occupation, engine.resume_memory_occupation)]
    sizes = [
        re.fullmatch(rf"(\d+) bytes were {done}", text[1])
        for done, text in zip(("released", "resumed"), texts, strict=True)
    ]
    assert all(sizes), texts
    first, second = (int(size[1]) for size in sizes if size)
    assert first == second
    return first


def test_weights_are_read_whole(ranks, old):
    for name, tensor in tensors_of(old).items():
        read = torch.tensor(ranks.get_weights_by_name(name, truncate_size=1000))
        assert torch.equal(read, tensor[:1000].float()), name
    with pytest.raises(RequestError, match="no weight"):
        ranks.get_weights_by_name("model.nothing.weight")


def test_what_is_saved_is_whole(ranks, size, old, answers, folder):
    [name] = size
    assert ranks.save_sharded_state(name)[0]
    assert name in [path.name for path in folder.iterdir()]
    assert all(path.name in ("tp_size", "pp_size") for path in folder.iterdir())
    again = fresh(str(folder / name), load_format="sharded_state", tokenizer_path=old)
    assert again == answers[0]
    success, message = ranks.save_sharded_state(name)
    assert not success
    assert "already exists" in message


@pytest.mark.parametrize("size", ["tp_size"], indirect=True)  # who is started again finds the new weights as all do
def test_after_a_rank_was_lost_the_new_weights_are_served_again(ranks, old, new, answers):
    assert ranks.update_weights_from_disk(new)[0]
    want = ranks.generate(input_ids=PROMPTS[0], sampling_params=LONG)["output_ids"]
    begun = threading.Event()
    found: list[list[int]] = []

    def read() -> None:
        for output in ranks.generate(input_ids=PROMPTS[0], sampling_params=LONG, stream=True):
            begun.set()
            found[:] = [output["output_ids"]]

    reader = threading.Thread(target=read)
    reader.start()
    assert begun.wait(60)
    os.kill(follower_of(ranks).pid, signal.SIGKILL)
    reader.join(60)
    assert found == [want]
    assert served(ranks) == answers[1]
    assert ranks.update_weights_from_disk(old)[0]
