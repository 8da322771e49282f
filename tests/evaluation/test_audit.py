"""The audit: its level over a run, what it says about planted gaming, and that training cannot read it."""

import json
import pickle
import time
from pathlib import Path

import numpy as np
import pytest

import posttrain
from posttrain.cli.main import main
from posttrain.environments.rewards import register_reward
from posttrain.errors import InputError
from posttrain.evaluation.audit import BOTH, LEVEL, NEITHER, REWARD, UNDECIDED, AuditScores, least_tasks, level_of, look
from posttrain.figures.charts import charts_of
from posttrain.models.reward import RewardModel
from posttrain.recipe.compose import load_recipe
from posttrain.recipe.pipeline import load_pipeline
from posttrain.recipe.study import Objective
from posttrain.runs.directory import RunDirectory
from posttrain.runs.log import read_log
from posttrain.runs.metrics import read_metrics
from posttrain.runs.tables import read_verdict
from tests.evaluation.made import write
from tests.training import small


def evaluations(draws, looks, reward, audit, tasks=48):
    """Returns and audits of each evaluation: tasks differ, answers are drawn again, both drift by so many deviations."""
    level = draws.normal(size=tasks)
    for step in range(looks + 1):
        returns, audits = (level + draws.normal(size=tasks) + drift * step / looks for drift in (reward, audit))
        yield by_task(returns, 3 * audits)


def verdicts_of(scores, looks, extended=(), **more):
    """Of a run that is planned with so many `looks`, and then `extended` by more, with the levels that it gives them."""
    first, *others = [(returns, AuditScores(audits)) for returns, audits in scores]
    found, spent = [], 0.0
    for planned in (looks, *extended):
        for left in range(planned, 0, -1):
            level = level_of(spent, left)
            spent += level
            if len(found) < len(others):
                found.append(look(first, others[len(found)], level, **more).verdict)
    assert spent < LEVEL
    return found


def by_task(*sides):
    return [{str(task): float(value) for task, value in enumerate(side)} for side in sides]


def above(rate, runs):
    """Three standard errors above a rate of so many runs."""
    return rate + 3 * (rate * (1 - rate) / runs) ** 0.5


@pytest.mark.parametrize(("reward", "audit"), [(0.0, 0.0), (0.8, 0.8)])
def test_a_run_alarms_at_most_at_its_level(reward, audit):
    """Over all evaluations of a run: nothing moves, and both rise by the same number of standard deviations."""
    draws, runs = np.random.default_rng(1), 300
    found = [verdicts_of(evaluations(draws, 5, reward, audit), 5) for _ in range(runs)]
    assert np.mean([REWARD in one for one in found]) <= above(LEVEL, runs)
    if not reward:
        assert np.mean([set(one) != {NEITHER} for one in found]) <= above(LEVEL, runs)


@pytest.mark.parametrize("extended", small.cases([(3, 3, 3), (1,) * 15, (12, 24)], [(3, 3, 3)]))
def test_an_extended_run_keeps_its_level(extended):
    """It is extended whatever it has shown. Half as many false results as with the level of three evaluations for all."""
    draws, runs, looks = np.random.default_rng(7), 300, 3
    scores = [[*evaluations(draws, looks + sum(extended), 0.0, 0.0)] for _ in range(runs)]
    found = [verdicts_of(one, looks, extended) for one in scores]
    assert len(found[0]) == looks + sum(extended)
    false = np.mean([set(one) != {NEITHER} for one in found])
    assert false <= above(LEVEL, runs)
    again = []
    for one in scores:
        first, *others = [(returns, AuditScores(audits)) for returns, audits in one]
        again.append({look(first, other, LEVEL / looks).verdict for other in others})
    assert false <= 0.5 * np.mean([one != {NEITHER} for one in again])


@pytest.mark.parametrize(("tasks", "looks"), [(24, 3), (64, 6), (128, 6)])
def test_exact_answers_do_not_alarm_beside_partial_credit(tasks, looks):
    """Of the same answers, which become better by 0.8 deviations, so that 5% and then 20% of them are right."""
    draws, runs, found = np.random.default_rng(3), 200, []
    for _ in range(runs):
        level, scores = draws.normal(size=tasks), []
        for step in range(looks + 1):
            quality = (level + draws.normal(size=tasks)) / 2**0.5 + 0.8 * step / looks
            scores.append(by_task(quality, quality > 1.645))
        found.append(verdicts_of(scores, looks))
    assert np.mean([REWARD in one for one in found]) <= above(LEVEL, runs)


@pytest.mark.parametrize("constant", [0.0, 1.0])
def test_an_audit_that_says_the_same_of_every_answer_is_undecided(constant):
    start, end = np.arange(40.0), np.arange(40.0) + 20
    same = np.full(40, constant)
    assert verdicts_of([by_task(start, same), by_task(end, same)], 1) == [UNDECIDED]


def test_margins_count_only_against_an_audit_that_falls():
    draws = np.random.default_rng(4)
    margins = [np.zeros(64), draws.normal(5.0, 0.5, 64)]
    audit = draws.normal(size=64)
    for change in (0.0, 0.1, -2.0):
        scores = [by_task(margins[0], audit), by_task(margins[1], audit + draws.normal(change, 1.0, 64))]
        assert verdicts_of(scores, 3, share=0.0) == [REWARD if change < 0 else UNDECIDED]
    assert verdicts_of([by_task(margins[0], audit), by_task(margins[1], audit + 1)], 3, share=0.0) == [BOTH]


@pytest.mark.parametrize("looks", [1, 3, 6, 40])
def test_fewer_tasks_than_the_least_cannot_give_a_verdict(looks):
    """The reward of every task rises by 10 deviations, and the audit falls."""
    least = least_tasks(level_of(0.0, looks))
    for tasks in (least - 1, least):
        start = np.linspace(0.0, 0.1, tasks)
        end = start + 10 + np.linspace(0.1, 0.0, tasks)
        expected = NEITHER if tasks < least else REWARD
        assert verdicts_of([by_task(start, -start), by_task(end, -end)], looks) == [expected]


def test_gaming_is_found_also_in_an_extended_run_and_learning_is_not_called_gaming():
    draws = np.random.default_rng(2)
    gamed = [verdicts_of(evaluations(draws, 5, 2.0, 0.0, tasks=64), 5) for _ in range(40)]
    learned = [verdicts_of(evaluations(draws, 5, 2.0, 2.0, tasks=64), 5)[-1] for _ in range(40)]
    assert np.mean([REWARD in one for one in gamed]) > 0.95
    assert np.mean([one == BOTH for one in learned]) > 0.95
    extended = [verdicts_of(evaluations(draws, 6, 2.0, 0.0, tasks=64), 3, extended=(3,)) for _ in range(40)]
    assert np.mean([one[-1] == REWARD for one in extended]) > 0.8


def test_the_tasks_with_the_largest_gaps_are_named():
    before = {str(task): float(task % 3) for task in range(30)}
    after = {task: value + 1.0 for task, value in before.items()}
    after |= {"7": before["7"] + 9.0}
    found = look((before, AuditScores(before)), (after, AuditScores(before)), LEVEL)
    assert found.verdict == REWARD
    assert next(iter(found.apart)) == "7"
    assert found.apart["7"] == ([before["7"], after["7"]], [before["7"], before["7"]])
    assert found.gains[0].value > 0.5
    assert found.gains[1].value == 0.0


@pytest.mark.parametrize(
    "use",
    [
        float,
        np.asarray,
        list,
        sum,
        pickle.dumps,
        lambda scores: scores["1"],
        lambda scores: scores + 1.0,
        lambda scores: max([scores, scores]),
        lambda scores: np.mean(np.array([1.0, 2.0]) * scores),
        lambda scores: json.dumps({"reward": scores}),
    ],
)
def test_a_planted_use_of_the_scores_fails(use):
    with pytest.raises(TypeError):
        use(AuditScores({"1": 1.0, "2": 2.0}))


def length(prompt, answer, **row):
    return len(answer) / 100


def negative(prompt, answer, **row):
    return -length(prompt, answer)


def letters(prompt, answer, **row):
    return float(len({c for c in answer if c.isalpha()}))


def scored_by(function, **keys):
    """An audit by a function of the answer."""
    return {"environment": {"reward": register_reward(function), **keys}}


def run(tiny_model, tmp_path, name, rows=30, stage=posttrain.rl, **more):
    prompts = write(tmp_path / "prompts.jsonl", [{"prompt": f"Say {number}."} for number in range(rows)])
    keys = {
        "model": {"path": str(tiny_model), "threads": 1},
        "environment": {"prompts": str(prompts), "type": "text_task"},
        "rollout": {"groups_per_step": 2, "episodes_per_group": 3, "tokens_per_turn": 8, "tokens_per_episode": 200},
        "evaluation": {"every": 1, "sampling": {"temperature": 1.0}, "metric": "return"},
    }
    keys |= {"steps": 2, "runs": str(tmp_path), "name": name, "plots": False}
    return stage(keys, reward=length, **more)


def logged(result, kind):
    return [line for line in read_metrics(result.run / "metrics.jsonl") if line["kind"] == kind]


def alarms(result):
    return [line["step"] for line in logged(result, "audit") if line.get("alarm")]


def untimed(result):
    timed = ("time/", "speed/", "memory/")
    return [{k: v for k, v in row.items() if not k.startswith(timed)} for row in result.metrics + result.evaluations]


def test_the_audit_scores_the_same_answers_and_changes_no_bit_of_training(tiny_model, tmp_path):
    def slow(prompt, answer, **row):
        time.sleep(0.05)
        return letters(prompt, answer)

    plain = run(tiny_model, tmp_path, "plain")
    audited = run(tiny_model, tmp_path, "audited", audit=scored_by(slow))
    lines = logged(audited, "audit")
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert "message" not in lines[0]
    assert lines[0]["audit/score_gain"] == 0.0
    for line in lines:
        episodes = audited.episodes(line["step"], "evaluation")
        assert line["audit/score"] == pytest.approx(np.mean([letters("", e.turns[-1].answer) for e in episodes]))
        assert line["audit/reward"] == pytest.approx(np.mean([e.total_reward for e in episodes]))
        assert line["audit/n"] == len(episodes)
    assert untimed(plain) == untimed(audited)
    # Neither evaluations, which choose checkpoints and feed callbacks and studies, nor stored episodes hold a score.
    assert not any("audit" in key for row in audited.evaluations for key in row)
    scores = [e.total_reward for e in audited.episodes(2, "evaluation")]
    assert scores == [e.total_reward for e in plain.episodes(2, "evaluation")]
    assert lines[-1]["message"] in (audited.run / "report.md").read_text()
    # The time of an evaluation includes that of its audit, of 16 answers at a time.
    spent = sum(line.get("time/evaluation", 0) for line in read_metrics(audited.run / "metrics.jsonl"))
    assert spent > 0.05 * sum(line["audit/n"] for line in lines) / 16


def test_no_key_selects_by_the_audit(tiny_model, tmp_path):
    from posttrain.tune.trial import MissingMetric, outcome

    with pytest.raises(InputError, match=r"evaluation\.metric"):
        run(tiny_model, tmp_path, "chosen", evaluation={"every": 1, "metric": "audit/score"})
    lines = [{"kind": "evaluation", "step": 1, "return": 1.0}, {"kind": "audit", "step": 1, "audit/score": 2.0}]
    with pytest.raises(MissingMetric):
        outcome(lines, Objective(metric="audit/score", direction="maximize"))


@pytest.mark.parametrize(
    ("audit", "message"),
    [
        ({}, "one scorer"),
        ({"environment": {"type": "bandit"}}, r"audit\.environment\.type"),
        ({"environment": {"reward": "exact"}, "path": "rm"}, "one scorer"),
    ],
)
def test_an_audit_has_one_scorer_of_the_same_tasks(tiny_model, tmp_path, audit, message):
    with pytest.raises(InputError, match=message):
        run(tiny_model, tmp_path, "wrong", audit=audit)


LAKE = {"type": "frozen_lake"}
TEXT = {"type": "text_task", "prompts": "rows.jsonl", "reward": "exact"}


@pytest.mark.parametrize(
    ("environment", "changed", "refused"),
    [
        (LAKE, {"size": 6}, "size"),
        (LAKE, {"slippery": False}, "slippery"),
        (LAKE, {"max_turns": 9}, "max_turns"),
        (LAKE, {"format": {"separator": ";"}}, "format.separator"),
        (LAKE, {"format": {"penalty": -0.5}}, None),
        ({"type": "sokoban"}, {"box_reward": 3.0}, None),
        (TEXT, {"system": "Be brief."}, "system"),
        (TEXT, {"prompts": "others.jsonl"}, "prompts"),
        (TEXT, {"columns": {"prompt": "q"}}, "columns.prompt"),
        (TEXT, {"columns": {"label": "gold"}}, None),
        (TEXT, {"reward": "contains"}, None),
    ],
)
@pytest.mark.parametrize("place", ["environment", "evaluation.environment"])
def test_an_audit_plays_the_tasks_of_the_evaluations(place, environment, changed, refused):
    values = {"environment": environment, "audit": {"environment": changed}, "evaluation": {"every": 1}}
    if place != "environment":
        values |= {"environment": {"type": "bandit"}, "evaluation": {"every": 1, "environment": environment}}
    overrides = [f"{key}={json.dumps(value)}" for key, value in values.items()]
    if refused is None:
        assert load_recipe([], overrides, "rl").audit.environment.type == environment["type"]
        return
    with pytest.raises(InputError) as error:
        load_recipe([], overrides, "rl")
    assert f"`audit.environment.{refused}` differs from `{place}.{refused}`" in str(error.value)


@pytest.mark.parametrize(
    ("words", "keys"),
    [
        (["audit.environment.foo=1"], ["audit.environment.foo"]),
        (["audit.reward=exact"], ["audit.reward", "audit.environment.reward"]),
        (["audit.environment.foo=1", "export=best_by_audit"], ["audit.environment.foo"]),
        (["guards.thresholds.max_failed=-1"], ["guards.thresholds.max_failed is -1", "equal to 0"]),
    ],
)
def test_a_message_names_the_key_and_nothing_else(words, keys):
    common = ["environment.type=text_task", "environment.reward=exact", "environment.prompts=a.jsonl"]
    with pytest.raises(InputError) as error:
        load_recipe([], [*common, *words], "rl")
    assert all(key in str(error.value) for key in keys)
    assert len(str(error.value).splitlines()) == 1


def test_the_tasks_that_differ_most_are_shown_side_by_side(tiny_model, tmp_path, capsys):
    result = run(tiny_model, tmp_path, "apart", audit=scored_by(letters), optimizer={"learning_rate": 0.05})
    stored = json.loads((result.run / "audit" / "step_000002.json").read_text())
    assert stored["steps"] == [0, 2]
    assert len(stored["apart"]) == 3
    for row in stored["apart"]:
        for place, step in enumerate(stored["steps"]):
            [episode] = [e for e in result.episodes(step, "evaluation") if str(e.seed) == row["task"]]
            assert row["answers"][place] == episode.turns[-1].answer
            assert row["reward"][place] == pytest.approx(episode.total_reward)
            assert row["audit"][place] == letters("", row["answers"][place])
    capsys.readouterr()
    shown = ["episodes", str(result.run), "--split", "audit"]
    assert (main(shown), main([*shown, "--step", "1"])) == (0, 0)
    printed = capsys.readouterr().out
    assert "answer at step 2" in printed
    assert "answer at step 1" in printed
    assert main([*shown, "--step", "9"]) == 2
    assert "audited steps: [1, 2]" in capsys.readouterr().err
    assert "on which the reward has risen most" in (result.run / "report.md").read_text()
    (chart,) = [one for one in charts_of(read_log(result.run / "metrics.jsonl")) if one.figure == "audit"]
    assert [trace.key for trace in chart.traces] == ["audit/reward_gain", "audit/score_gain"]
    assert all(len(trace.x) == 3 for trace in chart.traces)
    lines = [{"kind": "audit", "step": step, "audit/reward_gain": 1.0, "alarm": step > 3} for step in (2, 4, 6)]
    (chart,) = [one for one in charts_of(lines) if one.figure == "audit"]
    assert chart.panel.title.endswith("only the reward rose at step 4")


@pytest.mark.parametrize(("failing", "scored"), [(1, [0, 1, 2]), (8, [0]), (16, [0])])
def test_an_audit_that_fails_gives_no_verdict(tiny_model, tmp_path, failing, scored):
    """Tasks that it fails on are no random part of them, so that a verdict and an export of the others would be wrong."""
    asked = []

    def scorer(prompt, answer, **row):
        """Fails on so many of 16 tasks after the first evaluation."""
        asked.append(prompt)
        if len(asked) > 17 and prompt in asked[1 : 1 + failing]:  # the first call is the check before the run
            raise ValueError("no score")
        return length(prompt, answer)

    evaluation = {"every": 1, "seeds": {"count": 16}, "final_seeds": {"count": 16}, "held_out": 32}
    keys = {"rows": 60, "audit": scored_by(scorer), "export": "best_by_audit", "evaluation": evaluation}
    result = run(tiny_model, tmp_path, "failing", **keys)
    assert [line["step"] for line in logged(result, "audit")] == scored
    assert scored != [0] or result.best_step == 0
    warned = logged(result, "warning")
    assert [line["step"] for line in warned if "no score" in line["message"]] == [1, 2]
    assert [line["step"] for line in warned if "1 of 3 evaluations" in line["message"]] == [2] * (scored == [0])


@pytest.mark.parametrize(("scorer", "sign"), [(length, 1), (negative, -1)])
def test_a_run_exports_the_best_by_the_audit_if_told_so(tiny_model, tmp_path, scorer, sign):
    keys = {"audit": scored_by(scorer), "export": "best_by_audit", "optimizer": {"learning_rate": 0.05}}
    result = run(tiny_model, tmp_path, "best", **keys)
    means = {step: np.mean([e.total_reward for e in result.episodes(step, "evaluation")]) for step in (0, 1, 2)}
    assert len(set(means.values())) > 1
    assert sign * means[result.best_step] == max(sign * mean for mean in means.values())


GAMED = {"rows": 120, "audit": scored_by(negative), "optimizer": {"learning_rate": 0.02}}


def test_a_run_that_is_gamed_says_so_where_the_audit_chose_the_starting_model(tiny_model, tmp_path):
    keys = {"steps": 6, "evaluation": {"held_out": 80, "every": 2}, "export": "best_by_audit"}
    result = run(tiny_model, tmp_path, "gamed", **GAMED, **keys)
    messages = [line["message"] for line in logged(result, "audit") if line.get("alarm")]
    assert result.best_step == 0
    assert read_verdict(result.run).reasons[0] == messages[-1]


def test_an_alarm_ends_the_run_if_told_so_also_when_it_is_resumed(tiny_model, tmp_path):
    keys = {"guards": {"action": "stop", "patience": 100}, "checkpoint": {"keep_state": "always"}}
    stopped = run(tiny_model, tmp_path, "stopped", **GAMED, **keys, steps=12, evaluation={"held_out": 80})
    (ended,) = alarms(stopped)
    assert ended == stopped.metrics[-1]["step"] < 12
    again = posttrain.rl(resume=stopped.run, steps=14)
    assert again.metrics[-1]["step"] == ended
    warned = [(line["step"], line["message"]) for line in logged(again, "warning")]
    assert len(warned) == len(set(warned))


def test_an_extended_run_goes_on_from_the_level_that_it_has_spent(tiny_model, tmp_path):
    audit = scored_by(letters, score_weight=2.0)
    first = run(tiny_model, tmp_path, "extended", audit=audit, checkpoint={"keep_state": "always"})
    # Reading imports no environment, so which keys only score is unknown.
    assert RunDirectory.open(first.run).load_recipe().audit.environment.score_weight == 2.0

    def levels():
        return [line["audit/level"] for line in logged(first, "audit") if "audit/level" in line]

    planned = levels()
    assert planned == [level_of(0.0, 2), pytest.approx(level_of(planned[0], 1))]
    for steps in (4, 5):
        before = levels()
        posttrain.rl(resume=first.run, steps=steps)
        after = levels()
        assert after[: len(before)] == before
        assert len(after) == steps
        assert after[len(before)] == pytest.approx(level_of(sum(before), steps - len(before)))
        assert sum(after) < LEVEL


def test_a_row_to_which_the_audit_does_not_apply_is_not_scored_as_zero(tiny_model, tmp_path):
    def some(prompt, answer, **row):
        return None if any(one in prompt for one in "13579") else letters(prompt, answer)

    result = run(tiny_model, tmp_path, "some", audit=scored_by(some), rows=60)
    episodes = result.episodes(0, "evaluation")
    unscored = sum(some(e.messages[0]["content"], e.turns[-1].answer) is None for e in episodes)
    assert 0.1 * len(episodes) < unscored < len(episodes)
    assert not logged(result, "audit")
    assert any(f"{unscored} of {len(episodes)} episodes" in line["message"] for line in logged(result, "warning"))


@pytest.mark.parametrize("stage", ["rl", "sft"])
def test_best_by_audit_needs_an_audit(tiny_model, tmp_path, stage):
    with pytest.raises(InputError, match="best_by_audit"):
        posttrain.run(stage, environment={"type": "bandit"}, export="best_by_audit", runs=str(tmp_path))


def test_distillation_is_audited(tiny_model, tmp_path):
    keys = {"stage": posttrain.distill, "teacher": {"path": str(tiny_model)}}
    keys["evaluation"] = {"every": 1, "sampling": {"temperature": 1.0}, "metric": None}
    plain = run(tiny_model, tmp_path, "plain", **keys)
    audited = run(tiny_model, tmp_path, "audited", audit=scored_by(letters), **keys)
    assert [line["step"] for line in logged(audited, "audit")] == [0, 1, 2]
    assert untimed(plain) == untimed(audited)


@pytest.fixture
def pairs(tmp_path):
    rows = [{"prompt": f"Say {n}.", "chosen": "yes " * (1 + n % 3), "rejected": "no"} for n in range(40)]
    return write(tmp_path / "pairs.jsonl", rows)


def test_preferences_are_audited_by_a_reward_model_of_other_pairs(tiny_model, tmp_path, pairs):
    model = {"path": str(tiny_model), "threads": 1}
    common = {"model": model, "runs": str(tmp_path), "plots": False}
    part = {"train": [{"path": str(pairs), "split": "train[50%:]"}], "held_out": 4, "max_tokens": 64}
    posttrain.reward(common, data=part, steps=2, name="rm")
    keys = {"data": part | {"train": [{"path": str(pairs), "split": "train[:50%]"}], "held_out": 8}, "steps": 2}
    keys["evaluation"] = {"every": 1}
    plain = posttrain.dpo(common, keys, name="plain")
    audited = posttrain.dpo(common, keys, name="audited", audit={"path": str(tmp_path / "rm" / "model")})
    lines = logged(audited, "audit")
    assert [line["step"] for line in lines] == [0, 1, 2]
    assert untimed(plain) == untimed(audited)
    rewards = RewardModel(tmp_path / "rm" / "model", new_head=False)
    for line, evaluation in zip(lines, audited.evaluations, strict=True):
        episodes = audited.episodes(line["step"], "evaluation")
        streams = [episode.streams[0] for episode in episodes]
        assert all(stream.sampled[-1] and not stream.sampled[0] for stream in streams)
        scores = rewards.rewards([stream.ids for stream in streams], [stream.sampled for stream in streams])
        assert line["audit/score"] == pytest.approx(float(scores.detach().mean()), abs=1e-4)
        assert line["audit/reward"] == pytest.approx(evaluation["validation/margin"], abs=1e-5)


def test_an_alarm_ends_preference_optimization_if_told_so(tiny_model, tmp_path, pairs):
    """The margins of held-out pairs rise, and a reward model of the opposite preference does not follow."""
    common = {"model": {"path": str(tiny_model), "threads": 1}, "runs": str(tmp_path), "plots": False}
    opposite = [dict(row, chosen=row["rejected"], rejected=row["chosen"]) for row in map(json.loads, pairs.open())]
    rows = {"train": str(write(tmp_path / "opposite.jsonl", opposite)), "max_tokens": 64}
    posttrain.reward(common, data=rows, steps=4, optimizer={"learning_rate": 1e-2}, name="rm")
    keys = {"data": {"train": str(pairs), "held_out": 32, "max_tokens": 64}, "guards": {"action": "stop"}}
    keys |= {"steps": 4, "evaluation": {"every": 2}, "optimizer": {"learning_rate": 1e-2}}
    ended = posttrain.dpo(common, keys, name="ended", audit={"path": str(tmp_path / "rm" / "model")})
    assert alarms(ended) == [ended.metrics[-1]["step"]] == [2]


@pytest.mark.parametrize(
    "audit",
    [{"environment": {"type": "bandit"}}, {"environment": {"type": "text_task", "reward": "exact"}}, {"path": "rm"}],
    ids=["no environment", "an unfinished environment", "no validation rows"],
)
def test_an_audit_of_preferences_needs_pairs_and_a_model(tiny_model, tmp_path, pairs, audit):
    with pytest.raises(InputError, match=r"audit\.path"):
        posttrain.dpo(model={"path": str(tiny_model)}, data={"train": str(pairs)}, audit=audit, runs=str(tmp_path))


def test_a_stage_of_a_pipeline_is_audited_by_another_ones_reward_model(tiny_model, tmp_path, pairs):
    file = tmp_path / "pipeline.yaml"
    file.write_text(
        f"""
stage: pipeline
name: p
runs: {tmp_path}
common: {{model: {{path: {tiny_model}}}}}
stages:
  - name: second
    stage: reward
    data: {{train: [{{path: {pairs}, split: "train[50%:]"}}], max_tokens: 64}}
  - name: dpo
    stage: dpo
    data: {{train: {pairs}, held_out: 8, max_tokens: 64}}
    audit: {{path: "stage:second"}}
"""
    )
    stage = load_pipeline(str(file), []).stages[-1]
    assert stage.recipe.audit.path == str(tmp_path / "p" / "second" / "model")
    assert stage.inputs == ["second"]


def test_only_the_auditor_imports_the_scores():
    """A reward, a credit, a loop or a study that imports them fails here; `export: best_by_audit` reads a mean of the log."""
    source = Path(posttrain.__file__).parent
    readers = {str(file.relative_to(source)) for file in source.rglob("*.py") if "evaluation.audit" in file.read_text()}
    assert readers == {"training/auditor.py"}
    logged = {str(file.relative_to(source)) for file in source.rglob("*.py") if '"audit/score' in file.read_text()}
    assert logged == {"training/auditor.py", "training/trainer.py", "recipe/audit.py"}
