"""The names that clients know the model by. Pure; any process."""

from pathlib import Path

from headrace.checkpoint.hub_cache import HubName

LATEST = ":latest"
"""The tag that Ollama's clients add to names without one."""


def served_names(given: str | None, model_path: str) -> tuple[str, ...]:
    """The names of --served-model-name, at least one; without the option the last part of the model's path. Never a path."""
    names = [name.strip() for name in (given or "").split(",")]
    if any(names):
        return tuple(dict.fromkeys(filter(None, names)))
    hub_name = HubName.parse(model_path)
    path = Path(model_path if hub_name is None else hub_name.repo)
    return (path.stem if path.suffix == ".gguf" else path.name or "model",)


def spellings(name: str) -> tuple[str, str]:
    """A model's name as given, then with or without the tag `:latest`: both mean the same."""
    return name, name.removesuffix(LATEST) if name.endswith(LATEST) else name + LATEST
