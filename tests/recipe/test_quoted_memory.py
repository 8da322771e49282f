"""The memory of recipes on the pages is what `--dry-run` prints."""

import re
from pathlib import Path

import pytest

from posttrain.cli.main import main

ROOT = Path(__file__).resolve().parents[2]
MEASURED = ("docs/results/gpu.md", "docs/results/speed.md")
"""Pages of measurements, which no recipe repeats."""
GENERATED = ("docs/reference/recipes.md",)
HEADER = re.compile(r"\| recipe \| keys \| memory(?: with `--on (\w+)`)? \|")


def quoted_rows() -> tuple[list[tuple[str, str, str, str, str]], list[str]]:
    """(page, device or "", files, keys, memory) of each row of a table of memory, and other lines with an amount in GiB."""
    rows, others = [], []
    for path in [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]:
        page, device = path.relative_to(ROOT).as_posix(), None
        for line in path.read_text(encoding="utf-8").splitlines() if page not in (*MEASURED, *GENERATED) else ():
            if header := HEADER.fullmatch(line):
                device = header[1] or ""
            elif not line.startswith("|"):
                device = None
            elif device is not None and not line.startswith("|---"):
                files, keys, memory = (cell.strip(" `") for cell in line.strip("|").split("|"))
                rows.append((page, device, files, keys, memory))
                continue
            others += [f"{page}: {line}"] if re.search(r"\d GiB", line) else []
    return rows, others


ROWS, OTHERS = quoted_rows()


def test_every_amount_of_memory_is_in_a_table_that_is_compared():
    assert OTHERS == []
    assert {page for page, *_ in ROWS} == {"docs/migrating/helpsteer3.md", "docs/migrating/ragen.md"}


@pytest.mark.parametrize(("page", "device", "files", "keys", "memory"), ROWS)
def test_the_memory_of_a_page_is_what_the_dry_run_prints(page, device, files, keys, memory, monkeypatch, capsys):
    monkeypatch.chdir(ROOT)
    recipes = [f"recipes/{Path(page).stem}/{name}" for name in files.split()]
    stage = "reward" if files.startswith("reward") else "rl"
    # Files of rows that are missing here are an error after the plan.
    main([stage, *recipes, *keys.split(), "--dry-run", *(["--on", device] if device else [])])
    (printed,) = re.findall(r"^  about ([\d.]+) GiB", capsys.readouterr().out, re.M)
    assert memory == f"{float(printed):.1f} GiB"
