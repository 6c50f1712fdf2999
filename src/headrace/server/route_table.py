"""The route table: a row for each endpoint, with all that is declared about it.

A new endpoint is a handler in this package and a row here (docs/adding/endpoint.md). Routes of control operations come from their own table
(`messages.operations`). Pure; made once, when the application is.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from headrace.messages.requests import EmbeddingReqInput, GenerateReqInput
from headrace.server.anthropic.messages import AnthropicErrorReply, MessagesServing
from headrace.server.anthropic.protocol import CountTokensRequest, MessagesRequest
from headrace.server.context import ServingContext
from headrace.server.control import AbortBody, ControlAPI, FaultBody, FlushQuery, Liveness, Outcome
from headrace.server.diagnostics import DiagnosticsAPI, LatestQuery
from headrace.server.infill import InfillAPI, InfillRequest
from headrace.server.lora import LoadLoraBody, LoraAPI, UnloadLoraBody
from headrace.server.native import NativeAPI
from headrace.server.notes import noted_fields
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
from headrace.server.pooling.classify import ClassifyAPI, ClassifyRequest
from headrace.server.pooling.embed import CohereEmbedRequest, EmbedAPI, TeiEmbedRequest
from headrace.server.pooling.encode import EncodeAPI
from headrace.server.pooling.kinds import refusing_to_generate
from headrace.server.pooling.rerank import RerankAPI, RerankRequest
from headrace.server.pooling.score import ScoreAPI, ScoreRequest
from headrace.server.responses.protocol import ResponsesRequest
from headrace.server.responses.serving import GetQuery, ItemsQuery, ResponsesAPI
from headrace.server.routes import Examples, RouteSpec, aliases, operation_routes
from headrace.server.sessions import CloseSessionBody, OpenSessionBody, SessionAPI
from headrace.server.ui.pages import UiPages
from headrace.server.weights import WeightsAPI

_QUESTION = "What is the capital of France?"
_ANSWER = "Paris is the capital of France."
_BEGINNING = "The capital of France is"
_ASKED = [{"role": "user", "content": _QUESTION}]
_FOUND = [_ANSWER, "Berlin is the capital of Germany."]
_CITY: Mapping[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
GET, POST, DELETE = ("GET",), ("POST",), ("DELETE",)


def route_table(context: ServingContext) -> list[RouteSpec]:
    """Every route; the most used first, because they are tried in order."""
    table = [
        *_openai_routes(context),
        *_anthropic_routes(context),
        *_native_routes(context),
        *_pooling_routes(context),
        *_information_routes(context),
        *_admin_routes(context),
        *_ollama_routes(context),
        *operation_routes(context),
        *WeightsAPI(context).routes(),
    ]
    table += aliases(table)
    control, args = ControlAPI(context), context.args
    if not args.disable_metrics:
        table.append(RouteSpec("/metrics", GET, "public", control.metrics, "Prometheus metrics"))
    if args.enable_fault_injection:
        table.append(
            RouteSpec("/inject_fault", POST, "admin", control.inject_fault, "Test hook", FaultBody, in_schema=False)
        )
    if not args.disable_openapi:
        openapi = OpenApi(table)
        table.append(
            RouteSpec(
                "/openapi.json", GET, "user", openapi.openapi_json, "This API", in_schema=False, with_replicas=True
            )
        )
    if not args.disable_ui:
        table += UiPages().routes(has_docs=not args.disable_openapi)
    if context.model.pooling is not None:
        refuse = refusing_to_generate(context.model)
        table = [replace(spec, handler=refuse) if spec.generates else spec for spec in table]
    return table


def _openai_routes(context: ServingContext) -> list[RouteSpec]:
    named: dict[str, Any] = {"model": context.model.name}
    chat = {**named, "messages": _ASKED, "max_tokens": 64}
    text = {**named, "prompt": _BEGINNING, "max_tokens": 16}
    response = {**named, "input": _QUESTION, "max_output_tokens": 64}
    chats = {
        "A question": chat,
        "Streamed": {**chat, "stream": True, "stream_options": {"include_usage": True}},
        "A JSON schema": {
            **chat,
            "response_format": {
                "type": "json_schema",
                "json_schema": {"name": "place", "strict": True, "schema": _CITY},
            },
        },
        "A tool": {**chat, "tools": [{"type": "function", "function": {"name": "get_weather", "parameters": _CITY}}]},
        "Probabilities of tokens": {**chat, "max_tokens": 8, "logprobs": True, "top_logprobs": 3},
    }
    texts: Examples = {"A text": text, "Streamed": {**text, "stream": True}}
    vectors = {
        "A text": {**named, "input": _QUESTION},
        "Two texts at once": {**named, "input": [_QUESTION, _BEGINNING], "encoding_format": "base64"},
    }
    responses_asked = {"A question": response, "Streamed": {**response, "stream": True}}
    chatting, completions = ChatServing(context), CompletionServing(context)
    embeddings, responses, models = EmbeddingServing(context), ResponsesAPI(context), ModelsAPI(context)
    kept = partial(RouteSpec, tag="OpenAI")
    row = partial(kept, with_replicas=True)
    # fmt: off
    return [
        row("/v1/chat/completions", POST, "user", chatting.handle_request, "Chat completion", ChatCompletionRequest, generates=True, examples=chats),
        row("/v1/completions", POST, "user", completions.handle_request, "Text completion", CompletionRequest, generates=True, examples=texts),
        row("/v1/embeddings", POST, "user", embeddings.handle_request, "Embeddings", EmbeddingRequest, examples=vectors),
        row("/v1/responses", POST, "user", responses.create, "Response", ResponsesRequest, generates=True, examples=responses_asked),
        kept("/v1/responses/{id}", GET, "user", responses.get, "A kept response", query=GetQuery),
        kept("/v1/responses/{id}", DELETE, "user", responses.delete, "Forget a kept response"),
        kept("/v1/responses/{id}/cancel", POST, "user", responses.cancel, "Refused: no response runs in the background"),
        kept("/v1/responses/{id}/input_items", GET, "user", responses.input_items, "Input of a kept response", query=ItemsQuery),
        row("/v1/models", GET, "user", models.list_models, "Served models"),
        row("/v1/models/{id:path}", GET, "user", models.get_model, "One model"),
    ]
    # fmt: on


def _anthropic_routes(context: ServingContext) -> list[RouteSpec]:
    named = {"model": context.model.name, "messages": _ASKED}
    chat = {**named, "max_tokens": 64}
    asked = {"A question": chat, "Streamed": {**chat, "stream": True}}
    messages = MessagesServing(context)
    row = partial(RouteSpec, tag="Anthropic", failure=AnthropicErrorReply, with_replicas=True)
    # fmt: off
    return [
        row("/v1/messages", POST, "user", messages.create, "Message", MessagesRequest, generates=True, examples=asked),
        row("/v1/messages/count_tokens", POST, "user", messages.count_tokens, "Length of a message's prompt", CountTokensRequest,
            examples={"A question": named}),
    ]
    # fmt: on


def _native_routes(context: ServingContext) -> list[RouteSpec]:
    text = {"text": _BEGINNING, "sampling_params": {"max_new_tokens": 16, "temperature": 0}}
    texts: Examples = {
        "A text": text,
        "Streamed": {**text, "stream": True},
        "Two texts at once": {**text, "text": [_BEGINNING, "The capital of Italy is"]},
    }
    code = {
        "Code": {
            "input_prefix": "def is_even(n):\n    return ",
            "input_suffix": "\n\nprint(is_even(4))\n",
            "n_predict": 32,
        }
    }
    prompts: Examples = {"A text": {"prompt": "Hello"}, "A conversation": {"messages": _ASKED}}
    chats = {"A conversation": {"messages": _ASKED}}
    ids = {"Token ids": {"tokens": [72, 105]}}
    session = {"A name of your own": {"session_id": "s1"}}
    native, infill = NativeAPI(context), InfillAPI(context)
    tokens, sessions = TokenizeAPI(context), SessionAPI(context)
    row = partial(RouteSpec, with_replicas=True)
    # fmt: off
    return [
        row("/generate", ("POST", "PUT"), "user", native.generate, "Native generation", GenerateReqInput, generates=True, examples=texts),
        row("/infill", POST, "user", infill.infill, "llama.cpp: fill in the middle", InfillRequest, generates=True, examples=code),
        row("/tokenize", POST, "user", tokens.tokenize, "Text or messages to token ids", TokenizeBody, examples=prompts),
        row("/detokenize", POST, "user", tokens.detokenize, "Token ids to text", DetokenizeBody, examples=ids),
        row("/apply-template", POST, "user", tokens.apply_template, "llama.cpp: the text of a prompt", ChatCompletionRequest, examples=chats),
        row("/v1/tokenize", POST, "user", tokens.tokenize, "Alias of /tokenize", TokenizeBody, examples=prompts),
        row("/v1/detokenize", POST, "user", tokens.detokenize, "Alias of /detokenize", DetokenizeBody, examples=ids),
        RouteSpec("/open_session", POST, "user", sessions.open, "Open a session", OpenSessionBody, generates=True, examples=session),
        RouteSpec("/close_session", POST, "user", sessions.close, "Forget a session", CloseSessionBody, examples=session),
    ]
    # fmt: on


def _pooling_routes(context: ServingContext) -> list[RouteSpec]:
    """Routes of embedding models, rerankers and classifiers."""
    named: dict[str, Any] = {"model": context.model.name}
    labels = {
        **named,
        "query": _QUESTION,
        "items": [" Paris", " Berlin"],
        "label_token_ids": [3, 4],
        "apply_softmax": True,
    }
    tei: Examples = {"A text": {"inputs": _QUESTION}, "Two texts at once": {"inputs": [_QUESTION, _BEGINNING]}}
    cohere = {"Two texts": {**named, "texts": _FOUND, "input_type": "search_document", "embedding_types": ["float"]}}
    ranked: Examples = {"Two documents": {**named, "query": _QUESTION, "documents": _FOUND}}
    scored: Examples = {
        "Pairs of texts": {**named, "text_1": _QUESTION, "text_2": _FOUND},
        "Probabilities of labels": labels,
    }
    native: Examples = {"A text": {"text": _QUESTION}, "Two texts at once": {"text": [_QUESTION, _BEGINNING]}}
    classified = {"A text": {**named, "input": _BEGINNING}}
    classify, rerank, score = ClassifyAPI(context), RerankAPI(context), ScoreAPI(context)
    embed, encode = EmbedAPI(context), EncodeAPI(context)
    row = partial(RouteSpec, with_replicas=True)
    # fmt: off
    return [
        row("/embed", POST, "user", embed.tei, "TEI: embeddings", TeiEmbedRequest, examples=tei),
        row("/v2/embed", POST, "user", embed.cohere_v2, "Cohere: embeddings", CohereEmbedRequest, examples=cohere),
        row("/v1/embed", POST, "user", embed.cohere_v1, "Cohere: embeddings, in the older form", CohereEmbedRequest, examples=cohere),
        row("/info", GET, "user", embed.info, "TEI: the served model"),
        *(row(path, POST, "user", rerank.rerank, "Documents by their relevance", RerankRequest, examples=ranked)
          for path in ("/v1/rerank", "/v2/rerank", "/rerank")),
        *(row(path, POST, "user", score.score, "Scores of pairs, or of labels", ScoreRequest, examples=scored) for path in ("/v1/score", "/score")),
        row("/encode", POST, "user", encode.encode, "Native embeddings", EmbeddingReqInput, examples=native),
        *(row(path, POST, "user", classify.classify, "Classification", ClassifyRequest, examples=classified)
          for path in ("/classify", "/v1/classify")),
    ]
    # fmt: on


def _information_routes(context: ServingContext) -> list[RouteSpec]:
    aborted: Examples = {"One request": {"rid": "my-request"}, "All": {"abort_all": True}}
    control, diagnostics = ControlAPI(context), DiagnosticsAPI(context)
    row = partial(RouteSpec, with_replicas=True)
    # fmt: off
    return [
        row("/health", GET, "public", control.health, "Liveness", failure=Liveness),
        row("/ready", GET, "public", control.ready, "New requests are accepted", failure=Liveness),
        row("/ping", GET, "public", control.ping, "The HTTP server answers"),
        row("/health_generate", GET, "public", control.health_generate, "The engine can generate a token", failure=Liveness),
        row("/model_info", GET, "user", control.model_info, "The served model"),
        row("/get_model_info", GET, "user", control.model_info, "Alias of /model_info"),
        RouteSpec("/server_info", GET, "user", control.server_info, "Options, memory plan and state"),
        RouteSpec("/get_server_info", GET, "user", control.server_info, "Alias of /server_info"),
        RouteSpec("/v1/loads", GET, "user", control.loads, "Load of each replica"),
        RouteSpec("/get_load", GET, "user", control.get_load, "Load of each replica, for SGLang's routers"),
        RouteSpec("/v1/requests", GET, "user", diagnostics.latest_requests, "Live requests, and the last ones", query=LatestQuery),
        RouteSpec("/v1/requests/{id:path}", GET, "user", diagnostics.explain_request, "What happened to a request"),
        RouteSpec("/abort_request", POST, "user", control.abort_request, "Abort by rid; all with the admin key", AbortBody, examples=aborted),
    ]
    # fmt: on


def _admin_routes(context: ServingContext) -> list[RouteSpec]:
    loaded = {"A folder": {"lora_name": "my-adapter", "lora_path": "/path/to/adapter"}}
    unloaded = {"By its name": {"lora_name": "my-adapter"}}
    control, loras = ControlAPI(context), LoraAPI(context)
    # fmt: off
    return [
        RouteSpec("/flush_cache", POST, "admin", control.flush_cache, "Empty the prefix cache", failure=Outcome, query=FlushQuery),
        RouteSpec("/flush_cache", GET, "admin", control.flush_cache_by_get, "The same, not for browsers", failure=Outcome, query=FlushQuery),
        RouteSpec("/load_lora_adapter", POST, "admin", loras.load, "Load an adapter", LoadLoraBody, examples=loaded),
        RouteSpec("/unload_lora_adapter", POST, "admin", loras.unload, "Forget an adapter", UnloadLoraBody, examples=unloaded),
        RouteSpec("/internal_state", GET, "admin", control.internal_state, "Scheduler counters and pool accounting"),
    ]
    # fmt: on


def _ollama_routes(context: ServingContext) -> list[RouteSpec]:
    named: dict[str, Any] = {"model": context.model.name}
    asked = {**named, "options": {"num_predict": 64}}
    chat, prompt = {**asked, "messages": _ASKED}, {**asked, "prompt": _QUESTION}
    chats = {"Streamed": chat, "A question": {**chat, "stream": False}}
    prompts = {"Streamed": prompt, "A question": {**prompt, "stream": False}}
    texts: Examples = {"A text": {**named, "input": _QUESTION}, "Two texts": {**named, "input": _FOUND}}
    text, model = {"A text": {**named, "prompt": _QUESTION}}, {"The served model": named}
    noted = noted_fields()
    generation, embed = OllamaGenerationAPI(context, noted), OllamaEmbedAPI(context, noted)
    models = OllamaModelsAPI(context, noted)
    row = partial(RouteSpec, tag="Ollama", with_replicas=True)
    refused = partial(RouteSpec, access="user", handler=models.refuse, summary="Not here", in_schema=False)
    # fmt: off
    return [
        row("/api/chat", POST, "user", generation.chat, "Ollama: chat", OllamaChatRequest, generates=True, examples=chats),
        row("/api/generate", POST, "user", generation.generate, "Ollama: generate", OllamaGenerateRequest, generates=True, examples=prompts),
        RouteSpec("/", GET, "public", models.root, "What runs here", with_replicas=True),
        row("/api/version", GET, "user", models.version, "Ollama: version of the API"),
        row("/api/tags", GET, "user", models.tags, "Ollama: served models"),
        row("/api/ps", GET, "user", models.ps, "Ollama: loaded models"),
        row("/api/show", POST, "user", models.show, "Ollama: one model", OllamaShowRequest, examples=model),
        row("/api/pull", POST, "user", models.pull, "Ollama: success for a served model", OllamaPullRequest, examples=model),
        row("/api/embed", POST, "user", embed.embed, "Ollama: embeddings", OllamaEmbedRequest, examples=texts),
        row("/api/embeddings", POST, "user", embed.embeddings, "Ollama: one embedding", OllamaEmbeddingsRequest, examples=text),
        *(refused(f"/api/{name}", POST) for name in ("create", "copy", "push")),
        refused("/api/delete", DELETE),
        refused("/api/blobs/{digest:path}", ("HEAD", "POST")),
    ]
    # fmt: on
