"""Updates, pauses and released memory while requests run, on the real engine."""

import random
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
import transformers
from weights_harness import LONG, engine_of, fresh, tensors_of, tokens

from headrace.errors import HeadraceError, RequestError
from headrace.execution.update_weights import ModelWeights

NUM = 16
PROMPTS = [[i + 1, 2 * i + 7, 50 + i, 9] for i in range(NUM)]


@pytest.fixture(scope="module")
def answers(old, new):
    return fresh(old), fresh(new)


@pytest.fixture
def engine(old):
    with engine_of(old, max_total_tokens=8192) as engine:
        yield engine


def is_waiting(engine) -> bool:
    """For the answer of a scheduler."""
    return engine._manager.link.replies.is_waiting


def until(condition, what, timeout_s=30.0):
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, what
        time.sleep(0.002)


class InFlight:
    """Sixteen requests as one stream, read in a thread."""

    def __init__(self, engine, prompts=PROMPTS, sampling=LONG):
        self.engine, self.outputs, self.error = engine, {}, None
        before = engine.internal_state().generation_tokens
        self._thread = threading.Thread(target=self._read, args=(prompts, sampling))
        self._thread.start()
        until(lambda: len(self.outputs) == len(prompts), "not all have begun")
        self._before = before

    def _read(self, prompts, sampling):
        try:
            for output in self.engine.generate(input_ids=prompts, sampling_params=sampling, stream=True):
                self.outputs[output["index"]] = output
        except HeadraceError as error:
            self.error = error

    def seen(self):
        """Token ids of each so far, once everything that was made has arrived. Nothing may be running."""
        made = self.engine.internal_state().generation_tokens - self._before
        until(lambda: sum(len(o["output_ids"]) for o in self.outputs.values()) == made, "outputs are missing")
        return [self.outputs[i]["output_ids"] for i in range(len(self.outputs))]

    def join(self):
        self._thread.join(60)
        assert not self._thread.is_alive()
        if self.error is not None:
            raise self.error
        return [self.outputs[i] for i in range(len(self.outputs))]


def whole_pool(engine):
    state = engine.internal_state()
    return (
        state.pool.consistent
        and state.pool.leased_tokens == 0
        and state.pool.request_slots_free == state.pool.request_slots_total
        and state.num_running == state.num_waiting == state.memory_repairs == 0
    )


@pytest.fixture
def reading(monkeypatch):
    """Updates from disk wait for this event before they read."""
    event, from_disk = threading.Event(), ModelWeights._from_disk

    def held(weights, operation):
        assert event.wait(60)
        return from_disk(weights, operation)

    monkeypatch.setattr(ModelWeights, "_from_disk", held)
    yield event
    event.set()


def test_an_update_is_prepared_beside_the_steps_and_waits_for_what_has_begun(engine, new, answers, reading):
    flight = InFlight(engine)
    with ThreadPoolExecutor(1) as pool:
        update = pool.submit(engine.update_weights_from_disk, new, weight_version="2", abort_all_requests=False)
        until(lambda: is_waiting(engine), "the update was not sent")
        assert tokens(engine) == answers[0]
        assert engine.health(generate=True)
        assert not update.done()
        reading.set()
        assert update.result()[0]
    assert tokens(engine) == answers[1]
    assert engine.get_model_info()["model_path"] == new
    for output in flight.join():
        assert output["meta_info"]["weight_version"] == "default"
        assert output["meta_info"]["completion_tokens"] == LONG["max_new_tokens"]
    assert whole_pool(engine)


def test_an_update_that_hangs_can_be_cancelled(engine, new, answers, reading):
    with ThreadPoolExecutor(1) as pool:
        update = pool.submit(engine.update_weights_from_disk, new, abort_all_requests=True)
        until(lambda: is_waiting(engine), "the update was not sent")
        flight = InFlight(engine)
        assert engine.cancel_weight_update() == (True, "cancelled: 1 operation")
        assert update.result() == (False, "cancelled; nothing has changed")
    assert {output["meta_info"]["finish_reason"]["type"] for output in flight.join()} == {"length"}
    assert tokens(engine) == answers[0]
    reading.set()
    assert engine.update_weights_from_disk(new)[0]
    assert tokens(engine) == answers[1]


@pytest.mark.parametrize("mode", ["retract", "in_place"])
def test_paused_requests_go_on_with_the_new_weights_only(mode, engine, old, new):
    flight = InFlight(engine)
    assert engine.pause_generation(mode)[0]
    made = flight.seen()
    assert engine.health(generate=True)
    state = engine.internal_state()
    assert state.paused == mode
    assert (state.pool.leased_tokens > 0) == (mode == "in_place")
    bad = [(name, tensor[:1]) for name, tensor in tensors_of(new).items()]
    assert not engine.update_weights_from_tensor(bad)[0]
    assert engine.internal_state().pool.leased_tokens == state.pool.leased_tokens
    assert engine.update_weights_from_tensor(tensors_of(new).items(), weight_version="2")[0]
    assert flight.seen() == made, "it went on while paused"
    assert engine.continue_generation()[0]
    outputs = flight.join()
    assert {output["meta_info"]["weight_version"] for output in outputs} == {"2"}
    for output, ids in zip(outputs, made, strict=True):
        [told] = engine.explain_request(output["meta_info"]["id"])
        changes = [event for event in told["events"] if event["event"] in ("paused", "weights_updated", "continued")]
        assert [event["event"] for event in changes] == ["paused", "weights_updated", "continued"]
        # The first token after a pause may come before the answer to what ended it.
        assert [event["completion_tokens"] for event in changes[:2]] == [len(ids)] * 2
        assert changes[2]["completion_tokens"] >= len(ids)
    # Had anything of the old weights' KV been used, what follows would differ from a computation that never saw it.
    engine.flush_cache()
    left = [LONG | {"max_new_tokens": LONG["max_new_tokens"] - len(ids)} for ids in made]
    prompts = [prompt + ids for prompt, ids in zip(PROMPTS, made, strict=True)]
    again = engine.generate(input_ids=prompts, sampling_params=left)
    assert [ids + output["output_ids"] for ids, output in zip(made, again, strict=True)] == [
        output["output_ids"] for output in outputs
    ]
    assert whole_pool(engine)


def test_pausing_with_abort_ends_everything_with_what_there_is(engine, new, answers):
    flight = InFlight(engine)
    assert engine.pause_generation()[0]
    outputs = flight.join()
    assert {output["meta_info"]["finish_reason"]["type"] for output in outputs} == {"abort"}
    assert whole_pool(engine)
    with ThreadPoolExecutor(1) as pool:
        waits = pool.submit(tokens, engine)
        until(lambda: engine.internal_state().num_waiting == 3, "they do not wait")
        assert engine.update_weights_from_disk(new)[0]
        assert engine.flush_cache()
        assert not waits.done()
        assert engine.continue_generation()[0]
        assert waits.result() == answers[1]


def test_aborts_and_closed_streams_work_while_paused(engine):
    flight = InFlight(engine)
    engine.pause_generation("in_place")
    other = engine.generate(input_ids=[1, 2, 3], sampling_params=LONG, stream=True, rid="leaves")
    reader = threading.Thread(target=lambda: list(other))
    reader.start()
    until(lambda: engine.internal_state().num_waiting == 1, "it does not wait")
    engine.abort_request("leaves")
    reader.join(30)
    engine.abort_request(abort_all=True)
    flight.join()
    until(lambda: whole_pool(engine), "pages are lost")
    engine.continue_generation()


def test_shutdown_in_the_middle_of_everything(old, new):
    with engine_of(old) as engine:
        flight = InFlight(engine, sampling=LONG)
        engine.pause_generation("in_place")
        waiting = threading.Thread(target=lambda: swallow(lambda: engine.update_weights_from_disk(new)))
        waiting.start()
        begin = time.monotonic()
        try:
            engine.shutdown()
        finally:
            waiting.join(30)
            swallow(flight.join)
    assert not waiting.is_alive()
    assert time.monotonic() - begin < 30


def swallow(call):
    try:
        call()
    except HeadraceError:
        pass


@pytest.mark.parametrize("seed", range(2))
def test_random_interleavings_come_to_rest(seed, engine, old, new, answers):
    """A hundred operations each, from several threads at once."""
    source = random.Random(seed)
    good = {"1": list(tensors_of(old).items()), "2": list(tensors_of(new).items())}
    bad = [("model.norm.weight", torch.full((64,), torch.nan))]
    streams = []

    def generate():
        sampling = LONG | {"max_new_tokens": source.randrange(1, 40)}
        streams.append(
            engine.generate(input_ids=PROMPTS[: source.randrange(1, 5)], sampling_params=sampling, stream=True)
        )
        pool.submit(swallow, lambda stream=streams[-1]: [*zip(stream, range(source.randrange(1, 200)), strict=False)])

    def update():
        version = source.choice("12")
        abort = source.random() < 0.5
        pool.submit(engine.update_weights_from_tensor, good[version], weight_version=version, abort_all_requests=abort)

    actions = [
        generate,
        generate,
        update,
        lambda: pool.submit(engine.update_weights_from_tensor, bad),
        lambda: engine.pause_generation(source.choice(["abort", "retract", "in_place"])),
        engine.continue_generation,
        engine.flush_cache,
        lambda: engine.abort_request(abort_all=True),
        lambda: pool.submit(engine.release_memory_occupation, [source.choice(["kv_cache", "weights"])]),
        lambda: pool.submit(engine.resume_memory_occupation),
    ]
    with ThreadPoolExecutor(24) as pool:
        for _ in range(100):
            source.choice(actions)()
        engine.resume_memory_occupation()
        engine.continue_generation()
        until(lambda: not is_waiting(engine), "an operation is not answered")
        engine.resume_memory_occupation()
        engine.continue_generation()
    until(lambda: whole_pool(engine), f"it does not come to rest: {engine.internal_state()}")
    version = engine.internal_state().weight_version
    assert tokens(engine) == answers[version == "2"]


def rss_bytes(pid: int) -> int:
    return int(Path(f"/proc/{pid}/statm").read_text().split()[1]) * 4096


def test_released_memory_leaves_the_process_and_comes_back(tmp_path, old):
    config = transformers.LlamaConfig(
        vocab_size=2048,
        hidden_size=512,
        intermediate_size=1536,
        num_hidden_layers=2,
        num_attention_heads=8,
        num_key_value_heads=8,
        head_dim=64,
        max_position_embeddings=2048,
        bos_token_id=None,
        eos_token_id=None,
    )
    config.save_pretrained(tmp_path)
    (tmp_path / "tokenizer.json").write_bytes((Path(old) / "tokenizer.json").read_bytes())
    options = {"load_format": "dummy", "single_process": False, "max_total_tokens": 4096}
    with engine_of(str(tmp_path), **options) as engine:
        pid = engine._running.parts.children[0].pid
        ids = [[i % 2000 for i in range(start, start + 1100)] for start in (0, 700)]
        sampling = {"temperature": 0.0, "max_new_tokens": 4, "ignore_eos": True}
        want = [output["output_ids"] for output in engine.generate(input_ids=ids, sampling_params=sampling)]
        info = engine.get_server_info()
        kv_bytes = 2200 * 2 * 2 * 8 * 64 * 4
        full = rss_bytes(pid)
        assert engine.release_memory_occupation(["kv_cache"])[0]
        without_kv = rss_bytes(pid)
        assert full - without_kv > 0.9 * kv_bytes
        assert engine.release_memory_occupation()[0]
        without_both = rss_bytes(pid)
        assert without_kv - without_both > 0.9 * info["weight_bytes"]
        assert engine.internal_state().released == ("kv_cache", "weights")
        assert engine.health(generate=True)
        assert not engine.update_weights_from_tensor([("model.norm.weight", torch.ones(512))])[0]
        with pytest.raises(RequestError, match="released"):
            engine.get_weights_by_name("model.norm.weight")
        with ThreadPoolExecutor(1) as pool:
            again = pool.submit(engine.generate, input_ids=ids, sampling_params=sampling)
            assert engine.resume_memory_occupation(["weights"])[0]
            assert not again.done()
            assert engine.resume_memory_occupation(["kv_cache"])[0]
            assert [output["output_ids"] for output in again.result()] == want
            assert again.result()[0]["meta_info"]["cached_tokens"] == 0
        assert engine.resume_memory_occupation()[0]
