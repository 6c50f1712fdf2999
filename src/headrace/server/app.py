"""The HTTP application: the route table, the middleware around it, start and warm-up.

A new endpoint is a handler in this package and a row in `route_table`, which also declares who may call it. Handlers are raw ASGI
endpoints: requests are decoded by msgspec, and streams are written as bytes. Runs in the event loop that serves HTTP.
"""

from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import aclosing, asynccontextmanager
from dataclasses import replace

from fastapi import FastAPI, Request
from fastapi.responses import Response
from starlette.exceptions import HTTPException
from starlette.routing import Route
from starlette.types import Lifespan

from headrace.config.server_args import ServerArgs
from headrace.config.web import parse_origins
from headrace.errors import ConfigError
from headrace.frontend.tenants import SERVER
from headrace.log import get_logger
from headrace.messages.requests import EmbeddingReqInput, GenerateReqInput
from headrace.sampling.params import SamplingParams
from headrace.server.anthropic.messages import AnthropicErrorReply, MessagesServing
from headrace.server.anthropic.models import AnthropicModels, by_version
from headrace.server.anthropic.protocol import CountTokensRequest, MessagesRequest
from headrace.server.auth import AccessTable, AuthMiddleware
from headrace.server.body import Bodies
from headrace.server.chat.conversation import Conversation
from headrace.server.chat.prompt import chat_prompt
from headrace.server.context import ServedModel, ServerStatus, ServingContext
from headrace.server.control import AbortBody, ControlAPI, FaultBody, FlushQuery, Liveness, Outcome
from headrace.server.diagnostics import ConfigureLoggingBody, DiagnosticsAPI, LatestQuery
from headrace.server.error_forms import ApiError, form_of
from headrace.server.examples import request_examples
from headrace.server.experts import ExpertsAPI
from headrace.server.http import Endpoint, ErrorBoundary
from headrace.server.infill import InfillAPI, InfillRequest
from headrace.server.keys import ApiKeys, open_keys
from headrace.server.lora import LoadLoraBody, LoraAPI, UnloadLoraBody
from headrace.server.native import NativeAPI
from headrace.server.notes import NOTED_HEADER, SKIPPED_HEADER, noted_fields
from headrace.server.ollama.embed import OllamaEmbedAPI
from headrace.server.ollama.generation import OllamaGenerationAPI
from headrace.server.ollama.models import OllamaModelsAPI
from headrace.server.ollama.protocol import (
    OllamaChatRequest,
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaGenerateRequest,
    OllamaPullRequest,
    OllamaShowRequest,
)
from headrace.server.openai.chat import ChatServing
from headrace.server.openai.completions import CompletionServing
from headrace.server.openai.embeddings import EmbeddingRequest, EmbeddingServing
from headrace.server.openai.models import ModelsAPI
from headrace.server.openai.protocol import ChatCompletionRequest, CompletionRequest
from headrace.server.openai.tokenize import DetokenizeBody, TokenizeAPI, TokenizeBody
from headrace.server.openapi import OpenApi
from headrace.server.operations import operation_routes
from headrace.server.origin_gate import HostList, OriginGate, PatternCors, is_loopback
from headrace.server.pooling.classify import ClassifyAPI, ClassifyRequest
from headrace.server.pooling.embed import CohereEmbedRequest, EmbedAPI, TeiEmbedRequest
from headrace.server.pooling.encode import EncodeAPI
from headrace.server.pooling.kinds import described, refusing_to_generate
from headrace.server.pooling.rerank import RerankAPI, RerankRequest
from headrace.server.pooling.score import ScoreAPI, ScoreRequest
from headrace.server.request_counter import RequestCounter, RouteNames
from headrace.server.request_frontend import RequestFrontend
from headrace.server.request_id import RequestIdMiddleware
from headrace.server.responses.protocol import ResponsesRequest
from headrace.server.responses.serving import GetQuery, ItemsQuery, ResponsesAPI
from headrace.server.routes import RouteSpec, aliases
from headrace.server.sessions import CloseSessionBody, OpenSessionBody, SessionAPI
from headrace.server.settings import SetInternalStateBody, SettingsAPI
from headrace.server.ui.pages import UiPages
from headrace.server.weights import WeightsAPI
from headrace.version import VERSION

log = get_logger(__name__)


def route_table(context: ServingContext) -> list[RouteSpec]:
    """Every route with its access; the most used first, because they are tried in order."""
    native, control = NativeAPI(context), ControlAPI(context)
    chat, completions = ChatServing(context), CompletionServing(context)
    responses = ResponsesAPI(context)
    loras = LoraAPI(context)
    models, tokens, sessions = ModelsAPI(context), TokenizeAPI(context), SessionAPI(context)
    messages, cards = MessagesServing(context), AnthropicModels(context)
    list_models = by_version(cards.list_models, models.list_models)
    get_model = by_version(cards.get_model, models.get_model)
    diagnostics, settings = DiagnosticsAPI(context), SettingsAPI(context)
    get, post, delete = ("GET",), ("POST",), ("DELETE",)
    # fmt: off
    table = [
        RouteSpec("/v1/chat/completions", post, "user", chat.handle_request, "Chat completion", ChatCompletionRequest, generates=True),
        RouteSpec("/v1/completions", post, "user", completions.handle_request, "Text completion", CompletionRequest, generates=True),
        RouteSpec("/v1/embeddings", post, "user", EmbeddingServing(context).handle_request, "Embeddings", EmbeddingRequest),
        RouteSpec("/v1/responses", post, "user", responses.create, "Response", ResponsesRequest, generates=True),
        RouteSpec("/v1/responses/{id}", get, "user", responses.get, "A kept response", query=GetQuery),
        RouteSpec("/v1/responses/{id}", delete, "user", responses.delete, "Forget a kept response"),
        RouteSpec("/v1/responses/{id}/cancel", post, "user", responses.cancel, "Refused: no response runs in the background"),
        RouteSpec("/v1/responses/{id}/input_items", get, "user", responses.input_items, "Input of a kept response", query=ItemsQuery),
        RouteSpec(
            "/v1/messages", post, "user", messages.create, "Message", MessagesRequest, failure=AnthropicErrorReply, generates=True
        ),
        RouteSpec(
            "/v1/messages/count_tokens", post, "user", messages.count_tokens, "Length of a message's prompt", CountTokensRequest,
            failure=AnthropicErrorReply,
        ),
        RouteSpec("/generate", ("POST", "PUT"), "user", native.generate, "Native generation", GenerateReqInput, generates=True),
        RouteSpec("/infill", post, "user", InfillAPI(context).infill, "llama.cpp: fill in the middle", InfillRequest, generates=True),
        *_pooling_routes(context),
        RouteSpec("/health", get, "public", control.health, "Liveness", failure=Liveness),
        RouteSpec("/ready", get, "public", control.ready, "New requests are accepted", failure=Liveness),
        RouteSpec("/ping", get, "public", control.ping, "The HTTP server answers"),
        RouteSpec("/health_generate", get, "public", control.health_generate, "The engine can generate a token", failure=Liveness),
        RouteSpec("/tokenize", post, "user", tokens.tokenize, "Text or messages to token ids", TokenizeBody),
        RouteSpec("/detokenize", post, "user", tokens.detokenize, "Token ids to text", DetokenizeBody),
        RouteSpec("/v1/tokenize", post, "user", tokens.tokenize, "Alias of /tokenize", TokenizeBody),
        RouteSpec("/v1/detokenize", post, "user", tokens.detokenize, "Alias of /detokenize", DetokenizeBody),
        RouteSpec("/open_session", post, "user", sessions.open, "Open a session", OpenSessionBody, generates=True),
        RouteSpec("/close_session", post, "user", sessions.close, "Forget a session", CloseSessionBody),
        RouteSpec("/v1/models", get, "user", list_models, "Served models"),
        RouteSpec("/v1/models/{id:path}", get, "user", get_model, "One model"),
        RouteSpec("/model_info", get, "user", control.model_info, "The served model"),
        RouteSpec("/get_model_info", get, "user", control.model_info, "Alias of /model_info"),
        RouteSpec("/server_info", get, "user", control.server_info, "Options, memory plan and state"),
        RouteSpec("/get_server_info", get, "user", control.server_info, "Alias of /server_info"),
        RouteSpec("/v1/loads", get, "user", control.loads, "Load of each replica"),
        RouteSpec("/get_load", get, "user", control.get_load, "Load of each replica, for SGLang's routers"),
        RouteSpec("/v1/requests", get, "user", diagnostics.latest_requests, "Live requests, and the last ones", query=LatestQuery),
        RouteSpec("/v1/requests/{id:path}", get, "user", diagnostics.explain_request, "What happened to a request"),
        RouteSpec("/abort_request", post, "user", control.abort_request, "Abort by rid; all with the admin key", AbortBody),
        RouteSpec("/flush_cache", post, "admin", control.flush_cache, "Empty the prefix cache", failure=Outcome, query=FlushQuery),
        RouteSpec("/flush_cache", get, "admin", control.flush_cache_by_get, "The same, not for browsers", failure=Outcome, query=FlushQuery),
        RouteSpec("/load_lora_adapter", post, "admin", loras.load, "Load an adapter", LoadLoraBody),
        RouteSpec("/unload_lora_adapter", post, "admin", loras.unload, "Forget an adapter", UnloadLoraBody),
        RouteSpec(
            "/configure_logging", post, "admin", diagnostics.configure_logging, "What is logged", ConfigureLoggingBody
        ),
        RouteSpec("/dump_requests", post, "admin", diagnostics.dump_requests, "Write a dump of the latest requests"),
        RouteSpec("/freeze_gc", post, "admin", settings.freeze_gc, "Exclude current objects from garbage collection"),
        RouteSpec(
            "/set_internal_state", post, "admin", settings.set_internal_state, "Change limits", SetInternalStateBody
        ),
        RouteSpec("/internal_state", get, "admin", control.internal_state, "Scheduler counters and pool accounting"),
        *_ollama_routes(context),
        *operation_routes(context),
        *WeightsAPI(context).routes(),
        *ExpertsAPI(context).routes(),
    ]
    # fmt: on
    table += aliases(table)
    if not context.args.disable_metrics:
        table.append(RouteSpec("/metrics", get, "public", control.metrics, "Prometheus metrics"))
    if context.args.enable_fault_injection:
        fault = RouteSpec("/inject_fault", post, "admin", control.inject_fault, "Test hook", FaultBody, in_schema=False)
        table.append(fault)
    if not context.args.disable_openapi:
        openapi = OpenApi(table, request_examples(context.model.name))
        table.append(RouteSpec("/openapi.json", get, "user", openapi.openapi_json, "This API", in_schema=False))
    if not context.args.disable_ui:
        table += UiPages().routes(has_docs=not context.args.disable_openapi)
    if context.model.pooling is not None:
        refuse = refusing_to_generate(context.model)
        table = [replace(spec, handler=refuse) if spec.generates else spec for spec in table]
    return table


def _pooling_routes(context: ServingContext) -> list[RouteSpec]:
    """Routes of embedding models, rerankers and classifiers."""
    classify, rerank, score = ClassifyAPI(context), RerankAPI(context), ScoreAPI(context)
    embed = EmbedAPI(context)
    post = ("POST",)
    return [
        RouteSpec("/embed", post, "user", embed.tei, "TEI: embeddings", TeiEmbedRequest),
        RouteSpec("/v2/embed", post, "user", embed.cohere_v2, "Cohere: embeddings", CohereEmbedRequest),
        RouteSpec(
            "/v1/embed", post, "user", embed.cohere_v1, "Cohere: embeddings, in the older form", CohereEmbedRequest
        ),
        RouteSpec("/info", ("GET",), "user", embed.info, "TEI: the served model"),
        *(
            RouteSpec(path, post, "user", rerank.rerank, "Documents by their relevance", RerankRequest)
            for path in ("/v1/rerank", "/v2/rerank", "/rerank")
        ),
        *(
            RouteSpec(path, post, "user", score.score, "Scores of pairs, or of labels", ScoreRequest)
            for path in ("/v1/score", "/score")
        ),
        RouteSpec("/encode", post, "user", EncodeAPI(context).encode, "Native embeddings", EmbeddingReqInput),
        RouteSpec("/classify", post, "user", classify.classify, "Classification", ClassifyRequest),
        RouteSpec("/v1/classify", post, "user", classify.classify, "Classification", ClassifyRequest),
    ]


def _ollama_routes(context: ServingContext) -> list[RouteSpec]:
    noted = noted_fields()
    generation, embed = OllamaGenerationAPI(context, noted), OllamaEmbedAPI(context, noted)
    models = OllamaModelsAPI(context, noted)
    get, post = ("GET",), ("POST",)
    # fmt: off
    return [
        RouteSpec("/api/chat", post, "user", generation.chat, "Ollama: chat", OllamaChatRequest, generates=True),
        RouteSpec("/api/generate", post, "user", generation.generate, "Ollama: generate", OllamaGenerateRequest, generates=True),
        RouteSpec("/", get, "public", models.root, "What runs here"),
        RouteSpec("/api/version", get, "user", models.version, "Ollama: version of the API"),
        RouteSpec("/api/tags", get, "user", models.tags, "Ollama: served models"),
        RouteSpec("/api/ps", get, "user", models.ps, "Ollama: loaded models"),
        RouteSpec("/api/show", post, "user", models.show, "Ollama: one model", OllamaShowRequest),
        RouteSpec("/api/pull", post, "user", models.pull, "Ollama: success for a served model", OllamaPullRequest),
        RouteSpec("/api/embed", post, "user", embed.embed, "Ollama: embeddings", OllamaEmbedRequest),
        RouteSpec("/api/embeddings", post, "user", embed.embeddings, "Ollama: one embedding", OllamaEmbeddingsRequest),
        *(RouteSpec(f"/api/{name}", post, "user", models.refuse, "Not here", in_schema=False) for name in ("create", "copy", "push")),
        RouteSpec("/api/delete", ("DELETE",), "user", models.refuse, "Not here", in_schema=False),
        RouteSpec("/api/blobs/{digest:path}", ("HEAD", "POST"), "user", models.refuse, "Not here", in_schema=False),
    ]
    # fmt: on


def create_app(
    frontend: RequestFrontend,
    args: ServerArgs,
    model: ServedModel,
    status: ServerStatus | None = None,
) -> FastAPI:
    """The application that serves `model` through `frontend`.

    status: shared with the code that stops the server, to refuse new requests. `app.state.context` is the
    handlers' context, `app.state.keys` the keys of --api-key-file, `app.state.paths` the declared paths.
    Raises ConfigError for unknown warm-ups and a key file that cannot be used.
    """
    context = ServingContext(frontend, model, args, status if status is not None else ServerStatus())
    warmups = chosen_warmups(args)
    if model.pooling is not None and "chat" in warmups:
        raise ConfigError(f"--warmups chat: this model does not chat, it is {described(model)}")
    table = route_table(context)
    keys = open_keys(args)
    _warn_if_open(args)
    bodies = Bodies(args.max_body_bytes)
    app = FastAPI(
        title="Headrace",
        version=VERSION,
        openapi_url=None,
        docs_url=None,
        redoc_url=None,
        redirect_slashes=False,
        lifespan=_lifespan(context, warmups, bodies),
        exception_handlers={HTTPException: _routing_error},
    )
    app.state.context = context
    app.state.startup_error = None
    app.state.keys = keys
    app.state.paths = [spec.path for spec in table]
    _add_routes(app, args, table, bodies)
    _add_middleware(app, args, table, keys, frontend)
    return app


def _lifespan(context: ServingContext, warmups: list[str], bodies: Bodies) -> Lifespan[FastAPI]:
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
            context.text_threads.shutdown(wait=False, cancel_futures=True)
            bodies.close()

    return lifespan


def _add_routes(app: FastAPI, args: ServerArgs, table: list[RouteSpec], bodies: Bodies) -> None:
    interval_s = args.sse_ping_interval_s
    # The first ping says 200. Before the queue's limit has passed, a request may still be refused with 503.
    first_s = args.queue_timeout_s + interval_s
    for spec in table:
        endpoint = Endpoint(spec.handler, bodies, interval_s, first_s)
        app.router.routes.append(Route(spec.path, endpoint, methods=list(spec.methods), name=spec.path))


def _add_middleware(
    app: FastAPI, args: ServerArgs, table: list[RouteSpec], keys: ApiKeys | None, frontend: RequestFrontend
) -> None:
    """Add what a request passes before its handler, from the inside out: the last one added is the outermost.

    CORS answers preflights without a key, and adds its headers to error replies too, but not to refusals of the origin gate.
    """
    access = AccessTable((spec.path, spec.access) for spec in table)
    app.add_middleware(AuthMiddleware, table=access, api_key=args.api_key, admin_api_key=args.admin_api_key, keys=keys)
    app.add_middleware(ErrorBoundary)
    origins = parse_origins(args.allow_origins)
    if origins:
        app.add_middleware(
            PatternCors,
            origins=origins,
            expose_headers=["x-request-id", SKIPPED_HEADER.decode(), NOTED_HEADER.decode()],
        )
    app.add_middleware(OriginGate, origins=origins, hosts=HostList(args.host, args.allowed_hosts))
    if not args.disable_metrics:
        app.add_middleware(RequestCounter, names=RouteNames(spec.path for spec in table), count=frontend.count_reply)
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
    if context.model.pooling is not None:
        await _one_vector(context)
        return
    if context.args.skip_tokenizer_init:
        request = GenerateReqInput(input_ids=[0], sampling_params=_ONE_TOKEN)
    else:
        request = GenerateReqInput(text="Hello", sampling_params=_ONE_TOKEN)
    await _one_token(context, request)


async def _one_vector(context: ServingContext) -> None:
    has_text = not context.args.skip_tokenizer_init
    request = EmbeddingReqInput(text="Hello") if has_text else EmbeddingReqInput(input_ids=[0])
    async with aclosing(context.frontend.encode_request(request, caller=SERVER)) as updates:
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
