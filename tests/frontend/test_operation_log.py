"""What a replica has to be told to know what the others know."""

import itertools

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace.errors import ExecutionError
from headrace.frontend.update_phases import OperationLog, Standing
from headrace.messages.weights import (
    ContinueGeneration,
    PauseGeneration,
    ReleaseMemory,
    ResumeMemory,
    SetWeightVersion,
    UpdateFromDisk,
    UpdateFromTensors,
    WeightOperation,
)


def entered(*operations: WeightOperation) -> OperationLog:
    log = OperationLog()
    for operation in operations:
        log.enter(operation)
    return log


def test_orders_have_ids_and_only_what_still_matters_is_told_again():
    log = OperationLog()
    orders = (
        UpdateFromDisk("/first", weight_version="1"),
        PauseGeneration("abort"),
        UpdateFromDisk("/second", abort_all_requests=True, weight_version="2"),
        ReleaseMemory(("kv_cache",)),
        SetWeightVersion("two", abort_all_requests=True),
        PauseGeneration("in_place"),
    )
    assert [log.enter(order) for order in orders] == [1, 2, 3, 4, 5, 6]
    assert log.standing.orders_after(Standing()) == [
        UpdateFromDisk("/second"),
        SetWeightVersion("two"),
        PauseGeneration("in_place"),
        ReleaseMemory(("kv_cache",)),
    ]
    log.enter(ContinueGeneration())
    log.enter(ResumeMemory(("kv_cache", "weights")))
    assert log.standing.orders_after(Standing()) == [UpdateFromDisk("/second"), SetWeightVersion("two")]


def test_what_was_told_and_no_longer_holds_is_taken_back():
    told = entered(PauseGeneration("retract"), ReleaseMemory(("weights",))).standing
    assert Standing().orders_after(told) == [ContinueGeneration(), ResumeMemory(("weights",))]


def test_weights_that_were_given_back_are_taken_again_before_they_are_replaced():
    log = entered(ReleaseMemory(("kv_cache", "weights")))
    told = log.standing
    log.enter(UpdateFromDisk("/new"))
    assert log.standing.orders_after(told) == [
        ResumeMemory(("kv_cache", "weights")),
        UpdateFromDisk("/new"),
        ReleaseMemory(("kv_cache", "weights")),
    ]


def test_the_same_path_again_is_another_update():
    log = entered(UpdateFromDisk("/same"))
    told = log.standing
    log.enter(UpdateFromDisk("/same"))
    assert log.standing.orders_after(told) == [UpdateFromDisk("/same")]


def test_pushed_weights_cannot_be_told_until_an_update_from_disk():
    log = entered(UpdateFromTensors("/proc/1/fd/3", weight_version="t"))
    assert not log.can_be_told
    assert log.standing.version == "t"
    with pytest.raises(ExecutionError, match="pushed"):
        log.standing.orders_after(Standing())
    log.enter(UpdateFromDisk("/new"))
    assert log.can_be_told
    assert log.standing.orders_after(Standing()) == [UpdateFromDisk("/new"), SetWeightVersion("t")]


def test_what_is_taken_back_leaves_the_pause_that_came_meanwhile():
    log = entered(UpdateFromDisk("/old", weight_version="1"))
    before = log.standing
    log.enter(UpdateFromDisk("/new", weight_version="2"))
    log.enter(PauseGeneration("retract"))
    log.take_back(before)
    assert log.standing.orders_after(before) == [PauseGeneration("retract")]


def obey(state: dict[str, object], order: WeightOperation) -> None:
    """A replica, in short."""
    released = state["released"]
    assert isinstance(released, frozenset)
    match order:
        case UpdateFromDisk():
            assert "weights" not in released, "weights that are given back cannot be replaced"
            state["weights"] = order.model_path
            state["version"] = order.weight_version or state["version"]
        case SetWeightVersion():
            state["version"] = order.new_version
        case PauseGeneration():
            state["pause"] = order.mode
        case ContinueGeneration():
            state["pause"] = None
        case ReleaseMemory():
            state["released"] = released | set(order.tags)
        case ResumeMemory():
            state["released"] = released - set(order.tags)


TAGS = st.sampled_from([("kv_cache",), ("weights",), ("kv_cache", "weights")])
ORDERS = st.one_of(
    st.builds(PauseGeneration, st.sampled_from(["abort", "retract", "in_place"])),
    st.just(ContinueGeneration()),
    st.builds(ReleaseMemory, TAGS),
    st.builds(ResumeMemory, TAGS),
    st.builds(SetWeightVersion, st.sampled_from(["a", "b"])),
    st.builds(UpdateFromDisk, st.sampled_from(["/a", "/b"]), weight_version=st.sampled_from([None, "1", "2"])),
)


@given(st.lists(ORDERS, max_size=12), st.data())
def test_whoever_is_told_in_turns_ends_where_they_are_who_heard_everything(orders, data):
    log = OperationLog()
    begin = {"weights": "", "version": "default", "pause": None, "released": frozenset()}
    heard, late, told = dict(begin), dict(begin), Standing()
    for order, is_told in itertools.zip_longest(
        orders, data.draw(st.lists(st.booleans(), max_size=12)), fillvalue=None
    ):
        if order is not None and not (isinstance(order, UpdateFromDisk) and "weights" in heard["released"]):
            obey(heard, order)
            log.enter(order)
        if is_told:
            for each in log.standing.orders_after(told):
                obey(late, each)
            told = log.standing
    for each in log.standing.orders_after(told):
        obey(late, each)
    assert late == heard
