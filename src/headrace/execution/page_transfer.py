"""Copies pages of KV between the pool and plain bytes, for what keeps them outside of it; see `messages.step.PageTransfer`.

A page's bytes are those of its K and V in each layer, in the backend's layout: K of all layers, then V. Owns the fingerprint of what they depend on.
Called by the tier's thread, beside the steps.
"""

import hashlib
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial

import torch

from headrace.attention.base import KvPool
from headrace.distributed.rank import Rank
from headrace.execution.released import keepers_of
from headrace.execution.setup import Setup
from headrace.execution.weight_files import bytes_of
from headrace.kernels import PAGE_SIZE
from headrace.kernels import cpu as native_cpu
from headrace.layers.weight import Weight
from headrace.models.spec import CausalLM

NUMERICS = 1
"""Raised by whoever changes the bits of KV: those of an older version are not read any more."""


class PoolPages:
    """The pages of a pool. weights, facts: called for each fingerprint: all of the model, and what KV depends on beside them."""

    def __init__(
        self, pool: KvPool, weights: Callable[[], Iterable[Weight]], facts: Callable[[], Mapping[str, object]]
    ) -> None:
        num_pages = pool.num_slots // pool.page_size
        self._layers = [tensor.view(num_pages, -1).view(torch.uint8) for tensor in (*pool.k, *pool.v)]
        self._weights = weights
        self._facts = facts
        self._device = self._layers[0].device
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        self.page_bytes = sum(layer.shape[1] for layer in self._layers)

    @torch.inference_mode()
    def fingerprint(self) -> str:
        facts = {"numerics": NUMERICS, **self._facts()}
        found = hashlib.sha256(json.dumps(facts, sort_keys=True, default=str).encode())
        weights = list(self._weights())
        for weight in weights:
            found.update(f"{weight.name} {weight.shape} {weight.tied_name}".encode())
        for keeper in keepers_of(weights):
            for name, value in sorted(keeper.kept().items()):
                found.update(f"{name} ".encode())
                if isinstance(value, torch.Tensor):
                    found.update(f"{value.dtype} {list(value.shape)} ".encode())
                    found.update(bytes_of(value.cpu().contiguous()))
                else:
                    found.update(f"{value} ".encode())
        return found.hexdigest()

    @torch.inference_mode()
    def read(self, pages: Sequence[int]) -> memoryview:
        """See `PageTransfer.read`."""
        with torch.cuda.stream(self._stream):
            index = torch.tensor(pages, device=self._device)
            found = torch.cat([layer[index] for layer in self._layers], dim=1).cpu()
        return bytes_of(found)

    @torch.inference_mode()
    def write(self, pages: Sequence[int], data: memoryview) -> None:
        """See `PageTransfer.write`."""
        with torch.cuda.stream(self._stream):
            index = torch.tensor(pages, device=self._device)
            given = torch.frombuffer(data, dtype=torch.uint8).view(len(pages), self.page_bytes).to(self._device)
            for layer, part in zip(
                self._layers, given.split([layer.shape[1] for layer in self._layers], dim=1), strict=True
            ):
                layer[index] = part
        if self._stream is not None:
            self._stream.synchronize()


def page_transfer(setup: Setup, model: CausalLM, pool: KvPool, rank: Rank) -> PoolPages | str:
    """The pages of a pool, or why they cannot be copied."""
    if rank.group is not None:
        return "several ranks have parts of the KV cache (--tp-size, --pp-size): not supported yet"
    config = setup.config
    if config.attention_backend == "cpu" and config.page_size != PAGE_SIZE:
        return f"its pages lie scattered with --page-size {config.page_size}: use {PAGE_SIZE}"
    return PoolPages(pool, model.weights, partial(_facts, setup))


def _facts(setup: Setup) -> dict[str, object]:
    """What the bits of KV depend on, beside the weights. Kernels of different instruction sets are taken to differ."""
    config, args = setup.config, setup.args
    isa = native_cpu.isa() if config.native_kernels else "torch"
    return {
        "model": setup.model_config.as_file(),
        "class": setup.spec.name,
        "dtype": config.dtype,
        "quantization": config.quantization,
        "activations": config.activations,
        "attention": config.attention_backend,
        "kv": config.kv_cache_dtype,
        "page": config.page_size,
        "kernels": isa if setup.is_cpu else torch.cuda.get_device_name(),
        "deterministic": config.deterministic,
        "compiled": args.enable_torch_compile,
    }
