"""Attention backends over prefill, extension and decode, against plain torch in float32."""

from collections.abc import Iterator

import numpy as np
import torch

from bench.gpu.bench import Bench
from bench.gpu.closeness import BF16_ERROR, Check, distance, random_tensor
from headrace.attention.base import AttentionBackend, AttentionLayerSpec, KvShape, StepRows
from headrace.attention.select import BACKENDS
from headrace.attention.torch_native import TorchNativeAttention
from headrace.config.resolve import AttentionNeeds


def attention_checks(bench: Bench, dtype: torch.dtype) -> Iterator[tuple[str, Check]]:
    """Compare every backend that can run here with plain torch in float32, over prefill, extension and decode."""
    cases = [(64, 9, 3, 0, 0.0), (128, 32, 8, 0, 0.0), (128, 32, 4, 64, 0.0), (256, 8, 4, 0, 30.0)]
    for head_dim, heads, kv_heads, window, cap in cases[: 1 if bench.options.tiny else None]:
        spec = AttentionLayerSpec(0, heads, kv_heads, head_dim, head_dim**-0.5, window, cap)
        name_of_dtype = str(dtype).removeprefix("torch.")
        needs = AttentionNeeds(bench.options.device, True, head_dim, name_of_dtype, None)
        for backend in BACKENDS:
            if backend.reasons_against(needs):
                continue

            def compare(
                backend: type[AttentionBackend] = backend, spec: AttentionLayerSpec = spec
            ) -> tuple[float, float]:
                got = _attention_outputs(backend, spec, bench.device, dtype, dtype)
                want = _attention_outputs(TorchNativeAttention, spec, torch.device("cpu"), torch.float32, dtype)
                return distance(got, want), BF16_ERROR

            window_text = f", window {window}" if window else ""
            yield f"attention {backend.name}: {heads}/{kv_heads} heads of {head_dim}{window_text}", compare


def _attention_outputs(
    chosen: type[AttentionBackend],
    spec: AttentionLayerSpec,
    device: torch.device,
    dtype: torch.dtype,
    rounded: torch.dtype,
) -> torch.Tensor:
    """What a backend gives in three steps of three sequences, [tokens, heads * head_dim]. Inputs are rounded to `rounded`."""
    page = chosen.page_size
    room = 400 // page * page + page
    backend = chosen()
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
