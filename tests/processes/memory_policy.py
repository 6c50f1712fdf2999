"""The memory policy of a thread, by get_mempolicy(2); a child process imports this, too."""

import ctypes
import os
import platform

_GET_MEMPOLICY = {"x86_64": 239, "aarch64": 236}
_BIND = 2


def bound_memory() -> list[int]:
    """The nodes that this thread's memory is bound to; empty if it is not. Raises OSError when the kernel does not tell."""
    mode, mask = ctypes.c_int(), (ctypes.c_ulong * 17)()
    bits = 8 * ctypes.sizeof(ctypes.c_ulong)
    arguments = ctypes.byref(mode), mask, ctypes.c_ulong(len(mask) * bits), None, ctypes.c_ulong(0)
    if ctypes.CDLL(None, use_errno=True).syscall(ctypes.c_long(_GET_MEMPOLICY[platform.machine()]), *arguments):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))
    if mode.value != _BIND:
        return []
    return [node for node in range(len(mask) * bits) if mask[node // bits] >> (node % bits) & 1]
