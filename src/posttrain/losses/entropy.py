"""Control of the policy's entropy by masks and penalties of tokens.

They depend on all tokens of an optimizer step, so they are computed before its micro-batches, from the
log-probabilities and entropies before the step's first update.
"""

import math

import numpy as np

from posttrain.recipe.loss import ClipCovRecipe, KlCovRecipe


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
