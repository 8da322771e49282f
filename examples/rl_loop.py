"""A complete reinforcement-learning loop: the policy learns to answer with the requested letter.

Run it with `python examples/rl_loop.py`. It takes less than a minute on one processor core.
"""

import posttrain


class Letters(posttrain.Environment):
    """One turn: name the letter `a` or `b`. The reward is 1 if the answer begins with it."""

    def reset(self, seed: int) -> posttrain.Observation:
        self.letter = "ab"[seed % 2]
        return posttrain.Observation([{"role": "user", "content": f"Say the letter {self.letter}."}])

    def step(self, action: str) -> posttrain.Step:
        right = action[:1].lower() == self.letter
        return posttrain.Step([], float(right), terminated=True, truncated=False, info={"success": right})


policy = posttrain.Policy("packaged:smollm2-135m", lora={"rank": 8})
engine = posttrain.LocalEngine(policy)
env = posttrain.make_env(Letters)
learner = posttrain.Learner(policy, learning_rate=3e-3, loss="ppo")


def report(when: str) -> None:
    episodes = posttrain.rollout(engine, env, seeds=range(32), max_tokens=2, run_seed=1)
    rate = posttrain.summarize(episodes).success
    print(f"{when}: success {rate.value:.0%}, 95% interval [{rate.low:.0%}, {rate.high:.0%}], n = {rate.n}")


report("before")
for step in range(4):
    episodes = posttrain.rollout(engine, env, seeds=[0, 1], episodes_per_group=8, max_tokens=2, step=step)
    metrics = learner.update(episodes, posttrain.advantages(episodes, "rloo"))
    print(f"step {step}: return {sum(e.total_reward for e in episodes) / len(episodes):.2f}")
report("after")
