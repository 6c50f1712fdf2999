"""Which modules of src/headrace import which, and where they go in circles."""

import ast
from collections.abc import Iterator
from functools import cache
from pathlib import Path

SOURCE = Path(__file__).resolve().parents[2] / "src"


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


def graph() -> dict[str, set[str]]:
    """The modules that each module imports."""
    return {name: imported_by(path.read_text(encoding="utf-8")) for name, path in modules().items()}


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
