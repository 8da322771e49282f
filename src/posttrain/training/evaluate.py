"""The evaluate stage: a model in an environment, on held-out seeds, beside the baseline policies.

A model behind a server is evaluated without importing torch.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

from rich.console import Console

from posttrain.engines.openai import chat_client
from posttrain.environments.protocol import EnvironmentFactory, completed, task_split
from posttrain.errors import InputError
from posttrain.recipe.agent import AgentRecipe
from posttrain.recipe.components import EnvironmentRecipe, environment_class
from posttrain.recipe.engines import OpenAIEngineRecipe, no_primer
from posttrain.recipe.rollout import RolloutRecipe, SamplingRecipe
from posttrain.recipe.stages import EvaluateRecipe
from posttrain.recipe.warnings import recipe_warnings
from posttrain.rollout.remote_worker import FailureLimit, RemoteRolloutWorker
from posttrain.runs.directory import RunDirectory
from posttrain.runs.metrics import MetricsLog, Progress, take_events
from posttrain.runs.report import write_report
from posttrain.runs.tables import show_line
from posttrain.training.evaluators import EVALUATED, EpisodeEvaluator
from posttrain.training.results import write_tables
from posttrain.training.tasks import LeftOut, check_tasks, too_long


def run(recipe: EvaluateRecipe, directory: RunDirectory, console: Console) -> None:
    """Play `evaluation.final_seeds`, write episodes, metrics and report, and print the table."""
    evaluator, warnings = _open_evaluator(recipe, directory)
    for warning in warnings:
        console.print(warning, highlight=False)
    # Play before recording anything, so that a run that fails here, for example without its server, does not use up its
    # name.
    count = len(evaluator.tasks.test) * recipe.evaluation.episodes_per_seed
    baselines = evaluator.baselines()
    with Progress(count, recipe.name, console=console, unit="episode") as progress:
        final = evaluator.final(0, progress.played)
    with MetricsLog(directory, recipe.sinks) as log:
        for name, values in baselines.items():
            log.write(0, "baseline", {"policy": name, **values})
        log.write(0, "final", {"policy": EVALUATED, **final})
    tables = write_tables(directory, [evaluator])
    warnings = [*evaluator.warnings, *take_events()]
    write_report(directory, warnings=warnings)
    for table in tables:
        console.print(table)
    for warning in warnings:
        show_line(console, warning)
    console.print(f"report: {directory.report}", highlight=False, markup=False, soft_wrap=True)


def _open_evaluator(recipe: EvaluateRecipe, directory: RunDirectory) -> tuple[EpisodeEvaluator, list[str]]:
    """The evaluator of the model at `model.path` or behind the server, and warnings about tasks and prompts."""
    evaluation = recipe.evaluation
    tasks = replace(task_split(recipe.environment, evaluation, None), validation=())
    warnings = [*recipe_warnings(recipe), *check_tasks(recipe, tasks)]
    left_out = LeftOut()
    if recipe.remote is not None:
        # Only the server can count the tokens of its prompts.
        episodes = len(tasks.test) * evaluation.episodes_per_seed
        manager: Any = RemoteRolloutManager(recipe.remote, recipe.environment, recipe.rollout, episodes)
    else:
        from posttrain.models.policy import Policy
        from posttrain.training.reward_scorer import open_scorer
        from posttrain.training.rollouts import RolloutManager

        policy = Policy(recipe.model, recipe.seed)
        engine: Any = recipe.engine
        scorer, logs = open_scorer(recipe.reward, policy), directory.logs
        manager = RolloutManager(
            policy, engine, recipe.environment, recipe.rollout, scorer, evaluation.sampling, logs, recipe.agent
        )
        left_out, summary = too_long(recipe.environment, recipe.rollout, manager.renderer, tasks)
        warnings = [*warnings, *summary]
    return EpisodeEvaluator(manager, recipe, tasks, directory.episodes, left_out.held_out), warnings


class RemoteRolloutManager:
    """A client of a chat server, and the workers that play episodes with it. Loads no model."""

    scorer: Any = None
    agent: AgentRecipe | None = None

    def __init__(
        self, engine: OpenAIEngineRecipe, environment: EnvironmentRecipe, rollout: RolloutRecipe, episodes: int
    ) -> None:
        """Connect to the server. `episodes`: number of episodes that will be played. At most
        `rollout.failures.max_share` of them may fail. InputError if the environment has a primer, or the API key's
        variable is not set."""
        kind = environment_class(environment.type)
        primer = completed(partial(kind, environment), f"the constructor of {environment.type}").primer
        if primer:
            raise InputError(no_primer(environment, primer))
        self.engine = engine
        self.environment = EnvironmentFactory(environment)
        self.rollout = rollout
        self.episodes = episodes
        self.model_name = engine.model
        self.client = chat_client("engine", engine.url, engine.timeout, engine.retries, engine.api_key_variable)

    @contextmanager
    def worker(
        self, sampling: SamplingRecipe, environment: EnvironmentFactory | None = None
    ) -> Iterator[RemoteRolloutWorker]:
        """A worker that counts failures from zero."""
        yield RemoteRolloutWorker(
            client=self.client,
            engine=self.engine,
            record=FailureLimit(self.rollout.failures, self.episodes),
            environment=environment or self.environment,
            rollout=self.rollout,
            sampling=sampling,
        )
