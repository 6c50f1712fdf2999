"""What a CUDA graph holds, for a device of the tests: each operation with the numbers and the memory that it was captured with."""

from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves, tree_map

_WAITS = ("_local_scalar_dense", "nonzero", "masked_select", "equal", "is_nonzero", "unique")
"""Operations of which the host needs a value."""


def _look_up_operators() -> None:
    """torch looks an operator up when a mode first meets it, and keeps a borrowed pointer to what it finds. Two ranks in threads that do so at once
    may each make one, and the first is freed; so they are looked up before any thread is."""
    for name in torch._C._dispatch_get_all_op_names():
        namespace, _, rest = name.partition("::")
        packet, _, overload = rest.partition(".")
        if namespace == "aten":
            getattr(getattr(torch.ops.aten, packet), overload or "default", None)


_look_up_operators()


class Trace(TorchDispatchMode):
    """The operations of torch that run within. calls: each with its arguments; a tensor is where its memory is, or which call made it."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, Any]] = []
        self._makers: dict[int, int] = {}
        self._made: list[torch.UntypedStorage] = []
        self._alive: list[Any] = []  # or what is made next may have the same address

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        by_mask = name.startswith("index") and any(_is_mask(leaf) for leaf in tree_leaves(args[1:]))
        if by_mask or name.startswith(_WAITS):
            raise AssertionError(f"captured work needs a value on the host: {name}")
        if name == "lift_fresh":  # a tensor of numbers of the host, which are captured
            given, what = [], args[0].tolist()
        else:
            leaves = tree_leaves((args, kwargs))
            given = [_place(leaf) for leaf in leaves if isinstance(leaf, torch.Tensor | torch.UntypedStorage)]
            what = tree_map(self._described, (args, kwargs or {}))
        self.calls.append((name, what))
        out = func(*args, **(kwargs or {}))
        for leaf in tree_leaves(out):
            if isinstance(leaf, torch.Tensor) and _place(leaf) not in given:
                self._makers[_place(leaf)] = len(self.calls)
                self._made.append(leaf.untyped_storage())
        self._alive.append(out)
        return out

    def overwrite(self) -> None:
        """Spoil the memory that the operations made for themselves: floats become NaN."""
        for storage in self._made:
            if storage.device.type == "cpu":
                storage.fill_(255)

    def _described(self, value: Any) -> Any:
        if isinstance(value, torch.UntypedStorage):  # of Triton's interpreter, which copies what a kernel takes
            return f"{value.nbytes()} bytes"
        if not isinstance(value, torch.Tensor):
            return repr(value)
        maker = self._makers.get(_place(value))
        where = f"at {_place(value):#x}" if maker is None else f"of call {maker}"
        return f"{value.dtype}{list(value.shape)} by {value.stride()} from {value.storage_offset()} {where}"


class CapturedWork:
    """Work that is run again as it was captured: it may not depend on anything of the host that has changed since, nor use other memory. What it made
    on the way is gone when it has run: the host of a graph never sees it."""

    def __init__(self, run: Callable[[], None]) -> None:
        self._run = run
        self._calls = self._traced()

    def run(self) -> None:
        """Raises AssertionError if a graph would not do the same."""
        for number, (now, then) in enumerate(zip(self._traced(), self._calls, strict=True)):
            assert now == then, f"operation {number} of a graph was captured as {then}, and the step needs {now}"

    def _traced(self) -> list[tuple[str, Any]]:
        with Trace() as trace:
            self._run()
        trace.overwrite()
        return trace.calls


def _is_mask(value: Any) -> bool:
    return isinstance(value, torch.Tensor) and value.dtype == torch.bool


def _place(memory: torch.Tensor | torch.UntypedStorage) -> int:
    return (memory.untyped_storage() if isinstance(memory, torch.Tensor) else memory).data_ptr()
