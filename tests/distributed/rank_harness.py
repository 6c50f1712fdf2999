"""Ranks that are processes, and what they compute together. Run as a program: the process that they are forked from.

Every task is called by all ranks of a group; each checks what it gets.
"""

import json
import os
import random
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing, contextmanager, suppress
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch

from headrace.distributed.base import Group, Shard
from headrace.distributed.network import Address, Member, NetworkGroup, NetworkReceiver, NetworkSender
from headrace.distributed.network_follower import FollowerGroup
from headrace.distributed.network_leader import LeaderGroup
from headrace.distributed.one_host import SharedMemoryGroup
from headrace.layers.embedding import VOCABULARY_UNIT
from headrace.layers.logits import LogitsHead
from headrace.messages.requests import PromptContent, SampleTask
from headrace.messages.step import NewSequence
from headrace.sampling.params import ResolvedSamplingParams
from headrace.sampling.sampler import Sampler

LIMIT_S = 60.0
"""Reached only when a test fails."""
HOST = "127.0.0.1"
SECRET = b"a secret of these tests"
FACTS = {"the model": "tiny"}


@cache
def _many_floats(rank: int) -> np.ndarray:
    generator, count = np.random.default_rng(rank), 59_999  # a prime: no buffer's size divides it
    return (generator.standard_normal(count) * 10.0 ** generator.integers(-6, 6, count)).astype(np.float32)


def floats(rank: int, call: int, count: int) -> np.ndarray:
    """What a rank gives to a call: float32 of very different sizes, so that the order of a sum shows."""
    if count > 10_000:
        return np.resize(_many_floats(rank), count)
    begin = call * 37 % 49_000
    return _many_floats(rank)[begin : begin + count].copy()


def sum_once(group: Group, call: int, count: int) -> None:
    x = torch.from_numpy(floats(group.rank, call, count))
    group.all_reduce(x)
    want = floats(0, call, count)
    for rank in range(1, group.size):
        want += floats(rank, call, count)
    assert x.numpy().tobytes() == want.tobytes(), f"sum {call} of {count} floats in rank {group.rank}"


def gather_once(group: Group, call: int, rows: int, columns: list[int]) -> None:
    parts = [floats(rank, call, rows * n).reshape(rows, n) for rank, n in enumerate(columns)]
    wide = torch.full((rows, columns[group.rank] + 3), -1.0)  # rows that lie apart
    own = wide[:, : columns[group.rank]]
    own.copy_(torch.from_numpy(parts[group.rank]))
    if group.rank > 0:
        group.gather(own, columns, None)
        return
    out = torch.full((rows, sum(columns) + 2), -1.0)
    group.gather(own, columns, out[:, : sum(columns)])
    assert np.array_equal(out[:, : sum(columns)].numpy(), np.concatenate(parts, axis=1)), f"gather {call} of {columns}"
    assert (out[:, sum(columns) :] == -1).all()


def message_once(group: Group, call: int, size: int) -> None:
    message = random.Random(call).randbytes(size)
    if group.rank == 0:
        group.send(message)
    else:
        assert group.receive() == message, f"message {call} of {size} bytes"


def sums(group: Group) -> None:
    for call, count in enumerate((0, 1, 7, 576, 8191, 8193, 131_072, 3_000_001)):
        sum_once(group, call, count)


def gathers(group: Group) -> None:
    for call, (rows, unit) in enumerate(((1, 100), (3, 1), (0, 5), (7, 20_000))):
        gather_once(group, call, rows, [unit + rank for rank in range(group.size)])
        gather_once(group, call, rows, [unit * (rank % 2) for rank in range(group.size)])  # nothing from the leader


def messages(group: Group) -> None:
    for call, size in enumerate((0, 1, 65_536, 65_537, 5_000_000, 0, 12)):
        message_once(group, call, size)


def mixed(group: Group) -> None:
    dice = random.Random(group.size)
    for call in range(3_000):
        size = dice.choice((1, 10, 600, 600, 9_000))
        count = dice.randrange(size)
        kind = dice.randrange(6)
        if kind == 0:
            gather_once(group, call, dice.randrange(1, 4), [count + rank for rank in range(group.size)])
        elif kind == 1:
            message_once(group, call, count)
        else:
            sum_once(group, call, count)


class GivenLogits:
    """In place of the output projection of a rank: its columns of logits that are given. A call's input says which rows."""

    def __init__(self, logits: torch.Tensor, own: slice) -> None:
        self.num_outputs = logits.shape[1]
        self._own = logits[:, own]

    def __call__(self, rows: torch.Tensor, out: torch.Tensor | None = None) -> torch.Tensor:
        return self._own[rows].clone()


def peaks(group: Group) -> None:
    """Random logits with ties, infinities and NaN, in parts of different sizes: greedy rows take the tokens and errors of gathered logits."""
    greedy = ResolvedSamplingParams(max_new_tokens=5, seed=0, temperature=0.0)
    generator = torch.Generator().manual_seed(group.size)
    shard = Shard(group.rank, group.size, group)
    for call in range(60):
        num_rows, vocab_size = 1 + call % 7, 64 * group.size + 13 * call + 1
        logits = torch.randn(num_rows, vocab_size, generator=generator) * 40
        logits = logits.round() if call % 2 else logits  # ties
        for value, share in ((-torch.inf, 0.5), (torch.inf, 0.001), (torch.nan, 0.001)):
            chosen = torch.rand(logits.shape, generator=generator) < share * torch.rand(
                num_rows, 1, generator=generator
            )
            logits[chosen & (torch.rand(num_rows, 1, generator=generator) < 0.5)] = value
        for row in range(num_rows // 4):  # a part of a row, or all of it, has nothing to choose
            logits[row, : vocab_size // (1 + call % 3)] = -torch.inf
        projection: Any = GivenLogits(logits, shard.part(vocab_size, VOCABULARY_UNIT))
        head = LogitsHead(projection, soft_cap=(0.0, 5.0, 30.0)[call % 3], shard=shard)
        rows = torch.arange(num_rows)
        gathered, found = head(rows), head.peaks(rows)
        assert ((found.ids < 0) == np.isnan(found.values)).all(), f"call {call}"
        if group.rank > 0:
            continue
        sampler = Sampler(vocab_size, num_rows, "cpu", {})
        for row in range(num_rows):
            prompt = np.array([1], np.int32)
            task, content = SampleTask(greedy), PromptContent(prompt.tobytes())
            sampler.add(row, NewSequence(row, f"r{row}", prompt, 1, np.empty(0, np.int32), task, (), content))
        every = list(range(num_rows))
        want = sampler.sample(gathered, every, [1] * num_rows, [0] * num_rows, [""] * num_rows)
        got = sampler.take_largest(torch.from_numpy(found.ids), found.values.tolist())
        assert got.token_ids.tolist() == want.token_ids.tolist(), f"call {call}"
        assert got.errors == want.errors, f"call {call}"


def one_sum(group: Group) -> None:
    sum_once(group, 0, 10)


def one_gather(group: Group) -> None:
    gather_once(group, 0, 2, [3] * group.size)


def one_message(group: Group) -> None:
    message_once(group, 0, 10)


def ends_of(group: Group) -> tuple[NetworkReceiver, NetworkSender]:
    """Links of a ring over the network: from the rank before and to the one after."""
    assert isinstance(group, NetworkGroup)
    return NetworkReceiver(group), NetworkSender(group, (group.rank + 1) % group.size)


def ring(group: Group) -> None:
    """Steps as stages make them: a message of the leader, hidden states from rank to rank, each a bit larger, and several steps in flight."""
    (before, after), count, in_flight = ends_of(group), 300, 4
    rows = [call * 7 % 40 for call in range(count)]
    for call in range(count + in_flight):
        if call < count:
            message_once(group, call, 100)
            if call % 50 == 0:
                gather_once(group, call, 1, [3] * group.size)
            hidden = torch.full((rows[call], 1000), float(call)) if group.rank == 0 else before.receive(rows[call])
            after.send(hidden + 1)
        if group.rank == 0 and call >= in_flight:
            begun = call - in_flight
            assert torch.equal(before.receive(rows[begun]), torch.full((rows[begun], 1000), float(begun + group.size)))


def one_hidden(group: Group) -> None:
    ends_of(group)[0].receive(1)


TASKS = {
    task.__name__: task
    for task in (sums, gathers, messages, mixed, peaks, ring, one_sum, one_gather, one_message, one_hidden)
}


class RankProcess:
    """A process that plays a rank of one group after another. ours: the socket to it."""

    def __init__(self, ours: socket.socket) -> None:
        self._socket = ours
        self._socket.settimeout(2 * LIMIT_S)
        self._answers = self._socket.makefile("rb")
        self.pid = int(self._answers.readline())
        self._has_ended = False

    def begin(self, task: Callable[[Group], None], fd: int, rank: int, size: int) -> None:
        """Join the group of this descriptor and run the task, one of TASKS."""
        socket.send_fds(self._socket, [json.dumps([task.__name__, rank, size]).encode()], [fd])

    def begin_over_network(
        self, task: Callable[[Group], None], port: int, rank: int, size: int, limit_s: float = LIMIT_S
    ) -> None:
        """The same, of the group whose leader listens at this port."""
        self._socket.sendall(json.dumps([task.__name__, rank, size, port, limit_s]).encode())

    def has_joined(self) -> None:
        """Wait until it has joined."""
        assert self._answers.readline() == b"joined\n"

    def result(self) -> str:
        """Wait for the end of the task, after `has_joined`: "", or its error."""
        return json.loads(self._answers.readline())

    def kill(self) -> None:
        """Returns when it has ended; once."""
        os.kill(self.pid, signal.SIGKILL)
        with suppress(ConnectionResetError):  # it has not read everything
            self._answers.read()
        self._has_ended = True

    def close(self) -> None:
        if not self._has_ended:
            self.kill()
        self._answers.close()
        self._socket.close()


class Nursery:
    """Ranks that begin with everything imported. Its own process plays none."""

    def __init__(self) -> None:
        self._socket, theirs = socket.socketpair()
        with theirs:
            command = [sys.executable, __file__, str(theirs.fileno())]
            self._process = subprocess.Popen(command, pass_fds=[theirs.fileno()])

    @contextmanager
    def ranks(self, count: int) -> Iterator[list[RankProcess]]:
        with ExitStack() as processes:
            yield [processes.enter_context(closing(self._fork())) for _ in range(count)]

    def _fork(self) -> RankProcess:
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self._socket, [b"fork"], [theirs.fileno()])
        return RankProcess(ours)

    def close(self) -> None:
        self._socket.close()
        self._process.wait(LIMIT_S)


@contextmanager
def new_group(size: int, limit_s: float = LIMIT_S) -> Iterator[tuple[SharedMemoryGroup, int]]:
    """A group for the leader, and its descriptor."""
    fd = SharedMemoryGroup.memory(size)
    group = SharedMemoryGroup.join(fd, 0, size, limit_s)
    try:
        yield group, fd
    finally:
        os.close(fd)
        group.break_up("the test has ended")  # nobody waits for it any longer
        group.close()


@contextmanager
def network_leader(size: int, limit_s: float = LIMIT_S) -> Iterator[LeaderGroup]:
    """The leader of a group that nobody has joined yet."""
    group = LeaderGroup.listen(Address(HOST, 0), SECRET, Member(0, size, FACTS), limit_s)
    try:
        yield group
    finally:
        group.break_up("the test has ended")


def main(ours: socket.socket) -> None:
    """Fork a rank for each descriptor, the socket that it listens to, until there is none."""
    torch.set_num_threads(1)
    count = 0
    while (received := socket.recv_fds(ours, 4, 1))[0]:
        with socket.socket(fileno=received[1][0]) as theirs:
            if os.fork() == 0:
                ours.close()
                play(theirs)
                return
            count += 1
    for _ in range(count):
        os.wait()


def play(ours: socket.socket) -> None:
    """Ranks, one after another, as the socket says."""
    ours.sendall(f"{os.getpid()}\n".encode())
    while True:
        told, fds, _, _ = socket.recv_fds(ours, 4096, 1)
        if not told:
            return
        name, rank, size, *network = json.loads(told)
        group: SharedMemoryGroup | FollowerGroup
        if network:
            port, limit_s = network
            group = FollowerGroup.join(Address(HOST, port), SECRET, Member(rank, size, FACTS), limit_s, LIMIT_S)
        else:
            group = SharedMemoryGroup.join(fds[0], rank, size, LIMIT_S)
            os.close(fds[0])
        ours.sendall(b"joined\n")
        error = ""
        try:
            TASKS[name](group)
        except Exception as exception:
            error = f"{type(exception).__name__}: {exception}"
            group.break_up(error)  # the others need not wait for this rank
        group.close()
        ours.sendall(json.dumps(error).encode() + b"\n")


if __name__ == "__main__":
    sys.path.insert(0, str(Path(__file__).parent))
    main(socket.socket(fileno=int(sys.argv[1])))
