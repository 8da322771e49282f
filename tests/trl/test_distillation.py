"""The divergence of distillation against TRL's: values and gradients."""

import pytest
import torch

from posttrain.losses.distillation import generalized_jsd

pytest.importorskip("trl", minversion="1.16", reason="trl 1.16 is not installed; it is in the extra `dev`")


@pytest.mark.parametrize("beta", [0.0, 0.1, 0.5, 0.9, 1.0])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_divergence_and_its_gradient_are_those_of_trl(beta, temperature):
    from trl.experimental.gkd import GKDTrainer

    draws = torch.Generator().manual_seed(0)
    logits, teacher = (3 * torch.randn(2, 6, 50, generator=draws, dtype=torch.float64) for _ in range(2))
    labels = torch.ones(2, 6, dtype=torch.int64)
    labels[0, :2] = -100
    logits.requires_grad_()
    options = {"labels": labels, "beta": beta, "temperature": temperature}
    theirs = GKDTrainer.generalized_jsd_loss(logits, teacher, **options)
    (expected,) = torch.autograd.grad(theirs, logits)
    student, target = (torch.log_softmax(values / temperature, -1)[labels != -100] for values in (logits, teacher))
    ours = generalized_jsd(student, target, beta).mean()
    (found,) = torch.autograd.grad(ours, logits)
    torch.testing.assert_close(ours, theirs, rtol=1e-12, atol=1e-12)
    torch.testing.assert_close(found, expected, rtol=1e-10, atol=1e-12)
