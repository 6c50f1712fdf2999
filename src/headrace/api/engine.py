"""The runtime without HTTP: `Engine("smollm2").generate("...")`.

Owns the running engine, and the event loop of its TokenizerManager (`EngineCalls`). Does not know how the engine is
put together: the composition root does. Its methods may be called from any thread, and the async ones from any event loop.
"""

import asyncio
import atexit
import threading
from collections.abc import AsyncGenerator, Coroutine, Generator, Iterable, Mapping, Sequence
from contextlib import aclosing, closing
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar, Unpack, overload

import msgspec

from headrace.api.chat_reply import ChatDelta, ChatReply, chat_fields
from headrace.api.engine_calls import EngineCalls
from headrace.api.generate_request import PooledInputs, TokenIds, encode_request, generate_request
from headrace.api.operations import Operations
from headrace.api.options import (
    ChatOptions,
    EncodeOptions,
    EngineOptions,
    GenerateOptions,
    Messages,
    Sampling,
    SamplingOptions,
    Tools,
    option_values,
    options_text,
)
from headrace.api.scores import Route, ScoreOptions, Scores, rerank_fields, score_fields, scores_of
from headrace.api.weight_operations import WeightOperations
from headrace.config.server_args import ServerArgs
from headrace.errors import ExecutionError, RequestError
from headrace.frontend.inputs import check_token_ids
from headrace.frontend.native_answer import NativeAnswer, NativeStream, pooled_answers, whole_answer
from headrace.frontend.prompts import refuse_text
from headrace.frontend.runtime_settings import LimitChanges, LogLevel
from headrace.frontend.sample_update import SampleUpdate
from headrace.frontend.server_info import describe_load, describe_server
from headrace.frontend.tenants import Caller
from headrace.frontend.weight_control import TensorFile
from headrace.launch import RunningEngine, launch_engine
from headrace.messages.control import InternalState
from headrace.messages.field_errors import field_error
from headrace.messages.operations import Operation
from headrace.messages.requests import EmbeddingReqInput
from headrace.messages.weights import UpdateFromTensors, WeightOperation, WeightOpReply
from headrace.metrics.export import render
from headrace.processes.loading_bar import loading_bar
from headrace.text.tokenizers import Tokenizer

if TYPE_CHECKING:
    from headrace.api.engine_chat import EngineChat

T = TypeVar("T")


class Engine(Operations, WeightOperations, Scores):
    """A loaded model. A context manager; `shutdown` is also called at exit. Profiles and caches: `Operations`; weights, pausing and memory:
    `WeightOperations`; `rerank` and `score`: `Scores`.

    model: same as the option `model_path`. options: those of `headrace serve`, listed at `__init__`, also as SGLang and vLLM call them. Raises
    ConfigError or ModelError if the engine cannot start.
    """

    def __init__(self, model: str | None = None, /, **options: Unpack[EngineOptions]) -> None:
        with loading_bar() as on_progress:
            running = launch_engine(ServerArgs(**option_values(model, options)), on_progress)
        self._start(running)

    __init__.__doc__ = f"Load a model. Options:\n\n{options_text()}"

    @classmethod
    def over(cls, running: RunningEngine) -> Self:
        """An Engine for an engine that has already been started. Its TokenizerManager must not have been used in an event loop yet."""
        engine = cls.__new__(cls)
        engine._start(running)
        return engine

    def _start(self, running: RunningEngine) -> None:
        self._running = running
        self._manager = running.tokenizer_manager
        self._calls = EngineCalls()
        self._loop = self._calls.loop
        self._chat: EngineChat | None = None
        self._shutdown_lock = threading.Lock()
        atexit.register(self.shutdown)

    # -- generation

    @overload
    def generate(
        self,
        prompt: str | list[str] | None = None,
        sampling_params: Sampling | Sequence[Sampling] | None = None,
        input_ids: TokenIds | None = None,
        *,
        stream: Literal[True],
        **others: Unpack[GenerateOptions],
    ) -> Generator[NativeAnswer, None, None]: ...

    @overload
    def generate(
        self,
        prompt: str,
        sampling_params: SamplingOptions | None = None,
        input_ids: None = None,
        stream: Literal[False] = False,
        **others: Unpack[GenerateOptions],
    ) -> NativeAnswer: ...

    @overload
    def generate(
        self,
        prompt: list[str],
        sampling_params: Sampling | Sequence[Sampling] | None = None,
        input_ids: None = None,
        stream: Literal[False] = False,
        **others: Unpack[GenerateOptions],
    ) -> list[NativeAnswer]: ...

    @overload
    def generate(
        self,
        prompt: str | list[str] | None = None,
        sampling_params: Sampling | Sequence[Sampling] | None = None,
        input_ids: TokenIds | None = None,
        stream: bool = False,
        **others: Unpack[GenerateOptions],
    ) -> Any: ...

    def generate(
        self,
        prompt: str | list[str] | None = None,
        sampling_params: Sampling | Sequence[Sampling] | None = None,
        input_ids: TokenIds | None = None,
        stream: bool = False,
        **others: Unpack[GenerateOptions],
    ) -> Any:
        """Continue one prompt (returns a dict) or several (a list of dicts, also for n > 1); with `stream` an iterator of dicts.

        sampling_params: a dict, a SamplingParams, or a list of them, one per prompt; `json_schema`, `regex` ... constrain the output.
        others: the other fields of `GenerateReqInput`.
        Closing the iterator early aborts the rest. Raises RequestError, CapacityError, ExecutionError.
        """
        request = generate_request(prompt, sampling_params, input_ids, stream, {**others})
        updates = self._manager.generate_request(request)
        return self._iterate(updates) if stream else whole_answer(self._calls.wait(self._calls.submit(_all(updates))))

    @overload
    async def async_generate(
        self,
        prompt: str | list[str] | None = None,
        sampling_params: Sampling | Sequence[Sampling] | None = None,
        input_ids: TokenIds | None = None,
        *,
        stream: Literal[True],
        **others: Unpack[GenerateOptions],
    ) -> AsyncGenerator[NativeAnswer, None]: ...

    @overload
    async def async_generate(
        self,
        prompt: str,
        sampling_params: SamplingOptions | None = None,
        input_ids: None = None,
        stream: Literal[False] = False,
        **others: Unpack[GenerateOptions],
    ) -> NativeAnswer: ...

    @overload
    async def async_generate(
        self,
        prompt: list[str],
        sampling_params: Sampling | Sequence[Sampling] | None = None,
        input_ids: None = None,
        stream: Literal[False] = False,
        **others: Unpack[GenerateOptions],
    ) -> list[NativeAnswer]: ...

    @overload
    async def async_generate(
        self,
        prompt: str | list[str] | None = None,
        sampling_params: Sampling | Sequence[Sampling] | None = None,
        input_ids: TokenIds | None = None,
        stream: bool = False,
        **others: Unpack[GenerateOptions],
    ) -> Any: ...

    async def async_generate(
        self,
        prompt: str | list[str] | None = None,
        sampling_params: Sampling | Sequence[Sampling] | None = None,
        input_ids: TokenIds | None = None,
        stream: bool = False,
        **others: Unpack[GenerateOptions],
    ) -> Any:
        """Like `generate`, awaited in any event loop; with `stream` the result is an async iterator."""
        request = generate_request(prompt, sampling_params, input_ids, stream, {**others})
        updates = self._manager.generate_request(request)
        if stream:
            return self._aiterate(updates)
        return whole_answer(await asyncio.wrap_future(self._calls.submit(_all(updates))))

    # -- chat

    @overload
    def chat(
        self,
        messages: Messages,
        *,
        tools: Tools | None = None,
        stream: Literal[False] = False,
        **options: Unpack[ChatOptions],
    ) -> ChatReply: ...

    @overload
    def chat(
        self,
        messages: Messages,
        *,
        tools: Tools | None = None,
        stream: Literal[True],
        **options: Unpack[ChatOptions],
    ) -> Generator[ChatDelta, None, None]: ...

    def chat(
        self, messages: Messages, *, tools: Tools | None = None, stream: bool = False, **options: Unpack[ChatOptions]
    ) -> ChatReply | Generator[ChatDelta, None, None]:
        """Answer a conversation, through the model's chat template; with `stream` an iterator of what is new.

        messages, tools, options: as in a chat completion, whose other fields are accepted too. Without a limit the reply may fill the
        context, of the models with names it ends at 1,024 tokens (`default_max_tokens`).
        Closing the iterator early stops the reply. Raises RequestError, CapacityError, ExecutionError.
        """
        fields = chat_fields(messages, tools, stream, options)
        chats = self._chats()
        return (
            self._calls.each(chats.stream(fields))
            if stream
            else self._calls.wait(self._calls.submit(chats.whole(fields)))
        )

    @overload
    async def async_chat(
        self,
        messages: Messages,
        *,
        tools: Tools | None = None,
        stream: Literal[False] = False,
        **options: Unpack[ChatOptions],
    ) -> ChatReply: ...

    @overload
    async def async_chat(
        self,
        messages: Messages,
        *,
        tools: Tools | None = None,
        stream: Literal[True],
        **options: Unpack[ChatOptions],
    ) -> AsyncGenerator[ChatDelta, None]: ...

    async def async_chat(
        self, messages: Messages, *, tools: Tools | None = None, stream: bool = False, **options: Unpack[ChatOptions]
    ) -> ChatReply | AsyncGenerator[ChatDelta, None]:
        """Like `chat`, awaited in any event loop; with `stream` the result is an async iterator."""
        fields = chat_fields(messages, tools, stream, options)
        chats = self._chats()
        if stream:
            return self._calls.aeach(chats.stream(fields))
        return await asyncio.wrap_future(self._calls.submit(chats.whole(fields)))

    def _chats(self) -> "EngineChat":
        with self._shutdown_lock:
            if self._calls.is_closed:
                raise ExecutionError("the engine has been shut down")
            if self._chat is None:
                # Chat templates and HTTP types take a second to import, which only chats need.
                from headrace.api.engine_chat import EngineChat

                self._chat = EngineChat.over(self._running)
            return self._chat

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises RequestError if the engine has none."""
        if self._manager.args.skip_tokenizer_init:
            refuse_text("tokenizer")
        return self._running.tokenizer

    def encode(
        self,
        prompt: PooledInputs | None = None,
        input_ids: TokenIds | None = None,
        **others: Unpack[EncodeOptions],
    ) -> Any:
        """Make a vector of a text, of a pair of texts, or of token ids: the embedding, or the numbers (logits) of a model that classifies.

        Returns a dict {"embedding": [...], "meta_info": {...}}, or a list of them for a list of inputs. others: the other fields of
        `EmbeddingReqInput`. Raises RequestError, CapacityError, ExecutionError.
        """
        return pooled_answers(
            self._calls.wait(self._calls.submit(self._encoded(encode_request(prompt, input_ids, {**others}))))
        )

    async def async_encode(
        self,
        prompt: PooledInputs | None = None,
        input_ids: TokenIds | None = None,
        **others: Unpack[EncodeOptions],
    ) -> Any:
        """Like `encode`, awaited in any event loop."""
        request = encode_request(prompt, input_ids, {**others})
        return pooled_answers(await asyncio.wrap_future(self._calls.submit(self._encoded(request))))

    def _encoded(self, request: EmbeddingReqInput) -> Coroutine[Any, Any, list[SampleUpdate]]:
        return self._chats().encoded(request)

    async def async_rerank(
        self,
        query: str,
        documents: Sequence[str | Mapping[str, Any]],
        top_n: int | None = None,
        return_documents: bool = False,
        **options: Unpack[ScoreOptions],
    ) -> list[dict[str, Any]]:
        """Like `rerank`, awaited in any event loop."""
        fields = rerank_fields(query, documents, top_n, return_documents, {**options})
        found: list[dict[str, Any]] = (await self._soon_scored("/v1/rerank", fields))["results"]
        return found

    async def async_score(
        self,
        query: str | list[int],
        items: str | Sequence[str] | Sequence[list[int]],
        label_token_ids: list[int] | None = None,
        apply_softmax: bool = False,
        item_first: bool = False,
        **options: Unpack[ScoreOptions],
    ) -> Any:
        """Like `score`, awaited in any event loop."""
        fields = score_fields(query, items, label_token_ids, apply_softmax, item_first, {**options})
        return scores_of(await self._soon_scored("/v1/score", fields))

    def _scored(self, route: Route, fields: dict[str, Any]) -> dict[str, Any]:
        return self._calls.wait(self._calls.submit(self._chats().scored(route, fields)))

    async def _soon_scored(self, route: Route, fields: dict[str, Any]) -> dict[str, Any]:
        return await asyncio.wrap_future(self._calls.submit(self._chats().scored(route, fields)))

    # -- control

    def abort_request(self, rid: str = "", abort_all: bool = False) -> None:
        """Abort the samples of `rid`, or all. Unknown rids are ignored."""
        self._calls.call(lambda: self._manager.abort_request(rid, abort_all))

    def open_session(
        self, capacity_of_str_len: int = 0, session_id: str | None = None, timeout_s: float | None = None
    ) -> str:
        """Open a session and return its id, for the `session_params` of `generate`. Raises RequestError, CapacityError."""
        return self._calls.call(lambda: self._manager.open_session(capacity_of_str_len, session_id, timeout_s))

    def close_session(self, session_id: str) -> None:
        """Close a session. Its running requests continue. Raises NotFoundError."""
        self._calls.call(lambda: self._manager.close_session(session_id))

    def load_lora_adapter(self, lora_name: str, lora_path: str, pinned: bool = False) -> None:
        """Load an adapter in peft's format; `generate(..., lora_path=lora_name)` uses it. Raises RequestError, CapacityError."""
        self._calls.wait(self._calls.submit(self._manager.adapters.load(lora_name, lora_path, pinned)))

    def unload_lora_adapter(self, lora_name: str) -> None:
        """Unload an adapter, once the requests that use it have ended. Raises NotFoundError."""
        self._calls.wait(self._calls.submit(self._manager.adapters.unload(lora_name)))

    def lora_adapters(self) -> list[str]:
        """Names of all adapters."""
        return self._calls.call(lambda: self._manager.adapters.names)

    def flush_cache(self, timeout_s: float = 0.0) -> bool:
        """Empty the prefix cache, waiting at most `timeout_s` seconds for requests to end. False if some still run."""
        return self._calls.wait(self._calls.submit(self._manager.control.flush_cache(timeout_s))).success

    def internal_state(self) -> InternalState:
        """Counters and pool accounting of the scheduler."""
        return self._calls.wait(self._calls.submit(self._manager.control.internal_state()))

    def get_loads(self) -> list[dict[str, Any]]:
        """Load of each replica: requests, tokens, throughput."""
        return [
            describe_load(state)
            for state in self._calls.wait(self._calls.submit(self._manager.control.internal_states()))
        ]

    def get_model_info(self) -> dict[str, Any]:
        """The served model: name, type, sizes."""
        args, ready = self._manager.args, self._running.ready
        return {
            "model_path": self._calls.call(lambda: self._manager.weights.model_path) or args.model_path,
            "served_model_name": args.served_name,
            "model_class": ready.model_class,
            "is_generation": self._running.pooling is None,
            "context_length": ready.context_length,
            "vocab_size": ready.vocab_size,
            "hidden_size": ready.hidden_size,
            "dtype": ready.dtype,
            "weight_version": self._calls.call(lambda: self._manager.weights.version),
        }

    def get_server_info(self) -> dict[str, Any]:
        """Options (keys masked), facts about the model, and the state of each replica; see `describe_server`."""
        manager = self._manager
        states = self._calls.wait(self._calls.submit(manager.control.internal_states()))
        info = describe_server(manager.args, self._running.ready, manager.adapters.names, states)
        model = self.get_model_info()
        now = {name: model[name] for name in ("model_path", "weight_version")}
        return info | now | manager.settings.changed_options()

    def health(self, generate: bool = False) -> bool:
        """Whether the engine is alive; with `generate`, whether it generates a token."""
        return self._calls.wait(self._calls.submit(self._manager.health(generate)))

    def metrics(self) -> str:
        """The text of /metrics."""
        return self._calls.call(lambda: render(self._manager.metrics, self._manager.args.metrics_compat)).decode()

    def tokenize(self, prompt: str | list[str], add_special_tokens: bool = True) -> list[int] | list[list[int]]:
        """Token ids of a text, or of each of several."""
        texts = [prompt] if isinstance(prompt, str) else prompt
        rows = self._manager.tokenizer.encode_batch(texts, add_special_tokens, True) if texts else []
        return rows[0] if isinstance(prompt, str) else rows

    def detokenize(self, tokens: list[int] | list[list[int]], skip_special_tokens: bool = True) -> str | list[str]:
        """The text of token ids, or of each of several lists of them. Raises RequestError."""
        if self._manager.args.skip_tokenizer_init:
            refuse_text("tokens")
        rows, is_list = _token_rows(tokens)
        for ids in rows:
            check_token_ids("tokens", ids, self._manager.ready.vocab_size)
        texts = [self._manager.tokenizer.decode(ids, skip_special_tokens) for ids in rows]
        return texts if is_list else texts[0]

    def explain_request(self, rid: str) -> list[dict[str, Any]]:
        """Timelines of the samples of a recent request. Raises NotFoundError."""
        return self._calls.call(lambda: self._manager.records.timelines(rid, Caller(is_admin=True)))

    def latest_requests(self, limit: int = 100) -> list[dict[str, Any]]:
        """Live samples and those that ended last, at most `limit`, without their events and their text."""
        return self._calls.call(lambda: self._manager.records.latest(limit, Caller(is_admin=True)))

    def dump_requests(self) -> str:
        """Write a dump of the most recent requests to `dump_requests_dir` and return the file's name. Raises RequestError, ExecutionError."""
        return self._calls.wait(self._calls.submit(self._manager.records.dump()))[0]

    def start_expert_distribution_record(self) -> None:
        """Start counting the tokens that each layer of a mixture sends to each expert. Raises RequestError."""
        self._calls.wait(self._calls.submit(self._manager.experts.start()))

    def stop_expert_distribution_record(self) -> None:
        """Stop counting; the counts can still be dumped. Raises RequestError."""
        self._calls.wait(self._calls.submit(self._manager.experts.stop()))

    def dump_expert_distribution_record(self) -> dict[str, Any]:
        """Return the reply of the route, with the tokens per expert under `layers`, and reset the counts. Raises RequestError."""
        return self._calls.wait(self._calls.submit(self._manager.experts.dump()))

    def configure_logging(
        self, level: LogLevel | None = None, log_requests: bool | None = None, log_requests_level: int | None = None
    ) -> dict[str, Any]:
        """Change what is logged, in every process; None = unchanged. Returns the current settings. Raises RequestError."""
        return self._calls.call(
            lambda: self._manager.settings.configure_logging(level, log_requests, log_requests_level)
        )

    def freeze_gc(self) -> None:
        """Exclude all objects that exist now from garbage collection, in every process."""
        self._calls.call(self._manager.settings.freeze_gc)

    def set_internal_state(self, **limits: float) -> dict[str, Any]:
        """Change limits (fields of `LimitChanges`) in every replica. Returns the current limits. Raises RequestError."""
        try:
            changes = msgspec.convert(limits, LimitChanges)
        except msgspec.ValidationError as error:
            raise field_error(str(error), LimitChanges) from None
        return msgspec.structs.asdict(self._calls.call(lambda: self._manager.settings.change_limits(changes)))

    def _ask(self, operation: Operation[Any, Any], request: msgspec.Struct) -> Any:
        replies = self._calls.wait(self._calls.submit(operation.ask(self._manager.control, request)))
        return msgspec.to_builtins(operation.combine(replies))

    def _operate(self, operation: WeightOperation) -> WeightOpReply:
        return self._calls.wait(self._calls.submit(self._manager.weights.operate(operation)))

    def _update_from_tensors(
        self,
        parts: Iterable[bytes | memoryview],
        abort_all_requests: bool,
        weight_version: str | None,
        bucketed: bool = False,
    ) -> WeightOpReply:
        with TensorFile() as file:
            file.write(parts)
            return self._operate(UpdateFromTensors(file.path, abort_all_requests, weight_version, bucketed))

    # -- the end

    def shutdown(self) -> None:
        """Abort running requests and stop the engine. Idempotent; from any thread except the engine's own. Does nothing in the child of a fork."""
        if self._calls.is_forked:
            return
        with self._shutdown_lock:
            if self._calls.is_closed:
                return
            self._calls.is_closed = True
            atexit.unregister(self.shutdown)
            self._calls.end(self._close())
            if self._chat is not None:
                self._chat.close()
            self._running.shutdown()
            self._calls.stop()

    def __repr__(self) -> str:
        if self._calls.is_closed:
            return f"<Engine {self._manager.args.served_name}, shut down>"
        ready = self._manager.ready
        facts = f"{ready.model_class}, {ready.dtype} on {ready.device}, context of {ready.context_length} tokens"
        return f"<Engine {self._manager.args.served_name}: {facts}>"

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.shutdown()

    async def _close(self) -> None:
        await self._manager.close()
        # Waiting calls end with their error before the loop stops.
        others = asyncio.all_tasks() - {asyncio.current_task()}
        if others:
            await asyncio.wait(others, timeout=1.0)
        await self._loop.shutdown_asyncgens()

    def _iterate(self, updates: AsyncGenerator[SampleUpdate, None]) -> Generator[NativeAnswer, None, None]:
        answers = self._native_stream()
        with closing(self._calls.each(updates)) as each:
            for update in each:
                yield answers.answer(update)

    async def _aiterate(self, updates: AsyncGenerator[SampleUpdate, None]) -> AsyncGenerator[NativeAnswer, None]:
        answers = self._native_stream()
        async with aclosing(self._calls.aeach(updates)) as each:
            async for update in each:
                yield answers.answer(update)

    def _native_stream(self) -> NativeStream:
        return NativeStream(self._manager.args.incremental_streaming_output)


def _token_rows(tokens: list[int] | list[list[int]]) -> tuple[list[list[int]], bool]:
    """Lists of ids, and whether the input was a list of lists. Raises RequestError if both kinds are mixed."""
    rows = [item for item in tokens if isinstance(item, list)]
    if not rows:
        return [[item for item in tokens if not isinstance(item, list)]], False
    if len(rows) != len(tokens):
        raise RequestError("tokens mixes ids and lists of ids", "tokens")
    return rows, True


async def _all(updates: AsyncGenerator[SampleUpdate, None]) -> list[SampleUpdate]:
    async with aclosing(updates):
        return [update async for update in updates]
