"""Loads the media of prompts: from what clients give to items for the model's encoder and their tokens.

Runs in the main process's event loop; what takes time is done by threads (`sources`, `fetch`) and children (`media_child`), in which tenants take
turns (`headrace.turns`). Few items of a request wait for its tenant's turn at a time, so that a request with many images does not hold up one with a
single image. Work for a request that has gone is cancelled, unless another one waits for the same item; refusals of expensive items are remembered.
"""

import asyncio
import hashlib
import sys
import time
from collections import Counter
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Generic, TypeVar

from headrace.checkpoint.families import all_families
from headrace.checkpoint.files import read_json_object
from headrace.checkpoint.media_config import AudioConfig
from headrace.checkpoint.media_tokens import ItemFacts, Vocabulary
from headrace.checkpoint.model_config import read_audio, read_media
from headrace.checkpoint.preprocessor_config import (
    AudioSettings,
    image_settings,
    read_audio_settings,
    read_image_settings,
    read_video_settings,
    video_settings,
)
from headrace.checkpoint.projector import MediaFiles
from headrace.child_pool.child_side import MIB
from headrace.child_pool.pool import WAIT_LIMIT_S, ChildLateError, ChildLostError, ChildPool, worked_s
from headrace.config.web import MediaArgs
from headrace.errors import ExecutionError, ModelError, RequestError
from headrace.media_kinds import AudioRef, FileRef, ImageRef, MediaKind, MediaRef, VideoRef
from headrace.messages.media import KEY_BYTES, MediaItem, MediaStats
from headrace.multimodal.families import Family, LoadedItem, make_audio_family, make_family
from headrace.multimodal.fetch import Fetcher
from headrace.multimodal.limits import (
    CHILD_MEMORY_BYTES,
    FETCH_LIMIT_S,
    MAX_ITEM_BYTES,
    MAX_PIXELS,
    MAX_VIDEO_BYTES,
    PREPARE_LIMIT_S,
    VIDEO_LIMIT_S,
    MediaRefusedError,
    png_pixels,
)
from headrace.multimodal.media_messages import (
    VERDICTS,
    AudioJob,
    Done,
    ImageJob,
    MediaJob,
    MediaSettings,
    Refused,
    Setup,
    Verdict,
    VideoJob,
)
from headrace.multimodal.resolutions import bounded
from headrace.multimodal.sources import FileLimit, file_bytes, form_of, inline_bytes
from headrace.turns import Kept, Places, Turns, asking, is_large

T = TypeVar("T")


class RecentRefusals:
    """Refusals of files that took all that an item may take, so that sending one again and again does not hold up others. Each is remembered for a
    while only: that it took so much may have been another's doing."""

    def __init__(self, seconds: float = 60.0, max_refusals: int = 256) -> None:
        self._seconds = seconds
        self._refusals: Kept[bytes, tuple[float, MediaRefusedError]] = Kept(max_refusals)

    def check(self, key: bytes) -> None:
        if (found := self._refusals.get(key)) is None:
            return
        until_s, error = found
        if time.monotonic() < until_s:
            raise MediaRefusedError(error.message, error.kind)
        self._refusals.drop(key)

    def add(self, key: bytes, error: MediaRefusedError) -> None:
        self._refusals.put(key, (time.monotonic() + self._seconds, error), 1, asking().tenant)


@dataclass(slots=True)
class _Flight(Generic[T]):
    task: "asyncio.Task[T]"
    num_waiting: int = 0


class Flights(Generic[T]):
    """Work by key that is done once for all who wait for it. It is cancelled when nobody waits any more."""

    def __init__(self) -> None:
        self._flights: dict[bytes, _Flight[T]] = {}

    async def share(self, key: bytes, make: Callable[[], Coroutine[None, None, T]]) -> T:
        """What `make` gives, or what another call's that is in flight does. Raises as it does."""
        flight = self._flights.get(key)
        if flight is None:
            flight = _Flight(asyncio.get_running_loop().create_task(make()))
            # Whoever waits gets its error; if nobody does, it is not told either.
            flight.task.add_done_callback(lambda task: task.cancelled() or task.exception())
            self._flights[key] = flight
        flight.num_waiting += 1
        try:
            return await asyncio.shield(flight.task)
        finally:
            flight.num_waiting -= 1
            if not flight.num_waiting:
                if self._flights.get(key) is flight:
                    del self._flights[key]
                flight.task.cancel()  # of no effect if it is done

    def __contains__(self, key: bytes) -> bool:
        return key in self._flights


PROGRAM = (sys.executable, "-m", "headrace.multimodal.media_child")


class MediaPool(ChildPool[Verdict]):
    """Prepares media in children. limit_s: processor time for one item. memory_bytes: memory for one, beyond the child's own."""

    def __init__(
        self,
        settings: MediaSettings,
        num_children: int = 1,
        limit_s: float = PREPARE_LIMIT_S,
        memory_bytes: int = CHILD_MEMORY_BYTES,
        program: Sequence[str] = PROGRAM,
    ) -> None:
        super().__init__(
            "decode media",
            program,
            Setup(settings, memory_bytes),
            VERDICTS,
            num_children=num_children,
            limit_s=limit_s,
        )
        self._memory_bytes = memory_bytes

    def prepare(self, job: MediaJob) -> Done:
        """An item, ready for the encoder. Waits for a free child. Raises MediaRefusedError, or ExecutionError or CapacityError if it could not be
        tried."""
        decoding = f"decoding the {job.kind.one} takes"
        try:
            verdict = self.ask(job, is_large())
        except ChildLateError:
            raise MediaRefusedError(f"{decoding} longer than {self._limit_s:g} s", "time") from None
        except ChildLostError:
            raise MediaRefusedError(
                f"{decoding} more memory than the limit ({self._memory_bytes // MIB} MiB), or it is broken", "memory"
            ) from None
        if isinstance(verdict, Refused):
            raise MediaRefusedError(verdict.message, verdict.kind)
        return verdict


VIDEO_PATCHES = 4  # A video may have so many times the patches of an image
_AT_A_TIME = 4  # files of one request that are fetched or decoded at a time
_FILES = 10  # files that have been read and are yet to be prepared, at a time; eight of one tenant
# Videos whose frames are being fetched, or have been and are yet to be prepared, at a time; four of one tenant, five of two.
_VIDEOS = 6
_THREADS = 2  # that decode base64 and hash files
_SECONDS_PER_PIXEL = 2e-8  # of a PNG image; of other files, per byte


class MediaLoader:
    """See the module docstring. `close` ends the children; nothing is loaded afterwards.

    support: the media that the model supports. most: items of each kind in a prompt. max_frames: of a video. token_ids: of each kind that the model
    takes, the token that stands for an item in a prompt.
    """

    def __init__(self, family: Family, settings: MediaSettings, args: MediaArgs) -> None:
        self._family = family
        self._args = args
        self.support, self.most, self.max_frames = family.support, args.most, args.max_frames
        self.token_ids = {kind: own.token_id for kind, own in family.kinds.items()}
        self._limits = {kind: FileLimit(most, kind.max_bytes_option) for kind, most in args.max_bytes.items()}
        # Images of one size take the same tokens, however closely they are looked at.
        self._has_low = settings.images is not None and settings.images.recipe != "fixed"
        # One child more than one tenant, or large files of all, may have.
        self._pool = MediaPool(settings, args.num_processes + 1)
        self._turns = _turns_of(args.num_processes + 1, "media")
        # A video takes as long as many images, which do not wait for it.
        self._video_pool = MediaPool(settings, 2)
        self._video_turns = _turns_of(2, "media-videos")
        self._threads = Turns(_THREADS, "media-bytes", seconds_per_byte=1e-8)
        # A file system that does not answer holds these only.
        self._file_threads = ThreadPoolExecutor(_FILES, "media-files")
        self._fetcher = Fetcher(args)
        self._files = Places(_FILES)
        self._videos = Places(_VIDEOS)
        self._cache: Kept[bytes, LoadedItem] = Kept(args.cache_bytes)
        self._flights: Flights[LoadedItem] = Flights()
        self._costly = RecentRefusals()
        self._loaded: Counter[MediaKind] = Counter()
        self._num_hits = 0
        self._fetch_s = self._decode_s = 0.0
        self._refused: Counter[str] = Counter()
        self._closed = False

    def stats(self) -> MediaStats:
        return MediaStats(
            num_loaded=dict(self._loaded),
            num_cache_hits=self._num_hits,
            num_refused=dict(self._refused),
            fetch_s=self._fetch_s,
            decode_s=self._decode_s,
            num_cached=len(self._cache),
            cache_bytes=self._cache.size,
            num_killed=self._pool.num_killed + self._video_pool.num_killed,
        )

    async def load(self, refs: Sequence[MediaRef], owner: str = "") -> list[LoadedItem]:
        """Fetch, decode and prepare items. Raises RequestError, which tells which of them is wrong, ExecutionError and CapacityError. owner: only
        those with the same one share what is kept, so that nobody learns by the time what others sent."""
        places = asyncio.Semaphore(_AT_A_TIME)
        several = sum(isinstance(ref, ImageRef) for ref in refs) > 1
        tasks = [asyncio.create_task(self._load_one(ref, several, places, owner)) for ref in refs]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_EXCEPTION)
            for number, task in enumerate(tasks):
                if task.done() and (error := task.exception()) is not None:
                    kind = refs[number].kind
                    same = sum(ref.kind is kind for ref in refs[:number])
                    raise self._told(error, kind, same) from None
            return [task.result() for task in tasks]
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    def append(self, tokens: list[int], more: Sequence[int]) -> int:
        """Append to the tokens of a text those of the text after it, which may become others where both meet. Returns where `more` begins."""
        return self._family.joints.append(tokens, more)

    def close(self) -> None:
        """End the children. What is being loaded fails."""
        self._closed = True
        self._pool.close()
        self._video_pool.close()
        self._fetcher.close()
        for turns in (self._turns, self._video_turns, self._threads):
            turns.close()
        self._file_threads.shutdown(wait=False, cancel_futures=True)

    async def _load_one(self, ref: MediaRef, several: bool, places: asyncio.Semaphore, owner: str) -> LoadedItem:
        """several: it is one of several images of a prompt."""
        match ref:
            case ImageRef():
                squared = several and self._family.several_are_squares and ref.detail != "high"
                low = squared or (ref.detail == "low" and self._has_low)
                async with places, self._bytes(ref) as data:
                    return await self._shared(ImageJob(data, low, squared), owner)
            case AudioRef():
                async with places, self._bytes(ref) as data:
                    return await self._shared(AudioJob(data), owner)
            case VideoRef():
                return await self._load_video(ref, owner)

    async def _load_video(self, ref: VideoRef, owner: str) -> LoadedItem:
        # Frames that are in the request are there already; those of files come soon.
        is_slow = any(frame.url[:4].lower() == "http" for frame in ref.images)
        place = self._videos.one("too many videos are being fetched", FETCH_LIMIT_S)
        async with place if is_slow else nullcontext():
            try:
                async with asyncio.timeout(VIDEO_LIMIT_S):
                    frames = await self._frames(ref.images)
            except TimeoutError:
                raise MediaRefusedError(f"getting its frames takes longer than {VIDEO_LIMIT_S:g} s", "time") from None
            return await self._shared(VideoJob(frames, ref.fps), owner)

    async def _frames(self, frames: Sequence[ImageRef]) -> tuple[bytes, ...]:
        files: list[bytes] = []
        for first in range(0, len(frames), _AT_A_TIME):
            some = enumerate(frames[first : first + _AT_A_TIME], first)
            tasks = [asyncio.create_task(self._frame(number, frame)) for number, frame in some]
            try:
                files += await asyncio.gather(*tasks)
            finally:
                for task in tasks:
                    task.cancel()
                await asyncio.gather(*tasks, return_exceptions=True)
            if sum(map(len, files)) > MAX_VIDEO_BYTES:
                raise MediaRefusedError(f"its frames take more than {MAX_VIDEO_BYTES} bytes", "bytes")
        return tuple(files)

    async def _frame(self, number: int, frame: ImageRef) -> bytes:
        try:
            async with self._bytes(frame) as data:
                return data
        except MediaRefusedError as error:
            raise MediaRefusedError(f"frames[{number}]: {error.message}", error.kind) from None

    async def _shared(self, job: MediaJob, owner: str) -> LoadedItem:
        """What a job gives, or has given."""
        key = await self._threads.run(partial(_content_key, job, owner), _num_bytes(job))
        loaded = self._cache.use(key)
        if loaded is not None or key in self._flights:
            self._num_hits += 1
        if loaded is None:
            loaded = await self._flights.share(key, lambda: self._prepare(key, job, owner))
        self._loaded[job.kind] += 1
        return loaded

    @asynccontextmanager
    async def _bytes(self, ref: FileRef) -> AsyncIterator[bytes]:
        """The bytes of a file. How many there are at a time is bounded, but for those that are in requests."""
        form, limit = form_of(ref), self._limits[ref.kind]
        if form == "inline":
            yield await self._threads.run(partial(inline_bytes, ref, limit), ref.num_bytes)
        elif form == "file":
            async with self._files.one("too many files are being read"):
                yield await self._read(ref.url, limit)
        else:
            begun_s = time.perf_counter()
            async with self._fetcher.fetched(ref.url, limit) as data:
                self._fetch_s += time.perf_counter() - begun_s
                yield data

    async def _prepare(self, key: bytes, job: MediaJob, owner: str) -> LoadedItem:
        begun_s = time.perf_counter()
        self._costly.check(key)
        try:
            if isinstance(job, VideoJob):
                done = await self._video_turns.run(partial(self._video_pool.prepare, job), _size(job))
            else:
                done = await self._turns.run(partial(self._pool.prepare, job), _size(job))
        except MediaRefusedError as error:
            if error.kind in ("time", "memory"):
                self._costly.add(key, error)
            raise
        finally:
            self._decode_s += time.perf_counter() - begun_s
        num_frames = len(job.frames) if isinstance(job, VideoJob) else 0
        layout = self._family.kinds[job.kind].layout(ItemFacts(done.shape, done.grid, done.step_s, num_frames))
        item = MediaItem(
            _owned(done.key, owner, KEY_BYTES) if owner else done.key,
            layout.num_rows,
            done.values,
            done.shape,
            kind=job.kind,
            grid=done.grid,
            step_s=done.step_s,
        )
        loaded = LoadedItem(item, layout)
        self._cache.put(key, loaded, item.num_bytes + 64 * len(layout.tokens), asking().tenant)
        return loaded

    async def _read(self, url: str, limit: FileLimit) -> bytes:
        """See `file_bytes`. Raises ExecutionError if the loader has been closed."""
        try:
            read = partial(file_bytes, url, self._args.folder, limit)
            return await asyncio.get_running_loop().run_in_executor(self._file_threads, read)
        except (asyncio.CancelledError, RuntimeError):
            if self._closed:
                raise ExecutionError("the server is stopping") from None
            raise

    def _told(self, error: BaseException, kind: MediaKind, number: int) -> BaseException:
        """What the client is told of an error. number: of the item among those of its kind."""
        if not isinstance(error, MediaRefusedError):
            return error
        self._refused[error.kind] += 1
        return RequestError(f"{kind.field}[{number}]: {error.message}", kind.field, kind.invalid_code)


def make_loader(
    folder: Path,
    tokenizer: Vocabulary,
    args: MediaArgs,
    reasons: Mapping[MediaKind, str] | None = None,
    files: MediaFiles | None = None,
) -> MediaLoader:
    """The loader of a checkpoint. reasons: why it does not take other kinds of media. files: of a GGUF file, which is no folder. Raises ModelError,
    with the reason why none are served."""
    config = read_json_object(folder / "config.json") if files is None else files.config
    audio, audio_unsupported_reason = read_audio(config)
    if audio is not None:
        family = make_audio_family(audio, tokenizer, reasons or {})
        features = read_audio_settings(folder)
        _check_features(audio, features)
        return MediaLoader(family, MediaSettings(audio=features), args)
    media, vision_unsupported_reason = read_media(config)
    if media is None:
        raise ModelError(
            vision_unsupported_reason
            or audio_unsupported_reason
            or f"models of type {config.get('model_type')!r:.80} take text only"
        )
    own, videos = all_families().vision[media.family], None
    why = {**(reasons or {}), MediaKind.VIDEO: "those of its family are not served; send frames as images"}
    if own.video_processor:
        try:
            videos = (
                read_video_settings(folder, own.video_processor)
                if files is None
                else video_settings(files.processor, own.video_processor)
            )
        except ModelError as error:
            why[MediaKind.VIDEO] = error.message
    images = read_image_settings(folder, own.image_processor) if files is None else image_settings(files.processor)
    family, images = make_family(media, images, tokenizer, config, why, videos)
    images = bounded(images, args.max_patches)
    if videos is None:
        return MediaLoader(family, MediaSettings(images=images), args)
    patch_bytes = 4 * 3 * videos.temporal_patch_size * videos.patch_size**2
    most = min(VIDEO_PATCHES * args.max_patches, MAX_ITEM_BYTES // patch_bytes)
    return MediaLoader(family, MediaSettings(images=images, videos=videos, video_patches=most), args)


def _check_features(audio: AudioConfig, settings: AudioSettings) -> None:
    theirs = (settings.num_mel_bins, settings.chunk_frames)
    ours = (audio.num_mel_bins, 2 * audio.max_positions)
    if theirs != ours:
        raise ModelError(
            f"the feature extractor gives {theirs[1]} frames of {theirs[0]} values, and the encoder takes {ours[1]} of {ours[0]}"
        )


def _turns_of(num_children: int, name: str) -> Turns:
    """In which tenants ask so many children."""
    return Turns(
        num_children,
        name,
        seconds_per_byte=_SECONDS_PER_PIXEL,
        wait_limit_s=WAIT_LIMIT_S,
        clock=worked_s,
        leaves_one=True,
    )


def _files(job: MediaJob) -> tuple[bytes, ...]:
    return job.frames if isinstance(job, VideoJob) else (job.data,)


def _num_bytes(job: MediaJob) -> int:
    return sum(map(len, _files(job)))


def _size(job: MediaJob) -> int:
    """By which the time to decode it is estimated: the bytes of its files, but the pixels of those that are PNG images, which may be many more."""
    return sum(max(len(file), min(png_pixels(file), MAX_PIXELS)) for file in _files(job))


def _content_key(job: MediaJob, owner: str) -> bytes:
    """Of the files and all else that the values depend on, but for the settings."""
    files = _files(job)
    about = repr(job.fps) if isinstance(job, VideoJob) else ""
    if isinstance(job, ImageJob):
        about = "square" if job.squared else "low" if job.low else ""
    key = hashlib.blake2b(f"{job.kind} {about} {[len(file) for file in files]}".encode(), digest_size=32)
    for file in files:
        key.update(file)
    return _owned(key.digest(), owner, 32)


def _owned(key: bytes, owner: str, num_bytes: int) -> bytes:
    return hashlib.blake2b(key + owner.encode(), digest_size=num_bytes).digest()
