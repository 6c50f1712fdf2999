"""Copies pages of KV between the pool and plain bytes, for what keeps them outside of it; see `messages.step.PageTransfer`.

A page's bytes are those of its K and V in each layer, in the backend's layout: K, then V of the first layer, then of the next. Those of a draft
model follow. Of several ranks, each has a part of every page: the leader joins them in the order of ranks, so stages have together what one process
has. Owns the fingerprint of what they depend on. Called by the tier's thread, beside the steps; only what several ranks write into their pools is
written by all between the same two steps.
"""

import hashlib
import itertools
import json
import secrets
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
import torch

from headrace.attention.base import KvPool
from headrace.checkpoint.weight_cache import whole_content
from headrace.distributed.base import head_share
from headrace.distributed.rank import Rank
from headrace.errors import ExecutionError, ModelError
from headrace.execution.lora import LoraPool
from headrace.execution.model_source import open_model
from headrace.execution.rank_jobs import LeaderJobs
from headrace.execution.released import DraftMemory
from headrace.execution.setup import Setup, check_unchanged
from headrace.execution.weight_files import Digests, bytes_of
from headrace.kernels import PAGE_SIZE
from headrace.kernels import cpu as native_cpu
from headrace.kernels.registry import runs_native
from headrace.layers.weight import Keeper, Weight
from headrace.messages.ranks import RankPages
from headrace.messages.step import SUMMED_BYTES, Sums, sums_of
from headrace.messages.weights import Prepared
from headrace.models.spec import CausalLM, stage_layers

NUMERICS = 1
"""Raised by whoever changes the bits of KV: those of an older version are not read any more."""

_NOT_SHARED = {"kernels", "compiled"}
"""Facts in which two servers may differ that go on with each other's KV."""

_LINE_BYTES = 64
"""Sums come with native copies where each layer of a page has whole lines."""

_UNITS = {"cpu": PAGE_SIZE, "torch_native": 1, "triton": 1, "flashinfer": 1}
"""By attention backend: so many tokens of a head lie together in a page. What no backend here says is not converted to pages of another kind."""


@dataclass(frozen=True, slots=True)
class Share:
    """A rank's part of pages, for servers whose ranks are others. part: its first layer and KV head, and those behind its last. unit: see `_UNITS`,
    0 = not known. checkpoint: of what the weights are that the server has started with; called once."""

    part: tuple[int, int, int, int] = (0, 0, 0, 0)
    unit: int = 0
    checkpoint: Callable[[], str] = lambda: f"unknown: {secrets.token_hex(8)}"


class PoolPages:
    """The pages of a pool. weights, facts: called for each fingerprint: all of the model, and what KV depends on beside them. adapter: see
    `PageTransfer`. number: of the rank. tensors: what is known of the tensors of the weights. draft: its KV cache has the same pages."""

    def __init__(
        self,
        pool: KvPool,
        weights: Callable[[], Iterable[Weight]],
        facts: Callable[[], Mapping[str, object]],
        adapter: Callable[[int], str] = lambda lora_id: "",
        number: int = 0,
        tensors: Digests | None = None,
        share: Share | None = None,
        draft: DraftMemory | None = None,
    ) -> None:
        num_pages = pool.num_slots // pool.page_size
        pools = [pool] if draft is None else [pool, draft.pool]
        pairs = itertools.chain.from_iterable(zip(one.k, one.v, strict=True) for one in pools)
        layers = [tensor.view(num_pages, -1).view(torch.uint8) for pair in pairs for tensor in pair]
        self.page_bytes = sum(layer.shape[1] for layer in layers)
        self._draft, self._draft_hash = draft, ""
        self._draft_bytes = sum(layer.shape[1] for layer in layers[2 * len(pool.k) :])
        # Rows are copied element by element: eight bytes at a time take a third of the time of one.
        wide = (torch.int64, torch.int32, torch.int16, torch.uint8)
        self._dtype = next(one for one in wide if not any(layer.shape[1] % one.itemsize for layer in layers))
        self._layers = [layer.view(self._dtype) for layer in layers]
        self._weights = weights
        self._facts = facts
        self.adapter = adapter
        self._number = number
        self._tensors = tensors or Digests()
        self.share = share or Share()
        self._at_start = self._checkpoint = ""
        self._device = self._layers[0].device
        self._stream = torch.cuda.Stream(self._device) if self._device.type == "cuda" else None
        is_native = self._device.type == "cpu" and runs_native()
        self._copy = getattr(native_cpu.load(), "copy_kv_pages", None) if is_native else None
        self._places = [layer.data_ptr() for layer in layers], [layer.shape[1] for layer in layers], num_pages

    def fingerprint(self) -> str:
        return self.fingerprint_of(self.digests())

    def fingerprint_of(self, digests: Mapping[str, str], **facts: object) -> str:
        """That of weights with these digests. facts: further ones."""
        every = {"numerics": NUMERICS, **self._facts(), **self._draft_facts(), **facts}
        return _hash([every, self._names(), sorted(digests.items())])

    def facts(self) -> dict[str, str]:
        return self.facts_of(self.digests(), [self.share.part])

    def facts_of(self, digests: Mapping[str, str], parts: Iterable[Sequence[int]]) -> dict[str, str]:
        """See `PageTransfer.facts`. Kernels of different instruction sets are not taken to differ. parts: of all ranks; stages are one."""
        ranks: list[list[int]] = []
        for first, end, *heads in parts:
            if ranks and [ranks[-1][1], *ranks[-1][2:]] == [first, *heads]:
                ranks[-1][1] = end
            else:
                ranks.append([first, end, *heads])
        weights = _hash([self._names(), sorted(digests.items())])
        if not self._at_start:
            self._at_start, self._checkpoint = weights, self.share.checkpoint()
        every = {name: str(value) for name, value in self._facts().items() if name not in _NOT_SHARED}
        return {
            **every,
            "model": _hash(every["model"]),
            "numerics": str(NUMERICS),
            "ranks": json.dumps(ranks),
            "unit": str(self.share.unit),
            "weights": weights,
            "checkpoint": self._checkpoint if weights == self._at_start else f"updated: {weights[:24]}",
            **self._draft_facts(),
        }

    def _draft_facts(self) -> dict[str, str]:
        """Empty without a draft model; see `PageTransfer.facts`."""
        if self._draft is None:
            return {}
        if not self._draft_hash:  # nothing updates a draft model
            weights = [self._digest(keeper.kept()) for keeper in self._draft.keepers]
            self._draft_hash = _hash([self._draft.facts, weights])
        page = [len(self._draft.pool.k), self._draft_bytes]
        return {"draft": self._draft_hash, "draft_page": json.dumps(page)}

    def _names(self) -> list[str]:
        return [f"{weight.name} {weight.shape} {weight.tied_name}" for weight in self._weights()]

    @torch.inference_mode()
    def digests(self) -> dict[str, str]:
        """Of what each layer here keeps of the weights, every byte of it, by the first of them."""
        keepers: dict[int, tuple[str, Keeper]] = {}
        for weight in self._weights():
            for keeper in weight.keepers:
                keepers.setdefault(id(keeper), (weight.name, keeper))
        digests: dict[str, str] = {}
        for name, keeper in keepers.values():
            if kept := keeper.kept():
                digests[name] = self._digest(kept, digests.get(name, ""))
        return digests

    def _digest(self, kept: Mapping[str, object], before: str = "") -> str:
        """Of what a layer keeps. before: of another one of the same weight."""
        found = hashlib.sha256(before.encode())
        for part, value in sorted(kept.items()):
            if isinstance(value, torch.Tensor):
                found.update(f"{part} {value.dtype} {list(value.shape)} {self._tensors.of(value)} ".encode())
            else:
                found.update(f"{part} {value} ".encode())
        return found.hexdigest()

    def host_memory(self, num_bytes: int) -> memoryview:
        return bytes_of(torch.empty(num_bytes, dtype=torch.uint8, pin_memory=self._device.type == "cuda"))

    @torch.inference_mode()
    def read(self, pages: Sequence[int]) -> memoryview:
        """See `PageTransfer.read`."""
        if self._stream is not None and self._draft is not None:
            # A head follows a step whose ids the host has already.
            self._stream.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._stream):
            found = self._layers[0].new_empty((len(pages), self.page_bytes // self._dtype.itemsize))
            if self._copy is not None:
                self._copy(*self._places, list(pages), found.data_ptr(), False, 0)
            else:
                index = torch.tensor(pages, device=self._device)
                for layer, part in zip(self._layers, self._split(found), strict=True):
                    torch.index_select(layer, 0, index, out=part)
            return bytes_of(found.cpu())

    def read_into(self, pages: Sequence[int], into: memoryview) -> Sums:
        """See `PageTransfer.read_into`."""
        if self._copy is None or any(size % _LINE_BYTES for size in self._places[1]):
            into[:] = self.read(pages)
            return sums_of(into)
        rows = np.frombuffer(into, np.uint8).reshape(len(pages), self.page_bytes)
        sums = np.zeros(len(into) // SUMMED_BYTES + 1, np.uint64)
        self._copy(*self._places, list(pages), rows.ctypes.data, False, sums.ctypes.data)
        return sums[:-1]

    @torch.inference_mode()
    def write(self, pages: Sequence[int], data: memoryview) -> None:
        """See `PageTransfer.write`."""
        if self._copy is not None:
            rows = np.frombuffer(data, np.uint8).reshape(len(pages), self.page_bytes)
            self._copy(*self._places, list(pages), rows.ctypes.data, True, 0)
            return
        with torch.cuda.stream(self._stream):
            index = torch.tensor(pages, device=self._device)
            given = torch.frombuffer(data, dtype=self._dtype).view(len(pages), -1).to(self._device)
            for layer, part in zip(self._layers, self._split(given), strict=True):
                layer.index_copy_(0, index, part)
        if self._stream is not None:
            self._stream.synchronize()

    def _split(self, rows: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """The part of each layer, of rows of whole pages."""
        return rows.split([layer.shape[1] for layer in self._layers], dim=1)

    def do(self, work: RankPages) -> Prepared:
        """A follower's part of what `LeaderPages` does."""
        path = Path(work.folder) / f"rank-{self._number}"
        match work.kind:
            case "describe":
                path.write_text(json.dumps([self.page_bytes, self.digests(), self.share.part]))
            case "read":
                path.write_bytes(self.read(work.pages))
            case "write":
                data = memoryview(bytearray(path.read_bytes()))
                return Prepared("read", lambda: self.write(work.pages, data))
        return Prepared("written")


class LeaderPages:
    """The pages of all ranks. own: the leader's parts; those of the others go through files in the temporary directory, for a moment.

    shares: whether a rank has a part of a layer, so that the bits are those of this number of ranks. page_bytes: 0 before the first fingerprint.
    """

    def __init__(self, own: PoolPages, jobs: LeaderJobs, size: int, shares: bool) -> None:
        self._own = own
        self._jobs = jobs
        self._size = size
        self._shares = shares
        self._bytes: list[int] = []
        self._parts: list[Sequence[int]] = []
        self.adapter, self.host_memory = own.adapter, own.host_memory

    @property
    def page_bytes(self) -> int:
        return sum(self._bytes)

    def fingerprint(self) -> str:
        digests = self._described()
        return self._own.fingerprint_of(digests, **({"ranks": self._bytes} if self._shares else {}))

    def facts(self) -> dict[str, str]:
        digests = self._described()
        return self._own.facts_of(digests, self._parts)

    def _described(self) -> dict[str, str]:
        """The digests of all ranks."""
        with self._folder() as folder:
            self._drop(RankPages("describe", str(folder), ()))
            described = [json.loads(path.read_text()) for path in self._files(folder)]
        ranks = [(self._own.page_bytes, self._own.digests(), self._own.share.part), *described]
        self._bytes, self._parts = [num_bytes for num_bytes, _, _ in ranks], [part for _, _, part in ranks]
        if self._shares:
            return {f"{rank} {name}": one for rank, (_, every, _) in enumerate(ranks) for name, one in every.items()}
        return {name: one for _, every, _ in ranks for name, one in every.items()}

    def read(self, pages: Sequence[int]) -> memoryview:
        with self._folder() as folder:
            self._drop(RankPages("read", str(folder), tuple(pages)))
            parts = [self._own.read(pages), *(path.read_bytes() for path in self._files(folder))]
        rows = [torch.frombuffer(bytearray(part), dtype=torch.uint8).view(len(pages), -1) for part in parts]
        return bytes_of(torch.cat(rows, dim=1))

    def read_into(self, pages: Sequence[int], into: memoryview) -> Sums:
        into[:] = self.read(pages)
        return sums_of(into)

    def write(self, pages: Sequence[int], data: memoryview) -> None:
        """In all ranks between the same two steps, or in none."""
        whole = torch.frombuffer(data, dtype=torch.uint8).view(len(pages), -1)
        parts = [bytes_of(part.contiguous()) for part in whole.split(self._bytes, dim=1)]
        with self._folder() as folder:
            for path, part in zip(self._files(folder), parts[1:], strict=True):
                path.write_bytes(part)
            own = partial(Prepared, "", lambda: self._own.write(pages, parts[0]))
            _, prepared = self._jobs.prepare(RankPages("write", str(folder), tuple(pages)), own, lambda: True)
            prepared.install()

    def _drop(self, work: RankPages) -> None:
        """Let the others do what has no result but a file."""
        job, _ = self._jobs.prepare(work, lambda: Prepared(""), lambda: True)
        self._jobs.drop(job)

    def _files(self, folder: Path) -> Iterator[Path]:
        return (folder / f"rank-{rank}" for rank in range(1, self._size))

    @contextmanager
    def _folder(self) -> Iterator[Path]:
        """Raises ExecutionError."""
        try:
            with tempfile.TemporaryDirectory(prefix="headrace-kv-", ignore_cleanup_errors=True) as folder:
                yield Path(folder)
        except OSError as error:
            raise ExecutionError(f"ranks cannot exchange KV: the temporary directory: {error.strerror}") from error


def page_transfer(
    setup: Setup,
    model: CausalLM,
    pool: KvPool,
    rank: Rank,
    loras: LoraPool,
    tensors: Digests | None,
    draft: DraftMemory | None,
) -> PoolPages | str:
    """The pages of a rank's pool, or why they cannot be copied. tensors, draft: see `PoolPages`."""
    config = setup.config
    if setup.args.enable_dp_attention:
        return "ranks have KV of other requests (--enable-dp-attention): not supported yet"
    if rank.group is not None and rank.group.spans_hosts:
        return "ranks on several hosts (--nnodes) cannot exchange KV yet"
    if config.attention_backend == "cpu" and config.page_size != PAGE_SIZE:
        return f"its pages lie scattered with --page-size {config.page_size}: use {PAGE_SIZE}"
    shape, shard = setup.model_config, setup.placement.attention.shard
    layers, heads = stage_layers(shape, rank.stage), head_share(shard, shape.num_q_heads, shape.num_kv_heads).kv
    part = layers.start, layers.stop, heads.start, heads.stop
    share = Share(part, _UNITS.get(config.attention_backend, 0), partial(_checkpoint, setup))
    return PoolPages(pool, model.weights, partial(_facts, setup), loras.content, rank.number, tensors, share, draft)


def _checkpoint(setup: Setup) -> str:
    """Names the weights that `setup` loads, however many ranks share them; what nobody else has, if its files are not those any more."""
    if setup.args.load_format == "dummy":
        return f"random: {setup.args.random_seed} {setup.placement.device.type}"
    try:
        checkpoint = open_model(setup.args)
        content = whole_content(checkpoint.files())
        check_unchanged(checkpoint, setup.fingerprint)
    except (OSError, ModelError):
        return Share().checkpoint()
    return content


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


def _hash(told: object) -> str:
    return hashlib.sha256(json.dumps(told, sort_keys=True, default=str).encode()).hexdigest()
