"""The commands of docs/tutorial.md, in their order, against real servers; the replies have what the page shows."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import pytest
from server_process import serving

PAGE = Path(__file__).parents[2] / "docs" / "tutorial.md"
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```$", re.DOTALL | re.MULTILINE)
SERVE = re.compile(r"^(?:(\w+)=(\S+) )?(?:headrace|scripts/)\s?serve smollm2 ?(.*)$", re.MULTILINE)

# Ctrl-D ends it; Hugging Face is another host.
BY_HAND = ("source .venv/bin/activate\n", "headrace chat --url http://127.0.0.1:30000\n", "headrace pull ")


@dataclass(frozen=True)
class Block:
    """language: `sh`, `python`; shown: what the page says that it prints, shortened."""

    language: str
    text: str
    shown: str


def blocks() -> Iterator[Block]:
    found = BLOCK.findall(PAGE.read_text())
    for (language, text), (next_language, shown) in zip(found, [*found[1:], ("", "")], strict=True):
        if language:
            yield Block(language, text, "" if next_language else shown)


def run(block: Block, url: str, folder: Path) -> str:
    """What the commands print, with `url` in place of the address of the page."""
    text = block.text.replace("http://127.0.0.1:30000", url)
    command = ["bash", "-euo", "pipefail", "-c", text] if block.language == "sh" else [sys.executable, "-c", text]
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    done = subprocess.run(
        command, env=os.environ | {"PATH": path}, cwd=folder, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, f"{block.text}\n{done.stderr}"
    return done.stdout


def names(text: str) -> set[str]:
    """Names of JSON fields and metrics: what does not depend on the machine."""
    return set(re.findall(r'"\w+":|^headrace:\w+', text, re.MULTILINE))


@pytest.mark.slow
@pytest.mark.timeout(900)  # beside other work
@pytest.mark.skipif(shutil.which("curl") is None, reason="the commands need curl")
def test_every_command_does_what_the_page_shows(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    printed = []
    with ExitStack() as stack:
        url = ""
        for block in blocks():
            if found := SERVE.search(block.text):
                stack.close()
                if found[1]:
                    monkeypatch.setenv(found[1], found[2])
                url = stack.enter_context(serving("smollm2", *found[3].split())).url
            elif not block.text.startswith(BY_HAND):
                got = run(block, url, tmp_path)
                assert names(block.shown) <= names(got), f"{block.text}\n{got}"
                assert got.strip() or not block.shown, block.text
                printed.append(got)

    assert len(printed) >= 10
