"""A learner process of a cluster: it runs the same stage as any other, with engines, environments and reward models that
are elsewhere."""

import os
import signal
import socket
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

from posttrain.distributed.ray.actors import Worker, recipe_from
from posttrain.distributed.ray.worker_group import Member, WorkerHandle
from posttrain.environments.protocol import Environment
from posttrain.errors import PosttrainError
from posttrain.factory import become_learner
from posttrain.recipe.components import EnvironmentRecipe
from posttrain.runs import events

INTERRUPTED = 130
"""Exit code of a stage that was asked to stop, as that of the command line."""


@dataclass(frozen=True)
class WorkerGroup:
    """Whom a learner asks."""

    engines: Sequence[WorkerHandle] = ()
    rewards: Sequence[WorkerHandle] = ()
    environments: Sequence[WorkerHandle] = ()


@dataclass(frozen=True)
class Ended:
    """How a learner's stage ended: the exit code, and what the user reads."""

    code: int
    message: str = ""
    lost: bool = False
    """Because another learner is gone."""


@dataclass(frozen=True)
class Job:
    """What a learner runs."""

    document: str
    """The recipe as a JSON document."""
    resume: bool
    overwrite: bool
    crew: WorkerGroup
    variables: dict[str, str] = field(default_factory=dict)
    """Environment variables: who is who among the learners."""
    told: tuple[str, ...] = ()
    """What befell earlier learners of the run."""


class LearnerWorker(Worker):
    """Runs a stage in the main thread of its process."""

    def __init__(self, *common: Any) -> None:
        super().__init__(*common)
        self.reporter.on_news = events.record
        self.reporter.on_stop = lambda: os.kill(os.getpid(), signal.SIGTERM)

    def __repr__(self) -> str:
        return self.reporter.name

    def place(self) -> tuple[str, int, str, list[int], int]:
        """The machine's address, a port that is free on it, its name in Ray, the GPUs of this process, and its id."""
        import ray

        with socket.socket() as free:
            free.bind(("", 0))
            port = free.getsockname()[1]
        own = [int(device) for device in ray.get_gpu_ids()]
        return ray.util.get_node_ip_address(), port, ray.get_runtime_context().get_node_id(), own, os.getpid()

    def run(self, job: Job) -> Ended:
        """Run the stage to its end."""
        from posttrain.distributed.world import AlreadyReported, RankLost
        from posttrain.stages import run_stage

        os.environ.update(job.variables)
        become_learner()
        for sentence in job.told:
            events.record(sentence)
        recipe = recipe_from(job.document)
        try:
            with ExitStack() as placed:
                self._place(recipe, job.crew, placed)
                run_stage(recipe, resume=job.resume, overwrite=job.overwrite)
        except KeyboardInterrupt:
            return Ended(INTERRUPTED)
        except AlreadyReported as error:
            return Ended(error.exit_code)
        except RankLost as error:
            return Ended(error.exit_code, str(error), lost=True)
        except PosttrainError as error:
            return Ended(error.exit_code, str(error))
        return Ended(0)

    def _place(self, recipe: Any, crew: WorkerGroup, placed: ExitStack) -> None:
        """Let the crew make what it makes, until `placed` closes."""
        from posttrain.engines.factory import open_engine
        from posttrain.environments.protocol import open_environment
        from posttrain.training.reward_scorer import open_scorer

        def members(seats: Sequence[WorkerHandle]) -> list[Member]:
            return [Member(seat, self.reporter.watch, self.reporter) for seat in seats]

        if crew.engines:
            from posttrain.distributed.ray.engine import RayEngine

            engines, first = members(crew.engines), os.environ.get("RANK", "0") == "0"

            def make_engine(policy: Any, engine: Any, *more: Any, **named: Any) -> Any:
                return RayEngine(policy, engines, engine.slots, engine.type == "local", first)

            placed.enter_context(open_engine.placed_by(make_engine))
        if crew.environments:
            from posttrain.distributed.ray.actors import RayEnvironment

            workers, turn = members(crew.environments), [0]

            def make_environment(environment: EnvironmentRecipe) -> Environment:
                turn[0] += 1
                return RayEnvironment(environment, workers[turn[0] % len(workers)])

            placed.enter_context(open_environment.placed_by(make_environment))
        if crew.rewards:
            from posttrain.distributed.ray.actors import RayScorer

            copies = members(crew.rewards)

            def make_scorer(source: Any, policy: Any) -> Any:
                return RayScorer(source, copies)

            placed.enter_context(open_scorer.placed_by(make_scorer))
