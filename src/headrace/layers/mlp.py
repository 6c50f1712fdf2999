"""Feed-forward layers: gated (N. Shazeer, "GLU Variants Improve Transformer", 2020), and mixtures of them, of which a router chooses for each token.

Does not own the products (`headrace.kernels`). Runs in the thread that runs the model. Tokens are grouped by expert and each expert is one product; a
token's outputs are always summed from its best expert to its last, so its bits do not depend on other tokens.

Several ranks each have a part of every expert or, with `Placement.whole_experts`, some experts whole (expert parallelism: D. Lepikhin et al.,
"GShard", 2020, without its exchange of tokens: each rank has all of them). Every rank routes, with the same bits, and computes what it has; the
sum over the ranks is the output.
"""

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Literal, TypeVar

import torch

from headrace import kernels
from headrace.checkpoint.model_config import MoeConfig
from headrace.checkpoint.weight_formats import BLOCK_OF_FILES, KERNEL_GROUP, WIDE_GROUP
from headrace.errors import ModelError
from headrace.kernels import PackedExperts
from headrace.kernels.encoder import Activation
from headrace.layers.linear import Linear
from headrace.layers.weight import Placement, Weight, elsewhere


class ExpertCounts:
    """The counts of one layer. While recording is off, it costs one comparison per step."""

    def __init__(self, num_experts: int) -> None:
        self._num_experts = num_experts
        self._counts: torch.Tensor | None = None
        self._kept = [0] * num_experts

    def start(self, device: torch.device) -> None:
        self._counts = torch.zeros(self._num_experts, dtype=torch.int64, device=device)
        self._kept = [0] * self._num_experts

    def stop(self) -> None:
        if self._counts is not None:
            self._kept = self.take()
            self._counts = None

    def take(self) -> list[int]:
        if self._counts is not None:
            taken: list[int] = self._counts.tolist()
            self._counts.zero_()
            return taken
        taken, self._kept = self._kept, [0] * self._num_experts
        return taken

    @property
    def is_on(self) -> bool:
        return self._counts is not None

    def add(self, chosen: torch.Tensor) -> None:
        """chosen: int64[rows, experts of a row]."""
        if self._counts is not None:
            experts = chosen.flatten()
            self._counts.index_add_(0, experts, torch.ones_like(experts))


ACTIVATIONS: dict[str, Activation] = {
    "gelu": "gelu",
    "gelu_new": "gelu_tanh",
    "gelu_pytorch_tanh": "gelu_tanh",
    "relu": "relu",
    "silu": "silu",
}
"""Names of the kernels by Hugging Face's."""
FUNCTIONS: dict[tuple[Activation | None, bool], Callable[[torch.Tensor], torch.Tensor]] = {
    ("gelu", False): kernels.gelu,
    ("gelu_tanh", False): kernels.gelu_tanh,
    ("relu", False): torch.relu,
    ("gelu", True): kernels.gelu_mul,
    ("gelu_tanh", True): kernels.gelu_tanh_mul,
    ("silu", True): kernels.silu_mul,
}
"""By name, and whether the layer is gated: then they take what is activated, and the factor on it."""

GatedActivation = Literal["silu", "gelu_tanh"]

_GATED: dict[str, GatedActivation] = {"silu": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


class GatedMlp:
    """down(act(gate(x)) * up(x)). act: Hugging Face name of the activation; ModelError for one that is not known."""

    def __init__(
        self, hidden_size: int, intermediate_size: int, act: str, placement: Placement, *, bias: bool = False
    ) -> None:
        if act not in _GATED:
            raise ModelError(f"activation {act!r} is not supported; known: {', '.join(_GATED)}")
        self.activation = _GATED[act]
        self._gate = FUNCTIONS[self.activation, True]
        sizes = {"gate_proj": intermediate_size, "up_proj": intermediate_size}
        own = _own_part(intermediate_size, placement)
        self.gate_up = Linear(hidden_size, sizes, placement, bias=bias, own_outputs=dict.fromkeys(sizes, own))
        self.down = Linear(
            intermediate_size,
            {"down_proj": hidden_size},
            placement,
            bias=bias,
            own_inputs=None if placement.shard.is_whole else own,
        )

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self._gate(self.gate_up(x)))

    def weights(self, prefix: str) -> Iterator[Weight]:
        """`<prefix>.gate_proj`, `.up_proj`, `.down_proj`."""
        yield from self.gate_up.weights(f"{prefix}.")
        yield from self.down.weights(f"{prefix}.")


def _own_part(intermediate_size: int, placement: Placement) -> slice:
    """The part of the layer that this rank computes: whole blocks of what formats scale or rotate together, if there are enough of them."""
    shard = placement.shard
    units = (BLOCK_OF_FILES, WIDE_GROUP, KERNEL_GROUP) if placement.format.facts.blocks else (WIDE_GROUP, KERNEL_GROUP)
    unit = next((size for size in units if intermediate_size >= size * shard.size), 1)
    return shard.part(intermediate_size, unit)


_Given = TypeVar("_Given")  # a tensor or a quantised matrix


class SparseMoe:
    """softmax over all experts, the best `num_experts_per_tok`, renormalised if `norm_topk_prob`.

    renames: (ours, theirs) for families whose expert projections are not called gate_proj, up_proj and down_proj.
    Raises ModelError if there are fewer experts than ranks, and each has whole ones.
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
        self._own = _own_experts(moe.num_experts, placement)
        self._experts = [GatedMlp(hidden_size, moe.intermediate_size, act, placement.experts) for _ in self._own]
        self._packed: PackedExperts | None = None
        self._group = placement.shard.group
        self.counts = ExpertCounts(moe.num_experts)

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        top_shares, top_experts = kernels.route(
            self._router(x), self._moe.num_experts_per_tok, renormalise=self._moe.norm_topk_prob
        )
        self.counts.add(top_experts)
        self._show_observers(x, top_experts)
        if self._packed is None:
            gate_ups = [expert.gate_up.packed for expert in self._experts]
            downs = [expert.down.packed for expert in self._experts]
            self._packed = kernels.pack_experts(gate_ups, downs, self._experts[0].activation)
        y = kernels.moe(x, self._local(top_experts), top_shares, self._packed)
        if self._group is not None:
            self._group.all_reduce(y)
        return y

    def _local(self, top_experts: torch.Tensor) -> torch.Tensor:
        if len(self._own) == self._moe.num_experts:
            return top_experts
        local = top_experts - self._own.start
        return local.masked_fill_((local < 0) | (local >= len(self._own)), -1)

    def _show_observers(self, x: torch.Tensor, top_experts: torch.Tensor) -> None:
        """Run the observed experts one by one, so that they report their inputs; for calibration."""
        for index, expert in zip(self._own, self._experts, strict=True):
            if expert.gate_up.observer is not None or expert.down.observer is not None:
                expert(x[(top_experts == index).any(dim=1)])

    def weights(self, prefix: str) -> Iterator[Weight]:
        """`<prefix>.gate.weight` and `<prefix>.experts.<i>.*`."""
        yield from self._router.weights(f"{prefix}.")
        for index in range(self._moe.num_experts):
            is_own = index in self._own
            # Another rank's expert has the names and shapes of any.
            expert = self._experts[index - self._own.start if is_own else 0]
            for weight in expert.weights(f"{prefix}.experts.{index}"):
                named = replace(weight, name=self._renamed(weight.name))
                yield self._dropping(named) if is_own else elsewhere(named)

    def weights_changed(self) -> None:
        self._packed = None

    def _dropping(self, weight: Weight) -> Weight:
        """An expert's weight; loading it drops what was packed from the old ones."""
        quantized = weight.load_quantized
        return replace(
            weight,
            load=partial(self._load, weight.load),
            load_quantized=None if quantized is None else partial(self._load, quantized),
        )

    def _load(self, load: Callable[[_Given], None], tensor: _Given) -> None:
        load(tensor)
        self._packed = None

    def _renamed(self, name: str) -> str:
        for ours, theirs in self._renames:
            name = name.replace(ours, theirs)
        return name


def _own_experts(num_experts: int, placement: Placement) -> range:
    """The experts of which this rank has anything. Raises ModelError if there are fewer than ranks."""
    if not placement.whole_experts:
        return range(num_experts)
    part = placement.shard.part(num_experts)
    return range(part.start, part.stop)
