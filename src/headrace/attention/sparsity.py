"""Double sparsity: long outputs attend to the pages of the KV cache that matter most, which few channels of the keys tell.

S. Yang et al., "Post-Training Sparse Attention with Double Sparsity", 2024, with pages of 16 tokens in place of single ones. Owns the settings
(`DoubleSparsity`) and the file with the order of channels. Does not own the kernel (csrc/cpu/sparse_attention.cpp) or what
measures the channels (`execution.calibrate`). Runs at start.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

import torch

from headrace.config.server_args import ServerArgs
from headrace.errors import ConfigError
from headrace.kernels import PAGE_SIZE

ChannelType = Literal["qk", "q", "k"]
"""By what channels are ordered: how much they move the product of a query with different keys, or the magnitude of queries or keys alone."""

_LEAST_TOKENS = 128
"""The first page and the last ones are always among those that are attended to."""

_OPTION = "--ds-channel-config-path"


@dataclass(frozen=True, slots=True)
class DoubleSparsity:
    """Positions after a prompt, from `threshold` on, attend to `num_pages` pages, chosen by `num_channels` channels for each KV head.

    orders: of each layer int32[num_kv_heads, head_dim], the heavy channels first.
    """

    num_channels: int
    num_pages: int
    threshold: int
    orders: tuple[torch.Tensor, ...]

    def __str__(self) -> str:
        return (
            f"double sparsity: outputs from position {self.threshold} on attend to {self.num_pages} pages, "
            f"chosen by {self.num_channels} channels of each KV head"
        )

    def of_layers(self, begin: int, end: int) -> "DoubleSparsity":
        return DoubleSparsity(self.num_channels, self.num_pages, self.threshold, self.orders[begin:end])


def read_sparsity(args: ServerArgs, num_layers: int, num_kv_heads: int, head_dim: int) -> DoubleSparsity | None:
    """What the options ask for; None without --enable-double-sparsity. Raises ConfigError when the file does not fit the model."""
    if not args.enable_double_sparsity:
        return None
    assert args.ds_channel_config_path is not None
    if args.ds_heavy_channel_num > head_dim:
        raise ConfigError(
            f"--ds-heavy-channel-num {args.ds_heavy_channel_num}: heads of this model have {head_dim} channels"
        )
    if args.ds_heavy_token_num < _LEAST_TOKENS:
        raise ConfigError(f"--ds-heavy-token-num must be at least {_LEAST_TOKENS}, got {args.ds_heavy_token_num}")
    orders = read_orders(Path(args.ds_channel_config_path), args.ds_heavy_channel_type, num_layers)
    for layer, order in enumerate(orders):
        is_order = order.shape == (num_kv_heads, head_dim) and bool(
            (order.sort(dim=1).values == torch.arange(head_dim)).all()
        )
        if not is_order:
            raise ConfigError(
                f"{_OPTION}: layer {layer} is not an order of {head_dim} channels for each of {num_kv_heads} KV heads, as this model has"
            )
    return DoubleSparsity(
        args.ds_heavy_channel_num, args.ds_heavy_token_num // PAGE_SIZE, args.ds_sparse_decode_threshold, tuple(orders)
    )


def read_orders(path: Path, kind: ChannelType, num_layers: int) -> list[torch.Tensor]:
    """Of each layer int32[heads, channels]. Raises ConfigError."""
    try:
        layers = json.loads(path.read_bytes())
        return [torch.tensor(layers[_name(layer, kind)], dtype=torch.int32) for layer in range(num_layers)]
    except OSError as error:
        raise ConfigError(f"{_OPTION} {path}: {error.strerror}") from None
    except KeyError as error:
        raise ConfigError(f"{_OPTION} {path} has no {error}, which a model of {num_layers} layers needs") from None
    except (ValueError, TypeError, RuntimeError):
        raise ConfigError(f"{_OPTION} {path} is not a file of `headrace quantize --calibrate-sparsity`") from None


def write_orders(path: Path, weights: dict[ChannelType, list[torch.Tensor]]) -> None:
    """weights: of each layer [num_kv_heads, head_dim], how heavy channels are; of equal ones the first comes first."""
    content = {
        _name(layer, kind): weight.sort(dim=1, descending=True, stable=True).indices.tolist()
        for kind, layers in weights.items()
        for layer, weight in enumerate(layers)
    }
    path.write_text(json.dumps(content) + "\n")


def _name(layer: int, kind: ChannelType) -> str:
    return f"model.layers.{layer}.self_attn.{kind}_proj"
