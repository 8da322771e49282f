"""The value loss computed by hand, and where its gradient is zero."""

import pytest
import torch

from posttrain.losses.value import value_loss

VALUES = [1.0, 1.0, -0.5, 0.1]
OLD = [0.0, 0.0, 0.0, 0.0]
RETURNS = [2.0, -1.0, -2.0, 0.3]


def tensors():
    return torch.tensor(VALUES, requires_grad=True), torch.tensor(OLD), torch.tensor(RETURNS)


def test_without_a_clip_it_is_half_the_square():
    values, old, returns = tensors()
    losses, clipped = value_loss(values, old, returns, None)
    torch.testing.assert_close(losses, torch.tensor([0.5, 2.0, 1.125, 0.02]))
    assert not clipped.any()


def test_the_larger_square_counts():
    values, old, returns = tensors()
    losses, clipped = value_loss(values, old, returns, 0.2)
    # Clipped values are 0.2, 0.2, -0.2, 0.1; the second has moved away from its return, so the plain square is larger.
    torch.testing.assert_close(losses, torch.tensor([1.8**2 / 2, 2.0, 1.8**2 / 2, 0.02]))
    assert clipped.tolist() == [True, False, True, False]
    losses.sum().backward()
    torch.testing.assert_close(values.grad, torch.tensor([0.0, 2.0, 0.0, -0.2]))


@pytest.mark.parametrize("clip", [0.05, 0.2, None])
def test_values_that_have_not_moved_are_pulled_in_full(clip):
    _, old, returns = tensors()
    values = old.clone().requires_grad_()
    value_loss(values, old, returns, clip)[0].sum().backward()
    torch.testing.assert_close(values.grad, old - returns)
