"""Every run of the agent experiments resolves without a network, with the numbers of the original."""

from pathlib import Path

import pytest

from posttrain.cli.main import main
from posttrain.recipe.compose import load_recipe

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "recipes" / "ragen"


@pytest.mark.parametrize(("name", "size"), [("bandit", "0.5B"), ("sokoban", "1.5B"), ("frozen_lake", "7B")])
@pytest.mark.parametrize("thinking", ["true", "false"])
def test_every_environment_and_format_resolves(name, size, thinking, capsys):
    words = [f"model.path=Qwen/Qwen2.5-{size}-Instruct", f"environment.format.thinking={thinking}"]
    assert main(["rl", str(FOLDER / f"{name}.yaml"), *words, f"name={name}-{size}", "--dry-run", "--full"]) == 0
    said = capsys.readouterr().out
    for text in ("= 32 episodes per step", f"path: Qwen/Qwen2.5-{size}-Instruct", f"thinking: {thinking}"):
        assert text in said


def test_the_original_numbers():
    """Those that documents.yaml does not have."""
    for name in ("bandit", "sokoban", "frozen_lake"):
        recipe = load_recipe([str(FOLDER / f"{name}.yaml")], [], "rl")
        kl, optimizer, sampling = recipe.kl, recipe.optimizer, recipe.rollout.sampling
        assert (recipe.credit.type, kl.estimator, kl.apply_to) == ("brpo", "k3", "loss")
        assert (optimizer.learning_rate, optimizer.betas, optimizer.weight_decay) == (1e-6, (0.9, 0.999), 0.01)
        assert (sampling.temperature, sampling.top_p, recipe.entropy.coefficient) == (0.7, 0.95, 0.001)
        assert (recipe.rollout.tokens_per_turn, recipe.model.gradient_checkpointing) == (400, True)


@pytest.mark.parametrize("name", ["sokoban_sft", "frozen_lake_sft"])
def test_supervised_recipes_resolve(name, capsys):
    assert main(["sft", str(FOLDER / f"{name}.yaml"), "--dry-run", "--full"]) == 0
    assert "2000 traces of the optimal policy, 5 epochs, 40 traces per update: 250 updates" in capsys.readouterr().out
