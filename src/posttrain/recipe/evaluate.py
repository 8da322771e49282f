"""The recipe of `posttrain evaluate`."""

from collections.abc import Sequence
from typing import Any, Literal

from posttrain.recipe.agent import AgentRecipe, refuse_with_agent
from posttrain.recipe.components import environment_class
from posttrain.recipe.engines import AnyEngineRecipe, LocalEngineRecipe, no_primer, refuse_unknown_sampling
from posttrain.recipe.model import RewardSource
from posttrain.recipe.needs import TRAINED, needs_of
from posttrain.recipe.plan import TaskSplit, counted
from posttrain.recipe.rollout import EvaluationRecipe, HeldOut, RolloutRecipe
from posttrain.recipe.run import PlayedRecipe, imported

NOT_EVALUATED = {
    "engine": ("adapters",),
    "evaluation": ("every", "metric"),
    "model": ("lora", "gradient_checkpointing"),
    "rollout": tuple(key for key, marks in needs_of(RolloutRecipe).items() if TRAINED in marks),
}
"""Section -> keys of training that have no effect in an evaluation."""


class FinalEvaluation(EvaluationRecipe):
    """One evaluation, on `final_seeds`."""

    held_out: HeldOut | Literal["all"] | None = "all"  # type: ignore[assignment]
    """Which tasks of a file of tasks to evaluate on. `all`: every one, or those of sources with `use: test`. A number, a share or null: those that a training run with the same value holds out for its final table."""


class EvaluateRecipe(PlayedRecipe):
    """Evaluation of a model in an environment on held-out seeds."""

    stage: Literal["evaluate"] = "evaluate"
    """Which stage the recipe is for; `posttrain evaluate` takes this one."""
    engine: AnyEngineRecipe = LocalEngineRecipe()
    """The engine that answers: `model.path` in this process or in vLLM, or a remote model behind a server."""
    rollout: RolloutRecipe = RolloutRecipe()
    reward: RewardSource | None = None
    """Reward model whose score is added to the environment's reward. Null: none."""
    agent: AgentRecipe | None = None
    """Program that plays the episodes. Null: the environment is played turn by turn."""
    evaluation: FinalEvaluation = FinalEvaluation()

    def run(self, directory: Any, *, resume: bool, overwrite: bool, console: Any, callbacks: Sequence[Any]) -> None:
        imported("posttrain.training.evaluate:run")(self, directory, console)

    def _check(self) -> None:
        self.engine.check(self.model)
        if self.agent is not None:
            refuse_with_agent(self, self.agent)
        if self.remote is not None:
            refuse_unknown_sampling(self.evaluation.sampling, "evaluation.sampling")
            if self.reward is not None:
                raise ValueError("`reward.path` needs token ids, which a server does not return; remove `reward`")

    def models(self) -> dict[str, Any]:
        return super().models() | ({} if self.reward is None else {"reward": self.reward})

    def warnings(self) -> list[str]:
        """Limits of episodes, and a primer, which servers do not support."""
        if self.remote is None:
            evaluated = self.evaluation.environment or self.environment
            return self.rollout.warnings(self.environment.max_turns, evaluated.max_turns)
        primer = environment_class(self.environment.type)(self.environment).primer
        return [no_primer(self.environment, primer)] if primer else []

    def batch_lines(self, tasks: TaskSplit | None) -> list[str]:
        """The episodes and, with a remote model, the maximum number of requests and tokens."""
        evaluation, most = self.evaluation, self.rollout.tokens_per_turn
        lines = [f"evaluation, {evaluation.played()}: {evaluation.episodes(tasks, 2)}"]
        if (engine := self.remote) is None:
            return lines
        episodes, turns = (len(tasks.test) if tasks else 0) * evaluation.episodes_per_seed, self.environment.max_turns
        # A follow-up turns each update into two conversations.
        turns *= 2 if getattr(self.environment, "follow_up", False) else 1
        return [
            *lines,
            f"{engine.model} at {engine.url}, {counted(engine.max_concurrent, 'episode')} in flight",
            f"at most {episodes * turns:,} requests ({counted(turns, 'turn')} per episode) of at most {most:,} sampled "
            f"tokens: {episodes * turns * most:,} tokens",
        ]
