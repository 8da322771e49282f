"""Evaluators of held-out rows: loss per token, and accuracy of comparisons."""

import asyncio
import math
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any, ClassVar

import numpy as np

from posttrain.data.rendering import Renderer, TokenStream
from posttrain.data.tokens import TokenRow
from posttrain.distributed.world import current_world
from posttrain.engines.local.engine import LocalEngine
from posttrain.engines.protocol import Request
from posttrain.evaluation.results import Better, MetricResult
from posttrain.evaluation.statistics import ItemScores, Kind, calibration, pair_accuracy, probability_above, ratio
from posttrain.models.policy import Policy
from posttrain.models.reward import RewardModel
from posttrain.recipe.rollout import SamplingRecipe
from posttrain.rollout.driver import Played, quiet
from posttrain.runs.intervals import Estimate
from posttrain.runs.samples import LONGEST, RowAnswer, RowSample
from posttrain.runs.tables import START, TRAINED, Table, checkpoint_note
from posttrain.training.evaluators import Evaluator
from posttrain.training.objectives import PairObjective, RewardObjective, UnpairedObjective, logprobs
from posttrain.training.rows import DataSet, samples_of_compared, samples_of_row
from posttrain.training.updater import Samples, Updater

_SHOWN_ROWS, _REPLY_TOKENS = 6, 64
"""Rows with replies on the pages, and the tokens of a reply."""


class RowEvaluator(Evaluator, ABC):
    """A measurement of held-out rows, over all rows and over the rows of each domain."""

    measured: ClassVar[str]
    """What is measured, for the title of the table."""
    columns: ClassVar[tuple[str, ...]]
    """Headings of `cells`."""
    score: ClassVar[str]
    """What the score of an answer is."""
    work: ClassVar[str]
    """What is done with rows, for the display."""
    note: str
    """The meaning of the columns."""

    def __init__(
        self, learner: Updater[Any], validation: Sequence[TokenRow], test: Sequence[TokenRow], title: str
    ) -> None:
        """`validation`: rows of the learning curve. `test`: rows of the final table; if empty, the validation rows.
        `title`: name of the run, for the table."""
        self.learner, self.validation, self.test, self.title = learner, validation, test, title
        self._measured: list[np.ndarray] = []
        """For each call of `final`, the scores of the answers of each test row [n, answers] float64."""
        self._by_row = np.zeros((0, 1))

    def samples(self) -> list[RowSample]:
        """Test rows from the lowest to the highest score, evenly spaced, with replies of a policy."""
        if not self._measured:
            return []
        rows, before, after = self.test or self.validation, self._measured[0], self._measured[-1]
        if before is after:  # the initial model was not measured in this process
            before = np.full_like(after, np.nan)
        order = np.argsort(after[:, 0] - after[:, 1:].sum(axis=1))
        numbers = dict.fromkeys(order[np.linspace(0, len(order) - 1, _SHOWN_ROWS).round().astype(int)].tolist())
        model: Any = self.learner.model
        samples = []
        for number in numbers:
            row, answers = rows[number], []
            for side, (name, stream) in enumerate(zip(self.names(row), row.streams, strict=False)):
                prompt, answer = _last_answer(stream)
                scores = (_known(float(scores[number, side])) for scores in (before, after))
                answers.append(RowAnswer(name, model.tokenizer.decode(answer)[:LONGEST], *scores))
            samples.append(RowSample(row.origin, model.tokenizer.decode(prompt)[-LONGEST:], answers, self.score))
        if isinstance(model, Policy) and current_world().size == 1:
            prompts = [tuple(_last_answer(rows[number].streams[0])[0].tolist()) for number in numbers]
            with ThreadPoolExecutor(1) as thread:  # a notebook already runs an event loop in this one
                replies = thread.submit(asyncio.run, _replies(model, prompts)).result()
            samples = [replace(one, reply=reply) for one, reply in zip(samples, replies, strict=True)]
        return samples

    def names(self, row: TokenRow) -> Sequence[str]:
        """The names of the answers of a row."""
        return ("reference",)

    def cost(self) -> str:
        return f"{self.work} {len(self.test or self.validation)} held-out rows"

    def curve(self, step: int, played: Played = quiet) -> dict[str, Any]:
        return self.measure(self.validation, "validation", played) if self.validation else {}

    def final(self, step: int, played: Played = quiet) -> dict[str, Any]:
        values = self.measure(self.test or self.validation, "test", played)
        self._measured.append(self._by_row)
        return values

    def tables(self, lines: Mapping[str, Mapping[str, Any]]) -> list[Table]:
        rows = []
        for policy, title in ((START, START), (TRAINED, "trained model")):
            values = lines.get(policy, {})
            for suffix in [key.removeprefix("test/rows") for key in values if key.startswith("test/rows")]:
                note = checkpoint_note(values) if policy == TRAINED and not suffix else ""
                count = str(values[f"test/rows{suffix}"])
                rows.append((title, suffix.removeprefix("/") or "all", *self.cells(values, suffix), count, note))
        about = "" if self.test else " They are the validation rows, which also chose the checkpoint."
        table = Table(
            title=f"{self.title}: held-out {self.measured}",
            headings=("policy", "rows of", *self.columns, "n", "note"),
            rows=rows,
            note=f"{self.note}.{about}",
            words=("policy", "rows of", "note"),
        )
        return [table]

    @abstractmethod
    def measure(self, rows: Sequence[TokenRow], name: str, played: Played) -> dict[str, Any]:
        """The values of `rows`, under keys that begin with `name` and end with the domain."""

    @abstractmethod
    def cells(self, values: Mapping[str, Any], suffix: str) -> tuple[str, ...]:
        """The cells of a row of the table, from the values whose keys end with `suffix`."""


def _last_answer(stream: TokenStream) -> tuple[np.ndarray, np.ndarray]:
    """The tokens before the last answer of a stream, and those of the answer."""
    trained = np.flatnonzero(stream.trained)
    stop = int(trained[-1]) + 1
    start = int(np.flatnonzero(~stream.trained[:stop])[-1]) + 1 if not stream.trained[:stop].all() else 0
    return stream.ids[: max(start, 1)], stream.ids[start:stop]


async def _replies(policy: Policy, prompts: Sequence[tuple[int, ...]]) -> list[str]:
    """Greedy replies of at most `_REPLY_TOKENS` tokens."""
    engine, sampling = LocalEngine(policy, slots=len(prompts)), SamplingRecipe(temperature=0.0)
    engine.load_weights(policy.version)
    renderer = Renderer(policy.tokenizer, policy.end_tokens)

    async def reply(prompt: tuple[int, ...]) -> str:
        with engine.episode():
            return renderer.answer_text((await engine.generate(Request(prompt, sampling, 0, _REPLY_TOKENS))).ids)

    return list(await asyncio.gather(*map(reply, prompts)))


def _by_domain(rows: Sequence[TokenRow]) -> Iterator[tuple[str, np.ndarray]]:
    """The suffix of keys, and which rows it is about [n] bool: all rows, then those of each domain."""
    yield "", np.ones(len(rows), dtype=bool)
    for domain in sorted({row.domain for row in rows if row.domain is not None}):
        yield f"/{domain}", np.array([row.domain == domain for row in rows])


class LossEvaluator(RowEvaluator):
    """Loss in nats per trained token."""

    measured, work = "rows", "measuring the loss on"
    score = "loss in nats per token; lower is better"
    columns = ("loss", "95% interval", "perplexity")
    note = "Loss in nats per trained token; `n` rows; intervals are 95%, over rows"

    def cells(self, values: Mapping[str, Any], suffix: str) -> tuple[str, ...]:
        loss, low, high = (values[f"test/loss{part}{suffix}"] for part in ("", "_low", "_high"))
        return f"{loss:.4f}", "–" if low is None else f"[{low:.4f}, {high:.4f}]", f"{math.exp(loss):.2f}"

    def measure(self, rows: Sequence[TokenRow], name: str, played: Played) -> dict[str, Any]:
        owners, samples = zip(
            *((n, sample) for n, row in enumerate(rows) for sample in samples_of_row(row)), strict=True
        )
        scores = logprobs(self.learner, samples, lambda done: played(done * len(rows) // len(samples), len(rows)))
        nats, tokens = np.zeros(len(rows)), np.zeros(len(rows))
        for number, score in zip(owners, scores, strict=True):
            nats[number] -= float(score.sum(dtype="float64"))
            tokens[number] += len(score)
        self.row_scores = _scores("perplexity", "perplexity", "lower", nats, tokens)
        self._by_row = (nats / np.maximum(tokens, 1))[:, None]
        values: dict[str, Any] = {}
        for suffix, inside in _by_domain(rows):
            estimate = ratio(nats[inside].tolist(), tokens[inside].tolist())
            values[f"{name}/loss{suffix}"] = estimate.value
            values[f"{name}/loss_low{suffix}"] = _known(estimate.low)
            values[f"{name}/loss_high{suffix}"] = _known(estimate.high)
            values[f"{name}/rows{suffix}"] = int(inside.sum())
        loss = values[f"{name}/loss"]
        values[f"{name}/perplexity"] = math.inf if loss > 700 else math.exp(loss)
        return values


def _known(value: float) -> float | None:
    """A number, or None for a NaN, which is a number that the rows do not determine."""
    return None if math.isnan(value) else value


def _scores(name: str, kind: Kind, better: Better, sums: np.ndarray, counts: np.ndarray) -> MetricResult:
    """A metric of rows, by their position, from sums and counts [n] float64."""
    table = np.stack([sums, counts], axis=1)
    return MetricResult(name, ItemScores(kind, {str(row): summands for row, summands in enumerate(table)}), better)


class PreferenceEvaluator(RowEvaluator):
    """Accuracy, loss and margin of preference rows."""

    measured, work = "comparisons", "ranking"
    score = "reward; for a policy, the implicit one of its loss"
    columns = ("accuracy", "95% interval", "loss", "mean margin")

    def __init__(
        self,
        learner: Updater[Any],
        data: DataSet,
        title: str,
        objective_for: Callable[[Samples], PairObjective | UnpairedObjective | RewardObjective],
        unpaired: bool = False,
    ) -> None:
        """`title`: name of the run, for the table. `objective_for`: the objective of the given samples. `unpaired`: the
        rows are single answers labeled good or bad, not pairs. The evaluator of a reward model stores the statistics of the
        rewards with it, and prints examples."""
        super().__init__(learner, data.validation, data.test, title)
        self.objective_for, self.unpaired = objective_for, unpaired
        kind = "n pairs: the share whose better answer is ranked above the other; guessing gives 50%"
        if unpaired:
            kind = "n good and bad answers: the chance that a good one is ranked above a bad one"
        self.note = f"{kind}; 95% intervals over rows"
        self.margins = np.zeros(0)
        """Those [n] of the validation rows at the last evaluation."""

    def final(self, step: int, played: Played = quiet) -> dict[str, Any]:
        rows = self.test or self.validation
        losses, chosen, rejected = self._compare(rows, played)
        ranked = (np.sign(chosen - rejected) + 1) / 2
        paired = not np.isnan(ranked).any()
        both = np.stack([chosen, rejected], axis=1)
        self._measured.append(np.nansum(both, axis=1, keepdims=True) if self.unpaired else both)
        named: tuple[str, Kind, Better] = ("accuracy", "rate", "higher") if paired else ("loss", "mean", "lower")
        self.row_scores = _scores(*named, ranked if paired else losses, np.ones(len(rows)))
        if isinstance(model := self.learner.model, RewardModel):
            rewards = np.concatenate([chosen, rejected])
            if self.validation and self.test:
                rewards = np.concatenate(self._compare(self.validation)[1:])
            model.set_statistics(float(rewards.mean()), float(rewards.std(ddof=1)))
            self.artifacts = self._lines(rows, chosen, rejected)
        return _summary(rows, losses, chosen, rejected, "test")

    def names(self, row: TokenRow) -> Sequence[str]:
        return ("chosen", "rejected") if not self.unpaired else ("good",) if row.chosen else ("bad",)

    def cells(self, values: Mapping[str, Any], suffix: str) -> tuple[str, ...]:
        share, low, high = (values[f"test/accuracy{part}{suffix}"] for part in ("", "_low", "_high"))
        margin = values[f"test/margin{suffix}"]
        return (
            "–" if share is None else f"{100 * share:.1f}%",
            "–" if low is None else f"[{100 * low:.1f}, {100 * high:.1f}]",
            f"{values[f'test/loss{suffix}']:.4f}",
            "–" if margin is None else f"{round(margin, 3) + 0.0:.3f}",
        )

    def measure(self, rows: Sequence[TokenRow], name: str, played: Played) -> dict[str, Any]:
        losses, chosen, rejected = self._compare(rows, played)
        self.margins = chosen - rejected
        return _summary(rows, losses, chosen, rejected, name)

    def _compare(self, rows: Sequence[TokenRow], played: Played = quiet) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
        """Loss and the two rewards of each row, [n] float64; NaN for an answer that a row does not have."""
        samples = samples_of_compared(rows)
        objective: Any = self.objective_for(samples)
        table = np.full((3, len(rows)), np.nan)
        for group, output in self.learner.without_gradient(samples):
            compared = objective.compare(output, [samples[i] for i in group])
            values = (compared.losses, compared.chosen, compared.rejected)
            table[:, compared.rows] = np.stack([value.double().cpu().numpy() for value in values])
            played(int((~np.isnan(table[0])).sum()), len(rows))
        return table[0], table[1], table[2]

    def _lines(self, rows: Sequence[TokenRow], chosen: np.ndarray, rejected: np.ndarray) -> list[str]:
        """The calibration, and the pairs with the largest, median and smallest margin as text with their rewards."""
        model: Any = self.learner.model
        margins = chosen - rejected
        bins, error = calibration(list(margins))
        lines = [f"calibration: expected error {100 * error:.1f} percentage points over {len(margins)} pairs"]
        lines += [
            f"  predicted {100 * b.low:.0f}-{100 * b.high:.0f}%: mean {100 * b.confidence:.1f}%, right "
            f"{100 * b.accuracy.value:.1f}% [{100 * b.accuracy.low:.1f}, {100 * b.accuracy.high:.1f}], n {b.accuracy.n}"
            for b in bins
        ]
        order = np.argsort(margins)
        picked = dict.fromkeys(int(order[place]) for place in (-1, len(order) // 2, 0))
        lines.append("scored pairs (largest, median and smallest margin):")
        for number in picked:
            lines.append(f"  {rows[number].origin}: margin {margins[number]:+.3f}")
            for name, stream, reward in zip(
                ("chosen", "rejected"), rows[number].streams, (chosen[number], rejected[number]), strict=True
            ):
                text = " ".join(model.tokenizer.decode(stream.ids[stream.trained]).split())
                lines.append(f"    {name:8} {reward:+.3f}  {text[:150]}{'…' if len(text) > 150 else ''}")
        return lines


def _summary(
    rows: Sequence[TokenRow], losses: np.ndarray, chosen: np.ndarray, rejected: np.ndarray, name: str
) -> dict[str, Any]:
    values: dict[str, Any] = {}
    for suffix, inside in _by_domain(rows):
        good, bad = (rewards[inside & ~np.isnan(rewards)] for rewards in (chosen, rejected))
        if len(good) == len(bad) == inside.sum():
            accuracy = pair_accuracy(list((chosen - rejected)[inside]))
        elif len(good) and len(bad):
            accuracy = probability_above([good], [bad])
        else:
            accuracy = Estimate(math.nan, math.nan, math.nan, int(inside.sum()))
        values[f"{name}/rows{suffix}"] = int(inside.sum())
        values[f"{name}/accuracy{suffix}"] = _known(accuracy.value)
        values[f"{name}/accuracy_low{suffix}"] = _known(accuracy.low)
        values[f"{name}/accuracy_high{suffix}"] = _known(accuracy.high)
        values[f"{name}/loss{suffix}"] = float(losses[inside].mean())
        values[f"{name}/margin{suffix}"] = _known(_mean(chosen[inside]) - _mean(rejected[inside]))
    values[f"{name}/chosen"], values[f"{name}/rejected"] = _known(_mean(chosen)), _known(_mean(rejected))
    both = np.concatenate([chosen, rejected])
    values[f"{name}/reward_mean"], values[f"{name}/reward_std"] = _mean(both), float(np.nanstd(both))
    return values


def _mean(rewards: np.ndarray) -> float:
    """The mean of the rewards that exist; NaN if there are none, as in a domain with chosen answers alone."""
    known = rewards[~np.isnan(rewards)]
    return float(known.mean()) if len(known) else math.nan
