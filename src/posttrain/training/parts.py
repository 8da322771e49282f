"""What a run of reinforcement learning works with, made from its recipe."""

from dataclasses import dataclass

from posttrain.losses.kl import KlController
from posttrain.models.forward import TokenScores
from posttrain.models.policy import Policy
from posttrain.recipe.stages import RlRecipe
from posttrain.runs.directory import RunDirectory
from posttrain.training.collect import TaskOrder
from posttrain.training.critic import CriticLearner, open_critic
from posttrain.training.forward import token_forward
from posttrain.training.guards import Guards
from posttrain.training.playing import Playing
from posttrain.training.reward_scorer import RunningStatistics, open_scorer
from posttrain.training.tasks import check_tasks, too_long
from posttrain.training.trainer import Trainer
from posttrain.training.unit_credit import UnitCreditor, open_creditor
from posttrain.training.updates import TaughtRows, updates_of


@dataclass(frozen=True)
class Parts:
    """The parts of a run; those that a recipe does not ask for are None."""

    policy: Policy
    critic: CriticLearner | None
    trainer: Trainer[TokenScores]
    """It checkpoints all of them that have state."""
    playing: Playing
    creditor: UnitCreditor | None
    rows: TaughtRows | None
    tasks: TaskOrder
    kl: KlController
    guards: Guards
    running: RunningStatistics

    def take_messages(self) -> list[str]:
        """What there was to say of updates since the last call."""
        about_critic = self.critic.take_messages() if self.critic is not None else []
        return [*self.trainer.learner.take_messages(), *about_critic]


def open_parts(recipe: RlRecipe, run: RunDirectory) -> Parts:
    """All that `recipe` asks for; `InputError` where something of it does not fit together."""
    updates = updates_of(recipe)
    about_tasks = check_tasks(recipe)
    policy = Policy(recipe.model, recipe.seed)
    critic = open_critic(recipe, policy, updates)
    head = critic.head if critic is not None else None
    forward = token_forward(policy, recipe.learner, recipe.rollout.sampling.temperature, head)
    own_updates = updates - (recipe.critic.updates_before_policy if critic is not None else 0)
    trainer = Trainer(recipe, run, policy, forward, total_steps=recipe.steps, total_updates=own_updates)
    if critic is not None:
        critic.train_with(trainer.learner)
    scorer = open_scorer(recipe.reward, policy)
    playing = Playing(recipe, policy, run, scorer)
    playing.left_out, about_prompts = too_long(recipe, playing.renderer)
    creditor = open_creditor(recipe, scorer, policy)
    rows = TaughtRows(recipe.ptx, playing.renderer, recipe.seed) if recipe.ptx is not None else None
    about_rows = rows.data.problems.summary() if rows is not None else []
    about_units = creditor.messages if creditor is not None else []
    trainer.messages = [*about_tasks, *about_prompts, *about_rows, *about_units, *playing.about_the_template()]
    trainer.measures = [playing]
    trainer.choice = playing.choice(recipe.evaluation.metric)
    tasks = TaskOrder(recipe.seeds, recipe.seed, left_out=playing.left_out)
    kl, guards, running = KlController(recipe.kl), Guards(recipe.guards), RunningStatistics(recipe.reward)
    trainer.stateful = {"tasks": tasks, "kl": kl, "guards": guards, "reward": running}
    trainer.companions = {"critic": critic} if critic is not None else {}
    return Parts(policy, critic, trainer, playing, creditor, rows, tasks, kl, guards, running)
