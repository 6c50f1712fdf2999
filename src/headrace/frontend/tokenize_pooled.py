"""Tokenizes the inputs of a call of a model that pools: the tokens of each input, as the scheduler gets them.

Owns the checks that need the number of tokens. Runs in the tokenizer manager's event loop. `tokenize` does the same for calls that generate.
"""

import asyncio

from headrace.checkpoint.pooling import PoolingConfig
from headrace.config.server_args import ServerArgs
from headrace.errors import ContextLengthError, RequestError
from headrace.frontend.engine_request import engine_request
from headrace.frontend.inputs import is_large
from headrace.frontend.pooled_prompts import Cut, PooledPrompt, split_pooled_call, texts_of
from headrace.frontend.prompts import Call, CallLimits
from headrace.frontend.request_log import RequestLog
from headrace.frontend.request_state import CallState, ReqState
from headrace.messages.control import ReadyInfo
from headrace.messages.packing import pack_int32
from headrace.messages.requests import EmbeddingReqInput, PoolTask, PromptContent, TokenizedGenerateReqInput
from headrace.text.batch_tokenizer import AsyncDynamicBatchTokenizer


class PooledTokenizer:
    """See the module docstring. pooling: of the served model."""

    def __init__(
        self,
        args: ServerArgs,
        ready: ReadyInfo,
        pooling: PoolingConfig,
        tokenizer: AsyncDynamicBatchTokenizer,
        request_log: RequestLog,
    ) -> None:
        self._pooling = pooling
        self._tokenizer = tokenizer
        self._request_log = request_log
        self._cuts_dimensions = pooling.matryoshka or args.allow_dimensions
        self._most_tokens = min(ready.context_length, ready.max_total_tokens)
        self._task = PoolTask(reads_all=pooling.pooling != "last")

    async def split(self, obj: EmbeddingReqInput, limits: CallLimits) -> Call[PooledPrompt]:
        """See `split_pooled_call`. A call with many inputs is checked in a thread, so that it does not block other calls."""
        arguments = obj, limits, self._pooling, self._cuts_dimensions
        if not is_large(obj):
            return split_pooled_call(*arguments)
        return await asyncio.get_running_loop().run_in_executor(None, split_pooled_call, *arguments)

    async def tokenize(
        self, call: Call[PooledPrompt], obj: EmbeddingReqInput, state: CallState
    ) -> list[TokenizedGenerateReqInput]:
        """Tokenize and check every input. Returns a request for each sample of `state`. Raises RequestError; then nothing is to be sent."""
        cut = call.prompts[0].cut
        if cut.most_tokens is not None:
            cut = Cut(min(cut.most_tokens, self._most_tokens), cut.side)
        texts = texts_of(call.prompts)
        if self._pooling.lower_case:
            texts = [text.lower() if isinstance(text, str) else (text[0].lower(), text[1].lower()) for text in texts]
        encoded = iter(await self._tokenizer.encode_whole(texts, cut.most_tokens, cut.side) if texts else ())
        requests = []
        for index, (prompt, sample) in enumerate(zip(call.prompts, state.samples, strict=True)):
            if prompt.given.ids is not None:
                content = PromptContent(pack_int32(_cut(prompt.given.ids, cut)))
            else:
                content = next(encoded)
            place = f"input {index}" if call.is_list else "the input"
            self._check(content, prompt.given.field, place)
            self._describe(prompt, content, sample)
            task = PoolTask(prompt.dimensions, self._task.reads_all) if prompt.dimensions else self._task
            requests.append(engine_request(sample, content, task, namespace=prompt.namespace, priority=obj.priority))
        return requests

    def _check(self, content: PromptContent, field: str, place: str) -> None:
        """place: what messages call it. Raises RequestError."""
        num_tokens, most = content.num_tokens, self._most_tokens
        if not num_tokens:
            raise RequestError(f"{place} has no tokens, so there is nothing to make a vector of", field)
        if num_tokens > most:
            remedy = "input, or have it cut with truncate_prompt_tokens"
            raise ContextLengthError(field, most, f"{place} has {num_tokens} tokens", remedy)

    def _describe(self, prompt: PooledPrompt, content: PromptContent, sample: ReqState) -> None:
        """What is needed to present and log its output."""
        sample.num_prompt_tokens = content.num_tokens
        sample.logged_input = self._request_log.input_of(prompt.given, content)


def _cut(ids: list[int], cut: Cut) -> list[int]:
    if cut.most_tokens is None or len(ids) <= cut.most_tokens:
        return ids
    return ids[: cut.most_tokens] if cut.side == "right" else ids[-cut.most_tokens :]
