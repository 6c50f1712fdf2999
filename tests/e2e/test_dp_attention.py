"""A mixture of experts whose ranks compute attention for different requests: the text and the logprobs of one process."""

import random
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import psutil
import pytest
import torch
from engines import (
    FILTERED,
    GREEDY,
    PENALISED,
    SEEDED,
    Answer,
    ids_after_retraction,
    make_cases,
    one_by_one,
    random_ids,
    running_engine,
    together,
)
from rank_processes import followers
from server_process import ServerProcess, serving

from headrace.api.engine import Engine
from headrace.errors import ConfigError, HeadraceError

LIMIT_S = 60.0
TOLERANCE = 2e-3
FLOAT32 = {"dtype": "float32", "num_threads": 2, "max_total_tokens": 4096}
TWO: dict[str, Any] = {"tp_size": 2, "dp_size": 2, "enable_dp_attention": True, "single_process": False}
PLAIN = {"temperature": 0.0, "max_new_tokens": 12, "ignore_eos": True}


@pytest.fixture(scope="module")
def started(tiny_mixture: str) -> Iterator[tuple[Engine, psutil.Process]]:
    """An engine of two ranks, and the process that the second had at first."""
    others = followers()
    with running_engine(tiny_mixture, **FLOAT32, **TWO) as engine:
        [follower] = followers() - others
        yield engine, follower


@pytest.fixture(scope="module")
def ranks(started: tuple[Engine, psutil.Process]) -> Engine:
    return started[0]


def hundred_prompts() -> list[list[int]]:
    """A third of them begin with the same 40 tokens."""
    source = random.Random(3)
    return [
        (random_ids(40, seed=1) if i % 3 == 0 else []) + random_ids(source.randrange(1, 60), seed=i) for i in range(100)
    ]


def answers(engine: Engine, prompts: list[list[int]]) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = engine.generate(
        input_ids=prompts, sampling_params=PLAIN, return_logprob=True, logprob_start_len=0
    )
    return found


@pytest.fixture(scope="module")
def want(tiny_mixture: str) -> list[dict[str, Any]]:
    """What one process answers."""
    with running_engine(tiny_mixture, **FLOAT32) as engine:
        return answers(engine, hundred_prompts())


@pytest.fixture(scope="module")
def small(tiny_mixture: str) -> Iterator[Engine]:
    """With a pool of 704 tokens, of which each of two parts has half, and prompts in chunks."""
    options = {"max_total_tokens": 704, "chunked_prefill_size": 16, "schedule_conservativeness": 0.1}
    with running_engine(tiny_mixture, **{**FLOAT32, **TWO, **options}) as engine:
        yield engine


def assert_alike(want: list[dict[str, Any]], found: list[dict[str, Any]]) -> None:
    for one, two in zip(want, found, strict=True):
        assert two["output_ids"] == one["output_ids"]
        for side in ("input_token_logprobs", "output_token_logprobs"):
            for a, b in zip(one["meta_info"][side], two["meta_info"][side], strict=True):
                assert a[1] == b[1]
                assert a[0] is None or abs(a[0] - b[0]) < TOLERANCE


def test_greedy_text_and_logprobs_are_those_of_one_process(
    tiny_mixture: str, ranks: Engine, small: Engine, want: list[dict[str, Any]]
):
    ranks.flush_cache()
    assert_alike(want, answers(ranks, hundred_prompts()))
    small.flush_cache()
    assert_alike(want[::4], answers(small, hundred_prompts()[::4]))


def test_whole_experts_on_three_ranks_one_step_at_a_time_give_the_text_and_logprobs_of_one_process(
    tiny_mixture: str, want: list[dict[str, Any]]
):
    three = {"tp_size": 3, "dp_size": 3, "ep_size": 3, "disable_overlap_schedule": True}
    with running_engine(tiny_mixture, **{**FLOAT32, **TWO, **three}) as engine:
        assert_alike(want[::4], answers(engine, hundred_prompts()[::4]))


def test_an_answer_has_the_same_bits_alone_together_in_chunks_and_cached(ranks: Engine, small: Engine):
    samplings = {"greedy": GREEDY, "seeded": SEEDED, "filtered": FILTERED, "penalised": PENALISED}
    cases = make_cases([1, 17, 130], samplings)
    alone: dict[str, Answer] = one_by_one(ranks, cases)

    assert together(ranks, cases) == alone
    assert together(small, cases) == alone


def test_hidden_states_and_given_embeddings_are_those_of_one_process(tiny_mixture: str, ranks: Engine):
    found = []
    with running_engine(tiny_mixture, **FLOAT32) as one:
        for engine in (one, ranks):
            hidden = engine.generate(input_ids=[[5, 6, 7], [8, 9]], sampling_params=PLAIN, return_hidden_states=True)
            embeds = engine.generate(input_embeds=[[0.01 * i] * 64 for i in range(9)], sampling_params=PLAIN)
            states = [torch.tensor(state) for out in hidden for state in out["meta_info"]["hidden_states"]]
            found.append((states, embeds["output_ids"]))
    (one_states, one_ids), (two_states, two_ids) = found
    assert two_ids == one_ids
    for a, b in zip(one_states, two_states, strict=True):
        assert torch.allclose(a, b, rtol=0, atol=TOLERANCE)


def test_a_prompt_that_comes_again_is_found_in_its_part_and_its_samples_prefill_it_once(ranks: Engine):
    ranks.flush_cache()
    prompt = random_ids(200, seed=77)
    first, again = (ranks.generate(input_ids=prompt, sampling_params=PLAIN) for _ in range(2))
    assert first["meta_info"]["cached_tokens"] == 0
    assert again["meta_info"]["cached_tokens"] == 192  # whole pages of 16
    assert again["output_ids"] == first["output_ids"]

    ranks.flush_cache()
    before = ranks.internal_state().computed_prefill_tokens
    samples = ranks.generate(input_ids=prompt, sampling_params={**PLAIN, "n": 4})
    assert {tuple(out["output_ids"]) for out in samples} == {tuple(first["output_ids"])}
    computed = ranks.internal_state().computed_prefill_tokens - before
    assert computed <= 200 + 3 * 8  # each other sample computes what its last page lacks


def test_the_pool_is_counted_over_all_parts_and_a_request_fits_into_one(small: Engine):
    info = small.get_server_info()
    assert info["max_total_num_tokens"] == 704
    assert info["context_length"] == 352
    assert small.internal_state().pool.total_tokens == 704
    small.flush_cache()
    longest = small.generate(input_ids=[5] * 296, sampling_params={**PLAIN, "max_new_tokens": 56})
    assert longest["meta_info"]["completion_tokens"] == 56
    small.generate(input_ids=[6] * 296, sampling_params=PLAIN)
    assert small.internal_state().pool.evictable_tokens > 352  # each is in another part
    with pytest.raises(HeadraceError, match="352"):
        small.generate(input_ids=[5] * 340, sampling_params={**PLAIN, "max_new_tokens": 56})


def test_requests_that_were_set_back_are_as_alone(small: Engine):
    """More prompts than the parts have room for; and a pause that sends all of them back to the queue."""
    greedy = {"temperature": 0.0, "max_new_tokens": 60, "ignore_eos": True}
    sampling = [greedy, {**greedy, "temperature": 0.8, "seed": 3}] * 4
    prompts = [[5 + i] * 40 for i in range(len(sampling))]
    alone = [
        small.generate(input_ids=prompt, sampling_params=one)["output_ids"]
        for prompt, one in zip(prompts, sampling, strict=True)
    ]
    small.flush_cache()
    before = small.internal_state().num_retracted
    found = small.generate(input_ids=prompts, sampling_params=sampling)
    assert [one["output_ids"] for one in found] == alone
    assert small.internal_state().num_retracted > before
    assert ids_after_retraction(small, prompts, sampling) == alone
    assert small.internal_state().memory_repairs == 0


def test_a_rank_that_is_killed_costs_no_token(started: tuple[Engine, psutil.Process]):
    ranks, lost = started
    prompts = [[5 + i, 6, 7, 8, 9] for i in range(4)]
    sampling = {"temperature": 0.9, "seed": 5, "max_new_tokens": 200, "ignore_eos": True}
    whole = [out["output_ids"] for out in ranks.generate(input_ids=prompts, sampling_params=sampling)]
    begun = threading.Event()
    outputs: list[list[int]] = []

    def generate() -> None:
        last: dict[int, list[int]] = {}
        for item in ranks.generate(input_ids=prompts, sampling_params=sampling, stream=True):
            last[item.get("index", 0)] = item["output_ids"]
            begun.set()
        outputs.extend(last[i] for i in sorted(last))

    thread = threading.Thread(target=generate)
    thread.start()
    assert begun.wait(LIMIT_S)
    lost.kill()
    thread.join(LIMIT_S)
    assert not thread.is_alive()
    assert outputs == whole
    assert not lost.is_running()


@pytest.fixture(scope="module")
def server(tiny_mixture: str) -> Iterator[ServerProcess]:
    options = ("--tp-size", "2", "--dp-size", "2", "--enable-dp-attention", "--quantization", "int8")
    with serving(tiny_mixture, *options, "--max-total-tokens", "8192") as made:
        yield made


def test_quantised_answers_have_the_same_bits_together(server: ServerProcess):
    prompts = hundred_prompts()[:8]
    assert server.get("/server_info")["kv_cache_added_error"] <= 0.02
    alone = [server.post("/generate", {"input_ids": ids, "sampling_params": PLAIN})["output_ids"] for ids in prompts]
    both = server.post("/generate", {"input_ids": prompts, "sampling_params": PLAIN})
    assert [one["output_ids"] for one in both] == alone


def test_a_server_answers_the_openai_client_and_counts_one_replica(server: ServerProcess):
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0, timeout=60) as client:
        model = client.models.list().data[0].id
        asked = {"prompt": "Once upon a time", "temperature": 0, "max_tokens": 16, "extra_body": {"ignore_eos": True}}
        whole = client.completions.create(model=model, **asked)
        parts = client.completions.create(model=model, stream=True, **asked)
        assert "".join(part.choices[0].text for part in parts if part.choices) == whole.choices[0].text
        assert len(server.get("/v1/loads")["loads"]) == 1
        [tree] = server.get("/cache_tree")["data"]
        assert tree["num_tokens"] > 0
        assert [node for node in tree["nodes"] if node["parent"] == -1]


def test_what_does_not_go_with_it_is_refused(tiny_model: str, tiny_mixture: str, tmp_path: Path):
    def refused(words: str, **options: Any) -> None:
        with pytest.raises(ConfigError, match=words):
            Engine(**{"model_path": tiny_mixture, **TWO, **options})

    refused("needs --tp-size", tp_size=1)
    refused("must be the value of --tp-size, 2, got 1", dp_size=1)
    refused("cannot be combined with --pp-size", pp_size=2)
    refused("cannot be combined with --lora-paths", lora_paths=f"x={tmp_path}")
    refused("--enable-dp-attention is for mixtures of experts, and model type llama", model_path=tiny_model)


def test_an_adapter_is_refused_while_it_serves(ranks: Engine, tmp_path: Path):
    with pytest.raises(HeadraceError, match="not supported with --enable-dp-attention"):
        ranks.load_lora_adapter("x", str(tmp_path))
