"""The location-aware normalizer: known coefficients are recovered, sigma has a floor, files keep their layout."""

import json

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from scipy.optimize import minimize

from posttrain.credit.units.normalizer import (
    EPSILON,
    FitKey,
    Normalizer,
    file_with_normalizer,
    fit_key,
    fit_normalizer,
    huber_line,
    read_normalizer,
    read_normalizers,
    relative_positions,
    reward_profile,
)
from posttrain.errors import InputError
from posttrain.recipe.units import EntropyUnits, StepUnits, WholeUnits
from posttrain.seeds import random_stream

PHI = Normalizer(0.7668, 0.2569, 0.4705, 2.8339)
LLAMA_TOKENS = Normalizer(1.7340, 0.9906, 1.3212, 5.4513)
PUBLISHED = {
    "phi3-instruct": {
        "preference700K": {
            "peak": {"avg": {"1.75": [0.7668, 0.2569, 0.4705, 2.8339], "0": [0.9628, 0.3796, 1.2917, 3.5006]}}
        }
    },
    "llama3-sft": {"preference700K": {"peak": {"avg": {"2.0": [0.8967, 0.5680, 0.8572, 4.1667]}}}},
}


def drawn(true, answers, most=30, seed=0):
    """Unit rewards that follow `true` exactly, in answers of 1 to `most` units."""
    draws = random_stream(seed, "synthetic rewards")
    found = []
    for _ in range(answers):
        p = relative_positions(int(draws.integers(1, most + 1)))
        found.append(true.mean(p) + true.sigma(p) * draws.standard_normal(len(p)))
    return found


# -- the fit -----------------------------------------------------------------------------------------------------------


def test_known_coefficients_are_recovered():
    fit = fit_normalizer(drawn(PHI, 10_000))
    assert fit.normalizer.numbers == pytest.approx(PHI.numbers, abs=0.04)
    assert fit.r2_mean > 0.95
    assert fit.r2_std > 0.85
    # The point of the weights: positions of few answers pull an unweighted line about.
    profile = fit.profile
    several = profile.counts > 1
    logs = np.log(profile.positions[several])
    _, unweighted = huber_line(logs, profile.stds[several], np.ones(several.sum()))
    assert abs(fit.normalizer.intercept_std - 2.8339) <= abs(unweighted - 2.8339) + 5e-3
    normal = np.concatenate([fit.normalizer.normalize(answer) for answer in drawn(PHI, 4000, seed=1)])
    assert abs(normal.mean()) < 0.02
    assert abs(normal.std() - 1) < 0.02


def test_outliers_have_little_effect():
    answers = drawn(PHI, 5_000)
    spoiled = [*answers, *(np.array([1e3] * 31) for _ in range(20))]  # at positions that no other answer has
    plain, robust = fit_normalizer(answers).normalizer, fit_normalizer(spoiled).normalizer
    assert robust.numbers == pytest.approx(plain.numbers, abs=0.25)


def objective(values, x, y, w):
    slope, intercept, log_scale = values
    scale = np.exp(log_scale)
    z = np.abs(y - slope * x - intercept) / scale
    loss = np.where(z <= EPSILON, z**2, 2 * EPSILON * z - EPSILON**2)
    return np.sum(w * (scale + scale * loss)) / np.sum(w)


@pytest.mark.parametrize("seed", range(5))
def test_the_line_minimises_hubers_objective(seed):
    draws = random_stream(seed, "line")
    x = np.log(draws.uniform(0.01, 1, 60))
    y = 0.7 * x + 2 + 0.3 * draws.standard_normal(60)
    y[:6] += draws.uniform(-20, 20, 6)
    w = draws.integers(1, 50, 60).astype(float)
    slope, intercept = huber_line(x, y, w)
    found = minimize(
        objective, (0.0, 0.0, 0.0), (x, y, w), "Nelder-Mead", options={"xatol": 1e-9, "fatol": 1e-13, "maxiter": 10_000}
    )
    assert (slope, intercept) == pytest.approx(tuple(found.x[:2]), abs=1e-5)
    assert (slope, intercept) == pytest.approx((0.7, 2), abs=0.25)


def test_a_weight_is_a_repetition():
    x, y, w = np.log([0.1, 0.3, 0.5, 1.0]), np.array([1.0, 4.0, 2.0, 2.5]), np.array([3, 1, 2, 5])
    assert huber_line(x, y, w) == pytest.approx(huber_line(np.repeat(x, w), np.repeat(y, w), np.ones(11)), abs=1e-9)


def test_a_line_without_noise_is_fitted_exactly():
    x = np.log(np.arange(1, 21) / 20)
    y = 1.5 * x - 2
    assert huber_line(x, y, np.ones(20)) == pytest.approx((1.5, -2), abs=1e-9)
    y[[8, 14]] = 100.0, -40.0
    assert huber_line(x, y, np.ones(20)) == pytest.approx((1.5, -2), abs=1e-6)
    assert huber_line(np.zeros(3), np.array([1.0, 1.0, 1.0]), np.ones(3)) == (0.0, 1.0)


def test_the_profile_by_hand():
    profile = reward_profile([np.array([1.0, 5.0]), np.array([3.0, 7.0]), np.array([2.0])])
    assert profile.positions.tolist() == [0.5, 1.0]
    assert profile.means.tolist() == pytest.approx([2, 14 / 3])
    assert profile.counts.tolist() == [2, 3]
    assert profile.stds.tolist() == pytest.approx([np.std([1, 3], ddof=1), np.std([5, 7, 2], ddof=1)])
    long = reward_profile([np.zeros(3000)])
    assert long.positions[0] == 1e-3
    assert long.counts.sum() == 3000


def test_answers_of_one_unit_give_one_mean_and_deviation():
    rewards = random_stream(0, "outcomes").standard_normal(500) * 2 - 0.5
    fit = fit_normalizer([np.array([reward]) for reward in rewards])
    assert fit.normalizer.numbers == pytest.approx([0, 0, rewards.mean(), rewards.std(ddof=1)])
    assert np.isnan(fit.r2_mean)


def test_data_that_cannot_be_fitted_is_refused():
    with pytest.raises(ValueError, match="no position has two rewards"):
        fit_normalizer([np.array([1.0, 2.0, 3.0])])
    with pytest.raises(ValueError, match="standard deviation above 0"):
        fit_normalizer([np.array([1.0, 2.0])] * 3)
    with pytest.raises(ValueError, match="not finite"):
        fit_normalizer([np.array([1.0, np.nan])] * 3)


# -- what it does to rewards -------------------------------------------------------------------------------------------


def test_sigma_has_a_floor_where_the_published_fit_goes_negative():
    p = relative_positions(246)
    assert (0.9906 * np.log(p[:1]) + 5.4513 <= 0).all()
    sigma = LLAMA_TOKENS.sigma(relative_positions(4000))
    assert sigma.min() == pytest.approx(0.54513)
    assert (np.diff(sigma) >= 0).all()
    # No reward changes its sign against the mean, at any length.
    for units in (1, 245, 246, 1534, 4000):
        positions = relative_positions(units)
        above = LLAMA_TOKENS.normalize(LLAMA_TOKENS.mean(positions) + 1)
        assert (above > 0).all()
    # Where the line is above the floor, the floor changes nothing.
    assert LLAMA_TOKENS.sigma(np.array([0.5])) == pytest.approx([0.9906 * np.log(0.5) + 5.4513])
    assert Normalizer(0, 1, 0, 2, floor=0.5).sigma(np.array([1e-9, 1.0])).tolist() == pytest.approx([1, 2])


def test_normalizing_by_hand():
    made = Normalizer(2.0, 1.0, 0.5, 4.0)
    half = np.log(0.5)
    expected = [(3 - (2 * half + 0.5)) / (half + 4), (3 - 0.5) / 4]
    assert made.normalize(np.array([3.0, 3.0])).tolist() == pytest.approx(expected)
    assert made.normalize(np.zeros(0)).tolist() == []


@pytest.mark.parametrize("numbers", [(0, 0, 0, 0), (0, 0, 0, -1), (np.nan, 0, 0, 1), (0, np.inf, 0, 1)])
def test_statistics_that_cannot_scale_are_refused(numbers):
    with pytest.raises(ValueError, match="above 0 at the end"):
        Normalizer(*numbers)


# -- files -------------------------------------------------------------------------------------------------------------


def test_a_published_file_is_read(tmp_path):
    file = tmp_path / "params.json"
    file.write_text(json.dumps(PUBLISHED))
    assert len(read_normalizers(file)) == 3
    segmenter = EntropyUnits(type="entropy", threshold=1.75)
    assert read_normalizer(file, fit_key("phi3-instruct", "preference700K", segmenter))[1] == PHI
    # Thresholds are compared as numbers.
    llama = FitKey("llama3-sft", "preference700K", "peak", "avg", "2")
    assert read_normalizer(file, llama)[1].numbers == [0.8967, 0.5680, 0.8572, 4.1667]


numbers = st.floats(-50, 50)


@settings(deadline=None, max_examples=30)
@given(st.tuples(numbers, numbers, numbers, st.floats(1e-6, 50)))
def test_a_file_round_trips_and_keeps_its_other_fits(tmp_path_factory, values):
    file = tmp_path_factory.mktemp("fits") / "params.json"
    made, key = Normalizer(*values), fit_key("run", "val", StepUnits(type="steps"))
    file.write_text(file_with_normalizer(file, key, made))
    assert read_normalizer(file)[1] == made
    assert json.loads(file.read_text()) == {"run": {"val": {"steps": {"avg": {"0": list(values)}}}}}
    entropy = fit_key("run", "val", EntropyUnits(type="entropy", threshold=1.5))
    assert entropy[2:] == ("peak", "avg", "1.5")
    file.write_text(file_with_normalizer(file, entropy, PHI))
    file.write_text(file_with_normalizer(file, entropy, LLAMA_TOKENS))
    assert read_normalizers(file) == {key: made, entropy: LLAMA_TOKENS}


def test_the_error_about_a_missing_name_lists_the_existing_ones(tmp_path):
    file = tmp_path / "params.json"
    file.write_text(json.dumps(PUBLISHED))
    missing = fit_key("phi3-instruct", "preference700K", WholeUnits(type="token"))
    with pytest.raises(InputError, match=r"no fit phi3-instruct > preference700K > token.*name one of: .*peak > avg"):
        read_normalizer(file, missing)
    with pytest.raises(InputError, match="has 3 fits and none was named"):
        read_normalizer(file)
    with pytest.raises(InputError, match="cannot be read"):
        read_normalizer(tmp_path / "gone.json")


@pytest.mark.parametrize(
    "content",
    ["[", "[1, 2]", '{"a": [1, 2, 3, 4]}', '{"a": {"b": {"c": {"d": {"1": [1, 2, 3]}}}}}'],
    ids=["json", "list", "shallow", "three"],
)
def test_a_file_of_another_layout_is_named(content, tmp_path):
    file = tmp_path / "params.json"
    file.write_text(content)
    with pytest.raises(InputError, match=r"params\.json"):
        read_normalizer(file)
