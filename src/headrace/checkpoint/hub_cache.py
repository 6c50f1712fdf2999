"""Models of the Hugging Face cache by name: `org/name`, `org/name@revision`, `org/name:FILE.gguf`, `org/name:Q4_K_M`. No network, no torch.

Layout (`models--org--name/{blobs,refs,snapshots}`): https://huggingface.co/docs/huggingface_hub/guides/manage-cache.
"""

import os
import re
from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Self

from headrace.checkpoint.files import best_mmprojs, first_part, gguf_parts, is_mmproj, open_regular, read_json_object
from headrace.errors import ModelError

_REFERENCE = re.compile(
    r"(?P<repo>[A-Za-z0-9][\w.-]*/[A-Za-z0-9_][\w.-]*)(?:@(?P<revision>[\w./-]+))?(?::(?P<file>[\w. /-]+))?", re.ASCII
)
COMMIT = re.compile(r"[0-9a-f]{40}|[0-9a-f]{64}")
# What ends a name that can only be a path.
_FILE_SUFFIXES = (".gguf", ".safetensors", ".json", ".bin", ".pt", ".pth")
_MAX_REF_BYTES = 256


@dataclass(frozen=True, slots=True)
class HubName:
    """A model on the Hub as the user wrote it. repo: `org/name`. file: of a GGUF file, its name or its quantisation."""

    repo: str
    revision: str = "main"
    file: str | None = None

    @classmethod
    def parse(cls, text: str) -> Self | None:
        """None if the text is not of this form, so that it can only be a path."""
        found = _REFERENCE.fullmatch(text)
        if found is None or found["repo"].endswith(_FILE_SUFFIXES):
            return None
        parts = [found["repo"], found["revision"] or "main", found["file"] or ""]
        if any(".." in PurePosixPath(part).parts or part.startswith("/") for part in parts):
            return None
        return cls(found["repo"], parts[1], parts[2] or None)

    @property
    def text(self) -> str:
        """As `parse` reads it."""
        revision = "" if self.revision == "main" else f"@{self.revision}"
        return f"{self.repo}{revision}" + (f":{self.file}" if self.file else "")

    @property
    def folder(self) -> Path:
        return cache_folder() / f"models--{self.repo.replace('/', '--')}"


@dataclass(frozen=True, slots=True)
class CachedModel:
    """A model in the cache. name: to serve it by. kind: of its weights. num_bytes: of its files. commit: its revision."""

    name: str
    kind: str
    num_bytes: int
    commit: str
    path: Path


def cache_folder() -> Path:
    """$HF_HUB_CACHE, else $HF_HOME/hub, else $XDG_CACHE_HOME/huggingface/hub, else ~/.cache/huggingface/hub."""
    if own := os.environ.get("HF_HUB_CACHE"):
        return _expanded(own)
    if home := os.environ.get("HF_HOME"):
        return _expanded(home) / "hub"
    base = os.environ.get("XDG_CACHE_HOME")
    return (_expanded(base) if base else Path.home() / ".cache") / "huggingface" / "hub"


def find_model(name: HubName) -> Path:
    """The folder or GGUF file of a model in the cache. Raises ModelError saying what was looked for, and how to get it."""
    if not (name.folder / "snapshots").is_dir():
        raise ModelError(
            f"there is no file or folder {name.text}, and no model {name.repo} in the Hugging Face cache "
            f"(looked for {name.folder}); download it with: headrace pull {name.text}"
        )
    return _model_in(snapshot_of(name.folder, name), name)


def find_in_folder(folder: Path) -> Path | None:
    if not folder.name.startswith("models--") or not (folder / "snapshots").is_dir():
        return None
    name = HubName(folder.name.removeprefix("models--").replace("--", "/", 1))
    return _model_in(snapshot_of(folder, name), name)


def snapshot_of(folder: Path, name: HubName) -> Path:
    """The snapshot of a repository's folder that a revision means. Raises ModelError if there is none."""
    snapshots = folder / "snapshots"
    commit = name.revision if COMMIT.fullmatch(name.revision) else _read_ref(folder / "refs" / name.revision)
    if commit is None:
        here = sorted(entry.name for entry in snapshots.iterdir() if COMMIT.fullmatch(entry.name))
        others = f"; commits that are there: {', '.join(here[:5])}" if here else ""
        raise ModelError(
            f"the Hugging Face cache has no revision {name.revision} of {name.repo} (looked for "
            f"{folder / 'refs' / name.revision}){others}; download it with: headrace pull {name.text}"
        )
    if not (snapshots / commit).is_dir():
        raise ModelError(
            f"the Hugging Face cache has no files of {name.repo} at revision {name.revision} (looked for "
            f"{snapshots / commit}); download them with: headrace pull {name.text}"
        )
    return snapshots / commit


def choose_gguf(files: Iterable[str], wanted: str | None, repo: str) -> str:
    """The GGUF file that `wanted` means: its name, or a word of its name (`Q4_K_M`); None means the only file.

    files: names in the repository, of which others than GGUF models are skipped. Raises ModelError listing them if none
    or several fit. Of a file in parts it is the first.
    """
    models = sorted(file for file in files if is_gguf_model(file))
    if wanted is None:
        fitting = models
    elif wanted in models:
        fitting = [wanted]
    else:
        word = re.compile(rf"(?:^|[-._/]){re.escape(wanted.removesuffix('.gguf').lower())}(?:$|[-.])")
        fitting = [file for file in models if word.search(file.removesuffix(".gguf").lower())]
    whole = [file for file in fitting if gguf_parts(file) == [file]]
    if len(fitting) == 1 or len(whole) == 1:
        return (whole or fitting)[0]
    listed = ", ".join(PurePosixPath(file).name for file in fitting or models) or "none"
    if not fitting:
        raise ModelError(f"{repo} has no GGUF file {wanted}; its GGUF files: {listed}")
    raise ModelError(f"{repo} has {len(fitting)} GGUF files; name one as {repo}:FILE or {repo}:Q4_K_M: {listed}")


def is_gguf_model(file: str) -> bool:
    """Whether the name is that of a GGUF language model or its first part, and not of another part (`mmproj`, which sees images)."""
    name = PurePosixPath(file).name
    is_model = name.endswith(".gguf") and not is_mmproj(name) and not name.startswith("imatrix")
    return is_model and name == first_part(name)


def mmprojs_of(files: Iterable[str], model: str) -> list[str]:
    """The vision encoder of a GGUF model: of those in its folder, else of those at the top, the preferred precision (F16). Several if they are of
    several models. files: names in the repository."""
    found = [PurePosixPath(file) for file in files if is_mmproj(file)]
    for folder in (PurePosixPath(model).parent, PurePosixPath()):
        names = [file.name for file in found if file.parent == folder]
        if names:
            return [(folder / name).as_posix() for name in best_mmprojs(names)]
    return []


def list_cached() -> list[CachedModel]:
    """Every model in the cache that has weights which can be read, at its main revision, by name. GGUF files one by one."""
    folders = sorted(cache_folder().glob("models--*--*/snapshots"))
    return [model for folder in folders for model in _models_of(folder.parent)]


def format_of(model: CachedModel) -> str:
    """How the weights are stored, in words: GGUF with the type that most of them have, safetensors with dtype or method."""
    try:
        if model.kind == "GGUF":
            from headrace.checkpoint.gguf import GgufFile  # numpy: options are read without it

            sizes: Counter[str] = Counter()
            for tensor in GgufFile(model.path).tensors.values():
                sizes[tensor.type.name] += tensor.num_bytes
            return f"GGUF {sizes.most_common(1)[0][0]}" if sizes else "GGUF"
        config = read_json_object(model.path / "config.json")
    except ModelError:
        return f"{model.kind}, not readable"
    match config:
        case {"quantization_config": {"quant_method": str(method)}}:
            return f"{model.kind} {method}"
        case {"dtype": str(dtype)} | {"torch_dtype": str(dtype)}:
            return f"{model.kind} {dtype}"
        case _:
            return model.kind


def _models_of(folder: Path) -> list[CachedModel]:
    name = HubName(folder.name.removeprefix("models--").replace("--", "/", 1))
    try:
        snapshot = snapshot_of(folder, name)
        sizes = {
            file.relative_to(snapshot).as_posix(): file.stat().st_size for file in snapshot.rglob("*") if file.is_file()
        }
    except (ModelError, OSError):
        return []
    ggufs = [file for file in sizes if is_gguf_model(file)]
    if any(file.endswith(".safetensors") and not file.startswith("adapter") for file in sizes):
        return [CachedModel(name.repo, "safetensors", sum(sizes.values()), snapshot.name, snapshot)]
    return [
        CachedModel(
            name.repo if len(ggufs) == 1 else f"{name.repo}:{PurePosixPath(file).name}",
            "GGUF",
            sum(sizes.get(part, 0) for part in (*gguf_parts(file), *mmprojs_of(sizes, file))),
            snapshot.name,
            snapshot / file,
        )
        for file in sorted(ggufs)
    ]


def _model_in(snapshot: Path, name: HubName) -> Path:
    """The folder or GGUF file to serve of a snapshot. Raises ModelError if files are missing or lie elsewhere."""
    files = [path.relative_to(snapshot).as_posix() for path in sorted(snapshot.rglob("*")) if not path.is_dir()]
    has_weights = any(file.endswith(".safetensors") and "/" not in file for file in files)
    if name.file is not None or (not has_weights and any(is_gguf_model(file) for file in files)):
        try:
            chosen = choose_gguf(files, name.file, name.repo)
        except ModelError as error:
            raise ModelError(f"in the Hugging Face cache, {error.message}; headrace pull brings others") from None
        _check_inside(snapshot, [*gguf_parts(chosen), *mmprojs_of(files, chosen)], name)
        return snapshot / chosen
    _check_inside(snapshot, files, name)
    if not has_weights and "config.json" not in files:
        raise ModelError(
            f"the Hugging Face cache has neither config.json nor weights of {name.repo} (looked in {snapshot}); "
            f"download them with: headrace pull {name.text}"
        )
    return snapshot


def _check_inside(snapshot: Path, files: list[str], name: HubName) -> None:
    """A snapshot's files are links to blobs. One that leads out of the cache is not followed."""
    repository = snapshot.parent.parent
    roots = repository.resolve(), repository.parent.resolve()
    for file in files:
        try:
            target = (snapshot / file).resolve(strict=True)
        except (OSError, RuntimeError):
            raise ModelError(
                f"{file} of {name.repo} is not whole in the Hugging Face cache (looked for {snapshot / file}); "
                f"download it with: headrace pull {name.text}"
            ) from None
        if not any(target.is_relative_to(root) for root in roots):
            raise ModelError(
                f"{file} of {name.repo} is a link that leads out of the Hugging Face cache; it is not read"
            )


def _read_ref(file: Path) -> str | None:
    try:
        with open_regular(file) as opened:
            text = opened.read(_MAX_REF_BYTES).decode("ascii", errors="replace").strip()
    except (OSError, ModelError):
        return None
    return text if COMMIT.fullmatch(text) else None


def _expanded(text: str) -> Path:
    return Path(os.path.expandvars(text)).expanduser()
