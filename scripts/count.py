"""Figures of the source: its size, its import circles, and how many existing files a range of commits or a capability modified.

Run by scripts/count. Needs no package but Python's own.
"""

import argparse
import ast
import io
import subprocess
import sys
import tokenize
from collections import defaultdict
from collections.abc import Iterable, Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT / "tests/repo"))

from import_graph import circles, graph

LONG_LINE = 120
_DOCUMENTED = ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef
_BLANK = {tokenize.COMMENT, tokenize.NL, tokenize.NEWLINE, tokenize.INDENT, tokenize.DEDENT, tokenize.ENDMARKER}


def main() -> None:
    parser = argparse.ArgumentParser(prog="scripts/count", description=__doc__.splitlines()[0])
    parser.add_argument("range", nargs="?", help="commits, e.g. main..HEAD: which existing files of src they modified")
    commits = parser.parse_args().range
    if commits is not None:
        touched = existing_files(log(commits))
        print(f"{commits}: {len(touched)} existing files of src modified", *sorted(touched), sep="\n  ")
        return
    for name, value in size():
        print(f"{value:>9,}  {name}")
    print(f"{sum(1 for _ in circles(graph())):>9,}  import circles")
    for capability, entries in by_capability().items() if (ROOT / ".git").exists() else ():
        print(f"{len(existing_files(entries)):>9,}  existing files of src modified for: {capability}")


def size() -> Iterator[tuple[str, int]]:
    """Counts of the working tree."""
    sources = [path.read_text(encoding="utf-8") for path in sorted((ROOT / "src").rglob("*.py"))]
    lines = [line for source in sources for line in source.splitlines()]
    yield "lines of src", len(lines)
    yield "files of src", len(sources)
    yield "lines of code of src (not blank, no comment, docstring or import)", sum(map(code_lines, sources))
    yield "statements of src (AST)", sum(map(statements, sources))
    yield f"lines of src above {LONG_LINE} characters", sum(len(line) > LONG_LINE for line in lines)
    yield "fmt: off and fmt: skip in src", sum("# fmt: off" in line or "# fmt: skip" in line for line in lines)
    bench = [path.read_text(encoding="utf-8") for path in (ROOT / "bench").rglob("*.py")]
    yield "lines of bench", sum(len(source.splitlines()) for source in bench)


def code_lines(source: str) -> int:
    """Lines that hold a token which belongs to no comment, docstring or import."""
    lines: set[int] = set()
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type not in _BLANK:
            lines.update(range(token.start[0], token.end[0] + 1))
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import | ast.ImportFrom):
            lines.difference_update(range(node.lineno, (node.end_lineno or 0) + 1))
        elif isinstance(node, _DOCUMENTED) and ast.get_docstring(node, clean=False) is not None:
            lines.difference_update(range(node.body[0].lineno, (node.body[0].end_lineno or 0) + 1))
    return len(lines)


def statements(source: str) -> int:
    """All of them, docstrings and imports too."""
    return sum(isinstance(node, ast.stmt) for node in ast.walk(ast.parse(source)))


Change = tuple[str, tuple[str, ...]]
"""A status of git (A, M, D, R) and its paths."""


def log(*arguments: str) -> list[Change]:
    """What commits changed of src, the oldest first."""
    text = git("log", "--reverse", "--no-merges", "--name-status", "-M", "--format=", *arguments, "--", "src/*.py")
    return [(words[0][0], tuple(words[1:])) for line in text.splitlines() if (words := line.split("\t"))[0]]


def by_capability() -> dict[str, list[Change]]:
    """The changes of all commits whose message has a trailer `Capability: NAME`, by name."""
    found: dict[str, list[Change]] = defaultdict(list)
    trailer = "%(trailers:key=Capability,valueonly,separator=;)"
    text = git("log", "--reverse", "--no-merges", "--grep=^Capability: ", f"--format=%H {trailer}")
    for line in text.splitlines():
        commit, _, names = line.partition(" ")
        for name in filter(None, names.split(";")):
            found[name.strip()] += log("-1", commit)
    return found


def existing_files(changes: Iterable[Change]) -> set[str]:
    """The files that were there before, and that the changes modified, moved or removed."""
    new: set[str] = set()
    touched: set[str] = set()
    for status, paths in changes:
        if status == "A":
            new.add(paths[0])
        elif paths[0] not in new:
            touched.add(paths[0])
        if status == "R":
            new.add(paths[1])
    return touched


def git(*arguments: str) -> str:
    return subprocess.run(["git", *arguments], cwd=ROOT, check=True, capture_output=True, text=True).stdout


if __name__ == "__main__":
    main()
