"""Both sides on the same random batch, and the difference between them."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from reference.credit import CREDITS, PerEpisode, Play
from reference.losses import LOSSES, Batch, aggregate, kl, off_policy_mask, weights_of_correction
from reference.model import Padded, pad, score, spread

import posttrain
from crosschecks.cases import Case
from crosschecks.episodes import random_advantages, random_episodes, random_values
from crosschecks.package import moved_policy, one_step, save_model
from posttrain.episode import Advantages, Episode
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
        episodes = random_episodes(rng, self.vocabulary, same_turns=case.same_turns)
        padded = padded_streams(episodes)
        with torch.no_grad():
            now, ref = score(self.model, padded), score(self.start, padded)
        set_rollout_logprobs(rng, episodes, padded, now.logprobs, case.distance)
        ours, theirs = self.credit(case, rng, episodes)
        longest = max(16, *(len(stream) for episode in episodes for stream in episode.streams))
        total, gradient, _ = one_step(
            self.policy,
            episodes,
            ours,
            loss=case.loss,
            kl=case.kl or 0.0,
            entropy=case.entropy,
            tokens_per_batch=int(longest * rng.integers(1, 6)),
        )
        anchor = "learner" if "correction" in case.loss else "rollout"
        expected, scale = self.expected(case, episodes, padded, theirs, ref.logprobs, anchor)
        self.model.zero_grad()
        expected.backward()
        return abs(total - float(expected.detach())) / scale, self.gradient_difference(gradient)

    def credit(self, case: Case, rng: np.random.Generator, episodes: list[Episode]) -> tuple[Advantages, PerEpisode]:
        """Advantages by the package, and by the reference as one number per sampled token of each episode."""
        if case.credit is None:
            ours = random_advantages(rng, episodes, case.advantages_per_stream)
            return ours, [
                np.concatenate([v[s.sampled] for v, s in zip(vs, e.streams, strict=True)]).tolist()
                for vs, e in zip(ours.values, episodes, strict=True)
            ]
        values = random_values(rng, episodes)
        greedy = {episode.group: float(rng.integers(0, 2)) for episode in episodes}
        settings = chosen(CREDIT_SETTINGS, case.credit)
        ours = posttrain.advantages(episodes, settings, values=values, greedy_returns=greedy)
        return ours, CREDITS[settings.type](plays_of(episodes, values, greedy), settings)

    def expected(
        self,
        case: Case,
        episodes: Sequence[Episode],
        padded: Padded,
        advantages: PerEpisode,
        ref: torch.Tensor,
        anchor: str,
    ) -> tuple[torch.Tensor, float]:
        """The reference's loss, with gradient, and the size of its terms."""
        settings = chosen(LOSS_SETTINGS, case.loss)
        now = score(self.model, padded)
        rollout = spread([s.rollout_logprobs[s.sampled] for e in episodes for s in e.streams], padded)
        per_stream = []
        for episode, numbers in zip(episodes, advantages, strict=True):
            place = 0
            for stream in episode.streams:
                count = int(stream.sampled.sum())
                per_stream.append(numbers[place : place + count])
                place += count
        batch = Batch(
            logp=now.logprobs,
            old=rollout if anchor == "rollout" else now.logprobs.detach(),
            rollout=rollout,
            ref=ref,
            A=spread(per_stream, padded),
            mask=padded.sampled.double(),
            entropy=now.entropy,
            episode=padded.episode,
            group=padded.group,
        )
        token = LOSSES[settings.type](batch, settings)
        if settings.off_policy_mask is not None:
            token = token * off_policy_mask(batch, settings.off_policy_mask)
        if settings.correction is not None:
            c = settings.correction
            token = token * weights_of_correction(batch, c.type, c.level, c.cap)
        if case.kl is not None:
            token = token + case.kl["coefficient"] * kl(batch, case.kl["estimator"])
        token = token - case.entropy * batch.entropy
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
                greedy=greedy[episode.group],
            )
        )
    return plays
