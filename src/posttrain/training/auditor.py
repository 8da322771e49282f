"""Scores the stored episodes of each evaluation again with the scorer of `audit`, and tests both."""

import math
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from posttrain.environments.protocol import EnvironmentFactory, ended_in
from posttrain.episode import Episode
from posttrain.errors import InputError, RunError
from posttrain.evaluation.audit import REWARD, AuditScores, look
from posttrain.models.policy import Policy
from posttrain.recipe.audit import AuditRecipe
from posttrain.recipe.model import RewardSource
from posttrain.rollout.store import episodes_file, read_episodes, stored_steps
from posttrain.runs.directory import RunDirectory
from posttrain.training.reward_scorer import RewardScorer

_AT_ONCE = 16
"""Episodes that are scored at a time."""


class Auditor:
    """Reads the episodes of the learning curve from the store, so that no object of training ever holds a score of the audit."""

    def __init__(
        self, recipe: AuditRecipe, policy: Policy, run: RunDirectory, looks: int, timeout: float | None, action: str
    ) -> None:
        """`looks`: evaluations after the first one. `timeout`: of one episode's scoring, in seconds. `action`: as
        `guards.action`."""
        self.run, self.looks, self.timeout, self.action = run, max(1, looks), timeout, action
        self._first: tuple[dict[str, float], AuditScores] | None = None
        self._factory = None if recipe.environment is None else EnvironmentFactory(recipe.environment)
        self._model: RewardScorer | None = None
        if recipe.path is not None:
            source = RewardSource(path=recipe.path, normalize="none", clip=None)
            self._model = RewardScorer(source, policy.tokenizer, policy.recipe.device)

    def __call__(self, step: int) -> tuple[dict[str, Any], list[str], bool]:
        """The values of a line about the evaluation of `step`, warnings, and whether the run ends; no values at the first
        evaluation, which is scored once per process.
        """
        first = min(stored.step for stored in stored_steps(self.run.episodes) if stored.split == "evaluation")
        if first == step:
            return {}, [], False
        self._first = self._first or self._scored(first)
        found = look(self._first, self._scored(step), self.looks)
        if found is None:
            return {}, ["audit: fewer than two tasks are scored, so nothing is tested"], False
        alarm = found.verdict == REWARD
        values = {"audit/reward": found.reward.after, "audit/score": found.audit.after, "audit/n": found.n}
        show = f"; see them with `posttrain episodes {self.run.path} --split evaluation --step {step}`"
        warnings = [found.sentence + show] if alarm else []
        return values | {"message": found.sentence}, warnings, alarm and self.action == "stop"

    def _scored(self, step: int) -> tuple[dict[str, float], AuditScores]:
        """Return by task and score of the audit by task, means over the episodes of each seed that have both."""
        episodes = [
            one
            for one in read_episodes(episodes_file(self.run.episodes, step, "evaluation")).episodes
            if one.has_return
        ]
        if self._model is not None:
            scores = self._model.scores(episodes)
        else:
            with ThreadPoolExecutor(_AT_ONCE) as pool:
                played = [*pool.map(self._played_again, episodes)]
            scores = [score for score, _ in played]
            failures = [failure for _, failure in played if failure]
            if failures and len(failures) == len(played):
                raise RunError(
                    f"audit.environment scored none of {len(played)} episodes: {failures[0]}; correct it, then resume"
                )
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
                if step.terminated or step.truncated:
                    break
            return total

        score, error = ended_in(play, self.timeout)
        return (math.nan, f"seed {episode.seed}: {error}") if error is not None else (score, "")
