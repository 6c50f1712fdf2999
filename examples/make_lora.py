"""Makes a small LoRA adapter in peft's format for a model: random factors, enough to see an adapter change the answers.

python examples/make_lora.py smollm2 /tmp/pirate --rank 8 --seed 1
"""

import argparse
import json
from pathlib import Path

import torch
from safetensors.torch import save_file

from headrace.checkpoint.names import resolve_model
from headrace.checkpoint.source import open_checkpoint

TARGETS = ("q_proj", "v_proj", "gate_proj", "up_proj", "down_proj")


def main() -> None:
    """Read the shapes of the model's linear layers and write adapter_config.json and adapter_model.safetensors."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="a known name or a folder")
    parser.add_argument("output", type=Path, help="folder to write")
    parser.add_argument("--rank", type=int, default=8)
    parser.add_argument("--alpha", type=float, default=16.0)
    parser.add_argument("--size", type=float, default=0.1, help="how much of a layer's output the adapter is")
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()

    checkpoint = open_checkpoint(resolve_model(options.model))
    generator = torch.Generator().manual_seed(options.seed)
    scale = options.alpha / options.rank
    tensors = {}
    for name in checkpoint.tensor_names():
        module = name.removesuffix(".weight")
        if module.rpartition(".")[2] not in TARGETS:
            continue
        out_size, in_size = checkpoint.shape(name)
        weight_std = float(checkpoint.tensor(name).float().std())
        a = torch.randn(options.rank, in_size, generator=generator) / options.rank**0.5
        b = torch.randn(out_size, options.rank, generator=generator) * weight_std * options.size / scale
        tensors[f"base_model.model.{module}.lora_A.weight"] = a
        tensors[f"base_model.model.{module}.lora_B.weight"] = b
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": options.model,
        "r": options.rank,
        "lora_alpha": options.alpha,
        "target_modules": list(TARGETS),
        "bias": "none",
    }
    options.output.mkdir(parents=True, exist_ok=True)
    (options.output / "adapter_config.json").write_text(json.dumps(config, indent=2))
    save_file(tensors, options.output / "adapter_model.safetensors")
    print(f"{options.output}: {len(tensors) // 2} layers of rank {options.rank}")


if __name__ == "__main__":
    main()
