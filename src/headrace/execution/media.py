"""The encoder's outputs of a step: computing them in slices, keeping them by key, and putting them in place of the embeddings of tokens.

Owns the outputs that the scheduler has asked for and not dropped. Does not decide what is kept: `EncodeWork` says it. Used by the thread that runs
the steps.
"""

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

import numpy as np
import numpy.typing as npt
import torch

from headrace.attention.base import StepRows
from headrace.layers.rotary import SectionedRotary
from headrace.log import get_logger
from headrace.messages.media import MediaItem, num_parts
from headrace.messages.requests import PromptContent
from headrace.messages.step import EncodeWork
from headrace.models.media import DeepRows, MediaEncoder, MediaInput, Places, Slices, encode, places_of

_logger = get_logger(__name__)


@dataclass(frozen=True, slots=True)
class Encoded:
    """What a step's work has given: keys of complete outputs, messages of items that failed, seconds."""

    keys: tuple[bytes, ...] = ()
    errors: Mapping[bytes, str] = field(default_factory=dict)
    seconds: float = 0.0


class MediaRows:
    """See the module docstring. device: of the model."""

    def __init__(
        self,
        encoder: MediaEncoder,
        device: torch.device,
        synchronize: Callable[[], None] = lambda: None,
        rotary: SectionedRotary | None = None,
        merge_size: int = 1,
        places_per_second: float = 0.0,
        deep: DeepRows | None = None,
    ) -> None:
        """synchronize: wait until the device has done what was queued, so that seconds are told of the work itself. rotary: of a model whose tokens
        of images have three positions each; merge_size, places_per_second: see `places_of`. deep: of a model whose images add to its first layers."""
        self.encoder = encoder
        self._device = device
        self._synchronize = synchronize
        self._rotary = rotary
        self._merge_size = merge_size
        self._places_per_second = places_per_second
        self._deep = deep or DeepRows()
        self._deep_parts: list[tuple[torch.Tensor, torch.Tensor]] = []
        self._places: dict[int, tuple[Places, int]] = {}
        self._epoch = 0
        self._rows: dict[bytes, torch.Tensor] = {}
        self._batch: tuple[MediaItem, ...] = ()
        self._slices: Slices | None = None
        self._slices_left = 0

    def work(self, work: EncodeWork) -> Encoded:
        """Do what a plan says. An item that cannot be encoded has an error; the others of its batch are encoded."""
        begun_s = time.perf_counter()
        if work.epoch != self._epoch:
            self._epoch = work.epoch
            self._rows.clear()
            self._end_batch()
        for key in work.drop:
            self._rows.pop(key, None)
        if work.begin:
            assert self._slices is None, "the batch before is not done"
            self._batch = work.begin
            self._slices_left = self.encoder.num_slices * num_parts(item.shape for item in work.begin)
            self._slices = self.encoder.slices([self._input(item) for item in work.begin])
        if (
            not work.num_slices or self._slices is None
        ):  # the step that was to begin the batch has failed: another epoch follows
            return Encoded()
        found = self._compute(work.num_slices)
        self._synchronize()
        return Encoded(tuple(found[0]), found[1], time.perf_counter() - begun_s)

    def _compute(self, num_slices: int) -> tuple[list[bytes], dict[bytes, str]]:
        """The next slices of the batch, and after its last one the rest. Returns the keys of outputs that are complete, and errors by key."""
        assert self._slices is not None, "no batch has begun"
        self._slices_left -= num_slices
        try:
            while num_slices > 0 or self._slices_left <= 0:
                next(self._slices)
                num_slices -= 1
            return [], {}
        except StopIteration as done:
            rows: list[torch.Tensor] = done.value
            return self._keep(self._batch, rows), {}
        except Exception:
            _logger.exception("a batch of %d media items could not be encoded", len(self._batch))
            # One item may be the cause, and the others belong to other requests.
            return self._one_by_one(self._batch)

    def _keep(self, items: Sequence[MediaItem], rows: Sequence[torch.Tensor]) -> list[bytes]:
        for item, own in zip(items, rows, strict=True):
            assert len(own) == item.num_tokens, (len(own), item.num_tokens, item.shape, item.grid)
        self._rows |= {item.key: own.clone() for item, own in zip(items, rows, strict=True)}
        self._end_batch()
        return [item.key for item in items]

    def _one_by_one(self, items: Sequence[MediaItem]) -> tuple[list[bytes], dict[bytes, str]]:
        done: list[bytes] = []
        errors: dict[bytes, str] = {}
        for item in items:
            try:
                done += self._keep([item], encode(self.encoder, [self._input(item)]))
            except Exception:
                _logger.exception("one %s could not be encoded", item.kind.one)
                errors[item.key] = (
                    f"one {item.kind.one} of the request could not be encoded; the server's log has the cause"
                )
        self._end_batch()
        return done, errors

    def _end_batch(self) -> None:
        self._batch, self._slices, self._slices_left = (), None, 0

    def _input(self, item: MediaItem) -> MediaInput:
        values = torch.frombuffer(bytearray(item.values), dtype=torch.float32).view(item.shape)
        return MediaInput(values.to(self._device), item.grid)

    def add(self, seq: int, content: PromptContent) -> None:
        """A sequence enters or re-enters."""
        self._places.pop(seq, None)
        if self._rotary is not None and content.spans:
            self._places[seq] = places_of(content, self._merge_size, self._places_per_second)

    def begin_step(self) -> None:
        """Nothing has been placed yet."""
        self._deep_parts = []

    def rows(self, rows: StepRows, contents: Mapping[int, PromptContent]) -> StepRows:
        """A step's rows as attention sees them. contents: by row, of those whose prompts have images."""
        return _seeing_ahead(rows, contents) if self.encoder.sees_ahead else rows

    def positions(self, rows: StepRows, seqs: Sequence[int]) -> torch.Tensor:
        """int32[num_tokens], the positions that the step's tokens are rotated by. seqs: of the rows."""
        if self._rotary is None or self._places.keys().isdisjoint(seqs):
            return rows.positions
        positions = rows.positions.clone()
        composed: list[Places] = []
        where: list[npt.NDArray[np.int64]] = []
        first = 0
        for seq, start, count in zip(seqs, rows.starts, rows.counts, strict=True):
            if seq in self._places:
                places, shift = self._places[seq]
                known = places[:, start : start + count]
                after = np.arange(start + shift + known.shape[1], start + shift + count, dtype=np.int32)
                positions[first : first + count] = torch.from_numpy(np.concatenate([known[0], after])).to(self._device)
                differ = np.flatnonzero((known != known[0]).any(axis=0))
                composed.append(known[:, differ])
                where.append(differ + first)
            first += count
        tokens = torch.from_numpy(np.concatenate(where)).to(self._device)
        if len(tokens):
            places_of_all = np.concatenate(composed, axis=1)
            assert places_of_all.max() < self._rotary.num_positions, "the front end refuses prompts that reach so far"
            three = torch.from_numpy(places_of_all).long().to(self._device)
            positions[tokens] = self._rotary.rows_of(three)
        return positions

    def place(self, inputs: torch.Tensor, first: int, content: PromptContent, start: int, count: int) -> None:
        """Put rows in place of the embeddings of a prompt's tokens start .. start + count - 1. inputs: [num_tokens, hidden_size] of the step, theirs
        from `first` on."""
        size = inputs.shape[1]
        for span in content.spans:
            begin, end = max(start, span.start), min(start + count, span.end)
            if begin < end:
                row, at = span.first_row + begin - span.start, first + begin - start
                rows = self._rows[content.media[span.item].key][row : row + end - begin]
                inputs[at : at + end - begin] = rows[:, :size].to(inputs.dtype)
                if self.encoder.num_deep:
                    tokens = torch.arange(at, at + end - begin, device=inputs.device)
                    self._deep_parts.append((tokens, rows[:, size:]))

    @contextmanager
    def adding(self) -> Iterator[bool]:
        """Within it the layers add what belongs to the rows that were placed. Gives whether there is any; then the layers must run one by one."""
        if not self._deep_parts:
            yield False
            return
        self._deep.tokens, self._deep.rows = (torch.cat(parts) for parts in zip(*self._deep_parts, strict=True))
        self._deep_parts = []
        try:
            yield True
        finally:
            self._deep.tokens = self._deep.rows = None


def _seeing_ahead(rows: StepRows, contents: Mapping[int, PromptContent]) -> StepRows:
    """`rows` with what each token sees last, where the tokens of an image see each other. contents: see `MediaRows.rows`."""
    last = [
        np.arange(start, start + count, dtype=np.int32) for start, count in zip(rows.starts, rows.counts, strict=True)
    ]
    has_images = False
    for row, content in contents.items():
        start, count = rows.starts[row], rows.counts[row]
        for span in content.spans:
            begin, end = max(start, span.start), min(start + count, span.end)
            if begin < end:
                assert end == span.end, "the step ends within an image"
                last[row][begin - start : end - start] = span.end - 1
                has_images = True
    if not has_images:
        return rows
    return replace(rows, last_keys=torch.from_numpy(np.concatenate(last)).to(rows.positions.device))
