"""The verifier as a rule: `rule: posttrain.data.rationales.rule:reward`, or `:scores` with its parts."""

from functools import lru_cache
from typing import Any

from posttrain.data.rationales.policies import Policy
from posttrain.data.rationales.verifier import Verdict, verify

_policy = lru_cache(maxsize=1024)(Policy.from_json)


def reward(answer: str, row: dict[str, Any]) -> float:
    """Combined reward of `answer`, 0 to 1 (see `verifier`); `row["label"]` holds the policy as JSON.

    ValueError where the row has no text `label`, InputError where that is no policy.
    """
    return _verdict(answer, row).reward


def scores(answer: str, row: dict[str, Any]) -> dict[str, float]:
    """As `reward`, which is `score`, with the three numbers that it is made of."""
    found = _verdict(answer, row)
    parts = ("factual_accuracy", "logical_soundness", "efficiency")
    return {"score": found.reward} | {name: getattr(found, name) for name in parts}


def _verdict(answer: str, row: dict[str, Any]) -> Verdict:
    label = row.get("label")
    if not isinstance(label, str):
        raise ValueError("the row has no text `label` with its policy; use prompts of `posttrain data rationales`")
    return verify(answer, _policy(label))
