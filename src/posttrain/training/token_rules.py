"""Rules that need all samples of an update: which tokens are trained on, and which get the entropy bonus."""

from collections.abc import Sequence
from functools import partial
from typing import Literal

import numpy as np

from posttrain.credit.units.segment import answer_tokens
from posttrain.episode import Episode, StopReason
from posttrain.losses.entropy import clip_cov, covariances, kl_cov, top_entropy
from posttrain.losses.policy import gpg_factor
from posttrain.models.policy import Policy
from posttrain.recipe.loss import EntropyRecipe, PolicyLoss
from posttrain.training.updater import Sample, Samples, Totals, by_sample, computed


def set_factors(
    loss: PolicyLoss, entropy: EntropyRecipe, samples: Samples, trained: Samples, random: np.random.Generator | None
) -> Totals:
    """Set `factors` and `held` of an update's `samples`. Returns metrics of the chosen tokens.

    `trained`: the samples that are not masked as a whole. The rules apply to their tokens. `random` draws the tokens of
    `clip_cov`.
    """
    rule, metrics, tokens = entropy.covariance, Totals(), [sample.sampled_tokens for sample in trained]
    factors = np.ones(sum(tokens), dtype=np.float32)
    held = np.zeros(sum(tokens), dtype=bool)
    if loss.type == "gpg":
        compared = [s for s in samples if s.has_baseline]
        factors *= gpg_factor([s.group for s in compared], [bool(np.any(s.advantages != 0)) for s in compared])
    if entropy.top_share < 1:
        kept = top_entropy(_joined([computed(s.entropies) for s in trained]), entropy.top_share)
        factors[~kept] = 0.0
        metrics["policy/low_entropy_masked"] = _counted(~kept)
    if rule is not None:
        values = covariances(_joined([logprobs_before(s) for s in trained]), _joined([s.advantages for s in trained]))
        metrics["policy/covariance"] = (float(values.sum()), float(len(values)))
        if rule.type == "kl_cov":
            held = kl_cov(rule, values)
            metrics["policy/kl_cov_held"] = _counted(held)
        else:
            if random is None:
                raise ValueError("`clip_cov` draws tokens at random; pass `random`")
            clipped = clip_cov(rule, values, random)
            factors[clipped] = 0.0
            metrics["policy/clip_cov_masked"] = _counted(clipped)
    for sample in samples:  # masked samples have weight 0
        sample.factors = np.zeros(sample.sampled_tokens, dtype=np.float32)
        sample.held = np.zeros(sample.sampled_tokens, dtype=bool)
    for sample, *parts in zip(trained, by_sample(factors, trained), by_sample(held, trained), strict=True):
        sample.factors, sample.held = parts
    return metrics


def set_bonus_tokens(
    episodes: Sequence[Episode], samples: Samples, tokens: Literal["after_thinking", "answer"], policy: Policy
) -> None:
    """Mark the sampled tokens of each sample that get the entropy bonus: those of one part of the answers."""
    decode = partial(policy.tokenizer.decode, clean_up_tokenization_spaces=False)
    streams = [[np.zeros(len(stream), dtype=bool) for stream in episode.streams] for episode in episodes]
    for episode, marks in zip(episodes, streams, strict=True):
        for turn in episode.turns:
            ids = episode.streams[turn.stream].ids
            ended = turn.stop_reason is StopReason.END_TOKEN
            marks[turn.stream][turn.start : turn.stop] = answer_tokens(
                tokens, ids[: turn.start], ids[turn.start : turn.stop], ended, decode
            )
    for sample, mark in zip(samples, [mark for marks in streams for mark in marks], strict=True):
        sample.bonus = mark[sample.stream.sampled]


def logprobs_before(sample: Sample) -> np.ndarray:
    """[n]: log-probabilities before the step's updates, from the learner if it computed them, else from the engine."""
    return sample.rollout_logprobs if sample.old_logprobs is None else sample.old_logprobs


def _joined(parts: Sequence[np.ndarray]) -> np.ndarray:
    return np.concatenate([np.zeros(0, dtype=np.float32), *parts])


def _counted(flags: np.ndarray) -> tuple[float, float]:
    return float(flags.sum()), float(len(flags))
