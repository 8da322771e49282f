"""Memory of one of 8 GPUs of 80 GB in updates of Qwen3 models, by fake tensors, beside the plan that `--dry-run` prints.

    python benchmarks/memory.py

Forward passes of 8,192 tokens, two to an update; FSDP2 over 8 processes, or 2 replicas over 4 each; gradients reduced after each pass, AdamW with float32
masters in shards, adapters of rank 16 on all linear modules and experts. NCCL's own buffers are not counted. Engines on the same
GPUs sleep while the learner learns, and have the rest of the memory while it waits; engines apart have all of theirs.
"""

import argparse
import sys
from pathlib import Path

from harness.table import show

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.cuda_fake import started

from posttrain.recipe.plan import DEVICES

GIB = 2**30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="expression of pytest for the rows, such as 8B")
    parser.add_argument("--json", metavar="FILE", help="also write the table there")
    options = parser.parse_args()
    rows, memory = [], DEVICES["h100"].memory
    for row in started.printed_rows("table_memory", options.only):
        rows.append(
            {
                "model": row["model"],
                "trained": "adapters" if row["lora"] else "all weights",
                "processes": str(row["processes"]),
                "activations": "recomputed" if row["recomputed"] else "kept",
                "peak of an update, GiB": row["peak"] / GIB,
                "planned, GiB": row["planned"] / GIB,
                "plan / peak": row["planned"] / row["peak"],
                "between updates, GiB": row["resting"] / GIB,
                "left for an engine, GiB": (memory - row["resting"]) / GIB,
            }
        )
    show("Memory of one of 8 GPUs, by fake tensors", rows, json_file=options.json)


if __name__ == "__main__":
    main()
