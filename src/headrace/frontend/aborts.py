"""Aborts: samples that somebody does not want any more. Runs in the tokenizer manager's event loop.

Nothing leaves the table here: each sample's end does that. Samples that a scheduler has are ended by it; the others end when they would
be sent.
"""

from collections.abc import Iterable

from headrace.frontend.request_state import ReqState
from headrace.frontend.sample_table import SampleTable
from headrace.frontend.tenants import Caller
from headrace.messages.channel import Sender
from headrace.messages.control import AbortReq


class Aborts:
    """See the module's text. to_schedulers: all that live."""

    def __init__(self, table: SampleTable, to_schedulers: Sender) -> None:
        self._table = table
        self._to_schedulers = to_schedulers

    def abort(self, rid: str, caller: Caller) -> None:
        """Abort the caller's sample `rid`, or all samples of its call or prompt of this name; an admin's: of every key."""
        scopes = {caller.scope} | (self._table.scopes() if caller.is_admin else set())
        self.abort_samples(sample for scope in scopes for sample in self._table.find(scope, rid))

    def abort_all(self) -> None:
        """Abort everything, also what only the schedulers know."""
        _mark(self._table.samples.values())
        self._to_schedulers.send(AbortReq(abort_all=True))

    def abort_samples(self, samples: Iterable[ReqState]) -> None:
        """Abort those that have not ended."""
        if sent := _mark(samples):
            self._to_schedulers.send(AbortReq(sent))


def _mark(samples: Iterable[ReqState]) -> tuple[str, ...]:
    """Rids of those that a scheduler has."""
    sent = []
    for sample in samples:
        if sample.finish is None:
            sample.abort_asked = True
            if sample.sent_s:
                sent.append(sample.rid)
    return tuple(sent)
