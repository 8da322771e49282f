"""Law 10 with credit of units: killed where units are found or valued, a run resumes to the same bits."""

import pytest

from posttrain.models.reward import RewardModel
from posttrain.recipe.model import ModelRecipe
from posttrain.rollout.store import episodes_file, read_episodes

from . import small
from .test_text_task_rl import values

PLACES = {
    "credit": ("posttrain.training.unit_credit:UnitCreditor.credit", 2),
    "coalitions": ("posttrain.training.unit_credit:UnitValuer.coalitions", 2),
    "segments": ("posttrain.training.unit_credit:UnitCreditor._spans", 1),
    "store": ("posttrain.training.rl:write_episodes", 2),
    "update": ("posttrain.training.updater:Updater.update", 3),
}
QUICK = ("coalitions",)
"""Places that are not slow tests."""


def _values(tiny, folder, reward_model):
    """Units of tokens, a reward scaled by running statistics, a critic: all that a step remembers."""
    own = values(tiny, folder)
    del own["environment"]["reward"]
    return own | {
        "steps": 3,
        "reward": {"path": str(reward_model), "normalize": "running"},
        "credit": {"type": "gae", "gae_lambda": 0.9},
        "critic": {"optimizer": {"learning_rate": 1e-3}},
        "unit_credit": {"type": "loo", "segmenter": {"type": "token"}},
        "evaluation": own["evaluation"] | {"every": 0},
    }


@pytest.fixture(scope="module")
def reward_model(tiny_model, tmp_path_factory):
    directory = tmp_path_factory.mktemp("reward") / "model"
    RewardModel(ModelRecipe(path=str(tiny_model)), seed=5).export(directory)
    return directory


@pytest.fixture(scope="module")
def uninterrupted(tiny_model, reward_model, tmp_path_factory):
    runs = tmp_path_factory.mktemp("whole")
    assert small.run(_values(tiny_model, runs, reward_model)) == 0, (runs / "log.txt").read_text()
    return runs / "text"


@pytest.mark.parametrize(
    "place", [pytest.param(place, marks=[] if place in QUICK else pytest.mark.slow) for place in PLACES]
)
def test_it_resumes_to_the_same_bits_after_a_kill_there(place, tiny_model, reward_model, tmp_path, uninterrupted):
    own = _values(tiny_model, tmp_path, reward_model)
    assert small.run(own, die_at=PLACES[place]) == -9
    assert small.run(own, resume=(tmp_path / "text").exists()) == 0, (tmp_path / "log.txt").read_text()
    small.assert_same(tmp_path / "text", uninterrupted)


@pytest.mark.slow
def test_asynchronous_rollouts_too(tiny_model, reward_model, tmp_path):
    """The reward model is asked by the thread that samples and by the one that gives credit."""

    def own(runs):
        runs.mkdir()
        values = _values(tiny_model, runs, reward_model)
        return values | {"rollout": values["rollout"] | {"async_rollouts": 1}}

    assert small.run(own(tmp_path / "whole")) == 0, (tmp_path / "whole" / "log.txt").read_text()
    killed = own(tmp_path / "killed")
    assert small.run(killed, die_at=("posttrain.training.unit_credit:UnitValuer.coalitions", 2)) == -9
    assert small.run(killed, resume=True) == 0, (tmp_path / "killed" / "log.txt").read_text()
    runs = [tmp_path / name / "text" for name in ("killed", "whole")]
    for what in (small.weights, small.metrics, small.episodes):
        assert what(runs[0]) == what(runs[1])


def test_the_run_that_is_compared_has_credit_of_units(uninterrupted):
    trained = [line for line in small.metrics(uninterrupted) if line["kind"] == "train"]
    assert [line["units/forwards"] > 0 for line in trained] == [True, True, True]
    assert len({line["units/spread"] for line in trained}) == 3
    assert all("time/units" not in line for line in trained)
    for step in (1, 2, 3):
        units = read_episodes(episodes_file(uninterrupted / "episodes", step, "train")).units
        assert [own is not None and len(own.spans) > 1 for own in units] == [True] * 6
