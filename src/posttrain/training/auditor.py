"""Scores the stored episodes of each evaluation again with the scorer of `audit`, and tests both."""

import asyncio
import json
import math
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np

from posttrain.data.tokens import TokenRow
from posttrain.engines.local.engine import LocalEngine
from posttrain.engines.protocol import Completion, Request
from posttrain.environments.protocol import EnvironmentFactory, ended_in
from posttrain.episode import Episode, Outcome, Turn
from posttrain.errors import InputError, RunError
from posttrain.evaluation.audit import OF_REWARD, REWARD, AuditScores, least_tasks, level_of, look
from posttrain.evaluation.verdict import LOST
from posttrain.models.policy import Policy
from posttrain.recipe.audit import AuditRecipe
from posttrain.recipe.model import RewardSource
from posttrain.recipe.plan import counted
from posttrain.recipe.rollout import SamplingRecipe
from posttrain.recipe.stages import DpoRecipe
from posttrain.rollout.store import episodes_file, read_episodes, stored_steps, write_episodes
from posttrain.runs.directory import RunDirectory, storage_errors, write_atomically
from posttrain.runs.log import read_log
from posttrain.runs.tables import audit_file
from posttrain.training.reward_scorer import RewardScorer
from posttrain.training.rows import stream_of

_AT_ONCE = 16
"""Episodes that are scored at a time."""
_ROWS = 64
"""Held-out rows whose prompts are answered."""


class Auditor:
    """Reads the episodes of the learning curve from the store, so that no object of training ever holds a score of the audit."""

    share = OF_REWARD
    """As in `look`."""
    counted_by = "evaluation.seeds.count"
    """The key with the number of tasks."""

    def __init__(self, recipe: Any, policy: Policy, run: RunDirectory, steps: int) -> None:
        """`recipe`: of a stage with `audit`. `steps`: of the run."""
        self.recipe, self.run, self.steps = recipe, run, steps
        self._spent = 0.0
        """Level of the tests so far."""
        self._first: tuple[int, list[Episode], tuple[dict[str, float], AuditScores]] | None = None
        """Step, episodes and scores of the first evaluation."""
        audit: AuditRecipe = recipe.audit
        self._factory = None if audit.environment is None else EnvironmentFactory(audit.environment)
        self._scorer = "path" if audit.environment is None else "environment"
        self._notes: list[str] = []
        """Warnings about what is scored."""
        self._model: RewardScorer | None = None
        if audit.path is not None:
            source = RewardSource(path=audit.path, normalize="none", clip=None)
            self._model = RewardScorer(source, policy.tokenizer, policy.recipe.device, "audit.path")

    def __call__(self, step: int) -> tuple[dict[str, Any], list[str], bool]:
        """The values of a line about the evaluation of `step`, warnings, and whether the run ends. The first evaluation,
        which is scored once per process, has no verdict, and neither has one of which the audit scores too few tasks. The
        tasks that differ most are written to `audit_file`.
        """
        if self._first is None or _lost(self._first[1], len(self._first[2][0])):  # such as by a server that failed then
            first = min(stored.step for stored in stored_steps(self.run.episodes) if stored.split == "evaluation")
            begun = self._episodes(first)
            self._first = first, begun, self._scored(begun)
            log = read_log(self.run.metrics)
            logged = [str(line.get("message")) for line in log if line["kind"] == "warning"]
            self._notes = [note for note in self._notes if note not in logged]
            self._spent = math.fsum(line.get("audit/level", 0.0) for line in log)
            after = step + self.recipe.evaluation.every * (step == first)
            least, count = least_tasks(level_of(self._spent, self._left(after))), len(self._first[2][0])
            few = f"audit: {counted(count, 'task')} cannot show anything in "
            if count < least and not any(one.startswith(few) for one in logged):
                looks = counted(self._left(after), "evaluation")
                self._notes.append(f"{few}{looks}; raise {self.counted_by} to {least} or more")
        first, begun, start = self._first
        level = level_of(self._spent, self._left(step))
        episodes = begun if step == first else self._episodes(step)
        scored = start if step == first else self._scored(episodes)
        notes, self._notes = self._notes, []
        found = look(start, scored, level, self.share)
        if found is None or _lost(episodes, found.n):
            both, of = len(start[0].keys() & scored[0].keys()), counted(len({e.seed for e in episodes}), "task")
            where = f" there and at step {first}" * (step != first) + "; two or more are needed" * (both < 2)
            missed = f"audit: no verdict at step {step}, since {both} of {of} have a score{where}"
            return {}, [*notes, missed], False
        values = {"audit/reward": found.reward.after, "audit/score": found.audit.after, "audit/n": found.n}
        for name, gain in zip(("audit/reward_gain", "audit/score_gain"), found.gains, strict=True):
            limits = {f"{name}_low": gain.low, f"{name}_high": gain.high}
            values |= {name: gain.value, **{key: one for key, one in limits.items() if math.isfinite(one)}}
        if step == first:
            return values, notes, False
        self._spent += level
        answers = [{str(e.seed): e for e in reversed(part)} for part in (begun, episodes)]
        rows = [
            {
                "task": task,
                "reward": reward,
                "audit": audit,
                "answers": [side[task].turns[-1].answer for side in answers],
            }
            for task, (reward, audit) in found.apart.items()
        ]
        file = audit_file(self.run.path, step)
        with storage_errors(file):
            file.parent.mkdir(exist_ok=True)
        write_atomically(file, json.dumps({"steps": [first, step], "apart": rows}, ensure_ascii=False))
        alarm = found.verdict == REWARD
        show = f"; compare them with `posttrain episodes {self.run.path} --split audit`"
        warnings = [*notes, *([found.sentence + show] if alarm else ())]
        tested = {"audit/level": level, "message": found.sentence, "alarm": alarm}
        return values | tested, warnings, alarm and self.recipe.guards.action == "stop"

    def _left(self, step: int) -> int:
        """Evaluations from that of `step` to the end of the run."""
        return max(0, math.ceil((self.steps - step) / self.recipe.evaluation.every)) + 1

    def _episodes(self, step: int) -> list[Episode]:
        """The episodes of an evaluation that have a return."""
        stored = read_episodes(episodes_file(self.run.episodes, step, "evaluation")).episodes
        return [episode for episode in stored if episode.has_return]

    def _scored(self, episodes: list[Episode]) -> tuple[dict[str, float], AuditScores]:
        """Return by task and score of the audit by task, means over the episodes of each seed that have both."""
        if self._model is not None:
            scores = self._model.scores(episodes)
            failures = [
                f"seed {e.seed}: no finite score" for e, s in zip(episodes, scores, strict=True) if not math.isfinite(s)
            ]
        else:
            with ThreadPoolExecutor(_AT_ONCE) as pool:
                played = [*pool.map(self._played_again, episodes)]
            scores = [score for score, _ in played]
            failures = [failure for _, failure in played if failure]
        if failures:
            failed = f"{len(failures)} of {len(scores)} episodes: {failures[0]}"
            if len(failures) == len(scores) and self._first is None:
                raise RunError(f"audit.{self._scorer} did not score {failed}; correct it, then resume")
            self._notes.append(f"audit.{self._scorer} did not score {failed}")
        by_seed: dict[str, list[tuple[float, float]]] = {}
        for episode, score in zip(episodes, scores, strict=True):
            if math.isfinite(score):
                by_seed.setdefault(str(episode.seed), []).append((episode.total_reward, score))
        returns, audits = (
            {seed: math.fsum(pair[side] for pair in pairs) / len(pairs) for seed, pairs in by_seed.items()}
            for side in (0, 1)
        )
        return returns, AuditScores(audits)

    def _played_again(self, episode: Episode) -> tuple[float, str]:
        """The return of the episode's answers in the audit's environment, or NaN and why there is none."""
        assert self._factory is not None
        factory = self._factory

        def play() -> float:
            environment, total = factory(), 0.0
            if environment.reset(episode.seed).tools:
                raise InputError("it has tools, and an audit replays texts; audit with a reward model (audit.path)")
            for turn in episode.turns:
                step = environment.step(turn.answer)
                total += step.reward
                if not step.scored:
                    raise InputError("no score applies to its answer")
                if step.terminated or step.truncated:
                    break
            return total

        score, error = ended_in(play, self.recipe.rollout.environment_timeout)
        if error is None and not math.isfinite(score):
            error = InputError(f"its score is {score}")
        return (math.nan, f"seed {episode.seed}: {error}") if error is not None else (score, "")


def _lost(episodes: Sequence[Episode], scored: int) -> bool:
    """Whether too few of the tasks of `episodes` are `scored` for a verdict."""
    return scored < (1 - LOST) * len({episode.seed for episode in episodes})


class AnswerAuditor(Auditor):
    """Audits a stage that trains on pairs: before each test, the policy answers the prompts of held-out rows greedily. The
    reward of such an episode is the margin of its row, which the stage trains. Margins begin at 0 and always rise, so only a
    fall of the audit counts against them.
    """

    share = 0.0
    counted_by = "data.held_out"

    def __init__(
        self,
        recipe: DpoRecipe,
        policy: Policy,
        run: RunDirectory,
        steps: int,
        rows: Sequence[TokenRow],
        margins: Callable[[], np.ndarray],
    ) -> None:
        """`margins`: those [n] of all `rows` at the last evaluation."""
        super().__init__(recipe, policy, run, steps)
        assert self._model is not None
        if not self._model.same_tokens:
            raise InputError(
                f"audit.path: {self.recipe.audit.path} has another tokenizer or chat template; train it from a model like model.path"
            )
        self.policy, self.margins = policy, margins
        rows = rows[:_ROWS]
        self.prompts = [row.streams[0].ids[: int(np.argmax(row.streams[0].trained))] for row in rows]
        pairs = zip(rows, self.prompts, strict=True)
        self.most = max((len(side.ids) - len(ids) for row, ids in pairs for side in row.streams), default=1)
        """Tokens of an answer: those of the longest of the rows. A policy that does not end would take most of the run's time."""
        self.engine = LocalEngine(policy)

    def __call__(self, step: int) -> tuple[dict[str, Any], list[str], bool]:
        greedy = SamplingRecipe(temperature=0.0)
        room = self.recipe.data.max_tokens  # of a prompt with its answer
        requests = [Request(tuple(ids.tolist()), greedy, 0, min(self.most, room - len(ids))) for ids in self.prompts]

        async def answers() -> list[Completion]:
            return await asyncio.gather(*(self.engine.generate(request) for request in requests))

        self.engine.load_weights(self.policy.version)
        episodes = []
        for row, (request, margin, done) in enumerate(
            zip(requests, self.margins(), asyncio.run(answers()), strict=False)
        ):
            start, ids = len(request.prompt_ids), np.array(request.prompt_ids + done.ids, dtype=np.int64)
            stream = stream_of(ids, np.arange(len(ids)) >= start)
            text = [self.policy.tokenizer.decode(part) for part in (ids[:start], ids[start:])]
            messages = [{"role": role, "content": one} for role, one in zip(("user", "assistant"), text, strict=True)]
            turn = Turn(0, start, len(ids), float(margin), done.stop_reason, text[1])
            episodes.append(
                Episode(row, row, 0, self.policy.version, [stream], [turn], Outcome.TERMINATED, messages=messages)
            )
        self.engine.sleep()
        write_episodes(self.run.episodes, step, "evaluation", episodes)
        return super().__call__(step)
