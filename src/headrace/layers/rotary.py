"""Rotary position embedding: the tables, for every kind of frequency scaling. They are made once, when the model is built, and do not change, so that
cached keys stay valid.

Sources: J. Su et al., "RoFormer" (2021); linear interpolation: S. Chen et al. (2023); NTK-aware scaling and YaRN: B. Peng et al.,
"YaRN" (2023); llama3: the Llama 3.1 release; LongRoPE: Y. Ding et al. (2024).
"""

import math

import torch

from headrace import kernels
from headrace.checkpoint.layer_config import RopeConfig
from headrace.errors import ConfigError
from headrace.layers.weight import Placement


class Rotary:
    """cos and sin of every position, float32[max_positions, rotary_dim / 2], where rotary_dim <= head_dim."""

    def __init__(self, rope: RopeConfig, head_dim: int, trained_positions: int, placement: Placement) -> None:
        """trained_positions: `max_position_embeddings` of the model."""
        rotary_dim = int(head_dim * rope.partial_rotary_factor)
        frequencies, attention_factor = inverse_frequencies(
            rope, rotary_dim, trained_positions, placement.max_positions
        )
        positions = torch.arange(placement.max_positions, dtype=torch.float32)
        angles = positions[:, None] * frequencies[None, :]
        self.cos = (angles.cos() * attention_factor).to(placement.device)
        self.sin = (angles.sin() * attention_factor).to(placement.device)

    def __call__(self, q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor) -> None:
        """Rotate q [tokens, num_q_heads, head_dim] and k [tokens, num_kv_heads, head_dim] in place; positions int32[tokens]."""
        kernels.rotary(q, k, positions, self.cos, self.sin)


class NoRotary(Rotary):
    """Of a layer that has no positions: the tables turn nothing."""

    def __init__(self, rope: RopeConfig, head_dim: int, trained_positions: int, placement: Placement) -> None:
        super().__init__(rope, head_dim, trained_positions, placement)
        self.cos.fill_(1.0)
        self.sin.zero_()

    def __call__(self, q: torch.Tensor, k: torch.Tensor, positions: torch.Tensor) -> None:
        """Nothing."""


class SectionedRotary(Rotary):
    """Rotation by three positions of each token: in time, height and width (M-RoPE). Some pairs of a head turn by each.

    Where the three are equal, as those of text are, the row of the position serves. For other tokens `rows_of` composes rows of their own, after
    those of the positions, and these are the positions of such tokens until it is called again.

    Source: P. Wang et al., "Qwen2-VL" (2024).
    """

    def __init__(
        self,
        rope: RopeConfig,
        head_dim: int,
        trained_positions: int,
        placement: Placement,
        sections: tuple[int, ...],
        interleaved: bool = False,
    ) -> None:
        """sections: how many pairs of a head turn by time, height and width, in this order; interleaved (Qwen3-VL): they take turns, and those that
        are left turn by time. ConfigError unless they are all pairs."""
        super().__init__(rope, head_dim, trained_positions, placement)
        pairs = self.cos.shape[1]
        if sum(sections) != pairs:
            raise ConfigError(f"mrope_section {list(sections)} does not sum up to the {pairs} pairs of a head")
        self._first = len(self.cos)
        axes = torch.repeat_interleave(torch.arange(3), torch.tensor(sections))
        if interleaved:
            axes = torch.zeros(pairs, dtype=torch.long)
            for axis in (1, 2):
                axes[axis : 3 * sections[axis] : 3] = axis
        # Of each pair: by which of the three it turns, and its column in the tables.
        self._axes, self._columns = axes.to(placement.device), torch.arange(pairs, device=placement.device)
        self.cos, self.sin = (
            torch.cat([table, table.new_zeros(placement.composed_positions, table.shape[1])])
            for table in (self.cos, self.sin)
        )

    @property
    def num_positions(self) -> int:
        return self._first

    def rows_of(self, places: torch.Tensor) -> torch.Tensor:
        """places: int64[3, tokens] on the model's device, at most `Placement.composed_positions` tokens -> int32[tokens], their positions."""
        count = places.shape[1]
        assert self._first + count <= len(self.cos), (count, len(self.cos) - self._first)
        rows = places.T[:, self._axes]
        for table in (self.cos, self.sin):
            table[self._first : self._first + count] = table[rows, self._columns]
        return torch.arange(self._first, self._first + count, dtype=torch.int32, device=places.device)


def inverse_frequencies(
    rope: RopeConfig, rotary_dim: int, trained_positions: int, max_positions: int
) -> tuple[torch.Tensor, float]:
    """float32[rotary_dim / 2] radians per position, and the factor on cos and sin.

    In their papers, `dynamic` and `longrope` depend on the length of a sequence, but cached keys must not. `dynamic` changes nothing
    up to the trained length, which is the longest supported one. `longrope` uses its long factors if `max_positions`, the longest
    supported sequence, exceeds the original length.
    """
    exponents = torch.arange(0, rotary_dim, 2, dtype=torch.float32) / rotary_dim
    scaling = rope.scaling
    if rope.rope_type == "dynamic" and max_positions > trained_positions:
        raise ConfigError(
            f"dynamic NTK scaling changes the cached keys of a sequence that grows beyond {trained_positions} tokens; "
            f"serve at most {trained_positions}, not {max_positions}"
        )
    plain = 1.0 / rope.theta**exponents
    if rope.rope_type == "linear":
        return plain / scaling["factor"], 1.0
    if rope.rope_type == "llama3":
        return _llama3(plain, scaling), 1.0
    if rope.rope_type == "yarn":
        return _yarn(plain, rope.theta, rotary_dim, scaling)
    if rope.rope_type == "longrope":
        return _longrope(plain, scaling, trained_positions, max_positions)
    return plain, 1.0


def _llama3(plain: torch.Tensor, scaling: dict[str, float]) -> torch.Tensor:
    """Low frequencies are divided by `factor`, high ones kept, those between interpolated."""
    original = scaling["original_max_position_embeddings"]
    low, high = scaling["low_freq_factor"], scaling["high_freq_factor"]
    turns = original * plain / (2 * math.pi)  # over the original context
    keep = ((turns - low) / (high - low)).clamp(0.0, 1.0)
    return (1 - keep) * plain / scaling["factor"] + keep * plain


def _yarn(plain: torch.Tensor, theta: float, rotary_dim: int, scaling: dict[str, float]) -> tuple[torch.Tensor, float]:
    original, factor = scaling["original_max_position_embeddings"], scaling["factor"]

    def dimension(turns: float) -> float:
        """Index of the frequency that makes this many turns over the original context."""
        return rotary_dim * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    low, high = dimension(scaling.get("beta_fast") or 32), dimension(scaling.get("beta_slow") or 1)
    if scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rotary_dim - 1)
    if low == high:
        high += 0.001
    stretched = ((torch.arange(rotary_dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0.0, 1.0)
    frequencies = plain / factor * stretched + plain * (1 - stretched)
    attention_factor = scaling.get("attention_factor")
    if attention_factor is None:
        mscale, mscale_all_dim = scaling.get("mscale"), scaling.get("mscale_all_dim")
        if mscale and mscale_all_dim:
            attention_factor = _mscale(factor, mscale) / _mscale(factor, mscale_all_dim)
        else:
            attention_factor = _mscale(factor, 1.0)
    return frequencies, attention_factor


def _mscale(factor: float, mscale: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0


def _longrope(
    plain: torch.Tensor, scaling: dict[str, object], trained_positions: int, max_positions: int
) -> tuple[torch.Tensor, float]:
    original = scaling["original_max_position_embeddings"]
    assert isinstance(original, int | float), original
    divisors = torch.tensor(scaling["long_factor" if max_positions > original else "short_factor"], dtype=torch.float32)
    attention_factor = scaling.get("attention_factor")
    if attention_factor is None:
        factor = scaling.get("factor") or trained_positions / original
        assert isinstance(factor, int | float), factor
        attention_factor = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    assert isinstance(attention_factor, int | float), attention_factor
    return plain / divisors, attention_factor
