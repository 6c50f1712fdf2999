"""The route table: a row for each endpoint, with all that is declared about it.

A new endpoint is a handler in this package and a row here (docs/adding/endpoint.md). Routes of control operations come from their own table
(`messages.operations`). Pure; made once, when the application is.
"""

from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from typing import Any

from headrace.messages.control import Outcome
from headrace.messages.requests import EmbeddingReqInput, GenerateReqInput
from headrace.server import cache, control, native
from headrace.server.anthropic.messages import AnthropicErrorReply, MessagesServing
from headrace.server.anthropic.protocol import CountTokensRequest, MessagesRequest
from headrace.server.context import ServingContext
from headrace.server.infill import InfillRequest, infill
from headrace.server.notes import noted_fields
from headrace.server.ollama import embed as ollama_embed
from headrace.server.ollama import generation, protocol
from headrace.server.ollama import models as ollama_models
from headrace.server.openai.chat import ChatServing
from headrace.server.openai.completions import CompletionServing
from headrace.server.openai.embeddings import EmbeddingRequest, embeddings
from headrace.server.openai.models import get_model, list_models
from headrace.server.openai.protocol import ChatCompletionRequest, CompletionRequest
from headrace.server.openai.tokenize import DetokenizeBody, TokenizeBody, apply_template, detokenize, tokenize
from headrace.server.pooling.embed import CohereEmbedRequest, TeiEmbedRequest, cohere, info, tei
from headrace.server.pooling.encode import ClassifyRequest, classify, encode
from headrace.server.pooling.protocol import refuse_to_generate
from headrace.server.pooling.rerank import RerankRequest, rerank
from headrace.server.pooling.score import ScoreRequest, score
from headrace.server.responses.protocol import ResponsesRequest
from headrace.server.responses.serving import GetQuery, ItemsQuery, ResponsesAPI
from headrace.server.routes import Examples, OpenApi, RouteSpec, operation_routes
from headrace.server.ui.pages import ui_routes
from headrace.server.weights import weight_routes

_QUESTION = "Name the capital of France."
_ANSWER = "Paris is the capital of France."
_BEGINNING = "The capital of France is"
_TEXT = "You answer questions about the rules of chess. " * 4
_ASKED = [{"role": "user", "content": _QUESTION}]
_FOUND = [_ANSWER, "Berlin is the capital of Germany."]
_CITY: Mapping[str, Any] = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
WITHOUT_V1 = ("OpenAI", "Anthropic")
"""APIs whose clients may take the address of the server for that of the API: they leave out `/v1`."""

GET, POST, DELETE = ("GET",), ("POST",), ("DELETE",)


def route_table(context: ServingContext) -> list[RouteSpec]:
    """Every route; the most used first, because they are tried in order."""
    table = [
        *_openai_routes(context),
        *_anthropic_routes(context),
        *_native_routes(context),
        *_pooling_routes(context),
        *_control_routes(),
        *_ollama_routes(context),
        *operation_routes(),
        *weight_routes(),
    ]
    table += [
        replace(spec, path=spec.path.removeprefix("/v1"), summary=f"Alias of {spec.path}")
        for spec in table
        if spec.tag in WITHOUT_V1
    ]
    args = context.args
    if not args.disable_metrics:
        table.append(RouteSpec("/metrics", GET, "public", control.metrics, "Prometheus metrics"))
    if args.enable_fault_injection:
        hook = partial(RouteSpec, summary="Test hook", body=control.FaultBody, in_schema=False)
        table.append(hook("/inject_fault", POST, "admin", control.inject_fault))
    if not args.disable_openapi:
        hidden = partial(RouteSpec, in_schema=False, with_replicas=True)
        table.append(hidden("/openapi.json", GET, "user", OpenApi(table).openapi_json, "This API"))
    if not args.disable_ui:
        table += ui_routes(has_docs=not args.disable_openapi)
    if context.model.pooling is not None:
        table = [replace(spec, handler=refuse_to_generate) if spec.generates else spec for spec in table]
    return table


def _openai_routes(context: ServingContext) -> list[RouteSpec]:
    named: dict[str, Any] = {"model": context.model.name}
    chat = {**named, "messages": _ASKED, "max_tokens": 64}
    text = {**named, "prompt": _BEGINNING, "max_tokens": 16}
    response = {**named, "input": _QUESTION, "max_output_tokens": 64}
    schema = {"name": "place", "strict": True, "schema": _CITY}
    chats = {
        "A question": chat,
        "Streamed": {**chat, "stream": True, "stream_options": {"include_usage": True}},
        "A JSON schema": {**chat, "response_format": {"type": "json_schema", "json_schema": schema}},
        "A tool": {**chat, "tools": [{"type": "function", "function": {"name": "get_weather", "parameters": _CITY}}]},
        "Probabilities of tokens": {**chat, "max_tokens": 8, "logprobs": True, "top_logprobs": 3},
    }
    texts: Examples = {"A text": text, "Streamed": {**text, "stream": True}}
    vectors = {
        "A text": {**named, "input": _QUESTION},
        "Two texts at once": {**named, "input": [_QUESTION, _BEGINNING], "encoding_format": "base64"},
    }
    responses_asked = {"A question": response, "Streamed": {**response, "stream": True}}
    chatting, completions, responses = ChatServing(context), CompletionServing(context), ResponsesAPI(context)
    kept = partial(RouteSpec, tag="OpenAI")
    row = partial(kept, with_replicas=True)
    # fmt: off
    return [
        row("/v1/chat/completions", POST, "user", chatting.handle_request, "Chat completion", ChatCompletionRequest, generates=True, examples=chats),
        row("/v1/completions", POST, "user", completions.handle_request, "Text completion", CompletionRequest, generates=True, examples=texts),
        row("/v1/embeddings", POST, "user", embeddings, "Embeddings", EmbeddingRequest, examples=vectors),
        row("/v1/responses", POST, "user", responses.create, "Response", ResponsesRequest, generates=True, examples=responses_asked),
        kept("/v1/responses/{id}", GET, "user", responses.get, "A kept response", query=GetQuery),
        kept("/v1/responses/{id}", DELETE, "user", responses.delete, "Forget a kept response"),
        kept("/v1/responses/{id}/cancel", POST, "user", responses.cancel, "Refused: no response runs in the background"),
        kept("/v1/responses/{id}/input_items", GET, "user", responses.input_items, "Input of a kept response", query=ItemsQuery),
        row("/v1/models", GET, "user", list_models, "Served models"),
        row("/v1/models/{id:path}", GET, "user", get_model, "One model"),
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
    before, after = "def is_even(n):\n    return ", "\n\nprint(is_even(4))\n"
    code = {"Code": {"input_prefix": before, "input_suffix": after, "n_predict": 32}}
    prompts: Examples = {"A text": {"prompt": "Hello"}, "A conversation": {"messages": _ASKED}}
    chats = {"A conversation": {"messages": _ASKED}}
    ids = {"Token ids": {"tokens": [72, 105]}}
    session = {"A name of your own": {"session_id": "s1"}}
    pins: Examples = {
        "A text": {"prompt": _TEXT, "ttl": 600},
        "A conversation": {"messages": [{"role": "system", "content": _TEXT}]},
    }
    unpinned = {"By its id": {"id": "pin_0123456789abcdef01234567"}}
    row = partial(RouteSpec, with_replicas=True)
    # fmt: off
    return [
        row("/generate", ("POST", "PUT"), "user", native.generate, "Native generation", GenerateReqInput, generates=True, examples=texts),
        row("/infill", POST, "user", partial(infill, noted_fields()), "llama.cpp: fill in the middle", InfillRequest, generates=True, examples=code),
        row("/tokenize", POST, "user", tokenize, "Text or messages to token ids", TokenizeBody, examples=prompts),
        row("/detokenize", POST, "user", detokenize, "Token ids to text", DetokenizeBody, examples=ids),
        row("/apply-template", POST, "user", apply_template, "llama.cpp: the text of a prompt", ChatCompletionRequest, examples=chats),
        row("/v1/tokenize", POST, "user", tokenize, "Alias of /tokenize", TokenizeBody, examples=prompts),
        row("/v1/detokenize", POST, "user", detokenize, "Alias of /detokenize", DetokenizeBody, examples=ids),
        RouteSpec("/v1/cache/pin", POST, "user", cache.pin, "Compute a prompt and keep it cached", cache.PinBody, generates=True, examples=pins),
        RouteSpec("/v1/cache/unpin", POST, "user", cache.unpin, "Keep it no longer", cache.UnpinBody, examples=unpinned),
        RouteSpec("/v1/cache", GET, "user", cache.cached, "What is cached, by tier, and the pins"),
        RouteSpec("/slots/{id}", POST, "user", cache.slots, "llama.cpp: save, restore or erase a slot", in_schema=False, generates=True),
        RouteSpec("/open_session", POST, "user", native.open_session, "Open a session", native.OpenSessionBody, generates=True, examples=session),
        RouteSpec("/close_session", POST, "user", native.close_session, "Forget a session", native.CloseSessionBody, examples=session),
    ]
    # fmt: on


def _pooling_routes(context: ServingContext) -> list[RouteSpec]:
    named: dict[str, Any] = {"model": context.model.name}
    labels = {
        **named,
        "query": _QUESTION,
        "items": [" Paris", " Berlin"],
        "label_token_ids": [3, 4],
        "apply_softmax": True,
    }
    inputs: Examples = {"A text": {"inputs": _QUESTION}, "Two texts at once": {"inputs": [_QUESTION, _BEGINNING]}}
    texts = {"Two texts": {**named, "texts": _FOUND, "input_type": "search_document", "embedding_types": ["float"]}}
    ranked: Examples = {"Two documents": {**named, "query": _QUESTION, "documents": _FOUND}}
    scored: Examples = {
        "Pairs of texts": {**named, "text_1": _QUESTION, "text_2": _FOUND},
        "Probabilities of labels": labels,
    }
    native: Examples = {"A text": {"text": _QUESTION}, "Two texts at once": {"text": [_QUESTION, _BEGINNING]}}
    classified = {"A text": {**named, "input": _BEGINNING}}
    row = partial(RouteSpec, with_replicas=True)
    # fmt: off
    return [
        row("/embed", POST, "user", tei, "TEI: embeddings", TeiEmbedRequest, examples=inputs),
        row("/v2/embed", POST, "user", partial(cohere, "2"), "Cohere: embeddings", CohereEmbedRequest, examples=texts),
        row("/v1/embed", POST, "user", partial(cohere, "1"), "Cohere: embeddings, in the older form", CohereEmbedRequest, examples=texts),
        row("/info", GET, "user", info, "TEI: the served model"),
        *(row(path, POST, "user", rerank, "Documents by their relevance", RerankRequest, examples=ranked)
          for path in ("/v1/rerank", "/v2/rerank", "/rerank")),
        *(row(path, POST, "user", score, "Scores of pairs, or of labels", ScoreRequest, examples=scored) for path in ("/v1/score", "/score")),
        row("/encode", POST, "user", encode, "Native embeddings", EmbeddingReqInput, examples=native),
        *(row(path, POST, "user", classify, "Classification", ClassifyRequest, examples=classified)
          for path in ("/classify", "/v1/classify")),
    ]
    # fmt: on


def _control_routes() -> list[RouteSpec]:
    aborted: Examples = {"One request": {"rid": "my-request"}, "All": {"abort_all": True}}
    loaded = {"A folder": {"lora_name": "my-adapter", "lora_path": "/path/to/adapter"}}
    unloaded = {"By its name": {"lora_name": "my-adapter"}}
    row = partial(RouteSpec, with_replicas=True)
    # fmt: off
    return [
        row("/health", GET, "public", control.health, "Liveness", failure=control.Liveness),
        row("/ready", GET, "public", control.ready, "New requests are accepted", failure=control.Liveness),
        row("/ping", GET, "public", control.ping, "The HTTP server answers"),
        row("/health_generate", GET, "public", control.health_generate, "The engine can generate a token", failure=control.Liveness),
        row("/model_info", GET, "user", control.model_info, "The served model"),
        row("/get_model_info", GET, "user", control.model_info, "Alias of /model_info"),
        RouteSpec("/server_info", GET, "user", control.server_info, "Options, memory plan and state"),
        RouteSpec("/get_server_info", GET, "user", control.server_info, "Alias of /server_info"),
        RouteSpec("/v1/loads", GET, "user", control.loads, "Load of each replica"),
        RouteSpec("/get_load", GET, "user", control.get_load, "Load of each replica, for SGLang's routers"),
        RouteSpec("/v1/requests", GET, "user", control.latest_requests, "Live requests, and the last ones", query=control.LatestQuery),
        RouteSpec("/v1/requests/{id:path}", GET, "user", control.explain_request, "What happened to a request"),
        RouteSpec("/abort_request", POST, "user", control.abort_request, "Abort by rid; all with the admin key", control.AbortBody, examples=aborted),
        RouteSpec("/flush_cache", POST, "admin", control.flush_cache, "Empty the prefix cache", failure=Outcome, query=control.FlushQuery),
        RouteSpec("/flush_cache", GET, "admin", control.flush_cache_by_get, "The same, not for browsers",
                  failure=Outcome, query=control.FlushQuery),
        RouteSpec("/load_lora_adapter", POST, "admin", control.load_adapter, "Load an adapter", control.LoadLoraBody, examples=loaded),
        RouteSpec("/unload_lora_adapter", POST, "admin", control.unload_adapter, "Forget an adapter", control.UnloadLoraBody, examples=unloaded),
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
    row = partial(RouteSpec, tag="Ollama", with_replicas=True)
    refused = partial(RouteSpec, access="user", handler=ollama_models.refuse, summary="Not here", in_schema=False)
    # fmt: off
    return [
        row("/api/chat", POST, "user", partial(generation.chat, noted), "Ollama: chat", protocol.OllamaChatRequest, generates=True, examples=chats),
        row("/api/generate", POST, "user", partial(generation.generate, noted), "Ollama: generate", protocol.OllamaGenerateRequest,
            generates=True, examples=prompts),
        RouteSpec("/", GET, "public", ollama_models.root, "What runs here", with_replicas=True),
        row("/api/version", GET, "user", ollama_models.version, "Ollama: version of the API"),
        row("/api/tags", GET, "user", ollama_models.tags, "Ollama: served models"),
        row("/api/ps", GET, "user", ollama_models.ps, "Ollama: loaded models"),
        row("/api/show", POST, "user", partial(ollama_models.show, noted), "Ollama: one model", protocol.OllamaShowRequest, examples=model),
        row("/api/pull", POST, "user", partial(ollama_models.pull, noted), "Ollama: success for a served model",
            protocol.OllamaPullRequest, examples=model),
        row("/api/embed", POST, "user", partial(ollama_embed.embed, noted), "Ollama: embeddings", protocol.OllamaEmbedRequest, examples=texts),
        row("/api/embeddings", POST, "user", partial(ollama_embed.embeddings, noted), "Ollama: one embedding",
            protocol.OllamaEmbeddingsRequest, examples=text),
        *(refused(f"/api/{name}", POST) for name in ("create", "copy", "push")),
        refused("/api/delete", DELETE),
        refused("/api/blobs/{digest:path}", ("HEAD", "POST")),
    ]
    # fmt: on
