"""A GGUF file as a checkpoint: Hugging Face's names, shapes and order of rows; its blocks as quantised matrices, without converting to floats.

Block layouts: the `block_*` structs of ggml-common.h. Runs in the process that loads the model.
"""

import math
from collections import Counter
from pathlib import Path
from typing import TYPE_CHECKING

import msgspec
import numpy as np

from headrace.checkpoint.base import Checkpoint
from headrace.checkpoint.gguf import BlockType, Bytes, GgufFile, dequantize, half, k_scales, opened
from headrace.checkpoint.gguf_names import hf_config
from headrace.checkpoint.gguf_tensors import EncoderSource, GgufSource, map_tensors
from headrace.checkpoint.model_config import ModelConfig, parse_hf_config
from headrace.checkpoint.quantized_matrix import BlockMatrix, QuantizedMatrix
from headrace.checkpoint.sampling_defaults import from_gguf
from headrace.checkpoint.weight_formats import FORMATS, GGUF_METHOD, KERNEL_GROUP, Scheme, StoredType
from headrace.errors import ModelError

if TYPE_CHECKING:
    import torch

# type name -> (scheme, bytes of a block)
_TYPES: dict[str, tuple[Scheme, int]] = {
    "Q8_0": ("int8", 34),
    "Q4_0": ("int4", 18),
    "Q4_1": ("int4", 20),
    "Q4_K": ("int4", 144),
}


def quantized_matrix(type_name: str, rows: Bytes, shape: tuple[int, ...]) -> QuantizedMatrix | None:
    """The matrix of this shape in the blocks uint8[rows, row_bytes], with the same weights as `gguf.dequantize`; None for a type that no kernel
    supports."""
    import torch

    if type_name not in _TYPES:
        return None
    scheme, block_bytes = _TYPES[type_name]
    n, k = shape
    blocks: Bytes = np.ascontiguousarray(rows).reshape(-1, block_bytes)
    minimums = None
    if type_name == "Q4_K":
        scales, minimums = k_scales(blocks)
        # [n, 4, 32] bytes: the low nibbles are sub-block 2i, the high ones 2i + 1
        packed = blocks[:, 16:].reshape(-1, 4, 1, 32)
        codes = packed >> np.array([0, 4], np.uint8)[:, None] & 15
    elif type_name == "Q8_0":
        scales, codes = half(blocks, 0), blocks[:, 2:] ^ 0x80
    else:
        packed = blocks[:, -16:]
        scales, codes = half(blocks, 0), np.concatenate([packed & 15, packed >> 4], axis=1)
        if type_name == "Q4_1":
            minimums = -half(blocks, 2)

    def by_group(values: "np.ndarray[tuple[int, ...], np.dtype[np.float32]]") -> torch.Tensor:
        return torch.from_numpy(np.ascontiguousarray(values)).reshape(n, k // KERNEL_GROUP)

    return QuantizedMatrix(
        scheme,
        torch.from_numpy(np.ascontiguousarray(codes)).reshape(n, k),
        by_group(scales),
        None if minimums is None else by_group(minimums),
        KERNEL_GROUP,
    )


_FLOATS = ("F32", "F16", "BF16")
_SCALES: dict[str, tuple[int, ...]] = {
    "F32": (), "F16": (), "BF16": (), "Q4_0": (0,), "Q4_1": (0, 2), "Q5_0": (0,), "Q5_1": (0, 2), "Q8_0": (0,), "Q2_K": (80, 82),
    "Q3_K": (108,), "Q4_K": (0, 2), "Q5_K": (0, 2), "Q6_K": (208,), "IQ4_NL": (0,), "IQ4_XS": (0,), "MXFP4": (),
}  # fmt: skip
"""Types in whose bits the kernels compute, and the places of the float16 scales in a block."""


_FILE_TYPES: dict[object, str] = {
    0: "F32", 1: "F16", 2: "Q4_0", 3: "Q4_1", 7: "Q8_0", 8: "Q5_0", 9: "Q5_1", 10: "Q2_K", 11: "Q3_K_S", 12: "Q3_K_M", 13: "Q3_K_L",
    14: "Q4_K_S", 15: "Q4_K_M", 16: "Q5_K_S", 17: "Q5_K_M", 18: "Q6_K", 19: "IQ2_XXS", 20: "IQ2_XS", 21: "Q2_K_S", 22: "IQ3_XS",
    23: "IQ3_XXS", 24: "IQ1_S", 25: "IQ4_NL", 26: "IQ3_S", 27: "IQ3_M", 28: "IQ2_S", 29: "IQ2_M", 30: "IQ4_XS", 31: "IQ1_M", 32: "BF16",
    36: "TQ1_0", 37: "TQ2_0", 38: "MXFP4",
}  # fmt: skip
"""Values of `general.file_type`, as llama.cpp numbers its mixtures of types."""


class GgufCheckpoint(Checkpoint):
    """A GGUF file. `file` gives its metadata (tokenizer, chat template)."""

    kind = file_format = "gguf"

    def __init__(self, path: Path) -> None:
        self.file = opened(path)
        super().__init__(path, config_of(self.file))
        self._files = [self.file]
        self._sources: dict[str, GgufSource | EncoderSource] = {**map_tensors(self.file)}

    @property
    def total_bytes(self) -> int:
        return sum(math.prod(source.shape) * (2 if source.is_half else 4) for source in self._sources.values())

    @property
    def stored_precision(self) -> str:
        return precision_of(self.file)

    def stored_types(self, quantization: Scheme) -> tuple[StoredType, ...]:
        counts: Counter[str] = Counter()
        sizes: Counter[str] = Counter()
        for tensor in self.file.tensors.values():
            counts[tensor.type.name] += 1
            sizes[tensor.type.name] += tensor.num_bytes

        def runs_as(kind: str) -> str:
            if FORMATS[quantization].blocks:
                return quantization if kind in _SCALES else "floats"
            return "floats" if kind in _FLOATS or quantization == "none" else quantization

        return tuple(StoredType(kind, counts[kind], size, runs_as(kind)) for kind, size in sizes.most_common())

    def files(self) -> list[Path]:
        return [part.path for file in self._files for part in file.parts]

    def mapped_memory(self) -> list[Bytes]:
        return [memory for file in self._files for memory in file.mapped_memory()]

    def tensor_names(self) -> list[str]:
        return list(self._sources)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._source(name).shape

    def tensor(self, name: str) -> "torch.Tensor":
        return self._source(name).tensor()

    def quantized(self, name: str) -> QuantizedMatrix | None:
        source = self._source(name)
        if not isinstance(source, GgufSource) or len(source.shape) != 2 or source.subtract_one:
            return None
        matrix = quantized_matrix(source.stored.type.name, source.rows(), source.shape)
        return None if matrix is None else self._check_matrix(name, matrix)

    def block_type(self, name: str) -> BlockType | None:
        source = self._source(name)
        if not isinstance(source, GgufSource) or len(source.shape) != 2 or source.subtract_one:
            return None
        return source.stored.type if source.stored.type.name in _SCALES else None

    def blocks(self, name: str) -> BlockMatrix | None:
        import torch

        source, kind = self._source(name), self.block_type(name)
        if kind is None or not isinstance(source, GgufSource):
            return None
        rows = source.rows()
        if kind.block_values == 1:  # floats may be used as they are, and the file may change
            rows = np.array(rows)
        self._check_blocks(name, rows, kind)
        return BlockMatrix(kind, torch.from_numpy(rows))

    def _check_blocks(self, name: str, rows: Bytes, kind: BlockType) -> None:
        blocks = rows.reshape(-1, kind.block_bytes)
        if kind.block_values == 1:
            is_finite, is_zero = bool(np.isfinite(dequantize(rows, kind.name)).all()), not rows.any()
        elif kind.name == "MXFP4":  # of a power of two beyond 2^124 the largest weights are infinite
            is_finite, is_zero = bool((blocks[:, 0] <= 252).all()), not rows.any()
        else:  # by their bits: of a float16, 0x7C00 and above without the sign are infinity and NaN
            largest = max(int((blocks[:, at : at + 2].copy().view("<u2") & 0x7FFF).max()) for at in _SCALES[kind.name])
            is_finite, is_zero = largest < 0x7C00, largest == 0
        if not is_finite:
            raise ModelError(f"{self.file_of(name)}: tensor {name} contains NaN or infinity")
        if is_zero:
            raise ModelError(f"{self.file_of(name)}: tensor {name} {list(self.shape(name))} is zero-filled")

    def release(self) -> None:
        for file in self._files:
            file.release()

    def file_of(self, name: str) -> str:
        source = self._source(name)
        stored = source.stored if isinstance(source, GgufSource) else source.parts[0]
        return source.file.part_of(stored.name).path.name

    def _source(self, name: str) -> GgufSource | EncoderSource:
        if name not in self._sources:
            raise ModelError(f"{self.path.name} has no tensor {name}")
        return self._sources[name]


def precision_of(file: GgufFile) -> str:
    """The name of its `general.file_type`; without a known one, the type of most of its values."""
    named = _FILE_TYPES.get(file.get("general.file_type"))
    if named is not None:
        return named
    counts: Counter[str] = Counter()
    for tensor in file.tensors.values():
        counts[tensor.type.name] += math.prod(tensor.shape)
    return max(counts, key=counts.__getitem__, default="")


def _runs_in_own_bits(file: GgufFile) -> bool:
    """Whether most of its values are in types in whose bits the kernels compute. BF16 is none of them: those are the bits of a dequantised file."""
    sizes = [(math.prod(tensor.shape), tensor.type.name) for tensor in file.tensors.values()]
    return 2 * sum(size for size, kind in sizes if kind in _SCALES and kind != "BF16") > sum(size for size, _ in sizes)


def config_of(file: GgufFile) -> ModelConfig:
    general = {key: file.get(key) for key in file.metadata_keys() if key.startswith("general.")}
    return msgspec.structs.replace(
        parse_hf_config(hf_config(file), origin=file.path.name),
        sampling_defaults=from_gguf(general, file.path.name),
        quantization={"quant_method": GGUF_METHOD, "in_own_bits": _runs_in_own_bits(file)},
    )
