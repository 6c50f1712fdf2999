"""Replicas in processes of their own behind a real front end, what is done to them, and what must be true afterwards."""

import asyncio
import contextlib
import itertools
import os
import random
import signal
import sys
import time
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import replica_child
from fake_worker import expected_outputs
from frontend_fakes import ByteTokenizer, request

from headrace.config.server_args import ServerArgs
from headrace.errors import CapacityError, ExecutionError, HeadraceError, RequestError
from headrace.execution.model_source import args_of_update
from headrace.frontend.engine_link import DIED_REPEATEDLY
from headrace.frontend.native_answer import NativeStream
from headrace.frontend.request_state import ReqState
from headrace.frontend.tokenizer_manager import TokenizerManager
from headrace.messages.channel import IpcDir, Ports
from headrace.messages.weights import (
    ContinueGeneration,
    PauseGeneration,
    ReleaseMemory,
    ResumeMemory,
    UpdateFromDisk,
    WeightOperation,
)
from headrace.processes.child import ChildProcess
from headrace.processes.parts import ChildParts

LIMIT_S = 120.0
"""For a machine with busy cores; nothing here measures speed."""
KV = ("kv_cache",)


class FakeChild(ChildProcess):
    program = (sys.executable, replica_child.__file__)


@dataclass
class Asked:
    """A request, what came of it, and when."""

    prompt: list[int]
    max_new_tokens: int
    num_samples: int
    rid: str
    begin_s: float
    task: "asyncio.Task[Any]"
    end_s: float = 0.0


@dataclass
class History:
    """What was done, and when. held: times at which generation may have been paused. switched: from the call of an update to its reply."""

    asked: list[Asked] = field(default_factory=list)
    orders: "list[asyncio.Task[None]]" = field(default_factory=list)
    held: list[list[float]] = field(default_factory=list)
    switched: list[tuple[float, float]] = field(default_factory=list)
    log: list[str] = field(default_factory=list)

    def may_mix(self, one: Asked) -> bool:
        """The weights were replaced under a pause while it lived: it goes on with others, as it says in the documentation."""
        return any(
            begin <= one.end_s
            and one.begin_s <= end
            and any(
                since <= end and begin <= until and since <= one.end_s and one.begin_s <= until
                for since, until in self.held
            )
            for begin, end in self.switched
        )


class Fleet:
    """Two replicas and their front end. Use within the event loop that it was made in."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.resources = contextlib.ExitStack()
        self.deaths: list[str] = []
        self.numbers = itertools.count(1)
        self.rids = itertools.count()
        self.weights = 0
        self.adapters: dict[str, str] = {}
        (folder / "0").write_text("0")
        for name in ("a", "b"):
            (folder / name).write_text(name)
        self.args = ServerArgs(
            model_path=str(folder / "0"),
            dp_size=2,
            max_restarts=10**6,
            max_loras=3,
            load_balance_method="round_robin",
            log_level="warning",
            max_queued_requests=10**4,
        )
        ports = Ports.in_directory(self.resources.enter_context(IpcDir()))
        self.parts = ChildParts(self.args, ports, FakeChild, args_of_update=args_of_update)
        from_engine = self.parts.channels.receiver("to_tokenizer")
        ready = self.parts.wait_ready(lambda done, total: None, lambda: False)
        self.manager = TokenizerManager(
            self.args,
            ready,
            ByteTokenizer(),
            self.parts.channels.sender("to_scheduler"),
            from_engine,
            to_detokenizer=self.parts.channels.sender("to_detokenizer"),
            more_schedulers=[self.parts.channels.sender("to_scheduler", 1)],
        )
        self.manager.start()
        self.lora_ids: dict[str, int] = {}
        self._submit, self.manager.link.submit = self.manager.link.submit, self._note_and_submit
        self.parts.watch(self.manager, self._on_death)

    def _note_and_submit(self, samples: Sequence[ReqState]) -> None:
        """Under which number a request's adapter is in memory is known when it is sent."""
        self.lora_ids |= {sample.shown_id: sample.request.lora_id for sample in samples if sample.request is not None}
        self._submit(samples)

    def _on_death(self, message: str) -> None:
        self.deaths.append(message)
        self.manager.fail_all(message)

    async def return_begins(self) -> None:
        """Until a new life is about to be told what the others know, so that what comes next meets it."""
        async with asyncio.timeout(LIMIT_S):
            was_down = False
            while not was_down or len(self.manager.link.replicas_up()) < 2:
                was_down = was_down or len(self.manager.link.replicas_up()) < 2
                if was_down and self.manager.parts.num_rejoining:
                    return
                await asyncio.sleep(0.001)

    async def close(self) -> None:
        await self.manager.close()
        await asyncio.to_thread(self.parts.stop)
        self.resources.close()

    # -- what is done

    def kill(self, kind: str, index: int) -> bool:
        """kill -9; False when it is dead at the moment."""
        for child in tuple(self.parts.children):
            if child.kind == kind and child.index == index and child.exit_code is None:
                os.kill(child.pid, signal.SIGKILL)
                return True
        return False

    def ask(
        self,
        history: History,
        prompt: list[int],
        max_new_tokens: int,
        *,
        num_samples: int = 1,
        replica: int | None = None,
        lora: str | None = None,
        stream: bool = False,
    ) -> Asked:
        sampling = {
            "max_new_tokens": max_new_tokens, "temperature": 0.0, "ignore_eos": True, "n": num_samples,
            "skip_special_tokens": False,
        }  # fmt: skip
        rid = f"q{next(self.rids)}"
        asked = request(
            None,
            rid=rid,
            input_ids=prompt,
            sampling_params=sampling,
            stream=stream,
            routed_dp_rank=replica,
            lora_path=lora,
        )

        async def collect() -> Any:
            answers = NativeStream(incremental=False)
            last: dict[int, Any] = {}
            try:
                async for update in self.manager.generate_request(asked):
                    before = last.get(update.index)
                    assert before is None or before["meta_info"]["finish_reason"] is None, "it spoke after its end"
                    last[update.index] = answers.answer(update)
            finally:
                one.end_s = time.monotonic()
            return list(last.values())

        one = Asked(prompt, max_new_tokens, num_samples, rid, time.monotonic(), asyncio.create_task(collect()))
        history.asked.append(one)
        return one

    def order(self, history: History, what: str, work: Callable[[], Awaitable[None]]) -> None:
        """Carry it out in a task. A refusal, or a death in the way, is an answer too."""
        history.log.append(what)

        async def carry_out() -> None:
            try:
                await work()
            except (CapacityError, RequestError) as error:
                history.log.append(f"{what}: {error.message}")
            else:
                history.log.append(f"{what}: done")

        history.orders.append(asyncio.create_task(carry_out()))

    async def operate(self, operation: WeightOperation) -> None:
        reply = await self.manager.weights.operate(operation)
        if not reply.success:
            raise RequestError(reply.message)

    async def update(self, history: History, is_missing: bool = False, abort: bool = False) -> None:
        number = next(self.numbers)
        path = self.folder / str(number)
        if not is_missing:
            path.write_text(str(number))
        begin_s = time.monotonic()
        await self.operate(UpdateFromDisk(str(path), abort_all_requests=abort, weight_version=str(number)))
        assert not is_missing
        history.switched.append((begin_s, time.monotonic()))
        self.weights = number

    async def hold(self, history: History, operation: WeightOperation) -> None:
        """Pause, or release memory."""
        self._held_from(history)
        await self.operate(operation)

    async def go_on(self, history: History, operation: WeightOperation) -> None:
        await self.operate(operation)
        standing = self.manager.weights.log.standing
        if standing.pause is None and not standing.released and history.held:
            history.held[-1][1] = min(history.held[-1][1], time.monotonic())

    @staticmethod
    def _held_from(history: History) -> None:
        history.held.append([time.monotonic(), float("inf")])

    async def load(self, name: str) -> None:
        await self.manager.adapters.load(name, str(self.folder / name))

    # -- the end of it

    async def settle(self, history: History) -> None:
        """Let everything go on, and wait until all is done and everybody is back."""
        async with asyncio.timeout(LIMIT_S):
            for _ in range(2):
                await self._surely(ResumeMemory(KV))
                await self._surely(ContinueGeneration())
                await asyncio.gather(*history.orders)
            await asyncio.gather(*(one.task for one in history.asked), return_exceptions=True)
            while len(self.manager.link.replicas_up()) < 2 or not self.manager.link.is_serving:  # noqa: ASYNC110
                await asyncio.sleep(0.02)

    async def _surely(self, operation: WeightOperation) -> None:
        while True:
            try:
                return await self.operate(operation)
            except CapacityError:
                await asyncio.sleep(0.02)

    async def check(self, history: History) -> None:
        """Every replica has what was said to have succeeded, and nothing else; every request has ended once, with one set of weights."""
        assert not self.deaths, self.deaths
        states = await self.manager.control.internal_states()
        version = str(self.weights) if self.weights else "default"
        assert [(s.weight_version, s.paused, s.released) for s in states] == [(version, "", ())] * 2, history.log
        assert self.manager.weights.version == version
        for one in history.asked:
            self._check_request(history, one)
        assert not self.manager.table.samples, "a request is left over"
        probes = History()
        for replica, lora in itertools.product((0, 1), (None, *self.manager.adapters.names)):
            self.ask(probes, [0, 1, 1], 24, replica=replica, lora=lora)
        await asyncio.gather(*(one.task for one in probes.asked))
        for one in probes.asked:
            (answer,) = one.task.result()
            want = expected_outputs(
                one.prompt, 24, replica_child.EOS_EVERY, True, self.weights, self.lora_ids.get(one.rid, 0)
            )
            assert answer["output_ids"] == want, ("a replica has other weights", history.log)

    def _check_request(self, history: History, one: Asked) -> None:
        error = one.task.exception()
        if error is not None:
            # What kills again and again is given up; an adapter may go before its request is sent.
            known = isinstance(error, RequestError) or (
                isinstance(error, ExecutionError) and error.message == DIED_REPEATEDLY
            )
            assert known, (error, history.log)
            return
        answers = one.task.result()
        assert len(answers) == one.num_samples
        versions = set()
        for answer in answers:
            ids, meta = answer["output_ids"], answer["meta_info"]
            is_aborted = meta["finish_reason"]["type"] == "abort"
            assert is_aborted or len(ids) == one.max_new_tokens
            versions.add(meta["weight_version"])
            if history.may_mix(one):
                continue
            number = 0 if meta["weight_version"] == "default" else int(meta["weight_version"])
            want = expected_outputs(
                one.prompt, one.max_new_tokens, replica_child.EOS_EVERY, True, number, self.lora_ids.get(one.rid, 0)
            )
            assert ids == want[: len(ids)], ("weights are mixed", one, history.log)
        assert (
            len(versions) == 1
            or history.may_mix(one)
            or any(answer["meta_info"]["finish_reason"]["type"] == "abort" for answer in answers)
        ), ("samples of one prompt met different weights", versions, history.log)


async def play(fleet: Fleet, seed: int) -> History:
    """One random history."""
    rng = random.Random(seed)
    history = History()
    is_held_at_times = seed % 2 == 1
    kills = 0
    for _ in range(rng.randint(10, 22)):
        what = rng.choices(
            ["ask", "update", "hold", "go on", "load", "unload", "flush", "kill", "kill detokenizer", "nap"],
            [8, 3, 2 * is_held_at_times, 2 * is_held_at_times, 2, 1, 1, 3 * (kills < 3), 0.3 * (kills < 3), 4],
        )[0]
        match what:
            case "ask":
                for _ in range(rng.randint(1, 4)):
                    fleet.ask(
                        history,
                        [rng.randint(0, 1) for _ in range(rng.randint(1, 20))],
                        rng.randint(1, 90),
                        num_samples=rng.choice([1, 1, 1, 3]),
                        replica=rng.choice([None, None, None, 0, 1]),
                        lora=rng.choice([None, *fleet.manager.adapters.names]),
                        stream=rng.random() < 0.5,
                    )
            case "update":
                bad, abort = rng.random() < 0.2, rng.random() < 0.2
                fleet.order(
                    history, f"update bad={bad}", lambda bad=bad, abort=abort: fleet.update(history, bad, abort)
                )
            case "hold":
                operation = rng.choice([*map(PauseGeneration, ("abort", "retract", "in_place")), ReleaseMemory(KV)])
                fleet.order(history, f"{operation}", lambda operation=operation: fleet.hold(history, operation))
            case "go on":
                operation = rng.choice([ContinueGeneration(), ContinueGeneration(), ResumeMemory(KV)])
                fleet.order(history, f"{operation}", lambda operation=operation: fleet.go_on(history, operation))
            case "load":
                name = rng.choice("ab")
                fleet.order(history, f"load {name}", lambda name=name: fleet.load(name))
            case "unload":
                name = rng.choice("ab")
                fleet.order(history, f"unload {name}", lambda name=name: fleet.manager.adapters.unload(name))
            case "flush":
                fleet.order(history, "flush", lambda: _flush(fleet))
            case "kill" | "kill detokenizer":
                kind, index = ("detokenizer", 0) if what == "kill detokenizer" else ("scheduler", rng.randint(0, 1))
                if fleet.kill(kind, index):
                    kills += 1
                    history.log.append(f"kill {kind} {index}")
        if what == "kill" and rng.random() < 0.6:
            await fleet.return_begins()
        await asyncio.sleep(rng.choice([0.0, 0.0, 0.001, 0.02, 0.05, 0.1]))
    await fleet.settle(history)
    return history


async def _flush(fleet: Fleet) -> None:
    reply = await fleet.manager.control.flush_cache()
    if not reply.success:
        raise RequestError(reply.message)


__all__ = ["Fleet", "HeadraceError", "History", "play"]
