"""The section `audit`: a second scorer of the held-out episodes, which training never sees."""

from typing import ClassVar

from posttrain.recipe.base import BaseConfig, Reads
from posttrain.recipe.components import AnyEnvironment
from posttrain.recipe.metrics import HELD_OUT, TRAINING, Metric, Panel

GAINS = Panel("Change since the first evaluation", "standard deviations over tasks", figure="audit", from_zero=False)


class AuditRecipe(BaseConfig):
    """A second scorer of the learning curve's episodes. It enters no reward, credit, checkpoint selection or tuning. After each evaluation, paired tests say whether the reward rose and whether the audit did. With `guards.action: stop`, a run in which only the reward rises ends; with `export: best_by_audit`, the exported checkpoint is the one with the best audit."""

    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric("audit/reward", "mean return of the learning curve's episodes that the audit could score"),
        Metric("audit/score", "mean score of the audit, of the same episodes"),
        Metric("audit/reward_gain", "trained reward", GAINS, TRAINING),
        Metric("audit/score_gain", "audit", GAINS, HELD_OUT),
        Metric("audit/n", "tasks that both score"),
        Metric("audit/level", "level of this evaluation's tests; all of a run spend less than 0.05"),
    )

    environment: AnyEnvironment | None = None
    """Environment that scores the answers again: the keys in which it differs from that of the evaluations, such as another `reward` or `judge`. It must have the same tasks and the same turns. Null: none."""
    path: Reads | None = None
    """Reward model that scores the episodes again, for example one of other pairs or another seed. In `dpo`, it scores the policy's answers to the prompts of the validation rows. Null: none."""

    def _check(self) -> None:
        if (self.environment is None) == (self.path is None):
            raise ValueError("an audit has one scorer; set one of `audit.environment` and `audit.path`")
