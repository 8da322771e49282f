"""Which episodes each metric of a batch counts, on hand-made episodes of every outcome."""

import pytest

from posttrain.engines.protocol import EngineCounters
from posttrain.episode import Outcome, StopReason
from posttrain.evaluation.summary import summarize
from posttrain.training.rollouts import RolloutBatch, rollout_metrics

from ..rollout.episodes import played

KINDS = ("ended", "truncated", "filtered", "unscored", "failed", "failed at once")
"""`filtered`: an ended episode that a filter removed from the update."""


def episode(kind, number):
    """An episode whose values are a power of ten that no other kind has, so that sums show which kinds were counted."""
    size = 10**number
    outcome = {"truncated": Outcome.TRUNCATED, "unscored": Outcome.UNSCORED}.get(kind, Outcome.TERMINATED)
    made = played(
        seed=number,
        rewards=(float(size), 0.0) if number % 2 else (float(size),),
        success=kind in ("ended", "unscored", "failed"),
        outcome=Outcome.FAILED if kind.startswith("failed") else outcome,
        rejected="no tag",
        tokens=number + 1,
        group=number // 2,
    )
    for turn in made.turns:
        turn.info |= {"tool_calls": size, "malformed_calls": size, "failed_calls": size, "scores": {"extra": size}}
        turn.stop_reason = StopReason.TURN_BUDGET if kind == "truncated" else StopReason.END_TOKEN
    if kind == "failed at once":
        made.turns, made.streams = [], []
    return made


EPISODES = {kind: episode(kind, number) for number, kind in enumerate(KINDS)}
RETURNED = ("ended", "truncated", "filtered")
"""The episodes that have a return, which every mean is over."""
TABLE = {
    "rollout/episodes": (KINDS, lambda e: 1.0, "sum"),
    "rollout/kept": (("ended", "truncated"), lambda e: 1.0, "sum"),
    "rollout/failed": (("failed", "failed at once"), lambda e: 1.0, "sum"),
    "rollout/unscored": (("unscored",), lambda e: 1.0, "sum"),
    "rollout/success": ((*RETURNED, "failed", "failed at once"), lambda e: float(e.success), "mean"),
    "rollout/return": (RETURNED, lambda e: e.total_reward, "mean"),
    "rollout/score/extra": (RETURNED, lambda e: e.scores["extra"], "mean"),
    "rollout/turns": (RETURNED, lambda e: len(e.turns), "mean"),
    "rollout/tokens_per_answer": (RETURNED, lambda e: e.sampled_tokens, "per turn"),
    "rollout/rejected_share": (RETURNED, lambda e: len(e.turns), "per turn"),
    # The returned episodes have 4 turns.
    "rollout/truncated_share": (("truncated",), lambda e: len(e.turns) / 4, "sum"),
    "tools/calls": (RETURNED, lambda e: sum(t.info["tool_calls"] for t in e.turns), "mean"),
    "policy/repeated_share": (RETURNED, lambda e: 0.0, "mean"),
}
"""Metric -> the kinds of episodes that it counts, the value of one, and how the values are combined."""
OTHERS = {"tools/malformed_share": 0.5, "tools/failed_share": 1.0, "reward/group_spread": 4.5}
OTHERS |= {"rollout/same_answer_share": 0.75}
"""Shares of sums over the same episodes, the spread of the one group with two returns, 1 and 10, and the share of the answer of
all first turns, three of four."""


def combined(kinds, value, how):
    values = [value(EPISODES[kind]) for kind in kinds]
    count = {"sum": 1, "mean": len(values), "per turn": sum(len(EPISODES[kind].turns) for kind in kinds)}[how]
    return sum(values) / count


def batch(kinds):
    kept = [EPISODES[kind] for kind in kinds if kind in ("ended", "truncated")]
    return RolloutBatch(kept, [EPISODES[kind] for kind in kinds], counters=EngineCounters(sampled=7, prefilled=5))


def test_each_metric_counts_the_episodes_of_its_definition():
    metrics = rollout_metrics(batch(KINDS))
    expected = {key: combined(*entry) for key, entry in TABLE.items()} | OTHERS
    expected |= {"tokens/sampled": 7, "tokens/prefilled": 5, "tokens/reused": 0, "speed/tokens_per_second": 0}
    assert metrics == pytest.approx(expected)


@pytest.mark.parametrize("kinds", [("unscored",), ("failed at once",), ("failed", "unscored"), ()])
def test_a_batch_without_returns_has_no_means(kinds):
    metrics = rollout_metrics(batch(kinds))
    assert all(value == value for value in metrics.values())
    means = [key for key, (_, _, how) in TABLE.items() if how != "sum" and key != "policy/repeated_share"]
    left = [key for key in (*means, *OTHERS) if key in metrics]
    assert left == (["rollout/success"] if any("failed" in kind for kind in kinds) else [])


def test_an_evaluation_counts_the_same_episodes():
    result = summarize([EPISODES[kind] for kind in KINDS])
    for key in ("tokens_per_answer", "turns", "rejected_share"):
        assert getattr(result, key) == pytest.approx(combined(*TABLE[f"rollout/{key}"])), key
    assert result.success.value == pytest.approx(combined(*TABLE["rollout/success"]))
    assert result.mean_return.value == pytest.approx(combined(*TABLE["rollout/return"]))
    assert result.scores["extra"].value == pytest.approx(combined(*TABLE["rollout/score/extra"]))
    assert (result.n, result.episodes, result.failed, result.unscored) == (5, 6, 2, 1)
    assert summarize([EPISODES["unscored"]]).success is None
    values = summarize([EPISODES["unscored"]]).metrics()
    assert (values["return"], values["turns"], values["n"]) == (None, None, 0)
