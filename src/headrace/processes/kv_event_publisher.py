"""Publishes the KV events of a scheduler over ZeroMQ, in the form of vLLM and SGLang, and replays those that a subscriber missed, or tells it what
is cached now.

Owns both sockets, the thread that uses them and the replay buffer. The scheduler's thread only calls `publish`, which never waits.

A message on the PUB socket has three frames: topic, sequence number (8 bytes, big-endian), and a `KVEventBatch` as msgpack. To a request
of an empty frame and a sequence number, the ROUTER socket replies with all messages from there on, each an empty frame, its number and its
batch, and at last END and an empty batch.
"""

import os
import threading
import time
from collections import deque
from collections.abc import Iterator

import msgspec
import zmq

from headrace.config.kv_events import OPTION, KVEventsConfig, endpoint_of
from headrace.errors import ConfigError
from headrace.log import get_logger
from headrace.messages.kv_events import AllBlocksCleared, BlockRemoved, BlockStored, KVEvent, KVEventBatch

logger = get_logger(__name__)

END = (-1).to_bytes(8, "big", signed=True)
LINGER_MS = 200
"""How long `close` may take to send what waits."""


class KVEventPublisher:
    """See the module docstring. Listens from the start; `start` begins to send. replica: its index. Raises ConfigError."""

    def __init__(self, config: KVEventsConfig, replica: int) -> None:
        self._replica = replica
        self._topic = config.topic.encode()
        self._history = KVEventHistory(config.buffer_steps)
        self._max_waiting = config.max_queue_size
        self._waiting: deque[tuple[int, KVEventBatch]] = deque()
        self._next_sequence = 0
        self._stopping = False
        self._wake_fd = os.eventfd(0, os.EFD_NONBLOCK | os.EFD_CLOEXEC)
        self._context = zmq.Context()
        self._pub = self._context.socket(zmq.PUB)
        self._pub.set(zmq.SNDHWM, config.hwm)
        self._replay = self._context.socket(zmq.ROUTER)
        # A whole replay fits, and no more of it waits for a client that does not read.
        self._replay.set(zmq.SNDHWM, config.buffer_steps + 2)
        self._thread = threading.Thread(target=self._run, name="kv-events", daemon=True)
        try:
            self._bind(self._pub, config.endpoint)
            if config.replay_endpoint is not None:
                self._bind(self._replay, config.replay_endpoint)
        except ConfigError:
            self._close_sockets()
            raise

    def start(self) -> None:
        self._thread.start()

    def publish(self, events: list[KVEvent]) -> None:
        """Send the events of a turn, soon and in order. Never waits: when too many wait already they are lost, and their number is skipped."""
        sequence = self._next_sequence
        self._next_sequence += 1
        if len(self._waiting) >= self._max_waiting:
            logger.error("KV events %d are lost: %d batches wait to be sent", sequence, len(self._waiting))
            return
        self._waiting.append((sequence, KVEventBatch(time.time(), events, self._replica)))
        os.eventfd_write(self._wake_fd, 1)

    def close(self) -> None:
        self._stopping = True
        os.eventfd_write(self._wake_fd, 1)
        if self._thread.ident is not None:
            self._thread.join()
        self._close_sockets()

    def _bind(self, socket: zmq.Socket[bytes], endpoint: str) -> None:
        address = endpoint_of(endpoint, self._replica)
        try:
            socket.bind(address)
        except zmq.ZMQError as error:
            raise ConfigError(f"{OPTION}: cannot listen on {address}: {error.strerror}") from error

    def _close_sockets(self) -> None:
        self._pub.close(linger=LINGER_MS)
        self._replay.close(linger=LINGER_MS)
        self._context.term()
        os.close(self._wake_fd)

    def _run(self) -> None:
        poller = zmq.Poller()
        poller.register(self._wake_fd, zmq.POLLIN)
        poller.register(self._replay, zmq.POLLIN)
        while not self._stopping:
            ready = dict(poller.poll())
            if self._wake_fd in ready:
                os.eventfd_read(self._wake_fd)
                self._send_waiting()
            if self._replay in ready:
                self._answer(self._replay.recv_multipart())
        self._send_waiting()

    def _send_waiting(self) -> None:
        while self._waiting:
            sequence, batch = self._waiting.popleft()
            payload = self._history.add(sequence, batch)
            self._pub.send_multipart([self._topic, sequence.to_bytes(8, "big"), payload])

    def _answer(self, frames: list[bytes]) -> None:
        """Replay what a client asked for; what is not a request is ignored."""
        if len(frames) != 3 or len(frames[2]) != 8:
            logger.warning("ignored a request for KV events that is not a sequence number of 8 bytes")
            return
        client = frames[0]
        for sequence, payload in self._history.since(int.from_bytes(frames[2], "big")):
            self._replay.send_multipart([client, b"", sequence.to_bytes(8, "big"), payload])
        self._replay.send_multipart([client, b"", END, b""])


class KVEventHistory:
    """The latest batches, and what was cached before them. Used in the publisher's thread only. max_batches: how many batches are kept as they were
    sent, at least 1."""

    def __init__(self, max_batches: int) -> None:
        self._max_batches = max_batches
        self._batches: deque[tuple[int, KVEventBatch, bytes]] = deque()
        self._encode = msgspec.msgpack.Encoder().encode
        # The blocks that were cached before the oldest batch; a block comes after the one before it.
        self._before: dict[int, BlockStored] = {}

    def add(self, sequence: int, batch: KVEventBatch) -> bytes:
        """Keep a batch, whose number is above all others. Returns it as msgpack."""
        payload = self._encode(batch)
        self._batches.append((sequence, batch, payload))
        if len(self._batches) > self._max_batches:
            for event in self._batches.popleft()[1].events:
                self._apply(event)
        return payload

    def since(self, sequence: int) -> Iterator[tuple[int, bytes]]:
        """(number, msgpack) of the batches from `sequence` on.

        When older ones are asked for than are kept, one batch takes their place: all is cleared, then what was cached is stored. It has
        the number of the last of them.
        """
        if not self._batches:
            return
        oldest, first, _ = self._batches[0]
        if sequence < oldest:
            events: list[KVEvent] = [AllBlocksCleared(), *self._before.values()]
            yield oldest - 1, self._encode(KVEventBatch(first.ts, events, first.data_parallel_rank))
        for number, _, payload in self._batches:
            if number >= sequence:
                yield number, payload

    def _apply(self, event: KVEvent) -> None:
        match event:
            case BlockStored():
                parent, size = event.parent_block_hash, event.block_size
                for index, one in enumerate(event.block_hashes):
                    tokens = event.token_ids[index * size : (index + 1) * size]
                    self._before[one] = msgspec.structs.replace(
                        event, block_hashes=[one], parent_block_hash=parent, token_ids=tokens
                    )
                    parent = one
            case BlockRemoved():
                for one in event.block_hashes:
                    self._before.pop(one, None)  # the event that stored it may be lost
            case AllBlocksCleared():
                self._before.clear()
