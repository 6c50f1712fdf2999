"""Compiles every Triton kernel for a GPU that is not there, through the functions that launch them; run as a program.

usage: compile_for_gpu.py CAPABILITY (90 = Hopper). Prints a JSON line for each kernel: its name, shared memory in bytes, and how often the PTX has
tensor-core products of Hopper (wgmma), of before (mma), asynchronous copies of 16 bytes, fused multiply-adds of float32, and inexact
divisions. Nothing is launched: in the place of Triton's driver stands one that only names the GPU.
"""

import json
import re
import sys
from dataclasses import replace

import torch
from triton.backends.compiler import GPUTarget
from triton.runtime import driver
from triton.runtime.jit import JITFunction

from headrace.kernels.triton import launch

launch.is_hopper = lambda x: int(sys.argv[1]) >= 90  # before the kernels are imported, which take the name

from headrace import kernels  # noqa: E402
from headrace.kernels.packing import PackedLinear  # noqa: E402
from headrace.kernels.triton import attention, experts, rows, sampling  # noqa: E402
from headrace.kernels.triton.linear import fp8_values, int4_rows, invariant_linear, unpack_int4  # noqa: E402
from headrace.kernels.triton.one_row import one_row_linear  # noqa: E402

BFLOAT16 = torch.bfloat16


class NamedGpu:
    """What Triton asks of a driver before it launches anything."""

    def get_current_target(self) -> GPUTarget:
        return GPUTarget("cuda", int(sys.argv[1]), 32)

    def get_current_device(self) -> int:
        return 0

    def get_current_stream(self, device: int) -> int:
        return 0


def compile_instead(self, *args, grid, warmup, **options):
    kernel = run(self, *args, grid=grid, warmup=True, **options)
    ptx = kernel.asm["ptx"]
    counts = {
        "wgmma": ptx.count("wgmma.mma_async"),
        "mma": ptx.count("mma.sync"),
        "copies": len(re.findall(r"cp\.async\.cg.*0x10", ptx)),
        "fma": ptx.count("fma.rn.f32"),
        "inexact_div": ptx.count("div.full"),
        "binary": len(kernel.asm["cubin"]),
    }
    print(json.dumps({"kernel": self.fn.__name__, "shared": kernel.metadata.shared, **counts}), flush=True)
    return kernel


def attend(num_q_heads: int, num_kv_heads: int, head_dim: int, kv_dtype: torch.dtype, **options) -> None:
    window, soft_cap = options.pop("window", 0), options.pop("soft_cap", 0.0)
    sizes = [heads * head_dim for heads in (num_q_heads, num_kv_heads, num_kv_heads)]
    joined = torch.zeros(8, sum(sizes), dtype=BFLOAT16)
    q, k, v = (x.unflatten(1, (-1, head_dim)) for x in joined.split(sizes, dim=1))
    pool = torch.zeros(64, num_kv_heads, head_dim, dtype=kv_dtype)
    integers = torch.zeros(8, dtype=torch.int32)
    attention.write_kv(k, v, pool, pool.clone(), integers)
    table = torch.zeros(9, head_dim // 2)
    for norms in (None, (torch.ones(head_dim), torch.ones(head_dim), 1e-6)):
        for cos in (table, table[:, : head_dim // 4]):
            attention.rotate_write_kv(q, k, v, integers, cos, cos, pool, pool.clone(), integers, norms)
    plan = attention.Plan(
        table=torch.zeros(7, 4096, dtype=torch.int32),
        page_size=1,
        seq_lens=integers[:7],
        row_starts=integers,
        num_tokens=8,
        max_keys=4096,
        has_single=True,
        has_longer=True,
        num_processors=132,
        **options,
    )
    attention.attend(q, pool, pool, plan, 0.1, window=window, soft_cap=soft_cap)
    for norms in (None, (torch.ones(head_dim), torch.ones(head_dim), 1e-6)):
        new = attention.NewKeys(k, v, integers, table, table, integers, norms)
        attention.attend(q, pool, pool, replace(plan, has_longer=False), 0.1, window=window, soft_cap=soft_cap, new=new)


def linear(n: int, k: int) -> PackedLinear:
    return PackedLinear(n, k, "torch", torch.zeros(n, k, dtype=BFLOAT16), None)


driver.set_active(NamedGpu())
run, JITFunction.run = JITFunction.run, compile_instead

attend(32, 8, 128, BFLOAT16, deterministic=False)
attend(32, 8, 128, BFLOAT16, deterministic=True)
attend(8, 4, 256, torch.float8_e4m3fn, deterministic=False, window=1024, soft_cap=50.0)
x, weight = torch.zeros(4, 4096, dtype=BFLOAT16), torch.zeros(4096)
rows.rms_norm(x, weight, 1e-5, x.clone())
rows.layer_norm(x, weight, weight, 1e-5, None)
rows.silu_mul(x)
rows.gelu_tanh_mul(x)
heads, table = x.unflatten(1, (-1, 128)), torch.zeros(9, 64)
rows.rotary(heads[:, :24], heads[:, 24:], torch.zeros(4, dtype=torch.int32), table, table)
mixture = kernels.pack_experts([linear(1536, 2048)] * 4, [linear(2048, 768)] * 4, "silu")
for count in (2, 16, 64):
    experts.moe(
        x[:1, :2048].expand(count, -1), torch.zeros(count, 2, dtype=torch.int64), torch.zeros(count, 2), mixture
    )
for count in (1, 100, 1000):
    invariant_linear(x[:1].expand(count, -1), linear(1024, 4096), None, False)
experts.route(x[:, :128], 8, True)
scales = torch.zeros(1024, 128, 2, dtype=BFLOAT16)
for packed in (
    linear(1024, 4096),
    PackedLinear(1024, 4096, "torch_fp8", torch.zeros(1024, 4096, dtype=torch.float8_e4m3fn), None, torch.zeros(1024)),
    PackedLinear(1024, 4096, "torch_int4", torch.zeros(1024, 512, dtype=torch.int32), None, scales),
):
    one_row_linear(x[:1], packed, torch.zeros(1, 1024, dtype=BFLOAT16), False)
int4_rows(x, packed, torch.zeros(4, 1024, dtype=BFLOAT16), False)
unpack_int4(packed, BFLOAT16)
fp8_values(x)
logits, parameter = torch.zeros(2, 128256), torch.zeros(2)
sampling.argmax(logits)
sampling.exp_sums(logits)
column, masks = (
    (parameter, parameter.long(), parameter.double(), parameter.long(), parameter.double()),
    torch.zeros(2, 4008),
)
sampling.draw(logits, *column, masks.int(), parameter.long())
