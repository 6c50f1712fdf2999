"""Writes a quantised checkpoint, rounded to nearest, or calibrated on a text if the format requires it; the perplexity of a model on a text; and
which channels of its keys are heavy (`channel_weights`).

Owns the walk over the layers and the files written. Does not own the arithmetic (`layers.quantization`) or the format
(`checkpoint.quantized_formats`, docs/quantization.md). Runs in the process of the command, on CPU, and in the threads that it is given.
"""

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from itertools import accumulate
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from headrace.attention.base import AttentionBackend, AttentionLayerSpec, StepAttention
from headrace.attention.select import make_backend
from headrace.attention.sparsity import ChannelType
from headrace.checkpoint.base import Checkpoint
from headrace.checkpoint.model_config import ModelConfig
from headrace.checkpoint.quantized_formats import own_tensors
from headrace.checkpoint.quantized_matrix import QuantizedMatrix
from headrace.checkpoint.weight_formats import FINEST_STORED, KERNEL_GROUP, OWN_METHOD, Scheme, StoredScheme
from headrace.errors import ModelError
from headrace.execution.forward_batch import PAGE, window_rows
from headrace.execution.load_weights import IN_THIS_THREAD, Job, LoadThreads, load_model
from headrace.layers.quantization import integer_format
from headrace.layers.quantization.base import Calibrator
from headrace.layers.weight import Observable, Placement, Weight
from headrace.models.decoder import DecoderLM
from headrace.models.registry import model_class_for, stored_name
from headrace.models.spec import CausalLM, kv_shape

Progress = Callable[[str], None]

_HEAD, _TABLE = "lm_head.weight", "model.embed_tokens.weight"

_HESSIAN_BUDGET_BYTES = 2 << 30
"""Most bytes of Hessians at a time; larger models are calibrated in several passes over the text."""

_HESSIAN_ROWS = 512
"""Rows of a Hessian that one thread computes at a time."""


class _InputHessian:
    """The sum of x x^T over the inputs of one layer."""

    def __init__(self, size: int, threads: LoadThreads) -> None:
        self.sum = torch.zeros(size, size)
        self._threads = threads

    def __call__(self, x: torch.Tensor) -> None:
        parts = zip(self.sum.split(_HESSIAN_ROWS), x.T.split(_HESSIAN_ROWS), strict=True)
        for _ in self._threads.run(Job(partial(rows.addmm_, inputs, x), 0) for rows, inputs in parts):
            pass


class WindowRunner:
    """Runs a model over windows of at most `window` tokens, each from its first position, on CPU."""

    def __init__(self, model: CausalLM, config: ModelConfig, backend: str, window: int) -> None:
        self._model = model
        self._attention: AttentionBackend = make_backend(backend)
        num_slots = -(-window // PAGE) * PAGE
        self._attention.make_kv_pool(kv_shape(config, torch.float32), num_slots, PAGE, torch.device("cpu"))

    @torch.inference_mode()
    def hidden(
        self, tokens: Sequence[int], see: "Callable[[StepAttention], StepAttention]" = lambda own: own
    ) -> torch.Tensor:
        """The hidden states of all positions, [len(tokens), hidden_size]. see: what the model takes for its attention."""
        rows = window_rows(len(tokens))
        self._attention.prepare(rows)
        return self._model.forward(self._model.embed(torch.tensor(tokens)), rows.positions, see(self._attention))

    @torch.inference_mode()
    def negative_log_likelihoods(self, tokens: Sequence[int]) -> torch.Tensor:
        """float32[len(tokens) - 1]: of each token after the first, in nats."""
        logits = self._model.logits(self.hidden(tokens))
        return torch.nn.functional.cross_entropy(logits[:-1], torch.tensor(tokens[1:]), reduction="none")


def perplexity(runner: WindowRunner, windows: Sequence[Sequence[int]]) -> float:
    """e^(mean negative log likelihood) over all tokens except the first of each window. windows: at least two tokens each."""
    losses = torch.cat([runner.negative_log_likelihoods(window) for window in windows])
    return math.exp(float(losses.double().mean()))


class _Channels(StepAttention):
    """Sums over the queries and keys of each layer, [num_kv_heads, head_dim] each, and attention as `own` computes it."""

    name = "observed"

    def __init__(self) -> None:
        self.own: StepAttention
        self.sums: dict[int, torch.Tensor] = {}

    def over(self, own: StepAttention) -> "_Channels":
        self.own = own
        return self

    def forward(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, layer: AttentionLayerSpec) -> torch.Tensor:
        of_groups = q.double().unflatten(1, (layer.num_kv_heads, -1))
        keys = k.double()
        sums = (of_groups.abs().mean(2), of_groups.square().mean(2), keys.abs(), keys, keys.square())
        found = torch.stack([part.sum(0) for part in sums])
        self.sums[layer.layer_id] = self.sums.get(layer.layer_id, 0.0) + found
        return self.own.forward(q, k, v, layer)


def channel_weights(
    checkpoint: Checkpoint, windows: Sequence[Sequence[int]], *, backend: str, progress: Progress, threads: LoadThreads
) -> dict[ChannelType, list[torch.Tensor]]:
    """How heavy the channels of each layer's keys are after rotation, float64[num_kv_heads, head_dim].

    qk: the mean square of queries times the variance of keys; what is the same in all keys moves no choice between them. q, k: mean magnitudes.
    windows: tokens of the text. backend: for attention. Raises ModelError.
    """
    config = checkpoint.config
    placement = Placement(torch.device("cpu"), torch.float32, max(len(window) for window in windows), "none")
    model = load_model(checkpoint, model_class_for(config), placement, threads=threads)
    runner, seen = WindowRunner(model, config, backend, placement.max_positions), _Channels()
    for number, window in enumerate(windows):
        runner.hidden(window, seen.over)
        progress(f"calibration text: {number + 1} of {len(windows)} windows")
    num_tokens = sum(len(window) for window in windows)
    means = [seen.sums[layer] / num_tokens for layer in range(config.num_layers)]
    return {
        "qk": [q_square * (k_square - k.square()) for _, q_square, _, k, k_square in means],
        "q": [q for q, *_ in means],
        "k": [k for _, _, k, *_ in means],
    }


def quantize_checkpoint(
    checkpoint: Checkpoint,
    scheme: StoredScheme,
    windows: Sequence[Sequence[int]],
    output: Path,
    *,
    backend: str,
    progress: Progress = lambda line: None,
    threads: LoadThreads = IN_THIS_THREAD,
) -> None:
    """Write `output`/config.json and model.safetensors; the caller copies the other files of a model folder.

    windows: tokens of the text, for formats that calibrate; the model is built for the longest one. backend: for attention.
    threads: load, sum and round.
    Matrices of linear layers are quantised, the output projection in its own format; everything else is stored unchanged.
    Raises ModelError for a model that is already quantised, except in a GGUF file.
    """
    config = checkpoint.config
    if config.quantization is not None and checkpoint.kind != "gguf":
        raise ModelError(f"{checkpoint.path.name} is already quantised; quantise the original model")
    placement = Placement(torch.device("cpu"), torch.float32, max(len(window) for window in windows), "none")
    spec = model_class_for(config)
    model = load_model(checkpoint, spec, placement, threads=threads)
    runner = WindowRunner(model, config, backend, placement.max_positions)
    weights = {weight.name: weight for weight in model.weights()}
    encoder = model.media_encoder if isinstance(model, DecoderLM) else None
    # No text calibrates the weights of media encoders, and they are rounded when they are loaded.
    tower = () if encoder is None else {weight.name for weight in encoder.weights()}
    of_text = {name: weight for name, weight in weights.items() if name not in tower}
    matrices = _quantized(of_text, scheme, runner, windows, progress, threads)
    output.mkdir(parents=True, exist_ok=True)
    tensors = _tensors(checkpoint, spec.renaming(config), weights, matrices)
    tensors = {stored_name(config, name): tensor for name, tensor in tensors.items()}
    save_file(tensors, output / "model.safetensors", metadata={"format": "pt"})
    (output / "config.json").write_text(json.dumps(_config(config, scheme), indent=2) + "\n")


def _quantized(
    weights: Mapping[str, Weight],
    scheme: StoredScheme,
    runner: WindowRunner,
    windows: Sequence[Sequence[int]],
    progress: Progress,
    threads: LoadThreads,
) -> dict[str, QuantizedMatrix]:
    """The matrices of the linear layers, and of the output projection unless it is tied, by name."""
    linears = [weight for weight in weights.values() if weight.layer is not None and weight.name not in (_HEAD, _TABLE)]
    weight_format = integer_format(scheme)
    matrices: dict[str, QuantizedMatrix] = {}
    if weight_format.calibrator is None:
        for nearest in threads.run(
            Job(partial(_nearest, [weight], scheme), _num_bytes([weight])) for weight in linears
        ):
            matrices |= nearest
    else:
        for group in _passes(linears):
            _calibrate(group, weight_format.calibrator, runner, windows, matrices, progress, threads)
    if _HEAD in weights:
        matrices |= _nearest([weights[_HEAD]], weight_format.facts.head or scheme)
    return matrices


def _tensors(
    checkpoint: Checkpoint,
    rename: Callable[[str], str],
    weights: Mapping[str, Weight],
    matrices: Mapping[str, QuantizedMatrix],
) -> dict[str, torch.Tensor]:
    """The tensors to store: quantised matrices in parts, everything else unchanged."""
    tensors: dict[str, torch.Tensor] = {}
    for name_there in checkpoint.tensor_names():
        name = rename(name_there)
        if name in matrices:
            base = name.removesuffix(".weight")
            tensors |= {f"{base}.{suffix}": part for suffix, part in own_tensors(matrices[name]).items()}
        elif name in weights:
            kept = checkpoint.tensor(name_there)
            tensors[name] = kept.to(torch.bfloat16).contiguous() if kept.dim() > 1 else kept.contiguous()
    return tensors


def _config(config: ModelConfig, scheme: StoredScheme) -> dict[str, Any]:
    quantization = {"quant_method": OWN_METHOD, "scheme": scheme, "group_size": KERNEL_GROUP}
    changes: dict[str, Any] = {"quantization_config": quantization, "torch_dtype": "bfloat16"}
    if config.eos_token_ids:
        changes["eos_token_id"] = list(config.eos_token_ids)
    return config.as_file(**changes)


def _passes(linears: Sequence[Weight]) -> Iterator[list[Weight]]:
    """Consecutive groups of layers whose Hessians fit in the budget; parts of one layer stay together."""
    group: list[Weight] = []
    num_bytes = 0
    seen: set[int] = set()
    for weight in linears:
        size = 0 if id(weight.layer) in seen else 4 * weight.shape[1] ** 2
        if group and size and num_bytes + size > _HESSIAN_BUDGET_BYTES:
            yield group
            group, num_bytes = [], 0
        seen.add(id(weight.layer))
        group.append(weight)
        num_bytes += size
    if group:
        yield group


def _calibrate(
    weights: Sequence[Weight],
    calibrator: Calibrator,
    runner: WindowRunner,
    windows: Sequence[Sequence[int]],
    matrices: dict[str, QuantizedMatrix],
    progress: Progress,
    threads: LoadThreads,
) -> None:
    """Run the text through the model once, then quantise the matrices of these layers."""
    parts: dict[Observable, list[Weight]] = {}
    for weight in weights:
        assert weight.layer is not None, weight.name
        parts.setdefault(weight.layer, []).append(weight)
    hessians = {layer: _InputHessian(of_layer[0].shape[1], threads) for layer, of_layer in parts.items()}
    for layer, hessian in hessians.items():
        layer.observer = hessian
    for number, window in enumerate(windows):
        runner.hidden(window)
        progress(f"calibration text: {number + 1} of {len(windows)} windows")
    for layer in parts:
        layer.observer = None
    jobs = (
        Job(partial(_calibrated, of_layer, calibrator, hessians[layer].sum), _num_bytes(of_layer))
        for layer, of_layer in parts.items()
    )
    for number, calibrated in enumerate(threads.run(jobs)):
        matrices |= calibrated
        progress(f"quantised {number + 1} of {len(parts)} layers")


def _calibrated(parts: Sequence[Weight], calibrator: Calibrator, hessian: torch.Tensor) -> dict[str, QuantizedMatrix]:
    if parts[0].shape[1] % KERNEL_GROUP:
        return _nearest(parts, FINEST_STORED)
    return _by_name(parts, calibrator(torch.cat([part.read().float() for part in parts]), hessian))


def _nearest(parts: Sequence[Weight], scheme: Scheme) -> dict[str, QuantizedMatrix]:
    return _by_name(parts, integer_format(scheme).quantize(torch.cat([part.read() for part in parts])))


def _by_name(parts: Sequence[Weight], whole: QuantizedMatrix) -> dict[str, QuantizedMatrix]:
    ends = list(accumulate(part.shape[0] for part in parts))
    return {part.name: whole.rows(end - part.shape[0], end) for part, end in zip(parts, ends, strict=True)}


def _num_bytes(parts: Sequence[Weight]) -> int:
    """Of the parts in float32."""
    return 4 * sum(math.prod(part.shape) for part in parts)
