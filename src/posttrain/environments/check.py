"""Checks of every environment that do not rely on its own code: `posttrain env validate` runs them before
`validate`."""

import inspect
import math
import traceback
from collections.abc import Sequence
from pathlib import Path
from statistics import fmean

from posttrain.environments.game import require
from posttrain.environments.players import Played, Player, play_episode
from posttrain.environments.protocol import Environment, ProtocolError, Step, return_range
from posttrain.recipe.components import EnvironmentRecipe, environment_class
from posttrain.runs.intervals import within

_ANSWERS = ("?", "", "1", "yes")
"""Answers for environments with neither an expert nor random answers."""
_MANY = 20
"""Minimum number of seeds for which an expert that is not better than random answers is an error."""
_LONGEST = 1000
"""Number of steps after which an episode counts as endless, if the recipe has no `max_turns`."""

_SEEDED = "draw only from random.Random(seed)"
_PLAYERS: dict[str, Player] = {
    "expert": lambda environment, conversation: environment.expert(),
    "random": lambda environment, conversation: environment.random_answer(float(conversation.draws.random())),
    "fixed answers": lambda environment, conversation: environment.primer + _ANSWERS[conversation.turn % len(_ANSWERS)],
}


def check_environment(recipe: EnvironmentRecipe, seeds: Sequence[int]) -> list[str]:
    """Play the seeds and check the rules of the protocol. Returns the checks that could not be made.

    Two instances play the same episode for a seed. The episode ends, its rewards are finite numbers, its last `info`
    has `success`, and a step after the end raises RuntimeError. The expert, if there is one, is better than random
    answers.

    Raises:
        AssertionError: a check failed. The message names the seed.
    """
    kind = environment_class(recipe.type)
    if getattr(recipe, "judge", None) is not None:
        return ["not played: a judge scores the episodes"]
    if not kind.has_reward(recipe):
        return ["not played: a reward model scores the episodes"]
    results: dict[str, list[float]] = {}
    for seed in seeds:
        names = ("expert", "random")
        played = {name: _checked_episode(kind, recipe, seed, name) for name in names}
        if not any(played.values()):
            played = {"fixed answers": _checked_episode(kind, recipe, seed, "fixed answers")}
        for name, steps in played.items():
            if steps:
                last = steps[-1].info.get("success")
                results.setdefault(name, []).append(sum(step.reward for step in steps) if last is None else float(last))
    if not {"expert", "random"} <= results.keys():
        methods = {"expert": "no `expert`", "random": "no `random_answer`"}
        missing = ", ".join(method for name, method in methods.items() if name not in results)
        return [f"not compared: expert and random answers ({missing})"]
    best, usual = fmean(results["expert"]), fmean(results["random"])
    if best < usual or (best == usual < 1 and len(seeds) >= _MANY):
        rates = f"its expert reaches {best:g} on {len(seeds)} seeds, and random answers reach {usual:g}"
        raise AssertionError(f"{rates}; the expert must be better")
    return []


def needs_success(recipe: EnvironmentRecipe) -> bool:
    """Whether the last step must report `success`."""
    return getattr(recipe, "success_reward", 1.0) is not None


def step_limit(recipe: EnvironmentRecipe, longest: int = _LONGEST) -> int:
    """Number of steps after which an episode counts as endless: `max_turns`, or `longest` if the recipe has none."""
    return getattr(recipe, "max_turns", None) or longest


def _checked_episode(kind: type[Environment], recipe: EnvironmentRecipe, seed: int, name: str) -> list[Step]:
    """The steps of an episode that keeps the rules; empty if the environment does not offer the player `name`."""
    played = _episode(kind, recipe, seed, name)
    if played is None:
        return []
    for number, step in enumerate(played.steps, start=1):
        require(math.isfinite(step.reward), seed, f"the reward of step {number} is {step.reward}, which is not finite")
    again = _episode(kind, recipe, seed, name)
    assert again is not None
    require(played.first == again.first, seed, f"two resets with this seed differ; {_SEEDED}")
    require(
        played.seen == again.seen, seed, f"the same answers ({name}) led to something else the second time; {_SEEDED}"
    )
    # Code that seeds the global state reaches the same state twice. Other draws from it depend on what ran before.
    seeded = not played.moved_global_random or played.random_after == again.random_after
    require(seeded, seed, f"the episode draws from the global random state of Python or numpy; {_SEEDED}")
    total, bounds = sum(step.reward for step in played.steps), return_range(recipe)
    in_range = bounds is None or within(total, bounds)
    require(in_range, seed, f"the return {total:g} ({name}) is not in the range {bounds} of `return_range`")
    wrong = played.wrong_success(needs_success(recipe) and played.steps[-1].scored)
    require(wrong is None, seed, str(wrong))
    return played.steps


def _episode(kind: type[Environment], recipe: EnvironmentRecipe, seed: int, name: str) -> Played | None:
    """A complete episode, after which another step raised RuntimeError; None if the environment lacks this player."""
    limit = step_limit(recipe)
    played = play_episode(kind, recipe, seed, _PLAYERS[name], limit)
    if isinstance(error := played.error, NotImplementedError) and played.where == "answer 1":
        return None
    if isinstance(error, AssertionError):
        raise error
    where = f"{played.where} ({name})" if played.first else played.where
    if error is not None:
        fault = str(error) if isinstance(error, ProtocolError) else f"{type(error).__name__}: {error}"
        file = inspect.getfile(kind)
        lines = [frame.lineno for frame in traceback.extract_tb(error.__traceback__) if frame.filename == file]
        line = f" in line {lines[-1]} of {Path(file).name}" if lines else ""
        raise AssertionError(f"seed {seed}: {where}{line}: {fault}") from error
    if problem := played.broken_end(limit):
        raise AssertionError(f"seed {seed}: {problem}") from played.after_the_end
    return played
