"""The field's words: what README, docs, help and errors do not say. CONTRIBUTING.md says why; a new row needs the word that reads well."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", ROOT / "SECURITY.md", *sorted((ROOT / "docs").rglob("*.md"))]

READS_WELL = {
    r"\bguess": "draft tokens, to draft",
    r"\bhears?\b|\bmodels? do(es)? not see\b": "audio model, does not support images",
    r"(?<![#./-])\bsounds?\b(?!\.(py|json))": "audio",
    r"\b(models?|famil\w+) that (see|make|read|pool)s?\b": "vision model, embedding model",
    r"\bthoughts\b": "reasoning",
    r"\bfamilies of formats\b": "output formats",
    r"\b(read|reads) and (do|does) not write\b": "embedding models",
    r"\bmakes? vectors\b": "embedding model",
    r"\bgiven up\b": "cancelled",
    r"\bdoes not speak\b": "incompatible version",
    r"\bnobody\b": "no client, no request",
    r"\bsat out\b|\bsits? the step out\b": "skips the step",
    r"\bsmaller model says\b|\bhead of the model says\b": "a smaller model, an EAGLE-3 head",
    r"\btake their input\b": "activation dtype",
    r"\breads (text alone|no tool calls)\b": "does not support images, tool calls are disabled",
    r"(^|[.:;|] )Of a mixture\b": "MoE models",
    r"(^|[.:;|] )Who [a-z]+s\b(?![^.]*\?)": "the noun: waiters, a node that joins",
}


def sentences():
    """(where, text) of each line of a page, and of each text of the source that is no docstring: help, errors, logs."""
    for page in PAGES:
        for number, line in enumerate(page.read_text(encoding="utf-8").splitlines(), 1):
            yield f"{page.relative_to(ROOT)}:{number}", line
    for path in sorted((ROOT / "src").rglob("*.py")):
        tree = ast.parse(path.read_text(encoding="utf-8"))
        alone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
        for node in ast.walk(tree):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in alone:
                yield f"{path.relative_to(ROOT)}:{node.lineno}", node.value
    table = ROOT / "src/headrace/config/other_servers.toml"
    yield str(table.relative_to(ROOT)), table.read_text(encoding="utf-8")


def test_pages_help_and_errors_use_the_words_of_the_field():
    found = [
        f"{where}: {match[0]!r}, better: {better}"
        for where, text in sentences()
        for pattern, better in READS_WELL.items()
        if (match := re.search(pattern, text, re.MULTILINE))
    ]
    assert found == []


@pytest.mark.parametrize(
    "text",
    [
        "tokens are guessed",
        "Qwen2-Audio hears",
        "a model that makes vectors",
        "Done. Who waits spins",
        "it was given up",
    ],
)
def test_words_that_read_badly_are_found(text):
    assert any(re.search(pattern, text) for pattern in READS_WELL)


def test_a_question_may_begin_with_who():
    assert not any(re.search(pattern, "Who are you?") for pattern in READS_WELL)
