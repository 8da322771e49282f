"""An environment whose worker dies is rebuilt from its seed and answers. If its replay differs, the episode fails."""

import dataclasses
import random
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from posttrain.distributed.ray.actors import EnvironmentWorker, RayEnvironment, ReplayDiffers
from posttrain.distributed.ray.worker_group import WorkerDied
from posttrain.environments.protocol import Environment, EnvironmentFactory, Observation, Step
from posttrain.errors import InputError
from posttrain.recipe.components import EnvironmentRecipe, environment_recipe

LETTERS = str(Path(__file__).parents[2] / "training" / "letters.py")


class Forgetful(Environment):
    """Answers differently in each replay."""

    class Recipe(EnvironmentRecipe):
        """No additional keys."""

    def reset(self, seed):
        return Observation([{"role": "user", "content": "hello"}])

    def step(self, action):
        return Step([{"role": "user", "content": str(random.random())}], 0.0, False, False)


def worker():
    made = EnvironmentWorker.__new__(EnvironmentWorker)
    made.heartbeat = SimpleNamespace(progress=0)
    made._environments, made._importing = {}, threading.Lock()
    return made


class WorkerGroup:
    """A worker client whose worker dies before or after chosen calls, without Ray."""

    def __init__(self, before=(), after=()):
        self.worker, self.restarts, self.calls = worker(), 0, 0
        self.before, self.after = set(before), set(after)
        self.replays = 0

    @property
    def actor(self):
        return self

    @property
    def close(self):
        return SimpleNamespace(remote=lambda identity: self.worker.close(identity))

    def call_once(self, what, method, *arguments):
        self.calls += 1
        call = self.calls
        self.replays += method == "replay"
        if call in self.before:
            raise WorkerDied("killed")
        answer = getattr(self.worker, method)(*arguments)
        if call in self.after:
            raise WorkerDied("killed before it could say so")
        return answer

    def wait_for_restart(self, life, gone):
        self.worker, self.restarts = worker(), life + 1


def play(environment, answers, seed=3):
    said = [environment.reset(seed)]
    return said + [environment.step(answer) for answer in answers]


def remote(workers, kind=LETTERS, turns=3):
    return RayEnvironment(environment_recipe({"type": kind, "max_turns": turns}), workers)


ANSWERS = ["abc", "hello", "zyx"]


def plain():
    return play(EnvironmentFactory(environment_recipe({"type": LETTERS, "max_turns": 3}))(), ANSWERS)


@pytest.mark.parametrize(
    "deaths", [{}, {"before": [1]}, {"before": [2]}, {"before": [3, 4]}, {"after": [2]}, {"after": [4]}]
)
def test_episodes_are_the_same_whenever_the_worker_dies(deaths):
    workers = WorkerGroup(**deaths)
    environment = remote(workers)
    assert [dataclasses.asdict(each) for each in play(environment, ANSWERS)] == [
        dataclasses.asdict(each) for each in plain()
    ]
    assert workers.restarts == len(deaths.get("before", [])) + len(deaths.get("after", []))


def test_an_unnoticed_replacement_of_a_worker_is_detected():
    workers = WorkerGroup()
    environment = remote(workers)
    environment.reset(3)
    environment.step("abc")
    workers.worker = worker()
    assert environment.step("hello") == plain()[2]
    assert workers.replays == 1


def test_an_answer_that_arrives_twice_is_played_once():
    workers = WorkerGroup()
    environment = remote(workers)
    environment.reset(3)
    first = workers.worker.step(environment._id, 0, "abc")
    assert workers.worker.step(environment._id, 0, "abc") is first
    assert environment.step("abc") == first
    assert environment.step("hello") == plain()[2]


def test_a_nondeterministic_environment_fails_its_episode():
    workers = WorkerGroup(before=[4])
    environment = remote(workers, f"{__name__}:Forgetful", 5)
    environment.reset(3)
    environment.step("a")
    environment.step("b")
    with pytest.raises(ReplayDiffers, match=r"seed 3 .* differs at turn 1"):
        environment.step("c")


def test_input_errors_are_raised_unchanged():
    environment = remote(WorkerGroup())
    environment._values["type"] = "nothing.py"
    with pytest.raises(InputError, match="there is no file"):
        environment.reset(1)
