"""Structural tags as lark: free text with constrained parts between marks.

Two shapes, both as other servers take them: `{"structures": [{"begin", "schema", "end"}], "triggers": [...]}`, and `{"type": "structural_tag",
"format": {...}}`, a tree of formats. Each format becomes a lark expression. Text that may be anything up to a mark is one lazy terminal that ends
with the mark, so the mark's first occurrence counts.
"""

from collections.abc import Mapping, Sequence
from typing import Literal, TypeVar

import msgspec

from headrace.errors import RequestError
from headrace.grammar import lark
from headrace.grammar.schema_walk import Json, decode_json
from headrace.plain_types import plain_reason

_T = TypeVar("_T")


class ConstString(msgspec.Struct, tag="const_string", forbid_unknown_fields=True):
    value: str


class JsonSchema(msgspec.Struct, tag="json_schema", forbid_unknown_fields=True):
    """JSON that the schema allows. style: other ways to write the value are not supported."""

    json_schema: Json
    style: Literal["json"] = "json"
    any_order: Literal[False] = False


class Regex(msgspec.Struct, tag="regex", forbid_unknown_fields=True):
    """Text that a regular expression matches as a whole."""

    pattern: str


class Lark(msgspec.Struct, tag="lark", forbid_unknown_fields=True):
    definition: str


class AnyText(msgspec.Struct, tag="any_text", forbid_unknown_fields=True):
    """Any text, up to the end of the tag that it is in. excludes: strings that it does not contain."""

    excludes: list[str] = []


class Elements(msgspec.Struct, tag="sequence", forbid_unknown_fields=True):
    elements: list["Format"]


class Or(msgspec.Struct, tag="or", forbid_unknown_fields=True):
    elements: list["Format"]


class Tag(msgspec.Struct, tag="tag", forbid_unknown_fields=True):
    """A format between two marks. end: one mark, or several of which any ends it; an empty one is no mark."""

    begin: str
    content: "Format"
    end: str | list[str]

    @property
    def ends(self) -> tuple[str, ...]:
        """The marks that end it, none for a tag that its content ends."""
        ends = [self.end] if isinstance(self.end, str) else self.end
        return tuple(ends) if all(ends) else ()


class TriggeredTags(msgspec.Struct, tag="triggered_tags", forbid_unknown_fields=True):
    """Any text, in which a trigger begins a tag. at_least_one: begins with a tag. stop_after_first: ends with the first tag.
    excludes: strings that the text between tags does not contain."""

    triggers: list[str]
    tags: list[Tag]
    at_least_one: bool = False
    stop_after_first: bool = False
    excludes: list[str] = []


class TagsWithSeparator(msgspec.Struct, tag="tags_with_separator", forbid_unknown_fields=True):
    """Tags with a text between them. at_least_one: not none. stop_after_first: at most one."""

    tags: list[Tag]
    separator: str
    at_least_one: bool = False
    stop_after_first: bool = False


Format = ConstString | JsonSchema | Regex | Lark | AnyText | Elements | Or | Tag | TriggeredTags | TagsWithSeparator


class _Structure(msgspec.Struct, forbid_unknown_fields=True):
    begin: str
    schema: Json
    end: str


class _Structures(msgspec.Struct, forbid_unknown_fields=True):
    structures: list[_Structure]
    triggers: list[str]
    type: Literal["structural_tag"] = "structural_tag"


class _Tree(msgspec.Struct, forbid_unknown_fields=True):
    format: Format
    type: Literal["structural_tag"] = "structural_tag"


def to_lark(text: str, field: str, special_tokens: Mapping[str, int], closes_objects: bool = False) -> str:
    """A structural tag (JSON, either shape) as lark. special_tokens: text -> id; where a mark contains such a text, the token is meant.

    closes_objects: of its schemas, see `library_schema`.
    Raises RequestError with `field` for anything that is not supported, with its place.
    """
    value = decode_json(text, field, "the structural tag")
    legacy = isinstance(value, dict) and "structures" in value
    try:
        if legacy:
            asked = msgspec.convert(value, _Structures)
            tags = [Tag(item.begin, JsonSchema(item.schema), item.end) for item in asked.structures]
            root: Format = TriggeredTags(asked.triggers, tags)
        else:
            root = msgspec.convert(value, _Tree).format
    except msgspec.ValidationError as err:
        raise RequestError(f"the structural tag is not supported as it is: {plain_reason(err)}", field) from None
    compiler = _Compiler(field, special_tokens, closes_objects)
    start = compiler.expression(root, ())
    return "\n".join([f"start: {start}", *compiler.definitions]) + "\n"


class _Compiler:
    """Makes rules and terminals, numbered in the order in which they are made."""

    def __init__(self, field: str, special_tokens: Mapping[str, int], closes_objects: bool) -> None:
        self.definitions: list[str] = []
        self._field = field
        self._closes_objects = closes_objects
        self._special_tokens = special_tokens

    def expression(self, item: Format, ends: Sequence[str]) -> str:
        """What matches a format and then one of the marks `ends`; without marks, the format alone."""
        match item:
            case ConstString():
                return self._then(self._literal(item.value), ends)
            case JsonSchema():
                schema = lark.inline_schema(item.json_schema, self._field, self._closes_objects)
                return self._then(self._rule(schema), ends)
            case Regex():
                return self._then(self._terminal(lark.regex(item.pattern)), ends)
            case Lark():
                return self._lark(lark.checked(item.definition, self._field), ends)
            case AnyText():
                return self._text(ends, item.excludes)
            case Elements():
                return self._sequence(item, ends)
            case Or():
                return self._any_of(
                    [self.expression(element, ends) for element in self._not_empty(item.elements, "or")]
                )
            case Tag():
                return self._then(f"{self._literal(item.begin)} {self.expression(item.content, item.ends)}", ends)
            case TriggeredTags():
                return self._triggered(item, ends)
            case TagsWithSeparator():
                return self._then(self._separated(item), ends)

    def _lark(self, definition: str, ends: Sequence[str]) -> str:
        """Text of a definition. A mark that is text could be taken by the definition's last terminal, which is as long as it can be; so a definition
        that is a regular expression becomes one terminal, which ends with the mark's first occurrence."""
        if any(self._before_token(end)[0] for end in ends):
            made = lark.as_terminal(definition, f"LARK_{len(self.definitions)}")
            if made is not None:
                name, terminals = made
                self.definitions.append(terminals)
                return self._text(ends, ends, name)
        return self._then(self._rule(f"%lark {{\n{definition}\n}}"), ends)

    def _sequence(self, item: Elements, ends: Sequence[str]) -> str:
        *first, last = self._not_empty(item.elements, "sequence")
        for element in first:
            if _is_open(element):
                raise self._refused(
                    "text without an end (`any_text`, `triggered_tags`) can only be the last element of a `sequence`"
                )
        return " ".join([*(self.expression(element, ()) for element in first), self.expression(last, ends)])

    def _triggered(self, item: TriggeredTags, ends: Sequence[str]) -> str:
        """Free text up to a trigger, the rest of a tag, and so on; at last free text up to `ends`."""
        tags = self._by_trigger(item)
        if any(_is_open(tag) for group in tags.values() for tag in group):
            raise self._refused("a tag of `triggered_tags` needs an `end`, or content that has one")
        excludes = [*item.excludes, *tags]
        after = []
        for trigger, group in tags.items():
            before = self._text([trigger], [*item.excludes, *(other for other in tags if other != trigger)])
            rest = [Tag(tag.begin[len(trigger) :], tag.content, tag.end) for tag in group]
            after.append(f"{before} {self._any_of([self.expression(tag, ()) for tag in rest])}")
        first = self._rule(self._any_of([self.expression(tag, ()) for tag in item.tags])) if item.at_least_one else ""
        if item.stop_after_first:
            if first:
                return self._then(first, ends)
            return self._any_of([self._then(self._any_of(after), ends), self._text(ends, excludes)])
        return f"{first} {self._rule(self._any_of(after))}* {self._text(ends, excludes)}".strip()

    def _by_trigger(self, item: TriggeredTags) -> dict[str, list[Tag]]:
        """The tags by their triggers: each tag has exactly one."""
        tags: dict[str, list[Tag]] = {}
        if not all(item.triggers):
            raise self._refused("a trigger must not be empty")
        for tag in self._not_empty(item.tags, "triggered_tags"):
            matching = [trigger for trigger in dict.fromkeys(item.triggers) if tag.begin.startswith(trigger)]
            if len(matching) != 1:
                raise self._refused(
                    f"the tag that begins with {tag.begin!r} needs exactly one trigger that its `begin` starts with; it has {matching}"
                )
            tags.setdefault(matching[0], []).append(tag)
        return tags

    def _separated(self, item: TagsWithSeparator) -> str:
        tags = self._not_empty(item.tags, "tags_with_separator")
        if any(map(_is_open, tags)):
            raise self._refused("a tag of `tags_with_separator` needs an `end`, or content that has one")
        tag = self._rule(self._any_of([self.expression(tag, ()) for tag in tags]))
        more = "" if item.stop_after_first else f" ({self._literal(item.separator)} {tag})*"
        return f"({tag}{more})" if item.at_least_one else f"({tag}{more})?"

    def _text(self, ends: Sequence[str], excludes: Sequence[str], text: str = lark.ANY_TEXT) -> str:
        """Free text, or another terminal, without `excludes`, up to and with one of `ends`."""
        for excluded in excludes:
            if not excluded:
                raise self._refused("a string in `excludes` must not be empty")
            text += f" & ~({lark.ANY_TEXT} {lark.quoted(excluded)} {lark.ANY_TEXT})"
        if not ends:
            return self._terminal(text)
        written = [end for end in ends if self._literal(end) == lark.quoted(end)]
        options = []
        for before, rest in (self._before_token(end) for end in ends if end not in written):
            # What a mark has before its token belongs to the text's terminal, which would otherwise have taken it by the time the token comes.
            body = self._terminal(f"({text}) {lark.quoted(before)}" if before else text)
            options.append(f"{body} {self._literal(rest)}")
        if written:
            # Lazy: it ends with the first mark. Special tokens are no text, so none is needed before those.
            body = self._terminal(f"({text}) ({' | '.join(map(lark.quoted, written))})")
            self.definitions.append(f"lazy_{len(self.definitions)}[lazy]: {body}")
            options.append(f"lazy_{len(self.definitions) - 1}")
        return self._any_of(options)

    def _before_token(self, end: str) -> tuple[str, str]:
        """A mark before its first special token, and from there on."""
        places = [found for name in self._special_tokens if (found := end.find(name)) >= 0]
        at = min(places, default=len(end))
        return end[:at], end[at:]

    def _then(self, expression: str, ends: Sequence[str]) -> str:
        return f"{expression} {self._any_of([self._literal(end) for end in ends])}" if ends else expression

    def _literal(self, text: str) -> str:
        return lark.literal(text, self._special_tokens)

    def _any_of(self, options: Sequence[str]) -> str:
        return options[0] if len(options) == 1 else f"({' | '.join(options)})"

    def _rule(self, body: str) -> str:
        self.definitions.append(f"rule_{len(self.definitions)}: {body}")
        return f"rule_{len(self.definitions) - 1}"

    def _terminal(self, body: str) -> str:
        self.definitions.append(f"TEXT_{len(self.definitions)}: {body}")
        return f"TEXT_{len(self.definitions) - 1}"

    def _not_empty(self, items: Sequence[_T], name: str) -> Sequence[_T]:
        if not items:
            raise self._refused(f"`{name}` needs at least one element")
        return items

    def _refused(self, reason: str) -> RequestError:
        return RequestError(f"the structural tag is not supported as it is: {reason}", self._field)


def _is_open(item: Format) -> bool:
    """Whether only what follows says where it ends."""
    match item:
        case AnyText():
            return True
        case TriggeredTags():
            return not (item.at_least_one and item.stop_after_first)
        case Elements():
            return bool(item.elements) and _is_open(item.elements[-1])
        case Or():
            return any(map(_is_open, item.elements))
        case Tag():
            return not item.ends and _is_open(item.content)
        case _:
            return False
