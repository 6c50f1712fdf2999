"""The parts between two attention calls, as functions compiled by torch (`--enable-torch-compile`): from the residual stream to q, k and v, and from
attention's output back to the stream. All layers share them: weights are arguments.

Runs in the thread that runs the model; the first steps compile, for one number of tokens, for one token, and for any number.
"""

from collections.abc import Callable, Sequence

import torch
import torch.nn.functional as F

from headrace.attention.base import AttentionLayerSpec, StepAttention
from headrace.kernels import DecoderSpec

Enter = Callable[..., tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]]
Leave = Callable[..., tuple[torch.Tensor, torch.Tensor]]


def why_not(spec: DecoderSpec) -> str:
    for index, layer in enumerate(spec.layers):
        for linear in layer.linears:
            if linear.layout != "torch":
                return f"layer {index} has weights of layout {linear.layout}"
    return ""


class PiecewiseDecoder:
    """All layers of `spec`, which is replaced when weights were loaded anew. backend: of torch.compile."""

    def __init__(self, spec: DecoderSpec, backend: str = "inductor") -> None:
        assert not why_not(spec), why_not(spec)
        self.spec = spec
        self._enter: Enter = torch.compile(_entering(spec), backend=backend, fullgraph=True)
        self._leave: Leave = torch.compile(_leaving(spec), backend=backend, fullgraph=True)

    def __call__(
        self,
        hidden: torch.Tensor,
        positions: torch.Tensor,
        attention: StepAttention,
        attention_specs: Sequence[AttentionLayerSpec],
    ) -> torch.Tensor:
        residual, added = hidden, torch.zeros_like(hidden)
        for layer, attention_spec in zip(self.spec.layers, attention_specs, strict=True):
            q_norm, k_norm = layer.head_norms or (None, None)
            q, k, v, residual = self._enter(
                added, residual, layer.attention_norm, layer.qkv.data, layer.qkv.bias, q_norm, k_norm,
                layer.cos, layer.sin, positions,
            )  # fmt: skip
            out = attention.forward(q, k, v, attention_spec)
            added, residual = self._leave(
                out, residual, layer.out.data, layer.out.bias, layer.after_attention, layer.mlp_norm,
                layer.gate_up.data, layer.gate_up.bias, layer.down.data, layer.down.bias, layer.after_mlp,
            )  # fmt: skip
        residual = residual + added
        norm = self.spec.final_norm
        return residual if norm is None else _norm(residual, norm, self.spec.eps)


def _entering(spec: DecoderSpec) -> Enter:
    eps, head_dim = spec.eps, spec.head_dim
    num_q, num_kv = spec.num_q_heads, spec.num_kv_heads

    def enter(
        added: torch.Tensor,
        residual: torch.Tensor,
        norm: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        q_norm: torch.Tensor | None,
        k_norm: torch.Tensor | None,
        cos: torch.Tensor,
        sin: torch.Tensor,
        positions: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
        residual = residual + added
        qkv = _linear(_norm(residual, norm, eps), weight, bias).unflatten(1, (num_q + 2 * num_kv, head_dim))
        q, k, v = qkv.split((num_q, num_kv, num_kv), dim=1)
        if q_norm is not None and k_norm is not None:
            q, k = _norm(q, q_norm, eps), _norm(k, k_norm, eps)
        index = positions.long()
        c, s = cos[index].unsqueeze(1), sin[index].unsqueeze(1)
        return _rotated(q, c, s), _rotated(k, c, s), v.contiguous(), residual

    return enter


def _leaving(spec: DecoderSpec) -> Leave:
    eps, is_gelu = spec.eps, spec.layers[0].activation == "gelu_tanh"

    def leave(
        out: torch.Tensor,
        residual: torch.Tensor,
        out_weight: torch.Tensor,
        out_bias: torch.Tensor | None,
        after_attention: torch.Tensor | None,
        mlp_norm: torch.Tensor,
        gate_up_weight: torch.Tensor,
        gate_up_bias: torch.Tensor | None,
        down_weight: torch.Tensor,
        down_bias: torch.Tensor | None,
        after_mlp: torch.Tensor | None,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        x = _linear(out, out_weight, out_bias)
        residual = residual + (x if after_attention is None else _norm(x, after_attention, eps))
        gate, up = _linear(_norm(residual, mlp_norm, eps), gate_up_weight, gate_up_bias).chunk(2, dim=1)
        gated = F.gelu(gate, approximate="tanh") if is_gelu else F.silu(gate)
        x = _linear(gated * up, down_weight, down_bias)
        return (x if after_mlp is None else _norm(x, after_mlp, eps)), residual

    return leave


def _linear(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return F.linear(x, weight.to(x.dtype), None if bias is None else bias.to(x.dtype))


def _norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight).to(x.dtype)


def _rotated(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """Halves convention; elements beyond the rotated ones stay."""
    half = cos.shape[-1]
    a, b = x[..., :half].float(), x[..., half : 2 * half].float()
    turned = torch.cat((a * cos - b * sin, b * cos + a * sin), dim=-1).to(x.dtype)
    return turned if 2 * half == x.shape[-1] else torch.cat((turned, x[..., 2 * half :]), dim=-1)
