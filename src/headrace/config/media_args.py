"""Options of models that see, taken apart: `MediaArgs`.

Owns the checks of --allowed-media-domains and --allowed-local-media-path. Pure text, apart from looking whether a folder is there.
"""

import ipaddress
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.config.web import split_authority
from headrace.errors import ConfigError

if TYPE_CHECKING:
    from headrace.config.server_args import ServerArgs


@dataclass(frozen=True, slots=True, kw_only=True)
class MediaArgs:
    """Options of models that see. allowed_domains: hosts whose images may be fetched. allowed_addresses: (address, port) of those that are named by
    address and port. allowed_folder: images below it may be read, None = none. max_image_bytes: of a file. max_patches: of an image, where its
    size decides. cache_bytes: of prepared images that are kept."""

    allowed_domains: frozenset[str] = frozenset()
    allowed_addresses: frozenset[tuple[str, int]] = frozenset()
    allowed_folder: Path | None = None
    max_images: int = 8
    max_image_bytes: int = 20 << 20
    max_patches: int = 4096
    cache_bytes: int = 256 << 20
    num_processes: int = 1


def media_args(args: "ServerArgs") -> MediaArgs:
    """Those of a server's options. Raises ConfigError."""
    domains, addresses = parse_media_domains(args.allowed_media_domains)
    return MediaArgs(
        allowed_domains=domains,
        allowed_addresses=addresses,
        allowed_folder=parse_media_folder(args.allowed_local_media_path),
        max_images=args.max_images,
        max_image_bytes=args.max_image_bytes,
        max_patches=args.max_image_patches,
        cache_bytes=args.image_cache_bytes,
        num_processes=args.image_processes,
    )


def parse_media_domains(text: str) -> tuple[frozenset[str], frozenset[tuple[str, int]]]:
    """Names of hosts, and (address, port) of those that are given by address. Raises ConfigError."""
    domains: set[str] = set()
    addresses: set[tuple[str, int]] = set()
    for item in filter(None, (item.strip() for item in text.split(","))):
        split = split_authority(item)
        if split is None:
            raise ConfigError(
                f"--allowed-media-domains takes names of hosts such as images.example, or an address with a port, comma-separated; got {item!r:.80}"
            )
        host, port = split
        address = _address(host)
        if (address is None) != (port is None):
            what = "a name without a port" if address is None else "an address with its port"
            raise ConfigError(f"--allowed-media-domains takes {what}; got {item!r:.80}")
        if port is None:
            domains.add(host)
        else:
            addresses.add((str(address), port))
    return frozenset(domains), frozenset(addresses)


def parse_media_folder(text: str | None) -> Path | None:
    """The folder, without links in its path. Raises ConfigError."""
    if text is None:
        return None
    folder = Path(text).expanduser()
    if not folder.is_dir():
        raise ConfigError(f"--allowed-local-media-path: {text!r:.200} is not a folder")
    return folder.resolve()


def _address(host: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    try:
        return ipaddress.ip_address(host)
    except ValueError:
        return None
