"""The score of a query and a document: by a cross-encoder, or by a model that generates.

A model that generates is asked how likely its next token is "yes" instead of "no". The prompt is the one that Qwen3-Reranker was trained with
(Zhang et al., 2025, https://arxiv.org/abs/2506.05176, and the model's card), put into the model's own chat template. So the query comes before the
document, and the documents of a query share its prefix in the cache. Any model with such a template and these tokens can be asked; what other
models say means little.

Owns which of the two is used and what a score is. Runs in the event loop that serves HTTP; prompts are rendered in a thread.
"""

from collections.abc import Awaitable, Callable, Mapping, Sequence
from typing import Any

from headrace.errors import ContextLengthError, ExecutionError, RequestError
from headrace.frontend.sample_update import SampleUpdate
from headrace.messages.packing import unpack_float32
from headrace.messages.requests import CallInput, EmbeddingReqInput, GenerateReqInput
from headrace.sampling.params import SamplingParams
from headrace.server.chat.conversation import Conversation
from headrace.server.chat.prompt import chat_prompt
from headrace.server.context import Asker, ServingContext
from headrace.server.pooling.calls import answered, check_num_inputs, results_of
from headrace.server.pooling.protocol import (
    PooledRequest,
    PooledUsage,
    renamed,
    scores_pairs,
    sigmoid,
    usage_of,
    wrong_kind,
)

SYSTEM = (
    "Judge whether the Document meets the requirements based on the Query and the Instruct provided. "
    'Note that the answer can only be "yes" or "no".'
)
INSTRUCTION = "Given a web search query, retrieve relevant passages that answer the query"
"""Used if the request has no instruction of its own."""


ONE_TOKEN = SamplingParams(max_new_tokens=1, temperature=0.0)


class PairRequest(PooledRequest, frozen=True, kw_only=True, forbid_unknown_fields=True):
    """Fields of requests for scores of pairs.

    raw_scores: the model's own numbers instead of scores between 0 and 1. use_activation: vLLM's; false is the same.
    instruction: what to look for, for models that generate. instruct: SGLang's name of it.
    """

    raw_scores: bool | None = None
    use_activation: bool | None = None
    instruction: str | None = None
    instruct: str | None = None

    @property
    def is_raw(self) -> bool:
        """Whether the model's own numbers are wanted. Raises RequestError."""
        if self.raw_scores and self.use_activation:
            raise RequestError("raw_scores and use_activation contradict each other", "use_activation")
        return bool(self.raw_scores) or self.use_activation is False

    def given_instruction(self) -> str | None:
        """Raises RequestError for two that differ."""
        if self.instruction and self.instruct and self.instruction != self.instruct:
            raise RequestError("instruction and instruct differ: give one of them", "instruct")
        return self.instruction or self.instruct or None


async def score_pairs(
    asker: Asker,
    request: PairRequest,
    pairs: Sequence[tuple[str, str]],
    rid: str,
    *,
    param: str,
    cannot: str,
    truncates: bool = False,
) -> tuple[list[float], PooledUsage]:
    """The scores of (query, document) pairs, and their tokens.

    param: what the client calls the documents. cannot: what the error says that other models do not do. truncates: what does not fit is cut
    unless the request says otherwise; a model that generates refuses it in any case. Raises the errors of `answered`.
    """
    pooling = asker.context.model.pooling
    if pooling is not None and not scores_pairs(pooling):
        raise wrong_kind(asker.context.model, cannot)
    check_num_inputs(asker.context, param, len(pairs))
    has_sigmoid = (pooling is None or pooling.activation != "none") and not request.is_raw
    try:
        if pooling is None:
            updates, logits = await _judged(asker, request, pairs, rid)
        else:
            if request.given_instruction() is not None:
                raise RequestError("instruction: a cross-encoder reads the query and the document only", "instruction")
            call = EmbeddingReqInput(
                text=[[query, document] for query, document in pairs],
                is_cross_encoder_request=True,
                **request.call_fields(asker.context, rid, truncates),
            )
            asker.context.check_tokenizer("text")
            updates = await results_of(asker, call)
            logits = [unpack_float32(update.pooled or b"")[0] for update in updates]
    except RequestError as error:
        raise renamed(error, param) from None
    scores = [sigmoid(logit) for logit in logits] if has_sigmoid else logits
    return scores, usage_of(asker.context, updates)


async def _judged(
    asker: Asker, request: PairRequest, pairs: Sequence[tuple[str, str]], rid: str
) -> tuple[list[SampleUpdate], list[float]]:
    """By a model that generates: ln P(yes) - ln P(no) of the token after each prompt. Raises RequestError if it cannot be asked."""
    context = asker.context
    context.check_tokenizer("query")
    if context.model.chat_template is None:
        raise RequestError("this model cannot be asked for scores: it has no chat template", "model")
    yes_id, no_id = _only_token(context, "yes"), _only_token(context, "no")
    instruction = request.given_instruction() or INSTRUCTION
    routing = request.routing_fields(context)
    if request.truncate_prompt_tokens is not None:
        name = "truncate_prompt_tokens"
        raise RequestError(f"{name}: a model that generates reads documents whole, or not at all", name)

    async def prompts(start: int, stop: int) -> dict[str, Any]:
        return {
            "input_ids": await context.in_text_thread(
                lambda: [_prompt(context, *pairs[place], instruction, place) for place in range(start, stop)]
            )
        }

    sizes = [len(query) + len(document) for query, document in pairs]
    updates = await next_tokens(asker, sizes, prompts, [yes_id, no_id], rid, routing)
    found = [picked_logprobs(update) for update in updates]
    return updates, [logprobs[yes_id] - logprobs[no_id] for logprobs in found]


def _only_token(context: ServingContext, word: str) -> int:
    ids = context.model.tokenizer.encode(word, add_special_tokens=False)
    if len(ids) != 1:
        message = f"this model cannot be asked for scores: {word!r} is {len(ids)} tokens in its vocabulary, not one"
        raise RequestError(message, "model")
    return ids[0]


def _prompt(context: ServingContext, query: str, document: str, instruction: str, place: int) -> list[int]:
    """Token ids of the question about a document. place: its number in the request. Text never becomes special tokens. Raises RequestError."""
    context.check_text_length("documents", len(query) + len(document))
    asked = f"<Instruct>: {instruction}\n<Query>: {query}\n<Document>: {document}"
    messages: list[dict[str, object]] = [{"role": "system", "content": SYSTEM}, {"role": "user", "content": asked}]
    try:
        ids = list(chat_prompt(context, Conversation(messages=messages, thinking=False)).ids)
    except RequestError as error:
        if error.param == "messages":
            error.param = "documents"
        raise
    limit = context.model.context_length
    if len(ids) >= limit:
        asked = f"the query and document {place} have {len(ids)} tokens with the instruction, and the answer needs one"
        raise ContextLengthError("documents", limit, asked, "document")
    return ids


async def next_tokens(
    asker: Asker,
    sizes: Sequence[int],
    prompts: Callable[[int, int], Awaitable[dict[str, Any]]],
    token_ids: Sequence[int],
    rid: str,
    routing: Mapping[str, Any],
) -> list[SampleUpdate]:
    """The token after each prompt, with the logprobs of `token_ids`, see `picked_logprobs`. Raises the errors of `answered`.

    prompts: `text` or `input_ids` of the prompts `start` .. `stop` - 1. routing: see `PooledRequest.routing_fields`.
    """

    async def make(start: int, stop: int) -> CallInput:
        return GenerateReqInput(
            **await prompts(start, stop),
            sampling_params=ONE_TOKEN,
            return_logprob=True,
            token_ids_logprob=[*token_ids],
            rid=[f"{rid}/{place}" for place in range(start, stop)],
            **routing,
        )

    return await answered(asker, sizes, make)


def picked_logprobs(update: SampleUpdate) -> dict[int, float]:
    """The logprobs of the ids that were asked for, at the first output token."""
    assert update.logprobs is not None, "they were requested"
    assert update.logprobs.output.picked, "there is an output token"
    found = {token_id: value for value, token_id, _ in update.logprobs.output.picked[0] or () if value is not None}
    if len(found) < len(update.logprobs.output.picked[0] or ()):
        raise ExecutionError("the model gave logprobs that are not finite")
    return found
