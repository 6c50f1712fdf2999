"""GGUF files of every type, alone, in parts and as a vision encoder, with damages: a ModelError in one line, never another error or wrong values.

NaN and infinity are refused, wherever they are and however the model would run: in its own bits, rounded to int8 or int4, in floats.
"""

import struct
from pathlib import Path
from typing import NamedTuple

import gguf
import numpy as np
import pytest
from test_gguf import write_gguf
from test_gguf_mmproj import SIZE, encoder, text_model

from headrace.checkpoint.base import Checkpoint
from headrace.checkpoint.gguf import BLOCK_TYPES, BlockType, GgufFile
from headrace.checkpoint.source import open_checkpoint
from headrace.errors import ModelError

TENSOR, NAME = "blk.0.attn_q.weight", "model.layers.0.self_attn.q_proj.weight"
NOT_NUMBERS = (0x7F, 0xFF)
"""As the upper byte of a float of 16 bits or as one of 8, and as a power of two."""
COUNTS = (0, 1, 31, 33, 255, 2**31, 2**32 - 1, 2**62, 2**63, 2**64 - 1)


class Victim(NamedTuple):
    """A model that is opened, and the file of it that is damaged. name: by which the checkpoint has its only tensor of the type."""

    path: Path
    file: Path
    tensor: str
    name: str

    def open(self) -> Checkpoint:
        return open_checkpoint(self.path, str(self.file) if self.file.name.startswith("mmproj") else "auto")

    def read(self) -> list[str]:
        """Read the tensor in each way in which models load it; why it is refused, each time that it is."""
        checkpoint = self.open()
        refusals = []
        for read in (checkpoint.blocks, checkpoint.quantized, lambda name: checkpoint.checked_tensor(name, True)):
            try:
                read(self.name)
            except ModelError as error:
                refusals.append(error.message)
        return refusals


def variants(kind: BlockType) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """A block of random bits; that with each of its bytes, and all of them, as NOT_NUMBERS, uint8[n, block_bytes], but for those of zeros alone; and
    which of them have values that are no numbers."""
    size, draw = max(kind.block_bytes, 4), np.random.default_rng(3)
    blocks = draw.integers(0, 256, (200, size), dtype=np.uint8)
    values = dequantized(blocks, kind)
    good = np.isfinite(values).all(1) & (values != 0).any(1) & (np.abs(values) < 1e4).all(1)
    block = blocks[good][0]
    damaged = np.repeat(block[None], 2 * size + 2, axis=0)
    damaged[np.arange(2 * size), np.arange(2 * size) // 2] = NOT_NUMBERS * size
    damaged[-2:] = np.array(NOT_NUMBERS)[:, None]
    values = dequantized(damaged, kind)
    kept = (values != 0).any(1)
    return block, damaged[kept], ~np.isfinite(values[kept]).all(1)


def dequantized(blocks: np.ndarray, kind: BlockType) -> np.ndarray:
    """By the gguf library."""
    with np.errstate(all="ignore"):
        return gguf.quants.dequantize(blocks, gguf.GGMLQuantizationType[kind.name])


def make(folder: Path, place: str, kind: BlockType, block: np.ndarray) -> Victim:
    stored = (block[None], kind.name)
    if place == "alone":
        path = write_gguf(folder / "m.gguf", {"token_embd.weight": TABLE, TENSOR: stored}, QWEN2, "qwen2")
        return Victim(path, path, TENSOR, NAME)
    if place == "in parts":
        for number, tensors in enumerate(({"token_embd.weight": TABLE}, {TENSOR: stored})):
            split = {"split.no": number, "split.count": 2, "split.tensors.count": 2}
            write_gguf(folder / f"m-{number + 1:05}-of-00002.gguf", tensors, QWEN2 | split, "qwen2")
        return Victim(folder / "m-00001-of-00002.gguf", folder / "m-00002-of-00002.gguf", TENSOR, NAME)
    rows = np.repeat(block[None], SIZE, axis=0)
    file = encoder(folder, "mmproj.gguf", **{"mm.2.weight": (rows, kind.name)})
    return Victim(text_model(folder), file, "mm.2.weight", "multi_modal_projector.linear_2.weight")


TABLE = np.ones((3, SIZE), np.float32)
QWEN2 = {
    "qwen2.context_length": 128,
    "qwen2.embedding_length": SIZE,
    "qwen2.block_count": 1,
    "qwen2.feed_forward_length": 96,
    "qwen2.attention.head_count": 4,
    "qwen2.attention.layer_norm_rms_epsilon": 1e-5,
}
every_type = pytest.mark.parametrize("kind", BLOCK_TYPES.values(), ids=lambda kind: kind.name)
every_place = pytest.mark.parametrize("place", ["alone", "in parts", "encoder"])


@every_type
@every_place
def test_values_that_are_no_numbers_are_refused_however_they_are_read(place: str, kind: BlockType, tmp_path: Path):
    block, damaged, bad = variants(kind)
    victim = make(tmp_path, place, kind, block)
    offset = GgufFile(victim.file, is_part=True).tensors[victim.tensor].offset
    ways = 1 + (victim.open().blocks(victim.name) is not None) + (victim.open().quantized(victim.name) is not None)
    assert victim.read() == []
    assert bad.any() or kind.name == "NVFP4"  # whose scales are numbers, whatever their bits
    harmless = np.flatnonzero(~bad)
    for index in [*np.flatnonzero(bad)[-8:], *harmless[:: max(1, len(harmless) // 8)]]:
        with victim.file.open("r+b") as file:
            file.seek(offset)
            file.write(damaged[index].tobytes())
        refusals = victim.read()
        assert all(f"{victim.file.name}: tensor {victim.name} contains NaN or infinity" == text for text in refusals)
        assert len(refusals) == ways if bad[index] else len(refusals) in (0, ways - 1), (index, refusals)


@every_type
@every_place
def test_every_truncation_names_the_file(place: str, kind: BlockType, tmp_path: Path):
    victim = make(tmp_path, place, kind, variants(kind)[0])
    whole, tensor = victim.file.read_bytes(), GgufFile(victim.file, is_part=True).tensors[victim.tensor]
    end = tensor.offset + tensor.num_bytes
    for size in (*range(0, tensor.offset, 1 + tensor.offset // 20), tensor.offset, end - 1):
        victim.file.write_bytes(whole[:size])
        with pytest.raises(ModelError, match=victim.file.name) as refused:
            victim.open()
        assert "\n" not in refused.value.message


@every_type
@every_place
def test_wrong_counts_types_and_places_are_one_line(place: str, kind: BlockType, tmp_path: Path):
    """Or another matrix, which does not fit the model or has other values; never one that is outside of the file."""
    victim = make(tmp_path, place, kind, variants(kind)[0])
    whole = victim.file.read_bytes()
    begin = whole.index(victim.tensor.encode()) + len(victim.tensor)
    changes = [(begin + 4 + 8 * place, 8, count) for place in (0, 1) for count in COUNTS]
    changes += [(begin, 4, count) for count in (0, 1, 3, 4, 5, 2**31)]
    changes += [(begin + 20, 4, number) for number in range(48)]
    changes += [(begin + 24, 8, offset) for offset in (1, 32, 2**20, *COUNTS)]
    changes += [(8, 8, count) for count in COUNTS]  # of tensors
    refusals = []
    for at, size, value in changes:
        victim.file.write_bytes(whole[:at] + struct.pack("<Q", value)[:size] + whole[at + size :])
        try:
            refusals += victim.read()
        except ModelError as error:
            refusals.append(error.message)
    assert len(refusals) > len(changes) // 2
    assert not any("\n" in message for message in refusals)
