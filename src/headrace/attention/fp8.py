"""Whether a GPU computes in fp8."""

import torch

_FP8_CAPABILITY = (8, 9)
"""Compute capability (major, minor): Ada, Hopper and later."""


def reasons_against_fp8(device: str) -> list[str]:
    """Why devices of this type do not support fp8; empty if they do."""
    if device == "cuda" and torch.cuda.is_available() and torch.cuda.get_device_capability() < _FP8_CAPABILITY:
        return [
            f"the GPU has no fp8: its compute capability {torch.cuda.get_device_capability()} is below {_FP8_CAPABILITY}"
        ]
    return []
