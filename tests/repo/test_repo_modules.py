"""How modules hang together: none imports itself by way of others, and none is too long to read."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

SOURCE = Path(__file__).resolve().parents[2] / "src"
MAX_LINES = 600


def module_name(path: Path) -> str:
    parts = path.relative_to(SOURCE).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


@cache
def modules() -> dict[str, Path]:
    return {module_name(path): path for path in sorted(SOURCE.rglob("*.py"))}


class Imports(ast.NodeVisitor):
    """Names that a module imports: at the top, inside functions, or for annotations alone."""

    def __init__(self) -> None:
        self.names: set[str] = set()

    def visit_Import(self, node: ast.Import) -> None:
        self.names |= {alias.name for alias in node.names}

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        assert node.level == 0, "imports are absolute"
        assert node.module is not None
        # `from headrace import log` means the module headrace.log, and not the package.
        for alias in node.names:
            full = f"{node.module}.{alias.name}"
            self.names.add(full if full in modules() else node.module)


def imported_by(source: str) -> set[str]:
    visitor = Imports()
    visitor.visit(ast.parse(source))
    return {name for name in visitor.names if name in modules()}


def circles(graph: dict[str, set[str]]) -> Iterator[frozenset[str]]:
    """Strongly connected components of more than one module, or of one that imports itself (Tarjan, 1972)."""
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []

    def visit(name: str) -> Iterator[frozenset[str]]:
        index[name] = low[name] = len(index)
        stack.append(name)
        for other in sorted(graph[name]):
            if other not in index:
                yield from visit(other)
                low[name] = min(low[name], low[other])
            elif other in stack:
                low[name] = min(low[name], index[other])
        if low[name] == index[name]:
            at = stack.index(name)
            component = frozenset(stack[at:])
            del stack[at:]
            if len(component) > 1 or name in graph[name]:
                yield component

    for name in graph:
        if name not in index:
            yield from visit(name)


def test_no_module_imports_itself_by_way_of_others():
    """Counted are imports at the top, inside functions and for annotations alone (`if TYPE_CHECKING`): what is put off is a circle all the
    same. Not counted are that a module's package is imported with it, and what is imported by a computed name."""
    graph = {name: imported_by(path.read_text(encoding="utf-8")) for name, path in modules().items()}

    assert [sorted(circle) for circle in circles(graph)] == []


@pytest.mark.parametrize(
    "graph, expected",
    [
        ({"a": {"b"}, "b": {"c"}, "c": set()}, set()),
        ({"a": {"b"}, "b": {"a"}, "c": {"a"}}, {frozenset("ab")}),
        ({"a": {"b", "d"}, "b": {"c"}, "c": {"a"}, "d": {"e"}, "e": {"d"}}, {frozenset("abc"), frozenset("de")}),
        ({"a": {"a"}}, {frozenset("a")}),
    ],
)
def test_circles_are_found(graph, expected):
    assert set(circles(graph)) == expected


def test_imports_inside_functions_and_for_annotations_count():
    source = """
from typing import TYPE_CHECKING
import headrace.errors
from headrace import log
if TYPE_CHECKING:
    from headrace.messages import control
def run():
    from headrace.config.resolve import MEM_FRACTION
    import torch
"""
    assert imported_by(source) == {
        "headrace.errors",
        "headrace.log",
        "headrace.messages.control",
        "headrace.config.resolve",
    }


def test_no_source_file_is_too_long_to_read():
    sizes = {name: len(path.read_text(encoding="utf-8").splitlines()) for name, path in modules().items()}
    assert {name: lines for name, lines in sizes.items() if lines > MAX_LINES} == {}
