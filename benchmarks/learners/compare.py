"""Sides run in turn on one machine, and the table of how they compare."""

import argparse
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

from harness.models import MODELS, emulates_bfloat16, model_directory
from harness.options import named_sides, seconds
from harness.table import write_lines
from harness.timing import available_threads, in_turn, middle, ratio, run_side

from learners.job import KL, WEIGHTS, Job, Side, Stage
from learners.utilisation import STREAMS, Utilisation


@dataclass(frozen=True)
class Size:
    """How much a part does by default; on two quiet cores about four minutes for `qwen3` and eight for `smollm2`."""

    rows: int
    """Rows, pairs or answers of an optimizer step."""
    warmup: int
    steps: int
    rounds: int


def options(description: str | None, sizes: dict[str, dict[str, Size]]) -> argparse.Namespace:
    """The command line; `sizes`, by part and by model, are its defaults."""
    parser = argparse.ArgumentParser(description=(description or "").split("\n")[0])
    parser.add_argument("part", choices=sizes, help="what is trained")
    parser.add_argument("--model", choices=MODELS, default="qwen3", help="SmolLM2-135M or a small random Qwen3")
    parser.add_argument("--steps", type=int, help="optimizer steps that are measured in a round")
    parser.add_argument("--warmup", type=int, help="optimizer steps before those, on every side")
    parser.add_argument("--rounds", type=int, help="times that every side runs")
    parser.add_argument("--threads", type=int, default=available_threads(), help="processor threads of a side")
    parser.add_argument("--rows", type=int, help="rows, pairs or answers of an optimizer step")
    parser.add_argument("--group", type=int, default=4, help="answers to one prompt in rl")
    parser.add_argument("--limit", type=seconds, default=120.0, help="seconds after which a side is left out")
    parser.add_argument("--sides", help="run those whose name holds one of these words, separated by commas")
    parser.add_argument("--json", metavar="FILE", help="also write the table there")
    chosen = parser.parse_args()
    for name, default in asdict(sizes[chosen.part][chosen.model]).items():
        if getattr(chosen, name) is None:
            setattr(chosen, name, default)
    chosen.group = chosen.group if chosen.part == "rl" else 1
    # TRL takes rows in micro-batches of 8, whole groups among them.
    if (
        min(chosen.rows, chosen.steps, chosen.rounds) < 1
        or chosen.rows % min(8, chosen.rows)
        or chosen.rows % chosen.group
    ):
        parser.error(
            "--rows is at most 8 or a multiple of 8, and a multiple of --group; --steps and --rounds are 1 or more"
        )
    return chosen


def compare(
    stage: Stage,
    chosen: argparse.Namespace,
    sides: Sequence[Side],
    make_rows: Callable[[Any, int], list[dict[str, Any]]],
    unit: str,
) -> tuple[list[dict[str, Any]], list[str]]:
    """Rows of a table and notes below it. `make_rows`: rows of a stage for a tokenizer, and how many."""
    from transformers import AutoTokenizer

    notes: list[str] = []
    if chosen.sides:
        names = named_sides(chosen.sides, [side.name for side in sides])
        sides = [side for side in sides if side.name in names]
    elif emulated := emulates_bfloat16():
        sides = [side for side in sides if side.precision == "float32" or side.name == "posttrain auto"]
        notes.append(emulated)
    model = model_directory(chosen.model)
    with tempfile.TemporaryDirectory(prefix="posttrain-benchmark-") as place:
        # Two more for the held-out episodes of an RL run. A group shares its prompt.
        count = (chosen.warmup + chosen.steps) * chosen.rows // chosen.group + (2 if chosen.group > 1 else 0)
        rows = write_lines(Path(place) / "rows.jsonl", make_rows(AutoTokenizer.from_pretrained(model), count))

        def run(side: Side, number: int) -> dict[str, Any]:
            job = Job(
                stage,
                str(model),
                str(rows),
                chosen.warmup,
                chosen.steps,
                chosen.rows,
                chosen.group,
                number,
                side.settings,
            )
            return run_side(f"learners.{side.system}_side", job.as_json(), chosen.threads, limit=chosen.limit)

        found = in_turn({side.name: partial(run, side) for side in sides}, chosen.rounds)
    if slow := [side.name for side in sides if side.name not in found]:
        notes.append(f"left out, because a round took more than {chosen.limit:g} s (--limit): {', '.join(slow)}")
        sides = [side for side in sides if side.name in found]
    used = Utilisation(str(model), chosen.threads) if stage in STREAMS else None
    return _table(stage, sides, found, unit, used), [
        f"{chosen.model}, {chosen.rows} {unit} an optimizer step, {chosen.warmup} steps of warm-up and {chosen.steps} measured, "
        f"medians of {chosen.rounds} rounds in turn, {chosen.threads} threads; tokens are real ones, without padding",
        *(
            ["MFU: operations that real tokens require, as a share of the peak measured after the rounds"]
            if used
            else []
        ),
        *_verdict(stage, sides, found),
        *notes,
    ]


def _measure(stage: Stage) -> str:
    """What sides are compared by: in RL answers a second, since tokens also count prompts, which differ in order."""
    return "rows" if stage in KL else "tokens"


def _speeds(outcomes: Sequence[dict[str, Any]], amount: str) -> list[float]:
    """`amount` (rows or tokens) a second in each round."""
    return [outcome[amount] / outcome["seconds"] for outcome in outcomes]


def _best(
    stage: Stage, sides: Sequence[Side], found: dict[str, list[dict[str, Any]]], precision: str | None = None
) -> Side | None:
    """The fastest side of TRL."""
    theirs = [side for side in sides if side.system == "trl" and precision in (None, side.precision)]
    return max(theirs, key=lambda side: middle(_speeds(found[side.name], _measure(stage))), default=None)


def _table(
    stage: Stage, sides: Sequence[Side], found: dict[str, list[dict[str, Any]]], unit: str, used: Utilisation | None
) -> list[dict[str, Any]]:
    default = next((side for side in sides if side.default), None)
    best = _best(stage, sides, found)
    rows = []
    for side in sides:
        outcomes = found[side.name]
        speeds = _speeds(outcomes, _measure(stage))
        row: dict[str, Any] = {
            "stage": stage,
            "side": side.name,
            "weights and arithmetic": WEIGHTS.get(outcomes[0]["dtype"], side.about),
            "tokens/s": middle(_speeds(outcomes, "tokens")),
            f"{unit}/s": middle(_speeds(outcomes, "rows")),
            "x TRL defaults": ratio(speeds, _speeds(found[default.name], _measure(stage))) if default else None,
            "x TRL best": ratio(speeds, _speeds(found[best.name], _measure(stage))) if best else None,
            **({"MFU": middle([used.of(stage, side, outcome) for outcome in outcomes])} if used else {}),
            "peak GB": middle([outcome["peak_memory"] / 1e9 for outcome in outcomes]),
            f"tokens/{unit.removesuffix('s')}": middle([outcome["tokens"] / outcome["rows"] for outcome in outcomes]),
        }
        losses = [outcome["loss"] for outcome in outcomes if outcome["loss"] is not None]
        rows.append(row | ({"loss": middle(losses)} if stage in ("sft", "reward", "dpo") else {}))
    return rows


def _verdict(stage: Stage, sides: Sequence[Side], found: dict[str, list[dict[str, Any]]]) -> list[str]:
    """What the ratios are between like and like."""
    lines = []
    best = _best(stage, sides, found)
    if best is not None:
        lines.append(
            f"TRL is fastest as `{best.name}`: {', '.join(f'{k}={v}' for k, v in best.settings.items()) or '-'}"
        )
    plain = _best(stage, sides, found, "float32")
    ours = next((side for side in sides if side.system == "posttrain" and side.precision == "float32"), None)
    if plain is not None and ours is not None:
        times = ratio(*(_speeds(found[side.name], _measure(stage)) for side in (ours, plain)))
        lines.append(f"float32 against float32: {ours.name} is {times:.2f} times as fast as {plain.name}")
    spreads = [max(speeds) / min(speeds) for speeds in (_speeds(each, _measure(stage)) for each in found.values())]
    return [*lines, f"between rounds, the speeds of a side differ by a factor of {max(spreads):.2f} at most"]
