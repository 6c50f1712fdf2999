"""What a scheduler process makes of the options: its limits, and a replica's share of the machine."""

import math
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from headrace.config.server_args import ServerArgs
from headrace.messages.control import ReadyInfo
from headrace.processes.model_files import EndTokens, tokens_of
from headrace.processes.scheduler_process import scheduler_config
from headrace.processes.share import share_of_machine

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
MODEL = SimpleNamespace(encoder=None)
ENDS = EndTokens(frozenset([0]), frozenset())


@pytest.mark.parametrize("limit, step", [(2048, 2048), (100, 100), (4, 8)])
def test_a_step_is_never_larger_than_it_was_allowed_to_be(limit, step):
    ready = msgspec.structs.replace(READY, chunked_prefill_size=64)
    config = scheduler_config(ServerArgs(max_prefill_tokens=limit), MODEL, ready, ENDS)

    # Every running request decodes one token, whatever the limit.
    assert (config.chunk_tokens, config.step_tokens) == (64, step)


@pytest.mark.parametrize("limit_ms, seconds", [(250, 0.25), (None, math.inf)])
def test_the_time_of_a_step_is_bounded_as_the_worker_says(limit_ms, seconds):
    ready = msgspec.structs.replace(READY, max_step_ms=limit_ms)

    assert scheduler_config(ServerArgs(), MODEL, ready, ENDS).max_step_s == seconds


@pytest.mark.parametrize("asked_ms, default_s", [(None, 0.2), (200, 0.0)])
def test_a_bound_that_was_asked_for_is_no_default(asked_ms, default_s):
    ready = msgspec.structs.replace(READY, max_step_ms=200)

    assert scheduler_config(ServerArgs(max_step_ms=asked_ms), MODEL, ready, ENDS).default_step_s == default_s


def test_a_text_has_tokens_though_clients_send_ids_and_none_if_the_model_has_no_tokenizer(tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    given = tokens_of(ServerArgs(model_path="smollm2"), "The river")

    assert len(given) == 2
    assert tokens_of(ServerArgs(model_path="smollm2", skip_tokenizer_init=True), "The river") == given
    assert tokens_of(ServerArgs(model_path=str(tmp_path)), "The river") == []


def test_the_scheduler_queues_what_will_run_and_what_may_wait():
    assert scheduler_config(ServerArgs(max_queued_requests=3), MODEL, READY, ENDS).max_queued == 8 + 3
    # All may come to one of several replicas.
    assert scheduler_config(ServerArgs(max_queued_requests=3, dp_size=2), MODEL, READY, ENDS).max_queued == 16 + 3


def test_cores_and_memory_are_divided_and_there_is_a_thread_at_least():
    share = share_of_machine(ServerArgs(dp_size=4, device="cpu", num_threads=9, mem_fraction_static=0.8))
    assert (share.num_threads, share.mem_fraction_static) == (2, 0.2)
    assert share_of_machine(ServerArgs(dp_size=4, device="cpu", num_threads=2)).num_threads == 1
    alone = ServerArgs(num_threads=9)
    assert share_of_machine(alone) is alone
