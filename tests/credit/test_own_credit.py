"""A credit of a user, written and registered in this file alone, in both forms: a function, and a section with checks."""

from typing import Literal

import numpy as np
import pytest
from pydantic import Field

import posttrain
from posttrain.cli.main import main
from posttrain.errors import InputError
from posttrain.recipe.compose import load_recipe
from posttrain.recipe.credit import CREDITS, Credit
from posttrain.recipe.metrics import Metric
from posttrain.recipe.warnings import recipe_warnings


@pytest.fixture
def toys(monkeypatch):
    monkeypatch.setattr(CREDITS, "_kinds", {name: CREDITS.find(name) for name in CREDITS.names()})

    @posttrain.register_credit("toy_rank", compared_with="group", metrics=(Metric("credit/toy", "a toy"),))
    def toy_rank(returns, groups, *, scale: float = 1.0):
        """The rank of an episode in its group."""
        return np.array(
            [scale * (returns[groups == group] < r).sum() for r, group in zip(returns, groups, strict=True)]
        )

    @posttrain.register_credit("toy_late")
    class ToyLateCredit(Credit):
        """Rewards of the last tokens of an episode."""

        type: Literal["toy_late"] = "toy_late"
        """`toy_late`: the reward of each of the last `tokens` tokens."""
        tokens: int = Field(1, ge=1)
        """Number of tokens with credit."""

        def compute(self, rewards):
            return [np.where(np.arange(len(r)) >= len(r) - self.tokens, r, 0.0) for r in rewards]

        def problems(self, recipe):
            longest = recipe.rollout.tokens_per_turn
            return [f"`credit.tokens` is above {longest}; lower it"] if self.tokens > longest else []

        def warnings(self, recipe):
            return ["credit.tokens 1 is little"] if self.tokens == 1 else []


def run(tiny_model, folder, credit):
    return posttrain.rl(
        name=credit["type"],
        runs=str(folder),
        steps=1,
        model={"path": str(tiny_model), "threads": 1},
        environment={"type": "bandit"},
        credit=credit,
        rollout={"groups_per_step": 2, "episodes_per_group": 3, "tokens_per_turn": 4},
        evaluation={"every": 0, "final_seeds": {"start": 2_000_000, "count": 2}},
    )


def test_a_function_is_used_in_a_run(toys, tiny_model, tmp_path):
    result = run(tiny_model, tmp_path, {"type": "toy_rank", "scale": 0.5})
    assert result.metrics[0]["credit/without_baseline"] == 0.0
    with pytest.raises(InputError, match="compares the episodes of a group"):
        load_recipe([], ["credit.type=toy_rank", "rollout.episodes_per_group=1"], "rl")


def test_a_section_is_used_in_a_run(toys, tiny_model, tmp_path):
    assert "credit/without_baseline" not in run(tiny_model, tmp_path, {"type": "toy_late", "tokens": 2}).metrics[0]


def test_a_section_checks_and_warns(toys, tiny_model, tmp_path, capsys):
    with pytest.raises(InputError, match=r"`credit\.tokens` is above 64"):
        load_recipe([], ["credit.type=toy_late", "credit.tokens=65"], "rl")
    recipe = load_recipe([], ["credit.type=toy_late"], "rl")
    assert "credit.tokens 1 is little" in recipe_warnings(recipe)
    assert recipe.credit.rewards_of == "token"
    words = ["rl", "environment.type=bandit", f"model.path={tiny_model}", f"runs={tmp_path}", "credit.type=toy_late"]
    assert main([*words, "--dry-run"]) == 0
    assert "credit.tokens 1 is little" in capsys.readouterr().out


def test_both_are_documented(toys, capsys):
    assert main(["recipe", "credit"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "`toy_rank`: The rank of an episode in its group." in shown
    assert "Number of tokens with credit." in shown
