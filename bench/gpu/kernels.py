"""Every op, attention backend and weight format against torch on the CPU, and the tokens of a small model.

Both sides begin from the same rounded inputs. A check that fails is a row of its own; the others go on.
"""

from collections.abc import Iterator

import torch

from bench.gpu.attention import attention_checks
from bench.gpu.bench import Bench, Rows, row
from bench.gpu.closeness import BF16_ERROR, Check, distance, random_tensor
from bench.gpu.ops import op_checks
from bench.gpu.tokens import token_check, wait_check
from headrace import kernels
from headrace.kernels.packing import PackedLinear
from headrace.kernels.torch_quantized import fp8_per_row, pack_fp8, pack_int4
from headrace.layers.quantization import integer_format


def check_kernels(bench: Bench, rows: Rows) -> None:
    """Every op and backend against torch on the CPU; each one that fails is a row of its own."""
    dtype = torch.bfloat16 if bench.options.device == "cuda" else torch.float32
    checks: list[tuple[str, Check]] = [
        *op_checks(bench.device, dtype),
        *attention_checks(bench, dtype),
        *format_checks(bench.device),
        ("tokens: graphs, eager and CPU", lambda: token_check(bench)),
    ]
    if bench.options.device == "cuda":
        checks.append(("no step waits for the device", lambda: wait_check(bench)))
    for what, check in checks:
        try:
            error, limit = check()
        except Exception as failure:  # the boundary of a check: the others go on
            rows.append(row(what, f"failed: {type(failure).__name__}: {failure}"[:300], ok=False))
            continue
        rows.append(row(what, f"error {error:.2g}", ok=error <= limit, expected=f"<= {limit:g}", error=error))


def format_checks(device: torch.device) -> Iterator[tuple[str, Check]]:
    """Linear layers of one row and of more against floats of the same, rounded, weights."""
    matrix, inputs = random_tensor(512, 256) / 16, random_tensor(300, 256, seed=1).to(torch.bfloat16)
    codes = integer_format("int4").quantize(matrix)
    formats = {
        "bfloat16": (kernels.pack_linear(matrix.to(device, torch.bfloat16)), BF16_ERROR),
        "fp8": (pack_fp8(matrix.to(device), None, fp8_per_row(device)), 0.04),  # with the activations' own rounding
        "int4": (pack_int4(codes.to(device), None), BF16_ERROR),
    }
    for name, (packed, limit) in formats.items():
        for rows in (1, 3, 37, 300):

            def compare(packed: PackedLinear = packed, rows: int = rows, limit: float = limit) -> tuple[float, float]:
                x = inputs[:rows]
                want = x.float() @ kernels.unpack_linear(packed).float().cpu().T
                on_device = x.to(device) if device.type == "cuda" else x.float()
                return distance(kernels.linear(on_device, packed), want), limit

            yield f"{name} linear, {rows} rows", compare
