"""The front end in an HTTP worker (--tokenizer-worker-num): a proxy whose methods run in the main process.

Does not own requests or limits: the main process does, for all workers. Nor how a call crosses: `remote_calls` does. Nor what the methods
are: the Protocols of `request_frontend` are. Runs in the worker's event loop.
"""

from collections.abc import AsyncGenerator, Callable
from typing import Any, cast

import msgspec

from headrace.frontend.remote_methods import WireCaller
from headrace.frontend.sample_update import SampleUpdate
from headrace.frontend.tenants import Caller
from headrace.messages.front import FrontNews
from headrace.messages.requests import GenerateReqInput
from headrace.server.remote_calls import RemoteCalls
from headrace.server.request_frontend import METHODS, PARTS, RequestFrontend

_FROM_NEWS: dict[str, Callable[[FrontNews], Any]] = {
    "adapters.names": lambda news: news.adapters,
    "weights.version": lambda news: news.weight_version,
    "weights.model_path": lambda news: news.model_path,
}
"""Properties of the parts, which are answered from what was last heard."""


def remote_frontend(calls: RemoteCalls) -> RequestFrontend:
    """The front end whose methods are `calls`."""
    return cast("RequestFrontend", _RemoteFrontend(calls))


class _Remote:
    """An object of the main process, or one of its parts: each method of its Protocol is a call. prefix: of the methods' names."""

    def __init__(self, calls: RemoteCalls, prefix: str = "") -> None:
        self._calls = calls
        self._prefix = prefix

    def __getattr__(self, name: str) -> Any:
        path = self._prefix + name
        if path in _FROM_NEWS:
            return _FROM_NEWS[path](self._calls.news)
        if path not in METHODS:
            raise AttributeError(path)
        method = METHODS[path]

        def call(*values: object, **named: object) -> Any:
            given = dict(zip(method.arguments.__struct_fields__, values, strict=False)) | named
            sent = {key: WireCaller.of(value) if isinstance(value, Caller) else value for key, value in given.items()}
            if method.streams:
                return self._calls.stream(path, sent)
            return self._calls.call(path, **sent) if method.replies else self._calls.tell(path, **sent)

        return call


class _RemoteFrontend(_Remote):
    """The front end with its parts."""

    def __init__(self, calls: RemoteCalls) -> None:
        super().__init__(calls)
        for part in PARTS:
            setattr(self, part, _Remote(calls, f"{part}."))

    def generate_request(self, obj: GenerateReqInput, **options: Any) -> AsyncGenerator[SampleUpdate, None]:
        """See `RequestFrontend`. Raises RequestError."""
        updates: AsyncGenerator[SampleUpdate, None] = self.__getattr__("generate_request")(_sendable(obj), **options)
        return updates


def _sendable(obj: GenerateReqInput) -> GenerateReqInput:
    """The call as a message can hold it, whatever its schemas are. Raises RequestError."""
    given = obj.sampling_params
    if given is None:
        return obj
    sent = [one.with_json_as_text() for one in given] if isinstance(given, list) else given.with_json_as_text()
    return msgspec.structs.replace(obj, sampling_params=sent)
