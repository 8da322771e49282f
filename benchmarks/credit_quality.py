"""Credit quality on real text: how often each estimator of unit credit finds the one wrong step of a solution.

A result in a right solution is changed, and all that follows from it is calculated again, so that one step alone is
wrong. A reward model of whole answers gives credit by every estimator, one of units gives its own rewards. Chance is
1 / K for K units; how often the same step is lowest in the right solution tells what the estimator owes to the step's
place and words alone.
"""

import argparse
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from harness.table import show
from harness.timing import available_threads
from quality import ranking
from quality.judges import SENTENCES, Calculator, Credits, OutcomeJudge, UnitJudge, open_model
from quality.solutions import Case, pairs_of, read_jsonl, solve

from posttrain.errors import InputError

Judge = OutcomeJudge | UnitJudge


def options() -> argparse.Namespace:
    """The command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument(
        "--outcome", type=Path, metavar="RUN", help="reward model of whole answers: a run, or its model"
    )
    parser.add_argument("--units", type=Path, metavar="RUN", help="reward model of units: a run, or its model")
    parser.add_argument(
        "--calculator", action="store_true", help="a third judge that knows which calculations are wrong"
    )
    parser.add_argument(
        "--solutions", type=Path, default=Path("data/gsm8k/train.jsonl"), help="`question` and `answer`"
    )
    parser.add_argument(
        "--rows", default="2300:", help="which of them, first and end; neither model may have seen them"
    )
    parser.add_argument("--count", type=int, default=200, help="most solutions")
    parser.add_argument("--pairs", default="data/gsm8k/pairs_val.jsonl", help="held-out pairs; empty: none")
    parser.add_argument("--only", help="estimators whose name holds one of these words, separated by commas")
    parser.add_argument("--final", default="A: ", help="what the models have read before a final answer")
    parser.add_argument("--seed", type=int, default=0, help="of the changes")
    parser.add_argument("--dtype", choices=("float32", "bfloat16", "auto"), default="float32", help="of both models")
    parser.add_argument("--tokens", type=int, default=4096, help="most tokens in a forward pass")
    parser.add_argument("--threads", type=int, default=available_threads(), help="processor threads")
    parser.add_argument(
        "--write-pairs", type=Path, metavar="FILE", help="write right and wrong solutions as pairs and stop"
    )
    parser.add_argument("--json", metavar="FILE", help="also write the table there")
    return parser.parse_args()


def main() -> None:
    """Make wrong solutions, ask the reward models for credit, and print the table."""
    chosen = options()
    first, _, end = chosen.rows.partition(":")
    rows = list(enumerate(read_jsonl(chosen.solutions)))[int(first or 0) : int(end) if end else None]
    solved, skipped = solve(rows, chosen.final, chosen.count, chosen.seed)
    reasons = ", ".join(f"{reason} {count}" for reason, count in skipped.most_common())
    made = f"{len(solved)} of {len(solved) + sum(skipped.values())} solutions could be made wrong exactly; others: {reasons or 'none'}"
    if chosen.write_pairs is not None:
        chosen.write_pairs.write_text("".join(json.dumps(one.pair()) + "\n" for one in solved), encoding="utf-8")
        print(made)
        return
    if chosen.outcome is None and chosen.units is None:
        raise SystemExit(
            "name a reward model with --outcome or --units; `posttrain pipeline recipes/results/gsm8k.yaml` trains both"
        )
    import torch

    torch.set_num_threads(chosen.threads)
    of_units = UnitJudge(chosen.units, chosen.dtype, chosen.tokens) if chosen.units else None
    of_answers = OutcomeJudge(open_model(chosen.outcome, chosen.dtype), chosen.tokens) if chosen.outcome else None
    model = (of_answers or of_units).model
    perfect = OutcomeJudge(Calculator(model), chosen.tokens) if chosen.calculator else None
    segmenter = of_units.segmenter if of_units else SENTENCES
    found: list[dict[str, Any]] = []
    notes = [made]
    held = pairs_of(read_jsonl(Path(chosen.pairs))) if chosen.pairs else []
    for judge, name in ((of_answers, "answers"), (of_units, "units"), (perfect, "calculator")):
        if judge is None:
            continue
        reader = judge.reader(segmenter)
        cases = [case for case in map(reader.case, solved) if case is not None]
        if not cases:
            raise SystemExit("--rows: none of the solutions has 3 units or more; name other rows")
        units = sum(len(case.wrong_units) for case in cases) / len(cases)
        notes.append(f"{name}: {len(cases)} of them have 3 units or more, {units:.2f} in the mean")
        notes += judged(judge, name, cases, held)
        wrong, right = (credits_of(judge, cases, side, chosen) for side in ("wrong", "right"))
        found += [row(name, key, wrong[key], right[key], cases) for key in wrong]
    notes += [
        "answers: a reward model of whole answers; units: one of units; calculator: minus the number of wrong calculations",
        "lowest: share of solutions whose wrong step has the least credit, a tie among m counts 1/m; 95% intervals over "
        "solutions; before: the same step's share in the right solution; of steps: with the last unit left out, which is the final "
        "answer; AUC: share of the other steps with more credit",
        "drop: share of solutions whose step has less credit when it is wrong than when it was right, a tie is half",
        "forwards and tokens: a solution's, besides reading it whole; prefix and trunc are one pass, the same for both",
    ]
    show("Credit of one wrong step", found, notes, chosen.json)


def credits_of(judge: Judge, cases: Sequence[Case], side: str, chosen: argparse.Namespace) -> dict[str, Credits]:
    """The credit of all `right` or all `wrong` solutions by every estimator."""
    streams = [getattr(case, side) for case in cases]
    if isinstance(judge, UnitJudge):
        return judge.credits(streams)
    units = [getattr(case, f"{side}_units") for case in cases]
    words = [word.strip() for word in (chosen.only or "").split(",")]
    return judge.credits(streams, units, lambda name: any(word in name for word in words))


def row(name: str, key: str, wrong: Credits, right: Credits, cases: Sequence[Case]) -> dict[str, Any]:
    """A line of the table."""
    n = len(cases)
    found = ranking.found(wrong.values, right.values, [case.step for case in cases])
    return {
        "judge": name,
        "credit": key,
        "lowest": found.lowest.value,
        "95%": limits(found.lowest),
        "chance": found.chance,
        "before": found.unchanged,
        "over before": limits(found.above_unchanged),
        "of steps": found.of_steps.value,
        "steps 95%": limits(found.of_steps),
        "steps chance": found.chance_of_steps,
        "steps before": found.unchanged_of_steps,
        "AUC": found.auc.value,
        "AUC 95%": limits(found.auc),
        "drop": found.drop.value,
        "drop 95%": limits(found.drop),
        "n": n,
        "forwards": wrong.forwards / n,
        "tokens": wrong.tokens / n,
    }


def limits(estimate: Any) -> str:
    """The limits of an interval."""
    return f"{estimate.low:.3f} to {estimate.high:.3f}"


def judged(judge: Judge, name: str, cases: Sequence[Case], held: Sequence[tuple[str, str, str]]) -> list[str]:
    """How often the reward model ranks the better answer of held-out pairs, and of right and wrong solutions."""
    reader = judge.reader(SENTENCES)
    lines = []
    both = [reader.stream(question, answer) for question, *answers in held for answer in answers]
    if both:
        scores = judge.scores(both)
        share = ranking.accuracy(scores[::2] - scores[1::2], [question for question, *_ in held])
        lines.append(f"{share.value:.3f} of {len(held)} held-out pairs ({limits(share)}, {share.n} questions)")
    margins = judge.scores([case.right for case in cases]) - judge.scores([case.wrong for case in cases])
    share = ranking.accuracy(margins, [case.label for case in cases])
    lines.append(f"{share.value:.3f} of these {len(cases)} right and wrong solutions ({limits(share)})")
    return [f"{name}: the better one is ranked above in {' and '.join(lines)}"]


if __name__ == "__main__":
    try:
        main()
    except InputError as error:
        raise SystemExit(str(error)) from error
