"""Calls the handler registered for a message's type. Runs in the receiver's thread."""

from collections.abc import Callable
from typing import Any, TypeVar

M = TypeVar("M")


class TypeBasedDispatcher:
    """A table from message type to handler. Types match exactly: message structs are not subclassed."""

    def __init__(self) -> None:
        self._handlers: dict[type, Callable[[Any], object]] = {}
        self.num_unhandled = 0

    def register(self, kind: type[M], handler: Callable[[M], object]) -> None:
        """Call `handler` for messages of `kind`, which has no handler yet."""
        assert kind not in self._handlers, kind
        self._handlers[kind] = handler

    def __call__(self, message: object) -> bool:
        """Handle one message. Returns False, and counts it, if no handler is registered for its type."""
        handler = self._handlers.get(type(message))
        if handler is None:
            self.num_unhandled += 1
            return False
        handler(message)
        return True
