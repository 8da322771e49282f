"""Sampling that runs ahead of learning: a thread with an engine of its own makes the batches that the learner takes.

The thread plays batch after batch, in the order of steps; `rollout.ahead` says how far it may be ahead. What it has
sampled is on disk until a checkpoint covers it, so a run that is killed goes on with it.
"""

import time
from typing import Any

import torch

from posttrain.distribution.world import by_itself
from posttrain.recipe.stages import RlRecipe
from posttrain.rollout.ahead.journal import remove_batches
from posttrain.rollout.ahead.stale import ages, without_stale
from posttrain.rollout.ahead.weights import Published, Weights
from posttrain.training.collect import Collected, TaskOrder
from posttrain.training.playing import Playing
from posttrain.training.sampler import STOP_SECONDS, Sampler, journals_of
from posttrain.training.trainer import Trainer


class Ahead:
    """The batches of a run, made by a thread while the learner learns. A context manager: inside, the thread works."""

    phase = "waited_for_rollout"

    def __init__(self, recipe: RlRecipe, playing: Playing, tasks: TaskOrder, trainer: Trainer[Any]) -> None:
        """`tasks` is what a checkpoint holds: as it was after the batches that were learned from."""
        self.recipe, self.playing, self.tasks, self.trainer = recipe, playing, tasks, trainer
        rollout = recipe.rollout
        self._exact = rollout.on_new_weights == "finish" or rollout.replay is not None
        """Whether a batch needs the weights of one certain step, and not the newest."""
        self._published = Published(rollout.ahead + 1 if self._exact else 1)
        self._sampler = Sampler(recipe, playing, self._published)
        self._world = trainer.world
        self._older: list[Weights] = []
        self._versions: dict[int, int] = {}
        """Step -> version of the weights after it, for the last steps."""
        trainer.companions["ahead"] = self

    # -- the learner's side -------------------------------------------------------------------------------------------

    def __enter__(self) -> "Ahead":
        if self.recipe.kl.coefficient > 0:
            # While transformers loads a model, torch's default precision is that of the model, in all threads.
            with self.playing.policy.as_reference():
                pass
        with by_itself() as world:
            twin = self.playing.policy.twin() if world.first else None
        if twin is not None:
            self._sampler.start(twin, self.tasks, self.trainer.step + 1)
        return self

    def __exit__(self, *error: object) -> None:
        if not self._sampler.stop():
            self.trainer.warn(
                [f"a call of the environment keeps the thread that samples after {STOP_SECONDS:g} s; it is left behind"]
            )
        self._remove_covered()

    def take(self, step: int) -> Collected:
        """The episodes of `step`; waits for them. Whatever stopped the thread is raised here. Where several processes
        learn, the first one samples and all get what it sampled."""
        begun = time.perf_counter()
        batch = self._world.of_first(self._sampler.next)
        self._remove_covered()
        assert batch.step == step, f"batch {batch.step} for step {step}"
        collected, waited = batch.collected, time.perf_counter() - begun
        self.tasks.load_state_dict(batch.tasks)
        self._check_bound(step, collected)
        version = self.trainer.model.version
        collected.metrics |= {
            "time/waited_for_learner": batch.waited,
            "time/sampling": collected.seconds,
            "time/overlap_share": max(0.0, 1 - waited / max(collected.seconds, waited, 1e-9)),
        }
        self._drop_stale(collected, version)
        old = ages(collected.episodes, version)
        if len(old):
            collected.metrics |= {"policy/staleness_mean": float(old.mean()), "policy/staleness_max": float(old.max())}
        return collected

    def learned(self, step: int) -> None:
        """The weights are those after `step` now. Call it where no signal interrupts."""
        self._versions[step] = self.trainer.model.version
        for old in [known for known in self._versions if known < step - self.recipe.rollout.ahead]:
            del self._versions[old]
        weights = Weights.of(self.playing.policy, step)
        if self._world.first:
            self._published.publish(weights)

    def tensors(self) -> dict[str, torch.Tensor]:
        """The weights after the last steps before this one, which batches of the coming steps begin with."""
        self._older = self._pending()
        return {
            f"{back}/{name}": tensor
            for back, weights in enumerate(self._older, 1)
            for name, tensor in weights.tensors.items()
        }

    def state_dict(self) -> dict[str, Any]:
        """Which weights those of `tensors` are, and the versions of the last steps."""
        older = [(weights.step, weights.version) for weights in self._pending()]
        return {"versions": sorted(self._versions.items()), "older": older}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._versions = dict(map(tuple, state["versions"]))
        if self._world.first:
            for (step, version), read in zip(reversed(state["older"]), reversed(self._older), strict=True):
                self._published.publish(Weights(step, version, read.tensors))

    def _pending(self) -> list[Weights]:
        """The weights 1, 2, ... `ahead` steps ago in the first process, where they are needed; room for them where a
        checkpoint is to be read."""
        if not (self._exact and self._world.first):
            return []
        kept = {weights.step: weights for weights in self._published.kept()}
        steps = [max(0, self.trainer.step - back) for back in range(1, self.recipe.rollout.ahead + 1)]
        return [kept[step] if kept else Weights.unread(self.playing.policy) for step in steps]

    def _remove_covered(self) -> None:
        """Delete from the buffer what no resume will ask for."""
        if self._world.first:
            remove_batches(journals_of(self.playing.run), 0, max(self.trainer.checkpoints.steps(), default=0))

    def _check_bound(self, step: int, collected: Collected) -> None:
        oldest = self._versions.get(max(0, step - 1 - self.recipe.rollout.ahead), 0)
        for episode in collected.sampled:
            if len(episode.versions) and episode.versions.min() < oldest:
                raise AssertionError(
                    f"step {step} got a token of version {episode.versions.min()} and rollout.ahead = "
                    f"{self.recipe.rollout.ahead} allows version {oldest} or newer"
                )

    def _drop_stale(self, collected: Collected, version: int) -> None:
        rollout = self.recipe.rollout
        if rollout.stale_after is None:
            return
        smallest = 2 if self.recipe.compares_groups else 1
        kept, stale, alone = without_stale(collected.episodes, version, rollout.stale_after, smallest)
        collected.episodes = kept
        collected.metrics |= {"rollout/stale": float(stale), "rollout/stale_alone": float(alone)}
        if not kept:
            collected.messages.append(
                f"every episode is older than rollout.stale_after = {rollout.stale_after} updates, so nothing is learned from"
            )
