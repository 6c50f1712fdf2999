"""An EAGLE-3 head on a device: nothing that it does asks for a value."""

import contextlib
from pathlib import Path

import pytest
import torch
from device_harness import NUM_SEQS, Elsewhere, TensorAttention, device_driver
from eagle_head import CONFIG, HIDDEN_SIZE, NUM_LAYERS, READS
from runner_harness import CONTEXT, DRAWN, GREEDY, VOCAB_SIZE, prompt, save_llama

from headrace import kernels
from headrace.checkpoint.model_config import parse_hf_config
from headrace.execution.drafting import DeviceDraftSteps, DeviceEagleDrafter
from headrace.execution.load_weights import fill_random
from headrace.layers.weight import Placement
from headrace.models.decoder import DecoderLM
from headrace.models.eagle3 import EagleHead
from headrace.models.spec import kv_shape
from headrace.sampling.params import ResolvedSamplingParams
from headrace.speculative.base import Drafts

MOST = 4


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder: Path = tmp_path_factory.mktemp("llama")
    save_llama(folder, num_hidden_layers=NUM_LAYERS)
    return folder


@pytest.mark.parametrize("sampling", [GREEDY, DRAWN], ids=["greedy", "drawn"])
def test_no_value_is_asked_for(folder: Path, sampling: ResolvedSamplingParams) -> None:
    """In a prompt's step, in one that is a graph and in one that verifies guesses, of which the second is queued before the first has run."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(kernels.prefer("torch"))
        device, where = Elsewhere(), torch.device("meta")
        driver, runner, _ = device_driver(folder, sizes=(1, 2), verifying=(4, 8), device=device, on="meta")
        stack.callback(runner.runner.sampler.grammars.close)
        model, table, graphs = runner.runner.model, runner.runner.table, runner.graphs
        assert isinstance(model, DecoderLM)
        assert graphs is not None
        model.tap(READS)
        model.keep_tapped(8)
        graphs.capture()
        config = parse_hf_config(CONFIG)
        head = EagleHead(config, Placement(where, torch.float32, CONTEXT), model.embed, VOCAB_SIZE)
        fill_random(head.weights(), 0)
        attention = TensorAttention()
        attention.make_kv_pool(kv_shape(config, torch.float32), NUM_SEQS * CONTEXT + 1, 1, where)
        steps = DeviceDraftSteps(attention, table, runner.runner.sampler, device)
        features = torch.zeros(NUM_SEQS, 1 + MOST, HIDDEN_SIZE, device=where)
        runner.runner.drafts = Drafts([DeviceEagleDrafter(head, model, steps, features)])

        new = tuple(driver.new(seq, prompt(20 + seq, seq), sampling=sampling) for seq in range(2))
        driver.submit([(0, 20, True), (1, 9, False)], new)
        driver.submit([(0, 1, True), (1, 12, True)])
        driver.submit([(0, 1, True), (1, 1, True)])
        driver.submit([(0, 1, 1), (1, 1 + MOST, 1 + MOST)])

        assert [type(pending.step).__name__ for _, pending in driver.worker.lane.in_flight] == [  # type: ignore[attr-defined]
            *["QueuedStep"] * 3,
            "QueuedVerification",
        ]
