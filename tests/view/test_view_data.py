"""What the live page shows, without a server: lists, charts, episodes, comparisons."""

import json
import math
import re
import shutil
from urllib.parse import parse_qsl

import numpy as np
import pytest

from posttrain.credit.units.mixing import UnitRewards
from posttrain.credit.units.spans import Spans
from posttrain.episode import Advantages, Outcome
from posttrain.errors import InputError, PosttrainError, RunError
from posttrain.figures.charts import charts_of, marks_of
from posttrain.rollout.store import write_episodes
from posttrain.runs.directory import RunDirectory
from posttrain.runs.metrics import MetricsLog
from posttrain.runs.sources import open_sources
from posttrain.view.browse import PAGE, Filter, Store, group_page, steps_of
from posttrain.view.listing import Query, Scanner, listed
from posttrain.view.run_pages import Logs, charts_of_runs, paired, stages_of
from posttrain.view.server import Pages
from posttrain.view.templates import css
from tests.rollout.episodes import played
from tests.runs.comparing import finished, make_run


def lines_of(folder, **given):
    return listed(Scanner(folder), Query.of(given), read=60).lines


def test_a_run_is_summarized_with_its_result_beside_random_and_optimal(tmp_path):
    path = make_run(tmp_path, "one", ended=False)
    with MetricsLog(RunDirectory(path), []) as log:
        log.write(0, "baseline", {"policy": "random", "success": 0.125, "n": 64})
        log.write(0, "baseline", {"policy": "optimal", "success": 0.75, "n": 64})
    (line,) = lines_of(tmp_path)
    run = line.first
    assert (run.state, run.stage, run.environment, run.step, run.steps) == ("stopped", "rl", "bandit", 4, 4)
    assert run.best == pytest.approx((0.4, 0.3, 0.5))
    assert (run.metric, run.percent, run.final, run.n) == ("success", True, False, 64)
    assert (run.random, run.optimal) == (0.125, 0.75)
    with MetricsLog(RunDirectory(path), []) as log:
        log.write(4, "final", {"policy": "trained", **finished(0.2, 200)})
    run = lines_of(tmp_path)[0].first
    assert (run.state, run.final, run.best[0], run.n) == ("finished", True, 0.2, 200)
    (path / "failure.txt").write_text("the disk is full")
    run = lines_of(tmp_path)[0].first
    assert (run.state, run.reason) == ("failed", "the disk is full")
    with RunDirectory(path).lock():
        assert lines_of(tmp_path)[0].first.state == "running"


def test_seeds_are_one_line_with_their_mean(tmp_path):
    for seed, scale in enumerate((1.0, 1.1, 1.2, 1.3, 1.4), start=1):
        make_run(tmp_path, f"grpo-seed{seed}", paid=lambda step, scale=scale: step * scale, seed=seed)
    make_run(tmp_path, "other", optimizer={"learning_rate": 0.125})
    lines = {line.label: line for line in lines_of(tmp_path, sort="name")}
    assert set(lines) == {"grpo", "other"}
    mean, low, high = lines["grpo"].mean
    assert mean == pytest.approx(0.48)
    half = 2.776 * 0.4 * 0.158114 / math.sqrt(5)  # t(0.975, 4) s / sqrt(5), and a little skewness
    assert (mean - low, high - mean) == pytest.approx((half, half), rel=1e-2)
    apart = {line.label for line in lines_of(tmp_path, seeds="apart")}
    assert apart == {"other", *(f"grpo-seed{n}" for n in range(1, 6))}


def test_the_list_is_filtered_sorted_and_read_lazily(tmp_path):
    for name, paid in (("low", 1), ("high", 3), ("middle", 2)):
        make_run(tmp_path / "sub", name, paid=lambda step, paid=paid: paid)
    apart = {"seeds": "apart"}
    assert [line.label for line in lines_of(tmp_path, sort="result", **apart)] == ["sub/high", "sub/middle", "sub/low"]
    assert [line.label for line in lines_of(tmp_path, text="RL low", **apart)] == ["sub/low"]
    assert lines_of(tmp_path, state="running", **apart) == []
    scanner = Scanner(tmp_path)
    assert listed(scanner, Query.of({}), read=-1).unread == 3
    assert listed(scanner, Query.of({}), read=60).unread == 0
    assert listed(scanner, Query.of({}), read=-1).unread == 0, "kept"


def test_the_list_has_the_columns_that_its_address_names(tmp_path):
    make_run(tmp_path, "one", optimizer={"learning_rate": 0.125})
    query = Query.of({"columns": "state, optimizer.learning_rate loss.type nothing.here"})
    assert query.columns == ("state", "optimizer.learning_rate", "loss.type", "nothing.here")
    assert Query.of(dict(parse_qsl(query.address()))) == query
    assert Query.of({"columns": " "}) == Query()
    (line,) = listed(Scanner(tmp_path), query, read=60).lines
    assert [line.first.value(key) for key in query.columns[1:]] == ["0.125", "ppo", "–"]
    page = Pages(tmp_path).whole_list(query).body.decode()
    headings = re.findall(r"<th[^>]*>([^<]*)</th>", page)
    assert headings == ["Run", "State", "optimizer.learning_rate", "loss.type", "nothing.here"]


def test_a_pipeline_has_its_stages_in_order_on_one_axis(tmp_path):
    for name, paid in (("rl", 3), ("warm-up", 1)):
        make_run(tmp_path / "demo", name, paid=lambda step, paid=paid: paid)
    make_run(tmp_path / "other", "rl")
    (tmp_path / "demo" / "started.json").write_text('{"warm-up": {}, "rl": {}}')
    scanner = Scanner(tmp_path)
    stages = stages_of(scanner, "demo")
    assert [stage.run.name for stage in stages] == ["demo/warm-up", "demo/rl"]
    assert [stage.place(stage.run.best[0]) for stage in stages] == pytest.approx([10, 30])
    assert stages[0].place(None) is stages[0].place(math.nan) is None
    assert stages[0].place(2.0) == 100
    for name in ("other", "demo/rl", "nothing"):
        with pytest.raises(InputError, match="there is no pipeline"):
            stages_of(scanner, name)


def test_charts_have_intervals_baselines_marks_and_phases(tmp_path):
    path = make_run(tmp_path, "one")
    with MetricsLog(RunDirectory(path), []) as log:
        log.write(0, "baseline", {"policy": "random", "success": 0.125, "n": 64})
        times = {"time/rollout": 3.0, "time/update": 1.0, "time/step": 5.0, "speed/tokens_per_second": 10.0}
        log.write(5, "train", {"optimizer/gradient_norm": float("nan"), "optimizer/skipped": 2.0, **times})
        log.write(5, "warning", {"message": "stopped by a guard; the best checkpoint is kept"})
    lines = Logs().read(path / "metrics.jsonl")
    charts = {chart["title"]: chart for chart in (one.values() for one in charts_of(lines))}
    (success,) = charts["Success"]["curves"]
    assert (success["x"], success["y"], success["n"]) == ([0, 2, 4], [0.0, 0.2, 0.4], [64, 64, 64])
    assert success["low"] == pytest.approx([-0.1, 0.1, 0.3])
    assert charts["Success"]["levels"] == [{"label": "random policy", "value": 0.125, "color": "#D55E00"}]
    phases = {curve["key"]: (curve["own"], curve["y"]) for curve in charts["Time per phase"]["curves"]}
    assert phases == {"time/rollout": ([3.0], [3.0]), "time/update": ([1.0], [4.0]), "time/other": ([1.0], [5.0])}
    assert charts["Tokens per second"]["curves"][0]["y"] == [10.0]
    assert [(mark.step, mark.kind) for mark in marks_of(lines)] == [(5, "failure"), (5, "failure"), (5, "guard")]
    json.dumps(charts, allow_nan=False)


def test_a_log_reads_only_what_was_appended_and_notices_a_resumed_run(tmp_path):
    run, logs = RunDirectory(make_run(tmp_path, "one", steps=2, ended=False)), Logs()
    before = logs.read(run.metrics)
    with run.metrics.open("ab") as file:
        file.write(b'{"step": 3, "kind": "train", "loss/nll": 1')
    assert logs.read(run.metrics) is before, "an incomplete line"
    with MetricsLog(run, []) as log:
        log.write(3, "train", {"loss/nll": 2.0})
        after = logs.read(run.metrics)
        assert [column.tolist() for column in after.trained("loss/nll")] == [[3], [2.0]]
        assert (before.last_step, after.last_step) == (2, 3)
        log.truncate_after(1)
        assert logs.read(run.metrics).last_step == 1
    assert not logs.read(tmp_path / "none.jsonl")


@pytest.fixture
def stored(tmp_path):
    """A run with 30 groups of two episodes at step 1, and a group at step 2."""
    run = RunDirectory(make_run(tmp_path, "one"))
    episodes = [
        played(seed=group, group=group, index=index, rewards=(float(index * group),), success=bool(index))
        for group in range(30)
        for index in range(2)
    ]
    episodes[7].turns[0].answer = "a Needle in the answer"
    episodes[9].turns[0].answer = 'quotes ","streams":[{ and info'
    episodes[9].turns[0].info = {"streams": [1], "success": True}
    write_episodes(run.episodes, 1, "train", episodes)
    failed = played(outcome=Outcome.FAILED, failure="the needle broke")
    write_episodes(run.episodes, 2, "train", [failed])
    return run


def found(run, **given):
    wanted = Filter.of({key: str(value) for key, value in given.items()})
    return Store().find(steps_of(run.episodes, wanted.split)[0], wanted)


def test_episodes_are_paged_filtered_sorted_and_searched(stored):
    first = found(stored, step=1)
    assert (len(first.entries), first.matching) == (PAGE, 60)
    assert [len(found(stored, step=1, page=page).entries) for page in range(4)] == [25, 25, 10, 0]
    assert [one.index for one in found(stored, step=1, group=3).entries] == [0, 1]
    best = found(stored, step=1, order="best first").entries[0]
    assert (best.group, best.index, best.total, best.ending, best.tokens) == (29, 1, 29.0, "success", 3)
    assert found(stored, step=1, ending="success").matching == 30
    assert found(stored, step=1, least=10, most=12).matching == 3
    (needle,) = found(stored, step=1, text="needle").entries
    assert (needle.group, needle.index) == (3, 1)
    everywhere = {"text": "NEEDLE", "in": "all steps", "step": 1}
    assert [(one.step, one.ending) for one in found(stored, **everywhere).entries] == [(1, "success"), (2, "failed")]
    with pytest.raises(InputError, match="step 7"):
        found(stored, step=7)
    path = next(stored.episodes.glob("*1.train*"))
    path.write_bytes(path.read_bytes()[:-20])
    with pytest.raises(RunError, match=r"damaged.*delete it"):
        found(stored, step=1)


def test_a_group_shows_what_made_the_difference(tmp_path, tiny_model):
    run = RunDirectory(make_run(tmp_path, "one"))
    shutil.copytree(tiny_model, run.path / "model")
    pair = [played(rewards=(reward,), tokens=4, index=index, group=5) for index, reward in enumerate((0.0, 1.0))]
    pair[1].streams[0].ids[-1] = 77
    credit = [[np.array([0, 0, 0.5, 0.5, 0.5, 0.5], np.float32)], [np.array([0, 0, -1, -1, -1, -1], np.float32)]]
    write_episodes(run.episodes, 3, "train", pair, Advantages(credit))
    shown = group_page(run, {"step": "3", "group": "5"}, Store())
    assert "Episode 1 (return +1.000) and episode 0 (return +0.000) differ first in turn 0, after 3 common tokens" in (
        shown["parting"].sentence
    )
    pieces = [page.messages[0].pieces for _, page in shown["pages"]]
    assert [[piece.parted for piece in one] for one in pieces] == [[False, False, False, True]] * 2
    assert pieces[0][0].tooltip.startswith("token 0: advantage +0.5000 · log-probability -0.5000 (60.7%) · id 2")
    assert [css(one[0].strength) for one in pieces] == [
        "background:rgba(86,180,233,0.250)",
        "background:rgba(230,140,0,0.500)",
    ]
    assert (shown["mean"], shown["spread"]) == (0.5, 0.5)
    # The prompt of the group is shown once.
    assert [message.turn for message in shown["asked"]] == [None] * len(shown["asked"]) != []
    assert all(page.messages[0].turn == 0 for _, page in shown["pages"])
    with pytest.raises(InputError, match="no group 6"):
        group_page(run, {"step": "3", "group": "6"}, Store())


def test_tokens_show_the_credit_of_their_unit(tmp_path, tiny_model):
    run = RunDirectory(make_run(tmp_path, "one"))
    shutil.copytree(tiny_model, run.path / "model")
    units = UnitRewards(Spans(np.array([0, 1, 4]), np.array([True, True])), np.array([0.25, -0.5]), 1.0, 0.1)
    write_episodes(run.episodes, 1, "train", [played(tokens=4), played(tokens=4, group=1)], None, [units, None])
    shown = group_page(run, {"step": "1", "group": "0", "tint": "unit credit"}, Store())
    rows = shown["pages"][0][1].messages[1].units
    assert [(row.number, row.credit, row.tokens) for row in rows] == [("1", "+0.250", 1), ("2", "-0.500", 3)]
    tokens = [piece for row in rows for piece in row.pieces]
    assert ["unit credit +0.2500" in one.tooltip for one in tokens] == [True, False, False, False]
    assert [one.strength for one in tokens] == [0.5, -1.0, -1.0, -1.0]
    without = group_page(run, {"step": "1", "group": "1", "tint": "unit credit"}, Store())
    assert "unit credit" not in without["tints"]
    assert without["tint"] == "log-probability"


def test_runs_are_compared_by_curves_and_by_pairs(tmp_path):
    paths = [make_run(tmp_path, f"a{seed}", paid=lambda step, seed=seed: step * seed, seed=seed) for seed in (1, 2)]
    paths.append(make_run(tmp_path, "b", optimizer={"learning_rate": 0.125}))
    charts = {chart["title"]: chart for chart in charts_of_runs(open_sources(paths))}
    group, alone = charts["Return, training episodes"]["curves"]
    assert group["label"] == "a, mean of n = 2 seeds"
    assert group["y"] == pytest.approx([1.5, 3.0, 4.5, 6.0])
    assert group["low"] == group["high"] == [None] * 4, "two seeds are too few"
    assert (alone["label"], alone["y"]) == ("b", [1.0, 2.0, 3.0, 4.0])
    with pytest.raises(PosttrainError):
        paired(open_sources(paths))  # no stored final episodes
    for path in paths:
        shift = path.name.startswith("a")
        episodes = [played(seed=seed, rewards=(float(seed % 3 + shift),)) for seed in range(20)]
        write_episodes(RunDirectory(path).episodes, 4, "final", episodes)
    compared = paired(open_sources(paths))
    assert compared["sentence"]
    assert [row[0] for row in compared["table"].rows]
