"""The tokens that stand for an item of media in a prompt, and which of them are rows of the encoder's output: what a family needs to say so.

Imports no numpy, which reading a config does not need.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, Protocol

from msgspec.structs import replace

from headrace.checkpoint.media_config import MediaConfig
from headrace.checkpoint.preprocessor_config import ImageSettings
from headrace.errors import ModelError


class ItemFacts(NamedTuple):
    """What the tokens of an item depend on. shape, grid, step_s: see `MediaItem`. num_frames: of a video."""

    shape: tuple[int, ...]
    grid: tuple[int, int, int] = (0, 0, 0)
    step_s: float = 0.0
    num_frames: int = 0


@dataclass(frozen=True, slots=True)
class TokenLayout:
    """What stands for an item in a prompt. tokens: in place of its own token. spans: (start, length, first_row) of the rows among
    them. extra_places: how many more positions than tokens it may take."""

    tokens: tuple[int, ...]
    spans: tuple[tuple[int, int, int], ...]
    extra_places: int = 0

    @property
    def num_rows(self) -> int:
        """Tokens that are rows of the encoder's output."""
        return sum(length for _, length, _ in self.spans)


def layout_of(tokens: Sequence[int], row_token: int) -> TokenLayout:
    spans: list[tuple[int, int, int]] = []
    start = row = 0
    for index, token in enumerate([*tokens, None]):
        if token == row_token:
            continue
        if index > start:
            spans.append((start, index - start, row))
            row += index - start
        start = index + 1
    return TokenLayout(tuple(tokens), tuple(spans))


class Vocabulary(Protocol):
    def encode(self, text: str, add_special_tokens: bool = True, allow_special: bool = False) -> list[int]: ...

    def token_to_id(self, token: str) -> int | None: ...

    def id_to_token(self, token_id: int) -> str | None: ...


class KindTokens(NamedTuple):
    """Of one kind of media: the token that stands for an item in a prompt that a client sends, and what stands for it in what the model reads."""

    token_id: int
    layout: Callable[[ItemFacts], TokenLayout]


class Tokens:
    def __init__(self, vocabulary: Vocabulary, row: int) -> None:
        self._vocabulary = vocabulary
        self.row = row

    def text(self, token_id: int) -> str:
        text = self._vocabulary.id_to_token(token_id)
        if text is None:
            raise ModelError(f"the tokenizer has no token {token_id}, which stands for an image, audio or a video")
        return text

    def id(self, text: str) -> int:
        token_id = self._vocabulary.token_to_id(text)
        if token_id is None:
            raise ModelError(f"the tokenizer has no token {text!r}, which its media need")
        return token_id

    def ids(self, text: str) -> list[int]:
        return self._vocabulary.encode(text, add_special_tokens=False, allow_special=True)

    def layout(self, tokens: list[int]) -> TokenLayout:
        return layout_of(tokens, self.row)


def check_patches(media: MediaConfig, settings: ImageSettings, what: str) -> None:
    """Raises ModelError if the processor's patches are not those of the tower."""
    for name in ("patch_size", "temporal_patch_size", "merge_size"):
        theirs, ours = getattr(settings, name), getattr(media.vision, name)
        if theirs != ours:
            raise ModelError(f"the {what} processor's {name} is {theirs}, and that of the vision tower {ours}")


def check_side(settings: ImageSettings, side: int) -> None:
    """Raises ModelError if images do not come out in the one size that the tower takes."""
    size = settings.size
    out = settings.crop or ((size.height, size.width) if settings.resizes else (0, 0))
    if settings.recipe != "fixed" or out != (side, side):
        raise ModelError(
            f"the image processor makes images of {out[0]} x {out[1]} pixels, and the vision tower takes {side} x {side}"
        )


def check_tiles(settings: ImageSettings, side: int) -> None:
    """Raises ModelError if images are not cut into tiles of the one size that the tower takes."""
    if settings.recipe != "tiled" or (settings.size.height, settings.size.width) != (side, side):
        raise ModelError(f"the image processor does not make tiles of {side} x {side} pixels")


def into_tiles(media: MediaConfig, settings: ImageSettings) -> ImageSettings:
    """`Vision.settings` of families whose processor asks for tiles, whatever the file says."""
    return replace(settings, splits=True)


def token_of(config: dict[str, Any], name: str, default: int) -> int:
    value = config.get(name, default)
    if not isinstance(value, int):
        raise ModelError(f"config.json: {name} is {value!r:.80}; expected a token")
    return value
