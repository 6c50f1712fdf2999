"""Opens and reads files that an operator or a client names: only regular ones, and with errors that contain nothing of the file.

A FIFO without a writer, a terminal or a socket in the place of a file would hold its reader for ever. Messages of the control routes reach clients,
and a client may name a path: an error must not be a way to read a file. No torch.
"""

import json
import math
import mmap
import os
import re
import stat
from collections.abc import Iterable
from pathlib import Path
from typing import Any, BinaryIO

from headrace.errors import ModelError

_KINDS = {
    stat.S_IFIFO: "a FIFO",
    stat.S_IFSOCK: "a socket",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFDIR: "a folder",
}

_WANTED = ("f16", "bf16", "f32")
_FLOATS = re.compile(r"(?:^|[-._])(f16|bf16|f32)(?:$|[-._])")
_PRECISION = re.compile(r"[-._](?:f16|bf16|f32|i?q[0-9]\w*)(?=$|[-._])")
_PART = re.compile(r"(.+)-[0-9]{5}-of-([0-9]{5})\.gguf")


def first_part(name: str) -> str:
    """The name of the first part of the GGUF file that has a part of this name; of another file its own."""
    return _PART.sub(r"\1-00001-of-\2.gguf", name)


def gguf_parts(name: str) -> list[str]:
    """The names of all parts of the GGUF file that has a part of this name, as llama-gguf-split gives them; of another file its own."""
    found = _PART.fullmatch(name)
    if found is None or int(found[2]) < 1:
        return [name]
    return [f"{found[1]}-{number:05}-of-{found[2]}.gguf" for number in range(1, int(found[2]) + 1)]


def without_part(stem: str) -> str:
    """The name of a GGUF file without its ending, less the number of a part."""
    return _PART.sub(r"\1", f"{stem}.gguf").removesuffix(".gguf")


def is_mmproj(name: str) -> bool:
    """Whether a file's name is that of the vision encoder beside a GGUF model."""
    return name.endswith(".gguf") and "mmproj" in name.lower()


def mmproj_rank(name: str) -> int:
    """How much the precision that a vision encoder's name states is wanted: 0 = the most, F16, which llama.cpp's users choose; then BF16, F32, and
    names that state none, or a quantised type."""
    found = _FLOATS.search(name.lower().removesuffix(".gguf"))
    return _WANTED.index(found[1]) if found else len(_WANTED)


def mmproj_stem(name: str) -> str:
    """The name without the precision that it states: the same for files of one model."""
    return _PRECISION.sub("", name.lower().removesuffix(".gguf"))


def best_mmprojs(names: Iterable[str]) -> list[str]:
    """Of vision encoders' files by name those to choose: of each model the one of the precision that is wanted most."""
    best: dict[str, str] = {}
    for name in sorted(names, key=lambda name: (mmproj_rank(name), name)):
        best.setdefault(mmproj_stem(name), name)
    return list(best.values())


def open_regular(path: Path) -> BinaryIO:
    """Open a regular file, or a link to one, for reading. Raises ModelError naming any other kind, OSError as `open` does."""
    # Opening a FIFO waits for its writer otherwise. What is opened is what is checked: the name may change hands.
    fd = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_NOCTTY | os.O_CLOEXEC)
    try:
        kind = stat.S_IFMT(os.fstat(fd).st_mode)
        if kind != stat.S_IFREG:
            raise ModelError(f"{path.name} is {_KINDS.get(kind, 'something else')}; only regular files are read")
        return os.fdopen(fd, "rb")
    except BaseException:
        os.close(fd)
        raise


def map_regular(path: Path, access: int) -> mmap.mmap:
    """A regular file, mapped. access: of `mmap`. Raises ModelError."""
    try:
        with open_regular(path) as file:
            return mmap.mmap(file.fileno(), 0, access=access)
    except ValueError:
        raise ModelError(f"{path.name} is empty") from None
    except OSError as err:
        raise ModelError(f"{path.name} cannot be opened: {err.strerror}") from err


_SPECIAL_FLOATS = {"Infinity": math.inf, "-Infinity": -math.inf, "NaN": math.nan}


def read_json_object(file: Path) -> dict[str, Any]:
    """The JSON object in `file`. Raises ModelError naming the file when it is absent, broken or not an object."""
    value = _read(file)
    if not isinstance(value, dict):
        raise ModelError(f"{file.name} holds a {type(value).__name__}, not a JSON object")
    return value


def read_json_if_there(file: Path) -> dict[str, Any]:
    """As `read_json_object`; {} when it is absent."""
    return read_json_object(file) if file.is_file() else {}


def read_json_list(file: Path) -> list[Any]:
    """The JSON array in `file`. Raises ModelError naming the file when it is absent, broken or not an array."""
    value = _read(file)
    if not isinstance(value, list):
        raise ModelError(f"{file.name} holds a {type(value).__name__}, not a JSON array")
    return value


def _read(file: Path) -> Any:
    try:
        with open_regular(file) as opened:
            return json.loads(opened.read(), object_hook=_special_float)
    except FileNotFoundError:
        raise ModelError(f"{file.name} is missing from {file.parent.name or file.parent}") from None
    except OSError as err:
        raise ModelError(f"{file.name} cannot be read: {err.strerror}") from err
    except (ValueError, RecursionError) as err:
        raise ModelError(f"{file.name} cannot be read as JSON: {json_fault(err)}") from err


def _special_float(fields: dict[str, Any]) -> Any:
    """transformers 5 writes infinity as {"__float__": "Infinity"}."""
    return _SPECIAL_FLOATS.get(fields["__float__"], fields) if fields.keys() == {"__float__"} else fields


def json_fault(error: ValueError | RecursionError) -> str:
    match error:
        case json.JSONDecodeError():
            return f"{error.msg.lower()} at line {error.lineno}, column {error.colno}"
        case UnicodeDecodeError():
            return f"it is not UTF-8 at byte {error.start}"
        case RecursionError():
            return "it is nested too deeply"
        case _:
            return "it holds a value that is out of range"
