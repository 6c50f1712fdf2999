"""Experts that are whole on different ranks: the text of one process, and operations on weights that only some ranks have."""

from typing import Any

import pytest
import torch
from engines import running_engine
from weights_harness import PROMPTS, engine_of, fresh, save, tensors_of, tokens

from headrace.errors import RequestError

TWO: dict[str, Any] = {
    "tp_size": 2,
    "ep_size": 2,
    "single_process": False,
    "num_threads": 2,
    "max_total_tokens": 2048,
    "dtype": "float32",
}
EXPERTS = {"num_local_experts": 5, "num_experts_per_tok": 2}
ELSEWHERE = "model.layers.1.block_sparse_moe.experts.4.w2.weight"
"""The first rank has experts 0 to 2."""


@pytest.fixture(scope="module")
def mixtures(tmp_path_factory):
    folder = tmp_path_factory.mktemp("mixtures")
    return [save(folder / name, seed, False, "mixtral", **EXPERTS) for seed, name in enumerate(("old", "new"), start=1)]


@pytest.fixture(scope="module")
def answers(mixtures):
    return [fresh(folder) for folder in mixtures]


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    return tmp_path_factory.mktemp("saved")


@pytest.fixture(scope="module", params=["split", "whole"])
def attention(request):
    """What of attention's weights a rank has."""
    return request.param


@pytest.fixture(scope="module")
def ranks(mixtures, folder, attention):
    own = {"dp_size": 2, "enable_dp_attention": True} if attention == "whole" else {}
    with running_engine(mixtures[0], save_dir=str(folder), **TWO, **own) as engine:
        yield engine


def test_the_text_and_the_bytes_are_those_of_one_process(ranks, mixtures, answers):
    with engine_of(mixtures[0]) as one:
        want = one.get_server_info()
        logprobs = prompt_logprobs(one)
    assert tokens(ranks) == answers[0]
    assert (prompt_logprobs(ranks) - logprobs).abs().max() < 2e-3
    found = ranks.get_server_info()
    assert [found[name] for name in ("weight_bytes", "kv_bytes")] == [
        want[name] for name in ("weight_bytes", "kv_bytes")
    ]


def prompt_logprobs(engine) -> torch.Tensor:
    answer = engine.generate(
        input_ids=PROMPTS[1], sampling_params={"max_new_tokens": 1}, return_logprob=True, logprob_start_len=0
    )
    return torch.tensor([one[0] for one in answer["meta_info"]["input_token_logprobs"][1:]])


def test_the_choice_of_experts_is_that_of_one_process(ranks, mixtures, answers):
    found = []
    with engine_of(mixtures[0]) as one:
        for engine in (one, ranks):
            engine.flush_cache()
            engine.start_expert_distribution_record()
            assert tokens(engine) == answers[0]
            found.append(engine.dump_expert_distribution_record())
            engine.stop_expert_distribution_record()
            with pytest.raises(RequestError, match="return_routed_experts"):
                engine.generate(input_ids=PROMPTS[0], return_routed_experts=True)
    assert found[0] == found[1]


def test_weights_are_replaced_on_the_rank_that_has_them(ranks, mixtures, answers):
    for folder, want in ((mixtures[1], answers[1]), (mixtures[0], answers[0])):
        assert ranks.update_weights_from_disk(folder)[0]
        assert tokens(ranks) == want
    for folder, want in ((mixtures[1], answers[1]), (mixtures[0], answers[0])):
        assert ranks.update_weights_from_tensor(list(tensors_of(folder).items()))[0]
        assert tokens(ranks) == want


def test_what_no_rank_can_take_is_refused_by_all(ranks, answers):
    success, message = ranks.update_weights_from_tensor([(ELSEWHERE, torch.ones(3, 3))])
    assert not success
    assert f"{ELSEWHERE} is [3, 3], not [64, 96]" in message
    success, message = ranks.update_weights_from_tensor([(ELSEWHERE, torch.full((64, 96), torch.nan))])
    assert not success
    assert "NaN" in message
    assert tokens(ranks) == answers[0]


def test_checksums_are_those_of_one_process_and_random_values_reach_every_rank(ranks, mixtures, answers):
    with engine_of(mixtures[0]) as one:
        want = one.check_weights()
    assert want["success"]
    assert ranks.check_weights() == want
    assert ranks.check_weights("snapshot")["success"]
    assert ranks.check_weights("reset_tensors")["success"]
    assert not ranks.check_weights("compare", skip_tensor_list=["layers.0", "embed", "lm_head", "norm"])["success"]
    assert ranks.update_weights_from_disk(mixtures[0])[0]
    assert ranks.check_weights("compare")["success"]
    assert tokens(ranks) == answers[0]


def test_weights_are_read_from_the_rank_that_has_them(ranks, mixtures):
    stored = tensors_of(mixtures[0])
    assert ELSEWHERE in stored
    for name in stored:
        read = torch.tensor(ranks.get_weights_by_name(name, truncate_size=3000))
        assert torch.equal(read, stored[name].float()), name


def test_what_is_saved_has_all_experts(ranks, mixtures, answers, folder, attention):
    assert ranks.save_sharded_state(attention)[0]
    again = fresh(str(folder / attention), load_format="sharded_state", tokenizer_path=mixtures[0])
    assert again == answers[0]


def test_memory_is_released_and_taken_back(ranks, answers):
    assert ranks.release_memory_occupation(["kv_cache", "weights"])[0]
    assert ranks.resume_memory_occupation(["kv_cache", "weights"])[0]
    assert tokens(ranks) == answers[0]
