"""The files of the web pages, read once and compressed. Owns their types and entity tags; knows no routes."""

import gzip
import hashlib
from dataclasses import dataclass
from pathlib import Path

STATIC = Path(__file__).parent / "static"

_TYPES = {
    ".html": b"text/html; charset=utf-8",
    ".css": b"text/css; charset=utf-8",
    ".js": b"text/javascript; charset=utf-8",
    ".svg": b"image/svg+xml",
    ".json": b"application/json",
    ".LICENSE": b"text/plain; charset=utf-8",
}


@dataclass(frozen=True, slots=True)
class PageFile:
    """One file. etag: as in the header, with its quotes; the same for both forms of the body, hence weak."""

    content_type: bytes
    body: bytes
    compressed: bytes
    etag: bytes


def read_files(folder: Path = STATIC) -> dict[str, PageFile]:
    """Every file below `folder` by its path there, with `/` between the parts. Raises KeyError for a type that is not known."""
    return {path.relative_to(folder).as_posix(): _read(path) for path in sorted(folder.rglob("*")) if path.is_file()}


def _read(path: Path) -> PageFile:
    body = path.read_bytes()
    etag = b'W/"' + hashlib.sha256(body).hexdigest()[:32].encode() + b'"'
    return PageFile(_TYPES[path.suffix], body, gzip.compress(body, 9, mtime=0), etag)
