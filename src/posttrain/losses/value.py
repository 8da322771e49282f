"""The value loss: one value per sampled token. The learner divides their sum once per optimizer step."""

import torch


def value_loss(
    values: torch.Tensor, old: torch.Tensor, returns: torch.Tensor, clip: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """L_t = max((V - R)^2, (V_old + clamp(V - V_old, -clip, clip) - R)^2) / 2 of each token: [N], not reduced.

    `values` [N] float, differentiable: the current V. `old` [N]: V before the step's updates. `returns` [N]: R, the
    targets. All are in units of reward. A value that has moved towards its return by more than `clip` has gradient 0.
    `clip` None gives half the squared error. The second result, [N] bool, is true where the clipped term is larger.
    Source: the second published implementation of Schulman et al. 2017, arXiv 1707.06347;
    the paper itself does not clip values.
    """
    plain = (values - returns) ** 2
    if clip is None:
        return plain / 2, torch.zeros_like(values, dtype=torch.bool)
    clipped = (old + (values - old).clamp(-clip, clip) - returns) ** 2
    return torch.maximum(plain, clipped) / 2, clipped > plain
