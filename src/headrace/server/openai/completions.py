"""Text completions: `POST /v1/completions`.

Owns the legacy logprobs shape, echo and the text chunks. Runs in the event loop that serves HTTP; long work on texts goes
to a thread.
"""

import math
import re
from dataclasses import dataclass
from typing import cast

import msgspec

from headrace.errors import RequestError
from headrace.frontend.sample_update import SampleUpdate
from headrace.messages.requests import GenerateReqInput
from headrace.server.context import ServingContext
from headrace.server.http import encode_json
from headrace.server.infill import middle_of, stopping
from headrace.server.notes import OutputLimit
from headrace.server.openai.base import NOT_ENDED, ChunkWriter, Generation, OpenAIServingBase, Usage
from headrace.server.openai.fields import AskedGrammar, check_num_logprobs
from headrace.server.openai.logprobs import LegacyLogprobs, new_logprobs, prompt_logprobs
from headrace.server.openai.protocol import CompletionRequest


class CompletionServing(OpenAIServingBase[CompletionRequest, Generation[CompletionRequest]]):
    """Handler of /v1/completions."""

    id_prefix = "cmpl-"
    prompt_field = "prompt"
    default_max_tokens = 16

    def __init__(self, context: ServingContext) -> None:
        super().__init__(context, CompletionRequest)

    def validate(self, request: CompletionRequest) -> None:
        """Raises RequestError for echo, best_of and logprobs beyond what is possible."""
        if split_prompt(request.prompt)[0] is not None:
            self.context.check_tokenizer("prompt")
        if request.echo:
            self.context.check_tokenizer("echo")
            if request.suffix and split_prompt(request.prompt)[0] is None:
                raise RequestError("echo with a suffix needs a prompt of text", "echo")
        if request.logprobs is not None:
            self.context.check_tokenizer("logprobs")
        if request.num_candidates < request.num_samples:
            message = f"best_of must be at least n ({request.num_samples}), got {request.num_candidates}"
            raise RequestError(message, "best_of")
        if request.num_candidates > request.num_samples and request.stream:
            message = (
                f"best_of must equal n ({request.num_samples}) in a stream: the best is known only when all have ended"
            )
            raise RequestError(message, "best_of")
        check_num_logprobs("logprobs", request.logprobs)

    async def convert(self, request: CompletionRequest) -> Generation[CompletionRequest]:
        """Texts stay texts unless their ids are needed here. Echo with logprobs also requests the prompt's logprobs.

        With a suffix, the prompt is what stands before the text that is wanted.
        """
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
                raise RequestError("prompt: a prompt is empty", "prompt")
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
        return Generation(request, call, generation_id, limit)

    def _truncated(self, ids: list[int | list[int]], request: CompletionRequest) -> list[int | list[int]]:
        """Each prompt truncated as requested."""
        length = self.context.model.context_length
        if not ids or not isinstance(ids[0], list):
            return [*request.truncated(cast("list[int]", ids), length)]
        return [request.truncated(row, length) if isinstance(row, list) else row for row in ids]

    def chosen(self, generation: Generation[CompletionRequest], updates: list[SampleUpdate]) -> list[SampleUpdate]:
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

    def prompt_ids(self, generation: Generation[CompletionRequest], index: int) -> list[int]:
        """The tokens of the prompt of choice `index`, given as tokens or tokenized here."""
        ids = generation.call.input_ids
        assert ids is not None, "a completion has a prompt"
        own = ids[index // generation.request.num_samples] if isinstance(ids[0], list) else ids
        assert isinstance(own, list), "the prompt's shape was checked"
        return [i for i in own if isinstance(i, int)]

    def prompt_text(self, generation: Generation[CompletionRequest], index: int) -> str:
        """The text that echo puts before choice `index`."""
        number = index // generation.request.num_samples
        text = generation.call.text if not generation.request.suffix else split_prompt(generation.request.prompt)[0]
        if isinstance(text, str):
            return text
        if text is not None:
            return text[number]
        skip = generation.request.skip_special_tokens is not False
        return self.context.model.tokenizer.decode(self.prompt_ids(generation, index), skip)

    def choice_logprobs(self, generation: Generation[CompletionRequest]) -> LegacyLogprobs:
        """For one choice, see `LegacyLogprobs`."""
        skip, as_id = generation.request.skip_special_tokens is not False, generation.request.return_tokens_as_token_ids
        return LegacyLogprobs(self.context.model.tokenizer, skip, bool(as_id))

    def response(self, generation: Generation[CompletionRequest], updates: list[SampleUpdate], usage: Usage) -> object:
        """A `text_completion` object."""
        choices = [self._choice(generation, update) for update in updates]
        return generation.head("text_completion") | {"choices": choices, "usage": usage}

    def _choice(self, generation: Generation[CompletionRequest], update: SampleUpdate) -> object:
        assert update.finish is not None, "it has ended"
        request, index = generation.request, update.index
        prompt = self.prompt_text(generation, index) if request.echo else ""
        logprobs = None
        if request.logprobs is not None:
            shape = self.choice_logprobs(generation)
            if request.echo:
                shape.add_prompt(update, len(prompt), request.num_top_logprobs)
            shape.add(*new_logprobs(update, request))
            logprobs = shape.take(len(prompt) + len(update.text))
        choice: dict[str, object] = {
            "index": index,
            "text": prompt + update.text,
            "logprobs": logprobs,
            "prompt_logprobs": None,
            **generation.ending(update),
        }
        if request.return_token_ids:
            choice |= {"prompt_token_ids": self.prompt_ids(generation, index), "token_ids": update.ids}
        if request.prompt_logprobs is not None:
            choice["prompt_logprobs"] = prompt_logprobs(self.context.model.tokenizer, request, update)
        return choice

    def chunk_writer(self, generation: Generation[CompletionRequest]) -> "CompletionChunks":
        """See `CompletionChunks`."""
        return CompletionChunks(self, generation)


@dataclass(slots=True)
class _ChoiceStream:
    """State of one choice in a stream: its logprobs, and the length of the text before the next token."""

    logprobs: LegacyLogprobs | None
    length: int


class CompletionChunks(ChunkWriter):
    """Chunks of /v1/completions: text, the last with the finish reason."""

    def __init__(self, serving: CompletionServing, generation: Generation[CompletionRequest]) -> None:
        super().__init__(generation, "text_completion")
        self.serving = serving
        self.generation = generation
        self.choices: dict[int, _ChoiceStream] = {}

    def delta(self, update: SampleUpdate) -> bytes:
        """The new text, with echo before the first."""
        request, index, text = self.generation.request, update.index, update.text
        progress = b""
        if update.progress is not None:
            progress = b'%b%d,"text":"","logprobs":null,%b%b' % (
                self.choice_head, index, NOT_ENDED, self.progress_tail(update.progress),
            )  # fmt: skip
            if update.is_progress:
                return progress
        prompt_ids = b""
        choice = self.choices.get(index)
        if choice is None:
            shape = self.serving.choice_logprobs(self.generation) if request.logprobs is not None else None
            choice = self.choices[index] = _ChoiceStream(shape, 0)
            if request.echo:
                prompt = self.serving.prompt_text(self.generation, index)
                text = prompt + text
                if shape is not None:
                    shape.add_prompt(update, len(prompt), request.num_top_logprobs)
            if self.wants_ids:
                prompt_ids = b',"prompt_token_ids":' + encode_json(self.serving.prompt_ids(self.generation, index))
        choice.length += len(text)
        logprobs = b"null"
        has_logprobs = False
        if choice.logprobs is not None:
            choice.logprobs.add(*new_logprobs(update, request))
            has_logprobs = bool(choice.logprobs.tokens)
            logprobs = encode_json(choice.logprobs.take(None if update.finish is None else choice.length))
        has_ids = self.wants_ids and bool(update.ids or prompt_ids)
        if not text and not has_logprobs and not has_ids and update.finish is None:
            return progress
        return progress + b'%b%d,"text":%b,"logprobs":%b,%b%b' % (
            self.choice_head,
            index,
            encode_json(text),
            logprobs if has_logprobs else b"null",
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
        raise RequestError("prompt is empty", "prompt")
    texts = [item for item in prompt if isinstance(item, str)]
    ids = [item for item in prompt if not isinstance(item, str)]
    if texts and ids:
        raise RequestError("prompt mixes texts and token ids", "prompt")
    return (texts, None) if texts else (None, ids)
