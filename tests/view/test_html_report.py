"""The HTML report: complete, self-contained, and safe for any text of models and users."""

import base64
import json
import re
import subprocess
from shutil import which
from xml.etree import ElementTree

import numpy as np
import pytest

from posttrain.credit.units.mixing import UnitRewards
from posttrain.credit.units.spans import Spans
from posttrain.episode import Advantages, Outcome
from posttrain.errors import InputError
from posttrain.recipe.stages import RlRecipe
from posttrain.rollout.store import write_episodes
from posttrain.runs.directory import RunDirectory
from posttrain.runs.metrics import MetricsLog
from posttrain.view.report import write_html
from tests.rollout.episodes import played
from tests.runs.comparing import finished, make_run
from tests.view.pages import Page

ATTACK = (
    "</pre></style></title><script>alert(1)</script><img src=x onerror=alert(2)>\"'&lt; \x1b[31m \u202e {{ 7 * 7 }}"
)
SHOWN = "</style></title><script>alert(1)</script><img src=x onerror=alert(2)>"


@pytest.fixture(autouse=True)
def with_empty_images(request, monkeypatch):
    """Images have no content, unless the test is marked `figures`: drawing them takes most of the time."""
    if not request.node.get_closest_marker("figures"):
        monkeypatch.setattr("posttrain.view.report.encode", lambda figure, form: b"<svg/>")


def page_of(file):
    page = Page(file.read_text(encoding="utf-8"))
    page.check_self_contained()
    return page


def with_credit(run: RunDirectory, ids: list[int], units: bool = False) -> None:
    """A training step of two episodes; the first answered with the tokens `ids`."""
    episodes = [
        played(rewards=(reward,), tokens=len(ids), group=0, index=i, success=not i)
        for i, reward in enumerate((1.0, -0.5))
    ]
    values = []
    for episode in episodes:
        (stream,) = episode.streams
        stream.ids[2:] = ids
        credit = np.zeros(len(stream), np.float32)
        credit[2:] = np.linspace(-1, 1, len(ids))
        values.append([credit])
    found = (
        units
        and [UnitRewards(Spans(np.array([0, 3, len(ids)]), np.array([True, True])), np.array([0.25, -0.75]), 1.0, 0.1)]
        * 2
    )
    write_episodes(run.episodes, 4, "train", episodes, Advantages(values), found or ())


@pytest.mark.figures
def test_the_page_has_all_that_is_known_of_a_run(tmp_path):
    path = make_run(tmp_path, "lone", optimizer={"learning_rate": 0.125})
    run = RunDirectory(path)
    rewards = {"0": 0.5, "1": -1.0, "2": 2.0, "3": 0.75, "4": 1.0}
    episodes = [played(seed=int(seed), rewards=(paid,)) for seed, paid in rewards.items()]
    failed = played(seed=9, rewards=(50.0,), outcome=Outcome.FAILED, failure="broke")
    write_episodes(run.episodes, 4, "evaluation", [*episodes, failed])
    write_episodes(run.episodes, 2, "evaluation", [played(seed=77)])
    with MetricsLog(run, []) as log:
        log.write(4, "warning", {"message": "entropy is low"})
    table = {
        "title": "lone: bandit",
        "headings": ["policy", "success"],
        "rows": [["trained", "99.0%"]],
        "note": "of `n`",
    }
    (path / "results.json").write_text(json.dumps({"tables": [{**table, "words": ["policy"]}], "policies": []}))
    file, notes = write_html([path])
    assert (file, notes) == (path / "report.html", [])
    page = page_of(file)
    for expected in ("The run", "99.0%", "Scores by checkpoint", "update", "optimizer.learning_rate", "0.125"):
        assert expected in page.text
    assert "learning_rate: 0.125" in page.text, "the whole recipe"
    assert run.load_environment()["processor"] in page.text
    assert "entropy is low" in page.text
    summaries = re.findall(r"(best|median|worst): .*?seed (\d+) · return ([+-][\d.]+)", page.text)
    assert summaries == [("best", "2", "+2.000"), ("median", "3", "+0.750"), ("worst", "1", "-1.000")]
    assert "6 held-out episodes" in page.text
    assert "1 failed" in page.text
    assert len(page.all("img")) >= 3
    for image in page.all("img"):
        svg = base64.b64decode(image["src"].partition("base64,")[2])
        assert ElementTree.fromstring(svg).tag.endswith("svg")
        assert image["alt"]


@pytest.mark.figures
def test_text_of_models_and_users_is_escaped(tmp_path, tiny_model):
    from posttrain.models.load import load_tokenizer
    from posttrain.recipe.model import ModelRecipe

    tokenizer = load_tokenizer(ModelRecipe(path=str(tiny_model)))
    keys = {"model": {"path": str(tiny_model)}, "evaluation": {"metric": "success"}}
    path = make_run(tmp_path / "<b>&", "evil", **keys)
    run = RunDirectory(path)
    episode = played(rejected=ATTACK, outcome=Outcome.FAILED, failure=ATTACK)
    episode.messages = [{"role": ATTACK, "content": ATTACK}, {"role": "assistant", "content": "x"}]
    episode.turns[0].answer = ATTACK
    episode.turns[0].info["judge"] = {"score": 0.5, "reason": ATTACK}
    write_episodes(run.episodes, 4, "evaluation", [episode])
    with_credit(run, tokenizer.encode(SHOWN, add_special_tokens=False))
    with MetricsLog(run, []) as log:
        log.write(4, "warning", {"message": ATTACK})
        log.write(4, "evaluation", finished(0.5) | {f"score/{ATTACK}": 0.5})
    environment = run.load_environment() | {"command": ATTACK}
    run.environment_file.write_text(json.dumps(environment))
    table = {"title": ATTACK, "headings": [ATTACK], "rows": [[ATTACK]], "note": ATTACK, "words": []}
    (path / "results.json").write_text(json.dumps({"tables": [table], "policies": []}))
    file, _ = write_html([path])
    page = page_of(file)
    assert page.text.count("<script>alert(1)</script>") >= 10, "it is read as text wherever it stands"
    assert "{{ 7 * 7 }}" in page.text
    assert "\\u202e" in page.text
    assert "\\x1b[31m" in page.text
    for image in page.all("img"):
        ElementTree.fromstring(base64.b64decode(image["src"].partition("base64,")[2]))
    raw = file.read_text(encoding="utf-8")
    assert "<script" not in raw
    assert "\u202e" not in raw


def test_tokens_have_the_colour_of_their_credit(tmp_path, tiny_model):
    path = make_run(tmp_path, "credited", model={"path": str(tiny_model)})
    with_credit(RunDirectory(path), [70, 71, 72, 73, 74])
    page = page_of(write_html([path])[0])
    pieces = [attrs for attrs in page.all("span") if attrs.get("title")]
    assert [piece["title"] for piece in pieces[:5]] == ["-1.0000", "-0.5000", "+0.0000", "+0.5000", "+1.0000"]
    colours = [piece["style"] for piece in pieces[:5]]
    assert colours[0] == "background:rgba(230,140,0,0.500)"
    assert colours[4] == "background:rgba(86,180,233,0.500)"
    assert colours[2].endswith(",0.000)")
    assert "blue above 0" in page.text


def test_tokens_of_equal_credit_are_one_piece(tmp_path, tiny_model):
    path = make_run(tmp_path, "credited", model={"path": str(tiny_model)})
    episode = played(rewards=(1.0,), tokens=6)
    credit = np.full(len(episode.streams[0]), 0.5, np.float32)
    write_episodes(RunDirectory(path).episodes, 4, "train", [episode], Advantages([[credit]]))
    page = page_of(write_html([path])[0])
    assert [attrs["title"] for attrs in page.all("span") if attrs.get("title")] == ["+0.5000, 6 tokens"]


def test_units_are_shown_with_their_credit(tmp_path, tiny_model):
    path = make_run(
        tmp_path, "units", model={"path": str(tiny_model)}, unit_credit={"type": "loo"}, reward={"path": "m"}
    )
    with_credit(RunDirectory(path), [70, 71, 72, 73, 74], units=True)
    page = page_of(write_html([path])[0])
    assert "+0.250" in page.text
    assert "-0.750" in page.text
    assert re.search(r"outcome \+1.000 = \+0.100 empty answer", page.text)
    rows = [attrs for attrs in page.all("td") if attrs.get("style")]
    assert [row["style"].split("(")[1][:3] for row in rows[:2]] == ["86,", "230"]
    assert [attrs["title"] for attrs in page.all("span") if attrs.get("title")][:3] == ["-1.0000", "-0.5000", "+0.0000"]


def test_without_a_tokenizer_answers_are_shown_without_colors(tmp_path, capsys):
    path = make_run(tmp_path, "gone", model={"path": str(tmp_path / "no-model")})
    with_credit(RunDirectory(path), [70, 71, 72])
    file, notes = write_html([path])
    assert "tokenizer of the run cannot be loaded" in "".join(notes)
    page = page_of(file)
    assert "answer 0" in page.text
    assert not [attrs for attrs in page.all("span") if attrs.get("title")]


def test_a_long_answer_is_folded_and_cut_with_a_notice(tmp_path):
    path = make_run(tmp_path, "long")
    episode = played()
    episode.messages[1]["content"] = episode.turns[0].answer = "word " * 10_000
    write_episodes(RunDirectory(path).episodes, 4, "evaluation", [episode])
    page = page_of(write_html([path])[0])
    assert "[38000 more characters are not shown]" in page.text
    assert page.text.count("word ") < 2500


def test_several_runs_are_shown_side_by_side(tmp_path):
    paths = [make_run(tmp_path, f"ppo-{seed}", lambda s, seed=seed: s + seed, seed=seed) for seed in (1, 2)]
    paths.append(make_run(tmp_path, "still", steps=2, ended=False, optimizer={"learning_rate": 1.0}))
    for path in paths:
        shift = float(path.name == "still")
        write_episodes(
            RunDirectory(path).episodes, 4, "final", [played(seed=s, rewards=(s % 3 + shift,)) for s in range(20)]
        )
    file, notes = write_html(paths, tmp_path / "new folder" / "all.html")
    page = page_of(file)
    assert "Paired differences" in page.text
    assert "still is better than ppo in return" in page.text
    assert [attrs["href"] for attrs in page.all("a")] == ["#run-1", "#run-2", "#run-3"]
    assert [attrs["id"] for attrs in page.all("section")] == ["run-1", "run-2", "run-3"]
    for expected in ("ppo, mean of 2 seeds", "Recipe keys that differ", "2 of 4 steps", "optimizer.learning_rate"):
        assert expected in page.text
    assert any("still has done 2 of 4 steps" in note for note in notes)
    assert any(attrs["alt"] == "Figure: rollout_return" for attrs in page.all("img"))


def test_runs_with_little_data_have_a_page_with_a_notice(tmp_path):
    new = RunDirectory.create(
        RlRecipe.model_validate({"name": "new", "runs": str(tmp_path), "environment": {"type": "bandit"}})
    )
    page = page_of(write_html([new.path])[0])
    assert "The run has no metrics yet." in page.text
    assert "Warnings and failures" not in page.text
    new.failure.write_text("the disk is full\n")
    assert "The run failed: the disk is full" in page_of(write_html([new.path])[0]).text
    old = make_run(tmp_path, "old")
    recipe = old / "recipe.yaml"
    recipe.write_text(recipe.read_text() + "removed_key: 3\n")
    (old / "results.json").write_text("{")
    (old / "episodes" / "step_000004.evaluation.jsonl.zst").write_bytes(b"damaged")
    file, notes = write_html([old])
    told = "\n".join(notes)
    for expected in ("removed_key", "results.json cannot be read", "step_000004.evaluation.jsonl.zst is damaged"):
        assert expected in told
    page = page_of(file)
    assert "removed_key: 3" in page.text
    assert page.all("img"), "the curves are there all the same"
    page_of(write_html([new.path, old], tmp_path / "both.html")[0])


def test_a_damaged_file_is_named_once(tmp_path):
    run = make_run(tmp_path, "run")
    file = run / "environment.json"
    file.write_text(file.read_text().replace('"id"', '"ident"'))
    _, warnings = write_html([run])
    damaged = [one for one in warnings if "key 'id' is missing" in one]
    assert damaged == [f"run: {file}: key 'id' is missing or malformed; restore the file"]


def test_report_errors(tmp_path, capsys):
    from posttrain.cli.main import main

    path = make_run(tmp_path, "a")
    with pytest.raises(InputError, match="is a directory; give the name of a file"):
        write_html([path], tmp_path)
    assert main(["report", str(tmp_path / "nowhere")]) == 2
    assert "there is no run at" in capsys.readouterr().err
    assert main(["report", str(path), "--out", str(tmp_path / "a.html")]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "a.html")
    metrics = path / "metrics.jsonl"
    metrics.write_text("{}\n" + metrics.read_text())
    assert main(["report", str(path)]) == 1
    assert "line 1 is damaged" in capsys.readouterr().err


def test_a_tensorboard_log_has_no_report(tmp_path):
    from torch.utils.tensorboard import SummaryWriter

    with SummaryWriter(str(tmp_path)) as writer:
        writer.add_scalar("loss", 1.0, 1)
    with pytest.raises(InputError, match="use `posttrain plot`"):
        write_html([tmp_path])


def finished_run(tmp_path):
    """A run with a result, a wide table and an episode."""
    path = make_run(tmp_path, "lone")
    write_episodes(RunDirectory(path).episodes, 4, "evaluation", [played(seed=1)])
    cells = ["policy", "success", "mean return", "n", "note"]
    table = {
        "title": "t",
        "headings": cells,
        "rows": [["trained model", "99.0% [98.0, 99.9]", "0.990 [0.980, 0.999]", "200", "x " * 30]],
    }
    table |= {"note": "", "words": ["policy", "note"]}
    (path / "results.json").write_text(json.dumps({"tables": [table], "policies": []}))
    return path


def test_the_page_opens_with_the_result_and_ends_with_the_machine(tmp_path):
    path = finished_run(tmp_path)
    with (path / "metrics.jsonl").open("a") as file:
        file.write(json.dumps({"kind": "warning", "step": 1, "message": "one"}) + "\n")
    raw = (write_html([path])[0]).read_text()
    places = (
        '<p class="lead">',
        '<table class="stack">',
        "<h3>Curves</h3>",
        "<h3>Warnings and failures</h3>",
        "<h3>The run</h3>",
        "<h3>Machine</h3>",
    )
    order = [raw.index(part) for part in places]
    assert order == sorted(order)


@pytest.mark.skipif(which("chromium") is None, reason="chromium is not installed")
def test_nothing_but_tables_and_figures_is_wider_than_a_phone(tmp_path):
    """In a window of 400 pixels the page itself does not scroll sideways."""
    file, _ = write_html([finished_run(tmp_path)])
    probe = tmp_path / "probe.html"
    script = "let page = f.contentDocument.documentElement; document.title = page.scrollWidth - page.clientWidth"
    probe.write_text(
        f'<iframe id="f" src="{file}" style="width:400px;height:900px;border:0" onload="{script}"></iframe>'
    )
    words = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files", "--dump-dom"]
    page = subprocess.run([*words, probe.as_uri()], capture_output=True, text=True, timeout=120)
    assert re.search(r"<title>0</title>", page.stdout), page.stdout[:500]
