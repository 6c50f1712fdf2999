"""The images, sounds and videos of prompts: from what a call gives to the `PromptContent` with them.

Owns the shapes of `image_data`, `audio_data` and `video_data`, their checks, and the bounds on the bytes of media in one call. Does not own
fetching and decoding (`multimodal.loader`), nor what stands for an item in a prompt (`multimodal.families`). Runs in the tokenizer manager's
event loop.
"""

import asyncio
from collections.abc import Mapping, Sequence
from typing import Protocol, TypeVar, cast, get_args

from msgspec.structs import replace

from headrace.errors import RequestError
from headrace.messages.control import ReadyInfo
from headrace.messages.media import (
    DEFAULT_FPS,
    NO_SENSES,
    WORDS,
    AudioData,
    AudioRef,
    ImageData,
    ImageRef,
    MediaItem,
    MediaKind,
    MediaRef,
    MediaRefs,
    MediaSpan,
    Senses,
    VideoData,
    VideoRef,
)
from headrace.messages.media_stats import MediaStats
from headrace.messages.packing import pack_int32
from headrace.messages.requests import PromptContent

MAX_MEDIA_BYTES = 256 << 20
"""Most bytes of decoded media to send to the scheduler for one call; every sample carries those of its prompt."""

KINDS: tuple[MediaKind, ...] = get_args(MediaKind)

FRAMES_URL = "data:video/jpeg;base64,"
"""Before the frames of a video that is given as a text."""

MAX_FRAMES = 10_000
"""Of a video that is given as one text, whatever the options allow."""

_MIN_FPS, _MAX_FPS = 0.001, 240.0

R = TypeVar("R", ImageRef, AudioRef, VideoRef)


class Layout(Protocol):
    """What stands for one item in a prompt. tokens: in place of its own token. spans: (start, length, first_row) of the rows among
    them. extra_places: how many more positions than tokens it may take."""

    @property
    def tokens(self) -> tuple[int, ...]: ...

    @property
    def spans(self) -> tuple[tuple[int, int, int], ...]: ...

    @property
    def extra_places(self) -> int: ...


class LoadedItem(Protocol):
    """An item that is ready for the encoder, and its tokens."""

    @property
    def item(self) -> MediaItem: ...

    @property
    def layout(self) -> Layout: ...


class Loader(Protocol):
    """Makes items of what clients give; see `multimodal.loader.MediaLoader`."""

    @property
    def senses(self) -> Senses:
        """What clients need to know of the model."""

    @property
    def token_ids(self) -> Mapping[MediaKind, int]:
        """Of each kind that the model takes, the token that stands for an item in a prompt."""

    @property
    def most(self) -> Mapping[str, int]:
        """Most items of each kind in a prompt."""

    @property
    def max_frames(self) -> int:
        """Most frames of a video."""

    def append(self, tokens: list[int], more: Sequence[int]) -> int:
        """Append to the tokens of a text those of the text after it, which may become others where both meet. Returns where `more` begins."""

    async def load(self, refs: Sequence[MediaRef], owner: str = "") -> Sequence[LoadedItem]:
        """Fetch, decode and prepare items. Raises RequestError, which tells which of them is wrong.

        owner: only those with the same one share what is kept of items, here and in the encoder.
        """

    def stats(self) -> MediaStats:
        """What has been done so far."""

    def close(self) -> None:
        """End what it runs."""


class PromptMedia:
    """See the module docstring. loader: None = the model reads text alone; senses: then why, if it could do more."""

    def __init__(self, loader: Loader | None = None, senses: Senses = NO_SENSES) -> None:
        self.loader = loader
        self.senses = senses if loader is None else loader.senses

    def as_loaded(self, ready: ReadyInfo) -> "PromptMedia":
        """Those of the model as it was loaded, which may take none after all: with this class, or this attention."""
        if ready.encoder is not None or self.loader is None:
            return self
        self.close()
        reason = f"the model class {ready.model_class} with the attention backend {ready.attention_backend} does not encode them"
        return PromptMedia(senses=Senses(self.senses.family, {}, dict.fromkeys(self.senses.tokens, reason)))

    def check(self, prompts: Sequence[MediaRefs]) -> None:
        """Raises RequestError for media that the model does not take, and for too many of them. prompts: those of each prompt."""
        for kind in KINDS:
            words = WORDS[kind]
            count = max((len(refs.of(kind)) for refs in prompts), default=0)
            if not count:
                continue
            if self.loader is None or kind not in self.senses.tokens:
                raise RequestError(self.senses.refusal(kind), words.field, words.code)
            most = self.loader.most[kind]
            if count > most:
                raise RequestError(
                    f"{words.field}: {_number(count, words.one)} in one prompt; the limit is {most} ({words.limit})",
                    words.field,
                )
        for refs in prompts:
            check_frames(refs.videos, WORDS["video"].field, self.loader.max_frames if self.loader else 0)

    def check_tokens(self, ids: Sequence[int], refs: MediaRefs) -> None:
        """Raises RequestError for a prompt with the token of an item that is not given."""
        for kind, token_id in self.loader.token_ids.items() if self.loader is not None else ():
            if not refs.of(kind) and token_id in ids:
                words = WORDS[kind]
                raise RequestError(
                    f"the prompt has the token {self.senses.tokens[kind]}, but {words.field} has no {words.one} for it",
                    words.field,
                )

    async def add(self, ids: Sequence[int], refs: MediaRefs, owner: str = "") -> PromptContent:
        """A prompt with items in place of the tokens of their kinds, in order. owner: see `Loader.load`. Raises RequestError."""
        loader = self.loader
        assert loader is not None, "check has refused it"
        places, ordered = self._places(loader, ids, refs)
        items = await loader.load(ordered, owner)
        tokens: list[int] = []
        spans: list[MediaSpan] = []
        end = 0
        for number, (place, item) in enumerate(zip(places, items, strict=True)):
            loader.append(tokens, ids[end:place])
            begin = loader.append(tokens, item.layout.tokens)
            spans += [MediaSpan(begin + start, length, number, row) for start, length, row in item.layout.spans]
            end = place + 1
        loader.append(tokens, ids[end:])
        return PromptContent(
            pack_int32(tokens),
            media=tuple(item.item for item in items),
            spans=tuple(spans),
            extra_places=sum(item.layout.extra_places for item in items),
        )

    def _places(self, loader: Loader, ids: Sequence[int], refs: MediaRefs) -> tuple[list[int], list[MediaRef]]:
        """Where items belong among the tokens of a prompt, and the items in this order. Raises RequestError."""
        kinds = {loader.token_ids[kind]: kind for kind in KINDS if refs.of(kind)}
        places = [index for index, token_id in enumerate(ids) if token_id in kinds]
        found = [kinds[ids[place]] for place in places]
        for kind in kinds.values():
            words, given = WORDS[kind], len(refs.of(kind))
            if found.count(kind) != given:
                raise RequestError(
                    f"{words.field} has {_number(given, words.one)}, but the prompt has "
                    f"{_number(found.count(kind), f'{words.one} token')}: "
                    f"write {self.senses.tokens[kind]} once where each {words.one} belongs",
                    words.field,
                )
        left = {kind: iter(refs.of(kind)) for kind in kinds.values()}
        return places, [next(left[kind]) for kind in found]

    def close(self) -> None:
        """End what the loader runs."""
        if self.loader is not None:
            self.loader.close()


NO_MEDIA = PromptMedia()
"""Of a model that reads text alone."""


def refs_of(
    images: ImageData, sounds: AudioData, videos: VideoData, num_prompts: int, is_batch: bool
) -> list[MediaRefs]:
    """The media of each prompt of a call. Raises RequestError."""
    return [
        MediaRefs(*each)
        for each in zip(
            _by_prompt("image", ImageRef, images, num_prompts, is_batch),
            _by_prompt("audio", AudioRef, sounds, num_prompts, is_batch),
            _by_prompt("video", VideoRef, videos, num_prompts, is_batch),
            strict=True,
        )
    ]


def check_frames(videos: Sequence[VideoRef], where: str, max_frames: int) -> None:
    """Raises RequestError for a video with too many frames."""
    for number, video in enumerate(videos):
        if len(video.frames) > max_frames:
            raise RequestError(
                f"{where}[{number}]: it has {len(video.frames)} frames; the limit is {max_frames} (--max-video-frames)",
                where,
            )


def video_of_url(where: str, url: str, fps: float = DEFAULT_FPS) -> VideoRef:
    """The video of a text with its frames. Raises RequestError."""
    if url[: len(FRAMES_URL)].lower() != FRAMES_URL:
        raise RequestError(
            f"{where}: video files are not decoded. Take frames of the video, e.g. ffmpeg -i clip.mp4 -vf fps=2 frame%03d.jpg, and send "
            f'{{"frames": [...], "fps": 2}}, or {FRAMES_URL} and the base64 texts of the frames, separated by commas',
            where,
        )
    if url.count(",") > MAX_FRAMES:
        raise RequestError(f"{where}: a video of more than {MAX_FRAMES} frames", where)
    return VideoRef(frames=tuple(ImageRef(url=frame) for frame in url[len(FRAMES_URL) :].split(",")), fps=fps)


def check_media_bytes(contents: Sequence[tuple[PromptContent, int]]) -> None:
    """Raises RequestError if the media of a call are too large together. contents: prompts with their numbers of samples."""
    num_bytes = sum(content.media_bytes * num_samples for content, num_samples in contents)
    if num_bytes > MAX_MEDIA_BYTES:
        kind = next(item.kind for content, _ in contents for item in content.media)
        field, many = WORDS[kind].field, WORDS[kind].many
        raise RequestError(
            f"{field}: the {many} of this request take {num_bytes} bytes once decoded, over all samples; "
            f"the limit is {MAX_MEDIA_BYTES}: send fewer or smaller ones, or reduce n",
            field,
        )


async def add_media(
    media: PromptMedia,
    contents: Sequence[PromptContent],
    prompts: Sequence[MediaRefs],
    owners: Sequence[str],
) -> list[PromptContent]:
    """`contents` with the media of each prompt. owners: of the prompts, see `Loader.load`. Raises RequestError."""

    async def added(index: int) -> PromptContent:
        content, refs = contents[index], prompts[index]
        if not content.has_tokens:
            return content
        try:
            media.check_tokens(content.ids(), refs)
            return await media.add(content.ids(), refs, owners[index]) if refs else content
        except RequestError as error:
            if len(prompts) > 1:
                raise RequestError(f"prompt {index}: {error.message}", error.param, error.code) from None
            raise

    return list(await asyncio.gather(*map(added, range(len(prompts)))))


def _by_prompt(
    kind: MediaKind,
    ref_type: type[R],
    data: R | str | list[R | str | list[R | str] | None] | None,
    num_prompts: int,
    is_batch: bool,
) -> list[tuple[R, ...]]:
    words = WORDS[kind]
    if _is_nothing(data):
        return [()] * num_prompts
    if not is_batch:
        given: list[R | str | list[R | str] | None] = data if isinstance(data, list) else [data]
        if len(given) == 1 and isinstance(given[0], list):
            return [_refs(kind, ref_type, given[0])]
        return [_refs(kind, ref_type, given)]
    an_item = f"an item is one {words.one}, a list of {words.many}, or null"
    if not isinstance(data, list):
        raise RequestError(
            f"{words.field}: for a list of prompts it is a list, too, with an item for each; {an_item}", words.field
        )
    if len(data) != num_prompts:
        raise RequestError(
            f"{words.field}: for a list of prompts the number of items ({len(data)}) must equal that of the prompts ({num_prompts}); {an_item}",
            words.field,
        )
    return [_refs(kind, ref_type, item if isinstance(item, list) else [item]) for item in data]


def _is_nothing(data: object) -> bool:
    """Whether it asks for nothing."""
    return all(map(_is_nothing, data)) if isinstance(data, list) else data is None or data == ""


def _refs(kind: MediaKind, ref_type: type[R], given: Sequence[R | str | list[R | str] | None]) -> tuple[R, ...]:
    words, refs = WORDS[kind], []
    for item in given:
        if _is_nothing(item):
            continue
        if isinstance(item, list):
            raise RequestError(f"{words.field} has lists of {words.many}, but there is one prompt", words.field)
        ref = cast(R, _of_text(kind, item)) if isinstance(item, str) else item
        refs.append(cast(R, _checked(kind, ref)))
    return tuple(refs)


def _of_text(kind: MediaKind, text: str) -> MediaRef:
    match kind:
        case "image":
            return ImageRef(url=text)
        case "audio":
            return AudioRef(url=text)
        case "video":
            return video_of_url(WORDS["video"].field, text)


def _checked(kind: MediaKind, ref: MediaRef | None) -> MediaRef:
    """The item as it is loaded. Raises RequestError."""
    field = WORDS[kind].field
    if isinstance(ref, VideoRef):
        return checked_video(field, ref)
    assert ref is not None
    if bool(ref.url) == bool(ref.data):
        raise RequestError(f"{field}: {'a sound' if kind == 'audio' else 'an image'} has either url or data", field)
    return ref


def checked_video(where: str, ref: VideoRef) -> VideoRef:
    """The video with its frames as images. Raises RequestError."""
    if not ref.frames:
        raise RequestError(f"{where}: a video has no frames", where)
    if not _MIN_FPS <= ref.fps <= _MAX_FPS:
        raise RequestError(f"{where}: fps is {ref.fps:g}; expected a number from {_MIN_FPS:g} to {_MAX_FPS:g}", where)
    for number, frame in enumerate(ref.images):
        if bool(frame.url) == bool(frame.data):
            raise RequestError(
                f"{where}: frames[{number}] has {'both url and data' if frame.url else 'neither url nor data'}", where
            )
        if frame.detail == "low":
            raise RequestError(
                f"{where}: frames[{number}] has detail low, but frames are all made of one size; leave it out", where
            )
    return replace(ref, frames=ref.images)


def _number(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"
