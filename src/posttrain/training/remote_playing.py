"""Playing an environment with a model behind a server, as a measurement."""

from collections.abc import Iterator
from contextlib import contextmanager

from posttrain.environments.remote import chat_client
from posttrain.errors import InputError
from posttrain.recipe.components import environment_class
from posttrain.recipe.remote import no_primer
from posttrain.recipe.rollout import SamplingRecipe
from posttrain.recipe.stages import EvaluateRecipe
from posttrain.rollout.remote_player import Faults, RemotePlayer
from posttrain.runs.directory import RunDirectory
from posttrain.training.held_out import HeldOut


class RemotePlaying(HeldOut):
    """The server's client, and held-out episodes as a `Measure`. Needs no torch and loads no model."""

    def __init__(self, recipe: EvaluateRecipe, run: RunDirectory) -> None:
        """InputError for an environment that begins the answers itself, or a key that is named and not set."""
        super().__init__(recipe, run)
        assert recipe.remote is not None
        primer = environment_class(self.environment.type)(self.environment).primer
        if primer:
            raise InputError(no_primer(self.environment, primer))
        self.engine = recipe.remote
        self.evaluated = self.engine.model
        how = (self.engine.url, self.engine.seconds, self.engine.retries, self.engine.api_key_variable)
        self.client = chat_client("engine", *how)

    @contextmanager
    def player(self, sampling: SamplingRecipe) -> Iterator[RemotePlayer]:
        """A player for the final seeds, which counts failures anew."""
        evaluation = self.recipe.evaluation
        yield RemotePlayer(
            client=self.client,
            engine=self.engine,
            faults=Faults(self.recipe.rollout.failures, evaluation.final_seeds.count * evaluation.episodes_per_seed),
            environment=self.environment,
            rollout=self.recipe.rollout,
            sampling=sampling,
        )
