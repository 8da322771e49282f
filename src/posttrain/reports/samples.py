"""Which stored episodes a report shows: of the last evaluation, and of the last training step with credit."""

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from posttrain.credit.units.credited import CreditedUnits
from posttrain.errors import PosttrainError
from posttrain.rollout.store import StoredEpisodes, StoredStep, read_episodes, stored_steps
from posttrain.rollout.streams import Episode, Outcome
from posttrain.runs.directory import RunDirectory

_NAMES = {1: ("the only one",), 2: ("best", "worst"), 3: ("best", "median", "worst")}


@dataclass(frozen=True)
class Sample:
    """One episode, why it is shown, and its credit where that is known."""

    why: str
    episode: Episode
    advantages: list[np.ndarray] | None
    """Per stream [T] float32."""
    units: CreditedUnits | None


@dataclass(frozen=True)
class Samples:
    """Episodes of one file of the store."""

    title: str
    samples: list[Sample]


def samples_of(run: RunDirectory) -> tuple[list[Samples], list[str]]:
    """What is shown of the run, and what could not be read."""
    try:
        steps = list(stored_steps(run.episodes))
    except PosttrainError as error:
        return [], [str(error)]
    held_out = [one for one in steps if one.split == "evaluation"] or [one for one in steps if one.split == "final"]
    shown = [(held_out[-1], 3)] if held_out else []
    trained = [one for one in steps if one.split == "train"]
    shown += [(trained[-1], 2)] if trained else []
    found, notes = [], []
    for step, count in shown:
        try:
            found.append(_of_step(step, read_episodes(step.path), count))
        except PosttrainError as error:
            notes.append(str(error))
    return [one for one in found if one.samples], notes


def by_return(episodes: Sequence[Episode], count: int) -> list[tuple[str, int]]:
    """(why, place) of the best, the median with `count` 3, and the worst by return, among those that did not fail.

    Fewer where there are fewer; all failed episodes alike where there are no others.
    """
    places = [i for i, one in enumerate(episodes) if one.outcome is not Outcome.FAILED] or list(range(len(episodes)))
    order = sorted(places, key=lambda i: -episodes[i].total_reward)
    if not order:
        return []
    chosen = [order[0], order[len(order) // 2], order[-1]] if count == 3 else [order[0], order[-1]]
    chosen = list(dict.fromkeys(chosen))
    return list(zip(_NAMES[len(chosen)], chosen, strict=True))


def _of_step(step: StoredStep, stored: StoredEpisodes, count: int) -> Samples:
    advantages = stored.advantages
    samples = [
        Sample(why, stored.episodes[i], None if advantages is None else advantages.values[i], stored.units[i])
        for why, i in by_return(stored.episodes, count)
    ]
    what = {"train": "training episodes", "evaluation": "held-out episodes", "final": "final held-out episodes"}
    mean = "" if step.mean_return is None else f", mean return {step.mean_return:.3f}"
    failed = f", {step.failed} failed" if step.failed else ""
    return Samples(f"Step {step.step}: {step.episodes} {what[step.split]}{mean}{failed}", samples)
