"""Both sides on the same random batch, and the difference between them."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from reference.credit import CREDITS, PerEpisode, Play, uncompared
from reference.losses import (
    LOSSES,
    Batch,
    aggregate,
    clip_cov,
    correction_factor,
    kl,
    kl_cov,
    kl_importance_weighted,
    off_policy_mask,
    top_entropy,
)
from reference.model import Padded, Scores, pad, score, spread

import posttrain
from crosschecks.cases import Case
from crosschecks.episodes import random_advantages, random_episodes, random_values
from crosschecks.package import last_update, moved_policy, rewards_with_kl, save_model
from posttrain.episode import CUT_OFF, Advantages, Episode
from posttrain.recipe.compose import chosen
from posttrain.recipe.credit import CREDITS as CREDIT_SETTINGS
from posttrain.recipe.loss import LOSSES as LOSS_SETTINGS

TOLERANCE = 1e-4
"""Largest relative difference of a float32 computation from one in float64 that counts as agreement."""


class Sides:
    """The package's policy, and the same weights in a plain model in float64."""

    def __init__(self, folder: Path) -> None:
        from transformers import AutoModelForCausalLM

        directory = save_model(folder / "start")
        self.policy = moved_policy(directory)
        self.policy.export(folder / "moved")
        self.model, self.start = (
            AutoModelForCausalLM.from_pretrained(d, attn_implementation="eager", dtype=torch.float32).double()
            for d in (folder / "moved", directory)
        )
        self.vocabulary = self.model.config.vocab_size

    def compare(self, case: Case, batches: int) -> dict[str, Any]:
        """A row of the table."""
        worst = np.zeros(2)
        for seed in range(batches):
            worst = np.maximum(worst, self.differences(case, seed))
        agrees = "yes" if worst.max() < TOLERANCE else "no"
        return {
            "part": case.part,
            "algorithm": case.name,
            "batches": batches,
            "loss": float(worst[0]),
            "gradient": float(worst[1]),
            "agrees": agrees,
        }

    def differences(self, case: Case, seed: int) -> tuple[float, float]:
        """Relative difference of the loss and of the gradient, on the batch of a seed."""
        rng = np.random.default_rng((seed, *case.name.encode()))
        episodes = random_episodes(rng, self.vocabulary, case.groups, same_turns=case.same_turns, binary=case.binary)
        padded = padded_streams(episodes)
        with torch.no_grad():
            now, ref = (score(m, padded, case.temperature) for m in (self.model, self.start))
        set_rollout_logprobs(rng, episodes, padded, now.logprobs, case.distance)
        ours, theirs, left_out = self.credit(case, rng, episodes, padded, now, ref.logprobs)
        longest = max(16, *(len(stream) for episode in episodes for stream in episode.streams))
        update = last_update(
            self.policy,
            episodes,
            ours,
            updates=case.updates,
            loss=case.loss,
            kl=0.0 if in_reward(case) else case.kl or 0.0,
            entropy=case.entropy,
            temperature=case.temperature,
            tokens_per_batch=int(longest * rng.integers(1, 6)),
        )
        self.load(update.weights)
        old = rollout_logprobs(episodes, padded)
        if case.loss.get("old") == "learner" or "correction" in case.loss:
            old = now.logprobs
        expected, scale = self.expected(case, episodes, padded, theirs, left_out, old, ref.logprobs)
        self.model.zero_grad()
        expected.backward()
        difference = abs(update.loss - float(expected.detach())) / scale, self.gradient_difference(update.gradient)
        self.load(dict(self.policy.model.named_parameters()))
        return difference

    def load(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Give the reference's model other weights."""
        with torch.no_grad():
            for name, parameter in self.model.named_parameters():
                parameter.copy_(weights[name])

    def credit(
        self,
        case: Case,
        rng: np.random.Generator,
        episodes: list[Episode],
        padded: Padded,
        now: Scores,
        ref: torch.Tensor,
    ) -> tuple[Advantages, PerEpisode, set[int]]:
        """Advantages by the package, and by the reference as one number per sampled token of each episode; and the episodes
        that the reference leaves out of the update."""
        if case.credit is None:
            ours = random_advantages(rng, episodes, case.advantages_per_stream)
            return (
                ours,
                [
                    np.concatenate([v[s.sampled] for v, s in zip(vs, e.streams, strict=True)]).tolist()
                    for vs, e in zip(ours.values, episodes, strict=True)
                ],
                set(),
            )
        values = random_values(rng, episodes)
        greedy = {episode.group: float(rng.integers(0, 2)) for episode in episodes}
        settings = chosen(CREDIT_SETTINGS, case.credit)
        rewards = None
        plays = plays_of(episodes, values, greedy)
        if in_reward(case):
            assert case.kl is not None
            rewards = rewards_with_kl(episodes, case.kl, [ref[row, s].numpy() for row, s in enumerate(padded.sampled)])
            subtract_kl(plays, padded, rollout_logprobs(episodes, padded) - ref, case.kl["coefficient"])
        energies = None
        if settings.type == "optimal_token_baseline":
            energies = posttrain.Learner(self.policy).energies(episodes)
            exact = 1 - 2 * now.logprobs.exp() + now.squares
            for index, play in enumerate(plays):
                rows = padded.episode == index
                play.energies = exact[rows][padded.sampled[rows]].tolist()
        ours = posttrain.advantages(
            episodes, settings, rewards=rewards, values=values, greedy_returns=greedy, energies=energies
        )
        return ours, CREDITS[settings.type](plays, settings), uncompared(settings.type, plays, settings)

    def expected(
        self,
        case: Case,
        episodes: Sequence[Episode],
        padded: Padded,
        advantages: PerEpisode,
        left_out: set[int],
        old: torch.Tensor,
        ref: torch.Tensor,
    ) -> tuple[torch.Tensor, float]:
        """The reference's loss, with gradient, and the size of its terms."""
        settings = chosen(LOSS_SETTINGS, case.loss)
        now = score(self.model, padded, case.temperature)
        rollout = rollout_logprobs(episodes, padded)
        per_stream = []
        for episode, numbers in zip(episodes, advantages, strict=True):
            place = 0
            for stream in episode.streams:
                count = int(stream.sampled.sum())
                per_stream.append(numbers[place : place + count])
                place += count
        batch = Batch(
            logp=now.logprobs,
            old=old,
            rollout=rollout,
            ref=ref,
            A=spread(per_stream, padded),
            mask=padded.sampled.double(),
            entropy=now.entropy,
            episode=padded.episode,
            group=padded.group,
        )
        if settings.mask_truncated:
            cut = [e.turns[-1].stop_reason in CUT_OFF for e in episodes]
            batch.mask = batch.mask * torch.tensor([[not cut[episode]] for episode in padded.episode.tolist()])
        batch.mask = batch.mask * torch.tensor([[episode not in left_out] for episode in padded.episode.tolist()])
        token = LOSSES[settings.type](batch, settings)
        rule, penalty = case.entropy.get("covariance", {}), torch.zeros(())
        if rule.get("type") == "clip_cov":
            token = token * clip_cov(batch, rule["low"], rule["high"])
        if rule.get("type") == "kl_cov":
            penalty = kl_cov(batch, rule["share"], rule["coefficient"])
        if "top_share" in case.entropy:
            token = token * top_entropy(batch, case.entropy["top_share"])
        if settings.off_policy_mask is not None:
            token = token * off_policy_mask(batch, settings.off_policy_mask)
        if settings.correction is not None:
            token = token * correction_factor(batch, settings.correction)
        if case.kl is not None and not in_reward(case):
            estimate = kl_importance_weighted if case.kl.get("importance_weighted") else kl
            token = token + case.kl["coefficient"] * estimate(batch, case.kl["estimator"])
        token = token + penalty - case.entropy.get("coefficient", 0.0) * batch.entropy
        if not batch.mask.any():
            return (token * batch.mask).sum(), 1.0
        total = aggregate(token, batch, settings.aggregation, settings.constant)
        return total, float(aggregate(token.abs(), batch, settings.aggregation, settings.constant).detach()) or 1.0

    def gradient_difference(self, found: dict[str, torch.Tensor]) -> float:
        """Norm of the difference over the norm of the reference's gradient, over all parameters."""
        apart = size = 0.0
        for name, parameter in self.model.named_parameters():
            assert parameter.grad is not None
            mine = found.get(name, torch.zeros_like(parameter)).double()
            apart += float(((mine - parameter.grad) ** 2).sum())
            size += float((parameter.grad**2).sum())
        return apart**0.5 / (size**0.5 or 1.0)


def in_reward(case: Case) -> bool:
    return case.kl is not None and case.kl.get("apply_to") == "reward"


def rollout_logprobs(episodes: Sequence[Episode], padded: Padded) -> torch.Tensor:
    return spread([s.rollout_logprobs[s.sampled] for episode in episodes for s in episode.streams], padded)


def subtract_kl(plays: Sequence[Play], padded: Padded, difference: torch.Tensor, coefficient: float) -> None:
    """InstructGPT (2203.02155) equation 2, at each token: r - coefficient x (log pi - log pi_ref)."""
    for index, play in enumerate(plays):
        rows = padded.episode == index
        estimates = difference[rows][padded.sampled[rows]].tolist()
        play.rewards = [reward - coefficient * d for reward, d in zip(play.rewards, estimates, strict=True)]


def padded_streams(episodes: Sequence[Episode]) -> Padded:
    return pad([(s.ids, s.sampled, i, episode.group) for i, episode in enumerate(episodes) for s in episode.streams])


def set_rollout_logprobs(
    rng: np.random.Generator, episodes: Sequence[Episode], padded: Padded, now: torch.Tensor, distance: float
) -> None:
    """Log-probabilities of an engine that differs from the learner by `distance` nats a token."""
    streams = [stream for episode in episodes for stream in episode.streams]
    for row, stream in enumerate(streams):
        noise = distance * rng.normal(size=int(stream.sampled.sum()))
        stream.rollout_logprobs[stream.sampled] = now[row, padded.sampled[row]].numpy() + noise


def plays_of(
    episodes: Sequence[Episode], values: Sequence[Sequence[np.ndarray]], greedy: dict[int, float]
) -> list[Play]:
    """The episodes as the reference takes them: sampled tokens only."""
    plays = []
    for episode, own in zip(episodes, values, strict=True):

        def joined(of_streams: Sequence[np.ndarray], episode: Episode = episode) -> list[Any]:
            return [x for array, s in zip(of_streams, episode.streams, strict=True) for x in array[s.sampled].tolist()]

        plays.append(
            Play(
                group=episode.group,
                rewards=joined([s.rewards for s in episode.streams]),
                turn=joined([s.turn for s in episode.streams]),
                states=[str(turn.state) for turn in episode.turns],
                values=joined(own),
                scores=episode.turns[-1].info["scores"],
                greedy=greedy[episode.group],
            )
        )
    return plays
