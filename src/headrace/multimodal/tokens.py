"""What families need to say which tokens stand for an item: the vocabulary, and checks that the processor's sizes are those of the encoder."""

from collections.abc import Callable
from typing import Any, NamedTuple, Protocol

from headrace.checkpoint.image_processors import ImageSettings
from headrace.checkpoint.media_config import MediaConfig
from headrace.errors import ModelError
from headrace.multimodal.layout import ItemFacts, TokenLayout, layout_of


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


class Tokens:
    """The vocabulary, and the token that stands for a row."""

    def __init__(self, vocabulary: Vocabulary, row: int) -> None:
        self._vocabulary = vocabulary
        self.row = row

    def text(self, token_id: int) -> str:
        """Raises ModelError."""
        text = self._vocabulary.id_to_token(token_id)
        if text is None:
            raise ModelError(f"the tokenizer has no token {token_id}, which stands for an image, audio or a video")
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


def token_of(config: dict[str, Any], name: str, default: int) -> int:
    """A token of config.json. Raises ModelError."""
    value = config.get(name, default)
    if not isinstance(value, int):
        raise ModelError(f"config.json: {name} is {value!r:.80}; expected a token")
    return value
