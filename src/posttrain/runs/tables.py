"""Tables that a person reads: in the terminal, in a report, and as plain values for programs."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Any

from posttrain.recipe.rollout import SCORES

if TYPE_CHECKING:
    from rich.table import Table as RichTable


@dataclass(frozen=True)
class Table:
    """Cells as text. Columns named in `words` are aligned left, the others, which hold numbers, right."""

    title: str
    headings: tuple[str, ...]
    rows: Sequence[tuple[str, ...]]
    note: str
    """What `n` counts and what the intervals are."""
    words: tuple[str, ...] = ("policy", "note")
    played: bool = False
    """Whether it is about policies in an environment."""

    def rich(self) -> "RichTable":
        """For a rich console."""
        from rich.table import Table as RichTable
        from rich.text import Text

        table = RichTable(title=self.title or None, title_justify="left")
        for heading in self.headings:
            # Nothing is cut off: where the terminal is narrow, cells go on in the next line.
            table.add_column(heading, justify="left" if heading in self.words else "right", overflow="fold")
        for row in self.rows:
            table.add_row(*(Text(cell) for cell in row))
        return table

    def markdown(self) -> str:
        """For a report."""
        right = [place for place, heading in enumerate(self.headings) if heading not in self.words]
        return markdown_table(self.headings, self.rows, right)

    def values(self) -> dict[str, Any]:
        """For programs."""
        return asdict(self)


POLICY_HEADINGS = ("policy", "success", "95% interval", "mean return", "95% interval of it", "n", "note")


@dataclass(frozen=True)
class PolicyRow:
    """One policy in an environment. Rates are in [0, 1]; `n` is the number of seeds; None is unknown."""

    policy: str
    success: float | None
    interval: tuple[float, float] | None
    """95% interval of the success; None where the success is exact for these seeds."""
    mean_return: float | None
    n: int
    note: str = ""
    return_interval: tuple[float, float] | None = None
    """95% interval of the mean return; None where it is exact or unknown."""
    scores: Mapping[str, tuple[float, float, float]] = field(default_factory=dict)
    """What else the environment reports: mean and its 95% interval, by name."""

    @classmethod
    def from_values(cls, policy: str, values: Mapping[str, Any], note: str = "") -> "PolicyRow":
        """From the values of an evaluation or baseline line: `success`, `return`, their limits, and `n`."""

        def limits(name: str) -> tuple[float, float] | None:
            low, high = values.get(f"{name}_low"), values.get(f"{name}_high")
            return None if low is None or high is None else (low, high)

        success, paid = values.get("success"), values.get("return")
        names = [key for key in values if key.startswith(SCORES) and not key.endswith(("_low", "_high"))]
        scores = {key.removeprefix(SCORES): (values[key], *(limits(key) or (math.nan, math.nan))) for key in names}
        return cls(policy, success, limits("success"), paid, int(values["n"]), note, limits("return"), scores)

    @property
    def cells(self) -> tuple[str, ...]:
        """The row as text, in the order of POLICY_HEADINGS; rates as percentages with one decimal."""
        success = "–" if self.success is None else f"{100 * self.success:.1f}%"
        interval = "exact" if self.interval is None else f"[{100 * self.interval[0]:.1f}, {100 * self.interval[1]:.1f}]"
        paid = "–" if self.mean_return is None else f"{self.mean_return:.3f}"
        around = (
            "–" if self.return_interval is None else f"[{self.return_interval[0]:.3f}, {self.return_interval[1]:.3f}]"
        )
        rate = "–" if self.success is None else interval
        return self.policy, success, rate, paid, around, str(self.n), self.note


def policy_tables(rows: Sequence[PolicyRow], title: str = "") -> list[Table]:
    """The table of the policies in an environment, and one of what it reports of them besides, if it does."""
    note = (
        "`n` is the number of environment seeds. Intervals are 95%: score intervals over seeds for success (Wilson), "
        "Student's t over seeds for returns; `exact` values are computed for these seeds, not sampled."
    )
    names = list(dict.fromkeys(name for row in rows for name in row.scores))
    tables = [Table(title, POLICY_HEADINGS, [row.cells for row in rows], note, played=True)]
    if names:
        cells = [(row.policy, *(_score(row.scores.get(name)) for name in names)) for row in rows]
        note = "Means over the seeds that have such a score, with 95% intervals."
        tables.append(Table(f"{title}: scores" if title else "scores", ("policy", *names), cells, note, played=True))
    return tables


def _score(score: tuple[float, float, float] | None) -> str:
    return "–" if score is None else f"{score[0]:.3f} [{score[1]:.3f}, {score[2]:.3f}]"


def markdown_table(headings: Sequence[str], rows: Sequence[Sequence[str]], right: Sequence[int] = ()) -> str:
    """A Markdown table; the columns `right` are aligned right."""
    rules = ["---:" if column in right else "---" for column in range(len(headings))]
    body = [[cell.replace("|", "\\|").replace("\n", " ") for cell in row] for row in rows]
    return "\n".join("| " + " | ".join(row) + " |" for row in [list(headings), rules, *body])
