"""Starting from the cache of packed weights gives the same model; whatever is wrong with it costs a conversion and no more."""

import contextlib
import functools
from pathlib import Path

import pytest
import runner_harness
from runner_harness import make_driver, prompt, save_llama

from headrace.checkpoint import weight_cache
from headrace.checkpoint.base import Checkpoint
from headrace.checkpoint.weight_cache import ReadAhead
from headrace.checkpoint.weight_formats import names_on_cpu
from headrace.execution import build
from headrace.kernels import cpu as native_cpu

pytestmark = pytest.mark.skipif(bool(native_cpu.why_not()), reason="packed weights are the native kernels'")


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("HEADRACE_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "cache" / "weights"


@pytest.fixture
def model(tmp_path: Path) -> Path:
    save_llama(tmp_path / "model", tie_word_embeddings=True, attention_bias=True)
    return tmp_path / "model"


def start(model: Path, **options) -> tuple[str, list[int]]:
    """What the start says of the cache ("" = nothing), and a greedy continuation."""
    driver = make_driver(model, **options)
    tokens = driver.generate(0, prompt(20, seed=3), 12)
    driver.worker.close()
    said = [line for line in driver.info.decisions if line.startswith("weight cache: ")]
    return (said[0].removeprefix("weight cache: ") if said else ""), tokens


def loaded_names(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Names of the tensors that are read from now on."""
    names: list[str] = []
    original = Checkpoint.checked_tensor

    def record(self, name, *args, **kwargs):
        names.append(name)
        return original(self, name, *args, **kwargs)

    monkeypatch.setattr(Checkpoint, "checked_tensor", record)
    return names


@pytest.mark.parametrize(
    "options",
    [
        {"dtype": "float32"},
        {"dtype": "bfloat16", "activations": "float32"},
        {"dtype": "bfloat16", "activations": "bfloat16"},
        *({"dtype": "bfloat16", "quantization": name} for name in names_on_cpu()),
    ],
)
@pytest.mark.parametrize("tied", [True, False])
def test_the_second_start_reads_the_cache_and_says_the_same(
    tmp_path: Path, cache: Path, options: dict[str, str], tied: bool, monkeypatch: pytest.MonkeyPatch
):
    save_llama(tmp_path / "model", tie_word_embeddings=tied)
    first = start(tmp_path / "model", **options)
    names = loaded_names(monkeypatch)
    second = start(tmp_path / "model", **options)

    assert first[0] == "no file yet"
    assert "read in" in second[0]
    assert second[1] == first[1]
    # Norms are as good as they are stored; an embedding of its own that stays as it is, too.
    assert all("norm" in name for name in names), names


def test_precisions_and_models_have_files_of_their_own(tmp_path: Path, cache: Path, model: Path):
    save_llama(tmp_path / "other", tie_word_embeddings=True, num_hidden_layers=1)
    for folder, dtype in ((model, "float32"), (model, "bfloat16"), (tmp_path / "other", "bfloat16")):
        assert start(folder, dtype=dtype)[0] == "no file yet"

    assert len(list(cache.iterdir())) == 3


@pytest.mark.parametrize("damage", ["cut", "bit"])
def test_a_damaged_file_is_made_anew(cache: Path, model: Path, damage: str):
    want = start(model)[1]
    (file,) = cache.iterdir()
    whole = file.read_bytes()
    damaged = bytearray(whole[:-40] if damage == "cut" else whole)
    damaged[len(whole) // 2] ^= 1
    file.write_bytes(damaged)

    assert start(model) == ("packed again", want)
    assert file.read_bytes() == whole
    assert "read in" in start(model)[0]


def test_a_file_that_belongs_to_another_model_is_made_anew(tmp_path: Path, cache: Path, model: Path):
    want = start(model)[1]
    (own,) = cache.iterdir()
    save_llama(tmp_path / "other", tie_word_embeddings=True, num_hidden_layers=1)
    start(tmp_path / "other")
    (other,) = set(cache.iterdir()) - {own}
    own.write_bytes(other.read_bytes())

    assert start(model) == ("packed again", want)


def test_a_changed_checkpoint_is_loaded_again(cache: Path, model: Path):
    before = start(model)
    save_llama(model, tie_word_embeddings=True, attention_bias=True, rms_norm_eps=0.5)

    assert start(model)[0] == "no file yet"
    assert before[0] == "no file yet"


def test_weights_that_were_read_ahead_are_used_only_for_the_model_that_they_are_of(
    cache: Path, model: Path, monkeypatch: pytest.MonkeyPatch
):
    def start_ahead() -> tuple[str, list[int]]:
        with contextlib.closing(ReadAhead("options")) as ahead:
            monkeypatch.setattr(runner_harness, "build_worker", functools.partial(build.build_worker, ahead=ahead))
            return start(model)

    first, again = start_ahead(), start_ahead()
    assert (first[0], "read in" in again[0]) == ("no file yet", True)
    assert again[1] == first[1]
    save_llama(model, tie_word_embeddings=True, attention_bias=True, rms_norm_eps=0.5)
    other = start_ahead()
    assert other[0] == "no file yet"
    assert other == (other[0], start(model, disable_weight_cache=True)[1])


def test_an_unwritable_folder_is_only_logged(tmp_path: Path, model: Path, monkeypatch: pytest.MonkeyPatch):
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("HEADRACE_CACHE_DIR", str(tmp_path / "file"))

    assert len(start(model)[1]) == 12
    assert not list(tmp_path.glob("**/*.weights"))


def test_deleting_the_cache_is_safe(cache: Path, model: Path):
    want = start(model)[1]
    weight_cache.clear()

    assert start(model) == ("no file yet", want)


@pytest.mark.parametrize(
    "options", [{"load_format": "dummy"}, {"disable_weight_cache": True}, {"disable_native_kernels": True}]
)
def test_no_file_is_made_where_none_is_wanted(cache: Path, model: Path, options: dict[str, object]):
    assert start(model, **options)[0] == ""
    assert not cache.exists()


def test_loading_leaves_no_pages_of_the_checkpoint(model: Path, cache: Path, monkeypatch: pytest.MonkeyPatch):
    released: list[Checkpoint] = []
    opened = build.open_model

    def open_model(args):
        checkpoint = opened(args)
        release = checkpoint.release
        monkeypatch.setattr(checkpoint, "release", lambda: (released.append(checkpoint), release()))
        return checkpoint

    monkeypatch.setattr(build, "open_model", open_model)

    assert len(start(model, dtype="float32", disable_weight_cache=True)[1]) == 12
    assert len(released) == 1
