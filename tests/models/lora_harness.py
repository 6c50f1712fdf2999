"""Adapters in peft's format for tiny models, and what peft says that such an adapter does to the weights."""

import copy
import json
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

ATTENTION = ("q_proj", "k_proj", "v_proj", "o_proj")
DENSE = (*ATTENTION, "gate_proj", "up_proj", "down_proj")


@dataclass
class TinyAdapter:
    """Factors by module of a transformers model, and the config that goes with them."""

    config: dict[str, Any]
    factors: dict[str, tuple[torch.Tensor, torch.Tensor]]
    scales: dict[str, float]
    renames: dict[str, str] = field(default_factory=dict)

    def tensors(self) -> dict[str, torch.Tensor]:
        """As peft names them in the file."""
        return {
            f"base_model.model.{module}.lora_{side}.weight": tensor.contiguous()
            for module, pair in self.factors.items()
            for side, tensor in zip("AB", pair, strict=True)
        }

    def save(self, folder: Path, **changes: Any) -> str:
        """Write it; `changes` to the config."""
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "adapter_config.json").write_text(json.dumps(self.config | changes))
        save_file(self.tensors(), folder / "adapter_model.safetensors")
        return str(folder)

    def merged(self, model: Any) -> Any:
        """A copy of the transformers model with W + scale * B A in place of W: the definition of `merge_and_unload`."""
        model = copy.deepcopy(model)
        for module, (a, b) in self.factors.items():
            model.get_submodule(module).weight.data += self.scales[module] * (b @ a)
        return model


def tiny_adapter(
    model: Any,
    targets: tuple[str, ...] = DENSE,
    *,
    rank: int = 4,
    alpha: float = 6.0,
    ranks: dict[str, int] | None = None,
    alphas: dict[str, float] | None = None,
    rslora: bool = False,
    seed: int = 0,
) -> TinyAdapter:
    """Random factors on every linear layer of `model` whose name ends in one of `targets`; ranks, alphas: exceptions by that name."""
    generator = torch.Generator().manual_seed(seed)
    factors, scales = {}, {}
    for name, module in model.named_modules():
        leaf = name.rpartition(".")[2]
        if leaf not in targets or not isinstance(module, torch.nn.Linear):
            continue
        r, strength = (ranks or {}).get(leaf, rank), (alphas or {}).get(leaf, alpha)
        a = torch.randn(r, module.in_features, generator=generator) / module.in_features**0.5
        factors[name] = a, 0.3 * torch.randn(module.out_features, r, generator=generator)
        scales[name] = strength / (r**0.5 if rslora else r)
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": rank,
        "lora_alpha": alpha,
        "use_rslora": rslora,
        "target_modules": list(targets),
        "rank_pattern": ranks or {},
        "alpha_pattern": alphas or {},
        "bias": "none",
    }
    return TinyAdapter(config, factors, scales)
