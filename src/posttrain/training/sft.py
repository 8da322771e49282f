"""Supervised fine-tuning on expert traces: the warm-up that gives reinforcement learning something to learn from."""

import math
from collections.abc import Sequence

from rich.console import Console

from posttrain.recipe.stages import SftRecipe
from posttrain.rollout.store import write_episodes
from posttrain.runs.directory import RunDirectory
from posttrain.seeds import random_stream
from posttrain.training.batches import Sample
from posttrain.training.experts import expert_episodes
from posttrain.training.learner import means
from posttrain.training.objectives import SupervisedObjective
from posttrain.training.scoring import samples_of
from posttrain.training.table import finish, measure_start
from posttrain.training.trainer import Trainer


def train(recipe: SftRecipe, run: RunDirectory, resume: bool, console: Console) -> None:
    """Fit the policy to the traces; one step is one update on `episodes_per_update` of them."""
    per_epoch = math.ceil(recipe.data.seeds.count / recipe.episodes_per_update)
    total = recipe.epochs * per_epoch
    trainer = Trainer(recipe, run, total_steps=total, total_updates=total)
    if resume:
        trainer.resume()
    with trainer.working(f"sft {recipe.name}"):
        episodes = expert_episodes(recipe, trainer.renderer)
        write_episodes(run.episodes, 0, "train", episodes, None)
        samples = [samples_of([episode], 0) for episode in episodes]
        if trainer.evaluated < 0:
            measure_start(trainer)
        trainer.begin()
        while trainer.step < total:
            batch = _batch(recipe, samples, *divmod(trainer.step, per_epoch))
            with trainer.interrupts.critical():
                before = trainer.learner.trained_tokens
                with trainer.phase("update"):
                    totals = trainer.learner.update(batch, SupervisedObjective())
                totals.pop("policy/mismatch", None)  # nobody sampled the traces
                metrics = means(totals) | {"optimizer/learning_rate": trainer.optimizer.learning_rate}
                metrics["tokens/trained"] = float(trainer.learner.trained_tokens - before)
                metrics["speed/tokens_per_second"] = metrics["tokens/trained"] / trainer.seconds["update"]
                trainer.finish_step(metrics)
                trainer.warn(trainer.learner.take_messages())
            trainer.evaluate_and_save()
        finish(trainer, console)


def _batch(recipe: SftRecipe, samples: Sequence[Sequence[Sample]], epoch: int, part: int) -> list[Sample]:
    """The traces of one update: each epoch goes through all of them once, in an order of its own."""
    order = random_stream(recipe.seed, "traces", epoch).permutation(len(samples))
    chosen = order[part * recipe.episodes_per_update : (part + 1) * recipe.episodes_per_update]
    return [sample for i in chosen for sample in samples[i]]
