"""`posttrain env`."""

import re

import pytest
from typer.testing import CliRunner

from posttrain.cli.env import app
from posttrain.errors import InputError, RunError


def _run(*words, typed=""):
    return CliRunner().invoke(app, list(words), input=typed)


def _error(*words):
    error = _run(*words).exception
    assert isinstance(error, (InputError, RunError)), error
    return error


def test_list_shows_every_environment_and_its_baselines():
    result = _run("list", "--seeds", "10")
    assert result.exit_code == 0
    for name in ("bandit", "frozen_lake", "sokoban"):
        assert re.search(rf"{name}\D+[15]\D", result.output)
    assert "50.0 %" in result.output
    assert "100.0 %" in result.output


def test_a_person_plays_to_the_end_with_bare_actions():
    result = _run("play", "bandit", "--seed", "3", typed="DRAGON\n")
    assert result.exit_code == 0
    assert "Two slot machines" in result.output
    assert re.search(r"success: the task ended after 1 turn, return [+-]\d\.\d\d", result.output)


def test_bare_actions_are_wrapped_in_the_format_and_keys_apply():
    words = "frozen_lake slippery=false size=5 max_turns=3 format.thinking=true format.prime=true --seed 3"
    result = _run("play", *words.split(), typed="left\n\n<answer>left</answer>\nfoo\n")
    assert result.exit_code == 0
    assert "Rejected: no <think>." in result.output
    assert "Rejected: unknown action 'foo'." in result.output
    assert "no success: no turns are left after 3 turns, return -0.20" in result.output


def test_several_actions_can_be_typed_and_the_end_of_input_stops_cleanly():
    result = _run("play", "sokoban", "format.actions_per_turn=3", "max_turns=1", typed="up || up || up\n")
    assert "Rejected" not in result.output
    result = _run("play", "sokoban", typed="up\n")
    assert result.exit_code == 0
    assert result.output.endswith("stopped\n")


def test_validate_checks_all_or_one_with_keys():
    result = _run("validate", "--seeds", "5")
    whole = ("bandit", "frozen_lake", "json_answer", "memory", "sokoban", "tool_use", "word_sort")
    lines = [line for line in result.output.splitlines() if not line.startswith("  ")]
    assert lines == [f"{name}: valid on 5 seeds" for name in whole]
    assert _run("validate", "sokoban", "num_boxes=2", "--seeds", "3").output == "sokoban: valid on 3 seeds\n"


def test_validate_fails_on_an_unsound_environment_and_says_what_it_did_not_check(tmp_path):
    file = tmp_path / "lying.py"
    body = "@classmethod\n    def validate(cls, recipe, seeds): raise AssertionError('seed 0: it lies')"
    file.write_text(SOUND.replace("# more", body))
    assert "seed 0: it lies" in str(_error("validate", str(file)))
    file = tmp_path / "silent.py"
    file.write_text(SOUND)
    said = _run("validate", str(file), "--seeds", "3").output
    assert said.splitlines() == [
        f"{file}: valid on 3 seeds",
        "  not compared: expert and random answers (no `expert`, no `random_answer`)",
        "  not checked: a reference solution (no `validate`)",
    ]


SOUND = """
import random
from posttrain.environments.protocol import Environment, Observation, Step

class Sound(Environment):
    def reset(self, seed):
        self.over, self.draws = False, random.Random(seed)
        return Observation([{"role": "user", "content": str(seed)}])
    def step(self, action):
        if self.over:
            raise RuntimeError("the episode is over")
        self.over = True
        return Step([], self.draws.random(), True, False, {"success": bool(self.draws.random() < 0.5)})
    # more
"""
POLICIES = "def random_answer(self, draw): return 'r'\n    def expert(self): return 'e'\n    "


@pytest.mark.parametrize(
    ("right", "wrong", "fault"),
    [
        ("random.Random(seed)", "random.Random()", r"seed 0: the same answers .* led to something else"),
        ("str(seed)", "str(random.random())", "seed 0: two resets with this seed differ; draw only from random.Random"),
        ("self.over, ", "random.random(); self.over, ", "seed 0: the episode draws from the global random state"),
        ("RuntimeError", "KeyError", "seed 0: a step after the end raised KeyError, not RuntimeError"),
        ('{"success": bool(', '{"succes": bool(', "seed 0: the last step has no `success` of true or false in `info`"),
        ("self.draws.random(), True", "float('nan'), True", r"seed 0: the reward of step 1 is nan, which"),
        ("self.draws.random(), True", "'1', True", r"step 1 \(fixed answers\): the reward is '1', not a number"),
        ("self.over = True", "1 / 0", r"seed 0: step 1 \(fixed answers\) in line 12 of faulty.py: ZeroDivisionError"),
        ("self.over = True", "raise SystemExit(3)", r"seed 0: step 1 \(fixed answers\) in line 12 of .*SystemExit: 3"),
        ("self.over, ", "1 / 0; self.over, ", "seed 0: reset in line 7 of faulty.py: ZeroDivisionError"),
        ("def reset(self, seed)", "def reset(self)", r"seed 0: reset: TypeError: .* takes 1 positional argument"),
        ('[{"role": "user", "content": str(seed)}]', "[]", "`reset` returned an Observation without messages"),
        ('"user"', '"human"', "a message of `reset` has the role 'human'; use system, user, assistant, tool"),
        ("return Step(", "return (", "`step` returned a tuple, not a Step"),
        ("def step", "def expert(self): return 1\n    def step", r"answer 1 \(expert\): the answer is 1, not text"),
        ("class Sound(Environment):", "class Sound(Environment):\n    def __init__(self, r): 1 / 0", "the constructor"),
        ("True, False, {", "False, False, {", "seed 0: the episode has not ended after 1 step; end it there"),
        ("# more", POLICIES, "its expert reaches 0.5 on 40 seeds, and random answers reach 0.5"),
        (
            '{"success": bool(self.draws.random() < 0.5)})\n    # more',
            f'{{"success": action == "r"}})\n    {POLICIES}',
            "its expert reaches 0 on 40 seeds, and random answers reach 1",
        ),
    ],
)
def test_validate_finds_faults_without_help(tmp_path, right, wrong, fault):
    file = tmp_path / "faulty.py"
    assert right in SOUND
    file.write_text(SOUND.replace(right, wrong))
    if "0.5 on 40" in fault:
        file.write_text(
            file.read_text()
            .replace("bool(self.draws.random() < 0.5)", "self.seed % 2 == 0")
            .replace("self.over, ", "self.seed, self.over, ")
            .replace("= False, random", "= seed, False, random")
        )
    assert re.search(fault, str(_error("validate", str(file), "--seeds", "40")))
    if wrong == "return (":
        error = _run("play", str(file), typed="up\n").exception
        assert str(error).endswith("faulty.py: `step` returned a tuple, not a Step; correct the environment")


@pytest.fixture
def files(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    head = "from posttrain import Environment\n"
    body = "(Environment):\n    def reset(self, seed): ...\n    def step(self, action): ...\n"
    (tmp_path / "none.py").write_text("class A: ...\n")
    (tmp_path / "two.py").write_text(f"{head}class A{body}class B{body}")
    (tmp_path / "abstract.py").write_text(f"{head}class A(Environment): ...\n")


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("play", "sokoban", "frozen_lake"), "takes one environment, not 2"),
        (("play", "frozen_lake", "sise=5"), "the nearest is environment.size"),
        (("play", "nowhere.py"), "there is no file nowhere.py"),
        (("play", "two.py:C"), "there is no class C"),
        (("play", "none.py"), "none.py has no environment; derive a class from posttrain.Environment"),
        (("play", "two.py"), "two.py has the environments A, B; name one as two.py:A"),
        (("play", "none.py:A"), "A is not an environment"),
        (("play", "abstract.py"), "class A has no method reset and no method step; add it"),
    ],
)
@pytest.mark.usefixtures("files")
def test_wrong_input_is_one_sentence(words, message):
    error = _error(*words)
    assert isinstance(error, InputError)
    assert message in str(error)
    assert "\n" not in str(error)
