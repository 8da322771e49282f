"""Recipe keys of the memory environment."""

from typing import Literal

from pydantic import Field

from posttrain.recipe.base import BaseConfig, Reads
from posttrain.recipe.components import EnvironmentRecipe
from posttrain.recipe.data import TaskSources
from posttrain.recipe.judge import JudgeServerRecipe
from posttrain_memory.interpreter.pool import InterpreterLimits
from posttrain_memory.vault.limits import VaultLimits
from posttrain_memory.worlds.recipe import RewardWeights, WorldRecipe


class AgentRecipe(BaseConfig):
    """Format and limits of the memory agent, in training and in use."""

    max_turns: int = Field(8, ge=2)
    """Maximum number of policy messages in an episode. A scripted solution takes at most 5."""
    thinking: bool = True
    """Every message begins with a `<think>` block. Otherwise it is `<python>` or `<reply>` alone."""
    opened_by: Literal["policy", "environment", "template"] = "policy"
    """What writes the opening `<think>`: the policy, the environment (as the beginning of the policy's message), or
    the chat template, as that of Qwen3-4B-Thinking-2507 does.
    """
    prompt: Literal["full", "brief"] = "full"
    """The system prompt: about 570 or 190 tokens of SmolLM2."""
    result_chars: int = Field(4_000, ge=200)
    """Maximum number of characters of a result: values, printed text and error together. Longer results are cut, with a
    notice.
    """
    tool_calls: int = Field(60, ge=1)
    """Maximum number of tool calls in an episode."""
    interpreter: InterpreterLimits = InterpreterLimits()
    """Resource limits of a block of code."""

    def _check(self) -> None:
        if not self.thinking and self.opened_by != "policy":
            raise ValueError("`opened_by` has no effect without `thinking`; drop one")


class MemoryRecipe(AgentRecipe, EnvironmentRecipe):
    """Recipe keys of the environment `memory`."""

    scoring = EnvironmentRecipe.scoring | {"weights", "judge_decides", "rejected", "workers"}

    type: Literal["memory"] = "memory"
    """A vault of Markdown notes that the policy reads and changes by writing Python."""
    worlds: WorldRecipe = WorldRecipe()
    """Generated worlds and tasks. Each seed is one task in its own world; kinds are drawn in proportion to their
    numbers of tasks. Not used with `tasks`.
    """
    tasks: TaskSources = []
    """Rows written by `posttrain data worlds` to play instead: a path, or a list of paths and sections. The
    environment seed is the row number, counted from 0 over all sources. `evaluation.held_out` divides them, by vault
    where there are at least 20.
    """
    memories: Reads | None = None
    """Folder with the `base_memory.json` files of rows in the published format, which refer to their vault by name. A folder in
    `tasks` with evaluation items `KIND/N_qa.jsonl` has its vaults beside them, in folders `KIND/N`.
    """
    follow_up: bool = False
    """After an update, ask about it in a new conversation; both must be right (the two-rollout protocol). The reward
    is the mean of the two.
    """
    weights: RewardWeights = RewardWeights()
    """Reward of each outcome of an episode."""
    judge: JudgeServerRecipe | None = None
    """A language model that judges episodes in addition to the programmatic reward. Its score is reported, and
    `weights.judge` subtracts reward according to it. It cannot make a wrong episode right.
    """
    judge_decides: list[Literal["retrieval", "update", "clarification"]] = ["update"]
    """Kinds of tasks in the published format that succeed with at least half of the judge's points, instead of by comparison with
    a known answer. Updates that come with a question are decided by the answer to it. Rows that nothing can decide are dropped
    and counted.
    """
    rejected: float = Field(-0.02, le=0)
    """Added to the reward of a turn whose message cannot be parsed."""
    vault: VaultLimits = VaultLimits()
    """Size limits of the notes."""
    workers: int = Field(1, ge=1)
    """Number of processes that run code, shared by all episodes of a run."""

    @property
    def rows_key(self) -> str | None:
        """`environment.tasks`, unless tasks are generated."""
        return "environment.tasks" if self.tasks else None

    def _check(self) -> None:
        if self.memories is not None and not self.tasks:
            raise ValueError("`memories` requires `tasks`")
        weights = self.weights
        if weights.judge and self.judge is None:
            raise ValueError("`weights.judge` requires `judge`")
        rejected = (self.max_turns - 1) * (2 if self.follow_up else 1)
        least = weights.success - weights.turns_at_most - weights.judge + self.rejected * rejected
        most = weights.partial + weights.form
        half = (weights.success + weights.form + most) / 2
        if self.follow_up and least <= half:
            judged = " with judge score 0" if weights.judge else " after rejected messages"
            raise ValueError(
                f"a successful episode could earn as little as {least:g}{judged}, and one that is half wrong as "
                f"much as {half:g}; lower `weights.partial`, `weights.check_first`, `weights.code`, `weights.judge` or "
                "`max_turns`, or move `rejected` towards 0"
            )
        if least <= most:
            raise ValueError(
                f"a successful episode with rejected messages could earn as little as {least:g}, no more "
                "than a wrong one; move `rejected` towards 0, or lower `max_turns` or `weights.judge`"
            )
