"""Tokenizes the prompts of a call: tokens and checked parameters of each sample, as the scheduler gets them.

Owns the tokenizing threads, the checks that need the number of tokens, and the seeds of requests that give none. Large calls are checked in a
thread.
"""

import dataclasses
import itertools
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, cast

import msgspec
import tokenizers
from tokenizers import models

from headrace.checkpoint.pooling import PoolingConfig
from headrace.config.checks import guesses_by_text
from headrace.config.server_args import ServerArgs
from headrace.config.web import parse_prefill_hosts
from headrace.errors import ContextLengthError, RequestError
from headrace.frontend.adapters import Adapters
from headrace.frontend.inputs import PromptInput, check_text, is_large, tokenize_inputs
from headrace.frontend.media import NO_MEDIA, PromptMedia, add_media, check_media_bytes
from headrace.frontend.pooled import PooledPrompt, PooledTokenizer
from headrace.frontend.prompts import Call, CallLimits, Prompt, refuse_text, split_call
from headrace.frontend.records import RequestLog
from headrace.frontend.request_state import CallState, ReqState, engine_request
from headrace.frontend.rooms import of_sample
from headrace.frontend.sample_table import Aborts, SampleTable
from headrace.frontend.sessions import Sessions
from headrace.log import get_logger
from headrace.media_kinds import MediaKind
from headrace.messages.control import ReadyInfo
from headrace.messages.grammar import GrammarSpec
from headrace.messages.packing import pack_int32
from headrace.messages.requests import (
    CallInput,
    EmbeddingReqInput,
    GenerateReqInput,
    LogprobSpec,
    PromptContent,
    SampleTask,
    TokenizedGenerateReqInput,
)
from headrace.sampling.params import MAX_SEED, GenerationDefaults, ResolvedSamplingParams
from headrace.text.batch_tokenizer import AsyncDynamicBatchTokenizer
from headrace.text.tokenizers import RenderedPrompt, Tokenizer
from headrace.turns import Turns

log = get_logger(__name__)

DUMPED_CHARACTERS = 200
"""Length of a prompt's text in dumps."""
DUMPED_IDS = 50

WRONG_KIND = "wrong_model_type"
"""Code of the error of a call that wants another kind of model."""

AnyCall = Call[Prompt] | Call[PooledPrompt]

LEAST_ROOM = 1024
"""A request that says nothing of the number of its tokens gets no fewer for want of room: it is refused."""

MAX_TOKEN_CHARACTERS = 256
"""Longer texts are hardly one token."""


@dataclass(eq=False)
class PromptTokenizer:
    """limits: what calls are checked against. defaults: values of sampling parameters that a request does not give. table: where samples are
    found that a request of a session replaces. pooling: what the model makes of a text; None = it generates. media: makes those of prompts.
    """

    args: ServerArgs
    ready: ReadyInfo
    tokenizer: Tokenizer
    defaults: GenerationDefaults
    table: SampleTable
    aborts: Aborts
    sessions: Sessions
    adapters: Adapters
    request_log: RequestLog
    pooling: PoolingConfig | None = None
    media: PromptMedia = NO_MEDIA

    def __post_init__(self) -> None:
        self.limits = call_limits(self.args, self.ready, self.table.queue.most_at_once)
        self._batch_tokenizer = AsyncDynamicBatchTokenizer(
            self.tokenizer, self.ready.context_length, self.args.allow_auto_truncate
        )
        # Requests without a seed get different ones, which are the same again after a restart of the server.
        self._seeds = random.Random(self.args.random_seed)
        self._checks = Turns(2, "check")
        self._pooled = (
            PooledTokenizer(self.args, self.ready, self.pooling, self._batch_tokenizer, self._checks, self.request_log)
            if self.pooling is not None
            else None
        )

    async def split(self, obj: CallInput) -> AnyCall:
        """See `split_call` and `split_pooled_call`. A call with many items is checked in a thread, so that it does not block other calls.

        Raises RequestError, too, for a call that the served kind of model does not answer.
        """
        if self.limits.max_samples != self.table.queue.most_at_once:
            self.limits = dataclasses.replace(self.limits, max_samples=self.table.queue.most_at_once)
        if isinstance(obj, EmbeddingReqInput):
            if self._pooled is None:
                raise RequestError(
                    "this model generates text: it makes no embeddings and classifies nothing", code=WRONG_KIND
                )
            return await self._pooled.split(obj, self.limits)
        if self.pooling is not None:
            made = "embeddings" if self.pooling.task == "embed" else "scores"
            raise RequestError(f"this model does not generate text: it makes {made}", code=WRONG_KIND)
        if not is_large(obj):
            return split_call(obj, self.limits)
        return await self._checks.run(lambda: split_call(obj, self.limits))

    async def tokenize(
        self, call: AnyCall, obj: CallInput, state: CallState, default_max_new_tokens: int, in_chat: bool = False
    ) -> list[TokenizedGenerateReqInput]:
        """Tokenize and check every prompt of a call. Returns a request for each sample of `state`.

        The samples hold their adapters and their turns in sessions from now on. Raises RequestError, NotFoundError, CapacityError; then no
        prompt of the call is to be sent.
        """
        self.adapters.check_number(prompt.adapter for prompt in call.prompts)
        if isinstance(obj, GenerateReqInput):
            return await self._tokenize(cast(Call[Prompt], call), obj, state, default_max_new_tokens, in_chat)
        pooled = cast(Call[PooledPrompt], call)
        for prompt, sample in zip(pooled.prompts, state.samples, strict=True):
            if prompt.adapter:
                await self._use_adapter(prompt.adapter, [sample])
        assert self._pooled is not None, "split has refused it"
        return await self._pooled.tokenize(pooled, obj, state)

    async def _tokenize(
        self, call: Call[Prompt], obj: GenerateReqInput, state: CallState, default_max_new_tokens: int, in_chat: bool
    ) -> list[TokenizedGenerateReqInput]:
        given = [prompt.given for prompt in call.prompts]
        contents = await tokenize_inputs(given, self._batch_tokenizer, self.ready.hidden_size)
        if self.media.loader is not None or any(prompt.media for prompt in given):
            contents = await self._add_media(call, contents, state)
        samples = iter(state.samples)
        requests: list[TokenizedGenerateReqInput] = []
        reply_bytes = 0
        predictions: dict[str, list[int]] = {}
        for index, (prompt, content) in enumerate(zip(call.prompts, contents, strict=True)):
            own = list(itertools.islice(samples, prompt.sampling.n))
            words = prompt.sampling.bad_words
            bad_word_ids = await self._bad_word_ids(words) if words else []
            if prompt.prediction and prompt.prediction not in predictions:
                [ids] = await self._batch_tokenizer.encode_words([prompt.prediction])
                predictions[prompt.prediction] = ids[: self.ready.context_length]
            predicted_ids = predictions.get(prompt.prediction, [])
            if self.args.allow_auto_truncate:
                prompt, content = self._cut(prompt, content)
            if prompt.session is not None:
                content = self._continue_session(prompt, content, own[0])
            try:
                grammar = await self._grammar(prompt)
                fixed_bytes, token_bytes = self._reply_bytes(prompt, content)
                most = default_max_new_tokens
                if token_bytes:
                    room = (self.args.max_reply_bytes // len(state.samples) - fixed_bytes) // token_bytes
                    most = min(most, max(LEAST_ROOM, room))
                sampling = self._resolve(prompt, content, bad_word_ids, grammar, most)
                reply_bytes += len(own) * (fixed_bytes + token_bytes * sampling.max_new_tokens)
                logprobs = _logprob_spec(prompt, content)
            except RequestError as error:
                if len(call.prompts) > 1:
                    raise RequestError(f"prompt {index}: {error.message}", error.param, error.code) from None
                raise
            if prompt.adapter:
                await self._use_adapter(prompt.adapter, own)
            self._describe(prompt, content, logprobs, own)
            requests += _requests(prompt, content, sampling, logprobs, predicted_ids, own, obj, in_chat)
        if state.turn and reply_bytes > self.args.max_reply_bytes:
            raise RequestError(
                f"the outputs of this request may take {reply_bytes} bytes; the limit is {self.args.max_reply_bytes} (--max-reply-bytes): lower "
                "max_new_tokens or the number of samples, or ask for fewer logprobs or no hidden states",
                "max_new_tokens",
            )
        return requests

    def _reply_bytes(self, prompt: Prompt, content: PromptContent) -> tuple[int, int]:
        """What a sample of a prompt keeps until it is answered: bytes that its prompt takes, and those of each output token. Its own logprob is not
        counted: it is no more than the token."""
        num_listed = content.num_tokens - prompt.logprob_start_len if prompt.logprob_start_len >= 0 else 0
        logprobs = 8 * prompt.top_logprobs_num + 4 * len(prompt.token_ids_logprob) if prompt.return_logprob else 0
        hidden = 4 * self.ready.hidden_size if prompt.return_hidden_states else 0
        return num_listed * logprobs + content.num_tokens * hidden, logprobs + hidden

    async def _add_media(
        self, call: Call[Prompt], contents: list[PromptContent], state: CallState
    ) -> list[PromptContent]:
        """The prompts with their media, whose bytes the samples of the call hold from now on. Raises RequestError, CapacityError."""
        media = [prompt.given.media for prompt in call.prompts]
        self.media.check(media)
        self.table.hold_given(state, sum(refs.num_bytes for refs in media))
        owners = [state.tenant.namespace(prompt.namespace) for prompt in call.prompts]
        contents = await add_media(self.media, contents, media, owners)
        check_media_bytes(
            [(content, prompt.num_samples) for content, prompt in zip(contents, call.prompts, strict=True)]
        )
        samples = iter(state.samples)
        for content, prompt in zip(contents, call.prompts, strict=True):
            self.table.hold_media(list(itertools.islice(samples, prompt.num_samples)), content)
        return contents

    def close(self) -> None:
        self._batch_tokenizer.close()
        self._checks.close()
        self.media.close()

    async def _bad_word_ids(self, words: list[str]) -> list[list[int]]:
        """Token sequences of the words, at the start of a text and after a space."""
        spellings = list(dict.fromkeys(text for word in words for text in (word, f" {word.lstrip()}")))
        sequences = dict.fromkeys(tuple(ids) for ids in await self._batch_tokenizer.encode_words(spellings))
        return [list(ids) for ids in sequences if ids]

    async def _grammar(self, prompt: Prompt) -> GrammarSpec | None:
        """The prompt's grammar, with the token after which it begins. Raises RequestError if that is not one token."""
        after = prompt.sampling.grammar_after
        if prompt.grammar is None or not after:
            return prompt.grammar
        check_text("grammar_after", after, MAX_TOKEN_CHARACTERS)
        [ids] = await self._batch_tokenizer.encode_words([after], allow_special=True)
        if len(ids) != 1:
            raise RequestError(
                f"grammar_after must be the text of one token of the model; {after!r} has {len(ids)}", "grammar_after"
            )
        return msgspec.structs.replace(prompt.grammar, after_id=ids[0])

    def _continue_session(self, prompt: Prompt, content: PromptContent, sample: ReqState) -> PromptContent:
        """The tokens of the session so far, followed by those of the prompt. Raises RequestError, CapacityError."""
        assert prompt.session is not None
        bos_id = self.tokenizer.bos_id if prompt.given.text is not None else None
        tenant = sample.call.tenant
        ids, sample.turn, replaced = self.sessions.begin(prompt.session, prompt.rid, content.ids(), bos_id, tenant)
        for rid in replaced:
            self.aborts.abort_samples(self.table.find(tenant.scope, rid))
        return PromptContent(pack_int32(ids))

    def _resolve(
        self,
        prompt: Prompt,
        content: PromptContent,
        bad_word_ids: list[list[int]],
        grammar: GrammarSpec | None,
        default_max_new_tokens: int,
    ) -> ResolvedSamplingParams:
        return prompt.sampling.resolve(
            defaults=self.defaults,
            vocab_size=self.ready.vocab_size,
            default_max_new_tokens=default_max_new_tokens,
            room_tokens=self._room(prompt, content),
            bad_word_ids=bad_word_ids,
            grammar=grammar,
            seed=self._seeds.getrandbits(63),
            max_n=self.args.max_n,
        )

    def _cut(self, prompt: Prompt, content: PromptContent) -> tuple[Prompt, PromptContent]:
        """The beginning of a prompt that is too long, and a limit of output within the room, as --allow-auto-truncate of SGLang has it. Prompts with
        media or embeddings stay whole."""
        context, num_tokens = self.ready.context_length, content.num_tokens
        if num_tokens >= context and prompt.given.only_tokens:
            log.warning("a prompt of %d tokens is cut to the context of %d", num_tokens, context)
            content = PromptContent(content.token_ids[: 4 * (context - 1)])
        asked, room = prompt.sampling.max_new_tokens, context - content.num_tokens
        if asked is not None and asked > room > 0:
            prompt = dataclasses.replace(prompt, sampling=msgspec.structs.replace(prompt.sampling, max_new_tokens=room))
        return prompt, content

    def _room(self, prompt: Prompt, content: PromptContent) -> int:
        """Number of output tokens for which the context has room, where videos may take more positions than tokens.

        Raises ContextLengthError, RequestError.
        """
        name, context, num_tokens = prompt.given.field, self.ready.context_length, content.num_tokens
        if num_tokens == 0:
            raise RequestError("the prompt is empty", name)
        room = context - num_tokens
        asked = prompt.sampling.max_new_tokens
        if num_tokens > context and asked is None:
            raise ContextLengthError.of_prompt(name, context, num_tokens)
        least = 1 if asked is None else asked
        if least > room:
            raise ContextLengthError.of_both(name if room <= 0 else "max_new_tokens", context, num_tokens, least)
        if num_tokens > self.ready.max_total_tokens:
            held = "what the KV cache holds"
            raise ContextLengthError.of_prompt(name, self.ready.max_total_tokens, num_tokens, held)
        room -= content.extra_places
        least = asked or 1
        if content.extra_places and least > room:
            raise ContextLengthError(
                MediaKind.VIDEO.field,
                context,
                f"the videos make the prompt {num_tokens + content.extra_places} positions long in time, and {least} more were requested",
                "videos (fewer seconds, or a higher fps) or completion",
            )
        return room

    async def _use_adapter(self, name: str, samples: list[ReqState]) -> None:
        """Keep the adapter in memory until the samples leave the table. Raises NotFoundError, RequestError, CapacityError."""
        adapter = await self.adapters.acquire(name, len(samples))
        for sample in samples:
            sample.adapter = adapter

    def _describe(
        self, prompt: Prompt, content: PromptContent, logprobs: LogprobSpec | None, own: list[ReqState]
    ) -> None:
        num_tokens = content.num_tokens
        logged_input = self.request_log.input_of(prompt.given, content)
        dumped_prompt = _beginning(prompt.given, content) if self.args.crash_dump_prompts else ""
        for sample in own:
            sample.num_prompt_tokens = num_tokens
            sample.logged_input = logged_input
            sample.dumped_prompt = dumped_prompt
            sample.wants_hidden_states = prompt.return_hidden_states
        if logprobs is None:
            return
        first = logprobs.prompt_start - 1
        for sample in own:
            sample.wants_logprobs, sample.wants_mean_logprob = prompt.return_logprob, prompt.wants_mean_logprob
            sample.first_logprob_id = content.ids(first, first + 1)[0] if first < num_tokens else None
            sample.top_num = logprobs.top_num
            sample.picked_ids = logprobs.token_ids
        # Siblings find the prompt in the cache: asking for its logprobs as well would compute it again for each of them.
        is_shared = not (self.args.disable_radix_cache or prompt.return_hidden_states or not content.has_tokens)
        if is_shared and logprobs.prompt_start < num_tokens:
            for sample in own[1:]:
                sample.follow(own[0])


def call_limits(args: ServerArgs, ready: ReadyInfo, max_samples: int) -> CallLimits:
    return CallLimits(
        vocab_size=ready.vocab_size,
        hidden_size=ready.hidden_size,
        max_n=args.max_n,
        max_prompts=args.max_batch_prompts,
        max_samples=max_samples,
        processors=processor_names(args.custom_logit_processors),
        uses_priority=args.schedule_policy == "priority",
        num_replicas=args.num_replicas,
        has_tokenizer=not args.skip_tokenizer_init,
        has_grammars=args.grammar_backend != "none",
        context_length=ready.context_length,
        has_experts=ready.has_experts,
        uses_predictions=guesses_by_text(ready.speculative_algorithm),
        disaggregation=args.disaggregation_mode,
        bootstrap_port=args.disaggregation_bootstrap_port,
        prefill_hosts=parse_prefill_hosts(args.disaggregation_prefill_hosts),
    )


def processor_names(option: str) -> frozenset[str]:
    """Names defined by --custom-logit-processors (`name=module:callable,...`)."""
    return frozenset(item.partition("=")[0].strip() for item in option.split(",") if item.strip())


def _logprob_spec(prompt: Prompt, content: PromptContent) -> LogprobSpec | None:
    """Which logprobs to ask the engine for. Raises RequestError."""
    if not prompt.return_logprob and not prompt.wants_mean_logprob:
        return None
    num_tokens = content.num_tokens
    # The list of prompt logprobs starts with token `logprob_start_len`, which has no value: the engine begins after it.
    start = num_tokens if prompt.logprob_start_len == -1 else prompt.logprob_start_len
    if start > num_tokens:
        raise RequestError(
            f"logprob_start_len {start} is beyond the length of the prompt ({num_tokens})", "logprob_start_len"
        )
    if start < num_tokens and not content.has_tokens:
        raise RequestError("logprob_start_len: embeddings of a prompt have no logprobs", "logprob_start_len")
    return LogprobSpec(start + 1, prompt.top_logprobs_num, prompt.token_ids_logprob)


def _requests(
    prompt: Prompt,
    content: PromptContent,
    sampling: ResolvedSamplingParams,
    logprobs: LogprobSpec | None,
    predicted_ids: list[int],
    own: list[ReqState],
    obj: GenerateReqInput,
    in_chat: bool,
) -> list[TokenizedGenerateReqInput]:
    group = own[0].call.tenant.scope + prompt.rid if len(own) > 1 else ""

    def task(number: int, sample: ReqState) -> SampleTask:
        of_sample = logprobs
        if logprobs and sample.leader:  # those of outputs only
            of_sample = msgspec.structs.replace(logprobs, prompt_start=content.num_tokens + 1)
        return SampleTask(
            msgspec.structs.replace(sampling, seed=(sampling.seed + number) & MAX_SEED) if number else sampling,
            stream=obj.stream,
            logprobs=of_sample,
            return_hidden_states=prompt.return_hidden_states,
            custom_logit_processor=prompt.custom_logit_processor,
            predicted_ids=pack_int32(predicted_ids),
            in_chat=in_chat,
        )

    return [
        engine_request(
            sample,
            content,
            task(number, sample),
            namespace=prompt.namespace,
            priority=obj.priority,
            group=group,
            room=of_sample(prompt.room, number),
        )
        for number, sample in enumerate(own)
    ]


def _beginning(given: PromptInput, content: PromptContent) -> str:
    """The beginning of a prompt for dumps: its text if it has one, else its ids."""
    if given.embeds is not None:
        return f"{content.num_tokens} embeddings"
    return repr(given.text[:DUMPED_CHARACTERS]) if given.text is not None else repr(content.ids(stop=DUMPED_IDS))


class NoTokenizer(Tokenizer):
    """The tokenizer of a server without one (--skip-tokenizer-init): token ids in, token ids out. Tokens have no text, so all text is empty."""

    def __init__(self) -> None:
        super().__init__(tokenizers.Tokenizer(models.BPE({}, [])))

    def encode_batch(
        self, texts: Sequence[str], add_special_tokens: bool = True, allow_special: bool = False
    ) -> list[list[int]]:
        refuse_text("text")

    def encode_whole(
        self,
        texts: Sequence[str | tuple[str, str]],
        most_tokens: int | None = None,
        side: Literal["right", "left"] = "right",
    ) -> list[tuple[list[int], list[int]]]:
        refuse_text("text")

    def encode_rendered(self, prompt: RenderedPrompt) -> list[int]:
        refuse_text("messages")
