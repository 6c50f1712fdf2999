"""Every op against torch on the CPU, with the same inputs."""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from bench.gpu.closeness import BF16_ERROR, Check, distance, random_tensor
from headrace import kernels


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
