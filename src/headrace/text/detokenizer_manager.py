"""Token ids to text, for every sample of the engine.

Owns one decoder per live sample, text that is held back because it may begin a stop string, and the trimming of stops. Does not
decide when a sample ends: the scheduler does. Runs in a process of its own (or a thread of the main process), in one thread;
only heartbeats come from a second one. No torch.
"""

import os
import signal
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import msgspec

from headrace.garbage import freeze
from headrace.log import get_logger, set_level
from headrace.messages.channel import Receiver, Sender
from headrace.messages.control import (
    AbortReq,
    ConfigureLoggingReq,
    FaultReq,
    FreezeGCReq,
    Heartbeat,
    ShutdownReq,
    SourceGone,
)
from headrace.messages.outputs import BatchStrOut, BatchTokenIDOut, DecodeOptions, FinishReason, StrOut, TokenIDOut
from headrace.messages.packing import unpack_int32
from headrace.metrics.watchdog import Watchdog
from headrace.text.incremental import IncrementalDecoder
from headrace.text.stop import HoldBack
from headrace.text.tokenizers import Tokenizer

logger = get_logger(__name__)

HEARTBEAT_INTERVAL_S = 0.5
RECEIVE_WAIT_S = 0.5


@dataclass(slots=True)
class _Sample:
    """Decoding state of a live sample. It is bounded: a few bytes, and text shorter than the longest stop string.

    hold_back: None if there is no stop string to trim. source: of its outputs. failed: decoding failed and its end was
    reported; further outputs from the scheduler are dropped.
    """

    options: DecodeOptions
    decoder: IncrementalDecoder
    hold_back: HoldBack | None
    source: int
    failed: bool = False


class DetokenizerManager:
    """See the module docstring. `enable_faults`: obey FaultReq of stage detokenize (tests only)."""

    def __init__(
        self,
        tokenizer: Tokenizer,
        to_tokenizer: Sender,
        to_scheduler: Sender,
        *,
        enable_faults: bool = False,
        watchdog: Watchdog | None = None,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.num_unknown_outputs = 0
        self._tokenizer = tokenizer
        self._to_tokenizer = to_tokenizer
        self._to_scheduler = to_scheduler
        self._enable_faults = enable_faults
        self._watchdog = watchdog or Watchdog("detokenizer", 0.0)
        self._sleep = sleep
        self._samples: dict[str, _Sample] = {}
        self._gone: set[int] = set()
        self._faults: list[FaultReq] = []

    @property
    def num_samples(self) -> int:
        return len(self._samples)

    def run(self, receiver: Receiver, heartbeats: bool = True) -> None:
        """Take messages until a ShutdownReq. heartbeats: send them meanwhile (in a process of its own)."""
        stop = threading.Event()
        thread = threading.Thread(target=self._beat, args=(stop, receiver), name="heartbeat", daemon=True)
        if heartbeats:
            thread.start()
        try:
            while True:
                self._watchdog.end()
                message = receiver.recv(RECEIVE_WAIT_S)
                self._watchdog.begin()
                match message:
                    case BatchTokenIDOut():
                        self._to_tokenizer.send(self.handle(message))
                    case SourceGone():
                        self.forget(message.source)
                    case FaultReq():
                        self.add_fault(message)
                    case ConfigureLoggingReq():
                        set_level(message.level)
                    case FreezeGCReq():
                        freeze()
                    case ShutdownReq():
                        return
                    case _:
                        pass
        finally:
            stop.set()
            if heartbeats:
                thread.join()

    def handle(self, batch: BatchTokenIDOut) -> BatchStrOut:
        """Text of every row. A row that cannot be decoded ends its sample with an abort; the scheduler is told to stop it."""
        rows = []
        for row in batch.rows if batch.source not in self._gone else ():
            try:
                out = self._handle_row(row, batch.source)
            except Exception:
                logger.exception("detokenizing rid %s failed", row.rid)
                out = self._fail(row)
            if out is not None:
                rows.append(out)
            if row.finish is not None and (sample := self._samples.get(row.rid)) and sample.source == batch.source:
                del self._samples[row.rid]
        return BatchStrOut(tuple(rows), batch.source)

    def forget(self, source: int) -> None:
        """Drop the samples of `source`, some of which continue elsewhere, and ignore its further outputs."""
        self._gone.add(source)
        self._samples = {rid: sample for rid, sample in self._samples.items() if sample.source != source}

    def add_fault(self, fault: FaultReq) -> None:
        """Test hook; ignored, with a warning, unless faults are enabled."""
        if self._enable_faults and fault.stage == "detokenize":
            self._faults.append(fault)
        else:
            logger.warning("refused a fault request: fault injection is not enabled")

    def _handle_row(self, row: TokenIDOut, source: int) -> StrOut | None:
        sample = self._samples.get(row.rid)
        if row.options is not None and (
            sample is None or sample.source == source or sample.options.attempt < row.options.attempt
        ):
            sample = self._samples[row.rid] = self._new_sample(row.options, source)
        if sample is None or sample.source != source:
            self.num_unknown_outputs += 1
            return None
        if sample.failed:
            return None
        if self._faults:
            self._obey_faults(row)
        ids = unpack_int32(row.ids)
        if row.finish is None:
            text = sample.decoder.extend(ids)
            if sample.hold_back is not None:
                text = sample.hold_back.push(text)
        else:
            text = _last_text(sample, ids, row.finish)
        return StrOut(text, row if row.options is None else msgspec.structs.replace(row, options=None))

    def _new_sample(self, options: DecodeOptions, source: int) -> _Sample:
        decoder = IncrementalDecoder(
            self._tokenizer,
            skip_special_tokens=options.skip_special_tokens,
            spaces_between_special_tokens=options.spaces_between_special_tokens,
            context_ids=unpack_int32(options.context_ids),
        )
        trims = bool(options.stop) and not options.no_stop_trim
        hold_back = HoldBack(options.stop) if trims else None
        # Decode the delivered ids again to restore the state, and drop the text, which is the same as before.
        delivered = decoder.extend(unpack_int32(options.output_ids))
        if hold_back is not None:
            hold_back.push(delivered)
        return _Sample(options, decoder, hold_back, source)

    def _fail(self, row: TokenIDOut) -> StrOut | None:
        """The end of a sample that cannot be decoded."""
        if row.finish is None:
            self._to_scheduler.send(AbortReq((row.rid,), message="its output could not be decoded"))
            if row.rid in self._samples:
                self._samples[row.rid].failed = True
        finish = FinishReason("abort", message="the output could not be decoded", status_code=500)
        return StrOut("", TokenIDOut(row.rid, b"", row.num_output_tokens, finish, stats=row.stats))

    def _obey_faults(self, row: TokenIDOut) -> None:
        due = next((f for f in self._faults if f.rid == row.rid and row.num_output_tokens >= f.at_token), None)
        if due is None:
            return
        self._faults.remove(due)
        match due.kind:
            case "sleep":
                self._sleep(due.seconds)
            case "crash":
                os.kill(os.getpid(), signal.SIGKILL)
            case "raise" | "nan":
                raise RuntimeError("fault injected into the detokenizer")

    def _beat(self, stop: threading.Event, receiver: Receiver) -> None:
        while not stop.wait(HEARTBEAT_INTERVAL_S):
            self._to_tokenizer.send(Heartbeat("detokenizer", receiver.dropped_frames))


def _last_text(sample: _Sample, ids: list[int], finish: FinishReason) -> str:
    """The rest of a sample's text: flushed, and trimmed according to its finish reason.

    A stop token or EOS is the last id and leaves no text. A stop string is cut off where it first occurs: the scheduler stopped at
    the first one that was complete. The match of a stop pattern stays.
    """
    trim = finish.type == "stop" and not sample.options.no_stop_trim
    if trim and isinstance(finish.matched, int):
        ids = ids[:-1]
    held = sample.hold_back.held if sample.hold_back is not None else ""
    text = held + sample.decoder.extend(ids) + sample.decoder.flush()
    if trim and isinstance(finish.matched, str) and finish.matched in sample.options.stop:
        at = text.find(finish.matched)
        return text if at < 0 else text[:at]
    return text
