"""How modules hang together: none imports itself by way of others, none is too long to read, and tests know little of their inside."""

import ast
import re
from pathlib import Path

import pytest
from import_graph import circles, graph, imported_by, modules

TESTS = Path(__file__).resolve().parents[1]
MAX_LINES = 600


def test_no_module_imports_itself_by_way_of_others():
    """Counted are imports at the top, inside functions and for annotations alone (`if TYPE_CHECKING`): what is put off is a circle all the
    same. Not counted are that a module's package is imported with it, and what is imported by a computed name."""
    assert [sorted(circle) for circle in circles(graph())] == []


@pytest.mark.parametrize(
    "imports, expected",
    [
        ({"a": {"b"}, "b": {"c"}, "c": set()}, set()),
        ({"a": {"b"}, "b": {"a"}, "c": {"a"}}, {frozenset("ab")}),
        ({"a": {"b", "d"}, "b": {"c"}, "c": {"a"}, "d": {"e"}, "e": {"d"}}, {frozenset("abc"), frozenset("de")}),
        ({"a": {"a"}}, {frozenset("a")}),
    ],
)
def test_circles_are_found(imports, expected):
    assert set(circles(imports)) == expected


def test_imports_inside_functions_and_for_annotations_count():
    source = """
from typing import TYPE_CHECKING
import headrace.errors
from headrace import log
if TYPE_CHECKING:
    from headrace.messages import control
def run():
    from headrace.config.machine import MEM_FRACTION
    import torch
"""
    assert imported_by(source) == {
        "headrace.errors",
        "headrace.log",
        "headrace.messages.control",
        "headrace.config.machine",
    }


def test_no_source_file_is_too_long_to_read():
    sizes = {name: len(path.read_text(encoding="utf-8").splitlines()) for name, path in modules().items()}
    assert {name: lines for name, lines in sizes.items() if lines > MAX_LINES} == {}


MAX_PRIVATE = 113
"""Private attributes of src that tests touch. Lower it when there are fewer; what a test wants to see, a class can say (`num_pending`, `stats`)."""


def private_names(tree: ast.AST) -> set[str]:
    """Attributes and methods whose names begin with one underscore."""
    names = {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef)}
    names |= {node.attr for node in ast.walk(tree) if is_own(node)}
    return {name for name in names if name.startswith("_") and not name.startswith("__")}


def is_own(node: ast.AST) -> bool:
    """Whether it is an attribute of `self` or `cls`."""
    return isinstance(node, ast.Attribute) and isinstance(node.value, ast.Name) and node.value.id in ("self", "cls")


def test_tests_touch_fewer_and_fewer_private_attributes_of_the_source():
    private = set().union(*(private_names(ast.parse(path.read_bytes())) for path in modules().values()))
    touched = [
        f"{path.relative_to(TESTS)}:{node.lineno}: .{node.attr}"
        for path in sorted(TESTS.rglob("*.py"))
        for node in ast.walk(ast.parse(path.read_bytes()))
        if isinstance(node, ast.Attribute) and node.attr in private and not is_own(node)
    ]
    assert len(touched) <= MAX_PRIVATE, "\n".join(touched)


def test_kinds_of_media_are_named_in_one_module():
    """A kind is a `MediaKind`; its name as a text is left only where another API has a field or a value of that name."""
    known = {
        "media_kinds",
        "server.pooling.embed",
        "server.openai.protocol",
        "server.openai.chat_request",
        "server.responses.protocol",
    }
    known |= {"checkpoint.families", "models.registry"}  # the module `audio` of a family
    literal = re.compile(r"""(["'])(image|audio|video)\1""")
    found = {
        name.removeprefix("headrace.")
        for name, path in modules().items()
        if literal.search(path.read_text(encoding="utf-8"))
    }
    assert found - known == set()
