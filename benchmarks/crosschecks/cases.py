"""The rows of the table: what is compared, with which settings."""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from reference.credit import CREDITS as REFERENCE_CREDITS
from reference.losses import LOSSES as REFERENCE_LOSSES

from posttrain.recipe.credit import CREDITS
from posttrain.recipe.loss import LOSSES


@dataclass(frozen=True)
class Case:
    """One row of the table."""

    part: str
    name: str
    loss: dict[str, Any] = field(default_factory=lambda: {"type": "reinforce"})
    credit: dict[str, Any] | None = None
    """None: random advantages."""
    kl: dict[str, Any] | None = None
    entropy: dict[str, Any] = field(default_factory=dict)
    temperature: float = 1.0
    distance: float = 0.3
    """Standard deviation of the difference between the engine's and the learner's log-probabilities, in nats."""
    advantages_per_stream: bool = False
    groups: int | None = None
    """Number of groups; None: 1 to 4."""
    binary: bool = False
    """Returns are 0 or 1."""
    updates: int = 1
    """PPO epochs. The last one is compared."""
    same_turns: bool = False
    """All episodes of a group have the same number of turns."""


LOSS_SETTINGS: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "ppo": [("", {}), (", clip-higher", {"clip_high": 0.28}), (", dual clip", {"dual_clip": 1.5})],
    "gspo": [("", {}), (", wide clip", {"clip_low": 0.1, "clip_high": 0.1})],
    "gspo_token": [("", {}), (", wide clip", {"clip_low": 0.1, "clip_high": 0.1})],
    "dppo": [("", {}), (", binary KL", {"divergence": "kl", "delta": 0.05})],
    "sapo": [("", {"positive_temperature": 2.0, "negative_temperature": 3.0})],
    "gmpo": [("", {}), (", narrow clip", {"clip_low": 0.1, "clip_high": 0.2})],
    "cispo": [("", {}), (", both sides", {"clip_low": 0.2, "clip_high": 0.2})],
}
"""Settings that a loss is compared with, besides its defaults."""

CREDIT_SETTINGS: dict[str, list[tuple[str, dict[str, Any]]]] = {
    "reinforce": [("", {}), (", discounted", {"discount": 0.9})],
    "reinforce_pp": [("", {}), (", discounted", {"discount": 0.9})],
    "turn_returns": [("", {"discount": 0.9}), (", no baseline", {"baseline": "none"})],
    "mt_grpo": [("", {"turn_weight": 0.5})],
    "gigpo": [("", {}), (", no std", {"divide_by_std": False, "step_weight": 0.5})],
    "pass_at_k": [("", {}), (", k 2", {"k": 2})],
    "gdpo": [("", {}), (", weights", {"weights": {"correct": 1.0, "format": 0.3}})],
    "gae": [
        ("", {"whiten": False, "discount": 0.97}),
        (", whitened", {"gae_lambda": 0.8}),
        (", length_alpha", {"length_alpha": 0.5}),
    ],
    "bilevel_gae": [("", {"whiten": False, "discount": 0.97, "gae_lambda": 0.8}), (", whitened", {})],
}


OLD = {"old": "rollout"}
"""With the engine's log-probabilities as the anchor, the first update has ratios on both sides of 1."""
LATER = {"old": "learner"}
"""With the learner's, later updates have."""

CORRECTIONS: list[tuple[str, dict[str, Any]]] = [
    ("token weights", {"weights": "token", "cap": 1.3}),
    ("sequence weights", {"weights": "sequence", "cap": 1.3}),
    ("token rejection", {"weights": "none", "reject": "token", "bounds": (0.8, 1.3)}),
    ("sequence rejection", {"weights": "none", "reject": "sequence", "bounds": (0.7, 1.5)}),
    ("geometric rejection", {"weights": "none", "reject": "geometric", "bounds": (0.9, 1.1)}),
    (
        "token weights, geometric rejection",
        {"weights": "token", "cap": 1.3, "reject": "geometric", "bounds": (0.9, 1.1)},
    ),
]


def cases() -> Iterator[Case]:
    """All rows with a reference."""
    for name in LOSSES.names():
        if name in REFERENCE_LOSSES:
            for label, settings in LOSS_SETTINGS.get(name, [("", {})]):
                # Its authors define gmpo for one advantage per stream alone.
                loss, per_stream = {"type": name, **settings}, name == "gmpo"
                yield Case("policy loss", name + label, loss | OLD, advantages_per_stream=per_stream)
            if LOSSES.find(name).ratio_to == "old":
                title = f"{name}, second epoch"
                yield Case("policy loss", title, loss | LATER, updates=2, advantages_per_stream=per_stream)
    for aggregation in ({"aggregation": "sequence_mean"}, {"aggregation": "constant", "constant": 40.0}):
        yield Case("aggregation", str(aggregation["aggregation"]), {"type": "ppo", **OLD, **aggregation})
    for name, correction in CORRECTIONS:
        yield Case("correction", name, {"type": "ppo", "correction": correction})
    yield Case("correction", "token weights, second epoch", {"type": "ppo", "correction": CORRECTIONS[0][1]}, updates=2)
    yield Case("mask", "off-policy streams", {"type": "ppo", "off_policy_mask": 0.05, **OLD})
    yield Case("mask", "truncated episodes", {"type": "ppo", "mask_truncated": True, **OLD})
    sequence_mean = {"aggregation": "sequence_mean", "mask_truncated": True}
    yield Case("mask", "truncated episodes, sequence_mean", {"type": "ppo", **sequence_mean, **OLD})
    yield Case("temperature", "0.7", {"type": "ppo", **OLD}, temperature=0.7, entropy={"coefficient": 0.1})
    for estimator in ("k2", "k3"):
        yield Case("KL", f"{estimator} in the loss", kl={"coefficient": 0.2, "estimator": estimator})
    for estimator in ("k1", "k3"):
        weighted = {"coefficient": 0.2, "estimator": estimator, "importance_weighted": True}
        yield Case("KL", f"{estimator} in the loss, importance-weighted", kl=weighted)
    for credit in ("rloo", "reinforce", "gae"):
        in_reward = {"coefficient": 0.1, "estimator": "k1", "apply_to": "reward"}
        yield Case("KL", f"k1 in the reward, {credit}", credit={"type": credit}, kl=in_reward)
    yield Case("entropy", "bonus", entropy={"coefficient": 0.1})
    ppo = {"type": "ppo", **OLD}
    yield Case("entropy", "top_share", ppo, entropy={"top_share": 0.3})
    # The share is so large that nothing is left to chance.
    clip_cov = {"type": "clip_cov", "share": 0.999, "low": 0.1, "high": 1.0}
    yield Case("entropy", "clip_cov", ppo, entropy={"covariance": clip_cov})
    kl_cov = {"type": "kl_cov", "share": 0.2, "coefficient": 0.5}
    # In a batch of two tokens the covariances are equal, and rounding chooses.
    yield Case("entropy", "kl_cov", ppo, entropy={"covariance": kl_cov}, groups=3)
    later = {"type": "ppo", **LATER}
    yield Case("entropy", "kl_cov, second epoch", later, entropy={"covariance": kl_cov}, groups=3, updates=2)
    for name in CREDITS.names():
        if name in REFERENCE_CREDITS:
            for label, settings in CREDIT_SETTINGS.get(name, [("", {})]):
                credit = {"type": name, **settings}
                yield Case("credit", name + label, credit=credit, same_turns=name == "mt_grpo", binary=name == "maxrl")


def without_reference() -> list[tuple[str, str]]:
    """(part, name) of registered losses and credits that no reference covers."""
    return [
        *(("policy loss", name) for name in LOSSES.names() if name not in REFERENCE_LOSSES),
        *(("credit", name) for name in CREDITS.names() if name not in REFERENCE_CREDITS),
    ]
