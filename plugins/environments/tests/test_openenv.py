"""The adapter of OpenEnv: in process, and as the client of a real server."""

import os
import re
import socket
import subprocess
import sys
import time
from pathlib import Path

import pytest

from posttrain.environments.game import play
from posttrain.environments.make import make_env
from posttrain.errors import InputError

pytest.importorskip("openenv.core", reason="needs the extra openenv, which pins other versions")

ADAPTER = "posttrain_environments.openenv:OpenEnv"
LOCAL = {"in_process": "plugins.environments.tests.counting:Counting"}
ROOT = Path(__file__).parents[3]


@pytest.fixture(scope="module")
def server():
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    command = [sys.executable, "-m", "plugins.environments.tests.counting", str(port)]
    with subprocess.Popen(command, env=environment) as process:
        for _ in range(600):
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", port)) == 0:
                    break
            assert process.poll() is None
            time.sleep(0.1)
        yield {"url": f"http://127.0.0.1:{port}"}
        process.terminate()


@pytest.fixture(params=["local", "server"])
def keys(request):
    return LOCAL if request.param == "local" else request.getfixturevalue("server")


def start_of(observation):
    return int(re.search(r"after (\d+)", observation.messages[-1]["content"])[1])


def test_a_task_is_solved_and_its_seed_repeats_it(keys):
    make = make_env(ADAPTER, **keys)
    first = make().reset(3)
    assert first == make().reset(3)
    assert first != make().reset(5)
    assert first.messages[0]["content"] == "Answer with a whole number only."
    start = start_of(first)
    steps = play(make(), 3, [str(start + n) for n in (1, 2, 3)])
    assert [step.reward for step in steps] == pytest.approx([1 / 3] * 3)
    assert steps[-1].terminated
    assert steps[-1].info["success"] is True


def test_sessions_are_independent(keys):
    one, other = make_env(ADAPTER, **keys)(), make_env(ADAPTER, **keys)()
    start, _ = start_of(one.reset(1)), other.reset(2)
    assert one.step(str(start + 1)).messages[0]["content"] == "right"
    assert other.step("-5").terminated
    assert one.step(str(start + 2)).messages[0]["content"] == "right"


def test_wrong_answers_end_without_success_and_invalid_ones_are_rejected(keys):
    environment = make_env(ADAPTER, **keys)()
    environment.reset(0)
    step = environment.step("the first number")
    assert step.info["rejected"] == "the answer is not a whole number"
    assert not step.terminated
    last = environment.step("-1")
    assert last.info["success"] is False
    with pytest.raises(RuntimeError):
        environment.step("1")


def test_limits_and_json_answers():
    environment = make_env(ADAPTER, **LOCAL, keys={"length": 9}, max_turns=2)()
    start = start_of(environment.reset(0))
    environment.step(str(start + 1))
    last = environment.step(str(start + 2))
    assert last.truncated
    assert last.info["success"] is False


def test_wrong_keys_are_one_sentence():
    with pytest.raises(InputError, match="exactly one of `url`"):
        make_env(ADAPTER)
    with pytest.raises(InputError, match="actions have number, not 'move'"):
        make_env(ADAPTER, **LOCAL, action_field="move")().reset(0)
    with pytest.raises(InputError, match="no server of OpenEnv answers"):
        make_env(ADAPTER, url="http://127.0.0.1:9")().reset(0)
