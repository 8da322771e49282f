"""The phases of a recipe's step, its idle time, and the output of `--dry-run --on DEVICE`."""

from dataclasses import fields
from io import StringIO

import pytest
from rich.console import Console

from posttrain.cli.main import main
from posttrain.errors import InputError
from posttrain.planning.devices import DEVICES, HOST_COPIES, HOST_COPY, Device, device_of
from posttrain.planning.dry_run import duration, show_plan
from posttrain.planning.memory import ModelSizes, memory_estimate
from posttrain.planning.phases import (
    Phase,
    episodes_at_most,
    evaluated_at_most,
    idle_share,
    plain,
    rows_at_most,
    step_phases,
    total_seconds,
)
from posttrain.planning.placement import ALONE, Placement
from posttrain.planning.work import Episodes, rows_of
from posttrain.recipe.compose import load_recipe

SIZES = ModelSizes(4_022_000_000, 36, 2560, 9728, 32, 8, 128, 151_936)
H200 = DEVICES["h200"]


def recipe_of(*overrides, stage="rl"):
    return load_recipe([], list(overrides), stage)


def names(*overrides, stage="rl", placement=None):
    return [
        phase.what for phase in step_phases(recipe_of(*overrides, stage=stage), SIZES, H200, placement or Placement())
    ]


SAMPLED = ["reading prompts", "sampling"]
LEARNED = ["forward and backward passes", "optimizer"]


def test_every_computation_has_a_phase():
    assert names() == [*SAMPLED, *LEARNED]
    assert names("kl.coefficient=0.1") == [*SAMPLED, "reference log-probabilities", *LEARNED]
    assert names("reward.path=rm") == [*SAMPLED, "reward model", *LEARNED]
    assert names("credit.type=gae") == [*SAMPLED, "values", "critic's updates", *LEARNED]
    assert names("credit.type=gae", "critic.backbone=shared") == names()
    assert names("credit.type=optimal_token_baseline") == [*SAMPLED, "energies of tokens", *LEARNED]
    assert names(placement=Placement(engines=1)) == [*SAMPLED, *LEARNED, "weights to the engines"]
    assert names(stage="evaluate") == SAMPLED
    rows = "data.train=rows.jsonl"
    assert names(rows, stage="sft") == names(rows, stage="reward") == LEARNED
    assert names(rows, stage="dpo") == ["reference log-probabilities", *LEARNED]
    assert names(rows, "loss.type=simpo", stage="dpo") == LEARNED


def test_vllm_receives_the_weights_on_one_gpu_too():
    sent = "weights to the engines"
    assert names("engine.type=vllm") == [*SAMPLED, *LEARNED, sent]
    assert names("engine.type=vllm", stage="evaluate") == [sent, *SAMPLED]

    def seconds(*changes):
        return step_phases(recipe_of("engine.type=vllm", *changes), SIZES, H200)[-1].seconds

    files = 2 * SIZES.parameters * HOST_COPIES / HOST_COPY
    assert seconds() == pytest.approx(files)
    assert 0 < seconds("engine.weight_transfer=ipc") < files / 100
    assert 0 < seconds("model.lora.rank=8", "engine.adapters=adapter_only") < files / 50


def test_engines_without_cuda_graphs_launch_every_kernel():
    job = Episodes(8, 8, 100, 50, 50)

    def sampling(*changes, device=H200, **placed):
        phases = step_phases(recipe_of(*changes), SIZES, device, Placement(**placed), job)
        return next(phase.seconds for phase in phases if phase.what == "sampling")

    assert sampling(engines=1) == sampling() > 2 * sampling("engine.type=vllm")
    eager = ("engine.type=vllm", "engine.enforce_eager=true")
    assert sampling(*eager) == sampling(*eager, engines=1) > 1.5 * sampling("engine.type=vllm", engines=1)
    cpu = DEVICES["epyc-zen5-2"]
    assert sampling(*eager, device=cpu) == sampling("engine.type=vllm", device=cpu)


def test_lengths_that_a_recipe_leaves_open_are_at_their_limits():
    turns = recipe_of("environment.type=frozen_lake", "environment.max_turns=3", "rollout.tokens_per_turn=20")
    assert episodes_at_most(turns) == Episodes(8, 8, 0, 60, 60, 2048 - 60)
    assert evaluated_at_most(turns) == Episodes(64, 1, 0, 60, 60, 2048 - 60)
    once = recipe_of("rollout.tokens_per_turn=500", "rollout.tokens_per_episode=400")
    assert episodes_at_most(once) == Episodes(8, 8, 1, 399, 399, 0)
    pairs = recipe_of("data.train=p.jsonl", "data.max_tokens=100", "rows_per_update=5", stage="reward")
    assert rows_at_most(pairs) == rows_of(10, 100, 0)
    rows = recipe_of("data.train=p.jsonl", "data.max_tokens=100", "rows_per_update=5", stage="sft")
    assert rows_at_most(rows) == rows_of(5, 100, 100)


def test_updates_and_passes_are_all_counted():
    one, more = (
        {phase.what: phase for phase in step_phases(recipe_of(*changes), SIZES, H200)}
        for changes in ([], ["learner.updates_per_step=2", "learner.epochs_per_step=3"])
    )
    assert more[LEARNED[0]].seconds == pytest.approx(3 * one[LEARNED[0]].seconds)
    assert more[LEARNED[1]].seconds == pytest.approx(6 * one[LEARNED[1]].seconds)
    assert more[LEARNED[0]].tokens == 3 * one[LEARNED[0]].tokens


def test_auto_takes_the_faster_numbers_and_adapters_are_a_small_update():
    def seconds(*changes):
        return {phase.what: phase.seconds for phase in step_phases(recipe_of(*changes), SIZES, H200)}

    assert seconds("model.dtype=auto") == seconds("model.dtype=bfloat16") == seconds()
    assert seconds("model.dtype=bfloat16")["sampling"] < seconds("model.dtype=float32")["sampling"]
    assert seconds("model.lora.rank=8")["optimizer"] < seconds()["optimizer"] / 50


def test_idle_share_and_time_of_placements():
    apart = Placement(2, 2, engines=2, colocated=False)
    phases = [Phase("sampling", 3.0, 2, sampling=True), Phase("learning", 1.0, 2)]
    assert total_seconds(phases, apart) == 4.0
    assert idle_share(phases, apart) == 0.5
    ahead = Placement(2, 2, engines=2, colocated=False, async_rollouts=1)
    assert total_seconds(phases, ahead) == 3.0
    assert idle_share(phases, ahead) == pytest.approx(1 - 8 / 12)
    assert idle_share([Phase("all", 5.0, 2)], Placement(2)) == 0


def test_four_bit_matrices_are_an_eighth_of_float32():
    whole, packed = (
        memory_estimate(recipe_of("environment.type=bandit", "model.lora.rank=4", *more), SIZES)["weights"]
        for more in ((), ("model.load_in_4bit=true",))
    )
    matrices = SIZES.layers * SIZES.layer
    rest = SIZES.parameters - matrices
    assert whole[0] == 4 * SIZES.parameters
    assert packed[0] - 2 * rest == pytest.approx(matrices * (0.5 + 1 / 64 + 4 / (64 * 256)), abs=1)
    assert f"{matrices:,} parameters of 4 bits" in packed[1]


def test_asynchronous_engines_shorten_the_step():
    recipe = recipe_of("model.dtype=bfloat16", "model.gradient_checkpointing=true")
    job = Episodes(64, 8, 200, 500, 2000)
    waiting, ahead = (
        total_seconds(step_phases(recipe, SIZES, H200, placed, job), placed)
        for placed in (Placement(4, 4, engines=4, colocated=False, async_rollouts=steps) for steps in (0, 1))
    )
    assert ahead < waiting


def said(recipe, sizes, device):
    console = Console(file=StringIO(), width=220)
    show_plan(recipe, sizes, console, device)
    return console.file.getvalue()


def test_dry_run_predicts_no_time_without_limits():
    found = said(recipe_of(), SIZES, None)
    assert "no estimate without a device: pass --on with one of h200, h100" in found
    assert "a step" not in found.split("\ntime\n")[1]


def test_dry_run_shows_phases_and_their_sum():
    found = said(recipe_of("steps=50", "model.dtype=bfloat16"), SIZES, H200).split("\ntime\n")[1]
    for what in (*SAMPLED, *LEARNED, "an evaluation"):
        assert what in found
    step = total_seconds(step_phases(recipe_of("model.dtype=bfloat16"), SIZES, H200))
    assert f"{duration(step)}  an estimate for one h200, 50 of them {duration(50 * step)}" in found
    assert "rows and episodes have their maximum length" in found
    rows = said(recipe_of("data.train=r.jsonl", stage="dpo"), SIZES, H200)
    assert "an update" in rows
    assert "an evaluation" not in rows


def test_dry_run_counts_processes_and_offloading():
    def step(*keys):
        found = said(recipe_of("data.train=r.jsonl", "model.dtype=bfloat16", *keys, stage="dpo"), SIZES, H200)
        (line,) = [line for line in found.splitlines() if "an estimate for" in line and "an update" in line]
        return " ".join(line.split())

    def planned(placement):
        recipe = recipe_of("data.train=r.jsonl", "model.dtype=bfloat16", stage="dpo")
        return duration(total_seconds(step_phases(recipe, SIZES, H200, placement)))

    assert step() == f"an update {planned(ALONE)} an estimate for one h200"
    eight = Placement(devices=8, shard=8)
    assert step("hardware.processes=8") == f"an update {planned(eight)} an estimate for 8 h200"
    offloaded = Placement(offloaded=True)
    assert step("hardware.offload=optimizer") == f"an update {planned(offloaded)} an estimate for one h200"
    assert len({planned(ALONE), planned(eight), planned(offloaded)}) == 3
    everything = said(recipe_of("hardware.offload=all", "model.dtype=bfloat16"), SIZES, H200)
    assert "copies of weights from CPU memory" in everything


def test_dry_run_names_a_device_that_is_too_small():
    assert "GiB  an estimate; a100 has 74.51 GiB" in said(recipe_of(), SIZES, DEVICES["a100"])
    assert "has" not in said(recipe_of("model.dtype=bfloat16"), SIZES, H200).split("total")[1].split("\n")[0]


def test_no_time_is_predicted_for_inconsistent_sizes():
    mixture = ModelSizes(30_500_000_000, 48, 2048, 6144, 32, 4, 128, 151_936)
    assert not plain(mixture)
    assert "no estimate: the model is not a plain decoder" in said(recipe_of(), mixture, H200)
    assert plain(SIZES)
    untied = ModelSizes(32_762_000_000, 64, 5120, 25_600, 64, 8, 128, 151_936)
    assert plain(untied)


def test_the_command_line(monkeypatch, capsys):
    monkeypatch.setattr("posttrain.planning.model_sizes.model_sizes", lambda path: SIZES)
    words = ["rl", "environment.type=bandit"]
    assert main([*words, "--dry-run", "--full", "--on", "epyc-zen5-2"]) == 0
    assert "an estimate for one epyc-zen5-2" in capsys.readouterr().out
    assert main([*words, "--on", "h200"]) == 2
    assert "only with --dry-run" in capsys.readouterr().err
    assert main([*words, "--dry-run", "--on", "h2000"]) == 2
    assert "h2000 is neither a file nor a known device; known devices are h200, h100, a100" in capsys.readouterr().err


def test_a_device_from_a_file(tmp_path):
    file = tmp_path / "mine.yaml"
    file.write_text("bfloat16: 9.0e+11\nfloat32: 2e11\nreading: 5e10\nper_node: 2\noverlaps: false\n")
    assert device_of(str(file)) == Device("mine", 9e11, 2e11, 5e10, per_node=2, overlaps=False)
    file.write_text("like: h200\nproducts: 0.5\n")
    mine = device_of(str(file))
    assert {field.name for field in fields(Device) if getattr(mine, field.name) != getattr(H200, field.name)} == {
        "name",
        "products",
    }


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("[1, 2]", "has no keys"),
        ("bfloat16: 1\nfloat32: 1\n", "has no reading"),
        ("like: h200\nspeed: 3\n", "has an unknown key speed"),
        ("like: abacus\n", "known devices are h200"),
        ("like: h200\nreading: 0\n", "reading in .* must be a number above 0, not 0"),
        ("like: h200\nreading: fast\n", "must be a number above 0, not 'fast'"),
        ("like: h200\nreading: true\n", "must be a number above 0, not True"),
        ("like: h200\nreading: .nan\n", "must be a number above 0, not nan"),
        ("like: h200\noverlaps: 1\n", "must be true or false, not 1"),
        ("a: [", "is not valid YAML"),
    ],
)
def test_a_file_that_describes_no_device(tmp_path, text, expected):
    file = tmp_path / "mine.yaml"
    file.write_text(text)
    with pytest.raises(InputError, match=f"--on: .*{expected}"):
        device_of(str(file))


def test_durations():
    assert [duration(s) for s in (0.00123, 4.567, 600, 36_000, 3.6e7)] == [
        "1.23 ms",
        "4.57 s",
        "10 min",
        "10.0 h",
        "10,000.0 h",
    ]
