"""`posttrain.rl(engine=...)`: a custom engine in a run."""

from dataclasses import replace

import pytest

import posttrain
from posttrain.errors import InputError


class OneToken(posttrain.LocalEngine):
    async def generate(self, request):
        return await super().generate(replace(request, max_tokens=1))


def keys(model, place):
    return {
        "name": "run",
        "runs": str(place),
        "steps": 1,
        "model": {"path": str(model)},
        "environment": {"type": "bandit"},
        "rollout": {"groups_per_step": 2, "episodes_per_group": 2, "tokens_per_turn": 5},
        "evaluation": {
            "every": 0,
            "start": False,
            "seeds": {"start": 1_000_000, "count": 1},
            "final_seeds": {"start": 2_000_000, "count": 1},
        },
    }


def test_a_run_samples_with_the_engine_that_the_function_makes(tiny_model, tmp_path):
    made = []

    def engine(policy, recipe):
        made.append(recipe)
        return OneToken(policy, recipe)

    result = posttrain.rl(engine=engine, **keys(tiny_model, tmp_path))
    assert made
    assert made[0].slots == 64
    assert {int(stream.sampled.sum()) for episode in result.episodes(1) for stream in episode.streams} == {1}


def test_a_mapping_is_the_section_of_the_recipe_and_a_function_needs_one_process(tiny_model, tmp_path):
    result = posttrain.rl(engine={"slots": 3}, **keys(tiny_model, tmp_path))
    assert "slots: 3" in (result.run / "recipe.yaml").read_text()
    with pytest.raises(InputError, match="`engine` is a function of this process"):
        posttrain.rl(engine=OneToken, hardware={"processes": 2}, **keys(tiny_model, tmp_path / "other"))
