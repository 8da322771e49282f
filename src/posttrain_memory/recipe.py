"""The keys of the memory environment."""

from typing import Literal

from pydantic import Field, model_validator

from posttrain.recipe.base import BaseConfig
from posttrain.recipe.components import EnvironmentRecipe
from posttrain.recipe.data import Sources
from posttrain.recipe.judge import JudgeServerRecipe
from posttrain_memory.interpreter.pool import InterpreterLimits
from posttrain_memory.vault.limits import VaultLimits
from posttrain_memory.worlds.recipe import RewardWeights, WorldRecipe


class AgentRecipe(BaseConfig):
    """How a memory agent is asked and what its code may take, in training and in use."""

    max_turns: int = Field(8, ge=2)
    """Messages of the policy until the episode is cut off. A scripted solution takes at most 5."""
    thinking: bool = True
    """Every message begins with a `<think>` block; otherwise it is `<python>` or `<reply>` alone."""
    opened_by: Literal["policy", "environment", "template"] = "policy"
    """Who writes the opening `<think>`: the policy, the environment (put in the policy's mouth), or a chat template that does so by itself, as that of Qwen3-4B-Thinking-2507."""
    prompt: Literal["full", "brief"] = "full"
    """The system prompt: about 570 or 190 tokens of SmolLM2."""
    result_chars: int = Field(4_000, ge=100)
    """About how many characters of a result are shown; what is longer is cut and says so."""
    tool_calls: int = Field(60, ge=1)
    """Most calls of tools in an episode."""
    interpreter: InterpreterLimits = InterpreterLimits()
    """Limits of a block of code."""

    @model_validator(mode="after")
    def _opened(self):
        if not self.thinking and self.opened_by != "policy":
            raise ValueError("`opened_by` means nothing without `thinking`; leave one out")
        return self


class MemoryRecipe(AgentRecipe, EnvironmentRecipe):
    """Keys of `memory`."""

    type: Literal["memory"] = "memory"
    """A vault of Markdown notes, read and changed by writing Python."""
    worlds: WorldRecipe = WorldRecipe()
    """Worlds and tasks, made up: each seed is one task in a world of its own, of each kind as often as its number of tasks says. Not used with `tasks`."""
    tasks: Sources = []
    """Rows to play instead, which `posttrain data worlds` wrote: a path, or a list of paths and sections. The environment seed is the row, counted from 0 over all sources."""
    memories: str | None = None
    """Folder with the `base_memory.json` files of rows of the published form, which only name their vault."""
    follow_up: bool = False
    """After an update, a new conversation asks about it, and both have to be right: the two-rollout protocol. The reward is the mean of the two."""
    weights: RewardWeights = RewardWeights()
    """What each outcome of an episode is worth."""
    judge: JudgeServerRecipe | None = None
    """A language model that judges episodes beside the program; its score is reported, and `weights.judge` lets it take away. It makes no wrong episode right. Updates of the published form, whose truth no program knows, need its yes (half of its points)."""
    rejected: float = Field(-0.02, le=0)
    """Added to the reward of a turn whose message was not understood."""
    vault: VaultLimits = VaultLimits()
    """Limits of the notes."""
    workers: int = Field(1, ge=1)
    """Processes that run code, shared by all episodes of a run."""

    @model_validator(mode="after")
    def _consistent(self) -> "MemoryRecipe":
        if self.memories is not None and not self.tasks:
            raise ValueError("`memories` belongs to rows that name them; give `tasks`, too")
        weights = self.weights
        if weights.judge and self.judge is None:
            raise ValueError("`weights.judge` means nothing without a judge; name one in `judge`, or leave it out")
        rejected = (self.max_turns - 1) * (2 if self.follow_up else 1)
        least = weights.success - weights.turns_at_most - weights.judge + self.rejected * rejected
        most = weights.partial + weights.check_first
        half = (weights.success + weights.check_first + most) / 2
        if self.follow_up and least <= half:
            judged = " where the judge sees nothing in it" if weights.judge else " after messages that were rejected"
            raise ValueError(
                f"an episode that succeeds could earn as little as {least:g}{judged}, and one of which half is wrong as "
                f"much as {half:g}; lower `weights.partial`, `weights.check_first`, `weights.judge` or `max_turns`, or "
                "bring `rejected` nearer to 0"
            )
        if least <= most:
            raise ValueError(
                f"an episode that succeeds after messages that were rejected could earn as little as {least:g}, no more "
                "than a wrong one; bring `rejected` nearer to 0, or lower `max_turns` or `weights.judge`"
            )
        return self
