"""The runner and both workers, driven by hand-made plans over a tiny llama."""

import contextlib
import time
import weakref
from collections.abc import Iterator

import numpy as np
import pytest
import torch
from lora_harness import tiny_adapter
from runner_harness import CONTEXT, Driver, ids_by_row, int32, make_driver, prompt, save_llama

from headrace.errors import ExecutionError
from headrace.messages.control import FaultReq
from headrace.messages.grammar import GrammarSpec
from headrace.messages.requests import LogprobSpec, PromptContent
from headrace.sampling import grammar_rows
from headrace.sampling.params import ResolvedSamplingParams

# float32 logits summed in another order than transformers does.
TOLERANCE = 2e-4
A, B, C = prompt(40, 1), prompt(9, 2), prompt(17, 3)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory):
    folder = tmp_path_factory.mktemp("llama")
    return folder, save_llama(folder)


@contextlib.contextmanager
def driver_of(checkpoint, **options: object) -> Iterator[Driver]:
    driver = make_driver(checkpoint[0], **options)
    try:
        yield driver
    finally:
        driver.worker.close()


@pytest.fixture(params=["sync", "overlap"])
def driver(request, checkpoint):
    with driver_of(checkpoint, disable_overlap_schedule=request.param == "sync", enable_fault_injection=True) as driver:
        yield driver


@pytest.fixture
def sync(checkpoint):
    with driver_of(checkpoint) as driver:
        yield driver


def greedy(model, tokens: list[int], count: int) -> list[int]:
    tokens = list(tokens)
    with torch.inference_mode():
        for _ in range(count):
            tokens.append(int(model(torch.tensor([tokens])).logits[0, -1].argmax()))
    return tokens[-count:]


def test_greedy_tokens_are_those_of_transformers(driver, checkpoint):
    assert driver.generate(0, A, 12) == greedy(checkpoint[1], A, 12)


def test_chunks_and_a_cached_prefix_change_no_token(driver):
    whole = driver.generate(0, A, 12)

    assert driver.generate(1, A, 12, chunks=(7, 16, 1)) == whole
    # Sequence 2 reads the first 32 tokens' KV where sequence 0 wrote it.
    assert driver.generate(2, A, 12, prefix_slots=int32(range(32))) == whole


def test_steps_in_flight_read_the_tokens_of_the_steps_before(checkpoint):
    with driver_of(checkpoint) as driver:
        alone = [driver.generate(seq, tokens, 6) for seq, tokens in enumerate((A, B, C))]
    with driver_of(checkpoint, disable_overlap_schedule=False) as driver:
        driver.submit([(0, 40, True), (1, 9, True)], (driver.new(0, A), driver.new(1, B)))
        driver.submit([(0, 1, True), (2, 10, False), (1, 1, True)], (driver.new(2, C),))
        driver.submit([(2, 7, True), (1, 1, True), (0, 1, True)])
        for _ in range(3):
            driver.submit([(0, 1, True), (1, 1, True), (2, 1, True)])
        got: list[list[int]] = [[], [], []]
        for seqs in [(0, 1), (0, 2, 1), (2, 1, 0), (0, 1, 2), (0, 1, 2), (0, 1, 2)]:
            for seq, token in zip(seqs, ids_by_row(driver.worker.collect()), strict=True):
                got[seq].append(int(token))

    assert got[0] == alone[0]
    assert got[1] == alone[1]
    assert got[2][0] == -1, "the row that did not sample"
    assert got[2][1:] == alone[2][:4]


def test_a_seeded_draw_is_the_same_in_any_batch(sync):
    drawn = ResolvedSamplingParams(max_new_tokens=9, seed=7, temperature=1.5)
    alone = sync.generate(0, A, 6, sampling=drawn)

    sync.step([(1, 9, True)], (sync.new(1, B),))
    got = [ids_by_row(sync.step([(1, 1, True), (2, 40, True)], (sync.new(2, A, sampling=drawn),)))[1]]
    got += [ids_by_row(sync.step([(2, 1, True), (1, 1, True)]))[0] for _ in range(5)]

    assert got == alone


def test_a_retracted_sequence_goes_on_where_it_was(sync):
    whole = sync.generate(0, A, 8)

    again = sync.generate(1, A + whole[:3], 5, num_prompt_tokens=len(A))

    assert again == whole[3:]


def test_logprobs_of_prompt_and_samples(sync, checkpoint):
    spec = LogprobSpec(prompt_start=5, top_num=3, token_ids=(2, 4))
    with torch.inference_mode():
        want = torch.log_softmax(checkpoint[1](torch.tensor([A])).logits[0], -1)

    blocks = []
    for count, samples in ((3, False), (20, False), (17, True)):
        new = (sync.new(0, A, logprobs=spec),) if not blocks else ()
        result = sync.step([(0, count, samples)], new)
        blocks.append(result.prompt_logprobs.get(0))
    whole = sync.step([(1, 40, True)], (sync.new(1, A, logprobs=spec),)).prompt_logprobs[0]

    assert blocks[0] is None, "the first chunk predicts tokens 1 to 3 only"
    for name in ("token_ids", "values", "top_ids", "top_values", "picked"):
        assert getattr(blocks[1], name) + getattr(blocks[2], name) == getattr(whole, name), name
    assert np.frombuffer(whole.token_ids, np.int32).tolist() == A[5:]
    values = torch.from_numpy(np.frombuffer(whole.values, np.float32).copy())
    torch.testing.assert_close(values, want[4:39].gather(1, torch.tensor(A[5:])[:, None])[:, 0], atol=TOLERANCE, rtol=0)
    picked = torch.from_numpy(np.frombuffer(whole.picked, np.float32).copy()).view(-1, 2)
    torch.testing.assert_close(picked, want[4:39][:, [2, 4]], atol=TOLERANCE, rtol=0)
    sampled = result.logprobs[0]
    assert np.frombuffer(sampled.token_ids, np.int32).tolist() == ids_by_row(result)
    assert np.frombuffer(sampled.values, np.float32)[0] == pytest.approx(float(want[39].max()), abs=TOLERANCE)


def test_a_step_takes_the_time_that_it_takes_whatever_its_rows_ask(sync):
    for options in ({}, {"logprobs": LogprobSpec(prompt_start=5, top_num=1)}, {"return_hidden_states": True}):
        begin = time.perf_counter()
        result = sync.step([(0, 40, True)], (sync.new(0, A, **options),))
        assert 0.0 < result.forward_s <= time.perf_counter() - begin, options


def test_hidden_states_are_of_every_computed_position(sync, checkpoint):
    with torch.inference_mode():
        want = checkpoint[1].model(torch.tensor([A])).last_hidden_state[0]

    result = sync.step([(1, 9, True), (0, 40, True)], (sync.new(0, A, return_hidden_states=True), sync.new(1, B)))

    assert list(result.hidden_states) == [1]
    got = torch.frombuffer(bytearray(result.hidden_states[1]), dtype=torch.float32).view(40, -1)
    torch.testing.assert_close(got, want, atol=TOLERANCE, rtol=TOLERANCE)


def test_rows_of_every_kind_in_one_step_get_what_they_get_alone(sync):
    spec = LogprobSpec(prompt_start=5, top_num=3, token_ids=(2, 4))
    tokens = sync.generate(0, A, 3)
    with_states = sync.step([(1, 40, True)], (sync.new(1, A, return_hidden_states=True),))
    with_logprobs = sync.step([(1, 40, True)], (sync.new(1, A, logprobs=spec),))
    sync.step([(0, 40, True)], (sync.new(0, A),))

    # A chunk that nobody reads, a token of a prompt that was read, a prompt with its states, and one with logprobs from its sixth token on.
    new = sync.new(1, A), sync.new(2, A, return_hidden_states=True), sync.new(3, A, logprobs=spec)
    got = sync.step([(1, 17, False), (0, 1, True), (2, 40, True), (3, 40, True)], new)
    after = sync.step([(1, 23, True)])

    assert ids_by_row(got) == [-1, tokens[1], tokens[0], tokens[0]]
    assert got.hidden_states == {2: with_states.hidden_states[0]}
    assert got.prompt_logprobs == {3: with_logprobs.prompt_logprobs[0]}
    assert got.logprobs == {3: with_logprobs.logprobs[0]}
    assert ids_by_row(after) == tokens[:1]


def test_the_model_is_told_which_tokens_are_read(sync, monkeypatch):
    model = sync.worker.runner.model
    forward, told = model.forward, []

    def record(hidden, positions, attention, reads=None, **options):
        told.append(None if reads is None else reads.index.tolist())
        return forward(hidden, positions, attention, reads, **options)

    monkeypatch.setattr(model, "forward", record)
    spec = LogprobSpec(prompt_start=5, top_num=0, token_ids=())
    sync.step([(0, 40, True), (1, 3, False)], (sync.new(0, A), sync.new(1, A, logprobs=spec)))
    sync.step([(1, 10, False), (2, 9, True)], (sync.new(2, B, return_hidden_states=True),))
    sync.step([(1, 20, False), (3, 11, False)], (sync.new(3, C),))
    sync.step([(3, 5, False)])
    sync.step([(0, 1, True), (2, 1, True)])

    # Position 4, the second of its chunk, predicts the first token with a logprob.
    assert told == [[39], list(range(1, 19)), list(range(20)), [], None]


def test_an_adapter_sees_its_rows_in_a_step_of_which_few_are_read(sync, checkpoint, tmp_path):
    sync.worker.loras.load(1, tiny_adapter(checkpoint[1]).save(tmp_path), "")
    base, want = sync.generate(0, A, 3), sync.generate(1, A, 3, lora_id=1)

    new = sync.new(0, A), sync.new(1, A, lora_id=1)
    sync.step([(0, 11, False), (1, 7, False)], new)
    got = [ids_by_row(sync.step([(0, 29, True), (1, 33, True)]))]
    got += [ids_by_row(sync.step([(0, 1, True), (1, 1, True)])) for _ in range(2)]

    assert [list(tokens) for tokens in zip(*got, strict=True)] == [base, want]
    assert want != base


def test_input_embeddings_stand_in_for_the_prompt_only(sync, checkpoint):
    want = sync.generate(0, A, 5)
    embeds = checkpoint[1].get_input_embeddings().weight.detach()[A].numpy().astype(np.float32).tobytes()

    assert sync.generate(1, [0] * 40, 5, chunks=(11,), content=PromptContent(bytes(4 * 40), embeds)) == want


class AllowsEverything:
    """A compiled grammar, and the mask of a sequence, that forbids nothing."""

    is_complete = False

    def __init__(self) -> None:
        self.started: list[weakref.ref[AllowsEverything]] = []

    def start(self) -> "AllowsEverything":
        mask = AllowsEverything()
        self.started.append(weakref.ref(mask))
        return mask

    def fill(self, words) -> None:
        words.fill(-1)

    def accept(self, token_id: int) -> None:
        pass


def test_a_worker_that_rests_holds_nothing_of_the_grammars_of_rows_that_were_left(driver, monkeypatch):
    monkeypatch.setattr(grammar_rows, "PATIENCE_S", 60.0)
    spec = GrammarSpec("regex", "", "regex")
    params = ResolvedSamplingParams(max_new_tokens=8, seed=0, temperature=0.0, grammar=spec)
    grammar = AllowsEverything()
    constrained = driver.generate(0, B, 4, sampling=params, grammar=grammar)
    compiled, (mask,) = weakref.ref(grammar), grammar.started
    del grammar
    assert mask() is not None

    driver.worker.idle((0,))

    # Another row, whose plan says nothing of those that were left.
    assert driver.generate(1, B, 4) == constrained
    assert (mask(), compiled()) == (None, None)


def fault(stage: str, kind: str, rid: str = "r1", at_token: int = 1) -> tuple[FaultReq, ...]:
    return (FaultReq(stage=stage, kind=kind, rid=rid, at_token=at_token),)


def test_a_fault_in_the_forward_pass_fails_that_step_alone(driver):
    want = driver.generate(0, A, 4)
    driver.step([(1, 40, True), (2, 9, True)], (driver.new(1, A), driver.new(2, B)))
    driver.submit([(1, 1, True), (2, 1, True)], faults=fault("forward", "raise"))
    driver.submit([(3, 40, True)], (driver.new(3, A),))

    with pytest.raises(ExecutionError, match="injected"):
        driver.worker.collect()

    assert ids_by_row(driver.worker.collect()) == want[:1]
    assert [ids_by_row(driver.step([(3, 1, True)]))[0] for _ in range(3)] == want[1:]


@pytest.mark.parametrize(("kind", "message"), [("raise", "injected"), ("nan", "NaN")])
def test_a_fault_in_sampling_ends_its_row_alone(driver, kind: str, message: str):
    want = driver.generate(0, A, 3)
    driver.step([(1, 9, True), (2, 40, True)], (driver.new(1, B), driver.new(2, A)))

    result = driver.step([(1, 1, True), (2, 1, True)], faults=fault("sampling", kind))
    after = driver.step([(1, 1, True), (2, 1, True)])

    assert list(result.errors) == [0]
    assert message in result.errors[0]
    assert ids_by_row(result) == [-1, want[1]]
    assert ids_by_row(after)[1] == want[2]
    assert ids_by_row(after)[0] >= 0, "a step planned before the error was known still runs"


def test_an_unforeseen_exception_becomes_that_steps_execution_error(driver, monkeypatch, caplog):
    worker = driver.worker
    runner = worker.runner
    with monkeypatch.context() as patch:
        patch.setattr(runner.attention, "prepare", lambda rows: 1 / 0)
        with pytest.raises(ExecutionError) as caught:
            driver.step([(0, 40, True)], (driver.new(0, A),))

    assert isinstance(caught.value.__cause__, ZeroDivisionError)
    assert "ZeroDivision" not in caught.value.message
    assert len(driver.generate(1, B, 2)) == 2


def test_closing_twice_is_fine_and_ends_the_thread(checkpoint):
    import threading

    def lanes():
        return {thread for thread in threading.enumerate() if thread.name == "model-worker"}

    before = lanes()  # of other tests
    driver = make_driver(checkpoint[0], disable_overlap_schedule=False)
    driver.generate(0, B, 2)
    assert lanes() - before
    driver.worker.close()
    driver.worker.close()

    assert not lanes() - before


def test_torch_fallbacks_give_the_same_tokens(checkpoint):
    with driver_of(checkpoint) as driver:
        native = driver.generate(0, A, 8)
    with driver_of(checkpoint, disable_native_kernels=True) as driver:
        assert driver.info.attention_backend == "torch_native"
        assert driver.generate(0, A, 8) == native


def test_ready_info_says_what_was_built(checkpoint):
    with driver_of(checkpoint, max_total_tokens=None, context_length=64) as driver:
        info = driver.info

    assert (info.max_running_requests, info.context_length, info.vocab_size, info.hidden_size) == (4, 64, 131, 32)
    assert info.max_total_tokens == 4 * 64, "no more than four sequences of 64 tokens can use"
    assert info.kv_bytes == 4 * 64 * 2 * 2 * 2 * 16 * 4
    assert info.model_class == "llama"
    assert info.num_parameters == sum(p.numel() for p in checkpoint[1].parameters())
    assert info.weight_bytes == 4 * info.num_parameters
    assert (info.file_format, info.stored_precision) == ("safetensors", "")
    assert any("max_total_tokens" in decision for decision in info.decisions)


def test_a_pool_smaller_than_the_context_shortens_it(checkpoint):
    with driver_of(checkpoint, max_total_tokens=50) as driver:
        assert driver.info.max_total_tokens in (48, 50), "a whole number of pages"
        assert driver.info.context_length == driver.info.max_total_tokens < CONTEXT


def test_steps_put_their_logits_in_the_same_memory(sync, monkeypatch):
    model = sync.worker.runner.model
    compute, kept = model.logits, []

    def logits(hidden, out=None):
        kept.append(compute(hidden, out))  # kept, so that malloc does not give the same memory again
        return kept[-1]

    monkeypatch.setattr(model, "logits", logits)

    sync.generate(0, A, 3, logprobs=LogprobSpec(prompt_start=1, top_num=1, token_ids=()))

    assert len(kept) > 3, "those of the prompt, too"
    assert len({one.data_ptr() for one in kept}) == 1
