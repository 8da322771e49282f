"""The audit of an environment by players without a model: `posttrain env audit`.

Every player plays every seed twice in one process, and once in a second process with another `PYTHONHASHSEED`.
`audit_child.py` plays; this file starts it and compares its reports. An environment that hangs or kills its process is
a finding.
"""

import json
import math
import os
import re
import select
import signal
import subprocess
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import fmean, median
from threading import Thread
from time import monotonic
from typing import Any, Literal

from pydantic import TypeAdapter, ValidationError

from posttrain.distributed.process import ChildProcess
from posttrain.environments.check import needs_success
from posttrain.environments.players import WITHOUT_WORK
from posttrain.errors import RunError
from posttrain.recipe.components import EnvironmentRecipe

SLOW = 1.0
"""Duration in seconds from which a step is noted."""
SHARE_WITHOUT_WORK = 0.1
"""Share of the oracle's return (of 1 without an oracle) from which a return without work is a defect."""
SHORTEST_LEAK = 4
"""Minimum length of answers to search for in prompts: shorter ones occur by chance."""
_SHOWN = 160
"""Maximum number of characters of an exception that a finding quotes."""
_KEPT = 1 << 16
"""Number of bytes of a process's output that are kept, the newest."""

Check = Literal[
    "exceptions", "time", "protocol", "seeding", "rewards", "ceiling", "reward without work", "leak", "side effects"
]


@dataclass(frozen=True)
class Finding:
    """One defect or note."""

    check: Check
    defect: bool
    """True for a defect; false for a note about behavior that may be intended."""
    text: str
    command: str
    """The command that reproduces the finding."""


@dataclass
class Episodes:
    """The report of one process about one player on one seed, made by `audit_child`."""

    player: str
    seed: int
    digest: str = ""
    """Hash of everything that the environment showed and scored."""
    digest_again: str = ""
    """The same hash for the second episode, on another instance."""
    prompt: str = ""
    """Hash of the reset."""
    rewards: list[float] = field(default_factory=list)
    """By step."""
    success: bool | None = None
    error: str | None = None
    """`reset raised KeyError: ...`."""
    protocol: str | None = None
    """The rule of the protocol that the episode violated."""
    seconds: list[float] = field(default_factory=list)
    """Wall time of the reset, then of each step."""
    leaks: bool | None = None
    """Whether the oracle's first answer is in the prompt; None for other players, or if it cannot be determined."""
    chance: float = 0.0
    """Share of the other seeds' answers that are in this prompt, too."""
    side_effects: bool = False
    """Whether the episode changed the global random state."""

    @property
    def total_reward(self) -> float:
        return math.fsum(self.rewards)


@dataclass
class Score:
    """The result of one player."""

    n: int
    """Number of seeds."""
    successes: int | None
    """Success rate; None if the environment does not report success."""
    mean_return: float
    """Mean return of complete episodes; NaN if there are none."""
    lowest: float
    """Lowest and highest reward of a step."""
    highest: float


@dataclass
class Audit:
    """The audit of one environment."""

    name: str
    """Type and keys, as on the command line."""
    seeds: tuple[int, int]
    """The first seed and their number."""
    players: dict[str, Score]
    turns: int
    """Largest number of steps of an episode."""
    reset_ms: float
    """Median wall time of a reset, milliseconds."""
    step_ms: float
    """Median wall time of a step, milliseconds."""
    findings: list[Finding]

    @property
    def defects(self) -> list[Finding]:
        """The findings that are errors of the environment."""
        return [finding for finding in self.findings if finding.defect]

    def as_json(self) -> str:
        """One line, without NaN."""
        values = asdict(self)
        for score in values["players"].values():
            for key in ("mean_return", "lowest", "highest"):
                score[key] = round(score[key], 4) if math.isfinite(score[key]) else None
        for key in ("reset_ms", "step_ms"):
            values[key] = round(values[key], 3) if math.isfinite(values[key]) else None
        return json.dumps(values, ensure_ascii=False)


def audit(
    name: str, recipe: EnvironmentRecipe, seeds: range, players: Sequence[str], processes: "AuditProcesses"
) -> Audit:
    """Play and judge one environment. `name`: its type and keys, as words of the command line."""
    task = {
        "type": recipe.type,
        "recipe": recipe.model_dump_json(),
        "seeds": [seeds.start, len(seeds)],
        "players": list(players),
        "needs_success": needs_success(recipe),
    }
    reports = processes.play(task)
    first, second = reports
    findings = []
    for report in dict.fromkeys(report for report in reports if isinstance(report, NoReport)):
        command = _command(name, [at.seed], [at.player]) if (at := report.during) else _command(name, seeds, ())
        findings.append(Finding("exceptions", True, report.text, command))
    if isinstance(first, NoReport) or isinstance(second, NoReport):
        return Audit(name, (seeds.start, len(seeds)), {}, 0, math.nan, math.nan, findings)
    results = {player: _score([one for one in first if one.player == player]) for player in players}
    scores = {player: score for player, score in results.items() if score is not None}
    findings += _findings(name, first, second, scores)
    times = [one.seconds for one in first if one.seconds]
    steps = [seconds for one in times for seconds in one[1:]]
    return Audit(
        name,
        (seeds.start, len(seeds)),
        scores,
        max((len(one.rewards) for one in first), default=0),
        1000 * median([one[0] for one in times]) if times else math.nan,
        1000 * median(steps) if steps else math.nan,
        findings,
    )


def _score(episodes: list[Episodes]) -> Score | None:
    """The score of one player; None for an oracle that does not exist."""
    whole = [one for one in episodes if one.error is None]
    if not whole:
        return None
    rewards = [reward for one in whole for reward in one.rewards]
    known = [one.success for one in whole if one.success is not None]
    return Score(
        len(whole),
        sum(known) if known else None,
        fmean(one.total_reward for one in whole),
        min(rewards, default=math.nan),
        max(rewards, default=math.nan),
    )


# -- findings ---------------------------------------------------------------------------------------------------------


def _command(name: str, seeds: Iterable[int], players: Iterable[str], show: bool = False) -> str:
    """The command that plays these seeds with these players again."""
    numbers = sorted(set(seeds))
    options = f" --first {numbers[0]} --seeds {numbers[-1] - numbers[0] + 1}"
    options += "".join(f" --player {player}" for player in dict.fromkeys(players))
    return f"posttrain env audit {name}{options}{' --show' if show else ''}"


def _findings(
    name: str, first: list[Episodes], second: list[Episodes], scores: Mapping[str, Score]
) -> Iterator[Finding]:
    yield from _exceptions(name, first)
    yield from _seeding(name, first, second)
    if wrong := [one for one in first if not all(math.isfinite(reward) for reward in one.rewards)]:
        yield Finding("rewards", True, f"a reward is not finite ({_who(wrong)})", _of(name, wrong))
    oracle = [one for one in first if one.player == "oracle" and one.error is None]
    if failed := [one for one in oracle if one.success is False]:
        # With several turns, turns may run out or chance may decide, so it is only a note.
        one_turn = all(len(one.rewards) == 1 for one in oracle)
        earned = [f"{value:g}" for value in sorted({round(one.total_reward, 3) for one in failed})]
        returns = ", ".join([*earned[:4], *(["..."] if len(earned) > 4 else [])])
        text = f"the oracle fails on {len(failed)} of {len(oracle)} seeds, with return {returns}"
        yield Finding("ceiling", one_turn, text, _of(name, failed, show=True))
    yield from _without_work(name, first, scores)
    # An answer in the prompt, unless the answers of other seeds are there as well, as in a list of choices.
    known = [one for one in first if one.leaks is not None]
    if leaking := [one for one in known if one.leaks and one.chance < 0.5]:
        text = f"the oracle's first answer is in the prompt on {len(leaking)} of {len(known)} seeds"
        yield Finding("leak", False, text, _command(name, [one.seed for one in known], ["oracle"], show=True))
    moved = [one for one in first if one.side_effects]
    if moved:
        text = "changes the global random state of Python or numpy, which other code may draw from"
        yield Finding("side effects", False, text, _of(name, moved[:1]))


def _of(name: str, episodes: Sequence[Episodes], show: bool = False) -> str:
    """The command that reproduces the finding with only the first of these episodes."""
    return _command(name, [episodes[0].seed], [episodes[0].player], show)


def _exceptions(name: str, episodes: list[Episodes]) -> Iterator[Finding]:
    by_text: dict[tuple[Check, str], list[Episodes]] = {}
    for one in episodes:
        if one.error:
            by_text.setdefault(("exceptions", one.error[:_SHOWN]), []).append(one)
        if one.protocol:
            by_text.setdefault(("protocol", one.protocol), []).append(one)
    for (check, text), those in by_text.items():
        yield Finding(check, True, f"{text} ({_who(those)})", _of(name, those))
    slow = [one for one in episodes if max(one.seconds, default=0.0) > SLOW]
    if slow:
        worst = max(slow, key=lambda one: max(one.seconds))
        text = f"a call took {max(worst.seconds):.1f} s ({_who(slow)})"
        yield Finding("time", False, text, _of(name, [worst]))


def _seeding(name: str, first: list[Episodes], second: list[Episodes]) -> Iterator[Finding]:
    within = [one for one in first if one.digest != one.digest_again]
    if within:
        text = f"the same seed and answers give another episode in the same process ({_who(within)})"
        yield Finding("seeding", True, text, _of(name, within))
    across = [one for one, other in zip(first, second, strict=True) if one.digest != other.digest]
    across = [one for one in across if one.digest == one.digest_again]
    if across:
        text = (
            f"the same seed and answers give another episode in a process with another PYTHONHASHSEED ({_who(across)})"
        )
        yield Finding("seeding", True, text, _of(name, across))
    prompts = {one.prompt for one in first if one.prompt}
    seeds = {one.seed for one in first}
    if len(prompts) == 1 < len(seeds):
        yield Finding(
            "seeding", False, f"{len(seeds)} seeds show the same first messages", _command(name, seeds, ["nothing"])
        )


def _without_work(name: str, episodes: list[Episodes], scores: Mapping[str, Score]) -> Iterator[Finding]:
    """Rewards for players that do not try. Success, or a large share of the oracle's return, is a defect."""
    best = scores["oracle"].mean_return if "oracle" in scores else 1.0
    paid: dict[bool, list[Episodes]] = {True: [], False: []}
    for player in (player for player in WITHOUT_WORK if player in scores):
        whole = [one for one in episodes if one.player == player and one.error is None]
        share = scores[player].mean_return / best if best > 0 else 0.0
        defect = share >= SHARE_WITHOUT_WORK or any(one.success for one in whole)
        paid[defect] += [one for one in whole if one.success or one.total_reward > 0]
    for defect, those in paid.items():
        if not those:
            continue
        those.sort(key=lambda one: (not one.success, -one.total_reward, one.seed))
        solved = sum(bool(one.success) for one in those)
        text = f"{_who(those)}: up to {those[0].total_reward:.3g}" + (f" of {best:.3g}" if "oracle" in scores else "")
        text += f", {solved} successes" if solved else ""
        yield Finding("reward without work", defect, text, _of(name, those, show=True))


def _who(episodes: Sequence[Episodes]) -> str:
    """`echo, random on 3 seeds`."""
    players = ", ".join(dict.fromkeys(one.player for one in episodes))
    count = len({one.seed for one in episodes})
    return f"{players} on {count} seed{'s' if count > 1 else ''}"


# -- processes --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Started:
    """A process starts the episodes of one player on one seed."""

    player: str
    seed: int


@dataclass(frozen=True)
class NoReport:
    """Why a process has no report."""

    text: str
    during: _Started | None = None
    """The episodes that were running when the time was over."""


Report = list[Episodes] | NoReport
"""The findings of a process, or the reason why it has none."""
_LINE = TypeAdapter[list[Episodes] | str | _Started](list[Episodes] | str | _Started)
"""A line that a process writes: its findings, why it has none, or what it plays now."""


class AuditProcesses(AbstractContextManager["AuditProcesses"]):
    """Two processes that play, with different `PYTHONHASHSEED`. A context manager."""

    def __init__(self, seconds: float) -> None:
        """`seconds`: time-out of one environment in one process."""
        self._seconds = seconds
        self._processes: dict[str, ChildProcess] = {}
        self._outputs: dict[str, tuple[Thread, bytearray]] = {}
        """What each process writes besides its reports: the thread that reads it, and the newest bytes."""

    def __exit__(self, *exception: object) -> None:
        for process in self._processes.values():
            process.stop(1.0)

    def play(self, task: Mapping[str, Any]) -> tuple[Report, Report]:
        """The reports of both processes, one after the other."""
        return self._play("0", task), self._play("1", task)

    def _play(self, hash_seed: str, task: Mapping[str, Any]) -> Report:
        process = self._processes.get(hash_seed) or self._start(hash_seed)
        try:
            process.stdin.write(json.dumps(task).encode() + b"\n")
            process.stdin.flush()
        except BrokenPipeError:
            return self._death(hash_seed)
        # The child reports every episode when it starts, and all results at the end.
        played: list[_Started] = []
        expected = [
            (player, task["seeds"][0] + place) for place in range(task["seeds"][1]) for player in task["players"]
        ]
        end = monotonic() + self._seconds
        received = b""
        while True:
            line, complete, rest = received.partition(b"\n")
            if not complete:
                if not select.select([process.stdout], [], [], max(0.0, end - monotonic()))[0]:
                    return self._time_over(hash_seed, played, len(expected))
                part = os.read(process.stdout.fileno(), 1 << 20)
                if not part:
                    return self._death(hash_seed)
                received += part
                continue
            received = rest
            try:
                report = _LINE.validate_json(line)
            except ValidationError:
                break
            if isinstance(report, str):
                return NoReport(report)
            if isinstance(report, _Started):
                played.append(report)
                continue
            reported = [(one.player, one.seed) for one in report]
            # An environment need not have an oracle.
            if [one for one in expected if one in reported or one[0] != "oracle"] != reported:
                break
            return report
        self._stop(hash_seed)
        return NoReport("the environment wrote into the reports of its process")

    def _time_over(self, hash_seed: str, played: "Sequence[_Started]", total: int) -> NoReport:
        """The call that was running when the time was over; it shows whether one call hangs or many are slow."""
        self._processes[hash_seed].send_signal(signal.SIGABRT)  # `audit_child` writes its stack
        _, lines = self._stop(hash_seed)
        if not played:
            return NoReport(f"no result within {self._seconds:g} s")
        calls = [re.match(r'File "(.*)", line (\d+) in (\w+)', line.strip()) for line in lines]
        place = next((f" in {Path(call[1]).name}, line {call[2]} ({call[3]})" for call in calls if call), "")
        done = f"{len(played) - 1} of {total} done, then {played[-1].player} on seed {played[-1].seed}{place}"
        return NoReport(f"no result within {self._seconds:g} s: {done}", played[-1])

    def _death(self, hash_seed: str) -> NoReport:
        """The reason why the process ended: its exit status and the last line that it wrote."""
        code, lines = self._stop(hash_seed)
        return NoReport(f"its process ended with exit status {code}{': ' + lines[-1][:_SHOWN] if lines else ''}")

    def _stop(self, hash_seed: str) -> tuple[int, list[str]]:
        """End the process. Returns its exit code and the last lines that it wrote besides its reports."""
        code = self._processes.pop(hash_seed).stop(5.0)  # a busy machine is slow to write a stack
        reader, output = self._outputs[hash_seed]
        reader.join(5.0)  # a process that the environment started may hold the pipe open
        return code, output.decode(errors="replace").strip().splitlines()

    def _start(self, hash_seed: str) -> ChildProcess:
        environment = {
            **os.environ,
            "PYTHONHASHSEED": hash_seed,
            "PYTHONPATH": os.pathsep.join(p for p in sys.path if p),
        }
        command = [sys.executable, "-P", "-m", "posttrain.environments.audit_child"]
        process = self._processes[hash_seed] = ChildProcess(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE, environment=environment
        )
        output = bytearray()
        reader = Thread(target=_keep_newest, args=[process.stderr.fileno(), output], daemon=True)
        reader.start()
        self._outputs[hash_seed] = reader, output
        return process


def _keep_newest(pipe: int, output: bytearray) -> None:
    """Read a pipe to its end. An environment may print without end: the pipe never fills, and `output` is bounded."""
    # Not a number of parts: a stack arrives in parts of a few bytes.
    while part := os.read(pipe, 1 << 12):
        output += part
        del output[:-_KEPT]


def overrides_of(keys: Mapping[str, Any], prefix: str = "") -> list[str]:
    """`key=value` words of nested keys."""
    words = []
    for key, value in keys.items():
        if isinstance(value, Mapping):
            words += overrides_of(value, f"{prefix}{key}.")
        else:
            words.append(f"{prefix}{key}={value if isinstance(value, str) else json.dumps(value)}")
    return words


def require_sound(audits: Sequence[Audit]) -> None:
    """RunError if an audit has defects."""
    faulty = [audit for audit in audits if audit.defects]
    if faulty:
        count = sum(len(audit.defects) for audit in faulty)
        defects = f"{count} defect{'s' if count > 1 else ''}"
        raise RunError(f"{defects} in {len(faulty)} of {len(audits)} environments; the commands above reproduce them")
