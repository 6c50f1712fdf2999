"""Child processes that decode and prepare media, with limits of time and memory.

Owns what is said of an item that ends its child. Does not own the children (`child_pool`), and keeps nothing (`loader` does). Called from threads.
"""

import sys
from collections.abc import Sequence

from headrace.child_pool.child_side import MIB
from headrace.child_pool.pool import ChildLateError, ChildLostError, ChildPool
from headrace.multimodal.limits import CHILD_MEMORY_BYTES, PREPARE_LIMIT_S, MediaRefusedError
from headrace.multimodal.media_messages import VERDICTS, Done, MediaJob, MediaSettings, Refused, Setup, Verdict

PROGRAM = (sys.executable, "-m", "headrace.multimodal.media_child")


class MediaPool(ChildPool[Verdict]):
    """Prepares media in children. limit_s: processor time for one item. memory_bytes: memory for one, beyond the child's own."""

    def __init__(
        self,
        settings: MediaSettings,
        num_children: int = 1,
        limit_s: float = PREPARE_LIMIT_S,
        memory_bytes: int = CHILD_MEMORY_BYTES,
        program: Sequence[str] = PROGRAM,
    ) -> None:
        super().__init__(
            "decode media",
            program,
            Setup(settings, memory_bytes),
            VERDICTS,
            num_children=num_children,
            limit_s=limit_s,
        )
        self._memory_bytes = memory_bytes

    def prepare(self, job: MediaJob) -> Done:
        """An item, ready for the encoder. Waits for a free child. Raises MediaRefusedError, or ExecutionError if it could not be tried."""
        decoding = f"decoding the {job.kind.one} takes"
        try:
            verdict = self.ask(job)
        except ChildLateError:
            raise MediaRefusedError(f"{decoding} longer than {self._limit_s:g} s", "time") from None
        except ChildLostError:
            raise MediaRefusedError(
                f"{decoding} more memory than the limit ({self._memory_bytes // MIB} MiB), or it is broken", "memory"
            ) from None
        if isinstance(verdict, Refused):
            raise MediaRefusedError(verdict.message, verdict.kind)
        return verdict
