"""--enable-double-sparsity: the same tokens alone, beside others, after a retraction and with drafts; nothing that outputs computed is shared."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from engines import ids_after_retraction, random_ids, running_engine
from rich.console import Console

from headrace.api.engine import Engine
from headrace.cli.quantize import run_calibrate_sparsity
from headrace.errors import ConfigError

PROMPTS = [random_ids(count, seed=count) for count in (300, 411, 90)]
SAMPLING = {"temperature": 0.0, "max_new_tokens": 48, "ignore_eos": True}


@pytest.fixture(scope="module")
def channels(tiny_model: str, tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("channels") / "channels.json"
    run_calibrate_sparsity(tiny_model, path, None, 512, Console(quiet=True))
    return str(path)


def options(channels: str, **others: Any) -> dict[str, Any]:
    sparse = {"ds_channel_config_path": channels, "ds_heavy_channel_num": 16, "ds_heavy_token_num": 128}
    return (
        {
            "enable_double_sparsity": True,
            "max_loras": 0,
            "ds_sparse_decode_threshold": 200,
            "speculative_algorithm": "off",
        }
        | sparse
        | others
    )


@pytest.fixture(scope="module", params=["float32", "int8"])
def engine(request: pytest.FixtureRequest, tiny_model: str, channels: str) -> Iterator[Engine]:
    with running_engine(tiny_model, dtype="float32", kv_cache_dtype=request.param, **options(channels)) as engine:
        yield engine


def alone(engine: Engine) -> list[list[int]]:
    return [engine.generate(input_ids=prompt, sampling_params=SAMPLING)["output_ids"] for prompt in PROMPTS]


def logprobs(engine: Engine, prompt: list[int]) -> list[float]:
    answer = engine.generate(input_ids=prompt, sampling_params=SAMPLING, return_logprob=True)
    return [entry[0] for entry in answer["meta_info"]["output_token_logprobs"]]


def test_beside_others_and_retracted_the_tokens_are_the_same(engine: Engine) -> None:
    want = alone(engine)
    engine.flush_cache()
    together = engine.generate(input_ids=PROMPTS, sampling_params=SAMPLING)
    assert [answer["output_ids"] for answer in together] == want
    assert ids_after_retraction(engine, PROMPTS, [SAMPLING] * len(PROMPTS)) == want


def test_drafts_change_nothing(engine: Engine, tiny_model: str, channels: str) -> None:
    drafting = options(channels, speculative_algorithm="ngram")
    prompt = PROMPTS[0][:60] * 5
    want = engine.generate(input_ids=prompt, sampling_params=SAMPLING)["output_ids"]
    dtype = engine.get_server_info()["kv_cache_dtype"]
    with running_engine(tiny_model, dtype="float32", kv_cache_dtype=dtype, **drafting) as other:
        assert other.generate(input_ids=prompt, sampling_params=SAMPLING)["output_ids"] == want


def test_only_long_outputs_are_sparse(engine: Engine, tiny_model: str) -> None:
    dtype = engine.get_server_info()["kv_cache_dtype"]
    with running_engine(tiny_model, dtype="float32", kv_cache_dtype=dtype) as dense:
        # Channels in another order round otherwise.
        assert logprobs(engine, PROMPTS[2])[:4] == pytest.approx(logprobs(dense, PROMPTS[2])[:4], abs=0.05)
        got, want = logprobs(engine, PROMPTS[1]), logprobs(dense, PROMPTS[1])
    assert got[0] == pytest.approx(want[0], abs=0.05)  # of the prompt's last position
    assert got != pytest.approx(want, abs=0.05)


def test_what_outputs_computed_is_no_prefix(engine: Engine) -> None:
    engine.flush_cache()
    first = engine.generate(input_ids=PROMPTS[0], sampling_params=SAMPLING)["output_ids"]
    longer = PROMPTS[0] + first + PROMPTS[2]
    answer = engine.generate(input_ids=longer, sampling_params=SAMPLING)
    assert answer["meta_info"]["cached_tokens"] == len(PROMPTS[0]) // 16 * 16
    engine.flush_cache()
    assert engine.generate(input_ids=longer, sampling_params=SAMPLING)["output_ids"] == answer["output_ids"]


def test_the_file_is_the_same_again_and_must_fit(tiny_model: str, channels: str, tmp_path: Path) -> None:
    run_calibrate_sparsity(tiny_model, tmp_path / "again.json", None, 512, Console(quiet=True))
    assert (tmp_path / "again.json").read_bytes() == Path(channels).read_bytes()
    (tmp_path / "other.json").write_text("{}")
    with (
        pytest.raises(ConfigError, match=r"no 'model\.layers\.0\.self_attn\.qk_proj'"),
        running_engine(tiny_model, **options(str(tmp_path / "other.json"))),
    ):
        pass


@pytest.mark.parametrize(
    ("others", "match"),
    [
        ({"ds_channel_config_path": None}, "needs --ds-channel-config-path"),
        ({"enable_double_sparsity": False}, "needs --enable-double-sparsity"),
        ({"ds_heavy_token_num": 130}, "multiple of 16"),
        ({"ds_heavy_token_num": 64}, "at least 128"),
        ({"ds_heavy_channel_num": 32}, "have 16 channels"),
        ({"kv_cache_dir": "kv"}, "--kv-cache-dir"),
        ({"max_loras": 8}, "--max-loras 0"),
        ({"page_size": 1}, "needs the fused decoder"),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_what_does_not_go_together_is_refused(
    tiny_model: str, channels: str, others: dict[str, Any], match: str
) -> None:
    with pytest.raises(ConfigError, match=match), running_engine(tiny_model, **options(channels, **others)):
        pass
