"""Every op, attention backend and weight format against torch on the CPU, and the tokens of a small model.

Both sides begin from the same rounded inputs. A check that fails is a row of its own; the others go on.
"""

import math
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any

import numpy as np
import torch

from bench.gpu.bench import Bench, Rows
from bench.gpu.tokens import token_check, wait_check
from headrace import kernels
from headrace.attention.base import AttentionBackend, AttentionLayerSpec, KvShape, StepRows
from headrace.attention.select import BACKENDS
from headrace.attention.torch_native import TorchNativeAttention
from headrace.config.resolve import AttentionNeeds
from headrace.kernels.packing import PackedLinear
from headrace.kernels.torch_quantized import fp8_per_row, pack_fp8, pack_int4
from headrace.layers.quantization import integer_format

BF16_ERROR = 0.02
"""Norm of the difference over that of the reference: bfloat16 keeps 8 bits, and sums round once more."""

Check = Callable[[], tuple[float, float]]
"""Gives the error and the largest one allowed."""


def random_tensor(*shape: int, seed: int = 0) -> torch.Tensor:
    """Normal floats of the CPU's generator, so that every device is given the same."""
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def distance(got: torch.Tensor, want: torch.Tensor) -> float:
    """Norm of the difference over that of `want`; infinite where a value is not finite."""
    difference = got.float().cpu() - want.float().cpu()
    if not bool(difference.isfinite().all()):
        return math.inf
    return float(difference.norm() / want.float().norm())


def op_checks(device: torch.device, dtype: torch.dtype) -> Iterator[tuple[str, Check]]:
    """Run every op with the same inputs on this device and on the CPU, and compare."""
    x, residual = random_tensor(37, 256), random_tensor(37, 256, seed=1)
    weight, bias = random_tensor(256, seed=2), random_tensor(256, seed=3)
    matrix = random_tensor(512, 256, seed=4)
    ids = torch.randint(0, 512, (37,), generator=torch.Generator().manual_seed(5))
    angles = torch.arange(600.0)[:, None] * (1e-2 ** (torch.arange(32) / 32))
    positions = torch.arange(300, 337, dtype=torch.int32)
    logits = random_tensor(37, 5000, seed=6) * 4
    experts = [(random_tensor(128, 256, seed=10 + i) / 16, random_tensor(256, 64, seed=30 + i) / 8) for i in range(8)]
    shares, chosen = torch.topk(torch.softmax(random_tensor(37, 8, seed=7), 1), 2)

    def place(tensor: torch.Tensor, where: torch.device, floats: torch.dtype) -> torch.Tensor:
        # Both sides begin from the same rounded values.
        return tensor.to(dtype).to(where, floats) if tensor.is_floating_point() else tensor.to(where)

    def with_residual(op: Callable[..., torch.Tensor], *extra: Any) -> Callable[..., torch.Tensor]:
        def act(to: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
            sum_ = to(residual).clone()
            out = op(to(x), weight.to(sum_.device), *[e.to(sum_.device) for e in extra], 1e-5, sum_)
            return torch.cat((out, sum_))

        return act

    def rotated(to: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        q, k = (to(tensor.view(37, 4, 64)).clone() for tensor in (x, residual))
        where = q.device
        kernels.rotary(q, k, positions.to(where), angles.cos().to(where), angles.sin().to(where))
        return torch.cat((q, k))

    def mixed(to: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        packed = [[kernels.pack_linear(to(part)) for part in pair] for pair in experts]
        whole = kernels.pack_experts([up for up, _ in packed], [down for _, down in packed], "silu")
        inputs = to(x)
        return kernels.moe(inputs, chosen.to(inputs.device), shares.to(inputs.device), whole)

    close: dict[str, Callable[[Callable[[torch.Tensor], torch.Tensor]], torch.Tensor]] = {
        "rms_norm": with_residual(kernels.rms_norm),
        "layer_norm": with_residual(kernels.layer_norm, bias),
        "silu_mul": lambda to: kernels.silu_mul(to(x)),
        "gelu_tanh_mul": lambda to: kernels.gelu_tanh_mul(to(x)),
        "linear": lambda to: kernels.linear(to(x), kernels.pack_linear(to(matrix), to(matrix[:, 0]))),
        "embedding": lambda to: kernels.embedding(to(ids), to(matrix), 1.5),
        "rotary": rotated,
        "moe": mixed,
        "route": lambda to: kernels.route(to(logits[:, :128]), 8, renormalise=True)[0],
    }
    for name, act in close.items():

        def compare(act: Callable[..., torch.Tensor] = act) -> tuple[float, float]:
            got = act(lambda tensor: place(tensor, device, dtype))
            with kernels.prefer("torch"):
                want = act(lambda tensor: place(tensor, torch.device("cpu"), torch.float32))
            return distance(got, want), BF16_ERROR

        yield f"op {name}", compare

    temperatures = torch.tensor([0.0, 0.7, 1.5] * 12 + [1.0])
    top_k = torch.tensor([0, 1, 40] * 12 + [5000])
    top_p = torch.tensor([1.0, 0.9, 0.5] * 12 + [0.99], dtype=torch.float64)
    least = torch.tensor([0, 1 << 36, 0] * 12 + [0])
    u = torch.rand(37, generator=torch.Generator().manual_seed(8), dtype=torch.float64)
    mask_rows, masks = torch.arange(35, -2, -1), _token_masks(37, 5000)
    equal: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
        "argmax": kernels.argmax,
        "route": lambda where: kernels.route(where[:, :128], 8, renormalise=True)[1],
        "draw": lambda where: kernels.draw(where, temperatures, top_k, top_p, least, u),
        "exp_sums": lambda where: kernels.exp_sums(where)[1],
        "draw with masks": lambda where: kernels.draw(where, temperatures, top_k, top_p, least, u, masks, mask_rows),
    }
    for name, choose in equal.items():

        def match(choose: Callable[[torch.Tensor], torch.Tensor] = choose) -> tuple[float, float]:
            with kernels.prefer("torch"):
                want = choose(logits)
            return float((choose(logits.to(device)).cpu() != want).sum()), 0.0

        yield f"op {name}", match


def _token_masks(rows: int, vocab: int) -> torch.Tensor:
    """int32[rows, words]: of every three words one without any bit, one with all of them and a random one."""
    generator = torch.Generator().manual_seed(9)
    masks = torch.randint(-(2**31), 2**31, (rows, -(-vocab // 32)), generator=generator).to(torch.int32)
    masks[:, 1::3] = 0
    masks[:, 2::3] = -1
    return masks


def attention_checks(bench: Bench, dtype: torch.dtype) -> Iterator[tuple[str, Check]]:
    """Compare every backend that can run here with plain torch in float32, over prefill, extension and decode."""
    cases = [(64, 9, 3, 0, 0.0), (128, 32, 8, 0, 0.0), (128, 32, 4, 64, 0.0), (256, 8, 4, 0, 30.0)]
    for head_dim, heads, kv_heads, window, cap in cases[: 1 if bench.tiny else None]:
        spec = AttentionLayerSpec(0, heads, kv_heads, head_dim, head_dim**-0.5, window, cap)
        name_of_dtype = str(dtype).removeprefix("torch.")
        needs = AttentionNeeds(bench.options.device, True, head_dim, name_of_dtype, None)
        for backend in BACKENDS:
            if backend.reasons_against(needs):
                continue

            window_text = f", window {window}" if window else ""
            name = f"attention {backend.name}: {heads}/{kv_heads} heads of {head_dim}{window_text}"
            yield name, partial(_compare_attention, backend, spec, bench.device, dtype)


def _compare_attention(
    backend: type[AttentionBackend], spec: AttentionLayerSpec, device: torch.device, dtype: torch.dtype
) -> tuple[float, float]:
    got = _attention_outputs(backend, spec, device, dtype, dtype)
    want = _attention_outputs(TorchNativeAttention, spec, torch.device("cpu"), torch.float32, dtype)
    return distance(got, want), BF16_ERROR


def _attention_outputs(
    kind: type[AttentionBackend],
    spec: AttentionLayerSpec,
    device: torch.device,
    dtype: torch.dtype,
    rounded: torch.dtype,
) -> torch.Tensor:
    """What a backend gives in three steps of three sequences, [tokens, heads * head_dim]. Inputs are rounded to `rounded`."""
    backend, page = kind(), kind.page_size
    room = 400 // page * page + page
    backend.make_kv_pool(KvShape(1, spec.num_kv_heads, spec.head_dim, dtype), 3 * room, page, device)
    pages = torch.randperm(3 * room // page, generator=torch.Generator().manual_seed(0)).to(torch.int32)
    slots = (pages[:, None] * page + torch.arange(page, dtype=torch.int32)).reshape(3, room)
    starts, out = [0, 0, 0], []
    for step, counts in enumerate(([1, 17, 300], [5, 1, 40], [1, 1, 1])):
        ends = [start + count for start, count in zip(starts, counts, strict=True)]
        positions = [torch.arange(start, end) for start, end in zip(starts, ends, strict=True)]
        rows = StepRows(
            starts=starts,
            counts=counts,
            positions=torch.cat(positions).to(device, torch.int32),
            seq_lens=torch.tensor(ends, dtype=torch.int32, device=device),
            row_starts=torch.tensor([0, *np.cumsum(counts)], dtype=torch.int32, device=device),
            out_slots=torch.cat([slots[i, at] for i, at in enumerate(positions)]).to(device),
            slots=slots[:, : max(ends)].contiguous().to(device),
        )
        backend.prepare(rows)
        heads = (spec.num_q_heads, spec.num_kv_heads, spec.num_kv_heads)
        tensors = [random_tensor(sum(counts), n, spec.head_dim, seed=100 * step + i) for i, n in enumerate(heads)]
        q, k, v = (tensor.to(rounded).to(device, dtype) for tensor in tensors)
        out.append(backend.forward(q, k, v, spec).float().cpu())
        starts = ends
    return torch.cat(out)


def check_kernels(bench: Bench, rows: Rows) -> None:
    """Every op and backend against torch on the CPU; each one that fails is a row of its own."""
    dtype = torch.bfloat16 if bench.on_gpu else torch.float32
    checks: list[tuple[str, Check]] = [
        *op_checks(bench.device, dtype),
        *attention_checks(bench, dtype),
        *format_checks(bench.device),
        ("tokens: graphs, eager and CPU", lambda: token_check(bench)),
    ]
    if bench.on_gpu:
        checks.append(("no step waits for the device", lambda: wait_check(bench)))
    for what, check in checks:
        with rows.failure_of(what):
            error, limit = check()
            rows.add(what, f"error {error:.2g}", ok=error <= limit, expected=f"<= {limit:g}", error=error)


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
