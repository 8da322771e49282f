"""Numbers of a step that come from its episodes and from the engine's counters."""

from collections import defaultdict

import numpy as np

from posttrain.evaluation.summary import knows_success, reported
from posttrain.recipe.stages import RlRecipe
from posttrain.rollout.streams import Outcome
from posttrain.training.collect import Collected
from posttrain.training.trainer import Trainer


def rollout_metrics(collected: Collected, recipe: RlRecipe) -> dict[str, float]:
    """Success, return, lengths and spread over all sampled episodes, those that a filter removed included."""
    episodes = collected.sampled
    played = [e for e in episodes if e.outcome is not Outcome.FAILED]
    turns = [turn for e in episodes for turn in e.turns]
    by_group: dict[int, list[float]] = defaultdict(list)
    for episode in played:
        by_group[episode.group].append(episode.total_reward)
    spreads = [float(np.std(returns)) for returns in by_group.values() if len(returns) > 1]
    repeats = [_repeats(stream.ids, stream.sampled) for e in played for stream in e.streams]
    pairs = sum(count for _, count in repeats)
    metrics = {
        "rollout/episodes": float(len(episodes)),
        "rollout/kept": float(len(collected.episodes)),
        "rollout/failed": float(len(episodes) - len(played)),
        "rollout/turns": _mean([len(e.turns) for e in played]),
        "rollout/tokens_per_answer": _mean([turn.stop - turn.start for turn in turns]),
        "rollout/rejected_share": _mean([bool(turn.info.get("rejected")) for turn in turns]),
        "policy/repeated_share": sum(repeated for repeated, _ in repeats) / max(pairs, 1),
    }
    if knows_success(episodes):
        metrics["rollout/success"] = _mean([e.success for e in episodes])
    by_name: dict[str, list[float]] = defaultdict(list)
    for episode in played:
        for name, value in reported(episode).items():
            by_name[name].append(value)
    metrics |= {f"rollout/score/{name}": _mean(found) for name, found in by_name.items()}
    if played:
        metrics["rollout/return"] = _mean([e.total_reward for e in played])
    if spreads:
        metrics["reward/group_spread"] = _mean(spreads)
    return metrics | collected.metrics


class StepCounters:
    """What the engine does for a step and the learner from here on, in tokens, and how fast."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self._trained = trainer.learner.trained_tokens

    def metrics(self, collected: Collected) -> dict[str, float]:
        """Counts of the step that learns from `collected`; the speed is sampled tokens per second of sampling."""
        engine, seconds = collected.counters, collected.seconds
        return {
            "tokens/sampled": float(engine.sampled),
            "tokens/prefilled": float(engine.prefilled),
            "tokens/reused": float(engine.reused),
            "tokens/trained": float(self.trainer.learner.trained_tokens - self._trained),
            "speed/tokens_per_second": engine.sampled / seconds if seconds else 0.0,
            "optimizer/learning_rate": self.trainer.optimizer.learning_rate,
        }


def _repeats(ids: np.ndarray, sampled: np.ndarray) -> tuple[int, int]:
    """Sampled tokens equal to the token before them, and how many were compared."""
    return int((sampled[1:] & (ids[1:] == ids[:-1])).sum()), int(sampled[1:].sum())


def _mean(values: list) -> float:
    return float(np.mean(values)) if values else float("nan")
