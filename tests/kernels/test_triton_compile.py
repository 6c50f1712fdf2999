"""Every Triton kernel compiles for a Hopper GPU, to the instructions that its design counts on. No GPU is needed: nothing runs."""

import json
import os
import subprocess
import sys
from collections import defaultdict
from importlib.util import find_spec
from pathlib import Path

import pytest

KERNELS = {
    "_argmax_kernel",
    "_decode_kernel",
    "_described_linear_kernel",
    "_draw_kernel",
    "_exp_sums_kernel",
    "_expert_down_kernel",
    "_expert_kernel",
    "_expert_up_kernel",
    "_extend_kernel",
    "_floats_kernel",
    "_gate_kernel",
    "_int4_kernel",
    "_int4_rows_kernel",
    "_linear_kernel",
    "_mask_kernel",
    "_norm_kernel",
    "_order_kernel",
    "_peak_kernel",
    "_reduce_kernel",
    "_rotary_kernel",
    "_rotate_write_kernel",
    "_round_rows_kernel",
    "_route_kernel",
    "_sum_ranks_kernel",
    "_unpack_int4_kernel",
    "_write_kv_kernel",
}
# The smallest of the GPUs that are served (compute capability 8.6 and 8.9) gives a block 99 KiB.
SHARED_BYTES = 99 << 10
HOPPER_SHARED_BYTES = 227 << 10


@pytest.mark.slow
def test_every_kernel_compiles_for_hopper(tmp_path):
    if find_spec("triton") is None:
        pytest.skip("the package triton is not installed")
    # In a process of its own: this one may interpret.
    env = {**os.environ, "TRITON_INTERPRET": "0", "TRITON_CACHE_DIR": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""}
    program = Path(__file__).with_name("compile_for_gpu.py")
    done = subprocess.run(
        [sys.executable, str(program), "90"], env=env, capture_output=True, text=True, timeout=250, check=False
    )

    assert done.returncode == 0, done.stderr
    compiled = defaultdict(list)
    for line in done.stdout.splitlines():
        report = json.loads(line)
        compiled[report["kernel"]].append(report)
    assert set(compiled) == KERNELS
    for name, reports in compiled.items():
        most = HOPPER_SHARED_BYTES if name == "_described_linear_kernel" else SHARED_BYTES
        assert all(report["binary"] > 0 and report["shared"] <= most for report in reports)
    assert all(report["wgmma"] and report["copies"] for report in compiled["_extend_kernel"])
    assert all((report["wgmma"] or report["mma"]) and report["copies"] for report in compiled["_decode_kernel"])
    assert all((report["wgmma"] or report["mma"]) and report["copies"] for report in compiled["_expert_kernel"])
    # The draw is defined by operations that are rounded one by one.
    for name in ("_draw_kernel", "_exp_sums_kernel"):
        assert all(report["fma"] == report["inexact_div"] == 0 for report in compiled[name])
