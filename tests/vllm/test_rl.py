"""`posttrain rl` with vLLM as its engine: steps that change the weights, under the interpreter that trains, and rollouts ahead."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM

from posttrain.models.reward import RewardModel
from posttrain.recipe.model import ModelRecipe
from posttrain.rollout.store import episodes_file, read_episodes
from tests.training import letters
from tests.vllm.asking import SMALL
from tests.vllm.interpreter import ROOT, needs_vllm, vllm_python
from tests.vllm.models import save_model

MEMORY = ROOT / "plugins/memory/src/posttrain_memory/recipes"
pytestmark = [needs_vllm, pytest.mark.slow, pytest.mark.timeout(1800)]  # 8 learners and 2 engines of 4 workers start


def trained(directory: Path, *keys: str) -> tuple[Path, list[dict[str, Any]]]:
    """The run in `directory` that `keys` ask for, and the lines of its metrics; a run that fails fails the test."""
    words = [f"model.path={save_model(directory / 'model', heads=4)}", f"environment.type={letters.__file__}"]
    words += [f"runs={directory}", "name=tiny", "loss.correction.weights=token", "optimizer.learning_rate=1e-3"]
    words += [f"engine.{name}={value}" for name, value in (SMALL | {"python": vllm_python()}).items()]
    words += ["rollout.tokens_per_episode=256", "rollout.groups_per_step=2", "rollout.episodes_per_group=4"]
    words += ["evaluation.seeds.count=2", "evaluation.final_seeds.count=2", "learner.tokens_per_batch=512"]
    command = [sys.executable, "-m", "posttrain.cli.main", "rl", *words, *keys]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1700, check=False)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-2000:]
    run = directory / "tiny"
    return run, [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


PLACED = {
    "servers": ["engine.tensor_parallel=2", "engine.servers=2"],
    # The published placements of the memory agent and of PPO, in as many processes; engines are in workers of Ray.
    "gspo": [str(MEMORY / "gspo_8gpu_published.yaml")],
    "ppo": [str(ROOT / "recipes/rlhf/ppo_8gpu_published.yaml"), "credit.type=gae", "hardware.offload=none"],
}


@pytest.mark.parametrize("name", PLACED)
def test_two_steps_of_rl_with_servers(name, tmp_path):
    keys = [*PLACED[name]]
    if name == "ppo":
        scorer = tmp_path / "scorer"
        RewardModel(ModelRecipe(path=str(save_model(tmp_path / "base")))).export(scorer)
        keys += [f"reward={{path: {scorer}, normalize: none}}", f"critic.path={scorer}"]
        keys.append("kl={apply_to: reward, coefficient: 0.01}")
    run, lines = trained(tmp_path, *keys, "environment.max_turns=2", "steps=2", "rollout.tokens_per_turn=8")
    steps = [line for line in lines if line["kind"] == "train"]
    assert len(steps) == 2
    for step in steps:
        assert step["tokens/sampled"] > 0
        assert step["tokens/reused"] > 0, "turns and groups share prompts"
        assert 0 < step["policy/mismatch"] < 1e-4
        assert step["optimizer/gradient_norm"] > 0
    # Engines of Ray may be on other machines.
    assert len(list((run / "logs").glob("vllm-*.log"))) == (2 if name == "servers" else 0)


def test_temperature_with_top_p_stores_the_distribution_that_was_sampled_from(tmp_path):
    """The sampling of the agent recipes: vLLM's log-probabilities are those of the nucleus, computed here from the logits."""
    sampling = ["rollout.sampling.temperature=0.7", "rollout.sampling.top_p=0.95"]
    run, lines = trained(tmp_path, "steps=1", "rollout.tokens_per_turn=8", *sampling)
    (step,) = [line for line in lines if line["kind"] == "train"]
    assert 0 < step["policy/mismatch"] < -np.log(0.95)
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "model")
    episodes = read_episodes(episodes_file(run / "episodes", 1, "train")).episodes
    truncated = 0
    for stream in (stream for episode in episodes for stream in episode.streams):
        with torch.no_grad():
            logits = model(torch.from_numpy(stream.ids)[None]).logits[0, :-1].float()
        probabilities, order = (logits / 0.7).softmax(-1).sort(descending=True, stable=True)
        kept = probabilities.cumsum(-1) - probabilities < 0.95
        nucleus = probabilities.where(kept, 0.0)
        expected = torch.zeros_like(nucleus).scatter(-1, order, nucleus / nucleus.sum(-1, keepdim=True)).log()
        targets = torch.from_numpy(stream.ids[1:])[:, None]
        found, sampled = stream.rollout_logprobs[1:], stream.sampled[1:]
        assert np.abs(expected.gather(-1, targets)[:, 0].numpy() - found)[sampled].max() < 1e-4
        truncated += int((~kept.all(-1)).numpy()[sampled].sum())
    assert truncated > 0


def test_asynchronous_steps_of_rl_with_a_server(tmp_path):
    keys = ["environment.max_turns=3", "steps=5", "rollout.async_rollouts=2", "rollout.on_new_weights=continue"]
    run, lines = trained(tmp_path, *keys, "rollout.tokens_per_turn=48", "evaluation.every=2")
    steps = [line for line in lines if line["kind"] == "train"]
    assert [line["policy/staleness_max"] <= 2 for line in steps] == [True] * 5
    assert sum(line["policy/staleness_max"] for line in steps) > 0
    assert [line["step"] for line in lines if line["kind"] == "evaluation"] == [0, 2, 4, 5]
    for step in range(1, 6):
        for episode in read_episodes(run / "episodes" / f"step_{step:06d}.train.jsonl.zst").episodes:
            assert max(0, step - 3) <= episode.versions.min() <= episode.versions.max() <= step - 1
    assert list((run / "async_rollouts").iterdir()) == []
