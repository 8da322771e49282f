"""Units: the spans of sampled tokens that get their own credit."""

import re
from typing import Annotated, Literal

from pydantic import Field, field_validator, model_validator

from posttrain.recipe.base import BaseConfig

STEP_PATTERN = r"^[ \t]*\*{0,2}(?:[Ss]tep[ \t]+)?(?P<label>[A-Z]{1,2}|\d{1,3})[.):]\*{0,2}[ \t]+"


class _CutUnits(BaseConfig):
    """Keys of the segmenters that find their own cuts inside an answer."""

    max_units: int | None = Field(None, ge=1)
    """Most units of one answer; thinking, what stands before the first label and what stands after the steps are not counted. null: no limit."""
    merge: Literal["merge_tail", "merge_small"] = "merge_tail"
    """With `max_units`. `merge_tail`: the last unit takes all that follows it. `merge_small`: again and again the unit with the fewest tokens joins the smaller of its neighbours."""
    thinking: Literal["whole", "split"] = "whole"
    """`whole`: a thinking block `<think>…</think>` is one unit apart from the others. `split`: it is cut like any other text."""


class StepUnits(_CutUnits):
    """Labelled steps: a unit begins at each label. What stands before the first label is a unit that is no step."""

    type: Literal["steps"]
    """`steps`: units begin at labels at the start of a line."""
    pattern: str = STEP_PATTERN
    """Regular expression of where a step starts, in multi-line mode over the text of the answer. Its group `label` is the step's label, a number or letters, which `ordinal` needs."""
    ordinal: bool = True
    """Labels must count 1, 2, 3, … or A, B, …, Z, AA, …; a line such as `OK. fine` is then no step. false: every match is a step."""
    closing: str | None = None
    """Regular expression, multi-line, of what ends the steps, such as `^Rationale:`; from its first match after the last label on, the answer is a unit that is no step. null: the last step runs to the end."""

    @field_validator("pattern", "closing")
    @classmethod
    def _is_a_pattern(cls, value: str | None) -> str | None:
        try:
            re.compile(value or "", re.MULTILINE)
        except re.error as error:
            raise ValueError(f"{value!r} is no regular expression ({error}); mend it") from error
        return value

    @model_validator(mode="after")
    def _labels_can_be_read(self) -> "StepUnits":
        if self.ordinal and "label" not in re.compile(self.pattern, re.MULTILINE).groupindex:
            raise ValueError("`pattern` has no group (?P<label>…) to check; add one or set `ordinal: false`")
        return self


class EntropyUnits(_CutUnits):
    """Segments that begin where the reference model was unsure of the next token."""

    type: Literal["entropy"]
    """`entropy`: units begin where the reference model was unsure."""
    threshold: float = Field(1.5, ge=0)
    """Nats. A token begins a unit where the entropy of the distribution it was drawn from, under the reference model at temperature 1, is above this. Published values: 1.5 to 2.25."""
    peak: Literal["threshold", "local_max"] = "threshold"
    """`threshold`: every such token begins a unit. `local_max`: only those whose entropy is above that of both neighbours."""


class TextUnits(_CutUnits):
    """Units of plain writing."""

    type: Literal["sentence", "paragraph"]
    """`sentence`: ends at `.`, `!`, `?` and their like before a space, and at the end of a line. `paragraph`: ends at a blank line."""


class WholeUnits(BaseConfig):
    """Units that need no reading."""

    type: Literal["turn", "token", "outcome"]
    """`turn`: one unit per answer. `token`: one per sampled token. `outcome`: one per episode."""


UnitsRecipe = Annotated[StepUnits | EntropyUnits | TextUnits | WholeUnits, Field(discriminator="type")]


class _Mixed(BaseConfig):
    beta: float = Field(0.8, ge=0, le=1)
    """Share of the units' credit; the rest is credit of the outcome. 0 measures the credit of units and learns from the outcome alone."""


class _Read(_Mixed):
    segmenter: UnitsRecipe = StepUnits(type="steps")
    """What cuts answers into units. `entropy` measures under the policy's reference, its frozen start."""


class _Placed(BaseConfig):
    placement: Literal["end", "even"] = "end"
    """Where in a unit its reward arrives. `end`: at its last token. `even`: the same share at each of its tokens, of which the later ones then see only a part."""


class _Standardised(BaseConfig):
    statistics: Literal["batch", "group"] = "batch"
    """Credits are standardised over the units of the whole step, or of each group."""
    clip: float = Field(5.0, gt=0)
    """Standardised credits are clipped to [-clip, clip]."""


class _Probed(BaseConfig):
    probe: Literal["one_pass", "separate"] = "one_pass"
    """`one_pass`: the values after all units of an answer in one forward pass of the reward model. `separate`: a pass for each; the same numbers, for models in which one pass does not work."""


class PrefixCredit(_Probed, _Placed, _Read):
    """What the reward model's word rose by with each unit. A reward stream: the sum over units is the outcome minus the value of an empty answer."""

    type: Literal["prefix"]
    """`prefix`: value of the answer after the unit - value before it."""


class ShareCredit(_Placed, _Read):
    """The outcome divided among units. Reward streams that sum to the outcome."""

    type: Literal["even", "outcome", "attention"]
    """`even`: the same for each unit. `outcome`: all to the last. `attention`: by the attention that the reward model's last layer pays to each unit where it reads the reward (ABC)."""


class LearnedCredit(_Placed, _Mixed):
    """The rewards of a unit-level reward model, whose own units are used. A reward stream."""

    type: Literal["unit_rewards"]
    """`unit_rewards`: what a reward model trained with `units` says of each unit."""
    beta: float = Field(1.0, ge=0, le=1)
    """Share of the units' rewards; the rest is their mean, as a reward of the outcome."""
    normalizer: str | None = None
    """`params.json` of `posttrain fit-normalizer`, or the run it was made for; in a pipeline, `stage:NAME`. Rewards are then normalized by where their unit stands. null: by `reward.normalize`, the same for all places."""
    fit: str | None = Field(None, pattern=r"^[^>]+(>[^>]+){4}$")
    """Which fit of the file, as `model > dataset > method > aggregate > threshold`; not needed where there is only one."""

    @model_validator(mode="after")
    def _fit_of_a_file(self) -> "LearnedCredit":
        if self.fit is not None and self.normalizer is None:
            raise ValueError("`fit` names a fit of `normalizer`, which is not given; set it, or remove `fit`")
        return self


class TruncationCredit(_Probed, _Standardised, _Read):
    """What was still to come when the unit began. An advantage."""

    type: Literal["trunc"]
    """`trunc`: outcome - value of the answer up to the unit."""


class _Rendered(BaseConfig):
    rendering: Literal["delete", "placeholder", "blank"] = "delete"
    """How an answer is read without a unit. `delete`: its tokens are left out. `placeholder`: `[omitted]` stands for them. `blank`: as many spaces."""


class LeaveOneOutCredit(_Rendered, _Standardised, _Read):
    """What the answer lacks without the unit. An advantage; units that can stand in for each other get nothing."""

    type: Literal["loo"]
    """`loo`: outcome - value of the answer without the unit."""


class ShapleyCredit(_Rendered, _Standardised, _Read):
    """The mean of what a unit adds, over the orders in which units may join. An advantage that sums to the outcome minus the value of an empty answer."""

    type: Literal["shapley"]
    """`shapley`: Shapley values, exact where that costs no more than the permutations."""
    permutations: int = Field(8, ge=2)
    """Sampled orders, half of them the other half backwards."""


class CompatibleCredit(_Read):
    """The published DRCA, for comparison: `trunc` over blanks, paid as a reward though it is an advantage, so that later units are paid again and again."""

    type: Literal["drca_published"]
    """`drca_published`: the published DRCA."""
    beta: float = Field(0.8, ge=0, le=1)
    """Share of the units' credit; the rest is the outcome's, at the last token."""


CausalCredit = PrefixCredit | ShareCredit | LearnedCredit | CompatibleCredit
"""Credit that is a reward stream."""
HindsightCredit = TruncationCredit | LeaveOneOutCredit | ShapleyCredit
"""Credit that is an advantage."""

UnitCreditRecipe = Annotated[
    PrefixCredit
    | ShareCredit
    | LearnedCredit
    | TruncationCredit
    | LeaveOneOutCredit
    | ShapleyCredit
    | CompatibleCredit,
    Field(discriminator="type"),
]


class UnitRewardsRecipe(BaseConfig):
    """A reward for each unit of an answer, read at the unit's last token; the answer's score is their aggregate."""

    segmenter: UnitsRecipe
    """What cuts answers into units. `entropy` measures under the language model at `model.path`, which is loaded besides."""
    aggregate: Literal["mean"] = "mean"
    """How the rewards of its units make the score of an answer. `mean`: their mean, over all units."""
    entropy_coefficient: float = Field(0.0, ge=0)
    """Coefficient of the regulariser that spreads rewards evenly over the units of an answer; too much of it makes all units alike. 0 is off."""
    entropy_form: Literal["length_fair", "published"] = "length_fair"
    """With H the entropy in nats of the softmax of the rewards of an answer's K units. `length_fair`: adds 1 - H / log K, from 0 (even) to 1, of each answer. `published`: subtracts H / K, which hardly touches answers of many units."""


class StoredUnits(BaseConfig):
    """What a reward model keeps of its units in its `config.json`."""

    segmenter: UnitsRecipe
    aggregate: Literal["mean"] = "mean"
    reference: str | None = None
    """`model.path` of the language model whose entropies cut the units; null where none is needed."""


def stored_units(recipe: UnitRewardsRecipe, path: str) -> StoredUnits:
    """What a model trained by `recipe` from the one at `path` keeps."""
    needed = isinstance(recipe.segmenter, EntropyUnits)
    return StoredUnits(segmenter=recipe.segmenter, aggregate=recipe.aggregate, reference=path if needed else None)
