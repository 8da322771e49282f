"""The process that plays for `posttrain env audit`: one task per line of standard input, one report per line of
standard output."""

import faulthandler
import hashlib
import importlib
import json
import os
import re
import sys
import sysconfig
from collections.abc import Callable
from dataclasses import asdict
from typing import Any

from posttrain.environments.audit import SHORTEST_LEAK, Episodes
from posttrain.environments.check import step_limit
from posttrain.environments.players import PLAYERS, Played, joined, play_episode
from posttrain.environments.protocol import Environment, ProtocolError
from posttrain.recipe.components import EnvironmentRecipe, environment_class

LONGEST = 200
"""Number of steps after which an episode counts as endless, if the recipe has no `max_turns`."""


def main() -> None:
    """Process tasks until the input ends."""
    # Environments print, and their output must not mix with the reports.
    reports = os.fdopen(os.dup(1), "w", encoding="utf-8")
    os.dup2(2, 1)
    # The audit sends SIGABRT when its time is over, and quotes the stack.
    faulthandler.enable(all_threads=False)

    def write(report: Any) -> None:
        reports.write(json.dumps(report) + "\n")
        reports.flush()

    for line in sys.stdin:
        try:
            write([asdict(one) for one in play_all(json.loads(line), write)])
        except Exception as error:
            write(f"{type(error).__name__}: {' '.join(str(error).split())}")


def play_all(task: dict[str, Any], write: Callable[[dict[str, Any]], None]) -> list[Episodes]:
    """The episodes of one task, see `audit.audit`. `write` gets the player and the seed before each starts."""
    kind = environment_class(task["type"])
    recipe = kind.Recipe.model_validate_json(task["recipe"])
    start, count = task["seeds"]
    episodes, prompts, answers = [], dict[int, str](), dict[int, str]()
    for seed in range(start, start + count):
        for player in task["players"]:
            write({"player": player, "seed": seed})
            one, played = _play_twice(kind, recipe, seed, player, task["needs_success"])
            if one is None:
                continue
            episodes.append(one)
            if player == "oracle" and played.first is not None and played.answers:
                prompts[seed] = joined(played.first.messages)
                answers[seed] = played.answers[0]
    for one in episodes:
        if one.player == "oracle" and len(answers.get(one.seed, "").strip()) >= SHORTEST_LEAK:
            others = [answer for answer in answers.values() if answer != answers[one.seed]]
            # An answer that is the same for all seeds is probably one of a few named actions.
            if others:
                one.leaks = _contains(prompts[one.seed], answers[one.seed])
                one.chance = sum(_contains(prompts[one.seed], other) for other in others) / len(others)
    return episodes


def _play_twice(
    kind: type[Environment], recipe: EnvironmentRecipe, seed: int, name: str, needs_success: bool
) -> tuple[Episodes | None, Played]:
    """The report of one player on one seed; None for an oracle that the environment does not have."""
    limit = step_limit(recipe, LONGEST)
    played = play_episode(kind, recipe, seed, PLAYERS[name], limit)
    if isinstance(played.error, NotImplementedError) and name == "oracle":
        return None, played
    again = play_episode(kind, recipe, seed, PLAYERS[name], limit)
    one = Episodes(
        name,
        seed,
        _digest(played),
        _digest(again),
        "" if played.first is None else _hash(played.first.messages),
        [float(step.reward) for step in played.steps],
        seconds=played.seconds,
        side_effects=played.moved_global_random,
    )
    if isinstance(played.error, ProtocolError):
        one.protocol = f"{played.where}: {played.error}"
    elif played.error is not None:
        # One line, without separator lines and without the path of installed packages.
        text = str(played.error).replace(f"{sysconfig.get_paths()['purelib']}{os.sep}", "")
        text = " ".join(re.sub(r"([^\w\s])\1{9,}", " ", text).split())
        one.error = f"{played.where} raised {type(played.error).__name__}: {text}"
    else:
        success = played.steps[-1].info.get("success") if played.steps else None
        one.success = None if success is None else bool(success)
        required = needs_success and all(step.scored for step in played.steps)
        one.protocol = played.broken_end(limit) or played.wrong_success(required)
    return one, played


def _digest(played: Played) -> str:
    first = None if played.first is None else [played.first.messages, played.first.state]
    return _hash([first, played.seen, str(played.error and type(played.error).__name__)])


def _hash(value: object) -> str:
    return hashlib.blake2b(json.dumps(value, default=str).encode(), digest_size=8).hexdigest()


def _contains(text: str, answer: str) -> bool:
    """Whether the answer occurs in the text between word boundaries, ignoring differences in white space."""
    words = r"\s+".join(re.escape(word) for word in answer.split())
    return bool(words) and re.search(rf"(?<!\w){words}(?!\w)", text) is not None


if __name__ == "__main__":
    # Import the module under its real name, so that its classes are the same objects everywhere.
    importlib.import_module("posttrain.environments.audit_child").main()
