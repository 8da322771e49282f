"""Credit and the learner for your own training loop: episodes, then advantages, then one optimizer step of the policy."""

import warnings
import weakref
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from posttrain.credit.assign import compute_advantages, reward_streams
from posttrain.episode import Advantages, Episode, PerToken, RewardStreams, Stream, require_episodes
from posttrain.errors import InputError, require_type
from posttrain.models.policy import Policy
from posttrain.recipe.compose import chosen, section
from posttrain.recipe.credit import CREDITS, CreditRecipe
from posttrain.recipe.loss import LOSSES, EntropyRecipe, KlRecipe, PolicyLoss
from posttrain.recipe.model import LearnerRecipe, OptimizerRecipe
from posttrain.training.controllers import PolicyLearner, rounds_or_drops, set_advantages
from posttrain.training.objectives import energy_forward, logprobs, scores, token_energies, token_forward
from posttrain.training.optimizer import Optimizer
from posttrain.training.token_rules import set_bonus_tokens
from posttrain.training.updater import Samples, Updater, means, samples_of_episodes


def advantages(
    episodes: Sequence[Episode],
    credit: str | CreditRecipe | Mapping[str, Any] = "rloo",
    *,
    rewards: RewardStreams | None = None,
    values: PerToken | None = None,
    greedy_returns: Mapping[int, float] | None = None,
    energies: PerToken | None = None,
    **settings: Any,
) -> Advantages:
    """One advantage per sampled token of `episodes`, by the name of a credit.

        credit = posttrain.advantages(episodes, "grpo")
        credit = posttrain.advantages(episodes, "turn_returns", discount=0.9)

    Args:
        episodes: the result of `rollout`, with complete groups.
        credit: a `credit.type` of the recipe reference (`grpo`, `dr_grpo`, `rloo`, `brpo`, `arpo`, `reinforce`,
            `reinforce_pp`, `reinforce_pp_baseline`, `remax`, `opo`, `maxrl`, `pass_at_k`, `gdpo`,
            `optimal_token_baseline`, `turn_returns`, `mt_grpo`, `gigpo`, `gae`, `bilevel_gae`, or one that was
            registered), or its settings.
        rewards: rewards per token to use instead of those in the episodes, for example with a KL penalty in them.
        values: a critic's values before each sampled token, as `[episode][stream]` [T] float32; `gae` and `bilevel_gae`
            need them.
        greedy_returns: group id -> return of a greedy episode of the group's task; `remax` needs them.
        energies: the result of `Learner.energies` for the episodes; `optimal_token_baseline` needs them.
        settings: keys of the credit by name.

    Returns:
        `Advantages`; `values[episode][stream]` is [T] float32, zero where no token was sampled.

    Raises:
        InputError: there is no such credit, a setting is wrong, or `values` or `energies` are missing.
        RunError: a reward is not finite, or `greedy_returns` lacks a group.
    """
    require_episodes(episodes)
    recipe: CreditRecipe = chosen(CREDITS, credit, **settings)
    if "values" in recipe.inputs and values is None:
        raise InputError(f"credit {recipe.type} needs the values of a critic; pass `values`, or use another credit")
    if "energies" in recipe.inputs and energies is None:
        raise InputError(f"credit {recipe.type} needs the energies of the tokens; pass `learner.energies(episodes)`")
    return compute_advantages(episodes, recipe, rewards or reward_streams(episodes), greedy_returns, values, energies)


MISMATCH = 1e-3
"""Nats per token by which engine and learner may differ in float32, far above its rounding."""


class Learner:
    """Optimizes a policy on episodes with credit.

        learner = Learner(policy, learning_rate=1e-5, loss="gspo", kl=0.01)
        metrics = learner.update(episodes, posttrain.advantages(episodes, "grpo"))

    The policy's weights change in place. Call `rollout` again to sample episodes with the new weights.
    """

    def __init__(
        self,
        policy: Policy,
        *,
        loss: str | PolicyLoss | Mapping[str, Any] = "ppo",
        kl: float | KlRecipe | Mapping[str, Any] = 0.0,
        entropy: float | EntropyRecipe | Mapping[str, Any] = 0.0,
        temperature: float = 1.0,
        tokens_per_batch: int = 4096,
        updates: int = 1,
        **optimizer: Any,
    ) -> None:
        """Create the optimizer of the policy's trainable weights.

        Args:
            policy: the policy to train. With `lora`, only the adapters are trained.
            loss: a `loss.type` of the recipe reference (`ppo`, `gspo`, `gspo_token`, `cispo`, `dppo`, `sapo`, `gmpo`,
                `reinforce`, `gpg`, or one that was registered), or its settings such as `PpoLoss(clip_high=0.28)`.
            kl: coefficient of the KL penalty towards the policy's initial weights, which is added to the loss, or its
                settings.
            entropy: coefficient of the entropy bonus, or the settings of the `entropy` section of a recipe. `top_share`
                ranks tokens by their entropy under the current weights.
            temperature: the temperature that the episodes were sampled with.
            tokens_per_batch: maximum number of tokens in one forward pass. A longer stream raises RunError.
            updates: number of optimizer steps of the whole loop, for a `schedule` other than `constant`.
            optimizer: keys of the `optimizer` section of a recipe: `learning_rate`, `betas`, `weight_decay`,
                `max_gradient_norm`, `schedule`, `warmup_updates`, ...

        Raises:
            InputError: a setting is wrong, `kl.apply_to` is `reward`, or `kl.reference` would follow a policy with
                adapters.
        """
        require_type("policy", policy, Policy)
        require_type("updates", updates, int)
        self.policy = policy
        self.loss: PolicyLoss = chosen(LOSSES, loss)
        self.kl = section(KlRecipe, coefficient=kl) if isinstance(kl, int | float) else section(KlRecipe, kl)
        if self.kl.apply_to == "reward":
            raise InputError(
                "a learner adds the KL penalty to the loss; with `apply_to: reward`, subtract it from the rewards that you "
                "pass to `advantages`"
            )
        if isinstance(entropy, int | float):
            self.entropy = section(EntropyRecipe, coefficient=entropy)
        else:
            self.entropy = section(EntropyRecipe, entropy)
        for message in policy.warnings:
            warnings.warn(message, stacklevel=2)
        self.optimizer = Optimizer(policy.trainable(), section(OptimizerRecipe, **optimizer), updates)
        batches = section(LearnerRecipe, tokens_per_batch=tokens_per_batch)
        self._updater = Updater(policy, self.optimizer, batches, token_forward(policy, batches, temperature))
        self._learner = PolicyLearner(policy, self._updater, self.loss, self.kl, self.entropy, "rollout")
        self._energies = Updater(policy, self.optimizer, batches, energy_forward(policy, batches, temperature))
        self._old: dict[int, tuple[weakref.ref[Stream], np.ndarray | None]] = {}
        """Streams that were already trained on, by `id`, with their old log-probabilities; None means the rollout's."""

    def energies(self, episodes: Sequence[Episode]) -> PerToken:
        """The energy of each sampled token, zero elsewhere: per episode and stream [T] float32, for `advantages` with
        `optimal_token_baseline`. One forward pass."""
        return token_energies(self._energies, episodes, samples_of_episodes(episodes, self.policy.version))

    def update(self, episodes: Sequence[Episode], credit: Advantages) -> dict[str, float]:
        """Make one optimizer step.

        Several updates on the same episodes are PPO epochs. Old log-probabilities are those at the first of these
        updates: with `loss.old: learner`, the learner computes them in an additional forward pass. `auto` does so if
        weights are not float32, adapters have dropout, tokens were sampled by older weights, or `loss.correction` is
        set. Otherwise `auto` uses the engine's log-probabilities, and warns if they differ from the learner's.

        Args:
            episodes: the result of `rollout`.
            credit: the result of `advantages` for these episodes.

        Returns:
            Metrics by name as means over sampled tokens, for example `loss/policy`, `policy/entropy` in nats,
            `policy/kl` in nats per token, `optimizer/gradient_norm` before clipping. `optimizer/skipped` is 1 if a
            gradient was not finite, and `optimizer/no_signal` is 1 if no token has credit; in both cases the weights do
            not change.

        Raises:
            RunError: too many updates in a row were not finite, or an episode has more than `tokens_per_batch` tokens.
            ValueError: `credit` is for other episodes.
        """
        if [len(streams) for streams in credit.values] != [len(episode.streams) for episode in episodes]:
            raise ValueError("`credit` belongs to other episodes; compute it for these with `advantages`")
        samples = samples_of_episodes(episodes, self.policy.version)
        set_advantages(samples, credit)
        if self._learner.kl.coefficient > 0:
            with self.policy.as_reference():
                for sample, reference in zip(samples, logprobs(self._updater, samples), strict=True):
                    sample.ref_logprobs = reference
        first = self._set_old_logprobs(samples)
        learner_old = any(sample.old_logprobs is not None for sample in samples)
        self._learner.old = "learner" if learner_old else "rollout"
        if self.entropy.top_share < 1:
            for sample, (_, entropies, _) in zip(samples, scores(self._updater, samples), strict=True):
                sample.entropies = entropies
        if self.entropy.tokens != "all":
            set_bonus_tokens(episodes, samples, self.entropy.tokens, self.policy)
        metrics = means(self._learner.step(samples, first))
        mismatch = metrics.get("policy/mismatch", 0.0)
        unexpected = first and not learner_old and self.loss.old == "auto" and self.loss.ratio_to == "old"
        if unexpected and mismatch > MISMATCH:
            warnings.warn(
                f"the engine's log-probabilities differ from the learner's by {mismatch:.2g} nats per token; the local "
                "engine in float32 stays below 0.001, so check that both use the same weights, tokenizer and "
                "temperature. Set `old: learner` in the loss only for an engine with other arithmetic",
                stacklevel=2,
            )
        for message in self._updater.take_warnings():
            warnings.warn(message, stacklevel=2)
        self._learner.observe(metrics, len(episodes))
        return metrics

    def _set_old_logprobs(self, samples: Samples) -> bool:
        """Set `old_logprobs` where they differ from the rollout's. Returns whether no sample was trained on before."""
        self._old = {key: entry for key, entry in self._old.items() if entry[0]() is not None}
        new = [sample for sample in samples if id(sample.stream) not in self._old]
        stale = any((s.stream.versions[s.stream.sampled] != self.policy.version).any() for s in new)
        differs = stale or rounds_or_drops(self.policy.recipe, self.policy.device)
        by_learner = bool(new) and self.loss.old_source(differs) == "learner"
        computed = logprobs(self._updater, new) if by_learner else [None] * len(new)
        for sample, old in zip(new, computed, strict=True):
            self._old[id(sample.stream)] = (weakref.ref(sample.stream), old)
        for sample in samples:
            sample.old_logprobs = self._old[id(sample.stream)][1]
        if any(sample.old_logprobs is not None for sample in samples):
            for sample in samples:
                if sample.old_logprobs is None:
                    sample.old_logprobs = sample.rollout_logprobs
        return len(new) == len(samples)
