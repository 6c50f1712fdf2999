"""Orders to several replicas that die and come back: success means that every live one has it, a failure that all is as before."""

import asyncio
import itertools
import os

import pytest
from frontend_fakes import turns
from replica_fakes import FakeReplica, Replicas

from headrace.errors import CapacityError, ExecutionError, HeadraceError, ModelError, RequestError
from headrace.messages.outputs import TokenVersions
from headrace.messages.packing import pack_int32
from headrace.messages.weights import (
    CancelUpdate,
    CommitUpdate,
    ContinueGeneration,
    DropUpdate,
    HoldForUpdate,
    InitGroup,
    PauseGeneration,
    PrepareUpdate,
    ReleaseMemory,
    ResumeMemory,
    SetWeightVersion,
    UpdateFromDisk,
    UpdateFromDistributed,
    UpdateFromTensors,
)

NEW = UpdateFromDisk("/new", weight_version="1")
PUSHED = UpdateFromTensors("/proc/1/fd/9", weight_version="t")
OLD = ("start", "default", None, frozenset(), ())
DONE = ("/new", "1", None, frozenset(), ())


@pytest.fixture
async def replicas():
    replicas = Replicas()
    yield replicas
    await replicas.manager.close()


def states(replicas):
    return [one.state for one in replicas.all]


async def test_an_update_is_done_when_both_have_it(replicas):
    updating = replicas.operate(NEW)
    await replicas.until(lambda: replicas.all[1].asked(PrepareUpdate), 0)
    assert replicas.all[0].weights == "start", "nobody switches before all can"
    reply = await replicas.done(updating, 0, 1)
    assert (reply.success, reply.weight_version, replicas.manager.weights.version) == (True, "1", "1")
    assert states(replicas) == [DONE, DONE]


@pytest.mark.parametrize("phase", [PrepareUpdate, HoldForUpdate])
async def test_an_update_that_one_refuses_has_not_been(replicas, phase):
    replicas.all[1].refuses.add(phase)
    reply = await replicas.done(replicas.operate(NEW), 0, 1)
    assert (reply.success, reply.message, reply.weight_version) == (False, "no good", "default")
    assert states(replicas) == [OLD, OLD]
    for one in replicas.all:
        one.obey()
    assert all(isinstance(one.heard[-1], DropUpdate) and not one.is_held for one in replicas.all)
    assert replicas.manager.weights.log.head == 0


@pytest.mark.parametrize("phase", [PrepareUpdate, HoldForUpdate, CommitUpdate])
async def test_a_replica_that_dies_in_any_phase_has_it_in_its_next_life(replicas, phase):
    updating = replicas.operate(NEW)
    await replicas.reach(phase, 0, 1)
    replicas.die(1)
    reply = await replicas.done(updating, 0)
    assert reply.success
    returning = replicas.come_back(1)
    await replicas.until(lambda: bool(replicas.all[1].heard), 1)
    assert not replicas.is_up(1) or replicas.all[1].state == DONE
    await replicas.until(returning.done, 1)
    assert states(replicas) == [DONE, DONE]


@pytest.mark.parametrize("phase", [PrepareUpdate, HoldForUpdate, CommitUpdate])
async def test_a_replica_that_comes_back_in_any_phase_has_it_too(replicas, phase):
    replicas.die(1)
    updating = replicas.operate(NEW)
    await replicas.reach(phase, 0)
    returning = replicas.come_back(1)
    await replicas.until(returning.done, 1)
    assert replicas.is_up(1)
    assert replicas.all[1].state == (DONE if phase is CommitUpdate else OLD), "it is what the log says when it comes up"
    assert (await replicas.done(updating, 0, 1)).success
    assert states(replicas) == [DONE, DONE]


async def test_an_update_under_which_all_die_before_it_is_decided_has_not_been(replicas):
    updating = replicas.operate(NEW)
    await replicas.reach(HoldForUpdate, 0, 1)
    for index in (0, 1):
        replicas.die(index)
    with pytest.raises(CapacityError):
        await updating
    await replicas.until(replicas.come_back(0).done, 0)
    assert replicas.all[0].state == OLD


async def test_an_update_under_which_all_die_after_it_was_decided_holds(replicas):
    updating = replicas.operate(NEW)
    await replicas.reach(CommitUpdate, 0, 1)
    for index in (0, 1):
        replicas.die(index)
    assert (await updating).success
    await replicas.until(replicas.come_back(0).done, 0)
    assert replicas.all[0].state == DONE


async def test_a_replica_that_cannot_switch_is_started_again_with_what_the_others_have(replicas):
    replicas.all[1].refuses.add(CommitUpdate)
    assert (await replicas.done(replicas.operate(NEW), 0, 1)).success
    assert replicas.dismissed == [1]
    replicas.die(1)
    await replicas.until(replicas.come_back(1).done, 1)
    assert states(replicas) == [DONE, DONE]


async def test_when_none_can_switch_nothing_has_changed(replicas):
    for one in replicas.all:
        one.refuses.add(CommitUpdate)
    reply = await replicas.done(replicas.operate(NEW), 0, 1)
    assert (reply.success, reply.weight_version) == (False, "default")
    assert states(replicas) == [OLD, OLD]
    assert replicas.dismissed == []
    replicas.die(1)
    await replicas.until(replicas.come_back(1).done, 1)
    assert replicas.all[1].state == OLD


async def test_replicas_that_read_different_files_under_one_path_do_not_take_them(replicas):
    replicas.all[1].disk = {"/new": "another"}
    reply = await replicas.done(replicas.operate(NEW), 0, 1)
    assert not reply.success
    assert "changed while the replicas read it" in reply.message
    assert states(replicas) == [OLD, OLD]


async def test_a_caller_that_gives_up_before_the_decision_leaves_all_as_it_was(replicas):
    updating = replicas.operate(NEW)
    await replicas.reach(HoldForUpdate, 0, 1)
    updating.cancel()
    await asyncio.gather(updating, return_exceptions=True)
    for one in replicas.all:
        one.obey()
    assert states(replicas) == [OLD, OLD]
    assert not any(one.is_held or one.staged for one in replicas.all)
    assert (await replicas.done(replicas.operate(NEW), 0, 1)).success


@pytest.mark.parametrize("phase", [PrepareUpdate, HoldForUpdate])
async def test_a_cancelled_update_has_not_been_and_neither_have_those_behind_it(replicas, phase):
    updating, behind = replicas.operate(NEW), replicas.operate(UpdateFromDisk("/newer"))
    await replicas.reach(phase, 0, 1)
    cancelling = replicas.operate(CancelUpdate())
    assert (await replicas.done(cancelling, 0, 1)).message == "cancelled: 2 operations"
    for one in (updating, behind):
        reply = await replicas.done(one, 0, 1)
        assert (reply.success, reply.message) == (False, "cancelled; nothing has changed")
    for one in replicas.all:
        one.obey()
    assert states(replicas) == [OLD, OLD]
    assert not any(one.is_held or one.staged for one in replicas.all)


async def test_an_update_that_a_silent_replica_holds_up_can_be_cancelled(replicas):
    updating = replicas.operate(NEW)
    await replicas.until(lambda: replicas.all[1].asked(PrepareUpdate), 0)
    assert (await replicas.done(replicas.operate(CancelUpdate()), 0)).message == "cancelled: 1 operation"
    assert (await replicas.done(updating, 0)).message == "cancelled; nothing has changed"
    assert (await replicas.done(replicas.operate(NEW), 0, 1)).success, "what it hears later does not disturb the next"
    assert states(replicas) == [DONE, DONE]


async def test_who_asks_when_the_engine_is_gone_does_not_wait(replicas):
    replicas.manager.fail_all("gone")
    asking = replicas.manager.control.flush_cache()
    with pytest.raises(ExecutionError, match="gone"):
        await asking


async def test_a_decided_update_is_not_cancelled_any_more(replicas):
    updating = replicas.operate(NEW)
    await replicas.reach(CommitUpdate, 0, 1)
    assert (await replicas.done(replicas.operate(CancelUpdate()), 0, 1)).message == "cancelled: 0 operations"
    assert (await replicas.done(updating, 0, 1)).success
    assert states(replicas) == [DONE, DONE]


async def test_samples_of_one_prompt_are_not_told_apart_by_an_update(replicas):
    call = replicas.call(
        "p", rid="n", routed_dp_rank=0, sampling_params={"max_new_tokens": 8, "temperature": 0.0, "n": 2}
    )
    await replicas.given(0, "n/0")
    replicas.all[0].say("n/0", [1], 1, is_last=True)
    await turns()
    updating = replicas.operate(NEW)
    await replicas.reach(HoldForUpdate, 0, 1)
    for _ in range(100):
        for one in replicas.all:
            one.obey()
        await turns(1)
    assert states(replicas) == [OLD, OLD]
    replicas.all[0].say("n/1", [1], 1, is_last=True)
    assert (await replicas.done(updating, 0, 1)).success
    await call


# -- requests and an update


async def test_a_request_with_outputs_of_the_old_weights_ends_before_the_switch_wherever_it_goes(replicas):
    call = replicas.call("p", rid="r", routed_dp_rank=1)
    await replicas.given(1, "r")
    replicas.all[1].say("r", [1, 2], 2)
    await turns()
    updating = replicas.operate(NEW)
    await replicas.reach(HoldForUpdate, 0, 1)
    replicas.die(1)
    replicas.all[0].obey()
    # It waits for its replica, which may come back although the update is under way.
    await replicas.until(replicas.come_back(1).done, 0, 1)
    assert (await replicas.given(1, "r")).output_ids
    for _ in range(200):
        for one in replicas.all:
            one.obey()
        await turns(1)
    assert not updating.done()
    assert states(replicas) == [OLD, OLD]
    replicas.all[1].say("r", [3], 3, is_last=True)
    assert (await replicas.done(updating, 0, 1)).success
    await call
    assert states(replicas) == [DONE, DONE]


@pytest.mark.parametrize("policy", ["recompute", "keep"])
async def test_requests_do_not_hold_an_update_up_if_they_go_on_with_the_new_weights(policy):
    """Their tokens say which weights gave them, also after a death of their replica."""
    replicas = Replicas(kv_on_update=policy)
    call = replicas.call("p", rid="r", routed_dp_rank=1)
    await replicas.given(1, "r")
    replicas.all[1].say("r", [1, 2], 2, versions=(TokenVersions(0, "default", "default"),))
    await turns()
    assert (await replicas.done(replicas.operate(NEW), 0, 1)).success
    assert states(replicas) == [DONE, DONE]
    replicas.all[1].say("r", [3], 3, versions=(TokenVersions(2, "1", "default", 1),))
    await turns()
    replicas.die(1)
    await replicas.until(replicas.come_back(1).done, 0, 1)
    assert (await replicas.given(1, "r")).output_ids == pack_int32([1, 2, 3])
    replicas.all[1].say("r", [4], 4, is_last=True, versions=(TokenVersions(3, "1", "1"),))
    [answer] = await call
    assert answer["meta_info"]["weight_versions"] == [
        {"start": 0, "weight_version": "default", "kv_version": "default", "kv_age": 0},
        {"start": 2, "weight_version": "1", "kv_version": "default", "kv_age": 1},
        {"start": 3, "weight_version": "1", "kv_version": "1", "kv_age": 0},
    ]
    await replicas.manager.close()


async def test_paused_requests_do_not_hold_an_update_up(replicas):
    call = replicas.call("p", rid="r", routed_dp_rank=1)
    await replicas.given(1, "r")
    replicas.all[1].say("r", [1, 2], 2)
    await replicas.done(replicas.operate(PauseGeneration("in_place")), 0, 1)
    assert (await replicas.done(replicas.operate(NEW), 0, 1)).success
    replicas.all[1].say("r", [3], 3, is_last=True)
    await call


# -- pause and continue


async def test_a_replica_that_comes_back_while_a_pause_is_under_way_is_paused(replicas):
    replicas.die(1)
    pausing = replicas.operate(PauseGeneration("retract"))
    await replicas.until(lambda: replicas.all[0].asked(PauseGeneration))
    await replicas.until(replicas.come_back(1).done, 1)
    assert replicas.all[1].paused == "retract"
    assert (await replicas.done(pausing, 0, 1)).success


async def test_a_continue_passes_a_pause_that_waits_and_nobody_stays_paused(replicas):
    replicas.die(1)
    pausing = replicas.operate(PauseGeneration("retract"))
    await replicas.until(lambda: replicas.all[0].asked(PauseGeneration))
    returning = replicas.come_back(1)
    await replicas.until(lambda: replicas.all[1].asked(PauseGeneration))
    going_on = replicas.operate(ContinueGeneration())
    await replicas.until(returning.done, 0, 1)
    await replicas.until(lambda: pausing.done() and going_on.done(), 0, 1)
    assert [one.paused for one in replicas.all] == [None, None]


async def test_a_pause_under_which_one_dies_succeeds_and_holds_in_its_next_life(replicas):
    pausing = replicas.operate(PauseGeneration("in_place"))
    await replicas.until(lambda: replicas.all[1].asked(PauseGeneration), 0)
    replicas.die(1)
    assert (await replicas.done(pausing, 0)).success
    await replicas.until(replicas.come_back(1).done, 1)
    assert [one.paused for one in replicas.all] == ["in_place", "in_place"]
    assert (await replicas.done(replicas.operate(ContinueGeneration()), 0, 1)).success


async def test_a_continue_is_not_held_up_by_an_update(replicas):
    updating = replicas.operate(NEW)
    await replicas.reach(PrepareUpdate, 0, 1)
    waiting = replicas.operate(SetWeightVersion("later"))
    going_on = replicas.operate(ContinueGeneration())
    await turns()
    for one in replicas.all:
        one.take()
        one.waiting.reverse()
        one.obey(1)
    await replicas.until(going_on.done)
    assert not waiting.done()
    assert not updating.done()
    assert (await replicas.done(updating, 0, 1)).weight_version == "1"
    assert (await replicas.done(waiting, 0, 1)).weight_version == "later"
    assert [one.version for one in replicas.all] == ["later", "later"]


async def test_one_that_dies_while_it_is_told_is_no_loss_to_those_who_serve(replicas):
    replicas.die(1)
    await replicas.done(replicas.operate(PauseGeneration("retract")), 0)
    returning = replicas.come_back(1)
    await replicas.until(lambda: replicas.all[1].asked(PauseGeneration))
    replicas.die(1)
    with pytest.raises(CapacityError):
        await returning
    assert not replicas.is_up(1)
    await replicas.until(replicas.come_back(1).done, 1)
    assert replicas.all[1].paused == "retract"


# -- memory


async def test_memory_that_one_cannot_release_is_taken_again_by_the_others(replicas):
    replicas.all[1].refuses.add(ReleaseMemory)
    reply = await replicas.done(replicas.operate(ReleaseMemory(("kv_cache",))), 0, 1)
    assert not reply.success
    assert states(replicas) == [OLD, OLD]
    assert replicas.dismissed == []


async def test_a_replica_that_comes_back_while_memory_is_released_releases_it_too(replicas):
    replicas.die(1)
    releasing = replicas.operate(ReleaseMemory(("kv_cache",)))
    await replicas.until(lambda: replicas.all[0].asked(ReleaseMemory))
    await replicas.until(replicas.come_back(1).done, 1)
    assert (await replicas.done(releasing, 0, 1)).success
    assert [one.released for one in replicas.all] == [{"kv_cache"}, {"kv_cache"}]
    replicas.all[1].refuses.add(ResumeMemory)
    assert (await replicas.done(replicas.operate(ResumeMemory(("kv_cache",))), 0, 1)).success
    assert replicas.dismissed == [1], "requests run on the other one already"


# -- what a new life has


@pytest.mark.parametrize("is_updated", [False, True], ids=["as started", "updated"])
async def test_a_life_that_would_serve_other_weights_under_their_name_is_refused(replicas, is_updated):
    if is_updated:
        replicas.disk["/new"] = "first"
        await replicas.done(replicas.operate(NEW), 0, 1)
        replicas.disk["/new"] = "overwritten"
    replicas.die(1)
    returning = replicas.come_back(1, started_from="" if is_updated else "overwritten")
    await replicas.until(returning.done, 1)
    with pytest.raises(ModelError, match="Put the old files back"):
        await returning
    assert not replicas.is_up(1)


async def test_what_it_started_from_does_not_matter_once_it_was_replaced(replicas):
    replicas.disk["/new"] = "first"
    await replicas.done(replicas.operate(NEW), 0, 1)
    replicas.die(1)
    await replicas.until(replicas.come_back(1, started_from="overwritten").done, 1)
    assert states(replicas) == [DONE, DONE]


async def test_weights_that_are_gone_refuse_a_new_life_as_a_model_that_is_gone_does(replicas):
    await replicas.done(replicas.operate(NEW), 0, 1)
    replicas.die(1)
    returning = replicas.come_back(1)
    replicas.all[1].refuses.add(UpdateFromDisk)
    await replicas.until(returning.done, 1)
    with pytest.raises(ModelError, match="could not be loaded again: no good"):
        await returning


async def test_a_path_that_was_overwritten_is_no_loss_while_there_is_a_copy(replicas):
    kept = []
    for number in range(2):
        replicas.disk["/new"] = f"{number}" * 32 + "loaded"
        replicas.all[0].can_copy = replicas.all[1].can_copy = True
        assert (await replicas.done(replicas.operate(NEW), 0, 1)).success
        kept.append(replicas.manager.weights.reload().model_path)
        replicas.disk["/new"] = f"{number}" * 32 + "overwritten"
        replicas.die(1)
        await replicas.until(replicas.come_back(1).done, 1)
        assert replicas.all[1].weights == kept[-1] != "/new"
    assert replicas.manager.weights.model_path == "/new"
    await replicas.until(lambda: not os.path.exists(kept[0]))
    await replicas.until(lambda: os.path.exists(kept[1]))
    replicas.disk[kept[1]] = "tampered"
    replicas.die(1)
    returning = replicas.come_back(1)
    await replicas.until(returning.done, 1)
    with pytest.raises(ModelError, match="have changed"):
        await returning
    await replicas.manager.close()
    await replicas.until(lambda: not os.path.exists(kept[1]))


async def test_a_replica_whose_copy_goes_while_it_reads_it_reads_the_next_weights(replicas):
    await replicas.done(replicas.operate(NEW), 0, 1)
    replicas.die(1)
    returning = replicas.come_back(1)
    await replicas.until(lambda: replicas.all[1].asked(UpdateFromDisk))
    assert (await replicas.done(replicas.operate(UpdateFromDisk("/newer")), 0)).success
    replicas.all[1].refuses.add(UpdateFromDisk)
    replicas.all[1].obey()
    replicas.all[1].refuses.clear()
    await replicas.until(returning.done, 1)
    await returning
    assert replicas.all[1].weights == "/newer"


async def test_a_refused_update_leaves_the_copy_of_the_weights_in_force(replicas):
    for one in replicas.all:
        one.can_copy = True
    await replicas.done(replicas.operate(NEW), 0, 1)
    kept = replicas.manager.weights.reload().model_path
    replicas.all[1].refuses.add(HoldForUpdate)
    assert not (await replicas.done(replicas.operate(NEW), 0, 1)).success
    assert replicas.manager.weights.reload().model_path == kept
    await replicas.until(lambda: sorted(os.listdir(os.path.dirname(kept))) == [os.path.basename(kept), "lock"])


async def test_without_weights_that_can_be_loaded_the_server_says_so_until_it_gets_others(replicas):
    replicas.disk["/new"] = "loaded"
    await replicas.done(replicas.operate(NEW), 0, 1)
    replicas.disk["/new"] = "overwritten"
    held = replicas.call("p", rid="held")
    for index in (0, 1):
        replicas.die(index)
        returning = replicas.come_back(index)
        await replicas.until(returning.done, index)
        with pytest.raises(ModelError):
            await returning
        replicas.manager.parts.gone(f"scheduler {index}", index)
    for refused in (held, replicas.call("p"), replicas.operate(PUSHED), replicas.operate(PauseGeneration())):
        with pytest.raises(HeadraceError, match="goes on with the next weights") as caught:
            await refused
        assert caught.value.status_code == 503
    with pytest.raises(CapacityError, match="goes on with the next weights"):
        await replicas.manager.health()

    def revive(fault=""):
        for index in (0, 1):
            life = replicas.all[index] = FakeReplica(replicas.back, replicas.disk, replicas.manager.link.new_source())
            if not fault:
                replicas.manager.parts.rejoin(f"scheduler {index}", index, life.source, life.inbox, "")
        return fault

    replicas.manager.weights.revive = lambda: revive("it is cut off")
    reply = await replicas.done(replicas.operate(UpdateFromDisk("/broken", weight_version="2")))
    assert (reply.success, reply.message, reply.weight_version) == (False, "it is cut off", "1")
    replicas.manager.weights.revive = revive
    reply = await replicas.done(replicas.operate(UpdateFromDisk("/new", weight_version="3")), 0, 1)
    assert (reply.success, reply.weight_version) == (True, "3")
    assert [one.version for one in replicas.all] == ["3", "3"]
    assert await replicas.manager.health()
    replicas.disk["/new"] = "overwritten again"
    replicas.die(1)
    returning = replicas.come_back(1)
    await replicas.until(returning.done, 1)
    with pytest.raises(ModelError, match="have changed"):
        await returning


async def test_pushed_weights_are_for_all_or_none(replicas):
    updating = replicas.operate(PUSHED)
    await replicas.until(lambda: replicas.all[1].asked(PrepareUpdate), 0)
    replicas.die(1)
    with pytest.raises(CapacityError):
        await replicas.done(updating, 0)
    replicas.all[0].obey()
    assert states(replicas)[0] == OLD
    with pytest.raises(CapacityError, match="being restarted"):
        await replicas.done(replicas.operate(PUSHED), 0)
    replicas.all[0].obey()
    await replicas.until(replicas.come_back(1).done, 1)
    assert replicas.manager.weights.can_restore
    assert (await replicas.done(replicas.operate(PUSHED), 0, 1)).success
    assert [one.weights for one in replicas.all] == [PUSHED.file] * 2
    assert not replicas.manager.weights.can_restore


async def test_the_others_serve_on_when_one_cannot_get_pushed_weights_any_more(replicas):
    assert (await replicas.done(replicas.operate(PUSHED), 0, 1)).success
    named = replicas.call("p", rid="named", routed_dp_rank=1)
    await replicas.given(1, "named")
    replicas.die(1)
    replicas.manager.parts.gone("scheduler 1", 1)
    with pytest.raises(Exception, match="leave out routed_dp_rank"):
        await named
    call = replicas.call("p", rid="r")
    await replicas.given(0, "r")
    replicas.all[0].say("r", [1], 1, is_last=True)
    await call
    assert (await replicas.done(replicas.operate(PUSHED), 0)).success
    assert await replicas.manager.health()


# -- process groups

GROUP = InitGroup("127.0.0.1", 1, 1, 3, "g", "gloo", 5.0)
RECEIVED = UpdateFromDistributed(("w",), ("float32",), ((1,),), "g", weight_version="r")


async def test_replicas_join_a_group_at_ranks_that_follow_each_other(replicas):
    with pytest.raises(RequestError, match="world_size must be at least 3"):
        await replicas.operate(InitGroup("127.0.0.1", 1, 1, 2, "g", "gloo", 5.0))
    assert (await replicas.done(replicas.operate(GROUP), 0, 1)).success
    assert [one.groups for one in replicas.all] == [{"g": 1}, {"g": 2}]
    assert (await replicas.done(replicas.operate(RECEIVED), 0, 1)).success
    assert [(one.weights, one.version) for one in replicas.all] == [("received", "r")] * 2


async def test_a_group_that_one_cannot_join_is_left_by_the_others(replicas):
    replicas.all[1].refuses.add(InitGroup)
    reply = await replicas.done(replicas.operate(GROUP), 0, 1)
    assert (reply.success, reply.message) == (False, "no good")
    assert [one.groups for one in replicas.all] == [{}, {}]


async def test_a_replica_in_its_next_life_is_not_in_the_group(replicas):
    await replicas.done(replicas.operate(GROUP), 0, 1)
    replicas.die(1)
    await replicas.until(replicas.come_back(1).done, 1)
    with pytest.raises(RequestError, match="replica 1 was restarted"):
        await replicas.operate(RECEIVED)


async def test_when_only_some_receive_all_leave_the_group(replicas):
    await replicas.done(replicas.operate(GROUP), 0, 1)
    replicas.all[1].refuses.add(PrepareUpdate)
    reply = await replicas.done(replicas.operate(RECEIVED), 0, 1)
    assert not reply.success
    assert "join it again" in reply.message
    assert replicas.all[0].groups == {}
    assert [one.weights for one in replicas.all] == ["start", "start"]


# -- every order of two events


@pytest.mark.parametrize("first, second", [*itertools.permutations(["update", "pause", "release", "load"], 2)])
@pytest.mark.parametrize("num_heard", range(5))
async def test_a_death_and_a_return_between_any_two_orders_leave_both_alike(replicas, first, second, num_heard):
    orders = {
        "update": lambda: replicas.operate(NEW),
        "pause": lambda: replicas.operate(PauseGeneration("retract")),
        "release": lambda: replicas.operate(ReleaseMemory(("kv_cache",))),
        "load": lambda: asyncio.create_task(replicas.manager.adapters.load("a", "/a")),
    }
    replicas.manager.adapters._max_loras = 4
    tasks = [orders[first](), orders[second]()]
    for _ in range(num_heard):
        await turns()
        for one in replicas.all:
            one.obey(1)
    await turns()
    replicas.die(1)
    returning = replicas.come_back(1)
    await replicas.until(lambda: returning.done() and all(task.done() for task in tasks), 0, 1)
    await returning
    for task in tasks:
        await task
    for one in replicas.all:
        one.obey()
    assert replicas.all[0].state == replicas.all[1].state
