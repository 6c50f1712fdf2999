"""What the served model can do, and what a client is told who asks it for something else.

Pure functions, run in the event loop that serves HTTP.
"""

from headrace.checkpoint.pooling import PoolingConfig
from headrace.errors import RequestError
from headrace.frontend.tokenize import WRONG_KIND
from headrace.server.context import ServedModel
from headrace.server.http import Exchange, Handler


def described(model: ServedModel) -> str:
    """The kind of a model, with the name of its architecture: "an embedding model (BertModel)"."""
    shown = f" ({model.architectures[0]})" if model.architectures else ""
    return f"{_kind(model.pooling)}{shown}"


def _kind(pooling: PoolingConfig | None) -> str:
    if pooling is None:
        return "a model that generates text"
    if pooling.task == "embed":
        return "an embedding model"
    if pooling.is_pair:
        return "a cross-encoder"
    return "a reward model" if pooling.dimensions == 1 else "a classifier"


def _routes_of(pooling: PoolingConfig | None) -> str:
    if pooling is None:
        return "/v1/chat/completions or /v1/completions"
    if pooling.task == "embed":
        return "/v1/embeddings"
    return "/v1/rerank or /v1/score" if scores_pairs(pooling) else "/classify"


def wrong_kind(model: ServedModel, cannot: str) -> RequestError:
    """The error for a request that the model cannot serve. cannot: what it does not do, such as "does not generate text"."""
    message = f"this model {cannot}: it is {described(model)}; use {_routes_of(model.pooling)}"
    return RequestError(message, "model", WRONG_KIND)


def embedding_of(model: ServedModel) -> PoolingConfig:
    """How it makes embeddings. Raises RequestError if it makes none."""
    if model.pooling is None or model.pooling.task != "embed":
        raise wrong_kind(model, "makes no embeddings")
    return model.pooling


def classification_of(model: ServedModel) -> PoolingConfig:
    """How it classifies. Raises RequestError if it does not."""
    if model.pooling is None or model.pooling.task != "classify":
        raise wrong_kind(model, "does not classify")
    return model.pooling


def pooling_of(model: ServedModel) -> PoolingConfig:
    """What it makes of a text. Raises RequestError if that is more text."""
    if model.pooling is None:
        raise wrong_kind(model, "makes no embeddings and does not classify")
    return model.pooling


def check_normalize(asked: bool | None, pooling: PoolingConfig) -> None:
    """Raises RequestError unless the embeddings are as asked; None = as they are."""
    if asked not in (None, pooling.normalize):
        always = "always" if pooling.normalize else "never"
        raise RequestError(f"normalize: the embeddings of this model are {always} normalized", "normalize")


def refusing_to_generate(model: ServedModel) -> Handler:
    """The handler of routes that generate, for a model that does not."""

    async def refuse(exchange: Exchange) -> None:
        raise wrong_kind(model, "does not generate text")

    return refuse


def scores_pairs(pooling: PoolingConfig | None) -> bool:
    """Whether it gives one score to a query and a document."""
    return pooling is not None and pooling.task == "classify" and pooling.is_pair and pooling.dimensions == 1
