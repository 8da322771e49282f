"""`posttrain env audit`: every fault of an environment is found, and a sound one has no defect."""

import json
import os
import re
import threading

import pytest
from typer.testing import CliRunner

from posttrain.cli.env import app, environment_of
from posttrain.environments.audit import AuditProcesses, _keep_newest, audit
from posttrain.environments.players import PLAYERS
from posttrain.errors import InputError, RunError
from posttrain.recipe.components import environment_classes

SOUND = """
import random
from posttrain.environments.protocol import Environment, Observation, Step

class Sum(Environment):
    def reset(self, seed):
        draws = random.Random(seed)
        self.numbers = draws.randrange(1000, 5000), draws.randrange(1000, 5000)
        self.over = False
        return Observation([{"role": "user", "content": f"Add {self.numbers[0]} and {self.numbers[1]}."}])
    def step(self, action):
        if self.over:
            raise RuntimeError("the episode is over")
        self.over = True
        right = action == str(sum(self.numbers))
        return Step([], float(right), True, False, {"success": right})
    def expert(self):
        return str(sum(self.numbers))
"""
FAULTS = {
    "a seed that is no seed": ("random.Random(seed)", "random.Random()", "seeding: .* in the same process"),
    "hashes of text": ("random.Random(seed)", "random.Random(hash(str(seed)))", "seeding: .* another PYTHONHASHSEED"),
    "a reward for any answer": (
        "float(right)",
        "0.3 + 0.7 * right",
        "reward without work: .*nothing.* on 3 seeds: up to 0.3 of 1$",
    ),
    "an injection that works": (
        "action == str(sum(self.numbers))",
        'str(sum(self.numbers)) == action or "success" in action',
        "reward without work: injection on 3 seeds: up to 1 of 1, 3 successes",
    ),
    "an oracle that is wrong": ("return str(sum", "return str(1 + sum", "ceiling: the oracle fails on 3 of 3 seeds"),
    "an exception": (
        "right = action",
        "int(action.split()[0]); right = action",
        "exceptions: step 1 raised IndexError: .*nothing on 3 seeds",
    ),
    "a reward that is not a number": ("float(right)", 'float("nan")', "rewards: a reward is not finite"),
    "no end": ("True, False, {", "False, False, {", "protocol: the episode has not ended after 1 step;"),
    "a step after the end": ("self.over = True", "pass", "protocol: a step was possible after the end"),
    "no success": ('{"success": right}', "{}", "protocol: the last step has no `success`"),
    "a forged report": (
        "right = action",
        "import os; [os.write(number, b'[]\\n') for number in range(3, 9) if os.path.exists(f'/proc/self/fd/{number}')]\n"
        "        right = action",
        "exceptions: the environment wrote into the reports",
    ),
    "a process that dies": ("right = action", "import os; os._exit(3); right = action", "exceptions: .* exit status 3"),
}
NOTES = {
    "the answer in the prompt": (
        'content": f"Add',
        'content": f"The sum is {sum(self.numbers)}. Add',
        "leak: the oracle's first answer is in the prompt on 3 of 3 seeds",
    ),
    "one task": ("random.Random(seed)", "random.Random(1)", "seeding: 3 seeds show the same first messages"),
    "global randomness": (
        "draws = random",
        "random.random(); draws = random",
        "side effects: changes the global random state",
    ),
}


@pytest.fixture(scope="module")
def processes():
    with AuditProcesses(60) as started:
        yield started


def audited(processes, tmp_path, source, seeds=range(3), players=tuple(PLAYERS)):
    # A name of its own, because a process executes a file once.
    file = tmp_path / f"environment_{abs(hash((source, str(tmp_path))))}.py"
    file.write_text(source)
    return audit(str(file), environment_of(str(file), []), seeds, players, processes)


def texts(found, defect):
    return "\n".join(f"{one.check}: {one.text}" for one in found.findings if one.defect == defect)


@pytest.mark.parametrize("fault", FAULTS)
def test_a_fault_is_a_defect_and_its_command_shows_it_again(processes, tmp_path, fault):
    right, wrong, text = FAULTS[fault]
    assert right in SOUND
    source = SOUND.replace(right, wrong)
    found = audited(processes, tmp_path, source)
    assert re.search(text, texts(found, True)), found.findings
    command = next(one.command for one in found.defects if re.search(text, f"{one.check}: {one.text}"))
    first, seeds = (int(re.search(rf"--{option} (\d+)", command)[1]) for option in ("first", "seeds"))
    players = re.findall(r"--player (\w+)", command) or list(PLAYERS)
    again = audited(processes, tmp_path, source, range(first, first + seeds), players)
    assert text.partition(":")[0] in {one.check for one in again.defects}


@pytest.mark.parametrize("note", NOTES)
def test_a_note_is_no_defect(processes, tmp_path, note):
    right, wrong, text = NOTES[note]
    assert right in SOUND
    found = audited(processes, tmp_path, SOUND.replace(right, wrong))
    assert found.defects == []
    assert re.search(text, texts(found, False)), found.findings


def test_an_endless_call_is_a_defect_that_names_the_player_the_seed_and_the_line(processes, tmp_path, monkeypatch):
    audited(processes, tmp_path, SOUND)  # both processes have started
    monkeypatch.setattr(processes, "_seconds", 5)
    source = SOUND.replace("self.over = False", "self.over, self.slow = False, seed == 1")
    source = source.replace("right = action", "import time; time.sleep(60 * self.slow); right = action")
    found = audited(processes, tmp_path, source)
    (defect,) = {finding.text: finding for finding in found.defects}.values()
    place = r"then nothing on seed 1 in environment_\d+\.py, line \d+ \(step\)"
    assert re.fullmatch(f"no result within 5 s: 6 of 18 done, {place}", defect.text)
    assert defect.command.endswith(" --first 1 --seeds 1 --player nothing")


def test_output_in_small_parts_is_kept_up_to_a_limit_of_bytes():
    reader, writer = os.pipe2(os.O_DIRECT)  # each write stays a part of its own, as those of a stack may
    output = bytearray()
    thread = threading.Thread(target=_keep_newest, args=[reader, output])
    thread.start()
    lines = [b"line %d\n" % number for number in range(20_000)]
    for line in lines:
        os.write(writer, line)
    os.close(writer)
    thread.join()
    os.close(reader)
    assert output == b"".join(lines)[-65_536:]


def test_a_sound_environment_has_no_findings(tmp_path):
    file, out = tmp_path / "environment.py", tmp_path / "audit.jsonl"
    file.write_text(SOUND)
    result = CliRunner().invoke(app, ["audit", str(file), "--first", "7", "--seeds", "3", "--show", "--out", str(out)])
    assert result.exit_code == 0
    assert "no findings" in result.output
    assert "oracle on seed 7" in result.output
    assert "info {'success': True}" in result.output
    line = json.loads(out.read_text())
    assert line["seeds"] == [7, 3]
    assert line["players"]["oracle"] == {"n": 3, "successes": 3, "mean_return": 1, "lowest": 1, "highest": 1}
    assert line["players"]["injection"]["successes"] == 0
    assert line["findings"] == []


def test_defects_and_unknown_players_are_errors_of_the_command(tmp_path):
    file = tmp_path / "environment.py"
    file.write_text(SOUND.replace("float(right)", "1.0"))
    result = CliRunner().invoke(app, ["audit", str(file), "--player", "echo", "--seeds", "1"])
    assert isinstance(result.exception, RunError)
    assert "1 defect in 1 of 1 environments" in str(result.exception)
    error = CliRunner().invoke(app, ["audit", "--player", "judge"]).exception
    assert isinstance(error, InputError)
    assert "--player judge: use nothing, random, echo" in str(error)
    lines = CliRunner().invoke(app, ["list", "text_task"]).output.splitlines()
    assert len(lines) > 100
    assert "text_task reasoning_gym.dataset=chain_sum" in lines


def test_our_environments_have_no_defects(processes):
    for name, environment in environment_classes().items():
        if environment.self_contained:
            found = audit(name, environment_of(name, []), range(3), list(PLAYERS), processes)
            assert found.defects == []
            assert found.players["nothing"].successes == 0
