"""The output of --dry-run about batches, memory and keys without effect."""

from io import StringIO

import pytest
import torch
from rich.console import Console

from posttrain.cli.main import main
from posttrain.cli.stages import with_planned_engine
from posttrain.errors import InputError
from posttrain.models import load
from posttrain.planning.dry_run import batch_arithmetic, show_plan
from posttrain.planning.memory import ModelSizes, memory_estimate
from posttrain.planning.model_sizes import model_sizes, published_sizes
from posttrain.recipe.compose import dump_recipe, load_recipe
from posttrain.recipe.credit import CREDITS
from posttrain.recipe.plan import DEVICES, Device, device_of
from posttrain.recipe.warnings import recipe_warnings
from posttrain.training import stage as training_stage
from tests.conftest import save_tiny_model

SIZES = ModelSizes(
    parameters=1000, layers=2, hidden=8, intermediate=16, heads=4, key_value_heads=2, head_size=2, vocabulary=100
)


def recipe_of(*overrides, stage="rl"):
    return load_recipe([], list(overrides), stage)


def test_plan_describes_batches():
    words = "steps=10 rollout.groups_per_step=6 rollout.episodes_per_group=4 learner.updates_per_step=3"
    lines = batch_arithmetic(recipe_of(*words.split(), "learner.epochs_per_step=2", "evaluation.every=4"))
    numbers = [
        "6 groups x 4 episodes = 24 episodes per step",
        "3 updates per step x 2 epochs = 6 optimizer steps per step, each on about 8 episodes",
        "passes of at most 4096 tokens; at most 4 per optimizer step, with episodes of 2048 tokens",
        "10 steps: 240 episodes and 60 optimizer steps",
        "training on seeds 0..99999, 60 of them used",
        "64 episodes on the held-out seeds 1000000..1000063, before, 2 times during and after",
        "256 episodes on the held-out seeds 2000000..2000255, before and after",
    ]
    assert len(lines) == len(numbers)
    assert all(part in line for part, line in zip(numbers, lines, strict=True))


@pytest.mark.parametrize("name", CREDITS.names())
def test_every_credit_has_a_plan(name):
    words = {
        "maxrl": ["environment.type=frozen_lake", "environment.format.penalty=0"],
        "gdpo": ["credit.weights.return=1"],
    }
    assert batch_arithmetic(recipe_of(f"credit.type={name}", *words.get(name, [])))


PPO = ["credit.type=gae", "steps=10", "rollout.groups_per_step=6", "rollout.episodes_per_group=1"]
PTX = ["ptx.data.train=[a.jsonl,b.jsonl]", "ptx.rows_per_update=5", "ptx.data.max_tokens=2000"]


@pytest.mark.parametrize(
    ("backbone", "says"),
    [
        ("separate", "the critic makes 20 optimizer steps on the same episodes, in separate forward"),
        ("shared", "the value head makes 20 optimizer steps in the forward"),
    ],
)
def test_plan_describes_a_critic_and_supervised_rows(backbone, says):
    plain = [*PPO, "learner.epochs_per_step=2", f"critic.backbone={backbone}"]
    assert any(line.startswith(says) for line in batch_arithmetic(recipe_of(*plain)))
    lines = batch_arithmetic(recipe_of(*plain, *PTX, "critic.updates_before_policy=3"))
    assert any(line.startswith(says) and "the first 3 without the policy, which makes 17" in line for line in lines)
    says = "each optimizer step of the policy also uses 5 rows from a.jsonl, b.jsonl, at most 3 additional"
    assert any(line.startswith(says) for line in lines)
    without = batch_arithmetic(recipe_of("credit.type=rloo", "steps=10", f"critic.backbone={backbone}"))
    assert not any("critic" in line or "head" in line or "rows" in line for line in without)


def test_plan_describes_unit_credit():
    for credit, says in (
        ("{type: prefix}", "prefix rewards for K units per answer, weight 0.8: 1 pass of the reward model more"),
        ("{type: unit_rewards}", "unit_rewards rewards for K units per answer, weight 1: no text for the reward"),
        ("{type: loo, beta: 0.5}", "loo advantages for K units per answer, weight 0.5: K + 1 texts"),
    ):
        lines = batch_arithmetic(recipe_of(*PPO, "reward.path=rm", f"unit_credit={credit}"))
        assert sum(says in line for line in lines) == 1


def test_forward_passes_contain_whole_episodes():
    # Two of 2000 tokens go into 4096; the third of three does not go into 5000.
    for budget, passes in ((4096, 3), (5000, 3), (6000, 2)):
        recipe = recipe_of(*PPO, "rollout.tokens_per_episode=2000", f"learner.tokens_per_batch={budget}")
        expected = f"at most {passes} per optimizer step, with episodes of 2000 tokens"
        assert any(expected in line for line in batch_arithmetic(recipe)), budget


def test_sft_counts_its_updates():
    words = ["environment.type=bandit", "experts.seeds.count=50", "rows_per_update=16", "epochs=3"]
    lines = batch_arithmetic(recipe_of(*words, stage="sft"))
    assert lines[0] == "50 traces of the optimal policy, 3 epochs, 16 traces per update: 12 updates"


def memory(*words, stage="rl"):
    """Item -> bytes."""
    return {what: count for what, (count, _) in memory_estimate(recipe_of(*words, stage=stage), SIZES).items()}


def test_memory_counts_stored_tensors():
    sizes = memory("kl.coefficient=0.1", "engine.slots=3", "rollout.tokens_per_episode=100")
    assert sizes["weights"] == sizes["gradients"] == sizes["reference model"] == 4000
    assert sizes["AdamW state"] == 8000
    assert sizes["key/value cache, at most"] == 3 * 100 * 2 * 2 * (2 * 2) * 4
    assert sizes["logits"] == 4 * 512 * 100
    assert "reference model" not in memory()
    assert set(memory(stage="evaluate")) == {"weights", "key/value cache, at most"}
    lora = ("model.lora={rank: 2, targets: [q_proj, down_proj]}", "kl.coefficient=0.1")
    assert recipe_of(*lora).model.trained_parameters(SIZES) == 2 * 2 * ((8 + 8) + (16 + 8))
    assert memory(*lora)["reference model"] == 0


def test_memory_of_a_reference_model():
    def copy(*changes, stage="rl"):
        return memory(*changes, stage=stage).get("reference model")

    pairs = ("data.train=[rows.jsonl]",)
    assert copy(*pairs, stage="dpo") is None  # computed before training
    for later in (["loss.type=kto"], ["reference.update_every=8"], ["data.streaming=true", "steps=5"]):
        assert copy(*pairs, *later, stage="dpo") is not None
    moved = ("kl.coefficient=0.1", "kl.reference.update_every=8")
    assert copy(*moved) == copy(*moved, "kl.reference.mix=0.5") == 4 * 1000
    assert copy(*moved, "model.dtype=bfloat16") == 2 * 1000
    assert copy(*moved, "model.dtype=bfloat16", "kl.reference.mix=0.5") == (2 + 4) * 1000  # an average in float32


def test_memory_of_a_critic():
    def row(*changes):
        return memory(*PPO, *changes)["critic"]

    assert row() == (4 + 4 + 8) * 1000  # weights, gradients, two numbers of AdamW
    assert row("critic.dtype=bfloat16") == (2 + 2 + 6 + 8) * 1000  # and masters with their gradients
    adapters = 2 * 2 * ((8 + 8) + (16 + 8))
    lora = "critic.lora={rank: 2, targets: [q_proj, down_proj]}"
    assert row(lora) == 4 * 1000 + (4 + 8) * adapters
    assert row(lora, "critic.dtype=bfloat16") == 2 * 1000 + (2 + 6 + 8) * adapters
    alone = memory("credit.type=rloo")
    for changes in ([], PTX, ["critic.updates_before_policy=3"]):  # rows and values take no passes that are larger
        assert memory(*PPO, "critic.backbone=shared", *changes) == alone | {"critic": 8 * (4 + 4 + 8)}


def test_memory_of_the_models_whose_entropies_cut_units():
    units = [*PPO, "reward.path=rm", "unit_credit.type=prefix"]
    cut = "unit_credit.segmenter={type: entropy, threshold: 1.5}"
    assert "reference model" not in memory(*units)
    assert "reference model" in memory(*units, cut)
    found = memory("data.train=pairs.jsonl", "units.segmenter={type: entropy, threshold: 1.5}", stage="reward")
    assert found["language model for entropies"] == found["weights"]


def test_activations_are_those_of_the_wider_of_policy_and_critic():
    def activations(*changes):
        return memory(*changes)["activations, roughly"]

    halves = "model.dtype=bfloat16"
    assert activations(halves, *PPO) == 2 * activations(halves)
    assert activations(halves, *PPO, "critic.dtype=bfloat16") == activations(halves)
    assert activations(halves, *PPO, "critic.backbone=shared") == activations(halves)
    assert activations("model.gradient_checkpointing=true") < activations()


def test_sizes_of_a_directory_are_those_of_its_weights(tmp_path):
    from transformers import AutoModelForCausalLM

    model_directory = save_tiny_model(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(model_directory)
    sizes = model_sizes(str(model_directory))
    assert sizes is not None
    assert sizes.parameters == sum(parameter.numel() for parameter in model.parameters())
    assert (sizes.layers, sizes.hidden) == (model.config.num_hidden_layers, model.config.hidden_size)
    for file in model_directory.glob("*.safetensors"):
        file.unlink()
    counted = model_sizes(str(model_directory))
    assert counted is not None
    assert counted.parameters == sizes.parameters


@pytest.mark.parametrize(
    ("words", "lines"),
    [
        (["environment.type=bandit"], ["environment: bandit", "tasks: seeds 0..99999"]),
        (
            ["environment.type=text_task", "environment.prompts=[a.jsonl,b.jsonl]", "environment.reward=exact"],
            ["environment: text_task", "tasks: known when they are read (a.jsonl, b.jsonl)"],
        ),
    ],
)
def test_a_plan_starts_with_what_is_trained_on_what_and_may_lack_the_sizes(words, lines):
    recipe = recipe_of("model.path=nobody/no-such-model", *words)
    for full in (False, True):
        console = Console(file=StringIO(), width=200)
        show_plan(recipe, model_sizes(recipe.model.path), console, full=full)
        said = console.file.getvalue()
        assert said.splitlines()[:2] == lines
        assert said.splitlines()[2].startswith("model: nobody/no-such-model, ")
        assert "nobody/no-such-model are not on this machine and its sizes are not known by name, so its memory" in said
        assert "64 episodes per step" in said


def test_a_broken_model_directory_is_named(tmp_path):
    with pytest.raises(InputError, match=r"is not a model directory: it has no config.json"):
        model_sizes(str(tmp_path))
    (tmp_path / "config.json").write_text('{"model_type": "llama"}')
    (tmp_path / "model.safetensors").write_bytes(b"\x09\x00")
    with pytest.raises(InputError, match=r"model.safetensors is not a complete safetensors file; download it again"):
        model_sizes(str(tmp_path))
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    with pytest.raises(InputError, match=r"x.gguf is not a complete GGUF model"):
        model_sizes(str(tmp_path / "x.gguf"))


@pytest.mark.parametrize(
    ("stage", "overrides", "expected"),
    [
        ("rl", ["kl.apply_to=reward"], "kl.apply_to has no effect: kl.coefficient is 0"),
        ("rl", ["loss.clip_high=0.3"], "loss.clip_high has no effect: with one update per step the ratio is always 1"),
        ("rl", ["evaluation.sampling.top_k=5"], "evaluation.sampling.top_k has no effect: evaluation.sampling.temp"),
        ("rl", ["evaluation.every=101"], "evaluation.every has no effect: the run ends after 100 steps"),
        ("sft", ["environment.type=bandit", "learner.epochs_per_step=2"], "learner.epochs_per_step has no effect:"),
        ("evaluate", ["evaluation.seeds.start=5"], "evaluation.seeds has no effect: stage is evaluate"),
        ("rl", ["loss.type=gspo", "loss.clip_low=0.2", "learner.updates_per_step=2"], "loss.type gspo clips"),
        ("rl", ["optimizer.warmup_updates=100"], "optimizer.warmup_updates 100 is not below the 100 updates"),
        ("rl", ["model.head_dtype=float32", "model.device=cpu"], "model.head_dtype has no effect: model.dtype"),
        (
            "reward",
            ["data.train=a.jsonl", "model.head_dtype=float32", "model.dtype=bfloat16"],
            "model.head_dtype has no effect: rewards are computed in float32",
        ),
        ("rl", ["model.head_dtype=float32", "model.dtype=bfloat16", "engine.type=vllm"], "model.head_dtype=float32"),
        ("rl", ["model.lora.dropout=0.1"], "model.lora.dropout above 0 makes the policies of engine and learner"),
        ("rl", ["rollout.sampling.temperature=0"], "rollout.sampling.temperature 0 makes all episodes of a group"),
        ("rl", ["critic.backbone=shared"], "critic has no effect: credit.type rloo uses no values"),
        ("rl", ["credit.type=gae", "critic.backbone=shared", "critic.clip=0.5"], "critic.clip has no effect:"),
        ("rl", ["credit.type=gae", "critic.lora={export: adapter}"], "critic.lora.export has no effect: the critic"),
        (
            "rl",
            ["credit.type=gae", "critic.updates_before_policy=60", "optimizer.warmup_updates=40"],
            "optimizer.warmup_updates 40 is not below the 40 updates of the run",
        ),
    ],
)
def test_notes(stage, overrides, expected):
    found = recipe_warnings(recipe_of(*overrides, stage=stage))
    assert [note for note in found if note.startswith(expected)] != [], found


@pytest.mark.parametrize(
    ("stage", "needed"),
    [
        ("rl", []),
        ("rl", ["credit.type=gae", "critic.backbone=shared", *PTX]),
        ("sft", ["environment.type=bandit"]),
        ("reward", ["data.train=a.jsonl", "data.held_out=5"]),
        ("dpo", ["data.train=a.jsonl", "data.validation=[b.jsonl]"]),
        ("evaluate", []),
    ],
)
def test_defaults_give_no_warning(stage, needed, tmp_path):
    assert recipe_warnings(recipe_of(*needed, stage=stage)) == []
    (tmp_path / "r.yaml").write_text(dump_recipe(recipe_of(*needed, stage=stage)))
    assert recipe_warnings(load_recipe([str(tmp_path / "r.yaml")], [], stage)) == []


def planned_on(device, *words):
    console = Console(file=StringIO(), width=300)
    show_plan(recipe_of("model.path=Qwen/Qwen3-1.7B", *words), published_sizes("Qwen3-1.7B"), console, device)
    return console.file.getvalue()


@pytest.mark.parametrize(
    ("keys", "shown"),
    [
        (["evaluation.metric=success"], "20 tasks show changes from 49 points of success, in 80% of runs"),
        (
            ["evaluation.metric=return"],
            "20 tasks show changes from 0.67 standard deviations of the changes, in 80% of runs",
        ),
    ],
)
def test_a_dry_run_says_which_change_its_final_tasks_show(keys, shown):
    keys += ["evaluation.final_seeds.start=2000000", "evaluation.final_seeds.count=20"]
    assert any(line.endswith(shown) for line in batch_arithmetic(recipe_of(*keys)))


def test_activations_and_a_sleeping_engine_are_not_added_up():
    fits = planned_on(DEVICES["h100"], "engine.type=vllm")
    assert "the most at one time, while sampling" in fits
    assert "the run needs an estimated" not in fits
    more = planned_on(DEVICES["h100"], "engine.type=vllm", "engine.gpu_memory_utilization=0.9")
    assert "it fits with hardware.offload=rollouts\n" in more
    rollouts = ["engine.gpu_memory_utilization=0.9", "hardware.offload=rollouts"]
    assert "the run needs an estimated" not in planned_on(DEVICES["h100"], "engine.type=vllm", *rollouts)


def test_the_default_sft_of_a_4b_model_says_what_makes_it_fit_on_an_h100():
    def planned(*keys):
        recipe = recipe_of("model.path=Qwen/Qwen3-4B", "data.train=a.jsonl", *keys, stage="sft")
        shown = Console(file=StringIO(), width=300)
        show_plan(recipe, published_sizes("Qwen/Qwen3-4B"), shown, DEVICES["h100"])
        return shown.file.getvalue()

    text = planned()
    assert "parameters of 2 bytes" in text
    (warning,) = [line for line in text.splitlines() if "the run needs an estimated" in line]
    keys = warning.rpartition("it fits with ")[2].split()
    assert keys == ["model.gradient_checkpointing=selective"]
    assert "the run needs an estimated" not in planned(*keys)


def test_a_plan_names_a_gpu_that_is_too_small():
    assert "GiB  an estimate; a100 has 74.51 GiB" in planned_on(DEVICES["a100"], "engine.slots=2000")
    assert "a100 has" not in planned_on(DEVICES["a100"])


def test_the_gpu_of_the_command_line_is_a_name_or_gigabytes(monkeypatch, capsys):
    monkeypatch.setattr("posttrain.planning.model_sizes.model_sizes", lambda path: published_sizes("Qwen3-4B"))
    assert main(["rl", "environment.type=bandit", "--dry-run", "--full", "--on", "24"]) == 0
    assert "a GPU of 24 GB has 22.35 GiB" in capsys.readouterr().out
    assert main(["rl", "environment.type=bandit", "--on", "h200"]) == 2
    assert device_of("h100") == Device("h100", 80e9)
    assert device_of("47.5").memory == 47.5e9
    for word in ("nan", "-3", "0", "1e9", "true", "h100.yaml", ""):
        with pytest.raises(InputError, match="--on"):
            device_of(word)


def test_a_plan_for_a_gpu_names_its_default_engine(capsys):
    note = "engine.type is local in this plan; with vLLM installed, a run on a GPU uses vLLM"

    def noted(*words):
        assert main(["rl", "environment.type=bandit", "--dry-run", *words]) == 0
        return note in " ".join(capsys.readouterr().out.split())

    assert noted("--on", "h100")
    assert not noted("--on", "h100", "engine.type=local")
    assert not noted("--on", "h100", "engine.type=vllm")
    assert not noted()


def test_a_plan_on_a_gpu_with_vllm_is_that_of_the_run(monkeypatch):
    monkeypatch.setattr(load, "resolve_device", lambda name: torch.device("cuda"))
    monkeypatch.setattr(training_stage, "find_spec", lambda name: object())
    recipe = load_recipe([], ["environment.type=bandit", "hardware.processes=2"], "rl")
    out = StringIO()
    planned = with_planned_engine(recipe, DEVICES["h100"], Console(file=out, width=200))
    assert (planned.engine.type, planned.engine.servers) == ("vllm", 2)
    assert "engine.type is vllm" in out.getvalue()
    assert "engine.type is local" not in out.getvalue()
