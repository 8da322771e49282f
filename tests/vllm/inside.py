"""Run by vLLM's own interpreter: an engine under the same interpreter that is sent adapters alone. Writes what the test looks at as JSON."""

import json
import sys
from pathlib import Path

from posttrain.engines.factory import open_engine
from posttrain.engines.vllm.engine import sends_adapters
from posttrain.models.policy import Policy
from posttrain.recipe.engines import VllmEngineRecipe
from posttrain.recipe.model import LoraRecipe, ModelRecipe
from posttrain.recipe.rollout import SamplingRecipe
from tests.vllm.asking import GREEDY, SMALL, answers, distance, local_answers, move, request


def main(model: str, out: str) -> None:
    policy = Policy(ModelRecipe(path=model, lora=LoraRecipe(rank=4, alpha=8)))
    recipe = VllmEngineRecipe.model_validate(SMALL)
    assert sends_adapters(policy, recipe)
    sampling = SamplingRecipe(temperature=0.7)
    engine = open_engine(policy, recipe, 256, sampling)
    greedy = [request(number, GREEDY) for number in range(3)]
    warm = [request(number, sampling, tokens=30, seed=number) for number in range(3)]
    steps = []
    for version in range(3):
        if version:
            move(policy, seed=version)
        engine.load_weights(version)
        found, local = answers(engine, greedy), local_answers(policy, greedy)
        step = {"ids": [one.ids for one in found], "local": [one.ids for one in local]}
        step["versions"] = sorted({version for one in found for version in one.versions})
        step["distance"] = max(distance(policy, *pair) for pair in zip(warm, answers(engine, warm), strict=True))
        steps.append(step)
        engine.sleep()
    Path(out).write_text(json.dumps(steps))


if __name__ == "__main__":
    main(*sys.argv[1:])
