"""Arguments of the wrong type: each function names the argument in one sentence."""

import json
import random
import re
import traceback

import numpy as np
import pytest

import posttrain
from posttrain.environments.rewards import load_reward
from posttrain.errors import PosttrainError
from posttrain.recipe.compose import load_recipe

from .rollout.episodes import played

WRONG = {
    "int": (None, True, 1.5, float("nan"), "a", b"a", [1], {"a": 1}, object(), int, -1),
    "text": (None, True, 1.5, 3, b"a", [1.5], {"a": 1}, object(), len, ""),
    "numbers": (None, True, 3, 1.5, "a", [1.5], ["a"], [True], [None], [2**70], [-1], {"a": 1}, [float("nan")], [[1]]),
    "object": (None, True, 3, 1.5, "a", b"a", [1], {"a": 1}, object(), len, int),
    "objects": (None, True, 3, "a", b"a", [1], ["a"], [None], {"a": 1}, [int], object()),
    "flag": (None, 1.5, "a", "true", [True], {"a": 1}, object(), 2),
    "settings": (True, 3, "a", [1], object(), {"no_such_key": 1}, {1: 2}),
}


@pytest.fixture(scope="module")
def good(tiny_policy, tmp_path_factory):
    folder, engine = tmp_path_factory.mktemp("rows"), posttrain.LocalEngine(tiny_policy)
    message = {"messages": [{"role": "user", "content": "a"}, {"role": "assistant", "content": "b"}]}
    (folder / "rows.jsonl").write_text(json.dumps(message) + "\n")
    return {
        "rollout": {"engine": engine, "env": posttrain.make_env("bandit"), "seeds": [1], "max_tokens": 2},
        "load_dataset": {"source": f"{folder / 'rows.jsonl'}"},
        "make_env": {"environment": "bandit"},
        "summarize": {"episodes": [played()]},
        "advantages": {"episodes": [played()], "credit": "reinforce"},
        "Learner": {"policy": tiny_policy},
        "Policy": {"model": tiny_policy.recipe},
        "LocalEngine": {"policy": tiny_policy},
        **{stage: {"runs": f"{folder}"} for stage in ("sft", "dpo", "reward", "rl", "distill")},
    }


ARGUMENTS = {
    "rollout": {
        "engine": "object",
        "env": "object",
        "seeds": "numbers",
        "failures": "settings",
        **dict.fromkeys(("episodes_per_group", "max_tokens", "tokens_per_episode", "top_k", "run_seed", "step"), "int"),
    },
    "load_dataset": {"source": "objects", "kind": "text", "split": "text", "strict": "flag", "columns": "settings"},
    "make_env": {"environment": "object"},
    "summarize": {"episodes": "objects"},
    "advantages": {"episodes": "objects", "credit": "object"},
    "Learner": {"policy": "object", "loss": "object", "tokens_per_batch": "int", "updates": "int", "kl": "settings"},
    "Policy": {"model": "object", "seed": "int"},
    "LocalEngine": {"policy": "object"},
    **{
        stage: {"callbacks": "objects", "resume": "numbers", "overwrite": "flag", "fall_back": "flag", "steps": "int"}
        for stage in ("sft", "dpo", "reward", "rl", "distill")
    },
}
ALLOWED = {
    *((name, "None") for name in ("columns", "failures", "resume", "steps")),
    *((name, "'a'") for name in ("resume", "source")),
    ("source", "['a']"),
    ("seed", "-1"),
    ("updates", "-1"),
    ("kl", "3"),
}


@pytest.mark.parametrize("function", ARGUMENTS)
def test_wrong_types_are_named(function, good):
    draws = random.Random(function)
    shown = {
        "kl": "Kl|coefficient|key",
        "columns": "Columns|key",
        "failures": "ailure|key",
        "max_tokens": "tokens_per_turn",
    }
    for name, kind in ARGUMENTS[function].items():
        count = 4 if function in ("sft", "dpo", "reward", "distill") else len(WRONG[kind])
        for value in draws.sample(WRONG[kind], count):
            if (name, repr(value)) in ALLOWED:
                continue
            try:
                getattr(posttrain, function)(**{**good[function], name: value})
            except (PosttrainError, ValueError, TypeError) as error:
                message, raised_in = str(error), traceback.extract_tb(error.__traceback__)[-1].filename
            else:
                pytest.fail(f"{function} accepts {name}={value!r}")
            assert "posttrain/" in raised_in, (function, name, value, message, raised_in)
            about = [line for line in message.splitlines() if re.search(shown.get(name, name), line)]
            assert len(about) == 1, (function, name, value, message)


def test_seeds_of_numpy_are_seeds(good):
    episodes = posttrain.rollout(**{**good["rollout"], "seeds": np.arange(2), "run_seed": np.int64(3)})
    assert [(type(e.seed), e.seed) for e in episodes] == [(int, 0), (int, 1)]


def test_more_episodes_than_can_be_played_are_refused(good):
    seeds = ({"seeds": range(1001), "episodes_per_group": 1000}, {"seeds": range(10**12)}, {"seeds": range(2**70)})
    for many in ({"episodes_per_group": 2**62}, {"episodes_per_group": 1_000_001}, *seeds):
        with pytest.raises(PosttrainError, match=r"`episodes_per_group` .* 1,000,000 episodes"):
            posttrain.rollout(**{**good["rollout"], **many})
    for key in ("rollout.groups_per_step", "rollout.episodes_per_group", "evaluation.episodes_per_seed"):
        words = [f"{key}=1000001", "environment.type=bandit", "evaluation.sampling.temperature=1"]
        with pytest.raises(PosttrainError, match=rf"(`{key.partition('.')[2]}`|{key}).* 1,000,000 episodes"):
            load_recipe([], words, "rl")


@pytest.mark.parametrize(
    ("keyword", "right"),
    [("on_step", "callbacks"), ("callback", "callbacks"), ("on_evaluation", "callbacks"), ("overwite", "overwrite")],
)
def test_an_unknown_argument_names_the_nearest(keyword, right):
    with pytest.raises(PosttrainError, match=rf"`{keyword}`.*`{right}`"):
        posttrain.rl(**{keyword: len})


def test_a_file_that_exits_when_it_is_imported_is_named(tmp_path, monkeypatch):
    (tmp_path / "exits.py").write_text("import sys\nsys.exit(0)\n")
    monkeypatch.syspath_prepend(tmp_path)
    for environment in (f"{tmp_path / 'exits.py'}:Exits", f"{tmp_path / 'exits.py'}"):
        with pytest.raises(PosttrainError, match=r"exits.py.*SystemExit: 0"):
            posttrain.make_env(environment)
        with pytest.raises(PosttrainError, match=r"exits.py.*SystemExit: 0"):
            posttrain.rl(environment={"type": environment}, runs=f"{tmp_path}")
    for reward in (f"{tmp_path / 'exits.py'}:reward", "exits:reward"):
        with pytest.raises(PosttrainError, match=r"exits.*SystemExit: 0"):
            load_reward(reward)
