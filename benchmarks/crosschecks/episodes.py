"""Random multi-turn episodes: several turns, tokens of a tool between them, several streams, groups of different sizes."""

import numpy as np

from posttrain.episode import Advantages, Episode, Outcome, StopReason, Stream, Turn

REWARDS = (-1.0, 0.0, 0.0, 0.5, 1.0)
PARTS = ("correct", "format")
"""Names of the parts of a reward, in the information of a turn."""


def random_episodes(
    rng: np.random.Generator, vocabulary: int, groups: int | None = None, same_turns: bool = False, binary: bool = False
) -> list[Episode]:
    """1 to 4 groups of 1 to 4 episodes of 1 to 3 turns.

    A turn goes into the stream of the turn before, after tokens of a tool, or starts a new stream. In a quarter of the
    groups all rewards are equal. A quarter of the last answers are cut off. `binary`: an episode earns 0 or 1, with its last turn.
    """
    episodes = []
    for group in range(groups or int(rng.integers(1, 5))):
        prompt = rng.integers(3, vocabulary, rng.integers(1, 6))
        equal = rng.random() < 0.25
        turns = int(rng.integers(1, 4))
        for index in range(int(rng.integers(1, 5))):
            count = turns if same_turns else int(rng.integers(1, 4))
            rewards = [0.0 if binary else float(rng.choice(REWARDS)) for _ in range(count)]
            if binary:
                rewards[-1] = float(rng.integers(0, 2))
            if equal:
                rewards = [0.0] * (count - 1) + [1.0]
            episodes.append(_episode(rng, vocabulary, group, index, prompt, rewards))
    return episodes


def _episode(
    rng: np.random.Generator, vocabulary: int, group: int, index: int, prompt: np.ndarray, rewards: list[float]
) -> Episode:
    streams: list[list[tuple[int, bool, float, int]]] = []
    turns = []
    for number, reward in enumerate(rewards):
        if not streams or rng.random() < 0.3:
            streams.append([(int(token), False, 0.0, -1) for token in prompt])
        else:
            tool = rng.integers(3, vocabulary, rng.integers(1, 5))
            streams[-1] += [(int(token), False, 0.0, -1) for token in tool]
        answer = rng.integers(3, vocabulary, rng.integers(1, 7))
        start, last = len(streams[-1]), number == len(rewards) - 1
        streams[-1] += [(int(token), True, 0.0, number) for token in answer[:-1]]
        streams[-1].append((int(answer[-1]), True, reward, number))
        share = float(rng.choice((0.0, 0.5, 1.0)))
        turns.append(
            Turn(
                stream=len(streams) - 1,
                start=start,
                stop=len(streams[-1]),
                reward=reward,
                stop_reason=StopReason.TURN_BUDGET if last and rng.random() < 0.25 else StopReason.END_TOKEN,
                answer="",
                info={"scores": dict(zip(PARTS, (reward - share, share), strict=True))},
                state=str(rng.integers(0, 2)),
            )
        )
    return Episode(
        seed=group,
        group=group,
        index=index,
        version=0,
        streams=[_stream(tokens) for tokens in streams],
        turns=turns,
        outcome=Outcome.TERMINATED,
    )


def _stream(tokens: list[tuple[int, bool, float, int]]) -> Stream:
    ids, sampled, rewards, turn = zip(*tokens, strict=True)
    return Stream(
        ids=np.array(ids, dtype=np.int64),
        sampled=np.array(sampled, dtype=bool),
        rollout_logprobs=np.zeros(len(ids), dtype=np.float32),
        rewards=np.array(rewards, dtype=np.float32),
        turn=np.array(turn, dtype=np.int32),
        versions=np.where(sampled, 0, -1).astype(np.int32),
    )


def random_advantages(rng: np.random.Generator, episodes: list[Episode], per_stream: bool = False) -> Advantages:
    """A normal number per sampled token (or per stream), 0 in a quarter of the episodes."""

    def of_stream(stream: Stream, weight: float) -> np.ndarray:
        numbers = rng.normal() if per_stream else rng.normal(size=len(stream))
        return np.where(stream.sampled, weight * numbers, 0.0).astype(np.float32)

    weights = [float(rng.random() > 0.25) for _ in episodes]
    weights[0] = 1.0
    return Advantages([[of_stream(s, weight) for s in e.streams] for e, weight in zip(episodes, weights, strict=True)])


def random_values(rng: np.random.Generator, episodes: list[Episode]) -> list[list[np.ndarray]]:
    """A critic's value at each sampled token, `[episode][stream]` [T] float32."""
    return [
        [np.where(s.sampled, rng.normal(size=len(s)), 0.0).astype(np.float32) for s in episode.streams]
        for episode in episodes
    ]
