"""Learning curves of the toy study, and how often credit that is summed has the same best answer as the reward."""

import numpy as np

from posttrain.runs.intervals import seed_mean, success_rate
from posttrain.seeds import random_stream
from toy.credit import Way, advantages, episodes, summed
from toy.tasks import ANSWERS, TASKS, UNITS, Policy, pairs

ENOUGH = 0.95


def curve(way: Way, kind: str, seed: int, steps: int, batch: int, rate: float) -> np.ndarray:
    """[steps]: the exact score of the policy after each step, 0 for choices at random and 1 for the best answer."""
    task, policy, played = TASKS[kind](seed), Policy.uniform(), episodes(batch)
    draws, found = random_stream(seed, "toy", "run"), np.zeros(steps)
    for step in range(steps):
        answers = policy.sample(batch, draws)
        policy.climb(answers, advantages(way, task, played, answers, draws) / batch, rate)
        found[step] = task.score(float(policy.of_every_answer() @ task.every))
    return found


def exact_curve(kind: str, seed: int, steps: int, rate: float) -> np.ndarray:
    """[steps]: the same with the exact gradient, divided by the standard deviation of the reward under the policy."""
    task, policy, found = TASKS[kind](seed), Policy.uniform(), np.zeros(steps)
    for step in range(steps):
        chances = policy.of_every_answer()
        above = task.every - chances @ task.every
        weights = chances * above / (np.sqrt(chances @ above**2) + 1e-6)
        policy.climb(ANSWERS, np.repeat(weights[:, None], UNITS, axis=1), rate)
        found[step] = task.score(float(policy.of_every_answer() @ task.every))
    return found


def summary(curves: np.ndarray) -> dict[str, str | float]:
    """Columns of the table for curves [seeds, steps]: values with 95% intervals.

    Steps are those until the score is 0.95 for the first time; their median, with the order statistics that enclose
    it, counts seeds that never get there as above all others.
    """
    seeds, steps = curves.shape
    enough = curves >= ENOUGH
    first = np.sort(np.where(enough.any(axis=1), enough.argmax(axis=1) + 1, steps + 1))
    # Binomial(n, 1/2) by its normal approximation: ranks n/2 -+ 1.96 sqrt(n) / 2.
    low, high = (int(np.floor(seeds / 2 - 0.98 * seeds**0.5)), int(np.ceil(seeds / 2 + 0.98 * seeds**0.5)))
    ranks = [first[max(low - 1, 0)], np.median(first), first[min(high, seeds - 1)]]
    shown = [f"{rank:g}" if rank <= steps else f">{steps}" for rank in ranks]
    reached, final = success_rate(int(enough.any(axis=1).sum()), seeds), seed_mean(curves[:, -1].tolist(), rate=True)
    return {
        "steps to 95%": f"{shown[1]} [{shown[0]}, {shown[2]}]",
        "reached": f"{reached.value:.2f} [{reached.low:.2f}, {reached.high:.2f}]",
        "final": f"{final.value:.3f}" + ("" if final.low != final.low else f" [{final.low:.3f}, {final.high:.3f}]"),
    }


def agreement(name: str, beta: float, tasks: int) -> str:
    """In how many random tasks of `pairs` the best answer by beta x sum of credits + (1 - beta) R is the best by R."""
    same = 0
    for seed in range(tasks):
        task = pairs(seed)
        same += int(np.argmax(beta * summed(name, task, ANSWERS) + (1 - beta) * task.every) == np.argmax(task.every))
    found = success_rate(same, tasks)
    return f"{found.value:.2f} [{found.low:.2f}, {found.high:.2f}]"
