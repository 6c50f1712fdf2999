"""Choices for a GPU, with made-up facts, and fp8 models on the machine at hand."""

import dataclasses
from types import SimpleNamespace

import msgspec
import pytest
import torch
from fake_backend import FakeBackend
from runner_harness import CONTEXT, make_driver, prompt, save_llama
from safetensors.torch import load_file, save_file

from headrace.checkpoint.model_config import parse_hf_config
from headrace.checkpoint.source import open_checkpoint
from headrace.checkpoint.weight_formats import GGUF_METHOD
from headrace.config.machine import DeviceFacts
from headrace.config.resolve import resolve
from headrace.config.server_args import ServerArgs
from headrace.distributed.base import Shard
from headrace.distributed.rank import ALONE, Rank
from headrace.errors import ConfigError
from headrace.execution.calibrate import WindowRunner
from headrace.execution.graphs import graph_bytes
from headrace.execution.load_weights import load_model
from headrace.execution.memory import kv_token_budget
from headrace.execution.setup import check_can_be_split, own_device
from headrace.layers.weight import Placement
from headrace.models.registry import model_class_for

HOPPER = DeviceFacts(
    has_cuda=True, native_kernels=True, native_reason="", num_cpus=6, cuda_bfloat16=True, cuda_capability=(9, 0)
)
AMPERE = dataclasses.replace(HOPPER, cuda_capability=(8, 0))
LAPTOP = DeviceFacts(has_cuda=False, native_kernels=True, native_reason="", num_cpus=6)
MODEL = {"model_type": "llama", "torch_dtype": "bfloat16"}
BNB = {"quant_method": "bitsandbytes", "load_in_4bit": True}
GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": 128}
GGUF = {"quant_method": GGUF_METHOD, "in_own_bits": True}
FP8 = {"quant_method": "fp8", "weight_block_size": [128, 128]}
QUANTISED = (FakeBackend("graphs", 16, captures=True),)
SIMPLE = (FakeBackend("simple"),)
# Weights and activations of two layers with random weights, each rounded to 3 bits after the leading one.
FP8_ERROR = 0.2


def config(facts=HOPPER, backends=QUANTISED, model=(), **options):
    return resolve(ServerArgs(**options), parse_hf_config({**MODEL, **dict(model)}), facts, backends)


def test_a_gpu_captures_batches_up_to_what_runs_at_once():
    assert config(max_running_requests=24).cuda_graph_sizes == (1, 2, 4, 8, 16, 24)
    assert config(max_running_requests=20).cuda_graph_sizes == (1, 2, 4, 8, 16, 20)
    assert config(max_running_requests=1000).cuda_graph_sizes[-3:] == (224, 240, 256)
    assert config(max_running_requests=1000, cuda_graph_max_bs=2).cuda_graph_sizes == (1, 2)
    assert config(cuda_graph_bs="8,1, 3").cuda_graph_sizes == (1, 3, 8)
    assert config(disable_cuda_graph=True).cuda_graph_sizes == ()
    assert config(LAPTOP).cuda_graph_sizes == ()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"pp_size": 2}, "--pp-size above 1 works on CPUs only so far, and the device is cuda"),
        ({"tp_size": 2, "pp_size": 2}, "--pp-size above 1 works on CPUs only"),
        ({"tp_size": 2, "nnodes": 2}, "--nnodes above 1 works on CPUs only"),
        ({"tp_size": 2, "enable_deterministic_inference": True}, "order of sums over ranks depends on the batch"),
        ({"tp_size": 2, "enable_two_batch_overlap": True}, "--enable-two-batch-overlap works on CPUs only so far"),
        ({"tp_size": 2, "enable_torch_compile": True}, "--tp-size above 1 cannot be combined with --enable-torch-comp"),
    ],
)
def test_what_ranks_do_not_do_on_gpus_is_refused_by_name(options, message):
    model = parse_hf_config(MODEL)
    with pytest.raises(ConfigError, match=message):
        check_can_be_split(ServerArgs(**options), model_class_for(model), config(**options))


def test_attention_of_own_requests_is_refused_on_gpus_and_in_transformers_code():
    model = parse_hf_config({"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2})
    args = ServerArgs(tp_size=2, dp_size=2, enable_dp_attention=True)
    with pytest.raises(ConfigError, match="--enable-dp-attention works on CPUs only so far, and the device is cuda"):
        check_can_be_split(args, model_class_for(model), config(tp_size=2))
    with pytest.raises(ConfigError, match="--enable-dp-attention: this model runs through transformers' code"):
        check_can_be_split(args, model_class_for(model, "transformers"), config(tp_size=2))


def test_ranks_run_on_gpus_and_each_needs_one(monkeypatch):
    args = ServerArgs(tp_size=4, ep_size=4, dp_size=2)
    chosen = []
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    group = SimpleNamespace(rank=3)
    rank = Rank(Shard(3, 4), group=group)
    check_can_be_split(args, model_class_for(parse_hf_config(MODEL)), config(tp_size=4))

    monkeypatch.setattr(torch.cuda, "device_count", lambda: 4)
    assert own_device(args, config(), rank) == torch.device("cuda", 3)
    assert chosen == [torch.device("cuda", 3)]
    assert own_device(args, config(), ALONE) == torch.device("cuda")
    assert own_device(args, config(LAPTOP), rank) == torch.device("cpu")
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 3)
    with pytest.raises(
        ConfigError, match=r"--tp-size 4 needs 4 GPUs, .*, and 3 can be used here by each of --dp-size 2"
    ):
        own_device(args, config(), rank)


def test_a_backend_that_cannot_be_captured_is_said():
    got = config(backends=SIMPLE)

    assert got.cuda_graph_sizes == ()
    assert any("cannot be captured" in decision for decision in got.decisions)


@pytest.mark.parametrize(
    ("facts", "backends", "options", "message"),
    [
        (LAPTOP, QUANTISED, {"cuda_graph_bs": "1,2"}, "for GPUs"),
        (LAPTOP, QUANTISED, {"cuda_graph_max_bs": 4}, "for GPUs"),
        (HOPPER, SIMPLE, {"cuda_graph_max_bs": 4}, "simple cannot be captured"),
        (HOPPER, QUANTISED, {"cuda_graph_bs": "1,x"}, "whole numbers"),
        (HOPPER, QUANTISED, {"cuda_graph_bs": "1,65"}, r"from 1 to --max-running-requests \(64\)"),
        (HOPPER, QUANTISED, {"cuda_graph_bs": "1", "cuda_graph_max_bs": 4}, "leave --cuda-graph-max-bs out"),
        (HOPPER, QUANTISED, {"cuda_graph_bs": "1", "disable_cuda_graph": True}, "cannot be combined with"),
    ],
)
def test_graph_options_that_do_not_fit_are_refused(facts, backends, options, message):
    with pytest.raises(ConfigError, match=message):
        config(facts, backends, **options)


def test_the_share_of_memory_depends_on_the_device():
    assert config(LAPTOP).mem_fraction_static == 0.5
    assert config().mem_fraction_static == 0.85
    assert config(mem_fraction_static=0.3).mem_fraction_static == 0.3


def test_graphs_take_their_room_from_the_kv_cache():
    facts = {"available": 80 << 30, "weight_bytes": 16 << 30, "mem_fraction_static": 0.9, "page_size": 16}
    facts |= {"bytes_per_token": 131072, "max_tokens_useful": 10**9}
    room = graph_bytes(256, 128256, 4096, 8192)

    without, _ = kv_token_budget(**facts)
    beside, reason = kv_token_budget(**facts, reserved_bytes=room)

    assert room > 256 * 128256 * 4 + 256 * 8192 * 4
    assert (without - beside) * 131072 == pytest.approx(room, abs=16 * 131072)
    assert f"{room / 2**30:.2f} GiB that steps need" in reason


@pytest.mark.parametrize(
    ("facts", "model", "options", "want"),
    [
        (HOPPER, {}, {"quantization": "fp8"}, "fp8"),
        (HOPPER, {}, {"quantization": "int4"}, "int4"),
        (HOPPER, {"quantization_config": GPTQ}, {}, "int4"),
        (HOPPER, {"quantization_config": GPTQ}, {"quantization": "fp8"}, "fp8"),
        (HOPPER, {"quantization_config": GPTQ}, {"quantization": "none"}, "none"),
        (LAPTOP, {"quantization_config": GPTQ}, {}, "int4"),
        (LAPTOP, {"quantization_config": GPTQ}, {"quantization": "none"}, "none"),
        (LAPTOP, {"quantization_config": BNB}, {}, "none"),
        (LAPTOP, {"quantization_config": BNB}, {"quantization": "int4"}, "int4"),
        (HOPPER, {"quantization_config": FP8}, {"quantization": "none"}, "none"),
        (HOPPER, {"quantization_config": FP8}, {}, "fp8"),
        (AMPERE, {"quantization_config": FP8}, {}, "none"),
        (LAPTOP, {"quantization_config": FP8}, {}, "none"),
        (HOPPER, {"quantization_config": GPTQ, "torch_dtype": "float16"}, {}, "none"),
        (HOPPER, {"quantization_config": GPTQ, "torch_dtype": "float16"}, {"dtype": "bfloat16"}, "int4"),
        (HOPPER, {"quantization_config": FP8, "model_type": "qwen3_moe"}, {}, "none"),
        (HOPPER, {"quantization_config": GGUF}, {"quantization": "gguf"}, "none"),
        (LAPTOP, {"quantization_config": GGUF}, {"quantization": "gguf", "disable_native_kernels": True}, "none"),
        (LAPTOP, {"quantization_config": GGUF}, {"quantization": "gguf"}, "gguf"),
        (LAPTOP, {"quantization_config": GGUF}, {"quantization": "int4"}, "int4"),
        (LAPTOP, {"quantization_config": GGUF}, {}, "gguf"),
        (LAPTOP, {"quantization_config": GGUF}, {"disable_native_kernels": True}, "none"),
        (LAPTOP, {"quantization_config": GGUF}, {"dtype": "float32"}, "none"),
        (LAPTOP, {"quantization_config": GGUF}, {"activations": "bfloat16"}, "none"),
        (LAPTOP, {"quantization_config": GGUF}, {"save_dir": "saved"}, "none"),
        (LAPTOP, {"quantization_config": {**GGUF, "in_own_bits": False}}, {}, "none"),
    ],
)
def test_weights_are_served_in_the_format_that_the_device_has(facts, model, options, want):
    got = config(facts, model=model, **options)

    assert got.quantization == want
    if want == "none":
        assert any("dequantised" in decision for decision in got.decisions)


@pytest.mark.parametrize(
    ("facts", "model", "options", "message"),
    [
        (LAPTOP, {}, {"quantization": "fp8"}, "a CPU has int8"),
        (AMPERE, {}, {"quantization": "fp8"}, "compute capability 8.9"),
        (HOPPER, {}, {"quantization": "int8"}, "fp8 and int4 do"),
        (HOPPER, {}, {"quantization": "int4", "dtype": "float16"}, "--dtype bfloat16"),
        (HOPPER, {"model_type": "qwen3_moe"}, {"quantization": "fp8"}, "mixture"),
        (LAPTOP, {}, {"quantization": "gguf"}, "neither a GGUF file nor MXFP4"),
        (LAPTOP, {"quantization_config": GPTQ}, {"quantization": "gguf"}, "neither a GGUF file nor MXFP4"),
        (
            HOPPER,
            {},
            {"quantization": "fp8", "enable_deterministic_inference": True},
            "fp8 linear layers depend on the batch",
        ),
    ],
)
def test_a_format_that_the_device_lacks_is_refused(facts, model, options, message):
    with pytest.raises(ConfigError, match=message):
        config(facts, model=model, **options)


@pytest.mark.parametrize("tied", [False, True])
def test_a_model_in_fp8_is_close_to_itself(tmp_path, tied):
    save_llama(tmp_path, hidden_size=64, intermediate_size=96, tie_word_embeddings=tied)
    checkpoint = open_checkpoint(tmp_path)
    tokens = prompt(40, 0)

    def logits(scheme):
        placement = Placement(torch.device("cpu"), torch.float32, CONTEXT, scheme)
        model = load_model(checkpoint, model_class_for(checkpoint.config), placement)
        return model.logits(WindowRunner(model, checkpoint.config, "torch_native", CONTEXT).hidden(tokens))

    want, got = logits("none"), logits("fp8")

    assert 0 < (got - want).norm() / want.norm() < FP8_ERROR


def test_an_fp8_checkpoint_is_dequantised_on_a_cpu(tmp_path):
    (tmp_path / "float").mkdir()
    (tmp_path / "fp8").mkdir()
    save_llama(tmp_path / "float")
    tensors, exact = {}, {}
    for name, tensor in load_file(tmp_path / "float" / "model.safetensors").items():
        if "_proj" in name:
            scale = tensor.abs().amax() / 448
            tensors[name] = (tensor / scale).to(torch.float8_e4m3fn)
            tensors[f"{name}_scale_inv"] = scale.view(1, 1)
            exact[name] = tensors[name].float() * scale
        else:
            tensors[name] = exact[name] = tensor
    save_file(exact, tmp_path / "float" / "model.safetensors")
    save_file(tensors, tmp_path / "fp8" / "model.safetensors")
    settings = msgspec.json.decode((tmp_path / "float" / "config.json").read_bytes())
    (tmp_path / "fp8" / "config.json").write_bytes(msgspec.json.encode({**settings, "quantization_config": FP8}))

    def tokens(folder):
        driver = make_driver(folder)
        try:
            return driver.generate(0, prompt(20, 1), 6), driver.info.decisions
        finally:
            driver.worker.close()

    want, got = tokens(tmp_path / "float"), tokens(tmp_path / "fp8")

    assert got[0] == want[0]
    assert any("fp8 weights are dequantised" in decision for decision in got[1])


@pytest.mark.parametrize("algorithm", ["ngram", "draft", "eagle3"])
def test_guesses_on_several_gpus_are_refused_by_name(algorithm):
    path = None if algorithm == "ngram" else "smollm2"
    options = {"speculative_algorithm": algorithm, "speculative_draft_model_path": path}
    with pytest.raises(ConfigError, match=rf"--speculative-algorithm {algorithm} .*(on CPUs only so far|--tp-size)"):
        config(**options, tp_size=2)
    config(**options)


def test_drafts_by_default_are_off_where_they_are_not_supported_and_refuse_nothing():
    gpu = config(tp_size=2)
    assert gpu.speculative_algorithm == "off"
    assert any("speculative_algorithm off: auto drafts on CPUs only" in decision for decision in gpu.decisions)
    assert config(LAPTOP).speculative_algorithm == "auto"
    assert config(LAPTOP, speculative_algorithm="off").speculative_algorithm == "off"
    model = parse_hf_config(MODEL)
    others = resolve(ServerArgs(), model, LAPTOP, QUANTISED, batch_invariant=False)
    vectors = resolve(ServerArgs(), model, LAPTOP, QUANTISED, generates=False)
    assert others.speculative_algorithm == vectors.speculative_algorithm == "off"


def test_tokens_of_others_are_not_asked_for_where_nothing_is_drafted():
    with pytest.raises(ConfigError, match="--speculative-shared-tokens: nothing is drafted: auto drafts on CPUs only"):
        config(speculative_shared_tokens=100)
    assert config(LAPTOP, speculative_shared_tokens=100).speculative_algorithm == "auto"
