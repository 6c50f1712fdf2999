"""Text completions: `POST /v1/completions`. Owns echo and the text chunks. Runs in the event loop that serves HTTP; long work on texts goes to a
thread.
"""

import math
import re
from collections.abc import AsyncGenerator
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any, cast

import msgspec

from headrace.errors import RequestError
from headrace.frontend.sample_update import SampleUpdate
from headrace.frontend.slots import slot_of
from headrace.messages.requests import GenerateReqInput
from headrace.server.chat.conversation import refused
from headrace.server.context import Asker
from headrace.server.http import encode_json
from headrace.server.infill import middle_of, stopping
from headrace.server.notes import OutputLimit
from headrace.server.openai.base import NOT_ENDED, ChunkWriter, Generation, OpenAIServingBase
from headrace.server.openai.fields import AskedGrammar, check_num_logprobs
from headrace.server.openai.logprobs import LegacyLogprobs, new_places, prompt_logprobs
from headrace.server.openai.protocol import AS_MANY_AS_FIT, CompletionRequest
from headrace.text.tokenizers import Tokenizer

DEFAULT_TOKENS = 16
"""The limit of a reply whose request gives none, as OpenAI's API has it."""


@dataclass(slots=True)
class _Choice:
    """What was given of a choice: its logprobs, if they are wanted, and the length of its text so far."""

    logprobs: LegacyLogprobs | None
    length: int = 0


@dataclass(slots=True)
class CompletionGeneration(Generation[CompletionRequest]):
    tokenizer: Tokenizer = field(kw_only=True)
    choices: dict[int, _Choice] = field(default_factory=dict)

    def prompt_ids(self, index: int) -> list[int]:
        """The tokens of the prompt of choice `index`, given as tokens or tokenized here."""
        ids = self.call.input_ids
        assert ids is not None, "a completion has a prompt"
        own = ids[index // self.request.num_samples] if isinstance(ids[0], list) else ids
        assert isinstance(own, list), "the prompt's shape was checked"
        return [i for i in own if isinstance(i, int)]

    def push(self, update: SampleUpdate) -> tuple[str, dict[str, Any] | None]:
        """What an update adds to its choice: text, with echo before the first, and logprobs, if they are wanted."""
        request, text, choice = self.request, update.text, self.choices.get(update.index)
        if choice is None:
            skip, as_id = request.skip_special_tokens is not False, bool(request.return_tokens_as_token_ids)
            logprobs = LegacyLogprobs(self.tokenizer, skip, as_id) if request.logprobs is not None else None
            choice = self.choices[update.index] = _Choice(logprobs)
            if request.echo:
                prompt = self._prompt_text(update.index)
                text = prompt + text
                if logprobs is not None:
                    assert update.logprobs is not None, "they were requested"
                    logprobs.add_prompt(update.logprobs.prompt, len(prompt), request.num_top_logprobs)
        choice.length += len(text)
        if choice.logprobs is None:
            return text, None
        assert update.logprobs is not None, "they were requested"
        choice.logprobs.add(update.logprobs.output, new_places(update, request))
        return text, choice.logprobs.take(None if update.finish is None else choice.length)

    def _prompt_text(self, index: int) -> str:
        text = split_prompt(self.request.prompt)[0] if self.request.suffix else self.call.text
        if text is None:
            return self.tokenizer.decode(self.prompt_ids(index), self.request.skip_special_tokens is not False)
        return text if isinstance(text, str) else text[index // self.request.num_samples]


class CompletionServing(OpenAIServingBase[CompletionRequest, CompletionGeneration]):
    request_type = CompletionRequest
    id_prefix = "cmpl-"
    object_name = "text_completion"
    prompt_field = "prompt"

    def _check(self, request: CompletionRequest) -> None:
        if split_prompt(request.prompt)[0] is not None:
            self.context.check_tokenizer("prompt")
        if request.echo:
            self.context.check_tokenizer("echo")
            if request.suffix and split_prompt(request.prompt)[0] is None:
                raise refused("echo", "with a suffix needs a prompt of text")
        if request.logprobs is not None:
            self.context.check_tokenizer("logprobs")
        made, wanted = request.num_candidates, request.num_samples
        if made < wanted:
            raise refused("best_of", f"must be at least n ({wanted}), got {made}")
        if made > wanted and request.stream:
            raise refused("best_of", f"must equal n ({wanted}) in a stream: the best is known only when all have ended")
        check_num_logprobs("logprobs", request.logprobs)

    async def convert(self, request: CompletionRequest) -> CompletionGeneration:
        """Texts stay texts unless their ids are needed here. Echo with logprobs also requests the prompt's logprobs.

        With a suffix, the prompt is what stands before the text that is wanted.
        """
        self._check(request)
        text, ids = split_prompt(request.prompt)
        middle = await middle_of(self.context, request.suffix) if request.suffix else None
        if ids is not None:
            ids = self._truncated(ids, request)
        self.context.check_prompt_size("prompt", text, ids)
        shortened = request.truncate_prompt_tokens is not None
        begins = request.add_special_tokens is not False
        length = self.context.model.context_length
        limit = OutputLimit(request.max_new_tokens, length, length - _most_tokens(text, ids))
        # A stream may have to say what its limit became before the front end has looked at the prompt. An echo is the text as it was sent.
        counts = bool(request.stream) and limit.may_be_lowered and not request.echo
        if text is not None and (shortened or request.return_token_ids or middle is not None or not begins or counts):
            texts, alone = [text] if isinstance(text, str) else text, middle is None
            tokenizer = self.context.model.tokenizer
            if alone and not all(texts):
                raise refused("prompt", ": a prompt is empty")
            rows = await self.context.in_text_thread(lambda: tokenizer.encode_batch(texts, begins and alone, alone))
            ids = self._truncated([*rows[0]] if isinstance(text, str) else [*rows], request)
            text = None
        if middle is not None:
            ids = middle.around(ids or [], begins)
        generation_id = self.new_id(request)
        limit.least_room = length - _most_tokens(text, ids)
        if text is None:
            limit.fit(limit.least_room)
        sampling = request.sampling_params(limit.strict)
        if middle is not None:
            sampling = stopping(sampling, middle.how)
        fields = request.call_fields(whole_prompt=bool(request.echo))
        if request.num_candidates > request.num_samples:
            fields["return_logprob"] = True
        call = GenerateReqInput(text=text, input_ids=ids, sampling_params=sampling, rid=generation_id, **fields)
        return CompletionGeneration(request, call, generation_id, limit, tokenizer=self.context.model.tokenizer)

    async def updates(self, asker: Asker, generation: CompletionGeneration) -> AsyncGenerator[SampleUpdate, None]:
        unbounded = generation.request.output_limit == AS_MANY_AS_FIT
        limit = self.context.model.context_length if unbounded else DEFAULT_TOKENS
        news = self.context.frontend.generate_request(
            generation.call,
            default_max_new_tokens=generation.limit.default(limit),
            caller=asker.caller,
            slot=slot_of(generation.request.id_slot),
        )
        async with aclosing(news):
            async for update in news:
                generation.limit.watch(update)
                yield update

    def _truncated(self, ids: list[int | list[int]], request: CompletionRequest) -> list[int | list[int]]:
        length = self.context.model.context_length
        if not ids or not isinstance(ids[0], list):
            return [*request.truncated(cast("list[int]", ids), length)]
        return [request.truncated(row, length) if isinstance(row, list) else row for row in ids]

    def chosen(self, generation: CompletionGeneration, updates: list[SampleUpdate]) -> list[SampleUpdate]:
        """The best samples of each prompt, the best first."""
        made, wanted = generation.request.num_candidates, generation.request.num_samples
        if made == wanted:
            return updates
        best: list[SampleUpdate] = []
        for start in range(0, len(updates), made):
            best += sorted(updates[start : start + made], key=_mean_logprob, reverse=True)[:wanted]
        return [msgspec.structs.replace(update, index=index) for index, update in enumerate(best)]

    def renamed(self, exc: RequestError, request: CompletionRequest, grammar: AskedGrammar | None) -> RequestError:
        """See OpenAIServingBase. The number of samples is that of best_of, if it is given."""
        if exc.param == "n" and request.num_candidates != request.num_samples:
            exc.message, exc.param = re.sub(r"\bn\b", "best_of", exc.message, count=1), "best_of"
        return super().renamed(exc, request, grammar)

    def choice(self, generation: CompletionGeneration, update: SampleUpdate) -> dict[str, object]:
        request = generation.request
        text, logprobs = generation.push(update)
        choice: dict[str, object] = {
            "index": update.index,
            "text": text,
            "logprobs": logprobs,
            "prompt_logprobs": None,
            **generation.ending(update),
        }
        if request.return_token_ids:
            choice |= {"prompt_token_ids": generation.prompt_ids(update.index), "token_ids": update.ids}
        if request.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(self.context.model.tokenizer, request, update)
        return choice

    def chunk_writer(self, generation: CompletionGeneration) -> "CompletionChunks":
        return CompletionChunks(generation)


class CompletionChunks(ChunkWriter):
    """Chunks of /v1/completions: text, the last with the finish reason."""

    def __init__(self, generation: CompletionGeneration) -> None:
        super().__init__(generation, "text_completion")
        self.generation = generation

    def delta(self, update: SampleUpdate) -> bytes:
        """The new text, with echo before the first."""
        index, progress, prompt_ids = update.index, b"", b""
        if update.progress is not None:
            progress = b'%b%d,"text":"","logprobs":null,%b%b' % (
                self.choice_head, index, NOT_ENDED, self.progress_tail(update.progress),
            )  # fmt: skip
            if update.is_progress:
                return progress
        if self.wants_ids and index not in self.generation.choices:
            prompt_ids = b',"prompt_token_ids":' + encode_json(self.generation.prompt_ids(index))
        text, logprobs = self.generation.push(update)
        has_logprobs = logprobs is not None and bool(logprobs["tokens"])
        has_ids = self.wants_ids and bool(update.ids or prompt_ids)
        if not text and not has_logprobs and not has_ids and update.finish is None:
            return progress
        return progress + b'%b%d,"text":%b,"logprobs":%b,%b%b' % (
            self.choice_head,
            index,
            encode_json(text),
            encode_json(logprobs) if has_logprobs else b"null",
            NOT_ENDED if update.finish is None else encode_json(self.generation.ending(update))[1:-1],
            self.tail(update, in_choice=prompt_ids),
        )


def _mean_logprob(update: SampleUpdate) -> float:
    """Per token, as OpenAI compares samples; one that was aborted comes last."""
    assert update.logprobs is not None, "they were requested"
    assert update.finish is not None, "it has ended"
    if update.finish.type == "abort":
        return -math.inf
    values = [value for value, _, _ in update.logprobs.output.tokens if value is not None]
    return sum(values) / len(values) if values else 0.0


def _most_tokens(text: str | list[str] | None, ids: list[int | list[int]] | None) -> int:
    """More tokens than the longest of the prompts has: of a text twice its bytes, and some special ones."""
    texts = [text] if isinstance(text, str) else text or []
    rows = [len(row) for row in ids or () if isinstance(row, list)] or [len(ids or ())]
    return max(*rows, *(2 * len(one.encode()) + 8 for one in texts), 0)


def split_prompt(
    prompt: str | list[str | int | list[int]],
) -> tuple[str | list[str] | None, list[int | list[int]] | None]:
    """`prompt` as (texts, None) or (None, token ids). Raises RequestError for an empty or mixed list."""
    if isinstance(prompt, str):
        return prompt, None
    if not prompt:
        raise refused("prompt", "is empty")
    texts = [item for item in prompt if isinstance(item, str)]
    ids = [item for item in prompt if not isinstance(item, str)]
    if texts and ids:
        raise refused("prompt", "mixes texts and token ids")
    return (texts, None) if texts else (None, ids)
