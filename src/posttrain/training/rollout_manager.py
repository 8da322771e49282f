"""RolloutManager an environment with the policy in training: for rollouts, and as a measurement."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager

from posttrain.data.rendering import Renderer
from posttrain.distributed.world import current
from posttrain.engines.factory import open_engine
from posttrain.engines.local.engine import LocalEngine
from posttrain.engines.openai import chat_client
from posttrain.engines.protocol import Engine
from posttrain.errors import InputError
from posttrain.models.policy import Policy
from posttrain.recipe.components import environment_class
from posttrain.recipe.engines import OpenAIEngineRecipe, no_primer
from posttrain.recipe.rollout import SamplingRecipe
from posttrain.recipe.stages import EvaluateRecipe, RlRecipe, SftRecipe
from posttrain.rollout.driver import EpisodeSharding, RolloutWorker, Scorer
from posttrain.rollout.remote_worker import FailureLimit, RemoteRolloutWorker
from posttrain.runs.directory import RunDirectory
from posttrain.training.evaluators import EpisodeEvaluator


def sharding_of(engine: Engine) -> EpisodeSharding:
    """An engine in the process plays its process's groups; one outside is the first process's."""
    if current().is_single_process:
        return EpisodeSharding.NONE
    return EpisodeSharding.BY_GROUP if isinstance(engine, LocalEngine) else EpisodeSharding.RANK0


class RolloutManager(EpisodeEvaluator):
    """The engine, and held-out episodes as a `Evaluator`."""

    def __init__(
        self,
        recipe: RlRecipe | SftRecipe | EvaluateRecipe,
        policy: Policy,
        run: RunDirectory,
        scorer: Scorer | None = None,
    ) -> None:
        """`scorer` adds a reward model's rewards to the episodes played."""
        super().__init__(recipe, run)
        assert not isinstance(recipe.engine, OpenAIEngineRecipe), "a remote model plays through `RemoteRolloutManager`"
        self.policy = policy
        self.scorer = scorer
        self.renderer = Renderer(policy.tokenizer, policy.end_tokens)
        # Log-probabilities matter where they are learned from.
        sampling = recipe.rollout.sampling if isinstance(recipe, RlRecipe) else recipe.evaluation.sampling
        self.engine = open_engine(policy, recipe.engine, recipe.rollout.tokens_per_episode, sampling, run.logs)
        self.lock = threading.Lock()
        """Held while the engine is in use: one outside this process also samples ahead of the learner."""

    def about_the_template(self) -> list[str]:
        """What the chat template does to system messages and to the history of several turns."""
        found = self.renderer.warnings()
        if self.renderer.rewrites_answers:
            found.append("the chat template rewrites earlier answers, so every turn becomes a stream of its own")
        elif self.renderer.rewrites_thoughts:
            found.append(
                "the chat template drops earlier thinking, so the turn after a thinking answer starts a new stream"
            )
        return found

    @contextmanager
    def player(self, sampling: SamplingRecipe) -> Iterator[RolloutWorker]:
        """A player with the current policy; outside, the engine sleeps. It starts without memories: what a step samples
        must not depend on whether an evaluation, or a resume, came before it.
        """
        with self.lock:
            self.engine.load_weights(self.policy.version)
            yield RolloutWorker(
                engine=self.engine,
                renderer=self.renderer,
                environment=self.environment,
                rollout=self.recipe.rollout,
                sampling=sampling,
                version=self.policy.version,
                scorer=self.scorer,
                sharding=sharding_of(self.engine),
            )
            self.engine.sleep()


class RemoteRolloutManager(EpisodeEvaluator):
    """The server's client, and held-out episodes as a `Evaluator`. Needs no torch and loads no model."""

    def __init__(self, recipe: EvaluateRecipe, run: RunDirectory) -> None:
        """InputError for an environment that begins the answers itself, or a key that is named and not set."""
        super().__init__(recipe, run)
        assert recipe.remote is not None
        primer = environment_class(self.environment.type)(self.environment).primer
        if primer:
            raise InputError(no_primer(self.environment, primer))
        self.engine = recipe.remote
        self.evaluated = self.engine.model
        how = (self.engine.url, self.engine.timeout, self.engine.retries, self.engine.api_key_variable)
        self.client = chat_client("engine", *how)

    @contextmanager
    def player(self, sampling: SamplingRecipe) -> Iterator[RemoteRolloutWorker]:
        """A player for the final seeds, which counts failures anew."""
        evaluation = self.recipe.evaluation
        yield RemoteRolloutWorker(
            client=self.client,
            engine=self.engine,
            failure_monitor=FailureLimit(
                self.recipe.rollout.failures, evaluation.final_seeds.count * evaluation.episodes_per_seed
            ),
            environment=self.environment,
            rollout=self.recipe.rollout,
            sampling=sampling,
        )
