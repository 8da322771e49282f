"""What a key of a recipe needs of other keys to have an effect, as data on its field, and the one check of it.

    horizon: Annotated[float, needs("coefficient")] = 1.0

A key without effect that is given, and differs from its default, is a warning, or an error where its need is `refused`.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from posttrain.recipe.base import BaseConfig


@dataclass(frozen=True)
class Around:
    """A section and those around it, the innermost first. Each is the path of its keys with a final dot, and the section."""

    sections: tuple[tuple[str, BaseConfig], ...]

    def __call__(self, key: str) -> Any:
        """The value of the dotted `key`, in the innermost section that has its first part; None if there is none."""
        return self.look_up(key)[1]

    def look_up(self, key: str) -> tuple[str, Any]:
        """The path of `key` from the recipe, and its value, as `__call__`."""
        first = key.partition(".")[0]
        for prefix, section in self.sections:
            if hasattr(section, first):
                value: Any = section
                for part in key.split("."):
                    value = getattr(value, part, None)
                return f"{prefix}{key}", value
        return key, None


@dataclass(frozen=True)
class Needs:
    """A condition under which a key has an effect; part of the annotation of its field."""

    holds: Callable[[Around], bool]
    reason: str | Callable[[Around], str]
    """Why the key has no effect."""
    remedy: str | Callable[[Around], str] = ""
    """What to do besides removing the key."""
    refused: bool = False
    """Whether a key without effect is an error. Then the condition may name keys of the same section only."""
    only: Callable[[Any], bool] = lambda value: True
    """Which values of the key have this need."""
    key: str = ""
    """The key that the condition is about, if it is about one."""
    inside: str = ""
    """A key inside of this section that has the need, instead of the whole section."""


def needs(key: str, *values: Any, **options: Any) -> Needs:
    """Effective while `key` is one of `values`, or, without values, while it is set: not null, false, 0 or empty.

    `key` is a key of the same section, else of one around it; dots lead into sections. `options`: those of `Needs`.
    """
    return _on_key(key, lambda value: value in values if values else bool(value), values, options)


def unless(key: str, *values: Any, **options: Any) -> Needs:
    """Effective unless `key` is one of `values`, or, without values, unless it is set; otherwise as `needs`."""
    return _on_key(key, lambda value: value not in values if values else not value, (), options)


def several_updates(find: Around) -> bool:
    """Whether a step has several updates, or their number is unknown; after the first one, the policy has changed."""
    learner = find("learner")
    return learner is None or learner.several_updates


def _on_key(key: str, fits: Callable[[Any], bool], values: tuple[Any, ...], options: dict[str, Any]) -> Needs:
    def state(around: Around) -> str:
        path, value = around.look_up(key)
        if hasattr(type(value), "model_fields"):
            return f"{path} is set"
        plain = f"{value:g}" if isinstance(value, float) else json.dumps(value, default=str)
        return f"{path} is {value if isinstance(value, str) else plain}"

    def remedy(around: Around) -> str:
        path, _ = around.look_up(key)
        return f"set {path} to {' or '.join(values)}" if values else f"change {path}"

    defaults: dict[str, Any] = {"reason": state, "remedy": "" if key == "stage" else remedy, "key": key}
    return Needs(lambda around: fits(around(key)), **{**defaults, **options})


TRAINED = needs("on_policy", reason=lambda find: f"the {find('stage')} stage samples no training episodes", remedy="")
"""The need of keys about training episodes."""


def is_given(section: BaseConfig, key: str) -> bool:
    """Whether `key` was given and differs from its default. A dumped recipe gives every key, which is valid."""
    default = type(section).model_fields[key].get_default(call_default_factory=True)
    return key in section.model_fields_set and getattr(section, key) != default


def without_effect(section: BaseConfig, prefix: str = "", around: Around = Around(())) -> Iterator[str]:
    """One sentence for each given key of `section`, and of the sections in it, that has no effect.

    Of a section without effect, its keys are not named.
    """
    inner = Around(((prefix, section), *around.sections))
    unmet = dict(unmet_needs(section, inner, refused=False))
    yield from unmet.values()
    for name in type(section).model_fields:
        value = getattr(section, name)
        if name not in unmet and hasattr(type(value), "model_fields"):
            yield from without_effect(value, f"{prefix}{name}.", inner)


def unmet_needs(section: BaseConfig, around: Around, refused: bool) -> Iterator[tuple[str, str]]:
    """Each given key of `section` without effect, and a sentence with the first of its needs that does not hold, of those
    that are `refused` or of the others."""
    for name, all_needs in needs_of(type(section)).items():
        value = getattr(section, name)
        for need in [one for one in all_needs if one.refused is refused]:
            given = is_given(value, need.inside) if need.inside and value is not None else is_given(section, name)
            if given and need.only(value) and not need.holds(around):
                key = f"{name}.{need.inside}" if need.inside else name
                shown = f"`{key}`" if refused else f"{around.sections[0][0]}{key}"
                texts = (need.reason, need.remedy)
                reason, remedy = (text if isinstance(text, str) else text(around) for text in texts)
                yield key, f"{shown} has no effect: {reason}; remove it{', or ' if remedy else ''}{remedy}"
                break


CHANGES: dict[str, Callable[[Any], Any]] = {
    "optimizer.learning_rate": lambda rate: float(f"{rate / 10:.3g}"),
    "rollout.sampling.temperature": lambda temperature: None if temperature else 1.0,
    "rollout.episodes_per_group": lambda count: 2 * count,
    "rollout.missing_eos_penalty": lambda penalty: 2 * penalty or 0.5,
    "rollout.tokens_per_turn": lambda count: 2 * count,
    "rollout.failures.action": lambda action: None if action == "retry" else "retry",
    "rollout.failures.retries": lambda count: 2 * count or 1,
    "learner.epochs_per_step": lambda count: count // 2 or None,
    "learner.updates_per_step": lambda count: count // 2 or None,
    "kl.coefficient": lambda coefficient: 3 * coefficient or 0.01,
    "evaluation.metric": lambda metric: None if metric == "return" else "return",
    "steps": lambda count: count and 2 * count,
    "epochs": lambda count: 2 * count,
}
"""New values that messages advise, from the present one; None: this key would not help."""


def advised(recipe: BaseConfig, *keys: str) -> str:
    """The first of `keys` of `CHANGES` that has an effect in `recipe`, as `key=value` with its new value; empty if none has."""
    before = set(without_effect(recipe))
    for key in keys:
        *sections, name = key.split(".")
        values = recipe.model_dump(mode="json")
        place: Any = values
        for section in sections:
            place = place.get(section) or {}
        if name not in place or (value := CHANGES[key](place[name])) is None:
            continue
        place[name] = value
        with suppress(ValueError):  # the recipe does not accept it with its other keys
            if set(without_effect(type(recipe).model_validate(values))) <= before:
                return f"{key}={value:g}" if isinstance(value, float) else f"{key}={value}"
    return ""


@cache
def needs_of(section: type[BaseConfig]) -> dict[str, list[Needs]]:
    """Key of `section` -> its needs, without keys that have none."""
    fields = section.model_fields.items()
    found = {name: [mark for mark in info.metadata if isinstance(mark, Needs)] for name, info in fields}
    return {name: marks for name, marks in found.items() if marks}
