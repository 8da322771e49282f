"""Unit credit in training: segment a step's episodes into units, compute their credit, and add it to the outcome's."""

import json
import math
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path

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
from posttrain.credit.units.normalizer import Normalizer, fit_key, parse_key, read_normalizer, same
from posttrain.credit.units.segment import segment, stream_answers
from posttrain.credit.units.spans import RenderingTokens, Spans, blanked_prefix, prefix_lengths, with_units
from posttrain.episode import Advantages, Episode, RewardStreams, Stream
from posttrain.errors import InputError, RunError
from posttrain.models.policy import Policy
from posttrain.models.reward import RewardModel
from posttrain.recipe.rl import RlRecipe
from posttrain.recipe.units import (
    CompatibleCredit,
    EntropyUnits,
    HindsightCredit,
    LearnedCredit,
    LeaveOneOutCredit,
    PrefixCredit,
    UnitCreditRecipe,
)
from posttrain.training.controllers import RAW, RunningStatistics, scaled
from posttrain.training.reward_scorer import OF_UNITS, RewardScorer
from posttrain.training.rows import stream_of
from posttrain.training.unit_rewards import WEAK, entropies_under
from posttrain.training.updater import Sample, Samples, pack

_KEY = "reward.tokens_per_batch"


@dataclass(frozen=True, eq=False)
class JudgedAnswer:
    """An answer, its units, and its reward."""

    stream: Stream
    """Ends at the last sampled token."""
    units: Spans
    outcome: float
    """The normalized reward R of the whole answer."""
    label: str
    """Name of the episode in messages."""


class UnitValuer:
    """Computes the reward-model values that estimators of unit credit need, and counts the work."""

    def __init__(
        self, model: RewardModel, tokens_per_batch: int, scale: Callable[[float], float], clip: float | None = None
    ) -> None:
        """`scale`: maps a raw reward to the normalized reward, clipped to [-clip, clip]."""
        self.model, self.budget, self.scale, self.clip = model, tokens_per_batch, scale, clip
        self.forwards = 0
        """Texts scored."""
        self.tokens = 0
        """Tokens computed. A prompt that several texts of a pass share counts once."""
        self.clipped = 0
        """Values at or beyond the clip."""
        space = model.tokenizer.encode(" ", add_special_tokens=False)[0]
        self.ids = RenderingTokens(model.end_token, frozenset(model.end_tokens), space)

    def prefixes(self, answers: Sequence[JudgedAnswer], one_pass: bool) -> list[np.ndarray]:
        """Per answer [K + 1] float64: the value of the prompt alone, after each unit, and of the whole answer, R."""
        lengths = [prefix_lengths(answer.stream, answer.units) for answer in answers]
        values: list[np.ndarray] = []
        if one_pass:
            remaining = iter(lengths)
            # Tokens after the longest prefix are not needed.
            for group in self._groups(answers, [int(prefixes[-1]) + len(prefixes) for prefixes in lengths]):
                group_lengths = [next(remaining) for _ in group]
                streams = [a.stream.ids[: prefixes[-1]] for a, prefixes in zip(group, group_lengths, strict=True)]
                values += [self._scaled(rewards) for rewards in self.model.prefix_rewards(streams, group_lengths)]
        else:
            for answer, prefixes in zip(answers, lengths, strict=True):
                texts = [answer.stream.ids[:n] for n in prefixes.tolist()]
                ended = [ids if int(ids[-1]) in self.ids.ends else np.append(ids, self.ids.end) for ids in texts]
                values.append(self._score(answer, ended))
        return [np.append(prefix, answer.outcome) for prefix, answer in zip(values, answers, strict=True)]

    def without(self, answers: Sequence[JudgedAnswer]) -> list[np.ndarray]:
        """Per answer [K + 1] float64: the values without unit 0, 1, ..., K - 1, and without all of them."""
        values = []
        for answer in answers:
            kept = np.vstack([~np.eye(len(answer.units), dtype=bool), np.zeros(len(answer.units), dtype=bool)])
            texts = (with_units(answer.stream, answer.units, row, self.ids) for row in kept)
            values.append(self._score(answer, texts))
        return values

    def blanked(self, answers: Sequence[JudgedAnswer]) -> list[np.ndarray]:
        """Per answer [K] float64: the values of the published counterfactuals of its units."""
        return [self._score(a, (blanked_prefix(a.stream, *unit, self.ids) for unit in a.units)) for a in answers]

    def _groups(self, answers: Sequence[JudgedAnswer], sizes: Sequence[int]) -> Iterator[list[JudgedAnswer]]:
        """The answers in order, in groups of at most `tokens_per_batch` tokens."""
        group: list[JudgedAnswer] = []
        used = 0
        for answer, size in zip(answers, sizes, strict=True):
            if size > self.budget:
                raise RunError(
                    f"{answer.label} has {size} tokens with its units, more than {_KEY} = {self.budget}; raise {_KEY}"
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

    def _score(self, answer: JudgedAnswer, texts: Iterable[np.ndarray]) -> np.ndarray:
        """The values [K] of K texts, each scored separately, which share the prompt of `answer`."""
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

    def _scaled(self, values: np.ndarray) -> np.ndarray:
        scaled = np.array([self.scale(float(value)) for value in values], dtype=np.float64)
        self.clipped += 0 if self.clip is None else int((np.abs(scaled) >= self.clip).sum())
        return scaled


def open_normalizer(recipe: UnitCreditRecipe, scorer: RewardScorer) -> tuple[Normalizer | None, list[str]]:
    """The normalizer that the recipe names, or None, and a warning if its fit explains almost nothing.

    Raises `InputError` if it cannot be read, or was fitted to units that differ from those of the reward model.
    """
    if not isinstance(recipe, LearnedCredit) or recipe.normalizer is None:
        return None, []
    units = scorer.model.units
    assert units is not None
    path = Path(recipe.normalizer)
    if path.is_dir():
        run = path if (path / "normalizer").is_dir() else path.parent  # a run, or the model that it exported
        path = run / "normalizer" / "params.json"
    try:
        key, normalizer = read_normalizer(path, parse_key(recipe.fit) if recipe.fit is not None else None)
    except InputError as error:
        raise InputError(f"unit_credit.normalizer, unit_credit.fit: {error}") from error
    expected = fit_key(key.model, key.dataset, units.segmenter)
    if not same(key, expected):
        raise InputError(
            f"unit_credit.normalizer: {path} has the fit {key}, but {scorer.source.path} rewards units of {expected.method}, "
            f"threshold {expected.threshold}; fit it again with `posttrain fit-normalizer`"
        )
    try:
        r2 = json.loads((path.parent / f"{key.dataset}.json").read_text(encoding="utf-8"))["r2"]["mean"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError):
        return normalizer, []  # published and hand-written files have no R²
    if r2 is not None and r2 >= WEAK:
        return normalizer, []
    shown = "none" if r2 is None else f"{r2:.3f}"
    return normalizer, [
        f"unit_credit.normalizer: the position of a unit hardly explains its mean reward in {key} (R² {shown}); see "
        "plots/normalizer.png of the reward model's run"
    ]


@dataclass(frozen=True)
class StepCredit:
    """The credit of a step's episodes."""

    advantages: Advantages
    units: Sequence[CreditedUnits | None] = ()
    """The units of each episode, None for an episode that the reward model did not score; empty without unit credit."""
    metrics: dict[str, float] = field(default_factory=dict)
    warnings: list[str] = field(default_factory=list)


class UnitCreditor:
    """Segments episodes into units and assigns each unit its share of the reward model's reward."""

    def __init__(self, recipe: RlRecipe, scorer: RewardScorer, policy: Policy, running: RunningStatistics) -> None:
        """`running`: statistics by which rewards are normalized with `reward.normalize: running`. InputError if the reward model
        does not support this credit."""
        assert recipe.unit_credit is not None
        settings = recipe.unit_credit
        self.settings, self.scorer, self.policy, self.running = settings, scorer, policy, running
        self.tokens_per_batch = recipe.learner.tokens_per_batch
        path, model = scorer.source.path, policy.recipe.path
        if not scorer.same_tokens:
            raise InputError(
                f"unit_credit: {path} and {model} have different tokenizers or chat templates, so units of sampled tokens are not "
                "units of the reward model's input; train the reward model from a model of the same family"
            )
        rewards_units = scorer.model.units is not None
        if isinstance(settings, LearnedCredit) and not rewards_units:
            raise InputError(
                f"unit_credit.type: {path} rewards whole answers; train a reward model with `units`, or use `prefix`"
            )
        if not isinstance(settings, LearnedCredit) and rewards_units:
            raise InputError(
                f"unit_credit.type: {path} rewards units, and removing some of them changes the others; use "
                "`unit_rewards`, or a reward model of whole answers"
            )
        if recipe.environment.max_turns > 1 and (scorer.renderer.rewrites_answers or scorer.renderer.rewrites_thoughts):
            raise InputError(
                f"unit_credit: the chat template of {model} rewrites earlier turns, so episodes with "
                "`environment.max_turns` above 1 are not a single text; use another template, or one turn"
            )
        self.normalizer, self.warnings = open_normalizer(settings, scorer)
        self.decode = partial(policy.tokenizer.decode, clean_up_tokenization_spaces=False)

    def credit(
        self,
        episodes: Sequence[Episode],
        samples: Samples,
        step: int,
        rewards: RewardStreams,
        assign: Callable[[RewardStreams], Advantages],
    ) -> StepCredit:
        """The advantages of `episodes` with the credit of their units.

        Causal unit credit is added to `rewards` before `assign` turns them into advantages. Hindsight unit credit is
        added to the advantages that `assign` returns. `samples`: the samples of `episodes`. `rewards`: the rewards of
        outcomes. `running` must include these episodes already. RunError if an episode consists of several token
        streams, so the reward model cannot score it as a whole."""
        settings = self.settings
        with self.scorer.lock:
            units, metrics, warnings = self._units(episodes, samples, step)
        if isinstance(settings, HindsightCredit):
            advantages = with_unit_advantages(episodes, assign(rewards), units, settings.beta)  # type: ignore[arg-type]
        else:
            placement = "even" if isinstance(settings, CompatibleCredit) else settings.placement
            advantages = assign(
                with_unit_rewards(episodes, rewards, units, settings.beta, placement)  # type: ignore[arg-type]
            )
        return StepCredit(advantages, units, metrics, warnings)

    def _units(
        self, episodes: Sequence[Episode], samples: Samples, step: int
    ) -> tuple[list[CreditedUnits | None], dict[str, float], list[str]]:
        """The units of each episode with their credit, metrics, and warnings."""
        begun = time.perf_counter()
        source = self.scorer.source
        mean, std = self.scorer.statistics
        scale: Callable[[float], float] = partial(scaled, mean=mean, std=std, clip=source.clip)
        if self.running.active:
            scale = self.running.scaled
        valuer = UnitValuer(self.scorer.model, source.tokens_per_batch, scale, source.clip)
        scored = [number for number, e in enumerate(episodes) if e.turns and RAW in e.turns[-1].info]
        for number in scored:
            if len(episodes[number].streams) > 1:
                raise RunError(
                    f"{samples[number].label} consists of {len(episodes[number].streams)} token streams, because the chat "
                    "template rewrites history, but unit credit needs one; use another template, or remove unit_credit"
                )
        chosen = [episodes[number] for number in scored]
        first = np.cumsum([0, *(len(episode.streams) for episode in episodes)])
        spans = self._spans(chosen, [samples[first[number]] for number in scored])
        answers = [
            JudgedAnswer(
                e.streams[0], units, scale(e.turns[-1].info[RAW]), f"step {step} group {e.group} episode {e.index}"
            )
            for e, units in zip(chosen, spans, strict=True)
        ]
        credits, empty = self._values(chosen, answers, valuer)
        kind = UnitAdvantages if isinstance(self.settings, HindsightCredit) else UnitRewards
        credited: list[CreditedUnits | None] = [None] * len(episodes)
        for number, answer, credit, of_empty in zip(scored, answers, credits, empty, strict=True):
            if not np.isfinite([*credit, of_empty]).all():
                raise RunError(
                    f"{answer.label}: the reward model's values of parts of the answer are not all finite; use another reward model "
                    "or reward.dtype"
                )
            if kind is UnitAdvantages:
                credit = np.where(answer.units.is_unit, credit, 0.0)
            credited[number] = kind(answer.units, credit, answer.outcome, of_empty)
        metrics = unit_metrics(credited) | {
            "units/forwards": float(valuer.forwards),
            "units/tokens": float(valuer.tokens),
            "units/clipped": float(valuer.clipped),
            "time/units": time.perf_counter() - begun,
        }
        missing = [f"none of the {len(scored)} episodes has units; change unit_credit.segmenter"]
        return credited, metrics, [] if any(u is not None and u.has_units for u in credited) else missing

    def _spans(self, episodes: Sequence[Episode], samples: Samples) -> list[Spans]:
        if isinstance(self.settings, LearnedCredit):
            spans = []
            for episode in episodes:  # the units that the reward model rewarded when it scored the episode
                sampled = np.flatnonzero(episode.streams[0].sampled)
                ends = [place for place, _ in episode.turns[-1].info[OF_UNITS]]
                cuts = np.concatenate([[0], np.searchsorted(sampled, ends) + 1]).astype(np.int64)
                spans.append(Spans(cuts, np.ones(len(ends), dtype=bool)))
            return spans
        segmenter = self.settings.segmenter
        entropies: Sequence[np.ndarray | None] = [None] * len(episodes)
        if isinstance(segmenter, EntropyUnits):
            with self.policy.as_reference():
                entropies = self.policy.compute(entropies_under, self.policy.model, samples, self.tokens_per_batch)
        given = self.policy.end_tokens, self.decode
        return [
            segment(segmenter, stream_answers(e.streams[0], *given, values), self.decode)
            for e, values in zip(episodes, entropies, strict=True)
        ]

    def _values(
        self, episodes: Sequence[Episode], answers: Sequence[JudgedAnswer], valuer: UnitValuer
    ) -> tuple[list[np.ndarray], list[float]]:
        """Per answer: the credits [K] of its units, and the value of an empty answer."""
        recipe = self.settings
        if isinstance(recipe, PrefixCredit):
            values = valuer.prefixes(answers, recipe.probe == "one_pass")
            return [estimators.prefix(prefixes) for prefixes in values], [float(prefixes[0]) for prefixes in values]
        if isinstance(recipe, LeaveOneOutCredit):
            values = valuer.without(answers)
            credits = [estimators.loo(a.outcome, own[:-1]) for a, own in zip(answers, values, strict=True)]
            return credits, [float(own[-1]) for own in values]
        if isinstance(recipe, CompatibleCredit):
            blanked = valuer.blanked(answers)
            credits = [np.where(a.units.is_unit, a.outcome - v, 0.0) for a, v in zip(answers, blanked, strict=True)]
            return credits, [0.0] * len(answers)
        raw = [np.array([reward for _, reward in e.turns[-1].info[OF_UNITS]], dtype=np.float64) for e in episodes]
        if self.normalizer is None:  # normalized like outcomes
            credits = [np.array([valuer.scale(reward) for reward in rewards.tolist()]) for rewards in raw]
        else:  # by position, and clipped like outcomes
            most = math.inf if valuer.clip is None else valuer.clip
            credits = [np.clip(self.normalizer.normalize(rewards), -most, most) for rewards in raw]
        return credits, [0.0] * len(answers)


def unit_metrics(units: Sequence[CreditedUnits | None]) -> dict[str, float]:
    """Metrics of a step's unit credit: means over answers with units. `units/without` is a share of all scored answers."""
    scored = [answer for answer in units if answer is not None]
    having = [answer for answer in scored if answer.has_units]
    metrics = {"units/without": 1 - len(having) / len(scored)} if scored else {}
    if not having:
        return metrics
    by_answer = [answer.credits[answer.spans.is_unit] for answer in having]
    credits = np.concatenate(by_answer)
    return metrics | {
        "units/per_answer": float(np.mean([len(part) for part in by_answer])),
        "units/tokens_per_unit": float(np.mean([a.spans.lengths[a.spans.is_unit].mean() for a in having])),
        "units/credit": float(credits.mean()),
        "units/spread": float(np.mean([part.std() for part in by_answer])),
        "units/negative": float((credits < 0).mean()),
        "units/residual": float(np.mean([abs(answer.residual) for answer in having])),
    }
