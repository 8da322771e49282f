"""Training of a reward model on pairs of answers."""

import torch
from rich.console import Console

from posttrain.data.rendering import Renderer
from posttrain.models.reward import RewardModel
from posttrain.recipe.stages import RewardRecipe
from posttrain.runs.directory import RunDirectory
from posttrain.training.comparisons import RewardObjective
from posttrain.training.forward import reward_forward
from posttrain.training.preference_measure import PreferenceMeasure, choice_of
from posttrain.training.rows import load_data, samples_of_row
from posttrain.training.supervised import Batches, train_on
from posttrain.training.trainer import Trainer


def train(recipe: RewardRecipe, run: RunDirectory, resume: bool, console: Console) -> None:
    """Fit the model's reward to the pairs; one step is one update on `rows_per_update` pairs."""
    model = RewardModel(recipe.model, recipe.seed)
    renderer = Renderer(model.tokenizer, model.end_tokens)
    data = load_data("pair", recipe.data, renderer, "assistant", recipe.rows_per_update, recipe.seed)
    batches = Batches(data, lambda number, row: samples_of_row(row, number))
    total = recipe.steps or recipe.epochs * data.updates_per_epoch
    trainer: Trainer[torch.Tensor] = Trainer(recipe, run, model, reward_forward(model), total, total)
    trainer.messages = data.problems.summary()
    objective = RewardObjective(recipe.loss)
    if data.validation or data.test:
        trainer.measures.append(
            PreferenceMeasure(trainer.learner, recipe, data, lambda samples: objective, model, renderer)
        )
    else:
        trainer.messages.append("there are no validation rows, so the model keeps no statistics of its rewards")
    if data.validation:
        trainer.choice = choice_of(recipe.evaluation.metric)
    train_on(trainer, batches, lambda samples: objective, resume, console)
