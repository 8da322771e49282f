"""Losses and credits agree with independent implementations of the papers' formulas (`benchmarks/crosscheck.py`)."""

import json
from pathlib import Path

import crosschecks.cases
import crosschecks.compare
import numpy as np
import pytest
import torch

import posttrain
from posttrain.recipe.credit import CREDITS
from posttrain.recipe.loss import LOSSES
from tests.benchmarks.conftest import output_of

ROOT = Path(__file__).parents[2]


@pytest.fixture(scope="module")
def sides(tmp_path_factory):
    return crosschecks.compare.Sides(tmp_path_factory.mktemp("crosscheck"))


@pytest.fixture(scope="module")
def rows():
    return {f"{case.part}: {case.name}": case for case in crosschecks.cases.cases()}


@pytest.mark.slow
@pytest.mark.timeout(1200)  # some 100 s of one core, more where the machine is shared
def test_every_algorithm_agrees_with_its_reference(tmp_path):
    """The script as users run it: 10 random batches a row, and no registered loss or credit without a reference."""
    file = tmp_path / "table.json"
    output_of("crosscheck", "--json", str(file))
    rows = json.loads(file.read_text())["rows"]
    assert {row["algorithm"]: row["agrees"] for row in rows if row["agrees"] != "yes"} == {}
    page = (ROOT / "docs" / "results" / "crosscheck.md").read_text()
    assert [row["algorithm"] for row in rows if f"| {row['algorithm']} |" not in page] == []


def test_every_registered_loss_and_credit_has_a_reference():
    assert crosschecks.cases.without_reference() == []


def test_a_loss_or_credit_without_a_reference_is_reported(monkeypatch):
    for registry in (LOSSES, CREDITS):
        monkeypatch.setattr(registry, "_kinds", {name: registry.find(name) for name in registry.names()})
    posttrain.register_loss("new_loss")(lambda logprobs, batch: logprobs)
    posttrain.register_credit("new_credit")(lambda returns: returns)
    assert crosschecks.cases.without_reference() == [("policy loss", "new_loss"), ("credit", "new_credit")]


def test_a_wrong_gradient_is_detected(sides, rows, monkeypatch):
    """The comparison itself: a reference whose clip range is wider no longer agrees."""
    reference = crosschecks.compare.LOSSES["ppo"]
    wider = crosschecks.compare.chosen(LOSSES, {"type": "ppo", "clip_low": 0.25, "clip_high": 0.25})
    case = rows["policy loss: ppo"]
    assert sides.compare(case, 4)["agrees"] == "yes"
    monkeypatch.setitem(crosschecks.compare.LOSSES, "ppo", lambda batch, settings: reference(batch, wider))
    assert sides.compare(case, 4)["agrees"] == "no"


def test_a_batch_clips_on_both_sides_and_has_groups_without_signal(sides):
    """The random batches contain both clips, equal rewards, several streams and groups of one."""
    compare = crosschecks.compare
    ratios, streams, sizes, spreads = [], set(), set(), []
    for seed in range(10):
        rng = np.random.default_rng(seed)
        episodes = compare.random_episodes(rng, sides.vocabulary)
        padded = compare.padded_streams(episodes)
        with torch.no_grad():
            now = compare.score(sides.model, padded).logprobs
        compare.set_rollout_logprobs(rng, episodes, padded, now, 0.3)
        for row, stream in enumerate(s for episode in episodes for s in episode.streams):
            ratios += (now[row, padded.sampled[row]].numpy() - stream.rollout_logprobs[stream.sampled]).tolist()
        streams |= {len(episode.streams) for episode in episodes}
        for group in {episode.group for episode in episodes}:
            returns = [episode.total_reward for episode in episodes if episode.group == group]
            sizes.add(len(returns))
            spreads.append(max(returns) - min(returns))
    assert np.mean(np.exp(ratios) > 1.2) > 0.1
    assert np.mean(np.exp(ratios) < 0.8) > 0.1
    assert streams == {1, 2, 3}
    assert sizes == {1, 2, 3, 4}
    assert 0.0 in spreads
    assert max(spreads) > 0
