"""A step's optimizer steps, once its episodes have credit."""

from collections.abc import Sequence

from posttrain.data.rendering import Renderer
from posttrain.models.forward import TokenScores
from posttrain.models.policy import Policy
from posttrain.recipe.ptx import PtxRecipe
from posttrain.recipe.stages import RlRecipe
from posttrain.training.batches import Sample
from posttrain.training.collect import Collected
from posttrain.training.critic import CriticLearner
from posttrain.training.forward import logprobs, scores
from posttrain.training.learner import Learner, Objective, Totals, add_totals
from posttrain.training.objectives import MixedObjective, PolicyObjective, SharedObjective
from posttrain.training.rows import DataSet, load_data, samples_of_row
from posttrain.training.trainer import Trainer


class TaughtRows:
    """Rows of text that join every update of the policy."""

    def __init__(self, recipe: PtxRecipe, renderer: Renderer, seed: int) -> None:
        self.recipe = recipe
        self.data: DataSet = load_data(
            "conversation", recipe.data, renderer, recipe.loss_on, recipe.rows_per_update, seed
        )

    def batch(self, update: int) -> list[Sample]:
        """The rows of the run's update `update`, counted from 0."""
        samples = [sample for row in self.data.train.batch(update) for sample in samples_of_row(row)]
        for sample in samples:
            sample.taught = True
        return samples


def updates_of(recipe: RlRecipe) -> int:
    """Optimizer steps of the whole run, where no step has fewer groups than updates."""
    return recipe.steps * recipe.learner.updates_per_step * recipe.learner.passes


def reference_and_old(
    learner: Learner[TokenScores], policy: Policy, recipe: RlRecipe, samples: Sequence[Sample]
) -> None:
    """Log-probabilities that the losses compare with, where the recipe needs them; with them the values before the
    updates, where the policy's trunk carries them."""
    if recipe.kl.coefficient > 0:
        with policy.as_reference():
            references = logprobs(learner, samples)
        for sample, reference in zip(samples, references, strict=True):
            sample.reference = reference
    if recipe.loss.correction is not None:
        for sample, (old, values) in zip(samples, scores(learner, samples), strict=True):
            sample.old, sample.values = old, values


def make_updates(
    trainer: Trainer[TokenScores],
    recipe: RlRecipe,
    collected: Collected,
    samples: Sequence[Sample],
    kl: float,
    critic: CriticLearner | None,
    rows: TaughtRows | None,
) -> Totals:
    """`passes` times over the episodes, whole groups divided among the updates; the critic learns from the same ones."""
    shared = critic is not None and critic.head is not None
    objective = _objective(recipe, kl, shared, rows)
    groups = [e.group for e in collected.episodes for _ in e.streams]
    order = sorted(set(groups))
    count = min(recipe.learner.updates_per_step, len(order))
    first = trainer.step * recipe.learner.updates_per_step * recipe.learner.passes
    totals: Totals = {}
    for number in range(recipe.learner.passes * count):
        part = set(order[number % count :: count])
        chosen = [s for s, g in zip(samples, groups, strict=True) if g in part]
        alone = critic is not None and critic.learns_alone
        if critic is not None:
            add_totals(totals, critic.update(chosen) if alone or not shared else critic.take_fit())
        if alone:
            continue
        taught = rows.batch(first + number) if rows is not None else []
        update = trainer.learner.update([*chosen, *taught], objective)
        if number > 0:
            # Only before the first update are the learner's weights those that sampled.
            update.pop("policy/mismatch", None)
        if shared:
            update["critic/skipped"] = update["optimizer/skipped"]
        add_totals(totals, update)
    return totals


def _objective(recipe: RlRecipe, kl: float, shared: bool, rows: TaughtRows | None) -> Objective[TokenScores]:
    """What an update of the policy minimises; `shared`: with the loss of the values that its trunk carries."""
    policy, critic = PolicyObjective(recipe, kl), recipe.critic
    objective = SharedObjective(policy, critic.coefficient, critic.clip) if shared else policy
    return objective if rows is None else MixedObjective(objective, rows.recipe.coefficient)
