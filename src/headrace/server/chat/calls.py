"""From a conversation to a call of the engine, and to the reader of its output.

Owns what tools, reasoning and the requested grammar mean for the sampling of a reply. Every chat API uses it. Rendering and tokenizing run in a
thread; the rest in the event loop that serves HTTP.
"""

import dataclasses
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing
from dataclasses import dataclass
from typing import Any

import msgspec

from headrace.errors import RequestError
from headrace.frontend.sample_update import SampleUpdate
from headrace.messages.outputs import FinishReason
from headrace.messages.requests import GenerateReqInput
from headrace.parsers.call_grammar import binds_texts
from headrace.parsers.engine import OutputParser
from headrace.parsers.registry import OutputFormat
from headrace.sampling.params import SamplingParams
from headrace.server.chat.choice_stream import ChoiceStream, TokenPieces
from headrace.server.chat.conversation import Conversation
from headrace.server.chat.media import media_renamed
from headrace.server.chat.prompt import ChatPrompt, chat_prompt
from headrace.server.chat.reply_grammar import BoundReply, bound_reply
from headrace.server.chat.thinking import cannot_end, check_reasoning, with_thinking_budget
from headrace.server.context import Asker, ServingContext
from headrace.server.output_limit import OutputLimit

CONTEXT_TOKENS = 8
"""Tokens at the end of a prompt on which the text of the first output tokens may depend."""


@dataclass(frozen=True, slots=True)
class ChatCall:
    """A conversation that is ready to be generated.

    call: for the engine. format: how the output is read; None = it is nothing but text. by_grammar: see `BoundReply`. limit: of output tokens.
    drops_budget: the conversation's limit of reasoning was a hint, and cannot be kept.
    """

    context: ServingContext
    conversation: Conversation
    prompt: ChatPrompt
    sampling: SamplingParams
    call: GenerateReqInput
    format: OutputFormat | None
    by_grammar: bool
    limit: OutputLimit
    drops_budget: bool = False

    def notes(self, limit: str, budget: str) -> list[str]:
        """What is not honoured as it stands, for the reply's header. limit, budget: what the API calls the limits of output and of reasoning."""
        shows_lark = any(tool.lark for tool in self.conversation.tools) and not (
            self.format is not None and binds_texts(self.format)
        )
        return [
            *self.limit.notes(limit),
            *([budget] if self.drops_budget else ()),
            *(["tools.format"] if shows_lark else ()),
        ]

    def choice(self) -> ChoiceStream:
        """The reader of one choice."""
        if self.format is None:
            return ChoiceStream(None, None)
        reads_reasoning = self.conversation.splits_reasoning
        parser = _parser(self.format, self.conversation, self.prompt, reads_reasoning, self.by_grammar)
        pieces = TokenPieces(
            self.context.model.tokenizer,
            self.format.mark_ids,
            self.prompt.ids[-CONTEXT_TOKENS:],
            skip_special_tokens=self.sampling.skip_special_tokens,
            spaces_between_special_tokens=self.sampling.spaces_between_special_tokens,
        )
        return ChoiceStream(parser, pieces)

    async def updates(self, asker: Asker, may_fill_context: bool = False) -> AsyncGenerator[SampleUpdate, None]:
        """Generate. may_fill_context: no limit was asked for, and not just none given. Raises the errors of the engine, which name the fields of the
        request.
        """
        model = self.context.model
        limit = model.context_length if may_fill_context else model.default_reply_tokens
        updates = self.context.frontend.generate_request(
            self.call, default_max_new_tokens=self.limit.default(limit), in_chat=True, caller=asker.caller
        )
        try:
            async with aclosing(updates):
                async for update in updates:
                    self.limit.watch(update)
                    yield update
        except RequestError as exc:
            if self.by_grammar and exc.param == "structural_tag":
                exc.param = "tools" if self.conversation.tools else "response_format"
                exc.message = exc.message.replace("structural_tag", exc.param).replace("the structural tag", exc.param)
            raise media_renamed(exc) from None

    def reason(self, finish: FinishReason, choice: ChoiceStream) -> str:
        """Why a choice ended: stop, length, tool_calls or abort.

        A call that was asked for by name is no surprise: stop, as OpenAI says. One that a stop string has cut is not to be run: stop, too.
        """
        calls = finish.type == "stop" and choice.has_calls and self.conversation.choice.name is None
        is_cut = isinstance(finish.matched, str) and choice.in_call
        return "tool_calls" if calls and not is_cut else finish.type


async def chat_call(
    context: ServingContext,
    conversation: Conversation,
    sampling: SamplingParams,
    *,
    shorten: Callable[[list[int]], list[int]] | None = None,
    **fields: Any,
) -> ChatCall:
    """Render and tokenize a conversation, and say how its reply is sampled.

    A limit of output tokens beyond the room in the context is lowered. shorten: makes the prompt's ids fewer. fields: more of `GenerateReqInput`.
    Raises RequestError.
    """
    output_format = _format(context, conversation)
    budget = conversation.thinking_budget
    if conversation.budget_is_hint and (output_format is None or not output_format.has_reasoning):
        budget = None  # a model that does not reason stays within every budget
    if budget is not None:
        check_reasoning(output_format)

    def prepared() -> tuple[ChatPrompt, BoundReply, bool]:
        prompt = chat_prompt(context, conversation)
        if shorten is not None:
            shorter = shorten(prompt.ids)
            if prompt.media and len(shorter) < len(prompt.ids):
                raise RequestError(
                    "truncate_prompt_tokens: a prompt with media cannot be cut",
                    "truncate_prompt_tokens",
                )
            prompt = dataclasses.replace(prompt, ids=shorter)
        if output_format is None:
            return prompt, BoundReply(sampling), False
        prompt = prompt.with_marks(output_format.mark_ids)
        start = _parser(output_format, conversation, prompt, reads_reasoning=True)
        bound = bound_reply(sampling, conversation, output_format, start, prompt.tail)
        if budget is None:
            return prompt, bound, False
        limited = with_thinking_budget(bound.sampling, budget, output_format, start, context.model.tokenizer)
        if limited is None and not conversation.budget_is_hint:
            raise cannot_end()
        return prompt, BoundReply(limited or bound.sampling, bound.by_grammar), limited is None

    prompt, bound, drops_budget = await context.in_text_thread(prepared)
    params = bound.sampling
    length = context.model.context_length
    limit = OutputLimit(params.max_new_tokens, length, 0 if prompt.media else length - len(prompt.ids))
    if not prompt.media:
        limit.fit(limit.least_room)
    params = msgspec.structs.replace(params, max_new_tokens=limit.strict)
    call = GenerateReqInput(
        input_ids=list(prompt.ids),
        **prompt.media.native_fields(),
        sampling_params=params,
        **fields,
    )
    return ChatCall(context, conversation, prompt, params, call, output_format, bound.by_grammar, limit, drops_budget)


def _parser(
    output_format: OutputFormat,
    conversation: Conversation,
    prompt: ChatPrompt,
    reads_reasoning: bool,
    by_grammar: bool = False,
) -> OutputParser:
    return output_format.parser(
        tools=[tool.function for tool in conversation.tools],
        prompt_ids=prompt.marks,
        prompt_text=prompt.tail,
        reads_tools=bool(conversation.tools) and conversation.choice.mode != "none",
        reads_reasoning=reads_reasoning,
        num_calls_before=conversation.num_calls_before,
        by_text=by_grammar,
    )


def _format(context: ServingContext, conversation: Conversation) -> OutputFormat | None:
    """How the model writes what is not text, if the reply may hold that. Raises RequestError for tools that nobody could read."""
    found = context.model.output_format
    calls = bool(conversation.tools) and conversation.choice.mode != "none"
    if calls and (found is None or not found.has_tools):
        raise RequestError("tools: tool calls are disabled (--tool-call-parser none)", "tools")
    return found if conversation.tools or (found is not None and found.has_reasoning) else None
