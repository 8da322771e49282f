"""Evaluators: held-out measurements of a stage, such as playing episodes. Does not import torch."""

import math
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from posttrain.data.held_out import TaskSplit, listed_rows
from posttrain.environments.protocol import EnvironmentFactory, completed, return_range
from posttrain.episode import Outcome, StopReason
from posttrain.errors import RunError
from posttrain.evaluation.results import MetricResult
from posttrain.evaluation.summary import MEAN, PASS, evaluate
from posttrain.recipe.components import environment_class
from posttrain.recipe.rollout import SCORES, EvaluationRecipe
from posttrain.rollout.driver import Played, quiet, unscored_message
from posttrain.rollout.store import Split, write_episodes
from posttrain.runs.samples import RowSample
from posttrain.runs.tables import EVALUATED, START, TRAINED, PolicyRow, Table, checkpoint_note, policy_tables

if TYPE_CHECKING:
    from posttrain.training.evaluate import RemoteRolloutManager
    from posttrain.training.rollouts import RolloutManager

T = TypeVar("T")


class Evaluator(ABC):
    """One kind of held-out measurement. Its values go to a line of the metrics log; no two kinds share a key."""

    row_scores: MetricResult | None = None
    """The score of each row in the last `final`; None if its episodes are stored instead."""
    artifacts: Sequence[str] = ()
    """Lines to print after the final tables, such as scored samples; usually none."""

    def baselines(self) -> dict[str, dict[str, Any]]:
        """Name -> values of the baseline policies, such as `random` and `optimal`; empty if there are none."""
        return {}

    @abstractmethod
    def curve(self, step: int, played: Played = quiet) -> dict[str, Any]:
        """Values of the learning curve, on the data that selects the best checkpoint. `played` is called with the
        number of finished episodes or rows and the total."""

    @abstractmethod
    def final(self, step: int, played: Played = quiet) -> dict[str, Any]:
        """Values of the final table, on data that was not used to select a checkpoint."""

    @abstractmethod
    def cost(self) -> str:
        """A phrase that describes the work of `final`, for the display."""

    @abstractmethod
    def tables(self, lines: Mapping[str, Mapping[str, Any]]) -> list[Table]:
        """The final tables, from the metrics lines of kind `baseline` and `final` by their `policy`."""

    def samples(self) -> Sequence[RowSample]:
        """Some of the rows of the last `final`, for the pages; none if its episodes are stored instead."""
        return []


def choice_of(metric: str | None) -> Callable[[dict[str, Any]], float]:
    """The value of an evaluation that selects the best checkpoint; larger is better. By default success if the environment
    reports it, else the return."""
    if metric == "loss":
        return lambda values: -values["validation/loss"]
    if metric == "accuracy":  # there is none if all answers are good, or all are bad
        return lambda values: -math.inf if values["validation/accuracy"] is None else values["validation/accuracy"]
    return lambda values: values[metric or ("success" if "success" in values else "return")]


class EpisodeEvaluator(Evaluator):
    """Plays held-out seeds of an environment and compares the results with its baseline policies.

    Attributes:
        warnings: about the episodes of the last evaluation: failures, and truncated answers.
    """

    def __init__(
        self,
        manager: "RolloutManager | RemoteRolloutManager",
        recipe: Any,
        tasks: TaskSplit,
        episodes: Path,
        left_out: frozenset[int] = frozenset(),
    ) -> None:
        """`manager`: supplies the rollout workers. `recipe`: of a stage with `evaluation`. `tasks`: its `validation` seeds make
        the learning curve, and its `test` seeds the final table. `episodes`: directory to which the episodes are written.
        `left_out`: held-out seeds that are not played."""
        evaluation: EvaluationRecipe = recipe.evaluation
        self.manager = manager
        self.factory = manager.environment
        if evaluation.environment is not None:
            self.factory = EnvironmentFactory(evaluation.environment)
        self.environment = self.factory.recipe
        self.recipe, self.tasks, self.episodes, self.left_out = recipe, tasks, episodes, left_out
        self.warnings: list[str] = []

    def baselines(self) -> dict[str, dict[str, Any]]:
        kind = environment_class(self.environment.type)
        name = f"`baselines` of {self.environment.type}"
        baselines = completed(partial(kind.baselines, self.environment, self.tasks.test), name)
        return {
            policy: {
                "success": baseline.success,
                "success_low": baseline.interval[0] if baseline.interval else None,
                "success_high": baseline.interval[1] if baseline.interval else None,
                "return": baseline.mean_return,
                "n": baseline.n,
            }
            | {
                f"{SCORES}{name}{limit}": value
                for name, score in self._ordered(baseline.scores).items()
                for limit, value in zip(("", "_low", "_high"), score, strict=True)
            }
            for policy, baseline in baselines.items()
        }

    def curve(self, step: int, played: Played = quiet) -> dict[str, Any]:
        return self._play(self.tasks.validation, step, "evaluation", played)

    def final(self, step: int, played: Played = quiet) -> dict[str, Any]:
        return self._play(self.tasks.test, step, "final", played)

    def cost(self) -> str:
        return f"playing {len(self.tasks.test)} held-out episodes"

    def tables(self, lines: Mapping[str, Mapping[str, Any]]) -> list[Table]:
        """Table of the random, initial, trained and optimal policies, and tables of further scores of the environment."""
        return policy_tables(self.rows(lines), f"{self.recipe.name}: {self.environment.type}, held-out seeds")

    def rows(self, lines: Mapping[str, Mapping[str, Any]]) -> list[PolicyRow]:
        titles = {"random": "random policy", "optimal": "optimal policy", TRAINED: "trained model"}
        titles[EVALUATED] = self.manager.model_name
        others = environment_class(self.environment.type).scripted_baselines
        players = [
            policy
            for policy in ("random", *others, START, TRAINED, EVALUATED, "optimal")
            if "n" in lines.get(policy, {})
        ]
        rows = []
        for policy in players:
            line = lines[policy]
            notes = [checkpoint_note(line)] if "best_step" in line else []
            notes += [f"{line['failed']} of {line['episodes']} episodes failed"] if line.get("failed") else []
            row = PolicyRow.from_values(titles.get(policy, policy), line, "; ".join(notes))
            # mean@k and pass@k, with their intervals.
            keys = [key for key in line if key.startswith((MEAN, PASS)) and not key.endswith(("_low", "_high"))]
            attempts = {key.replace("k/", ""): (line[key], line[f"{key}_low"], line[f"{key}_high"]) for key in keys}
            rows.append(replace(row, scores={**attempts, **row.scores}))
        return rows

    def listed_tasks(self) -> dict[str, str]:
        """Part of the run -> the rows of files that are its tasks, for the report. Generated tasks are not listed."""
        trained = self.manager.environment.recipe
        parts = {
            "training": (trained, self.tasks.training),
            "curve": (self.environment, self.tasks.validation),
            "table": (self.environment, self.tasks.test),
        }
        listed = {}
        for part, (environment, seeds) in parts.items():
            rows = environment_class(environment.type).task_rows(environment)
            played = [seed for seed in seeds if part == "training" or seed not in self.left_out]
            if rows is not None and played:
                listed[part] = listed_rows(rows, played)
        return listed

    def _play(self, seeds: Sequence[int], step: int, split: Split, played: Played) -> dict[str, Any]:
        # A reward model adds to the rewards of the environment, and an agent may have others.
        is_known = self.manager.scorer is None and self.manager.agent is None
        bounds = return_range(self.environment) if is_known else None
        evaluation, seed = self.recipe.evaluation, self.recipe.seed
        with self.manager.worker(evaluation.sampling, self.factory) as worker:
            result, episodes = evaluate(
                worker, seeds, evaluation.episodes_per_seed, seed, self.left_out, played, bounds
            )
        write_episodes(self.episodes, step, split, episodes, None)
        if result.unscored == result.episodes:
            remedy = "correct the function or environment, or hold out other tasks"
            raise RunError(f"{unscored_message(episodes)}; there is nothing to evaluate, so {remedy}")
        share = self.manager.rollout.failures.max_share
        if result.failed > min(share * result.episodes, result.episodes - result.unscored - 1):
            first = next(episode for episode in episodes if episode.failure)
            task = environment_class(self.environment.type).task_name(self.environment, first.seed)
            raise RunError(
                f"{result.failed} of {result.episodes} evaluation episodes failed, the first on {task}: {first.failure}; "
                f"rollout.failures.max_share is {share}; correct the environment, its reward or its judge, then resume"
            )
        failed = [episode for episode in episodes if episode.outcome is Outcome.FAILED]
        self.warnings = []
        if failed:
            self.warnings.append(
                f"{len(failed)} of {len(episodes)} episodes failed and count as not successful, the first on environment "
                f"seed {failed[0].seed}: {failed[0].failure}"
            )
        if message := unscored_message(episodes):
            self.warnings.append(message)
        reasons = Counter(turn.stop_reason for episode in episodes for turn in episode.turns)
        if cut := reasons[StopReason.TURN_BUDGET]:
            most = self.manager.rollout.tokens_per_turn
            self.warnings.append(
                f"{cut} of {reasons.total()} answers are truncated at rollout.tokens_per_turn = {most}"
            )
        return replace(result, scores=self._ordered(result.scores)).metrics()

    def _ordered(self, scores: Mapping[str, T]) -> dict[str, T]:
        order = environment_class(self.environment.type).score_order
        return {name: scores[name] for name in dict.fromkeys([*order, *scores]) if name in scores}
