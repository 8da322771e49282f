"""Whether a training run learned anything: a paired test of its held-out measure before and after, and probable reasons.

It reads what the run has stored, and plays nothing. `Trainer.finish` writes the verdict to `results.json`.
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from posttrain.evaluation.paired import PairedTest, paired_test
from posttrain.evaluation.results import MetricResult, read_results
from posttrain.evaluation.sides import episode_metrics
from posttrain.recipe.guards import GUARDS, GuardRecipe
from posttrain.recipe.plan import counted, detectable
from posttrain.rollout.store import read_episodes, stored_steps
from posttrain.runs.directory import RunDirectory
from posttrain.runs.log import Log, read_log
from posttrain.runs.tables import IMPROVED, NOTHING, START, TRAINED, UNIMPROVED, WORSE, Verdict

REASONS = 3
"""Number of probable reasons."""


def rows_file(run: RunDirectory, policy: str) -> Path:
    """The scores by final held-out row of the policy `START` or `TRAINED`."""
    return run.path / "rows" / ("start.json" if policy == START else "trained.json")


def run_verdict(run: RunDirectory) -> Verdict | None:
    """The verdict on a finished training run; None if it has not measured the model before training.

    The final data is tested at 5%, two-sided; no checkpoint was selected on it. A run whose best checkpoint is the starting
    model has learned nothing, whatever the test, and so has one of which only the reward rose, by the audit of the
    exported checkpoint.
    """
    log = read_log(run.metrics)
    recipe: Any = run.load_recipe(to_run=True)
    test, text = None, ""
    if (pair := _measured(run, getattr(recipe.evaluation, "metric", None))) is not None:
        before, after = pair
        items = sorted(before.scores.items.keys() & after.scores.items.keys())
        if len(items) > 1:
            test = paired_test(before.name, before.better, [before.scores], [after.scores], items)
            test = test.with_correction(test.p)
            text = f"{_change(test)} on {counted(test.n, 'held-out task')}"
    if any(line.get("chosen") == UNIMPROVED for line in log):
        return Verdict(NOTHING, f"Nothing was learned: {UNIMPROVED}.", _reasons(log, recipe, test))
    if test is None:
        return None
    exported = next((line.get("best_step") for line in log if line["kind"] == "final"), None)
    alarms = [line for line in log if line["kind"] == "audit" and line.get("alarm") and line["step"] == exported]
    if test.better_side == "B" and alarms:
        return Verdict(NOTHING, f"The reward rose and the audit did not: {text}.", [str(alarms[-1].get("message"))])
    if test.better_side == "B":
        return Verdict(IMPROVED, f"The model improved: {text}.")
    words = {None: (NOTHING, "Nothing was learned"), "A": (WORSE, "The model got worse")}[test.better_side]
    return Verdict(words[0], f"{words[1]}: {text}.", _reasons(log, recipe, test))


def _measured(run: RunDirectory, metric: str | None) -> tuple[MetricResult, MetricResult] | None:
    """The held-out measure before and after training: of rows, or of episodes (`metric`, else success, else the return)."""
    finals = sorted((one for one in stored_steps(run.episodes) if one.split == "final"), key=lambda one: one.step)
    if len(finals) > 1 and finals[0].step == 0:
        sides = [episode_metrics(read_episodes(one.path).episodes, "") for one in (finals[0], finals[-1])]
        for name in [metric] if metric is not None else ["success", "return"]:
            if all(name in side for side in sides):
                return sides[0][name], sides[1][name]
    files = [rows_file(run, policy) for policy in (START, TRAINED)]
    if not all(file.is_file() for file in files):
        return None
    before, after = ([*read_results(file)[0].values()] for file in files)
    return before[0], after[0]


def _change(test: PairedTest) -> str:
    values = f"{test.metric} went from {test.text(test.a)} to {test.text(test.b)}"
    limits = "" if math.isnan(test.difference.low) else f" {test.limits}"
    return f"{values}, {test.text(test.difference.value, signed=True)}{limits}, p = {test.p_text},"


def _reasons(log: Log, recipe: Any, test: PairedTest | None) -> list[str]:
    """The three most likely reasons by the run's own metrics, the strongest first."""
    found = sorted([*_guarded(log, recipe), *_of_run(log, recipe, test)], key=lambda reason: -reason[0])
    return [sentence for _, sentence in found[:REASONS]]


def _guarded(log: Log, recipe: Any) -> Iterator[tuple[float, str]]:
    """(share of the steps, sentence) of each guard whose threshold was exceeded; see `posttrain.recipe.guards`."""
    thresholds = getattr(getattr(recipe, "guards", None), "thresholds", GuardRecipe().thresholds)
    for guard in GUARDS:
        threshold = thresholds.get(guard.key)
        keys = [key for key in (guard.metric, guard.per, "rollout/success") if key in log.columns]
        if threshold is None or guard.metric not in keys:
            continue
        steps = [
            dict(zip(keys, values, strict=True)) for values in zip(*(log.columns[key] for key in keys), strict=True)
        ]
        values = [guard.value(step) for step in steps if guard.beyond(step, threshold)]
        if values:
            since = f"in {len(values)} of {len(steps)} steps"
            yield len(values) / len(steps), guard.sentence(float(np.mean(values)), threshold, since)


def _of_run(log: Log, recipe: Any, test: PairedTest | None) -> Iterator[tuple[float, str]]:
    """(strength in [0, 1], sentence) of reasons that no guard covers."""

    def average(key: str) -> float:
        values = log.trained(key)[1]
        return float(values.mean()) if len(values) else math.nan

    success, first, last = average("rollout/success"), *_ends(log, "rollout/return")
    if success <= 0.05:
        yield 1.0, f"training episodes succeed in {success:.1%}: the tasks are too hard; warm up with `posttrain sft`"
    start = test.a if test is not None and test.kind == "rate" else success
    if start >= 0.95:
        yield 1.0, f"{start:.1%} succeed from the start, so little is left to learn; choose harder tasks in environment"
    if test is not None and last > first and test.difference.value <= 0:
        yield (
            0.9,
            f"the training return rose from {first:.3g} to {last:.3g} and the held-out measure did not: the reward may be "
            "gamed, or the tasks are memorized; look at the episodes, and raise kl.coefficient",
        )
    clipped = np.nansum([average(name) for name in ("policy/clip_low", "policy/clip_high")])
    if clipped > 0.3:
        yield float(clipped), f"{clipped:.0%} of the tokens are clipped; lower learner.epochs_per_step"
    if (skipped := average("optimizer/skipped")) > 0:
        yield skipped, f"{skipped:.0%} of the updates are skipped; lower optimizer.learning_rate"
    rate, usual = recipe.optimizer.learning_rate, (5e-5 if recipe.model.lora else 1e-6)
    if rate < usual:
        kind = "LoRA" if recipe.model.lora else "all weights"
        yield 0.8, f"optimizer.learning_rate {rate:g} is low for training {kind}; raise it"
    done = log.last_step * getattr(recipe, "updates", 1)
    if done < 50:
        yield 0.6, f"the model made only {counted(done, 'update')}; raise steps"
    if test is not None:
        least = (
            f"{100 * detectable(test.n):.0f} points"
            if test.kind == "rate"
            else f"{2.8 / math.sqrt(test.n):.2f} standard deviations"
        )
        yield 0.5, f"{counted(test.n, 'held-out task')} show changes of {least} or more; hold out more"
    yield 0.1, f"{counted(log.last_step, 'step')} at optimizer.learning_rate {rate:g} may be too few; raise steps"


def _ends(log: Log, key: str) -> tuple[float, float]:
    """The mean of a training metric in the first and the last quarter of the steps; NaN without steps."""
    values = log.trained(key)[1]
    part = max(1, len(values) // 4)
    return (float(values[:part].mean()), float(values[-part:].mean())) if len(values) else (math.nan, math.nan)
