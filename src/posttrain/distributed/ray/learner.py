"""The learner process of a cluster: it runs the usual stage with engines, environments and scoring models on other workers."""

import os
import signal
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from posttrain.distributed.ray.actors import Worker, recipe_from
from posttrain.distributed.ray.worker_group import StateLost, WorkerClient, WorkerGroup, WorkerHandle
from posttrain.environments.protocol import Environment
from posttrain.errors import PosttrainError
from posttrain.recipe.components import EnvironmentRecipe
from posttrain.runs.metrics import record_event

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
    workers: WorkerGroup
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
        from posttrain.distributed.world import AlreadyReported, RankLost
        from posttrain.training.stage import run_in_process

        os.environ.update(job.variables)
        for sentence in job.past_events:
            record_event(sentence)
        recipe = recipe_from(job.document)
        try:
            with ExitStack() as stack:
                self._use_workers(recipe, job.workers, stack)
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

    def _use_workers(self, recipe: Any, workers: WorkerGroup, stack: ExitStack) -> None:
        """Create engines, environments, scorers, reference model and critic on the workers until `stack` closes."""
        from posttrain.engines.factory import open_engine
        from posttrain.environments.protocol import environment_maker
        from posttrain.training.critic import open_critic
        from posttrain.training.reference import open_reference
        from posttrain.training.reward_scorer import open_scorer

        def clients(handles: Sequence[WorkerHandle]) -> list[WorkerClient]:
            return [WorkerClient(handle, self.heartbeat.monitor, self.heartbeat) for handle in handles]

        if workers.engines:
            from posttrain.distributed.ray.engine import RayEngine

            engines, is_rank0 = clients(workers.engines), os.environ.get("RANK", "0") == "0"

            def make_engine(policy: Any, engine: Any, *more: Any, **named: Any) -> Any:
                return RayEngine(policy, engines, engine.slots, engine.type == "local", is_rank0)

            stack.enter_context(open_engine.placed_by(make_engine))
        if workers.environments:
            from posttrain.distributed.ray.actors import RayEnvironment

            environment_workers, next_worker = clients(workers.environments), [0]

            def make_environment(environment: EnvironmentRecipe) -> Environment:
                next_worker[0] += 1
                return RayEnvironment(environment, environment_workers[next_worker[0] % len(environment_workers)])

            stack.enter_context(environment_maker.placed_by(lambda environment: make_environment))
        if workers.rewards:
            from posttrain.distributed.ray.actors import RayScorer

            copies = clients(workers.rewards)

            def make_scorer(source: Any, policy: Any) -> Any:
                return RayScorer(source, copies, policy)

            stack.enter_context(open_scorer.placed_by(make_scorer))
        if workers.references:
            from posttrain.distributed.ray.models import RayReference

            references = clients(workers.references)

            def make_reference(policy: Any, learner: Any) -> Any:
                return RayReference(references)

            stack.enter_context(open_reference.placed_by(make_reference))
        if workers.critics:
            import ray

            from posttrain.distributed.ray.models import RayCritic

            critics, has_gpus = clients(workers.critics), bool(ray.get_gpu_ids())

            def make_critic(
                settings: Any, policy: Any, learner: Any, updates: int, seed: int, stored_statistics: bool
            ) -> Any:
                return RayCritic(critics, has_gpus, updates, stored_statistics)

            stack.enter_context(open_critic.placed_by(make_critic))
