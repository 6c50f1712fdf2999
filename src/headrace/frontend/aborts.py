"""Aborts samples on request. Runs in the tokenizer manager's event loop.

Samples are only marked here and stay in the table: a scheduler ends those that it has, and the others end when they would be sent.
"""

from collections.abc import Iterable

from headrace.frontend.request_state import ReqState
from headrace.frontend.sample_table import SampleTable
from headrace.frontend.tenants import Caller
from headrace.messages.channel import Sender
from headrace.messages.control import AbortReq


class Aborts:
    """See the module docstring. to_schedulers: sends to all live schedulers."""

    def __init__(self, table: SampleTable, to_schedulers: Sender) -> None:
        self._table = table
        self._to_schedulers = to_schedulers

    def abort(self, rid: str, caller: Caller) -> None:
        """Abort the caller's sample `rid`, or all samples of its call or prompt with that name. An admin aborts those of every key."""
        scopes = {caller.scope} | (self._table.scopes() if caller.is_admin else set())
        found = [sample for scope in scopes for sample in self._table.find(scope, rid)]
        self.abort_samples(sample for sample in found if caller.is_admin or sample.call.owner == caller.owner)

    def abort_all(self) -> None:
        """Abort all samples, including those that only the schedulers know."""
        _mark(self._table.samples.values())
        self._to_schedulers.send(AbortReq(abort_all=True))

    def abort_samples(self, samples: Iterable[ReqState]) -> None:
        """Abort the given samples, except those that have ended."""
        if sent := _mark(samples):
            self._to_schedulers.send(AbortReq(sent))


def _mark(samples: Iterable[ReqState]) -> tuple[str, ...]:
    """Mark samples as aborted. Returns the rids of those that were sent to a scheduler."""
    sent = []
    for sample in samples:
        if sample.finish is None:
            sample.abort_asked = True
            if sample.sent_s:
                sent.append(sample.rid)
    return tuple(sent)
