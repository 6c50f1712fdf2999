"""The composition root with stand-ins for the scheduler and the detokenizer."""

import asyncio
import logging
import threading
from types import SimpleNamespace

import msgspec
import pytest

from headrace import launch
from headrace.checkpoint.model_config import parse_hf_config
from headrace.checkpoint.sampling_defaults import SamplingDefaults
from headrace.config.server_args import ServerArgs
from headrace.errors import ConfigError, ExecutionError
from headrace.messages.control import Heartbeat, ReadyInfo, ShutdownReq
from headrace.processes import threads
from headrace.processes.model_files import ModelFiles

READY = ReadyInfo(
    max_total_tokens=4096,
    max_running_requests=8,
    context_length=1024,
    vocab_size=257,
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
MODEL = parse_hf_config({"model_type": "llama", "eos_token_id": 0})


@pytest.mark.parametrize(
    ("facts", "want"),
    [
        ({"kv_cache_dtype": "int16"}, "cpu, multiplies 16-bit integers"),
        ({"kv_cache_dtype": "int8"}, "cpu, multiplies 8-bit integers"),
        ({"kv_cache_dtype": "bfloat16", "activations": "bfloat16"}, "cpu, multiplies bfloat16"),
        ({"kv_cache_dtype": "bfloat16"}, "cpu, multiplies floats"),
        ({"kv_cache_dtype": "int8", "attention_backend": "torch_native"}, "torch_native"),
    ],
)
def test_the_summary_says_what_attention_multiplies(facts, want):
    assert msgspec.structs.replace(READY, **{"attention_backend": "cpu"} | facts).attention == want


class Files(ModelFiles):
    """Of a model without files."""

    config = MODEL
    tokenizer = SimpleNamespace(decode=lambda ids: "", chat_template={})
    chat_template = tool_template = None

    def check(self):
        pass


@pytest.fixture
def parts(monkeypatch):
    """The scheduler and the detokenizer wait for their end; gives how the scheduler was asked to say that it stands still."""
    seen = SimpleNamespace()

    def scheduler(args, channels, on_ready, on_progress, on_stall):
        seen.on_stall = on_stall
        on_ready(READY)
        assert isinstance(channels.receiver("to_scheduler").recv(60), ShutdownReq)

    def detokenizer(args, channels, on_ready, on_progress):
        on_ready(None)
        assert isinstance(channels.receiver("to_detokenizer").recv(60), ShutdownReq)

    monkeypatch.setattr(threads, "run_scheduler", scheduler)
    monkeypatch.setattr(threads, "run_detokenizer", detokenizer)
    monkeypatch.setattr(launch, "ModelFiles", Files)
    return seen


@pytest.fixture
def engine(parts):
    engine = launch.launch_engine(ServerArgs(single_process=True))
    yield engine
    engine.shutdown()


def test_a_stall_in_a_thread_is_a_death_and_not_the_end_of_the_process(parts, engine):
    deaths = []
    engine.on_death = lambda: deaths.append(engine.tokenizer_manager.engine_loop.failure)

    parts.on_stall()

    assert len(deaths) == 1
    assert "--watchdog-timeout-s" in deaths[0]


async def test_a_loop_of_outputs_that_fails_is_a_death(engine):
    dead = asyncio.Event()
    engine.on_death = dead.set
    engine.tokenizer_manager.start()
    engine.parts.channels.sender("to_tokenizer").send(Heartbeat(["not", "hashable"]))

    await asyncio.wait_for(dead.wait(), 20)

    assert engine.tokenizer_manager.engine_loop.failure == "internal error"
    await engine.tokenizer_manager.close()


def test_sampling_settings_that_are_not_followed_are_warned_of(parts, monkeypatch, caplog):
    wishes = SamplingDefaults(temperature=0.5, origin="generation_config.json", not_followed=("num_beams 4",))
    model = msgspec.structs.replace(MODEL, sampling_defaults=wishes)
    monkeypatch.setattr(Files, "config", model)
    monkeypatch.setattr(logging.getLogger("headrace"), "propagate", True)

    launch.launch_engine(ServerArgs(single_process=True)).shutdown()

    assert [record.getMessage() for record in caplog.records if record.levelname == "WARNING"] == [
        "the model has sampling settings that are not supported: num_beams 4"
    ]


def test_threads_that_load_give_up_when_told_to_stop(parts, monkeypatch):
    loading = threading.Event()
    ended = threading.Event()

    def scheduler(args, channels, on_ready, on_progress, on_stall):
        loading.set()
        try:
            while True:
                on_progress(0, 1)
        finally:
            ended.set()

    monkeypatch.setattr(threads, "run_scheduler", scheduler)
    with pytest.raises(ExecutionError, match="stopped during start-up"):
        launch.launch_engine(ServerArgs(single_process=True), should_stop=loading.is_set)
    assert ended.wait(20)


def test_a_thread_that_cannot_start_says_why_without_waiting_for_the_other(parts, monkeypatch):
    def detokenizer(args, channels, on_ready, on_progress):
        raise ExecutionError("no tokenizer")

    monkeypatch.setattr(threads, "run_detokenizer", detokenizer)
    with pytest.raises(ExecutionError, match="no tokenizer"):
        launch.launch_engine(ServerArgs(single_process=True))


def test_text_that_the_main_process_makes_needs_no_detokenizer(parts):
    engine = launch.launch_engine(ServerArgs(single_process=True, detokenize_in="main"))
    try:
        assert "detokenizer" not in [thread.name for thread in threading.enumerate()]
        channels = engine.parts.channels
        assert channels.sender("to_detokenizer") is channels.receiver("to_tokenizer")
    finally:
        engine.shutdown()


def test_options_that_cannot_work_are_refused_before_anything_is_read_or_imported(parts, monkeypatch):
    """The parts have been started, and are ended at once."""
    ended = []
    monkeypatch.setattr(threads.ThreadParts, "kill", lambda self: ended.append(self))
    monkeypatch.setattr(Files, "check", lambda self: pytest.fail("the tokenizer was opened"))

    with pytest.raises(ConfigError, match="--context-length 1000000 is longer"):
        launch.launch_engine(ServerArgs(single_process=True, context_length=1_000_000))
    assert len(ended) == 1


def test_a_start_that_is_stopped_goes_no_further(parts, monkeypatch):
    monkeypatch.setattr(Files, "open_media", lambda self: pytest.fail("the start went on"))

    with pytest.raises(ExecutionError, match="stopped during start-up"):
        launch.launch_engine(ServerArgs(single_process=True), should_stop=lambda: True)
