"""The blocks of a message: which types are read, and which are shown to the model as text.

Owns the types of blocks and the fields of each. Pure functions, run in the event loop that serves HTTP.
"""

from collections.abc import Mapping, Sequence

import msgspec

from headrace.errors import RequestError
from headrace.media_kinds import MediaKind
from headrace.messages.bodies import field_error, is_empty, without_neutral
from headrace.server.anthropic.protocol import Block
from headrace.server.chat.written_items import decoded_text, document, written_out

WRITTEN_OUT = frozenset(
    {
        "advisor_tool_result",
        "bash_code_execution_tool_result",
        "browser_state",
        "code_execution_tool_result",
        "compaction",
        "container_upload",
        "fallback",
        "mcp_tool_listing",
        "mcp_tool_result",
        "mcp_tool_use",
        "server_tool_use",
        "text_editor_code_execution_tool_result",
        "tool_addition",
        "tool_reference",
        "tool_removal",
        "tool_search_tool_result",
        "web_fetch_tool_result",
        "web_search_tool_result",
    }
)
"""Types of blocks that the vendor's servers make, in a conversation that was begun there: shown to the model as text."""

FIELDS_OF_TYPE = {
    "text": {"text", "citations"},
    "tool_use": {"id", "name", "input", "caller", "toolset_name"},
    "tool_result": {"tool_use_id", "content", "is_error", "toolset_name"},
    "thinking": {"thinking", "signature"},
    "redacted_thinking": {"data"},
    MediaKind.IMAGE: {"source"},
    "document": {"source", "title", "context", "citations"},
    "search_result": {"source", "title", "content", "citations"},
}
"""The fields of each supported type of block, beside those of all types."""

_OF_EVERY_TYPE = {"type", "cache_control"}


def read_blocks(where: str, given: Sequence[object]) -> tuple[list[str], list[Block]]:
    """The blocks of a content and the place of each; what is shown as text is a block of text. Raises RequestError that names the place."""
    places: list[str] = []
    blocks: list[Block] = []
    for number, one in enumerate(given):
        place = f"{where}[{number}]"
        read = _read(place, one)
        places += [place] * len(read)
        blocks += read
    return places, blocks


def _read(where: str, given: object) -> list[Block]:
    if not isinstance(given, dict):
        raise RequestError(f"{where} must be an object", where)
    if given.get("type") in WRITTEN_OUT:
        return [Block(type="text", text=written_out(where, given))]
    block = _decoded(where, given)
    check_block(where, block)
    match block.type:
        case "document":
            return _document(where, block)
        case "search_result":
            text = "\n".join(block_text(place, one) for place, one in _texts(f"{where}.content", block.content))
            return [Block(type="text", text=document("search_result", text, title=block.title, source=block.source))]
        case _:
            return [block]


def _decoded(where: str, given: Mapping[str, object]) -> Block:
    try:
        try:
            return msgspec.convert(given, Block)
        except msgspec.ValidationError:
            return msgspec.convert(without_neutral(given, Block), Block)
    except msgspec.ValidationError as error:
        found = field_error(str(error), Block)
        name = f"{where}.{found.param}" if found.param else where
        message = found.message.replace(found.param, name, 1) if found.param else f"{where}: {found.message}"
        raise RequestError(message, name, found.code) from None


def check_block(where: str, block: Block) -> None:
    """Raises RequestError for a block of another type, or with fields of another type."""
    known = FIELDS_OF_TYPE.get(block.type)
    if known is None:
        raise RequestError(
            f"{where}: blocks of type {block.type[:50]!r} are not supported yet",
            f"{where}.type",
            "unsupported_parameter",
        )
    for name in block.__struct_fields__:
        if name not in known and name not in _OF_EVERY_TYPE and not is_empty(getattr(block, name)):
            raise RequestError(f"{where}.{name} does not belong to a block of type {block.type}", f"{where}.{name}")


def block_text(where: str, block: Block) -> str:
    """The text of a block of text. Raises RequestError if it has none."""
    if block.text is None:
        raise RequestError(f"{where}.text is missing", f"{where}.text", "missing_field")
    return block.text


def _document(where: str, block: Block) -> list[Block]:
    """A document as text; its images, if it is made of blocks, follow it."""
    images: list[Block] = []
    match block.source:
        case {"type": "text", "data": str(text)}:
            pass
        case {"type": "base64", "data": str(data)} if (found := decoded_text(data)) is not None:
            text = found
        case {"type": "content", "content": str(text)}:
            pass
        case {"type": "content", "content": list(inner)}:
            places, blocks = read_blocks(f"{where}.source.content", inner)
            images = [one for one in blocks if one.type == MediaKind.IMAGE]
            text = "\n".join(
                block_text(place, one) for place, one in zip(places, blocks, strict=True) if one.type != MediaKind.IMAGE
            )
        case _:
            raise RequestError(
                f"{where}.source: of documents only their text is read here; send it as "
                '{"type": "text", "media_type": "text/plain", "data": ...}',
                f"{where}.source",
                "unsupported_parameter",
            )
    shown = document("document", text, title=block.title, context=block.context)
    return [Block(type="text", text=shown), *images]


def _texts(where: str, given: object) -> list[tuple[str, Block]]:
    if not isinstance(given, list):
        raise RequestError(f"{where} must be a list of blocks of text", where)
    places, blocks = read_blocks(where, given)
    return list(zip(places, blocks, strict=True))
