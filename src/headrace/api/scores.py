"""Methods that score texts, the same on `Engine` and `Runtime`.

Owns their names, defaults and results. The subclass has the request answered. Runs in the caller's thread.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypedDict, Unpack

Route = Literal["/v1/rerank", "/v1/score"]


class ScoreOptions(TypedDict, total=False):
    """The other fields of these routes, see docs/http-api.md."""

    instruction: str | None
    raw_scores: bool
    truncate: bool
    truncate_prompt_tokens: int | None
    rid: str | None
    priority: int | None
    cache_salt: str | None
    lora_path: str | None
    routed_dp_rank: int | None


class Scores(ABC):
    """See the module docstring. Every method raises RequestError, CapacityError and ExecutionError."""

    @abstractmethod
    def _scored(self, route: Route, fields: dict[str, Any]) -> dict[str, Any]:
        """The reply of a route to a body."""

    def rerank(
        self,
        query: str,
        documents: Sequence[str | Mapping[str, Any]],
        top_n: int | None = None,
        return_documents: bool = False,
        **options: Unpack[ScoreOptions],
    ) -> list[dict[str, Any]]:
        """The documents by their relevance for the query, the best first: `{"index": ..., "relevance_score": ...}`, at most `top_n`.

        By a cross-encoder, or by a model that generates and is asked for yes or no.
        """
        fields = rerank_fields(query, documents, top_n, return_documents, {**options})
        found: list[dict[str, Any]] = self._scored("/v1/rerank", fields)["results"]
        return found

    def score(
        self,
        query: str | list[int],
        items: str | Sequence[str] | Sequence[list[int]],
        label_token_ids: list[int] | None = None,
        apply_softmax: bool = False,
        item_first: bool = False,
        **options: Unpack[ScoreOptions],
    ) -> Any:
        """For each item a list with the probability of each label as the next token after query and item, by a model that generates.

        Without labels: for each item the score of the pair, by a cross-encoder, the cosine of two embeddings, or the answer to yes or no.
        apply_softmax: probabilities among the labels only. item_first: the item comes before the query.
        """
        fields = score_fields(query, items, label_token_ids, apply_softmax, item_first, {**options})
        return scores_of(self._scored("/v1/score", fields))


def rerank_fields(
    query: str,
    documents: Sequence[str | Mapping[str, Any]],
    top_n: int | None,
    return_documents: bool,
    options: dict[str, Any],
) -> dict[str, Any]:
    """The body of a request for a ranking."""
    given = {"query": query, "documents": _plain(documents), "top_n": top_n, "return_documents": return_documents}
    return _given(given | options)


def score_fields(
    query: str | list[int],
    items: str | Sequence[str] | Sequence[list[int]],
    label_token_ids: list[int] | None,
    apply_softmax: bool,
    item_first: bool,
    options: dict[str, Any],
) -> dict[str, Any]:
    """The body of a request for scores."""
    given: dict[str, Any] = {"items": _plain(items), "apply_softmax": apply_softmax, "item_first": item_first}
    if label_token_ids is None:
        given["queries"] = query
    else:
        given |= {"query": query, "label_token_ids": label_token_ids}
    return _given(given | options)


def scores_of(reply: dict[str, Any]) -> Any:
    """What `score` returns of a reply, which has labels or not."""
    return reply["scores"] if "scores" in reply else [item["score"] for item in reply["data"]]


def _plain(items: Any) -> Any:
    return items if isinstance(items, str) else list(items)


def _given(fields: dict[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in fields.items() if value is not None}
