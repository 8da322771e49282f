"""The HTML report: complete, self-contained, and safe for any text of models and users."""

import base64
import json
import re
import subprocess
from shutil import which
from xml.etree import ElementTree

import numpy as np
import pytest
from matplotlib import rc_context

from posttrain.cli.main import main
from posttrain.credit.units.mixing import UnitRewards
from posttrain.credit.units.spans import Spans
from posttrain.episode import Advantages, Outcome
from posttrain.errors import InputError
from posttrain.figures.draw import STYLE, entitle, new_figure
from posttrain.recipe.stages import RlRecipe
from posttrain.rollout.store import write_episodes
from posttrain.runs.directory import RunDirectory
from posttrain.runs.metrics import MetricsLog
from posttrain.view.report import _narrow, write_html
from tests.conftest import make_tokenizer
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


def tooltips(page):
    return [attrs["title"] for attrs in page.all("span") if attrs.get("title")]


def write_table(path, **changed):
    """The results of a run: a wide table."""
    row = ["trained model", "99.0% [98.0, 99.9]", "0.990 [0.980, 0.999]", "200", "x " * 30]
    table = {"title": "lone: bandit", "headings": ["policy", "success", "mean return", "n", "note"], "rows": [row]}
    table |= {"note": "of `n`", "words": ["policy", "note"]} | changed
    (path / "results.json").write_text(json.dumps({"tables": [table], "policies": []}))


def with_credit(run, ids, units=False):
    """A training step of two episodes; the first answered with the tokens `ids`."""
    episodes = [
        played(rewards=(reward,), tokens=len(ids), group=0, index=i, success=not i)
        for i, reward in enumerate((1.0, -0.5))
    ]
    values = []
    for episode in episodes:
        (stream,) = episode.streams
        stream.ids[2:] = ids
        values.append([np.concatenate([np.zeros(2), np.linspace(-1, 1, len(ids))]).astype(np.float32)])
    credited: list[UnitRewards] = []
    if units:
        spans = Spans(np.array([0, 3, len(ids)]), np.array([True, True]))
        credited = [UnitRewards(spans, np.array([0.25, -0.75]), 1.0, 0.1)] * 2
    write_episodes(run.episodes, 4, "train", episodes, Advantages(values), credited)


@pytest.mark.figures
def test_the_page_has_all_that_is_known_of_a_run_in_order(tmp_path):
    path = make_run(tmp_path, "lone", optimizer={"learning_rate": 0.125})
    run = RunDirectory(path)
    episodes = [played(seed=seed, rewards=(paid,)) for seed, paid in enumerate((0.5, -1.0, 2.0, 0.75, 1.0))]
    failed = played(seed=9, rewards=(50.0,), outcome=Outcome.FAILED, failure="broke")
    write_episodes(run.episodes, 4, "evaluation", [*episodes, failed])
    write_episodes(run.episodes, 2, "evaluation", [played(seed=77)])
    with MetricsLog(run, []) as log:
        log.write(4, "warning", {"message": "entropy is low"})
    write_table(path)
    file, notes = write_html([path])
    assert (file, notes) == (path / "report.html", [])
    page = page_of(file)
    for expected in ("99.0%", "Scores by checkpoint", "update", "optimizer.learning_rate", "6 held-out episodes"):
        assert expected in page.text
    assert "learning_rate: 0.125" in page.text, "the whole recipe"
    assert run.load_environment()["processor"] in page.text
    assert "entropy is low" in page.text
    assert "1 failed" in page.text
    summaries = re.findall(r"(best|median|worst): .*?seed (\d+) · return ([+-][\d.]+)", page.text)
    assert summaries == [("best", "2", "+2.000"), ("median", "3", "+0.750"), ("worst", "1", "-1.000")]
    assert len(page.all("img")) >= 3
    for image in page.all("img"):
        svg = base64.b64decode(image["src"].partition("base64,")[2])
        assert ElementTree.fromstring(svg).tag.endswith("svg")
        assert image["alt"]
    titles = ("Curves", "Warnings and failures", "The run", "Machine")
    places = ('<p class="lead">', '<table class="stack">', *(f"<h3>{title}</h3>" for title in titles))
    order = [file.read_text().index(part) for part in places]
    assert order == sorted(order)


@pytest.mark.figures
def test_text_of_models_and_users_is_escaped(tmp_path, tiny_model):
    keys = {"model": {"path": str(tiny_model)}, "evaluation": {"metric": "success"}}
    path = make_run(tmp_path / "<b>&", "evil", **keys)
    run = RunDirectory(path)
    episode = played(rejected=ATTACK, outcome=Outcome.FAILED, failure=ATTACK)
    episode.messages = [{"role": ATTACK, "content": ATTACK}, {"role": "assistant", "content": "x"}]
    episode.turns[0].answer = ATTACK
    episode.turns[0].info["judge"] = {"score": 0.5, "reason": ATTACK}
    write_episodes(run.episodes, 4, "evaluation", [episode])
    with_credit(run, make_tokenizer().encode(SHOWN, add_special_tokens=False))
    with MetricsLog(run, []) as log:
        log.write(4, "warning", {"message": ATTACK})
        log.write(4, "evaluation", finished(0.5) | {f"score/{ATTACK}": 0.5})
    run.environment_file.write_text(json.dumps(run.load_environment() | {"command": ATTACK}))
    write_table(path, title=ATTACK, headings=[ATTACK], rows=[[ATTACK]], note=ATTACK, words=[])
    file, _ = write_html([path])
    page = page_of(file)
    assert page.text.count("<script>alert(1)</script>") >= 10, "it is read as text wherever it stands"
    for shown in ("{{ 7 * 7 }}", "\\u202e", "\\x1b[31m"):
        assert shown in page.text
    for image in page.all("img"):
        ElementTree.fromstring(base64.b64decode(image["src"].partition("base64,")[2]))
    raw = file.read_text(encoding="utf-8")
    assert "<script" not in raw
    assert "\u202e" not in raw


def test_tokens_have_the_colour_of_their_credit(tmp_path, tiny_model):
    run = RunDirectory(make_run(tmp_path, "credited", model={"path": str(tiny_model)}))
    with_credit(run, [70, 71, 72, 73, 74])
    page = page_of(write_html([run.path])[0])
    assert tooltips(page)[:5] == ["-1.0000", "-0.5000", "+0.0000", "+0.5000", "+1.0000"]
    colours = [attrs["style"] for attrs in page.all("span") if attrs.get("title")]
    assert colours[0] == "background:rgba(230,140,0,0.500)"
    assert colours[4] == "background:rgba(86,180,233,0.500)"
    assert colours[2].endswith(",0.000)")
    assert "blue above 0" in page.text
    episode = played(rewards=(1.0,), tokens=6)
    credit = np.full(len(episode.streams[0]), 0.5, np.float32)
    write_episodes(run.episodes, 5, "train", [episode], Advantages([[credit]]))
    page = page_of(write_html([run.path])[0])
    assert tooltips(page) == ["+0.5000, 6 tokens"], "tokens of equal credit are one piece"


def test_units_are_shown_with_their_credit(tmp_path, tiny_model):
    keys = {"model": {"path": str(tiny_model)}, "unit_credit": {"type": "loo"}, "reward": {"path": "m"}}
    path = make_run(tmp_path, "units", **keys)
    with_credit(RunDirectory(path), [70, 71, 72, 73, 74], units=True)
    page = page_of(write_html([path])[0])
    assert "+0.250" in page.text
    assert "-0.750" in page.text
    assert re.search(r"outcome \+1.000 = \+0.100 empty answer", page.text)
    rows = [attrs for attrs in page.all("td") if attrs.get("style")]
    assert [row["style"].split("(")[1][:3] for row in rows[:2]] == ["86,", "230"]
    assert tooltips(page)[:3] == ["-1.0000", "-0.5000", "+0.0000"]


def test_without_a_tokenizer_answers_are_shown_without_colors_and_long_ones_are_cut(tmp_path):
    run = RunDirectory(make_run(tmp_path, "gone", model={"path": str(tmp_path / "no-model")}))
    with_credit(run, [70, 71, 72])
    episode = played()
    episode.messages[1]["content"] = episode.turns[0].answer = "word " * 10_000
    write_episodes(run.episodes, 4, "evaluation", [episode])
    file, notes = write_html([run.path])
    assert "tokenizer of the run cannot be loaded" in "".join(notes)
    page = page_of(file)
    assert "answer 0" in page.text
    assert tooltips(page) == []
    assert "[38000 more characters are not shown]" in page.text
    assert page.text.count("word ") < 2500


def test_several_runs_are_shown_side_by_side(tmp_path):
    paths = [make_run(tmp_path, f"ppo-{seed}", lambda s, seed=seed: s + seed, seed=seed) for seed in (1, 2)]
    paths.append(make_run(tmp_path, "still", steps=2, ended=False, optimizer={"learning_rate": 1.0}))
    for path in paths:
        shift = float(path.name == "still")
        final = [played(seed=s, rewards=(s % 3 + shift,)) for s in range(20)]
        write_episodes(RunDirectory(path).episodes, 4, "final", final)
    file, notes = write_html(paths, tmp_path / "new folder" / "all.html")
    page = page_of(file)
    assert "still is better than ppo in return" in page.text
    assert [attrs["href"] for attrs in page.all("a")] == ["#run-1", "#run-2", "#run-3"]
    assert [attrs["id"] for attrs in page.all("section")] == ["run-1", "run-2", "run-3"]
    tables = ("Paired differences", "ppo, mean of 2 seeds", "Recipe keys that differ", "optimizer.learning_rate")
    for expected in (*tables, "2 of 4 steps"):
        assert expected in page.text
    assert any("still has done 2 of 4 steps" in note for note in notes)
    assert any(attrs["alt"] == "Figure: rollout_return" for attrs in page.all("img"))


def test_runs_with_little_or_damaged_data_have_a_page_with_a_notice(tmp_path):
    values = {"name": "new", "runs": str(tmp_path), "environment": {"type": "bandit"}}
    new = RunDirectory.create(RlRecipe.model_validate(values))
    page = page_of(write_html([new.path])[0])
    assert "The run has no metrics yet." in page.text
    assert "Warnings and failures" not in page.text
    new.failure.write_text("the disk is full\n")
    assert "The run failed: the disk is full" in page_of(write_html([new.path])[0]).text
    old = RunDirectory(make_run(tmp_path, "old"))
    old.environment_file.write_text(old.environment_file.read_text().replace('"id"', '"ident"'))
    once = f"old: {old.environment_file}: key 'id' is missing or malformed; restore the file"
    assert write_html([old.path])[1] == [once]
    old.recipe_file.write_text(old.recipe_file.read_text() + "removed_key: 3\n")
    (old.path / "results.json").write_text("{")
    (old.episodes / "step_000004.evaluation.jsonl.zst").write_bytes(b"damaged")
    file, notes = write_html([old.path])
    for expected in ("removed_key", "results.json cannot be read", "step_000004.evaluation.jsonl.zst is damaged"):
        assert expected in "\n".join(notes)
    page = page_of(file)
    assert "removed_key: 3" in page.text
    assert page.all("img"), "the curves are there all the same"
    page_of(write_html([new.path, old.path], tmp_path / "both.html")[0])


def test_report_errors(tmp_path, capsys):
    from torch.utils.tensorboard import SummaryWriter

    path = make_run(tmp_path, "a")
    with pytest.raises(InputError, match="is a directory; give the name of a file"):
        write_html([path], tmp_path)
    with SummaryWriter(str(tmp_path / "events")) as writer:
        writer.add_scalar("loss", 1.0, 1)
    with pytest.raises(InputError, match="use `posttrain plot`"):
        write_html([tmp_path / "events"])
    assert main(["report", str(tmp_path / "nowhere")]) == 2
    assert "there is no run at" in capsys.readouterr().err
    assert main(["report", str(path), "--out", str(tmp_path / "a.html")]) == 0
    assert capsys.readouterr().out.strip() == str(tmp_path / "a.html")
    (path / "metrics.jsonl").write_text("{}\n" + (path / "metrics.jsonl").read_text())
    assert main(["report", str(path)]) == 1
    assert "line 1 is damaged" in capsys.readouterr().err


def test_legends_beside_the_axes_of_a_figure_are_below_them():
    with rc_context(STYLE):
        figure, panels = new_figure(2)
        for axes in panels:
            axes.plot([0, 1], [0, 1], label="held-out seeds")
            axes.legend(loc="upper left", bbox_to_anchor=(1.0, 1.0))
        entitle(figure, "Learning curve of a run with a name that needs more than one line here")
        _narrow(figure)
        figure.canvas.draw()
    assert figure.get_figwidth() == 6
    assert len(figure.get_suptitle().splitlines()) == 2
    first, second = (axes.get_window_extent() for axes in panels)
    legends = [axes.get_legend().get_window_extent() for axes in panels]
    assert first.y0 > legends[0].y1 > legends[0].y0 > second.y1
    assert second.y0 > panels[1].xaxis.get_tightbbox().y0 > legends[1].y1 > 0
    assert all(0 < legend.x0 < legend.x1 < figure.bbox.width for legend in legends)


@pytest.mark.skipif(which("chromium") is None, reason="chromium is not installed")
def test_nothing_but_tables_and_figures_is_wider_than_a_phone(tmp_path):
    """In a window of 400 pixels the page itself does not scroll sideways."""
    path = make_run(tmp_path, "lone")
    write_episodes(RunDirectory(path).episodes, 4, "evaluation", [played(seed=1)])
    write_table(path)
    file, _ = write_html([path])
    probe = tmp_path / "probe.html"
    script = "let page = f.contentDocument.documentElement; document.title = page.scrollWidth - page.clientWidth"
    style = "width:400px;height:900px;border:0"
    probe.write_text(f'<iframe id="f" src="{file}" style="{style}" onload="{script}"></iframe>')
    words = ["chromium", "--headless", "--no-sandbox", "--disable-gpu", "--allow-file-access-from-files", "--dump-dom"]
    page = subprocess.run([*words, probe.as_uri()], capture_output=True, text=True, timeout=120)
    assert re.search(r"<title>0</title>", page.stdout), page.stdout[:500]
