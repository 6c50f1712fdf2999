"""Every op, attention backend and weight format against torch on the CPU, and the tokens of a small model.

Both sides begin from the same rounded inputs. A check that fails is a row of its own; the others go on.
"""

from collections.abc import Iterator

import torch

from headrace.benchmark.gpu.attention import attention_checks
from headrace.benchmark.gpu.bench import Bench, Rows, row
from headrace.benchmark.gpu.closeness import BF16_ERROR, Check, distance, random_tensor
from headrace.benchmark.gpu.ops import op_checks
from headrace.benchmark.gpu.tokens import token_check, wait_check
from headrace.kernels.torch_quantized import fp8_per_row, fp8_product, int4_product, pack_fp8, pack_int4, unpack_fp8
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
    """Quantised products against floats of the same quantised weights."""
    matrix, x = random_tensor(512, 256) / 16, random_tensor(37, 256, seed=1).to(torch.bfloat16)

    def fp8() -> tuple[float, float]:
        packed = pack_fp8(matrix.to(device), None, fp8_per_row(device))
        want = x.float() @ unpack_fp8(packed).cpu().T
        return distance(fp8_product(x.to(device), packed), want), 0.04  # the activations' own rounding

    def int4() -> tuple[float, float]:
        codes = integer_format("int4").quantize(matrix)
        want = x.float() @ codes.dequantize().T
        return distance(int4_product(x.to(device), pack_int4(codes.to(device), None)), want), BF16_ERROR

    yield "fp8 linear", fp8
    yield "int4 linear", int4
