"""Every policy loss, credit, correction and KL placement against formulas that were written independently from the papers.

The package computes on packed streams in float32, through its public names. `reference/` computes on padded batches with full
logits in float64 and imports only torch. Both get the same random multi-turn episodes and the same weights, and the loss and
the gradient of all parameters are compared. A registered loss or credit without a reference fails.
"""

import argparse
import sys
import tempfile
from pathlib import Path

from crosschecks.cases import cases, without_reference
from crosschecks.compare import TOLERANCE, Sides
from harness.table import show


def main() -> None:
    """Compare, print the table, and exit with 1 where a difference is too large or a reference is missing."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--batches", type=int, default=10, help="random batches of each row")
    parser.add_argument("--only", default="", help="rows whose name contains this")
    parser.add_argument("--json", metavar="FILE", help="also write the table there")
    parser.add_argument(
        "--markdown", action="store_true", help="print the table of docs/reference/algorithms.md instead"
    )
    chosen = parser.parse_args()
    rows = []
    with tempfile.TemporaryDirectory() as folder:
        sides = Sides(Path(folder))
        for case in cases():
            if chosen.only in case.name:
                rows.append(sides.compare(case, chosen.batches))
    rows += [
        {"part": part, "algorithm": name, "batches": 0, "loss": None, "gradient": None, "agrees": "no reference"}
        for part, name in without_reference()
    ]
    notes = [
        "loss and gradient: the largest relative difference over the batches, float32 against float64; the gradient is of all parameters",
        f"agrees: both are below {TOLERANCE:g}",
    ]
    if chosen.markdown:
        print("| part | algorithm | batches | loss | gradient |\n|---|---|---:|---:|---:|")
        for row in rows:
            print("| {part} | {algorithm} | {batches} | {loss:.0e} | {gradient:.0e} |".format(**row))
        return
    show("The package against formulas written independently from the papers", rows, notes, chosen.json)
    if any(row["agrees"] != "yes" for row in rows):
        sys.exit(1)


if __name__ == "__main__":
    main()
