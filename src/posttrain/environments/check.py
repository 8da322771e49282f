"""Checks of every environment that do not rely on its own code: `posttrain env validate` runs them before
`validate`.
"""

import math
from collections.abc import Mapping, Sequence
from statistics import fmean

from posttrain.environments.players import Conversation, Played, Player, oracle, play_episode
from posttrain.environments.protocol import Environment, Step
from posttrain.recipe.components import EnvironmentRecipe, environment_class

_ANSWERS = ("?", "", "1", "yes")
"""Answers for environments with neither an expert nor random answers."""
_MANY = 20
"""Minimum number of seeds for which an expert that is not better than random answers is an error."""
_LONGEST = 1000
"""Number of steps after which an episode counts as endless, if the recipe has no `max_turns`."""


def check_environment(recipe: EnvironmentRecipe, seeds: Sequence[int]) -> list[str]:
    """Play the seeds and check the rules of the protocol. Returns the checks that could not be made.

    Two instances play the same episode for a seed. The episode ends, its rewards are finite numbers, its last `info`
    has `success`, and a step after the end raises RuntimeError. The expert, if there is one, is better than random
    answers.

    Raises:
        AssertionError: a check failed. The message names the seed.
    """
    kind = environment_class(recipe.type)
    if unplayed := not_played(recipe):
        return [unplayed]
    results: dict[str, list[float]] = {}
    for seed in seeds:
        for name, player in _players(kind(recipe), seed).items():
            steps = _checked_episode(kind, recipe, seed, player, name, needs_success(recipe))
            last = steps[-1].info.get("success")
            results.setdefault(name, []).append(sum(step.reward for step in steps) if last is None else float(last))
    if not {"expert", "random"} <= results.keys():
        methods = {"expert": "`expert`", "random": "`random_answer`"}
        missing = " and no ".join(method for name, method in methods.items() if name not in results)
        return [f"not compared: expert and random answers, because it has no {missing}"]
    best, usual = fmean(results["expert"]), fmean(results["random"])
    if best < usual or (best == usual < 1 and len(seeds) >= _MANY):
        raise AssertionError(f"its expert reaches {best:g} on {len(seeds)} seeds, and random answers reach {usual:g}")
    return []


def not_played(recipe: EnvironmentRecipe) -> str | None:
    """Why episodes of this recipe cannot be played without a model; None if they can."""
    if getattr(recipe, "judge", None) is not None:
        return "not played, because a judge scores the episodes"
    if not environment_class(recipe.type).has_reward(recipe):
        return "not played, because a reward model scores the episodes"
    return None


def needs_success(recipe: EnvironmentRecipe) -> bool:
    """Whether the last step must report `success`."""
    return getattr(recipe, "success_reward", 1.0) is not None


def step_limit(recipe: EnvironmentRecipe, longest: int = _LONGEST) -> int:
    """Number of steps after which an episode counts as endless: `max_turns`, or `longest` if the recipe has none."""
    return getattr(recipe, "max_turns", None) or longest


def _random(environment: Environment, conversation: Conversation) -> str:
    return environment.random_answer(float(conversation.draws.random()))


def _fixed(environment: Environment, conversation: Conversation) -> str:
    return environment.primer + _ANSWERS[conversation.turn % len(_ANSWERS)]


def _players(environment: Environment, seed: int) -> Mapping[str, Player]:
    """The policies that the environment offers; fixed answers if it offers none."""
    environment.reset(seed)
    offers = {"expert": environment.expert, "random": lambda: environment.random_answer(0.0)}
    players: dict[str, Player] = {}
    for (name, offer), player in zip(offers.items(), (oracle, _random), strict=True):
        try:
            offer()
        except NotImplementedError:
            continue
        players[name] = player
    return players or {"fixed answers": _fixed}


def _checked_episode(
    kind: type[Environment], recipe: EnvironmentRecipe, seed: int, player: Player, name: str, needs_success: bool
) -> list[Step]:
    played = _episode(kind(recipe), seed, player, name)
    for number, step in enumerate(played.steps, start=1):
        is_number = isinstance(step.reward, int | float) and math.isfinite(step.reward)
        _require(is_number, seed, f"the reward of step {number} is {step.reward!r}, not a finite number")
    again = _episode(kind(recipe), seed, player, name)
    _require(played.first == again.first, seed, "two resets differ")
    same = [_seen(step) for step in played.steps] == [_seen(step) for step in again.steps]
    _require(same, seed, f"the same answers ({name}) led to something else the second time")
    success = played.steps[-1].info.get("success")
    wanted = success in (True, False) if needs_success else success in (True, False, None)
    _require(wanted, seed, f"the last step has no `success` of true or false in `info`, but {success!r}")
    return played.steps


def _episode(environment: Environment, seed: int, player: Player, name: str) -> Played:
    """A complete episode, after which another step must raise RuntimeError."""
    limit = step_limit(environment.recipe)
    played = play_episode(environment, seed, player, limit)
    if isinstance(error := played.error, AssertionError):
        raise error
    if error is not None:
        message = f"seed {seed}: {played.where} ({name}) raised {type(error).__name__}: {error}"
        raise AssertionError(message) from error
    _require(played.ended, seed, f"the episode has not ended after {limit} steps")
    after = played.after_the_end
    if after is None:
        raise AssertionError(f"seed {seed}: a step was possible after the end; raise RuntimeError there")
    if not isinstance(after, RuntimeError):
        raised = f"a step after the end raised {type(after).__name__}, not RuntimeError"
        raise AssertionError(f"seed {seed}: {raised}") from after
    return played


def _seen(step: Step) -> tuple[object, ...]:
    return step.messages, step.reward, step.terminated, step.truncated, step.info.get("success"), step.state


def _require(condition: bool, seed: int, fault: str) -> None:
    if not condition:
        raise AssertionError(f"seed {seed}: {fault}")
