"""The reward model in workers of the cluster: episodes are divided among its copies."""

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor

from posttrain.cluster.crew import Member
from posttrain.recipe.reward import RewardSource
from posttrain.rollout.streams import Episode
from posttrain.training.reward_scorer import OF_UNITS, RewardScorer


class RayScorer(RewardScorer):
    """Pays episodes as a scorer in this process does; what the model says comes from the workers."""

    def __init__(self, source: RewardSource, members: Sequence[Member]) -> None:
        self.source = source
        self.members = list(members)
        self.alone = threading.Lock()
        self.statistics = self.members[0].ask("its statistics", "statistics")

    def scores(self, episodes: Sequence[Episode]) -> list[float]:
        """As of the model in this process; copies read whole runs of episodes, one after another."""
        count = len(self.members)
        each = -(-len(episodes) // count) if episodes else 0
        parts = [list(episodes[i * each : (i + 1) * each]) for i in range(count)]
        with ThreadPoolExecutor(count) as pool:
            asked = [
                pool.submit(member.ask, f"{len(part)} rewards", "scores", part)
                for member, part in zip(self.members, parts, strict=True)
                if part
            ]
            found = [pair for done in asked for pair in done.result()]
        for episode, (_, units) in zip(episodes, found, strict=True):
            if units is not None:
                last = episode.turns[-1]
                last.info = {**last.info, OF_UNITS: units}
        return [raw for raw, _ in found]
