"""The recipe of agents: programs that play the episodes themselves and call the policy through an endpoint."""

from typing import ClassVar, Literal

from pydantic import Field

from posttrain.recipe.base import BaseConfig, Executes
from posttrain.recipe.metrics import Metric

SCORED_ELSEWHERE = ("environment", "report", "none")
"""Values of `agent.reward` that do not name a function."""


class AgentRecipe(BaseConfig):
    """An agent: a program that is started once per episode and calls the policy through an endpoint of this run."""

    metrics: ClassVar[tuple[Metric, ...]] = (
        Metric("agent/calls", "answered calls of agents"),
        Metric("agent/finished", "agents that finished"),
        Metric("agent/crashed", "agents that exited with an error"),
        Metric("agent/timed_out", "agents that ran longer than `agent.timeout`"),
        Metric("agent/not_started", "agents that could not be started"),
        Metric("agent/never_called", "agents that made no call"),
        Metric("agent/no_report", "agents without a usable report"),
        Metric("agent/no_reward", "agents whose environment or reward function failed"),
        Metric("agent/streams", "streams of the episodes of agents"),
        Metric("agent/refused", "refused calls of agents"),
        Metric("agent/retried", "repeated requests that got the recorded answer"),
        Metric("agent/late", "calls after the end of their episode"),
        Metric("agent/malformed_calls", "tool calls that could not be parsed"),
        Metric("agent/abandoned", "calls of agents whose client gave up before the answer"),
    )

    command: Executes = Field(min_length=1)
    """Command line of the agent, run in the current folder without a shell. `{task}` and `{seed}` are replaced by the
    task's last message and by its seed. The agent gets them in `POSTTRAIN_TASK` and `POSTTRAIN_SEED` and the task on
    its standard input as well, and the endpoint in `OPENAI_BASE_URL` and `OPENAI_API_KEY`."""
    timeout: float = Field(600.0, gt=0)
    """Seconds after which the agent and its child processes are ended and the episode fails."""
    report: Literal["stdout", "file"] = "stdout"
    """Where the agent reports. `stdout`: its standard output. `file`: the file that `POSTTRAIN_REPORT` names. A JSON
    object, in its last line or as a whole, may have `answer`, `reward`, `success` and `scores`. Other text is the answer."""
    reward: Literal["environment", "report", "none"] | Executes = "environment"
    """What rewards an episode. `environment`: the environment, which gets the reported answer as the action. `report`:
    `reward` of the report. `none`: only a reward model. Else a function as in `environment.reward`."""
    success_reward: float | None = 1.0
    """For `report` and functions: the smallest reward of a success, unless the report has `success`. Null: no success."""
    max_concurrent: int = Field(16, ge=1)
    """Maximum number of agents that run at a time."""
    lockstep: bool = True
    """true: a forward pass of the local engine waits until every running agent has called it or ended, so that a resumed
    run repeats the same bits. false: it waits for no agent, which is faster where agents take long between calls."""

    @property
    def function(self) -> str | None:
        """The reward function; None if something else rewards."""
        return None if self.reward in SCORED_ELSEWHERE else self.reward


def refuse_with_agent(recipe: BaseConfig, agent: AgentRecipe) -> None:
    """Raise ValueError for settings that episodes of an agent do not support."""
    environment, reward = getattr(recipe, "environment"), getattr(recipe, "reward", None)  # noqa: B009
    if agent.reward == "environment" and environment.max_turns > 1:
        turns = f"`environment.max_turns` is {environment.max_turns}; set it to 1"
        raise ValueError(
            f"`agent.reward: environment` gives the environment one answer, and {turns}, or reward the agent by its report or "
            "by a function"
        )
    if agent.reward == "none" and reward is None:
        raise ValueError("`agent.reward: none` leaves the episodes without a reward; set `reward.path` or another one")
    if getattr(recipe, "unit_credit", None) is not None:
        raise ValueError("`unit_credit` divides one stream, and an agent may have several; remove it, or `agent`")
    if getattr(recipe, "rollout").async_rollouts:  # noqa: B009
        raise ValueError("`rollout.async_rollouts` does not support `agent`; set it to 0")
    hardware = getattr(recipe, "hardware", None)
    if hardware is not None and hardware.ray is not None:
        raise ValueError("`hardware.ray` does not support `agent`; remove one of them")
    if getattr(recipe, "remote", None) is not None:
        raise ValueError("`agent` records token ids, which a server does not return; use the local engine or vLLM")
