"""The formats by name, and which of them a checkpoint's model writes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple, TypeVar

import regex

from headrace.errors import ConfigError
from headrace.log import get_logger
from headrace.parsers.base import BLANK
from headrace.parsers.engine import OutputParser, random_characters
from headrace.parsers.formats import REASONING_TABLES, TABLES
from headrace.parsers.program import Program, bind, marks, terminals, without_calls
from headrace.parsers.response_template import UnsupportedTemplateError, tables_of
from headrace.parsers.table import Kind, ReasoningTable, Table

logger = get_logger(__name__)

AnyTable = TypeVar("AnyTable", bound=Table | ReasoningTable)

NO_TABLE = Table("", {}, has_tools=False)
"""Of a model that writes no calls."""

OFF = "none"
AUTO = "auto"


class Names(NamedTuple):
    """The names that options take, aliases included, sorted."""

    tool_parsers: tuple[str, ...]
    reasoning_parsers: tuple[str, ...]


class OutputFormat:
    """What a model writes: calls, reasoning, or both, bound to a tokenizer.

    name: the names of its parts, joined by `+`. mark_ids: tokens that must be delivered as marks, by id and without text, whatever
    `skip_special_tokens` says. special: the texts of all added tokens and their ids.
    """

    def __init__(self, table: Table | None, reasoning: ReasoningTable | None, special: Mapping[str, int]) -> None:
        table = self.table = table or NO_TABLE
        self.reasoning = reasoning
        self.special = dict(special)
        self.name = "+".join(dict.fromkeys(part.name for part in (table, reasoning) if part and part.name))
        self.has_tools = table.has_tools
        self.has_reasoning = reasoning is not None or table.has_reasoning
        self._marks = marks(terminals(table, reasoning), special)
        self.mark_ids = frozenset(self._marks)
        self._programs: dict[tuple[bool, bool, bool], Program] = {}

    def parser(
        self,
        *,
        tools: Sequence[Mapping[str, object]] = (),
        prompt_ids: Sequence[int] = (),
        prompt_text: str = "",
        reads_tools: bool = True,
        reads_reasoning: bool = True,
        by_text: bool = False,
        num_calls_before: int = 0,
        random: Callable[[], str] | None = None,
    ) -> OutputParser:
        """A parser for one output.

        tools: functions (`name`, `parameters`), whose schemas decide what parameters written as text become. prompt_ids, prompt_text: the
        prompt, or its end, in either form or both: whether it leaves reasoning open. reads_tools, reads_reasoning: what is not read stays in
        the content, tags included. by_text: terminals match as text even where they are tokens: for outputs that are bound by a `call_grammar`.
        num_calls_before: calls in the conversation so far, for formats that number them. random: gives one random
        character (of letters and digits) for ids; None: of the system.
        """
        program = self._program(reads_tools, reads_reasoning, by_text)
        schemas: dict[str, Mapping[str, object]] = {}
        for tool in tools:
            name, parameters = tool.get("name"), tool.get("parameters")
            if isinstance(name, str) and isinstance(parameters, Mapping):
                schemas[name] = parameters
        table = self.table
        begun = (
            [found.end() for found in regex.finditer(table.anchor, prompt_text, regex.DOTALL)] if table.anchor else []
        )
        parser = OutputParser(
            program,
            schemas,
            program.start if begun else self._start(program, prompt_ids, prompt_text),
            reads_tools=reads_tools,
            reads_reasoning=reads_reasoning,
            num_calls_before=num_calls_before,
            read_name=table.read_name,
            call_id=table.call_id,
            draw=random_characters if random is None else lambda num: "".join(random() for _ in range(num)),
        )
        if begun:
            parser.skip(prompt_text[begun[-1] :])
        return parser

    @property
    def inner_ids(self) -> frozenset[int]:
        """Marks after which the model's turn goes on."""
        return self.mark_ids.difference(self.special[text] for text in self.table.turn_ends if text in self.special)

    @property
    def reasoning_end_ids(self) -> frozenset[int]:
        states = self._program(True, True, False).states.values()
        return frozenset(token_id for state in states if state.kind is Kind.REASONING for token_id in state.marks)

    def _program(self, reads_tools: bool, reads_reasoning: bool, by_text: bool) -> Program:
        key = (reads_tools, reads_reasoning, by_text)
        if key not in self._programs:
            table = self.table
            if not reads_tools:
                table = without_calls(table) if table.has_reasoning or table.anchor else NO_TABLE
            reasoning = self.reasoning if reads_reasoning else None
            self._programs[key] = bind(table, reasoning, self.special, self._marks, by_text)
        return self._programs[key]

    def _start(self, program: Program, prompt_ids: Sequence[int], prompt_text: str) -> str:
        """The first state, by what the prompt left open."""
        end = prompt_text.rstrip(BLANK)
        for text, state in self.table.prompts:
            if state in program.states and end.endswith(text):
                return state
        if self.reasoning is None or "reasoning" not in program.states:
            return program.start
        if any(end.endswith(text.rstrip(BLANK)) for text in self.reasoning.opens):
            return "reasoning"
        opens = {self.special[text] for text in self.reasoning.opens if text in self.special}
        closes = {self.special[text] for text in self.reasoning.closes if text in self.special}
        if opens and closes:
            # A user's text never becomes special tokens: the last of them tells, also where the prompt ends within the reasoning.
            for token_id in reversed(prompt_ids):
                if token_id in opens:
                    return "reasoning"
                if token_id in closes:
                    break
        return program.start


def choose(
    *,
    template: str,
    special: Mapping[str, int],
    response_template: Mapping[str, object] | None = None,
    tool_parser: str | None = None,
    reasoning_parser: str | None = None,
) -> OutputFormat | None:
    """The format of a model, or None if it writes neither calls nor reasoning that is known.

    template: the chat template. special: texts of all added tokens and their ids. response_template: that of the tokenizer's config, which decides
    unless a parser is named.
    tool_parser, reasoning_parser: names (`names`), `none` to switch off, None or `auto` to choose by the checkpoint. Raises ConfigError for
    unknown names.
    """
    if response_template is not None and {tool_parser or AUTO, reasoning_parser or AUTO} == {AUTO}:
        try:
            return _described(response_template, template, special)
        except UnsupportedTemplateError as err:
            logger.warning("the checkpoint's response_template cannot be used: %s; its chat template decides", err)
    known = names()
    for what, name, others in (
        ("tool call parser", tool_parser, known.tool_parsers),
        ("reasoning parser", reasoning_parser, known.reasoning_parsers),
    ):
        if name is not None and name not in (AUTO, OFF, *others):
            raise ConfigError(f"there is no {what} {name!r}; there are: {', '.join((AUTO, OFF, *others))}")
    table = _chosen(TABLES, tool_parser, template)
    reasoning = _chosen(REASONING_TABLES, reasoning_parser, template)
    if table is not None and table.has_reasoning:
        reasoning = None
    if table is None and reasoning is None:
        return None
    return OutputFormat(table, reasoning, special)


def _described(response_template: Mapping[str, object], template: str, special: Mapping[str, int]) -> OutputFormat:
    """The format that a checkpoint describes. How calls are written, for grammars, is known from the format that its chat template shows."""
    table, reasoning = tables_of(response_template, special)
    shown = _chosen(TABLES, AUTO, template)
    if shown is not None:
        table = replace(table, writings=shown.writings, has_headers=shown.has_headers, turn_ends=shown.turn_ends)
    return OutputFormat(table, reasoning, special)


def names() -> Names:
    """All names of formats, for the options."""
    with_reasoning: list[Table | ReasoningTable] = [
        *REASONING_TABLES,
        *(table for table in TABLES if table.has_reasoning),
    ]
    return Names(
        tuple(sorted(name for table in TABLES for name in (table.name, *table.aliases))),
        tuple(sorted({name for table in with_reasoning for name in (table.name, *table.aliases)})),
    )


def _chosen(tables: Sequence[AnyTable], name: str | None, template: str) -> AnyTable | None:
    """The table of a name, or the first that fits the chat template."""
    if name is not None and name != AUTO:
        return next((table for table in tables if name in (table.name, *table.aliases)), None)
    return next(
        (table for table in tables if any(all(text in template for text in group) for group in table.fingerprints)),
        None,
    )


class ReasoningTokens(NamedTuple):
    """end_id: the token that ends reasoning. end_ids: all that do. begins: sequences of tokens, of which each begins it."""

    end_id: int
    end_ids: tuple[int, ...]
    begins: tuple[tuple[int, ...], ...]


def reasoning_tokens(format: OutputFormat, encode: Callable[[str], list[int]]) -> ReasoningTokens | None:
    """Those of a format; None if no single token ends its reasoning.

    encode: the ids of a text in which the texts of special tokens are these tokens, without bos.
    """
    if (table := format.reasoning or format.table.reasoning) is None:
        return None
    end_id = next((format.special[text] for text in table.closes if text in format.special), None)
    if end_id is None:
        return None
    begins = dict.fromkeys(tuple(encode(text)) for text in table.opens)
    return ReasoningTokens(end_id, tuple(sorted(format.reasoning_end_ids)), tuple(filter(None, begins)))
