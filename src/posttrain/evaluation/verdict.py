"""Whether a training run learned anything: a paired test of its held-out measure before and after, and probable reasons.

It reads what the run has stored, and plays nothing. `Trainer.finish` writes the verdict to `results.json`.
"""

import math
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from posttrain.evaluation.paired import PairedTest, paired_test
from posttrain.evaluation.results import MetricResult, read_results
from posttrain.evaluation.sides import episode_metrics
from posttrain.recipe.detectable import FEWEST, shown
from posttrain.recipe.guards import GUARDS, OFF_POLICY, GuardRecipe
from posttrain.recipe.needs import advised
from posttrain.recipe.plan import counted
from posttrain.recipe.run import BY_AUDIT
from posttrain.rollout.store import read_episodes, stored_steps
from posttrain.runs.directory import RunDirectory
from posttrain.runs.log import Log, read_log
from posttrain.runs.tables import IMPROVED, NOTHING, START, TRAINED, UNIMPROVED, UNSHOWN, WORSE, Verdict

REASONS = 3
"""Number of probable reasons."""
LOST = 0.1
"""Share of the held-out items that may be missing from a verdict."""
SILENT = 0.5
"""Share of groups. If as many have no credit, training lacks a signal."""


def rows_file(run: RunDirectory, policy: str) -> Path:
    """The scores by final held-out row of the policy `START` or `TRAINED`."""
    return run.path / "rows" / ("start.json" if policy == START else "trained.json")


def run_verdict(run: RunDirectory) -> Verdict | None:
    """The verdict on a finished training run; None if it has not measured the model before training.

    The final data is tested at 5%, two-sided; no checkpoint was selected on it. A run whose best checkpoint is the starting
    model has learned nothing, whatever the test, and so has one of which only the reward rose, by the audit of the
    exported checkpoint. Of others, tests of fewer than `FEWEST` items show nothing, and neither do those that more than `LOST` of
    the items are missing from, which are not a random part.
    """
    log = read_log(run.metrics)
    recipe: Any = run.load_recipe(to_run=True)
    test, text, count, lost = None, "", FEWEST, 0.0
    if (pair := _measured(run, getattr(recipe.evaluation, "metric", None))) is not None:
        before, after = pair
        items = sorted(before.scores.items.keys() & after.scores.items.keys())
        if (count := len(items)) > 1:
            test = paired_test(before.name, before.better, [before.scores], [after.scores], items)
            test = replace(test, corrected=test.p)
            what, lost = _lost(log, test)
            limits = "" if math.isnan(test.difference.low) else f" {test.limits}"
            change = (
                f"{test.text(test.a)} to {test.text(test.b)}, {test.text(test.difference.value, signed=True)}{limits}"
            )
            text = f"{test.metric} went from {change}, p = {test.p_text}, on {counted(test.n, _item(recipe))}{what}"
    if any(line.get("chosen") == UNIMPROVED for line in log):
        by = " by the audit" if getattr(recipe, "export", None) == BY_AUDIT else ""
        gamed = [str(line["message"]) for line in log if line["kind"] == "audit" and line.get("alarm")][-1:]
        reasons = [*gamed, *_reasons(log, recipe, test)][:REASONS]
        return Verdict(NOTHING, f"Nothing was learned{by}: {UNIMPROVED}.", reasons)
    if count < FEWEST:
        return Verdict(UNSHOWN, f"Not shown: {'; '.join([*filter(None, [text]), *recipe.too_few(count)])}.")
    if lost > LOST:
        return Verdict(UNSHOWN, f"Not shown: {text}; correct the environment, then evaluate again.")
    if test is None:
        return None
    exported = next((line.get("best_step") for line in log if line["kind"] == "final"), None) or 0
    # An audit that fails from then on does not take back its last verdict.
    audits = [line for line in log if line["kind"] == "audit" and "alarm" in line and line["step"] <= exported]
    if test.better_side == "B" and any(line["alarm"] for line in audits[-1:]):
        return Verdict(NOTHING, f"The reward rose and the audit did not: {text}.", [str(audits[-1].get("message"))])
    if test.better_side == "B":
        return Verdict(IMPROVED, f"The model improved: {text}.")
    words = {None: (NOTHING, "Nothing was learned"), "A": (WORSE, "The model got worse")}[test.better_side]
    return Verdict(words[0], f"{words[1]}: {text}.", _reasons(log, recipe, test))


def unaudited(log: Log) -> str:
    """The evaluations among which `export: best_by_audit` cannot choose; empty if there are none."""
    steps, scored = ({line["step"] for line in log if line["kind"] == kind} for kind in ("evaluation", "audit"))
    if not (missed := sorted(steps - scored)):
        return ""
    shown = ", ".join(map(str, missed[:3])) + " ..." * (len(missed) > 3)
    return (
        f"export: best_by_audit chooses among {len(scored)} of {len(steps)} evaluations, since the audit did not score enough tasks "
        f"at step {shown}; correct audit"
    )


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


def _lost(log: Log, test: PairedTest) -> tuple[str, float]:
    """What the failed episodes of the final data do to the test, empty if none failed, and the share of tasks not measured."""
    finals = {line.get("policy"): line for line in log if line["kind"] in ("baseline", "final")}
    sides = [finals[policy] for policy in (START, TRAINED) if finals.get(policy, {}).get("failed")]
    if not sides:
        return "", 0.0
    if test.n < (tasks := max(int(side["n"]) for side in sides)):
        return f"; {test.n} of {tasks} tasks were measured, the others failed", 1 - test.n / tasks
    failed, episodes = (sum(int(side[key]) for side in sides) for key in ("failed", "episodes"))
    counts = " and count as unsuccessful" if test.metric == "success" else ""
    return f"; {failed} of {counted(episodes, 'episode')} failed{counts}", 0.0


def _set(recipe: Any, *keys: str) -> str:
    """The end of a sentence with what `advised` gives, if one of `keys` has an effect."""
    return f"; set {change}" if (change := advised(recipe, *keys)) else ""


def _item(recipe: Any) -> str:
    return "held-out row" if recipe.tested_key.startswith("data.") else "held-out task"


def _reasons(log: Log, recipe: Any, test: PairedTest | None) -> list[str]:
    """The three most likely reasons by the run's own metrics, the strongest first."""
    found = sorted([*_guarded(log, recipe), *_of_run(log, recipe, test)], key=lambda reason: -reason[0])
    return [sentence for _, sentence in found[:REASONS]]


def _guarded(log: Log, recipe: Any) -> Iterator[tuple[float, str]]:
    """(share of the steps, sentence) of each guard whose threshold was exceeded; see `posttrain.recipe.guards`."""
    thresholds = getattr(getattr(recipe, "guards", None), "thresholds", GuardRecipe.defaults)
    fell = _moved(log, "rollout/return") < 0
    for guard in GUARDS:
        threshold = thresholds.get(guard.key)
        keys = [key for key in (guard.metric, guard.per, "rollout/success") if key in log.columns]
        if threshold is None or guard.metric not in keys:
            continue
        steps = [
            dict(zip(keys, values, strict=True)) for values in zip(*(log.columns[key] for key in keys), strict=True)
        ]
        first = next((value for step in steps if not math.isnan(value := guard.value(step))), math.nan)
        values = [guard.value(step) for step in steps if guard.beyond(step, threshold, first)]
        if values:
            since = f"in {len(values)} of {len(steps)} steps"
            sentence = guard.sentence(recipe, float(np.mean(values)), threshold, since, first, fell)
            yield len(values) / len(steps), sentence


def _of_run(log: Log, recipe: Any, test: PairedTest | None) -> Iterator[tuple[float, str]]:
    """(strength, sentence) of reasons that no guard covers; those of guards have at most the strength 1."""

    def average(key: str) -> float:
        values = log.trained(key)[1]
        return float(values.mean()) if len(values) else math.nan

    success, first, last = average("rollout/success"), *_ends(log, "rollout/return")
    spread, moved = average("reward/group_spread"), _moved(log, "rollout/return")
    silent = average("credit/zero_groups")
    if math.isnan(silent):
        silent = float(spread == 0 or (math.isnan(spread) and success <= 0.05))
    rate, usual = recipe.optimizer.learning_rate, (5e-5 if recipe.model.lora else 1e-6)
    kind = "LoRA" if recipe.model.lora else "all weights"
    updates = log.last_step * getattr(recipe, "updates", 1)
    if rate < usual:
        # Where no group has credit, another rate would not change that.
        strength = 2.0 if rate <= usual / 10 and silent < SILENT else 0.8
        yield strength, f"optimizer.learning_rate {rate:g} is low for training {kind}; raise it"
    worse = test is not None and test.better_side == "A" and not math.isnan(first)
    broken = rate > usual / 10 and moved < int(worse)
    if broken:
        what = f"training return fell from {first:.3g} to {last:.3g}" if moved < 0 else "held-out measure got worse"
        yield 2.0, f"the {what}, so the updates are too large{_set(recipe, 'optimizer.learning_rate')}"
    start = test.a if test is not None and test.kind == "rate" else success
    sampling = getattr(getattr(recipe, "rollout", None), "sampling", None)
    rows = getattr(getattr(recipe, "environment", None), "rows_key", None)
    if start >= 0.95:
        what = "tasks in environment" if hasattr(recipe, "environment") else "rows in data"
        yield 1.0, f"{start:.1%} succeed from the start, so little is left to learn; choose harder {what}"
    elif silent >= SILENT and sampling is not None and sampling.temperature == 0:
        yield 2.0, "rollout.sampling.temperature is 0, so the episodes of a task are the same; set it to 1"
    elif rows and spread == 0 and first != 0 and not np.ptp(log.trained("rollout/return")[1]):
        yield 2.0, f"every training episode has the return {first:.4g}; let environment.reward tell answers apart"
    elif success <= 0.05 and silent >= SILENT and not broken:
        yield 1.0, f"training episodes succeed in {success:.1%}: the tasks are too hard; warm up with `posttrain sft`"
    if getattr(recipe, "export", None) == BY_AUDIT and (missing := unaudited(log)):
        yield 1.5, missing
    if test is not None and moved > 0 and test.difference.value <= 0:
        audited = getattr(recipe, "export", None) == BY_AUDIT
        which = "the audit of the best checkpoint" if audited else "the held-out measure"
        yield (
            0.9,
            f"the training return rose from {first:.3g} to {last:.3g} and {which} did not: the reward may be gamed, or the "
            f"tasks are memorized; look at the episodes{_set(recipe, 'kl.coefficient', 'optimizer.learning_rate')}",
        )
    if test is not None and test.metric == "success" and not (test.a or test.b) and moved > 0:
        yield (
            2.0,
            f"the training return rose from {first:.3g} to {last:.3g}, and no answer counts as a success{_set(recipe, 'evaluation.metric')}",
        )
    clipped = np.nansum([average(name) for name in ("policy/clip_low", "policy/clip_high")])
    if clipped > 0.3:
        yield float(clipped), f"{clipped:.0%} of the tokens are clipped{_set(recipe, *OFF_POLICY)}"
    if (skipped := average("optimizer/skipped")) > 0:
        yield skipped, f"{skipped:.0%} of the updates are skipped{_set(recipe, 'optimizer.learning_rate')}"
    more = _set(recipe, "steps", "epochs")
    if updates < 50 and not broken:
        yield 0.6, f"the model made only {counted(updates, 'update')}{more}"
    if test is not None:
        episodes = getattr(recipe.evaluation, "episodes_per_seed", 1)
        yield 0.5, f"{shown(test.n, episodes, test.kind, _item(recipe))}; raise {recipe.tested_key}"
    if updates >= 50 and not broken:
        yield 0.1, f"{counted(log.last_step, 'step')} at optimizer.learning_rate {rate:g} may be too few{more}"


def _moved(log: Log, key: str) -> int:
    """1 or -1 if a training metric has risen or fallen from the first quarter of the steps to the last by more than twice
    the standard error that its changes between steps suggest, else 0."""
    values, (first, last) = log.trained(key)[1], _ends(log, key)
    if len(values) < 3:
        return 0
    noise = math.sqrt(float(np.mean(np.diff(values) ** 2)) / max(1, len(values) // 4))
    return int(last - first > 2 * noise) - int(first - last > 2 * noise)


def _ends(log: Log, key: str) -> tuple[float, float]:
    """The mean of a training metric in the first and the last quarter of the steps; NaN without steps."""
    values = log.trained(key)[1]
    part = max(1, len(values) // 4)
    return (float(values[:part].mean()), float(values[-part:].mean())) if len(values) else (math.nan, math.nan)
