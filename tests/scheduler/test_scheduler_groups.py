"""Samples of one prompt are counted by prompt: what is known of it goes with the last of them."""

import pytest
from fake_worker import Rig

from headrace.messages.control import AbortReq, ResetReq
from headrace.scheduler import control, retract
from headrace.scheduler.request import Req

LONG = {"max_new_tokens": 12, "ignore_eos": True}
PROMPT = [0, 1, 1, 0, 1]


class NeverListed(dict[str, Req]):
    """Requests that may be looked up but not gone through."""

    def __iter__(self):
        raise AssertionError("goes through all requests")

    keys = values = items = __iter__


def test_the_end_of_a_sample_does_not_look_at_the_other_requests():
    rig = Rig(num_pages=400, max_running=2)
    for i in range(6):
        rig.add(f"r{i}", PROMPT, group="g" if i % 2 else "h", **LONG)
    rig.turn()
    rig.state.by_rid = NeverListed(rig.state.by_rid)
    rows = control.abort(rig.state, AbortReq(tuple(f"r{i}" for i in range(6))))

    assert len(rows) == 6
    assert len(rig.state.groups) == 0


def test_a_group_has_begun_until_its_last_sample_ends():
    rig = Rig(num_pages=400, max_running=1)
    for i in range(3):
        rig.add(f"r{i}", PROMPT, group="g", **LONG)
    rig.add("alone", PROMPT, **LONG)
    rig.turn()
    last, alone = rig.state.by_rid["r2"], rig.state.by_rid["alone"]
    rig.inbox.send(AbortReq(("r0",)))
    rig.turn()

    assert len(rig.state.groups) == 1
    assert retract.has_begun(rig.state, last)  # by the sample before it
    assert not retract.has_begun(rig.state, alone)
    rig.drain()
    rig.check_idle()
    rig.add("again", PROMPT, group="g", **LONG)
    rig.state.gate.draining = True
    rig.turn()
    assert not retract.has_begun(rig.state, rig.state.by_rid["again"])


@pytest.mark.parametrize("turns", [0, 3])
def test_a_reset_forgets_every_group(turns):
    rig = Rig(num_pages=400, max_running=2)
    for i in range(4):
        rig.add(f"r{i}", PROMPT, group="g", **LONG)
    for _ in range(turns):
        rig.turn()
    rig.inbox.send(ResetReq(1))
    rig.turn()

    assert len(rig.state.groups) == 0
    assert not rig.state.by_rid
