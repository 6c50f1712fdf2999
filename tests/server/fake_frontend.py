"""A scripted TokenizerManager, and a real server around it on a loopback port.

The engine's part is played: tokens are bytes, the text is scripted. Prompts, `n`, streams, logprobs and errors have the shapes
of the real one.
"""

import asyncio
import json
import threading
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
import msgspec
import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from headrace.checkpoint.pooling import PoolingConfig
from headrace.checkpoint.sampling_defaults import SamplingDefaults
from headrace.config.server_args import ServerArgs
from headrace.errors import HeadraceError, NotFoundError, RequestError
from headrace.frontend.control import MainOperations
from headrace.frontend.prompts import CallLimits, split_call
from headrace.frontend.runtime_settings import Limits
from headrace.frontend.sample_update import (
    LogprobLists,
    PromptProgress,
    SampleLogprobs,
    SampleTimes,
    SampleUpdate,
    SampleUsage,
)
from headrace.frontend.tenants import ANONYMOUS, Caller
from headrace.media_kinds import MediaRefs
from headrace.messages.control import (
    CacheNode,
    CacheTree,
    FaultReq,
    InternalState,
    Outcome,
    PoolState,
    ReadyInfo,
)
from headrace.messages.media import NO_MEDIA_SUPPORT, MediaSupport
from headrace.messages.operations import OPERATIONS, LimitChanges, OperationReq, RankInfo, answered
from headrace.messages.outputs import FinishReason, LogprobBlock
from headrace.messages.packing import pack_float32, pack_int32
from headrace.messages.requests import GenerateReqInput
from headrace.messages.weights import UpdateFromTensors, WeightOperation, WeightOpReply
from headrace.metrics.catalog import Metrics
from headrace.metrics.export import render
from headrace.parsers.registry import choose
from headrace.sampling.params import GenerationDefaults, ResolvedSamplingParams
from headrace.server.app import create_app
from headrace.server.context import ServedModel, ServerStatus
from headrace.server.listener import Server
from headrace.text.chat_templates import ChatTemplate
from headrace.text.tokenizers import Tokenizer

MODEL = "org/tiny"
IMAGE_TOKENS = 16
CONTEXT_LENGTH = 512
TEMPLATE = (
    "{% for m in messages %}<|{{ m.role }}|>{{ m.content }}\n{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
    "{% if reasoning_effort is defined %}[{{ reasoning_effort }}]{% endif %}"
)


def byte_tokenizer(*special: str) -> Tokenizer:
    """One token per byte, and two special ones before those given."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|user|>", "<|assistant|>", *special])
    return Tokenizer(backend)


def events(reply: httpx.Response) -> list[Any]:
    """The events of a stream; checks the framing and that [DONE] comes once, at the end."""
    assert reply.status_code == 200, reply.text
    assert reply.headers["content-type"].startswith("text/event-stream")
    frames = reply.text.split("\n\n")
    assert frames.pop() == ""
    assert all(frame.startswith("data: ") and "\n" not in frame for frame in frames)
    assert frames.count("data: [DONE]") == 1
    assert frames.pop() == "data: [DONE]"
    return [json.loads(frame.removeprefix("data: ")) for frame in frames]


def block(
    values: Sequence[float],
    ids: Sequence[int],
    top: Sequence[float] = (),
    top_ids: Sequence[int] = (),
    picked: Sequence[float] = (),
) -> LogprobBlock:
    """Logprobs of tokens, as the engine sends them."""
    return LogprobBlock(
        pack_int32(ids), pack_float32(values), pack_int32(top_ids), pack_float32(top), pack_float32(picked)
    )


@dataclass
class Script:
    """What the fake engine does.

    text: of every sample, one token per byte. hold_at: stop after so many tokens, until `release`; 0: before the first one, if the reply is a
    stream. progress: (total, processed) of the prompt, told before that if it was asked for. fail_at: raise `error` after so many tokens. ends:
    finish reasons by index, default length or stop. tokens_per_chunk: as a stream_interval. padding_bytes: makes every update so much larger.
    picked: the logprob of a requested token id after a prompt. sampled: by the index of a sample its text and the
    logprob of its tokens; without streams.
    """

    text: str = "Hello, wörld 🙂!"
    hold_at: int | None = None
    progress: tuple[tuple[int, int], ...] = ()
    fail_at: int | None = None
    error: Exception | None = None
    ends: dict[int, FinishReason] = field(default_factory=dict)
    tokens_per_chunk: int = 1
    cached_tokens: int = 2
    padding_bytes: int = 0
    picked: Callable[[list[int], int], float] = lambda prompt, token: -3.0
    sampled: Callable[[int], tuple[str, float]] | None = None


class FakeWeights:
    """Answers as the WeightControl does, and remembers what was asked."""

    def __init__(self) -> None:
        self.version = "default"
        self.model_path: str | None = None
        self.operations: list[WeightOperation] = []
        self.file = b""
        self.reply = WeightOpReply(1, True, "done", "default")

    async def operate(self, operation: WeightOperation) -> WeightOpReply:
        self.operations.append(operation)
        if isinstance(operation, UpdateFromTensors) and operation.random_but is None:
            self.file = Path(operation.file).read_bytes()  # noqa: ASYNC240, it is memory
        return self.reply


class FakeExperts:
    """Records once."""

    def __init__(self) -> None:
        self.is_recording = False

    async def start(self) -> None:
        if self.is_recording:
            raise RequestError("the choice of experts is being recorded: stop it first")
        self.is_recording = True

    async def stop(self) -> None:
        self.is_recording = False

    async def dump(self) -> dict[str, Any]:
        return {"is_recording": self.is_recording, "layers": {"0": [1, 2]}}


class FakePins:
    """Remembers what was asked; there is one pin."""

    ID = "pin_0123456789abcdef01234567"

    def __init__(self) -> None:
        self.asked: list[tuple[GenerateReqInput, float, Any]] = []
        self.is_held = True

    async def pin(self, obj: GenerateReqInput, ttl_s: float, caller: Any = None) -> dict[str, Any]:
        self.asked.append((obj, ttl_s, caller))
        return {"id": self.ID, "object": "cache.pin", "tokens": 16, "cached_tokens": 0, "expires_at": 1}

    async def unpin(self, pin_id: str, caller: Any = None) -> None:
        if pin_id != self.ID:
            raise NotFoundError("there is no such pin", "id", "pin_not_found")
        self.is_held = False

    async def cache(self, caller: Any = None) -> dict[str, Any]:
        return {"object": "cache", "memory": {"tokens": 16}, "disk": None, "pins": [{"id": self.ID}] * self.is_held}


class FakeSlots:
    """asked: the slots that requests have named, and what was done with slots."""

    def __init__(self) -> None:
        self.asked: list[object] = []

    async def save(self, slot: int, name: str, caller: Any = None) -> dict[str, Any]:
        self.asked.append(("save", slot, name))
        return {"id_slot": slot, "filename": name, "n_saved": 8, "n_written": 32, "timings": {"save_ms": 0.5}}

    async def restore(self, slot: int, name: str, caller: Any = None) -> dict[str, Any]:
        self.asked.append(("restore", slot, name))
        return {"id_slot": slot, "filename": name, "n_restored": 0, "n_read": 32, "timings": {"restore_ms": 0.5}}

    async def erase(self, slot: int, caller: Any = None) -> dict[str, Any]:
        self.asked.append(("erase", slot))
        return {"id_slot": slot, "n_erased": 8}


class FakeAdapters:
    """Names, and what was loaded."""

    def __init__(self) -> None:
        self.names: list[str] = []
        self.loads: list[tuple[str, str, bool]] = []

    async def load(self, name: str, path: str, pinned: bool = False) -> None:
        if name in self.names:
            raise RequestError("there already", "lora_name")
        if "broken" in path:
            raise RequestError("broken", "lora_path")
        self.loads.append((name, path, pinned))
        self.names.append(name)

    async def unload(self, name: str) -> None:
        if name not in self.names:
            raise NotFoundError("there is no such adapter", "lora_name")
        self.names.remove(name)


class FakeFrontend:
    """Answers as the TokenizerManager does, and as some of its parts."""

    def __init__(self, context_length: int = CONTEXT_LENGTH, special: Sequence[str] = ()) -> None:
        self.context_length = context_length
        self.tokenizer = byte_tokenizer(*special)
        self.has_tokenizer = True
        self.has_experts = False
        self.reset()

    def reset(self) -> None:
        """Forget everything between tests."""
        self.script = Script()
        self.calls: list[GenerateReqInput] = []
        self.resolved: list[ResolvedSamplingParams] = []
        self.callers: list[Any] = []
        self.in_chats: list[bool] = []
        self.asked_by: list[tuple[str, Any]] = []
        self.profiled: list[Any] = []
        self.control = self.records = self.settings = self
        self.experts = FakeExperts()
        self.aborted: list[str] = []
        self.opened: list[tuple[int, str | None, float | None]] = []
        self.closed: list[str] = []
        self.adapters = FakeAdapters()
        self.pins = FakePins()
        self.slots = FakeSlots()
        self.asked_pins: list[Any] = []
        self.faults: list[FaultReq] = []
        self.started = threading.Event()
        self.closed_early = threading.Event()
        self.alive = True
        self.flush = Outcome(True, "flushed")
        self.flush_timeouts: list[float] = []
        self.num_active = 0
        self._released = asyncio.Event()
        self.weights = FakeWeights()
        self.dumps: int | None = 3
        self.num_frozen = 0
        self.changes: list[LimitChanges] = []
        self.samples: list[dict[str, Any]] = [{"rid": "known"}, {"rid": "other"}]
        self.metrics = Metrics(MODEL)
        self.own_counters = {"num_unknown_outputs": 0}
        self.replies: list[tuple[str, int]] = []

    async def ids_with_media(self, input_ids: list[int], media: MediaRefs, caller: Caller = ANONYMOUS) -> list[int]:
        self.counted = [*input_ids], media
        count = len(media.images) + len(media.audios) + len(media.videos)
        return [*input_ids, *[0] * (IMAGE_TOKENS - 1) * count]

    async def generate_request(
        self,
        obj: GenerateReqInput,
        is_disconnected: Any = None,
        *,
        default_max_new_tokens: int = 128,
        in_chat: bool = False,
        caller: Any = None,
        pins: Any = (),
        slot: int = 0,
    ) -> AsyncGenerator[SampleUpdate, None]:
        limits = CallLimits(
            self.tokenizer.vocab_size, 8, max_n=8, max_prompts=64, max_samples=256, context_length=self.context_length,
            has_tokenizer=self.has_tokenizer, has_experts=self.has_experts,
        )  # fmt: skip
        call = split_call(obj, limits)
        self.calls.append(obj)
        self.callers.append(caller)
        self.in_chats.append(in_chat)
        self.asked_pins.append(pins)
        self.slots.asked.append(slot)
        script = self.script
        samples = []
        for prompt in call.prompts:
            given = prompt.given
            ids = given.ids if given.text is None else self.tokenizer.encode(given.text)
            if ids is None:
                ids = [0] * (len(given.embeds or b"") // 32)
            if len(ids) > self.context_length:
                raise RequestError(f"the prompt has {len(ids)} tokens, the context {self.context_length}", "text")
            sampling = prompt.sampling.resolve(
                defaults=GenerationDefaults(), vocab_size=self.tokenizer.vocab_size, default_max_new_tokens=default_max_new_tokens,
                room_tokens=self.context_length - len(ids), bad_word_ids=[], grammar=prompt.grammar, seed=0,
                max_n=8,
            )  # fmt: skip
            self.resolved.append(sampling)
            samples += [(prompt, ids, sampling)] * prompt.sampling.n
        whole = self.tokenizer.encode(script.text)
        if script.error is not None and script.fail_at == 0:
            raise script.error
        self.num_active += 1
        finished = False
        try:
            if obj.stream:
                lengths = [min(len(whole), sampling.max_new_tokens) for _, _, sampling in samples]
                done = [0] * len(samples)
                ended = [False] * len(samples)
                for total, processed in script.progress if obj.return_progress else ():
                    told = PromptProgress(total, 0, processed, 1)
                    update = self._update(0, samples[0][0], samples[0][1], [], 0, False, call.is_list)
                    yield msgspec.structs.replace(update, progress=told)
                if script.hold_at == 0:
                    await self._hold()
                while not all(ended):
                    for i, (prompt, ids, _) in enumerate(samples):
                        if ended[i]:
                            continue
                        before, done[i] = done[i], min(lengths[i], done[i] + script.tokens_per_chunk)
                        ended[i] = done[i] == lengths[i]
                        yield self._update(i, prompt, ids, whole[: done[i]], before, ended[i], call.is_list)
                        self.started.set()
                        await self._pause(done[i])
            else:
                self.started.set()
                await self._pause(script.hold_at or 0)
                finished = True
                for i, (prompt, ids, sampling) in enumerate(samples):
                    own = whole if script.sampled is None else self.tokenizer.encode(script.sampled(i)[0])
                    made = own[: sampling.max_new_tokens]
                    yield self._update(i, prompt, ids, made, 0, True, call.is_list)
            finished = True
        finally:
            self.num_active -= 1
            if not finished:
                self.closed_early.set()

    async def _hold(self) -> None:
        self._loop = asyncio.get_running_loop()
        await self._released.wait()

    def release(self) -> None:
        """Go on with what holds."""
        self._loop.call_soon_threadsafe(self._released.set)

    async def _pause(self, num_tokens: int) -> None:
        script = self.script
        if script.hold_at == num_tokens and num_tokens:
            await self._hold()
        if script.error is not None and script.fail_at == num_tokens and num_tokens:
            raise script.error
        await asyncio.sleep(0)

    def _update(
        self, index: int, prompt: Any, ids: list[int], made: list[int], before: int, ended: bool, is_list: bool
    ) -> SampleUpdate:
        """Says what is new of the tokens `made`: those after the first `before`."""
        finish = None
        if ended:
            all_said = len(made) == len(self.tokenizer.encode(self.script.text))
            normal = FinishReason("stop", matched=2) if all_said else FinishReason("length", length=len(made))
            finish = self.script.ends.get(index, normal)
        return SampleUpdate(
            rid=prompt.rid,
            index=index,
            is_listed=is_list,
            text=self._text(made, ended)[len(self._text(made[:before], False)) :],
            ids=made[before:],
            finish=finish,
            usage=SampleUsage(len(ids), len(made), self.script.cached_tokens),
            times=SampleTimes(0.5),
            weight_version="default" + "x" * self.script.padding_bytes,
            num_retractions=0,
            logprobs=self._logprobs(prompt, ids, made[before:], before == 0, index) if prompt.return_logprob else None,
        )

    def _text(self, made: list[int], ended: bool) -> str:
        text = self.tokenizer.decode(made)
        return text if ended else text.rstrip("\ufffd")

    def _logprobs(self, prompt: Any, ids: list[int], new: list[int], is_first: bool, index: int = 0) -> SampleLogprobs:
        k, picked = prompt.top_logprobs_num, tuple(prompt.token_ids_logprob)
        value = self.script.sampled(index)[1] if self.script.sampled else -0.5
        output, shown = LogprobLists(), ids if is_first and prompt.logprob_start_len == 0 else []
        for i in new:
            top = range(40, 40 + k)
            output.extend(
                block([value], [i], [-0.5 - j for j in range(k)], top, [self.script.picked(ids, i) for i in picked]),
                picked,
            )
        before = LogprobLists()
        if shown:
            before.add_unknown(shown[0])
        for i in shown[1:]:
            before.extend(block([-0.25], [i], [-0.25] if k else [], [i] if k else [], [-0.25] * len(picked)), picked)
        return SampleLogprobs(
            *(lists.since(0, k > 0, picked, lambda i: self.tokenizer.decode([i])) for lists in (before, output))
        )

    def abort_request(self, rid: str = "", abort_all: bool = False, caller: Any = None) -> None:
        self.aborted.append("*" if abort_all else rid)
        self.asked_by.append(("abort", caller))

    async def open_session(
        self,
        capacity_of_str_len: int = 0,
        session_id: str | None = None,
        timeout_s: float | None = None,
        caller: Any = None,
    ):
        self.opened.append((capacity_of_str_len, session_id, timeout_s))
        self.asked_by.append(("open", caller))
        return session_id or "s1"

    async def close_session(self, session_id: str, caller: Any = None) -> None:
        self.asked_by.append(("close", caller))
        if session_id != "s1":
            raise NotFoundError("there is no such session", "session_id")
        self.closed.append(session_id)

    async def flush_cache(self, timeout_s: float = 0.0) -> Outcome:
        self.flush_timeouts.append(timeout_s)
        return self.flush

    async def internal_state(self) -> InternalState:
        pool = PoolState(1024, 512, 256, 256, 64, 64, True)
        return InternalState(pool, 1, 2, 0, 3, 0, 0, 4, 50, 60, 10, 40, 20, 0, 0, 12.5, 0.5, 7)

    async def internal_states(self) -> list[InternalState]:
        return [await self.internal_state()]

    async def ask(self, name: str, request: bytes) -> dict[int, bytes]:
        operation = OPERATIONS[name]
        asked = operation.request_of(OperationReq(1, name, request))
        if operation.at == "main":
            found = await getattr(MainOperations(self.experts, self, self), name)(asked)
            return {0: answered(1, found).reply}
        match name:
            case "cache_tree":
                nodes = [CacheNode(-1, 40, 2, 1), CacheNode(0, 8, 0, 1), CacheNode(0, 16, 0, 0)]
                reply: Any = CacheTree(0, 3, 64, nodes[: asked.max_nodes])
            case "ranks":
                reply = [RankInfo(rank, 100 + rank, 4096, 1024, 512) for rank in range(2)]
            case "slow_down":
                reply = f"slept {asked.forward_sleep_time}"
            case "start_profile":
                self.profiled.append(asked)
                reply = Outcome(True, "profiling")
            case _:
                reply = Outcome(False, "no profile is running")
        return {0: answered(1, reply).reply}

    async def health(self, generate: bool = False) -> bool:
        return self.alive

    async def timelines(self, rid: str, caller: Any = None):
        self.asked_by.append(("timelines", caller))
        if found := [sample for sample in self.samples if sample["rid"] == rid and "events" in sample]:
            return found
        if rid != "known":
            raise NotFoundError("there is no such request", "rid")
        return [{"rid": rid, "tenant_asked": caller.tenant and caller.tenant.name, "is_admin": caller.is_admin}]

    async def latest(self, limit: int, caller: Any = None):
        self.asked_by.append(("latest", caller))
        return self.samples[:limit]

    def configure_logging(self, level, log_requests, log_requests_level):
        self.logging = (level, log_requests, log_requests_level)
        return {
            "level": level or "info",
            "log_requests": bool(log_requests),
            "log_requests_level": log_requests_level or 0,
        }

    async def dump(self):
        if self.dumps is None:
            raise RequestError("there is no folder to write to")
        return "requests-1.json", self.dumps

    def freeze_gc(self):
        self.num_frozen += 1

    def change_limits(self, changes):
        self.changes.append(changes)
        return Limits(4, changes.max_queued_requests or 16, 128, 1.0, 200)

    async def changed_options(self):
        return {"max_queued_requests": self.changes[-1].max_queued_requests} if self.changes else {}

    async def counters(self):
        return self.own_counters

    async def metrics_text(self):
        return render(self.metrics)

    def count_reply(self, route: str, status: int) -> None:
        self.replies.append((route, status))

    def count_template_kill(self) -> None:
        self.metrics.template_kills.inc()

    async def inject_fault(self, fault: FaultReq) -> None:
        self.faults.append(fault)


def served_model(
    tokenizer: Tokenizer,
    template: str | None = TEMPLATE,
    context_length: int = CONTEXT_LENGTH,
    reasoning_parser: str = "think",
    pooling: PoolingConfig | None = None,
    media_support: MediaSupport = NO_MEDIA_SUPPORT,
    reply_limit: int = 0,
    aliases: tuple[str, ...] = (),
) -> ServedModel:
    """The fake model as the server knows it. pooling: what it makes of a text instead of more text. media_support: the media that it takes."""
    ready = ReadyInfo(
        max_total_tokens=1024, max_running_requests=8, context_length=context_length, vocab_size=tokenizer.vocab_size,
        hidden_size=8, page_size=1, dtype="float32", kv_cache_dtype="float32", device="cpu", attention_backend="torch_native",
        model_class="Fake", weight_bytes=1, kv_bytes=1, load_s=0.1,
        num_parameters=134_515_008, file_format="gguf", stored_precision="Q4_K_M",
    )  # fmt: skip
    chat = None if template is None else ChatTemplate(template, tokenizer.special_texts)
    output_format = choose(
        template=template or "", special=tokenizer.added_tokens, tool_parser="hermes", reasoning_parser=reasoning_parser
    )
    return ServedModel(
        output_format=output_format, name=MODEL, context_length=context_length, tokenizer=tokenizer, chat_template=chat, ready=ready, created=1,
        model_type="fake", architectures=("FakeForCausalLM" if pooling is None else "FakeModel",), pooling=pooling,
        sampling_defaults=SamplingDefaults(temperature=0.25, origin="the card of the fake"),
        media_support=media_support, reply_limit=reply_limit, aliases=aliases,
    )  # fmt: skip


@dataclass
class Running:
    """A server that accepts requests."""

    server: Server
    frontend: FakeFrontend
    status: ServerStatus
    app: Any

    @property
    def url(self) -> str:
        return self.server.url


def make_app(
    frontend: Any,
    status: ServerStatus | None = None,
    template: str | None = TEMPLATE,
    pooling: PoolingConfig | None = None,
    media_support: MediaSupport = NO_MEDIA_SUPPORT,
    **options: Any,
) -> Any:
    """The application around a fake."""
    args = ServerArgs(**({"port": 0} | options))
    reasoning_parser = "think" if args.reasoning_parser == "auto" else args.reasoning_parser
    context_length = getattr(frontend, "context_length", CONTEXT_LENGTH)
    limit = args.default_max_tokens or 0
    model = served_model(
        frontend.tokenizer,
        template,
        context_length,
        reasoning_parser,
        pooling,
        media_support,
        limit,
        args.served_names[1:],
    )
    return create_app(frontend, args, model, status), args


@contextmanager
def running_server(
    template: str | None = TEMPLATE,
    fake_context_length: int = CONTEXT_LENGTH,
    special_tokens: Sequence[str] = (),
    frontend: FakeFrontend | None = None,
    pooling: PoolingConfig | None = None,
    media_support: MediaSupport = NO_MEDIA_SUPPORT,
    **options: Any,
) -> Iterator[Running]:
    """A real server on a free port, in a thread. special_tokens: more of the fake's tokenizer. frontend: another fake than the usual one."""
    frontend = frontend or FakeFrontend(fake_context_length, special_tokens)
    status = ServerStatus()
    app, args = make_app(frontend, status, template, pooling, media_support, **options)
    server = Server(app, args)
    failures: list[BaseException] = []

    def run() -> None:
        try:
            server.run()
        except HeadraceError as exc:
            failures.append(exc)
            server.started.set()

    thread = threading.Thread(target=run)
    thread.start()
    try:
        assert server.started.wait(20)
        if failures:
            raise failures[0]
        frontend.reset()
        yield Running(server, frontend, status, app)
    finally:
        server.shutdown()
        thread.join(20)
        assert not thread.is_alive()
