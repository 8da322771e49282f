"""The adapter of verifiers 1: tasks are rows, rewards are those of the task, and what needs more than one answer is refused."""

import threading
import time
from pathlib import Path

import pytest

from posttrain.cli.main import main
from posttrain.environments.check import check_environment
from posttrain.environments.game import play
from posttrain.environments.make import make_env
from posttrain.environments.rewards import RewardFailure
from posttrain.errors import InputError
from posttrain.recipe.components import environment_class

pytest.importorskip("verifiers.v1", reason="needs the extra verifiers, which pins other versions")

ADAPTER = "posttrain_environments.verifiers:Verifiers"


@pytest.fixture(autouse=True)
def tasksets(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parent / "tasksets"))


def wait_until(condition):
    end = time.monotonic() + 10
    while not condition() and time.monotonic() < end:
        time.sleep(0.01)
    assert condition()


def letters(**keys):
    return make_env(ADAPTER, taskset="letters-v1", **keys)


def test_a_right_answer_has_all_rewards_and_a_wrong_one_does_not():
    environment = letters()()
    assert environment.reset(2).messages == [
        {"role": "system", "content": "Answer with one letter."},
        {"role": "user", "content": "Which letter has the number 3?"},
    ]
    assert environment.row()["letter"] == "c"
    (right,) = play(environment, 2, ["c"])
    assert (right.reward, right.terminated, right.info["success"]) == (1.5, True, True)
    assert right.info["scores"] == {"right": 1.0, "short": 0.5, "length": 1.0}
    (wrong,) = play(environment, 2, ["the letter c"])
    assert (wrong.reward, wrong.info["success"]) == (0.0, False)
    with pytest.raises(RuntimeError, match="call reset"):
        environment.step("c")


def test_tasks_are_rows_and_keys_change_the_config():
    environment = letters(keys={"first": 20}, tasks=4)
    rows = environment_class(environment.recipe.type).task_rows(environment.recipe)
    assert len(rows) == len({row.key for row in rows}) == 4
    assert environment().reset(0).messages[-1]["content"] == "Which letter has the number 21?"
    with pytest.raises(InputError, match="environment seed 4 is not a task of letters-v1, which has 4"):
        environment().reset(4)


def test_the_checks_of_every_environment_pass():
    check_environment(letters().recipe, range(5))


def test_a_reward_that_fails_is_a_failure_and_no_zero():
    environment = letters()()
    environment.reset(1)
    with pytest.raises(RewardFailure, match=r"task 1 of letters-v1 cannot be scored \(TaskError: .*no length"):
        environment.step("crash")


@pytest.mark.parametrize("prompted", [True, False])
def test_an_env_of_one_agent_is_played_turn_by_turn(prompted):
    environment = make_env(ADAPTER, taskset="guess_v1", keys={"prompted": prompted}, max_turns=5)()
    first = environment.reset(5).messages
    assert first[0] == {"role": "system", "content": "Answer with a number."}
    assert first[1]["content"] == ("Guess a number from 1 to 8." if prompted else "Guess.")
    low, high, right = (environment.step(guess) for guess in ("3", "8", "6"))
    assert (low.messages, low.reward, low.terminated) == ([{"role": "user", "content": "higher"}], 0.0, False)
    assert high.messages == [{"role": "user", "content": "lower"}]
    assert (right.reward, right.terminated, right.truncated, right.info["success"]) == (1.0, True, False, True)
    assert right.info["scores"] == {"won": 1.0, "guesses": 3.0}
    with pytest.raises(RuntimeError, match="call reset"):
        environment.step("6")


def test_an_exchange_ends_at_its_limit_and_at_its_stops():
    environment = make_env(ADAPTER, taskset="guess_v1", max_turns=2)()
    steps = play(environment, 5, ["1", "2"])
    assert [(step.truncated, step.terminated) for step in steps] == [(False, False), (True, False)]
    (stopped,) = play(environment, 5, ["stop"])
    assert (stopped.terminated, stopped.reward) == (True, 0.0)
    environment.reset(5)
    with pytest.raises(RewardFailure, match=r"task 5 of guess_v1 cannot be scored .*the engine broke"):
        environment.step("crash")
    threads = threading.active_count()
    for seed in range(8):
        environment.reset(seed)
    environment.close()
    wait_until(lambda: threading.active_count() <= threads)


def test_a_run_trains_on_an_env(tiny_model, tmp_path):
    words = [f"model.path={tiny_model}", f"environment.type={ADAPTER}", "environment.taskset=guess_v1", "steps=1"]
    words += ["environment.max_turns=3", "rollout.groups_per_step=2", "rollout.episodes_per_group=2", "plots=false"]
    words += ["rollout.tokens_per_turn=4", "evaluation.held_out=2", "evaluation.every=0", f"runs={tmp_path}"]
    words += ["name=guess"]
    assert main(["rl", *words]) == 0


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ("tools", "has tools that run as servers, and this environment plays with answers alone"),
        ("sandbox", "task 0 of refused_v1 has the reward in_a_box, which runs in a sandbox"),
        ("no reward", "task 0 of refused_v1 has no reward"),
        ("no prompt", "task 0 of refused_v1 has no prompt"),
        ("image", "task 0 of refused_v1 has an image in its prompt"),
        ("infinite", "refused_v1 is infinite; set environment.tasks"),
        ("empty", "refused_v1 has no tasks"),
        ("crash", r"the tasks of refused_v1 cannot be read \(ValueError: the file is missing\)"),
    ],
)
def test_what_one_answer_cannot_play_is_refused(fault, message):
    with pytest.raises(InputError, match=message):
        make_env(ADAPTER, taskset="refused_v1", keys={"fault": fault})()


def test_an_infinite_taskset_is_read_up_to_a_number_of_tasks():
    assert make_env(ADAPTER, taskset="refused_v1", keys={"fault": "infinite"}, tasks=7)().reset(6).messages


@pytest.mark.parametrize(
    ("taskset", "message"), [("nosuch", "'nosuch' cannot be loaded"), ("textarena", "cannot be loaded")]
)
def test_a_taskset_that_cannot_be_loaded_is_one_sentence(taskset, message):
    with pytest.raises(InputError, match=message):
        make_env(ADAPTER, taskset=taskset)()


def test_a_run_trains_on_it(tiny_model, tmp_path):
    words = [f"model.path={tiny_model}", f"environment.type={ADAPTER}", "environment.taskset=letters-v1", "steps=1"]
    words += ["rollout.groups_per_step=2", "rollout.episodes_per_group=2", "rollout.tokens_per_turn=4", "plots=false"]
    words += ["evaluation.held_out=6", "evaluation.every=0", f"runs={tmp_path}", "name=letters"]
    assert main(["rl", *words]) == 0
