"""Memory of one of 8 GPUs of 80 GB in updates of Qwen3 models, by fake tensors.

    python benchmarks/memory.py          beside the plan that `--dry-run` prints
    python benchmarks/memory.py --row    of Qwen3-4B on one row that the GPUs compute together, and the bytes that one sends

Measured on fake tensors (`tests/cuda_fake`), which need no GPU: FSDP2 over 8 processes, or 2 replicas over 4 each, AdamW with float32
masters in shards, flash attention, logits of 512 positions at a time. Without `--row`, forward passes have 8,192 tokens, two to an
update, gradients are reduced after each, and adapters of rank 16 are on all linear modules and experts. NCCL's own buffers are not
counted. Engines on the same GPUs sleep while the learner learns, and have the rest of the memory while it waits; engines apart have
all of theirs.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

from harness.table import show

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.cuda_fake import started

from posttrain.recipe.plan import DEVICES

GIB = 2**30


def of_update(row: dict[str, Any]) -> dict[str, Any]:
    return {
        "model": row["model"],
        "trained": "adapters" if row["lora"] else "all weights",
        "processes": str(row["processes"]),
        "activations": "recomputed" if row["recomputed"] else "kept",
        "peak of an update, GiB": row["peak"] / GIB,
        "planned, GiB": row["planned"] / GIB,
        "plan / peak": row["planned"] / row["peak"],
        "between updates, GiB": row["resting"] / GIB,
        "left for an engine, GiB": (DEVICES["h100"].memory - row["resting"]) / GIB,
    }


def of_row(row: dict[str, Any]) -> dict[str, Any]:
    return {
        "trained": "adapters of rank 16" if row["lora"] else "all weights",
        "activations": "recomputed" if row["recomputed"] else "kept",
        "tokens of the row": 8 * row["tokens"],
        "tokens per GPU": row["tokens"],
        "weights and optimizer, GiB": row["state"] / GIB,
        "kept by a forward pass, GiB": row["held"] / GIB,
        "peak, GiB": row["peak"] / GIB,
        "sent per token, MB": row["sent"] / row["tokens"] / 1e6,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--row", action="store_true", help="updates on one long row")
    parser.add_argument("--only", default="", help="expression of pytest for the rows, such as 8B or 4096-False")
    parser.add_argument("--json", metavar="FILE", help="also write the table there")
    options = parser.parse_args()
    shown, title = (
        (of_row, "An update on one row of Qwen3-4B on 8 GPUs")
        if options.row
        else (of_update, "Memory of one of 8 GPUs")
    )
    rows = started.printed_rows("test_row" if options.row else "test_update", options.only)
    show(f"{title}, by fake tensors", [shown(row) for row in rows], json_file=options.json)


if __name__ == "__main__":
    main()
