"""Every automatic choice, without a machine: facts are made up."""

import subprocess
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import msgspec
import pytest
from fake_backend import FakeBackend

from headrace.checkpoint.model_config import parse_hf_config
from headrace.checkpoint.weight_formats import GGUF_METHOD
from headrace.config.machine import DeviceFacts
from headrace.config.resolve import AttentionFacts, AttentionNeeds, refuse_early, resolve
from headrace.config.server_args import ServerArgs
from headrace.errors import ConfigError
from headrace.execution.model_source import override_model, sampling_defaults

LAPTOP = DeviceFacts(has_cuda=False, native_kernels=True, native_reason="", num_cpus=6)
GPU = DeviceFacts(has_cuda=True, native_kernels=True, native_reason="", num_cpus=6, cuda_bfloat16=True)
OLD_GPU = DeviceFacts(has_cuda=True, native_kernels=True, native_reason="", num_cpus=6)
NO_KERNELS = DeviceFacts(has_cuda=False, native_kernels=False, native_reason="it was not built", num_cpus=6)
MODEL = parse_hf_config({"model_type": "llama", "torch_dtype": "float16", "eos_token_id": [2, 5]}, {"temperature": 0.6})


def is_not_for_cpu(needs: AttentionNeeds) -> bool:
    return needs.device != "cpu" or not needs.native_kernels or needs.page_size not in (None, 16)


BACKENDS = (FakeBackend("cpu", 16, refuses=is_not_for_cpu), FakeBackend("plain"))


def config(facts: DeviceFacts = LAPTOP, backends: Sequence[AttentionFacts] = BACKENDS, **options):
    return resolve(ServerArgs(**options), MODEL, facts, backends)


def test_a_laptop_gets_native_kernels_bfloat16_and_pages_of_16():
    got = config()

    assert (got.device, got.dtype, got.kv_cache_dtype, got.attention_backend) == ("cpu", "bfloat16", "bfloat16", "cpu")
    assert (got.page_size, got.num_threads, got.native_kernels) == (16, 6, True)
    assert got.context_length == MODEL.max_position_embeddings


def test_what_the_user_says_is_kept_and_not_reported_as_a_decision():
    got = config(
        device="cpu", dtype="float32", kv_cache_dtype="bfloat16", num_threads=3, page_size=1, context_length=99,
        attention_backend="auto", disable_overlap_schedule=True, chunked_prefill_size=-1,
    )  # fmt: skip

    assert (got.dtype, got.kv_cache_dtype, got.num_threads, got.context_length) == ("float32", "bfloat16", 3, 99)
    assert (got.page_size, got.attention_backend, got.chunked_prefill_size) == (1, "plain", 2048)
    assert len(got.decisions) == 1
    assert got.decisions[0].startswith("attention_backend plain: cpu cannot: not here")


def attention_of(facts: DeviceFacts, *backends: AttentionFacts) -> tuple[str, str]:
    got = config(facts, backends)
    (said,) = [decision for decision in got.decisions if decision.startswith("attention_backend")]
    return got.attention_backend, said


def test_a_backend_that_was_verified_on_such_a_device_goes_before_a_faster_one_that_was_not():
    fast, slow = FakeBackend("fast", verified=frozenset({"cuda"})), FakeBackend("slow")

    assert attention_of(LAPTOP, fast, slow) == ("slow", "attention_backend slow: fast is not verified on cpu")
    assert attention_of(GPU, fast, slow) == ("fast", "attention_backend fast: the fastest for this device")


def test_where_none_is_verified_the_fastest_is_taken_and_that_is_said():
    fast = FakeBackend("fast", verified=frozenset())
    said = "not verified on cuda yet, nor is any other that supports the model"

    assert attention_of(GPU, fast, FakeBackend("slow")) == ("fast", f"attention_backend fast: {said}")
    absent = FakeBackend("absent", refuses=lambda needs: True)
    assert attention_of(GPU, absent, fast) == ("fast", f"attention_backend fast: absent cannot: not here; {said}")


def test_dynamic_ntk_is_served_up_to_the_trained_length():
    raw = {"model_type": "llama", "max_position_embeddings": 256, "rope_scaling": {"type": "dynamic", "factor": 4.0}}
    model = parse_hf_config(raw)

    assert resolve(ServerArgs(), model, LAPTOP, BACKENDS).context_length == 256
    with pytest.raises(ConfigError, match=r"257 is longer than the 256 positions .* dynamic NTK"):
        resolve(ServerArgs(context_length=257), model, LAPTOP, BACKENDS)


def test_the_longest_text_of_an_embedding_model_is_its_context_unless_the_operator_says_another_length():
    assert resolve(ServerArgs(), MODEL, LAPTOP, BACKENDS, most_tokens=100).context_length == 100
    assert resolve(ServerArgs(context_length=50), MODEL, LAPTOP, BACKENDS, most_tokens=100).context_length == 50
    assert resolve(ServerArgs(context_length=200), MODEL, LAPTOP, BACKENDS, most_tokens=100).context_length == 200


@pytest.mark.parametrize(
    ("facts", "options", "size"),
    [
        (LAPTOP, {}, 512),
        (GPU, {"page_size": 1}, 2048),
        (LAPTOP, {"chunked_prefill_size": 64}, 64),
        (LAPTOP, {"max_prefill_tokens": 100}, 100),
        (LAPTOP, {"chunked_prefill_size": -1, "max_prefill_tokens": 4096}, 4096),
    ],
)
def test_the_prompt_tokens_of_a_step_are_bounded_by_both_options(facts: DeviceFacts, options: dict, size: int):
    assert config(facts, **options).chunked_prefill_size == size


@pytest.mark.parametrize(
    ("facts", "options", "limit"),
    [
        (LAPTOP, {}, 200),
        (LAPTOP, {"max_step_ms": 40}, 40),
        (LAPTOP, {"max_step_ms": -1}, None),
        (GPU, {}, None),
        (GPU, {"max_step_ms": -1}, None),
        (GPU, {"enable_deterministic_inference": True}, 200),
    ],
)
def test_steps_are_bounded_in_time_where_tokens_do_not_depend_on_how_prompts_are_cut(facts, options, limit):
    assert config(facts, **options).max_step_ms == limit


def test_a_bound_in_time_that_would_change_tokens_is_refused():
    with pytest.raises(ConfigError, match=r"--max-step-ms 40: .* cuda without --enable-deterministic-inference"):
        config(GPU, max_step_ms=40)
    with pytest.raises(ConfigError, match=r"--max-step-ms 40: .* transformers"):
        resolve(ServerArgs(max_step_ms=40), MODEL, LAPTOP, BACKENDS, batch_invariant=False)
    assert resolve(ServerArgs(), MODEL, LAPTOP, BACKENDS, batch_invariant=False).max_step_ms is None


@pytest.mark.parametrize(("option", "dtype"), [("bf16", "bfloat16"), ("int8", "int8"), ("auto", "float32")])
def test_the_kv_cache_may_have_a_type_of_its_own(option: str, dtype: str):
    assert config(dtype="float32", kv_cache_dtype=option).kv_cache_dtype == dtype


def on_isa(isa: str, **options: Any) -> tuple[str, str, str]:
    """(quantization, activations, weight format) of a laptop with this instruction set."""
    got = config(replace(LAPTOP, cpu_isa=isa), **options)
    return got.quantization, got.activations, got.weight_format


@pytest.mark.parametrize(
    ("isa", "want"),
    [
        ("avx512bf16", ("none", "bfloat16", "bfloat16")),
        ("amx", ("none", "bfloat16", "bfloat16")),
        ("avx512vnni", ("int16", "float32", "int16")),
        ("avx512", ("none", "float32", "none")),
        ("avxvnni", ("int16", "float32", "int16")),
        ("avx2", ("int16", "float32", "int16")),
        ("neon_i8mm", ("none", "float32", "none")),
    ],
)
def test_sixteen_bits_are_computed_in_the_fastest_way_of_the_processor_and_that_is_said(isa: str, want: tuple):
    assert on_isa(isa) == want
    said = [decision for decision in config(replace(LAPTOP, cpu_isa=isa)).decisions if isa in decision]
    assert len(said) == 1
    for exact in ({"activations": "float32"}, {"dtype": "float32"}):
        assert on_isa(isa, **exact) == ("none", "float32", "none")
    assert on_isa(isa, quantization="int8") == ("int8", "float32", "int8")
    assert on_isa(isa, activations="bfloat16") == ("none", "bfloat16", "bfloat16")
    assert on_isa(isa, disable_native_kernels=True) == ("none", "float32", "none")


def test_weights_that_will_be_saved_or_were_asked_for_in_bfloat16_stay_as_they_are():
    assert on_isa("avx512vnni", save_dir="/tmp") == ("none", "float32", "none")
    assert on_isa("avx512vnni", dtype="bfloat16") == ("none", "float32", "none")


@pytest.mark.parametrize(
    ("facts", "options", "reason"),
    [
        (LAPTOP, {"activations": "bfloat16", "dtype": "float32"}, "--dtype bfloat16"),
        (LAPTOP, {"activations": "bfloat16", "quantization": "int8"}, "int8 linear layers"),
        (GPU, {"activations": "float32"}, "a choice on CPU"),
    ],
)
def test_activations_that_cannot_be_had_are_refused(facts: DeviceFacts, options: dict, reason: str):
    with pytest.raises(ConfigError, match=reason):
        config(facts, **options)


@pytest.mark.parametrize(
    ("quantization", "dtype"),
    [("int8", "int8"), ("int8-fast", "int8"), ("int4", "int8"), ("int16", "int16"), ("none", "bfloat16")],
)
def test_on_cpu_integers_get_a_kv_cache_of_integers(quantization: str, dtype: str):
    got = config(quantization=quantization)

    assert got.kv_cache_dtype == dtype
    assert any(decision.startswith(f"kv_cache_dtype {dtype}: ") for decision in got.decisions)
    assert config(quantization=quantization, kv_cache_dtype="bfloat16").kv_cache_dtype == "bfloat16"


def test_a_backend_without_a_kv_cache_of_8_bits_keeps_that_of_the_weights_and_says_why():
    no_bytes = FakeBackend("plain", refuses=lambda needs: needs.kv_cache_dtype == "int8")

    got = config(backends=[no_bytes], quantization="int8")

    assert got.kv_cache_dtype == "bfloat16"
    assert "kv_cache_dtype bfloat16: plain cannot have int8: not here" in got.decisions
    with pytest.raises(ConfigError, match="not here"):
        config(backends=[no_bytes], quantization="int8", kv_cache_dtype="int8")


def test_a_file_in_its_own_bits_has_a_kv_cache_of_16_bits():
    file = parse_hf_config(
        {"model_type": "llama", "quantization_config": {"quant_method": GGUF_METHOD, "in_own_bits": True}}
    )

    got, asked = (resolve(args, file, LAPTOP, BACKENDS) for args in (ServerArgs(), ServerArgs(kv_cache_dtype="int8")))

    assert (got.kv_cache_dtype, got.kv_cache_fallback) == ("int16", "bfloat16")
    assert (asked.kv_cache_dtype, asked.kv_cache_fallback) == ("int8", "")
    assert config(quantization="int8").kv_cache_fallback == "bfloat16"


def test_wide_heads_keep_a_kv_cache_of_16_bits_unless_8_are_asked_for():
    wide = parse_hf_config({"model_type": "llama", "head_dim": 256})

    got = resolve(ServerArgs(quantization="int8"), wide, LAPTOP, BACKENDS)

    assert got.kv_cache_dtype == "bfloat16"
    assert "kv_cache_dtype bfloat16: heads of 256 elements lose too much in int8" in got.decisions
    asked = ServerArgs(quantization="int8", kv_cache_dtype="int8")
    assert resolve(asked, wide, LAPTOP, BACKENDS).kv_cache_dtype == "int8"
    assert resolve(ServerArgs(quantization="int16"), wide, LAPTOP, BACKENDS).kv_cache_dtype == "int16"


def test_a_gpu_keeps_the_kv_cache_in_the_dtype_of_the_model():
    assert config(GPU, quantization="int4", dtype="bfloat16").kv_cache_dtype == "bfloat16"


@pytest.mark.parametrize(("facts", "reason"), [(NO_KERNELS, "it was not built"), (LAPTOP, "--disable-native-kernels")])
def test_missing_native_kernels_are_said_with_the_reason(facts: DeviceFacts, reason: str):
    got = config(facts, disable_native_kernels=facts is LAPTOP)

    assert not got.native_kernels
    assert any(reason in decision for decision in got.decisions)


def test_a_gpu_is_taken_when_there_is_one_in_the_checkpoints_dtype():
    assert (config(GPU).device, config(GPU).dtype) == ("cuda", "float16")
    assert config(OLD_GPU, dtype="auto").dtype == "float16"
    assert not config(GPU).native_kernels


@pytest.mark.parametrize(
    ("facts", "options", "message"),
    [
        (LAPTOP, {"device": "cuda"}, "no GPU"),
        (LAPTOP, {"dtype": "float16"}, "float16"),
        (LAPTOP, {"kv_cache_dtype": "float16"}, "kv-cache-dtype"),
        (OLD_GPU, {"dtype": "bfloat16"}, "float16"),
        (LAPTOP, {"attention_backend": "cpu", "page_size": 1}, "not here"),
        (LAPTOP, {"context_length": 2049}, "2048"),
    ],
)
def test_impossible_combinations_are_refused(facts: DeviceFacts, options: dict[str, object], message: str):
    with pytest.raises(ConfigError, match=message):
        config(facts, **options)


def test_an_override_keeps_what_generation_config_said():
    changed = override_model(MODEL, '{"rope_theta": 5.0}')

    assert changed.rope.theta == 5.0
    assert changed.eos_token_ids == (2, 5)
    assert changed.sampling_defaults.temperature == 0.6
    assert override_model(MODEL, "{}") is MODEL
    assert override_model(MODEL, '{"eos_token_id": 7}').eos_token_ids == (7,)


def test_the_user_may_turn_the_sampling_defaults_of_the_model_off():
    assert sampling_defaults(ServerArgs(), MODEL).temperature == 0.6

    plain = sampling_defaults(ServerArgs(sampling_defaults="openai"), MODEL)
    assert plain.summary() == "temperature 1 (--sampling-defaults openai)"


def test_resolving_needs_no_torch():
    code = "import headrace.config.resolve, sys; sys.exit('torch' in sys.modules)"

    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


OPTIONS = (
    {},
    {"device": "cpu", "dtype": "bfloat16"},
    {"device": "cuda"},
    {"context_length": 10**6},
    {"dtype": "float16"},
    {"kv_cache_dtype": "float16"},
    {"kv_cache_dtype": "fp8_e4m3"},
    {"quantization": "fp8"},
    {"quantization": "int8", "activations": "bfloat16"},
    {"dtype": "float32", "activations": "bfloat16"},
    {"enable_torch_compile": True},
    {"quantization": "int4", "kv_cache_dtype": "int8", "context_length": 9},
)


def refusal(call) -> str:
    try:
        call()
    except ConfigError as error:
        return error.message
    return ""


@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_what_is_refused_before_torch_is_there_is_what_would_be_refused_later(options):
    args = ServerArgs(**options)

    early = refusal(lambda: refuse_early(args, MODEL, has_cuda=False, memory_bytes=2**40))

    assert early == refusal(lambda: resolve(args, MODEL, LAPTOP, BACKENDS))


def test_as_long_as_there_may_be_a_gpu_only_what_holds_on_every_device_is_refused():
    refused = [
        options
        for options in OPTIONS
        if refusal(lambda: refuse_early(ServerArgs(**options), MODEL, has_cuda=None, memory_bytes=2**40))  # noqa: B023
    ]
    assert refused == [{"context_length": 10**6}]
    assert "float16" in refusal(
        lambda: refuse_early(ServerArgs(device="cpu", dtype="float16"), MODEL, has_cuda=None, memory_bytes=0)
    )


SMALL = parse_hf_config(
    {
        "model_type": "llama", "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 10, "num_attention_heads": 16,
        "num_key_value_heads": 4, "vocab_size": 32768, "max_position_embeddings": 4096,
    }
)  # fmt: skip
SMALL_WEIGHTS = 2 * (1024 * 32768 + 10 * (2 * 1024 * (16 + 4) * 64 + 3 * 1024 * 4096))
"""Bytes, at least: in 16 bits."""


@pytest.mark.parametrize(
    ("options", "advice"),
    [
        ({"mem_fraction_static": 0.01}, "use a smaller model or --quantization"),
        ({"mem_fraction_static": 0.0125, "quantization": "int4"}, "lower --context-length"),
        ({"mem_fraction_static": 0.35, "dp_size": 10}, "lower --context-length"),
        ({"mem_fraction_static": 0.04, "dtype": "float32"}, "use a smaller model or --quantization"),
    ],
    ids=str,
)
def test_a_share_of_memory_without_room_for_a_sequence_is_refused_before_the_model_is_loaded(options, advice):
    args = ServerArgs(**{"context_length": 4096, **options})

    message = refusal(lambda: refuse_early(args, SMALL, has_cuda=False, memory_bytes=10 * 2**30))

    assert message.startswith("--mem-fraction-static ")
    assert message.endswith(f"raise --mem-fraction-static, or {advice}")
    enough = ServerArgs(**{"context_length": 4096, **options, "mem_fraction_static": 0.5, "dp_size": 1})
    assert refusal(lambda: refuse_early(enough, SMALL, has_cuda=False, memory_bytes=10 * 2**30)) == ""


def test_the_share_of_memory_that_is_just_enough_is_accepted():
    """Weights that are mapped from a file are counted as free memory; the logits of each request need some, too."""
    a_token = 2 * 10 * 4 * 64
    memory = 4 * SMALL_WEIGHTS
    needed = SMALL_WEIGHTS + 4 * 8 * 32768 + 100 * a_token
    args = ServerArgs(
        mem_fraction_static=(needed + 1) / (memory + SMALL_WEIGHTS), max_running_requests=8, context_length=100
    )

    refuse_early(args, SMALL, has_cuda=False, memory_bytes=memory)
    assert "99 KV tokens" in refusal(lambda: refuse_early(args, SMALL, has_cuda=False, memory_bytes=memory - 4096))


def test_without_an_own_implementation_the_weights_are_not_guessed():
    gpt2 = msgspec.structs.replace(SMALL, model_type="gpt2")
    args = ServerArgs(mem_fraction_static=0.01)

    assert "beside" in refusal(lambda: refuse_early(args, SMALL, has_cuda=False, memory_bytes=10 * 2**30))
    refuse_early(args, gpt2, has_cuda=False, memory_bytes=10 * 2**30)


def test_a_model_without_an_implementation_is_refused_early_when_one_is_asked_for():
    gpt2 = msgspec.structs.replace(SMALL, model_type="gpt2")

    with pytest.raises(ConfigError, match="--model-impl headrace: model type gpt2"):
        refuse_early(ServerArgs(model_impl="headrace"), gpt2, has_cuda=None, memory_bytes=2**40)
    refuse_early(ServerArgs(model_impl="headrace"), SMALL, has_cuda=None, memory_bytes=2**40)


def test_a_kv_cache_that_no_format_fits_into_the_machine_is_refused_by_its_option():
    a_token = 2 * MODEL.num_layers * MODEL.num_kv_heads * MODEL.head_dim
    args = ServerArgs(max_total_tokens=100)

    refuse_early(args, MODEL, has_cuda=False, memory_bytes=100 * a_token)
    with pytest.raises(ConfigError, match="--max-total-tokens 100 needs at least"):
        refuse_early(args, MODEL, has_cuda=False, memory_bytes=100 * a_token - 1)


def test_attention_of_own_requests_is_for_mixtures_of_experts():
    args = ServerArgs(tp_size=2, dp_size=2, enable_dp_attention=True, device="cpu", dtype="float32")
    mixture = parse_hf_config({"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}, {})
    said = f"--enable-dp-attention is for mixtures of experts, and model type {MODEL.model_type} has none"
    for model, words in ((MODEL, said), (mixture, "")):
        found = refusal(lambda: refuse_early(args, model, has_cuda=False, memory_bytes=2**40))  # noqa: B023
        assert found.startswith(words)
        assert bool(found) == bool(words)
        assert refusal(lambda: resolve(args, model, LAPTOP, BACKENDS)) == found  # noqa: B023


def test_experts_are_dealt_only_where_each_rank_gets_one():
    mixture = parse_hf_config({"model_type": "mixtral", "num_local_experts": 4, "num_experts_per_tok": 2}, {})
    for size, model, said in (
        (2, MODEL, "--ep-size 2: this model has no experts"),
        (5, mixture, "--ep-size 5: the model has 4 experts"),
        (4, mixture, ""),
        (1, MODEL, ""),
    ):
        args = ServerArgs(tp_size=max(2, size), ep_size=size, device="cpu", dtype="float32")
        found = refusal(lambda: refuse_early(args, model, has_cuda=False, memory_bytes=2**40))  # noqa: B023
        assert found.startswith(said)
        assert bool(found) == bool(said)
        assert refusal(lambda: resolve(args, model, LAPTOP, BACKENDS)) == found  # noqa: B023
