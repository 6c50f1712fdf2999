"""The two calls that OpenRLHF makes on its inference workers, on an Engine or a Runtime.

Owns the mapping only. OpenRLHF calls `update_weight` for each parameter and broadcasts it from the actor's rank 0 at the same time; pause
generation around a whole model, or requests in between meet one half of each. Runs in the caller's thread.
"""

from typing import Protocol

from headrace.errors import ExecutionError


class UpdatableEngine(Protocol):
    """What is needed of an Engine or a Runtime."""

    def init_weights_update_group(
        self, master_address: str, master_port: int, rank_offset: int, world_size: int, group_name: str, backend: str
    ) -> tuple[bool, str]:
        """Join a group."""

    def update_weights_from_distributed(
        self, names: list[str], dtypes: list[str], shapes: list[list[int]], group_name: str
    ) -> tuple[bool, str]:
        """Take weights from it."""


class OpenRlhfWorker:
    """`init_process_group` and `update_weight` over an engine."""

    def __init__(self, engine: UpdatableEngine) -> None:
        self._engine = engine
        self._group_name = ""

    def init_process_group(
        self,
        master_address: str,
        master_port: int,
        rank_offset: int,
        world_size: int,
        group_name: str,
        backend: str = "nccl",
    ) -> None:
        """Join the actor's group. Raises ExecutionError."""
        self._group_name = group_name
        _check(
            self._engine.init_weights_update_group(
                master_address, master_port, rank_offset, world_size, group_name, backend
            )
        )

    def update_weight(self, name: str, dtype: object, shape: list[int], empty_cache: bool = False) -> None:
        """Take one parameter. dtype: torch's, or its name. empty_cache: nothing to do, staging memory is not cached. Raises
        ExecutionError; the old weight serves on then."""
        dtype_name = str(dtype).removeprefix("torch.")
        _check(self._engine.update_weights_from_distributed([name], [dtype_name], [list(shape)], self._group_name))


def _check(result: tuple[bool, str]) -> None:
    success, message = result
    if not success:
        raise ExecutionError(message)
