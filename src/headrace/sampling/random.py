"""Random numbers that are a pure function of (seed, position, stream).

Owns the generator of every draw. It has no state, so a draw does not depend on the batch, on earlier draws, on retraction or on the device.
Uses integers on the host; runs in the sampler's thread (a worker's).
"""

from collections.abc import Sequence
from typing import Final

import numpy as np
import numpy.typing as npt

_MULTIPLIERS: Final = np.array([[0xD2511F53], [0xCD9E8D57]], dtype=np.uint64)
_WEYL: Final = np.array([[0x9E3779B9], [0xBB67AE85]], dtype=np.uint64)
_LOW32: Final = np.uint64(0xFFFFFFFF)
_SHIFT32: Final = np.uint64(32)
_ROUNDS: Final = 10

UInt64Array = npt.NDArray[np.uint64]
Int64Array = npt.NDArray[np.int64]


def philox4x32(counter: UInt64Array, key: UInt64Array) -> UInt64Array:
    """Philox4x32-10 of Salmon et al., "Parallel Random Numbers: As Easy as 1, 2, 3", SC 2011.

    counter: uint64[4, n] and key: uint64[2, n], each value a 32-bit word. Returns uint64[4, n], 32-bit words.
    """
    even, odd = counter[[0, 2]], counter[[1, 3]]
    for _ in range(_ROUNDS):
        product = _MULTIPLIERS * even
        even = (product[::-1] >> _SHIFT32) ^ odd ^ key
        odd = product[::-1] & _LOW32
        key = (key + _WEYL) & _LOW32
    return np.stack((even[0], odd[0], even[1], odd[1]))


def uniform(
    seeds: Sequence[int] | UInt64Array, positions: Sequence[int] | Int64Array, stream: int = 0
) -> npt.NDArray[np.float64]:
    """float64[n] in [0, 1), 53 random bits each: one number for each pair (seed, position).

    seeds: in [0, 2**64). positions: index that the sampled token will have, in [0, 2**64).
    stream: in [0, 2**32); different streams give independent numbers for the same pair.
    """
    seed, position = np.array(seeds, dtype=np.uint64), np.array(positions, dtype=np.uint64)
    counter = np.stack(
        (position & _LOW32, position >> _SHIFT32, np.full_like(position, stream), np.zeros_like(position))
    )
    words = philox4x32(counter, np.stack((seed & _LOW32, seed >> _SHIFT32)))
    bits = (words[0] << np.uint64(21)) ^ (words[1] >> np.uint64(11))
    numbers: npt.NDArray[np.float64] = bits.astype(np.float64) * 2.0**-53
    return numbers
