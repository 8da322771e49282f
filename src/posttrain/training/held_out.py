"""Held-out episodes of an environment as a `Measure`, whoever plays them."""

from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Literal

from posttrain.evaluation.evaluate import evaluate
from posttrain.evaluation.pass_at_k import MEAN, PASS
from posttrain.recipe.components import EnvironmentRecipe, environment_class
from posttrain.recipe.rollout import SCORES, SamplingRecipe, SeedRange
from posttrain.recipe.stages import EvaluateRecipe, RlRecipe, SftRecipe
from posttrain.rollout.driver import EpisodePlayer
from posttrain.rollout.store import Split, write_episodes
from posttrain.rollout.streams import Episode, Outcome, StopReason
from posttrain.runs.directory import RunDirectory
from posttrain.runs.tables import PlayRow, Table, play_tables
from posttrain.training.measure import EVALUATED, START, TRAINED


class HeldOut(ABC):
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
    def player(self, sampling: SamplingRecipe) -> AbstractContextManager[EpisodePlayer[Any]]:
        """A player as it is now, for the time of the block."""

    def choice(self, metric: Literal["success", "return"] | None) -> Callable[[dict[str, Any]], float]:
        """What chooses the best checkpoint among evaluations: `metric`, or success where it is known, else the return."""
        return lambda values: values[metric or ("success" if "success" in values else "return")]

    def references(self) -> dict[str, dict[str, Any]]:
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
        return play_tables(self.rows(lines), f"{self.recipe.name}: {self.environment.type}, held-out seeds")

    def rows(self, lines: Mapping[str, Mapping[str, Any]]) -> list[PlayRow]:
        """The rows of the table."""
        titles = {
            "random": "random policy",
            "optimal": "optimal policy",
            TRAINED: "trained model",
            EVALUATED: self.evaluated,
        }
        others = environment_class(self.environment.type).players
        known = [
            player
            for player in ("random", *others, START, TRAINED, EVALUATED, "optimal")
            if "n" in lines.get(player, {})
        ]
        found = [
            PlayRow.from_values(titles.get(player, player), lines[player], _note(lines[player])) for player in known
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
