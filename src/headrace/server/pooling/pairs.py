"""The score of a query and a document: by a cross-encoder, or by a model that generates.

Owns which of them is used and what a score is. Runs in the event loop that serves HTTP; prompts are rendered in a thread.
"""

from collections.abc import Sequence
from contextlib import aclosing
from dataclasses import dataclass

from headrace.errors import RequestError
from headrace.frontend.sample_update import SampleUpdate
from headrace.messages.packing import unpack_float32
from headrace.messages.requests import CallInput, EmbeddingReqInput, GenerateReqInput
from headrace.sampling.params import SamplingParams
from headrace.server.context import Asker, ServingContext
from headrace.server.pooling.calls import MakeCall, answered, check_ended_well, check_num_inputs, results_of
from headrace.server.pooling.judge import INSTRUCTION, Judge
from headrace.server.pooling.kinds import scores_pairs, wrong_kind
from headrace.server.pooling.protocol import PooledRequest, PooledUsage, renamed, usage_of
from headrace.server.pooling.replies import sigmoid

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


@dataclass(frozen=True, slots=True)
class PairScores:
    """A score for each pair."""

    scores: list[float]
    usage: PooledUsage


async def score_pairs(
    context: ServingContext,
    asker: Asker,
    request: PairRequest,
    pairs: Sequence[tuple[str, str]],
    rid: str,
    *,
    param: str,
    cannot: str,
    truncates: bool = False,
) -> PairScores:
    """The scores of (query, document) pairs.

    param: what the client calls the documents. cannot: what the error says that other models do not do. truncates: what does not fit is cut
    unless the request says otherwise; a model that generates refuses it in any case. Raises the errors of `answered`.
    """
    model = context.model
    if model.pooling is not None and not scores_pairs(model.pooling):
        raise wrong_kind(model, cannot)
    check_num_inputs(context, param, len(pairs))
    has_sigmoid = model.pooling is None or model.pooling.activation != "none"
    has_sigmoid = has_sigmoid and not request.is_raw
    try:
        if model.pooling is None:
            judge = Judge.of(context)
            updates = await _judged(judge, asker, request, pairs, rid)
            logits = [judge.log_odds(update) for update in updates]
        else:
            updates = await _encoded(context, asker, request, pairs, rid, truncates)
            logits = [unpack_float32(update.pooled or b"")[0] for update in updates]
    except RequestError as error:
        raise renamed(error, param) from None
    scores = [sigmoid(logit) for logit in logits] if has_sigmoid else logits
    return PairScores(scores, usage_of(context, updates))


async def _encoded(
    context: ServingContext,
    asker: Asker,
    request: PairRequest,
    pairs: Sequence[tuple[str, str]],
    rid: str,
    truncates: bool,
) -> list[SampleUpdate]:
    """By a cross-encoder."""
    if request.given_instruction() is not None:
        raise RequestError("instruction: a cross-encoder reads the query and the document only", "instruction")
    call = EmbeddingReqInput(
        text=[[query, document] for query, document in pairs],
        is_cross_encoder_request=True,
        **request.call_fields(context, rid, truncates),
    )
    context.check_tokenizer("text")
    return await results_of(context, asker, call)


async def _judged(
    judge: Judge, asker: Asker, request: PairRequest, pairs: Sequence[tuple[str, str]], rid: str
) -> list[SampleUpdate]:
    """By a model that generates. Prompts are rendered chunk by chunk."""
    instruction = request.given_instruction() or INSTRUCTION
    routing = request.routing_fields(judge.context)
    if request.truncate_prompt_tokens is not None:
        name = "truncate_prompt_tokens"
        raise RequestError(f"{name}: a model that generates reads documents whole, or not at all", name)

    async def make(start: int, stop: int) -> CallInput:
        def prompts() -> list[int | list[int]]:
            return [judge.prompt(*pairs[place], instruction, place) for place in range(start, stop)]

        return GenerateReqInput(
            input_ids=await judge.context.in_text_thread(prompts),
            sampling_params=ONE_TOKEN,
            return_logprob=True,
            token_ids_logprob=[judge.yes_id, judge.no_id],
            rid=[f"{rid}/{place}" for place in range(start, stop)],
            **routing,
        )

    sizes = [len(query) + len(document) for query, document in pairs]
    return await generated(judge.context, asker, sizes, make)


async def generated(context: ServingContext, asker: Asker, sizes: Sequence[int], make: MakeCall) -> list[SampleUpdate]:
    """The one token of each prompt. Raises the errors of `answered`, and the first failure of a prompt."""
    updates: list[SampleUpdate] = []
    async with aclosing(answered(context, asker, sizes, make)) as chunks:
        async for chunk in chunks:
            check_ended_well(chunk)
            updates += chunk
    return updates
