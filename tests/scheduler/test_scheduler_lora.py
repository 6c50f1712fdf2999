"""Adapters come and go beside the scheduler's steps, and requests of one that is not there are refused alone."""

from fake_worker import Rig

from headrace.errors import ModelError
from headrace.messages.lora import LoadLoraReq, LoraReply, UnloadLoraReq

PROMPT = [0, 1, 1, 0, 1]


class Loras:
    """What a worker does for adapters. bad: paths that cannot be read."""

    def __init__(self, rig: Rig) -> None:
        self.loaded: set[int] = set()
        self.bad: set[str] = set()
        rig.worker.load_lora = self.load
        rig.worker.unload_lora = self.loaded.discard
        rig.worker.has_lora = self.loaded.__contains__

    def load(self, lora_id: int, path: str) -> None:
        if path in self.bad:
            raise ModelError("no good")
        self.loaded.add(lora_id)


def replies(rig: Rig) -> list[LoraReply]:
    found = []
    while (message := rig.back.recv_nowait()) is not None:
        if isinstance(message, LoraReply):
            found.append(message)
    return found


def test_what_is_to_be_there_at_once_is_there_for_the_next_message():
    rig = Rig()
    loras = Loras(rig)
    loras.bad = {"/bad"}
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
    loras = Loras(rig)
    rig.inbox.send(LoadLoraReq(1, 5, "/good", at_once=True))
    rig.add("r", PROMPT, 20, ignore_eos=True, lora_id=5)
    rig.inbox.send(UnloadLoraReq(2, 5))
    for _ in range(5):
        rig.turn()
        assert 5 in loras.loaded
    rig.drain()
    rig.turn()
    rig.scheduler._loras.close()  # what was begun is finished

    assert rig.finish["r"].length == 20
    assert loras.loaded == set()
    assert replies(rig) == [LoraReply(1, 5), LoraReply(2, 5)]
