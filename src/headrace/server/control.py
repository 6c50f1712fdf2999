"""Health, information and control routes, timelines of requests, and LoRA adapters. Runs in the event loop that serves HTTP."""

from collections.abc import Awaitable
from typing import Annotated, Literal

import msgspec

from headrace.config.server_args import spellings
from headrace.errors import AuthError, CapacityError, MethodError, RequestError
from headrace.frontend.server_info import (
    describe_load,
    describe_server,
    describe_short_load,
    model_name_of,
    sum_of_states,
)
from headrace.media_kinds import MediaKind
from headrace.messages.control import FaultReq, Outcome
from headrace.metrics.export import CONTENT_TYPE
from headrace.server.http import Exchange, send_response
from headrace.server.middleware import is_browsers


class AbortBody(msgspec.Struct, forbid_unknown_fields=True):
    """What to abort: one request, or all."""

    rid: str | None = None
    abort_all: bool = False


class Liveness(msgspec.Struct, frozen=True, omit_defaults=True):
    """ok, or unavailable with status 503. reason: why it stays so until somebody does something."""

    status: Literal["ok", "unavailable"]
    reason: str = ""


OK, UNAVAILABLE = Liveness("ok"), Liveness("unavailable")


class FlushQuery(msgspec.Struct, forbid_unknown_fields=True):
    """timeout: wait at most this many seconds for requests to end."""

    timeout: float = 0.0


class FaultBody(FaultReq, frozen=True, tag=False, array_like=False, forbid_unknown_fields=True):
    """A fault to inject, as JSON."""


class LatestQuery(msgspec.Struct, forbid_unknown_fields=True):
    """limit: how many to list at most."""

    limit: Annotated[int, msgspec.Meta(ge=1, le=1000)] = 100


class LoadLoraBody(msgspec.Struct, forbid_unknown_fields=True):
    """lora_path: a folder on the server's machine, as saved by peft. pinned: never evicted."""

    lora_name: str
    lora_path: str
    pinned: bool = False


class UnloadLoraBody(msgspec.Struct, forbid_unknown_fields=True):
    """Which adapter to unload."""

    lora_name: str


async def health(exchange: Exchange) -> None:
    """Cheap liveness check: 200 while the engine's processes are alive, else 503."""
    await _answer_health(exchange, await _health(exchange))


async def health_generate(exchange: Exchange) -> None:
    """200 if the engine can generate a token (or requests run, which proves it), else 503."""
    async with exchange.until_client_leaves():
        found = await _health(exchange, generate=True)
    await _answer_health(exchange, found)


async def ready(exchange: Exchange) -> None:
    """200 if new requests are accepted: started, not draining, alive."""
    await _answer_health(exchange, await _health(exchange) if exchange.context.status.ready else UNAVAILABLE)


async def ping(exchange: Exchange) -> None:
    """200 while the HTTP server runs."""
    await _answer_health(exchange, OK)


async def _health(exchange: Exchange, generate: bool = False) -> Liveness:
    try:
        return OK if await exchange.context.frontend.health(generate=generate) else UNAVAILABLE
    except CapacityError as error:
        return Liveness("unavailable", error.message)


async def _answer_health(exchange: Exchange, found: Liveness) -> None:
    if found == OK:
        await exchange.reply_json(found)
    else:
        await exchange.reply_json(found, 503, [(b"retry-after", b"1")])


async def model_info(exchange: Exchange) -> None:
    """The served model: name, type, sizes. The admin key sees the full path, other keys only its last part."""
    context, model, pooling = exchange.context, exchange.context.model, exchange.context.model.pooling
    path = context.frontend.weights.model_path or context.args.model_path
    tokenizer_path = context.args.tokenizer_name
    described = (
        {
            "task": pooling.task,
            "dimensions": pooling.dimensions,
            "max_tokens": model.context_length,
            "normalize": pooling.normalize,
            "labels": pooling.labels,
        }
        if pooling is not None
        else None
    )
    await exchange.reply_json(
        {
            "model_path": path if exchange.is_admin else model_name_of(path),
            "tokenizer_path": tokenizer_path if exchange.is_admin else model_name_of(tokenizer_path),
            "served_model_name": model.name,
            "model_type": model.model_type,
            "architectures": model.architectures,
            "model_class": model.ready.model_class,
            "is_generation": pooling is None,
            **{f"has_{kind}_understanding": kind in model.media_support.tokens for kind in MediaKind},
            **{f"{kind}_token": model.media_support.tokens.get(kind) for kind in MediaKind},
            "pooling": described,
            "has_chat_template": model.chat_template is not None,
            "output_format": None if model.output_format is None else model.output_format.name,
            "context_length": model.context_length,
            "vocab_size": model.ready.vocab_size,
            "hidden_size": model.ready.hidden_size,
            "dtype": model.ready.dtype,
            "default_max_tokens": model.reply_limit or None,
            "sampling_defaults": {**model.sampling_defaults.values(), "origin": model.sampling_defaults.origin},
            "weight_version": context.frontend.weights.version,
        }
    )


async def server_info(exchange: Exchange) -> None:
    """Options (keys masked, files by name only), the memory plan and the state of each replica, as one flat object."""
    context, frontend = exchange.context, exchange.context.frontend
    states = await frontend.control.internal_states()
    info = describe_server(context.args, context.model.ready, frontend.adapters.names, states)
    info["served_model_name"] = context.model.name
    info["model_path"] = model_name_of(frontend.weights.model_path or context.args.model_path)
    info["weight_version"] = frontend.weights.version
    changed = await frontend.settings.changed_options()
    await exchange.reply_json(info | changed | {"frontend": await frontend.counters()})


async def loads(exchange: Exchange) -> None:
    """Load of each replica, for routers: requests, tokens, throughput."""
    states = await exchange.context.frontend.control.internal_states()
    await exchange.reply_json({"loads": [describe_load(state) for state in states]})


async def get_load(exchange: Exchange) -> None:
    """The load in the form of SGLang's routers: a list with three counts per replica."""
    states = await exchange.context.frontend.control.internal_states()
    await exchange.reply_json([describe_short_load(state) for state in states])


async def internal_state(exchange: Exchange) -> None:
    """Counters and pool accounting of the scheduler, and the counters of this process under `frontend`."""
    frontend = exchange.context.frontend
    states = await frontend.control.internal_states()
    state = {**msgspec.to_builtins(sum_of_states(states)), "frontend": await frontend.counters()}
    if exchange.context.args.num_replicas > 1:
        state["replicas"] = states
    await exchange.reply_json(state)


async def flush_cache(exchange: Exchange) -> None:
    """Empty the prefix cache; 409 with the reason if requests still run or wait after the timeout."""
    options = exchange.read_query(FlushQuery)
    await exchange.read_no_fields()
    async with exchange.until_client_leaves():
        reply = await exchange.context.frontend.control.flush_cache(options.timeout)
    await exchange.reply_json(reply, 200 if reply.success else 409)


async def flush_cache_by_get(exchange: Exchange) -> None:
    """The same for trainers, some of which ask with GET. An image or a link of a page can make a browser do that, so browsers are refused."""
    if exchange.scope["method"] != "GET" or is_browsers(exchange.scope["headers"]):
        raise MethodError("only clients that are no browsers may GET this: use POST", code="method_not_allowed")
    await flush_cache(exchange)


async def abort_request(exchange: Exchange) -> None:
    """Abort a request of the caller by its rid, or all requests (needs the admin key)."""
    body = await exchange.read_json(AbortBody)
    if body.abort_all:
        if not exchange.is_admin:
            raise AuthError("abort_all needs the admin key", "abort_all", "invalid_api_key")
        exchange.context.frontend.abort_request(abort_all=True)
    elif body.rid:
        exchange.context.frontend.abort_request(body.rid, caller=exchange.caller)
    else:
        raise RequestError("name the request to abort by rid, or set abort_all", "rid")
    await exchange.reply_json(Outcome(True, "asked to abort"))


async def metrics(exchange: Exchange) -> None:
    text = await exchange.context.frontend.metrics_text()
    await send_response(exchange.send, 200, text, CONTENT_TYPE.encode())


async def inject_fault(exchange: Exchange) -> None:
    """For tests; the route exists only with --enable-fault-injection."""
    body = await exchange.read_json(FaultBody)
    await exchange.context.frontend.control.inject_fault(FaultReq(**msgspec.structs.asdict(body)))
    await exchange.reply_json(Outcome(True, "injected"))


async def explain_request(exchange: Exchange) -> None:
    """The timeline of a recent request, without its text. The admin key sees all requests, other keys only their own."""
    records = exchange.context.frontend.records
    samples = await records.timelines(exchange.path_param("id"), exchange.caller)
    await exchange.reply_json({"object": "list", "data": samples})


async def latest_requests(exchange: Exchange) -> None:
    """Live requests and those that ended last, without their text. The admin key sees all, other keys only their own."""
    limit = exchange.read_query(LatestQuery).limit
    samples = await exchange.context.frontend.records.latest(limit, exchange.caller)
    await exchange.reply_json({"object": "list", "data": samples})


async def load_adapter(exchange: Exchange) -> None:
    """Load a LoRA adapter; 400 with the reason if it is refused, 503 if there is no room."""
    body = await exchange.read_json(LoadLoraBody)
    if any(name in exchange.context.model.names for name in spellings(body.lora_name)):
        raise RequestError(f"{body.lora_name!r} is the model's own name", "lora_name")
    loading = exchange.context.frontend.adapters.load(body.lora_name, body.lora_path, body.pinned)
    await _change_adapters(exchange, loading, "the adapter is loaded")


async def unload_adapter(exchange: Exchange) -> None:
    """Unload a LoRA adapter once the requests that use it have ended; 404 for an unknown name."""
    body = await exchange.read_json(UnloadLoraBody)
    unloading = exchange.context.frontend.adapters.unload(body.lora_name)
    await _change_adapters(exchange, unloading, "the adapter is unloaded")


async def _change_adapters(exchange: Exchange, change: Awaitable[None], message: str) -> None:
    async with exchange.until_client_leaves():
        await change
    names = exchange.context.frontend.adapters.names
    await exchange.reply_json({"success": True, "message": message, "loaded_adapters": names})
