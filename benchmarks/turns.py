"""Episodes of many turns: the driver and the local engine against a loop in lock-step that reads the history again.

A group begins with one prompt, then every episode grows by its own answers and a drawing a turn. The loop calls
transformers' generate once a turn over all whole histories, as TRL's trainers do. Prompts, lengths of answers and
observations are the same on both sides; tokens are sampled at temperature 1.
"""

import argparse
from functools import partial
from typing import Any

from harness.models import MODELS, emulates_bfloat16, model_directory
from harness.options import named_sides, number, numbers, seconds
from harness.table import show
from harness.timing import available_threads, in_turn, middle, ratio, run_side

SIDES = ("posttrain float32", "posttrain bfloat16", "lock-step generate float32", "lock-step generate bfloat16")


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--model", choices=MODELS, default="smollm2", help="SmolLM2-135M or a small random Qwen3")
    parser.add_argument("--turns", type=numbers(1), default="4,8", help="turns of an episode, separated by commas")
    parser.add_argument("--episodes", type=number(1), default=16, help="episodes, all in flight")
    parser.add_argument("--group", type=number(1), default=8, help="episodes of one group, with the same prompt")
    parser.add_argument("--answer", type=number(1), default=24, help="median tokens of an answer")
    parser.add_argument(
        "--size", type=number(1), default=6, help="rows and columns of the drawing that answers an answer"
    )
    parser.add_argument("--rounds", type=number(1), default=3, help="times that every side runs")
    parser.add_argument("--threads", type=number(1), default=available_threads(), help="processor threads of a side")
    parser.add_argument("--limit", type=seconds, default=120.0, help="seconds after which a side is left out")
    parser.add_argument("--sides", help="run those whose name holds one of these words, separated by commas")
    parser.add_argument("--json", metavar="FILE", help="also write the table there")
    return parser.parse_args()


def main() -> None:
    """Run the sides in turn and print the table."""
    chosen = options()
    names = named_sides(chosen.sides, SIDES)
    emulated = None if chosen.sides else emulates_bfloat16()
    if emulated:
        names = [side for side in names if "bfloat16" not in side]
    model = str(model_directory(chosen.model))

    def run(side: str, turns: int, number: int) -> dict[str, Any]:
        way, _, dtype = side.rpartition(" ")
        job = {
            "way": way,
            "dtype": dtype,
            "model": model,
            "round": number,
            "turns": turns,
            "context": 8192,
            **{key: getattr(chosen, key) for key in ("episodes", "group", "answer", "size")},
        }
        return run_side("sides.turns_worker", job, chosen.threads, limit=chosen.limit)

    rows = []
    for turns in chosen.turns:
        found = in_turn({side: partial(run, side, turns) for side in names}, chosen.rounds)
        speeds = {side: [o["sampled"] / o["seconds"] for o in outcomes] for side, outcomes in found.items()}
        theirs = max((side for side in found if "generate" in side), key=lambda side: middle(speeds[side]), default="")
        for side, outcomes in found.items():
            rows.append(
                {
                    "side": side,
                    "turns": turns,
                    "tokens/s": middle(speeds[side]),
                    "answers/s": middle([o["answers"] / o["seconds"] for o in outcomes]),
                    "x lock-step": ratio(speeds[side], speeds.get(theirs, [])),
                    "sampled": outcomes[-1]["sampled"],
                    "computed": outcomes[-1]["computed"],
                    "reused": outcomes[-1]["reused"],
                    "computed/sampled": outcomes[-1]["computed"] / outcomes[-1]["sampled"],
                    "peak GB": middle([o["peak"] / 1e9 for o in outcomes]),
                }
            )
    notes = [
        f"{chosen.model}, {chosen.episodes} episodes in groups of {chosen.group}, {chosen.threads} threads, medians of "
        f"{chosen.rounds} rounds in turn, each after a round of warm-up; answers are lognormal, median {chosen.answer} tokens",
        "tokens/s: sampled tokens over the whole time; computed: positions that went through the model, padding included; "
        "reused: prompt tokens whose keys and values were taken from the cache",
        "x lock-step: against the lock-step loop in its faster precision",
    ]
    notes += [emulated] if emulated else []
    show("Episodes of many turns", rows, notes, chosen.json)


if __name__ == "__main__":
    main()
