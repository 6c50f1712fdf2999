"""A quantised KV cache is the default only of models that it does not hurt: measured once, on the model itself."""

import functools
import logging
from collections.abc import Callable
from pathlib import Path
from shutil import copytree

import pytest
import torch
import transformers
from model_harness import save_tiny
from runner_harness import prompt, save_llama
from safetensors.torch import load_file, save_file

from headrace.checkpoint import weight_cache
from headrace.config.server_args import ServerArgs
from headrace.execution import kv_precision
from headrace.execution.build import build_worker
from headrace.execution.kv_precision import MOST_ADDED
from headrace.kernels import cpu as native_cpu
from headrace.messages.control import ReadyInfo
from headrace.messages.weights import UpdateFromDisk

needs_kernels = pytest.mark.skipif(bool(native_cpu.why_not()), reason="int4 and int16 are the native kernels'")

Tensors = dict[str, torch.Tensor]
Change = Callable[[Tensors], None]

_OPT = {
    "vocab_size": 131,
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "max_position_embeddings": 256,
}
_SHAPE = _OPT | {"intermediate_size": 96, "num_key_value_heads": 2}
TYPES = {
    "qwen2": _SHAPE,
    "llama": _SHAPE | {"attention_bias": True},
    # Headrace has no code of its own for these.
    "opt": _OPT | {"ffn_dim": 96, "word_embed_proj_dim": 64},
    "phi": _SHAPE,
    "stablelm": _SHAPE | {"use_qkv_bias": True},
    "starcoder2": _SHAPE,
}


def unchanged(tensors: Tensors) -> None:
    """The random model as it is."""


def large_biases(tensors: Tensors) -> None:
    """Of keys, as Qwen2 has them."""
    for name, tensor in tensors.items():
        if "k_proj.bias" in name:
            tensor[::3], tensor[1::3] = 200.0, -70.0


def outlier_channels(tensors: Tensors, factor: float = 300.0) -> None:
    """One channel of each head of K far above the others, and that of Q as far below: without rotation, the same model."""
    for name, tensor in tensors.items():
        if "k_proj" in name:
            tensor[5::16] *= factor
        if "q_proj" in name:
            tensor[5::16] /= factor


def save_model(folder: Path, model_type: str, change: Change) -> Path:
    save_tiny(transformers.AutoConfig.for_model(model_type, **TYPES[model_type]), folder)
    tensors = load_file(folder / "model.safetensors")
    change(tensors)
    save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def ids_of(text: str) -> list[int]:
    assert text == kv_precision.TEXT
    return prompt(kv_precision.NUM_TOKENS + 9, 1)


def never(text: str) -> list[int]:
    raise AssertionError("it is measured again")


def start(folder: Path, tokenize: kv_precision.Tokenize = ids_of, **options) -> ReadyInfo:
    worker, info = build_worker(
        ServerArgs(model_path=str(folder), max_total_tokens=256, max_running_requests=2, **options), tokenize=tokenize
    )
    worker.close()
    return info


def decision_of(info: ReadyInfo) -> str:
    (decision,) = (line for line in info.decisions if line.startswith("kv_cache_dtype "))
    return decision


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HEADRACE_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "weights"


@needs_kernels
@pytest.mark.parametrize(
    ("model_type", "quantization"), [*((name, "int8") for name in TYPES), ("qwen2", "int8-fast"), ("qwen2", "int4")]
)
@pytest.mark.parametrize("change", [large_biases, outlier_channels])
def test_a_model_that_8_bits_hurt_keeps_16(tmp_path: Path, model_type: str, change: Change, quantization: str):
    info = start(save_model(tmp_path / "model", model_type, change), quantization=quantization)

    assert info.kv_cache_dtype == "bfloat16"
    assert info.kv_cache_added_error is not None
    assert info.kv_cache_added_error > MOST_ADDED
    assert f"int8 would add {info.kv_cache_added_error:.3f} to the error" in decision_of(info)


@needs_kernels
@pytest.mark.parametrize(
    ("model_type", "quantization"),
    [*((name, "int8") for name in TYPES), *(("qwen2", name) for name in ("int8-fast", "int4", "int16"))],
)
def test_any_other_gets_integers_and_says_what_they_cost(tmp_path: Path, model_type: str, quantization: str):
    info = start(save_model(tmp_path / "model", model_type, unchanged), quantization=quantization)

    assert info.kv_cache_dtype == ("int16" if quantization == "int16" else "int8")
    assert info.kv_cache_added_error is not None
    assert info.kv_cache_added_error <= MOST_ADDED
    assert f"goes with {quantization} weights and adds " in decision_of(info)


@needs_kernels
def test_16_bit_integers_are_measured_by_the_same_rule(tmp_path: Path):
    """They are not rotated: beside a channel of 30,000, the others are one step."""
    folder = save_model(tmp_path / "model", "opt", functools.partial(outlier_channels, factor=30_000.0))
    info = start(folder, quantization="int16")

    assert info.kv_cache_dtype == "bfloat16"
    assert "int16 would add" in decision_of(info)


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[tuple[int, int]]:
    """Which tokens of the text were computed, with one cache after the other."""
    found, dtypes = [], {}
    hidden, attention = kv_precision.hidden_states, kv_precision.cache_in

    def made(setup, rank, dtype, num_tokens):
        cache = attention(setup, rank, dtype, num_tokens)
        dtypes[cache] = dtype
        return cache

    def recorded(setup, model, rank, cache, token_ids, start, end):
        found.append((start, end))
        states = hidden(setup, model, rank, cache, token_ids, start, end)
        whole = hidden(setup, model, rank, attention(setup, rank, dtypes[cache], end), token_ids, 0, end)
        assert torch.equal(whole[start:], states)
        return states

    monkeypatch.setattr(kv_precision, "cache_in", made)
    monkeypatch.setattr(kv_precision, "hidden_states", recorded)
    return found


@needs_kernels
@pytest.mark.parametrize("change", [large_biases, unchanged])
def test_half_of_the_text_is_computed_where_the_choice_is_clear(
    tmp_path: Path, computed: list[tuple[int, int]], change: Change
):
    start(save_model(tmp_path / "model", "qwen2", change), quantization="int8")

    assert computed == [(0, 64)] * 3


@needs_kernels
@pytest.mark.parametrize(("added", "dtype"), [(0.019, "int8"), (0.021, "bfloat16")])
def test_the_other_half_is_computed_where_it_may_change_the_choice(
    tmp_path: Path,
    computed: list[tuple[int, int]],
    monkeypatch: pytest.MonkeyPatch,
    added: float,
    dtype: str,
):
    errors = iter([[0.0, 0.0, 64 * 0.015], [0.0, 0.0, 64 * (2 * added - 0.015)]])
    monkeypatch.setattr(kv_precision, "_logprob_errors", lambda *_: next(errors))

    info = start(save_model(tmp_path / "model", "qwen2", unchanged), quantization="int8")

    assert computed == [(0, 64)] * 3 + [(64, 128)] * 3
    assert info.kv_cache_dtype == dtype


def test_the_torch_fallback_is_measured_too(tmp_path: Path):
    options = {"quantization": "int8", "disable_native_kernels": True}

    assert start(save_model(tmp_path / "biases", "qwen2", large_biases), **options).kv_cache_dtype == "bfloat16"
    assert start(save_model(tmp_path / "plain", "qwen2", unchanged), **options).kv_cache_dtype == "int8"


@needs_kernels
@pytest.mark.parametrize("change", [large_biases, unchanged])
def test_it_is_measured_once_and_kept_with_the_packed_weights(
    tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch, change: Change
):
    folder = save_model(tmp_path / "model", "qwen2", change)
    first = start(folder, quantization="int8")
    second = start(folder, never, quantization="int8")

    assert decision_of(second) == decision_of(first)
    assert (second.kv_cache_dtype, second.kv_cache_added_error) == (first.kv_cache_dtype, first.kv_cache_added_error)
    # Another precision, another config, other weights: other numbers.
    for options in ({"quantization": "int4"}, {"json_model_override_args": '{"rope_theta": 50000}'}):
        with pytest.raises(AssertionError, match="again"):
            start(folder, never, **{"quantization": "int8", **options})
    # Other code of attention, too.
    code = copytree(kv_precision._ATTENTION, tmp_path / "attention")
    with monkeypatch.context() as patched:
        patched.setattr(kv_precision, "_ATTENTION", code)
        start(folder, never, quantization="int8")
        (code / "cpu.py").write_text("# other\n")
        with pytest.raises(AssertionError, match="again"):
            start(folder, never, quantization="int8")
    save_model(folder, "qwen2", outlier_channels)
    with pytest.raises(AssertionError, match="again"):
        start(folder, never, quantization="int8")
    weight_cache.clear()
    assert not list(cache.iterdir())


@needs_kernels
def test_without_the_cache_every_start_comes_to_the_same(tmp_path: Path, cache: Path):
    folder = save_model(tmp_path / "model", "qwen2", large_biases)
    kept = start(folder, quantization="int8")
    others = [
        start(folder, quantization="int8", disable_weight_cache=True, num_threads=threads, chunked_prefill_size=16)
        for threads in (1, 2)
    ]
    (measured,) = cache.glob("*.measured")
    measured.write_bytes(b"\0damaged")

    assert [decision_of(info) for info in others] == [decision_of(kept)] * 2
    assert decision_of(start(folder, quantization="int8")) == decision_of(kept)


@needs_kernels
def test_what_the_user_names_is_honoured_with_a_warning_where_the_cost_is_known(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
):
    caplog.set_level(logging.WARNING, "headrace")
    folder = save_model(tmp_path / "model", "qwen2", large_biases)
    named = {"quantization": "int8", "kv_cache_dtype": "int8"}

    before = start(folder, never, **named)
    assert (before.kv_cache_dtype, before.kv_cache_added_error) == ("int8", None)
    assert "--kv-cache-dtype" not in caplog.text
    start(folder, quantization="int8")
    after = start(folder, never, **named)

    assert after.kv_cache_dtype == "int8"
    assert "as asked, although it adds" in decision_of(after)
    assert "--kv-cache-dtype int8: as asked" in caplog.text
    assert start(folder, never, quantization="int8", kv_cache_dtype="bfloat16").kv_cache_added_error is None


@needs_kernels
def test_random_weights_are_not_measured(tmp_path: Path):
    save_llama(tmp_path)
    info = start(tmp_path, never, quantization="int8", load_format="dummy")

    assert info.kv_cache_dtype == "int8"
    assert "random ones are not measured" in decision_of(info)


@needs_kernels
@pytest.mark.parametrize("options", [{}, {"kv_cache_dtype": "int8"}, {"kv_cache_dtype": "bfloat16"}])
def test_the_first_update_of_random_weights_warns_that_nothing_was_measured(
    tmp_path: Path, caplog: pytest.LogCaptureFixture, options: dict
):
    caplog.set_level(logging.WARNING, "headrace")
    save_llama(tmp_path)
    args = ServerArgs(
        model_path=str(tmp_path), quantization="int8", load_format="dummy", max_total_tokens=256, **options
    )
    worker, _ = build_worker(args)
    assert "--kv-cache-dtype" not in caplog.text
    for _ in range(2):
        worker.weights.start(UpdateFromDisk(str(tmp_path), "safetensors")).result().install()
    worker.close()

    warned = [record.getMessage() for record in caplog.records if "--kv-cache-dtype bfloat16" in record.getMessage()]
    assert len(warned) == (0 if options else 1)


@needs_kernels
def test_an_update_of_a_measured_model_warns_of_nothing(tmp_path: Path, caplog: pytest.LogCaptureFixture):
    caplog.set_level(logging.WARNING, "headrace")
    folder = save_model(tmp_path / "model", "qwen2", unchanged)
    args = ServerArgs(model_path=str(folder), quantization="int8", max_total_tokens=256)
    worker, info = build_worker(args, tokenize=ids_of)
    worker.weights.start(UpdateFromDisk(str(folder), "safetensors")).result().install()
    worker.close()

    assert info.kv_cache_dtype == "int8"
    assert "--kv-cache-dtype" not in caplog.text


@needs_kernels
def test_what_cannot_be_measured_keeps_16_bits(tmp_path: Path):
    save_llama(tmp_path)
    info = start(tmp_path, lambda text: [], quantization="int8")

    assert info.kv_cache_dtype == "bfloat16"
    assert "without a tokenizer" in decision_of(info)


@needs_kernels
@pytest.mark.parametrize("options", [{"quantization": "none"}, {"quantization": "int8", "dtype": "float32"}])
def test_floats_are_not_measured_and_a_cache_in_float32_is_the_fallback_of_float32(tmp_path: Path, options: dict):
    folder = save_model(tmp_path / "model", "qwen2", large_biases)
    floats = options["quantization"] == "none"
    # On some machines, 16 bits become int16 unless the user has named floats.
    info = start(folder, never if floats else ids_of, **({"dtype": "bfloat16"} | options))

    assert info.kv_cache_dtype == options.get("dtype", "bfloat16")


@needs_kernels
@pytest.mark.parametrize(("change", "dtype"), [(large_biases, "bfloat16"), (unchanged, "int8")])
def test_of_a_model_that_makes_vectors_their_error_is_measured(tmp_path: Path, change: Change, dtype: str):
    folder = save_model(tmp_path / "model", "qwen2", change)
    info = start(folder, quantization="int8", is_embedding=True)

    assert info.kv_cache_dtype == dtype
    assert "the relative error of vectors" in decision_of(info)
    assert info.speculation == "off: an embedding model generates no tokens"
