"""A tokenizer of bytes and an engine that says what it is told: enough to drive the real front end without a model."""

import asyncio
import contextlib
import threading

import msgspec

from headrace.config.server_args import ServerArgs
from headrace.frontend.native_answer import NativeStream, whole_answer
from headrace.frontend.tokenizer_manager import TokenizerManager
from headrace.messages.channel import LocalChannels
from headrace.messages.control import (
    AbortReq,
    HealthCheckReply,
    InternalState,
    Outcome,
    PoolState,
    ReadyInfo,
)
from headrace.messages.operations import OperationReq, answered
from headrace.messages.outputs import (
    BatchTokenIDOut,
    DecodeOptions,
    FinishReason,
    SamplesMoved,
    SampleStats,
    TokenIDOut,
)
from headrace.messages.packing import pack_int32
from headrace.messages.requests import BatchTokenizedGenerateReqInput, GenerateReqInput, TokenizedGenerateReqInput
from headrace.text.detokenizer_manager import DetokenizerManager

EOS = 256
VOCAB_SIZE = 257
CONTEXT_LENGTH = 64
READY = ReadyInfo(
    max_total_tokens=4096,
    max_running_requests=8,
    context_length=CONTEXT_LENGTH,
    vocab_size=VOCAB_SIZE,
    hidden_size=2,
    page_size=1,
    dtype="float32",
    kv_cache_dtype="float32",
    device="cpu",
    attention_backend="fake",
    model_class="Fake",
    weight_bytes=0,
    kv_bytes=0,
    load_s=0.0,
)
STATE = InternalState(
    pool=PoolState(4096, 4000, 90, 6, 8, 8, True),
    num_running=0,
    num_waiting=0,
    num_in_flight_steps=0,
    num_steps=0,
    num_retracted=3,
    num_aborted=0,
    num_finished=0,
    prompt_tokens=0,
    generation_tokens=0,
    cached_tokens=5,
    computed_prefill_tokens=0,
    prefix_query_tokens=20,
    memory_repairs=0,
    dropped_frames=0,
    gen_throughput=12.5,
    new_token_ratio=0.5,
    waiting_tokens=0,
)


class ByteTokenizer:
    """Token i < 256 is byte i; 256 is a special token that ends a text. Waits while `released` is clear."""

    fixed_bytes = True
    strips_first_space = False
    bos_id = None
    special_ids = frozenset({EOS})

    def __init__(self):
        self.batches = []
        self.released = threading.Event()
        self.released.set()

    def encode_batch(self, texts, add_special_tokens=True, allow_special=False):
        assert self.released.wait(20)
        self.batches.append(list(texts))
        return [list(text.encode()) for text in texts]

    def token_bytes(self, token_id):
        return b"<eos>" if token_id == EOS else bytes([token_id])

    def decode(self, ids, skip_special_tokens=True, spaces_between_special_tokens=True):
        kept = [i for i in ids if not (skip_special_tokens and i in self.special_ids)]
        return b"".join(map(self.token_bytes, kept)).decode(errors="replace")


class FakeEngine:
    """The scheduler's side of the channels. Outputs pass through the real DetokenizerManager.

    requests: what arrived, by rid. aborts: AbortReqs that arrived. busy: answer to health checks. answers: False = silence to
    control requests. source: signs the outputs. Live samples are those without an end; an abort ends them, as the scheduler does.
    """

    def __init__(self, channels, tokenizer):
        self.inbox = channels.receiver("to_scheduler")
        self.outbox = channels.sender("to_tokenizer")
        self.detokenizer = DetokenizerManager(tokenizer, self.outbox, channels.sender("to_scheduler"))
        self.requests = {}
        self.order = []
        self.aborts = []
        self.num_tokens = {}
        self.busy = False
        self.answers = True
        self.aborts_end = True
        self.source = 0

    def pump(self):
        """Handle every message that has arrived."""
        while (message := self.inbox.recv_nowait()) is not None:
            self.handle(message)

    def handle(self, message):
        match message:
            case TokenizedGenerateReqInput():
                self.add(message)
            case BatchTokenizedGenerateReqInput():
                for request in message.requests:
                    self.add(request)
            case AbortReq():
                self.aborts.append(message)
                rids = list(self.num_tokens) if message.abort_all else [r for r in message.rids if r in self.num_tokens]
                for rid in rids if self.aborts_end else []:
                    self.emit(rid, finish=FinishReason("abort", message=message.message))
            case OperationReq() if self.answers:
                reply = {
                    "flush_cache": Outcome(not self.num_tokens, "said so"),
                    "internal_state": STATE,
                    "check_health": HealthCheckReply(self.busy),
                }[message.name]
                self.outbox.send(answered(message.id, reply))

    def add(self, request):
        assert request.rid not in self.num_tokens
        self.requests[request.rid] = request
        self.order.append(request.rid)
        self.num_tokens[request.rid] = -1

    def row(self, rid, text="", finish=None, ids=None, **more):
        request = self.requests[rid]
        ids = list(text.encode()) if ids is None else ids
        first = self.num_tokens[rid] < 0
        self.num_tokens[rid] = max(0, self.num_tokens[rid]) + len(ids)
        s = request.task.params
        options = DecodeOptions(
            s.skip_special_tokens, s.spaces_between_special_tokens, s.no_stop_trim, s.stop, s.stop_regex
        )
        stats = SampleStats(request.content.num_tokens, 0, queue_time_s=0.25)
        row = TokenIDOut(
            rid,
            pack_int32(ids),
            self.num_tokens[rid],
            finish,
            options if first else None,
            more.pop("stats", stats) if first or finish else None,
            **more,
        )
        if finish is not None:
            del self.num_tokens[rid]
        return row

    def emit(self, rid, text="", finish=None, ids=None, **more):
        """One output of one sample."""
        self.send(self.row(rid, text, finish, ids, **more))

    def send(self, *rows):
        if begun := tuple(row.rid for row in rows if row.options is not None):
            self.outbox.send(SamplesMoved(begun, (), self.source))
        out = self.detokenizer.handle(BatchTokenIDOut(rows, self.source))
        self.outbox.send(out)

    async def until(self, condition):
        """Handle messages until `condition` holds."""
        async with asyncio.timeout(20):
            self.pump()
            while not condition():
                self.handle(await self.next_message())

    async def next_message(self):
        """The next message; it stays in the inbox if the wait is cancelled."""
        while (message := self.inbox.recv_nowait()) is None:  # noqa: ASYNC110, the test looks into the inbox too
            await asyncio.sleep(0.001)
        return message

    async def echo(self):
        """Answer every request with its prompt, one byte a step, within its limits, until cancelled."""
        while True:
            self.handle(await self.next_message())
            for rid in list(self.num_tokens):
                ids = self.requests[rid].content.ids()[: self.requests[rid].task.params.max_new_tokens]
                for token_id in ids:
                    self.emit(rid, ids=[token_id])
                self.emit(rid, finish=FinishReason("length", length=len(ids)))


class Frontend:
    """A TokenizerManager on a FakeEngine, within one event loop."""

    def __init__(self, defaults=None, ready=READY, clock=None, **options):
        self.channels = LocalChannels()
        self.tokenizer = ByteTokenizer()
        self.engine = FakeEngine(self.channels, self.tokenizer)
        self.args = ServerArgs(model_path="fake", **options)
        more = {} if clock is None else {"clock": clock}
        self.manager = TokenizerManager(
            self.args,
            msgspec.structs.replace(ready, speculative_algorithm=self.args.speculative_algorithm),
            self.tokenizer,
            self.channels.sender("to_scheduler"),
            self.channels.receiver("to_tokenizer"),
            defaults=defaults,
            to_detokenizer=self.channels.sender("to_detokenizer"),
            **more,
        )

    def start(self, text=None, **fields):
        """A call in a task; its answers as a list, which is shared while it grows."""
        answers = []

        async def collect():
            async with contextlib.aclosing(answers_of(self.manager, request(text, **fields))) as given:
                async for answer in given:
                    answers.append(answer)
            return answers

        task = asyncio.create_task(collect())
        task.answers = answers
        return task

    async def call(self, text=None, **fields):
        """Run a call against the echo and give its answers."""
        echo = asyncio.create_task(self.engine.echo())
        try:
            async with asyncio.timeout(20):
                return await self.start(text, **fields)
        finally:
            echo.cancel()
            await asyncio.gather(echo, return_exceptions=True)

    @property
    def is_clean(self):
        """Nothing is left of any call."""
        table = self.manager.table
        return table.is_empty and not (table.queue.num_queued or table.queue.num_running)


async def answers_of(manager, asked, **options):
    """The native answers of a call: one, or with `stream` as they come. options: of `generate_request`."""
    stream = NativeStream(manager.args.incremental_streaming_output)
    async with contextlib.aclosing(manager.generate_request(asked, **options)) as updates:
        if not asked.stream:
            yield whole_answer([update async for update in updates])
            return
        async for update in updates:
            yield stream.answer(update)


def request(text=None, **fields):
    given = {"text": text, **fields}
    return msgspec.convert({k: v for k, v in given.items() if v is not None}, GenerateReqInput)


async def turns(count=20):
    """Let the other tasks run."""
    for _ in range(count):
        await asyncio.sleep(0)
