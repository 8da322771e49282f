"""What an environment is: the state machine of one task. It knows no tokens and no models."""

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

from posttrain.errors import InputError
from posttrain.recipe.components import EnvironmentRecipe

Message = dict[str, str]
"""A chat message: `{"role": "system" | "user", "content": text}`."""


@dataclass(frozen=True)
class Observation:
    """What the policy sees first: the messages before its first answer."""

    messages: list[Message]
    state: str | None = None
    """A name of the state, the same for two episodes of one task exactly where they stand in the same state; for
    credit that compares answers given in one state (`gigpo`). None: the observation's tokens tell states apart."""


@dataclass(frozen=True)
class Step:
    """What one action led to.

    `messages` are shown to the policy if the episode goes on. `terminated` means the task ended by its own rules,
    `truncated` that a limit cut it off. `info["success"]` (bool) is set on the last step; `info["rejected"]` (text)
    says why an answer was not understood. `state` names the state that it led to, as that of `Observation` does.
    """

    messages: list[Message]
    reward: float
    terminated: bool
    truncated: bool
    info: dict[str, Any] = field(default_factory=dict)
    state: str | None = None
    fresh: bool = False
    """`messages` begin a new conversation: the policy sees nothing of what came before."""


@dataclass(frozen=True)
class Baseline:
    """Success of a reference player on given seeds.

    `success` is the mean success in [0, 1]; `n` the number of seeds; `interval` the 95% interval over seeds, or
    None when the value is exact for those seeds. `mean_return` is the mean undiscounted return. `scores` are what an
    environment reports besides, by name: mean and its 95% interval.
    """

    success: float
    mean_return: float
    n: int
    interval: tuple[float, float] | None = None
    scores: Mapping[str, tuple[float, float, float]] = field(default_factory=dict)


class Environment(ABC):
    """One task attempt. A fresh instance plays each episode.

    Subclasses implement `reset` and `step`, and `expert` and `baselines` where they can be computed. One with keys of
    its own in a recipe nests a `Recipe` class; the values are in `self.recipe`.
    """

    Recipe: ClassVar[type[EnvironmentRecipe]] = EnvironmentRecipe
    """Keys of the `environment` section of a recipe."""
    self_contained: ClassVar[bool] = True
    """Its defaults are a whole task; otherwise a recipe has to name data."""
    players: ClassVar[tuple[str, ...]] = ()
    """Names of further players without a model that `baselines` measures, in the order in which tables show them."""
    waits: ClassVar[bool] = False
    """Its methods wait for another process, so they are called in threads."""
    primer: str = ""
    """Text put in the policy's mouth at the start of each answer; `step` gets it in front of what was sampled."""

    def __init__(self, recipe: EnvironmentRecipe) -> None:
        self.recipe: Any = recipe

    @abstractmethod
    def reset(self, seed: int) -> Observation:
        """Start the task that `seed` determines. The same seed gives the same task and the same chance events."""

    @abstractmethod
    def step(self, action: str) -> Step:
        """Play the policy's answer `action` (text, as sampled). Raises RuntimeError after the last step."""

    @classmethod
    def check_tasks(cls, recipe: EnvironmentRecipe, training: range, held_out: Sequence[range]) -> list[str]:
        """What the user should know of the tasks of these seeds before a run; InputError where a seed has no task."""
        return []

    @classmethod
    def pays(cls, recipe: EnvironmentRecipe) -> bool:
        """Whether the environment itself scores answers; otherwise a reward model has to."""
        return True

    @classmethod
    def task_name(cls, recipe: EnvironmentRecipe, seed: int) -> str:
        """What to call the task of `seed` in messages."""
        return f"environment seed {seed}"

    def expert(self) -> str:
        """The answer text of an optimal policy in the current state; NotImplementedError where none is known."""
        raise NotImplementedError(f"{type(self).__name__} has no expert")

    def random_answer(self, draw: float) -> str:
        """A well-formed answer with a uniformly random action, chosen by `draw` in [0, 1)."""
        raise NotImplementedError(f"{type(self).__name__} has no random player")

    @classmethod
    def baselines(cls, recipe: EnvironmentRecipe, seeds: Sequence[int]) -> dict[str, Baseline]:
        """`{"random": ..., "optimal": ...}` and the `players` on these seeds, as far as they can be computed."""
        return {}

    @classmethod
    def validate(cls, recipe: EnvironmentRecipe, seeds: Sequence[int]) -> None:
        """Prove without a model that a reference solution earns full reward and a wrong answer does not.

        Raises AssertionError that names the seed and what went wrong.
        """
        raise NotImplementedError(f"{cls.__name__} does not validate itself")


def require_rows(what: str, count: int, training: range, held_out: Sequence[range]) -> None:
    """InputError naming the key where seeds go beyond the `count` rows of `what`, the key that names their file.

    `held_out`: the seeds of the curve and, last, those of the final table.
    """
    keys = ("seeds", "evaluation.seeds", "evaluation.final_seeds")
    for key, seeds in zip(keys, (training, held_out[0], held_out[-1]), strict=True):
        if seeds.stop > count:
            raise InputError(
                f"{key} go to {seeds.stop - 1}, but {what} has {count} usable rows (0 to {count - 1}), and a seed is a "
                f"row; set `{key}.start` and `{key}.count`"
            )
