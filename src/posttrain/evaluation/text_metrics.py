"""Metrics of predictions that need no model: BLEU, chrF, exact match, and verifiers."""

import json
import math
import unicodedata
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from posttrain.environments.rules import SCORE, Rule, load_rule
from posttrain.errors import InputError
from posttrain.evaluation.predictions import Prediction
from posttrain.evaluation.scores import ItemScores, item_means, item_sums, sacrebleu_metric
from posttrain.plugins import require_module

Better = Literal["higher", "lower", "neither"]
"""Which values of a metric are better; `neither` is not compared."""


@dataclass(frozen=True)
class Measured:
    """One metric of a file of predictions."""

    name: str
    scores: ItemScores
    better: Better = "higher"
    texts: int = 0
    """Texts that were scored; an item may have several."""
    left_out: Mapping[str, int] = field(default_factory=dict)
    """Texts that were not, by reason."""
    about: Mapping[str, Any] = field(default_factory=dict)
    """What a reader has to know to compare the number: a signature, a layer, a model."""


def corpus_metric(name: Literal["bleu", "chrf"], rows: Sequence[Prediction]) -> Measured:
    """SacreBLEU's corpus BLEU (Papineni et al. 2002; Post 2018) or chrF2 (Popović 2015), in [0, 100]."""
    metric = sacrebleu_metric(name)
    known, missing = with_reference(rows)
    counts = metric._extract_corpus_statistics([row.text for row in known], [[row.reference for row in known]])
    scores = item_sums(name, ((row.item, own) for row, own in zip(known, counts, strict=True)))
    return Measured(name, scores, "higher", len(known), missing, {"signature": str(metric.get_signature())})


def exact_match(rows: Sequence[Prediction]) -> Measured:
    """Share of predictions that are the reference, after `normalized`."""
    known, missing = with_reference(rows)
    hits = ((row.item, float(normalized(row.text) == normalized(row.reference or ""))) for row in known)
    about = {"normalized": "Unicode NFKC, case folded, white space as one space, none at the ends"}
    return Measured("exact", item_means("rate", hits), "higher", len(known), missing, about)


def normalized(text: str) -> str:
    """NFKC, case folded, runs of white space as one space, none at the ends; punctuation counts."""
    return " ".join(unicodedata.normalize("NFKC", text).casefold().split())


def verified(rows: Sequence[Prediction], verifier: str) -> Measured:
    """Mean score by a data set of reasoning-gym (`chain_sum`) or by a rule (`module:function`, `file.py:function`).

    A row on which the verifier raises, or gives no finite number, is left out and counted; InputError where that
    leaves none.
    """
    score = _rule(verifier) if ":" in verifier else _gym_scorer(verifier)
    values: list[tuple[str, float]] = []
    left_out: dict[str, int] = {}
    first = ""
    for row in rows:
        try:
            value = score(row)
            if not math.isfinite(value):
                raise ValueError(f"it gave {value}")
            values.append((row.item, value))
        except Exception as error:
            first = first or f"{type(error).__name__}: {str(error)[:120]}, {row.origin}"
            reason = f"the verifier raised {type(error).__name__}"
            left_out[reason] = left_out.get(reason, 0) + 1
    if not values:
        raise InputError(
            f"--verifier {verifier}: no prediction could be scored ({first}); the rows need what it reads, a reference "
            "and often `metadata`"
        )
    kind: Literal["rate", "mean"] = "rate" if {value for _, value in values} <= {0.0, 1.0} else "mean"
    return Measured("verifier", item_means(kind, values), "higher", len(values), left_out, {"verifier": verifier})


def with_reference(rows: Sequence[Prediction]) -> tuple[list[Prediction], dict[str, int]]:
    """The rows that have a reference, and how many have none; InputError where none has one."""
    known = [row for row in rows if row.reference is not None]
    if not known:
        raise InputError(
            "no row has a reference to compare with; add the column `reference`, or name yours in `columns.reference`"
        )
    return known, {"no reference": len(rows) - len(known)} if len(known) < len(rows) else {}


def _rule(where: str) -> Callable[[Prediction], float]:
    try:
        rule: Rule = load_rule(where)
    except InputError as error:
        raise InputError(str(error).replace("environment.rule", "--verifier", 1)) from error

    def score(row: Prediction) -> float:
        filled = {} if row.reference is None else {"label": row.reference}
        found = rule(row.text, {**filled, **row.row})
        return float(found[SCORE] if isinstance(found, Mapping) else found)

    return score


def _gym_scorer(name: str) -> Callable[[Prediction], float]:
    reasoning_gym = require_module("reasoning_gym", f"--verifier {name}")
    if name not in require_module("reasoning_gym.factory", f"--verifier {name}").DATASETS:
        raise InputError(
            f"--verifier: there is no data set {name!r} in reasoning-gym; use one of its names, or `module:function`"
        )
    scorer = reasoning_gym.get_score_answer_fn(name)

    def score(row: Prediction) -> float:
        if row.reference is None:
            raise ValueError("the row has no reference")
        metadata = row.row.get("metadata")
        metadata = json.loads(metadata) if isinstance(metadata, str) else metadata
        question = row.prompt[-1]["content"] if row.prompt else ""
        entry = {"question": question, "answer": row.reference, "metadata": metadata or {}}
        return float(scorer(row.text.strip(), entry))

    return score
