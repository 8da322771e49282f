"""Hostile run folders beside a good one: every page and command ends in time, shows nothing from outside, and still shows the
good run.

The surface is a function as in `tests.adversary.surfaces`. Consecutive seeds, as many as there are kinds, cover all of them.
"""

import json
import os
import random
import re
import signal
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from unittest import mock
from urllib.parse import quote

from posttrain.rollout.store import json_line, zstd
from tests.adversary.hosts import quietly

SECRET = "the text of a file outside"
CONTROLS = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f\u200b-\u200f\u2028-\u202e\u2060-\u2069\ufeff\ud800-\udfff]")
"""Characters that act on a terminal, reorder text or are invisible."""
FOREIGN = "\x1b]0;owned\x07\x1b[2J\x9b31m\u202eevil\u2066\u200b\u2028\r\x7f\ufeff[red]\ud800"
_SECONDS = 120
"""Seconds that a page or a command may take, on a busy machine."""
EPISODES = "episodes/step_000001.train.jsonl.zst"
FILES = ("recipe.yaml", "environment.json", "metrics.jsonl", "failure.txt", "results.json", ".lock", EPISODES)
_LINE = {"step": 2, "kind": "train", "time/run": 1.0, "rollout/return": 0.5}


def _socket(path: Path) -> None:
    here = os.getcwd()
    os.chdir(path.parent)  # the address of a socket is short
    with socket.socket(socket.AF_UNIX) as one:
        one.bind(path.name)
    os.chdir(here)


def _sparse(path: Path) -> None:
    path.touch()
    os.truncate(path, 8 << 30)


SHAPES: dict[str, Callable[[Path, Path], object]] = {
    "link outside": lambda path, outside: path.symlink_to(outside / "secret"),
    "link to a device": lambda path, outside: path.symlink_to("/dev/zero"),
    "loop": lambda path, outside: path.symlink_to(path),
    "dangling link": lambda path, outside: path.symlink_to(outside / "nothing"),
    "pipe": lambda path, outside: os.mkfifo(path),
    "directory": lambda path, outside: path.mkdir(),
    "socket": lambda path, outside: _socket(path),
    "sparse": lambda path, outside: _sparse(path),
    "not UTF-8": lambda path, outside: path.write_bytes(b"\xff\xfe\x80{}\n" * 9),
    "deep": lambda path, outside: path.write_text("[" * 200_000 + "\n"),
    "digits": lambda path, outside: path.write_text("9" * 400 + "\n"),
    "no permission": lambda path, outside: (path.write_text("{}"), path.chmod(0)),
    "empty": lambda path, outside: path.touch(),
    "missing": lambda path, outside: None,
}
"""What is in the place of a file."""


def _shape(name: str, shape: Callable[[Path, Path], object]) -> Callable[[Path, Path], None]:
    def change(run: Path, outside: Path) -> None:
        (run / name).unlink(missing_ok=True)
        shape(run / name, outside)

    return change


def _metrics(**values: object) -> Callable[[Path, Path], None]:
    def change(run: Path, outside: Path) -> None:
        with (run / "metrics.jsonl").open("a") as file:
            file.write(json.dumps({**_LINE, **values}) + "\n")

    return change


def _raw(name: str, text: str) -> Callable[[Path, Path], None]:
    def change(run: Path, outside: Path) -> None:
        with (run / name).open("ab") as file:
            file.write(text.encode(errors="surrogatepass"))

    return change


def _json(name: str, **values: object) -> Callable[[Path, Path], None]:
    def change(run: Path, outside: Path) -> None:
        file = run / name
        file.write_text(json.dumps((json.loads(file.read_text()) if file.exists() else {}) | values))

    return change


def _results(**values: object) -> Callable[[Path, Path], None]:
    return _json("results.json", **{"tables": [], "policies": []} | values)


def _recipe(text: str) -> Callable[[Path, Path], object]:
    return lambda run, outside: (run / "recipe.yaml").write_text(text)


def _episode(**values: object) -> Callable[[Path, Path], None]:
    """An episode with other values in its record, or in the header of its file."""

    def change(run: Path, outside: Path) -> None:
        file = run / EPISODES
        lines = zstd.decompress(file.read_bytes()).split(b"\n")
        for number, line in enumerate(lines):
            record = json.loads(line)
            changed = {**record, **{key: value for key, value in values.items() if key in record}}
            lines[number] = json_line(changed).encode()  # spaces would hide the episode from the page of its group
        file.write_bytes(zstd.compress(b"\n".join(lines)))

    return change


def _turn(**values: object) -> dict[str, object]:
    usual = {"stream": 0, "start": 2, "stop": 5, "reward": 1.0, "stop_reason": "end_token", "answer": "a", "info": {}}
    return usual | {"state": None} | values


def _folder(name: str, shape: str) -> Callable[[Path, Path], None]:
    def change(run: Path, outside: Path) -> None:
        target = run / name
        target.rename(outside / "moved") if target.exists() else (outside / "moved").mkdir()
        if shape == "file":
            target.touch()
        else:
            target.symlink_to(outside / "moved" if shape == "link" else ".")

    return change


_ARRAYS = ("ids", "sampled", "rollout_logprobs", "rewards", "turn", "versions")
_WRONG = (["<i8", ""], ["|S3", "YWJj"], ["<f8", "////////////"], ["<i8", "//////////8="])


def _table(*cells: object) -> dict[str, object]:
    return {"title": FOREIGN, "headings": ["policy", "n"], "rows": [list(cells)], "note": FOREIGN}


OTHERS: dict[str, Callable[[Path, Path], object]] = {
    "number of 400 digits": _metrics(**{"rollout/return": int("9" * 400)}),
    "step of 400 digits": _metrics(step=int("9" * 400)),
    "step of 30 digits": _metrics(step=10**30),
    "negative step": _metrics(step=-5),
    "step is true": _metrics(step=True),
    "text as a number": _metrics(**{"time/run": "x", "n": "x", "optimizer/skipped": "x"}),
    "text as a metric": _metrics(**{"rollout/return": FOREIGN}),
    "list as a metric": _metrics(kind="evaluation", success=[1, "x"]),
    "object as a metric": _metrics(**{"rollout/return": {"a": [{}]}}),
    "NaN": _raw("metrics.jsonl", '{"step": 2, "kind": "train", "rollout/return": NaN}\n'),
    "infinity": _raw("metrics.jsonl", '{"step": 2, "kind": "train", "rollout/return": -Infinity}\n'),
    "1e999": _raw("metrics.jsonl", '{"step": 2, "kind": "train", "rollout/return": 1e999}\n'),
    "huge float": _metrics(**{"rollout/return": 1.7e308, "optimizer/gradient_norm": 5e-324}),
    "controls in keys": _metrics(**{FOREIGN: 1.0, f"rollout/{FOREIGN}": 2.0, f"score/{FOREIGN}": 3.0}),
    "controls in a kind": _metrics(kind=FOREIGN),
    "controls in a message": _metrics(kind="warning", message=FOREIGN),
    "message is a list": _metrics(kind="warning", message=[FOREIGN, 1]),
    "audit without a message": _metrics(kind="audit"),
    "message of an audit is a list": _metrics(kind="audit", message=[FOREIGN, 1]),
    "controls in an audit": _metrics(kind="audit", message=FOREIGN),
    "nonfinite is a number": _metrics(nonfinite=3),
    "final of texts": _metrics(kind="final", policy=FOREIGN, success="x", best_step=None, chosen=FOREIGN),
    "evaluation of texts": _metrics(kind="evaluation", success=FOREIGN, success_low="x"),
    "line without an end": _raw("metrics.jsonl", "x" * 5_000_000),
    "long line": _raw("metrics.jsonl", "x" * 5_000_000 + "\n"),
    "pid of 30 digits": _raw(".lock", "9" * 30),
    "pid of the group": _raw(".lock", "0"),
    "all processes": _raw(".lock", "-1"),
    "controls in a failure": _raw("failure.txt", FOREIGN * 50),
    "huge failure": _raw("failure.txt", "x" * 30_000_000),
    "recipe is a list": _recipe("- a\n- b\n"),
    "recipe of other types": _recipe("stage: [1]\nmodel: 3\nseed: []\nsteps: {}\n"),
    "controls in a recipe": _recipe(
        f"stage: rl\nname: {json.dumps(FOREIGN)}\nmodel: {{path: {json.dumps(FOREIGN)}}}\nenvironment: {{type: bandit}}\n"
    ),
    "aliases": _recipe(
        "a: &a [x, x, x, x]\nb: &b [*a, *a, *a, *a]\n"
        + "".join(f"k{i}: &c{i} [{', '.join([f'*c{i - 1}' if i else '*b'] * 9)}]\n" for i in range(12))
    ),
    "environment of other types": _json(
        "environment.json", packages={"torch": [1]}, git={"commit": 3}, cpus_allowed="x"
    ),
    "controls in the environment": _json("environment.json", **dict.fromkeys(("command", "processor", "id"), FOREIGN)),
    "controls in a table": _results(tables=[_table(FOREIGN, "3")]),
    "table of other types": _results(tables=[_table(None, {"a": 1})]),
    "ragged table": _results(tables=[_table("a")]),
    "results without tables": _json("results.json", policies=3),
    "verdict is a number": _results(verdict=3),
    "verdict of other types": _results(verdict={"outcome": [1], "reasons": 3}),
    "controls in a verdict": _results(verdict={"outcome": FOREIGN, "sentence": FOREIGN, "reasons": [FOREIGN, 1]}),
    "unknown policies": _results(policies=[{"x": 1}]),
    "seed of an episode is text": _episode(seed=FOREIGN),
    "seed of 400 digits": _episode(seed=int("9" * 400)),
    "group is a list": _episode(group=[1]),
    "outcome is unknown": _episode(outcome=FOREIGN),
    "controls in a failed episode": _episode(failure=FOREIGN, outcome="failed"),
    "messages are numbers": _episode(messages=[1, 2]),
    "messages without a role": _episode(messages=[{"content": FOREIGN}]),
    "turns are numbers": _episode(turns=[1]),
    "reward of 400 digits": _episode(turns=[_turn(reward=int("9" * 400))]),
    "reward is text": _episode(turns=[_turn(reward="1")]),
    "answer is a list": _episode(turns=[_turn(answer=[1])]),
    "controls in the information of a turn": _episode(
        turns=[_turn(info={FOREIGN: FOREIGN, "judge": [FOREIGN], "scores": 3})]
    ),
    **{
        f"tokens of a turn: {wrong}": _episode(turns=[_turn(**wrong)])
        for wrong in ({"stream": 5}, {"stream": -1}, {"start": -3}, {"stop": 10**9}, {"info": [1]})
    },
    **{f"array {array}": _episode(advantages=[array], streams=[dict.fromkeys(_ARRAYS, array)]) for array in _WRONG},
    "no advantages": _episode(advantages=[]),
    "failure is a list": _episode(failure=[1], outcome="failed"),
    "header of texts": _episode(step="x", episodes=FOREIGN),
    "header of 400 digits": _episode(step=int("9" * 400), mean_return=int("9" * 400)),
    "mean return is text": _episode(mean_return=FOREIGN),
    **{
        f"{name} is a {shape}": _folder(name, shape)
        for name in ("episodes", "plots")
        for shape in ("link", "file", "loop")
    },
    "checkpoints is a link": _folder("checkpoints", "link"),
    "checkpoint of 400 digits": lambda run, outside: (run / "checkpoints" / f"step_{'9' * 200}" / "policy").mkdir(
        parents=True
    ),
    "model is a link": lambda run, outside: (run / "model").symlink_to(outside),
    "report is a link": lambda run, outside: (run / "report.html").symlink_to(outside / "secret"),
    "partial of 30 digits": lambda run, outside: (run / f".x.{'9' * 30}.partial").touch(),
}
"""Changes of other files, and of what is in them."""
KINDS: dict[str, Callable[[Path, Path], object]] = {
    **{f"{file}: {name}": _shape(file, shape) for file in FILES for name, shape in SHAPES.items()},
    **OTHERS,
}
NAMES = ("bad", "bad", b"bad\xff\xfe", FOREIGN[:-1].replace("/", ""), "a\nb", "<script>", "x" * 200)
PAGES = (
    *("/", "/list?seeds=apart", "/run/{}", "/state/{}", "/charts/{}", "/episodes/{}", "/group/{}?step=1&group=0"),
    *("/compare?run={}&run=good", "/compare-charts?run={}&run=good"),
    *("/compare-results?run={}&run=good", "/run/good", "/charts/good"),
)
COMMANDS = (
    *(["runs", "list", "{runs}"], ["episodes", "{}"], ["episodes", "{}", "--step", "1", "--tokens"]),
    *(["compare", "{}", "{good}"], ["plot", "{}", "--out", "{out}", "--format", "svg"], ["report", "{}"]),
    *(["report", "{}", "{good}", "--out", "{out}/report.html"], ["rl", "--resume", "{}"]),
    *(["runs", "clean", "{}", "--yes"], ["export", "{}", "{out}/exported"], ["rl", "--resume", "{}", "--dry-run"]),
)


@contextmanager
def _in_time(what: str) -> Iterator[None]:
    def late(*_: object) -> None:
        raise TimeoutError(f"{what} does not end")

    before = signal.signal(signal.SIGALRM, late)
    signal.alarm(_SECONDS)
    try:
        yield
    finally:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, before)


def make_runs(folder: Path, kind: str, name: str | bytes) -> tuple[Path, Path]:
    """A good run and one of a kind in `folder`/runs; returns the folder of the second and that of the files outside."""
    from posttrain.rollout.store import write_episodes
    from tests.rollout.episodes import played
    from tests.runs.comparing import make_run

    runs, outside = folder / "runs", folder / "outside"
    outside.mkdir()
    (outside / "secret").write_text(SECRET + "\n")
    for one in ("good", "bad"):
        run = make_run(runs, one, model={"path": "nowhere/at/all"})
        write_episodes(run / "episodes", 1, "train", [played(rewards=(1.0, 0.0))])
        write_episodes(run / "episodes", 4, "final", [played(seed=seed) for seed in range(4)])
    KINDS[kind](runs / "bad", outside)
    bad = runs / os.fsdecode(name)
    (runs / "bad").rename(bad)
    return bad, outside


def check_pages(folder: Path, pages: tuple[str, ...] = PAGES) -> None:
    """Every page is an answer, without text from outside, and the lists have the good run."""
    from starlette.testclient import TestClient

    from posttrain.view.server import Pages

    server = Pages(folder / "runs")
    (name,) = server.scanner.find().keys() - {"good"} or {"bad"}
    client = TestClient(server.app())
    for page in pages:
        with _in_time(page):
            response = client.get(page.format(quote(name, safe="")))
        assert response.status_code in (200, 404, 500), page
        assert SECRET not in response.text, page
        assert not CONTROLS.search(response.text), page
        if page in ("/", "/list?seeds=apart"):
            assert "good" in response.text, page
        if page.endswith("/good"):
            assert response.status_code == 200, page


def check_commands(folder: Path, bad: Path, commands: tuple[list[str], ...] = COMMANDS) -> None:
    """Every command ends with a result or a sentence, and writes no control character and no text from outside."""
    runs, out = folder / "runs", folder / "out"
    out.mkdir(exist_ok=True)
    places = {"runs": runs, "good": runs / "good", "out": out}
    for words in commands:
        with _in_time(" ".join(words)), mock.patch.dict(os.environ, COLUMNS="2000"):  # no folded paths
            code, stdout, stderr = quietly([word.format(bad, **places) for word in words])
        assert code in (0, 1, 2), (words, stderr[-300:])
        assert "--debug" not in stderr, (words, stderr[-300:])
        assert SECRET not in stdout + stderr, words
        assert (found := CONTROLS.search(stdout + stderr)) is None, (words, found)
        if words[:2] == ["runs", "list"]:
            assert code == 0, (words, stderr)
            assert f"{runs}/good" in stdout, stdout
    for file in (bad / "report.html", out / "report.html", bad / "report.md"):
        if file.is_file() and not file.is_symlink():
            assert SECRET not in file.read_text(), file
            assert not CONTROLS.search(file.read_text()), file


def run_folder(seed: int, folder: Path) -> None:
    """A hostile run folder beside a good one, by all pages and some commands."""
    draw = random.Random(seed)
    kind = list(KINDS)[37 * seed % len(KINDS)]  # neighbours differ
    bad, outside = make_runs(folder, kind, draw.choice(NAMES))
    check_pages(folder)
    check_commands(folder, bad, (COMMANDS[0], *draw.sample(COMMANDS[1:], 2)))
    assert (outside / "secret").read_text() == SECRET + "\n", "a file outside was changed"
