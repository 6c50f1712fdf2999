"""What stands for one image, sound or video in a prompt, by family: the tokens that transformers' processors write.

Owns the families' texts and counts of tokens. Does not prepare values (`processors`), and knows no prompts. Sources: the processors of transformers
5 for LLaVA, LLaVA-OneVision, Pixtral, Mistral 3, Idefics3, SmolVLM, Qwen2-VL to Qwen3-VL, InternVL, Gemma 3 and Qwen2-Audio.
"""

import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any, NamedTuple, Protocol

import msgspec
import numpy as np

from headrace.checkpoint.audio_config import AudioConfig
from headrace.checkpoint.image_processors import ImageSettings
from headrace.checkpoint.media_config import MediaConfig
from headrace.errors import ModelError
from headrace.media_kinds import MediaKind
from headrace.messages.media import MediaSupport, time_places
from headrace.multimodal.layout import PLAIN, ItemFacts, Joints, TokenLayout, layout_of
from headrace.multimodal.resolutions import best_resolution, shrunk, without_border

_CACHED_LAYOUTS = 256
_LONGEST_RUN = 32


class Vocabulary(Protocol):
    """What is needed of a tokenizer."""

    def encode(self, text: str, add_special_tokens: bool = True, allow_special: bool = False) -> list[int]: ...

    def token_to_id(self, token: str) -> int | None: ...

    def id_to_token(self, token_id: int) -> str | None: ...


LayoutOf = Callable[[ItemFacts], TokenLayout]


class KindTokens(NamedTuple):
    """Of one kind of media: the token that stands for an item in a prompt that a client sends, and what stands for it in what the model reads."""

    token_id: int
    layout: LayoutOf


@dataclass(frozen=True, slots=True)
class Family:
    """The tokens of a model that sees or hears. kinds: what it takes. joints: put layouts and text together."""

    support: MediaSupport
    kinds: Mapping[MediaKind, KindTokens]
    joints: Joints = PLAIN


def make_family(
    media: MediaConfig,
    settings: ImageSettings,
    vocabulary: Vocabulary,
    config: dict[str, Any],
    reasons: Mapping[MediaKind, str] | None = None,
    videos: ImageSettings | None = None,
) -> tuple[Family, ImageSettings]:
    """The family of a checkpoint that sees, and the settings as this family has them. config: its config.json. reasons: why it does not take other
    kinds. videos: settings of frames, None = it takes none. Raises ModelError, with the reason why its images cannot be served."""
    if media.vision.num_channels != 3:
        raise ModelError(f"the vision tower takes {media.vision.num_channels} channels; only 3 are served")
    build = _FAMILIES.get(media.family)
    if build is None:
        raise ModelError(f"images of model type {media.family!r:.80} cannot be prepared")
    tokens = _Tokens(vocabulary, media.image_token_id)
    tokens.text(tokens.row)  # a server without a tokenizer has no tokens
    if media.vision.tower == "pixtral":
        build, settings = _pixtral, _pixtral_settings(media, settings)
    if media.family == "internvl":  # transformers' processor asks for tiles, whatever the file says
        settings = msgspec.structs.replace(settings, splits=True)
    kinds: dict[MediaKind, KindTokens] = {MediaKind.IMAGE: build(media, settings, tokens, config)}
    why = dict(reasons or {})
    if videos is not None:
        try:
            kinds[MediaKind.VIDEO] = _qwen_videos(
                media, videos, _Tokens(vocabulary, _token(config, "video_token_id", 151656))
            )
        except ModelError as error:
            why[MediaKind.VIDEO] = error.message
    joints = _line_ends(tokens) if media.family == "gemma3" else PLAIN
    return _family(media.family, kinds, tokens, why, joints), settings


def make_hearing_family(audio: AudioConfig, vocabulary: Vocabulary, reasons: Mapping[MediaKind, str]) -> Family:
    """The family of a checkpoint that hears. reasons: why it does not take other kinds. Raises ModelError."""
    tokens = _Tokens(vocabulary, audio.audio_token_id)

    def layout(facts: ItemFacts) -> TokenLayout:
        """Two neighbouring positions are one row."""
        return tokens.layout([tokens.row] * (facts.grid[0] // 2))

    return _family(audio.family, {MediaKind.AUDIO: KindTokens(tokens.row, layout)}, tokens, reasons, PLAIN)


def _family(
    name: str,
    kinds: Mapping[MediaKind, KindTokens],
    tokens: "_Tokens",
    reasons: Mapping[MediaKind, str],
    joints: Joints,
) -> Family:
    texts = {kind: tokens.text(own.token_id) for kind, own in kinds.items()}
    others = {kind: reason for kind, reason in reasons.items() if kind not in kinds}
    kept = {kind: KindTokens(own.token_id, lru_cache(_CACHED_LAYOUTS)(own.layout)) for kind, own in kinds.items()}
    return Family(MediaSupport(name, texts, others), kept, joints)


class _Tokens:
    """The vocabulary, and the token that stands for a row."""

    def __init__(self, vocabulary: Vocabulary, row: int) -> None:
        self._vocabulary = vocabulary
        self.row = row

    def text(self, token_id: int) -> str:
        """Raises ModelError."""
        text = self._vocabulary.id_to_token(token_id)
        if text is None:
            raise ModelError(f"the tokenizer has no token {token_id}, which stands for an image, a sound or a video")
        return text

    def id(self, text: str) -> int:
        """Raises ModelError."""
        token_id = self._vocabulary.token_to_id(text)
        if token_id is None:
            raise ModelError(f"the tokenizer has no token {text!r}, which its media need")
        return token_id

    def ids(self, text: str) -> list[int]:
        """Of text with special tokens in it."""
        return self._vocabulary.encode(text, add_special_tokens=False, allow_special=True)

    def layout(self, tokens: list[int]) -> TokenLayout:
        """The layout of these tokens."""
        return layout_of(tokens, self.row)


def _llava(media: MediaConfig, settings: ImageSettings, tokens: _Tokens, config: dict[str, Any]) -> KindTokens:
    vision = media.vision
    _check_side(settings, vision.image_size)
    num_tokens = (vision.image_size // vision.patch_size) ** 2
    num_tokens += vision.tower == "clip"
    num_tokens -= media.drops_first
    layout = tokens.layout([tokens.row] * num_tokens)
    return KindTokens(tokens.row, lambda facts: layout)


def _pixtral(media: MediaConfig, settings: ImageSettings, tokens: _Tokens, config: dict[str, Any]) -> KindTokens:
    """A token after each row of patches, and another one after the last."""
    side = settings.patch_size * settings.merge_size
    after_row, after_image = tokens.id("[IMG_BREAK]"), tokens.id("[IMG_END]")

    def layout(facts: ItemFacts) -> TokenLayout:
        rows, columns = facts.shape[2] // side, facts.shape[3] // side
        ids = ([tokens.row] * columns + [after_row]) * rows
        ids[-1] = after_image
        return tokens.layout(ids)

    return KindTokens(tokens.row, layout)


def _idefics3(media: MediaConfig, settings: ImageSettings, tokens: _Tokens, config: dict[str, Any]) -> KindTokens:
    vision = media.vision
    if settings.max_side > vision.image_size:
        raise ModelError(
            f"tiles have {settings.max_side} pixels of a side, more than the vision tower's {vision.image_size}"
        )
    patches = settings.max_side // vision.patch_size
    if patches % media.shuffle:
        raise ModelError(f"{patches} x {patches} patches cannot be merged by {media.shuffle}")
    num_tokens = (patches // media.shuffle) ** 2
    image = tokens.text(tokens.row) * num_tokens
    around = "<fake_token_around_image>"
    tokens.id(around)

    def layout(facts: ItemFacts) -> TokenLayout:
        _, rows, columns = facts.grid
        text = "".join(
            "".join(f"{around}<row_{row}_col_{column}>{image}" for column in range(1, columns + 1)) + "\n"
            for row in range(1, rows + 1)
        )
        text += ("\n" if rows else "") + f"{around}<global-img>{image}{around}"
        return tokens.layout(tokens.ids(text))

    return KindTokens(tokens.row, layout)


def _qwen2_vl(media: MediaConfig, settings: ImageSettings, tokens: _Tokens, config: dict[str, Any]) -> KindTokens:
    _check_patches(media, settings, "image")
    merged = media.vision.merge_size**2

    def layout(facts: ItemFacts) -> TokenLayout:
        return tokens.layout([tokens.row] * (math.prod(facts.grid) // merged))

    return KindTokens(tokens.row, layout)


def _qwen_videos(media: MediaConfig, settings: ImageSettings, tokens: _Tokens) -> KindTokens:
    """All rows one after the other, or, of Qwen3-VL, those of each step in time between two tokens, after its time in seconds."""
    _check_patches(media, settings, "video")
    merged = media.vision.merge_size**2
    tokens.text(tokens.row)
    if media.family != "qwen3_vl":

        def plain(facts: ItemFacts) -> TokenLayout:
            layout = tokens.layout([tokens.row] * (math.prod(facts.grid) // merged))
            last = np.array([facts.grid[0] - 1])
            num_places = int(time_places(last, media.vision.places_per_second * facts.step_s or 1.0)[0]) + 1
            return replace(layout, extra_places=max(0, num_places - layout.num_rows))

        return KindTokens(tokens.row, plain)
    begin, end = tokens.id("<|vision_start|>"), tokens.id("<|vision_end|>")

    def layout(facts: ItemFacts) -> TokenLayout:
        steps, height, width = facts.grid
        together = media.vision.temporal_patch_size
        fps = together / facts.step_s
        ids: list[int] = []
        for first in range(0, steps * together, together):
            last = min(first + together, facts.num_frames) - 1
            ids += tokens.ids(f"<{(first / fps + last / fps) / 2:.1f} seconds>")
            ids += [begin, *[tokens.row] * (height * width // merged), end]
        return tokens.layout(ids)

    return KindTokens(tokens.row, layout)


def _anyres(media: MediaConfig, settings: ImageSettings, tokens: _Tokens, config: dict[str, Any]) -> KindTokens:
    """The whole image, and a larger one without the black around it, with a token at the end of each row; or the former alone, with one token."""
    vision = media.vision
    if settings.recipe != "anyres" or settings.size.height != vision.image_size:
        raise ModelError(f"the image processor does not make tiles of {vision.image_size} x {vision.image_size} pixels")
    side = vision.image_size // vision.patch_size
    if settings.pinpoints != media.pinpoints:
        raise ModelError("image_grid_pinpoints of the image processor are not those of the model")

    def layout(facts: ItemFacts) -> TokenLayout:
        if facts.shape[0] == 1:
            return tokens.layout([tokens.row] * (side * side + 1))
        _, height, width = facts.grid
        tall, wide = best_resolution(height, width, settings.pinpoints)
        rows, columns = (each // vision.image_size * side for each in (tall, wide))
        rows, columns = shrunk(*without_border(height, width, rows, columns), media.max_tiles * side**2)
        return tokens.layout([tokens.row] * (side * side + rows * columns + rows))

    return KindTokens(tokens.row, layout)


def _internvl(media: MediaConfig, settings: ImageSettings, tokens: _Tokens, config: dict[str, Any]) -> KindTokens:
    vision = media.vision
    size = settings.size
    if settings.recipe != "tiled" or (size.height, size.width) != (vision.image_size, vision.image_size):
        raise ModelError(f"the image processor does not make tiles of {vision.image_size} x {vision.image_size} pixels")
    ratio = config.get("downsample_ratio", 0.5)
    num_tokens = int((vision.image_size // vision.patch_size) ** 2 * ratio**2)
    begin, end = tokens.id("<img>"), tokens.id("</img>")

    def layout(facts: ItemFacts) -> TokenLayout:
        return tokens.layout([begin, *[tokens.row] * (num_tokens * facts.shape[0]), end])

    return KindTokens(tokens.row, layout)


def _gemma3(media: MediaConfig, settings: ImageSettings, tokens: _Tokens, config: dict[str, Any]) -> KindTokens:
    _check_side(settings, media.vision.image_size)
    begin, end = (
        _token(config, name, default) for name, default in (("boi_token_index", 255999), ("eoi_token_index", 256000))
    )
    apart = tokens.ids("\n\n")
    layout = tokens.layout([*apart, begin, *[tokens.row] * media.mm_tokens, end, *apart])
    tokens.text(end)
    return KindTokens(begin, lambda facts: layout)


_FAMILIES: dict[str, Callable[[MediaConfig, ImageSettings, _Tokens, dict[str, Any]], KindTokens]] = {
    "llava": _llava,
    "mistral3": _pixtral,
    "idefics3": _idefics3,
    "smolvlm": _idefics3,
    "qwen2_vl": _qwen2_vl,
    "qwen2_5_vl": _qwen2_vl,
    "qwen3_vl": _qwen2_vl,
    "gemma3": _gemma3,
    "llava_next": _anyres,
    "llava_onevision": _anyres,
    "internvl": _internvl,
}


def _line_ends(tokens: _Tokens) -> Joints:
    """Joins runs of line ends: Gemma has a token for each number of them up to 31."""
    runs = {}
    for count in range(1, _LONGEST_RUN + 1):
        ids = tokens.ids("\n" * count)
        if len(ids) == 1:
            runs[ids[0]] = count
    return Joints(runs, lambda count: tokens.ids("\n" * count))


def _pixtral_settings(media: MediaConfig, settings: ImageSettings) -> ImageSettings:
    """Patches that are merged are resized to as one: transformers' processor passes it so."""
    if settings.recipe != "pixtral":
        raise ModelError("a Pixtral tower needs a PixtralImageProcessor")
    vision = media.vision
    merge = vision.merge_size if media.family == "mistral3" else 1
    return msgspec.structs.replace(settings, patch_size=vision.patch_size, merge_size=merge)


def _check_patches(media: MediaConfig, settings: ImageSettings, what: str) -> None:
    """Raises ModelError if the processor's patches are not those of the tower."""
    for name in ("patch_size", "temporal_patch_size", "merge_size"):
        theirs, ours = getattr(settings, name), getattr(media.vision, name)
        if theirs != ours:
            raise ModelError(f"the {what} processor's {name} is {theirs}, and that of the vision tower {ours}")


def _check_side(settings: ImageSettings, side: int) -> None:
    """Raises ModelError if images do not come out in the one size that the tower takes."""
    size = settings.size
    out = settings.crop or ((size.height, size.width) if settings.resizes else (0, 0))
    if settings.recipe != "fixed" or out != (side, side):
        raise ModelError(
            f"the image processor makes images of {out[0]} x {out[1]} pixels, and the vision tower takes {side} x {side}"
        )


def _token(config: dict[str, Any], name: str, default: int) -> int:
    value = config.get(name, default)
    if not isinstance(value, int):
        raise ModelError(f"config.json: {name} is {value!r:.80}; expected a token")
    return value
