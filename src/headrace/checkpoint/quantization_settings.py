"""Which quantised checkpoints are served: the settings of a `quantization_config`, read without torch.

Owns what is refused. Does not own the weight formats (`weight_formats`) nor how matrices are stored (`quantized_formats`). Pure; used in any process.
"""

from dataclasses import dataclass
from typing import Any, Literal

from headrace.checkpoint.weight_formats import KERNEL_GROUP, STORED, Scheme
from headrace.errors import ModelError

OWN_METHOD = "headrace"


@dataclass(frozen=True, slots=True)
class StoredSettings:
    """Of a quantised checkpoint. group_size: -1 = a whole row. zero_offset: what GPTQ adds to a stored zero point.

    block: of fp8, (rows, columns) of the weights that share a scale; (0, 0) = all of a matrix do.
    """

    method: Literal["headrace", "gptq", "awq", "fp8"]
    scheme: Scheme
    group_size: int
    zero_offset: int = 0
    block: tuple[int, int] = (0, 0)


def stored_settings(quantization: dict[str, Any] | None) -> StoredSettings | None:
    """What a checkpoint says with this `quantization_config`; None for one that is not quantised.

    Raises ModelError naming the setting that is not supported.
    """
    if quantization is None:
        return None
    method = quantization.get("quant_method")
    bits = quantization.get("bits", quantization.get("w_bit"))
    group_size = quantization.get("group_size", quantization.get("q_group_size"))
    if method == OWN_METHOD:
        scheme = quantization.get("scheme")
        if scheme not in STORED or group_size != KERNEL_GROUP:
            raise ModelError(
                f"a headrace checkpoint of scheme {scheme} with groups of {group_size} is not known to this version"
            )
        return StoredSettings("headrace", scheme, KERNEL_GROUP)
    if method == "fp8":
        return _fp8_settings(quantization)
    if method not in ("gptq", "awq"):
        raise ModelError(
            f"quantised checkpoints of quant_method {method} are not supported; gptq, awq, fp8 and headrace are"
        )
    if bits != 4:
        raise ModelError(f"{method} checkpoints of {bits} bits are not supported; those of 4 are")
    if not isinstance(group_size, int) or (group_size != -1 and (group_size <= 0 or group_size % KERNEL_GROUP)):
        raise ModelError(
            f"{method} checkpoints with group_size {group_size} are not supported; -1 and multiples of {KERNEL_GROUP} are"
        )
    if method == "awq":
        version = str(quantization.get("version", "gemm")).lower()
        if version != "gemm":
            raise ModelError(f"awq checkpoints of version {version} are not supported; gemm is")
        return StoredSettings("awq", "int4", group_size)
    layout = quantization.get("checkpoint_format") or "gptq"
    if layout not in ("gptq", "gptq_v2"):
        raise ModelError(f"gptq checkpoints of checkpoint_format {layout} are not supported; gptq and gptq_v2 are")
    return StoredSettings("gptq", "int4", group_size, 1 if layout == "gptq" else 0)


def _fp8_settings(quantization: dict[str, Any]) -> StoredSettings:
    activations = quantization.get("activation_scheme", "dynamic")
    if activations != "dynamic":
        raise ModelError(f"fp8 checkpoints with activation_scheme {activations} are not supported; dynamic is")
    block = quantization.get("weight_block_size")
    if block is None:
        return StoredSettings("fp8", "fp8", -1)
    if not (isinstance(block, list) and len(block) == 2 and all(isinstance(size, int) and size > 0 for size in block)):
        raise ModelError(f"fp8 checkpoints with weight_block_size {block} are not supported; two positive sizes are")
    return StoredSettings("fp8", "fp8", -1, block=(block[0], block[1]))


def stored_scheme(quantization: dict[str, Any] | None) -> Scheme:
    """How a model of this `quantization_config` computes: "none" when it is not quantised. Raises ModelError as `stored_settings`."""
    found = stored_settings(quantization)
    return "none" if found is None else found.scheme
