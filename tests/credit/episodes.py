"""Episodes of credit's tests, drawn as text."""

import numpy as np
from pydantic import TypeAdapter

from posttrain.episode import Episode, Outcome, StopReason, Stream, Turn
from posttrain.recipe.credit import CreditRecipe

_RECIPE: TypeAdapter = TypeAdapter(CreditRecipe)


def recipe(kind, **keys):
    return _RECIPE.validate_python({"type": kind} | keys)


def episode(*streams, group=0, index=0, ids=None, states=()):
    """Each stream as marks or (marks, rewards), for example ("..ss.s", {3: 1.0}).

    Marks: "." for tokens that were not sampled, a digit for those of a turn, "s" for those of turn 0. `states`: the
    environment's names of the turns' states.
    """
    made = []
    for number, stream in enumerate(streams):
        marks, paid = (stream, {}) if isinstance(stream, str) else stream
        turn = np.array([-1 if c == "." else int(c.replace("s", "0")) for c in marks], dtype=np.int32)
        rewards = np.zeros(len(turn), dtype=np.float32)
        rewards[list(paid)] = list(paid.values())
        tokens = np.arange(len(turn)) if ids is None else np.array(ids[number], dtype=np.int64)
        zeros = np.zeros(len(turn), np.float32)
        made.append(Stream(tokens, turn >= 0, zeros, rewards, turn, np.minimum(turn, 0)))
    turns = [Turn(0, 0, 1, 0.0, StopReason.END_TOKEN, "", state=state) for state in states]
    return Episode(group, group, index, 0, made, turns, Outcome.TERMINATED)
