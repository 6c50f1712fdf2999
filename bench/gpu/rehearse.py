"""`scripts/gpu_rehearse`: what `scripts/gpu_check` will do on a machine with a GPU, tried where there is none.

Owns what has to travel (`.whl/`) and the imports that are missing on that machine. Needs the project's environment with its development tools and
a package index. Exit code 1 when something would fail there.
"""

import os
import re
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Iterable
from importlib.metadata import packages_distributions, version
from pathlib import Path

ROOT = Path(__file__).resolve().parents[2]
WHEELS = ROOT / ".whl"
_TRITON = "triton==3.6.0"
_PYTHON = "3.12"
_PLATFORMS = [f"manylinux_2_{minor}_x86_64" for minor in (35, 34, 31, 28, 27, 26, 24, 17)]
_PLATFORMS += ["manylinux2014_x86_64", "manylinux1_x86_64"]
_MOST_BYTES = 64 << 20
_TRAVELS = """
annotated-doc annotated-types cffi fastapi gguf google-re2 httptools llguidance msgspec opentelemetry-api pycparser pydantic pydantic-core
pytest-asyncio pytest-timeout pyzmq sniffio soundfile soxr starlette typing-inspection uvicorn
""".split()  # noqa: SIM905
"""Packages that the pieces import, the server too, and tests. Those that the machine has are left out."""

_BLOCKER = '''
"""Hides what the machine with the GPU does not have."""
import sys
ALLOWED = frozenset({allowed!r})
class Hiding:
    def __init__(self, finder):
        self.finder = finder
    def find_spec(self, name, path=None, target=None):
        if path is None and not name.startswith("_") and name.split(".")[0] not in ALLOWED:
            return None
        return self.finder.find_spec(name, path, target)
    def __getattr__(self, name):
        return getattr(self.finder, name)
sys.meta_path[:] = [Hiding(finder) for finder in sys.meta_path]
'''


def main() -> int:
    """Run the command; returns its exit code."""
    there = {_plain(name) for name in re.split(r"[\s,]+", Path(sys.argv[1]).read_text()) if name}
    _download([name for name in _TRAVELS if _plain(name) not in there])
    steps = {
        "size of what travels": _check_size,
        "syntax of Python 3.12": _check_syntax,
        "kernels for sm_90": _compile_kernels,
        "all pieces, tiny": lambda: _try_pieces(there, sys.argv[2:]),
    }
    failed = []
    for what, step in steps.items():
        print(f"== {what}", flush=True)
        if not step():
            failed.append(what)
    print(f"failed: {', '.join(failed)}" if failed else "all green: the machine with the GPU may come")
    return 1 if failed else 0


def _plain(name: str) -> str:
    return name.lower().replace("_", "-").rstrip(".")


def _download(names: list[str]) -> None:
    """The wheels of these packages in the versions that are installed here, for the Python of that machine."""
    WHEELS.mkdir(exist_ok=True)
    missing = [name for name in names if not list(WHEELS.glob(f"{name.replace('-', '_')}-{version(name)}-*.whl"))]
    if not missing:
        return
    command = [sys.executable, "-m", "pip", "download", "-q", "--no-deps", "--only-binary=:all:"]
    command += ["--python-version", _PYTHON, "--implementation", "cp", "-d", str(WHEELS)]
    for platform in _PLATFORMS:
        command += ["--platform", platform]
    subprocess.run([*command, *(f"{name}=={version(name)}" for name in missing)], check=True)


def _check_size() -> bool:
    tracked = subprocess.run(["git", "ls-files", "-z"], cwd=ROOT, capture_output=True, check=True).stdout.split(b"\0")
    files = [ROOT / os.fsdecode(name) for name in tracked if name]
    tree = sum(path.stat().st_size for path in files if path.is_file())
    wheels = sum(path.stat().st_size for path in WHEELS.iterdir())
    print(f"   {tree / 2**20:.1f} MiB of files and {wheels / 2**20:.1f} MiB of wheels")
    return tree + wheels < _MOST_BYTES


def _check_syntax() -> bool:
    known = [shutil.which("python3.12"), *sorted(map(str, Path.home().glob(".pyenv/versions/3.12*/bin/python3.12")))]
    runs = [path for path in known if path and subprocess.run([path, "-c", ""], capture_output=True).returncode == 0]
    if not runs:
        print("   no python3.12 here: not tried")
        return True
    with tempfile.TemporaryDirectory() as cache:
        command = [runs[0], "-X", f"pycache_prefix={cache}", "-W", "error"]
        command += ["-m", "compileall", "-qq", "src", "tests", "bench"]
        return subprocess.run(command, cwd=ROOT, check=False).returncode == 0


def _compile_kernels() -> bool:
    with tempfile.TemporaryDirectory() as folder:
        install = [sys.executable, "-m", "pip", "install", "-q", "--no-deps", "--target", folder, _TRITON]
        subprocess.run(install, check=True)
        environment = os.environ | {
            "PYTHONPATH": f"{folder}:{ROOT / 'src'}",
            "TRITON_INTERPRET": "0",
            "TRITON_CACHE_DIR": f"{folder}/cache",
        }
        command = [sys.executable, str(ROOT / "tests" / "kernels" / "compile_for_gpu.py"), "90"]
        done = subprocess.run(command, env=environment, stdout=subprocess.PIPE, text=True, check=False)
        print(f"   {len(done.stdout.splitlines())} kernels")
        return done.returncode == 0


def _try_pieces(there: set[str], arguments: list[str]) -> bool:
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "sitecustomize.py").write_text(_BLOCKER.format(allowed=sorted(_modules(there))))
        environment = os.environ | {"PYTHONPATH": f"{folder}:{ROOT / 'src'}", "TRITON_INTERPRET": "1"}
        command = [sys.executable, "-m", "bench.gpu.check", "--rehearse", *arguments]
        return subprocess.run(command, cwd=ROOT, env=environment, check=False).returncode == 0


def _modules(there: Iterable[str]) -> set[str]:
    """Top-level modules that can be imported on that machine."""
    names = set(there) | {"headrace", "setuptools", "pip"}
    if "huggingface-hub" in names:
        # The HTTP client of the version that is installed here; there it has its own version's.
        names |= {"httpx2", "httpcore2", "truststore"}
    owners_of = packages_distributions().items()
    modules = {module for module, owners in owners_of if names & set(map(_plain, owners))}
    for wheel in WHEELS.glob("*.whl"):
        with zipfile.ZipFile(wheel) as archive:
            modules |= {re.split(r"[/.]", name)[0] for name in archive.namelist() if ".dist-info/" not in name}
    modules |= {path.stem for path in (ROOT / "tests").rglob("*.py")}  # what tests import of their own folders
    modules |= {"headrace", "bench", "sitecustomize", "__mp_main__", "_distutils_hack"}
    return modules | set(sys.stdlib_module_names)


if __name__ == "__main__":
    sys.exit(main())
