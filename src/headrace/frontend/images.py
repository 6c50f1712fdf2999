"""The images of prompts: from what a call gives to the `PromptContent` with them.

Owns the shapes of `image_data`, its checks, and the bounds on the bytes of images in one call. Does not own fetching and decoding
(`multimodal.loader`), nor what stands for an image in a prompt (`multimodal.families`). Runs in the tokenizer manager's event loop.
"""

import asyncio
from collections.abc import Sequence
from typing import Protocol

from headrace.errors import RequestError
from headrace.messages.control import ReadyInfo
from headrace.messages.image_stats import ImageStats
from headrace.messages.media import ImageData, ImageRef, MediaInfo, MediaItem, MediaSpan
from headrace.messages.packing import pack_int32
from headrace.messages.requests import PromptContent

MAX_MEDIA_BYTES = 256 << 20
"""Most bytes of decoded images to send to the scheduler for one call; every sample carries those of its prompt."""

_FIELD = "image_data"


class Layout(Protocol):
    """What stands for one image in a prompt. tokens: in place of its image token. spans: (start, length, first_row) of the rows among them."""

    @property
    def tokens(self) -> tuple[int, ...]: ...

    @property
    def spans(self) -> tuple[tuple[int, int, int], ...]: ...


class LoadedImage(Protocol):
    """An image that is ready for the encoder, and its tokens."""

    @property
    def item(self) -> MediaItem: ...

    @property
    def layout(self) -> Layout: ...


class ImageLoader(Protocol):
    """Makes images of what clients give; see `multimodal.loader.MediaLoader`."""

    @property
    def info(self) -> MediaInfo:
        """What clients need to know of the model."""

    @property
    def image_token_id(self) -> int:
        """The token that stands for an image in a prompt."""

    @property
    def max_images(self) -> int:
        """Most images in a prompt."""

    def append(self, tokens: list[int], more: Sequence[int]) -> int:
        """Append to the tokens of a text those of the text after it, which may become others where both meet. Returns where `more` begins."""

    async def load(self, refs: Sequence[ImageRef], owner: str = "") -> Sequence[LoadedImage]:
        """Fetch, decode and prepare images. Raises RequestError, which tells which of them is wrong.

        owner: only those with the same one share what is kept of images, here and in the encoder.
        """

    def stats(self) -> ImageStats:
        """What has been done so far."""

    def close(self) -> None:
        """End what it runs."""


class PromptImages:
    """See the module docstring. loader: None = the model does not see; blind: then why, if it has eyes."""

    def __init__(self, loader: ImageLoader | None = None, blind: str = "") -> None:
        self.loader = loader
        self.blind = blind

    def as_loaded(self, ready: ReadyInfo) -> "PromptImages":
        """Those of the model as it was loaded, which may not see after all: with this class, or this attention."""
        if ready.encoder is not None or self.loader is None:
            return self
        self.close()
        return PromptImages(
            blind=f"the model class {ready.model_class} with the attention backend {ready.attention_backend} does not see"
        )

    def check(self, prompts: Sequence[Sequence[ImageRef]]) -> None:
        """Raises RequestError for images that the model cannot see, and for too many of them. prompts: those of each prompt."""
        most = max(map(len, prompts), default=0)
        if not most:
            return
        if self.loader is None:
            raise RequestError(self.refusal, _FIELD, "unsupported_images")
        if most > self.loader.max_images:
            raise RequestError(
                f"{_FIELD}: {most} images in one prompt; the limit is {self.loader.max_images} (--max-images)", _FIELD
            )

    @property
    def refusal(self) -> str:
        """Why the model does not see."""
        return blindness(self.blind)

    async def add(self, ids: Sequence[int], refs: Sequence[ImageRef], owner: str = "") -> PromptContent:
        """A prompt with images in place of its image tokens, in order. owner: see `ImageLoader.load`. Raises RequestError."""
        loader = self.loader
        assert loader is not None, "check has refused it"
        places = [index for index, token_id in enumerate(ids) if token_id == loader.image_token_id]
        if len(places) != len(refs):
            token = loader.info.image_token
            raise RequestError(
                f"{_FIELD} has {_number(len(refs), 'image')}, but the prompt has {_number(len(places), 'image token')}: "
                f"write {token} once where each image belongs",
                _FIELD,
            )
        images = await loader.load(refs, owner)
        tokens: list[int] = []
        spans: list[MediaSpan] = []
        end = 0
        for number, (place, image) in enumerate(zip(places, images, strict=True)):
            loader.append(tokens, ids[end:place])
            begin = loader.append(tokens, image.layout.tokens)
            spans += [MediaSpan(begin + start, length, number, row) for start, length, row in image.layout.spans]
            end = place + 1
        loader.append(tokens, ids[end:])
        return PromptContent(pack_int32(tokens), media=tuple(image.item for image in images), spans=tuple(spans))

    def close(self) -> None:
        """End what the loader runs."""
        if self.loader is not None:
            self.loader.close()


def blindness(why: str) -> str:
    """What clients are told of a model that does not see. why: "" = it has no eyes."""
    return "this model does not see images" + (f": {why}" if why else "")


NO_IMAGES = PromptImages()
"""Of a model that does not see."""


def images_of(data: ImageData, num_prompts: int, is_batch: bool) -> list[tuple[ImageRef, ...]]:
    """The images of each prompt of a call. Raises RequestError."""
    if data is None or (isinstance(data, list) and not any(data)):
        return [()] * num_prompts
    if not is_batch:
        given = data if isinstance(data, list) else [data]
        if len(given) == 1 and isinstance(given[0], list):
            given = list(given[0])
        return [_refs(given)]
    if not isinstance(data, list) or len(data) != num_prompts:
        number = len(data) if isinstance(data, list) else 1
        raise RequestError(
            f"{_FIELD}: for a list of prompts the number of items ({number}) must equal that of the prompts ({num_prompts}); "
            "an item is an image, a list of images, or null",
            _FIELD,
        )
    return [_refs(item if isinstance(item, list) else [item]) for item in data]


def check_media_bytes(contents: Sequence[tuple[PromptContent, int]]) -> None:
    """Raises RequestError if the images of a call are too large together. contents: prompts with their numbers of samples."""
    num_bytes = sum(content.media_bytes * num_samples for content, num_samples in contents)
    if num_bytes > MAX_MEDIA_BYTES:
        raise RequestError(
            f"{_FIELD}: the images of this request take {num_bytes} bytes once decoded, over all samples; "
            f"the limit is {MAX_MEDIA_BYTES}: send fewer or smaller images, or reduce n",
            _FIELD,
        )


async def add_images(
    images: PromptImages,
    contents: Sequence[PromptContent],
    prompts: Sequence[Sequence[ImageRef]],
    owners: Sequence[str],
) -> list[PromptContent]:
    """`contents` with the images of each prompt. owners: of the prompts, see `ImageLoader.load`. Raises RequestError."""
    with_images = [index for index, refs in enumerate(prompts) if refs]
    done = await asyncio.gather(
        *(images.add(contents[index].ids(), prompts[index], owners[index]) for index in with_images)
    )
    found = dict(zip(with_images, done, strict=True))
    return [found.get(index, content) for index, content in enumerate(contents)]


def _refs(given: Sequence[ImageRef | str | list[ImageRef | str] | None]) -> tuple[ImageRef, ...]:
    refs = []
    for item in given:
        if item is None or item == "":
            continue
        if isinstance(item, list):
            raise RequestError(f"{_FIELD} has lists of images, but there is one prompt", _FIELD)
        ref = ImageRef(url=item) if isinstance(item, str) else item
        if bool(ref.url) == bool(ref.data):
            raise RequestError(f"{_FIELD}: an image has either url or data", _FIELD)
        refs.append(ref)
    return tuple(refs)


def _number(count: int, what: str) -> str:
    return f"{count} {what}" if count == 1 else f"{count} {what}s"
