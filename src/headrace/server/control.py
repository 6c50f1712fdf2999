"""Health, information and control routes.

Runs in the event loop that serves HTTP. Who may call them is declared in app.py.
"""

from typing import Literal

import msgspec

from headrace.checkpoint.pooling import PoolingConfig
from headrace.errors import AuthError, MethodError, RequestError
from headrace.frontend.server_info import (
    describe_load,
    describe_server,
    describe_short_load,
    model_name_of,
    sum_of_states,
)
from headrace.media_kinds import MediaKind
from headrace.messages.control import FaultReq
from headrace.metrics.export import CONTENT_TYPE
from headrace.server.context import ServingContext
from headrace.server.http import Exchange, send_response
from headrace.server.origin_gate import is_browsers
from headrace.server.request_frontend import answer


class AbortBody(msgspec.Struct, forbid_unknown_fields=True):
    """What to abort: one request, or all."""

    rid: str | None = None
    abort_all: bool = False


class Outcome(msgspec.Struct, frozen=True):
    """Result of an operation. If the status is not 200 it failed, and the message says why."""

    success: bool
    message: str


class Liveness(msgspec.Struct, frozen=True):
    """ok, or unavailable with status 503."""

    status: Literal["ok", "unavailable"]


class FlushQuery(msgspec.Struct, forbid_unknown_fields=True):
    """timeout: wait at most this many seconds for requests to end."""

    timeout: float = 0.0


class FaultBody(msgspec.Struct, forbid_unknown_fields=True):
    """A fault to inject, see `FaultReq`."""

    stage: Literal["admission", "forward", "sampling", "detokenize"]
    kind: Literal["raise", "nan", "sleep", "crash"]
    rid: str
    at_token: int = 0
    seconds: float = 0.0


_ABORT = msgspec.json.Decoder(AbortBody)
_FAULT = msgspec.json.Decoder(FaultBody)


class ControlAPI:
    """Handlers of health, information and control routes."""

    def __init__(self, context: ServingContext) -> None:
        self.context = context

    async def health(self, exchange: Exchange) -> None:
        """Cheap liveness check: 200 while the engine's processes are alive, else 503."""
        await self._answer_health(exchange, await self.context.frontend.health(generate=False))

    async def health_generate(self, exchange: Exchange) -> None:
        """200 if the engine can generate a token (or requests run, which proves it), else 503."""
        async with exchange.until_client_leaves():
            alive = await self.context.frontend.health(generate=True)
        await self._answer_health(exchange, alive)

    async def ready(self, exchange: Exchange) -> None:
        """200 if new requests are accepted: started, not draining, alive."""
        alive = self.context.status.ready and await self.context.frontend.health(generate=False)
        await self._answer_health(exchange, alive)

    async def ping(self, exchange: Exchange) -> None:
        """200 while the HTTP server runs."""
        await exchange.reply_json({"status": "ok"})

    async def _answer_health(self, exchange: Exchange, alive: bool) -> None:
        if alive:
            await exchange.reply_json({"status": "ok"})
        else:
            await exchange.reply_json({"status": "unavailable"}, 503, [(b"retry-after", b"1")])

    async def model_info(self, exchange: Exchange) -> None:
        """The served model: name, type, sizes. The admin key sees the full path, other keys only its last part."""
        model = self.context.model
        path = self.context.frontend.weights.model_path or self.context.args.model_path
        tokenizer_path = self.context.args.tokenizer_path or self.context.args.model_path
        await exchange.reply_json(
            {
                "model_path": path if exchange.is_admin else model_name_of(path),
                "tokenizer_path": tokenizer_path if exchange.is_admin else model_name_of(tokenizer_path),
                "served_model_name": model.name,
                "model_type": model.model_type,
                "architectures": model.architectures,
                "model_class": model.ready.model_class,
                "is_generation": model.pooling is None,
                **{f"has_{kind}_understanding": kind in model.media_support.tokens for kind in MediaKind},
                **{f"{kind}_token": model.media_support.tokens.get(kind) for kind in MediaKind},
                "pooling": None if model.pooling is None else _described(model.pooling, model.context_length),
                "has_chat_template": model.chat_template is not None,
                "output_format": None if model.output_format is None else model.output_format.name,
                "context_length": model.context_length,
                "vocab_size": model.ready.vocab_size,
                "hidden_size": model.ready.hidden_size,
                "dtype": model.ready.dtype,
                "default_max_tokens": model.reply_limit or None,
                "sampling_defaults": {**model.sampling_defaults.values(), "origin": model.sampling_defaults.origin},
                "weight_version": self.context.frontend.weights.version,
            }
        )

    async def server_info(self, exchange: Exchange) -> None:
        """Options (keys masked, files by name only), the memory plan and the state of each replica, as one flat object."""
        context, frontend = self.context, self.context.frontend
        states = await frontend.control.internal_states()
        info = describe_server(context.args, context.model.ready, frontend.adapters.names, states)
        info["served_model_name"] = context.model.name
        info["model_path"] = model_name_of(frontend.weights.model_path or context.args.model_path)
        info["weight_version"] = frontend.weights.version
        changed = await answer(frontend.settings.changed_options())
        await exchange.reply_json(info | changed | {"frontend": await answer(frontend.counters())})

    async def loads(self, exchange: Exchange) -> None:
        """Load of each replica, for routers: requests, tokens, throughput."""
        states = await self.context.frontend.control.internal_states()
        await exchange.reply_json({"loads": [describe_load(state) for state in states]})

    async def get_load(self, exchange: Exchange) -> None:
        """The load in the form of SGLang's routers: a list with three counts per replica."""
        states = await self.context.frontend.control.internal_states()
        await exchange.reply_json([describe_short_load(state) for state in states])

    async def internal_state(self, exchange: Exchange) -> None:
        """Counters and pool accounting of the scheduler, and the counters of this process under `frontend`."""
        await exchange.reply_json(await self._state())

    async def _state(self) -> dict[str, object]:
        frontend = self.context.frontend
        states = await frontend.control.internal_states()
        state = {**msgspec.to_builtins(sum_of_states(states)), "frontend": await answer(frontend.counters())}
        if self.context.args.num_replicas > 1:
            state["replicas"] = states
        return state

    async def flush_cache(self, exchange: Exchange) -> None:
        """Empty the prefix cache; 409 with the reason if requests still run or wait after the timeout."""
        options = exchange.read_query(FlushQuery)
        await exchange.read_no_fields()
        async with exchange.until_client_leaves():
            reply = await self.context.frontend.control.flush_cache(options.timeout)
        await exchange.reply_json({"success": reply.success, "message": reply.message}, 200 if reply.success else 409)

    async def flush_cache_by_get(self, exchange: Exchange) -> None:
        """The same for trainers, some of which ask with GET. An image or a link of a page can make a browser do that, so browsers are refused."""
        if exchange.scope["method"] != "GET" or is_browsers(exchange.scope["headers"]):
            raise MethodError("only clients that are no browsers may GET this: use POST", code="method_not_allowed")
        await self.flush_cache(exchange)

    async def abort_request(self, exchange: Exchange) -> None:
        """Abort a request of the caller by its rid, or all requests (needs the admin key)."""
        body = await exchange.read_json(_ABORT)
        if body.abort_all:
            if not exchange.is_admin:
                raise AuthError("abort_all needs the admin key", "abort_all", "invalid_api_key")
            self.context.frontend.abort_request(abort_all=True)
        elif body.rid:
            self.context.frontend.abort_request(body.rid, caller=exchange.caller)
        else:
            raise RequestError("name the request to abort by rid, or set abort_all", "rid")
        await exchange.reply_json({"success": True, "message": "asked to abort"})

    async def metrics(self, exchange: Exchange) -> None:
        """The Prometheus text."""
        text = await answer(self.context.frontend.metrics_text())
        await send_response(exchange.send, 200, text, CONTENT_TYPE.encode())

    async def inject_fault(self, exchange: Exchange) -> None:
        """For tests; the route exists only with --enable-fault-injection."""
        body = await exchange.read_json(_FAULT)
        await self.context.frontend.control.inject_fault(FaultReq(**msgspec.structs.asdict(body)))
        await exchange.reply_json({"success": True, "message": "injected"})


def _described(pooling: PoolingConfig, max_tokens: int) -> dict[str, object]:
    """What clients may want to know of a model that does not generate. max_tokens: of an input."""
    return {
        "task": pooling.task,
        "dimensions": pooling.dimensions,
        "max_tokens": max_tokens,
        "normalize": pooling.normalize,
        "labels": pooling.labels,
    }
