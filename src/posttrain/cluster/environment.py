"""An environment in a worker of the cluster, behind the protocol of environments.

An environment is a function of its seed and the answers it got, so one whose worker died is made again from these; what
it says is compared with what it said before.
"""

import hashlib
import json
import weakref
from typing import Any
from uuid import uuid4

from posttrain.cluster.crew import Gone, Member
from posttrain.environments.protocol import Environment, Observation, Step
from posttrain.recipe.components import EnvironmentRecipe


class ReplayDiffers(Exception):
    """An environment does not do again what it did."""


class Unknown(Exception):
    """The worker has no such environment: it was started again since."""


def digest(said: Observation | Step) -> str:
    """Of what an environment said: all but its info, which may hold times."""
    parts: list[Any] = [said.messages, said.state]
    if isinstance(said, Step):
        parts += [said.reward, said.terminated, said.truncated, said.fresh]
    return hashlib.blake2b(json.dumps(parts, default=repr).encode(), digest_size=16).hexdigest()


class RayEnvironment(Environment):
    """One episode's environment, in the worker `member`."""

    waits = True

    def __init__(self, recipe: EnvironmentRecipe, member: Member) -> None:
        super().__init__(recipe)
        self._member = member
        self._values = recipe.model_dump(mode="json")
        self._id = uuid4().hex
        self._seed = 0
        self._answers: list[str] = []
        self._said: list[str] = []
        weakref.finalize(self, _close, member.actor, self._id)

    def reset(self, seed: int) -> Observation:
        self._seed, self._answers, self._said = seed, [], []
        observation, self.primer = self._asked("a reset", "reset", self._id, self._values, seed)
        self._said.append(digest(observation))
        return observation

    def step(self, action: str) -> Step:
        step = self._asked("a step", "step", self._id, len(self._answers), action)
        self._answers.append(action)
        self._said.append(digest(step))
        return step

    def _asked(self, what: str, method: str, *arguments: Any) -> Any:
        """The worker's answer; after its death, that of the one in its place, where the episode is played again first."""
        while True:
            life = self._member.lives
            try:
                return self._member.once(what, method, *arguments)
            except Gone as gone:
                self._member.await_return(life, gone)
            except Unknown:
                pass
            if method == "step":
                self._rebuild()

    def _rebuild(self) -> None:
        while True:
            life = self._member.lives
            try:
                said = self._member.once("a replay", "replay", self._id, self._values, self._seed, self._answers)
            except Gone as gone:
                self._member.await_return(life, gone)
                continue
            for turn, (again, before) in enumerate(zip(said, self._said, strict=True)):
                if again != before:
                    raise ReplayDiffers(
                        f"its worker died, and played again with seed {self._seed} and the same answers it says something "
                        f"else at turn {turn}, so its state is lost"
                    )
            return


def _close(actor: Any, identity: str) -> None:
    try:
        actor.close.remote(identity)
    except Exception:
        return  # Ray is gone, and the worker with it
