"""Headrace: an LLM serving runtime. docs/architecture.md follows a request through its packages.

Read first: launch.py (the composition root: puts an engine together from its parts), serve.py (`headrace serve`, from
signals to exit code), launch_server.py (`python -m headrace.launch_server`).

- Base: errors.py (one error tree), log.py (one logger), plain_types.py (words for types), media_kinds.py (what differs by kind of
  media), turns.py (who is next where work waits), cgroup.py (limits of control groups), version.py, garbage.py (garbage
  collection, returning free memory)
"""

from typing import TYPE_CHECKING, Any

from headrace.version import VERSION

if TYPE_CHECKING:
    from headrace.api.engine import Engine
    from headrace.api.runtime import Runtime

__version__ = VERSION
__all__ = ["Engine", "Runtime", "__version__"]


def __getattr__(name: str) -> Any:
    """`headrace.Engine` and `headrace.Runtime`, imported on first use, so that `import headrace` stays cheap."""
    if name == "Engine":
        from headrace.api.engine import Engine

        return Engine
    if name == "Runtime":
        from headrace.api.runtime import Runtime

        return Runtime
    raise AttributeError(f"module 'headrace' has no attribute {name!r}")
