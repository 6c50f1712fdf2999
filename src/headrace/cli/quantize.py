"""`headrace quantize`: from a model to a folder with its quantised checkpoint, tokenizer and all, or to the file of double sparsity.

Owns the calibration text and what is copied. Does not own the quantisation (`execution.calibrate`). Runs in the main process.
"""

import shutil
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from rich.console import Console

from headrace import kernels
from headrace.benchmark.agreement import WINDOW, default_text, windows_of
from headrace.checkpoint.base import Checkpoint
from headrace.checkpoint.gguf_mmproj import NONE
from headrace.checkpoint.names import resolve_model
from headrace.checkpoint.source import open_checkpoint
from headrace.checkpoint.weight_formats import Scheme, StoredScheme
from headrace.errors import ConfigError
from headrace.execution.calibrate import WindowRunner, channel_weights, perplexity, quantize_checkpoint
from headrace.execution.load_weights import IN_THIS_THREAD, LoadThreads, load_model, load_threads
from headrace.kernels import cpu
from headrace.text.tokenizers import Tokenizer, load_tokenizer

_SPARSITY_WINDOW = 4096
"""Tokens of the calibration text that attend to one another, for --calibrate-sparsity."""


def run_quantize(
    model: str,
    scheme: StoredScheme,
    output: Path,
    calibration: Path | None,
    calibration_tokens: int,
    check_tokens: int,
    console: Console,
) -> None:
    """Write the checkpoint and, unless check_tokens is 0, say what it costs in perplexity. Raises ConfigError or ModelError."""
    if output.exists() and any(output.iterdir()):
        raise ConfigError(f"--output {output}: the folder is not empty")
    path = resolve_model(model)
    checkpoint, tokenizer = open_checkpoint(path, NONE), load_tokenizer(path)
    backend = _backend()
    text = default_text("calibration") if calibration is None else calibration.read_text()
    windows = windows_of(tokenizer, text, calibration_tokens)
    if len(windows[0]) < 2:
        raise ConfigError("the calibration text is empty")
    kernels.set_num_threads(kernels.num_threads())
    with _threads() as threads, console.status("loading") as status:
        quantize_checkpoint(
            checkpoint, scheme, windows, output, backend=backend, progress=status.update, threads=threads
        )
    _copy_companions(path, tokenizer, output)
    size = (output / "model.safetensors").stat().st_size
    console.print(f"{output}: {size / 1e6:.0f} MB", highlight=False, soft_wrap=True)
    if check_tokens:
        held_out = windows_of(tokenizer, default_text("held out"), check_tokens)
        before = _perplexity(checkpoint, "none", backend, held_out)
        after = _perplexity(open_checkpoint(output), scheme, backend, held_out)
        num_tokens = sum(len(window) for window in held_out)
        console.print(
            f"perplexity on {num_tokens} held-out tokens: {before:.3f} before, {after:.3f} after ({after / before - 1:+.2%})",
            highlight=False,
            soft_wrap=True,
        )


def run_calibrate_sparsity(
    model: str, output: Path, calibration: Path | None, calibration_tokens: int, console: Console
) -> None:
    """Write the file of --ds-channel-config-path. Raises ConfigError or ModelError."""
    from headrace.attention.sparsity import write_orders

    if output.exists():
        raise ConfigError(f"--output {output} exists; name a new file")
    path = resolve_model(model)
    checkpoint = open_checkpoint(path, NONE)
    text = default_text("calibration") if calibration is None else calibration.read_text()
    ids = load_tokenizer(path).encode(text)[:calibration_tokens]
    if len(ids) < 2:
        raise ConfigError("the calibration text is empty")
    # Far apart, rotation makes keys differ more.
    length = min(_SPARSITY_WINDOW, checkpoint.config.max_position_embeddings)
    windows = [ids[start : start + length] for start in range(0, len(ids), length)]
    kernels.set_num_threads(kernels.num_threads())
    with _threads() as threads, console.status("loading") as status:
        weights = channel_weights(checkpoint, windows, backend=_backend(), progress=status.update, threads=threads)
    write_orders(output, weights)
    console.print(
        f"{output}: the order of channels in {checkpoint.config.num_layers} layers", highlight=False, soft_wrap=True
    )


def _backend() -> str:
    return "torch_native" if cpu.why_not() else "cpu"


def _threads() -> AbstractContextManager[LoadThreads]:
    """Without native kernels torch runs the model, so its own threads are needed."""
    return nullcontext(IN_THIS_THREAD) if cpu.why_not() else load_threads(kernels.num_threads())


def _perplexity(checkpoint: Checkpoint, scheme: Scheme, backend: str, windows: Sequence[Sequence[int]]) -> float:
    import torch

    from headrace.layers.weight import Placement
    from headrace.models.registry import model_class_for

    placement = Placement(torch.device("cpu"), torch.bfloat16, WINDOW, scheme)
    with load_threads(kernels.num_threads()) as threads:
        model = load_model(checkpoint, model_class_for(checkpoint.config), placement, threads=threads)
    return perplexity(WindowRunner(model, checkpoint.config, backend, WINDOW), windows)


def _copy_companions(path: Path, tokenizer: Tokenizer, output: Path) -> None:
    """The tokenizer and generation defaults: copied from a folder, written out from a GGUF file."""
    if not path.is_dir() or not (path / "config.json").is_file():
        tokenizer.save(output)
        return
    for file in path.iterdir():
        weights = file.suffix in (".safetensors", ".bin", ".pt", ".pth", ".gguf") or file.name.endswith(".index.json")
        if file.is_file() and not weights and file.name != "config.json":
            shutil.copyfile(file, output / file.name)
