"""Checks that every environment has to pass, without its help: `posttrain env validate` makes them before its `validate`."""

import math
from collections.abc import Callable, Iterator, Sequence
from statistics import fmean

from posttrain.environments.protocol import Environment, Observation, Step
from posttrain.recipe.components import EnvironmentRecipe, environment_class
from posttrain.seeds import random_stream

_ANSWERS = ("?", "", "1", "yes")
"""Answers where the environment has neither an expert nor random answers."""
_MANY = 20
"""Seeds from which an expert that is no better than random answers is an error."""
_LONGEST = 1000
"""Steps after which an episode is endless, where the recipe has no `max_turns`."""


def check_environment(recipe: EnvironmentRecipe, seeds: Sequence[int]) -> list[str]:
    """Play the seeds and check what the protocol asks for; returns what could not be checked.

    An episode of a seed is the same twice, on two instances. It ends, its rewards are finite numbers, its last `info` has
    `success`, and a step after the end raises RuntimeError. The expert, if there is one, does better than random answers.

    Raises:
        AssertionError: a check failed. The message names the seed.
    """
    kind = environment_class(recipe.type)
    if getattr(recipe, "judge", None) is not None:
        return ["its episodes are not played, because a judge scores them"]
    if not kind.has_reward(recipe):
        return ["its episodes are not played, because a reward model scores them"]
    needs_success = getattr(recipe, "success_reward", 1.0) is not None
    results: dict[str, list[float]] = {}
    for seed in seeds:
        players = _players(kind(recipe), seed)
        for name, player in players.items():
            steps = _checked_episode(kind, recipe, seed, player, name, needs_success)
            last = steps[-1].info.get("success")
            results.setdefault(name, []).append(sum(step.reward for step in steps) if last is None else float(last))
    if not {"expert", "random"} <= results.keys():
        missing = " and ".join(name for name in ("expert", "random answers") if name.split()[0] not in results)
        return [f"it has no {missing}, so none is compared with the other"]
    best, usual = fmean(results["expert"]), fmean(results["random"])
    if best < usual or (best == usual < 1 and len(seeds) >= _MANY):
        raise AssertionError(f"its expert reaches {best:g} on {len(seeds)} seeds, and random answers reach {usual:g}")
    return []


Player = Callable[[Environment], Iterator[str]]
"""Answers to an environment, one after the other."""


def _players(environment: Environment, seed: int) -> dict[str, Player]:
    """The policies that the environment offers; fixed answers if it offers none."""

    def experts(played: Environment) -> Iterator[str]:
        while True:
            yield played.expert()

    def randoms(played: Environment) -> Iterator[str]:
        draws = random_stream("check", seed)
        while True:
            yield played.random_answer(float(draws.random()))

    def fixed(played: Environment) -> Iterator[str]:
        while True:
            yield from (played.primer + answer for answer in _ANSWERS)

    environment.reset(seed)
    players: dict[str, Player] = {}
    for name, player in (("expert", experts), ("random", randoms)):
        try:
            next(player(environment))
        except NotImplementedError:
            continue
        players[name] = player
    return players or {"fixed answers": fixed}


def _checked_episode(
    kind: type[Environment], recipe: EnvironmentRecipe, seed: int, player: Player, name: str, needs_success: bool
) -> list[Step]:
    first, steps = _episode(kind(recipe), seed, player, name)
    for number, step in enumerate(steps, start=1):
        is_number = isinstance(step.reward, int | float) and math.isfinite(step.reward)
        _require(is_number, seed, f"the reward of step {number} is {step.reward!r}, not a finite number")
    again, repeated = _episode(kind(recipe), seed, player, name)
    _require(first == again, seed, "two resets differ")
    same = [_seen(step) for step in steps] == [_seen(step) for step in repeated]
    _require(same, seed, f"the same answers ({name}) led to something else the second time")
    success = steps[-1].info.get("success")
    wanted = success in (True, False) if needs_success else success in (True, False, None)
    _require(wanted, seed, f"the last step has no `success` of true or false in `info`, but {success!r}")
    return steps


def _episode(environment: Environment, seed: int, player: Player, name: str) -> tuple[Observation, list[Step]]:
    """The first observation and the steps of a whole episode, after which one step more must be refused."""
    limit, steps = getattr(environment.recipe, "max_turns", None) or _LONGEST, list[Step]()
    try:
        first = environment.reset(seed)
        for answer in player(environment):
            steps.append(environment.step(answer))
            if steps[-1].terminated or steps[-1].truncated:
                break
            _require(len(steps) < limit, seed, f"the episode has not ended after {limit} steps")
    except AssertionError:
        raise
    except Exception as error:
        where = f"step {len(steps) + 1}" if steps or "first" in locals() else "reset"
        raise AssertionError(f"seed {seed}: {where} ({name}) raised {type(error).__name__}: {error}") from error
    try:
        environment.step(_ANSWERS[0])
    except RuntimeError:
        return first, steps
    except Exception as error:
        raised = f"a step after the end raised {type(error).__name__}, not RuntimeError"
        raise AssertionError(f"seed {seed}: {raised}") from error
    raise AssertionError(f"seed {seed}: a step was possible after the end; raise RuntimeError there")


def _seen(step: Step) -> tuple[object, ...]:
    return step.messages, step.reward, step.terminated, step.truncated, step.info.get("success"), step.state


def _require(condition: bool, seed: int, fault: str) -> None:
    if not condition:
        raise AssertionError(f"seed {seed}: {fault}")
