"""The process of an agent: started with the task and the endpoint in its environment, ended with all of its
children.
"""

import asyncio
import json
import os
import shlex
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from posttrain.distributed.process import ChildProcess

_READ = 1 << 20
"""Number of bytes to read from the end of an agent's output."""
_REPORT_KEYS = {"answer", "reward", "success", "scores"}


@dataclass(frozen=True)
class AgentExit:
    """How an agent's process ended."""

    code: int | None
    """Exit code; None if the agent was stopped at its time-out."""
    output: str
    """The end of its standard output."""
    errors: str
    """The end of its standard error."""


@dataclass(frozen=True)
class AgentReport:
    """The answer, reward and scores that an agent reported."""

    answer: str
    reward: Any = None
    success: bool | None = None
    scores: dict[str, Any] = field(default_factory=dict)


async def run_agent(
    command: str,
    task: str,
    seed: int,
    variables: Mapping[str, str],
    folder: Path,
    timeout: float,
    stop: asyncio.Event,
) -> AgentExit:
    """Run an agent until it exits, `timeout` seconds pass, or `stop` is set. OSError if it cannot be started.

    Its children end with it. `folder` is an empty directory for its input and output.
    """
    words = [word.replace("{task}", task).replace("{seed}", str(seed)) for word in shlex.split(command)]
    (folder / "input").write_text(task, encoding="utf-8")
    with open(folder / "input", "rb") as stdin, open(folder / "out", "wb") as out, open(folder / "err", "wb") as err:
        process = ChildProcess(words, stdin=stdin, stdout=out, stderr=err, environment={**os.environ, **variables})
    with process:
        exited, stopped = asyncio.create_task(process.wait()), asyncio.create_task(stop.wait())
        try:
            done, _ = await asyncio.wait({exited, stopped}, timeout=timeout, return_when=asyncio.FIRST_COMPLETED)
        finally:
            exited.cancel()
            stopped.cancel()
    return AgentExit(exited.result() if exited in done else None, _tail(folder / "out"), _tail(folder / "err"))


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
            success = value.get("success")
            scores = value.get("scores")
            return AgentReport(
                answer=str(value.get("answer", "")),
                reward=value.get("reward"),
                success=success if isinstance(success, bool) else None,
                scores=scores if isinstance(scores, dict) else {},
            )
    return AgentReport(text)
