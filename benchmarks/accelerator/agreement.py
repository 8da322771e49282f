"""Supervised updates on the device against the same updates in float32 on a processor, and again from a saved state."""

from collections.abc import Iterator
from typing import Any

import torch

from accelerator.rows import Row
from accelerator.shapes import RandomPolicy, Shape
from accelerator.training import samples_of
from posttrain.recipe.model import LearnerRecipe, OptimizerRecipe
from posttrain.training.objectives import SupervisedObjective, token_forward
from posttrain.training.optimizer import Optimizer
from posttrain.training.updater import Updater

UPDATES = 20
LEARNING_RATE = 1e-4
"""With a much smaller one, the first updates do not change bfloat16 weights at all, although they change the masters."""


class Side:
    """A policy with its optimizer, on fixed rows."""

    def __init__(
        self, shape: Shape, device: torch.device, dtype: torch.dtype, weights: dict[str, torch.Tensor] | None = None
    ) -> None:
        self.policy = RandomPolicy(shape, device)
        self.policy.model.to(dtype)
        if weights is not None:
            self.policy.model.load_state_dict(weights)
        self.optimizer = Optimizer(self.policy.trainable(), OptimizerRecipe(learning_rate=LEARNING_RATE), UPDATES)
        recipe = LearnerRecipe(tokens_per_batch=512, logits_per_chunk=256)
        self.learner: Any = Updater(self.policy, self.optimizer, recipe, token_forward(self.policy, recipe))
        self.samples = samples_of([60, 80, 100, 120], 0.3, shape.vocabulary, 0)

    def losses(self, updates: int) -> list[float]:
        found = []
        for _ in range(updates):
            loss, tokens = self.learner.update(self.samples, SupervisedObjective())["loss/nll"]
            found.append(loss / tokens)
        return found

    def saved(self) -> tuple[dict[str, torch.Tensor], dict[str, Any]]:
        """A copy of all that a checkpoint holds."""
        tensors = self.weights() | self.optimizer.tensors()
        return {name: tensor.cpu().clone() for name, tensor in tensors.items()}, self.optimizer.state_dict()

    def restore(self, saved: dict[str, torch.Tensor], state: dict[str, Any]) -> None:
        with torch.no_grad():
            for name, tensor in (self.weights() | self.optimizer.tensors(state)).items():
                tensor.copy_(saved[name])
        self.optimizer.load_state_dict(state)

    def weights(self) -> dict[str, torch.Tensor]:
        return {f"weights/{name}": tensor for name, tensor in self.policy.model.state_dict().items()}


def agreement(shape: Shape, device: torch.device) -> Iterator[Row]:
    """Largest distances of the losses from those in float32 on a processor, and from those before a restore.

    Losses fall to almost zero, where rounding to bfloat16 alone changes them by several percent. So the distance of
    bfloat16 is relative to the first loss; that of float32 is relative to each loss.
    """
    plain = Side(shape, torch.device("cpu"), torch.float32)
    # Copied, because a processor's float32 model trains the tensors of its state.
    weights = {name: tensor.clone() for name, tensor in plain.policy.model.state_dict().items()}
    expected, half = plain.losses(UPDATES), UPDATES // 2
    del plain
    found = Side(shape, device, torch.float32, weights).losses(UPDATES)
    distance = max(abs(mine / theirs - 1) for mine, theirs in zip(found, expected, strict=True))
    note = f"loss {expected[0]:.3f} to {expected[-1]:.3f}"
    yield Row("agreement", f"{UPDATES} updates in float32 against a processor", distance, "relative", note=note)
    side = Side(shape, device, torch.bfloat16, weights)
    found = side.losses(half)
    saved = side.saved()
    found += side.losses(half)
    distance = max(abs(mine - theirs) / expected[0] for mine, theirs in zip(found, expected, strict=True))
    note = f"loss {found[0]:.3f} to {found[-1]:.3f}"
    yield Row("agreement", f"{UPDATES} updates in bfloat16, of the first loss", distance, "relative", note=note)
    side.restore(*saved)
    again = max(abs(mine / theirs - 1) for mine, theirs in zip(side.losses(half), found[half:], strict=True))
    yield Row("agreement", f"{half} updates again from the saved state", again, "relative")
