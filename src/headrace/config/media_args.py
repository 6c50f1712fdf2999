"""Options for media in prompts, taken apart: `MediaArgs`.

Owns the checks of --allowed-media-domains and --allowed-local-media-path. Looks up no names.
"""

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from headrace.config.server_options import ServerOptions
from headrace.config.web import split_authority
from headrace.errors import ConfigError
from headrace.media_kinds import DEFAULT_FILE_BYTES, FILE_KINDS, MediaKind

_BELOW = "*."
_NAME = re.compile(r"[a-z0-9_-]+(\.[a-z0-9_-]+)*")


@dataclass(frozen=True, slots=True)
class MediaDomains:
    """Hosts from which files may be fetched. names: (name, port), port None = the usual one of http and https; a name that begins with `*.` is every
    host below it. addresses: (address, port): what the operator names so may be fetched from although it is not public."""

    names: frozenset[tuple[str, int | None]] = frozenset()
    addresses: frozenset[tuple[str, int]] = frozenset()

    def allows_name(self, host: str, port: int, usual_port: int) -> bool:
        """Whether a host (lower case, without the root's dot) may be asked at this port. usual_port: of the URL's scheme."""
        ports = {port, None} if port == usual_port else {port}
        parts = host.split(".")
        above = (_BELOW + ".".join(parts[count:]) for count in range(1, len(parts)))
        return any((name, each) in self.names for name in (host, *above) for each in ports)


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaArgs:
    """Options for media. folder: files below it may be read, None = none. most: items of each kind in a prompt. max_bytes: of a file of each kind.
    max_patches: of an image, where its size decides. max_frames: of a video. cache_bytes: of prepared items that are kept. num_processes: that decode
    them."""

    domains: MediaDomains = MediaDomains()
    folder: Path | None = None
    most: Mapping[MediaKind, int] = field(default_factory=lambda: {kind: kind.default_limit for kind in MediaKind})
    max_bytes: Mapping[MediaKind, int] = field(default_factory=lambda: dict.fromkeys(FILE_KINDS, DEFAULT_FILE_BYTES))
    max_patches: int = 4096
    max_frames: int = 64
    cache_bytes: int = 256 << 20
    num_processes: int = 1


def media_args(args: ServerOptions) -> MediaArgs:
    """Those of a server's options. Raises ConfigError."""
    return MediaArgs(
        domains=parse_media_domains(args.allowed_media_domains),
        folder=parse_media_folder(args.allowed_local_media_path),
        most={kind: kind.limit_of(args) for kind in MediaKind},
        max_bytes={kind: kind.max_bytes_of(args) for kind in FILE_KINDS},
        max_frames=args.max_video_frames,
        max_patches=args.max_image_patches,
        cache_bytes=args.image_cache_bytes,
        num_processes=args.image_processes,
    )


def unsupported_by_options(args: ServerOptions, pools: bool) -> str:
    """Why a model with media support has none with these options, or "". pools: it is an embedding model."""
    if pools:
        return "it makes embeddings of text only"
    if args.num_ranks > 1:
        return "it is split over several ranks, and images, audio and videos need --tp-size 1 and --pp-size 1"
    if args.model_impl == "transformers":
        return "it runs transformers' code (--model-impl transformers)"
    if args.skip_tokenizer_init:
        return "it has no tokenizer (--skip-tokenizer-init)"
    return ""


def parse_media_domains(text: str) -> MediaDomains:
    """The hosts of --allowed-media-domains. Raises ConfigError."""
    names: set[tuple[str, int | None]] = set()
    addresses: set[tuple[str, int]] = set()
    for item in filter(None, (item.strip() for item in text.split(","))):
        below = _BELOW if item.startswith(_BELOW) else ""
        split = split_authority(item.removeprefix(below))
        if split is None:
            raise _wrong(item)
        host, port = split
        address = _address(host)
        if address is None:
            if not _NAME.fullmatch(host) or host.rpartition(".")[2].isdigit():
                raise _wrong(item)
            names.add((below + host, port))
        elif below or port is None:
            raise _wrong(item)
        else:
            addresses.add((str(address), port))
    return MediaDomains(frozenset(names), frozenset(addresses))


def parse_media_folder(text: str | None) -> Path | None:
    """The folder of --allowed-local-media-path, without links in its path. Raises ConfigError."""
    if text is None:
        return None
    folder = Path(text).expanduser()
    if not folder.is_dir():
        raise ConfigError(f"--allowed-local-media-path: {text!r:.200} is not a folder")
    return folder.resolve()


def _wrong(item: str) -> ConfigError:
    return ConfigError(
        f"--allowed-media-domains takes hosts such as images.example, *.example.com or 10.0.0.5:8000, comma-separated; got {item!r:.80}"
    )


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None
