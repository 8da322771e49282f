"""Control of the policy's entropy: masks and penalties of tokens, and the coefficient of the entropy bonus.

The masks depend on all tokens of an optimizer step, so they are computed before its micro-batches, from the
log-probabilities and entropies before the step's first update.
"""

import math
from collections.abc import Mapping
from typing import Any

import numpy as np

from posttrain.recipe.loss import ClipCovRecipe, EntropyRecipe, KlCovRecipe


def top_entropy(entropies: np.ndarray, share: float) -> np.ndarray:
    """[N] bool: the `share` of tokens with the highest entropy, at least one; ties at the threshold are included.

    `entropies` [N] float, nats: of the distribution that each token of the update was drawn from. The policy gradient
    of all other tokens is dropped; the divisor does not change. Source: Wang et al. 2025, "Beyond the 80/20 rule",
    arXiv 2506.01939, which recommends 0.2.
    """
    count = len(entropies)
    if not count:
        return np.zeros(0, dtype=bool)
    kept = min(count, max(1, math.ceil(share * count - 1e-9)))
    return np.asarray(entropies >= np.partition(entropies, count - kept)[count - kept])


def covariances(logprobs: np.ndarray, advantages: np.ndarray) -> np.ndarray:
    """[N]: (log pi - mean of log pi) (A - mean of A) of each token of the update; the means are over its N tokens.

    Their mean is the covariance that reduces the entropy: a policy gradient step that raises the probability of tokens
    that are already likely lowers the entropy. Source: Cui et al. 2025, "The entropy mechanism of reinforcement
    learning for reasoning language models", arXiv 2505.22617, section 4.
    """
    logprobs, advantages = logprobs.astype(np.float64), advantages.astype(np.float64)
    if not len(logprobs):
        return np.zeros(0)
    return np.asarray((logprobs - logprobs.mean()) * (advantages - advantages.mean()))


def clip_cov(recipe: ClipCovRecipe, values: np.ndarray, random: np.random.Generator) -> np.ndarray:
    """[N] bool: max(1, floor(share N)) tokens drawn at random from those with `low` < covariance < `high`; all if
    fewer.

    These tokens lose their gradient (Clip-Cov). `values` [N]: the result of `covariances`. Source: as for
    `covariances`.
    """
    eligible = np.flatnonzero((values > recipe.low) & (values < recipe.high))
    count = min(len(eligible), max(1, int(recipe.share * len(values))))
    chosen = np.zeros(len(values), dtype=bool)
    chosen[random.permutation(eligible)[:count]] = True
    return chosen


def kl_cov(recipe: KlCovRecipe, values: np.ndarray) -> np.ndarray:
    """[N] bool: the max(1, floor(share N)) tokens with the largest covariance; ties go to the earlier token.

    These tokens get the penalty coefficient x |log pi - log pi_old| (KL-Cov, in the form of the authors' code). Its
    gradient is 0 if pi = pi_old, so it has an effect from a step's second update on. `values` [N]: the result of
    `covariances`.
    """
    chosen = np.zeros(len(values), dtype=bool)
    chosen[np.argsort(-values, kind="stable")[: max(1, int(recipe.share * len(values)))]] = True
    return chosen


class EntropyController:
    """The coefficient of the entropy bonus: fixed, or adapted to a target.

    Adaptive: after each step with entropy H, c becomes c + `step` if H < target, else c - `step`, within 0 and
    `max_coefficient`. The bonus of the next step has the coefficient c if H <= target, else 0. Source: He et al. 2025,
    "Skywork open reasoner 1", arXiv 2505.22312, section 4 (adaptive entropy control), where H is measured before the
    update.
    """

    def __init__(self, recipe: EntropyRecipe) -> None:
        self.recipe = recipe
        self.used = recipe.has_bonus
        """Whether the bonus ever has a coefficient above 0."""
        self._adapted = recipe.coefficient
        self._below = True

    @property
    def coefficient(self) -> float:
        """The coefficient of the next step's bonus."""
        return self._adapted if self._below else 0.0

    def update(self, entropy: float | None) -> None:
        """Adapt to `entropy`, the measured entropy per token in nats. None or a value that is not finite changes
        nothing.
        """
        target = self.recipe.target
        if target is None or entropy is None or not math.isfinite(entropy):
            return
        change = self.recipe.step if entropy < target else -self.recipe.step
        self._adapted = min(max(self._adapted + change, 0.0), self.recipe.max_coefficient)
        self._below = entropy <= target

    def update_from(self, metrics: Mapping[str, float]) -> None:
        """Adapt to the entropy of the tokens that get the bonus, taken from a step's `metrics`. No effect if it is
        missing.
        """
        self.update(metrics.get("policy/entropy" if self.recipe.tokens == "all" else "policy/bonus_entropy"))

    def state_dict(self) -> dict[str, Any]:
        """The adapted coefficient, and whether the last entropy was at most the target."""
        return {"coefficient": self._adapted, "below": self._below}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Restore what `state_dict` returned."""
        self._adapted, self._below = state["coefficient"], state["below"]
