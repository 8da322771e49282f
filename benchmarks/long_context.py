"""Memory of a GPU, and bytes that it sends, in an update of Qwen3-4B on one row that 8 GPUs compute together.

    python benchmarks/long_context.py

Measured on fake tensors (`tests/cuda_fake`), which need no GPU: FSDP2 over 8 processes, AdamW with float32 masters in shards,
gradients reduced after the pass, flash attention, logits of 512 positions at a time. NCCL's own buffers are not counted.
"""

import argparse
import sys
from pathlib import Path

from harness.table import show

sys.path.insert(0, str(Path(__file__).parents[1]))
from tests.cuda_fake import started

GIB = 2**30


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="expression of pytest for the rows, such as 4096-False")
    parser.add_argument("--json", metavar="FILE", help="also write the table there")
    options = parser.parse_args()
    rows = []
    for row in started.printed_rows("table_long_context", options.only):
        rows.append(
            {
                "trained": "adapters of rank 16" if row["lora"] else "all weights",
                "activations": "recomputed" if row["recomputed"] else "kept",
                "tokens of the row": 8 * row["tokens"],
                "tokens per GPU": row["tokens"],
                "weights and optimizer, GiB": row["state"] / GIB,
                "kept by a forward pass, GiB": row["held"] / GIB,
                "peak, GiB": row["peak"] / GIB,
                "sent per token, MB": row["sent"] / row["tokens"] / 1e6,
            }
        )
    show("An update on one row of Qwen3-4B on 8 GPUs, by fake tensors", rows, json_file=options.json)


if __name__ == "__main__":
    main()
