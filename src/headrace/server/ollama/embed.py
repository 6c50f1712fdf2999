"""`POST /api/embed` and the older `/api/embeddings`. Runs in the event loop that serves HTTP."""

import time
import uuid
from collections.abc import Iterator

import msgspec

from headrace.errors import RequestError
from headrace.frontend.sample_update import SampleUpdate
from headrace.messages.requests import EmbeddingReqInput
from headrace.server.context import ServingContext
from headrace.server.http import Exchange, Headers
from headrace.server.notes import HeaderNotes
from headrace.server.ollama.bodies import read_body
from headrace.server.ollama.models import full_name
from headrace.server.ollama.options import check_keep_alive, check_options, option_notes
from headrace.server.ollama.protocol import OllamaEmbeddingsRequest, OllamaEmbedRequest, OllamaOptions
from headrace.server.pooling.calls import results_of
from headrace.server.pooling.encode import check_num_numbers
from headrace.server.pooling.kinds import embedding_of
from headrace.server.pooling.protocol import renamed
from headrace.server.pooling.replies import normalized, object_pieces, reply_in_pieces, vector_json

_EMBED = msgspec.json.Decoder(OllamaEmbedRequest)
_EMBEDDINGS = msgspec.json.Decoder(OllamaEmbeddingsRequest)


class OllamaEmbedAPI:
    """Handlers of the two routes."""

    def __init__(self, context: ServingContext, noted: HeaderNotes) -> None:
        self.context = context
        self._noted = noted

    async def embed(self, exchange: Exchange) -> None:
        """The embeddings of a text or of several, with length 1 as Ollama's always are. Longer texts are cut unless the client forbids it.

        Without an input the reply has no embeddings: so clients of Ollama have a model loaded.
        """
        start_ns = time.monotonic_ns()
        body, unknown = await read_body(exchange, _EMBED)
        headers = self._checked(body, unknown)
        updates: list[SampleUpdate] = []
        async with exchange.until_client_leaves():
            texts = [body.input] if isinstance(body.input, str) else body.input
            if texts:
                updates = await self._results(
                    exchange, body.model, texts, "input", body.dimensions or None, body.truncate is not False
                )
            await reply_in_pieces(exchange, self._reply(body, updates, start_ns), headers)

    async def embeddings(self, exchange: Exchange) -> None:
        """The embedding of a text; none for no text."""
        body, unknown = await read_body(exchange, _EMBEDDINGS)
        headers = self._checked(body, unknown)
        vector: object = []
        async with exchange.until_client_leaves():
            if body.prompt:
                (update,) = await self._results(exchange, body.model, [body.prompt], "prompt")
                vector = vector_json(update.pooled or b"")
        await exchange.reply_json({"embedding": vector}, headers=headers)

    def _checked(self, body: OllamaEmbedRequest | OllamaEmbeddingsRequest, unknown: list[str]) -> Headers:
        """The headers of the reply. Raises RequestError."""
        embedding_of(self.context.model)
        self.context.adapter_of(body.model)
        check_keep_alive(body.keep_alive)
        options = body.options or OllamaOptions()
        check_options(options)
        return self._noted.headers([*unknown, *option_notes(options, self.context.model.context_length)])

    async def _results(
        self,
        exchange: Exchange,
        model: str,
        texts: list[str],
        param: str,
        dimensions: int | None = None,
        truncates: bool = True,
    ) -> list[SampleUpdate]:
        """param: what the client calls the texts. Raises the errors of `results_of`."""
        rid = f"ollama-{uuid.uuid4().hex}"
        exchange.name_request(rid)
        try:
            call = EmbeddingReqInput(
                text=list(texts),
                dimensions=dimensions,
                truncate_prompt_tokens=-1 if truncates else None,
                rid=rid,
                lora_path=self.context.adapter_of(model),
            )
            self.context.check_tokenizer(param)
            check_num_numbers(self.context, call, param)
            return await results_of(self.context, exchange, call)
        except RequestError as error:
            raise renamed(error, param) from None

    def _reply(self, body: OllamaEmbedRequest, updates: list[SampleUpdate], start_ns: int) -> Iterator[bytes]:
        head: dict[str, object] = {"model": body.model or full_name(self.context.model.name)}
        is_normalized = embedding_of(self.context.model).normalize
        vectors = (update.pooled or b"" for update in updates)
        items = (vector_json(pooled if is_normalized else normalized(pooled)) for pooled in vectors)
        tail: dict[str, object] = {
            "total_duration": time.monotonic_ns() - start_ns,
            "load_duration": 0,
            "prompt_eval_count": sum(update.usage.prompt_tokens for update in updates),
        }
        return object_pieces(head, "embeddings", items, tail)
