"""Responses that are kept, in memory and by the key that made them.

Owns how many are kept: at most `--max-stored-responses`, and at most MAX_STORED_BYTES of their items. When there is no room, the oldest
response of the owner with the most bytes goes. Used in the event loop that serves HTTP only.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from headrace.errors import NotFoundError
from headrace.server.http import encode_json

MAX_STORED_BYTES = 64 << 20
"""Most bytes of all kept responses as JSON. A response counts with the whole conversation before it, whose items it shares."""

Item = Mapping[str, object]


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response, as it was sent. earlier: items of the conversation before it. own: items of its input. num_bytes: of all of them as JSON."""

    response: Mapping[str, object]
    earlier: tuple[Item, ...]
    own: tuple[Item, ...]
    output: tuple[Item, ...]
    num_bytes: int

    @property
    def items(self) -> tuple[Item, ...]:
        """The whole conversation."""
        return (*self.earlier, *self.own, *self.output)

    @property
    def input_items(self) -> tuple[Item, ...]:
        """What the model was given."""
        return (*self.earlier, *self.own)


@dataclass(slots=True)
class _Owner:
    """The responses of an owner, the oldest first."""

    responses: OrderedDict[str, StoredResponse] = field(default_factory=OrderedDict)
    num_bytes: int = 0


class ResponseStore:
    """The kept responses. max_responses: 0 = none is kept."""

    def __init__(self, max_responses: int, max_bytes: int = MAX_STORED_BYTES) -> None:
        self.max_responses = max_responses
        self._max_bytes = max_bytes
        self._owners: dict[str, _Owner] = {}
        self._count = 0
        self._num_bytes = 0

    def __len__(self) -> int:
        """How many are kept."""
        return self._count

    def get(self, owner: str, response_id: str, field_name: str | None = None) -> StoredResponse:
        """A response of this owner. field_name: the request's field that names it. Raises NotFoundError."""
        found = self._owners.get(owner, _Owner()).responses.get(response_id)
        if found is None:
            shown = response_id if len(response_id) <= 100 else response_id[:100] + "..."
            why = "" if self.max_responses else ": this server keeps none, see --max-stored-responses"
            raise NotFoundError(f"there is no response with the id {shown!r}{why}", field_name)
        return found

    def put(
        self, owner: str, response: Mapping[str, object], before: StoredResponse | None, own: Sequence[Item]
    ) -> None:
        """Keep a response, and let others go if there is no room. before: the one that it continues. One that is too large is not kept."""
        output = response["output"]
        assert isinstance(output, list), "of a response"
        num_bytes = len(encode_json(response)) + len(encode_json(own)) + (before.num_bytes if before is not None else 0)
        if num_bytes > self._max_bytes or not self.max_responses:
            return
        while self._count >= self.max_responses or self._num_bytes + num_bytes > self._max_bytes:
            self._drop_one()
        earlier = before.items if before is not None else ()
        kept = StoredResponse(response, earlier, tuple(own), tuple(output), num_bytes)
        mine = self._owners.setdefault(owner, _Owner())
        mine.responses[str(response["id"])] = kept
        mine.num_bytes += num_bytes
        self._count += 1
        self._num_bytes += num_bytes

    def delete(self, owner: str, response_id: str) -> None:
        """Forget a response. Those that continue it keep its items. Raises NotFoundError."""
        self.get(owner, response_id)
        self._drop(owner, response_id)

    def items_of(self, owner: str) -> dict[str, Item]:
        """All items of an owner's responses that have an id, by it."""
        found: dict[str, Item] = {}
        for response in self._owners.get(owner, _Owner()).responses.values():
            for item in (*response.own, *response.output):
                if isinstance(item_id := item.get("id"), str):
                    found[item_id] = item
        return found

    def _drop_one(self) -> None:
        owner = max(self._owners, key=lambda name: self._owners[name].num_bytes)
        self._drop(owner, next(iter(self._owners[owner].responses)))

    def _drop(self, owner: str, response_id: str) -> None:
        mine = self._owners[owner]
        gone = mine.responses.pop(response_id)
        mine.num_bytes -= gone.num_bytes
        self._count -= 1
        self._num_bytes -= gone.num_bytes
        if not mine.responses:
            del self._owners[owner]
