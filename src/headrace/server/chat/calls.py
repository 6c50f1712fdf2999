"""From a conversation to a call of the engine, and to the reader of its output. Owns what tools, reasoning and the requested grammar mean for the
sampling of a reply. `chat_call` and `ChatCall` run in the event loop that serves HTTP; all else is pure, in the thread that renders and tokenizes.
"""

from collections.abc import AsyncGenerator, Callable, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, replace
from typing import Any

import msgspec

from headrace.errors import RequestError
from headrace.frontend.pins import PinAsk
from headrace.frontend.sample_update import SampleUpdate
from headrace.grammar.schema_walk import with_one_of_as_any_of
from headrace.messages.bodies import is_empty
from headrace.messages.grammar import GrammarKind
from headrace.messages.outputs import FinishReason
from headrace.messages.requests import CONTEXT_TOKENS, GenerateReqInput
from headrace.parsers.call_grammar import CallGrammar, Named, binds_texts, call_grammar
from headrace.parsers.engine import OutputParser
from headrace.parsers.registry import OutputFormat, reasoning_tokens
from headrace.sampling.grammar_fields import GRAMMAR_KINDS, json_value
from headrace.sampling.params import SamplingParams, ThinkingBudget
from headrace.server.chat.choice_stream import ChoiceStream, TokenPieces
from headrace.server.chat.conversation import Conversation, refused
from headrace.server.chat.prompt import ChatPrompt, chat_prompt, media_renamed
from headrace.server.context import Asker, ServingContext
from headrace.server.notes import OutputLimit

_BUDGET = "thinking_budget"

_FORBIDDEN = -100.0
"""The bias of tokens that must not come, the least that is allowed."""


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
        notes = self.limit.notes(limit)
        if self.drops_budget:
            notes.append(budget)
        if any(tool.lark for tool in self.conversation.tools) and not (self.format and binds_texts(self.format)):
            notes.append("tools.format")
        return notes

    def choice(self) -> ChoiceStream:
        if self.format is None:
            return ChoiceStream(None, None)
        parser = _parser(
            self.format, self.conversation, self.prompt, self.conversation.splits_reasoning, self.by_grammar
        )
        pieces = TokenPieces(
            self.context.model.tokenizer,
            self.format.mark_ids,
            self.prompt.ids[-CONTEXT_TOKENS:],
            skip_special_tokens=self.sampling.skip_special_tokens,
            spaces_between_special_tokens=self.sampling.spaces_between_special_tokens,
        )
        return ChoiceStream(parser, pieces)

    async def updates(
        self, asker: Asker, may_fill_context: bool = False, pins: Sequence[PinAsk] = (), slot: int = 0
    ) -> AsyncGenerator[SampleUpdate, None]:
        """Generate. may_fill_context: no limit was asked for, and not just none given. pins: of the prompt. Raises the errors of the engine, which
        name the fields of the request.
        """
        model = self.context.model
        limit = model.context_length if may_fill_context else model.default_reply_tokens
        updates = self.context.frontend.generate_request(
            self.call,
            default_max_new_tokens=self.limit.default(limit),
            in_chat=True,
            caller=asker.caller,
            pins=pins,
            slot=slot,
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
    """Render and tokenize a conversation, and say how its reply is sampled. A limit of output tokens beyond the room in the context is lowered.

    shorten: makes the prompt's ids fewer. fields: more of `GenerateReqInput`. Raises RequestError.
    """
    output_format = _format(context, conversation)
    budget = conversation.thinking_budget
    if budget is not None and (output_format is None or not output_format.has_reasoning):
        if not conversation.budget_is_hint:
            raise refused(
                _BUDGET, ": this server does not know how the model ends its reasoning, see --reasoning-parser"
            )
        budget = None  # a model that does not reason stays within every budget

    def prepared() -> tuple[ChatPrompt, BoundReply, bool]:
        prompt = chat_prompt(context, conversation)
        if shorten is not None:
            shorter = shorten(prompt.ids)
            if prompt.media and len(shorter) < len(prompt.ids):
                raise refused("truncate_prompt_tokens", ": a prompt with media cannot be cut")
            prompt = replace(prompt, ids=shorter)
        if output_format is None:
            return prompt, BoundReply(sampling), False
        prompt = replace(prompt, marks=tuple(i for i in prompt.ids if i in output_format.mark_ids))
        start = _parser(output_format, conversation, prompt, reads_reasoning=True)
        bound = bound_reply(sampling, conversation, output_format, start, prompt.tail)
        if budget is None:
            return prompt, bound, False
        found = reasoning_tokens(output_format, lambda text: context.model.tokenizer.encode(text, False, True))
        if found is None:
            if not conversation.budget_is_hint:
                raise refused(_BUDGET, ": this model's reasoning does not end with a token of its own")
            return prompt, bound, True
        limit = ThinkingBudget(num_tokens=budget, is_open=start.is_reasoning, **found._asdict())
        return prompt, replace(bound, sampling=msgspec.structs.replace(bound.sampling, thinking_budget=limit)), False

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
        reads_tools=conversation.may_call,
        reads_reasoning=reads_reasoning,
        num_calls_before=conversation.num_calls_before,
        by_text=by_grammar,
    )


def _format(context: ServingContext, conversation: Conversation) -> OutputFormat | None:
    """How the model writes what is not text, if the reply may hold that. Raises RequestError for tools that nobody could read."""
    found = context.model.output_format
    if conversation.may_call and (found is None or not found.has_tools):
        raise refused("tools", ": tool calls are disabled (--tool-call-parser none)")
    return found if conversation.tools or (found is not None and found.has_reasoning) else None


@dataclass(frozen=True, slots=True)
class BoundReply:
    """sampling: with what the output must match. by_grammar: a grammar that was made here binds it, so marks may come as text, too."""

    sampling: SamplingParams
    by_grammar: bool = False


def bound_reply(
    sampling: SamplingParams, conversation: Conversation, output_format: OutputFormat, start: OutputParser, prompt: str
) -> BoundReply:
    """The sampling parameters with what `tool_choice`, `strict` and reasoning ask of the output.

    start: a parser at the beginning of the output. prompt: the end of its text. Raises RequestError for what cannot be combined.
    """
    kind = next((kind for kind in GRAMMAR_KINDS if not is_empty(getattr(sampling, kind))), None)
    if sampling.grammar_after:
        if conversation.choice.mode == "required":
            raise refused("grammar_after", "cannot be combined with a required tool call")
        return BoundReply(sampling)
    reasoning = output_format.reasoning
    ends_reasoning = next((text for text in reasoning.closes if text in output_format.special), "") if reasoning else ""
    # Where the prompt has opened the reasoning, the grammar begins behind its end, or has it in itself; else the model may open it.
    after = ends_reasoning if start.is_reasoning else ""
    # Templates switch reasoning off by writing some that is complete.
    has_closed = reasoning is not None and prompt.rstrip().endswith(tuple(reasoning.closes))
    opens_reasoning = not start.is_reasoning and not has_closed
    in_reasoning = start.is_reasoning and not after
    bound = _calls_and_content(sampling, kind, conversation, output_format, opens_reasoning, in_reasoning)
    if bound is None:
        return BoundReply(msgspec.structs.replace(sampling, grammar_after=after) if kind and after else sampling)
    if bound.forbidden_ids:
        bias = {str(token_id): _FORBIDDEN for token_id in bound.forbidden_ids}
        sampling = msgspec.structs.replace(sampling, logit_bias={**(sampling.logit_bias or {}), **bias})
    if not bound.structural_tag:
        return BoundReply(sampling)
    without: dict[str, Any] = dict.fromkeys(GRAMMAR_KINDS)
    tag = bound.structural_tag
    return BoundReply(
        msgspec.structs.replace(sampling, **without | {"structural_tag": tag, "grammar_after": after or None}), True
    )


def _calls_and_content(
    sampling: SamplingParams,
    kind: GrammarKind | None,
    conversation: Conversation,
    output_format: OutputFormat,
    opens_reasoning: bool,
    in_reasoning: bool,
) -> CallGrammar | None:
    """What binds the output; None = nothing, or the request's own grammar as it is."""
    choice, tools, may_call = conversation.choice, conversation.tools, conversation.may_call
    content = None
    if kind is not None and choice.mode != "required":
        beside_reasoning = in_reasoning or (opens_reasoning and output_format.has_reasoning)
        if not may_call and not beside_reasoning:
            return None
        if kind in ("ebnf", "lark"):  # cannot be part of another grammar
            if may_call:
                raise refused(
                    kind,
                    "cannot be combined with tools that may be called: use tool_choice none, or another kind of grammar",
                )
            if in_reasoning:
                raise refused(
                    kind,
                    "cannot be combined with this model's reasoning: switch that off, or use another kind of grammar",
                )
            return None
        content = _content(sampling, kind)
    if not tools and content is None:
        return None
    return call_grammar(
        output_format,
        [tool.function if tool.strict else _loose(tool.function) for tool in tools],
        Named(choice.name) if choice.name is not None else choice.mode,
        parallel=conversation.parallel,
        strict_names={tool.name for tool in tools if tool.strict},
        opens_reasoning=opens_reasoning,
        in_reasoning=in_reasoning,
        content=content,
        inputs={tool.name: tool.lark for tool in tools if tool.lark},
    )


def _loose(function: Mapping[str, object]) -> Mapping[str, object]:
    """A function that is not strict, as grammars read it."""
    parameters = function.get("parameters")
    return {**function, "parameters": with_one_of_as_any_of(parameters)} if isinstance(parameters, dict) else function


def _content(sampling: SamplingParams, kind: GrammarKind) -> dict[str, Any]:
    """The request's grammar as a format of a structural tag. Raises RequestError."""
    match kind:
        case "json_schema":
            return {"type": "json_schema", "json_schema": json_value(kind, sampling.json_schema)}
        case "regex":
            return {"type": "regex", "pattern": sampling.regex}
        case "choice":
            texts = [{"type": "const_string", "value": text} for text in sampling.choice or ()]
            return texts[0] if len(texts) == 1 else {"type": "or", "elements": texts}
        case _:
            tag = json_value(kind, sampling.structural_tag)
            found = tag.get("format") if isinstance(tag, dict) else None
            if not isinstance(found, dict):
                raise refused("structural_tag", ": only one with a `format` can be combined with tools or reasoning")
            return found
