"""Our own format, which `headrace quantize` writes (docs/quantization.md)."""

from typing import TYPE_CHECKING, Any

from headrace.checkpoint.quantized_formats.base import Parts, QuantizedFormat, unpacked
from headrace.checkpoint.quantized_matrix import QuantizedMatrix
from headrace.checkpoint.weight_formats import KERNEL_GROUP, STORED, codes_of
from headrace.errors import ModelError

if TYPE_CHECKING:
    import torch


class OwnFormat(QuantizedFormat):
    """codes: int8: uint8[n, k]; int4: uint8[n, k / 2], the even element of a pair in the low nibble. scales, minimums: float [n, k / 32]."""

    suffixes = ("codes", "scales", "minimums")
    telling = ("codes",)
    needed = ("codes", "scales")

    def __init__(self, config: dict[str, Any]) -> None:
        scheme, group_size = config.get("scheme"), config.get("group_size")
        if scheme not in STORED or group_size != KERNEL_GROUP:
            raise ModelError(
                f"a headrace checkpoint of scheme {scheme} with groups of {group_size} is not known to this version"
            )
        self.scheme = scheme
        self.described = f"headrace {scheme} weights"

    def shape(self, parts: Parts) -> tuple[int, int]:
        n, stored = parts.matrix_shape("codes")
        # A checkpoint of int4 keeps some matrices in 8 bits: their scales tell.
        groups = parts.matrix_shape("scales")[1]
        return n, stored * 2 if stored * 2 <= groups * KERNEL_GROUP else stored

    def read(self, parts: Parts) -> QuantizedMatrix:
        n, k = self.shape(parts)
        groups = (n, -(-k // KERNEL_GROUP))
        codes, scales = parts.tensor("codes", ("U8",)), parts.floats("scales", groups)
        minimums = parts.floats("minimums", groups) if "minimums" in parts else None
        if codes.shape[1] == k:
            if minimums is not None:
                raise ModelError(f"{parts.layer}: 8-bit codes have no minimums")
            return QuantizedMatrix("int8", codes, scales, None, KERNEL_GROUP)
        return QuantizedMatrix("int4", unpacked(codes, 4), scales, minimums, KERNEL_GROUP)


def own_tensors(matrix: QuantizedMatrix) -> dict[str, "torch.Tensor"]:
    """What `OwnFormat` reads, by suffix. Scales are float16 where that is exact to 11 bits, float32 where they are too small or large."""
    import torch

    assert matrix.group_size == KERNEL_GROUP, matrix.group_size
    codes = matrix.codes
    if codes_of(matrix.scheme).bits == 4:
        codes = codes[:, 0::2] | codes[:, 1::2] << 4
    parts = {"codes": codes.contiguous()}
    for suffix, values in (("scales", matrix.scales), ("minimums", matrix.minimums)):
        if values is not None:
            sizes = values.abs()
            fits = bool(((sizes == 0) | (sizes >= 2.0**-14)).all() and (sizes < 65504).all())
            parts[suffix] = values.to(torch.float16 if fits else torch.float32).contiguous()
    return parts
