"""The media of prompts: from what a call gives to the `PromptContent` with them.

Owns their checks against the model and its limits, and the bounds on the bytes of media in one call. `headrace.media_kinds` has the shapes in
which they are given, `multimodal` fetches, decodes, and says what stands for an item in a prompt.
"""

import asyncio
from collections.abc import Sequence
from typing import TYPE_CHECKING

from headrace.errors import RequestError
from headrace.media_kinds import MediaKind, MediaRef, MediaRefs, VideoRef
from headrace.messages.control import ReadyInfo
from headrace.messages.media import NO_MEDIA_SUPPORT, MediaSpan, MediaSupport
from headrace.messages.packing import pack_int32
from headrace.messages.requests import PromptContent

if TYPE_CHECKING:
    from headrace.multimodal.loader import MediaLoader

MAX_MEDIA_BYTES = 256 << 20
"""Most bytes of decoded media to send to the scheduler for one call; every sample carries those of its prompt."""


class PromptMedia:
    """loader: None = the model takes text only; support: then why, if it could do more."""

    def __init__(self, loader: "MediaLoader | None" = None, support: MediaSupport = NO_MEDIA_SUPPORT) -> None:
        self.loader = loader
        self.support = support if loader is None else loader.support

    def as_loaded(self, ready: ReadyInfo) -> "PromptMedia":
        """Those of the model as it was loaded, which may take none after all: with this class, or this attention."""
        if ready.encoder is not None or self.loader is None:
            return self
        self.close()
        reason = f"the model class {ready.model_class} with the attention backend {ready.attention_backend} does not encode them"
        return PromptMedia(support=MediaSupport(self.support.family, {}, dict.fromkeys(self.support.tokens, reason)))

    def check(self, prompts: Sequence[MediaRefs]) -> None:
        """Raises RequestError for media that the model does not take, and for too many of them. prompts: those of each prompt."""
        for kind in MediaKind:
            count = max((len(refs.of(kind)) for refs in prompts), default=0)
            if not count:
                continue
            if self.loader is None or kind not in self.support.tokens:
                raise RequestError(self.support.refusal(kind), kind.field, kind.unsupported_code)
            most = self.loader.most[kind]
            if count > most:
                raise RequestError(
                    f"{kind.field}: {kind.amount(count)} in one prompt; the limit is {most} ({kind.limit_option})",
                    kind.field,
                )
        for refs in prompts:
            check_frames(refs.videos, MediaKind.VIDEO.field, self.loader.max_frames if self.loader else 0)

    def check_tokens(self, ids: Sequence[int], refs: MediaRefs) -> None:
        """Raises RequestError for a prompt with the token of an item that is not given."""
        for kind, token_id in self.loader.token_ids.items() if self.loader is not None else ():
            if not refs.of(kind) and token_id in ids:
                raise RequestError(
                    f"the prompt has the token {self.support.tokens[kind]}, but {kind.field} has no {kind.one} for it",
                    kind.field,
                )

    async def add(self, ids: Sequence[int], refs: MediaRefs, owner: str = "") -> PromptContent:
        """A prompt with items in place of the tokens of their kinds, in order. owner: see `MediaLoader.load`. Raises RequestError."""
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

    def _places(self, loader: "MediaLoader", ids: Sequence[int], refs: MediaRefs) -> tuple[list[int], list[MediaRef]]:
        """Where items belong among the tokens of a prompt, and the items in this order. Raises RequestError."""
        kinds = {loader.token_ids[kind]: kind for kind in MediaKind if refs.of(kind)}
        places = [index for index, token_id in enumerate(ids) if token_id in kinds]
        found = [kinds[ids[place]] for place in places]
        for kind in kinds.values():
            given = len(refs.of(kind))
            if found.count(kind) != given:
                raise RequestError(
                    f"{kind.field} has {kind.amount(given)}, but the prompt has "
                    f"{found.count(kind)} {kind} token{'s' * (found.count(kind) != 1)}: "
                    f"write {self.support.tokens[kind]} once where each {kind.one} belongs",
                    kind.field,
                )
        left = {kind: iter(refs.of(kind)) for kind in kinds.values()}
        return places, [next(left[kind]) for kind in found]

    def close(self) -> None:
        if self.loader is not None:
            self.loader.close()


NO_MEDIA = PromptMedia()
"""Of a model that takes text only."""


def check_frames(videos: Sequence[VideoRef], where: str, max_frames: int) -> None:
    for number, video in enumerate(videos):
        if len(video.frames) > max_frames:
            raise RequestError(
                f"{where}[{number}]: it has {len(video.frames)} frames; the limit is {max_frames} (--max-video-frames)",
                where,
            )


def check_media_bytes(contents: Sequence[tuple[PromptContent, int]]) -> None:
    """Raises RequestError if the media of a call are too large together. contents: prompts with their numbers of samples."""
    num_bytes = sum(content.media_bytes * num_samples for content, num_samples in contents)
    if num_bytes > MAX_MEDIA_BYTES:
        kind = next(item.kind for content, _ in contents for item in content.media)
        raise RequestError(
            f"{kind.field}: the {kind.many} of this request take {num_bytes} bytes once decoded, over all samples; "
            f"the limit is {MAX_MEDIA_BYTES}: send fewer or smaller ones, or reduce n",
            kind.field,
        )


async def add_media(
    media: PromptMedia,
    contents: Sequence[PromptContent],
    prompts: Sequence[MediaRefs],
    owners: Sequence[str],
) -> list[PromptContent]:
    """`contents` with the media of each prompt. owners: of the prompts, see `MediaLoader.load`. Raises RequestError."""

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
