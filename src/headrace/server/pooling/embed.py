"""`POST /embed` and `GET /info` as Text Embeddings Inference has them, `POST /v2/embed` and `/v1/embed` as Cohere has them.

Runs in the event loop that serves HTTP. `/v1/embeddings` is in `server/openai/`.
"""

import uuid
from collections.abc import Iterator, Sequence
from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from headrace.errors import RequestError
from headrace.frontend.sample_update import SampleUpdate
from headrace.messages.packing import unpack_float32
from headrace.messages.requests import EmbeddingReqInput
from headrace.server.chat.conversation import unsupported
from headrace.server.http import Exchange, LongList, json_pieces
from headrace.server.pooling.calls import embedded
from headrace.server.pooling.protocol import (
    GivenInput,
    PooledRequest,
    check_normalize,
    given_input,
    normalized,
    pooling_of,
    scores_pairs,
    vector_json,
)
from headrace.version import VERSION

CohereType = Literal["float", "int8", "uint8", "binary", "ubinary", "base64"]


class TeiEmbedRequest(PooledRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of /embed.

    inputs: a text, texts, token ids, or lists of token ids. normalize: None = true. truncate: None = true, longer inputs are cut.
    """

    inputs: GivenInput
    normalize: bool | None = None
    dimensions: Annotated[int | None, Meta(extra_json_schema={"minimum": 1})] = None
    prompt_name: str | None = None


class CoherePart(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """A part of an input. Images are refused."""

    type: str
    text: str | None = None
    image_url: object | None = None


class CohereInput(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """An input in parts, which are joined by line breaks."""

    content: list[CoherePart]


class CohereEmbedRequest(msgspec.Struct, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of /v2/embed and /v1/embed.

    texts, inputs: one of them. input_type: what the texts are for; accepted without effect, because no prompt is put before a text.
    truncate: at which side longer inputs are cut; None = END. max_tokens: most tokens of an input that are read. output_dimension: as `dimensions`.
    """

    model: str = ""
    input_type: str | None = None
    texts: list[str] | None = None
    inputs: list[CohereInput] | None = None
    images: list[str] | None = None
    max_tokens: Annotated[int | None, Meta(extra_json_schema={"minimum": 1})] = None
    output_dimension: Annotated[int | None, Meta(extra_json_schema={"minimum": 1})] = None
    embedding_types: list[CohereType] | None = None
    truncate: Literal["NONE", "START", "END"] | None = None
    priority: int | None = None

    def given_texts(self) -> list[str]:
        """Raises RequestError unless there is one text for each input."""
        if self.images or self.input_type == "image":
            raise unsupported("images", "images: this model makes embeddings of texts")
        if (self.texts is None) == (self.inputs is None):
            raise RequestError("give exactly one of texts and inputs", "texts")
        return (
            self.texts
            if self.texts is not None
            else [_joined(place, one) for place, one in enumerate(self.inputs or ())]
        )


async def tei(exchange: Exchange) -> None:
    """A list with the vector of each input."""
    request = await exchange.read_json(TeiEmbedRequest)
    pooling = pooling_of(exchange.context.model, "embed")
    if request.normalize is False:
        check_normalize(False, pooling)
    if request.prompt_name is not None:
        raise unsupported("prompt_name", "prompt_name: no prompts are kept here; write the prompt before the text")
    rid = request.rid or f"embd-{uuid.uuid4().hex}"
    fields = given_input("inputs", request.inputs) | request.call_fields(exchange.context, rid, truncates=True)
    async with exchange.until_client_leaves():
        updates = await _embedded(exchange, "inputs", dimensions=request.dimensions, **fields)
        lengths_are_one = pooling.normalize or request.normalize is False
        vectors = (update.pooled or b"" for update in updates)
        items = (vector_json(vector if lengths_are_one else normalized(vector)) for vector in vectors)
        await exchange.reply_in_pieces(json_pieces(LongList(items)), made_of=updates)


async def cohere(version: Literal["1", "2"], exchange: Exchange) -> None:
    """The vectors in each of the types that were asked for; in the older version as plain lists if none was."""
    request, context = await exchange.read_json(CohereEmbedRequest), exchange.context
    pooling_of(context.model, "embed")
    texts, rid = request.given_texts(), str(uuid.uuid4())
    types = list(dict.fromkeys(request.embedding_types or ("float",)))
    for name in types:
        if name in ("int8", "uint8"):
            message = f"embedding_types: {name} is not supported; float, base64, binary and ubinary are"
            raise unsupported("embedding_types", message)
    if request.max_tokens is not None and request.max_tokens < 1:
        raise RequestError(f"max_tokens must be at least 1, got {request.max_tokens}", "max_tokens")
    is_limit = request.max_tokens is not None and request.max_tokens < context.model.context_length
    most = request.max_tokens if is_limit else -1
    async with exchange.until_client_leaves():
        updates = await _embedded(
            exchange,
            "texts",
            text=texts,
            rid=rid,
            dimensions=request.output_dimension,
            truncate_prompt_tokens=None if request.truncate == "NONE" else most,
            truncation_side="left" if request.truncate == "START" else "right",
            lora_path=context.adapter_of(request.model),
            priority=request.priority,
        )
        is_plain = version == "1" and request.embedding_types is None
        num_tokens = sum(update.usage.prompt_tokens for update in updates)
        head: dict[str, object] = {
            "id": rid,
            "texts": texts,
            "meta": {"api_version": {"version": version}, "billed_units": {"input_tokens": num_tokens}},
            "response_type": "embeddings_floats" if is_plain else "embeddings_by_type",
        }
        await exchange.reply_in_pieces(_cohere_pieces(head, updates, types, is_plain), made_of=updates)


async def info(exchange: Exchange) -> None:
    """The model and the limits of a request."""
    model, args = exchange.context.model, exchange.context.args
    pooling, ready = model.pooling, model.ready
    labels = {} if pooling is None else {str(index): label for index, label in enumerate(pooling.labels)}
    names = {"id2label": labels, "label2id": {label: int(index) for index, label in labels.items()}}
    kind: dict[str, object] | None = None
    if pooling is not None and pooling.task == "embed":
        kind = {"embedding": {"pooling": "last_token" if pooling.pooling == "last" else pooling.pooling}}
    elif pooling is not None:
        kind = {"reranker" if scores_pairs(pooling) else "classifier": names}
    await exchange.reply_json(
        {
            "model_id": model.name,
            "model_sha": None,
            "model_dtype": ready.dtype,
            "model_type": kind,
            "max_concurrent_requests": ready.max_running_requests * args.num_replicas + args.max_queued_requests,
            "max_input_length": model.context_length,
            "max_batch_tokens": ready.chunked_prefill_size,
            "max_batch_requests": ready.max_running_requests,
            "max_client_batch_size": args.max_inputs,
            "auto_truncate": True,
            "tokenization_workers": args.tokenizer_worker_num,
            "version": VERSION,
        }
    )


async def _embedded(exchange: Exchange, param: str, **fields: Any) -> list[SampleUpdate]:
    """param: what the client calls the inputs. Raises RequestError with its names."""
    exchange.name_request(fields["rid"])
    try:
        return await embedded(exchange, param, EmbeddingReqInput(**fields))
    except RequestError as error:
        if error.param == "dimensions" and param == "texts":
            error.param = "output_dimension"
            error.message = f"output_{error.message}".replace("dimensions", "dimension", 1)
        raise


def _joined(place: int, given: CohereInput) -> str:
    texts = [part.text for part in given.content if part.type == "text" and part.text is not None]
    if not texts or len(texts) < len(given.content):
        where = f"inputs[{place}].content"
        raise unsupported(where, f"{where}: this model makes embeddings of texts alone")
    return "\n".join(texts)


def _cohere_pieces(
    head: dict[str, object], updates: Sequence[SampleUpdate], types: Sequence[CohereType], is_plain: bool
) -> Iterator[bytes]:
    """The reply: the fields of `head`, then the vectors. is_plain: as a list instead of a list for each type."""
    lists = {name: LongList(_in_type(name, updates)) for name in types}
    return json_pieces(head | {"embeddings": LongList(_in_type("float", updates)) if is_plain else lists})


def _in_type(name: CohereType, updates: Sequence[SampleUpdate]) -> Iterator[object]:
    """The vectors as JSON. binary, ubinary: a bit for each number, 1 if it is above 0, eight in an int8 or a uint8."""
    for update in updates:
        pooled = update.pooled or b""
        if name in ("binary", "ubinary"):
            yield [byte - (128 if name == "binary" else 0) for byte in _signs(unpack_float32(pooled))]
        else:
            yield vector_json(pooled, as_base64=name == "base64")


def _signs(values: Sequence[float]) -> bytes:
    """The first number is the highest bit."""
    bits = "".join("1" if value > 0 else "0" for value in values)
    bits += "0" * (-len(bits) % 8)
    return int(bits, 2).to_bytes(len(bits) // 8, "big")
