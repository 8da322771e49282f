"""What the users of the four documents do: runs the command or the test that shows each row of coverage.yaml.

Each row names commands and tests. A command runs in a folder of its document, with small files in the author's format and the
recipes; a test is a node id of pytest. What several rows share runs once. A row is

- what `expected` says, where all of it succeeds and every output is there: "works", "waits for" a device or service, or
  "works", "partial" or "fails" "as measured", where `measured` has the result of a longer run that is stored in docs/results;
- "FAILS" with the first line of the error otherwise, also where nothing shows the row.

What is shown of a row that waits is what can be shown without the device: a dry run, a plan, or a run with a tiny model.
"""

import argparse
import contextlib
import os
import shlex
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
# The folder of this script would hide the package `coverage`; the tests are imported from the root.
sys.path[0] = str(ROOT)

import pytest  # noqa: E402
import yaml  # noqa: E402

ROWS = ROOT / "benchmarks" / "coverage.yaml"
PAGE = ROOT / "docs" / "results" / "coverage.md"
PROGRAM = [sys.executable, "-c", "import sys; from posttrain.cli.main import main; sys.exit(main(sys.argv[1:]))"]
SECONDS = 900
"""What a command may take."""
WIDTH = 200
"""Characters of an error in the table."""


@dataclass(frozen=True)
class Row:
    """A row of coverage.yaml."""

    row: int
    document: str
    does: str
    """What the user does or expects."""
    shown_by: list[str]
    """Commands that begin with `posttrain`, and node ids of tests."""
    expected: str
    """"works", "waits for" and what for, or "works", "partial" or "fails" and "as measured"."""
    makes: list[str] = field(default_factory=list)
    """Patterns of files that its commands leave in the folder of the document."""
    prints: list[str] = field(default_factory=list)
    """Texts that its commands print."""
    note: str = ""
    measured: str = ""
    """For a row "as measured": the command that ran, on which data, and its result."""

    @property
    def asserts(self) -> str:
        """What its checks assert: exit status, files and printed texts of the commands, and the tests in words."""
        commands = [shown for shown in self.shown_by if shown.startswith("posttrain ")]
        parts = [f"exit status 0 of the {'commands' if len(commands) > 1 else 'command'}"] if commands else []
        parts += [f"files {', '.join(f'`{pattern}`' for pattern in self.makes)}"] if self.makes else []
        parts += [f"printed: {', '.join(f'`{text}`' for text in self.prints)}"] if self.prints else []
        tests = [shown.partition("::test_")[2].replace("_", " ") for shown in self.shown_by if "::" in shown]
        parts += [f"{'tests' if len(tests) > 1 else 'test'}: {'; '.join(tests)}"] if tests else []
        return "; ".join(parts)


@dataclass
class Outcome:
    """What a command or a test came to."""

    error: str | None = None
    """First line of the error."""
    skipped: str | None = None
    """Why a test was skipped."""
    printed: str = ""


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--only", metavar="N,M", help="these rows; the page is not written")
    parser.add_argument("--document", metavar="NAME", help="the rows of this document; the page is not written")
    parser.add_argument("--rows", metavar="FILE", default=str(ROWS), help="another file of rows")
    parser.add_argument("--out", metavar="FILE", help=f"page to write; of all rows, {PAGE.relative_to(ROOT)}")
    return parser.parse_args()


def main() -> int:
    """Run the chosen rows, print and write their table; 1 where a row fails."""
    given = options()
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    started = time.monotonic()
    rows = [Row(**values) for values in yaml.safe_load(Path(given.rows).read_text(encoding="utf-8"))]
    numbers = {int(number) for number in given.only.split(",")} if given.only else {row.row for row in rows}
    chosen = [row for row in rows if row.row in numbers and given.document in (None, row.document)]
    if not chosen or numbers - {row.row for row in rows}:
        sys.exit(f"there is no such row or document in {given.rows}")
    with tempfile.TemporaryDirectory(prefix="coverage-") as folder:
        commands = Commands(Path(folder))
        tests = run_tests({shown for row in chosen for shown in row.shown_by if not shown.startswith("posttrain ")})
        states = {row.row: state(row, commands, tests) for row in chosen}
    text = page(chosen, states, time.monotonic() - started)
    print(text)
    if out := given.out or (PAGE if len(chosen) == len(rows) and given.rows == str(ROWS) else None):
        Path(out).parent.mkdir(parents=True, exist_ok=True)
        Path(out).write_text(text, encoding="utf-8")
    return int(any(value.startswith("FAILS") for value in states.values()))


# -- commands and tests -------------------------------------------------------------------------------------------------


class Commands:
    """Runs each command once, in the folder of its document."""

    def __init__(self, folder: Path) -> None:
        self.root = folder
        """Has a folder for each document."""
        self._outcomes: dict[tuple[str, str], Outcome] = {}

    def run(self, document: str, command: str) -> Outcome:
        """What the command came to."""
        if (document, command) not in self._outcomes:
            folder = self.root / document
            if not folder.exists():
                folder.mkdir()
                _prepare(document, folder)
            print(f"{document}: {command}", file=sys.stderr, flush=True)
            self._outcomes[document, command] = self._run([*PROGRAM, *shlex.split(command)[1:]], folder)
        return self._outcomes[document, command]

    def _run(self, command: Sequence[str], folder: Path) -> Outcome:
        path = os.pathsep.join(filter(None, (str(ROOT / "src"), os.environ.get("PYTHONPATH"))))
        environment = {**os.environ, "PYTHONPATH": path, "COLUMNS": "200"}
        try:
            done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True, timeout=SECONDS)
        except subprocess.TimeoutExpired:
            return Outcome(f"not finished after {SECONDS} s")
        printed = done.stdout + done.stderr
        return Outcome(_first_error(done.stderr or printed) if done.returncode else None, printed=printed)


def _prepare(document: str, folder: Path) -> None:
    """The recipes, and small files in the format of the document's author, as its journey has them."""
    from tests.journeys import helpsteer3, memory_agent, place_model, place_recipes, rationales

    place_recipes(folder)
    place_model(folder, "models/tiny", "qwen3")
    files: dict[str, Callable[[Path], None]] = {
        "memory-agent-gspo": memory_agent.write_records,
        "rlhf-rationales": rationales.author_files,
        "helpsteer3-rloo": partial(helpsteer3.author_files, count=helpsteer3.ENOUGH),
    }
    if document in files:
        files[document](folder)


def _first_error(text: str) -> str:
    """The first line of `text` that names an error, or else its last line."""
    lines = [line.strip() for line in text.splitlines() if line.strip()] or ["no output"]
    return next((line for line in lines if "rror" in line), lines[-1])


class _Recorder:
    """Selects the wanted tests of the files that pytest collects, and keeps what they come to."""

    def __init__(self, wanted: Collection[str]) -> None:
        self.outcomes: dict[str, Outcome] = {}
        self._wanted = wanted

    def pytest_collection_modifyitems(self, items: list[Any]) -> None:
        items[:] = [item for item in items if item.nodeid.partition("[")[0] in self._wanted]

    def pytest_runtest_logreport(self, report: Any) -> None:
        outcome = self.outcomes.setdefault(report.nodeid.partition("[")[0], Outcome())
        if report.failed:
            crash = getattr(report.longrepr, "reprcrash", None)
            outcome.error = outcome.error or (crash.message if crash else str(report.longrepr))
        elif report.skipped:
            outcome.skipped = str(report.longrepr[2])


def run_tests(names: Collection[str]) -> dict[str, Outcome]:
    """Node id -> what its tests came to, with all their parameters. They run in this process."""
    files = sorted({str(file) for name in names if (file := ROOT / name.partition("::")[0]).is_file()})
    recorder = _Recorder(names)
    if files:
        os.chdir(ROOT)
        words = ["-v", "--tb=line", "--durations=10", "-m", "slow or not slow", "-p", "no:cacheprovider"]
        with contextlib.redirect_stdout(sys.stderr):
            pytest.main([*words, "--continue-on-collection-errors", *files], plugins=[recorder])
    return {name: recorder.outcomes.get(name, Outcome(f"{name} was not run")) for name in names}


# -- states and the page ------------------------------------------------------------------------------------------------


def state(row: Row, commands: Commands, tests: Mapping[str, Outcome]) -> str:
    """What is expected, or "FAILS: " and why."""
    if not row.shown_by:
        return "FAILS: no command and no test shows it"
    printed = ""
    for shown in row.shown_by:
        outcome = tests.get(shown) or commands.run(row.document, shown)
        if outcome.error:
            return f"FAILS: {_short(outcome.error)}"
        if outcome.skipped and row.expected == "works":
            return f"FAILS: skipped, {_short(outcome.skipped)}"
        printed += outcome.printed
    for pattern in row.makes:
        if not any((commands.root / row.document).glob(pattern)):
            return f"FAILS: {pattern} was not made"
    for text in row.prints:
        if text not in printed:
            return f'FAILS: "{text}" was not printed'
    return row.expected


def page(rows: Sequence[Row], states: dict[int, str], seconds: float) -> str:
    """The table of all rows, after a table of counts."""
    from posttrain.runs.machine import describe_machine

    machine = describe_machine()
    lines = [
        "# Coverage of the four documents",
        "",
        "What the users of the four experiment documents do or expect, and whether it works. `python benchmarks/coverage.py` runs the",
        "commands and tests of each row and writes this page; `benchmarks/coverage.yaml` has the rows. Models are tiny. What is shown of",
        "a row that waits for a device or a service is what can be shown without it. What a row says as measured is of a stored run.",
        "",
        f"{machine['processor']}, {machine['cpus_allowed']} processors, torch {machine['packages']['torch']}; {seconds / 60:.0f} minutes.",
        "",
        "| document | rows | works | partial as measured | fails as measured | waits | check FAILS |",
        "|---|---:|---:|---:|---:|---:|---:|",
    ]
    for document in dict.fromkeys(row.document for row in rows):
        of_document = [states[row.row] for row in rows if row.document == document]
        counts = [sum(value.startswith(word) for value in of_document) for word in _STATES]
        lines.append(f"| {document} | {len(of_document)} | {' | '.join(map(str, counts))} |")
    lines += ["", "| # | document | what the user does or expects | shown by | which asserts | state |"]
    lines += ["|---:|---|---|---|---|---|"]
    for row in rows:
        shown = "<br>".join(f"`{word}`" for word in row.shown_by) or "–"
        note = "".join(f". {text}" for text in (row.measured, row.note) if text)
        cells = [row.row, row.document, row.does, shown, row.asserts or "–", f"{states[row.row]}{note}"]
        lines.append(f"| {' | '.join(str(cell).replace('|', chr(92) + '|') for cell in cells)} |")
    return "\n".join(lines) + "\n"


_STATES = ("works", "partial", "fails", "waits", "FAILS")
"""First words of the states of rows, in the order of the table of counts."""


def _short(text: str) -> str:
    """The first line, cut to what a table has room for."""
    line = (text.strip().splitlines() or ["no message"])[0]
    return line if len(line) <= WIDTH else f"{line[: WIDTH - 1]}…"


if __name__ == "__main__":
    sys.exit(main())
