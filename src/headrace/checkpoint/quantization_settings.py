"""Which quantised checkpoints are served: the settings of a `quantization_config`, read without torch.

Owns the schemes' names and what is refused. Does not own how matrices are stored (`quantized_formats`). Pure; used in any process.
"""

from dataclasses import dataclass
from typing import Any, Literal

from headrace.errors import ModelError

Scheme = Literal["none", "int16", "int8", "int8-fast", "int4", "fp8"]
"""How linear layers compute: in float; 16-bit integers with one scale a row (weights) and one every 128 elements (activations); 8-bit weights
and activations with a scale every 32 elements; 8 bits with scales as in int16; 4-bit weights with a scale every 32 elements and 8-bit
activations (on a GPU: bfloat16 ones); float8 weights and activations with a scale a row (on a GPU only)."""

BITS: dict[Scheme, int] = {"int16": 16, "int8": 8, "int8-fast": 8, "int4": 4}

KERNEL_GROUP = 32
"""Elements that share a scale in the kernels; a checkpoint's groups are multiples of it."""

WIDE_GROUP = 128
"""Elements of a row of activations that share a scale where weights have one scale a row."""

MAX_WORDS_NORM = 23170
"""Of 128 weights as 16-bit integers: sqrt(sum of squares). Sums of their products with activations fit 32 bits."""

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
        if scheme not in ("int4", "int8") or group_size != KERNEL_GROUP:
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
