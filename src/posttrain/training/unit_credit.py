"""Unit credit in training: cut a step's episodes into units, value them, and add their credit to that of outcomes."""

import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial

import numpy as np
import torch

from posttrain.credit.units import estimators
from posttrain.credit.units.mixing import (
    CreditedUnits,
    UnitAdvantages,
    UnitRewards,
    with_unit_advantages,
    with_unit_rewards,
)
from posttrain.credit.units.rendering import (
    Rendering,
    RenderingTokens,
    blanked_prefix,
    prefix_lengths,
    render_coalition,
)
from posttrain.credit.units.segment import episode_answers, segment
from posttrain.credit.units.spans import Spans
from posttrain.episode import Advantages, Episode, RewardStreams, Stream
from posttrain.errors import InputError, RunError
from posttrain.models.policy import Policy
from posttrain.models.reward import RewardModel
from posttrain.recipe.units import (
    CompatibleCredit,
    EntropyUnits,
    HindsightCredit,
    LearnedCredit,
    LeaveOneOutCredit,
    PrefixCredit,
    ShapleyCredit,
    ShareCredit,
    TruncationCredit,
    UnitCreditRecipe,
)
from posttrain.seeds import random_stream
from posttrain.training.reward_scorer import OF_UNITS, RAW, RewardScorer, RunningStatistics, scaled
from posttrain.training.rows import stream_of
from posttrain.training.unit_normalizer import open_normalizer
from posttrain.training.unit_rewards import entropies_under
from posttrain.training.updater import Sample, on_stream, pack

_KEY = "reward.tokens_per_batch"


@dataclass(frozen=True, eq=False)
class JudgedAnswer:
    """An answer, its units, and what the reward model says of the whole."""

    stream: Stream
    """Up to the last sampled token."""
    units: Spans
    outcome: float
    """R, normalized."""
    label: str
    """Names the episode in messages."""


class UnitValuer:
    """Asks a reward model for the values that estimators of unit credit are made of; counts what it computes."""

    def __init__(
        self, model: RewardModel, tokens_per_batch: int, scale: Callable[[float], float], clip: float | None = None
    ) -> None:
        """`scale`: from what the model says to the normalized reward, which it clips to [-clip, clip]."""
        self.model = model
        self.budget = tokens_per_batch
        self.scale = scale
        self.clip = clip
        self.forwards = 0
        """Texts read."""
        self.tokens = 0
        """Tokens computed, a prompt that several texts of a pass share once."""
        self.clipped = 0
        """Values that the clip changed, or that lie on it."""
        tokenizer = model.tokenizer

        def ids(text: str) -> list[int]:
            found: list[int] = tokenizer.encode(text, add_special_tokens=False)
            return found

        self.ids = RenderingTokens(model.end_token, frozenset(model.end_tokens), ids("[omitted]"), ids(" ")[0])

    def prefixes(self, answers: Sequence[JudgedAnswer], one_pass: bool) -> list[np.ndarray]:
        """Per answer [K + 1] float64: the value of its prompt alone, after each unit, and of the whole, R."""
        seen = [prefix_lengths(answer.stream, answer.units) for answer in answers]
        if one_pass:
            values = self._probed(answers, seen)
        else:
            cut = ((self._ended(a.stream.ids[:n]) for n in own.tolist()) for a, own in zip(answers, seen, strict=True))
            values = self._read(answers, cut)
        return [np.append(own, answer.outcome) for own, answer in zip(values, answers, strict=True)]

    def coalitions(
        self, answers: Sequence[JudgedAnswer], members: Sequence[Sequence[int]], how: Rendering
    ) -> list[dict[int, float]]:
        """Per answer: the values of its coalitions of units, and of the whole one, R."""
        texts = (
            (render_coalition(answer.stream, answer.units, one, how, self.ids) for one in own)
            for answer, own in zip(answers, members, strict=True)
        )
        values = self._read(answers, texts)
        return [
            dict(zip(own, found.tolist(), strict=True)) | {(1 << len(answer.units)) - 1: answer.outcome}
            for own, found, answer in zip(members, values, answers, strict=True)
        ]

    def blanked(self, answers: Sequence[JudgedAnswer]) -> list[np.ndarray]:
        """Per answer [K] float64: the values of the published counterfactuals of its units."""
        texts = ((blanked_prefix(a.stream, *unit, self.ids) for unit in a.units) for a in answers)
        return self._read(answers, texts)

    def attention(self, answers: Sequence[JudgedAnswer]) -> list[np.ndarray]:
        """Per answer [K] float64: the attention paid to each of its units where the reward is read."""
        found: list[np.ndarray] = []
        for group in self._groups(answers, [len(a.stream) for a in answers]):
            for answer, paid in zip(group, self.model.last_token_attention([a.stream.ids for a in group]), strict=True):
                own = paid[answer.stream.sampled].astype(np.float64)
                found.append(np.add.reduceat(own, answer.units.cuts[:-1]))
        return found

    def _probed(self, answers: Sequence[JudgedAnswer], seen: Sequence[np.ndarray]) -> list[np.ndarray]:
        found: list[np.ndarray] = []
        left = iter(seen)
        # What stands behind the last beginning is read by none of them.
        for group in self._groups(answers, [int(own[-1]) + len(own) for own in seen]):
            parts = [next(left) for _ in group]
            streams = [a.stream.ids[: own[-1]] for a, own in zip(group, parts, strict=True)]
            found += [self._scaled(values) for values in self.model.prefix_rewards(streams, parts)]
        return found

    def _groups(self, answers: Sequence[JudgedAnswer], sizes: Sequence[int]) -> Iterator[list[JudgedAnswer]]:
        """Answers in their order, in passes of at most the budget's tokens."""
        group: list[JudgedAnswer] = []
        used = 0
        for answer, size in zip(answers, sizes, strict=True):
            if size > self.budget:
                raise RunError(
                    f"{answer.label} takes {size} tokens with its units, more than {_KEY} = {self.budget}; raise it"
                )
            if used + size > self.budget:
                yield group
                group, used = [], 0
            group.append(answer)
            used += size
            self.forwards += 1
            self.tokens += size
        if group:
            yield group

    def _read(self, answers: Sequence[JudgedAnswer], texts: Iterable[Iterable[np.ndarray]]) -> list[np.ndarray]:
        """Per answer the values [K] of whole texts [T] of it, each read on its own; the answer's prompt is shared.

        The texts of one answer exist at a time: there may be hundreds.
        """
        return [self._read_one(answer, own) for answer, own in zip(answers, texts, strict=True)]

    def _read_one(self, answer: JudgedAnswer, texts: Iterable[np.ndarray]) -> np.ndarray:
        prompt, label = int(np.argmax(answer.stream.sampled)), f"{answer.label}, without some of its units,"
        samples = [
            Sample(stream_of(ids, np.arange(len(ids)) >= prompt), label, np.zeros(0, np.float32)) for ids in texts
        ]
        values = np.zeros(len(samples), dtype=np.float64)
        for group in pack(samples, self.budget, _KEY):
            chosen = [samples[i].stream for i in group]
            with torch.no_grad():
                values[group] = self.model.rewards([s.ids for s in chosen], [s.sampled for s in chosen]).cpu().numpy()
            self.forwards += len(group)
            prompts = {s.ids[~s.sampled].tobytes(): int((~s.sampled).sum()) for s in chosen}
            self.tokens += sum(prompts.values()) + sum(int(s.sampled.sum()) for s in chosen)
        return self._scaled(values)

    def _ended(self, ids: np.ndarray) -> np.ndarray:
        return ids if int(ids[-1]) in self.ids.ends else np.append(ids, self.ids.end)

    def _scaled(self, values: np.ndarray) -> np.ndarray:
        found = np.array([self.scale(float(value)) for value in values], dtype=np.float64)
        self.clipped += 0 if self.clip is None else int((np.abs(found) >= self.clip).sum())
        return found


@dataclass(frozen=True)
class StepCredit:
    """The credit of a step's episodes."""

    advantages: Advantages
    units: Sequence[CreditedUnits | None] = ()
    """The units of each episode, None for an episode that the reward model did not score; empty without unit credit."""
    metrics: dict[str, float] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)


class UnitCreditor:
    """Cuts episodes into units and credits each with its part of the reward model's reward."""

    def __init__(
        self,
        settings: UnitCreditRecipe,
        scorer: RewardScorer,
        policy: Policy,
        running: RunningStatistics,
        tokens_per_batch: int,
        seed: int,
        max_turns: int,
    ) -> None:
        """Create a creditor.

        Args:
            running: statistics by which rewards are normalized with `reward.normalize: running`.
            tokens_per_batch: most tokens of a forward pass of the policy.
            max_turns: turns of an episode.

        Raises:
            InputError: the reward model cannot give such credit.
        """
        self.settings, self.scorer, self.policy, self.running = settings, scorer, policy, running
        self.tokens_per_batch, self.seed = tokens_per_batch, seed
        path, model = scorer.source.path, policy.recipe.path
        if not scorer.same_tokens:
            raise InputError(
                f"unit_credit: {path} has another tokenizer or template than {model}, so units of sampled "
                "tokens are no units of what it reads; start the reward model from a model of the same family"
            )
        of_units = scorer.reader is not None
        if isinstance(settings, LearnedCredit) and not of_units:
            raise InputError(
                f"unit_credit.type: {path} rewards whole answers; train one with `units` for `unit_rewards`, or use `prefix`"
            )
        if not isinstance(settings, LearnedCredit) and of_units:
            raise InputError(
                f"unit_credit.type: {path} rewards units, so an answer without some of them has other units; use "
                "`unit_rewards`, or a reward model of whole answers"
            )
        if max_turns > 1 and (scorer.renderer.rewrites_answers or scorer.renderer.rewrites_thoughts):
            raise InputError(
                f"unit_credit: the chat template of {model} rewrites earlier turns, so an episode of "
                "`environment.max_turns` above 1 is no one text with units; use another template, or one turn"
            )
        self.normalizer, self.warnings = open_normalizer(settings, scorer)
        self.decode = partial(policy.tokenizer.decode, clean_up_tokenization_spaces=False)

    def credit(
        self,
        episodes: Sequence[Episode],
        samples: Sequence[Sample],
        step: int,
        rewards: RewardStreams,
        assign: Callable[[RewardStreams], Advantages],
    ) -> StepCredit:
        """The advantages of `episodes` with the credit of their units.

        Causal unit credit is added to `rewards` before `assign` turns them into advantages. Hindsight unit credit is added
        to the advantages that `assign` returns.

        Args:
            samples: the samples of `episodes`.
            rewards: the rewards of outcomes. `running` must include these episodes already.

        Raises:
            RunError: an episode is in several token streams, so the reward model does not read it as a whole.
        """
        settings = self.settings
        with self.scorer.lock:
            units, metrics, warnings = self._units(episodes, samples, step)
        if isinstance(settings, HindsightCredit):
            how = (settings.beta, settings.statistics, settings.clip)
            advantages = with_unit_advantages(episodes, assign(rewards), units, *how)  # type: ignore[arg-type]
        else:
            placement = "even" if isinstance(settings, CompatibleCredit) else settings.placement
            advantages = assign(
                with_unit_rewards(episodes, rewards, units, settings.beta, placement)  # type: ignore[arg-type]
            )
        return StepCredit(advantages, units, metrics, warnings)

    def _units(
        self, episodes: Sequence[Episode], samples: Sequence[Sample], step: int
    ) -> tuple[list[CreditedUnits | None], dict[str, float], list[str]]:
        """The units of each episode with their credit, metrics, and warnings."""
        begun = time.perf_counter()
        scale = self.running.scaled if self.running.active else self._stored
        valuer = UnitValuer(self.scorer.model, self.scorer.source.tokens_per_batch, scale, self.scorer.source.clip)
        scored = [number for number, e in enumerate(episodes) if e.turns and RAW in e.turns[-1].info]
        for number in scored:
            if len(episodes[number].streams) > 1:
                raise RunError(
                    f"{samples[number].label} is in {len(episodes[number].streams)} token streams, because the chat "
                    "template rewrites history; credit of units needs one, so use a template that does not, or leave "
                    "unit_credit out"
                )
        chosen = [episodes[number] for number in scored]
        spans = self._spans(chosen, self._samples_of(scored, episodes, samples))
        answers = [
            JudgedAnswer(
                e.streams[0], own, scale(e.turns[-1].info[RAW]), f"step {step} group {e.group} episode {e.index}"
            )
            for e, own in zip(chosen, spans, strict=True)
        ]
        credits, empty = self._values(chosen, answers, valuer, step)
        kind = UnitAdvantages if isinstance(self.settings, HindsightCredit) else UnitRewards
        units: list[CreditedUnits | None] = [None] * len(episodes)
        for number, answer, own, nothing in zip(scored, answers, credits, empty, strict=True):
            if not np.isfinite([*own, nothing]).all():
                raise RunError(
                    f"{answer.label}: the reward model's values of an answer without some of its units are not all "
                    "finite, though that of the whole is; use another reward model or reward.dtype"
                )
            units[number] = kind(answer.units, own, answer.outcome, nothing)
        metrics = unit_metrics(units) | {
            "units/forwards": float(valuer.forwards),
            "units/tokens": float(valuer.tokens),
            "units/clipped": float(valuer.clipped),
            "time/units": time.perf_counter() - begun,
        }
        missing = [f"no units were found in any of the {len(scored)} episodes; look at unit_credit.segmenter"]
        return units, metrics, [] if any(u is not None and u.has_units for u in units) else missing

    def _stored(self, raw: float) -> float:
        return scaled(raw, *self.scorer.statistics, self.scorer.source.clip)

    def _samples_of(
        self, scored: Sequence[int], episodes: Sequence[Episode], samples: Sequence[Sample]
    ) -> list[Sample]:
        first = np.cumsum([0, *(len(e.streams) for e in episodes)])
        return [samples[first[number]] for number in scored]

    def _spans(self, episodes: Sequence[Episode], samples: Sequence[Sample]) -> list[Spans]:
        if isinstance(self.settings, LearnedCredit):
            return [_kept_units(episode) for episode in episodes]
        segmenter = self.settings.segmenter
        entropies: Sequence[np.ndarray | None] = [None] * len(episodes)
        if isinstance(segmenter, EntropyUnits):
            with self.policy.as_reference():
                of_samples = self.policy.compute(entropies_under, self.policy.model, samples, self.tokens_per_batch)
            entropies = [on_stream(own, s.stream.sampled) for own, s in zip(of_samples, samples, strict=True)]
        return [
            segment(segmenter, episode_answers(e, self.decode, None if own is None else [own]), self.decode)
            for e, own in zip(episodes, entropies, strict=True)
        ]

    def _values(
        self, episodes: Sequence[Episode], answers: Sequence[JudgedAnswer], valuer: UnitValuer, step: int
    ) -> tuple[list[np.ndarray], list[float]]:
        """Credits [K] and the value of an empty answer, of each."""
        recipe = self.settings
        if isinstance(recipe, PrefixCredit | TruncationCredit):
            values = valuer.prefixes(answers, recipe.probe == "one_pass")
            estimate = estimators.prefix if isinstance(recipe, PrefixCredit) else estimators.trunc
            return [estimate(own) for own in values], [float(own[0]) for own in values]
        if isinstance(recipe, LeaveOneOutCredit):
            members = [[*estimators.leave_one_out_coalitions(len(a.units)), 0] for a in answers]
            found = valuer.coalitions(answers, members, recipe.rendering)
            without = [np.array([own[m] for m in asked[:-1]]) for own, asked in zip(found, members, strict=True)]
            return [estimators.loo(a.outcome, own) for a, own in zip(answers, without, strict=True)], [
                f[0] for f in found
            ]
        if isinstance(recipe, ShapleyCredit):
            names = [("shapley", step, e.group, e.index) for e in episodes]
            randoms = [random_stream(self.seed, *name) for name in names]
            chosen = [
                estimators.sample_orders(len(a.units), recipe.permutations, r)
                for a, r in zip(answers, randoms, strict=True)
            ]
            members = [[0, *estimators.coalitions(len(a.units), o)] for a, o in zip(answers, chosen, strict=True)]
            found = valuer.coalitions(answers, members, recipe.rendering)
            credits = [
                estimators.shapley(len(a.units), order, own)
                for a, order, own in zip(answers, chosen, found, strict=True)
            ]
            return credits, [own[0] for own in found]
        if isinstance(recipe, CompatibleCredit):
            blanked = valuer.blanked(answers)
            credits = [np.where(a.units.is_unit, a.outcome - own, 0.0) for a, own in zip(answers, blanked, strict=True)]
            return credits, [0.0] * len(answers)
        if isinstance(recipe, LearnedCredit):
            return [self._learned(episode, valuer.scale) for episode in episodes], [0.0] * len(answers)
        return self._shared(recipe, answers, valuer), [0.0] * len(answers)

    def _shared(self, recipe: ShareCredit, answers: Sequence[JudgedAnswer], valuer: UnitValuer) -> list[np.ndarray]:
        if recipe.type == "attention":
            weights = valuer.attention(answers)
            return [estimators.attention(a.outcome, own) for a, own in zip(answers, weights, strict=True)]
        share = estimators.even if recipe.type == "even" else estimators.last
        return [share(a.outcome, len(a.units)) for a in answers]

    def _learned(self, episode: Episode, scale: Callable[[float], float]) -> np.ndarray:
        """Unit rewards [K], normalized by place or, without a fit, all alike, and clipped as the outcome is."""
        raw = np.array([reward for _, reward in episode.turns[-1].info[OF_UNITS]], dtype=np.float64)
        if self.normalizer is None:
            return np.array([scale(value) for value in raw.tolist()])
        clip = self.scorer.source.clip
        normal = self.normalizer.normalize(raw)
        return normal if clip is None else np.clip(normal, -clip, clip)


def unit_metrics(units: Sequence[CreditedUnits | None]) -> dict[str, float]:
    """What a step's credit looks like: means over answers that have units, but for the shares, which are of all."""
    known = [own for own in units if own is not None]
    found = [own for own in known if own.has_units]
    metrics = {"units/without": 1 - len(found) / len(known)} if known else {}
    if not found:
        return metrics
    credits = np.concatenate([own.credits for own in found])
    return metrics | {
        "units/per_answer": float(np.mean([len(own.spans) for own in found])),
        "units/tokens_per_unit": float(np.mean([own.spans.tokens / len(own.spans) for own in found])),
        "units/credit": float(credits.mean()),
        "units/spread": float(np.mean([own.credits.std() for own in found])),
        "units/negative": float((credits < 0).mean()),
        "units/residual": float(np.mean([abs(own.residual) for own in found])),
    }


def _kept_units(episode: Episode) -> Spans:
    """The units that the reward model rewarded when it scored the episode."""
    sampled = np.flatnonzero(episode.streams[0].sampled)
    ends = [place for place, _ in episode.turns[-1].info[OF_UNITS]]
    cuts = np.concatenate([[0], np.searchsorted(sampled, ends) + 1]).astype(np.int64)
    return Spans(cuts, np.ones(len(ends), dtype=bool))
