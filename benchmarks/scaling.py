"""Predictions of the cost model: for recorded speeds, for 8, 64 and 1,024 GPUs, and for published placements. No measurement.

The model is `posttrain.planning.phases`, which `--dry-run --on DEVICE` uses too; docs/results/scaling.md explains it.
"""

import argparse
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from harness.options import names
from harness.table import show
from planned import clusters, topologies
from planned.measured import RECORDS

Rows = list[dict[str, Any]]


def measured_table() -> Rows:
    """Predicted and measured speeds on the machine of docs/results/speed.md."""
    return [
        {
            "workload": record.what,
            "unit": record.unit,
            "measured": float(record.measured),
            "predicted": record.predict(),
            "predicted / measured": record.ratio,
            "fitted": "yes" if record.fitted else "",
        }
        for record in RECORDS
    ]


def search_table() -> Rows:
    """RAGEN's first search group: 9 runs on 8 GPUs, one GPU a run."""
    last, work, idle = topologies.search_in_parallel()
    return [
        {
            "workload": "9 runs on 8 GPUs",
            "total time, s": last,
            "sum of all runs, s": work,
            "busy GPUs": 8 * (1 - idle),
        }
    ]


TABLES: dict[str, tuple[str, Callable[[], Rows]]] = {
    "measured": ("Predicted and measured speeds", measured_table),
    "published": ("Predicted speeds and reports of other systems", clusters.published_table),
    "baseline": ("One job on more GPUs, baseline setting", clusters.baseline_table),
    "best": ("The fastest setting that fits in memory", clusters.best_table),
    "changes": ("One change of the baseline at a time", clusters.changes_table),
    **{job.replace(" ", "-"): (f"{job} on 8 GPUs", partial(topologies.table, job)) for job in topologies.PLANS},
    "search": ("A parallel search", search_table),
}


def markdown(rows: Sequence[Mapping[str, Any]]) -> str:
    """The rows as a table in Markdown, numbers with three digits."""
    lines = ["| " + " | ".join(rows[0]) + " |", "|" + "---|" * len(rows[0])]
    return "\n".join([*lines, *("| " + " | ".join(map(_cell, row.values())) + " |" for row in rows)])


def _cell(value: Any) -> str:
    if value is None:
        return "–"
    if not isinstance(value, float):
        return f"{value:,}" if isinstance(value, int) else str(value)
    if value == 0:
        return "0"
    return f"{float(f'{value:.3g}'):,.0f}" if abs(value) >= 100 else f"{value:.3g}"


def main() -> None:
    """Print the chosen tables."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--tables",
        type=names(TABLES),
        default=",".join(TABLES),
        help=f"comma-separated names out of {', '.join(TABLES)}",
    )
    parser.add_argument("--markdown", action="store_true", help="as Markdown, for docs/results/scaling_tables.md")
    parser.add_argument(
        "--json", metavar="FILE", help="also write the table to this file; needs a single table in --tables"
    )
    chosen = parser.parse_args()
    if chosen.json and len(chosen.tables) > 1:
        parser.error("--json: the file holds one table; choose it with --tables")
    for name in chosen.tables:
        title, make = TABLES[name]
        if chosen.markdown:
            print(f"{title}\n\n{markdown(make())}\n")
        else:
            show(title, make(), ["estimates; this script measures nothing"], chosen.json)


if __name__ == "__main__":
    main()
