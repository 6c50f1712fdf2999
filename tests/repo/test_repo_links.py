"""Links between documents lead somewhere, and every page is found from docs/index.md."""

import re
from collections import Counter
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
PAGES = sorted([*ROOT.glob("*.md"), *ROOT.glob("docs/**/*.md"), *ROOT.glob("bench/notes/*.md")])


def prose(page: Path) -> str:
    """The page without its code blocks."""
    return re.sub(r"^( *)```.*?^\1```$", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def links(page: Path) -> list[str]:
    """Targets of the page's links and images, those on other hosts left out."""
    found = re.findall(r"\]\(([^)\s]+)\)|<img src=\"([^\"]+)\"", prose(page))
    return [target for pair in found for target in pair if target and not re.match(r"https?:", target)]


def anchor(heading: str) -> str:
    """What GitHub makes of a heading: lower case, no punctuation, hyphens for spaces."""
    text = re.sub(r"\[([^\]]*)\]\([^)]*\)", r"\1", heading).lower()
    return re.sub(r"[^\w\- ]", "", text).strip().replace(" ", "-")


def anchors(page: Path) -> set[str]:
    """Anchors of all headings; the second of the same name ends in -1."""
    names = [anchor(heading) for heading in re.findall(r"^#+ +(.*)$", prose(page), re.MULTILINE)]
    seen: Counter[str] = Counter()
    found = set()
    for name in names:
        found.add(f"{name}-{seen[name]}" if seen[name] else name)
        seen[name] += 1
    return found


def is_lost(page: Path, target: str) -> bool:
    """Whether the file or the heading that `page` links to is not there."""
    path, _, name = target.partition("#")
    file = (page.parent / path).resolve() if path else page
    return not file.exists() or (name != "" and file.suffix == ".md" and name not in anchors(file))


def test_anchors_are_made_as_github_makes_them():
    assert anchor("What it costs, in quality?") == "what-it-costs-in-quality"
    assert anchor("Ollama: /api") == "ollama-api"
    assert anchor("The `flashinfer` attention_backend") == "the-flashinfer-attention_backend"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_no_link_is_dead(page):
    assert [target for target in links(page) if is_lost(page, target)] == []


def test_a_lost_file_and_a_lost_heading_are_noticed(tmp_path):
    page = tmp_path / "page.md"
    page.write_text(
        "# One\n```\n# not a heading\n```\n[a](#one) [b](#not-a-heading) [c](other.md) [d](https://example.org)\n"
    )

    assert [target for target in links(page) if is_lost(page, target)] == ["#not-a-heading", "other.md"]


def test_every_page_is_reached_from_the_index():
    index = ROOT / "docs" / "index.md"
    linked = {(index.parent / target.partition("#")[0]).resolve() for target in links(index)}
    pages = {page for page in PAGES if page.is_relative_to(ROOT / "docs")} - {index}

    assert len(pages) > 20
    assert sorted(str(page.relative_to(ROOT)) for page in pages - linked) == []


def test_the_readme_leads_to_the_index_and_the_tutorial():
    assert {"docs/index.md", "docs/tutorial.md"} <= set(links(ROOT / "README.md"))
