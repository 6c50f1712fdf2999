"""The formats by name, and which of them a checkpoint's model writes."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import NamedTuple

import regex

from headrace.errors import ConfigError
from headrace.log import get_logger
from headrace.parsers.base import OutputParser
from headrace.parsers.engine import BLANK, Machine, random_characters
from headrace.parsers.formats import (
    deepseek,
    gemma,
    glm,
    harmony,
    hermes,
    kimi_k2,
    llama3,
    minimax,
    mistral,
    pythonic,
    qwen3_coder,
    think,
)
from headrace.parsers.program import Program, bind, marks, terminals, without_calls
from headrace.parsers.response_template import UnsupportedTemplateError, tables_of
from headrace.parsers.table import Kind, ReasoningTable, Table

logger = get_logger(__name__)

TABLES: tuple[Table, ...] = (
    harmony.TABLE,
    deepseek.V32,
    deepseek.V3,
    deepseek.V31,
    kimi_k2.TABLE,
    minimax.TABLE,
    qwen3_coder.TABLE,
    glm.GLM47,
    glm.GLM45,
    gemma.GEMMA4,
    gemma.FUNCTION_GEMMA,
    pythonic.LFM2,
    pythonic.TABLE,
    mistral.TABLE,
    hermes.TABLE,
    llama3.TABLE,
)
"""The tool formats. Of several whose fingerprints a template has, the first counts."""

REASONING_TABLES: tuple[ReasoningTable, ...] = think.TABLES

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
        self.table = table
        self.reasoning = reasoning
        self.special = dict(special)
        self.name = "+".join(dict.fromkeys(part.name for part in (table, reasoning) if part is not None))
        self.has_tools = table is not None and table.has_tools
        self.has_reasoning = reasoning is not None or (table is not None and table.has_reasoning)
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
        table = self.table if self.table is not None else _NO_TABLE
        begun = (
            [found.end() for found in regex.finditer(table.anchor, prompt_text, regex.DOTALL)] if table.anchor else []
        )
        machine = Machine(
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
            machine.skip(prompt_text[begun[-1] :])
        return machine

    @property
    def inner_ids(self) -> frozenset[int]:
        """Marks after which the model's turn goes on."""
        ends = self.table.turn_ends if self.table is not None else ()
        return self.mark_ids.difference(self.special[text] for text in ends if text in self.special)

    @property
    def reasoning_end_ids(self) -> frozenset[int]:
        """Tokens that end reasoning."""
        states = self._program(True, True, False).states.values()
        return frozenset(token_id for state in states if state.kind is Kind.REASONING for token_id in state.marks)

    def _program(self, reads_tools: bool, reads_reasoning: bool, by_text: bool) -> Program:
        key = (reads_tools, reads_reasoning, by_text)
        if key not in self._programs:
            table = self.table
            if table is not None and not reads_tools:
                table = without_calls(table) if table.has_reasoning or table.anchor else None
            reasoning = self.reasoning if reads_reasoning else None
            self._programs[key] = bind(table, reasoning, self.special, self._marks, by_text)
        return self._programs[key]

    def _start(self, program: Program, prompt_ids: Sequence[int], prompt_text: str) -> str:
        """The first state, by what the prompt left open."""
        end = prompt_text.rstrip(BLANK)
        for text, state in self.table.prompts if self.table is not None else ():
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


_NO_TABLE = Table("none", {})


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
    table = _table(tool_parser, template)
    reasoning = _reasoning_table(reasoning_parser, template)
    if table is not None and table.has_reasoning:
        reasoning = None
    if table is None and reasoning is None:
        return None
    return OutputFormat(table, reasoning, special)


def _described(response_template: Mapping[str, object], template: str, special: Mapping[str, int]) -> OutputFormat:
    """The format that a checkpoint describes. How calls are written, for grammars, is known from the format that its chat template shows."""
    table, reasoning = tables_of(response_template, special)
    shown = _table(AUTO, template)
    if shown is not None:
        table = replace(table, writings=shown.writings, has_headers=shown.has_headers, turn_ends=shown.turn_ends)
    return OutputFormat(table, reasoning, special)


def names() -> Names:
    """All names of formats, for the options."""
    tools = [name for table in TABLES for name in (table.name, *table.aliases)]
    reasoning = [name for table in REASONING_TABLES for name in (table.name, *table.aliases)]
    reasoning += [name for table in TABLES if table.has_reasoning for name in (table.name, *table.aliases)]
    return Names(tuple(sorted(tools)), tuple(sorted(set(reasoning))))


def _table(name: str | None, template: str) -> Table | None:
    if name == OFF:
        return None
    if name is None or name == AUTO:
        return next((table for table in TABLES if _fits(table.fingerprints, template)), None)
    for table in TABLES:
        if name in (table.name, *table.aliases):
            return table
    raise _unknown("tool call parser", name, names().tool_parsers)


def _reasoning_table(name: str | None, template: str) -> ReasoningTable | None:
    if name == OFF:
        return None
    if name is None or name == AUTO:
        return next((table for table in REASONING_TABLES if _fits(table.fingerprints, template)), None)
    for table in REASONING_TABLES:
        if name in (table.name, *table.aliases):
            return table
    if name in names().reasoning_parsers:
        return None
    raise _unknown("reasoning parser", name, names().reasoning_parsers)


def _unknown(what: str, name: str, known: Sequence[str]) -> ConfigError:
    return ConfigError(f"there is no {what} {name!r}; there are: {', '.join((AUTO, OFF, *known))}")


def _fits(fingerprints: Sequence[Sequence[str]], template: str) -> bool:
    return any(all(text in template for text in group) for group in fingerprints)
