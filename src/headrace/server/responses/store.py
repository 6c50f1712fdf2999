"""Responses that are kept, in memory and by the key that made them.

Owns how many are kept: at most `--max-stored-responses`, and at most MAX_STORED_BYTES. Which of them go when there is no room, `turns.Kept` says.
They are kept as JSON, so that the bound is one of memory. Used from any thread.
"""

import threading
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass

import msgspec

from headrace.errors import NotFoundError
from headrace.server.http import encode_json
from headrace.turns import Kept

MAX_STORED_BYTES = 64 << 20
"""Most bytes of all kept responses. A response counts with the whole conversation before it, which it shares with the responses there."""

Item = Mapping[str, object]

_ITEMS = msgspec.json.Decoder(list[dict[str, object]])


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response as JSON. earlier: lists of items of the conversation before it. own: of its input. output: of its output.

    item_ids: of `own` and `output`. num_bytes: of everything, earlier lists included.
    """

    response: bytes
    earlier: tuple[bytes, ...]
    own: bytes
    output: bytes
    item_ids: frozenset[str]
    num_bytes: int

    @property
    def parts(self) -> tuple[bytes, ...]:
        """The lists of items of the whole conversation."""
        return (*self.earlier, self.own, self.output)

    def items(self) -> list[Item]:
        """The items of the whole conversation."""
        return [item for part in self.parts for item in _ITEMS.decode(part)]

    def input_items(self) -> list[Item]:
        """The items that the model was given."""
        return [item for part in (*self.earlier, self.own) for item in _ITEMS.decode(part)]


class ResponseStore:
    """The kept responses. max_responses: 0 = none is kept."""

    def __init__(self, max_responses: int, max_bytes: int = MAX_STORED_BYTES) -> None:
        self.max_responses = max_responses
        self._kept: Kept[tuple[str, str], StoredResponse] = Kept(max_bytes, max_responses)
        self._lock = threading.Lock()  # of what changes them

    def __len__(self) -> int:
        return len(self._kept)

    def get(self, owner: str, response_id: str, field_name: str | None = None) -> StoredResponse:
        """A response of this owner. field_name: the request's field that names it. Raises NotFoundError."""
        found = self._kept.get((owner, response_id))
        if found is None:
            shown = response_id if len(response_id) <= 100 else response_id[:100] + "..."
            why = "" if self.max_responses else ": this server keeps none, see --max-stored-responses"
            raise NotFoundError(f"there is no response with the id {shown!r}{why}", field_name)
        return found

    def put(
        self,
        owner: str,
        response: Mapping[str, object],
        before: StoredResponse | None,
        own: Sequence[Item],
        tenant: str = "",
    ) -> None:
        """Keep a response, and let others go if there is no room. before: the one that it continues. One that is too large is not kept.

        owner: who may see it. tenant: whose share it takes of.
        """
        output = response["output"]
        assert isinstance(output, list), "of a response"
        made, given, all_of_it = encode_json(output), encode_json(own), encode_json(response)
        num_bytes = len(made) + len(given) + len(all_of_it) + (before.num_bytes if before is not None else 0)
        ids = frozenset(item_id for item in (*own, *output) if isinstance(item_id := item.get("id"), str))
        earlier = before.parts if before is not None else ()
        stored = StoredResponse(all_of_it, earlier, given, made, ids, num_bytes)
        with self._lock:
            self._kept.put((owner, str(response["id"])), stored, num_bytes, tenant)

    def delete(self, owner: str, response_id: str) -> None:
        """Forget a response. Those that continue it keep its items. Raises NotFoundError."""
        with self._lock:
            self.get(owner, response_id)
            self._kept.drop((owner, response_id))

    def items_of(self, owner: str, ids: Collection[str]) -> dict[str, Item]:
        """The items of an owner's responses with these ids; those that are not there are left out."""
        found: dict[str, Item] = {}
        wanted = frozenset(ids)
        for (whose, _), response in self._kept.items():
            if whose == owner and not wanted.isdisjoint(response.item_ids):
                for item in _ITEMS.decode(response.own) + _ITEMS.decode(response.output):
                    item_id = item.get("id")
                    if isinstance(item_id, str) and item_id in wanted:
                        found[item_id] = item
        return found
