"""Sessions: turns of a conversation whose tokens the server keeps, so that a client sends only what is new (SPEC S19).

Owns the open sessions and the tokens of their turns. A session is a tree: a turn goes on from another one (`rid`), from the
latest, or from nothing. Only ids are kept here; the KV of earlier turns is found by the prefix cache like any other prefix, and
computed again if it was evicted. Used by the tokenizer manager, in its event loop only. No torch.
"""

import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from headrace.errors import CapacityError, NotFoundError, RequestError
from headrace.messages.requests import SessionParams

MAX_SESSION_ID_LENGTH = 512
SWEEP_INTERVAL_S = 1.0
"""Stale sessions are looked for so often when sessions are opened, and whenever there is no room for another."""


@dataclass(slots=True, eq=False)
class Turn:
    """One request of a session and its place in the tree.

    num_kept: tokens of the parent's sequence that it goes on from. prompt_ids: what this turn added to them. output_ids: None
    until it has finished.
    """

    rid: str
    session: "_Session"
    parent: "Turn | None"
    num_kept: int
    prompt_ids: list[int]
    output_ids: list[int] | None = None
    children: set["Turn"] = field(default_factory=set)

    def sequence(self, with_outputs: bool = True) -> list[int]:
        """All tokens up to the end of this turn, or to the end of its prompt."""
        turns: list[Turn] = []
        turn: Turn | None = self
        while turn is not None:
            turns.append(turn)
            turn = turn.parent
        ids: list[int] = []
        for turn in reversed(turns):
            del ids[turn.num_kept :]
            ids += turn.prompt_ids
            if turn.output_ids is not None and (with_outputs or turn is not self):
                ids += turn.output_ids
        return ids


@dataclass(slots=True, eq=False)
class _Session:
    id: str
    timeout_s: float
    max_characters: int
    used_s: float
    turns: dict[str, Turn] = field(default_factory=dict)
    latest: Turn | None = None
    num_tokens: int = 0

    def is_stale(self, now_s: float) -> bool:
        """Nobody has used it for too long, and nothing of it runs."""
        if not self.timeout_s or now_s - self.used_s <= self.timeout_s:
            return False
        return all(turn.output_ids is not None for turn in self.turns.values())


class Sessions:
    """The open sessions.

    max_sessions, max_tokens: bounds over all of them. timeout_s: a session that nobody used for so long is closed; 0 = never.
    decode: text of ids, for sessions with a limit in characters.
    """

    def __init__(
        self,
        max_sessions: int,
        max_tokens: int,
        timeout_s: float,
        decode: Callable[[Sequence[int]], str],
        clock: Callable[[], float],
    ) -> None:
        self._open: dict[str, _Session] = {}
        self._max_sessions = max_sessions
        self._max_tokens = max_tokens
        self._timeout_s = timeout_s
        self._decode = decode
        self._clock = clock
        self._num_tokens = 0
        self._next_sweep_s = 0.0

    def __len__(self) -> int:
        return len(self._open)

    def open(self, session_id: str | None = None, capacity_of_str_len: int = 0, timeout_s: float | None = None) -> str:
        """A new session's id. capacity_of_str_len: most characters of a sequence, 0 = no limit but the context.

        timeout_s: instead of the server's own, which it cannot exceed. Raises RequestError, CapacityError.
        """
        if session_id is not None and not 0 < len(session_id) <= MAX_SESSION_ID_LENGTH:
            raise RequestError(f"session_id must have 1 to {MAX_SESSION_ID_LENGTH} characters", "session_id")
        if capacity_of_str_len < 0:
            raise RequestError("capacity_of_str_len must not be negative", "capacity_of_str_len")
        if timeout_s is not None and not 0 < timeout_s < float("inf"):
            raise RequestError("timeout must be a positive number of seconds", "timeout")
        self._close_stale()
        session_id = session_id or uuid.uuid4().hex
        if session_id in self._open:
            raise RequestError("a session with this session_id is open", "session_id")
        if len(self._open) >= self._max_sessions:
            raise CapacityError(f"{self._max_sessions} sessions are open, which is the limit (--max-sessions)")
        limits = [limit for limit in (timeout_s, self._timeout_s) if limit]
        self._open[session_id] = _Session(
            session_id, min(limits, default=0.0), capacity_of_str_len, used_s=self._clock()
        )
        return session_id

    def close(self, session_id: str) -> None:
        """Forget a session. Its running requests go on, for whoever waits for them. Raises NotFoundError."""
        self._drop(self._find(session_id))

    def begin(
        self, params: SessionParams, rid: str, ids: Sequence[int], bos_id: int | None = None
    ) -> tuple[list[int], Turn, list[str]]:
        """Enter request `rid` with the new tokens `ids`: its whole prompt, its turn, and requests to abort since it replaces them.

        bos_id: taken from the front of `ids` when they do not begin the sequence. Raises NotFoundError for a session or turn that
        is not there, RequestError for a turn that has not finished, CapacityError.
        """
        if params.id is None:
            raise RequestError("session_params needs the id of a session", "session_params")
        session = self._find(params.id)
        session.used_s = self._clock()
        if rid in session.turns:
            raise RequestError(f"rid {rid[:100]!r} is a turn of this session already", "rid")
        parent = self._parent(session, params)
        history: list[int] = []
        if parent is not None:
            if parent.output_ids is None:
                raise RequestError("session_params: the request it goes on from has not finished", "session_params")
            history = parent.sequence(with_outputs=not params.drop_previous_output)
            if params.offset:
                history = history[: params.offset]
        added = list(ids[1:]) if history and bos_id is not None and len(ids) > 1 and ids[0] == bos_id else list(ids)
        prompt = history + added
        self._check_size(session, prompt, len(added))
        stopped = self._replace(session, parent) if params.replace else []
        turn = Turn(rid, session, parent, len(history), added)
        if parent is not None:
            parent.children.add(turn)
        session.turns[rid] = session.latest = turn
        self._count(session, len(added))
        return prompt, turn, stopped

    def finish(self, turn: Turn, output_ids: Sequence[int]) -> None:
        """The request of a turn has ended well: other turns may go on from it."""
        if turn.session.turns.get(turn.rid) is turn:
            turn.output_ids = list(output_ids)
            self._count(turn.session, len(output_ids))
            turn.session.used_s = self._clock()

    def give_up(self, turn: Turn) -> None:
        """The request of a turn has failed or was aborted: as if it had not been. Does nothing to a finished turn."""
        if turn.output_ids is None and turn.session.turns.get(turn.rid) is turn:
            self._remove(turn)

    def _find(self, session_id: str) -> _Session:
        session = self._open.get(session_id)
        if session is not None and session.is_stale(self._clock()):
            self._drop(session)
            session = None
        if session is None:
            raise NotFoundError("session_params: there is no such session; it may have been closed", "session_params")
        return session

    @staticmethod
    def _parent(session: _Session, params: SessionParams) -> Turn | None:
        if params.rid is None:
            return None if params.replace else session.latest
        parent = session.turns.get(params.rid)
        if parent is None:
            raise NotFoundError("session_params: this session has no turn with this rid", "session_params")
        return parent

    def _check_size(self, session: _Session, prompt: list[int], num_added: int) -> None:
        limit = session.max_characters
        if limit and len(self._decode(prompt)) > limit:
            raise RequestError(f"the session may hold {limit} characters (capacity_of_str_len)", "session_params")
        if self._num_tokens + num_added > self._max_tokens:
            raise CapacityError(f"the open sessions hold {self._num_tokens} tokens; the limit is {self._max_tokens}")

    def _replace(self, session: _Session, parent: Turn | None) -> list[str]:
        """Remove what came after `parent` (None: everything); rids of those that still run."""
        gone = list(parent.children) if parent is not None else [t for t in session.turns.values() if t.parent is None]
        return [turn.rid for top in gone for turn in self._remove(top) if turn.output_ids is None]

    def _remove(self, top: Turn) -> list[Turn]:
        """Take a turn and all after it out of its session; what was taken."""
        session = top.session
        gone = [top]
        for turn in gone:
            gone += turn.children
            del session.turns[turn.rid]
            self._count(session, -len(turn.prompt_ids) - len(turn.output_ids or ()))
        if top.parent is not None:
            top.parent.children.discard(top)
        if session.latest in gone:
            session.latest = top.parent
        return gone

    def _count(self, session: _Session, num_tokens: int) -> None:
        session.num_tokens += num_tokens
        self._num_tokens += num_tokens

    def _drop(self, session: _Session) -> None:
        del self._open[session.id]
        self._num_tokens -= session.num_tokens
        session.turns.clear()
        session.latest = None

    def _close_stale(self) -> None:
        now = self._clock()
        if now < self._next_sweep_s and len(self._open) < self._max_sessions:
            return
        self._next_sweep_s = now + SWEEP_INTERVAL_S
        for session in [session for session in self._open.values() if session.is_stale(now)]:
            self._drop(session)
