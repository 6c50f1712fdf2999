"""What stands for one image, sound or video in a prompt: the tokens that transformers' processors write.

Which they are, a family says (`headrace.families`, with `layout.py`). Does not prepare values (`processors`), and knows no prompts.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from headrace.checkpoint.audio_config import AudioConfig
from headrace.checkpoint.families import audio as audio_families
from headrace.checkpoint.families import vision
from headrace.checkpoint.image_processors import ImageSettings
from headrace.checkpoint.media_config import MediaConfig
from headrace.errors import ModelError
from headrace.media_kinds import MediaKind
from headrace.messages.media import MediaSupport
from headrace.multimodal.layout import PLAIN, Joints, KindTokens, Tokens, Vocabulary

_CACHED_LAYOUTS = 256
_LONGEST_RUN = 32


@dataclass(frozen=True, slots=True)
class Family:
    """The media tokens of a model. kinds: what it takes. joints: put layouts and text together.
    several_are_squares: of several images in a prompt, each is one square."""

    support: MediaSupport
    kinds: Mapping[MediaKind, KindTokens]
    joints: Joints = PLAIN
    several_are_squares: bool = False


def make_family(
    media: MediaConfig,
    settings: ImageSettings,
    vocabulary: Vocabulary,
    config: dict[str, Any],
    reasons: Mapping[MediaKind, str] | None = None,
    videos: ImageSettings | None = None,
) -> tuple[Family, ImageSettings]:
    """The family of a vision checkpoint, and the settings as this family has them. config: its config.json. reasons: why it does not take other
    kinds. videos: settings of frames, None = it takes none. Raises ModelError, with the reason why its images cannot be served."""
    if media.vision.num_channels != 3:
        raise ModelError(f"the vision tower takes {media.vision.num_channels} channels; only 3 are served")
    own = vision()[media.family]
    tokens = Tokens(vocabulary, media.image_token_id)
    tokens.text(tokens.row)  # a server without a tokenizer has no tokens
    if own.settings is not None:
        settings = own.settings(media, settings)
    kinds: dict[MediaKind, KindTokens] = {MediaKind.IMAGE: own.tokens(media, settings, tokens, config)}
    why = dict(reasons or {})
    if videos is not None:
        assert own.video_tokens is not None, media.family
        try:
            kinds[MediaKind.VIDEO] = own.video_tokens(media, videos, vocabulary, config)
        except ModelError as error:
            why[MediaKind.VIDEO] = error.message
    joints = _line_ends(tokens) if own.joins_line_ends else PLAIN
    return _family(media.family, kinds, tokens, why, joints, own.several_are_squares), settings


def make_hearing_family(audio: AudioConfig, vocabulary: Vocabulary, reasons: Mapping[MediaKind, str]) -> Family:
    """The family of an audio checkpoint. reasons: why it does not take other kinds. Raises ModelError."""
    tokens = Tokens(vocabulary, audio.audio_token_id)
    kinds: dict[MediaKind, KindTokens] = {MediaKind.AUDIO: audio_families()[audio.family].tokens(audio, tokens)}
    return _family(audio.family, kinds, tokens, reasons)


def _family(
    name: str,
    kinds: Mapping[MediaKind, KindTokens],
    tokens: Tokens,
    reasons: Mapping[MediaKind, str],
    joints: Joints = PLAIN,
    several_are_squares: bool = False,
) -> Family:
    texts = {kind: tokens.text(own.token_id) for kind, own in kinds.items()}
    others = {kind: reason for kind, reason in reasons.items() if kind not in kinds}
    kept = {kind: KindTokens(own.token_id, lru_cache(_CACHED_LAYOUTS)(own.layout)) for kind, own in kinds.items()}
    return Family(MediaSupport(name, texts, others), kept, joints, several_are_squares)


def _line_ends(tokens: Tokens) -> Joints:
    """Joins runs of line ends: Gemma has a token for each number of them up to 31."""
    runs = {}
    for count in range(1, _LONGEST_RUN + 1):
        ids = tokens.ids("\n" * count)
        if len(ids) == 1:
            runs[ids[0]] = count
    return Joints(runs, lambda count: tokens.ids("\n" * count))
