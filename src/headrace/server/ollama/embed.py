"""`POST /api/embed` and the older `/api/embeddings`. Runs in the event loop that serves HTTP."""

import time
import uuid

from headrace.frontend.sample_update import SampleUpdate
from headrace.messages.requests import EmbeddingReqInput
from headrace.server.context import ServingContext
from headrace.server.http import Exchange, LongList, json_pieces
from headrace.server.notes import HeaderNotes
from headrace.server.ollama.protocol import (
    OllamaEmbeddingsRequest,
    OllamaEmbedRequest,
    OllamaOptions,
    check_keep_alive,
    check_options,
    full_name,
    option_notes,
    read_body,
)
from headrace.server.pooling.calls import embedded
from headrace.server.pooling.protocol import (
    normalized,
    pooling_of,
    vector_json,
)


async def embed(noted: HeaderNotes, exchange: Exchange) -> None:
    """The embeddings of a text or of several, with length 1 as Ollama's always are. Longer texts are cut unless the client forbids it.

    Without an input the reply has no embeddings: so clients of Ollama have a model loaded.
    """
    start_ns = time.monotonic_ns()
    body, headers_of = await read_body(noted, exchange, OllamaEmbedRequest)
    headers = headers_of(_checked(exchange.context, body))
    model = exchange.context.model
    updates: list[SampleUpdate] = []
    async with exchange.until_client_leaves():
        texts = [body.input] if isinstance(body.input, str) else body.input
        if texts:
            cut = None if body.truncate is False else -1
            updates = await _results(exchange, body.model, texts, "input", body.dimensions or None, cut)
        is_normalized = pooling_of(model, "embed").normalize
        vectors = (update.pooled or b"" for update in updates)
        items = (vector_json(pooled if is_normalized else normalized(pooled)) for pooled in vectors)
        reply = {
            "model": body.model or full_name(model.name),
            "embeddings": LongList(items),
            "total_duration": time.monotonic_ns() - start_ns,
            "load_duration": 0,
            "prompt_eval_count": sum(update.usage.prompt_tokens for update in updates),
        }
        await exchange.reply_in_pieces(json_pieces(reply), headers, updates)


async def embeddings(noted: HeaderNotes, exchange: Exchange) -> None:
    """The embedding of a text; none for no text."""
    body, headers_of = await read_body(noted, exchange, OllamaEmbeddingsRequest)
    headers = headers_of(_checked(exchange.context, body))
    vector: object = []
    async with exchange.until_client_leaves():
        if body.prompt:
            (update,) = await _results(exchange, body.model, [body.prompt], "prompt")
            vector = vector_json(update.pooled or b"")
    await exchange.reply_json({"embedding": vector}, headers=headers)


def _checked(context: ServingContext, body: OllamaEmbedRequest | OllamaEmbeddingsRequest) -> list[str]:
    """The notes for the reply. Raises RequestError."""
    pooling_of(context.model, "embed")
    context.adapter_of(body.model)
    check_keep_alive(body.keep_alive)
    check_options(body.options or OllamaOptions())
    return option_notes(body.options, context)


async def _results(
    exchange: Exchange, model: str, texts: list[str], param: str, dimensions: int | None = None, cut: int | None = -1
) -> list[SampleUpdate]:
    """param: what the client calls the texts. cut: see `truncate_prompt_tokens`. Raises the errors of `results_of`."""
    rid = f"ollama-{uuid.uuid4().hex}"
    exchange.name_request(rid)
    adapter = exchange.context.adapter_of(model)
    call = EmbeddingReqInput(
        text=list(texts), dimensions=dimensions, truncate_prompt_tokens=cut, rid=rid, lora_path=adapter
    )
    return await embedded(exchange, param, call)
