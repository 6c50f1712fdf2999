"""`POST /v1/score` and `/score`. Runs in the event loop that serves HTTP.

Two dialects, told apart by their fields. vLLM's scores pairs of texts: by a cross-encoder, by a model that generates (`judge`), or as the cosine of
two embeddings. SGLang's says how likely given tokens are after a prompt.
"""

import math
import time
import uuid
from collections.abc import Sequence
from typing import Annotated, Any, Literal, cast

import msgspec
import numpy as np
from msgspec import Meta

from headrace.errors import RequestError
from headrace.messages.requests import EmbeddingReqInput
from headrace.server.context import Asker
from headrace.server.http import Exchange, LongList, json_pieces
from headrace.server.pooling.calls import ID_SIZE, check_num_inputs, results_of
from headrace.server.pooling.pairs import PairRequest, next_tokens, picked_logprobs, score_pairs
from headrace.server.pooling.protocol import (
    PooledUsage,
    renamed,
    softmax,
    usage_of,
    wrong_kind,
)

Texts = str | list[str]

_PAIRS = (("text_1", "text_2"), ("data_1", "data_2"), ("queries", "documents"), ("queries", "items"))
"""Names of the two sides in vLLM's dialect."""

_LABEL_FIELDS = ("query", "label_token_ids", "apply_softmax", "item_first")
_PAIR_FIELDS = ("text_1", "text_2", "data_1", "data_2", "queries", "documents")


class ScoreRequest(PairRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of these routes.

    text_1, text_2: one text and one, one and several, or as many and as many; data_1, data_2, queries, documents and items are newer names.
    query, items: SGLang's, texts or token ids; each item is appended to the query, or put before it with item_first. label_token_ids: the tokens
    whose probabilities after it are wanted. apply_softmax: probabilities among these tokens only.
    """

    text_1: Texts | None = None
    text_2: Texts | None = None
    data_1: Texts | None = None
    data_2: Texts | None = None
    queries: Texts | None = None
    documents: Texts | None = None
    query: str | list[int] | None = None
    items: str | list[str | list[int]] | None = None
    label_token_ids: Annotated[list[int] | None, Meta(extra_json_schema={"minItems": 1})] = None
    apply_softmax: bool | None = None
    item_first: bool | None = None


class Score(msgspec.Struct, frozen=True):
    """An element of `data`."""

    index: int
    object: Literal["score"]
    score: float


async def score(exchange: Exchange) -> None:
    """A score for each pair, or probabilities of labels for each item."""
    request = await exchange.read_json(ScoreRequest)
    rid = request.rid or f"score-{uuid.uuid4().hex}"
    exchange.name_request(rid)
    wants_labels = asks_for_labels(request)
    async with exchange.until_client_leaves():
        if wants_labels:
            labels, usage = await label_scores(exchange, request, rid)
            model = exchange.context.shown_model(request.model)
            reply = {"scores": LongList(labels), "model": model, "usage": usage, "object": "scoring"}
        else:
            scores, usage = await text_scores(exchange, request, rid)
            items = (Score(index, "score", score) for index, score in enumerate(scores))
            model = exchange.context.shown_model(request.model)
            head = {"id": rid, "object": "list", "created": int(time.time()), "model": model}
            reply = head | {"data": LongList(items), "usage": usage}
        await exchange.reply_in_pieces(json_pieces(reply))


def asks_for_labels(request: ScoreRequest) -> bool:
    """Whether the request is in SGLang's dialect. Raises RequestError for fields of both."""
    label_fields = [name for name in _LABEL_FIELDS if getattr(request, name) not in (None, False)]
    pair_fields = [name for name in _PAIR_FIELDS if getattr(request, name) is not None]
    if label_fields and pair_fields:
        raise RequestError(
            f"{label_fields[0]} does not go with {pair_fields[0]}: they belong to two dialects of this route",
            label_fields[0],
        )
    return bool(label_fields) or (request.items is not None and not pair_fields)


# -- vLLM's


async def text_scores(asker: Asker, request: ScoreRequest, rid: str) -> tuple[list[float], PooledUsage]:
    """A score for each pair of texts, and their tokens. Raises RequestError, and the errors of `score_pairs`."""
    (_, param), first, second = _sides(request)
    pooling = asker.context.model.pooling
    if pooling is not None and pooling.task == "embed":
        return await _cosines(asker, request, rid, param, first, second)
    pairs = list(zip(first * len(second) if len(first) == 1 else first, second, strict=True))
    return await score_pairs(asker, request, pairs, rid, param=param, cannot="does not score pairs of texts")


async def _cosines(
    asker: Asker, request: ScoreRequest, rid: str, param: str, first: list[str], second: list[str]
) -> tuple[list[float], PooledUsage]:
    """The cosines of the embeddings; each text is embedded once. param: what the client calls the second ones. Raises the errors of `results_of`."""
    context = asker.context
    if request.given_instruction() is not None:
        raise RequestError("instruction: an embedding model reads the texts only", "instruction")
    if request.is_raw:
        raise RequestError("raw_scores: the cosine of two embeddings is all there is", "raw_scores")
    check_num_inputs(context, param, len(second))
    call = EmbeddingReqInput(text=[*first, *second], **request.call_fields(context, rid))
    try:
        updates = await results_of(asker, call)
    except RequestError as error:
        raise renamed(error, param) from None
    vectors = [update.pooled or b"" for update in updates]
    scores = await context.in_text_thread(lambda: cosines(vectors[: len(first)], vectors[len(first) :]))
    return scores, usage_of(context, updates)


# -- SGLang's


async def label_scores(asker: Asker, request: ScoreRequest, rid: str) -> tuple[list[list[float]], PooledUsage]:
    """How likely the labels are after each item, and their tokens. Raises RequestError, and the errors of `next_tokens`."""
    context = asker.context
    for name in ("query", "items", "label_token_ids"):
        if getattr(request, name) is None:
            raise RequestError(f"missing field {name!r}", name, "missing_field")
    labels, prompts = request.label_token_ids or [], _prompts(request)
    if not labels:
        raise RequestError("label_token_ids is empty", "label_token_ids")
    if context.model.pooling is not None:
        raise wrong_kind(context.model, "gives no probabilities of tokens")
    if request.is_raw or request.given_instruction() is not None:
        raise RequestError("raw_scores and instruction do not go with label_token_ids", "label_token_ids")
    if request.truncate or request.truncate_prompt_tokens is not None:
        raise RequestError("truncate: a model that generates reads a prompt whole, or not at all", "truncate")
    check_num_inputs(context, "items", len(prompts))
    field, size = ("text", 1) if isinstance(prompts[0], str) else ("input_ids", ID_SIZE)
    context.check_prompt_size("items", **{"text": None, "input_ids": None, field: cast(Any, prompts)})
    routing = request.routing_fields(context)

    async def part(start: int, stop: int) -> dict[str, Any]:
        return {field: prompts[start:stop]}

    try:
        sizes = [len(prompt) * size for prompt in prompts]
        updates = await next_tokens(asker, sizes, part, labels, rid, routing)
    except RequestError as error:
        if error.param == "token_ids_logprob":
            error.message = error.message.replace("token_ids_logprob", "label_token_ids")
            error.param = "label_token_ids"
        raise renamed(error, "items") from None
    scores = []
    for logprobs in map(picked_logprobs, updates):
        values = [logprobs[label] for label in labels]
        scores.append(softmax(values) if request.apply_softmax else [math.exp(value) for value in values])
    return scores, usage_of(context, updates)


def _sides(request: ScoreRequest) -> tuple[tuple[str, str], list[str], list[str]]:
    """The names and texts of the two sides. Raises RequestError."""
    given = [pair for pair in _PAIRS if any(getattr(request, name) is not None for name in pair)]
    whole = [pair for pair in given if all(getattr(request, name) is not None for name in pair)]
    named = {name for pair in given for name in pair if getattr(request, name) is not None}
    if len(whole) != 1 or named != set(whole[0]):
        shown = " and ".join(sorted(named)) or "none of them"
        raise RequestError(
            "give text_1 and text_2 (or data_1 and data_2, or queries and documents), or query, items and label_token_ids; "
            f"got {shown}",
            min(named) if named else "text_1",
        )
    (names,) = whole
    first, second = (_list(name, getattr(request, name)) for name in names)
    if len(first) not in (1, len(second)):
        raise RequestError(
            f"{names[0]} has {len(first)} texts and {names[1]} {len(second)}: give one and several, or as many and as many",
            names[0],
        )
    return names, first, second


def _list(name: str, given: object) -> list[str]:
    texts = [given] if isinstance(given, str) else given
    if not isinstance(texts, list) or not texts:
        raise RequestError(f"{name} is empty", name)
    if not all(isinstance(text, str) for text in texts):
        raise RequestError(f"{name} must be a string or a list of strings", name)
    return texts


def _prompts(request: ScoreRequest) -> list[str] | list[list[int]]:
    """Query and item as one prompt each. Raises RequestError."""
    query, items = request.query, request.items
    parts = [items] if isinstance(items, str) else items or []
    if not parts:
        raise RequestError("items is empty", "items")
    kind: type = str if isinstance(query, str) else list
    if not all(isinstance(part, kind) for part in parts):
        raise RequestError("items must be texts if query is a text, and token ids if query is token ids", "items")
    joined: Any = [part + query if request.item_first else query + part for part in cast(Any, parts)]
    return cast("list[str] | list[list[int]]", joined)


def cosines(first: Sequence[bytes], second: Sequence[bytes]) -> list[float]:
    """Of each vector of `second` with its own of `first`, or with the only one there; 0 where one has no length. All are float32 bytes."""
    a, b = (
        np.stack([np.frombuffer(item, np.float32) for item in items]).astype(np.float64) for items in (first, second)
    )
    lengths = np.sqrt((a * a).sum(1) * (b * b).sum(1))
    products = (a * b).sum(1)
    found: list[float] = np.divide(products, lengths, out=np.zeros_like(products), where=lengths > 0).tolist()
    return found
