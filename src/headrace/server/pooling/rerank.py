"""`POST /v1/rerank`, `/v2/rerank` and `/rerank`, in the shape of Jina's and Cohere's APIs. Runs in the event loop that serves HTTP.

A body with `texts` in place of `documents` is one of Text Embeddings Inference, and so is its reply.
"""

import uuid
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Annotated, Any

import msgspec
from msgspec import Meta

from headrace.errors import RequestError
from headrace.server.chat.conversation import unsupported
from headrace.server.context import Asker
from headrace.server.http import Exchange, LongList, json_pieces
from headrace.server.pooling.calls import check_num_inputs
from headrace.server.pooling.pairs import PairRequest, score_pairs
from headrace.server.pooling.protocol import PooledUsage


class RerankRequest(PairRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Body of these routes.

    documents: texts, or objects with a `text` and more fields that are returned as they are. top_n: only the best so many; top_k: Voyage's name
    of it. return_documents: None = true. max_chunks_per_doc, max_tokens_per_doc, rank_fields: Cohere's; a document is one chunk, cut to its first
    `max_tokens_per_doc` tokens and to what the model reads. texts, return_text: TEI's.
    """

    query: str
    documents: Annotated[list[str | dict[str, object]] | None, Meta(extra_json_schema={"minItems": 1})] = None
    texts: Annotated[list[str] | None, Meta(extra_json_schema={"minItems": 1})] = None
    return_text: bool | None = None
    top_n: Annotated[int | None, Meta(extra_json_schema={"minimum": 1})] = None
    top_k: Annotated[int | None, Meta(extra_json_schema={"minimum": 1})] = None
    return_documents: bool | None = None
    max_chunks_per_doc: Annotated[int | None, Meta(extra_json_schema={"minimum": 1})] = None
    max_tokens_per_doc: Annotated[int | None, Meta(extra_json_schema={"minimum": 1})] = None
    rank_fields: list[str] | None = None


class RerankResult(msgspec.Struct, frozen=True, omit_defaults=True):
    """An element of `results`. index: of the document in the request."""

    index: int
    relevance_score: float
    document: dict[str, object] | None = None


class TeiRank(msgspec.Struct, frozen=True, omit_defaults=True):
    """An element of TEI's reply."""

    index: int
    score: float
    text: str | None = None


async def rerank(exchange: Exchange) -> None:
    """The documents by their relevance, the best first."""
    request = await exchange.read_json(RerankRequest)
    rid = request.rid or f"rerank-{uuid.uuid4().hex}"
    exchange.name_request(rid)
    async with exchange.until_client_leaves():
        found = await ranked(exchange, request, rid)
        if request.texts is not None:
            await exchange.reply_in_pieces(json_pieces(LongList(found.in_tei())))
            return
        head: dict[str, object] = {"id": rid, "model": exchange.context.shown_model(request.model)}
        tokens = {"input_tokens": found.usage.prompt_tokens, "output_tokens": 0}
        body = {"results": LongList(found.results()), "usage": found.usage, "meta": {"tokens": tokens}}
        await exchange.reply_in_pieces(json_pieces(head | body))


@dataclass(frozen=True, slots=True)
class Ranking:
    """scores: of the documents, in their order. best: the numbers of those that were asked for, the best first."""

    request: RerankRequest
    documents: Sequence[str | dict[str, object]]
    scores: list[float]
    best: list[int]
    usage: PooledUsage

    def results(self) -> Iterator[RerankResult]:
        shows = self.request.return_documents is not False
        for place in self.best:
            document = self.documents[place]
            shown: dict[str, object] = {"text": document} if isinstance(document, str) else document
            yield RerankResult(place, self.scores[place], shown if shows else None)

    def in_tei(self) -> Iterator[TeiRank]:
        """The same in TEI's form."""
        texts = self.request.texts if self.request.return_text else None
        for place in self.best:
            yield TeiRank(place, self.scores[place], texts[place] if texts else None)


async def ranked(asker: Asker, request: RerankRequest, rid: str) -> Ranking:
    """Score and sort the documents; equal ones stay in their order. Raises RequestError, and the errors of `score_pairs`."""
    context = asker.context
    top_n = _top_n(request)
    _check_cohere(request)
    documents, param = _given(request)
    texts = [_text_of(place, document) for place, document in enumerate(documents)]
    if (most := request.max_tokens_per_doc) is not None and most < context.model.context_length:
        context.check_tokenizer("max_tokens_per_doc")
        check_num_inputs(context, param, len(texts))
        for text in texts:
            context.check_text_length(param, len(text))
        texts = await context.in_text_thread(lambda: context.model.tokenizer.beginnings(texts, most))
    pairs = [(request.query, text) for text in texts]
    scores, usage = await score_pairs(asker, request, pairs, rid, param=param, cannot="does not rerank", truncates=True)
    order = sorted(range(len(scores)), key=lambda place: (-scores[place], place))
    return Ranking(request, documents, scores, order[:top_n], usage)


def _given(request: RerankRequest) -> tuple[Sequence[str | dict[str, object]], str]:
    """The documents, and what the client calls them. Raises RequestError."""
    if request.texts is None:
        if request.return_text is not None:
            raise RequestError("return_text goes with texts; with documents it is return_documents", "return_text")
        if request.documents is None:
            raise RequestError("missing field 'documents'", "documents", "missing_field")
        return request.documents, "documents"
    if request.documents is not None or request.return_documents is not None:
        raise RequestError("texts goes with neither documents nor return_documents", "texts")
    return request.texts, "texts"


def _check_cohere(request: RerankRequest) -> None:
    """Raises RequestError for those of Cohere's fields that ask for something else than what is done."""
    for name in ("max_chunks_per_doc", "max_tokens_per_doc"):
        value = getattr(request, name)
        if value is not None and value < 1:
            raise RequestError(f"{name} must be at least 1, got {value}", name)
    if request.rank_fields not in (None, [], ["text"]):
        raise unsupported("rank_fields", 'rank_fields must be ["text"]: no other field of a document is read')


def _top_n(request: RerankRequest) -> int | None:
    """How many results are wanted; None = all. Raises RequestError."""
    if request.top_n is not None and request.top_k not in (None, request.top_n):
        raise RequestError("top_n and top_k differ: give one of them", "top_k")
    name, given = ("top_n", request.top_n) if request.top_n is not None else ("top_k", request.top_k)
    if given is not None and given < 1:
        raise RequestError(f"{name} must be at least 1, got {given}", name)
    return given


def _text_of(place: int, document: str | dict[str, Any]) -> str:
    if isinstance(document, str):
        return document
    text = document.get("text")
    if not isinstance(text, str):
        raise RequestError(
            f"documents[{place}] must be a string, or an object with a string text", f"documents[{place}].text"
        )
    return text
