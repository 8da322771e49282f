"""What a part hands back, and the one table of all of them."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

PLAN = "of the plan"
"""Unit of a measured peak of memory over the planned one."""
WEIGHTS = "weights to the engines"
"""Case of the time of sending them."""


@dataclass(frozen=True)
class Row:
    """One measured number."""

    part: str
    case: str
    value: float
    unit: str
    share: float | None = None
    """Of the limit that the part's notes name."""
    memory: float | None = None
    """Peak bytes on the device."""
    note: str = ""
    check: str = ""
    """Whether the part passed, and by which criterion; in its first row."""


def spread(runs: Sequence[Sequence[Row]]) -> list[Row]:
    """One row for each case of several runs of a part: the one with the median value, and the extremes in its note. The rows of
    a run that failed take the place of all."""
    failed = [run for run in runs if any(math.isnan(row.value) for row in run) or len(run) != len(runs[0])]
    if failed or len(runs) == 1:
        return list([*failed, *runs][0])
    found = []
    for rows in (sorted(of_case, key=lambda row: row.value) for of_case in zip(*runs, strict=True)):
        note = f"{rounded(rows[0].value)} to {rounded(rows[-1].value)} in {len(rows)} runs"
        middle = rows[len(rows) // 2]
        found.append(replace(middle, note=f"{note}; {middle.note}".removesuffix("; ")))
    return found


def table(rows: Sequence[Row]) -> str:
    """The rows as Markdown."""
    cells = [["part", "case", "result", "share of the limit", "peak GiB", "check", "note"]]
    for row in rows:
        share = "" if row.share is None or math.isnan(row.share) else f"{row.share:.1%}"
        memory = "" if row.memory is None or math.isnan(row.memory) else f"{row.memory / 2**30:.2f}"
        value = "failed" if math.isnan(row.value) else f"{rounded(row.value)} {row.unit}"
        cells.append([row.part, row.case, value, share, memory, row.check, row.note])
    widths = [max(len(line[column]) for line in cells) for column in range(len(cells[0]))]
    lines = [
        "| " + " | ".join(text.ljust(width) for text, width in zip(line, widths, strict=True)) + " |" for line in cells
    ]
    return "\n".join([lines[0], "|" + "|".join("-" * (width + 2) for width in widths) + "|", *lines[1:]])


PEERS = {"sft-0.5B": "trl-0.5B", "rl-0.5B": "trl-grpo-0.5B"}
"""Our part -> the part that does the same work with TRL."""


def ratios(parts: Mapping[str, Sequence[Row]]) -> list[Row]:
    """For each pair in `PEERS` that was measured: our rate divided by that of TRL's best setting."""
    found = []
    for ours, theirs in PEERS.items():
        mine, peers = ([row for row in parts.get(name, ()) if row.unit.endswith("/s")] for name in (ours, theirs))
        if mine and peers:
            best = max(peers, key=lambda row: row.value)
            note = f"ours: {mine[0].case}, {mine[0].note.partition(';')[0]}; TRL's best: {best.case}, {best.note}"
            found.append(Row("ratio", f"{ours} over TRL's best", mine[0].value / best.value, "times", note=note))
    return found


def rounded(value: float) -> str:
    """Three significant digits, and whole numbers from a hundred on."""
    return f"{value:,.0f}" if abs(value) >= 100 else f"{value:.3g}"
