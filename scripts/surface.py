"""What users reach, as lines of text: commands and options, routes, error codes, metrics, Python signatures.

Run by scripts/surface, which compares two commits. Reads the package on PYTHONPATH; starts no server and needs no kernels.
"""

import ast
import dataclasses
import inspect
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import MagicMock

# The tree on PYTHONPATH, before that of an editable installation.
sys.meta_path[:] = [finder for finder in sys.meta_path if "Redirecting" not in type(finder).__name__]

import typer
from prometheus_client import Histogram

import headrace
from headrace import errors
from headrace.cli.app import app
from headrace.config.server_args import ServerArgs
from headrace.metrics.catalog import Metrics
from headrace.server.app import create_app

SOURCE = Path(headrace.__file__).parent


def main() -> None:
    """`surface.py [--words]`: with the help texts and descriptions, too, which a change of wording changes."""
    words = "--words" in sys.argv[1:]
    parts = [
        commands(words),
        options(words),
        routes(words),
        error_classes(),
        error_codes(),
        metrics(words),
        signatures(),
    ]
    for lines in (*parts, environment()):
        print("\n".join(lines))


def commands(words: bool) -> Iterator[str]:
    """Each command's parameters but those of `ServerArgs`, which `options` lists."""
    server = {f"--{field.name.replace('_', '-')}" for field in dataclasses.fields(ServerArgs)}

    def walk(path: str, command: Any) -> Iterator[str]:
        for param in command.params:
            if not server & set(param.opts):
                names = " ".join((*param.opts, *param.secondary_opts))
                yield f"command {path}: {names} ({_name_of(param.type_descriptor.annotation)}, default {param.default!r})"
                if words:
                    yield f"command {path}: {names}: {getattr(param, 'help', None)}"
        if words:
            yield f"command {path}: {command.help}"
        for name, below in sorted(getattr(command, "commands", {}).items()):
            yield from walk(f"{path} {name}", below)

    return walk("headrace", typer.main.get_command(app))


def _name_of(annotation: Any) -> str:
    """A type without the modules in which it and what it holds are defined."""
    return re.sub(r"[a-z_.]+\.(?=[A-Z])", "", str(getattr(annotation, "__name__", annotation)))


def options(words: bool) -> Iterator[str]:
    """Each field of `ServerArgs`."""
    for field in dataclasses.fields(ServerArgs):
        default = field.default_factory() if callable(field.default_factory) else field.default
        about = dict(field.metadata)
        text = f"{about.pop('group', '')}: {about.pop('help', '')}"
        yield f"option {field.name}: {field.type} = {default!r}, {about}"
        if words:
            yield f"option {field.name}: {text}"


def routes(words: bool) -> Iterator[str]:
    """The OpenAPI document, a line a leaf, and the paths that it leaves out."""
    for options in ({}, {"disable_metrics": True, "disable_ui": True}, {"enable_fault_injection": True}):
        model = MagicMock(pooling=None)
        model.name = "NAME"
        served = create_app(MagicMock(), ServerArgs(**options), model)
        paths = {(route.path, *sorted(route.methods or ())) for route in served.routes}
        yield from (f"route {options or ''} {' '.join(path)}" for path in sorted(paths))
    (described,) = (route.endpoint for route in served.routes if route.path == "/openapi.json")
    yield from _leaves(
        "openapi", described.handler.__self__.document(), set() if words else {"summary", "description", "title"}
    )


def _leaves(path: str, value: Any, skipped: set[str]) -> Iterator[str]:
    if isinstance(value, dict) and value:
        for key in sorted(value):
            if key not in skipped or isinstance(value[key], dict):
                yield from _leaves(f"{path}/{key}", value[key], skipped)
    elif isinstance(value, list) and any(isinstance(item, dict) for item in value):
        for index, item in enumerate(value):
            yield from _leaves(f"{path}/{index}", item, skipped)
    else:
        yield f"{path} = {value!r}"


def error_classes() -> Iterator[str]:
    """The error tree with statuses and types."""
    for name, kind in sorted(vars(errors).items()):
        if inspect.isclass(kind) and issubclass(kind, errors.HeadraceError):
            yield f"error {name}({kind.__mro__[1].__name__}): {kind.status_code} {kind.error_type}"


def error_codes() -> Iterator[str]:
    """Every literal `code` of an error."""
    found: set[str] = set()
    for file in SOURCE.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_bytes())):
            if isinstance(node, ast.Call) and _name(node.func).endswith("Error"):
                values = [*node.args[2:3], *(word.value for word in node.keywords if word.arg == "code")]
                found |= {str(value.value) for value in values if isinstance(value, ast.Constant)}
    return (f"code {code}" for code in sorted(found))


def _name(node: ast.expr) -> str:
    return node.id if isinstance(node, ast.Name) else getattr(node, "attr", "")


def metrics(words: bool) -> Iterator[str]:
    """Names, kinds, labels and buckets."""
    catalog = Metrics("NAME")
    for collector in sorted(
        set(catalog.registry._collector_to_names), key=lambda c: sorted(catalog.registry._collector_to_names[c])
    ):
        buckets = f" {collector._upper_bounds}" if isinstance(collector, Histogram) else ""
        for family in collector.describe() if hasattr(collector, "describe") else collector.collect():
            labels = getattr(collector, "_labelnames", ()) or sorted({key for s in family.samples for key in s.labels})
            yield f"metric {family.name} {family.type} {tuple(labels)}{buckets}"
            if words:
                yield f"metric {family.name}: {family.documentation}"


def signatures() -> Iterator[str]:
    """Public methods of what `headrace` exports."""
    for name in headrace.__all__:
        kind = getattr(headrace, name)
        if inspect.isclass(kind):
            for method, member in sorted(inspect.getmembers(kind)):
                if callable(member) and (not method.startswith("_") or method in ("__init__", "__enter__", "__exit__")):
                    is_async = (
                        "async " if inspect.iscoroutinefunction(member) or inspect.isasyncgenfunction(member) else ""
                    )
                    yield f"python {name}: {is_async}{method}{_name_of(inspect.signature(member))}"
                elif isinstance(member, property):
                    yield f"python {name}: {method} (property)"


def environment() -> Iterator[str]:
    """Variables that are read."""
    found = {name for file in SOURCE.rglob("*.py") for name in re.findall(r"HEADRACE_[A-Z_]*[A-Z]", file.read_text())}
    return (f"environment {name}" for name in sorted(found))


if __name__ == "__main__":
    main()
