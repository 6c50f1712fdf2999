"""Random histories of pause, continue, update, release, adapters that come and go, abort, disconnect and flush, on a scheduler whose
worker notices KV of other weights and of other adapters.

Whatever the order: no step meets an operation, every request ends exactly once, and when all is continued the pool is whole.
"""

import threading

import numpy as np
import pytest
from fake_worker import Rig, expected_outputs
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from headrace.messages.control import AbortReq, HealthCheckReply
from headrace.messages.operations import CHECK_HEALTH, FLUSH_CACHE, Nothing
from headrace.messages.weights import (
    CancelUpdate,
    CommitUpdate,
    ContinueGeneration,
    DropUpdate,
    GetWeight,
    HoldForUpdate,
    InitGroup,
    LoadLoraReq,
    LoraReply,
    PauseGeneration,
    PrepareUpdate,
    ReleaseMemory,
    ResumeMemory,
    SetWeightVersion,
    UnloadLoraReq,
    UpdateFromDisk,
    WeightOpReply,
    WeightOpReq,
)

MODES = st.sampled_from(["abort", "retract", "in_place"])
TAGS = st.sampled_from([("kv_cache",), ("weights",), ("kv_cache", "weights")])


class Inline:
    """What a scheduler reads adapters with, in its own thread."""

    task = None

    def __init__(self, do):
        self.lock, self.abandoned, self.do = threading.Lock(), False, do

    def submit(self, task):
        self.do(self, task)

    def close(self):
        pass


class Operations(RuleBasedStateMachine):
    @initialize(
        overlap=st.booleans(),
        radix=st.booleans(),
        page_size=st.sampled_from([1, 4]),
        num_pages=st.integers(40, 100),
        max_running=st.integers(1, 4),
        policy=st.sampled_from(["flush", "flush", "recompute"]),
    )
    def start(self, overlap, radix, page_size, num_pages, max_running, policy):
        self.drains = policy == "flush"
        self.rig = Rig(
            overlap=overlap,
            radix=radix,
            page_size=page_size,
            num_pages=num_pages,
            max_running=max_running,
            kv_on_update=policy,
        )
        self.asked = {}
        self.groups = {}  # samples of one prompt
        self.aborting = set()  # updates that end what they meet when they take effect
        self.mixed = set()  # requests that an update met while they were paused, or that it did not wait for: their tokens come from both
        self.aborted = set()
        self.next_version = 1
        self.num_operations = 0
        self.replies = {}
        self.lora_replies = []
        self.num_loras = 0
        self.loras = {0}  # what a request may name
        self.rig.worker.loras.bad_paths = {"bad"}
        self.rig.scheduler.loras._lane = Inline(self.rig.scheduler.loras._do)

    def operate(self, operation):
        self.num_operations += 1
        self.rig.inbox.send(WeightOpReq(self.num_operations, operation))

    def turn(self, count=1):
        for _ in range(count):
            version = self.rig.worker.version
            begun = {req.rid for req in (*self.rig.state.running, *self.rig.state.waiting) if req.has_begun}
            if self.aborting:
                self.aborted |= set(self.asked)
            self.rig.turn()
            if self.rig.worker.version != version:
                self.mixed |= begun
            for message in self.rig.back.messages:
                if isinstance(message, WeightOpReply):
                    assert message.id not in self.replies, "answered twice"
                    self.replies[message.id] = message
                    self.aborting.discard(message.id)
                elif isinstance(message, LoraReply):
                    self.lora_replies.append(message.id)
            self.rig.back.messages.clear()

    @rule(
        prompt=st.lists(st.integers(0, 1), min_size=1, max_size=20),
        max_new_tokens=st.integers(1, 12),
        choice=st.integers(0, 3),
    )
    def generate(self, prompt, max_new_tokens, choice):
        rid = f"r{len(self.asked)}"
        lora_id = sorted(self.loras)[choice % len(self.loras)]
        self.asked[rid] = (prompt, max_new_tokens, lora_id)
        namespace = f"lora {lora_id}" if lora_id else ""
        self.rig.add(rid, prompt, max_new_tokens, stream=True, lora_id=lora_id, namespace=namespace)

    @rule(prompt=st.lists(st.integers(0, 1), min_size=1, max_size=20), num_samples=st.integers(2, 6))
    def generate_samples(self, prompt, num_samples):
        """Several of one prompt: they are all of one version."""
        group = f"g{len(self.asked)}"
        for _ in range(num_samples):
            rid = f"r{len(self.asked)}"
            self.asked[rid] = (prompt, 6, 0)
            self.groups.setdefault(group, []).append(rid)
            self.rig.add(rid, prompt, 6, stream=True, group=group)

    @rule(bad=st.booleans())
    def load_adapter(self, bad):
        self.num_loras += 1
        self.rig.inbox.send(LoadLoraReq(2 * self.num_loras, self.num_loras, "bad" if bad else "good", at_once=True))
        if not bad:
            self.loras.add(self.num_loras)

    @rule(choice=st.integers(0, 3))
    def unload_adapter(self, choice):
        loaded = sorted(self.loras - {0})
        if loaded:
            lora_id = loaded[choice % len(loaded)]
            self.loras.discard(lora_id)  # the front end lets nobody name it any more
            self.rig.inbox.send(UnloadLoraReq(2 * lora_id + 1, lora_id))

    @rule(count=st.integers(1, 6))
    def turns(self, count):
        self.turn(count)

    @rule(mode=MODES)
    def pause(self, mode):
        if mode == "abort":
            self.aborted |= set(self.asked)
        self.operate(PauseGeneration(mode))

    @rule()
    def go_on(self):
        self.operate(ContinueGeneration())

    @rule(abort=st.booleans())
    def update(self, abort):
        version = str(self.next_version)
        self.operate(UpdateFromDisk(version, abort_all_requests=abort, weight_version=version))
        self.next_version += 1
        if abort:
            self.aborting.add(self.num_operations)

    @rule()
    def cancel(self):
        self.operate(CancelUpdate())

    @rule()
    def wait_too_long(self):
        self.rig.now += 1000.0

    @rule()
    def prepare(self):
        version = str(self.next_version)
        self.operate(PrepareUpdate(self.next_version, UpdateFromDisk(version, weight_version=version)))
        self.next_version += 1

    @rule(behind=st.integers(1, 2))
    def hold(self, behind):
        self.operate(HoldForUpdate(self.next_version - behind))

    @rule(behind=st.integers(1, 2))
    def commit(self, behind):
        self.operate(CommitUpdate(self.next_version - behind))

    @rule(behind=st.integers(1, 2))
    def drop(self, behind):
        self.operate(DropUpdate(self.next_version - behind))

    @rule(bad=st.booleans())
    def finish_job(self, bad):
        self.rig.worker.weights.finish(bad)

    @rule()
    def join_a_group(self):
        self.operate(InitGroup("localhost", 1, 1, 2, "g", "gloo", 1.0))

    @rule(tags=TAGS)
    def release(self, tags):
        self.operate(ReleaseMemory(tags))

    @rule(tags=TAGS)
    def resume(self, tags):
        self.operate(ResumeMemory(tags))

    @rule(number=st.integers(0, 30))
    def abort_or_disconnect(self, number):
        rid = f"r{number}"
        if rid in self.asked:
            self.aborted.add(rid)
            self.rig.inbox.send(AbortReq((rid,)))

    @rule()
    def abort_all(self):
        self.aborted |= set(self.asked)
        self.rig.inbox.send(AbortReq(abort_all=True))

    @rule()
    def flush(self):
        self.rig.inbox.send(FLUSH_CACHE.message(1, Nothing()))

    @invariant()
    def steps_are_held(self):
        if self.rig.state.gate.exclusive or self.rig.state.gate.held:
            assert not self.rig.worker.queue

    def teardown(self):
        if not hasattr(self, "rig"):
            return
        self.rig.inbox.send(WeightOpReq(0, ResumeMemory(("kv_cache", "weights"))))
        self.operate(ContinueGeneration())
        for number in range(1, self.next_version):
            self.operate(DropUpdate(number))
        for lora_id in self.loras - {0}:
            self.rig.inbox.send(UnloadLoraReq(2 * lora_id + 1, lora_id))
        for _ in range(4000):
            self.rig.worker.weights.finish()
            self.turn()
            if not self.rig.busy and len(self.replies) == self.num_operations + 1:
                break
        assert not self.rig.busy, "it does not come to rest"
        assert set(self.replies) == set(range(self.num_operations + 1)), "an operation was not answered"
        assert set(self.rig.finish) == set(self.asked), "a request did not end"
        self.turn()
        assert not self.rig.worker.loras, "an adapter was not let go"
        assert len(self.lora_replies) == len(set(self.lora_replies)), "answered twice"
        assert {i // 2 for i in self.lora_replies} == set(range(1, self.num_loras + 1)), "a load was not answered"
        for rid, (prompt, max_new_tokens, lora_id) in self.asked.items():
            finish = self.rig.finish[rid]
            if finish.type == "abort":
                assert rid in self.aborted or "alone" in finish.message
            elif rid not in self.mixed:
                version = self.rig.rows[rid][-1].stats.weight_version
                version = 0 if version == "default" else int(version)
                assert self.rig.ids[rid] == expected_outputs(
                    prompt, max_new_tokens, 9, version=version, lora_id=lora_id
                )
        for members in self.groups.values():
            if self.drains and not self.aborted & set(members) and not self.mixed & set(members):
                versions = {self.rig.rows[rid][-1].stats.weight_version for rid in members}
                assert len(versions) == 1, f"samples of one prompt have weights of {versions}"
        self.rig.check_idle()


TestOperations = Operations.TestCase
TestOperations.settings = settings(max_examples=100, stateful_step_count=25, deadline=None)


def reply_of(rig):
    return next(m for m in rig.back.messages if isinstance(m, WeightOpReply))


def test_a_stream_of_newcomers_cannot_starve_an_update():
    rig = Rig(eos_every=10**9)
    rig.add("first", [0], 30)
    rig.turn()
    rig.inbox.send(WeightOpReq(1, UpdateFromDisk("1")))
    for i in range(40):
        rig.add(f"late{i}", [0, 1], 20)
        rig.turn()
        rig.worker.weights.finish()
    assert rig.worker.version == 1
    assert rig.ids["first"] == expected_outputs([0], 30, 10**9)
    rig.drain()
    assert rig.ids["late0"] == expected_outputs([0, 1], 20, 10**9, version=1)
    rig.check_idle()


def replies_of(rig):
    return {m.id: m for m in rig.back.messages if isinstance(m, WeightOpReply)}


@pytest.mark.parametrize("overlap", [True, False])
def test_samples_of_one_prompt_run_with_one_version(overlap):
    """Sample 0 runs and ends alone, for want of room; the update waits for its siblings and no one else."""
    rig = Rig(overlap=overlap, max_running=1)
    for i in range(3):
        rig.add(f"s{i}", [0, 1], 5, ignore_eos=True, group="prompt")
    rig.add("other", [0, 1], 5, ignore_eos=True)
    rig.turn()
    rig.inbox.send(WeightOpReq(1, UpdateFromDisk("1", weight_version="1")))
    for _ in range(60):
        rig.turn()
        rig.worker.weights.finish()
    versions = {rid: rig.rows[rid][-1].stats.weight_version for rid in rig.rows}
    assert versions == {"s0": "default", "s1": "default", "s2": "default", "other": "1"}
    for i in range(3):
        assert rig.ids[f"s{i}"] == expected_outputs([0, 1], 5, 9, ignore_eos=True)
    assert rig.ids["other"] == expected_outputs([0, 1], 5, 9, ignore_eos=True, version=1)
    rig.check_idle()


def test_a_request_that_another_scheduler_began_ends_before_the_update():
    """Its first tokens are of the present weights, though it has not run here yet."""
    rig = Rig(max_running=1, eos_every=10**9)
    rig.add("runs", [0], 5)
    rig.turn()
    begun = expected_outputs([0, 1], 3, 10**9)
    rig.ids["replayed"] = list(begun)  # as they had arrived
    rig.add("replayed", [0, 1], 6, attempt=1, output_ids=np.array(begun, np.int32).tobytes())
    rig.inbox.send(WeightOpReq(1, UpdateFromDisk("1", weight_version="1")))
    for _ in range(40):
        rig.turn()
        rig.worker.weights.finish()
    assert rig.rows["replayed"][-1].stats.weight_version == "default"
    assert rig.worker.version == 1


def test_steps_go_on_while_an_update_is_prepared():
    rig = Rig(eos_every=10**9, num_pages=256)
    rig.add("runs", [0], 100, stream=True)
    rig.turn()
    rig.inbox.send(WeightOpReq(1, UpdateFromDisk("1")))
    rig.turn()
    made = len(rig.ids["runs"])
    rig.add("comes", [0, 1], 4)
    rig.inbox.send(CHECK_HEALTH.message(7, Nothing()))
    rig.add("leaves", [0, 1], 40)
    rig.inbox.send(AbortReq(("leaves",)))
    for _ in range(20):
        rig.turn()
    assert rig.reply(CHECK_HEALTH, 7) == HealthCheckReply(True, False)
    assert rig.finish["leaves"].type == "abort"
    assert len(rig.ids["runs"]) >= made + 19
    assert rig.ids["comes"] == expected_outputs([0, 1], 4, 10**9)
    rig.worker.weights.finish()
    rig.turn()
    rig.add("late", [0, 1], 4)
    rig.drain()
    assert rig.ids["runs"] == expected_outputs([0], 100, 10**9)
    assert rig.ids["late"] == expected_outputs([0, 1], 4, 10**9, version=1)
    assert reply_of(rig).success


def test_what_must_not_meet_steps_is_prepared_once_they_have_ended():
    rig = Rig(eos_every=10**9)
    rig.worker.weights.holds_steps = True
    rig.add("runs", [0], 10)
    rig.turn()
    rig.inbox.send(WeightOpReq(1, UpdateFromDisk("1")))
    for _ in range(30):
        rig.turn()  # the fake asserts that no step is in flight when it starts
    rig.add("waits", [0, 1], 4)
    for _ in range(5):
        rig.turn()
    assert "waits" not in rig.rows
    rig.worker.weights.finish()
    rig.drain()
    assert rig.ids["waits"] == expected_outputs([0, 1], 4, 10**9, version=1)


@pytest.mark.parametrize("comes_back", [True, False])
def test_an_update_that_hangs_is_given_up(comes_back):
    rig = Rig(eos_every=10**9)
    rig.add("runs", [0], 60)
    rig.inbox.send(WeightOpReq(1, UpdateFromDisk("1", abort_all_requests=True)))
    rig.turn()
    rig.now += rig.scheduler.config.weight_update_timeout_s
    rig.turn()
    reply = reply_of(rig)
    assert not reply.success
    assert "600 s (--weight-update-timeout-s)" in reply.message
    assert "runs" not in rig.finish, "an update that failed has ended a request"
    if comes_back:
        rig.worker.weights.finish()
    rig.inbox.send(WeightOpReq(2, UpdateFromDisk("2")))
    rig.turn()
    rig.worker.weights.finish()
    rig.drain()
    for _ in range(3):
        rig.turn()
    assert replies_of(rig)[2].success
    assert rig.worker.version == 2
    assert rig.ids["runs"] == expected_outputs([0], 60, 10**9)


def test_joining_a_group_has_its_own_limit():
    rig = Rig(eos_every=10**9)
    rig.add("runs", [0], 60)
    rig.inbox.send(WeightOpReq(1, InitGroup("localhost", 1, 1, 2, "g", "gloo", 2000.0)))
    rig.turn()
    rig.now += 1000.0
    rig.turn()
    assert not replies_of(rig)
    rig.now += 1006.0
    rig.turn()
    assert "within 2000 s" in reply_of(rig).message
    rig.drain()
    assert rig.finish["runs"].type == "length"


@pytest.mark.parametrize("is_staged", [True, False])
def test_cancelling_ends_what_has_not_taken_effect(is_staged):
    rig = Rig(eos_every=10**9)
    rig.add("runs", [0], 30)
    rig.inbox.send(WeightOpReq(1, UpdateFromDisk("1", abort_all_requests=not is_staged)))
    rig.inbox.send(WeightOpReq(2, UpdateFromDisk("2")))
    rig.inbox.send(WeightOpReq(3, GetWeight("a", 1)))
    rig.turn()
    if is_staged:
        rig.worker.weights.finish()
        rig.turn()
        assert rig.state.gate.draining
    rig.inbox.send(WeightOpReq(4, CancelUpdate()))
    rig.turn()
    rig.worker.weights.finish()
    rig.add("late", [0, 1], 5)
    rig.drain()
    told = replies_of(rig)
    assert [told[i].success for i in (1, 2, 3, 4)] == [False, False, True, True]
    assert told[4].message == "cancelled: 2 operations"
    assert rig.worker.version == 0
    assert rig.ids["runs"] == expected_outputs([0], 30, 10**9)
    assert rig.ids["late"] == expected_outputs([0, 1], 5, 10**9)
    assert not rig.state.gate.draining


def test_pause_modes():
    for mode, held, num_left in (("in_place", True, 1), ("retract", False, 1), ("abort", False, 0)):
        rig = Rig(eos_every=10**9)
        rig.add("a", [0, 1, 1], 20)
        for _ in range(4):
            rig.turn()
        rig.inbox.send(WeightOpReq(1, PauseGeneration(mode)))
        for _ in range(3):
            rig.turn()
        made = len(rig.ids["a"])
        for _ in range(3):
            rig.turn()
        assert reply_of(rig).num_paused_requests == num_left
        assert len(rig.ids["a"]) == made, "it goes on while paused"
        assert (rig.kv.state().leased_tokens > 0) == held
        rig.back.messages.clear()
        rig.inbox.send(FLUSH_CACHE.message(2, Nothing()))
        rig.turn()
        assert rig.reply(FLUSH_CACHE, 2).success == (not held)
        rig.inbox.send(WeightOpReq(2, PauseGeneration(mode)))  # again: nothing new
        rig.inbox.send(WeightOpReq(3, ContinueGeneration()))
        rig.inbox.send(WeightOpReq(4, ContinueGeneration()))
        rig.drain()
        if mode != "abort":
            assert rig.ids["a"] == expected_outputs([0, 1, 1], 20, 10**9)
        rig.check_idle()


def test_memory_is_not_released_under_requests():
    rig = Rig(eos_every=10**9)
    rig.add("a", [0, 1], 30)
    rig.turn()
    rig.inbox.send(WeightOpReq(1, ReleaseMemory(("kv_cache",))))
    rig.turn()
    assert not reply_of(rig).success
    rig.back.messages.clear()
    rig.inbox.send(WeightOpReq(2, PauseGeneration("in_place")))
    rig.inbox.send(WeightOpReq(3, ReleaseMemory(("kv_cache",))))
    for _ in range(4):
        rig.turn()
        rig.worker.weights.finish()
    assert rig.state.gate.released == {"kv_cache"}
    assert rig.kv.state().free_tokens == rig.kv.total_tokens
    rig.inbox.send(WeightOpReq(4, ContinueGeneration()))
    made = len(rig.ids["a"])
    for _ in range(3):
        rig.turn()
    assert len(rig.ids["a"]) == made, "it runs on released memory"
    rig.inbox.send(WeightOpReq(5, ResumeMemory(("kv_cache",))))
    for _ in range(3):
        rig.turn()
        rig.worker.weights.finish()
    rig.drain()
    assert rig.ids["a"] == expected_outputs([0, 1], 30, 10**9)


def test_the_version_can_be_set_alone():
    rig = Rig()
    rig.inbox.send(WeightOpReq(1, SetWeightVersion("seven")))
    rig.add("a", [0, 1], 3)
    rig.drain()
    assert reply_of(rig).weight_version == "seven"
    assert rig.rows["a"][-1].stats.weight_version == "seven"
