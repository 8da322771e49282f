"""The site: generated pages are whole, it builds with warnings as errors, and it requests nothing from other hosts."""

import json
import os
import re
import runpy
import subprocess
import sys
from functools import cache
from pathlib import Path
from types import SimpleNamespace

import pytest

from posttrain.runs.panels import all_metrics
from tests.conftest import declared

ROOT = Path(__file__).parents[2]
DOCS = ROOT / "docs"


@cache
def module(path):
    """A script of docs/ as a namespace."""
    return SimpleNamespace(**runpy.run_path(str(DOCS / path)))


METRIC = re.compile(
    r"(?:rollout|policy|loss|kl|entropy|critic|units|optimizer|tokens|time|reward|preference|validation|test|correction"
    r"|credit|agent|audit|tools|teacher|ptx|reference|generate|speed|router)/[a-z_0-9]+|memory/(?:key_value_cache|process|gpu)"
)
"""A metric of `metrics.jsonl`, as the source spells it."""


def test_every_metric_of_the_source_is_declared():
    metrics = all_metrics().values()
    page = module("theme/hooks.py").markdown_of_metrics()
    files = (file.read_text(encoding="utf-8") for file in (ROOT / "src" / "posttrain").rglob("*.py"))
    found = {match[1] for text in files for match in re.finditer(f'"({METRIC.pattern})"', text)} - {"tokens/s"}
    assert len(found) > 100
    assert [name for name in found if declared(name, metrics) is None] == [], "declare it in a section of the recipe"
    assert all(f"| `{metric.name}` | " in page for metric in metrics)
    # A declaration that no string of the source names is one that nothing writes.
    built = ("validation/", "policy/chosen", "policy/rejected", "preference/", "tokens_per_answer", "test/")
    unused = {metric.name for metric in metrics if "/" in metric.name and "*" not in metric.name} - found
    assert [name for name in unused if not name.startswith(built)] == []


def test_the_audit_has_a_row_per_task_and_a_command_per_defect():
    hooks = module("theme/hooks.py")
    page = hooks.on_page_markdown((DOCS / "results/audit.md").read_text(), None, None, None)
    assert "<!-- audit" not in page
    stored = [json.loads(line) for line in hooks.AUDIT.read_text().splitlines()]
    assert len({row["name"] for row in stored}) == len(stored) > 200
    assert f"# Audit of {len(stored)} tasks" in page
    broken = [row for row in stored if any(finding["defect"] for finding in row["findings"])]
    assert f" {len(broken)} tasks have a defect" in page
    for row in stored:
        assert f"\n| `{row['name']}` | {row['seeds'][1]} |" in page
    for row in broken:
        assert f"`posttrain env audit {row['name']} --first" in page
    assert not re.search(r"/(tmp|home|root|work|usr|opt)/", hooks.AUDIT.read_text()), "paths of a machine"


def test_every_command_is_on_the_page():
    from typer.main import get_command

    from posttrain.cli.main import app

    page = module("theme/hooks.py").markdown_of_commands()
    for name in get_command(app).commands:
        assert f"`posttrain {name}`" in page
    assert "`--dry-run`" in page
    assert "`posttrain evaluate judge`" in page
    # They are copied without their prompt.
    show = module("theme/hooks.py").on_page_markdown
    shown = show("```console\n$ posttrain demo\n$ pip list\n```\n`$ x`\n", None, None, None)
    assert shown == "```console\nposttrain demo\npip list\n```\n`$ x`\n"


def test_every_key_of_a_recipe_is_a_heading_on_the_page_of_its_section():
    hooks = module("theme/hooks.py")
    text = (DOCS / "reference/recipes.md").read_text(encoding="utf-8")
    index, pages = hooks.pages_of_keys(text)
    keys = re.findall(r"^\| `([\w.*]+)` \|", text, re.M)
    assert len(keys) > 800
    assert sorted(re.findall(r"^## `([\w.*]+)`$", "\n".join(pages.values()), re.M)) == sorted(keys)
    assert not re.search(r"^\|", index, re.M), "a table is unreadable on a phone"
    assert all(f"](recipes/{Path(path).name})" in index for path in pages)
    assert "Default `64`; must be a whole number, 1 or more." in pages["reference/recipes/rl-rollout.md"]
    assert "\\|" not in "".join(pages.values())


@pytest.mark.parametrize("page", ["trl", "verl"])
def test_the_importer_makes_the_migration_tables(page):
    from posttrain_import.commands import import_commands

    hooks = module("theme/hooks.py")
    text = (DOCS / f"migrating/{page}.md").read_text()
    before, after = hooks.IMPORT.sub("\0", text).split("\0")
    block = re.findall(r"^```\w*\n(.*?)^```", before, flags=re.M | re.S)[-1]
    (command,) = import_commands(block, {}, None)[0]
    assert command.unknown == []
    assert command.recipe().steps > 0
    shown = hooks.on_page_markdown(text, None, None, None)
    assert shown.endswith(after)
    rows = [line for line in shown[len(before) :].splitlines() if line.startswith("| `")]
    assert len(rows) >= 20
    assert all(f"| `{row.flag}` |" in shown for row in command.rows if not row.implied)


def test_every_figure_is_stored_in_both_themes_and_shows_the_stored_numbers():
    draw = module("figures/draw.py")
    pages = "".join(page.read_text(encoding="utf-8") for page in [*DOCS.rglob("*.md"), ROOT / "README.md"])
    for name in draw.FIGURES:
        for theme in draw.THEMES:
            assert (DOCS / "figures" / f"{name}_{theme}.svg").is_file(), "run `make figures`"
            assert f"figures/{name}_{theme}.svg" in pages
    text = (DOCS / "figures" / "credit_light.svg").read_text(encoding="utf-8").replace("\u2212", "-")
    for name, row in draw.example_credits().items():
        assert [part for part in (name, *(f"{value:+.2f}" for value in row)) if part not in text] == []


@pytest.mark.slow
def test_the_figures_can_be_drawn(tmp_path):
    files = module("figures/draw.py").draw(tmp_path)
    assert {file.name for file in files} == {file.name for file in (DOCS / "figures").glob("*.svg")}


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_the_site_builds_without_warnings_and_requests_nothing_elsewhere(tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", str(tmp_path / "site")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        env={**os.environ, "NO_MKDOCS_2_WARNING": "1", "PYTHONPATH": os.pathsep.join(sys.path)},
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    assert (tmp_path / "site/search/search_index.json").is_file()
    python = (tmp_path / "site/reference/python.html").read_text(encoding="utf-8")
    returned = re.findall(r">Returns:</span>.*?</table>", python, flags=re.S)
    assert returned, "no function has a section Returns"
    # A wrapped sentence is one row.
    assert all(section.count('class="doc-section-item"') == 1 for section in returned)
    for page in (tmp_path / "site").rglob("*.html"):
        text = page.read_text(encoding="utf-8")
        loaded = re.findall(r'<(?:script|link|img|iframe|source)[^>]+(?:src|href)="(https?://[^"]+)"', text)
        assert loaded == [], page
