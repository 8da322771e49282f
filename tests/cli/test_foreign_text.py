"""Text of other people in the terminal: no character that acts on it, reorders text or is invisible gets there."""

import contextlib
import io
import json
import sys
import traceback

import pytest
import typer

from posttrain.errors import InputError
from posttrain.rollout.store import write_episodes
from posttrain.runs.directory import RunDirectory
from posttrain.runs.metrics import MetricsLog
from posttrain.runs.report import write_report
from posttrain.runs.tables import Results, Table, write_results
from posttrain.terminal import escaped_output, new_console, printable
from tests.adversary.hosts import quietly
from tests.adversary.run_folders import CONTROLS, FOREIGN
from tests.rollout.episodes import played
from tests.runs.comparing import make_run

NAME = FOREIGN[:-1].replace("/", "")
"""As a name of a file."""


def test_printable_keeps_text_and_escapes_what_acts_on_a_terminal():
    plain = "naïve 日本\u3000語 €\u00a0é\n\tx 👍🏽 e\u0301"
    assert printable(plain) == plain
    assert printable("a\r\nb\rc") == "a\nb\\rc"
    every = "".join(map(chr, range(sys.maxunicode + 1)))
    assert CONTROLS.search(printable(every)) is None
    assert printable(FOREIGN).startswith(
        r"\x1b]0;owned\x07\x1b[2J\x9b31m\u202eevil\u2066\u200b\u2028\r\x7f\ufeff[red]\ud800"
    )


def test_everything_written_is_escaped_but_frames_of_progress_bars():
    stream = io.StringIO()
    with contextlib.redirect_stdout(stream), contextlib.redirect_stderr(stream), escaped_output():
        print(FOREIGN)
        typer.echo(FOREIGN, err=True)
        new_console().print(Table(FOREIGN, (FOREIGN, "n"), [(FOREIGN, "1")], FOREIGN))
        try:
            raise ValueError(FOREIGN)
        except ValueError:
            traceback.print_exc()
    assert CONTROLS.search(stream.getvalue()) is None
    assert stream.getvalue().count("owned") >= 6
    bar = io.StringIO()
    with contextlib.redirect_stderr(bar), escaped_output():
        for frame in ("\rloading:  10%|█  |", "\x1b[A", "\n"):
            sys.stderr.write(frame)
    assert bar.getvalue() == "\rloading:  10%|█  |\x1b[A\n"


def test_a_terminal_still_gets_colors_and_no_foreign_sequence():
    stream = io.StringIO()
    console = new_console(file=stream, force_terminal=True, color_system="truecolor", width=200, highlight=False)
    console.print(f"[red]{FOREIGN}[/red]x")
    assert "\x1b[31m" in stream.getvalue()
    rest = stream.getvalue().replace("\x1b[31m", "").replace("\x1b[0m", "")
    assert CONTROLS.search(rest) is None


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """A run, and files beside it, with foreign text in every place: names, rows, recipes, episodes, metrics, predictions."""
    tmp_path = tmp_path_factory.mktemp("foreign")
    path = tmp_path / "runs" / NAME
    make_run(tmp_path / "runs", "run", model={"path": f"nowhere/{NAME}"}).rename(path)
    run = RunDirectory(path)
    call = {"id": FOREIGN, "type": "function", "function": {"name": FOREIGN, "arguments": "{}"}}
    messages = [
        {"role": "system", "content": FOREIGN},
        {"role": "user", "name": FOREIGN, "content": FOREIGN},
        {"role": "assistant", "content": FOREIGN, "tool_calls": [call]},
    ]
    episode = played(rejected=FOREIGN, messages=messages)
    episode.turns[0].info |= {"judge": {"score": 1.0, "reason": FOREIGN}, "scores": {FOREIGN: 1.0}}
    write_episodes(run.episodes, 1, "train", [episode])
    write_episodes(run.episodes, 4, "final", [played(seed=seed, messages=messages) for seed in range(3)])
    with MetricsLog(run, []) as log:
        log.write(4, "warning", {"message": FOREIGN})
        log.write(4, "train", {f"rollout/{FOREIGN}": 1.0})
    run.failure.write_bytes(FOREIGN.encode("utf-8", "backslashreplace"))
    write_results(run.path, Results([Table(FOREIGN, ("policy", "n"), [(FOREIGN, "1")], FOREIGN)]))
    write_report(run, warnings=[FOREIGN])
    assert CONTROLS.search(run.report.read_text()) is None
    rows = [{"messages": messages}, {"messages": [{"role": FOREIGN, "content": FOREIGN}]}, {FOREIGN: FOREIGN}]
    (tmp_path / f"{NAME}.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / f"{NAME}.yaml").write_text(
        f"stage: rl\n{json.dumps(NAME)}: 1\nenvironment: {{type: {json.dumps(NAME)}}}\n"
    )
    (tmp_path / f"{NAME}.py").write_text("broken(\n")
    return path


COMMANDS = """
runs list | episodes RUN | episodes RUN --step 1 | compare RUN FILE | report RUN | rl --resume RUN | rl RECIPE | recipe NAME
data show FILE | data check FILE | plan NAME | sft data.train=FILE model.path=NAME | rl NAME=TEXT | rl steps=TEXT
evaluate text FILE | generate model.path=NAME | export RUN NAME | NAME | rl --NAME | env validate NAME | env play NAME.py
import IMPORT | chat NAME | tune RECIPE | pipeline RECIPE | view NAME | serve NAME | export RUN --push NAME | doctor NAME
plot RUN --metric NAME --format svg | rl RECIPE --debug
""".strip().replace("\n", " | ")
"""RUN, FILE, RECIPE, NAME and TEXT stand for foreign ones."""


@pytest.mark.parametrize("command", COMMANDS.split(" | "))
def test_no_command_passes_it_on(folder, command, monkeypatch):
    monkeypatch.chdir(folder.parents[1])
    words = command.split()
    foreign = {"RUN": str(folder), "FILE": f"{NAME}.jsonl", "RECIPE": f"{NAME}.yaml", "NAME": NAME, "TEXT": FOREIGN}
    foreign["IMPORT"] = f"trl sft --model {FOREIGN}"
    for mark, text in foreign.items():
        words = [word.replace(mark, text) for word in words]
    code, out, errors = quietly(words)
    assert code in (0, 1, 2)
    assert out + errors
    assert (found := CONTROLS.search(out + errors)) is None, found


def test_messages_of_errors_are_escaped(monkeypatch):
    def broken(*args, **kwargs):
        raise InputError(FOREIGN)

    monkeypatch.setattr("posttrain.cli.main.app", broken)
    code, out, errors = quietly(["rl"])
    assert code == 2
    assert "owned" in errors
    assert CONTROLS.search(out + errors) is None
