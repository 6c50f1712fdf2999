"""The HTTP application: its routes (`route_table`), the middleware around them, start and warm-up.

Handlers are raw ASGI endpoints: requests are decoded by msgspec, and streams are written as bytes. Runs in the event loop that serves HTTP.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from functools import partial
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.routing import Route
from starlette.types import Lifespan

from headrace.config.server_args import ServerArgs
from headrace.config.web import parse_origins, parse_proxies
from headrace.errors import ConfigError
from headrace.frontend.tenants import SERVER
from headrace.log import get_logger
from headrace.messages.requests import EmbeddingReqInput, GenerateReqInput
from headrace.sampling.params import SamplingParams
from headrace.server.auth import ApiKeys, AuthMiddleware, open_keys, turn_of
from headrace.server.chat.conversation import Conversation
from headrace.server.chat.prompt import chat_prompt
from headrace.server.context import ServedModel, ServerStatus, ServingContext
from headrace.server.error_forms import ApiError, form_of
from headrace.server.http import Endpoint
from headrace.server.middleware import (
    ErrorBoundary,
    HostList,
    OriginGate,
    PatternCors,
    RequestCounter,
    RequestIdMiddleware,
    RouteNames,
    is_loopback,
)
from headrace.server.notes import NOTED_HEADER, SKIPPED_HEADER
from headrace.server.pooling.protocol import described
from headrace.server.request_frontend import RequestFrontend
from headrace.server.route_table import route_table
from headrace.server.routes import RouteSpec
from headrace.version import VERSION

log = get_logger(__name__)


def create_app(
    frontend: RequestFrontend,
    args: ServerArgs,
    model: ServedModel,
    status: ServerStatus | None = None,
) -> FastAPI:
    """The application that serves `model` through `frontend`.

    status: shared with the code that stops the server, to refuse new requests. `app.state.context` is the
    handlers' context, `app.state.keys` the keys of --api-key-file, `app.state.turn_of` whose turn a request takes, `app.state.routes` the rows of
    the route table.
    Raises ConfigError for unknown warm-ups and a key file that cannot be used.
    """
    context = ServingContext(frontend, model, args, status if status is not None else ServerStatus())
    warmups = chosen_warmups(args)
    if model.pooling is not None and "chat" in warmups:
        raise ConfigError(f"--warmups chat: this model does not chat, it is {described(model)}")
    table = route_table(context)
    keys = open_keys(args)
    _warn_if_open(args)
    app = FastAPI(
        title="Headrace",
        version=VERSION,
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        lifespan=_lifespan(context, warmups),
        exception_handlers={HTTPException: _routing_error},
    )
    app.state.context = context
    app.state.startup_error = None
    app.state.keys = keys
    app.state.routes = table
    app.state.turn_of = partial(
        turn_of, keys=keys, admin_key=args.admin_api_key, proxies=parse_proxies(args.trusted_proxies)
    )
    for spec in table:
        endpoint = Endpoint(spec.handler, context)
        app.router.routes.append(Route(spec.path, endpoint, methods=list(spec.methods), name=spec.path))
    _add_middleware(app, context, table, keys)
    return app


def _lifespan(context: ServingContext, warmups: list[str]) -> Lifespan[FastAPI]:
    """Start and end of the application: warm up, serve, end the threads. `app.state.startup_error` gets what a warm-up raises."""

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        try:
            for name in warmups:
                await WARMUPS[name](context)
        except Exception as exc:
            app.state.startup_error = exc
            raise
        context.status.started = True
        try:
            yield
        finally:
            context.status.started = False
            context.close()

    return lifespan


def _add_middleware(app: FastAPI, context: ServingContext, table: list[RouteSpec], keys: ApiKeys | None) -> None:
    """Add what a request passes before its handler, from the inside out: the last one added is the outermost.

    CORS answers preflights without a key, and adds its headers to error replies too, but not to refusals of the origin gate.
    """
    args = context.args
    names, access = RouteNames(spec.path for spec in table), {spec.path: spec.access for spec in table}
    app.add_middleware(
        AuthMiddleware,
        names=names,
        access=access,
        api_key=args.api_key,
        admin_api_key=args.admin_api_key,
        keys=keys,
        proxies=parse_proxies(args.trusted_proxies),
    )
    app.add_middleware(ErrorBoundary)
    origins = parse_origins(args.allow_origins)
    if origins:
        exposed = ["x-request-id", SKIPPED_HEADER.decode(), NOTED_HEADER.decode()]
        app.add_middleware(PatternCors, origins=origins, expose_headers=exposed)
    app.add_middleware(OriginGate, origins=origins, hosts=HostList(args.host, args.allowed_hosts))
    if not args.disable_metrics:
        app.add_middleware(RequestCounter, names=names, count=context.frontend.count_reply)
    app.add_middleware(RequestIdMiddleware)


def _warn_if_open(args: ServerArgs) -> None:
    has_keys = args.api_key or args.admin_api_key or args.api_key_file
    if not has_keys and not is_loopback(args.host):
        log.warning(
            "no keys are set and --host is %s: whoever can reach this server may use it and replace its weights; "
            "set --api-key and --admin-api-key",
            args.host,
        )


async def _routing_error(request: Request, exc: Exception) -> Response:
    """The error for an unknown route or method, in the same shape as every other error."""
    assert isinstance(exc, HTTPException), "registered for this type"
    if exc.status_code == 405:
        error = ApiError(
            f"{request.method[:20]} is not allowed here", "invalid_request_error", None, "method_not_allowed"
        )
    else:
        error = ApiError("there is no such route", "not_found_error", None, "route_not_found")
    return Response(form_of(request.url.path)(exc.status_code, error), exc.status_code, exc.headers, "application/json")


async def _warm_generate(context: ServingContext) -> None:
    """Generate a token, or make one vector if that is what the model does."""
    prompt: dict[str, Any] = {"input_ids": [0]} if context.args.skip_tokenizer_init else {"text": "Hello"}
    if context.model.pooling is None:
        await _one_token(context, GenerateReqInput(**prompt, sampling_params=_ONE_TOKEN))
        return
    async with aclosing(context.frontend.encode_request(EmbeddingReqInput(**prompt), caller=SERVER)) as updates:
        await anext(updates)


async def _warm_chat(context: ServingContext) -> None:
    chat = Conversation(messages=[{"role": "user", "content": "Hello"}])
    prompt = await context.in_text_thread(lambda: chat_prompt(context, chat))
    await _one_token(context, GenerateReqInput(input_ids=list(prompt.ids), sampling_params=_ONE_TOKEN))


async def _one_token(context: ServingContext, request: GenerateReqInput) -> None:
    async with aclosing(context.frontend.generate_request(request, caller=SERVER)) as updates:
        await anext(updates)


_ONE_TOKEN = SamplingParams(max_new_tokens=1, temperature=0.0)

WARMUPS: dict[str, Callable[[ServingContext], Awaitable[None]]] = {"generate": _warm_generate, "chat": _warm_chat}
"""Routines that `--warmups` may name."""


def chosen_warmups(args: ServerArgs) -> list[str]:
    """Names to run before the server is ready: `generate` unless skipped, then `--warmups`. Raises ConfigError."""
    named = [name.strip() for name in args.warmups.split(",") if name.strip()]
    for name in named:
        if name not in WARMUPS:
            raise ConfigError(f"--warmups: {name!r} is not one of {', '.join(WARMUPS)}")
    if "chat" in named and args.skip_tokenizer_init:
        raise ConfigError("--warmups chat cannot be combined with --skip-tokenizer-init")
    first = [] if args.skip_server_warmup else ["generate"]
    return list(dict.fromkeys(first + named))
