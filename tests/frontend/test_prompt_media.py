"""The images of prompts: every shape of `image_data`, and prompts with images in place of their image tokens."""

import asyncio
from dataclasses import dataclass
from typing import Any, get_args

import pytest

from headrace.api.options import GenerateOptions
from headrace.config.server_args import ServerArgs
from headrace.errors import RequestError
from headrace.frontend.media import MAX_MEDIA_BYTES, PromptMedia, add_media, check_media_bytes
from headrace.media_kinds import (
    DEFAULT_FILE_BYTES,
    FILE_KINDS,
    REFS,
    ImageRef,
    MediaFields,
    MediaKind,
    MediaParts,
    MediaRefs,
    refs_of,
)
from headrace.messages.media import MediaItem, MediaSpan, MediaStats, MediaSupport
from headrace.messages.packing import pack_int32
from headrace.messages.requests import PromptContent
from headrace.multimodal.media_messages import MediaJob
from headrace.server.openai.base import PromptTokensDetails
from headrace.server.openai.protocol import ContentPart

A, B = ImageRef(url="a"), ImageRef(data=b"b")


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (None, [()]),
        ([], [()]),
        ([None, ""], [()]),
        ("", [()]),
        ([[None]], [()]),
        ("a", [(A,)]),
        (A, [(A,)]),
        (["a", B], [(A, B)]),
        ([["a", B]], [(A, B)]),
    ],
)
def test_the_images_of_one_prompt(data: Any, expected: list[Any]):
    assert [refs.images for refs in refs_of({MediaKind.IMAGE: data}, 1, is_batch=False)] == expected


@pytest.mark.parametrize(
    ("data", "expected"),
    [
        (None, [(), ()]),
        ("", [(), ()]),
        ([[], [None, ""]], [(), ()]),
        ([None, "a"], [(), (A,)]),
        ([["a", B], None], [(A, B), ()]),
        (["a", [B]], [(A,), (B,)]),
    ],
)
def test_the_images_of_several_prompts(data: Any, expected: list[Any]):
    assert [refs.images for refs in refs_of({MediaKind.IMAGE: data}, 2, is_batch=True)] == expected


@pytest.mark.parametrize(
    ("data", "num_prompts", "words"),
    [
        ("a", 2, "a list of prompts needs a list"),
        (["a"], 2, "must equal that of the prompts"),
        ([ImageRef()], 1, "either url or data"),
        ([ImageRef(url="a", data=b"b")], 1, "either url or data"),
        ([["a"], ["b"]], 1, "there is one prompt"),
    ],
)
def test_other_shapes_are_refused(data: Any, num_prompts: int, words: str):
    with pytest.raises(RequestError, match=words):
        refs_of({MediaKind.IMAGE: data}, num_prompts, is_batch=num_prompts > 1)


@dataclass
class Loaded:
    """An image of three tokens, of which the middle one is a token of text."""

    item: MediaItem
    tokens = (7, 8, 7)
    spans = ((0, 1, 0), (2, 1, 1))
    extra_places = 0

    @property
    def layout(self) -> "Loaded":
        return self


class Loader:
    support = MediaSupport("llava", {MediaKind.IMAGE: "<image>"})
    token_ids = {MediaKind.IMAGE: 5}
    most = {MediaKind.IMAGE: 2}
    max_frames = 3

    def __init__(self) -> None:
        self.closed = False
        self.owners: list[str] = []

    def append(self, tokens, more):
        tokens += more
        return len(tokens) - len(more)

    async def load(self, refs, owner=""):
        self.owners.append(owner)
        await asyncio.sleep(0)
        return [Loaded(MediaItem(ref.url.encode().ljust(16, b"."), 2, bytes(8), (2,))) for ref in refs]

    def stats(self) -> MediaStats:
        return MediaStats()

    def close(self) -> None:
        self.closed = True


def content(*ids: int) -> PromptContent:
    return PromptContent(pack_int32(ids))


async def test_images_take_the_place_of_their_tokens():
    prompts = [content(1, 5, 2, 5), content(1, 2), content(5)]
    images = [MediaRefs((ImageRef(url="a"), ImageRef(url="b"))), MediaRefs(), MediaRefs((ImageRef(url="a"),))]

    loader = Loader()
    first, text, last = await add_media(PromptMedia(loader), prompts, images, ["x", "y", "z"])

    assert loader.owners == ["x", "z"]

    assert first.ids() == [1, 7, 8, 7, 2, 7, 8, 7]
    assert first.spans == (MediaSpan(1, 1, 0), MediaSpan(3, 1, 0, 1), MediaSpan(5, 1, 1), MediaSpan(7, 1, 1, 1))
    assert first.media_tokens == {MediaKind.IMAGE: 4}
    first.check_media()
    assert text is prompts[1]
    assert last.media == first.media[:1]
    # The same image has the same key, and another one has another.
    assert last.cache_key(last.token_ids)[:4] == first.cache_key(first.token_ids)[4:8]
    assert first.cache_key(first.token_ids)[4:8] != first.cache_key(first.token_ids)[20:24]


async def test_a_token_without_an_image_is_refused_and_the_prompt_is_named():
    media = PromptMedia(Loader())
    with pytest.raises(RequestError, match="the prompt has the token <image>, but image_data has no image for it"):
        await add_media(media, [content(1, 5)], [MediaRefs()], [""])
    with pytest.raises(RequestError, match=r"prompt 1: image_data has 1 image, but the prompt has 0 image tokens"):
        await add_media(media, [content(1), content(1)], [MediaRefs(), MediaRefs((A,))], ["", ""])


async def test_places_and_images_must_be_as_many():
    images = PromptMedia(Loader())
    for ids in ([1], [5, 5]):
        with pytest.raises(RequestError, match=r"write <image> once where each image belongs"):
            await images.add(ids, MediaRefs((ImageRef(url="a"),)))


def test_too_many_images_and_models_without_eyes_are_refused():
    with pytest.raises(RequestError, match="3 images in one prompt; the limit is 2"):
        PromptMedia(Loader()).check([MediaRefs(), MediaRefs((A, A, A))])
    with pytest.raises(RequestError, match=r"does not support images$"):
        PromptMedia().check([MediaRefs((A,))])
    with pytest.raises(RequestError, match="does not support images: it is split"):
        PromptMedia(support=MediaSupport(reasons={MediaKind.IMAGE: "it is split"})).check([MediaRefs((A,))])
    PromptMedia().check([MediaRefs(), MediaRefs()])


def test_what_a_call_holds_is_bounded():
    large = PromptContent(b"", media=(MediaItem(bytes(16), 1, bytes(MAX_MEDIA_BYTES // 4), (1,)),))
    check_media_bytes([(large, 4)])
    with pytest.raises(RequestError, match="reduce n"):
        check_media_bytes([(large, 4), (large, 1)])


def test_closing_ends_the_loader():
    loader = Loader()
    PromptMedia(loader).close()
    assert loader.closed
    PromptMedia().close()


@pytest.mark.parametrize("kind", MediaKind)
def test_a_kind_has_its_place_in_every_api(kind: MediaKind):
    assert REFS[kind].kind is kind
    assert MediaRefs.by_kind([]).of(kind) == ()
    assert {*kind.parts} <= {*MediaParts.__struct_fields__} & {*ContentPart.__struct_fields__}
    assert kind.field in MediaFields.__struct_fields__
    assert kind.field in GenerateOptions.__annotations__
    assert kind.tokens_field in PromptTokensDetails.__struct_fields__
    assert kind.limit_of(ServerArgs()) == kind.default_limit
    assert kind not in FILE_KINDS or kind.max_bytes_of(ServerArgs()) == DEFAULT_FILE_BYTES
    assert [job.kind for job in get_args(MediaJob)].count(kind) == 1
