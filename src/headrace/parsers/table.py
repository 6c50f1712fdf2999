"""How a format is written down: states, the terminals that lead from one to the next, and what the text in each state is.

Tables name terminals by their text. `program.py` binds them to a tokenizer, and `engine.py` runs them.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum, auto
from typing import Literal

from headrace.parsers.base import CallSink, Reader

ToolSchemas = Mapping[str, Mapping[str, object]]
"""The JSON schema of each function's arguments, by its name."""


class Kind(Enum):
    """What the text in a state is."""

    CONTENT = auto()
    REASONING = auto()
    SPACE = auto()
    """Blanks between terminals. Anything else leads to `State.peek`, or is malformed."""
    NAME = auto()
    """The name of a function, without the blanks around it."""
    HEADER = auto()
    """A line that says what follows (`State.read_header`). A terminal that leads to the same state is part of it."""
    KEY = auto()
    """The name of a parameter."""
    VALUE = auto()
    """The value of a parameter, as text, which becomes JSON."""
    ARGUMENTS = auto()
    """The arguments as they are."""
    REGION = auto()
    """The text of one call or several, which is read once it is complete (`State.read_calls`)."""
    ID = auto()
    """The id that the model gives a call."""
    READER = auto()
    """A structured text that ends by itself (`State.reader`)."""


ValueType = Literal["schema", "string", "json"]
"""What a parameter's value is: `schema`: its schema says it; or the format itself does."""


@dataclass(frozen=True, slots=True)
class Go:
    """Where a terminal leads.

    begin: the name is complete, the call begins. end: the call ends. closes: what was read so far is complete, reasoning or what surrounds a call: it
    is never given back. value: of what type the value is that begins. keep: the terminal itself is read again, in the next state.
    """

    to: str
    begin: bool = False
    end: bool = False
    closes: bool = False
    value: ValueType = "schema"
    keep: bool = False


@dataclass(frozen=True, slots=True)
class Header:
    """What a header says about what follows. to: the state. call: the name of the function that is called."""

    to: str
    call: str | None = None


Captures = Mapping[str, str]
ReadCalls = Callable[[str, Captures, ToolSchemas], list[tuple[str, str]]]
"""Calls as (name, JSON text of the arguments) in a region's text. Captures: by the terminal before it. Raises ValueError if it is none."""

MakeReader = Callable[[CallSink], Reader]


@dataclass(frozen=True, slots=True)
class State:
    """A state of a format.

    on: terminals that are looked for. patterns: regular expressions that are terminals, too;
    their named groups are captures. peek: for SPACE, the state for a first character that is no blank, which is not consumed; "" = any.
    then: for READER, the state after it. trim_newline: for VALUE, one line break after the opening and one before the closing terminal belong
    to them.
    """

    kind: Kind
    on: Mapping[str, Go] = field(default_factory=dict)
    peek: Mapping[str, str] = field(default_factory=dict)
    reader: MakeReader | None = None
    then: str = "content"
    trim_newline: bool = False
    read_header: Callable[[str], Header | None] | None = None
    read_calls: ReadCalls | None = None
    patterns: Sequence[tuple[str, Go]] = ()


NameReader = Callable[[str], str | None]
CallId = Callable[[str, int, Callable[[int], str]], str]


def plain_name(text: str) -> str | None:
    """A function's name as it is; None for text that has blanks in it or is empty."""
    return text if text and not any(character in text for character in " \t\r\n") else None


@dataclass(frozen=True, slots=True)
class Writing:
    """How a call is to be written, for grammars. `{name}` is the function's name; `{number}` any number.

    begin, end: around the arguments of a call. arguments: `json`: an object; `tags`: one `parameter` after the other, around which there is
    nothing; `python`: keyword arguments; `gemma`: an object with `delimiter` around strings. parameter: before and after a value, with `{key}`
    and `{is_string}` (true or false). section: around all calls. separator: between calls. bare: the first character of calls that stand alone at
    the beginning of the output. needs: a token without which a tokenizer is of a model that writes calls in another way. escapes: the name is
    within JSON.
    """

    begin: str
    end: str = ""
    arguments: Literal["json", "tags", "python", "gemma"] = "json"
    parameter: tuple[str, str] = ("", "")
    delimiter: str = ""
    section: tuple[str, str] = ("", "")
    separator: str = ""
    bare: str = ""
    needs: str = ""
    escapes: bool = False

    @property
    def has_plain_text(self) -> bool:
        """Whether a text stands in a call as it is, not within quotes that would change it."""
        return self.arguments in ("tags", "gemma")


@dataclass(frozen=True, slots=True)
class Table:
    """A format: how a model writes calls, or all of its messages.

    opens: terminals in `content` that begin calls. states: by name; `content` and `reasoning` are added where the table has none of that
    name. start: the state at the beginning of an output and after reasoning between tags. read_name: the function's name in the text of a
    NAME, or None for what is no name. call_id: makes the id of a call from its name, its number in the conversation, and a function that
    draws as many random letters and digits as it is told; None: `call_` and 24 of them. prompts: an end of the prompt, without blanks after
    it, and the state in which it leaves the output; the first that fits. anchor: a regular expression; what the prompt has after its last
    match is read as the beginning of the output. is_text: all terminals match by text. parts: texts inside calls that may be special tokens
    of a tokenizer, and are read as text. writings: how calls are to be written; the first that the tokenizer has the token for. aliases:
    other names of the format. fingerprints: groups of texts; a chat template with all texts of a group is of a model that writes this
    format. has_headers: all texts are messages with headers, as in Harmony. reasoning: what begins and ends the reasoning of a format
    that has its own (`has_reasoning`), for limits of it. turn_ends: terminals after which the model's turn is over.
    """

    name: str
    states: Mapping[str, State]
    opens: Mapping[str, Go] = field(default_factory=dict)
    start: str = "content"
    read_name: NameReader = plain_name
    call_id: CallId | None = None
    prompts: Sequence[tuple[str, str]] = ()
    anchor: str = ""
    is_text: bool = False
    parts: Sequence[str] = ()
    writings: Sequence[Writing] = ()
    aliases: Sequence[str] = ()
    fingerprints: Sequence[Sequence[str]] = ()
    has_tools: bool = True
    has_reasoning: bool = False
    has_headers: bool = False
    reasoning: "ReasoningTable | None" = None
    turn_ends: Sequence[str] = ()


@dataclass(frozen=True, slots=True)
class ReasoningTable:
    """Reasoning between tags. opens and closes: terminals, of which any begins or ends it. aliases, fingerprints: see `Table`."""

    name: str
    opens: Sequence[str]
    closes: Sequence[str]
    aliases: Sequence[str] = ()
    fingerprints: Sequence[Sequence[str]] = ()
