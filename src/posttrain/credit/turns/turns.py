"""The turns of an episode as its tokens tell them: which turn sampled a token, what it paid, what it was shown.

Arrays run over the sampled tokens of an episode alone, in order, across its streams. Where turns end is known from
`Stream.turn`, so a turn that paid nothing is a turn like any other.
"""

from collections.abc import Hashable, Sequence

import numpy as np

from posttrain.errors import RunError
from posttrain.rollout.streams import Episode


def turn_numbers(episode: Episode) -> np.ndarray:
    """[n] int64: for each sampled token the index of its turn, never falling. RunError where it would fall."""
    empty = np.zeros(0, dtype=np.int64)
    numbers = np.concatenate([empty, *(stream.turn[stream.sampled] for stream in episode.streams)]).astype(np.int64)
    if len(numbers) and (numbers[0] < 0 or (np.diff(numbers) < 0).any()):
        raise RunError(
            f"group {episode.group} episode {episode.index} (environment seed {episode.seed}) has turns out of order; "
            "give its sampled tokens the index of their turn, in the order in which they were played"
        )
    return numbers


def starts(turns: np.ndarray) -> np.ndarray:
    """[K] int64: where each turn's first token is in `turns` [n]; K is the number of turns that sampled a token."""
    return np.flatnonzero(np.diff(turns, prepend=-1))


def turn_rewards(rewards: np.ndarray, turns: np.ndarray) -> np.ndarray:
    """[K] float64: what each turn paid: the sum of the rewards [n] of its tokens, a KL penalty in them included."""
    return np.add.reduceat(rewards, starts(turns)) if len(turns) else np.zeros(0)


def spread_over_tokens(of_turns: np.ndarray, turns: np.ndarray) -> np.ndarray:
    """[n] float64: each token gets the number of its turn; `of_turns` [K], `turns` [n]."""
    return np.repeat(of_turns, np.diff(starts(turns), append=len(turns)))


def state_keys(episode: Episode) -> list[Hashable]:
    """One key per turn that sampled a token: what the state was in which it was played. Equal keys are one state.

    The key is `Turn.state` where the environment named it. Otherwise it is the ids of the tokens that the policy was
    shown since it last sampled in that stream: the observation, or the whole prompt at the start of a stream. No text
    is compared. A stream that begins with a rewritten history therefore repeats a state only with the same history.
    """
    keys: list[Hashable] = []
    for stream in episode.streams:
        begun = 0
        own = np.flatnonzero(stream.sampled)
        places = starts(stream.turn[stream.sampled])
        for first, stop in zip(places.tolist(), np.append(places, len(own))[1:].tolist(), strict=True):
            number = int(stream.turn[own[first]])
            named = episode.turns[number].state if number < len(episode.turns) else None
            shown = stream.ids[begun : own[first]].astype("<i8").tobytes()
            keys.append(("tokens", shown) if named is None else ("named", named))
            begun = int(own[stop - 1]) + 1
    return keys


def split_by(counts: Sequence[int], values: np.ndarray) -> list[np.ndarray]:
    """`values` [sum of counts] as one array per count."""
    return np.split(values, np.cumsum(counts)[:-1]) if len(counts) else []
