"""Units: spans of sampled tokens that get their own credit, and how they are found and scored."""

import re
from typing import Annotated, ClassVar, Literal

from pydantic import Field, field_validator

from posttrain.recipe.base import BaseConfig, Reads, Text
from posttrain.recipe.metrics import HELD_OUT, TRAINING, Metric, Panel
from posttrain.recipe.needs import needs

STEP_PATTERN = r"^[ \t]*\*{0,2}(?:[Ss]tep[ \t]+)?(?P<label>[A-Z]{1,2}|\d{1,3})[.):]\*{0,2}[ \t]+"


class _CutUnits(BaseConfig):
    """Keys of segmenters that find boundaries within an answer."""

    max_units: int | None = Field(None, ge=1)
    """Maximum number of units per answer, not counting thinking, text before the first label and text after the steps. Units beyond it are merged into the last one. Null: no limit."""
    thinking: Literal["whole", "split"] = "whole"
    """`whole`: a thinking block `<think>…</think>` is one span, which is not a unit. `split`: it is segmented like other text."""


class StepUnits(_CutUnits):
    """Labelled steps. Text before the first label is not a unit."""

    type: Literal["steps"]
    """`steps`: a unit begins at each label at the start of a line."""
    pattern: Text = STEP_PATTERN
    """Regular expression (multi-line mode) that matches the start of a step. If it has a group `label`, a number or letters, only labels that count 1, 2, 3, … or A, B, …, Z, AA, … start a step, so a line such as `OK. fine` does not; otherwise every match does."""
    closing: Text | None = None
    """Regular expression (multi-line mode) that ends the steps, such as `^Rationale:`. Text from its first match after the last label is not a unit. Null: the last step runs to the end."""

    @field_validator("pattern", "closing")
    @classmethod
    def _is_a_pattern(cls, value: str | None) -> str | None:
        try:
            re.compile(value or "", re.MULTILINE)
        except re.error as error:
            raise ValueError(f"invalid regular expression {value!r}: {error}") from error
        return value


class EntropyUnits(_CutUnits):
    """Segments that begin at tokens where the reference model's distribution has high entropy."""

    type: Literal["entropy"]
    """`entropy`: a unit begins at each high-entropy token of the reference model."""
    threshold: float = Field(1.5, ge=0)
    """Entropy in nats, under the reference model at temperature 1, above which a token begins a unit. Published values: 1.5 to 2.25."""


class TextUnits(_CutUnits):
    """Sentences."""

    type: Literal["sentence"]
    """`sentence`: ends at `.`, `!`, `?` and their like before a space, and at the end of a line."""


class WholeUnits(BaseConfig):
    """Units that need no segmentation."""

    type: Literal["turn", "token", "outcome"]
    """`turn`: one unit per answer. `token`: one per sampled token. `outcome`: one per episode."""


UnitsRecipe = Annotated[StepUnits | EntropyUnits | TextUnits | WholeUnits, Field(discriminator="type")]


UNITS = Panel("Units of an answer", "units", figure="units")
LOWERED = Panel("Units that lowered the reward", "share of units", percent=True, whole=True, figure="units")
UNIT_REWARDS = Panel("Rewards of the units of an answer", "reward", figure="units")


_OF_UNITS = (
    Metric("units/per_answer", "all units", UNITS, TRAINING),
    Metric("units/effective", "effective units: exp of the entropy of their rewards", UNITS, HELD_OUT),
    Metric("units/spread", "standard deviation within an answer", UNIT_REWARDS, TRAINING),
)


class _Mixed(BaseConfig):
    metrics: ClassVar[tuple[Metric, ...]] = (
        *_OF_UNITS,
        Metric("units/residual", "|residual| of the outcome", UNIT_REWARDS, HELD_OUT),
        Metric("units/negative", "credit below 0", LOWERED, TRAINING),
        Metric("units/credit", "mean credit of a unit"),
        Metric("units/clipped", "reward-model values at the limit of `reward.clip`"),
        Metric("units/forwards", "texts that the reward model read to compute the credit"),
        Metric("units/tokens", "tokens of these texts"),
        Metric("units/tokens_per_unit", "mean tokens of a unit"),
        Metric("units/without", "share of scored episodes without units"),
        Metric("units/*", "a statistic of one type of unit credit"),
        Metric("time/units", "seconds of unit credit, part of `time/credit`"),
    )

    beta: float = Field(0.8, ge=0, le=1)
    """Share of unit credit; 1 - beta is credit of the outcome. 0: unit credit is logged, and only the outcome trains the policy."""

    texts: ClassVar[str] = "no text for the reward model"
    """Work of the reward model for an answer of K units, one text after another."""

    @property
    def cost(self) -> str:
        """Work of the reward model for an answer of K units."""
        return "1 pass of the reward model" if getattr(self, "probe", None) == "one_pass" else self.texts


class _Read(_Mixed):
    segmenter: UnitsRecipe = StepUnits(type="steps")
    """How answers are segmented into units. `entropy` uses the reference model."""


class _Placed(BaseConfig):
    placement: Literal["end", "even"] = "end"
    """Where in a unit its reward is placed. `end`: at its last token. `even`: spread evenly over its tokens, so later tokens of the unit see only part of it."""


class PrefixCredit(_Placed, _Read):
    """Increase of the reward-model score with each unit. A reward stream; units sum to the outcome minus the value of an empty answer."""

    type: Literal["prefix"]
    """`prefix`: value after the unit - value before it."""
    probe: Literal["one_pass", "separate"] = "one_pass"
    """`one_pass`: compute the values after all units of an answer in one forward pass of the reward model. `separate`: one pass per unit; same values, for architectures where one pass is not supported."""

    texts: ClassVar[str] = "K texts for the reward model"


class LearnedCredit(_Placed, _Mixed):
    """Rewards of a unit-level reward model, on the units it was trained with. A reward stream."""

    type: Literal["unit_rewards"]
    """`unit_rewards`: scores of a reward model trained with `units`."""
    beta: float = Field(1.0, ge=0, le=1)
    """Share of unit rewards; 1 - beta is their mean, as a reward of the outcome."""
    normalizer: Reads | None = None
    """Position-dependent normalization: a `params.json` of `posttrain fit-normalizer`, or the run it belongs to. In a pipeline, `stage:NAME`. Null: normalize by `reward.normalize`, independent of position."""
    fit: Annotated[Text | None, needs("normalizer", reason="`fit` needs `normalizer`", refused=True)] = Field(
        None, pattern=r"^[^>]+(>[^>]+){4}$"
    )
    """Which fit of the file to use, as `model > dataset > method > aggregate > threshold`. Not needed if it has only one."""


class LeaveOneOutCredit(_Read):
    """Loss of value without the unit. An advantage; redundant units get 0."""

    type: Literal["loo"]
    """`loo`: outcome - value of the answer without the unit."""

    texts: ClassVar[str] = "K + 1 texts for the reward model"


class CompatibleCredit(_Read):
    """The published DRCA, for comparison: the outcome minus the value of the answer up to the unit, with blanks for it. It is used as a reward although it is an advantage, so later units are counted several times."""

    type: Literal["drca_published"]
    """`drca_published`: the published DRCA."""
    beta: float = Field(0.8, ge=0, le=1)
    """Share of unit credit; 1 - beta is the outcome, at the last token."""

    texts: ClassVar[str] = "K texts for the reward model"


CausalCredit = PrefixCredit | LearnedCredit | CompatibleCredit
"""Credit that is a reward stream."""
HindsightCredit = LeaveOneOutCredit
"""Credit that is an advantage."""

UnitCreditRecipe = Annotated[
    PrefixCredit | LearnedCredit | LeaveOneOutCredit | CompatibleCredit,
    Field(discriminator="type"),
]


class UnitRewardsRecipe(BaseConfig):
    """A reward for each unit of an answer, read at the unit's last token. The score of an answer is their mean."""

    metrics: ClassVar[tuple[Metric, ...]] = (Metric("loss/unevenness", "regularizer of unit rewards"), *_OF_UNITS)

    segmenter: UnitsRecipe
    """How answers are segmented into units. `entropy` also loads the language model at `model.path`."""
    entropy_coefficient: float = Field(0.0, ge=0)
    """Weight of a regularizer that favours even rewards over the units of an answer. Too large a value makes all units equal. 0: off."""
    entropy_form: Literal["length_fair", "published"] = "length_fair"
    """Form of the regularizer, with H the entropy in nats of the softmax over the rewards of K units. `length_fair`: 1 - H / log K, from 0 (even) to 1. `published`: -H / K, which is weak for answers with many units."""


class StoredUnits(BaseConfig):
    """The unit settings that a reward model stores in its `config.json`."""

    segmenter: UnitsRecipe
    reference: Reads | None = None
    """`model.path` of the language model whose entropies segment units; null if not needed."""


def stored_units(recipe: UnitRewardsRecipe, path: str) -> StoredUnits:
    """The unit settings to store with a model that `recipe` trained from the model at `path`."""
    needed = isinstance(recipe.segmenter, EntropyUnits)
    return StoredUnits(segmenter=recipe.segmenter, reference=path if needed else None)
