"""Test hook: does what an injected fault says, in the middle of a step. Only where the server was started with --enable-fault-injection."""

import os
import signal
import time

from headrace.errors import ExecutionError
from headrace.log import get_logger
from headrace.messages.control import FaultReq

_logger = get_logger(__name__)


def do_fault(fault: FaultReq) -> None:
    """Sleep, end the process, or raise ExecutionError."""
    _logger.warning("injected fault: %s at stage %s for %s", fault.kind, fault.stage, fault.rid)
    if fault.kind == "sleep":
        time.sleep(fault.seconds)
    elif fault.kind == "crash":
        os.kill(os.getpid(), signal.SIGKILL)
    else:
        raise ExecutionError("injected fault in the forward pass")
