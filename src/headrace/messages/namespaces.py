"""Namespaces of the prefix cache: strings that keep the KV of different owners, keys and adapters apart.

Owns how they are put together and read. "" is that of everybody, without an adapter.
"""

import json
from collections.abc import Callable
from dataclasses import dataclass


def of_request(extra_key: str | None, cache_salt: str | None) -> str:
    """Both keys as one string, unique for each pair; empty when neither is given."""
    return json.dumps([extra_key or "", cache_salt or ""]) if extra_key or cache_salt else ""


def of_api_key(key_name: str, namespace: str) -> str:
    """`namespace` within that of an API key."""
    return json.dumps(["key", key_name, namespace])


def of_adapter(namespace: str, lora_id: int, lora_name: str) -> str:
    """`namespace` within that of an adapter; lora_id 0 = the base model.

    Adapter numbers are never reused, so a reloaded adapter finds no old KV.
    """
    return json.dumps([namespace, lora_id, lora_name, ""]) if lora_id else namespace


@dataclass(frozen=True, slots=True)
class NamespaceParts:
    """What a namespace was put together from; None = it has no such part."""

    extra_key: str | None = None
    cache_salt: str | None = None
    key_name: str | None = None
    lora_id: int | None = None
    lora_name: str | None = None


def read(namespace: str) -> NamespaceParts:
    """The parts of a namespace that the functions above made."""
    lora_id = lora_name = key_name = extra_key = cache_salt = None
    # Four parts: an adapter's. Three: an API key's. Two: a request's.
    if namespace and len(parts := json.loads(namespace)) == 4:
        namespace, lora_id, lora_name, _ = parts
    if namespace and len(parts := json.loads(namespace)) == 3:
        _, key_name, namespace = parts
    if namespace:
        extra_key, cache_salt = (part or None for part in json.loads(namespace))
    return NamespaceParts(extra_key, cache_salt, key_name, lora_id, lora_name)


def lasting(namespace: str, content_of: Callable[[int], str]) -> str | None:
    """`namespace` as it is after a restart, too: an adapter is its content, not its number and its name. None: `content_of` does not know it."""
    if not namespace or len(parts := json.loads(namespace)) != 4:
        return namespace
    inner, lora_id, _, _ = parts
    content = content_of(lora_id)
    return json.dumps(["adapter", content, inner, "", ""]) if content else None


def owner_of(namespace: str) -> str | None:
    """The name of its API key, None without one."""
    try:
        return read(namespace).key_name
    except ValueError:  # not made here: nobody else's
        return namespace
