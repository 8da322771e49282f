"""A policy loss and a credit of your own, registered by decorators and used in a loop and in a recipe.

`python examples/custom_loss.py` runs both. Keyword-only parameters become keys of the recipe: `loss.sharpness`, `credit.scale`.
"""

import sys
from typing import Annotated

import numpy as np
import torch
from pydantic import Field

import posttrain

BOUNDED = posttrain.Metric("policy/bounded", "mean absolute value of the bounded ratio")


@posttrain.register_loss("soft_ppo", metrics=(BOUNDED,))
def soft_ppo(
    logprobs: torch.Tensor,
    batch: posttrain.TokenBatch,
    *,
    sharpness: Annotated[float, Field(gt=0, description="Slope of the bounded ratio at 1.")] = 5.0,
):
    """A smooth bound on the ratio instead of PPO's clipping: -A tanh(sharpness (ratio - 1)) / sharpness."""
    ratio = (logprobs - batch.rollout_logprobs).clamp(-20, 20).exp()
    bounded = torch.tanh(sharpness * (ratio - 1)) / sharpness
    metrics = {"policy/bounded": (float(bounded.detach().abs().sum()), len(bounded))}  # sum and count
    return -batch.advantages * bounded, metrics


@posttrain.register_credit("median")
def median(returns: np.ndarray, groups: np.ndarray, *, scale: float = 1.0) -> np.ndarray:
    """The return minus the median of its group."""
    medians = {group: np.median(returns[groups == group]) for group in np.unique(groups)}
    return scale * (returns - [medians[group] for group in groups])


if __name__ == "__main__":
    model = sys.argv[1] if len(sys.argv) > 1 else "packaged:smollm2-135m"
    # In a loop of your own:
    policy = posttrain.Policy(model, lora={"rank": 8})
    engine = posttrain.LocalEngine(policy)
    env = posttrain.make_env("bandit")
    loss = {"type": "soft_ppo", "sharpness": 3.0}
    learner = posttrain.Learner(policy, learning_rate=1e-3, loss=loss, entropy=0.01)
    episodes = posttrain.rollout(engine, env, seeds=range(4), episodes_per_group=4, max_tokens=16)
    metrics = learner.update(episodes, posttrain.advantages(episodes, "median", scale=2.0))
    print(f"loss {metrics['loss/policy']:.4f}, bounded {metrics['policy/bounded']:.4f}")
    # In a recipe:
    result = posttrain.rl(
        name="soft_ppo",
        steps=1,
        model={"path": model, "lora": {"rank": 8}},
        environment={"type": "bandit"},
        loss={"type": "soft_ppo"},
        entropy={"coefficient": 0.01},
        credit={"type": "median", "scale": 2.0},
        rollout={"groups_per_step": 2, "episodes_per_group": 4, "tokens_per_turn": 16},
        evaluation={
            "every": 0,
            "seeds": {"start": 1_000_000, "count": 2},
            "final_seeds": {"start": 2_000_000, "count": 4},
        },
        overwrite=True,
    )
    print(f"bounded {result.metrics[-1]['policy/bounded']:.4f}, model in {result.model}")
