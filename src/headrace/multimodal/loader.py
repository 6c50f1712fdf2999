"""Loads the images of prompts: from `ImageRef` to items for the model's encoder and their tokens.

Owns `MediaLoader`, the cache of prepared images, and how many images are fetched and decoded at a time. Does not own the steps: `sources` and
`fetch` get the bytes, children (`media_pool`) decode and prepare them, `families` says what stands for them. Runs in the main process's event
loop; what takes time is done by threads and children.

A request's images wait for a place beside those of others, and take few places at a time, so that a request with many images does not hold up one
with a single image. Work for a request that has gone is cancelled, unless another one waits for the same image.
"""

import asyncio
import hashlib
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from dataclasses import dataclass
from pathlib import Path

from headrace.checkpoint.image_processors import ImageSettings, read_image_settings
from headrace.checkpoint.json_file import read_json_object
from headrace.checkpoint.media_config import read_media
from headrace.config.media_args import MediaArgs
from headrace.errors import ExecutionError, ModelError, RequestError
from headrace.messages.image_stats import ImageStats
from headrace.messages.media import KEY_BYTES, ImageRef, MediaInfo, MediaItem
from headrace.multimodal.families import Family, Vocabulary, make_family
from headrace.multimodal.fetch import Fetcher
from headrace.multimodal.layout import TokenLayout
from headrace.multimodal.media_pool import MediaPool
from headrace.multimodal.prepared_cache import Flights, PreparedCache, RecentRefusals
from headrace.multimodal.refused import MediaRefusedError
from headrace.multimodal.resolutions import bounded
from headrace.multimodal.sources import file_bytes, form_of, inline_bytes

FIELD = "image_data"

_AT_A_TIME = 4
"""Images of one request that are fetched or decoded at a time."""

_FILES = 8
"""Files that have been read and are yet to be prepared, at a time."""

_THREADS = 2
"""That decode base64 and hash files."""


@dataclass(frozen=True, slots=True)
class Loaded:
    """An image that is ready for the encoder, and its tokens."""

    item: MediaItem
    layout: TokenLayout


class MediaLoader:
    """See the module docstring, and `frontend.images.ImageLoader`. `close` ends the children; nothing is loaded afterwards."""

    def __init__(self, family: Family, settings: ImageSettings, args: MediaArgs) -> None:
        self._family = family
        self._args = args
        # Images of one size take the same tokens, however closely they are looked at.
        self._has_low = settings.recipe != "fixed"
        # LLaVA-OneVision was trained with tiles of an image that is the only one of its prompt.
        self._several_are_low = family.info.family == "llava_onevision"
        self._pool = MediaPool(settings, args.num_processes)
        self._pool_threads = ThreadPoolExecutor(args.num_processes, "images")
        self._threads = ThreadPoolExecutor(_THREADS, "image-bytes")
        # A file system that does not answer holds these only.
        self._file_threads = ThreadPoolExecutor(_FILES, "image-files")
        self._fetcher = Fetcher(args)
        self._files = asyncio.Semaphore(_FILES)
        self._cache: PreparedCache[Loaded] = PreparedCache(args.cache_bytes, _num_bytes)
        self._flights: Flights[Loaded] = Flights()
        self._costly = RecentRefusals()
        self._num_loaded = self._num_hits = 0
        self._fetch_s = self._decode_s = 0.0
        self._refused: Counter[str] = Counter()
        self._closed = False

    @property
    def info(self) -> MediaInfo:
        """What clients need to know of the model."""
        return self._family.info

    @property
    def image_token_id(self) -> int:
        """The token that stands for an image in a prompt."""
        return self._family.image_token_id

    @property
    def max_images(self) -> int:
        """Most images in a prompt."""
        return self._args.max_images

    def stats(self) -> ImageStats:
        """What has been done so far."""
        return ImageStats(
            num_loaded=self._num_loaded,
            num_cache_hits=self._num_hits,
            num_refused=dict(self._refused),
            fetch_s=self._fetch_s,
            decode_s=self._decode_s,
            num_cached=len(self._cache),
            cache_bytes=self._cache.num_bytes,
            num_killed=self._pool.num_killed,
        )

    async def load(self, refs: Sequence[ImageRef], owner: str = "") -> list[Loaded]:
        """Fetch, decode and prepare images. Raises RequestError, which tells which of them is wrong, and ExecutionError.

        owner: only those with the same one share what is kept, so that nobody learns by the time what others sent.
        """
        places = asyncio.Semaphore(_AT_A_TIME)
        several = len(refs) > 1
        tasks = [asyncio.create_task(self._load_one(ref, several, places, owner)) for ref in refs]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            for number, task in enumerate(tasks):
                if task.done() and (error := task.exception()) is not None:
                    raise self._told(error, number) from None
            return [task.result() for task in tasks]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def append(self, tokens: list[int], more: Sequence[int]) -> int:
        """See `frontend.images.ImageLoader`."""
        return self._family.joints.append(tokens, more)

    def close(self) -> None:
        """End the children. What is being loaded fails."""
        self._closed = True
        self._pool.close()
        self._fetcher.close()
        for threads in (self._pool_threads, self._threads, self._file_threads):
            threads.shutdown(wait=False, cancel_futures=True)

    async def _load_one(self, ref: ImageRef, several: bool, places: asyncio.Semaphore, owner: str) -> Loaded:
        """several: it is one of several images of a prompt."""
        low = (ref.detail == "low" and self._has_low) or (ref.detail == "auto" and several and self._several_are_low)
        async with places, self._bytes(ref) as data:
            key = await asyncio.get_running_loop().run_in_executor(self._threads, _content_key, data, low, owner)
            loaded = self._cache.get(key)
            if loaded is not None or key in self._flights:
                self._num_hits += 1
            if loaded is None:
                loaded = await self._flights.share(key, lambda: self._prepare(key, data, low, owner))
            self._num_loaded += 1
            return loaded

    @asynccontextmanager
    async def _bytes(self, ref: ImageRef) -> AsyncIterator[bytes]:
        """The bytes of an image. How many there are at a time is bounded, but for those that are in requests."""
        form, most = form_of(ref), self._args.max_image_bytes
        loop = asyncio.get_running_loop()
        if form == "inline":
            yield await loop.run_in_executor(self._threads, inline_bytes, ref, most)
        elif form == "file":
            async with self._files:
                yield await loop.run_in_executor(self._file_threads, file_bytes, ref.url, self._args.folder, most)
        else:
            begun_s = time.perf_counter()
            async with self._fetcher.fetched(ref.url) as data:
                self._fetch_s += time.perf_counter() - begun_s
                yield data

    async def _prepare(self, key: bytes, data: bytes, low: bool, owner: str) -> Loaded:
        begun_s = time.perf_counter()
        self._costly.check(key)
        try:
            loop = asyncio.get_running_loop()
            done = await loop.run_in_executor(self._pool_threads, self._pool.prepare, data, low)
        except MediaRefusedError as error:
            if error.kind in ("time", "memory"):
                self._costly.add(key, error)
            raise
        except asyncio.CancelledError:
            if self._closed:
                raise ExecutionError("the server is stopping") from None
            raise
        finally:
            self._decode_s += time.perf_counter() - begun_s
        layout = self._family.layout(done.shape, done.grid)
        item = MediaItem(
            _owned(done.key, owner, KEY_BYTES) if owner else done.key,
            layout.num_rows,
            done.values,
            done.shape,
            grid=done.grid,
        )
        loaded = Loaded(item, layout)
        self._cache.put(key, loaded)
        return loaded

    def _told(self, error: BaseException, number: int) -> BaseException:
        """What the client is told of an error."""
        if not isinstance(error, MediaRefusedError):
            return error
        self._refused[error.kind] += 1
        return RequestError(f"{FIELD}[{number}]: {error.message}", FIELD, "invalid_image")


def make_loader(folder: Path, model_type: str, tokenizer: Vocabulary, args: MediaArgs) -> MediaLoader:
    """The loader of a checkpoint. model_type: at the top of its config.json. Raises ModelError, with the reason why its images are not served."""
    config = read_json_object(folder / "config.json")
    media, blind = read_media(config)
    if media is None:
        raise ModelError(blind or f"models of type {model_type!r:.80} do not see")
    family, settings = make_family(media, read_image_settings(folder, model_type), tokenizer, config)
    return MediaLoader(family, bounded(settings, args.max_patches), args)


def _content_key(data: bytes, low: bool, owner: str) -> bytes:
    key = hashlib.blake2b(data, digest_size=32, person=b"low" if low else b"").digest()
    return _owned(key, owner, 32)


def _owned(key: bytes, owner: str, num_bytes: int) -> bytes:
    """A key that differs for each owner."""
    return hashlib.blake2b(key + owner.encode(), digest_size=num_bytes).digest()


def _num_bytes(loaded: Loaded) -> int:
    return loaded.item.num_bytes + 64 * len(loaded.layout.tokens)
