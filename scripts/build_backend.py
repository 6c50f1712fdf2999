"""The build backend of pyproject.toml: scikit-build-core, which is not called where a compiler or Python's headers are missing.

pip then shows one line, as scripts/setup does, where CMake would say many.
"""

import os
import shlex
import shutil
import sys
import sysconfig
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from scikit_build_core import build
from scikit_build_core.build import (
    build_sdist,
    get_requires_for_build_editable,
    get_requires_for_build_sdist,
    get_requires_for_build_wheel,
    prepare_metadata_for_build_editable,
    prepare_metadata_for_build_wheel,
)

__all__ = [
    "build_editable",
    "build_sdist",
    "build_wheel",
    "get_requires_for_build_editable",
    "get_requires_for_build_sdist",
    "get_requires_for_build_wheel",
    "prepare_metadata_for_build_editable",
    "prepare_metadata_for_build_wheel",
]


def build_wheel(*arguments: Any, **options: Any) -> str:
    _check_tools()
    return build.build_wheel(*arguments, **options)


def build_editable(*arguments: Any, **options: Any) -> str:
    _check_tools()
    return build.build_editable(*arguments, **options)


def _check_tools() -> None:
    """Ends the process when something is missing."""
    names: Sequence[str] = ("c++", "g++", "clang++")  # as CMake looks for one
    if os.environ.get("CXX"):
        names = shlex.split(os.environ["CXX"])[:1]
    if not any(map(shutil.which, names)):
        name = "g++" if len(names) > 1 else names[0]
        sys.exit(f"no {name} found; install it (Debian: apt-get install g++), or set CXX")
    if not Path(sysconfig.get_path("include"), "Python.h").exists():
        sys.exit(f"{sys.executable} lacks its C headers (Debian: apt-get install python3-dev)")
