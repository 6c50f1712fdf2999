"""Files and JSON that are given to commands: a JSON schema, a list of tools, images and audio.

Owns which files are sent, and how media of a message are shown. Runs in the main process, before a model is loaded: what cannot be used is refused at
once. The commands read files themselves, so the server needs no permission to.
"""

import json
from base64 import b64encode
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from headrace.checkpoint.files import open_regular
from headrace.errors import ConfigError, ModelError, RequestError
from headrace.media_kinds import DEFAULT_FILE_BYTES, PARTS, MediaKind
from headrace.sampling.grammar_fields import GrammarFields


def read_schema(given: str) -> str:
    """The schema as JSON. given: its JSON (an object, `true` or `false`), else the path of a file.

    Raises ConfigError for a file that cannot be read and for JSON that is no schema. Whether it can be followed is found out when it is used.
    """
    is_json = given.lstrip().startswith("{") or given in ("true", "false")
    source = "the schema" if is_json else given
    try:
        text = given if is_json else Path(given).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        reason = error.strerror if isinstance(error, OSError) else "it is not UTF-8"
        raise ConfigError(f"the schema {given} cannot be read: {reason}") from None
    try:
        spec = GrammarFields(json_schema=text).grammar_spec()
    except RequestError as error:
        raise ConfigError(error.message.replace("json_schema", source, 1)) from None
    if spec is None:
        raise ConfigError(f"{source} is empty")
    return spec.text


def read_tools(given: str) -> list[dict[str, Any]]:
    """The tools as OpenAI's API takes them. given: their JSON, a list, else the path of a file.

    A tool is `{"type": "function", "function": {"name", "description", "parameters"}}`, or its `function` alone. Raises ConfigError.
    """
    from headrace.server.openai.chat_request import tools_of

    is_json = given.lstrip().startswith("[")
    source = "the list of tools" if is_json else given
    try:
        listed = json.loads(given if is_json else Path(given).read_text(encoding="utf-8"))
    except OSError as error:
        raise ConfigError(f"the tools in {given} cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{source} is not valid JSON: {error}") from None
    if not isinstance(listed, list) or not listed or not all(isinstance(tool, dict) for tool in listed):
        raise ConfigError(f"{source} must be a list of tools, each an object with a name and parameters")
    tools = [tool if "function" in tool else {"type": "function", "function": tool} for tool in listed]
    try:
        tools_of(tools)
    except RequestError as error:
        raise ConfigError(f"{source}: {error.message}") from None
    return tools


_STARTS = {
    MediaKind.IMAGE: ((b"\x89PNG\r\n\x1a\n", "png"), (b"\xff\xd8\xff", "jpeg"), (b"GIF8", "gif"), (b"BM", "bmp")),
    MediaKind.AUDIO: ((b"fLaC", "flac"), (b"OggS", "ogg"), (b"ID3", "mp3")),
}
"""How files of a format begin."""

_RIFF = {MediaKind.IMAGE: (b"WEBP", "webp"), MediaKind.AUDIO: (b"WAVE", "wav")}


def read_part(kind: MediaKind, path: Path) -> dict[str, Any]:
    """A file as a part of a message. Raises ConfigError for one that cannot be read, is too large or is of another kind."""
    data = file_bytes(kind, path)
    name, coded = _format_of(kind, data), b64encode(data).decode()
    if kind is MediaKind.AUDIO:
        return {"type": "input_audio", "input_audio": {"data": coded, "format": name}}
    part = kind.parts[0]
    return {"type": part, part: {"url": f"data:{kind}/{name};base64,{coded}"}}


def file_bytes(kind: MediaKind, path: Path) -> bytes:
    """The bytes of a file. Raises ConfigError as `read_part` does."""
    try:
        with open_regular(path) as file:
            data = file.read(DEFAULT_FILE_BYTES + 1)
    except OSError as error:
        raise ConfigError(f"the {kind} file {path} cannot be read: {error.strerror}") from None
    except ModelError as error:
        raise ConfigError(f"the {kind} file {path} cannot be read: {error.message}") from None
    # A server takes no larger one unless it is started with --max-image-bytes or --max-audio-bytes.
    if len(data) > DEFAULT_FILE_BYTES:
        raise ConfigError(f"the {kind} file {path} is larger than {DEFAULT_FILE_BYTES} bytes")
    if _format_of(kind, data) is None:
        formats = [name.upper() for name in kind.formats if name != "opus"]
        raise ConfigError(f"{path} is not an {kind} file: {', '.join(formats[:-1])} and {formats[-1]} can be sent")
    return data


def shown(content: str | list[dict[str, Any]] | None) -> str:
    """The content of a message as text, with a word for each item."""
    if not isinstance(content, list):
        return content or ""
    return "\n".join(part["text"] if part["type"] == "text" else f"[{PARTS[part['type']]}]" for part in content)


def number_of(parts: Sequence[dict[str, Any]]) -> str:
    """E.g. "1 image and 2 audio clips"; "" of no parts."""
    kinds = [PARTS[part["type"]] for part in parts]
    return " and ".join(kind.amount(kinds.count(kind)) for kind in MediaKind if kind in kinds)


def _format_of(kind: MediaKind, data: bytes) -> str | None:
    mark, name = _RIFF[kind]
    if data[:4] + data[8:12] == b"RIFF" + mark:
        return name
    # The header of a frame of layer III. A text in UTF-16 begins with its first 11 bits, too.
    is_frame = len(data) > 1 and data[0] == 0xFF and data[1] & 0xE6 == 0xE2 and data[1] & 0x18 != 0x08
    if kind is MediaKind.AUDIO and is_frame:
        return "mp3"
    return next((name for start, name in _STARTS[kind] if data.startswith(start)), None)
