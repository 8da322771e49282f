"""Supervised fine-tuning on rows of text or on the traces of an environment's expert."""

from collections.abc import Callable, Sequence
from typing import Any

from rich.console import Console

from posttrain.data.held_out import TaskSplit
from posttrain.data.rendering import Renderer, TokenStream
from posttrain.data.tokens import TokenRow
from posttrain.environments.protocol import task_split
from posttrain.errors import InputError
from posttrain.models.policy import Policy
from posttrain.recipe.rollout import evaluated_environment
from posttrain.recipe.stages import SftRecipe
from posttrain.recipe.warnings import recipe_warnings
from posttrain.rollout.store import write_episodes
from posttrain.runs.directory import RunDirectory
from posttrain.seeds import random_stream
from posttrain.training.evaluators import EpisodeEvaluator, Evaluator, choice_of
from posttrain.training.experts import expert_episodes, settings_warnings
from posttrain.training.objectives import SupervisedObjective, token_forward
from posttrain.training.optimizer import Optimizer
from posttrain.training.rollouts import RolloutManager
from posttrain.training.row_evaluators import LossEvaluator
from posttrain.training.rows import load_data, train_on
from posttrain.training.tasks import check_tasks
from posttrain.training.trainer import Callbacks, Trainer
from posttrain.training.updater import Sample, Updater, samples_of_episodes


def train(recipe: SftRecipe, run: RunDirectory, resume: bool, console: Console, callbacks: Callbacks = ()) -> None:
    """Train the policy; one step is one update on `rows_per_update` rows or traces."""
    tasks, evaluated = TaskSplit((), (), ()), evaluated_environment(recipe)
    if evaluated is not None:
        environment = recipe.environment or evaluated
        tasks = task_split(environment, recipe.evaluation, recipe.experts.seeds, "experts.seeds")
    policy = Policy(recipe.model, recipe.seed)
    renderer = Renderer(policy.tokenizer, policy.end_tokens)
    if recipe.data is None:
        traces = _Traces(recipe, tasks.training, renderer, run)
        batch, updates_per_epoch = traces.batch, traces.updates_per_epoch
        data, validation, test = None, traces.held_out, [] if recipe.chosen_by_loss else traces.held_out
    else:
        data = load_data("conversation", recipe.data, renderer, recipe.loss_on, recipe.rows_per_update, recipe.seed)
        batch, updates_per_epoch = data.batch, data.updates_per_epoch
        validation, test = data.validation, data.test
    total = recipe.steps or recipe.epochs * updates_per_epoch
    manager = None
    if evaluated is not None:
        # An engine on the same GPU starts before the optimizer's state takes its memory.
        manager = RolloutManager(
            policy, recipe.engine, evaluated, recipe.rollout, sampling=recipe.evaluation.sampling, logs=run.logs
        )
    optimizer = Optimizer(policy.trainable(), recipe.optimizer, total)
    learner = Updater(policy, optimizer, recipe.learner, token_forward(policy, recipe.learner))
    warnings, evaluators = recipe_warnings(recipe), list[Evaluator]()
    best_by: Callable[[dict[str, Any]], float] | None = None
    if data is not None:
        warnings += [*data.problems.summary(), *renderer.warnings()]
    if recipe.tested_key.startswith("evaluation."):
        warnings += recipe.too_few(len(tasks.test))
    elif validation or test:
        warnings += recipe.too_few(len(test or validation))
    if validation or test:
        evaluators.append(LossEvaluator(learner, validation, test, recipe.name))
    if evaluated is not None and manager is not None:
        metric = recipe.evaluation.metric
        evaluators.append(EpisodeEvaluator(manager, recipe, tasks, run.episodes))
        warnings += check_tasks(recipe, tasks)
        best_by = choice_of(metric if metric != "loss" else None)
        warnings += [text for text in manager.template_warnings() if text not in warnings]
        if recipe.data is not None:
            warnings += settings_warnings(evaluated, recipe.data.train)
    if recipe.chosen_by_loss:
        best_by = choice_of("loss")
    trainer = Trainer(
        recipe,
        total,
        run,
        policy,
        learner,
        evaluators=evaluators,
        best_by=best_by,
        warnings=warnings,
        callbacks=callbacks,
    )
    objective = SupervisedObjective(recipe.loss)
    train_on(trainer, data, batch, lambda samples: objective, resume, console)


class _Traces:
    """Expert traces in batches. Each epoch contains every trace once, in a different order.

    Attributes:
        held_out: the traces of `experts.held_out` as rows. No batch contains them.
    """

    def __init__(self, recipe: SftRecipe, seeds: Sequence[int], renderer: Renderer, run: RunDirectory) -> None:
        count = len(seeds) - recipe.experts.held_out
        if count < 1:
            raise InputError(
                f"experts.held_out is {recipe.experts.held_out}, and experts.seeds has {len(seeds)} seeds, so none is left "
                "to train on; raise experts.seeds.count"
            )
        episodes = expert_episodes(recipe, seeds[:count], renderer)
        self.held_out = [
            TokenRow([TokenStream(stream.ids, stream.sampled) for stream in episode.streams], f"seed {episode.seed}")
            for episode in expert_episodes(recipe, seeds[count:], renderer)
        ]
        write_episodes(run.episodes, 0, "train", episodes, None)
        self.recipe = recipe
        self.samples = [samples_of_episodes([episode], 0) for episode in episodes]
        self.updates_per_epoch = -(-len(episodes) // recipe.rows_per_update)

    def batch(self, step: int) -> list[Sample]:
        epoch, part = divmod(step, self.updates_per_epoch)
        order = random_stream(self.recipe.seed, "traces", epoch).permutation(len(self.samples))
        chosen = order[part * self.recipe.rows_per_update : (part + 1) * self.recipe.rows_per_update]
        return [sample for i in chosen for sample in self.samples[i]]
