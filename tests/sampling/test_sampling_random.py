"""The counter-based generator."""

import numpy as np
import pytest

from headrace.sampling.draw import philox4x32, uniform


@pytest.mark.parametrize(
    ("counter", "key", "want"),
    [  # known answers of the Random123 distribution (kat_vectors)
        ([0] * 4, [0] * 2, [0x6627E8D5, 0xE169C58D, 0xBC57AC4C, 0x9B00DBD8]),
        ([0xFFFFFFFF] * 4, [0xFFFFFFFF] * 2, [0x408F276D, 0x41C83B0E, 0xA20BC7C6, 0x6D5451FD]),
        (
            [0x243F6A88, 0x85A308D3, 0x13198A2E, 0x03707344],
            [0xA4093822, 0x299F31D0],
            [0xD16CFE09, 0x94FDCCEB, 0x5001E420, 0x24126EA1],
        ),
    ],
)
def test_known_answers(counter, key, want):
    words = philox4x32(np.array(counter, dtype=np.uint64)[:, None], np.array(key, dtype=np.uint64)[:, None])
    assert words[:, 0].tolist() == want


def test_a_number_depends_on_its_own_pair_alone():
    seeds, positions = [1, 2, 3, 2**63 - 1], [9, 0, 9, 2**31]
    together = uniform(seeds, positions)
    alone = [uniform([s], [p])[0] for s, p in zip(seeds, positions, strict=True)]
    assert together.tolist() == alone
    assert len(set(alone)) == 4


def test_numbers_are_in_range_and_uniform_along_positions_and_along_seeds():
    for numbers in (uniform([5] * 20000, range(20000)), uniform(range(20000), [5] * 20000)):
        assert numbers.min() >= 0.0
        assert numbers.max() < 1.0
        counts = np.histogram(numbers, bins=64, range=(0, 1))[0]
        # Chi-square with 63 degrees of freedom exceeds 111 with probability 1.6e-4; the seeds are fixed.
        assert ((counts - 20000 / 64) ** 2 / (20000 / 64)).sum() < 111
        assert abs(np.corrcoef(numbers[:-1], numbers[1:])[0, 1]) < 0.03


def test_streams_are_unrelated():
    first, second = uniform([5] * 5000, range(5000)), uniform([5] * 5000, range(5000), stream=1)
    assert abs(np.corrcoef(first, second)[0, 1]) < 0.05
