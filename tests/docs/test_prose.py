"""The written pages stay short, and their links lead somewhere."""

import re
from pathlib import Path

ROOT = Path(__file__).parents[2]
WRITTEN_WORDS, OUTSIDE_RESULTS = 35_800, 29_100
GENERATED = (
    "reference/recipes.md",
    "reference/families.md",
    "results/coverage.md",
    "results/crosscheck.md",
    "results/intervals.md",
)


def written_words(text: str, with_tables: bool) -> int:
    """Words of a page without its code; `with_tables`: the cells of its tables count."""
    text = re.sub(r"^```.*?^```", "", text, flags=re.M | re.S)
    if not with_tables:
        text = re.sub(r"^\|.*$", "", text, flags=re.M)
    return sum(bool(re.search(r"\w", word)) for word in text.split())


def test_the_pages_are_short():
    """Generated pages do not count, nor do the tables of results, which scripts print."""
    docs = ROOT / "docs"
    pages = [page for page in docs.rglob("*.md") if page.relative_to(docs).as_posix() not in GENERATED]
    words = {True: 0, False: 0}  # outside of results, and there
    for page in pages:
        outside = page.relative_to(docs).parts[0] != "results"
        words[outside] += written_words(page.read_text(encoding="utf-8"), outside)
    assert sum(words.values()) <= WRITTEN_WORDS, sum(words.values())
    assert words[True] <= OUTSIDE_RESULTS, words
    assert len((ROOT / "README.md").read_text(encoding="utf-8").split()) <= 900
    assert len((ROOT / "AGENTS.md").read_text(encoding="utf-8").splitlines()) < 120


def test_links_lead_to_files_of_the_repository():
    """Also where the pages are read without the site, which has more pages."""
    pages = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *(ROOT / "docs").rglob("*.md")]
    broken = [
        (page.name, link)
        for page in pages
        for link in re.findall(r"\]\(([^)#\s:]+)(?:#[^)]*)?\)", page.read_text(encoding="utf-8"))
        if not (page.parent / link).exists()
    ]
    assert broken == []
