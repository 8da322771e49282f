"""A decision process small enough to enumerate: two turns, stochastic environment tokens, answers that may stop early.

The policy has two tokens, GO and STOP. A turn's answer ends at STOP or after two tokens. Between the turns the
environment puts one of two tokens, with odds that depend on the first answer, and a first answer of STOP alone ends
the episode one time in four. The policy is a softmax over one logit per state.
"""

import itertools
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from posttrain.episode import Episode, Outcome, Stream

GO, STOP, ENVIRONMENT = 0, 1, 2
ANSWERS = ((STOP,), (GO, STOP), (GO, GO))
STATES = 6
"""First or second token of turn 1; the same of turn 2 after either environment token."""
PARAMETERS = 0.6 * np.array([[0.3, -0.2], [-0.5, 0.4], [0.1, 0.7], [0.9, -0.3], [-0.4, -0.6], [0.2, 0.5]])
"""[STATES, 2] logits of the policy that is tested; none of its distributions is uniform."""


@dataclass(frozen=True)
class Trajectory:
    """One possible course of an episode."""

    choices: tuple[tuple[int, int], ...]
    """(state, token) of each sampled token."""
    environment: float
    """Probability of the environment's part."""
    ids: tuple[int, ...]
    sampled: tuple[bool, ...]
    rewards: tuple[float, ...]
    turn: tuple[int, ...]
    """Index of the turn that sampled each token, -1 for the environment's."""

    @property
    def total(self) -> float:
        return sum(self.rewards)

    def probability(self, log_policy: np.ndarray) -> float:
        return self.environment * float(np.exp(sum(log_policy[state, token] for state, token in self.choices)))


def log_softmax(parameters: np.ndarray) -> np.ndarray:
    return parameters - np.log(np.exp(parameters).sum(axis=1, keepdims=True))


def trajectories() -> list[Trajectory]:
    """All of them, each once."""
    found = []
    for first in ANSWERS:
        reward, odds, ends = {(STOP,): (0.5, 0.5, 0.25), (GO, STOP): (0.0, 0.8, 0.0), (GO, GO): (-0.25, 0.3, 0.0)}[
            first
        ]
        if ends:
            found.append(_trajectory(ends, (first, 0, reward)))
        for shown in (0, 1):
            chance = (1 - ends) * (odds if shown == 0 else 1 - odds)
            for second in ANSWERS:
                payment = (2.0 if shown == 0 else -1.0) * (len(second) == 2) + 3.0 * (shown == 1 and second == (STOP,))
                found.append(_trajectory(chance, (first, 0, reward), (second, 2 + 2 * shown, payment)))
    return found


def _trajectory(chance: float, *answers: tuple[tuple[int, ...], int, float]) -> Trajectory:
    """The course of answers, each with the state of its first token and its reward at the last. Before the second, the
    environment puts a token, which leads to its state."""
    made = Trajectory((), chance, (), (), (), ())
    for number, (answer, start, reward) in enumerate(answers):
        before = (ENVIRONMENT + start // 2 - 1,) * number
        made = Trajectory(
            made.choices + tuple((start + place, token) for place, token in enumerate(answer)),
            chance,
            made.ids + before + answer,
            made.sampled + (False,) * number + (True,) * len(answer),
            made.rewards + (0.0,) * (number + len(answer) - 1) + (reward,),
            made.turn + (-1,) * number + (number,) * len(answer),
        )
    return made


def score(trajectory: Trajectory, log_policy: np.ndarray) -> np.ndarray:
    """[STATES, 2]: gradient of the trajectory's log-probability with respect to the logits."""
    gradient = np.zeros_like(log_policy)
    for state, token in trajectory.choices:
        gradient[state] -= np.exp(log_policy[state])
        gradient[state, token] += 1.0
    return gradient


def exact_gradient(parameters: np.ndarray) -> np.ndarray:
    """[STATES, 2]: gradient of the expected return, by enumeration: sum of P(tau) R(tau) grad log P(tau)."""
    log_policy = log_softmax(parameters)
    terms = (t.probability(log_policy) * t.total * score(t, log_policy) for t in trajectories())
    return np.sum(list(terms), axis=0)


def episode(trajectory: Trajectory, log_policy: np.ndarray, index: int) -> Episode:
    """The trajectory as a rollout would return it."""
    sampled = np.array(trajectory.sampled)
    logprobs = np.zeros(len(sampled), dtype=np.float32)
    logprobs[sampled] = [log_policy[choice] for choice in trajectory.choices]
    stream = Stream(
        np.array(trajectory.ids),
        sampled,
        logprobs,
        np.array(trajectory.rewards, dtype=np.float32),
        np.array(trajectory.turn, dtype=np.int32),
        np.where(sampled, 0, -1).astype(np.int32),
    )
    return Episode(seed=0, group=0, index=index, version=0, streams=[stream], turns=[], outcome=Outcome.TERMINATED)


def binary(trajectory: Trajectory) -> Trajectory:
    """The same trajectory with a reward of 1 at its end if its return is above 1, and of 0 else."""
    rewards = (0.0,) * (len(trajectory.rewards) - 1) + (float(trajectory.total > 1),)
    return replace(trajectory, rewards=rewards)


def joint_samples(
    size: int, log_policy: np.ndarray, every: Sequence[Trajectory] | None = None
) -> list[tuple[tuple[Trajectory, ...], float]]:
    """Every unordered group of `size` independent trajectories with its probability; these add up to 1."""
    every = trajectories() if every is None else every
    found = []
    for chosen in itertools.combinations_with_replacement(range(len(every)), size):
        orders = len(set(itertools.permutations(chosen)))
        probability = float(np.prod([every[i].probability(log_policy) for i in chosen])) * orders
        found.append((tuple(every[i] for i in chosen), probability))
    return found
