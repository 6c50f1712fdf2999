"""Messages that load an adapter into the engine or unload it.

The engine knows an adapter by a number that is never reused (`lora_id`, from 1; 0 = the base model). Only the front end knows names.
"""

from typing import Protocol

import msgspec

RESTORED = 0
"""Id of requests sent to a restarted scheduler; nobody waits for the reply."""


class LoadLoraReq(msgspec.Struct, frozen=True, tag=True, array_like=True, gc=False):
    """Read the adapter in the folder `path` and keep it as `lora_id`. If that fails, nothing changes.

    at_once: before the next message is read, which may be a request that uses it; otherwise beside the steps. fingerprint: the expected one of
    its files, empty = any.
    """

    id: int
    lora_id: int
    path: str
    at_once: bool = False
    fingerprint: str = ""


class UnloadLoraReq(msgspec.Struct, frozen=True, tag=True, array_like=True, gc=False):
    """Unload the adapter once no request in the scheduler uses it. Unknown ids are ignored."""

    id: int
    lora_id: int


class LoraReply(msgspec.Struct, frozen=True, tag=True, array_like=True, gc=False):
    """Result of a load or unload. message: why it failed. status_code: 200 = done, 400 = the adapter is at fault, 500 = we are.

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
        """Read an adapter whose files have this fingerprint (empty = any), and return theirs. Called in its own thread, while steps run.

        Raises ModelError; then nothing has changed.
        """

    def unload(self, lora_id: int) -> None:
        """Unload an adapter that no step in flight uses. Unknown ids are ignored."""
