"""Calls of environments and rewards that take too long, never return, or raise what is no Exception."""

import asyncio
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping
from pathlib import Path
from typing import ClassVar

import numpy as np
import pytest

from posttrain.data.held_out import TaskSplit
from posttrain.environments import protocol, rewards
from posttrain.environments.make import make_env
from posttrain.environments.protocol import Call, CallTimeout, Environment, Observation, Step, ended_in, ended_within
from posttrain.episode import Outcome
from posttrain.errors import InputError, RunError
from posttrain.recipe.rl import RlRecipe
from posttrain.recipe.rollout import RolloutRecipe
from posttrain.rollout.store import read_episodes, write_episodes
from posttrain.training.evaluators import EpisodeEvaluator
from posttrain.training.tasks import check_tasks

from .test_driver import EchoEngine, play

FOREVER = threading.Event()


class Hanging(Environment):
    """One turn. Seeds name what hangs, from 0 in the order of `HANGS`; other seeds are played."""

    HANGS = ("sleep", "event", "loop", "reset", "constructor")
    late: ClassVar[list[str]] = []

    def reset(self, seed):
        self.kind = self.HANGS[seed] if seed < len(self.HANGS) else ""
        if self.kind == "reset":
            FOREVER.wait()
        return Observation([{"role": "user", "content": f"task {seed}"}])

    def step(self, action):
        if self.kind == "sleep":
            time.sleep(1.5)
            Hanging.late.append(action)
        if self.kind == "event":
            FOREVER.wait()
        while self.kind == "loop":
            pass
        return Step([], 1.0, True, False, {"success": True})


class Wide(EchoEngine):
    """Plays all episodes at a time."""

    def __init__(self):
        super().__init__()
        self.capacity = 64


@pytest.mark.parametrize("blocking", [False, True])
def test_a_call_that_never_returns_fails_its_episode_on_time(blocking, monkeypatch):
    monkeypatch.setattr(Hanging, "blocking", blocking)
    begun = time.monotonic()
    episodes = play([0, 1, 2, 3, 9, 10], Wide(), Hanging, environment_timeout=0.5)
    assert time.monotonic() - begun < 1.4
    assert [e.outcome is Outcome.FAILED for e in episodes] == [True] * 4 + [False] * 2
    assert all(e.failure.endswith("took longer than 0.5 s") for e in episodes[:4])
    time.sleep(1.5)
    assert Hanging.late == [], "a call that was given up goes on"
    # The next episodes are not affected by calls that still hang.
    assert all(e.success for e in play([9, 10], Wide(), Hanging, environment_timeout=0.5))


def test_calls_of_an_environment_that_does_not_block_never_overlap():
    running, most, both = [0], [0], threading.Barrier(2)

    def call():
        running[0] += 1
        most[0] = max(most[0], running[0])
        time.sleep(0.01)
        running[0] -= 1

    def meet():
        both.wait(50.0)

    async def all_calls(function, count, one_at_a_time):
        await asyncio.gather(*(ended_within(function, 60.0, one_at_a_time) for _ in range(count)))

    asyncio.run(all_calls(call, 8, True))
    assert most == [1]
    # Of others, each waits for another one to run at the same time.
    asyncio.run(all_calls(meet, 2, False))
    assert not both.broken


def test_calls_share_a_thread_until_one_is_given_up():
    protocol._idle.clear()
    threads = [ended_in(threading.current_thread, 60.0)[0] for _ in range(3)]
    assert len(set(threads)) == 1
    begun, late = threading.Event(), threading.Event()
    hung = Call(lambda: (begun.set(), time.sleep(0.3), late.set()))
    assert hung.thread is threads[0]
    begun.wait(50.0)
    hung.give_up()
    assert ended_in(threading.current_thread, 60.0)[0] is not threads[0]
    threads[0].join(50.0)
    assert not threads[0].is_alive()
    assert not late.is_set()
    # A call that has ended meanwhile is not interrupted, nor the one that its thread runs now.
    done = Call(int)
    done.future.result(50.0)
    following = Call(lambda: time.sleep(0.2) or "ended")
    assert following.thread is done.thread
    done.give_up()
    assert following.future.result(50.0) == ("ended", None)


def test_too_many_calls_that_still_hang_end_the_run(monkeypatch):
    monkeypatch.setattr(protocol, "MOST_GIVEN_UP", sum(thread.is_alive() for thread in protocol._given_up) + 2)
    ends = [ended_in(FOREVER.wait, 0.01) for _ in range(2)]
    assert all(isinstance(error, CallTimeout) for _, error in ends)
    with pytest.raises(RunError, match=r"environment_timeout.*have not returned"):
        ended_in(FOREVER.wait, 0.01)


class GeneratorExitLike(BaseException):
    """As libraries raise it that interrupt code."""

    def __str__(self):
        raise RuntimeError("no text")


class Raises(Mapping):
    """Raises wherever it is read."""

    def __getitem__(self, key):
        raise LookupError("no key")

    def __iter__(self):
        raise RuntimeError("no keys")

    def __len__(self):
        return 1

    def __str__(self):
        raise RuntimeError("no text")

    __repr__ = __str__


CIRCULAR: dict = {}
CIRCULAR["itself"] = CIRCULAR


class Wrong(Environment):
    """One turn, in which the environment of seed n does the n-th wrong thing."""

    RAISED = (
        SystemExit(3),
        KeyboardInterrupt(),
        asyncio.CancelledError(),
        GeneratorExit(),
        StopIteration(1),
        TimeoutError("mine"),
        ValueError("\ud800"),
        GeneratorExitLike(),
        RecursionError(),
    )
    STEPS = (
        Step([], 1e300, True, False),
        Step([], 10**400, True, False),
        Step([], float("inf"), True, False),
        Step([], np.float32("nan"), True, False),
        Step([], "1", True, False),
        Step([], np.array([1.0]), True, False),
        Step([], None, True, False),
        Step([], 1.0, True, False, {"success": "no"}),
        Step([], 1.0, True, False, {"success": 1}),
        Step([], 1.0, True, False, {"success": np.array([True, False])}),
        Step([], 1.0, True, False, {"scores": [1.0]}),
        Step([], 1.0, True, False, {"scores": {"a": float("nan")}}),
        Step([], 1.0, True, False, {"scores": {"a": "1"}}),
        Step([], 1.0, True, False, {"scores": {"a": 1.0, "a_low": 0.5}}),
        Step([], 1.0, "no", False),
        Step([{"role": "user", "content": "\ud800"}], 1.0, False, False),
        Step([{"role": "user", "content": "a", "name": "\udfff"}], 1.0, False, False),
        Step([{"role": "user", "content": "a", "extra": object()}], 1.0, False, False),
        Step("a", 1.0, False, False),
        Step([Raises()], 1.0, False, False),
        Step([], 1.0, True, False, Raises()),
        Step([], 1.0, True, False, {"success": True, "of": Raises()}),
        Step([], 1.0, True, False, {"success": True, "of": CIRCULAR}),
        Step([], 1.0, True, False, {"success": True, (0, 1): "a key"}),
        Step([], 1.0, True, False, {"success": True, "of": "\ud800"}),
        (step for step in ()),
        None,
    )

    def reset(self, seed):
        self.seed = seed
        content = "\ud83d" if seed == 99 else f"task {seed}"
        return Observation([{"role": "user", "content": content}])

    def step(self, action):
        if self.seed < len(self.RAISED):
            raise self.RAISED[self.seed]
        return self.STEPS[self.seed - len(self.RAISED)]


@pytest.mark.parametrize("timeout", [None, 60.0])
def test_whatever_an_environment_raises_or_returns_fails_its_episode_by_name(timeout):
    seeds = [*range(len(Wrong.RAISED) + len(Wrong.STEPS)), 99]
    episodes = play(seeds, Wide(), Wrong, environment_timeout=timeout)
    for seed, episode in zip(seeds, episodes, strict=True):
        assert episode.outcome is Outcome.FAILED, seed
        assert episode.failure.startswith("tests.rollout.test_timeouts:Wrong"), seed
        assert episode.failure.encode(), seed
        assert episode.total_reward == 0.0
    raised = dict(zip(seeds, episodes, strict=True))
    assert raised[0].failure.endswith("raised SystemExit: 3")
    assert raised[5].failure.endswith("raised TimeoutError: mine")


def ended_with(*step):
    """An episode whose environment returned this step."""

    class One(Wrong):
        RAISED = ()
        STEPS = (Step([], *step),)

    (episode,) = play([0], environment=One)
    return episode


def test_numbers_of_numpy_are_numbers():
    episode = ended_with(np.float32(0.5), np.True_, np.False_, {"success": np.True_, "scores": {"a": np.int64(2)}})
    assert (episode.total_reward, episode.success, episode.scores) == (0.5, True, {"a": 2.0})
    assert type(episode.turns[0].info["success"]) is bool


def test_an_async_reward_that_blocks_does_not_block_later_ones():
    async def blocks(answer):
        time.sleep(20)

    cancelled = threading.Event()

    async def waits(answer):
        try:
            await asyncio.sleep(60)
        finally:
            cancelled.set()

    async def right(answer):
        await asyncio.sleep(0)
        return 1.0

    async def leaves(answer):
        raise SystemExit(2)

    def score(function, seconds=30.0):
        return ended_in(lambda: rewards.RewardFunction("r", function)([], "a", {}, "row 1"), seconds)

    assert score(right)[0] == {"score": 1.0}
    loop = rewards._event_loop()
    assert isinstance(score(leaves)[1], rewards.RewardFailure)
    assert isinstance(score(waits, 0.2)[1], CallTimeout)
    assert cancelled.wait(5), "it ends when its call is given up"
    rewards.replace_blocked_loop()
    assert rewards._event_loop() is loop, "a loop that runs is kept"
    assert isinstance(score(blocks, 0.2)[1], CallTimeout)
    rewards.replace_blocked_loop()
    assert score(right)[0] == {"score": 1.0}


class Opening(Environment):
    """Hangs, raises or exits where its seed says."""

    where: ClassVar[str] = ""

    def __init__(self, recipe):
        super().__init__(recipe)
        self.end("constructor")

    def end(self, place):
        if Opening.where == f"{place} hangs":
            FOREVER.wait()
        if Opening.where == f"{place} exits":
            raise SystemExit(0)

    def reset(self, seed):
        return Observation([{"role": "user", "content": "task"}])

    def step(self, action):
        return Step([], 1.0, True, False, {"success": True})

    def try_reward(self, seed):
        self.end("reward")
        return []

    @classmethod
    def baselines(cls, recipe, seeds):
        raise SystemExit(0)


@pytest.mark.parametrize("place", ["constructor", "reward"])
def test_the_check_before_a_run_names_what_hangs_or_exits(place, monkeypatch):
    recipe = RlRecipe(environment=make_env(Opening).recipe)
    tasks = TaskSplit(range(1), range(1), range(1), None)
    monkeypatch.setattr(Opening, "where", f"{place} hangs")
    (line,) = check_tasks(recipe.model_copy(update={"rollout": RolloutRecipe(environment_timeout=0.05)}), tasks)
    assert ("constructor" in line, "reward" in line, "0.05 s" in line) == (place == "constructor", False, True)
    monkeypatch.setattr(Opening, "where", f"{place} exits")
    with pytest.raises(InputError, match=r"SystemExit: 0"):
        check_tasks(recipe.model_copy(update={"rollout": RolloutRecipe(environment_timeout=None)}), tasks)


@pytest.mark.parametrize(
    "bounds",
    [1.0, (1, 0), ("0", "1"), (0, float("inf")), [float("nan"), 1], (0, 1, 2), {"low": 0, "high": 1}, KeyError],
)
def test_a_range_of_returns_that_is_none_is_named_before_the_run(bounds, monkeypatch):
    def return_range(recipe):
        if bounds is KeyError:
            raise KeyError("range")
        return bounds

    monkeypatch.setattr(Opening, "return_range", return_range)
    with pytest.raises(InputError, match=r"`return_range` of .*Opening"):
        check_tasks(RlRecipe(environment=make_env(Opening).recipe), TaskSplit(range(1), range(1), range(1), None))


def test_baselines_that_exit_are_named(tmp_path):
    evaluator = EpisodeEvaluator.__new__(EpisodeEvaluator)
    evaluator.environment = make_env(Opening).recipe
    evaluator.tasks = TaskSplit(range(1), range(1), range(1), None)
    with pytest.raises(InputError, match=r"`baselines` of .*Opening raised SystemExit: 0"):
        evaluator.baselines()


@pytest.mark.parametrize("score", [1e39, -1e39, float("nan"), float("inf"), 10**400, np.float64(1e300), True, "1"])
def test_a_score_that_float32_does_not_hold_fails_its_episode_by_name(score):
    episode = ended_with(1.0, True, False, {"success": True, "scores": {"close": score}})
    if score is True:
        assert episode.scores == {"close": 1.0}
    else:
        assert episode.outcome is Outcome.FAILED
        assert "'close'" in episode.failure


def test_scores_keep_their_digits_in_the_episode_file(tmp_path):
    values = {"a": 0.1, "b": 1 / 3, "c": 16777217.0, "d": np.float64(1e-300), "e": np.int64(3), "f": None}
    episode = ended_with(1.0, True, False, {"success": True, "scores": values})
    (stored,) = read_episodes(write_episodes(tmp_path, 1, "train", [episode], None)).episodes
    assert stored.scores == episode.scores == {key: value for key, value in values.items() if value is not None}


HUNG = """
import time
import posttrain


def reward(answer, **row):
    if row["hangs"]:
        print("hung", flush=True)
        while True:
            try:
                time.sleep(10**6)
            except BaseException:
                pass
    return float("a" in answer)
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("number", "ahead", "timeout"), [(signal.SIGTERM, 0, 600), (signal.SIGINT, 1, 600), (signal.SIGTERM, 0, "null")]
)
def test_a_signal_ends_a_run_whose_reward_never_returns(number, ahead, timeout, tiny_model, tmp_path):
    (tmp_path / "hung.py").write_text(HUNG)
    rows = "".join(f'{{"prompt": "{n}", "hangs": {str(n > 0).lower()}}}\n' for n in range(12))
    (tmp_path / "rows.jsonl").write_text(rows)
    words = [f"environment.prompts={tmp_path}/rows.jsonl", f"environment.reward={tmp_path}/hung.py:reward"]
    words += ["environment.type=text_task", f"model.path={tiny_model}", f"runs={tmp_path}", "name=hung", "steps=2"]
    words += ["evaluation.every=0", "rollout.groups_per_step=4", "rollout.episodes_per_group=2", "model.threads=1"]
    words += ["rollout.tokens_per_turn=4", f"rollout.async_rollouts={ahead}", "seeds.start=0", "seeds.count=8"]
    words += ["evaluation.seeds.start=8", "evaluation.seeds.count=2", "evaluation.final_seeds.start=10"]
    words += [f"rollout.environment_timeout={timeout}"]
    command = [sys.executable, "-m", "posttrain.cli.main", "rl", *words]
    environment = os.environ | {"PYTHONPATH": str(Path(__file__).parents[2] / "src")}
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, env=environment) as run:
        shown = b""
        while b"hung\n" not in shown:
            line = run.stdout.readline()
            assert line, shown.decode()
            shown += line
        time.sleep(1)
        begun = time.monotonic()
        run.send_signal(number)
        rest, _ = run.communicate(timeout=90)
        assert time.monotonic() - begun < 20
        assert run.returncode == 130, (shown + rest).decode()
