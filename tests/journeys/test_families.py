"""Families whose sequences cannot share a pass, or carry states: every command, and transformers' own generation."""

import asyncio
import json

import numpy as np
import pytest
import torch
import transformers

from posttrain.cli.main import main
from posttrain.engines.local.engine import LocalEngine
from posttrain.engines.protocol import Request
from posttrain.models.policy import Policy
from posttrain.recipe.rollout import SamplingRecipe
from tests.models.test_gate import saved

SLOW = ["jamba", "mamba", "falcon_h1", "gemma2", "gpt_oss", "lfm2", "recurrent_gemma", "nemotron_h", "llama4", "rwkv"]
SLOW += ["bloom"]


def write_rows(file, rows):
    file.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return file


@pytest.mark.parametrize("kind", ["qwen3_5", *(pytest.param(kind, marks=pytest.mark.slow) for kind in SLOW)])
def test_every_command_with_a_family(kind, tmp_path, capfd):
    def run(*words):
        assert main([*map(str, words), f"runs={tmp_path / 'runs'}"]) == 0, capfd.readouterr().err
        captured = capfd.readouterr()
        assert "Warning" not in captured.out + captured.err
        return captured.out

    base = saved(kind, tmp_path / "base")
    capfd.readouterr()
    short = ("rollout.tokens_per_turn=6", "evaluation.final_seeds.count=2")
    dialogs = [
        {"messages": [{"role": "user", "content": f"Goal {n}?"}, {"role": "assistant", "content": f"Up row {n}"}]}
        for n in range(4)
    ]
    train = write_rows(tmp_path / "rows.jsonl", dialogs)
    run("sft", f"model.path={base}", f"data.train={train}", "rows_per_update=2", "steps=1", "name=sft")
    model = tmp_path / "runs/sft/model"
    shared = ["credit.type=gae", "critic.backbone=shared"]
    credit = {"qwen3_5": ["credit.type=gae", f"critic.path={base}"], "recurrent_gemma": ["credit.type=rloo"]}
    words = ("rl", f"model.path={model}", "environment.type=bandit", f"ptx.data.train={train}", "steps=1",
        "rollout.groups_per_step=1", "rollout.episodes_per_group=2", "evaluation.every=0", *short)  # fmt: skip
    run(*words, "name=rl", *credit.get(kind, shared))
    if kind == "recurrent_gemma":  # its logits are capped in its own way, so no value head reads their states
        assert main([*words, *shared, "name=refused", f"runs={tmp_path / 'runs'}"]) == 2
        assert "critic.backbone" in capfd.readouterr().err
    model = tmp_path / "runs/rl/model"
    run("evaluate", f"model.path={model}", "environment.type=bandit", "name=evaluation", *short)
    run("generate", f"model.path={model}", f"data.test={train}", "name=answers", "rollout.tokens_per_turn=6")

    policy = Policy(str(model))
    prompt = np.random.default_rng(0).integers(10, 300, 12)

    async def sample():
        return await LocalEngine(policy).generate(Request(tuple(prompt.tolist()), SamplingRecipe(temperature=0), 0, 8))

    answer = asyncio.run(sample()).ids
    theirs = transformers.AutoModelForCausalLM.from_pretrained(model).eval()
    with torch.no_grad():
        for count in range(len(answer)):
            ids = torch.tensor([[*prompt.tolist(), *answer[:count]]])
            assert int(theirs(input_ids=ids, use_cache=False).logits[0, -1].argmax()) == answer[count]
