"""Mixture of experts: route each token to its best experts and add up what they say.

Owns the routing. Runs in the thread that runs the model. Tokens are grouped by expert and each expert is one product; a token's
sum is always taken in the order of expert ids, so its bits do not depend on the tokens beside it.
"""

from collections.abc import Iterator
from dataclasses import replace

import torch

from headrace.checkpoint.model_config import MoeConfig
from headrace.layers.linear import Linear
from headrace.layers.mlp import GatedMlp
from headrace.layers.weight import Placement, Weight


class SparseMoe:
    """softmax over all experts, the best `num_experts_per_tok`, renormalised if `norm_topk_prob`.

    renames: (ours, theirs) for families whose expert projections are not called gate_proj, up_proj and down_proj.
    """

    def __init__(
        self,
        hidden_size: int,
        moe: MoeConfig,
        act: str,
        placement: Placement,
        *,
        renames: tuple[tuple[str, str], ...] = (),
    ) -> None:
        self._moe = moe
        self._renames = renames
        self._router = Linear(hidden_size, {"gate": moe.num_experts}, placement.unquantized)
        self._experts = [GatedMlp(hidden_size, moe.intermediate_size, act, placement) for _ in range(moe.num_experts)]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        """x [rows, hidden_size] -> [rows, hidden_size]."""
        shares = torch.softmax(self._router(x).float(), dim=-1)
        top_shares, top_experts = torch.topk(shares, self._moe.num_experts_per_tok, dim=-1)
        if self._moe.norm_topk_prob:
            top_shares = top_shares / top_shares.sum(dim=-1, keepdim=True)
        out = torch.zeros_like(x)
        for expert in torch.unique(top_experts).tolist():
            rows, places = torch.where(top_experts == expert)
            out[rows] += self._experts[expert](x[rows]) * top_shares[rows, places, None].to(x.dtype)
        return out

    def weights(self, prefix: str) -> Iterator[Weight]:
        """`<prefix>.gate.weight` and `<prefix>.experts.<i>.*`."""
        yield from self._router.weights(f"{prefix}.")
        for index, expert in enumerate(self._experts):
            for weight in expert.weights(f"{prefix}.experts.{index}"):
                yield replace(weight, name=self._renamed(weight.name))

    def _renamed(self, name: str) -> str:
        for ours, theirs in self._renames:
            name = name.replace(ours, theirs)
        return name
