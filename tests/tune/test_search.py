"""Studies on simulated runs: trials, chained groups, pruning and limits."""

import re

import optuna
import pytest
import yaml
from optuna.trial import TrialState

from posttrain.recipe.compose import load_recipe

from . import studies

GROUPS = [
    {"name": "one", "grid": {"rollout.groups_per_step": [2, 4], "rollout.episodes_per_group": [2, 4, 6]}},
    {"name": "two", "grid": {"optimizer.learning_rate": [1e-5, 1e-4, 1e-3]}},
]


@pytest.fixture
def begun(monkeypatch):
    return studies.stand_in(monkeypatch)


def report(folder):
    return (folder / "runs/s/report.md").read_text()


def best(folder):
    return yaml.safe_load((folder / "runs/s/best.yaml").read_text())


def test_the_same_seed_makes_the_same_trials(begun, tmp_path):
    for name, seed in (("a", 1), ("b", 1), ("c", 2)):
        (tmp_path / name).mkdir()
        assert studies.tune(tmp_path / name, sampler={"seed": seed, "startup_trials": 2}) == 0
    a, b, c = (studies.summary(tmp_path / name) for name in "abc")
    assert a == b
    assert len(a) == 6
    assert not {t[2]["optimizer.learning_rate"] for t in a} & {t[2]["optimizer.learning_rate"] for t in c}
    assert len({t[2]["optimizer.learning_rate"] for t in a}) == 6


def test_the_search_finds_the_optimum_and_every_trial_is_a_run_with_its_recipe(begun, tmp_path):
    assert studies.tune(tmp_path, trials=20) == 0
    found = best(tmp_path)
    assert 1e-5 < found["optimizer"]["learning_rate"] < 1e-3
    assert found["rollout"]["episodes_per_group"] in (4, 5, 6)
    assert set(found) == {"optimizer", "rollout"}
    recipe = load_recipe([str(tmp_path / "runs/s/best.yaml")], [], "rl")
    finished = [t for t in studies.trials(tmp_path) if t.state == TrialState.COMPLETE]
    winner = max(finished, key=lambda t: t.value)
    assert recipe.optimizer.learning_rate == winner.params["optimizer.learning_rate"]
    assert winner.value == pytest.approx(studies.quality(recipe))
    for trial in finished:
        recipe = load_recipe([str(tmp_path / f"runs/s/trials/{trial.number:04d}/recipe.yaml")], [], "rl")
        assert (recipe.optimizer.learning_rate, recipe.steps) == (trial.params["optimizer.learning_rate"], 4)


def test_failed_trials_keep_their_reason_and_are_not_the_end(begun, tmp_path, capsys):
    start = [{"optimizer.learning_rate": 9e-3, "rollout.episodes_per_group": 5}, {"optimizer.learning_rate": 1e-4}]
    assert studies.tune(tmp_path, start=start) == 0
    first, second, *_ = studies.trials(tmp_path)
    assert first.state == TrialState.FAIL
    assert "SIGKILL, possibly by the kernel because memory ran out" in first.user_attrs["reason"]
    assert second.params["optimizer.learning_rate"] == 1e-4
    assert second.state == TrialState.COMPLETE
    assert re.search(r"\| 0 \| failed \| – .*memory ran out", report(tmp_path))
    assert "failed, killed by SIGKILL" in capsys.readouterr().out


def test_an_invalid_combination_is_a_failed_trial(begun, tmp_path):
    search = {"credit.type": ["rloo", "reinforce"], "rollout.episodes_per_group": [1, 4]}
    start = [{"credit.type": kind, "rollout.episodes_per_group": n} for kind in search["credit.type"] for n in (1, 4)]
    assert studies.tune(tmp_path, search=search, start=start, trials=4) == 0
    states = [trial.state for trial in studies.trials(tmp_path)]
    assert states == [TrialState.FAIL, *[TrialState.COMPLETE] * 3]
    assert "compares the episodes of a group" in studies.trials(tmp_path)[0].user_attrs["reason"]
    assert begun == ["0001", "0002", "0003"]


def test_if_all_trials_fail_there_is_no_best_and_one_sentence(begun, tmp_path, capsys):
    search = {"optimizer.learning_rate": {"low": 4e-3, "high": 1e-2}}
    assert studies.tune(tmp_path, search=search, trials=3) == 1
    said = capsys.readouterr().err
    assert said.count("\n") == 1
    assert "all 3 trials failed, because: killed by SIGKILL" in said
    assert not (tmp_path / "runs/s/best.yaml").exists()
    assert report(tmp_path).count("| failed |") == 3


def test_the_best_trial_satisfies_the_limits_or_the_nearest_is_named(begun, tmp_path, capsys):
    start = [{"optimizer.learning_rate": rate, "rollout.episodes_per_group": 5} for rate in (1e-4, 2e-5, 1e-6)]

    def tune(most, name):
        objective = {"metric": "return", "direction": "maximize", "within": {"policy/kl": {"max": most}}}
        return studies.tune(tmp_path, objective=objective, start=start, trials=3, name=name)

    assert tune(0.01, "s") == 0
    # The KL of the stand-in is 100 x the learning rate x the step, 4 where the return is best.
    limited = [trial.user_attrs["limited"]["policy/kl"] for trial in studies.trials(tmp_path)]
    assert limited == pytest.approx([0.04, 0.008, 0.0004])
    assert [trial.constraints["policy/kl"] > 0 for trial in studies.trials(tmp_path)] == [True, False, False]
    assert best(tmp_path)["optimizer"]["learning_rate"] == 2e-5
    assert re.search(r"\| 0 \| finished .*exceeds its limits", report(tmp_path))
    assert tune(1e-9, "none") == 1
    said = capsys.readouterr().err
    assert "none of 3 finished trials satisfies the limits; the nearest is trial 2 (policy/kl 0.0004 where at" in said


@pytest.mark.parametrize("named", ["objective", "within"])
def test_a_missing_metric_ends_the_study_after_one_trial(named, monkeypatch, tmp_path, capsys):
    begun = studies.stand_in(monkeypatch, lambda recipe, step: {"return": 1.0, "score/update": 0.5, "score/other": 0.5})
    search = {"optimizer.learning_rate": [1e-5, 1e-4]}
    objective = {"metric": "score/updat", "direction": "maximize"}
    if named == "within":
        objective = {"metric": "return", "direction": "maximize", "within": {"rollout/score/updat": {"max": 1.0}}}
    assert studies.tune(tmp_path, search=search, objective=objective, trials=5) == 1
    said = capsys.readouterr().err
    assert begun == ["0000"]
    assert "stopped after trial 0, because no trial can be scored" in said
    if named == "objective":
        assert "its evaluations have no score/updat; they have score/update, " in said
    else:
        assert "neither evaluations nor training steps have rollout/score/updat" in said
    assert report(tmp_path).count("| failed |") == 1
    assert not (tmp_path / "runs/s/best.yaml").exists()


def test_a_trial_without_the_metric_does_not_end_the_study(monkeypatch, tmp_path):
    rates = [1e-5, 1e-4]
    begun = studies.stand_in(
        monkeypatch, lambda recipe, step: {"score/a": 0.5} if recipe.optimizer.learning_rate == rates[0] else {}
    )
    start = [{"optimizer.learning_rate": rate} for rate in rates]
    changes = {"search": {"optimizer.learning_rate": rates}, "start": start, "trials": 3}
    assert studies.tune(tmp_path, objective={"metric": "score/a", "direction": "maximize"}, **changes) == 0
    assert len(begun) == 3
    assert [trial.state.name for trial in studies.trials(tmp_path)][:2] == ["COMPLETE", "FAIL"]


def test_a_worse_trial_is_pruned(begun, tmp_path):
    pruner = {"type": "median", "startup_trials": 2}
    search = {"optimizer.learning_rate": {"low": 1e-6, "high": 1e-2, "log": True}}
    start = [{"optimizer.learning_rate": rate} for rate in (1e-4, 2e-4, 1e-6, 1.5e-4)]
    assert studies.tune(tmp_path, search=search, start=start, pruner=pruner, trials=4) == 0
    found = studies.trials(tmp_path)
    assert [trial.state.name for trial in found] == ["COMPLETE", "COMPLETE", "PRUNED", "COMPLETE"]
    assert list(found[2].intermediate_values) == [1]
    assert found[2].user_attrs["step"] == 1


def test_groups_run_their_grids_and_chain_the_best_values(begun, tmp_path):
    assert studies.tune(tmp_path, search=None, trials=None, groups=GROUPS) == 0
    found = studies.trials(tmp_path)
    assert [trial.user_attrs["group"] for trial in found] == ["one"] * 6 + ["two"] * 3
    grid = [(2, 2), (2, 4), (2, 6), (4, 2), (4, 4), (4, 6)]
    assert [(t.params["rollout.groups_per_step"], t.params["rollout.episodes_per_group"]) for t in found[:6]] == grid
    chosen = max(found[:6], key=lambda trial: (trial.value, -trial.number)).params
    assert chosen["rollout.episodes_per_group"] in (4, 6)
    for trial in found[6:]:
        assert {key: trial.params[key] for key in chosen} == chosen
    assert [trial.params["optimizer.learning_rate"] for trial in found[6:]] == [1e-5, 1e-4, 1e-3]
    assert best(tmp_path)["optimizer"]["learning_rate"] == 1e-4
    assert len(re.findall(r"^\| \d", report(tmp_path), re.M)) == 9


def test_one_group_runs_alone_with_the_best_values_of_earlier_groups(begun, tmp_path, capsys):
    alone = {"search": None, "trials": None, "groups": GROUPS}
    assert studies.tune(tmp_path, "--group", "2", **alone) == 0
    found = studies.trials(tmp_path)
    assert [trial.params for trial in found] == [{"optimizer.learning_rate": rate} for rate in (1e-5, 1e-4, 1e-3)]
    assert best(tmp_path) == yaml.safe_load((tmp_path / "runs/s/best_two.yaml").read_text())
    assert not (tmp_path / "runs/s/best_one.yaml").exists()
    # The other order, in one study: group one first, then two with the best of one.
    assert studies.tune(tmp_path, "--group", "one", "name=t", **alone) == 0
    assert {trial.user_attrs["group"] for trial in studies.trials(tmp_path, "t")} == {"one"}
    assert studies.tune(tmp_path, "--group", "two", "name=t", **alone) == 2
    assert "continue it with `--resume`" in capsys.readouterr().err
    assert studies.tune(tmp_path, "--group", "two", "--resume", "name=t", **alone) == 0
    chosen = yaml.safe_load((tmp_path / "runs/t/best_one.yaml").read_text())["rollout"]
    later = studies.trials(tmp_path, "t")[6:]
    assert [trial.params["rollout.groups_per_step"] for trial in later] == [chosen["groups_per_step"]] * 3
    ready = load_recipe([str(tmp_path / "runs/t/best_two.yaml")], ["environment.type=bandit"], "rl")
    assert (ready.optimizer.learning_rate, ready.rollout.episodes_per_group) == (1e-4, chosen["episodes_per_group"])


def test_a_group_without_successful_trials_ends_the_study_and_unfinished_ones_go_first(begun, tmp_path, capsys):
    groups = [{"name": "rates", "grid": {"optimizer.learning_rate": [4e-3, 5e-3]}}, GROUPS[0]]
    assert studies.tune(tmp_path, search=None, trials=None, groups=groups) == 1
    assert "group rates: none of its 2 trials can be chained" in capsys.readouterr().err
    assert report(tmp_path).count("| failed |") == 2
    assert not (tmp_path / "runs/s/best.yaml").exists()
    study = optuna.load_study(study_name="s", storage=f"sqlite:///{tmp_path}/runs/s/study.db")
    study.enqueue_trial({}, user_attrs={"group": "rates", "point": 9, "names": []})
    words = ("--group", "2", "--resume")
    assert studies.tune(tmp_path, *words, search=None, trials=None, groups=groups) == 2
    assert "1 trials of group rates have not ended" in capsys.readouterr().err


def test_resuming_a_finished_study_runs_nothing_and_may_add_trials(begun, tmp_path, capsys):
    assert studies.tune(tmp_path, trials=3) == 0
    begun.clear()
    before = studies.summary(tmp_path)
    assert studies.tune(tmp_path, "--resume", trials=3) == 0
    assert begun == []
    assert studies.tune(tmp_path, "--resume", "trials=5") == 0
    assert studies.summary(tmp_path)[:3] == before
    assert begun == ["0003", "0004"]
    for words, said in (
        ([], "exists; continue it with `--resume`"),
        (["--resume", "keys.steps=9"], "the recipe of the study runs/s has changed"),
        (["--resume", "search.optimizer.learning_rate.high=1e-3"], "search of the study runs/s has changed"),
        (["--resume", "name=other"], "there is no study in runs/other"),
    ):
        assert studies.tune(tmp_path, *words) == 2
        assert said in capsys.readouterr().err
