"""The learner process of a cluster: it runs the usual stage with engines, environments and scoring models on other workers."""

import itertools
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from posttrain.distributed.ray.actors import RayEnvironment, RayScorer, Worker, recipe_from
from posttrain.distributed.ray.engine import RayEngine
from posttrain.distributed.ray.models import RayCritic, RayReference
from posttrain.distributed.ray.worker_group import StateLost, WorkerClient, WorkerHandle
from posttrain.distributed.world import AlreadyReported, RankLost
from posttrain.engines.factory import open_engine
from posttrain.environments.protocol import Environment, environment_maker
from posttrain.errors import PosttrainError
from posttrain.planning.workers import CRITIC, ENGINE, ENVIRONMENTS, REFERENCE, REWARD
from posttrain.recipe.components import EnvironmentRecipe, Factory
from posttrain.runs.metrics import record_event
from posttrain.training.critic import open_critic
from posttrain.training.reference import open_reference
from posttrain.training.reward_scorer import open_scorer
from posttrain.training.stage import run_in_process

INTERRUPTED = 130
"""Exit code of a stage that a signal stopped, as on the command line."""


@dataclass(frozen=True)
class LearnerExit:
    """How a learner's stage ended: the exit code and the message for the user."""

    code: int
    message: str = ""
    lost: bool = False
    """Whether it ended because another learner exited."""
    died: tuple[str, int] | None = None
    """Name and process id of the worker whose death ended it."""


@dataclass(frozen=True)
class Job:
    """The task of one learner."""

    document: str
    """The recipe as JSON."""
    resume: bool
    overwrite: bool
    workers: Mapping[str, Sequence[WorkerHandle]]
    """The workers that serve the learners, by role."""
    variables: dict[str, str] = field(default_factory=dict)
    """Environment variables with the rank and the addresses of the process group."""
    past_events: tuple[str, ...] = ()
    """Deaths of earlier learners of the run, to be logged."""


class LearnerWorker(Worker):
    """Runs a stage in the main thread of its process."""

    def __init__(self, *common: Any) -> None:
        super().__init__(*common)
        self.heartbeat.on_event = record_event
        self.heartbeat.on_stop = lambda: os.kill(os.getpid(), signal.SIGTERM)

    def __repr__(self) -> str:
        return self.heartbeat.name

    def run(self, job: Job) -> LearnerExit:
        """Run the stage to its end. Errors of posttrain are returned; all others are raised."""
        os.environ.update(job.variables)
        for sentence in job.past_events:
            record_event(sentence)
        recipe = recipe_from(job.document)
        try:
            with ExitStack() as stack:
                self._use_workers(job.workers, stack)
                run_in_process(recipe, job.resume, job.overwrite)
        except KeyboardInterrupt as stop:
            return LearnerExit(INTERRUPTED, *getattr(stop, "__notes__", [])[:1])
        except AlreadyReported as error:
            return LearnerExit(error.exit_code)
        except RankLost as error:
            return LearnerExit(error.exit_code, str(error), lost=True)
        except StateLost as error:
            return LearnerExit(error.exit_code, str(error), died=(error.worker, error.pid))
        except PosttrainError as error:
            return LearnerExit(error.exit_code, str(error))
        return LearnerExit(0)

    def _use_workers(self, workers: Mapping[str, Sequence[WorkerHandle]], stack: ExitStack) -> None:
        """Create engines, environments, scorers, reference model and critic on the workers until `stack` closes."""
        import ray

        is_rank0, has_gpus = os.environ.get("RANK", "0") == "0", bool(ray.get_gpu_ids())
        engines, scorers, environments, references, critics = (
            [WorkerClient(handle, self.heartbeat.monitor, self.heartbeat) for handle in workers.get(role, ())]
            for role in (ENGINE, REWARD, ENVIRONMENTS, REFERENCE, CRITIC)
        )
        numbers = itertools.count(1)

        def make_engine(policy: Any, engine: Any, *more: Any, **named: Any) -> Any:
            return RayEngine(policy, engines, engine.slots, engine.type == "local", is_rank0)

        def make_environment(environment: EnvironmentRecipe) -> Environment:
            return RayEnvironment(environment, environments[next(numbers) % len(environments)])

        makers: list[tuple[Factory[..., Any], list[WorkerClient], Callable[..., Any]]] = [
            (open_engine, engines, make_engine),
            (environment_maker, environments, lambda environment: make_environment),
            (open_scorer, scorers, lambda source, policy: RayScorer(source, scorers, policy)),
            (open_reference, references, lambda policy, learner: RayReference(references)),
            (open_critic, critics, lambda recipe, policy: RayCritic(critics, has_gpus)),
        ]
        for factory, clients, maker in makers:
            if clients:
                stack.enter_context(factory.placed_by(maker))
