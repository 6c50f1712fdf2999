"""Which experts were chosen, as the worker tells it, against the routers of transformers."""

from pathlib import Path

import pytest
import torch
import transformers
from runner_harness import CONTEXT, VOCAB_SIZE, make_driver, prompt, save_llama

from headrace.errors import RequestError
from headrace.messages.control import ExpertCountsReq

NUM_EXPERTS, CHOSEN = 5, 2
PROMPT = prompt(40, seed=3)


@pytest.fixture(scope="module")
def mixture(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, transformers.PreTrainedModel]:
    """Three layers, the middle one dense."""
    config = transformers.Qwen3MoeConfig(
        vocab_size=VOCAB_SIZE, hidden_size=32, intermediate_size=48, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, max_position_embeddings=CONTEXT, tie_word_embeddings=False,
        num_experts=NUM_EXPERTS, num_experts_per_tok=CHOSEN, moe_intermediate_size=24, mlp_only_layers=[1],
    )  # fmt: skip
    model = transformers.AutoModelForCausalLM.from_config(config, attn_implementation="eager", dtype=torch.float32)
    generator = torch.Generator().manual_seed(0)
    for tensor in model.parameters():
        if tensor.ndim > 1:
            tensor.data = torch.randn(tensor.shape, generator=generator) / tensor.shape[-1] ** 0.5
    folder = tmp_path_factory.mktemp("mixture")
    model.eval().save_pretrained(folder)
    return folder, model


def counts_of_routers(model: transformers.PreTrainedModel, tokens: list[int]) -> list[list[int]]:
    with torch.inference_mode():
        routers = model(torch.tensor([tokens]), output_router_logits=True).router_logits
    chosen = [logits.topk(CHOSEN, dim=-1).indices.flatten() for logits in routers]
    return [torch.bincount(experts, minlength=NUM_EXPERTS).tolist() for experts in chosen]


@pytest.mark.parametrize(
    "options", [{}, {"disable_overlap_schedule": False}, {"disable_native_kernels": True}], ids=str
)
def test_every_token_of_every_sparse_layer_is_counted(mixture, options):
    folder, model = mixture
    driver = make_driver(folder, **options)
    worker = driver.worker
    driver.generate(0, PROMPT, 2)
    assert worker.count_experts(ExpertCountsReq("dump")).layers == {0: [0] * NUM_EXPERTS, 2: [0] * NUM_EXPERTS}

    worker.count_experts(ExpertCountsReq("start"))
    made = driver.generate(1, PROMPT, 4, chunks=(7, 13))
    got = worker.count_experts(ExpertCountsReq("dump"))
    worker.count_experts(ExpertCountsReq("stop"))
    driver.generate(2, PROMPT, 2)
    after = worker.count_experts(ExpertCountsReq("dump"))
    worker.close()

    first, last = counts_of_routers(model, [*PROMPT, *made[:-1]])
    assert got.layers == {0: first, 2: last}
    assert sum(first) == CHOSEN * (len(PROMPT) + 3)
    assert not any(any(counts) for counts in after.layers.values())


def test_what_was_counted_before_the_stop_can_be_told_after_it(mixture):
    driver = make_driver(mixture[0])
    driver.worker.count_experts(ExpertCountsReq("start"))
    driver.generate(0, PROMPT, 1)
    driver.worker.count_experts(ExpertCountsReq("stop"))
    got = driver.worker.count_experts(ExpertCountsReq("dump"))
    driver.worker.close()

    assert {layer: sum(counts) for layer, counts in got.layers.items()} == {0: 80, 2: 80}


@pytest.mark.parametrize("overlap", [True, False])
def test_a_dense_model_has_nothing_to_record(tmp_path, overlap):
    save_llama(tmp_path)
    driver = make_driver(tmp_path, disable_overlap_schedule=not overlap)
    with pytest.raises(RequestError, match="no experts"):
        driver.worker.count_experts(ExpertCountsReq("start"))
    driver.worker.close()
