"""What a stage measures on held-out data, and the tables that come of it."""

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Generic, Literal, Protocol, TypeVar

import numpy as np

from posttrain.data.rendering import Renderer
from posttrain.data.tokens import TokenRow
from posttrain.episode import Episode, Outcome, StopReason
from posttrain.evaluation.statistics import Estimate, bootstrap_ratio, calibration, pair_accuracy, ranking_accuracy
from posttrain.evaluation.summary import MEAN, PASS, evaluate
from posttrain.models.forward import TokenScores
from posttrain.models.reward import RewardModel
from posttrain.recipe.components import EnvironmentRecipe, environment_class
from posttrain.recipe.rollout import SCORES, SamplingRecipe, SeedRange
from posttrain.recipe.stages import DpoRecipe, EvaluateRecipe, RewardRecipe, RlRecipe, SftRecipe
from posttrain.rollout.driver import EpisodeWorker
from posttrain.rollout.store import Split, write_episodes
from posttrain.runs.directory import RunDirectory
from posttrain.runs.tables import PolicyRow, Table, policy_tables
from posttrain.training.batches import Sample
from posttrain.training.objectives import PairObjective, RewardObjective, UnpairedObjective, logprobs
from posttrain.training.rows import DataSet, samples_of_row
from posttrain.training.updater import Updater

START = "start of this run"
TRAINED = "trained"
EVALUATED = "evaluated"


class Evaluator(Protocol):
    """One kind of held-out measurement. Values are those of a line of the metrics log; keys of two kinds differ."""

    def baselines(self) -> dict[str, dict[str, Any]]:
        """RolloutWorker -> values of what the model is compared with: random and optimal players, where there are any."""
        ...

    def curve(self, step: int) -> dict[str, Any]:
        """Values of the learning curve, on the data that chooses the best checkpoint."""
        ...

    def final(self, step: int) -> dict[str, Any]:
        """Values of the final table, on data that no choice is made on."""
        ...

    def cost(self) -> str:
        """What `final` will do, in words for the display."""
        ...

    def tables(self, lines: Mapping[str, Mapping[str, Any]]) -> list[Table]:
        """The final tables from the metrics lines of kind `baseline` and `final`, by player."""
        ...

    def artefacts(self) -> Sequence[str]:
        """Lines to print after the final table, such as scored samples; usually none."""
        ...


class EpisodeEvaluator(ABC):
    """Plays the held-out seeds of a recipe, beside the reference players of its environment."""

    evaluated = "model"
    """What the final table calls the model that is evaluated."""

    def __init__(self, recipe: RlRecipe | SftRecipe | EvaluateRecipe, run: RunDirectory) -> None:
        assert recipe.environment is not None
        self.recipe = recipe
        self.environment: EnvironmentRecipe = recipe.environment
        self.run = run
        self.left_out: frozenset[int] = frozenset()
        """Held-out seeds that are not played."""
        self.remarks: list[str] = []
        """What to know of the episodes played last besides their summary."""

    @abstractmethod
    def player(self, sampling: SamplingRecipe) -> AbstractContextManager[EpisodeWorker[Any]]:
        """A player as it is now, for the time of the block."""

    def choice(self, metric: Literal["success", "return"] | None) -> Callable[[dict[str, Any]], float]:
        """What chooses the best checkpoint among evaluations: `metric`, or success where it is known, else the return."""
        return lambda values: values[metric or ("success" if "success" in values else "return")]

    def baselines(self) -> dict[str, dict[str, Any]]:
        """Values of the random and the optimal player on the final seeds, as far as the environment can compute them."""
        seeds = self.recipe.evaluation.final_seeds
        found = environment_class(self.environment.type).baselines(self.environment, range(seeds.start, seeds.stop))
        return {
            player: {
                "success": baseline.success,
                "success_low": baseline.interval[0] if baseline.interval else None,
                "success_high": baseline.interval[1] if baseline.interval else None,
                "return": baseline.mean_return,
                "n": baseline.n,
            }
            | {
                f"{SCORES}{name}{limit}": value
                for name, score in baseline.scores.items()
                for limit, value in zip(("", "_low", "_high"), score, strict=True)
            }
            for player, baseline in found.items()
        }

    def curve(self, step: int) -> dict[str, Any]:
        """Play the held-out seeds of the learning curve."""
        return self._play(self.recipe.evaluation.seeds, step, "evaluation")

    def final(self, step: int) -> dict[str, Any]:
        """Play the held-out seeds of the final table."""
        return self._play(self.recipe.evaluation.final_seeds, step, "final")

    def cost(self) -> str:
        """For the display."""
        return f"playing {self.recipe.evaluation.final_seeds.count} held-out episodes"

    def tables(self, lines: Mapping[str, Mapping[str, Any]]) -> list[Table]:
        """Random, start, trained, optimal; and what the environment reports of each besides."""
        return policy_tables(self.rows(lines), f"{self.recipe.name}: {self.environment.type}, held-out seeds")

    def rows(self, lines: Mapping[str, Mapping[str, Any]]) -> list[PolicyRow]:
        """The rows of the table."""
        titles = {
            "random": "random policy",
            "optimal": "optimal policy",
            TRAINED: "trained model",
            EVALUATED: self.evaluated,
        }
        others = environment_class(self.environment.type).scripted_baselines
        known = [
            player
            for player in ("random", *others, START, TRAINED, EVALUATED, "optimal")
            if "n" in lines.get(player, {})
        ]
        found = [
            PolicyRow.from_values(titles.get(player, player), lines[player], _note(lines[player])) for player in known
        ]
        return [
            replace(row, scores={**_attempts(lines[player]), **row.scores})
            for player, row in zip(known, found, strict=True)
        ]

    def artefacts(self) -> Sequence[str]:
        return []

    def _play(self, seeds: SeedRange, step: int, split: Split) -> dict[str, Any]:
        recipe = self.recipe.evaluation.model_copy(update={"seeds": seeds})
        with self.player(recipe.sampling) as player:
            result, episodes = evaluate(player, recipe, self.recipe.seed, self.left_out)
        write_episodes(self.run.episodes, step, split, episodes, None)
        self.remarks = _remarks(episodes, self.recipe.rollout.tokens_per_turn)
        return result.metrics()


def _attempts(line: Mapping[str, Any]) -> dict[str, tuple[float, float, float]]:
    """mean@k and pass@k of an evaluation line with their intervals, under the names that the table gives them."""
    keys = [key for key in line if key.startswith((MEAN, PASS)) and not key.endswith(("_low", "_high"))]
    return {key.replace("k/", ""): (line[key], line[f"{key}_low"], line[f"{key}_high"]) for key in keys}


def _note(line: Mapping[str, Any]) -> str:
    """What the table says beside a player: which checkpoint it is, and how many episodes failed."""
    notes = [f"step {line['best_step']}, {line['chosen']}"] if "best_step" in line else []
    notes += [f"{line['failed']} of {line['episodes']} episodes failed"] if line.get("failed") else []
    return "; ".join(notes)


def _remarks(episodes: Sequence[Episode], most: int) -> list[str]:
    """How many episodes failed, and how many answers were cut off at `most` tokens."""
    failed = [episode for episode in episodes if episode.outcome is Outcome.FAILED]
    found = []
    if failed:
        found.append(
            f"{len(failed)} of {len(episodes)} episodes failed and count as not successful, the first on environment seed "
            f"{failed[0].seed}: {failed[0].failure}"
        )
    reasons = Counter(turn.stop_reason for episode in episodes for turn in episode.turns)
    if cut := reasons[StopReason.TURN_BUDGET]:
        found.append(f"{cut} of {reasons.total()} answers were cut off at rollout.tokens_per_turn = {most}")
    return found


class LossEvaluator:
    """Nats per trained token, over all rows and over those of each domain."""

    def __init__(self, learner: Updater[TokenScores], recipe: SftRecipe, data: DataSet) -> None:
        self.learner = learner
        self.recipe = recipe
        self.data = data

    def baselines(self) -> dict[str, dict[str, Any]]:
        return {}

    def curve(self, step: int) -> dict[str, Any]:
        return self._measure(self.data.validation, "validation") if self.data.validation else {}

    def final(self, step: int) -> dict[str, Any]:
        return self._measure(self.data.final, "test")

    def cost(self) -> str:
        return f"measuring the loss on {len(self.data.final)} held-out rows"

    def tables(self, lines: Mapping[str, Mapping[str, Any]]) -> list[Table]:
        """Before and after, whole and by domain."""
        rows = []
        for player, title in ((START, START), (TRAINED, "trained model")):
            values = lines.get(player, {})
            for key in [key for key in values if key.startswith("test/rows")]:
                suffix = key.removeprefix("test/rows")
                loss, low, high = (values[f"test/loss{part}{suffix}"] for part in ("", "_low", "_high"))
                interval = f"[{low:.4f}, {high:.4f}]" if low is not None else "–"
                note = f"step {values['best_step']}, {values['chosen']}" if player == TRAINED and not suffix else ""
                domain, count = suffix.removeprefix("/") or "all", values[key]
                rows.append((title, domain, f"{loss:.4f}", interval, f"{math.exp(loss):.2f}", str(count), note))
        headings = ("policy", "rows of", "loss", "95% interval", "perplexity", "n", "note")
        about = "" if self.data.test else " They are the validation rows, which also chose the checkpoint."
        table = Table(
            title=f"{self.recipe.name}: held-out rows",
            headings=headings,
            rows=rows,
            note="Loss in nats per trained token; `n` rows; intervals are 95%, by bootstrap over rows." + about,
            words=("policy", "rows of", "note"),
        )
        return [table]

    def artefacts(self) -> Sequence[str]:
        return []

    def _measure(self, rows: Sequence[TokenRow], name: str) -> dict[str, Any]:
        samples = [(row, sample) for row in rows for sample in samples_of_row(row)]
        scores = logprobs(self.learner, [sample for _, sample in samples])
        nats: dict[int, float] = {}
        tokens: dict[int, float] = {}
        for (row, _), score in zip(samples, scores, strict=True):
            nats[id(row)] = nats.get(id(row), 0.0) - float(score.sum(dtype="float64"))
            tokens[id(row)] = tokens.get(id(row), 0.0) + len(score)
        values: dict[str, Any] = {}
        domains = sorted({row.domain for row in rows if row.domain is not None})
        for domain in [None, *domains]:
            chosen = [row for row in rows if domain is None or row.domain == domain]
            estimate = bootstrap_ratio([nats[id(row)] for row in chosen], [tokens[id(row)] for row in chosen])
            suffix = "" if domain is None else f"/{domain}"
            values[f"{name}/loss{suffix}"] = estimate.value
            known = not math.isnan(estimate.low)  # one row has no interval
            values[f"{name}/loss_low{suffix}"] = estimate.low if known else None
            values[f"{name}/loss_high{suffix}"] = estimate.high if known else None
            values[f"{name}/rows{suffix}"] = len(chosen)
        values[f"{name}/perplexity"] = math.exp(values[f"{name}/loss"])
        return values


Output = TypeVar("Output")
_SHOWN_PAIRS = 3


def choice_of(metric: str) -> Callable[[dict[str, Any]], float]:
    """What chooses the best checkpoint: larger is better."""
    if metric == "loss":
        return lambda values: -values["validation/loss"]
    # Nothing is ranked where all answers are good, or all are bad.
    return lambda values: -math.inf if math.isnan(values["validation/accuracy"]) else values["validation/accuracy"]


class PreferenceEvaluator(Generic[Output]):
    """Accuracy, loss and margin, over all rows and over those of each domain."""

    def __init__(
        self,
        learner: Updater[Output],
        recipe: DpoRecipe | RewardRecipe,
        data: DataSet,
        objective_for: Callable[[Sequence[Sample]], PairObjective | UnpairedObjective | RewardObjective],
        model: RewardModel | None = None,
        renderer: Renderer | None = None,
    ) -> None:
        """`model` and `renderer`: for reward models, which keep statistics and show what they scored."""
        self.learner = learner
        self.recipe = recipe
        self.data = data
        self.objective_for = objective_for
        self.model = model
        self.renderer = renderer
        self._shown: list[str] = []

    def baselines(self) -> dict[str, dict[str, Any]]:
        return {}

    def curve(self, step: int) -> dict[str, Any]:
        return self._values(self.data.validation, "validation") if self.data.validation else {}

    def final(self, step: int) -> dict[str, Any]:
        rows = self.data.final
        losses, chosen, rejected = self._judge(rows)
        if self.model is not None:
            both = np.concatenate([chosen, rejected])
            if self.data.validation and self.data.test:
                both = np.concatenate(self._judge(self.data.validation)[1:])
            self.model.set_statistics(float(both.mean()), float(both.std(ddof=1)))
            self._shown = [*_calibration_lines(chosen - rejected), *self._sample_lines(rows, chosen, rejected)]
        return _summary(rows, losses, chosen, rejected, "test")

    def cost(self) -> str:
        return f"ranking {len(self.data.final)} held-out rows"

    def tables(self, lines: Mapping[str, Mapping[str, Any]]) -> list[Table]:
        """Before and after, whole and by domain."""
        rows = []
        for player, title in ((START, START), (TRAINED, "trained model")):
            values = lines.get(player, {})
            for key in [key for key in values if key.startswith("test/rows")]:
                suffix = key.removeprefix("test/rows")
                share, low, high = (values[f"test/accuracy{part}{suffix}"] for part in ("", "_low", "_high"))
                margin = values[f"test/margin{suffix}"]
                note = f"step {values['best_step']}, {values['chosen']}" if player == TRAINED and not suffix else ""
                rows.append(
                    (
                        title,
                        suffix.removeprefix("/") or "all",
                        "–" if share is None else f"{100 * share:.1f}%",
                        "–" if share is None else f"[{100 * low:.1f}, {100 * high:.1f}]",
                        f"{values[f'test/loss{suffix}']:.4f}",
                        "–" if margin is None else f"{round(margin, 3) + 0.0:.3f}",
                        str(values[key]),
                        note,
                    )
                )
        kind = "n good and bad answers: the chance that a good one is ranked above a bad one"
        if self.recipe.stage == "reward" or self.recipe.loss.type != "kto":
            kind = "n pairs: the share whose better answer is ranked above the other; guessing gives 50%"
        about = "" if self.data.test else " They are the validation rows, which also chose the checkpoint."
        table = Table(
            title=f"{self.recipe.name}: held-out comparisons",
            headings=("policy", "rows of", "accuracy", "95% interval", "loss", "mean margin", "n", "note"),
            rows=rows,
            note=f"{kind}; 95% intervals over rows.{about}",
            words=("policy", "rows of", "note"),
        )
        return [table]

    def artefacts(self) -> Sequence[str]:
        return self._shown

    def _values(self, rows: Sequence[TokenRow], name: str) -> dict[str, Any]:
        return _summary(rows, *self._judge(rows), name)

    def _judge(self, rows: Sequence[TokenRow]) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Loss and the two rewards of each row, [n] float64; NaN for an answer that a row has not."""
        samples = [sample for number, row in enumerate(rows) for sample in samples_of_row(row, number)]
        objective: Any = self.objective_for(samples)
        found = np.full((3, len(rows)), np.nan)
        for group, output in self.learner.without_gradient(samples):
            judged = objective.judge(output, [samples[i] for i in group])
            values = (judged.losses, judged.chosen, judged.rejected)
            found[:, judged.rows] = np.stack([value.double().cpu().numpy() for value in values])
        return found[0], found[1], found[2]

    def _sample_lines(self, rows: Sequence[TokenRow], chosen: np.ndarray, rejected: np.ndarray) -> list[str]:
        """A few pairs as text with their rewards: the most surely right, the middle one, and the most wrong."""
        assert self.renderer is not None
        order = np.argsort(chosen - rejected)
        picked = dict.fromkeys(int(order[place]) for place in (-1, len(order) // 2, 0))
        lines = ["scored pairs (most surely right, middle, most surely wrong):"]
        for number in list(picked)[:_SHOWN_PAIRS]:
            lines.append(f"  {rows[number].origin}: margin {chosen[number] - rejected[number]:+.3f}")
            for name, stream, reward in zip(
                ("chosen", "rejected"), rows[number].streams, (chosen[number], rejected[number]), strict=True
            ):
                text = " ".join(self.renderer.tokenizer.decode(stream.ids[stream.trained]).split())
                lines.append(f"    {name:8} {reward:+.3f}  {text[:150]}{'…' if len(text) > 150 else ''}")
        return lines


def _summary(
    rows: Sequence[TokenRow], losses: np.ndarray, chosen: np.ndarray, rejected: np.ndarray, name: str
) -> dict[str, Any]:
    values: dict[str, Any] = {}
    domains = [row.domain for row in rows]
    for domain in [None, *sorted({d for d in domains if d is not None})]:
        inside = np.array([domain is None or d == domain for d in domains])
        suffix = "" if domain is None else f"/{domain}"
        accuracy = _accuracy(chosen[inside], rejected[inside])
        values[f"{name}/rows{suffix}"] = int(inside.sum())
        values[f"{name}/accuracy{suffix}"] = accuracy.value
        values[f"{name}/accuracy_low{suffix}"] = accuracy.low
        values[f"{name}/accuracy_high{suffix}"] = accuracy.high
        values[f"{name}/loss{suffix}"] = float(losses[inside].mean())
        values[f"{name}/margin{suffix}"] = float(np.nanmean(chosen[inside]) - np.nanmean(rejected[inside]))
    values[f"{name}/chosen"], values[f"{name}/rejected"] = float(np.nanmean(chosen)), float(np.nanmean(rejected))
    both = np.concatenate([chosen, rejected])
    values[f"{name}/reward_mean"], values[f"{name}/reward_std"] = float(np.nanmean(both)), float(np.nanstd(both))
    return values


def _accuracy(chosen: np.ndarray, rejected: np.ndarray) -> Estimate:
    good, bad = chosen[~np.isnan(chosen)], rejected[~np.isnan(rejected)]
    if len(good) == len(bad) == len(chosen):
        return pair_accuracy(list(chosen - rejected))
    if not len(good) or not len(bad):
        return Estimate(math.nan, math.nan, math.nan, len(chosen))
    return ranking_accuracy(list(good), list(bad))


def _calibration_lines(margins: np.ndarray) -> list[str]:
    bins, error = calibration(list(margins))
    lines = [f"calibration: expected error {100 * error:.1f} percentage points over {len(margins)} pairs"]
    lines += [
        f"  predicted {100 * b.low:.0f}-{100 * b.high:.0f}%: mean {100 * b.confidence:.1f}%, right "
        f"{100 * b.accuracy.value:.1f}% [{100 * b.accuracy.low:.1f}, {100 * b.accuracy.high:.1f}], n {b.accuracy.n}"
        for b in bins
    ]
    return lines
