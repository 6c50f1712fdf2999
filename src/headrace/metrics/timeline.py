"""Timelines of requests: what happened when, for `/v1/requests/{rid}` and spans; and dumps of them to a file, for debugging: when a process of the
engine dies, or on an operator's request.

Owns the records of the most recent requests, and the files. They contain no text, except the beginnings of prompts with --crash-dump-prompts.
Filled by the tokenizer manager, in its event loop.
"""

import json
import os
import time
from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from datetime import datetime
from itertools import chain, islice
from pathlib import Path
from typing import Any, Literal

import msgspec

from headrace.log import get_logger
from headrace.messages.outputs import FinishReason, SampleStats
from headrace.version import VERSION

logger = get_logger(__name__)

MAX_NOTES = 128
"""Most pauses, deaths and updates to record per sample."""

Note = Literal["lost", "replayed", "paused", "continued", "weights_updated", "memory_released", "memory_resumed"]
"""External events of live samples. lost: the scheduler that had it, or the detokenizer, has died."""


State = Literal["waiting", "running", "finished", "refused"]
"""waiting: no step computes it, since it is new, was retracted, or has lost its scheduler."""


@dataclass(slots=True)
class Timeline:
    """One sample. Times are seconds of the manager's clock, 0.0 = not yet; `created_unix_s` is the Unix time of its arrival.

    rid: as in the engine. shown_id: the id that the client saw. tenant, scope: of the key, see `Tenant`. owner: whose it
    is, see `Caller`. num_processed_tokens: of the prompt, computed so far or found in the cache. replica: the last that had it. runs: it does not
    wait. adapter: its name, empty = none. The scheduler's events come with the last output; after a replay, only those of the last attempt.
    """

    rid: str
    shown_id: str
    tenant: str
    created_s: float
    created_unix_s: float
    traceparent: str = ""
    prompt: str = ""
    stream: bool = False
    sent_s: float = 0.0
    first_token_s: float = 0.0
    finished_s: float = 0.0
    num_prompt_tokens: int = 0
    num_output_tokens: int = 0
    stats: SampleStats = field(default_factory=lambda: SampleStats(0, 0))
    finish: FinishReason | None = None
    num_replays: int = 0
    ended: bool = False
    scope: str = ""
    owner: str = ""
    replica: int | None = None
    runs: bool = False
    adapter: str = ""
    num_processed_tokens: int = 0
    _notes: list[tuple[str, float, int]] = field(default_factory=list)

    @property
    def own_rid(self) -> str:
        """The rid as the client knows it."""
        return self.rid.removeprefix(self.scope)

    def age_s(self, now_s: float) -> float:
        """Seconds from the arrival to the end, or until `now_s` while it lives; 0 if it was refused."""
        end_s = self.finished_s or (self.created_s if self.ended else now_s)
        return end_s - self.created_s

    @property
    def state(self) -> State:
        """What has become of it. refused: it ended before it was sent, and has no finish reason."""
        if self.finish is not None:
            return "finished"
        if self.ended:
            return "refused"
        return "running" if self.runs else "waiting"

    def note(self, kind: Note, at_s: float) -> None:
        """Record an external event; at most MAX_NOTES are kept."""
        if len(self._notes) < MAX_NOTES:
            self._notes.append((kind, at_s, self.num_output_tokens))

    def events(self) -> list[dict[str, Any]]:
        """All events, earliest first; `at_s` counts from the arrival."""
        found = [("received", self.created_s, 0)]
        if self.sent_s:
            found.append(("tokenized", self.sent_s, self.num_prompt_tokens))
        found += [(event.kind, event.at_s, event.num_tokens) for event in self.stats.events]
        found += self._notes
        if self.first_token_s:
            found.append(("first_token", self.first_token_s, 0))
        if self.finished_s:
            found.append(("finished", self.finished_s, self.num_output_tokens))
        order = {kind: place for place, kind in enumerate(_ORDER)}
        found.sort(key=lambda event: (event[1], order[event[0]]))
        return [
            {"event": kind, "at_s": round(max(0.0, at_s - self.created_s), 6)} | ({_COUNT[kind]: n} if n else {})
            for kind, at_s, n in found
        ]

    def describe(self) -> dict[str, Any]:
        """The timeline as JSON, without the text of the request."""
        miss = self.stats.cache_miss
        return self.summary() | {
            "cache_miss": None if miss is None else msgspec.structs.asdict(miss),
            "events": self.events(),
        }

    def summary(self) -> dict[str, Any]:
        """The same without the events."""
        finish = self.finish
        return {
            "rid": self.own_rid,
            "id": self.shown_id,
            "state": self.state,
            "created": self.created_unix_s,
            "key": self.tenant or None,
            "adapter": self.adapter or None,
            "dp_rank": self.replica,
            "stream": self.stream,
            "prompt_tokens": self.num_prompt_tokens,
            "processed_tokens": self.num_processed_tokens,
            "cached_tokens": self.stats.cached_tokens,
            "completion_tokens": self.num_output_tokens,
            "num_retractions": self.stats.num_retractions,
            "num_replays": self.num_replays,
            "weight_version": self.stats.weight_version,
            "queue_time_s": self.stats.queue_time_s,
            "ttft_s": self.first_token_s - self.created_s if self.first_token_s else None,
            "e2e_s": self.finished_s - self.created_s if self.finished_s else None,
            "finish_reason": None if finish is None else finish.type,
            "finish_message": None if finish is None else finish.message or None,
            "matched": None if finish is None else finish.matched,
        }


_COUNT: dict[str, str] = {
    "received": "num_tokens",
    "tokenized": "prompt_tokens",
    "grammar_compiled": "num_tokens",
    "transferred": "prompt_tokens",
    "admitted": "cached_tokens",
    "chunk": "num_tokens",
    "retracted": "completion_tokens",
    "lost": "completion_tokens",
    "replayed": "completion_tokens",
    "paused": "completion_tokens",
    "weights_updated": "completion_tokens",
    "memory_released": "completion_tokens",
    "memory_resumed": "completion_tokens",
    "continued": "completion_tokens",
    "first_token": "num_tokens",
    "finished": "completion_tokens",
}
"""Name of each event's count."""

_ORDER = tuple(_COUNT)


class Timelines:
    """Timelines of live samples and of the last `max_finished` that ended."""

    def __init__(self, max_finished: int) -> None:
        self._max_finished = max_finished
        self._live: dict[str, Timeline] = {}
        self._finished: OrderedDict[str, Timeline] = OrderedDict()

    def add(self, timeline: Timeline) -> None:
        self._live[timeline.rid] = timeline

    def finish(self, rid: str) -> None:
        """A sample has ended. A later one with the same rid replaces it."""
        timeline = self._live.pop(rid, None)
        if timeline is None:
            return
        timeline.ended = True
        if not self._max_finished:
            return
        self._finished.pop(rid, None)
        self._finished[rid] = timeline
        if len(self._finished) > self._max_finished:
            self._finished.popitem(last=False)

    def find(self, rid: str, owner: str | None) -> list[Timeline]:
        """The last sample `rid` of this owner, or all its samples with this id; owner None: those of every owner."""
        visible = [each for each in self if owner in (None, each.owner) and rid in (each.own_rid, each.shown_id)]
        exact = [each for each in visible if each.own_rid == rid]
        return (exact if owner is None else exact[-1:]) or visible

    def latest(self, limit: int, owner: str | None) -> list[Timeline]:
        """The last `limit` samples of this owner (None: of every owner): live ones, the latest first, then those that ended last."""
        newest_first = chain(reversed(self._live.values()), reversed(self._finished.values()))
        return list(islice((each for each in newest_first if owner in (None, each.owner)), limit))

    def __iter__(self) -> Iterator[Timeline]:
        """Finished ones first, earliest end first, then live ones."""
        yield from self._finished.values()
        yield from self._live.values()


def described(requests: Iterable[Timeline], prompts: bool) -> list[dict[str, Any]]:
    """The requests in the form of the file. Live requests have the state "waiting" or "running"."""
    return [each.describe() | ({"prompt": each.prompt} if prompts else {}) for each in requests]


def write_dump(folder: str, kind: str, message: str, requests: list[dict[str, Any]]) -> Path:
    """Write `<kind>-<time>-<pid>.json`, readable by the owner only. message: why. Raises OSError."""
    content = {"version": VERSION, "time": time.time(), "message": message, "requests": requests}
    now = datetime.now()
    path = Path(folder) / f"{kind}-{now:%Y%m%d-%H%M%S-%f}-{os.getpid()}.json"
    path.parent.mkdir(parents=True, exist_ok=True)
    with os.fdopen(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600), "w") as file:
        json.dump(content, file, indent=1)
    return path


def write_crash_dump(folder: str, message: str, requests: Iterable[Timeline], prompts: bool) -> Path | None:
    """Write `crash-<time>-<pid>.json`. If it cannot be written, that is logged: None. message: what died."""
    found = described(requests, prompts)
    try:
        path = write_dump(folder, "crash", message, found)
    except OSError as error:
        logger.error("cannot write a crash dump: %s", error.strerror)
        return None
    logger.error("wrote a dump of the last requests (%d) to %s", len(found), path)
    return path
