"""Loss and perplexity on held-out rows, as a `Measure` of supervised fine-tuning."""

import math
from collections.abc import Mapping, Sequence
from typing import Any

from posttrain.data.tokens import TokenRow
from posttrain.evaluation.statistics import bootstrap_ratio
from posttrain.models.forward import TokenScores
from posttrain.recipe.stages import SftRecipe
from posttrain.runs.tables import Table
from posttrain.training.forward import logprobs
from posttrain.training.learner import Learner
from posttrain.training.measure import START, TRAINED
from posttrain.training.rows import DataSet, samples_of_row


class LossMeasure:
    """Nats per trained token, over all rows and over those of each domain."""

    def __init__(self, learner: Learner[TokenScores], recipe: SftRecipe, data: DataSet) -> None:
        self.learner = learner
        self.recipe = recipe
        self.data = data

    def references(self) -> dict[str, dict[str, Any]]:
        return {}

    def curve(self, step: int) -> dict[str, Any]:
        return self._measure(self.data.validation, "validation") if self.data.validation else {}

    def final(self, step: int) -> dict[str, Any]:
        return self._measure(self.data.final, "test")

    def cost(self) -> str:
        return f"measuring the loss on {len(self.data.final)} held-out rows"

    def tables(self, lines: Mapping[str, Mapping[str, Any]]) -> list[Table]:
        """Before and after, whole and by domain."""
        rows = []
        for player, title in ((START, START), (TRAINED, "trained model")):
            values = lines.get(player, {})
            for key in [key for key in values if key.startswith("test/rows")]:
                suffix = key.removeprefix("test/rows")
                loss, low, high = (values[f"test/loss{part}{suffix}"] for part in ("", "_low", "_high"))
                interval = f"[{low:.4f}, {high:.4f}]" if low is not None else "–"
                note = f"step {values['best_step']}, {values['chosen']}" if player == TRAINED and not suffix else ""
                domain, count = suffix.removeprefix("/") or "all", values[key]
                rows.append((title, domain, f"{loss:.4f}", interval, f"{math.exp(loss):.2f}", str(count), note))
        headings = ("player", "rows of", "loss", "95% interval", "perplexity", "n", "note")
        about = "" if self.data.test else " They are the validation rows, which also chose the checkpoint."
        table = Table(
            title=f"{self.recipe.name}: held-out rows",
            headings=headings,
            rows=rows,
            note="Loss in nats per trained token; `n` rows; intervals are 95%, by bootstrap over rows." + about,
            words=("player", "rows of", "note"),
        )
        return [table]

    def artefacts(self) -> Sequence[str]:
        return []

    def _measure(self, rows: Sequence[TokenRow], name: str) -> dict[str, Any]:
        samples = [(row, sample) for row in rows for sample in samples_of_row(row)]
        scores = logprobs(self.learner, [sample for _, sample in samples])
        nats: dict[int, float] = {}
        tokens: dict[int, float] = {}
        for (row, _), score in zip(samples, scores, strict=True):
            nats[id(row)] = nats.get(id(row), 0.0) - float(score.sum(dtype="float64"))
            tokens[id(row)] = tokens.get(id(row), 0.0) + len(score)
        values: dict[str, Any] = {}
        domains = sorted({row.domain for row in rows if row.domain is not None})
        for domain in [None, *domains]:
            chosen = [row for row in rows if domain is None or row.domain == domain]
            estimate = bootstrap_ratio([nats[id(row)] for row in chosen], [tokens[id(row)] for row in chosen])
            suffix = "" if domain is None else f"/{domain}"
            values[f"{name}/loss{suffix}"] = estimate.value
            known = not math.isnan(estimate.low)  # one row has no interval
            values[f"{name}/loss_low{suffix}"] = estimate.low if known else None
            values[f"{name}/loss_high{suffix}"] = estimate.high if known else None
            values[f"{name}/rows{suffix}"] = len(chosen)
        values[f"{name}/perplexity"] = math.exp(values[f"{name}/loss"])
        return values
