"""Playing an environment with the policy in training: for rollouts, and as a measurement."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

from posttrain.data.rendering import Renderer
from posttrain.engines.local import LocalEngine
from posttrain.evaluation.evaluate import evaluate
from posttrain.models.policy import Policy
from posttrain.recipe.components import EnvironmentRecipe, environment_class
from posttrain.recipe.rollout import SCORES, SamplingRecipe, SeedRange
from posttrain.recipe.stages import EvaluateRecipe, RlRecipe, SftRecipe
from posttrain.rollout.driver import Player, Scorer
from posttrain.rollout.store import write_episodes
from posttrain.runs.directory import RunDirectory
from posttrain.runs.tables import PlayRow, Table, play_table
from posttrain.training.measure import EVALUATED, START, TRAINED

_TITLES = {"random": "random policy", "optimal": "optimal policy", TRAINED: "trained model", EVALUATED: "model"}


class Playing:
    """The engine, and held-out episodes as a `Measure`."""

    def __init__(
        self,
        recipe: RlRecipe | SftRecipe | EvaluateRecipe,
        policy: Policy,
        run: RunDirectory,
        scorer: Scorer | None = None,
    ) -> None:
        """`scorer` adds a reward model's rewards to the episodes played."""
        assert recipe.environment is not None
        self.recipe = recipe
        self.environment: EnvironmentRecipe = recipe.environment
        self.policy = policy
        self.run = run
        self.scorer = scorer
        self.left_out: frozenset[int] = frozenset()
        """Held-out seeds that are not played."""
        self.renderer = Renderer(policy.tokenizer, policy.end_tokens)
        self.engine = LocalEngine(policy, recipe.engine)

    def about_the_template(self) -> list[str]:
        """What the chat template does to the history of several turns."""
        if self.renderer.rewrites_answers:
            return ["the chat template rewrites earlier answers, so every turn becomes a stream of its own"]
        if self.renderer.rewrites_thoughts:
            return ["the chat template drops earlier thinking, so the turn after a thinking answer starts a new stream"]
        return []

    def player(self, sampling: SamplingRecipe) -> Player:
        """A player with the current policy. The engine starts without memories: what a step samples must not depend
        on whether an evaluation, or a resume, came before it.
        """
        self.engine.load_weights(None, self.policy.version)
        return Player(
            engine=self.engine,
            renderer=self.renderer,
            environment=self.environment,
            rollout=self.recipe.rollout,
            sampling=sampling,
            version=self.policy.version,
            scorer=self.scorer,
        )

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

    def table(self, lines: Mapping[str, Mapping[str, Any]]) -> Table:
        """Random, start, trained, optimal."""
        return play_table(self.rows(lines), f"{self.recipe.name}: {self.environment.type}, held-out seeds")

    def rows(self, lines: Mapping[str, Mapping[str, Any]]) -> list[PlayRow]:
        """The rows of the table."""
        rows = []
        others = environment_class(self.environment.type).players
        for player in ("random", *others, START, TRAINED, EVALUATED, "optimal"):
            if "n" in lines.get(player, {}):
                line = lines[player]
                note = f"step {line['best_step']}, {line['chosen']}" if player == TRAINED else ""
                rows.append(PlayRow.from_values(_TITLES.get(player, player), line, note))
        return rows

    def artefacts(self) -> Sequence[str]:
        return []

    def _play(self, seeds: SeedRange, step: int, split: str) -> dict[str, Any]:
        recipe = self.recipe.evaluation.model_copy(update={"seeds": seeds})
        result, episodes = evaluate(self.player(recipe.sampling), recipe, self.recipe.seed, self.left_out)
        write_episodes(self.run.episodes, step, split, episodes, None)  # type: ignore[arg-type]
        return result.metrics()
