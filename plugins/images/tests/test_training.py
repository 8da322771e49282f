"""Every training stage on rows and environments with images, resume to the same bits, export, and what a run stores."""

import json
import sys

import numpy as np
import pytest
import torch
from plugins.images.tests.conftest import encoded, part, picture, text
from safetensors.torch import load_file

import posttrain
from posttrain.data.messages import messages_of
from posttrain.data.rendering import Renderer
from posttrain.environments.players import joined, play_episode
from posttrain.environments.protocol import Environment, Observation, Step
from posttrain.errors import InputError, PosttrainError
from posttrain.evaluation.judges import _cut
from posttrain.evaluation.predictions import read_predictions
from posttrain.images import EDGE, FIRST, MARK, key_of
from posttrain.recipe.components import EnvironmentRecipe
from posttrain.recipe.compose import load_recipe
from posttrain.rollout.store import read_episodes
from posttrain.training.experts import expert_episodes, expert_rows
from tests.training import async_runs

SETTINGS = {"optimizer": {"learning_rate": 1e-3}, "checkpoint": {"every": 1, "keep_state": "always"}}


AGENT = """
import json, os, urllib.request
body = json.dumps({"messages": json.loads(os.environ["POSTTRAIN_MESSAGES"])}).encode()
headers = {"Authorization": "Bearer " + os.environ["OPENAI_API_KEY"]}
request = urllib.request.Request(os.environ["OPENAI_BASE_URL"] + "/chat/completions", body, headers)
print(json.load(urllib.request.urlopen(request))["choices"][0]["message"]["content"] + os.environ["POSTTRAIN_TASK"])
"""


def write_rows(folder, count=6):
    """Rows for every stage; images are files and bytes, and two rows have the same one."""
    (folder / "pictures").mkdir(parents=True, exist_ok=True)
    rows = []
    for number in range(count):
        image = picture(40, 64, number // 2)
        (folder / "pictures" / f"{number}.png").write_bytes(encoded(image))
        shown = part(image) if number % 2 else {"type": "image", "path": f"pictures/{number}.png"}
        prompt = [{"role": "user", "content": [shown, text("what shape?")]}]
        rows.append({"prompt": prompt, "completion": "red", "chosen": "a red one", "rejected": "none", "label": "red"})
    file = folder / "rows.jsonl"
    file.write_text("\n".join(map(json.dumps, rows)))
    return file


def weights(run):
    return {name: tensor for file in run.glob("model/*.safetensors") for name, tensor in load_file(file).items()}


@pytest.mark.parametrize("family", ["idefics3", pytest.param("qwen2_5_vl", marks=pytest.mark.slow), "gemma3"])
def test_sft_dpo_and_export(model_of, tmp_path, family):
    from transformers import AutoImageProcessor, AutoModelForImageTextToText, AutoTokenizer

    file = write_rows(tmp_path / "data")
    shared = {"runs": str(tmp_path), "steps": 2, "rows_per_update": 4, **SETTINGS}
    posttrain.sft(model={"path": str(model_of(family))}, data={"train": str(file)}, name="sft", **shared)
    # The images of the rows, each once.
    assert len(list((tmp_path / "sft" / "images").iterdir())) == 3
    before, after = load_file(model_of(family) / "model.safetensors"), weights(tmp_path / "sft")
    changed = [name for name, tensor in after.items() if not torch.equal(tensor, before[name])]
    assert any("vision" in name or "visual" in name for name in changed)
    exported = tmp_path / "sft" / "model"
    posttrain.dpo(model={"path": str(exported)}, data={"train": str(file)}, name="dpo", **shared)
    final = tmp_path / "dpo" / "model"
    model = AutoModelForImageTextToText.from_pretrained(final)
    assert type(model).__module__.startswith("transformers.models.")
    AutoImageProcessor.from_pretrained(final, backend="pil")
    assert (
        type(AutoTokenizer.from_pretrained(final)).__name__
        == type(AutoTokenizer.from_pretrained(model_of(family))).__name__
    )
    config = json.loads((final / "config.json").read_text())
    assert config["architectures"] == [type(model).__name__]
    assert json.loads((final / "preprocessor_config.json").read_text()) == json.loads(
        (model_of(family) / "preprocessor_config.json").read_text()
    )


def test_lora_trains_the_decoder_and_the_encoder(model_of, tmp_path):
    file = write_rows(tmp_path / "data")
    model = {"path": str(model_of("idefics3")), "lora": {"rank": 2, "export": "merged"}}
    posttrain.sft(
        model=model, data={"train": str(file)}, name="sft", runs=str(tmp_path), steps=2, rows_per_update=4, **SETTINGS
    )
    assert weights(tmp_path / "sft").keys() == load_file(model_of("idefics3") / "model.safetensors").keys()


def test_reward_models(model_of, tmp_path):
    """Gemma 3 has one in transformers. Of the others, transformers could not load it again."""
    file = write_rows(tmp_path / "data")
    shared = {"runs": str(tmp_path), "steps": 2, "rows_per_update": 4, **SETTINGS}
    posttrain.reward(model={"path": str(model_of("gemma3"))}, data={"train": str(file)}, name="reward", **shared)
    assert "score.weight" in weights(tmp_path / "reward")
    with pytest.raises(InputError, match="AutoModelForSequenceClassification"):
        posttrain.reward(model={"path": str(model_of("idefics3"))}, data={"train": str(file)}, name="other", **shared)


class Album(Environment):
    """Two pictures, one after the other. The reward is the share of the letter e in the answers."""

    class Recipe(EnvironmentRecipe):
        type: str = f"{__file__}:Album"

    def reset(self, seed: int) -> Observation:
        self.seed, self.turn = seed, 0
        return Observation([{"role": "user", "content": [part(picture(40, 64, seed)), text("what is it?")]}])

    def step(self, action: str) -> Step:
        self.turn += 1
        reward = action.count("e") / max(len(action), 1)
        shown = [{"role": "user", "content": [part(picture(32, 32, self.seed)), text("and this?")]}]
        return Step([] if self.turn > 1 else shown, reward, self.turn > 1, False, {"success": reward > 0})

    def expert(self) -> str:
        return "red"


def playing(model, runs, **changes):
    """A recipe of RL on albums."""
    rollout = {"groups_per_step": 2, "episodes_per_group": 3, "tokens_per_turn": 6, "tokens_per_episode": 400}
    recipe = {"model": {"path": str(model), "threads": 1}, "environment": {"type": f"{__file__}:Album"}}
    held_out = {"seeds": {"start": 1000, "count": 1}, "final_seeds": {"start": 2000, "count": 2}}
    recipe |= {"rollout": rollout, "evaluation": {"every": 0, **held_out}, "runs": str(runs)}
    recipe |= {"seeds": {"start": 0, "count": 4}}
    return recipe | changes


@pytest.mark.parametrize("family", [pytest.param("idefics3", marks=pytest.mark.slow), "qwen3_vl"])
def test_rl_with_several_turns_resumes_to_the_same_bits(model_of, tmp_path, family):
    recipe = playing(model_of(family), tmp_path, **SETTINGS)
    posttrain.rl(recipe, name="whole", steps=4)
    posttrain.rl(recipe, name="halves", steps=2)
    posttrain.rl(resume=tmp_path / "halves", steps=4)
    whole, halves = weights(tmp_path / "whole"), weights(tmp_path / "halves")
    assert all(torch.equal(tensor, halves[name]) for name, tensor in whole.items())
    files = sorted((tmp_path / "whole" / "episodes").glob("*.train.jsonl.zst"))
    stored = [read_episodes(file) for file in files]
    for episode in [one for step in stored for one in step.episodes]:
        [stream] = episode.streams
        shown = stream.ids >= FIRST
        assert not stream.sampled[shown].any()
        keys = list(dict.fromkeys(key_of(int(token)) for token in stream.ids[shown]))
        assert keys == [key for one in episode.messages for key in MARK.findall(one["content"])]
        assert all((tmp_path / "whole" / "images" / f"{key}.png").is_file() for key in keys)
    mismatches = [json.loads(line).get("policy/mismatch") for line in (tmp_path / "whole" / "metrics.jsonl").open()]
    assert max(filter(None, mismatches), default=0.0) < 1e-4
    assert np.isfinite([float(one) for one in filter(None, mismatches)]).all()


def test_rollouts_ahead_of_the_learner_match_one_thread(model_of, tmp_path):
    """The encoder's weights too reach the thread that samples, at the step that its tokens' versions name."""
    recipe = playing(model_of("qwen3_vl"), tmp_path, stage="rl", steps=3, optimizer={"learning_rate": 1e-2})
    recipe["rollout"]["async_rollouts"] = 1
    ahead = async_runs.train({**recipe, "name": "ahead"})
    one = async_runs.train_with(async_runs.OneThread, {**recipe, "name": "one"})
    assert async_runs.results(ahead) == async_runs.results(one)
    versions = [values for file in async_runs.results(ahead)[2].values() for stream in file for values in stream]
    assert max(versions) > 0
    before, after = load_file(model_of("qwen3_vl") / "model.safetensors"), weights(ahead.path)
    assert any("visual" in name and (tensor - before[name]).abs().max() > 5e-3 for name, tensor in after.items())


def test_experts_players_and_teachers_see_the_pictures(model_of, policy_of, tmp_path):
    recipe = load_recipe([], [f"environment.type={__file__}:Album", "model.path=m"], "sft")
    policy = policy_of("idefics3")
    for episode in expert_episodes(recipe, [0, 1], Renderer(policy.tokenizer, policy.end_tokens)):
        keys = {key_of(int(token)) for token in episode.streams[0].ids if token >= FIRST}
        assert keys == {key for one in episode.messages for key in MARK.findall(one["content"])}
        assert len(keys) == 2
    played = play_episode(Album, recipe.environment, 0, lambda _, seen: joined(seen.newest), 2)
    assert [len(MARK.findall(answer)) for answer in played.answers] == [1, 1]
    [row] = json.loads(json.dumps(expert_rows(recipe.environment, range(1), "optimal", "episode", 0)))
    assert row["messages"][0]["content"][0]["type"] == "image"
    posttrain.distill(playing(model_of("idefics3"), tmp_path, teacher={"path": str(model_of("idefics3"))}), steps=1)


def test_agents_and_predictions_have_the_pictures(model_of, tmp_path, monkeypatch):
    (tmp_path / "agent.py").write_text(AGENT)
    task = {"type": "text_task", "prompts": str(write_rows(tmp_path / "data")), "reward": "exact"}
    agent = {"command": f"{sys.executable} {tmp_path / 'agent.py'}"}
    recipe = playing(model_of("idefics3"), tmp_path, environment=task, agent=agent, steps=1, seeds={})
    recipe["evaluation"] = {"every": 0}  # of the rows
    posttrain.rl(recipe, name="agents")
    stored = read_episodes(tmp_path / "agents" / "episodes" / "step_000001.train.jsonl.zst").episodes
    assert all((episode.streams[0].ids >= FIRST).any() for episode in stored)
    monkeypatch.setattr("posttrain.rollout.agents.worker._MAX_VARIABLE", 200)
    with pytest.raises(PosttrainError, match="images of its task"):
        posttrain.rl(recipe, name="large")
    asked = {"data": {"test": task["prompts"]}, "rollout": {"tokens_per_turn": 2}, "out": str(tmp_path / "a.jsonl")}
    posttrain.generate(model={"path": str(model_of("idefics3"))}, runs=str(tmp_path), name="asked", **asked)
    contents = [row.prompt[0]["content"] for row in read_predictions(asked["out"]).rows]
    assert len({MARK.search(one)[1] for one in contents}) == 3
    assert all(_cut(contents[0], count).count(EDGE) in (0, 2) for count in range(len(contents[0])))


def test_what_is_not_supported_is_refused_by_name(policy_of, model_of, tmp_path, monkeypatch):
    from posttrain.distributed import world
    from posttrain.engines.vllm.engine import VllmEngine
    from posttrain.models.policy import Policy
    from posttrain.publishing.gguf import write_gguf
    from posttrain.recipe.hardware import HardwareRecipe

    with pytest.raises(InputError, match=r"engine\.type: vllm does not sample .* of gemma3 .* set it to local"):
        VllmEngine(policy_of("gemma3"))
    with pytest.raises(InputError, match="not idefics3"):
        write_gguf(model_of("idefics3"), tmp_path / "model.gguf", "f16", "model")
    alone = world.current_world()
    monkeypatch.setattr(alone, "hardware", HardwareRecipe(processes=2, sequence_parallel=2))
    with pytest.raises(InputError, match="sequence_parallel=1"):
        Policy(str(model_of("idefics3")))


def test_a_model_without_its_processor_reads_text(model_of, tmp_path):
    """As before: the text of a composite model is trained, and a message with an image is refused."""
    import shutil

    from posttrain.models.policy import Policy

    shutil.copytree(model_of("gemma3"), tmp_path / "model")
    for name in ("preprocessor_config.json", "processor_config.json"):
        (tmp_path / "model" / name).unlink()
    policy = Policy(str(tmp_path / "model"))
    assert not hasattr(policy.tokenizer, "images")
    shown = messages_of([{"role": "user", "content": [part(picture()), text("?")]}], "messages")
    with pytest.raises(InputError, match="reads text only"):
        Renderer(policy.tokenizer, policy.end_tokens).prompt(shown)
