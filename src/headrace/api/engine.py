"""The runtime without HTTP: `Engine("smollm2").generate("...")`.

Owns the running engine, and the event loop of its TokenizerManager (`EngineCalls`). Does not know how the engine is
put together: the composition root does. Its methods may be called from any thread, and the async ones from any event loop.
"""

import asyncio
import atexit
import threading
from collections.abc import AsyncGenerator, Callable, Coroutine, Generator, Iterable, Mapping, Sequence
from contextlib import aclosing, closing
from typing import TYPE_CHECKING, Any, Literal, Self, TypeVar, Unpack, overload

from headrace.api.arguments import (
    PooledInputs,
    TokenIds,
    chat_fields,
    encode_request,
    generate_request,
    rerank_fields,
    score_fields,
    scores_of,
)
from headrace.api.chat_reply import ChatDelta, ChatReply
from headrace.api.engine_calls import EngineCalls
from headrace.api.methods import Methods, Route, ScoreOptions
from headrace.api.native_client import NativeClient
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
    takes,
)
from headrace.config.server_args import ServerArgs
from headrace.errors import CapacityError, ExecutionError, RequestError
from headrace.frontend.inputs import check_token_ids
from headrace.frontend.native_answer import NativeAnswer, NativeStream, pooled_answers, whole_answer
from headrace.frontend.prompts import refuse_text
from headrace.frontend.rooms import chosen_room, handed_on
from headrace.frontend.sample_update import SampleUpdate
from headrace.frontend.server_info import describe_server
from headrace.frontend.weight_control import tensor_file
from headrace.launch import RunningEngine, launch_engine
from headrace.messages.weights import UpdateFromTensors, WeightOpReply
from headrace.processes.handshake import loading_bar
from headrace.text.tokenizers import Tokenizer

if TYPE_CHECKING:
    from headrace.api.engine_chat import EngineChat
    from headrace.frontend.tokenizer_manager import TokenizerManager

T = TypeVar("T")


class Engine(Methods):
    """A loaded model. A context manager; `shutdown` is also called at exit. What a `Runtime` does as well: `Methods`.

    model: same as the option `model_path`. options: those of `headrace serve`, listed at `__init__`, also as SGLang and vLLM call them. Raises
    ConfigError or ModelError if the engine cannot start.
    """

    @takes(EngineOptions)
    def __init__(self, model: str | None = None, /, **options: Unpack[EngineOptions]) -> None:  # type: ignore[misc]
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
        request = chosen_room(request, self._manager.args)
        updates = self._manager.generate_request(request)
        return self._iterate(updates) if stream else whole_answer(self._calls.result(_all(updates)), handed_on(request))

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
        request = chosen_room(request, self._manager.args)
        updates = self._manager.generate_request(request)
        if stream:
            return self._aiterate(updates)
        return whole_answer(await self._calls.aresult(_all(updates)), handed_on(request))

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
        return self._calls.each(chats.stream(fields)) if stream else self._calls.result(chats.whole(fields))

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
        return await self._calls.aresult(chats.whole(fields))

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
        return self._running.files.tokenizer

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
        request = encode_request(prompt, input_ids, {**others})
        return pooled_answers(self._calls.result(self._chats().encoded(request)))

    async def async_encode(
        self,
        prompt: PooledInputs | None = None,
        input_ids: TokenIds | None = None,
        **others: Unpack[EncodeOptions],
    ) -> Any:
        """Like `encode`, awaited in any event loop."""
        request = encode_request(prompt, input_ids, {**others})
        return pooled_answers(await self._calls.aresult(self._chats().encoded(request)))

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
        found: list[dict[str, Any]] = (await self._ascored("/v1/rerank", fields))["results"]
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
        return scores_of(await self._ascored("/v1/score", fields))

    def _scored(self, route: Route, fields: dict[str, Any]) -> dict[str, Any]:
        return self._calls.result(self._chats().scored(route, fields))

    async def _ascored(self, route: Route, fields: dict[str, Any]) -> dict[str, Any]:
        return await self._calls.aresult(self._chats().scored(route, fields))

    # -- control

    def _call(self, here: "Callable[[TokenizerManager], T]", over_http: Callable[[NativeClient], T]) -> T:
        return self._calls.call(lambda: here(self._manager))

    def _wait(
        self, here: "Callable[[TokenizerManager], Coroutine[Any, Any, T]]", over_http: Callable[[NativeClient], T]
    ) -> T:
        return self._calls.result(here(self._manager))

    def _update_from_tensors(
        self,
        parts: Iterable[bytes | memoryview],
        abort_all_requests: bool,
        weight_version: str | None,
        bucketed: bool = False,
    ) -> WeightOpReply:
        with tensor_file(parts) as path:
            update = UpdateFromTensors(path, abort_all_requests, weight_version, bucketed)
            return self._calls.result(self._manager.weights.operate(update))

    def flush_cache(self, timeout_s: float = 0.0) -> bool:
        """Empty the prefix cache, waiting at most `timeout_s` seconds for requests to end. False if some still run."""
        return self._calls.result(self._manager.control.flush_cache(timeout_s)).success

    def get_model_info(self) -> dict[str, Any]:
        """The served model: name, type, sizes."""
        args, ready = self._manager.args, self._running.ready
        return {
            "model_path": self._calls.call(lambda: self._manager.weights.model_path) or args.model_path,
            "served_model_name": args.served_name,
            "model_class": ready.model_class,
            "is_generation": self._running.files.pooling is None,
            "context_length": ready.context_length,
            "vocab_size": ready.vocab_size,
            "hidden_size": ready.hidden_size,
            "dtype": ready.dtype,
            "weight_version": self._calls.call(lambda: self._manager.weights.version),
        }

    def get_server_info(self) -> dict[str, Any]:
        """Options (keys masked), facts about the model, and the state of each replica; see `describe_server`."""
        manager = self._manager
        states = self._calls.result(manager.control.internal_states())
        info = describe_server(manager.args, self._running.ready, manager.adapters.names, states)
        model = self.get_model_info()
        now = {name: model[name] for name in ("model_path", "weight_version")}
        return info | now | self._calls.result(manager.settings.changed_options())

    def health(self, generate: bool = False) -> bool:
        """Whether the engine is alive; with `generate`, whether it generates a token."""
        try:
            return self._calls.result(self._manager.health(generate))
        except CapacityError:
            return False

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
