"""Where the tokens of a prompt with images are for rotary embedding in three parts (M-RoPE): in time, height and width.

Owns the places. Does not own the tables (`layers.rotary.SectionedRotary`). Used by the thread that runs the model.

Source: P. Wang et al., "Qwen2-VL" (2024), section 2.1.
"""

import numpy as np
import numpy.typing as npt

from headrace.messages.requests import PromptContent

Places = npt.NDArray[np.int32]
"""int32[3, num_tokens]."""


def places_of(content: PromptContent, merge_size: int) -> tuple[Places, int]:
    """The places of a prompt's tokens, and what is added to the index of a token after the prompt, for all three.

    Tokens of text are at the same place in all three. Those of an image are at its place in time and, from there on, in its rows and columns of
    `merge_size` patches each; the text after it goes on behind the longer of its sides. Each image has one span.
    """
    places = np.tile(np.arange(content.num_tokens, dtype=np.int32), (3, 1))
    shift = 0
    for span in content.spans:
        time, height, width = content.media[span.item].grid
        rows, columns = height // merge_size, width // merge_size
        assert span.length == time * rows * columns, (span, content.media[span.item].grid)
        first = span.start + shift
        index = np.arange(span.length)
        inside = places[:, span.start : span.end]
        inside[0] = first + index // (rows * columns)
        inside[1] = first + index // columns % rows
        inside[2] = first + index % columns
        shift += max(rows, columns) - span.length
        places[:, span.end :] = np.arange(span.end, content.num_tokens, dtype=np.int32) + shift
    return places, shift
