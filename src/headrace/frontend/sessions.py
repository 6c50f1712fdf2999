"""Sessions: turns of a conversation whose tokens the server keeps, so that a client sends only what is new.

A session belongs to the key that opened it, and is unknown to others. It is a tree: a turn continues another one (`rid`), the latest one, or
none. Only ids are kept here; the KV of earlier turns is found by the prefix cache like any other prefix, and computed again if it was evicted.
With --session-dir, each is in a file, too (`session_files`), and is opened again from there.
"""

import math
import uuid
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from headrace.errors import CapacityError, ExecutionError, NotFoundError, RequestError
from headrace.frontend.session_files import TOKEN_BYTES, SessionFiles, SessionRecord, TurnRecord
from headrace.frontend.tenants import ANONYMOUS, Caller, Tenant, TenantLimits
from headrace.log import get_logger
from headrace.messages.packing import pack_int32, unpack_int32
from headrace.messages.requests import SessionParams

_logger = get_logger(__name__)

MAX_SESSION_ID_LENGTH = 512
SWEEP_INTERVAL_S = 1.0
"""Stale sessions are removed at most this often when a session is opened, and whenever there is no room for another."""
PUT_RID = "saved"
"""Of the turn of a session that was `put`."""
WITHOUT_KEY = Tenant(TenantLimits(name=""))
"""Owner of sessions on a server without keys."""


@dataclass(slots=True, eq=False)
class Turn:
    """One request of a session and its place in the tree.

    num_kept: tokens of the parent's sequence that it continues. prompt_ids: the tokens that this turn adds. output_ids: None
    until it has finished. replica: index of the replica that has it, None = none yet.
    """

    rid: str
    session: "_Session"
    parent: "Turn | None"
    num_kept: int
    prompt_ids: list[int]
    output_ids: list[int] | None = None
    children: set["Turn"] = field(default_factory=set)
    replica: int | None = None

    @property
    def home(self) -> int | None:
        """Index of the replica that should have the KV of the parent."""
        return self.parent.replica if self.parent is not None else None

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
class _Kept:
    num_sessions: int = 0
    num_tokens: int = 0


@dataclass(slots=True, eq=False)
class _Session:
    id: str
    tenant: Tenant
    timeout_s: float
    max_characters: int
    used_s: float
    turns: dict[str, Turn] = field(default_factory=dict)
    latest: Turn | None = None
    num_tokens: int = 0

    def is_stale(self, now_s: float) -> bool:
        """Whether it has not been used for too long and no request of it runs."""
        if not self.timeout_s or now_s - self.used_s <= self.timeout_s:
            return False
        return all(turn.output_ids is not None for turn in self.turns.values())


_NO_SESSION = _Session("", WITHOUT_KEY, 0.0, 0, 0.0)
"""Of turns that have just been read."""


@dataclass(eq=False)
class Sessions:
    """The open sessions.

    max_sessions, max_tokens: limits over all sessions; each key has a share, see `TenantLimits`. timeout_s: a session that has not
    been used for this long is closed; 0 = never. decode: text of ids, for sessions with a limit in characters. files: None = sessions end with the
    process. vocab_size: what ids from files are below.
    """

    max_sessions: int
    max_tokens: int
    timeout_s: float
    decode: Callable[[Sequence[int]], str]
    clock: Callable[[], float]
    files: SessionFiles | None = None
    vocab_size: int = 0
    _open: dict[tuple[str, str], _Session] = field(init=False, default_factory=dict)
    _kept: dict[str, _Kept] = field(init=False, default_factory=dict)
    _num_tokens: int = field(init=False, default=0)
    _next_sweep_s: float = field(init=False, default=0.0)

    def __len__(self) -> int:
        return len(self._open)

    def open(
        self,
        session_id: str | None = None,
        capacity_of_str_len: int = 0,
        timeout_s: float | None = None,
        tenant: Tenant = WITHOUT_KEY,
    ) -> str:
        """A new session's id. capacity_of_str_len: most characters of a sequence, 0 = no limit but the context.

        timeout_s: shorter than the server's own limit. tenant: its owner. Raises RequestError, CapacityError.
        """
        if session_id is not None and not 0 < len(session_id) <= MAX_SESSION_ID_LENGTH:
            raise RequestError(f"session_id must have 1 to {MAX_SESSION_ID_LENGTH} characters", "session_id")
        if capacity_of_str_len < 0:
            raise RequestError("capacity_of_str_len must not be negative", "capacity_of_str_len")
        if timeout_s is not None and not 0 < timeout_s < float("inf"):
            raise RequestError("timeout must be a positive number of seconds", "timeout")
        self._close_stale(tenant)
        session_id = session_id or uuid.uuid4().hex
        key = (tenant.scope, session_id)
        if key in self._open or (self.files is not None and self.files.load(tenant.name, session_id) is not None):
            raise RequestError("a session with this session_id is already open", "session_id")
        limits = [limit for limit in (timeout_s, self.timeout_s) if limit]
        self._save(self._enter(session_id, min(limits, default=0.0), capacity_of_str_len, tenant))
        return session_id

    def close(self, session_id: str, caller: Caller = ANONYMOUS) -> None:
        """Close a session of the caller, or for an admin all with this id. Running requests continue.

        Raises NotFoundError.
        """
        scopes = [caller.scope]
        if caller.is_admin:
            scopes = [scope for scope, name in self._open if name == session_id] or scopes
        owner = caller.tenant.name if caller.tenant is not None else ""
        is_open = (caller.scope, session_id) in self._open
        if not is_open and self.files is not None and self.files.remove(owner, session_id):
            return
        for scope in scopes:
            session = self._find(session_id, scope, "session_id")
            if self.files is not None:
                self.files.remove(session.tenant.name, session_id)
            self._drop(session)

    def put(self, session_id: str, ids: list[int], output_ids: list[int], tenant: Tenant = WITHOUT_KEY) -> None:
        """A session of one turn that has finished, in place of what has this id. Raises CapacityError, and ExecutionError without a file of it."""
        self._close_stale(tenant)
        if (before := self._open.get((tenant.scope, session_id))) is not None:
            self._drop(before)
        session = self._enter(session_id, self.timeout_s, 0, tenant)
        try:
            self._check_tokens(session, len(ids) + len(output_ids))
        except CapacityError:
            self._drop(session)
            raise
        self._count(session, len(ids) + len(output_ids))
        session.latest = session.turns[PUT_RID] = Turn(PUT_RID, session, None, 0, ids, output_ids)
        if not self._save(session):
            self._drop(session)
            raise ExecutionError("it could not be written to --session-dir; the server's log says why")

    def get(self, session_id: str, field: str, tenant: Tenant = WITHOUT_KEY) -> list[int]:
        """The tokens of a session that was `put`, which counts as used. Raises NotFoundError, CapacityError."""
        session = self._used(session_id, field, tenant)
        self._save(session)
        turn = session.turns.get(PUT_RID)
        return turn.sequence() if turn is not None else []

    def begin(
        self,
        params: SessionParams,
        rid: str,
        ids: Sequence[int],
        bos_id: int | None = None,
        tenant: Tenant = WITHOUT_KEY,
    ) -> tuple[list[int], Turn, list[str]]:
        """Add request `rid` with the new tokens `ids`. Returns its whole prompt, its turn, and the requests to abort because it replaces them.

        bos_id: removed from the front of `ids` unless they begin the sequence. tenant: must own the session. Raises
        NotFoundError for an unknown session or turn, RequestError for a turn that has not finished, CapacityError.
        """
        if params.id is None:
            raise RequestError("session_params needs the id of a session", "session_params")
        session = self._used(params.id, "session_params", tenant)
        if rid in session.turns:
            raise RequestError(f"rid {rid[:100]!r} is already a turn of this session", "rid")
        parent = self._parent(session, params)
        history: list[int] = []
        if parent is not None:
            if parent.output_ids is None:
                raise RequestError("session_params: the request to continue from has not finished", "session_params")
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
        """The request of a turn has finished: other turns may continue it."""
        if turn.session.turns.get(turn.rid) is turn:
            turn.output_ids = list(output_ids)
            self._count(turn.session, len(output_ids))
            turn.session.used_s = self.clock()
            self._save(turn.session)

    def cancel(self, turn: Turn) -> None:
        """The request of a turn has failed or was aborted: remove the turn. Does nothing to a finished turn."""
        if turn.output_ids is None and turn.session.turns.get(turn.rid) is turn:
            self._remove(turn)

    def _enter(self, session_id: str, timeout_s: float, max_characters: int, tenant: Tenant) -> _Session:
        """A new session. Raises CapacityError."""
        self._check_room(tenant)
        session = _Session(session_id, tenant, timeout_s, max_characters, used_s=self.clock())
        self._open[tenant.scope, session_id] = session
        self._kept.setdefault(tenant.scope, _Kept()).num_sessions += 1
        return session

    def _save(self, session: _Session) -> bool:
        return self.files is not None and self.files.save(session.tenant.name, _recorded(session))

    def _used(self, session_id: str, field: str, tenant: Tenant) -> _Session:
        if (tenant.scope, session_id) not in self._open:
            self._open_again(session_id, tenant)
        session = self._find(session_id, tenant.scope, field)
        session.used_s = self.clock()
        return session

    def _open_again(self, session_id: str, tenant: Tenant) -> None:
        """From its file, if there is one. Raises CapacityError."""
        record = self.files.load(tenant.name, session_id) if self.files is not None else None
        if record is None:
            return
        turns = _turns_of(record, self.vocab_size)
        if turns is None:
            _logger.warning("a file of --session-dir does not hold a session: it is ignored")
            return
        session = self._enter(session_id, record.timeout_s, record.max_characters, tenant)
        num_tokens = sum(len(turn.prompt_ids) + len(turn.output_ids or ()) for turn in turns)
        try:
            self._check_tokens(session, num_tokens)
        except CapacityError:
            self._drop(session)
            raise
        self._count(session, num_tokens)
        for turn in turns:
            turn.session = session
            if turn.parent is not None:
                turn.parent.children.add(turn)
            session.turns[turn.rid] = turn
        session.latest = turns[record.latest] if record.latest >= 0 else None

    def _find(self, session_id: str, scope: str, field: str) -> _Session:
        session = self._open.get((scope, session_id))
        if session is not None and session.is_stale(self.clock()):
            self._drop(session)
            session = None
        if session is None:
            raise NotFoundError("there is no such session; it may have been closed", field)
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
        if limit and len(self.decode(prompt)) > limit:
            raise RequestError(
                f"the session may hold at most {limit} characters (capacity_of_str_len)", "session_params"
            )
        self._check_tokens(session, num_added)

    def _check_tokens(self, session: _Session, num_added: int) -> None:
        limits, held = session.tenant.limits, self._kept[session.tenant.scope].num_tokens
        most = limits.max_session_tokens
        most = int(self.max_tokens * limits.share) if most is None else most
        if held + num_added > most:
            message = f"the open sessions hold {held} tokens; the limit is {most}"
            raise CapacityError(message, status_code=_status(session.tenant))
        # The message must not reveal how much others hold.
        if self._num_tokens + num_added > self.max_tokens:
            raise CapacityError("the server has no room for more session tokens (--max-session-tokens)")

    def _check_room(self, tenant: Tenant) -> None:
        most = self._most_sessions(tenant)
        if self._num_sessions(tenant) >= most:
            message = f"the limit of open sessions ({most}) has been reached (--max-sessions)"
            raise CapacityError(message, status_code=_status(tenant))
        if len(self._open) >= self.max_sessions:
            raise CapacityError("the server has no room for another session (--max-sessions)")

    def _most_sessions(self, tenant: Tenant) -> int:
        limits = tenant.limits
        if limits.max_sessions is not None:
            return limits.max_sessions
        return min(self.max_sessions, max(1, int(self.max_sessions * limits.share)))

    def _num_sessions(self, tenant: Tenant) -> int:
        kept = self._kept.get(tenant.scope)
        return kept.num_sessions if kept is not None else 0

    def _replace(self, session: _Session, parent: Turn | None) -> list[str]:
        """Remove all turns after `parent` (None: all turns). Returns the rids of those that still run."""
        gone = list(parent.children) if parent is not None else [t for t in session.turns.values() if t.parent is None]
        return [turn.rid for top in gone for turn in self._remove(top) if turn.output_ids is None]

    def _remove(self, top: Turn) -> list[Turn]:
        """Remove a turn and all after it from its session. Returns the removed turns."""
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
        self._kept[session.tenant.scope].num_tokens += num_tokens

    def _drop(self, session: _Session) -> None:
        scope = session.tenant.scope
        del self._open[scope, session.id]
        self._num_tokens -= session.num_tokens
        kept = self._kept[scope]
        kept.num_tokens -= session.num_tokens
        kept.num_sessions -= 1
        if not kept.num_sessions:
            del self._kept[scope]
        session.turns.clear()
        session.latest = None

    def _close_stale(self, tenant: Tenant) -> None:
        now = self.clock()
        has_room = len(self._open) < self.max_sessions and self._num_sessions(tenant) < self._most_sessions(tenant)
        if now < self._next_sweep_s and has_room:
            return
        self._next_sweep_s = now + SWEEP_INTERVAL_S
        for session in [session for session in self._open.values() if session.is_stale(now)]:
            self._drop(session)


def _recorded(session: _Session) -> SessionRecord:
    """Its finished turns."""
    turns = [turn for turn in session.turns.values() if turn.output_ids is not None]
    index = {turn.rid: number for number, turn in enumerate(turns)}
    latest = session.latest
    while latest is not None and latest.rid not in index:
        latest = latest.parent
    records = [
        TurnRecord(
            turn.rid,
            index[turn.parent.rid] if turn.parent is not None else -1,
            turn.num_kept,
            pack_int32(turn.prompt_ids),
            pack_int32(turn.output_ids or ()),
        )
        for turn in turns
    ]
    return SessionRecord(
        session.id, session.timeout_s, session.max_characters, index[latest.rid] if latest is not None else -1, records
    )


def _turns_of(record: SessionRecord, vocab_size: int) -> list[Turn] | None:
    """Its turns, of no session yet; None if the record is of none."""
    turns: list[Turn] = []
    lengths: list[int] = []
    for one in record.turns:
        if not -1 <= one.parent < len(turns) or (len(one.prompt) | len(one.outputs)) % TOKEN_BYTES:
            return None
        prompt, outputs = unpack_int32(one.prompt), unpack_int32(one.outputs)
        parent = turns[one.parent] if one.parent >= 0 else None
        before = lengths[one.parent] if parent is not None else 0
        if not 0 <= one.num_kept <= before or not all(0 <= token_id < vocab_size for token_id in prompt + outputs):
            return None
        lengths.append(one.num_kept + len(prompt) + len(outputs))
        turns.append(Turn(one.rid, _NO_SESSION, parent, one.num_kept, prompt, outputs))
    is_tree = len({turn.rid for turn in turns}) == len(turns) and -1 <= record.latest < max(1, len(turns))
    is_bounded = 0 <= record.timeout_s < math.inf and record.max_characters >= 0
    return turns if is_tree and is_bounded and (turns or record.latest < 0) else None


def _status(tenant: Tenant) -> int:
    """429 when the key's own share is used up, 503 when the server has no room."""
    return 429 if tenant.scope else 503
