"""Weights that change while requests run (--kv-on-update recompute and keep): each token says which weights gave it, and the oldest that gave its KV.

The fake's tokens depend on both, so that a token with another label, or from KV of other weights, is a wrong token.
"""

from pathlib import Path

import numpy as np
import pytest
from fake_worker import FakeWorker, Rig, first_history, history_hash, mixed, next_token
from hypothesis import given, settings
from hypothesis import strategies as st
from test_scheduler_tiers import PAGE, KvOfWorker, SteppedTier

from headrace.cache.page_files import PageFiles
from headrace.messages.control import AbortReq
from headrace.messages.operations import FLUSH_CACHE, Nothing
from headrace.messages.outputs import TokenVersions
from headrace.messages.packing import pack_int32
from headrace.messages.requests import PoolTask, PromptContent, TokenizedGenerateReqInput
from headrace.messages.weights import (
    CommitUpdate,
    ContinueGeneration,
    HoldForUpdate,
    PauseGeneration,
    PrepareUpdate,
    SetWeightVersion,
    UpdateFromDisk,
    WeightOpReply,
    WeightOpReq,
)

COIN = 2
"""`eos_every`: half of the tokens would be others with other weights."""


class LabelledKvOfWorker(KvOfWorker):
    """stored: of which weights the KV is that was to be stored, and by which it was found."""

    def __init__(self, worker: FakeWorker) -> None:
        super().__init__(worker)
        self.stored: set[tuple[int, int]] = set()

    def read(self, pages: list[int]) -> memoryview:
        oldest = self.worker.oldest.reshape(-1, PAGE)[pages]
        self.stored |= {(version, self.worker.version) for version in oldest.ravel().tolist()}
        return super().read(pages)

    def write(self, pages: list[int], data: memoryview) -> None:
        super().write(pages, data)
        self.worker.oldest.reshape(-1, PAGE)[pages] = self.worker.version


class Server:
    """A scheduler whose weights change, and that may be started again. asked: prompt and most new tokens, by rid."""

    def __init__(self, policy: str, folder: Path | None = None, **options: object) -> None:
        self.options = {"page_size": PAGE, "eos_every": COIN, **options, "kv_on_update": policy}
        self.policy, self.folder = policy, folder
        self.asked: dict[str, tuple[list[int], int]] = {}
        self.ids: dict[str, list[int]] = {}
        self.labels: dict[str, list[tuple[int, int, int]]] = {}
        self.finish: dict[str, object] = {}
        self.stored: list[set[tuple[int, int]]] = []
        self.version = self.num_operations = self.num_updates = 0
        self.rig = self.start()

    def start(self) -> Rig:
        self.tier = None

        def tier(worker: FakeWorker) -> SteppedTier:
            worker.version = self.version
            transfer = LabelledKvOfWorker(worker)
            self.stored.append(transfer.stored)
            self.tier = SteppedTier(transfer, lambda it: PageFiles(self.folder, it, PAGE, transfer.page_bytes, 1 << 30))
            return self.tier

        rig = Rig(**self.options, tier=tier if self.folder is not None else None)
        rig.worker.version = self.version
        if self.version:
            rig.inbox.send(WeightOpReq(0, SetWeightVersion(str(self.version))))
        return rig

    def restart(self) -> None:
        """The scheduler dies, and another one gets what it had not finished."""
        before, self.rig = self.rig, self.start()
        if before.state.gate.pause is not None:
            self.operate(PauseGeneration(before.state.gate.pause))
        for rid, (prompt, num_new) in self.asked.items():
            if rid not in self.finish:
                made = self.ids.get(rid, [])
                self.rig.ids[rid] = list(made)
                self.send(rid, prompt, num_new, output_ids=pack_int32(made), attempt=1)

    def add(self, prompt: list[int], num_new: int, num_samples: int = 1) -> None:
        group = f"g{len(self.asked)}" if num_samples > 1 else ""
        for _ in range(num_samples):
            rid = f"r{len(self.asked)}"
            self.asked[rid] = prompt, num_new
            self.send(rid, prompt, num_new, group=group)

    def send(self, rid: str, prompt: list[int], num_new: int, **fields: object) -> None:
        self.rig.add(rid, prompt, num_new, ignore_eos=True, stream=True, **fields)

    def operate(self, operation: object) -> None:
        self.num_operations += 1
        self.rig.inbox.send(WeightOpReq(self.num_operations, operation))

    def update(self, in_phases: bool = False) -> None:
        """New weights, whose switch waits for no request: a few turns are enough."""
        self.num_updates += 1
        version = str(self.num_updates)
        update = UpdateFromDisk(version, weight_version=version)
        for operation in (
            (PrepareUpdate(self.num_updates, update), HoldForUpdate(self.num_updates), CommitUpdate(self.num_updates))
            if in_phases
            else (update,)
        ):
            self.operate(operation)
            self.turn(3 + self.rig.state.config.max_steps_in_flight)
            [reply] = [
                m for m in self.rig.back.messages if isinstance(m, WeightOpReply) and m.id == self.num_operations
            ]
            assert reply.success
        assert self.rig.worker.version == self.version == self.num_updates

    def turn(self, count: int = 1) -> None:
        for _ in range(count):
            self.rig.worker.weights.finish()
            self.rig.turn()
            if self.tier is not None:
                while self.tier.work():
                    pass
            self.version = self.rig.worker.version
            for rid, rows in self.rig.rows.items():
                for row in rows:
                    made = self.ids.setdefault(rid, [])
                    assert row.num_output_tokens == len(made) + len(row.ids) // 4
                    made += np.frombuffer(row.ids, np.int32).tolist()
                    for one in row.versions:
                        assert one.start < len(made)
                        weights, kv = (
                            0 if name == "default" else int(name) for name in (one.weight_version, one.kv_version)
                        )
                        assert one.kv_age == weights - kv
                        self.labels.setdefault(rid, []).append((one.start, weights, kv))
                    if row.finish is not None:
                        self.finish[rid] = row.finish
            self.rig.rows.clear()

    def drain(self) -> None:
        self.operate(ContinueGeneration())
        for _ in range(3000):
            self.turn()
            if not self.rig.busy:
                break
        self.turn()

    def check(self) -> None:
        """All tokens are those of the weights, and of the KV, that they are said to be of."""
        for rid, made in self.ids.items():
            prompt, _ = self.asked[rid]
            for place, token in enumerate(made):
                _, weights, kv = [label for label in self.labels[rid] if label[0] <= place][-1]
                history = first_history(weights if self.policy == "recompute" else 0, 0)
                for earlier in prompt + made[:place]:
                    history = history_hash(history, earlier)
                if self.policy == "recompute":
                    assert weights == kv
                else:
                    history = mixed(history, weights, kv)
                assert token == next_token(history, COIN), (rid, place, weights, kv)
        assert all(kv == weights for stored in self.stored for kv, weights in stored)


PROMPTS = st.lists(st.integers(0, 1), min_size=1, max_size=24)
ACTION = st.one_of(
    st.tuples(PROMPTS, st.integers(1, 20), st.sampled_from([1, 1, 3])),
    st.integers(1, 6),  # so many turns
    st.sampled_from(["update", "update", "update in phases", "restart", "flush", "continue"]),
    st.tuples(st.just("pause"), st.sampled_from(["retract", "in_place"])),
    st.tuples(st.just("abort"), st.integers(0, 9)),
)
SETUP = st.fixed_dictionaries(
    {
        "num_pages": st.integers(12, 40),
        "radix": st.booleans(),
        "overlap": st.booleans(),
        "chunk": st.integers(1, 12),
        "max_running": st.integers(1, 5),
        "num_stages": st.sampled_from([1, 1, 2]),
        "num_parts": st.sampled_from([1, 1, 2]),
    }
)


@pytest.mark.parametrize("policy", ["recompute", "keep"])
@pytest.mark.parametrize("has_tier", [False, True])
def test_no_token_is_of_other_weights_or_kv_than_it_says(policy, has_tier, tmp_path_factory):
    @settings(max_examples=150, deadline=None)
    @given(setup=SETUP, guesses=st.sampled_from([0, 0, 3]), actions=st.lists(ACTION, min_size=2, max_size=20))
    def run(setup, guesses, actions):
        if setup["num_parts"] > 1:
            setup = setup | {"num_stages": 1}
        folder = tmp_path_factory.mktemp("kv") if has_tier else None
        server = Server(policy, folder, **setup | {"overlap": setup["overlap"] and setup["num_stages"] == 1})
        aborted = set()
        for action in actions:
            server.rig.worker.guesses = lambda step, row: (hash((step, row)) % (guesses + 1), hash((row, step)) % 2)
            match action:
                case int(count):
                    server.turn(count)
                case "update" | "update in phases":
                    server.update(in_phases=action == "update in phases")
                case "restart":
                    server.restart()
                case "flush":
                    server.rig.inbox.send(FLUSH_CACHE.message(1, Nothing()))
                case "continue":
                    server.operate(ContinueGeneration())
                case ("pause", mode):
                    server.operate(PauseGeneration(mode))
                case ("abort", number):
                    aborted.add(f"r{number}")
                    server.rig.inbox.send(AbortReq((f"r{number}",)))
                case (prompt, num_new, num_samples):
                    server.add(prompt, num_new, num_samples)
        server.drain()
        server.rig.check_idle()
        assert set(server.finish) == set(server.asked)
        for rid, (_, num_new) in server.asked.items():
            finish = server.finish[rid]
            assert finish.type == "length" or rid in aborted or "alone" in finish.message
            assert finish.type == "abort" or len(server.ids[rid]) == num_new
        server.check()

    run()


def test_kv_that_is_kept_would_be_found():
    """The check of the test above: a scheduler that does not drop KV fails it."""
    server = Server("keep", num_pages=40)
    server.rig.worker.mixes = False
    server.add([0, 1, 1, 0, 1], 30)
    server.turn(8)
    with pytest.raises(AssertionError, match="KV of an earlier position"):
        server.update()


@pytest.mark.parametrize("policy", ["recompute", "keep"])
def test_an_update_a_step_ends_no_stream_and_keeps_none_waiting(policy):
    server = Server(policy, num_pages=200, chunk=64, step_tokens=80)
    for _ in range(3):
        server.add([0, 1, 1, 0, 1] * 3, 30)
    server.turn(2)
    while len(server.finish) < 3:
        server.update()
    server.check()
    assert server.num_updates > 4
    if policy == "recompute":
        assert server.rig.state.counters.num_retracted >= server.num_updates
    else:
        assert server.rig.state.counters.num_retracted == 0
        assert max(weights - kv for _, weights, kv in server.labels["r0"]) == server.labels["r0"][-1][1] > 0


def test_a_prompt_that_hits_kept_pages_says_how_old_they_are():
    server = Server("keep", num_pages=100)
    server.add([0, 1, 1, 0] * 4, 2)
    server.drain()
    server.update()
    server.update()
    server.add([0, 1, 1, 0] * 4, 2)
    server.add([1, 1, 1, 0] * 4, 2)
    server.drain()
    assert server.labels == {"r0": [(0, 0, 0)], "r1": [(0, 2, 0)], "r2": [(0, 2, 2)]}
    server.check()


def test_pages_behind_newer_ones_are_as_old_as_what_they_were_computed_from():
    """The second request computes the first pages again while the first one, which began with older weights, is still at its prompt."""
    server = Server("keep", num_pages=100, chunk=4)
    prompt = [0, 1, 1, 0] * 50
    server.add(prompt, 4)
    server.turn()
    server.update()
    server.add(prompt[:33], 1)
    server.drain()
    assert server.labels["r1"] == [(0, 1, 1)]
    server.add(prompt, 8)
    server.drain()
    assert server.labels["r2"] == [(0, 1, 0)]
    server.check()


@pytest.mark.parametrize(("policy", "oldest"), [("recompute", 1), ("keep", 0)])
def test_an_embedding_is_labelled_too(policy, oldest):
    server = Server(policy, num_pages=100, chunk=4)
    content = PromptContent(np.array([0, 1, 1, 0] * 20, np.int32).tobytes())
    server.rig.inbox.send(TokenizedGenerateReqInput("r0", content, PoolTask()))
    server.turn()
    server.rig.inbox.send(WeightOpReq(1, UpdateFromDisk("1", weight_version="1")))
    for _ in range(60):
        server.rig.worker.weights.finish()
        server.rig.turn()
    [row] = server.rig.rows["r0"]
    assert row.pooled == b"pooled r0"
    assert row.versions == (TokenVersions(0, "1", ["default", "1"][oldest], 1 - oldest),)


def test_a_new_name_begins_a_label():
    server = Server("recompute", num_pages=100)
    server.add([0, 1, 1, 0], 30)
    server.turn(6)
    server.operate(SetWeightVersion("7"))
    server.drain()
    assert [label[1:] for label in server.labels["r0"]] == [(0, 0), (7, 7)]


def test_without_the_option_nothing_is_said():
    server = Server("flush", num_pages=100)
    server.add([0, 1, 1, 0], 5)
    server.drain()
    assert not server.labels
