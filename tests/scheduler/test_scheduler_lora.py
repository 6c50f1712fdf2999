"""Adapters come and go beside the scheduler's steps, and requests of one that is not there are refused alone."""

import gc
import threading
import weakref

from fake_worker import FakeWorker, Mailbox, Rig

from headrace.messages.weights import LoadLoraReq, LoraReply, UnloadLoraReq
from headrace.scheduler.lora import LoraLoader

PROMPT = [0, 1, 1, 0, 1]


def replies(rig: Rig) -> list[LoraReply]:
    found = []
    while (message := rig.back.recv_nowait()) is not None:
        if isinstance(message, LoraReply):
            found.append(message)
    return found


def test_what_is_to_be_there_at_once_is_there_for_the_next_message():
    rig = Rig()
    rig.worker.loras.bad_paths = {"/bad"}
    rig.inbox.send(LoadLoraReq(0, 5, "/good", at_once=True))
    rig.inbox.send(LoadLoraReq(0, 6, "/bad", at_once=True))
    rig.add("good", PROMPT, 4, ignore_eos=True, lora_id=5)
    rig.add("bad", PROMPT, 4, ignore_eos=True, lora_id=6)
    rig.add("base", PROMPT, 4, ignore_eos=True)
    rig.drain()

    assert replies(rig) == [LoraReply(0, 5), LoraReply(0, 6, 400, "no good")]
    assert [rig.finish[rid].type for rid in ("good", "bad", "base")] == ["length", "abort", "length"]
    assert rig.finish["bad"].status_code == 500
    rig.check_idle()


def test_an_adapter_stays_until_the_last_request_that_uses_it_has_ended():
    rig = Rig()
    rig.inbox.send(LoadLoraReq(1, 5, "/good", at_once=True))
    rig.add("r", PROMPT, 20, ignore_eos=True, lora_id=5)
    rig.inbox.send(UnloadLoraReq(2, 5))
    for _ in range(5):
        rig.turn()
        assert 5 in rig.worker.loras
    rig.drain()
    rig.turn()
    rig.scheduler.loras.close()  # what was begun is finished

    assert rig.finish["r"].length == 20
    assert rig.worker.loras == set()
    assert replies(rig) == [LoraReply(1, 5), LoraReply(2, 5)]


def test_an_adapter_that_hangs_is_given_up_and_holds_up_nobody():
    rig = Rig()
    reading, comes_back = threading.Event(), threading.Event()
    load = rig.worker.loras.load

    def read(lora_id: int, path: str, fingerprint: str) -> str:
        if path == "/hangs":
            reading.set()
            assert comes_back.wait(60)
        return load(lora_id, path, fingerprint)

    rig.worker.loras.load = read
    rig.inbox.send(LoadLoraReq(1, 5, "/hangs"))
    rig.inbox.send(LoadLoraReq(2, 6, "/good"))
    rig.turn()
    assert reading.wait(60)
    rig.add("base", PROMPT, 4, ignore_eos=True)
    rig.drain()
    assert replies(rig) == []
    rig.now += rig.scheduler.config.weight_update_timeout_s
    rig.turn()
    rig.scheduler.loras.close()  # the second one is finished
    first, second = replies(rig)
    assert (first.id, first.status_code) == (1, 500)
    assert "600 s (--weight-update-timeout-s)" in first.message
    assert second == LoraReply(2, 6)
    comes_back.set()


def test_the_end_lets_go_of_the_worker_without_the_garbage_collector():
    """At the end of a process the collector does not run, and the kernels' memory would count as lost."""
    worker = FakeWorker(8, 2)
    loader = LoraLoader(worker.loras, Mailbox(), 0.0, lambda: 0.0)
    loader.load(LoadLoraReq(1, 5, "/good"))
    loader.close()
    assert worker.loras == {5}
    gone = weakref.ref(loader)
    gc.disable()
    try:
        del loader
        assert gone() is None
    finally:
        gc.enable()
