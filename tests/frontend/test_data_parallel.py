"""Who gets a request when there are several replicas, and what becomes of it when one dies."""

import asyncio
import itertools
import random
from collections.abc import Iterator

import msgspec
import pytest
from frontend_fakes import READY, STATE, ByteTokenizer, answers_of, request, turns

from headrace.config.server_args import ServerArgs
from headrace.errors import CapacityError, ConfigError, RequestError
from headrace.frontend import balancers
from headrace.frontend.balancers import Balancer
from headrace.frontend.server_info import of_all_replicas, sum_of_states
from headrace.frontend.tokenizer_manager import TokenizerManager
from headrace.messages.channel import LocalQueue
from headrace.messages.control import AbortReq, Outcome
from headrace.messages.operations import (
    SLOW_DOWN,
    START_PROFILE,
    STOP_PROFILE,
    Nothing,
    SlowDownBody,
    StartProfileBody,
    answered,
)
from headrace.messages.outputs import BatchStrOut, FinishReason, StrOut, TokenIDOut
from headrace.messages.packing import pack_int32
from headrace.messages.requests import (
    BatchTokenizedGenerateReqInput,
    PromptContent,
    SampleTask,
    TokenizedGenerateReqInput,
)
from headrace.sampling.params import ResolvedSamplingParams


def asked(ids: list[int], max_new_tokens: int = 8, namespace: str = "") -> TokenizedGenerateReqInput:
    sampling = ResolvedSamplingParams(max_new_tokens=max_new_tokens, seed=0)
    return TokenizedGenerateReqInput("r", PromptContent(pack_int32(ids)), SampleTask(sampling), namespace=namespace)


def give(balancer: Balancer, one: TokenizedGenerateReqInput, replicas: list[int]) -> int:
    replica = balancer.choose(one, replicas)
    balancer.sent(replica, one)
    return replica


def test_round_robin_gives_to_each_in_turn():
    balancer = balancers.make_balancer("round_robin", 3)
    assert [give(balancer, asked([1]), [0, 1, 2]) for _ in range(6)] == [0, 1, 2, 0, 1, 2]


def test_shortest_queue_counts_what_is_live():
    balancer = balancers.make_balancer("shortest_queue", 2)
    one = asked([1])
    assert sorted(give(balancer, one, [0, 1]) for _ in range(4)) == [0, 0, 1, 1]
    balancer.left(1, one)
    balancer.left(1, one)
    assert [give(balancer, one, [0, 1]) for _ in range(2)] == [1, 1]


def test_total_tokens_weighs_prompts_and_what_may_be_made():
    balancer = balancers.make_balancer("total_tokens", 2)
    long = give(balancer, asked([1] * 100, 900), [0, 1])
    assert {give(balancer, asked([1] * 10, 10), [0, 1]) for _ in range(20)} == {1 - long}


PREFIX = list(range(200))


def test_cache_aware_goes_where_the_prefix_is():
    balancer = balancers.make_balancer("cache_aware", 3)
    home = give(balancer, asked([*PREFIX, 1]), [0, 1, 2])
    lead = balancers.MAX_LEAD_REQUESTS
    assert [give(balancer, asked([*PREFIX, i]), [0, 1, 2]) for i in range(lead)] == [home] * lead
    assert give(balancer, asked([*range(500, 700)]), [0, 1, 2]) != home, "another prefix goes to who has least to do"


def test_cache_aware_does_not_mix_namespaces_nor_remember_what_is_gone():
    balancer = balancers.make_balancer("cache_aware", 2)
    home = give(balancer, asked(PREFIX), [0, 1])
    assert give(balancer, asked(PREFIX, namespace="other"), [0, 1]) == 1 - home
    for replica in (0, 1):
        balancer.forget(replica)
    assert give(balancer, asked(PREFIX), [1 - home]) == 1 - home
    assert give(balancer, asked(PREFIX), [0, 1]) == 1 - home


def test_cache_aware_leaves_a_replica_that_has_far_more_to_do():
    balancer = balancers.make_balancer("cache_aware", 2)
    chosen = [give(balancer, asked(PREFIX), [0, 1]) for _ in range(200)]
    assert chosen[: balancers.MAX_LEAD_REQUESTS] == [chosen[0]] * balancers.MAX_LEAD_REQUESTS
    assert {0, 1} == set(chosen)


def test_cache_aware_forgets_the_least_recently_used(monkeypatch):
    monkeypatch.setattr(balancers, "MAX_BLOCKS", 8)
    balancer = balancers.CacheAware(1)
    for i in range(20):
        give(balancer, asked([*range(i, i + 64)]), [0])
    assert len(balancer._blocks[0]) == 8


def test_cache_aware_remembers_no_more_than_a_replica_can_have():
    balancer = balancers.CacheAware(2, cache_tokens=10 * balancers.BLOCK_TOKENS)
    home = give(balancer, asked(PREFIX), [0])
    for i in range(5):
        give(balancer, asked([1000 + i, *PREFIX]), [home])
    assert len(balancer._blocks[home]) == 10
    assert set(balancer._holders) == set(balancer._blocks[home]), "what one replica dropped nobody has"


def test_cache_aware_takes_the_least_loaded_of_those_with_the_prefix():
    balancer = balancers.make_balancer("cache_aware", 4)
    for replica, count in ((1, 3), (2, 1), (3, 2)):
        for i in range(count):
            balancer.sent(replica, asked([*PREFIX, i]))
    assert balancer.choose(asked(PREFIX), [0, 1, 2, 3]) == 2, "0 has nothing to do, but not the prefix"
    assert balancer.choose(asked(PREFIX), [0, 1, 3]) == 3
    balancer.sent(0, asked(PREFIX))
    balancer.left(0, asked(PREFIX))
    assert balancer.choose(asked(PREFIX), [0, 1, 2, 3]) == 0


@pytest.mark.parametrize("method", ["shortest_queue", "total_tokens"])
def test_the_least_loaded_of_many_is_found_after_thousands_of_changes(method):
    balancer = balancers.make_balancer(method, 50)
    rng = random.Random(5)
    live: list[tuple[int, TokenizedGenerateReqInput]] = []
    for _ in range(3000):
        replicas = rng.sample(range(50), rng.randint(1, 50))
        one = asked([1] * rng.randint(1, 9), rng.randint(1, 9))
        replica = balancer.choose(one, replicas)
        assert balancer.load[replica] == min(balancer.load[each] for each in replicas)
        balancer.sent(replica, one)
        live.append((replica, one))
        if rng.random() < 0.6:
            balancer.left(*live.pop(rng.randrange(len(live))))
    assert len(balancer._heap) < 500


def test_replicas_together_are_what_a_client_may_ask_for():
    infos = [msgspec.structs.replace(READY, max_total_tokens=n, context_length=n // 2) for n in (4096, 4000)]
    both = of_all_replicas(infos)
    assert (both.max_total_tokens, both.context_length, both.max_running_requests) == (4000, 2000, 16)
    with pytest.raises(ConfigError, match="GPU"):
        of_all_replicas([READY, msgspec.structs.replace(READY, device="cuda")])
    with pytest.raises(ConfigError, match="--kv-cache-dtype"):
        of_all_replicas([READY, msgspec.structs.replace(READY, kv_cache_dtype="int8")])


def test_states_add_up():
    total = sum_of_states([STATE, msgspec.structs.replace(STATE, replica=1, num_retracted=4)])
    assert (total.num_retracted, total.pool.total_tokens, total.pool.consistent) == (7, 8192, True)
    assert total.new_token_ratio == 0.5
    assert (total.paused, total.released, total.weight_version) == ("", (), "default")
    other = msgspec.structs.replace(STATE, paused="retract", released=("weights",), weight_version="2")
    mixed = sum_of_states([STATE, other])
    assert (mixed.paused, mixed.released, mixed.weight_version) == ("", (), "default")


def numbered(part: msgspec.Struct, numbers: Iterator[int]) -> msgspec.Struct:
    """The same with other numbers, each of them another one, in its parts, too."""
    changed = {}
    for name in part.__struct_fields__:
        value = getattr(part, name)
        if isinstance(value, msgspec.Struct):
            changed[name] = numbered(value, numbers)
        elif isinstance(value, int | float) and not isinstance(value, bool):
            changed[name] = type(value)(next(numbers))
    return msgspec.structs.replace(part, **changed)


def numbers_of(part: msgspec.Struct, path: str = "") -> dict[str, float]:
    """By path, those of its parts included."""
    found = {}
    for name in part.__struct_fields__:
        value = getattr(part, name)
        if isinstance(value, msgspec.Struct):
            found |= numbers_of(value, f"{path}{name}.")
        elif isinstance(value, int | float) and not isinstance(value, bool):
            found[f"{path}{name}"] = value
    return found


def test_every_number_of_a_state_adds_up_also_those_of_its_parts():
    states = [numbered(STATE, itertools.count(begin)) for begin in (100, 1000, 10000)]
    total = numbers_of(sum_of_states(states))
    parts = [numbers_of(state) for state in states]
    assert {"speculation.num_right", "grammars.cached_bytes", "pool.free_tokens"} <= total.keys()
    for name in total.keys() - {"new_token_ratio", "replica"}:
        assert total[name] == sum(part[name] for part in parts), name


def test_threads_do_not_go_with_replicas():
    with pytest.raises(ConfigError, match="--dp-size"):
        ServerArgs(dp_size=2, single_process=True)


class House:
    """A front end in front of three schedulers that only listen."""

    def __init__(self, **options):
        self.inboxes = [LocalQueue() for _ in range(3)]
        self.from_engine = LocalQueue()
        args = ServerArgs(model_path="fake", dp_size=3, **options)
        self.manager = TokenizerManager(
            args, READY, ByteTokenizer(), self.inboxes[0], self.from_engine, more_schedulers=self.inboxes[1:]
        )
        self.manager.start()

    def call(self, text: str, **fields):

        fields = {"sampling_params": {"max_new_tokens": 4, "temperature": 0.0}} | fields

        async def collect():
            return [answer async for answer in answers_of(self.manager, request(text, **fields))]

        return asyncio.create_task(collect())

    def requests(self) -> list[list[TokenizedGenerateReqInput]]:
        """What has newly arrived at each."""
        found: list[list[TokenizedGenerateReqInput]] = []
        for inbox in self.inboxes:
            found.append([])
            while (message := inbox.recv_nowait()) is not None:
                if isinstance(message, BatchTokenizedGenerateReqInput):
                    found[-1] += message.requests
                elif isinstance(message, TokenizedGenerateReqInput):
                    found[-1].append(message)
        return found

    async def until_sent(self, count: int) -> list[list[str]]:
        got: list[list[str]] = [[], [], []]
        for _ in range(10000):
            for replica, new in enumerate(self.requests()):
                got[replica] += [one.rid for one in new]
            if sum(map(len, got)) == count:
                return got
            await turns(1)
        raise AssertionError(got)

    def end(self, rid: str, source: int):
        out = StrOut("done", TokenIDOut(rid, pack_int32([1]), 1, FinishReason("length", length=1)))
        self.from_engine.send(BatchStrOut((out,), source))


async def test_samples_of_one_prompt_stay_together():
    house = House()
    call = house.call("p", sampling_params={"max_new_tokens": 4, "n": 3}, rid="a")
    sent = await house.until_sent(3)
    assert sorted(map(len, sent)) == [0, 0, 3]
    house.manager.abort_request("a")
    for j in range(3):
        house.end(f"a/{j}", 0)
    await call
    await house.manager.close()


async def test_a_named_replica_is_obeyed_and_one_that_is_not_there_refused():
    house = House()
    calls = [house.call("p", rid=f"r{i}", routed_dp_rank=2) for i in range(4)]
    assert await house.until_sent(4) == [[], [], ["r0", "r1", "r2", "r3"]]
    with pytest.raises(RequestError, match="numbered 0 to 2"):
        await house.call("p", routed_dp_rank=3)
    for i in range(4):
        house.end(f"r{i}", 2)
    for call in calls:
        await call
    assert [each["dp_rank"] for each in await house.manager.records.latest(9)] == [2] * 4
    await house.manager.close()


async def test_the_older_name_of_the_replica_means_the_same_and_must_not_contradict():
    house = House()
    calls = [
        house.call("p", rid="old", data_parallel_rank=1),
        house.call("p", rid="both", routed_dp_rank=1, data_parallel_rank=1),
    ]
    assert await house.until_sent(2) == [[], ["old", "both"], []]
    with pytest.raises(RequestError, match="data_parallel_rank is 3, but the replicas are numbered 0 to 2"):
        await house.call("p", data_parallel_rank=3)
    with pytest.raises(RequestError, match="differ"):
        await house.call("p", routed_dp_rank=1, data_parallel_rank=0)
    for rid in ("old", "both"):
        house.end(rid, 1)
    for call in calls:
        await call
    await house.manager.close()


async def test_the_samples_of_a_dead_replica_go_to_the_others():
    house = House()
    calls = [house.call("p", rid=f"r{i}") for i in range(6)] + [house.call("p", rid="named", routed_dp_rank=1)]
    sent = await house.until_sent(7)
    lost = [rid for rid in sent[1] if rid != "named"]
    house.manager.parts.down("scheduler 1", 1)
    assert await house.manager.health()

    moved = await house.until_sent(len(lost))
    assert sorted(moved[0] + moved[2]) == sorted(lost)
    assert moved[1] == []

    inbox = house.inboxes[1] = LocalQueue()
    house.manager.parts.up("scheduler 1", 1, 7, inbox)
    assert await house.until_sent(1) == [[], ["named"], []]
    sources = {rid: replica for replica in (0, 2) for rid in sent[replica] + moved[replica]} | {"named": 7}
    for rid, source in sources.items():
        house.end(rid, source)
    for call in calls:
        await call
    await house.manager.close()


async def test_a_session_stays_on_its_replica_while_that_one_is_up():
    house = House()
    session = await house.manager.open_session()
    replicas = []
    for number in range(5):
        call = house.call("p", rid=f"t{number}", session_params={"id": session})
        sent = await house.until_sent(1)
        (replica,) = [replica for replica in range(3) if sent[replica]]
        replicas.append(replica)
        house.end(f"t{number}", replica)
        await call
        if number == 2:
            house.manager.parts.down(f"scheduler {replica}", replica)
    first, then = replicas[0], replicas[3]
    assert replicas == [first, first, first, then, then]
    assert then != first
    branch = house.call("p", rid="b", session_params={"id": session, "rid": "t4"}, routed_dp_rank=3 - first - then)
    assert (await house.until_sent(1))[3 - first - then] == ["b"], "a client that names a replica is obeyed"
    house.end("b", 3 - first - then)
    await branch
    await house.manager.close()


async def test_control_messages_reach_all_that_live():

    house = House()
    house.manager.parts.down("scheduler 1", 1)
    asking = asyncio.create_task(house.manager.control.internal_states())
    await turns()
    seen = [inbox.recv_nowait() for inbox in house.inboxes]
    assert [message and message.name for message in seen] == ["internal_state", None, "internal_state"]
    for replica in (2, 0):
        state = msgspec.structs.replace(STATE, replica=replica)
        house.from_engine.send(answered(seen[replica].id, state))
    assert [state.replica for state in await asking] == [0, 2]
    house.manager.abort_request(abort_all=True)
    assert house.inboxes[0].recv_nowait() == AbortReq(abort_all=True)
    await house.manager.close()


async def test_a_replica_that_dies_before_it_answers_is_not_waited_for_unless_all_do():
    house = House()
    asking = asyncio.create_task(house.manager.control.internal_states())
    await turns()
    seen = [inbox.recv_nowait() for inbox in house.inboxes]
    house.from_engine.send(answered(seen[0].id, STATE))
    await turns()
    house.manager.parts.down("scheduler 1", 1)
    assert not asking.done(), "one that lives has not answered"
    house.manager.parts.down("scheduler 2", 2)
    assert await asking == [STATE]
    # What a dead one still has to say is of no interest.
    house.from_engine.send(answered(seen[1].id, STATE))
    asking = asyncio.create_task(house.manager.control.flush_cache())
    await turns()
    house.manager.parts.down("scheduler 0", 0)
    with pytest.raises(CapacityError):
        await asking
    await house.manager.close()


async def test_every_replica_is_profiled_and_one_that_had_ended_by_itself_is_no_error():
    house = House()

    async def asked(operation, request, replies):
        asking = asyncio.create_task(operation.ask(house.manager.control, request))
        await turns()
        seen = [inbox.recv_nowait() for inbox in house.inboxes]
        assert [message.name for message in seen] == [operation.name] * 3
        for one, (success, message) in zip(seen, replies, strict=True):
            house.from_engine.send(answered(one.id, Outcome(success, message)))
        return operation.combine(await asking)["message"]

    assert await asked(START_PROFILE, StartProfileBody(), [(True, "profiling")] * 3) == "profiling"
    ended = [(True, "wrote 0"), (False, "no profile"), (True, "wrote 2")]
    assert await asked(STOP_PROFILE, Nothing(), ended) == "wrote 0; no profile; wrote 2"
    with pytest.raises(RequestError, match="none"):
        await asked(STOP_PROFILE, Nothing(), [(False, "none")] * 3)
    await house.manager.close()


@pytest.mark.parametrize("method", ["round_robin", "shortest_queue", "total_tokens", "cache_aware"])
def test_every_policy_keeps_to_the_replicas_that_live(method):
    balancer = balancers.make_balancer(method, 4)
    for i, replicas in enumerate(itertools.islice(itertools.cycle(([1, 3], [0], [2, 3, 0])), 30)):
        assert give(balancer, asked([*PREFIX, i]), list(replicas)) in replicas


async def test_a_replica_that_returns_is_told_again_what_lasts():
    house = House()
    asking = asyncio.create_task(SLOW_DOWN.ask(house.manager.control, SlowDownBody(0.5)))
    await turns()
    for inbox in house.inboxes:
        house.from_engine.send(answered(inbox.recv_nowait().id, "slow"))
    assert await asking == {0: "slow", 1: "slow", 2: "slow"}
    house.manager.parts.down("scheduler 1", 1)
    returned = LocalQueue()
    house.manager.parts.up("scheduler 1", 1, 7, returned)

    assert returned.recv_nowait() == SLOW_DOWN.message(0, SlowDownBody(0.5))
    await house.manager.close()
