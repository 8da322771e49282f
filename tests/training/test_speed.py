"""The measured speed of a machine, and the steps of a run that fit into its time."""

import io

import numpy as np
import pytest
from pydantic import TypeAdapter
from rich.console import Console

import posttrain
from posttrain import doctor
from posttrain.episode import RewardStreams
from posttrain.errors import RunError
from posttrain.recipe.stages import Recipe
from posttrain.runs.metrics import read_metrics
from posttrain.stages import run_stage
from posttrain.training import speed
from posttrain.training.learner import Learner
from posttrain.training.speed import Cost, Speed, cost, expected_seconds, steps_that_fit

from . import small


def recipe(tiny, runs, **changes):
    return TypeAdapter(Recipe).validate_python(small.recipe_values(tiny, runs, **changes))


def train(recipe, resume=False):
    """Run the recipe in this process; returns the run and its output."""
    console = Console(file=io.StringIO(), width=200)
    run = run_stage(recipe, resume=resume, overwrite=not resume, console=console)
    return run, console.file.getvalue()


def of_speed(sampling, training=Cost(0.0, 0.0)):
    return Speed("float32", 1, 8, 2.0, sampling, training, tokens=1.0)


# -- the measurement --------------------------------------------------------------------------------------------------


@pytest.fixture
def updates(monkeypatch):
    """The episodes of every update that changed the weights, and whether each of their sampled tokens had credit."""
    original, done = Learner.update, []

    def update(learner, episodes, credit):
        version = learner.policy.version
        metrics = original(learner, episodes, credit)
        masks = [stream.sampled for episode in episodes for stream in episode.streams]
        values = [value for streams in credit.values for value in streams]
        assert all(np.array_equal(value != 0, mask) for value, mask in zip(values, masks, strict=True))
        assert metrics["optimizer/gradient_norm"] > 0
        assert learner.policy.version == version + 1
        done.append(episodes)
        return metrics

    monkeypatch.setattr(Learner, "update", update)
    return done


@pytest.fixture
def clock(monkeypatch):
    """`clock[0]`: the seconds that everything appears to take."""
    state = [1.0]
    monkeypatch.setattr(speed, "timed", lambda work: (work(), state[0]))
    return state


def test_every_measured_update_trains_all_of_its_episodes(tiny_model, updates):
    found = doctor.measure(str(tiny_model), seconds=0.1)
    assert found.sampling.seconds(8) > 0
    assert found.training.seconds(8) > 0
    assert found.tokens > 0
    assert 1 <= found.turns <= 6
    assert len(updates) >= 2


def test_a_fast_machine_measures_whole_steps(tiny_model, updates, clock):
    clock[0] = 0.01
    found = doctor.measure(str(tiny_model), seconds=2.0)
    assert found.in_flight == 128
    assert [len(episodes) for episodes in updates] == [2, 2, 128]
    assert found.tokens == pytest.approx(speed.computed_tokens(updates[-1]) / 0.01)


def test_a_slow_machine_measures_one_group_and_two_episodes(tiny_model, updates, clock):
    clock[0] = 10.0
    found = doctor.measure(str(tiny_model), seconds=2.0)
    assert found.in_flight == 8
    assert [len(episodes) for episodes in updates] == [2, 2]
    assert (found.sampling, found.training) == (Cost(0.0, 10 / 8), Cost(0.0, 10 / 2))


def test_an_update_that_trains_nothing_is_an_error(tiny_model, monkeypatch):
    monkeypatch.setattr(speed, "every_token", lambda episodes: posttrain.advantages(episodes, rewards=zeros(episodes)))
    with pytest.raises(RunError, match="skipped the measured update"):
        doctor.measure(str(tiny_model), seconds=0.1)


def zeros(episodes):
    return RewardStreams([[np.zeros(len(stream), dtype=np.float32) for stream in e.streams] for e in episodes])


@pytest.mark.parametrize(
    ("measured", "expected"),
    [
        ([(8, 4.0)], Cost(0.0, 0.5)),
        ([(8, 3.0), (24, 5.0)], Cost(2.0, 0.125)),
        ([(8, 3.0), (24, 2.0)], Cost(2.0, 0.0)),  # noise: more episodes took less time
        ([(8, 1.0), (24, 6.0)], Cost(0.0, 0.25)),  # noise: a line through both would be negative at 0
    ],
)
def test_two_sizes_separate_fixed_seconds_from_those_of_an_episode(measured, expected):
    found = cost(measured)
    assert (found.fixed, found.each) == pytest.approx((expected.fixed, expected.each))
    assert found.seconds(measured[-1][0]) == pytest.approx(measured[-1][1])


# -- the steps that fit -----------------------------------------------------------------------------------------------


def test_a_step_is_its_sampling_its_updates_and_its_share_of_evaluations(tiny_model, tmp_path):
    learner = {"updates_per_step": 2, "epochs_per_step": 3}
    of = recipe(tiny_model, tmp_path, learner=learner)  # 2 groups of 3 episodes, an evaluation every 2 steps
    found = of_speed(Cost(10.0, 1.0), Cost(100.0, 7.0))
    step = (10 + 6) + 3 * 2 * (100 + 3 * 7)
    assert expected_seconds(of, found, 1, 5) == step
    assert expected_seconds(of, found, 5, 5) == 5 * step + 2 * (10 + 5)


@pytest.mark.parametrize(("minutes", "steps"), [(100, 4), (4.1, 4), (2.1, 2), (1.9, 1), (0.01, 1)])
def test_the_most_steps_within_the_limit_are_taken_and_at_least_one(tiny_model, tmp_path, minutes, steps):
    of = recipe(tiny_model, tmp_path, max_minutes=minutes, evaluation={"every": 0})
    found, seconds = steps_that_fit(of, of_speed(Cost(60.0, 0.0)))
    assert found == steps
    assert seconds == 60 * steps


def test_measuring_changes_nothing_in_a_run_whose_steps_fit(tiny_model, tmp_path):
    plain, _ = train(recipe(tiny_model, tmp_path / "plain", max_minutes=60))
    fitted, printed = train(recipe(tiny_model, tmp_path / "fitted", max_minutes=60, fit_steps=True))
    assert "all 4 steps fit into max_minutes = 60" in printed

    def numbers(run):
        clocks = ("time/", "memory/", "speed/")
        return [
            {key: value for key, value in line.items() if not key.startswith(clocks)}
            for line in read_metrics(run.metrics)
            if line["kind"] in ("train", "evaluation")
        ]

    assert numbers(fitted) == numbers(plain)


def test_a_slow_machine_makes_fewer_steps_and_evaluates_the_last_also_when_resumed(tiny_model, tmp_path, monkeypatch):
    monkeypatch.setattr(speed, "measure_run", lambda recipe: of_speed(Cost(19.0, 0.0)))
    given = recipe(tiny_model, tmp_path, max_minutes=1, fit_steps=True, checkpoint={"keep_state": "always"})
    run, printed = train(given)
    assert "2 of 4 steps fit into max_minutes = 1: they take about 0.9 minutes" in printed
    assert run.load_recipe().steps == 2
    assert [line["step"] for line in read_metrics(run.metrics) if line["kind"] == "evaluation"] == [0, 2]
    monkeypatch.setattr(speed, "measure_run", lambda recipe: of_speed(Cost(0.0, 0.0)))
    resumed, printed = train(given, resume=True)
    assert "steps is 2 instead of 4, as measured when the run began" in printed
    assert resumed.saved_step() == 2


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({}, "needs a limit; set `max_minutes`"),
        ({"max_minutes": 1, "rollout": {"async_rollouts": 1}}, "measures one process"),
        ({"max_minutes": 1, "hardware": {"processes": 2}}, "measures one process"),
    ],
)
def test_a_run_that_cannot_be_measured_is_refused(tiny_model, tmp_path, changes, said):
    with pytest.raises(ValueError, match=said):
        recipe(tiny_model, tmp_path, fit_steps=True, **changes)
