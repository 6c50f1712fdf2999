"""A wheel of this checkout holds all that serving needs: it serves from an environment that has Headrace from nowhere else."""

import json
import os
import re
import subprocess
import sys
import sysconfig
import venv
import zipfile
from email import message_from_bytes
from pathlib import Path

import httpx
import pytest
from server_process import serving

ROOT = Path(__file__).resolve().parents[2]
STATIC = ROOT / "src/headrace/server/ui/static"
PIP = (sys.executable, "-m", "pip", "--disable-pip-version-check")
# Kernels that were compiled for this checkout (scripts/setup) are not compiled again; without them it takes minutes.
pytestmark = [pytest.mark.slow, pytest.mark.timeout(1800)]


def run(*command) -> str:
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, f"{command}:\n{done.stdout}{done.stderr}"
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("dist")
    # Those of one processor or of all, as scripts/setup compiled them.
    caches = [cache.read_text() for cache in ROOT.glob("build/cp*/CMakeCache.txt")]
    isas = next((found[1] for cache in caches if (found := re.search(r"^HEADRACE_ISAS:\w+=(.*)", cache, re.M))), "all")
    options = ("--no-deps", "--no-build-isolation", "--no-index", "-C", f"cmake.define.HEADRACE_ISAS={isas}")
    run(*PIP, "wheel", *options, "--wheel-dir", folder, ROOT)
    [made] = folder.glob("*.whl")
    return made


@pytest.fixture(scope="module")
def environment(wheel, tmp_path_factory) -> Path:
    """A virtual environment with the wheel in it. What it depends on it sees in the environment of the tests, by a .pth file: those
    in there are not read then, and so the Headrace of the checkout is not seen."""
    folder = tmp_path_factory.mktemp("environment")
    venv.create(folder, symlinks=True)
    python = folder / "bin/python"
    run(*PIP, "--python", python, "install", "--no-deps", "--no-index", wheel)
    packages = Path(run(python, "-c", "import sysconfig; print(sysconfig.get_path('purelib'))").strip())
    (packages / "dependencies.pth").write_text(sysconfig.get_path("purelib") + "\n")
    return folder


def test_a_wheel_has_every_file_of_the_package_and_the_kernels(wheel):
    source = ROOT / "src"
    files = (path for path in (source / "headrace").rglob("*") if path.is_file())
    expected = {str(path.relative_to(source)) for path in files if path.suffix not in {".pyc", ".so"}}
    kernels = "headrace/kernels/cpu/_native" + sysconfig.get_config_var("EXT_SUFFIX")

    found = {name for name in zipfile.ZipFile(wheel).namelist() if ".dist-info/" not in name}

    assert found == expected | {kernels}


def test_a_wheel_names_the_licences_of_all_that_is_in_it(wheel):
    with zipfile.ZipFile(wheel) as opened:
        [name] = [name for name in opened.namelist() if name.endswith(".dist-info/METADATA")]
        metadata = message_from_bytes(opened.read(name))
        folder = name.removesuffix("METADATA") + "licenses/"
        texts = {opened.read(folder + file) for file in metadata.get_all("License-File")}
    vendored = json.loads((STATIC / "vendor/SOURCES.json").read_text())
    used = {name for entry in vendored for name in entry["license"].split(" OR ")}

    assert used <= set(re.findall(r"[\w.-]+", metadata["License-Expression"]))
    assert texts == {path.read_bytes() for path in [ROOT / "LICENSE", *STATIC.glob("vendor/*.LICENSE")]}


def test_an_installed_wheel_serves_chats_and_the_pages(environment, tiny_model):
    python = environment / "bin/python"
    places = run(
        python, "-c", "import headrace, headrace.kernels.cpu._native as k; print(headrace.__file__, k.__file__)"
    )
    assert all(Path(place).is_relative_to(environment) for place in places.split())

    with serving(tiny_model, headrace=environment / "bin/headrace") as server:
        ask = {"model": Path(tiny_model).name, "max_tokens": 4, "messages": [{"role": "user", "content": "Hello"}]}
        reply = server.post("/v1/chat/completions", ask)
        pages = {
            name: httpx.get(f"{server.url}/ui/{name}", timeout=60) for name in ("", "main.js", "vendor/marked.esm.js")
        }

    assert 1 <= reply["usage"]["completion_tokens"] <= 4
    assert pages[""].text == (STATIC / "index.html").read_text()
    assert pages["main.js"].content == (STATIC / "main.js").read_bytes()
    assert pages["vendor/marked.esm.js"].content == (STATIC / "vendor/marked.esm.js").read_bytes()
