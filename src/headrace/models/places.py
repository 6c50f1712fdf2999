"""Where the tokens of a prompt with images and videos are for rotary embedding in three parts (M-RoPE): in time, height and width.

Owns the places. Does not own the tables (`layers.rotary.SectionedRotary`). Used by the thread that runs the model.

Sources: P. Wang et al., "Qwen2-VL" (2024), section 2.1; S. Bai et al., "Qwen2.5-VL Technical Report" (2025), section 2.1.2, of places in time.
"""

import numpy as np
import numpy.typing as npt

from headrace.media_kinds import MediaKind
from headrace.messages.media import MediaItem, time_places
from headrace.messages.requests import PromptContent

Places = npt.NDArray[np.int32]
"""int32[3, num_tokens]."""


def places_of(content: PromptContent, merge_size: int, places_per_second: float = 0.0) -> tuple[Places, int]:
    """The places of a prompt's tokens, and what is added to the index of a token after the prompt, for all three.

    Tokens of text are at the same place in all three. Those of an image are at its place in time and, from there on, in its rows and columns of
    `merge_size` patches each. Those of a video are, step by step, at places in time: one for each step, or so many for a second. Text after
    either goes on behind the last of its places, as in the papers and in the code of the models' authors. transformers 5.23 lets text go on behind
    the longer side of a frame, in the midst of a longer video's time, and yet generated tokens behind all of it.
    """
    places = np.tile(np.arange(content.num_tokens, dtype=np.int32), (3, 1))
    shift = 0
    for span in content.spans:
        item = content.media[span.item]
        rows, columns = (side // merge_size for side in item.grid[1:])
        assert span.length % (rows * columns) == 0, (span, item.grid)
        first = span.start + shift
        index = np.arange(span.length)
        inside = places[:, span.start : span.end]
        inside[0] = first + _in_time(index // (rows * columns), item, places_per_second)
        inside[1] = first + index // columns % rows
        inside[2] = first + index % columns
        shift += int(inside.max()) + 1 - first - span.length
        places[:, span.end :] = np.arange(span.end, content.num_tokens, dtype=np.int32) + shift
    return places, shift


def _in_time(steps: npt.NDArray[np.int64], item: MediaItem, places_per_second: float) -> npt.NDArray[np.int64]:
    if item.kind != MediaKind.VIDEO or not places_per_second:
        return steps
    return time_places(steps, places_per_second * item.step_s)
