"""Supervised fine-tuning on rows of text or on the traces of an environment's expert."""

from rich.console import Console

from posttrain.data.rendering import Renderer
from posttrain.models.forward import TokenScores
from posttrain.models.policy import Policy
from posttrain.recipe.stages import SftRecipe
from posttrain.rollout.store import write_episodes
from posttrain.runs.directory import RunDirectory
from posttrain.seeds import random_stream
from posttrain.training.batches import Sample
from posttrain.training.evaluators import LossEvaluator
from posttrain.training.experts import expert_episodes
from posttrain.training.objectives import SupervisedObjective, token_forward
from posttrain.training.rl import samples_of
from posttrain.training.rollout_manager import RolloutManager
from posttrain.training.rows import load_data, samples_of_row
from posttrain.training.supervised import Batches, SampleBatches, train_on
from posttrain.training.trainer import Trainer


def train(recipe: SftRecipe, run: RunDirectory, resume: bool, console: Console) -> None:
    """Train the policy; one step is one update on `rows_per_update` rows or traces."""
    policy = Policy(recipe.model, recipe.seed)
    renderer = Renderer(policy.tokenizer, policy.end_tokens)
    if recipe.data is None:
        batches: SampleBatches = _Traces(recipe, renderer, run)
        data = None
    else:
        data = load_data("conversation", recipe.data, renderer, recipe.loss_on, recipe.rows_per_update, recipe.seed)
        batches = Batches(data, lambda number, row: samples_of_row(row))
    total = recipe.steps or recipe.epochs * batches.updates_per_epoch
    trainer: Trainer[TokenScores] = Trainer(recipe, run, policy, token_forward(policy, recipe.learner), total, total)
    if data is not None:
        trainer.messages = [*data.problems.summary(), *renderer.warnings()]
        if data.validation or data.test:
            trainer.evaluators.append(LossEvaluator(trainer.learner, recipe, data))
    if recipe.environment is not None:
        playing = RolloutManager(recipe, policy, run)
        trainer.evaluators.append(playing)
        trainer.messages += [text for text in playing.about_the_template() if text not in trainer.messages]
        metric = recipe.evaluation.metric
        trainer.choice = playing.choice(metric if metric != "loss" else None)
    if recipe.chosen_by_loss:
        trainer.choice = lambda values: -values["validation/loss"]
    objective = SupervisedObjective()
    train_on(trainer, batches, lambda samples: objective, resume, console)


class _Traces:
    """Expert traces in batches. Each epoch has all traces once, in its own order."""

    def __init__(self, recipe: SftRecipe, renderer: Renderer, run: RunDirectory) -> None:
        episodes = expert_episodes(recipe, renderer)
        write_episodes(run.episodes, 0, "train", episodes, None)
        self.recipe = recipe
        self.samples = [samples_of([episode], 0) for episode in episodes]
        self.updates_per_epoch = -(-len(episodes) // recipe.rows_per_update)

    def batch(self, step: int) -> list[Sample]:
        epoch, part = divmod(step, self.updates_per_epoch)
        order = random_stream(self.recipe.seed, "traces", epoch).permutation(len(self.samples))
        chosen = order[part * self.recipe.rows_per_update : (part + 1) * self.recipe.rows_per_update]
        return [sample for i in chosen for sample in self.samples[i]]

    def warnings(self) -> list[str]:
        return []
