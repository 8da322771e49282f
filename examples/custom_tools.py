"""An environment with a tool: the policy asks for a capital and answers with it.

`python examples/custom_tools.py` plays the expert, imitates it for a few steps, and lets the model play. The same class works on
the command line: `posttrain rl environment.type=examples/custom_tools.py:Capitals`.
"""

import sys
from typing import Annotated

import posttrain
from posttrain import ToolEnvironment, calling


class Capitals(ToolEnvironment):
    """Name the capital of a country, which a tool returns."""

    capitals = {"Kenya": "Nairobi", "Peru": "Lima", "Nepal": "Kathmandu"}

    def begin(self, seed: int):
        self.country, self.asked = list(self.capitals)[seed % 3], False
        return [{"role": "user", "content": f"What is the capital of {self.country}?"}]

    def tools(self):
        return [self.capital]

    def capital(self, country: Annotated[str, "its English name"]) -> str:
        """The capital of a country."""
        if country not in self.capitals:
            raise ValueError(f"unknown country {country}")
        self.asked = True
        return self.capitals[country]

    def finish(self, answer: str):
        success = answer.strip() == self.capitals[self.country]
        return float(success), {"success": success}

    def expert(self) -> str:
        return self.capitals[self.country] if self.asked else calling(("capital", {"country": self.country}))


if __name__ == "__main__":
    model = sys.argv[1] if len(sys.argv) > 1 else "packaged:smollm2-135m"
    env = posttrain.make_env(Capitals)
    played = env()
    print(played.reset(0).messages[-1]["content"])
    while not (step := played.step(played.expert())).terminated:
        print(step.messages[-1]["role"], step.messages[-1]["content"])
    result = posttrain.sft(
        name="capitals",
        rows_per_update=4,
        model={"path": model, "lora": {"rank": 8}},
        environment={"type": Capitals, "max_turns": 3},
        experts={"seeds": {"start": 0, "count": 12}},
        rollout={"tokens_per_turn": 40, "tokens_per_episode": 600},
        evaluation={
            "every": 0,
            "seeds": {"start": 1_000_000, "count": 3},
            "final_seeds": {"start": 2_000_000, "count": 6},
        },
        overwrite=True,
    )
    for row in result.evaluation:
        print(f"{row['policy']}: success {row['success']:.0%}, n = {row['n']}")
