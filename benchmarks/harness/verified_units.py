"""A short form of the rationales task for small models, and PPO with the credit of its steps from the verifier itself."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any, Literal

import numpy as np

import posttrain
from harness.table import read_lines, write_lines
from posttrain.credit.assign import sampled_rewards, to_streams
from posttrain.credit.critic import ValueCredit
from posttrain.credit.units import estimators
from posttrain.credit.units.mixing import UnitAdvantages, UnitRewards, with_unit_advantages, with_unit_rewards
from posttrain.credit.units.segment import segment, stream_answers
from posttrain.credit.units.spans import Spans
from posttrain.episode import Advantages, Episode, RewardStreams, StopReason
from posttrain.recipe.units import StepUnits
from posttrain.seeds import random_stream
from posttrain_environments.rationales.dataset import identity
from posttrain_environments.rationales.domains import draw_policy
from posttrain_environments.rationales.policies import DECISIONS, Attribute, Policy, Question
from posttrain_environments.rationales.procedures import LABELS, Procedure, best_procedure, write
from posttrain_environments.rationales.verifier import Verdict, verify

Keys = dict[str, Any]

# -- a short form of the rationales task -------------------------------------------------------------------------------

WORDS = ["old", "big", "red", "new", "wet", "hot", "paid", "lost", "late", "used", "open", "rare"]
"""What is asked about a case, instead of questions in English."""
MARKS = ["? If YES, ", ". If NO, ", "go to Step ", "Rationale: short.", *DECISIONS]
"""Single tokens of the tokenizer."""
NOISE = 0.3
"""Share of targets that are random in the imitated procedures, which keeps exploration for RL."""
IMITATED, TRAINED, CURVE, FINAL = 4000, 1000, 64, 128
"""Policies of fine-tuning, of RL, of the learning curve and of the final tasks, in this order. Settings are chosen on as
many others, which follow them.
"""


def short_policy(number: int) -> Policy | None:
    """A policy on three of `WORDS`; None for a draw that is not suitable."""
    drawn = draw_policy(random_stream("claims", number))
    if len(drawn.attributes) > 3 or any(len(attribute.questions) > 1 for attribute in drawn.attributes):
        return None
    words = random_stream("claims", "words", number).permutation(WORDS)[: len(drawn.attributes)]
    return replace(
        drawn,
        domain="cases",
        attributes=tuple(Attribute((Question(f"{word}?", str(word), f"not {word}"),)) for word in words),
    )


def short_prompt(policy: Policy) -> str:
    """The rules in order, one per line."""
    lines = []
    for rule in policy.rules:
        clauses = [getattr(policy.questions[place], "yes" if wanted else "no") for place, wanted in rule.conditions]
        lines.append(f"{(' and ' if rule.every else ' or ').join(clauses)} {rule.decision}")
    return "\n".join([*lines, f"else {policy.default}"])


def write_rows(folder: Path) -> None:
    """`sft.jsonl` with noisy procedures, `imitated.jsonl` with their policies, and `prompts.jsonl` with the other policies. No
    policy occurs twice."""
    rows: list[Keys] = []
    seen: set[str] = set()
    number = 0
    while len(rows) < IMITATED + TRAINED + 2 * (CURVE + FINAL):
        policy = short_policy(number)
        number += 1
        if policy is None or identity(policy) in seen or len((best := best_procedure(policy)).steps) > 5:
            continue
        seen.add(identity(policy))
        prompt = {"role": "user", "content": short_prompt(policy)}
        answer = {"role": "assistant", "content": write(noisy(best, number))}
        rows.append({"messages": [prompt, answer], "prompt": [prompt], "label": policy.to_json()})
    for name, part, keys in (
        ("sft", rows[:IMITATED], ("messages",)),
        ("imitated", rows[:IMITATED], ("prompt", "label")),
        ("prompts", rows[IMITATED:], ("prompt", "label")),
    ):
        write_lines(folder / f"{name}.jsonl", ({key: row[key] for key in keys} for row in part))


def noisy(best: Procedure, number: int) -> Procedure:
    """An optimal procedure in which each target is random with the probability `NOISE`."""
    draws = random_stream("claims", "noise", number)

    def target(place: int, right: str) -> str:
        possible = [*DECISIONS, *LABELS[place + 1 : len(best.steps)]]
        return possible[int(draws.integers(len(possible)))] if draws.random() < NOISE else right

    steps = [replace(s, yes=target(k, s.yes), no=target(k, s.no)) for k, s in enumerate(best.steps)]
    return Procedure(tuple(steps), "short.")


@lru_cache
def policies(file: str) -> list[Policy]:
    """The policies of `prompts.jsonl`, by environment seed."""
    return [Policy.from_json(row["label"]) for row in read_lines(Path(file))]


def random_score(policy: Policy, number: int) -> float:
    """The verifier's score of random steps, as many as are optimal: any question, and a decision or any later step."""
    draws = random_stream("claims", "random", number)
    best = best_procedure(policy).steps
    steps = []
    for place, step in enumerate(best):
        targets = [*DECISIONS, *LABELS[place + 1 : len(best)]]
        question = policy.questions[int(draws.integers(len(policy.questions)))].ask
        yes, no = (targets[int(draws.integers(len(targets)))] for _ in range(2))
        steps.append(replace(step, question=question, yes=yes, no=no))
    return verify(write(Procedure(tuple(steps), "short.")), policy).reward


# -- credit of units from the verifier itself --------------------------------------------------------------------------

SEGMENTER = StepUnits(type="steps", closing="^Rationale:")


@lru_cache
def decoder(path: str) -> Callable[[Any], str]:
    """Text of token ids, without the token that ends an answer."""
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(path)
    return lambda ids: str(tokenizer.decode(ids, clean_up_tokenization_spaces=False))


class VerifiedUnits(ValueCredit):
    """PPO with the credit of units, where the verifier takes the place of the reward model: credit without its errors."""

    type: Literal["verified_units"] = "verified_units"  # type: ignore[assignment]
    estimator: Literal["outcome", "prefix", "loo", "drca_published", "unit_rewards", "reached_unit_rewards"]
    beta: float = 0.8
    prompts: str
    tokenizer: str

    def estimate(self, episodes: Sequence[Episode], rewards: Any, values: Any) -> list[np.ndarray]:
        """GAE of the rewards with those of units."""
        return super().estimate(episodes, self._with_units(episodes, rewards), values)

    def returns(self, episodes: Sequence[Episode], rewards: Any) -> list[np.ndarray]:
        """Returns of the rewards with those of units."""
        return super().returns(episodes, self._with_units(episodes, rewards))

    def compute(self, episodes: Sequence[Episode], rewards: Any, values: Any) -> list[np.ndarray]:
        """Adds the advantages of units with `loo`."""
        advantages = super().compute(episodes, rewards, values)
        if self.estimator != "loo":
            return advantages
        streams = Advantages([to_streams(e, a) for e, a in zip(episodes, advantages, strict=True)])
        units = [self._units(episode, UnitAdvantages) for episode in episodes]
        mixed = with_unit_advantages(episodes, streams, units, self.beta)
        return sampled_rewards(episodes, RewardStreams(mixed.values))

    def _with_units(self, episodes: Sequence[Episode], rewards: Any) -> list[np.ndarray]:
        """Per episode [n]: `rewards`, with the part of causal credit at the units."""
        if self.estimator in ("outcome", "loo"):
            return list(rewards)
        units = [self._units(episode, UnitRewards) for episode in episodes]
        if self.estimator.endswith("unit_rewards"):  # the mean is 0, or more steps would be paid
            mean = np.concatenate([one.credits[one.spans.is_unit] for one in units]).mean()
            units = [replace(one, credits=np.where(one.spans.is_unit, one.credits - mean, 0.0)) for one in units]
        streams = RewardStreams([to_streams(e, r) for e, r in zip(episodes, rewards, strict=True)])
        placement: Any = "even" if self.estimator == "drca_published" else "end"
        return sampled_rewards(episodes, with_unit_rewards(episodes, streams, units, self.beta, placement))

    def _units(self, episode: Episode, kind: Any) -> Any:
        parts, spans = unit_parts(episode, self.tokenizer)
        return unit_credit(self.estimator, parts, spans, policies(self.prompts)[episode.seed], kind)


def verified_unit_groups(
    episodes: Sequence[Episode], returns: np.ndarray, groups: np.ndarray, *, prompts: str, tokenizer: str
) -> list[np.ndarray]:
    """`grpo` for units, without a critic: the return from a unit on minus its mean in the group, over the group's deviation.

    The return from unit k on is R minus the verifier's score before it; the mean is over the group's answers with a unit k.
    """
    found = [unit_parts(episode, tokenizer) for episode in episodes]
    policy = policies(prompts)
    ahead, advantages = [], []
    for (parts, _), episode in zip(found, episodes, strict=True):
        values = [verify("".join(parts[:k]), policy[episode.seed]).reward for k in range(len(parts) + 1)]
        ahead.append(values[-1] - np.array(values[:-1]))
    for place, (_, spans) in enumerate(found):
        group = np.flatnonzero(groups == groups[place])
        others, deviation = [ahead[other] for other in group], np.std(returns[group], ddof=1) + 1e-6
        means = [np.mean([one[k] for one in others if len(one) > k]) for k in range(len(ahead[place]))]
        advantages.append(np.repeat((ahead[place] - means) / deviation, spans.lengths))
    return advantages


def unit_parts(episode: Episode, tokenizer: str) -> tuple[list[str], Spans]:
    """The texts of the parts of an answer, which are units except before the first and after the last step, and their spans."""
    decode, stream = decoder(tokenizer), episode.streams[0]
    ends = {int(stream.ids[turn.stop - 1]) for turn in episode.turns if turn.stop_reason is StopReason.END_TOKEN}
    spans = segment(SEGMENTER, stream_answers(stream, ends, decode), decode)
    ids = stream.ids[stream.sampled]
    return [decode(ids[start:stop]).replace("<|im_end|>", "") for start, stop in spans], spans


def unit_credit(estimator: str, parts: Sequence[str], spans: Spans, policy: Policy, kind: Any) -> Any:
    """The credit of the units with the texts `parts`, from the verifier's scores of parts of the answer.

    `unit_rewards`: 1 minus half the number of faults of a step, at least 0. `reached_unit_rewards`: the same, and 0 for a
    step that no case reaches, which has a single fault and cannot decide wrongly.
    """
    whole = verify("".join(parts), policy)
    if estimator.endswith("unit_rewards"):
        quality = [step_quality(part, whole, estimator.startswith("reached")) for part in parts]
        return kind(spans, np.where(spans.is_unit, quality, 0.0), whole.reward, 0.0)
    if estimator == "loo":
        texts = ["".join([*parts[:k], *parts[k + 1 :]]) for k in range(len(parts))]
        credits = estimators.loo(whole.reward, np.array([verify(text, policy).reward for text in texts]))
        return kind(spans, np.where(spans.is_unit, credits, 0.0), whole.reward, 0.0)
    values = np.array([verify("".join(parts[:k]), policy).reward for k in range(len(parts) + 1)])
    if estimator == "prefix":
        return kind(spans, estimators.prefix(values), whole.reward, float(values[0]))
    return kind(spans, np.where(spans.is_unit, values[-1] - values[:-1], 0.0), whole.reward, 0.0)


def step_quality(part: str, whole: Verdict, reached: bool) -> float:
    """In [0, 1]: 1 minus half the number of faults of the step that begins with the label of `part`; with `reached`, 0 for
    a step that no case reaches.
    """
    kinds = [fault.kind for fault in whole.faults if fault.step == part.lstrip()[:1]]
    return 0.0 if reached and "unreachable" in kinds else max(0.0, 1.0 - len(kinds) / 2)


@lru_cache
def register() -> None:
    """Add `verified_units` and `verified_unit_groups` to the credits of this process."""
    posttrain.register_credit("verified_units")(VerifiedUnits)
    posttrain.register_credit("verified_unit_groups", compared_with="group")(verified_unit_groups)
