"""What crosses when an adapter is loaded into the engine or taken out of it.

An adapter is known to the engine by a number that is never used twice (`lora_id`, from 1; 0 = the base model). Names are the front end's.
"""

from typing import Protocol

import msgspec

RESTORED = 0
"""Id of what is sent to a scheduler that begins another life: nobody waits for the reply."""


class LoadLoraReq(msgspec.Struct, frozen=True, tag=True, array_like=True, gc=False):
    """Read the adapter in the folder `path` and keep it as `lora_id`. Nothing changes when that fails.

    at_once: before the next message is read, which may be a request that uses it; else beside the steps. fingerprint: which its files must
    have, empty = any.
    """

    id: int
    lora_id: int
    path: str
    at_once: bool = False
    fingerprint: str = ""


class UnloadLoraReq(msgspec.Struct, frozen=True, tag=True, array_like=True, gc=False):
    """Forget the adapter, once no request in the scheduler uses it. One that is not there is nothing."""

    id: int
    lora_id: int


class LoraReply(msgspec.Struct, frozen=True, tag=True, array_like=True, gc=False):
    """What became of either. message: why it failed. status_code: 400 when the adapter is at fault, 500 when we are; 200 = done.

    fingerprint: of the files of an adapter that was loaded.
    """

    id: int
    lora_id: int
    status_code: int = 200
    message: str = ""
    fingerprint: str = ""


class Adapters(Protocol):
    """The worker's side: the adapters in memory, by `lora_id`."""

    def __contains__(self, lora_id: int) -> bool:
        """Whether sequences may use it."""

    def load(self, lora_id: int, path: str, fingerprint: str) -> str:
        """Read an adapter whose files have this fingerprint (empty = any); theirs. From a thread of its own, while steps run.

        Raises ModelError, and then nothing has changed.
        """

    def unload(self, lora_id: int) -> None:
        """Forget an adapter that no step in flight uses. Unknown ids are ignored."""
