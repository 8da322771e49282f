"""Plays episodes with an agent: the task from the environment, the answers from the policy, the reward from a report."""

import asyncio
import json
import os
import shlex
import shutil
import tempfile
from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import Any

from posttrain.distributed.process import ChildProcess
from posttrain.engines.openai import for_servers
from posttrain.environments.protocol import Environment, Observation, Step
from posttrain.environments.rewards import SCORE, RewardFailure, RewardFunction, Scores, finite_scores, load_reward
from posttrain.episode import Episode, Outcome
from posttrain.images import MARK, readable
from posttrain.recipe.agent import AgentRecipe
from posttrain.rollout.agents.endpoint import AgentEndpoint
from posttrain.rollout.agents.session import AgentSession
from posttrain.rollout.driver import EnvironmentFailure, EpisodeRequest, EpisodeWorker, RolloutWorker, outcome_of

_MAX_VARIABLE = 100_000
"""Maximum length of a variable in characters: Linux limits an environment variable to 128 KiB."""

_READ = 1 << 20
"""Number of bytes to read from the end of an agent's output."""
_REPORT_KEYS = {"answer", "reward", "success", "scores"}


@dataclass(frozen=True)
class AgentReport:
    """The answer, reward and scores that an agent reported."""

    answer: str
    reward: Any = None
    success: bool | None = None
    scores: dict[str, Any] = field(default_factory=dict)


async def run_agent(
    agent: AgentRecipe, task: str, seed: int, variables: Mapping[str, str], folder: Path, session: AgentSession
) -> str:
    """Run an agent until it exits, `agent.timeout` seconds pass, or the engine of `session` fails.

    Returns the end of its standard output. Its children end with it. `folder` is an empty directory for its input and
    output. OSError or ValueError if it cannot be started, _AgentFailure if it does not finish or makes no call.
    """
    words = [word.replace("{task}", task).replace("{seed}", str(seed)) for word in shlex.split(agent.command)]
    (folder / "input").write_text(task, encoding="utf-8")
    with open(folder / "input", "rb") as stdin, open(folder / "out", "wb") as out, open(folder / "err", "wb") as err:
        process = ChildProcess(words, stdin=stdin, stdout=out, stderr=err, environment={**os.environ, **variables})
    with process:
        exited, stopped = asyncio.create_task(process.wait()), asyncio.create_task(session.failed.wait())
        try:
            done, _ = await asyncio.wait({exited, stopped}, timeout=agent.timeout, return_when=asyncio.FIRST_COMPLETED)
        finally:
            exited.cancel()
            stopped.cancel()
    if session.error is not None:
        raise _AgentFailure(AgentEnding.CRASHED, "was ended because the engine failed")
    if exited not in done:
        raise _AgentFailure(AgentEnding.TIMED_OUT, f"ran longer than agent.timeout = {agent.timeout:g} s")
    if code := exited.result():
        lines = _tail(folder / "err").strip().splitlines()
        how = f"exited with code {code}" if code > 0 else f"was ended by signal {-code}"
        raise _AgentFailure(AgentEnding.CRASHED, how + (f": {lines[-1][:300]}" if lines else ""))
    if not session.turns:
        raise _AgentFailure(AgentEnding.NEVER_CALLED, "exited without a call; it must use OPENAI_BASE_URL")
    return _tail(folder / "out")


def _tail(file: Path) -> str:
    with open(file, "rb") as stream:
        stream.seek(max(0, file.stat().st_size - _READ))
        return stream.read().decode("utf-8", "replace")


def read_report(text: str) -> AgentReport:
    """The report in `text`: a JSON object, as the whole text or its last line. Otherwise the text is the answer."""
    text = text.strip()
    for candidate in (text, text.rpartition("\n")[2]):
        try:
            value = json.loads(candidate)
        except (ValueError, RecursionError):
            continue
        if isinstance(value, dict) and value.keys() & _REPORT_KEYS:
            success, scores = value.get("success"), value.get("scores")
            return AgentReport(
                answer=str(value.get("answer", "")),
                reward=value.get("reward"),
                success=success if isinstance(success, bool) else None,
                scores=scores if isinstance(scores, dict) else {},
            )
    return AgentReport(text)


class AgentEnding(StrEnum):
    """How the agent of an episode ended. All but the first fail the episode."""

    FINISHED = "finished"
    """It exited with code 0 after at least one call, and its report was complete."""
    TIMED_OUT = "timed_out"
    """It ran longer than `agent.timeout`."""
    CRASHED = "crashed"
    """It exited with another code, or by a signal."""
    NOT_STARTED = "not_started"
    """Its command cannot be executed."""
    NEVER_CALLED = "never_called"
    """It exited with code 0, but no call was answered."""
    NO_REPORT = "no_report"
    """Its report is missing, or has no finite reward where `agent.reward` is `report`."""
    NO_REWARD = "no_reward"
    """The environment or the reward function failed."""


class _AgentFailure(Exception):
    """An agent that did not finish."""

    def __init__(self, ending: AgentEnding, reason: str) -> None:
        super().__init__(reason)
        self.ending = ending


@dataclass(frozen=True, kw_only=True)
class AgentWorker(RolloutWorker):
    """Plays episodes by starting an agent for each. The engine keeps an episode open until the agent has ended."""

    agent: AgentRecipe
    endpoint: AgentEndpoint

    @property
    def capacity(self) -> int:
        return min(self.engine.capacity, self.agent.max_concurrent)

    async def run_episode(self, request: EpisodeRequest) -> Episode:
        kind: type[EpisodeWorker] = RolloutWorker if self.agent.lockstep else EpisodeWorker
        return await kind.run_episode(self, request)

    async def _run_attempt(self, request: EpisodeRequest, attempt: int) -> Episode:
        session = AgentSession(
            self.engine, self.renderer, self.rollout, self.sampling, request, attempt, self.agent.lockstep
        )
        ending, failure, outcome = AgentEnding.FINISHED, None, Outcome.FAILED
        step = Step([], 0.0, True, False)
        try:
            environment, observation = await self._start(request.seed)
            report = await self._report(session, environment, observation, request)
            step = await self._reward(environment, observation, report, request)
            outcome = outcome_of(step)
        except _AgentFailure as error:
            ending, failure = error.ending, f"the agent {error}"
        except (EnvironmentFailure, RewardFailure) as error:
            ending, failure = AgentEnding.NO_REWARD, str(error)
        finally:
            streams, turns, messages = session.finish()
        if session.error is not None:
            raise session.error
        session.info["ending"] = ending.value
        if turns and outcome is not Outcome.FAILED:
            last = turns[-1]
            last.reward, last.info = step.reward, {**last.info, **step.info}
            streams[last.stream].rewards[last.stop - 1] += step.reward
        return Episode(
            seed=request.seed,
            group=request.group,
            index=request.index,
            version=self.version,
            streams=streams,
            turns=turns,
            outcome=outcome,
            failure=failure,
            messages=messages,
            info=session.info,
        )

    async def _report(
        self, session: AgentSession, environment: Environment, observation: Observation, request: EpisodeRequest
    ) -> AgentReport:
        """Run the agent; returns its report. _AgentFailure if it does not finish."""
        folder = Path(tempfile.mkdtemp(prefix="posttrain-agent-"))
        task = readable(observation.messages[-1]["content"]) if observation.messages else ""
        key = self.endpoint.open(session)
        variables = {
            "OPENAI_BASE_URL": f"{self.endpoint.url}/v1",
            "OPENAI_API_KEY": key,
            "POSTTRAIN_SEED": str(request.seed),
            "POSTTRAIN_REPORT": str(folder / "report"),
            "POSTTRAIN_TASK": task,
            "POSTTRAIN_MESSAGES": json.dumps(list(map(for_servers, observation.messages))),
            "POSTTRAIN_ROW": json.dumps(dict(await self._call(environment.row, environment.blocking)), default=str),
        }
        variables = {name: value for name, value in variables.items() if len(value) <= _MAX_VARIABLE}
        try:
            if "POSTTRAIN_MESSAGES" not in variables and any(
                MARK.search(one["content"]) for one in observation.messages
            ):
                raise _AgentFailure(
                    AgentEnding.NOT_STARTED,
                    f"cannot get the images of its task, which are longer than {_MAX_VARIABLE:,} characters; make them smaller",
                )
            text = await run_agent(self.agent, task, request.seed, variables, folder, session)
            if self.agent.report == "file":
                try:
                    text = (folder / "report").read_text(encoding="utf-8")
                except (OSError, ValueError) as error:
                    raise _AgentFailure(
                        AgentEnding.NO_REPORT,
                        f"wrote no report to the file in POSTTRAIN_REPORT ({type(error).__name__}); write it, or set "
                        "agent.report=stdout",
                    ) from error
            return read_report(text)
        except (OSError, ValueError) as error:
            raise _AgentFailure(
                AgentEnding.NOT_STARTED, f"cannot be started ({error}); correct agent.command"
            ) from error
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    async def _reward(
        self, environment: Environment, observation: Observation, report: AgentReport, request: EpisodeRequest
    ) -> Step:
        """The reward and the info of the last turn."""
        if self.agent.reward == "environment":
            return await self._step(environment, report.answer, request.seed)
        if self.agent.reward == "none":
            return Step([], 0.0, True, False)
        if self.agent.reward == "report":
            try:
                scores: Scores = finite_scores(
                    {SCORE: report.reward, **report.scores}, "the report", f"seed {request.seed}"
                )
            except RewardFailure as error:
                raise _AgentFailure(AgentEnding.NO_REPORT, f"reported no finite reward: {error}") from error
        else:
            function: RewardFunction = load_reward(self.agent.reward, "agent.reward")
            origin = type(environment).task_name(environment.recipe, request.seed)
            score = partial(function, observation.messages, report.answer, environment.row(), origin)
            scores = await self._call(score, environment.blocking or function.blocking)
        reward = scores[SCORE]
        others = {name: value for name, value in scores.items() if name != SCORE}
        info: dict[str, Any] = {"scores": others} if others else {}
        if report.success is not None:
            info["success"] = report.success
        elif self.agent.success_reward is not None and reward is not None:
            info["success"] = reward >= self.agent.success_reward
        return Step([], reward or 0.0, True, False, info, scored=reward is not None)
