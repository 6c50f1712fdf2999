"""Options that name hosts, taken apart: whose pages may call a server and by what names (`--allow-origins`, `--allowed-hosts`), media in prompts,
with the hosts that they may be fetched from (`MediaArgs`), and prefill servers that requests may name (`PrefillHosts`).

Pure text but for a folder that must be there: no sockets, and no names are looked up. Used when the options are checked, by `server.origin_gate`,
`multimodal` and `frontend.rooms`.
"""

import ipaddress
import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

from headrace.config.server_options import ServerOptions
from headrace.errors import ConfigError
from headrace.media_kinds import DEFAULT_FILE_BYTES, FILE_KINDS, MediaKind

ANY = "*"
OPAQUE = "null"
"""The origin of a sandboxed frame or a local file, as browsers send it."""

_AUTHORITY = re.compile(r"(\[[0-9a-f:.]+\]|[a-z0-9._-]+)(?::([0-9]{1,5}))?")
_DEFAULT_PORTS = {"http": 80, "https": 443}
_ANY_PORT = re.compile(r"(https?)://(\[[0-9a-f:.]+\]|[a-z0-9._-]+):\*")
_SCHEME = re.compile(r"([a-z][a-z0-9+.-]*)://\*")
_APP_AUTHORITY = re.compile(r"[a-z0-9._~-]*(:[0-9]{1,5})?")

LOCAL_APPS = "local-apps"
_LOCAL_APPS = (
    *(f"{scheme}://{host}:*" for scheme in _DEFAULT_PORTS for host in ("localhost", "127.0.0.1", "0.0.0.0", "[::1]", "tauri.localhost")),
    *(f"{scheme}://*" for scheme in ("app", "chrome-extension", "moz-extension", "safari-web-extension", "tauri", "vscode-webview")),
    "file://",
    "vscode-file://vscode-app",
)  # fmt: skip
"""Who runs on this machine and not on a web site: pages of any port of it, desktop applications (Tauri's on Windows are tauri.localhost), editors,
extensions of browsers."""

_BELOW = "*."
_NAME = re.compile(r"[a-z0-9_-]+(\.[a-z0-9_-]+)*")
_OWN_NETWORKS = tuple(
    map(ipaddress.ip_network, ("127.0.0.0/8", "::1", "10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16", "fc00::/7"))
)


Networks = tuple[ipaddress.IPv4Network | ipaddress.IPv6Network, ...]


def split_authority(text: str) -> tuple[str, int | None] | None:
    """Host (lower case, without brackets and the root's dot) and port of `host[:port]`; None for anything else."""
    found = _AUTHORITY.fullmatch(text.strip().lower())
    if found is None:
        return None
    host = found[1].strip("[]").removesuffix(".")
    return (host, int(found[2]) if found[2] else None) if host else None


def address_of(text: str) -> ipaddress.IPv4Address | ipaddress.IPv6Address | None:
    """An IP address without brackets; None for anything else."""
    try:
        return ipaddress.ip_address(text)
    except ValueError:
        return None


def is_origin(text: str) -> bool:
    scheme, _, authority = text.partition("://")
    return _SCHEME.fullmatch(f"{scheme}://*") is not None and split_authority(authority) is not None


def is_same_origin(origin: str, host: str) -> bool:
    """Whether `origin` is that of pages served under the Host header `host`. A proxy may have taken TLS off: schemes are not compared."""
    scheme, _, authority = origin.strip().lower().partition("://")
    page, own = split_authority(authority), split_authority(host)
    if page is None or own is None:
        return False
    implied = _DEFAULT_PORTS.get(scheme)
    return (page[0], page[1] or implied) == (own[0], own[1] or implied)


def normal_origin(origin: str) -> str:
    """`origin` in lower case and without the port that its scheme implies, as browsers write it."""
    text = origin.strip().lower()
    scheme, found, _ = text.partition("://")
    return text.removesuffix(f":{_DEFAULT_PORTS[scheme]}") if found and scheme in _DEFAULT_PORTS else text


@dataclass(frozen=True, slots=True)
class Origins:
    """Those of `--allow-origins`. listed: as `normal_origin` writes them. hosts: (scheme, host) with any port. schemes: with any host."""

    is_any: bool = False
    listed: frozenset[str] = frozenset()
    hosts: frozenset[tuple[str, str]] = frozenset()
    schemes: frozenset[str] = frozenset()

    def __bool__(self) -> bool:
        return self.is_any or bool(self.listed or self.hosts or self.schemes)

    def allows(self, origin: str) -> bool:
        """Whether pages of `origin`, an Origin header, may use the server. Nothing that is no whole origin matches a pattern."""
        text = normal_origin(origin)
        if self.is_any or text in self.listed:
            return True
        scheme, found, authority = text.partition("://")
        if scheme in self.schemes:
            return bool(found) and _APP_AUTHORITY.fullmatch(authority) is not None
        split = _AUTHORITY.fullmatch(authority) if found else None
        return split is not None and (scheme, split[1]) in self.hosts


def parse_origins(text: str) -> Origins:
    """`--allow-origins`. Raises ConfigError."""
    items = {normal_origin(item) for item in text.split(",") if item.strip()}
    if ANY in items:
        return Origins(is_any=True)
    if LOCAL_APPS in items:
        items = {*items, *_LOCAL_APPS} - {LOCAL_APPS}
    listed, hosts, schemes = set(), set(), set()
    for item in items:
        if (port := _ANY_PORT.fullmatch(item)) is not None:
            hosts.add((port[1], port[2]))
        elif (scheme := _SCHEME.fullmatch(item)) is not None and scheme[1] not in _DEFAULT_PORTS:
            schemes.add(scheme[1])
        elif item in (OPAQUE, "file://") or is_origin(item):
            listed.add(item)
        else:
            raise ConfigError(
                f"--allow-origins takes origins such as https://chat.example (no path, no slash at the end), http://localhost:* (any port), "
                f"app://* (any, but not of http and https), file://, {LOCAL_APPS}, comma-separated, or *; got {item!r:.80}"
            )
    return Origins(listed=frozenset(listed), hosts=frozenset(hosts), schemes=frozenset(schemes))


def parse_hosts(text: str) -> frozenset[str]:
    """The names of `--allowed-hosts`; {"*"} = any. Raises ConfigError."""
    items = [item.strip() for item in text.split(",") if item.strip()]
    if ANY in items:
        return frozenset({ANY})
    hosts = set()
    for item in items:
        # An IPv6 address may come without the brackets that a Host header needs.
        split = split_authority(f"[{item}]" if item.count(":") > 1 and not item.startswith("[") else item)
        if split is None or split[1] is not None:
            raise ConfigError(
                f"--allowed-hosts takes names and addresses without a port, comma-separated, or *; got {item!r:.80}"
            )
        hosts.add(split[0])
    return frozenset(hosts)


@dataclass(frozen=True, slots=True)
class PrefillHosts:
    """Those of `--disaggregation-prefill-hosts`. names: in lower case, at any address; {"*"} = any host. networks: with any host in them."""

    names: frozenset[str] = frozenset()
    networks: Networks = _OWN_NETWORKS

    def allows(self, host: str, address: str) -> bool:
        """Whether to connect to an address that a host has. Not to a link-local one by default: clouds answer there about themselves."""
        found = address_of(address)
        found = getattr(found, "ipv4_mapped", None) or found
        is_named = not self.names.isdisjoint((ANY, host.lower()))
        return is_named or (found is not None and any(found in network for network in self.networks))


def parse_prefill_hosts(text: str | None) -> PrefillHosts:
    """Raises ConfigError."""
    if text is None:
        return PrefillHosts()
    names, networks = set(), []
    for item in filter(None, (item.strip().lower() for item in text.split(","))):
        try:
            networks.append(ipaddress.ip_network(item))
        except ValueError as error:
            if item != ANY and (not _NAME.fullmatch(item) or item.rpartition(".")[2].isdigit()):
                raise ConfigError(
                    f"--disaggregation-prefill-hosts takes names, addresses and networks such as 10.0.0.0/8, comma-separated, or *: {error}"
                ) from None
            names.add(item)
    return PrefillHosts(frozenset(names), tuple(networks))


def parse_proxies(text: str | None) -> Networks:
    """`--trusted-proxies`. Raises ConfigError."""
    try:
        return tuple(ipaddress.ip_network(item.strip()) for item in (text or "").split(",") if item.strip())
    except ValueError as error:
        raise ConfigError(
            f"--trusted-proxies takes addresses and networks such as 10.0.0.0/8, comma-separated: {error}"
        ) from None


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
        address = address_of(host)
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
