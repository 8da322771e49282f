"""The loss of a critic: one value per sampled token, to be divided once by the learner."""

import torch


def value_loss(
    values: torch.Tensor, old: torch.Tensor, returns: torch.Tensor, clip: float | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """L_t = max((V - R)^2, (V_old + clamp(V - V_old, -clip, clip) - R)^2) / 2 of each token: [N], not reduced.

    `values` [N] float, differentiable: V as the critic is now; `old` [N]: V before the step's updates; `returns` [N]:
    R, what the values should have been; all in units of reward. A value that has moved by more than `clip`, towards its
    return, has gradient 0. `clip` None is the plain half square. The second result [N] bool says where the clipped
    square is the larger one. Source: the second published implementation of Schulman et al. 2017, arXiv 1707.06347;
    the paper itself does not clip values.
    """
    plain = (values - returns) ** 2
    if clip is None:
        return plain / 2, torch.zeros_like(values, dtype=torch.bool)
    clipped = (old + (values - old).clamp(-clip, clip) - returns) ** 2
    return torch.maximum(plain, clipped) / 2, clipped > plain
