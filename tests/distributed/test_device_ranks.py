"""Steps queued by two ranks, each on a device of the tests: the tokens of one process, however a step runs."""

import contextlib
import sys
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from device_ranks import device_ranks
from runner_harness import CONTEXT, DRAWN, GREEDY, WEARY, Driver, ids_by_row, make_driver, prompt, save_llama
from safetensors.torch import load_file, save_file
from turns_grammar import Turns, under

sys.path.insert(0, str(Path(__file__).parent.parent / "models"))

from lora_harness import tiny_adapter
from model_harness import save_tiny, tiny_config

from headrace.errors import ConfigError, ExecutionError
from headrace.execution import pool_plan
from headrace.kernels import cpu
from headrace.messages.control import FaultReq
from headrace.messages.requests import LogprobSpec
from headrace.messages.weights import UpdateFromDisk
from headrace.sampling import grammar_rows
from headrace.sampling.params import ResolvedSamplingParams

if cpu.why_not():
    pytest.skip(cpu.why_not(), allow_module_level=True)

A, B, C, D = prompt(40, 1), prompt(9, 2), prompt(17, 3), prompt(12, 4)
PROMPTS = (A, B, C, D)
BANNED = ResolvedSamplingParams(max_new_tokens=50, seed=0, temperature=0.0, bad_words=((5, 6),), min_new_tokens=2)
NUM_TOKENS = 10


def kinds() -> list[dict[str, Any]]:
    """One row of each kind that is queued: greedy, drawn, with penalties, and under a grammar."""
    return [{"sampling": GREEDY}, {"sampling": DRAWN}, {"sampling": WEARY}, under(Turns(3))]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Its folder, and the model of transformers."""
    made = tmp_path_factory.mktemp("device-ranks")
    return made, save_llama(made, intermediate_size=256)


@pytest.fixture(scope="module")
def folder(checkpoint: tuple[Path, Any]) -> Path:
    return checkpoint[0]


@pytest.fixture(autouse=True)
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """No mask is late, or takes too long, because the machine is busy."""
    monkeypatch.setattr(grammar_rows, "PATIENCE_S", 60.0)
    monkeypatch.setattr(grammar_rows, "LIMIT_S", 600.0)


@pytest.fixture(scope="module")
def want(folder: Path) -> list[list[int]]:
    """The tokens of each of `kinds`, and of a row that the host edits, each alone in one process."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(grammar_rows, "PATIENCE_S", 60.0)
        driver = make_driver(folder, attention_backend="torch_native", page_size=1, disable_weight_cache=True)
        with contextlib.closing(driver.worker):
            found = [driver.generate(seq, PROMPTS[seq], NUM_TOKENS, **kind) for seq, kind in enumerate(kinds())]
            return [*found, driver.generate(0, C, NUM_TOKENS, sampling=BANNED)]


@pytest.fixture(params=[(), (1, 2, 4)], ids=["eager", "graphs"])
def sizes(request: pytest.FixtureRequest) -> tuple[int, ...]:
    return request.param


def collect(driver: Driver, got: list[list[int]]) -> None:
    for row, token in enumerate(ids_by_row(driver.worker.collect())):
        got[row].append(token)


def test_rows_of_every_kind_give_the_tokens_of_one_process(folder, want, sizes):
    """Two steps in flight: the follower gets tokens that no host has seen."""
    got: list[list[int]] = [[], [], [], []]
    with device_ranks(folder, sizes) as ranks:
        driver, (ours, theirs) = ranks.driver, ranks.devices
        new = tuple(driver.new(seq, PROMPTS[seq], **kind) for seq, kind in enumerate(kinds()))
        driver.submit([(seq, len(PROMPTS[seq]), True) for seq in range(4)], new)
        for _ in range(NUM_TOKENS - 1):
            driver.submit([(seq, 1, True) for seq in range(4)])
            collect(driver, got)
        collect(driver, got)
        assert (ours.num_replays, theirs.num_replays) == (((NUM_TOKENS - 1),) * 2 if sizes else (0, 0))
        assert (ours.num_waits, theirs.num_waits) == (NUM_TOKENS, 0), "the follower waits for nothing"

    assert got == want[:4]
    assert not ranks.other.reasons


def test_chunks_and_steps_that_need_the_host_come_between(folder, want, sizes):
    """Prompts in chunks beside rows that decode, a row that the host edits, logprobs, hidden states: then queued steps again."""
    spec = LogprobSpec(prompt_start=3, top_num=2, token_ids=())
    with device_ranks(folder, sizes) as ranks:
        driver = ranks.driver
        assert driver.generate(0, A, 3, chunks=(7, 16)) == want[0][:3]
        driver.step([(0, 1, False), (1, 9, True)], (driver.new(1, B, sampling=DRAWN),))
        driver.computed[0] -= 1  # the row that did not sample goes on where it was
        step = driver.step([(0, 1, True), (1, 1, True), (2, 17, True)], (driver.new(2, C, sampling=BANNED),))
        assert ids_by_row(step) == [want[0][3], want[1][1], want[4][0]]
        driver.submit([(2, 1, True), (0, 1, True)])
        driver.submit([(2, 1, True), (0, 1, True)])
        assert [ids_by_row(driver.worker.collect()) for _ in range(2)] == [[want[4][i], want[0][i + 3]] for i in (1, 2)]
        rich = driver.step([(3, 12, True)], (driver.new(3, D, logprobs=spec, return_hidden_states=True),))
        assert len(rich.prompt_logprobs) == len(rich.logprobs) == 1
        assert len(rich.hidden_states[0]) == 12 * 32 * 4
        assert ids_by_row(driver.step([(0, 1, True), (1, 1, True)])) == [want[0][6], want[1][2]]
        assert driver.generate(3, B, NUM_TOKENS, sampling=DRAWN) == want[1]

    assert not ranks.other.reasons


def test_a_greedy_step_is_one_graph_in_each_rank_and_leaves_the_same_tokens_in_both(folder, want):
    with device_ranks(folder, (1, 2)) as ranks:
        driver, (ours, theirs) = ranks.driver, ranks.devices
        leader: Any = driver.worker
        assert (ours.num_captures, theirs.num_captures) == (2, 2)
        assert driver.generate(0, A, NUM_TOKENS) == want[0]
        assert (ours.num_replays, theirs.num_replays) == (NUM_TOKENS - 1, NUM_TOKENS - 1)
        tables = leader.runner.runner.table, ranks.follower.runner.table
        end = len(A) + NUM_TOKENS
    assert [table.tokens[0, :end].tolist() for table in tables] == [[*A, *want[0]]] * 2


def test_a_step_that_fails_before_its_layers_is_the_only_one(folder, want, sizes):
    with device_ranks(folder, sizes, enable_fault_injection=True) as ranks:
        driver = ranks.driver
        driver.step([(0, 40, True), (1, 9, True)], (driver.new(0, A), driver.new(1, B)))
        driver.submit([(1, 1, True)], faults=(FaultReq(stage="forward", kind="raise", rid="r1", at_token=1),))
        driver.submit([(0, 1, True)])
        with pytest.raises(ExecutionError, match="injected"):
            driver.worker.collect()
        assert ids_by_row(driver.worker.collect()) == want[0][1:2]
        assert driver.generate(1, B, 4, sampling=DRAWN) == want[1][:4]

    assert not ranks.other.reasons


def test_a_sequence_that_cannot_be_entered_ends_with_its_steps(folder, want, sizes, monkeypatch):
    """Just before, the follower was told of a constrained row of the step in flight."""
    with device_ranks(folder, sizes) as ranks:
        driver = ranks.driver
        leader: Any = driver.worker
        add = leader.runner.runner.sampler.add

        def failing(seq: int, new: Any) -> None:
            if new.rid == "bad":
                raise MemoryError
            add(seq, new)

        monkeypatch.setattr(leader.runner.runner.sampler, "add", failing)
        driver.submit([(3, 12, True)], (driver.new(3, D, **under(Turns(3))),))
        driver.submit([(1, 9, True)], (driver.new(1, B, rid="bad"),))
        driver.submit([(1, 1, True)])
        assert ids_by_row(driver.worker.collect()) == want[3][:1]
        for _ in range(2):
            with pytest.raises(ExecutionError):
                driver.worker.collect()
        assert ids_by_row(driver.step([(3, 1, True)])) == want[3][1:2]
        assert driver.generate(1, B, 4, sampling=DRAWN) == want[1][:4]

    assert not ranks.other.reasons


def test_graphs_are_captured_by_both_ranks_when_both_have_new_weights(folder, want, tmp_path):
    save_llama(tmp_path, intermediate_size=256)
    before = load_file(folder / "model.safetensors")
    after = {name: tensor.flip(0).contiguous() for name, tensor in before.items()}
    save_file(after, tmp_path / "model.safetensors", {"format": "pt"})
    changed = make_driver(tmp_path, attention_backend="torch_native", page_size=1, disable_weight_cache=True)
    with contextlib.closing(changed.worker):
        want_then = changed.generate(0, A, 4)
    with device_ranks(folder, (1, 2)) as ranks:
        driver, (ours, theirs) = ranks.driver, ranks.devices
        assert driver.generate(0, A, 4) == want[0][:4] != want_then
        driver.worker.weights.start(UpdateFromDisk(str(tmp_path))).result().install()
        assert driver.generate(0, A, 4) == want_then
        assert (ours.num_captures, theirs.num_captures) == (4, 4)
        driver.worker.weights.start(UpdateFromDisk(str(folder))).result().install()
        assert driver.generate(1, A, 4) == want[0][:4]

    assert not ranks.other.reasons


def test_an_adapter_is_loaded_by_both_ranks_and_used_beside_queued_steps(checkpoint, want, tmp_path):
    folder, model = checkpoint
    adapter = tiny_adapter(model)
    merged = adapter.merged(model)
    tokens = list(A)
    with torch.inference_mode():
        for _ in range(3):
            tokens.append(int(merged(torch.tensor([tokens])).logits[0, -1].argmax()))
    with device_ranks(folder, (1, 2)) as ranks:
        driver = ranks.driver
        driver.worker.loras.load(1, adapter.save(tmp_path), "")
        assert driver.generate(1, A, 3, lora_id=1) == tokens[len(A) :] != want[0][:3]
        assert driver.generate(0, A, 4) == want[0][:4]
        driver.worker.loras.unload(1)
        assert 1 not in driver.worker.loras

    assert not ranks.other.reasons


@pytest.mark.parametrize("ep_size", [1, 2])
def test_a_mixture_gives_the_tokens_of_one_process(tmp_path, ep_size):
    save_tiny(tiny_config("qwen3_moe"), tmp_path)
    prompts = [[3, 17, 5, 60, 2, 44], [9, 9, 31]]
    driver = make_driver(tmp_path, attention_backend="torch_native", page_size=1, disable_weight_cache=True)
    with contextlib.closing(driver.worker):
        want = [driver.generate(seq, tokens, 6) for seq, tokens in enumerate(prompts)]
    with device_ranks(tmp_path, (1, 2), ep_size=ep_size) as ranks:
        assert [ranks.driver.generate(seq, tokens, 6) for seq, tokens in enumerate(prompts)] == want
        assert ranks.devices[1].num_replays == 10


def test_the_kv_cache_is_as_large_as_the_rank_with_the_least_room_allows(folder, want, monkeypatch):
    room = {True: 4 << 20, False: 240 << 10}
    leader = threading.get_ident()
    monkeypatch.setattr(pool_plan, "available_bytes", lambda device: room[threading.get_ident() == leader])
    with device_ranks(folder, max_total_tokens=None) as ranks:
        info = ranks.driver.info
        assert info.max_total_tokens < 4 * CONTEXT
        assert any("the GPU of rank 1 has room for no more" in decision for decision in info.decisions)
        pools = [runner.attention._pool for runner in (ranks.driver.worker.runner.runner, ranks.follower.runner)]
        assert [len(pool.k[0]) for pool in pools] == [info.max_total_tokens] * 2
        assert ranks.driver.generate(0, A, 4) == want[0][:4]


def test_a_follower_that_ends_ends_the_start(folder, monkeypatch):
    """It finds its memory too small; the leader, which waits for its number, raises its error."""
    leader = threading.get_ident()
    room = {True: 4 << 20, False: 1 << 10}
    monkeypatch.setattr(pool_plan, "available_bytes", lambda device: room[threading.get_ident() == leader])
    with (
        pytest.raises(ConfigError, match="memory has room for 0 KV tokens"),
        device_ranks(folder, max_total_tokens=None),
    ):
        pass


def test_a_follower_that_fails_ends_the_leaders_waits(folder):
    """On a GPU the values would never come; here the collectives of the leader fail, too."""
    with device_ranks(folder) as ranks:
        driver = ranks.driver
        driver.step([(0, 40, True)], (driver.new(0, A),))
        ranks.devices[0].is_computing = lambda: True
        driver.submit([(0, 1, True)])
        ranks.other.break_up("the follower is gone")
        with pytest.raises(ExecutionError, match="the follower is gone"):
            driver.worker.collect()
        assert "the follower is gone" in ranks.other.reasons[0]


def test_a_step_that_the_devices_do_not_finish_in_time_breaks_up_the_group(folder):
    with device_ranks(folder) as ranks:
        driver = ranks.driver
        leader: Any = driver.worker
        driver.step([(0, 40, True)], (driver.new(0, A),))
        ranks.devices[0].is_computing = lambda: True
        leader.runner._device._limit_s = 0.0
        driver.submit([(0, 1, True)])
        with pytest.raises(ExecutionError, match=r"did not finish a step within 0 s \(--rank-timeout-s\)"):
            driver.worker.collect()
        assert "--rank-timeout-s" in ranks.other.reasons[0]
