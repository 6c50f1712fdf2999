"""`headrace quantize`: from a model to a folder with its quantised checkpoint, tokenizer and all.

Owns the calibration text and what is copied. Does not own the quantisation (`execution.calibrate`). Runs in the main process.
"""

import shutil
from collections.abc import Sequence
from contextlib import nullcontext
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
from headrace.execution.calibrate import WindowRunner, perplexity, quantize_checkpoint
from headrace.execution.load_weights import IN_THIS_THREAD, load_model, load_threads
from headrace.kernels import cpu
from headrace.text.tokenizers import Tokenizer, load_tokenizer


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
    is_native = not cpu.why_not()
    backend = "cpu" if is_native else "torch_native"
    text = default_text("calibration") if calibration is None else calibration.read_text()
    windows = windows_of(tokenizer, text, calibration_tokens)
    if len(windows[0]) < 2:
        raise ConfigError("the calibration text is empty")
    num_threads = kernels.num_threads()
    kernels.set_num_threads(num_threads)
    # Without native kernels torch runs the model, so its own threads are needed.
    with (
        load_threads(num_threads) if is_native else nullcontext(IN_THIS_THREAD) as threads,
        console.status("loading") as status,
    ):
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
