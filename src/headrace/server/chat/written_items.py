"""Parts of a conversation as text for the model: documents, and what a vendor's own tools did (searches, shells, programs) when its client sends
it back here.

Pure functions; any thread.
"""

import base64
import binascii
import json
from collections.abc import Mapping
from typing import Any

from headrace.errors import RequestError
from headrace.messages.bodies import is_empty

_OPAQUE = frozenset(
    {
        "cache_control",
        "caller",
        "call_id",
        "encrypted_content",
        "encrypted_index",
        "encrypted_stdout",
        "fingerprint",
        "id",
        "signature",
        "tool_use_id",
    }
)
"""Names of fields that say nothing to a model: ids, marks, and what only the vendor can read."""


def written_out(where: str, item: Mapping[str, Any], *hidden: str) -> str:
    """An item of any type as its fields in JSON, between marks with the type's name. hidden: more fields that are left out.

    Raises RequestError that names `where` if it is nested too deeply.
    """
    kind = item["type"]
    fields = {name: value for name, value in item.items() if name != "type" and name not in hidden}
    try:
        shown = json.dumps(_readable(fields), ensure_ascii=False)
    except RecursionError:
        raise RequestError(f"{where} is nested too deeply", where) from None
    return f"<{kind}>\n{shown}\n</{kind}>"


def _readable(value: Any) -> Any:
    """The value without opaque and empty fields, and without the content of files."""
    if isinstance(value, dict):
        is_file = value.get("type") == "base64"
        return {
            name: _readable(item)
            for name, item in value.items()
            if not (name in _OPAQUE or is_empty(item) or (is_file and name == "data"))
        }
    if isinstance(value, list):
        return [_readable(item) for item in value]
    if isinstance(value, str) and value.startswith("data:"):
        return value.partition(",")[0]
    return value


def document(kind: str, text: str, **about: object) -> str:
    """A text with what is known about it, between marks with the name of its kind."""
    lines = [f"{name}: {value}" for name, value in about.items() if isinstance(value, str) and value]
    return "\n".join([f"<{kind}>", *lines, text, f"</{kind}>"])


def file_text(name: object, data: object) -> str | None:
    """A file of a message as text. data: its data URL, or the base64 of it. None if it is no text in UTF-8."""
    if not isinstance(data, str) or not data:
        return None
    text = decoded_text(data.partition(",")[2] if data.startswith("data:") else data)
    return None if text is None else document("document", text, title=name)


def decoded_text(data: str) -> str | None:
    """The text whose base64 this is; None if it is not that of a text in UTF-8."""
    try:
        text = base64.b64decode(data, validate=True).decode()
    except (binascii.Error, UnicodeError, ValueError):
        return None
    return None if "\0" in text or text.startswith("%PDF-") else text
