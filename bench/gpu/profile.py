"""Which kernels take the time of a few steps, by torch's profiler."""

from collections.abc import Callable

import torch

from bench.gpu.bench import Bench, Rows, row

_SHOWN = 14


def add_kernel_times(bench: Bench, rows: Rows, what: str, steps: Callable[[], int]) -> None:
    """Profile `steps`, which gives the number of steps it ran, and add the kernels that take the most time of one. Nothing without a GPU."""
    if bench.options.device != "cuda":
        steps()
        return
    from torch.profiler import ProfilerActivity, profile

    torch.cuda.synchronize()
    with profile(activities=[ProfilerActivity.CUDA, ProfilerActivity.CPU]) as profiled:
        num_steps = steps()
        torch.cuda.synchronize()
    kernels = [event for event in profiled.key_averages() if event.self_device_time_total > 0]
    kernels.sort(key=lambda event: -event.self_device_time_total)
    total = sum(event.self_device_time_total for event in kernels)
    lines = [
        f"{event.self_device_time_total / num_steps:10.1f} us {event.count / num_steps:6.1f}x {event.key}"
        for event in kernels
    ]
    (bench.out / f"profile-{what.replace(' ', '-')}.txt").write_text("\n".join(lines) + "\n")
    rows.append(
        row(f"profile {what}", f"kernels take {total / num_steps / 1e3:.3f} ms a step", seconds=total / num_steps / 1e6)
    )
    for event in kernels[:_SHOWN]:
        each = event.self_device_time_total / num_steps
        rows.append(
            row(
                f"  {event.key[:60]}",
                f"{each:.1f} us, {event.count / num_steps:.1f} launches, {each * num_steps / total:.1%}",
            )
        )
