"""The tokens of a model's media, which its family says (`checkpoint/media_tokens.py`), and how they join those of the text around them."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

from headrace.checkpoint.families import all_families
from headrace.checkpoint.media_config import AudioConfig, MediaConfig
from headrace.checkpoint.media_tokens import KindTokens, TokenLayout, Tokens, Vocabulary
from headrace.checkpoint.preprocessor_config import ImageSettings
from headrace.errors import ModelError
from headrace.media_kinds import MediaKind
from headrace.messages.media import MediaItem, MediaSupport

_CACHED_LAYOUTS = 256
_LONGEST_RUN = 32


@dataclass(frozen=True, slots=True)
class LoadedItem:
    item: MediaItem
    layout: TokenLayout


class Joints:
    """Puts layouts and text together, so that the tokens are those of the whole text.

    letter_runs: of the tokens that are runs of one letter, such as line ends, the number of letters. encode: the tokens of a run of so many. Where a
    layout and the text beside it have such runs, the text has one run, which the tokenizer may read as other tokens.
    """

    def __init__(self, letter_runs: Mapping[int, int], encode: Callable[[int], Sequence[int]]) -> None:
        self._runs = letter_runs
        self._encode = encode

    def append(self, tokens: list[int], more: Sequence[int]) -> int:
        """Append to the tokens of a text those of the text after it. Returns the index at which `more` would begin; it may be none of
        theirs, if both meet in a run."""
        before = 0
        while before < len(tokens) and tokens[-1 - before] in self._runs:
            before += 1
        after = 0
        while after < len(more) and more[after] in self._runs:
            after += 1
        if before and after:
            run = [*tokens[len(tokens) - before :], *more[:after]]
            tokens[len(tokens) - before :] = self._encode(sum(self._runs[token] for token in run))
            more = more[after:]
        else:
            after = 0
        start = len(tokens) - after
        tokens += more
        return start


PLAIN = Joints({}, lambda count: ())  # of layouts that begin and end with special tokens


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
    own = all_families().vision[media.family]
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


def make_audio_family(audio: AudioConfig, vocabulary: Vocabulary, reasons: Mapping[MediaKind, str]) -> Family:
    """The family of an audio checkpoint. reasons: why it does not take other kinds. Raises ModelError."""
    tokens = Tokens(vocabulary, audio.audio_token_id)
    kinds: dict[MediaKind, KindTokens] = {MediaKind.AUDIO: all_families().audio[audio.family].tokens(audio, tokens)}
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
