"""Remote calls of the front end's methods: types of their arguments and results, taken from the signatures of a Protocol.

A method that is added to the Protocol can be called remotely; arriving calls are checked against its annotations. Used by both
sides (`front_door`, `remote_frontend`).
"""

import inspect
from collections.abc import AsyncGenerator, Awaitable, Callable
from dataclasses import dataclass
from typing import Any, Self, get_args, get_origin, get_type_hints

import msgspec

from headrace.frontend.tenants import Caller


class WireCaller(msgspec.Struct, frozen=True):
    """A `Caller` in a message: the main process finds its tenant by name."""

    tenant: str | None = None
    traceparent: str = ""
    is_admin: bool = False

    @classmethod
    def of(cls, caller: Caller) -> Self:
        """The caller in the form for messages."""
        return cls(caller.tenant.name if caller.tenant is not None else None, caller.traceparent, caller.is_admin)


@dataclass(frozen=True, slots=True)
class RemoteMethod:
    """One remote method. arguments: a struct of the given ones. result: its type. streams: the method yields many results.

    replies: it is awaited; False = nobody waits for it.
    """

    arguments: type[msgspec.Struct]
    result: Any
    streams: bool
    replies: bool


def remote_methods(protocol: type) -> dict[str, RemoteMethod]:
    """The methods of a Protocol, by name."""
    methods = {}
    for name, function in vars(protocol).items():
        if name.startswith("_") or not inspect.isfunction(function):
            continue
        hints = get_type_hints(function)
        result = hints["return"]
        streams = get_origin(result) is AsyncGenerator
        replies = inspect.iscoroutinefunction(function) or result is not type(None)
        result = get_args(result)[0] if streams else _awaited(result)
        methods[name] = RemoteMethod(_arguments(function, hints), result, streams, replies)
    return methods


def _awaited(result: Any) -> Any:
    """T of `T | Awaitable[T]`; other types unchanged."""
    awaited = [kind for kind in get_args(result) if get_origin(kind) is Awaitable]
    return get_args(awaited[0])[0] if awaited else result


def _arguments(function: Callable[..., Any], hints: dict[str, Any]) -> type[msgspec.Struct]:
    fields: list[tuple[str, Any, Any]] = []
    for name in inspect.signature(function).parameters:
        if name == "self":
            continue
        kind = WireCaller if hints[name] is Caller else hints[name]
        # Arguments that were not given are left to the method's own defaults.
        fields.append((name, kind | msgspec.UnsetType, msgspec.UNSET))
    title = "".join(word.capitalize() for word in function.__name__.split("_"))
    return msgspec.defstruct(f"{title}Arguments", fields, frozen=True, kw_only=True, forbid_unknown_fields=True)
