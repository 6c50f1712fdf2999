"""Kernels in Triton, for NVIDIA GPUs.

They also run on the CPU, slowly, under Triton's interpreter (TRITON_INTERPRET=1). That is how they are tested.

Owns the GPU code (attention/; linear layers: linear.py, one_row.py; mixtures: experts.py; rows.py, sampling.py), how it is launched (launch.py)
and whether it can run here. Does not own the meaning of an op (`kernels.ops`) nor the layout of a KV pool
(`headrace.attention.triton`). Called by the thread that runs the model. Nothing here waits for the device, and nothing
is tuned at run time: block sizes come from small tables by head size and kind of device.
"""

import os
from importlib.util import find_spec

MIN_CAPABILITY = (8, 0)
"""Compute capability of the first GPUs with what the kernels use: bfloat16 products and asynchronous copies."""


def is_interpreted() -> bool:
    """Whether Triton interprets instead of compiling. Triton decides when it is first imported: set the variable before that."""
    return os.environ.get("TRITON_INTERPRET", "") == "1"


def why_not(device_type: str) -> str:
    """Why the kernels cannot run on tensors of this device type ("cpu", "cuda"); "" when they can."""
    if find_spec("triton") is None:
        return "the package triton is not installed"
    if device_type == "cuda":
        import torch

        if torch.cuda.is_available() and torch.cuda.get_device_capability() < MIN_CAPABILITY:
            return f"the GPU's compute capability {torch.cuda.get_device_capability()} is below {MIN_CAPABILITY}"
        return ""
    if device_type == "cpu" and is_interpreted():
        return ""
    return f"the Triton kernels run on CUDA, not on {device_type}"
