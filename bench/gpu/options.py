"""Options of a check of a GPU. No torch: the command reads this before any piece runs."""

from dataclasses import dataclass
from pathlib import Path

CONFIGS = Path(__file__).resolve().parents[1] / "configs"
MODELS = ("llama-3.1-8b", "qwen3-8b", "qwen3-30b-a3b", "smollm2-135m")


@dataclass(frozen=True, slots=True)
class Options:
    """device: cuda or cpu. tiny: the models' shapes with a few small layers, to try the whole run. models: of CONFIGS."""

    device: str
    tiny: bool
    models: tuple[str, ...]
