"""A replica behind Ray Serve: one actor with one engine, whose processes are its children, and with the application of `headrace serve`.

Ray makes the actor, calls `__serve_build_asgi_app__`, then the application for each request, and `__del__` at the end, all in one event loop.
"""

import asyncio
from collections.abc import Sequence
from typing import Any

from headrace import log
from headrace.config.server_args import ServerArgs
from headrace.errors import ConfigError, ExecutionError, RequestError
from headrace.launch import RunningEngine, launch_engine
from headrace.server.app import create_app
from headrace.server.context import ServerStatus
from headrace.server.http import ASGIApp, Receive, Scope, Send, send_error
from headrace.server.middleware import UNKNOWN_ROUTE, RouteNames
from headrace.server.routes import RouteSpec
from headrace.version import VERSION


class OneReplicaGate:
    """Refuses routes that would reach one of several replicas. routes: all declared ones; a path that nobody declares goes on to its 404."""

    def __init__(self, app: ASGIApp, routes: Sequence[RouteSpec]) -> None:
        self.app = app
        self.names = RouteNames(spec.path for spec in routes)
        self.open = {spec.path for spec in routes if spec.with_replicas} | {UNKNOWN_ROUTE}

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        route = self.names.of(scope["path"]) if scope["type"] == "http" else UNKNOWN_ROUTE
        if route in self.open:
            await self.app(scope, receive, send)
            return
        refusal = RequestError(
            f"{route} would reach one replica of several, so it is off with --ray; give what all replicas shall have as an option",
            None,
            "unsupported_with_ray",
        )
        await send_error(send, scope, refusal)


class EngineReplica:
    """One engine, once its application has been built. version: of the process that asks for it. options: those of `ServerArgs`."""

    def __init__(self, version: str, options: dict[str, Any]) -> None:
        if version != VERSION:
            raise ConfigError(f"this node has Headrace {VERSION}, and the one that started --ray has {version}")
        self._args = ServerArgs(**options)
        self._status = ServerStatus()
        self._engine: RunningEngine | None = None
        self._is_dead = False

    async def __serve_build_asgi_app__(self) -> ASGIApp:
        """Start the engine. Its errors end the start of the replica."""
        args = self._args
        log.configure(args.log_level, "replica", args.log_format)
        engine = await asyncio.to_thread(launch_engine, args)
        self._engine = engine
        engine.on_death = self._died
        engine.tokenizer_manager.start()
        app = create_app(engine.tokenizer_manager, args, engine.files.served(engine.ready), self._status)
        return OneReplicaGate(app, app.state.routes)

    def check_health(self) -> None:
        """Called by Ray Serve, which replaces the replica when this raises: the engine has died for good. A restart of its parts is no death."""
        if self._is_dead:
            raise ExecutionError("a part of the engine died and was not restarted")

    async def __del__(self) -> None:
        """Called by Ray Serve when requests have ended or had their time."""
        engine, self._engine = self._engine, None
        if engine is not None:
            await engine.tokenizer_manager.close()
            await asyncio.to_thread(engine.shutdown)

    def _died(self) -> None:
        self._is_dead = True
        self._status.draining = True
