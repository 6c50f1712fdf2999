"""What the calls over all layers (`decoder`, `encoder`) pass to the native code: addresses of tensors, which are checked first."""

import torch

from headrace.kernels.packing import QUANT_SCHEMES, PackedLinear

NativeLinear = tuple[int, bool, int, int, int, int, int]
"""Address, whether it is bfloat16, QuantScheme or -1, address of the column scales, address of the bias, n, k."""


def check_contiguous(what: str, x: torch.Tensor, dtype: torch.dtype, shape: tuple[int, ...]) -> None:
    """ValueError unless `x` is a contiguous tensor of this dtype and shape on the CPU."""
    if x.dtype != dtype or x.shape != shape or not x.is_contiguous() or x.device.type != "cpu":
        raise ValueError(
            f"{what} must be contiguous {dtype} {list(shape)} on CPU, "
            f"got {x.dtype} {list(x.shape)} with strides {x.stride()} on {x.device}"
        )


def native_linear(packed: PackedLinear) -> NativeLinear:
    """A packed weight as the native code takes it."""
    return (
        packed.data.data_ptr(),
        packed.layout == "native_bf16",
        QUANT_SCHEMES.get(packed.layout, -1),
        address_of(packed.column_scales),
        address_of(packed.bias),
        packed.n,
        packed.k,
    )


def address_of(x: torch.Tensor | None) -> int:
    """0 for None."""
    return 0 if x is None else x.data_ptr()
