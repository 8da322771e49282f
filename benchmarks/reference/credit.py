"""Advantages from the papers, on plain lists, in float64. Only sampled tokens appear; tokens of the environment are left out."""

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import combinations
from typing import Any

import torch

EPSILON = 1e-6
Tensor = torch.Tensor


@dataclass
class Play:
    """One episode of L sampled tokens, across its streams."""

    group: int
    rewards: list[float]
    """[L]."""
    turn: list[int]
    """[L]: the turn of each token, never decreasing."""
    states: list[str] = field(default_factory=list)
    """Of each turn."""
    values: list[float] = field(default_factory=list)
    """[L]: a critic's value before each token."""
    scores: dict[str, float] = field(default_factory=dict)
    """Parts of the reward, by name."""
    energies: list[float] = field(default_factory=list)
    """[L]: squared norm of the gradient of each token's log-probability with respect to its logits, 1 - 2 p + sum p^2."""
    greedy: float = 0.0
    """Return of a greedy episode of the group's task."""

    @property
    def total(self) -> float:
        return float(sum(self.rewards))

    def turn_rewards(self) -> list[float]:
        sums = [0.0] * (max(self.turn) + 1)
        for turn, reward in zip(self.turn, self.rewards, strict=True):
            sums[turn] += reward
        return sums


PerEpisode = list[list[float]]
Credit = Callable[[Sequence[Play], Any], PerEpisode]


def mean(x: Sequence[float]) -> float:
    return sum(x) / len(x)


def sample_std(x: Sequence[float]) -> float:
    """With n - 1."""
    return (sum((v - mean(x)) ** 2 for v in x) / (len(x) - 1)) ** 0.5 if len(x) > 1 else 0.0


def groups(plays: Sequence[Play]) -> list[list[int]]:
    """Indices of the episodes of each group."""
    members = defaultdict(list)
    for index, play in enumerate(plays):
        members[play.group].append(index)
    return list(members.values())


def constant(plays: Sequence[Play], numbers: Sequence[float]) -> PerEpisode:
    """One number for all tokens of an episode."""
    return [[number] * len(play.rewards) for play, number in zip(plays, numbers, strict=True)]


def in_groups(rule: Callable[[list[Play]], list[float]]) -> Credit:
    """A rule on the episodes of one group. Groups of one have no baseline, so their advantage is 0."""

    def credit(plays: Sequence[Play], settings: Any) -> PerEpisode:
        numbers = [0.0] * len(plays)
        for members in groups(plays):
            if len(members) > 1:
                for index, number in zip(members, rule([plays[i] for i in members]), strict=True):
                    numbers[index] = number
        return constant(plays, numbers)

    return credit


def _grpo(group: list[Play]) -> list[float]:
    """Shao et al. 2024 (2402.03300) equation 3 and section 4.1.2."""
    R = [play.total for play in group]
    return [(r - mean(R)) / (sample_std(R) + EPSILON) for r in R]


def _dr_grpo(group: list[Play]) -> list[float]:
    """Liu et al. 2025 (2503.20783) equation 3."""
    R = [play.total for play in group]
    return [r - mean(R) for r in R]


def _rloo(group: list[Play]) -> list[float]:
    """Kool et al. 2019; Ahmadian et al. 2024 (2402.14740) equation 6."""
    R = [play.total for play in group]
    return [r - (sum(R) - r) / (len(R) - 1) for r in R]


def _opo(group: list[Play]) -> list[float]:
    """Hao et al. 2025 (2505.23585) equation 7: the baseline weights returns by length."""
    lengths = [len(play.rewards) for play in group]
    baseline = sum(n * play.total for n, play in zip(lengths, group, strict=True)) / sum(lengths)
    return [play.total - baseline for play in group]


def _maxrl(group: list[Play]) -> list[float]:
    """Tajwar et al. 2026 (2602.02710): (r - mean) / mean, 0 without a success."""
    R = [play.total for play in group]
    return [(r - mean(R)) / mean(R) if mean(R) > 0 else 0.0 for r in R]


def pass_at_k(plays: Sequence[Play], settings: Any) -> PerEpisode:
    """Tang et al. 2025 (2503.19595) equation 5: best of k attempts minus the best without this one, a mean over all sets of k
    of the group that hold it. k is the size of the group where that is smaller or k is not given."""

    def rule(group: list[Play]) -> list[float]:
        R = [play.total for play in group]
        k = min(settings.k or len(R), len(R))
        numbers = []
        for i in range(len(R)):
            others = R[:i] + R[i + 1 :]
            sets = list(combinations(others, k - 1))
            numbers.append(mean([max(R[i], *chosen) - max(chosen) for chosen in sets]))
        return numbers

    return in_groups(rule)(plays, settings)


def gdpo(plays: Sequence[Play], settings: Any) -> PerEpisode:
    """Liu et al. 2026 (2601.05242) equations 4 to 6: each score is normalized within the group; the weighted sum is normalized
    over the episodes of the batch. An episode without company is left out of the update, so it has no part in either."""
    sums, weights = [0.0] * len(plays), settings.weights or dict.fromkeys(plays[0].scores, 1.0)
    company = [members for members in groups(plays) if len(members) > 1]
    for members in company:
        for name, weight in weights.items():
            for i, number in zip(members, normalized([plays[i].scores[name] for i in members]), strict=True):
                sums[i] += weight * number
    compared = [i for members in company for i in members]
    for i, number in zip(compared, normalized([sums[i] for i in compared]), strict=True):
        sums[i] = number
    return constant(plays, sums)


def optimal_token_baseline(plays: Sequence[Play], settings: Any) -> PerEpisode:
    """Li et al. 2026 (2602.07078): the reward-to-go minus, at the t-th token, the mean over the group's episodes that have one,
    weighted by the cumulative energy of their tokens up to it. A token that no other episode reaches has no baseline, as in
    the authors' code: the formula alone would compare it with itself."""
    out: PerEpisode = [[0.0] * len(play.rewards) for play in plays]
    for members in groups(plays):
        if len(members) == 1:
            continue
        for i in members:
            returns = rewards_to_go(plays[i].rewards, 1.0)
            for t in range(len(returns)):
                alive = [plays[j] for j in members if t < len(plays[j].rewards)]
                if len(alive) == 1:
                    out[i][t] = returns[t]
                    continue
                weights = [sum(play.energies[: t + 1]) for play in alive]
                seen = [sum(play.rewards[t:]) for play in alive]
                out[i][t] = returns[t] - sum(w * G for w, G in zip(weights, seen, strict=True)) / sum(weights)
    return out


IN_GROUP = (
    "grpo",
    "dr_grpo",
    "rloo",
    "opo",
    "maxrl",
    "pass_at_k",
    "gdpo",
    "optimal_token_baseline",
    "mt_grpo",
    "gigpo",
)
"""Credits that compare an episode with the others of its group."""


def uncompared(name: str, plays: Sequence[Play], settings: Any) -> set[int]:
    """Positions of the episodes with nothing to be compared with, which are left out of the update and of its divisor."""
    if name == "brpo":
        return {0} if len(plays) == 1 else set()
    if name not in (*IN_GROUP, "reinforce_pp_baseline") and not (
        name == "turn_returns" and settings.baseline != "none"
    ):
        return set()
    single = {members[0] for members in groups(plays) if len(members) == 1}
    if name == "gigpo":
        # Two visits to a state are compared with each other.
        single = {i for i in single if len(set(plays[i].states)) == len(plays[i].states)}
    return single


def remax(plays: Sequence[Play], settings: Any) -> PerEpisode:
    """Li et al. 2023 (2310.10505) equation 5: the return of a greedy episode is the baseline."""
    return constant(plays, [play.total - play.greedy for play in plays])


def arpo(plays: Sequence[Play], settings: Any) -> PerEpisode:
    """RAGEN (2504.20073): the raw return."""
    return constant(plays, [play.total for play in plays])


def brpo(plays: Sequence[Play], settings: Any) -> PerEpisode:
    """RAGEN (2504.20073): statistics of the whole batch."""
    R = [play.total for play in plays]
    return constant(plays, [(r - mean(R)) / (sample_std(R) + EPSILON) for r in R])


def rewards_to_go(rewards: Sequence[float], discount: float) -> list[float]:
    after, out = 0.0, []
    for reward in reversed(rewards):
        after = reward + discount * after
        out.append(after)
    return out[::-1]


def whiten(rows: PerEpisode) -> PerEpisode:
    """Mean 0 and standard deviation 1 over all tokens of the batch."""
    flat = [x for row in rows for x in row]
    center, spread = mean(flat), (sum((x - mean(flat)) ** 2 for x in flat) / len(flat)) ** 0.5
    return [[(x - center) / (spread + EPSILON) for x in row] for row in rows]


def reinforce(plays: Sequence[Play], settings: Any) -> PerEpisode:
    """Williams 1992, discounted reward-to-go."""
    return [rewards_to_go(play.rewards, settings.discount) for play in plays]


def reinforce_pp(plays: Sequence[Play], settings: Any) -> PerEpisode:
    """Hu 2025 (2501.03262) equations 5 and 6: reward-to-go, normalized over the batch."""
    return whiten(reinforce(plays, settings))


def reinforce_pp_baseline(plays: Sequence[Play], settings: Any) -> PerEpisode:
    """Hu 2025 (2501.03262) equation 7: minus the group's mean, then normalized over the batch without groups of one, which are
    left out of the update."""
    rows = in_groups(_dr_grpo)(plays, settings)
    compared = [i for members in groups(plays) if len(members) > 1 for i in members]
    for i, row in zip(compared, whiten([rows[i] for i in compared]), strict=True):
        rows[i] = row
    return rows


def gae_of(rewards: Sequence[float], values: Sequence[float], gamma: float, lam: float) -> list[float]:
    """Schulman et al. 2016 (1506.02438) equation 16; the value after the last token is 0."""
    out = []
    for t in range(len(rewards)):
        total, weight = 0.0, 1.0
        for k in range(t, len(rewards)):
            after = values[k + 1] if k + 1 < len(values) else 0.0
            total += weight * (rewards[k] + gamma * after - values[k])
            weight *= gamma * lam
        out.append(total)
    return out


def gae(plays: Sequence[Play], settings: Any) -> PerEpisode:
    """`length_alpha`: VAPO (2504.05118) equation 8, lambda = 1 - 1 / (alpha x length)."""
    rows = []
    for play in plays:
        lam = settings.gae_lambda
        if settings.length_alpha is not None:
            lam = max(0.0, 1 - 1 / (settings.length_alpha * len(play.rewards)))
        rows.append(gae_of(play.rewards, play.values, settings.discount, lam))
    return whiten(rows) if settings.whiten else rows


def over_tokens(play: Play, of_turn: Sequence[float]) -> list[float]:
    return [of_turn[turn] for turn in play.turn]


def turn_returns(plays: Sequence[Play], settings: Any) -> PerEpisode:
    """Reward-to-go per turn minus the mean of the other episodes of the group at that turn, 0 after their end."""
    returns = [rewards_to_go(play.turn_rewards(), settings.discount) for play in plays]
    if settings.baseline == "none":
        return [over_tokens(play, G) for play, G in zip(plays, returns, strict=True)]
    out: PerEpisode = [[0.0] * len(play.rewards) for play in plays]
    for members in groups(plays):
        for i in members:
            others = [returns[j] for j in members if j != i]
            if others:
                baselines = [mean([G[k] if k < len(G) else 0.0 for G in others]) for k in range(len(returns[i]))]
                advantages = [g - b for g, b in zip(returns[i], baselines, strict=True)]
                out[i] = over_tokens(plays[i], advantages)
    return out


def normalized(x: Sequence[float], divide: bool = True) -> list[float]:
    return [(v - mean(x)) / (sample_std(x) + EPSILON if divide else 1.0) for v in x]


def mt_grpo(plays: Sequence[Play], settings: Any) -> PerEpisode:
    """Zeng et al. 2025 (2505.11821) equation 6: outcome advantage plus, before the last turn, a share of the turn's own."""
    out: PerEpisode = [[0.0] * len(play.rewards) for play in plays]
    for members in groups(plays):
        if len(members) == 1:
            continue
        rewards = [plays[i].turn_rewards() for i in members]
        outcome = normalized([r[-1] for r in rewards])
        for place, i in enumerate(members):
            of_turn = []
            for k in range(len(rewards[place])):
                number = outcome[place]
                if k < len(rewards[place]) - 1:
                    # Turns of the episodes that went on after turn k.
                    went_on = [j for j in range(len(members)) if k < len(rewards[j]) - 1]
                    own = normalized([rewards[j][k] for j in went_on])
                    number += settings.turn_weight * own[went_on.index(place)]
                of_turn.append(number)
            out[i] = over_tokens(plays[i], of_turn)
    return out


def gigpo(plays: Sequence[Play], settings: Any) -> PerEpisode:
    """Feng et al. 2025 (2505.10978) equations 3, 7 and 8: episodes within the group, plus turns within a state. Two visits of
    one episode to a state are compared too, also where it is alone in its group."""
    out: PerEpisode = [[0.0] * len(play.rewards) for play in plays]
    for members in groups(plays):
        episode = normalized([plays[i].total for i in members], settings.divide_by_std)
        anchors: dict[str, list[tuple[int, int, float]]] = defaultdict(list)
        for place, i in enumerate(members):
            for k, G in enumerate(rewards_to_go(plays[i].turn_rewards(), settings.discount)):
                anchors[plays[i].states[k]].append((place, k, G))
        of_turn = [[episode[place]] * (max(plays[i].turn) + 1) for place, i in enumerate(members)]
        for met in anchors.values():
            for (place, k, _), number in zip(
                met, normalized([G for *_, G in met], settings.divide_by_std), strict=True
            ):
                of_turn[place][k] += settings.step_weight * number
        for place, i in enumerate(members):
            out[i] = over_tokens(plays[i], of_turn[place])
    return out


def bilevel_gae(plays: Sequence[Play], settings: Any) -> PerEpisode:
    """RAGEN (2504.20073): GAE over turns, whose result is what the last token of a turn is worth in GAE over its tokens.
    Turn values are those before the first token of a turn, and rewards inside a turn are discounted per token."""
    g, h = settings.discount, settings.turn_discount
    rows: PerEpisode = []
    for play in plays:
        spans = [[t for t, turn in enumerate(play.turn) if turn == k] for k in range(max(play.turn) + 1)]
        row = [0.0] * len(play.rewards)
        beyond = 0.0
        for span in reversed(spans):
            rewards, values = [play.rewards[t] for t in span], [play.values[t] for t in span]
            # What follows the turn is a last reward, which comes with the turn's last token.
            rewards[-1] += beyond
            for t, number in zip(span, gae_of(rewards, values, g, settings.gae_lambda), strict=True):
                row[t] = number
            monte_carlo = sum(g**n * reward for n, reward in enumerate(rewards))
            turn_advantage = monte_carlo - values[0]
            beyond = h * (values[0] + settings.turn_gae_lambda * turn_advantage)
        rows.append(row)
    return whiten(rows) if settings.whiten else rows


CREDITS: dict[str, Credit] = {
    "grpo": in_groups(_grpo),
    "dr_grpo": in_groups(_dr_grpo),
    "rloo": in_groups(_rloo),
    "opo": in_groups(_opo),
    "maxrl": in_groups(_maxrl),
    "pass_at_k": pass_at_k,
    "gdpo": gdpo,
    "optimal_token_baseline": optimal_token_baseline,
    "remax": remax,
    "brpo": brpo,
    "arpo": arpo,
    "reinforce": reinforce,
    "reinforce_pp": reinforce_pp,
    "reinforce_pp_baseline": reinforce_pp_baseline,
    "gae": gae,
    "turn_returns": turn_returns,
    "mt_grpo": mt_grpo,
    "gigpo": gigpo,
    "bilevel_gae": bilevel_gae,
}
