"""What naive runtimes get wrong, through a whole engine with a real tokenizer. Outputs are scripted where the words matter."""

import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engines import GREEDY, SEEDED, random_ids, running_engine
from scripted_output import END_ID

from headrace.api.engine import Engine
from headrace.errors import RequestError
from headrace.messages.control import InternalState
from headrace.text.tokenizers import Tokenizer

SCRIPTED = {"custom_logit_processors": "play=scripted_output:play"}
WORLD = "Ünïcödé 漢字かな交じり 한국어 😀👩‍👩‍👧‍👦🏴‍☠️🇫🇷 e\u0301 שלום"
LONG = {"temperature": 0.0, "max_new_tokens": 900, "ignore_eos": True}
RANKS: dict[str, dict[str, Any]] = {
    "alone": {},
    "two stages": {"pp_size": 2},
    "two parts of attention": {"tp_size": 2, "dp_size": 2, "enable_dp_attention": True},
}
FEW_RANKS = ("alone", "two stages")
in_one_process_and_in_several = pytest.mark.parametrize(
    "ranks", [RANKS[name] for name in FEW_RANKS], ids=FEW_RANKS, indirect=True, scope="module"
)
"""Of tests of the text alone: who makes it knows nothing of ranks."""


@pytest.fixture(scope="module", params=list(RANKS.values()), ids=list(RANKS))
def ranks(request: pytest.FixtureRequest) -> dict[str, Any]:
    """Options of an engine on one rank or several."""
    return {**request.param, "single_process": not request.param}


@pytest.fixture(scope="module")
def model(request: pytest.FixtureRequest, ranks: dict[str, Any]) -> str:
    """The model that these ranks run."""
    name = "tiny_mixture" if "enable_dp_attention" in ranks else "tiny_model"
    return str(request.getfixturevalue(name))


@pytest.fixture(scope="module")
def engine(model: str, ranks: dict[str, Any]) -> Iterator[Engine]:
    with pytest.MonkeyPatch.context() as environment:
        environment.setenv("PYTHONPATH", str(Path(__file__).parent))  # where processes find the script's code
        with running_engine(model, **ranks, **SCRIPTED) as engine:
            yield engine


@pytest.fixture(scope="module")
def byte_ids(tokenizer: Tokenizer) -> dict[int, int]:
    """The token of each single byte."""
    pieces = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size - 1, -1, -1)}
    return {byte: pieces[bytes([byte])] for byte in range(256) if bytes([byte]) in pieces}


def script(ids: list[int], stream: bool = False, **sampling: Any) -> dict[str, Any]:
    """Arguments that make the engine say `ids` and then end."""
    return {
        "input_ids": ids,
        "sampling_params": {"temperature": 0.0, "max_new_tokens": 300} | sampling,
        "custom_logit_processor": "play",
        "stream": stream,
    }


def settled(engine: Engine) -> InternalState:
    """The state once nothing runs; every look asks the scheduler. Fails after many."""
    return _state_when(engine, lambda state: state.num_running + state.num_waiting + state.num_in_flight_steps == 0)


def _state_when(engine: Engine, wanted: Any) -> InternalState:
    for _ in range(5000):
        state = engine.internal_state()
        if wanted(state):
            return state
    raise AssertionError(f"never: {state}")


# -- characters


@in_one_process_and_in_several
@pytest.mark.parametrize("split, interval", [("tokens", 1), ("tokens", 3), ("bytes", 2), ("bytes", 7)])
def test_no_chunk_ends_inside_a_character(
    engine: Engine, tokenizer: Tokenizer, byte_ids: dict[int, int], split: str, interval: int
) -> None:
    ids = tokenizer.encode(WORLD) if split == "tokens" else [byte_ids[byte] for byte in WORLD.encode()]

    whole = engine.generate(**script(ids))
    chunks = list(engine.generate(**script(ids, stream=True, stream_interval=interval)))

    assert whole["text"] == WORLD
    assert whole["output_ids"] == [*ids, END_ID]
    assert chunks[-1]["text"] == WORLD
    for chunk in chunks:
        assert WORLD.startswith(chunk["text"])
        assert "\ufffd" not in chunk["text"]


@in_one_process_and_in_several
def test_the_beginning_of_a_character_is_flushed_at_the_end(engine: Engine, byte_ids: dict[int, int]) -> None:
    ids = [byte_ids[byte] for byte in "hé😀".encode()]
    for length in range(2, len(ids) + 1):
        # The limit falls inside the emoji for the last few.
        want = "hé😀".encode()[:length].decode(errors="replace")
        whole = engine.generate(**script(ids, max_new_tokens=length))
        chunks = list(engine.generate(**script(ids, stream=True, max_new_tokens=length)))

        assert whole["text"] == want
        assert chunks[-1]["text"] == want
        assert all("\ufffd" not in chunk["text"] for chunk in chunks[:-1])


def test_allowed_token_ids_and_logit_bias_choose_the_words(engine: Engine, tokenizer: Tokenizer) -> None:
    allowed = tokenizer.encode(" 漢")
    sampling = {"max_new_tokens": 12, "temperature": 1.0, "seed": 1, "ignore_eos": True}
    only = engine.generate("hello", sampling | {"allowed_token_ids": allowed})
    biased = engine.generate("hello", sampling | {"logit_bias": {str(allowed[0]): 100.0}})

    assert set(only["output_ids"]) <= set(allowed)
    assert only["text"] == tokenizer.decode(only["output_ids"])
    assert set(biased["output_ids"]) == {allowed[0]}


# -- stops


@in_one_process_and_in_several
@pytest.mark.parametrize("interval", [1, 5])
def test_nothing_of_a_stop_string_is_ever_shown(engine: Engine, byte_ids: dict[int, int], interval: int) -> None:
    ids = [byte_ids[byte] for byte in b"one STAR, two STOP three"]

    whole = engine.generate(**script(ids, stop="STOP"))
    chunks = list(engine.generate(**script(ids, stream=True, stop="STOP", stream_interval=interval)))

    assert whole["text"] == "one STAR, two "
    assert whole["meta_info"]["finish_reason"] == {"type": "stop", "matched": "STOP"}
    assert chunks[-1]["text"] == whole["text"]
    assert chunks[-1]["output_ids"] == whole["output_ids"] == ids[: len("one STAR, two STOP")]
    assert all(whole["text"].startswith(chunk["text"]) for chunk in chunks)


@in_one_process_and_in_several
@pytest.mark.parametrize("text, interval", [("about to STO", 3), ("a STO that goes on", 1)])
def test_what_only_begins_a_stop_string_is_shown_after_all(
    engine: Engine, byte_ids: dict[int, int], text: str, interval: int
) -> None:
    ids = [byte_ids[byte] for byte in text.encode()]

    chunks = list(engine.generate(**script(ids, stream=True, stop=["STOP"], stream_interval=interval)))

    assert chunks[-1]["text"] == text
    assert chunks[-1]["meta_info"]["finish_reason"] == {"type": "stop", "matched": END_ID}


def test_the_earliest_of_several_stops_wins_even_within_a_token(engine: Engine, tokenizer: Tokenizer) -> None:
    [word] = tokenizer.encode(" international")
    ids = [*tokenizer.encode("The"), word, *tokenizer.encode(" law")]

    for stop in (["national", "inter"], ["inter", "national"]):
        output = engine.generate(**script(ids, stop=stop))

        assert output["text"] == "The "
        assert output["meta_info"]["finish_reason"] == {"type": "stop", "matched": "inter"}
        # Computed is computed: the token of the stop is counted and listed.
        assert output["output_ids"] == ids[:2]
        assert output["meta_info"]["completion_tokens"] == 2


def test_an_untrimmed_stop_is_part_of_the_text(engine: Engine, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("count one two three")

    kept = engine.generate(**script(ids, stop="two", no_stop_trim=True))
    pattern = engine.generate(**script(ids, stop_regex="t[a-z]o"))

    assert kept["text"] == pattern["text"] == "count one two"
    assert kept["meta_info"]["finish_reason"]["matched"] == "two"
    assert pattern["meta_info"]["finish_reason"]["matched"] == "t[a-z]o"


def test_a_stop_string_in_the_prompt_does_not_count(engine: Engine, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("say stop")

    # The first token of the output follows the "stop" at the prompt's end.
    output = engine.generate(**script(ids, stop=["stop", "stopsay", "psay"]))

    assert output["text"] == "say "
    assert output["meta_info"]["completion_tokens"] == len(ids)


def test_precedence_within_a_step(engine: Engine, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("red green blue")
    last = ids[-1]

    string = engine.generate(**script(ids, stop="blue", stop_token_ids=[last], max_new_tokens=len(ids)))
    token = engine.generate(**script(ids, stop_token_ids=[last], max_new_tokens=len(ids)))
    length = engine.generate(**script(ids, max_new_tokens=len(ids)))
    end = engine.generate(**script(ids, max_new_tokens=len(ids) + 1))

    reasons = [output["meta_info"]["finish_reason"] for output in (string, token, length, end)]
    assert reasons == [
        {"type": "stop", "matched": "blue"},
        {"type": "stop", "matched": last},
        {"type": "length", "length": len(ids)},
        {"type": "stop", "matched": END_ID},
    ]
    assert [output["text"] for output in (string, token, length, end)] == [
        "red green ",
        "red green",
        "red green blue",
        "red green blue",
    ]


def test_min_new_tokens_makes_ends_impossible_before(engine: Engine, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("red green blue")
    stop_id = ids[1]

    output = engine.generate(**script(ids, min_new_tokens=8, stop_token_ids=[stop_id], max_new_tokens=40))

    # The script ends after three tokens; the model must go on, and both kinds of end wait for the eighth.
    assert output["meta_info"]["completion_tokens"] == 9
    assert output["output_ids"][-1] == END_ID
    assert not {stop_id, END_ID} & set(output["output_ids"][:8])


def test_a_stop_string_ends_before_min_new_tokens(engine: Engine, tokenizer: Tokenizer) -> None:
    ids = tokenizer.encode("red green blue")

    output = engine.generate(**script(ids, min_new_tokens=8, stop="green"))

    assert output["text"] == "red "


def test_min_new_tokens_holds_when_the_limit_is_clipped_to_the_context(engine: Engine) -> None:
    # 1024 positions: the default limit of 128 is cut to the 20 that are left.
    prompt = random_ids(1004, seed=3)
    output = engine.generate(input_ids=prompt, sampling_params={"min_new_tokens": 20, "temperature": 0})

    assert output["meta_info"]["completion_tokens"] == 20
    assert output["meta_info"]["finish_reason"] == {"type": "length", "length": 20}
    with pytest.raises(RequestError, match="min_new_tokens"):
        engine.generate(input_ids=prompt, sampling_params={"min_new_tokens": 21, "temperature": 0})


# -- samples, order, cache counts


def test_a_prompt_is_prefilled_once_for_all_its_samples(engine: Engine) -> None:
    page = engine.get_server_info()["page_size"]
    prompt = random_ids(150, seed=150)
    before = settled(engine)
    cold = engine.generate(input_ids=prompt, sampling_params=SEEDED | {"n": 5})
    after = settled(engine)
    warm = engine.generate(input_ids=prompt, sampling_params=SEEDED | {"n": 5})

    computed = after.computed_prefill_tokens - before.computed_prefill_tokens
    # The others find all but the last page, which is not full, of what the first has computed.
    assert 150 <= computed <= 150 + 4 * page
    assert [output["meta_info"]["cached_tokens"] for output in cold] == [0] * 5
    assert {output["meta_info"]["prompt_tokens"] for output in cold} == {150}
    assert [output["meta_info"]["cached_tokens"] for output in warm] == [150 // page * page] * 5
    assert [output["output_ids"] for output in warm] == [output["output_ids"] for output in cold]


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
def test_samples_come_prompt_by_prompt(engine: Engine, tokenizer: Tokenizer, stream: bool) -> None:
    texts = ["first one", "the second of them", "third"]
    request = script([], stream=stream, n=2) | {"input_ids": [tokenizer.encode(text) for text in texts]}
    result = engine.generate(**request)
    if not stream:
        assert [output["index"] for output in result] == list(range(6))
        assert [output["text"] for output in result] == [text for text in texts for _ in range(2)]
        return
    shown = [""] * 6
    ended = [False] * 6
    for chunk in result:
        index = chunk["index"]
        assert chunk["text"].startswith(shown[index])
        assert not ended[index]
        shown[index] = chunk["text"]
        ended[index] = chunk["meta_info"]["finish_reason"] is not None
    assert shown == [text for text in texts for _ in range(2)]
    assert all(ended)


def test_cached_tokens_are_never_more_than_the_prompt(engine: Engine) -> None:
    prompt = random_ids(96, seed=96)
    for length in (96, 96, 32, 17, 16, 1):
        meta = engine.generate(input_ids=prompt[:length], sampling_params=GREEDY)["meta_info"]

        # The last token is always computed: its logits choose the first output.
        assert 0 <= meta["cached_tokens"] < length == meta["prompt_tokens"]
    assert settled(engine).pool.consistent


def test_namespaces_share_no_kv(engine: Engine) -> None:
    prompt = random_ids(64, seed=64)

    def cached(**key: str) -> int:
        meta = engine.generate(input_ids=prompt, sampling_params=GREEDY, **key)["meta_info"]
        return int(meta["cached_tokens"])

    assert cached(cache_salt="a") == 0
    assert cached(cache_salt="a") > 0
    assert cached(cache_salt="b") == 0
    assert cached(extra_key="a") == 0
    assert cached() == 0


# -- aborts and rids


def test_aborting_a_queued_request_costs_no_prefill(tiny_model: str) -> None:
    with running_engine(tiny_model, max_running_requests=1) as engine:
        running = engine.generate(input_ids=[17, 18, 19], sampling_params=LONG, rid="runs", stream=True)
        next(running)
        answers: list[dict[str, Any]] = []
        waiting = threading.Thread(
            target=lambda: answers.append(
                engine.generate(input_ids=random_ids(50, seed=50), sampling_params=LONG, rid="waits")
            )
        )
        waiting.start()
        _state_when(engine, lambda state: state.num_waiting == 1)

        engine.abort_request("wait")
        engine.abort_request("waits-not")
        engine.abort_request("waits")
        waiting.join()
        state = engine.internal_state()
        chunk = next(running)
        running.close()

    assert answers[0]["meta_info"]["finish_reason"]["type"] == "abort"
    assert answers[0]["output_ids"] == []
    assert state.computed_prefill_tokens == 3
    assert state.num_running == 1
    assert chunk["meta_info"]["finish_reason"] is None


def test_aborting_a_running_request_keeps_its_text_and_frees_its_kv(engine: Engine) -> None:
    stream = engine.generate(input_ids=random_ids(40, seed=41), sampling_params=LONG, rid="cut", stream=True)
    shown = [next(stream) for _ in range(4)]
    engine.abort_request("cut")
    shown += stream

    last = shown[-1]
    assert last["meta_info"]["finish_reason"]["type"] == "abort"
    assert last["output_ids"][:4] == shown[3]["output_ids"][:4]
    assert last["text"].startswith(shown[3]["text"])
    assert len(last["output_ids"]) == last["meta_info"]["completion_tokens"] < 900
    assert settled(engine).pool.leased_tokens == 0


def test_abort_and_finish_may_race(engine: Engine) -> None:
    for length in (1, 2, 3, 5, 8):
        stream = engine.generate(
            input_ids=[17, 18], sampling_params=GREEDY | {"max_new_tokens": length}, rid="race", stream=True
        )
        chunks = [next(stream)]
        engine.abort_request("race")
        chunks += stream
        engine.abort_request("race")

        reasons = [chunk["meta_info"]["finish_reason"] for chunk in chunks]
        assert [reason is not None for reason in reasons] == [False] * (len(chunks) - 1) + [True]
        assert reasons[-1]["type"] in ("abort", "length")
    state = settled(engine)
    assert state.pool.leased_tokens == 0
    assert state.pool.consistent


def test_a_rid_is_refused_while_it_lives_and_free_after(engine: Engine) -> None:
    first = engine.generate(input_ids=[17, 18], sampling_params=LONG, rid="mine", stream=True)
    next(first)
    with pytest.raises(RequestError, match="in use"):
        engine.generate(input_ids=[19], sampling_params=GREEDY, rid="mine")
    engine.abort_request("mine")
    for chunk in first:
        if chunk["meta_info"]["finish_reason"] is not None:
            break

    # The old owner is not closed yet: that must not touch the new one.
    second = engine.generate(input_ids=[19], sampling_params=LONG | {"max_new_tokens": 60}, rid="mine", stream=True)
    shown = [next(second)]
    first.close()
    shown += second

    assert shown[-1]["meta_info"]["finish_reason"] == {"type": "length", "length": 60}
    assert shown[-1]["meta_info"]["id"] == "mine"


# -- too long


def test_a_prompt_that_is_too_long_is_refused_with_the_counts(engine: Engine) -> None:
    long = random_ids(1100, seed=9)

    for stream in (False, True):
        with pytest.raises(RequestError, match=r"1024 tokens.*1100 in the messages"):
            list(engine.generate(input_ids=long, sampling_params=GREEDY, stream=stream))
        with pytest.raises(RequestError, match=r"prompt 1.*1024 tokens.*1100 in the messages"):
            list(engine.generate(input_ids=[[17], long], sampling_params=GREEDY, stream=stream))
    assert engine.generate(input_ids=[17], sampling_params=GREEDY)["meta_info"]["completion_tokens"] == 16


def test_a_request_that_can_never_fit_the_pool_is_refused_and_the_engine_lives_on(tiny_model: str) -> None:
    with running_engine(tiny_model, max_total_tokens=64) as engine:
        with pytest.raises(RequestError, match=r"64 tokens.*60 in the messages, 16 in the completion"):
            engine.generate(input_ids=random_ids(60, seed=1), sampling_params=GREEDY)
        with pytest.raises(RequestError, match=r"64 tokens.*65 in the messages"):
            engine.generate(input_ids=random_ids(65, seed=1), sampling_params=GREEDY)
        fits = engine.generate(input_ids=random_ids(48, seed=1), sampling_params=GREEDY)

        assert fits["meta_info"]["completion_tokens"] == 16
        assert settled(engine).pool.consistent


def test_no_output_tokens_means_prefill_only(engine: Engine) -> None:
    prompt = random_ids(80, seed=80)
    output = engine.generate(input_ids=prompt, sampling_params={"max_new_tokens": 0})
    again = engine.generate(input_ids=prompt, sampling_params=GREEDY)

    assert output["output_ids"] == []
    assert output["text"] == ""
    assert output["meta_info"]["finish_reason"] == {"type": "length", "length": 0}
    assert again["meta_info"]["cached_tokens"] >= 64


# -- no tokenizer


def test_an_engine_without_a_tokenizer_gives_the_same_ids(tiny_model: str) -> None:
    ids = random_ids(12, seed=3)
    wanted: dict[str, Any] = {"input_ids": ids, "sampling_params": GREEDY, "return_logprob": True}
    with running_engine(tiny_model) as engine:
        want = engine.generate(**wanted)

    with running_engine(tiny_model, skip_tokenizer_init=True) as without:
        got = without.generate(**wanted)
        streamed = list(without.generate(**wanted, stream=True))[-1]
        for refused in (lambda: without.generate("text"), lambda: without.detokenize([1])):
            with pytest.raises(RequestError, match="--skip-tokenizer-init"):
                refused()
        with pytest.raises(RequestError, match="--skip-tokenizer-init"):
            without.tokenize("text")

    assert got["output_ids"] == streamed["output_ids"] == want["output_ids"]
    assert got["meta_info"]["output_token_logprobs"] == want["meta_info"]["output_token_logprobs"]
    assert got["text"] == streamed["text"] == ""
