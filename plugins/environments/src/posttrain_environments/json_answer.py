"""Read a few sentences and answer in JSON with given keys and types: a format and facts that a program can check."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import numpy as np
import yaml
from pydantic import Field, field_validator

from posttrain.environments.game import play, require
from posttrain.environments.protocol import Baseline, Environment, Observation, Step
from posttrain.recipe.base import Text
from posttrain.recipe.components import EnvironmentRecipe
from posttrain.seeds import random_stream

FORM, FACTS = "form", "facts"
"""Names of the scores: 1 if the answer has the requested form, and the share of its values that match the text."""

Value = str | int | bool | list[str]


@dataclass(frozen=True)
class _Attribute:
    """A key, the sentence that states it, and its possible values: words, a range of integers, two sentences, or a
    list.
    """

    key: str
    sentence: str | tuple[str, str]
    values: tuple[str, ...] | range | None = None
    several: bool = False

    @property
    def type(self) -> str:
        if self.values is None:
            return "true or false"
        if isinstance(self.values, range):
            return "integer"
        return "list of strings" if self.several else "string"

    def draw(self, random: np.random.Generator) -> tuple[Value, str]:
        """Return a value and the sentence that states it."""
        if self.values is None:
            truth = bool(random.random() < 0.5)
            return truth, self.sentence[0 if truth else 1]
        assert isinstance(self.sentence, str)
        if isinstance(self.values, range):
            number = int(random.choice(self.values))
            return number, self.sentence.format(number)
        if self.several:
            words = [str(word) for word in random.choice(self.values, size=int(random.integers(2, 4)), replace=False)]
            return words, self.sentence.format(f"{', '.join(words[:-1])} and {words[-1]}")
        word = str(random.choice(self.values))
        return word, self.sentence.format(word)


def _attribute(key: str, sentence: str | list[str], several: bool = False, **values: list[Any]) -> _Attribute:
    drawn = range(*values["range"]) if "range" in values else tuple(values["values"]) if "values" in values else None
    return _Attribute(key, sentence if isinstance(sentence, str) else (sentence[0], sentence[1]), drawn, several)


_LISTED = yaml.safe_load(Path(__file__).with_name("topics.yaml").read_text(encoding="utf-8"))["topics"]
TOPICS: dict[str, tuple[_Attribute, ...]] = {
    topic: tuple(_attribute(**one) for one in attributes) for topic, attributes in _LISTED.items()
}
"""Topics of the texts. No key of `film` or `machine` occurs in another topic, so they can be held out."""


class JsonAnswerRecipe(EnvironmentRecipe):
    """Keys of `json_answer`."""

    scoring = EnvironmentRecipe.scoring | {"facts_weight"}

    type: Literal["json_answer"] = "json_answer"
    """Answers in JSON with given keys and types."""
    max_turns: Literal[1] = 1
    """One answer ends the episode."""
    topics: list[Text] = ["person", "shop", "book", "animal", "town", "match", "dish", "house"]
    """Topics of the texts: these, film or machine. A schema is a choice of keys of one topic, so other topics are
    schemas that were never seen.
    """
    keys: tuple[int, int] = (2, 4)
    """Smallest and largest number of keys asked for."""
    facts_weight: float = Field(0.5, ge=0, le=1)
    """Weight of right values in the reward; the rest is for the form."""

    @field_validator("topics")
    @classmethod
    def _topics_exist(cls, value: list[str]) -> list[str]:
        if not value or (unknown := sorted(set(value) - set(TOPICS))):
            raise ValueError(
                f"must be one or more of {', '.join(TOPICS)}, got {', '.join(unknown) if value else 'none'}"
            )
        return value

    @field_validator("keys")
    @classmethod
    def _keys_can_be_asked(cls, value: tuple[int, int]) -> tuple[int, int]:
        most = min(map(len, TOPICS.values()))
        if not 1 <= value[0] <= value[1] <= most:
            raise ValueError(f"must be two numbers from 1 to {most}, the smaller one first")
        return value


class JsonAnswer(Environment):
    """A text and a schema. Success is an object of exactly the keys asked for, with values of their types.

    The reward is `(1 - facts_weight) form + facts_weight facts`. `form` is 1 for success, and at most 0.5 for an object
    with only some of the keys and types, which gives partial answers a learning signal. `facts` is the share of keys
    with the right value, and 0 without success, so only well-formed answers are rewarded for facts.
    """

    Recipe = JsonAnswerRecipe

    def reset(self, seed: int) -> Observation:
        random = random_stream("json_answer", seed)
        topic = TOPICS[self.recipe.topics[int(random.integers(len(self.recipe.topics)))]]
        drawn = {attribute.key: attribute.draw(random) for attribute in topic}
        low, high = self.recipe.keys
        chosen = random.choice(len(topic), size=int(random.integers(low, high + 1)), replace=False)
        self._types = {topic[i].key: topic[i].type for i in chosen}
        self._right = {topic[i].key: drawn[topic[i].key][0] for i in chosen}
        # The first sentence identifies the subject. The others are in random order, and some have no question.
        rest = random.permutation(np.arange(1, len(topic)))
        text = " ".join(drawn[topic[i].key][1] for i in [0, *rest])
        form = ", ".join(f'"{key}": {type}' for key, type in self._types.items())
        self._done = False
        content = f"{text}\nAnswer only with a JSON object of this form, filled in: {{{form}}}"
        return Observation([{"role": "user", "content": content}], f"task {seed}")

    def step(self, action: str) -> Step:
        if self._done:
            raise RuntimeError("the episode has ended; call reset")
        self._done = True
        form, facts, reason = self._scores(action)
        info: dict[str, Any] = {"success": form == 1, "scores": {FORM: float(form == 1), FACTS: facts}}
        if reason:
            info["rejected"] = reason
        weight = self.recipe.facts_weight
        return Step([], (1 - weight) * form + weight * facts, True, False, info, "ended")

    def _scores(self, answer: str) -> tuple[float, float, str | None]:
        """The form in [0, 1], the share of right facts, and why the form is not right."""
        try:
            given = json.loads(answer)
        except (ValueError, RecursionError):
            return 0.0, 0.0, "not JSON"
        if not isinstance(given, dict):
            return 0.0, 0.0, "not an object"
        typed = sum(_has_type(given.get(key), type) for key, type in self._types.items())
        if set(given) != set(self._types) or typed < len(self._types):
            known = len(set(given) & set(self._types)) / max(len(given), len(self._types))
            return 0.1 + 0.2 * known + 0.2 * typed / len(self._types), 0.0, "other keys or types"
        facts = sum(_same(given[key], value) for key, value in self._right.items()) / len(self._right)
        return 1.0, facts, None

    def expert(self) -> str:
        return json.dumps(self._right)

    @classmethod
    def baselines(cls, recipe: EnvironmentRecipe, seeds: Sequence[int]) -> dict[str, Baseline]:
        """The optimal policy is always right. There is no random policy, because random text has the form with
        probability 0.
        """
        return {"optimal": Baseline(1.0, 1.0, len(seeds))}

    @classmethod
    def validate(cls, recipe: JsonAnswerRecipe, seeds: Sequence[int]) -> None:
        """The right object gets 1, a wrong fact does not count as right, and other keys or types do not count as the
        form.
        """
        environment = cls(recipe)
        for seed in seeds:
            best = play(environment, seed)[-1]
            require(best.reward == 1 and best.info["success"] is True, seed, "the right answer does not earn 1")
            right = dict(environment._right)
            key = next(iter(right))
            for name, wrong in (
                ("a value of another type", {**right, key: None}),
                ("a missing key", {k: v for k, v in right.items() if k != key}),
                ("one more key", {**right, "more": 1}),
            ):
                other = play(environment, seed, [json.dumps(wrong)])[-1]
                require(other.reward < 0.5 and not other.info["success"], seed, f"{name} counts as the form")
            facts = play(environment, seed, [json.dumps({**right, key: _other(right[key])})])[-1].info["scores"][FACTS]
            require(facts < 1, seed, "a wrong fact counts as right")


def _has_type(value: object, type: str) -> bool:
    if type == "integer":
        return isinstance(value, int) and not isinstance(value, bool)
    if type == "list of strings":
        return isinstance(value, list) and bool(value) and all(isinstance(one, str) and one for one in value)
    return isinstance(value, bool) if type == "true or false" else isinstance(value, str) and bool(value)


def _other(value: Value) -> Value:
    """Another value of the same type."""
    if isinstance(value, bool):
        return not value
    return value + 1 if isinstance(value, int) else [*value, "?"] if isinstance(value, list) else f"{value}?"


def _same(given: Value, right: Value) -> bool:
    """Whether two values are equal, ignoring the case of words and the order of lists."""
    if isinstance(given, list) and isinstance(right, list):
        return sorted(word.casefold() for word in given) == sorted(word.casefold() for word in right)
    return given.casefold() == right.casefold() if isinstance(given, str) and isinstance(right, str) else given == right
