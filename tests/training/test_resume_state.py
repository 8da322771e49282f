"""Law 10 for what only some runs remember: killed where it is computed or stored, a run resumes to the same bits."""

import json
from types import SimpleNamespace

import pytest

from posttrain.distributed.tensors import read_all
from posttrain.rollout.store import episodes_file, read_episodes

from . import small
from .test_distill import values_of
from .test_ptx import ptx
from .test_text_task_rl import values as text_values


def _last_checkpoint(run):
    last = sorted((run / "checkpoints").glob("step_*"))[-1]
    critic = json.loads((last / "state.json").read_text())["checkpointables"]["critic"]
    return read_all(last / "tensors"), critic["optimizer"]["updates"]


def ppo(models, runs):
    critic = {"updates_before_policy": 1, "clip": 0.1, "lora": {"rank": 2, "dropout": 0.1}}
    critic["optimizer"] = {"learning_rate": 1e-3, "schedule": "cosine"}
    return small.recipe_values(models.tiny, runs, credit={"type": "gae"}, critic=critic)


def check_ppo(run):
    tensors, updates = _last_checkpoint(run)
    assert any(name.startswith("critic/weights/") and "lora" in name for name in tensors)
    assert updates == 8


def shared_critic(models, runs):
    critic = {"backbone": "shared", "updates_before_policy": 1, "clip": 0.1, "coefficient": 0.5}
    critic["optimizer"] = {"learning_rate": 1e-2, "schedule": "cosine"}
    model = {"path": str(models.tiny), "threads": 1, "lora": {"rank": 2, "dropout": 0.1}}
    return small.recipe_values(models.tiny, runs, credit={"type": "gae"}, critic=critic, model=model, ptx=ptx(runs))


def check_shared_critic(run):
    tensors, updates = _last_checkpoint(run)
    assert tensors["critic/weights/weight"].any()
    assert updates == 8


def distill(models, runs):
    """Steps on fixed rows included."""
    rows = runs / "rows.jsonl"
    rows.write_text("\n".join(json.dumps({"prompt": f"Task {n}", "completion": "row column"}) for n in range(6)))
    off = {"data": {"train": str(rows), "cache": str(runs / "cache"), "max_tokens": 100}}
    off |= {"share": 0.5, "rows_per_step": 4}
    loss = {"type": "jsd", "beta": 0.5, "top_k": 9}
    return values_of(models.tiny, runs, {"path": str(models.teacher)}, loss=loss, off_policy=off, steps=5)


def check_distill(run):
    assert {"teacher/off_policy" in line for line in small.lines(run, "train")} == {True, False}


def units(models, runs):
    """Units of tokens, a reward scaled by running statistics, a critic: all that a step remembers."""
    values = text_values(models.tiny, runs)
    del values["environment"]["reward"]
    values |= {"steps": 3, "evaluation": values["evaluation"] | {"every": 0}}
    values["reward"] = {"path": str(models.reward), "normalize": "running"}
    values["unit_credit"] = {"type": "loo", "segmenter": {"type": "token"}}
    values["credit"] = {"type": "gae", "gae_lambda": 0.9}
    return values | {"critic": {"optimizer": {"learning_rate": 1e-3}}}


def check_units(run):
    trained = small.lines(run, "train")
    assert [line["units/forwards"] > 0 for line in trained] == [True, True, True]
    assert len({line["units/spread"] for line in trained}) == 3
    for step in (1, 2, 3):
        stored = read_episodes(episodes_file(run / "episodes", step, "train")).units
        assert [own is not None and len(own.spans) > 1 for own in stored] == [True] * 6


def units_ahead(models, runs):
    """The reward model is asked by the thread that samples and by the one that gives credit."""
    values = units(models, runs)
    return values | {"rollout": values["rollout"] | {"async_rollouts": 1}}


def moving_reference(models, runs):
    kl = {"coefficient": 0.1, "reference": {"update_every": 3, "mix": 0.5}}
    return small.recipe_values(models.tiny, runs, kl=kl)


def check_moving_reference(run):
    assert any(name.startswith("reference/") for name in small.weights(run))


def rows_in_rl(models, runs):
    return small.recipe_values(models.tiny, runs, ptx=ptx(runs), credit={"type": "gae"})


def running_statistics(models, runs):
    values = text_values(models.tiny, runs, reward={"path": str(models.reward), "normalize": "running"})
    values["rollout"]["missing_eos_penalty"] = 0.5
    return values


def checkpoints_by_a_thread(models, runs):
    values = small.recipe_values(models.tiny, runs)
    values["checkpoint"] |= {"asynchronous": True}
    return values


STEP, SAVE = "posttrain.training.updater:Optimizer.step", "torch:save"
WITHOUT = "posttrain.training.unit_credit:UnitValuer.without"
DEATHS = [
    (ppo, "posttrain.training.critic:CriticUpdater.begin_update", 4),
    (ppo, "posttrain.training.critic:CriticLearner.estimate_values", 3),
    (ppo, STEP, 7),
    (ppo, SAVE, 3),
    (ppo, "posttrain.engines.local.engine:LocalEngine._step", 90),
    (shared_critic, STEP, 6),  # the trunk has made its update, the head has not
    (shared_critic, SAVE, 3),
    (distill, "posttrain.training.teacher:ModelScorer.score", 3),
    (distill, STEP, 5),
    (distill, "pathlib:Path.rename", 4),
    (units, WITHOUT, 2),
    (units, "posttrain.training.unit_credit:UnitCreditor.credit", 2),
    (units, "posttrain.training.unit_credit:UnitCreditor._spans", 1),
    (units, "posttrain.training.rl:write_episodes", 2),
    (units, "posttrain.training.updater:Updater.update", 3),
    (units_ahead, WITHOUT, 2),
    (moving_reference, STEP, 5),
    (rows_in_rl, "posttrain.training.rows:DataSet.batch", 6),
    (running_statistics, "posttrain.training.updater:Updater.update", 2),
    (checkpoints_by_a_thread, "posttrain.training.checkpoint:Checkpoints._seal", 3),
    (checkpoints_by_a_thread, "os:fsync", 9),
]
"""The recipe of a run, and the call before which it dies."""
QUICK = (DEATHS[0], DEATHS[7], DEATHS[10])
CHECKS = {
    ppo: check_ppo,
    shared_critic: check_shared_critic,
    distill: check_distill,
    units: check_units,
    moving_reference: check_moving_reference,
}


@pytest.fixture(scope="module")
def models(tiny_model, reward_model, teacher_model):
    return SimpleNamespace(tiny=tiny_model, reward=reward_model, teacher=teacher_model)


@pytest.fixture(scope="module")
def whole(models, tmp_path_factory):
    """The run of a recipe without interruption, made when first asked for."""
    made = {}

    def run(recipe):
        if recipe not in made:
            made[recipe] = small.finished(recipe(models, tmp_path_factory.mktemp("whole")))
        return made[recipe]

    return run


@pytest.mark.parametrize("death", small.cases(DEATHS, QUICK), ids=lambda death: f"{death[0].__name__} {death[1]}")
def test_it_resumes_to_the_same_bits_after_a_kill_there(death, models, tmp_path, whole):
    recipe, *place = death
    values = recipe(models, tmp_path)
    assert small.killed(values, tuple(place)) == [-9]
    run = small.finished(values)
    small.assert_same(run, whole(recipe))
    CHECKS.get(recipe, lambda run: None)(run)
