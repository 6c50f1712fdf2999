"""What the loader of media has done since its start, for metrics."""

from collections.abc import Mapping

import msgspec

from headrace.messages.media import MediaKind


class MediaStats(msgspec.Struct, frozen=True):
    """num_loaded: items that were given to requests, by kind. num_cache_hits: those of them that had been prepared for another. num_refused: items
    that were refused, by the kind of the reason. fetch_s, decode_s: seconds in which files were fetched, and decoded and prepared, their waiting for
    a place included. num_cached, cache_bytes: prepared items that are kept. num_killed: processes that had to be ended.
    """

    num_loaded: Mapping[MediaKind, int] = {}
    num_cache_hits: int = 0
    num_refused: Mapping[str, int] = {}
    fetch_s: float = 0.0
    decode_s: float = 0.0
    num_cached: int = 0
    cache_bytes: int = 0
    num_killed: int = 0
