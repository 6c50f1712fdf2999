"""The Engine: the same answers from any thread and any loop, streams that can be left, an end that ends everything."""

import asyncio
import contextlib
import threading
from types import SimpleNamespace

import numpy as np
import pytest
from frontend_fakes import READY, ByteTokenizer, FakeEngine

from headrace.api.engine import Engine
from headrace.config.server_args import ServerArgs
from headrace.errors import ConfigError, ExecutionError, RequestError
from headrace.frontend.tokenizer_manager import TokenizerManager
from headrace.messages.channel import LocalChannels
from headrace.messages.control import ShutdownReq
from headrace.messages.outputs import FinishReason


class RunningFake:
    """An echo scheduler in a thread. `held` rids get their first byte only."""

    files = SimpleNamespace(pooling=None)

    def __init__(self):
        channels = LocalChannels()
        tokenizer = ByteTokenizer()
        self.ready = READY
        self.engine = FakeEngine(channels, tokenizer)
        self.tokenizer_manager = TokenizerManager(
            ServerArgs(model_path="fake", api_key="open-sesame"),
            READY,
            tokenizer,
            channels.sender("to_scheduler"),
            channels.receiver("to_tokenizer"),
        )
        self.num_shutdowns = 0
        self.received = threading.Event()
        self.aborted = threading.Event()
        self._sender = channels.sender("to_scheduler")
        self._thread = threading.Thread(target=self._run)
        self._thread.start()

    def shutdown(self):
        self.num_shutdowns += 1
        self._sender.send(ShutdownReq())
        self._thread.join()

    def _run(self):
        engine = self.engine
        while not isinstance(message := engine.inbox.recv(30), ShutdownReq):
            engine.handle(message)
            if engine.requests:
                self.received.set()
            if engine.aborts:
                self.aborted.set()
            for rid in list(engine.num_tokens):
                ids = engine.requests[rid].content.ids()
                if "held" in rid:
                    if engine.num_tokens[rid] < 0:
                        engine.emit(rid, ids=ids[:1])
                    continue
                for token_id in ids:
                    engine.emit(rid, ids=[token_id])
                engine.emit(rid, finish=FinishReason("length", length=len(ids)))


@pytest.fixture
def running():
    return RunningFake()


@pytest.fixture
def engine(running):
    with Engine.over(running) as engine:
        yield engine


def test_one_prompt_several_prompts_and_several_samples(engine):
    assert engine.generate("hello")["text"] == "hello"
    assert [a["text"] for a in engine.generate(["a", "b"])] == ["a", "b"]
    assert [a["text"] for a in engine.generate("a", {"n": 2})] == ["a", "a"]
    assert engine.generate(input_ids=[104, 105])["text"] == "hi"
    assert engine.generate(text="by its other name")["text"] == "by its other name"


class Tensor:
    """As arrays and tensors: ids that come out of `tolist`."""

    def __init__(self, *ids):
        self._ids = ids

    def tolist(self):
        return list(self._ids)


@pytest.mark.parametrize("ids", [(104, 105), Tensor(104, 105), np.array([104, 105]), [np.int64(104), 105]])
def test_token_ids_may_be_any_sequence_or_array(engine, ids):
    assert engine.generate(input_ids=ids)["text"] == "hi"


@pytest.mark.parametrize("ids", [([104], (105,)), [Tensor(104), np.array([105])], np.array([[104], [105]])])
def test_several_prompts_of_token_ids_may_be_sequences_and_arrays(engine, ids):
    assert [answer["text"] for answer in engine.generate(input_ids=ids)] == ["h", "i"]


@pytest.mark.parametrize("ids", ["hi", {104}, 104, np.array(104)])
def test_what_is_no_sequence_of_token_ids_is_said(engine, ids):
    with pytest.raises(RequestError, match="input_ids must be a list") as caught:
        engine.generate(input_ids=ids)
    assert caught.value.param == "input_ids"


def test_a_stream_ends_with_the_same_answer(engine):
    chunks = list(engine.generate("hello", stream=True))

    assert chunks[-1]["text"] == "hello"
    assert chunks[-1]["meta_info"]["finish_reason"] is not None
    assert all(c["meta_info"]["finish_reason"] is None for c in chunks[:-1])


def test_wrong_types_and_unknown_fields_are_bad_requests(engine):
    for fields in ({"prompt": 5}, {"prompt": "a", "nonsense": 1}, {"prompt": "a", "sampling_params": {"n": "2"}}):
        with pytest.raises(RequestError):
            engine.generate(**fields)


def test_leaving_a_stream_aborts_it(engine, running):
    with contextlib.closing(engine.generate("hello", stream=True, rid="held")) as chunks:
        next(chunks)

    assert running.aborted.wait(20)


async def test_it_works_within_a_running_event_loop(engine):
    one, many = await asyncio.gather(engine.async_generate("one"), engine.async_generate(["a", "b"]))
    stream = await engine.async_generate("hello", stream=True)
    chunks = [chunk async for chunk in stream]

    assert one["text"] == "one"
    assert len(many) == 2
    assert chunks[-1]["text"] == "hello"


async def test_cancelling_an_awaited_call_aborts_it(engine, running):
    task = asyncio.create_task(engine.async_generate("hello", rid="held"))
    assert await asyncio.to_thread(running.received.wait, 20)
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task

    assert await asyncio.to_thread(running.aborted.wait, 20)


async def test_closing_an_async_stream_aborts_it(engine, running):
    stream = await engine.async_generate("hello", stream=True, rid="held")
    await anext(stream)
    await stream.aclose()

    assert await asyncio.to_thread(running.aborted.wait, 20)


def test_threads_share_an_engine(engine):
    answers = {}

    def ask(text):
        answers[text] = engine.generate(text)["text"]

    threads = [threading.Thread(target=ask, args=(f"text {i}",)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()

    assert answers == {f"text {i}": f"text {i}" for i in range(8)}


def test_control_operations(engine):
    engine.abort_request("nobody")
    assert engine.flush_cache()
    assert engine.health()
    info = engine.get_server_info()
    assert info["context_length"] == READY.context_length
    assert info["internal_states"][0]["num_retracted"] == 3
    assert "open-sesame" not in str(info)


def test_what_a_server_does_by_routes_an_engine_does_by_methods(engine, monkeypatch):
    frozen = []
    monkeypatch.setattr("headrace.frontend.runtime_settings.freeze", lambda: len(frozen) or frozen.append(1) or 1)
    engine.generate("hello", rid="r")

    assert engine.get_model_info()["context_length"] == READY.context_length
    assert engine.get_loads()[0]["max_total_tokens"] == 4096
    assert "headrace:requests_total" in engine.metrics()
    assert engine.tokenize("ab") == [97, 98]
    assert engine.tokenize(["a", "b"]) == [[97], [98]]
    assert engine.detokenize([97, 98]) == "ab"
    assert engine.detokenize([[97], [98]]) == ["a", "b"]
    for bad in ([97, [98]], [-1], [True]):
        with pytest.raises(RequestError):
            engine.detokenize(bad)
    assert engine.explain_request("r")[0]["state"] == "finished"
    with pytest.raises(RequestError, match="--dump-requests-dir"):
        engine.dump_requests()
    engine.freeze_gc()
    assert frozen
    assert engine.set_internal_state(max_queued_requests=5)["max_queued_requests"] == 5
    assert engine.get_server_info()["max_queued_requests"] == 5
    for bad in ({"max_queued_requests": 0}, {"model_path": 1}, {}):
        with pytest.raises(RequestError):
            engine.set_internal_state(**bad)
    assert engine.configure_logging(log_requests=True, log_requests_level=2)["log_requests_level"] == 2


def test_shutdown_ends_waiting_calls_and_later_ones(running):
    engine = Engine.over(running)
    chunks = engine.generate("hello", stream=True, rid="held")
    next(chunks)

    engine.shutdown()
    engine.shutdown()

    assert running.num_shutdowns == 1
    for call in (lambda: next(chunks), lambda: engine.generate("x"), engine.flush_cache):
        with pytest.raises(ExecutionError, match="shut down"):
            call()


def test_shutdown_reaches_a_thread_that_waits(running):
    engine = Engine.over(running)
    errors = []

    def wait():
        try:
            engine.generate("hello", rid="held")
        except ExecutionError as error:
            errors.append(error)

    thread = threading.Thread(target=wait)
    thread.start()
    assert running.received.wait(20)
    engine.shutdown()
    thread.join()

    assert "stopped" in errors[0].message


def test_an_unknown_option_is_a_config_error():
    with pytest.raises(ConfigError, match="unknown option: modle_path"):
        Engine(modle_path="x")
