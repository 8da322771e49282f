"""Where the time of each training stage goes: shares of torch's operators.

One process for each stage runs the product's own path on made-up rows; the steps after the first are profiled.
"""

import argparse
import re
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from harness.data import chat_rows, preference_rows, prompt_rows, write_rows
from harness.models import MODELS, model_directory
from harness.options import names
from harness.table import show
from harness.timing import available_threads, run_side
from learners.job import KL, Job, Stage

ROWS: dict[Stage, Callable[[Any, int], list[dict[str, Any]]]] = {
    "sft": chat_rows,
    "reward": preference_rows,
    "dpo": preference_rows,
    "rloo": prompt_rows,
    "grpo": prompt_rows,
}
CLASSES = {
    "products of projections": r"^kernel multiply$|aten::(addmm|mm|addmm_|linear|_weight_int8pack_mm)$|mkldnn|onednn|_linear_pointwise",
    "all layers of the engine's model in one call": r"^kernel layers$",
    "attention": r"aten::(bmm|baddbmm|baddbmm_|matmul)$|^_SegmentAttention",
    "attention over the cache, norms and rotary positions in the compiled kernel": r"^kernel ",
    "softmax, exponentials, reductions": r"aten::_?(softmax|log_softmax|softmax_backward_data|log_softmax_backward_data|logsumexp|exp_?|log_?|sum|mean|amax|max|argmax|cumsum|norm|linalg_vector_norm|var)\b",
    "copies, conversions, joining": r"aten::(copy_|_to_copy|clone|cat|stack|contiguous|fill_|zero_|index_put_|index_copy_|index_add_|_index_put_impl_)$",
    "looking up rows": r"aten::(index|index_select|gather|embedding|embedding_dense_backward|scatter_add_?|take_along_dim)$",
    "elementwise": r"aten::(mul_?|add_?|sub_?|div_?|silu|silu_backward|sigmoid|neg|rsqrt|pow|where|masked_fill_?|clamp_?|minimum|maximum|addcmul_?|addcdiv_?|lerp_?|rsub|_foreach\w*)$",
    "optimizer": r"fused_adam",
    "random numbers": r"aten::(exponential_|uniform_|multinomial|rand\w*|bernoulli_)$",
}
"""What operators are summed up as; the first that matches counts."""
OTHER, OUTSIDE = "other operators", "outside of operators: Python, rendering, files"


def shares(operators: Mapping[str, float], seconds: float) -> dict[str, float]:
    """Share of the wall-clock time by class of operators; what no operator accounts for is `OUTSIDE`."""
    found = dict.fromkeys([*CLASSES, OTHER, OUTSIDE], 0.0)
    for name, own in operators.items():
        kind = next((kind for kind, pattern in CLASSES.items() if re.search(pattern, name)), OTHER)
        found[kind] += own / seconds
    found[OUTSIDE] = max(0.0, 1 - sum(found.values()))
    return found


def main() -> None:
    """Profile the stages one after the other and print one table."""
    chosen = _options()
    from transformers import AutoTokenizer

    model = model_directory(chosen.model)
    tokenizer = AutoTokenizer.from_pretrained(model)
    found: dict[str, dict[str, float]] = {}
    seconds: dict[str, float] = {}
    with tempfile.TemporaryDirectory(prefix="posttrain-benchmark-") as place:
        for stage in chosen.stages:
            group = 4 if stage in KL else 1
            count = (1 + chosen.steps) * chosen.rows // group + 2
            rows = write_rows(ROWS[stage](tokenizer, count), Path(place) / f"{stage}.jsonl")
            settings = {"model.dtype": chosen.dtype}
            job = Job(stage, str(model), str(rows), 1, chosen.steps, chosen.rows, group, 0, settings)
            result = run_side("learners.profiled_side", job.as_json(), chosen.threads)
            found[stage], seconds[stage] = shares(result["operators"], result["seconds"]), result["seconds"]
    table = [
        {"what": name, **{stage: f"{found[stage][name]:.1%}" for stage in found}} for name in [*CLASSES, OTHER, OUTSIDE]
    ]
    notes = [
        f"{chosen.model}, {chosen.rows} rows or answers a step, {chosen.steps} steps, {chosen.threads} threads",
        "seconds of a step: " + ", ".join(f"{stage} {spent / chosen.steps:.2f}" for stage, spent in seconds.items()),
    ]
    show("Shares of the time of a step", table, notes, chosen.json)


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", choices=MODELS, default="smollm2", help="SmolLM2-135M or a small random Qwen3")
    parser.add_argument("--stages", type=names(ROWS), default=",".join(ROWS), help="which, separated by commas")
    parser.add_argument("--rows", type=int, default=8, help="rows, pairs or answers of a step")
    parser.add_argument("--steps", type=int, default=1, help="steps that are profiled, after one that is not")
    parser.add_argument("--dtype", default="auto", help="model.dtype of the recipe")
    parser.add_argument("--threads", type=int, default=available_threads(), help="processor threads")
    parser.add_argument("--json", metavar="FILE", help="also write the table there")
    return parser.parse_args()


if __name__ == "__main__":
    main()
