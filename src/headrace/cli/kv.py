"""`headrace cache kv`: KV that is kept, in a folder (--kv-cache-dir) or by a running server. Only a server pins."""

import datetime
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.filesize import decimal
from rich.table import Column, Table

from headrace.api.native_client import NativeClient
from headrace.benchmark.tables import print_table
from headrace.cache.page_files import files_below
from headrace.errors import ConfigError


def is_address(target: str) -> bool:
    return target.startswith(("http://", "https://"))


def run_list(target: str, api_key: str | None, console: Console) -> None:
    if is_address(target):
        _show(NativeClient(target, api_key).get("/v1/cache"), console)
        return
    groups: dict[str, list[tuple[int, float]]] = {}
    for path, size, used_s in files_below(_folder(target)):
        groups.setdefault(path.relative_to(target).parts[0], []).append((size, used_s))
    table = Table("weights", Column("files", justify="right"), Column("size", justify="right"), "last used")
    for name, files in sorted(groups.items(), key=lambda group: -max(used_s for _, used_s in group[1])):
        used = datetime.datetime.fromtimestamp(max(used_s for _, used_s in files)).strftime("%Y-%m-%d %H:%M")
        table.add_row(name[:12], str(len(files)), decimal(sum(size for size, _ in files)), used)
    if groups:
        print_table(console, table)
    num_bytes = sum(size for files in groups.values() for size, _ in files)
    console.print(f"{decimal(num_bytes)} in {target}", highlight=False, soft_wrap=True)


def run_pin(url: str, prompt: str, ttl: float, api_key: str | None, console: Console) -> None:
    if not is_address(url):
        raise ConfigError("a prompt is pinned by a running server: give its address, such as http://127.0.0.1:30000")
    made = NativeClient(url, api_key).ask("/v1/cache/pin", prompt=prompt, ttl=ttl)
    until = datetime.datetime.fromtimestamp(made["expires_at"]).strftime("%Y-%m-%d %H:%M:%S")
    console.print(f"{made['id']}: {made['tokens']} tokens until {until}", highlight=False)


def run_clear(target: str, api_key: str | None, console: Console) -> None:
    if is_address(target):
        done = NativeClient(target, api_key).ask("/flush_cache")
        console.print(str(done["message"]), highlight=False)
        return
    num_bytes = 0
    for path, size, _ in list(files_below(_folder(target))):
        path.unlink(missing_ok=True)
        num_bytes += size
    console.print(f"freed {decimal(num_bytes)}", highlight=False)


def _folder(target: str) -> Path:
    folder = Path(target)
    if not folder.is_dir():
        raise ConfigError(f"there is no folder {target!r:.200}; an address begins with http://")
    return folder


def _show(cached: dict[str, Any], console: Console) -> None:
    memory, disk = cached["memory"], cached["disk"]
    console.print(
        f"memory: {memory['tokens']} of {memory['limit_tokens']} tokens, pinned {memory['pinned_tokens']} of at most "
        f"{memory['pin_limit_tokens']}",
        highlight=False,
    )
    if disk is not None:
        used = f"{decimal(disk['bytes'])} of " if "bytes" in disk else ""
        console.print(f"disk: {used}{decimal(disk['limit_bytes'])}", highlight=False)
    table = Table("pin", Column("tokens", justify="right"), Column("ends in", justify="right"))
    for pin in cached["pins"]:
        table.add_row(pin["id"], str(pin["tokens"]), f"{max(0, round(pin['expires_at'] - time.time()))} s")
    if cached["pins"]:
        print_table(console, table)
