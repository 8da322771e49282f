"""How commands are read: shells, launchers, defaults, unknown flags, and every flag of the installed TRL."""

import dataclasses

import pytest
import yaml

from posttrain.cli.main import main
from posttrain.errors import InputError
from posttrain.recipe.compose import load_recipe
from posttrain.recipe.reference import keys_of
from posttrain.recipe.stages import STAGES
from posttrain_import.commands import import_commands
from posttrain_import.rows import literal
from posttrain_import.rules import programs
from posttrain_import.shell import read_commands

TRAIN_ALL = """
USE_PPO="algorithm.adv_estimator=gae" # by default.
USE_BASE="algorithm.kl_ctrl.kl_coef=0.001 actor_rollout_ref.actor.kl_loss_coef=0.001"
# Section 3.1
python train.py --config-name _1_bandit trainer.experiment_name=bandit-ppo $USE_PPO $USE_BASE &
python train.py --config-name _2_sokoban trainer.experiment_name=sokoban-ppo $USE_PPO $USE_BASE
"""
"""How RAGEN runs all of its experiments."""
GRPO = "trl grpo --model_name_or_path m --dataset_name p.jsonl --reward_funcs rewards.good"


def one(text, rows=None, **variables):
    (command,) = import_commands(text, variables, rows)[0]
    return command


def words(text, **variables):
    return [list(command.words) for command in read_commands(text, variables)]


def test_shell_scripts_are_read_like_a_shell():
    script = """
    set -x  # a comment
    export SIZE=64
    MODEL="Qwen/Qwen3 4B"; OTHER='$SIZE'
    VLLM=0 python -m x --size $SIZE --path "${MODEL}/final" --text '$SIZE' --n ${N:-8} $@ \\
       --last a#b > log.txt 2>&1 | tee other.log
    if [ -f x ]; then echo "done" && echo $OTHER; fi
    """
    found = words(script)
    assert found[0] == ["set", "-x"]
    assert found[1] == [
        *["python", "-m", "x", "--size", "64", "--path", "Qwen/Qwen3 4B/final"],
        *["--text", "$SIZE", "--n", "8", "--last", "a#b"],
    ]
    assert found[2:] == [["tee", "other.log"], ["[", "-f", "x", "]"], ["echo", "done"], ["echo", "$SIZE"]]
    assert dict(read_commands(script, {})[1].assignments) == {"VLLM": "0"}
    assert words("read -r -d '' args <<EOF\nopenrlhf.cli.train_sft \\\n --bf16\nEOF\ndeepspeed --module $args") == [
        ["deepspeed", "--module", "openrlhf.cli.train_sft", "--bf16"]
    ]
    assert words("python --size $SIZE", SIZE="3") == [["python", "--size", "3"]]


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("python -m openrlhf.cli.train_sft --beta $BETA", "$BETA has no value in the command; add BETA=VALUE after it"),
        ("trl sft --name $(date)", "is the output of another command; write its value instead"),
        ("trl sft --name 'x", "has no second one; close the quotation"),
        ("ls -l", "'ls -l' is not a command that the importer supports"),
        ("trl chat", "trl chat has no importer"),
        ("python -m openrlhf.cli.serve_rm", "openrlhf.cli.serve_rm has no importer"),
        ("missing.sh", "missing.sh: there is no such file; name a script, or quote the whole command"),
        ("trl sft --max_length", "--max_length has no value; give it one, or remove it"),
        ("trl sft --max_length 3 4", "--max_length has the values 3 4; it takes one"),
        ("trl sft --num_train_epochs many", "num_train_epochs is many; it must be a number"),
        ("trl sft more", "more belongs to no flag"),
        ("python -m verl.trainer.main_ppo data", "data is not KEY=VALUE; remove it"),
        ("bash train.sh sokoban rl_or_sft=both", "rl_or_sft=both; it must be rl or sft"),
    ],
)
def test_a_command_that_cannot_be_read_is_an_error(text, message):
    with pytest.raises(InputError) as error:
        import_commands(text, {})
    assert message in str(error.value)


KINDS = {"sft": "SFTConfig", "dpo": "DPOConfig", "reward": "RewardConfig", "grpo": "GRPOConfig", "rloo": "RLOOConfig"}


@pytest.mark.parametrize("name", KINDS)
def test_flags_and_defaults_are_those_of_the_installed_trl(name):
    library = pytest.importorskip("trl")
    listed = *dataclasses.fields(getattr(library, KINDS[name])), *dataclasses.fields(library.ModelConfig)
    fields = {field.name: field.default for field in listed}
    assert set(fields) - set(programs()[name].rules) == set()
    for flag, ours in programs()[name].defaults.items():
        theirs = fields[flag]
        if theirs is dataclasses.MISSING:
            continue
        theirs = getattr(theirs, "value", theirs)
        texts = str(theirs).lower(), f"{theirs}".removesuffix(".0").lower()
        assert str(ours).lower() in texts or float(ours) == theirs, flag


TRAINERS = {
    name: program for name, program in programs().items() if program.stage and not program.command and not program.files
}


@pytest.mark.parametrize("name", TRAINERS)
def test_every_key_that_rules_set_exists(name):
    """The keys that a program sets by its defaults and by plain values are keys of its stage."""
    program = TRAINERS[name]
    known = {key.path for key in keys_of(STAGES[program.stage])} | {"seeds.start", "seeds.count"}
    rows = program.table([("env", "sokoban")] if "env" in program.rules else [], 1000)
    keys = {key for row in rows for key in row.answer.keys}
    assert len(keys) > 10
    assert {key for key in keys if key not in known} == set()


def test_unknown_flags_are_named_and_nothing_is_written(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    text = f"{GRPO} --max_steps 10 --num_generation 4"
    assert main(["import", text]) == 2
    said = capsys.readouterr().err
    assert (
        "--num_generation: TRL has no such flag, or the importer does not support it (did you mean num_generations?)"
        in said
    )
    assert list(tmp_path.iterdir()) == []
    assert main(["import", text, "--ignore-unknown"]) == 0
    assert [file.name for file in tmp_path.iterdir()] == ["trl-rl.yaml"]


def test_the_written_recipe_is_the_imported_one(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    text = f"{GRPO} --max_steps 10 --output_dir out/small --lr_scheduler_type cosine"
    assert main(["import", text, "--out", "recipes"]) == 0
    said = capsys.readouterr().out
    assert "run it with: posttrain rl recipes/small.yaml" in said
    assert "equal" in said
    written = (tmp_path / "recipes/small.yaml").read_text()
    assert load_recipe(["recipes/small.yaml"], [], "rl") == one(text).recipe()
    assert "steps: 10  # --max_steps" in written
    assert f"#   {text[:60]}" in written
    assert yaml.safe_load(written)["optimizer"]["schedule"] == "cosine"
    assert main(["import", text, "--out", "recipes"]) == 2
    assert "small.yaml exists; choose another --out, or pass --overwrite" in capsys.readouterr().err
    assert main(["import", text, "--out", "recipes", "--overwrite"]) == 0


def test_a_file_with_several_commands(tmp_path, monkeypatch, capsys):
    monkeypatch.chdir(tmp_path)
    script = "mkdir -p log\ntrl sft --model_name_or_path m --dataset_name a.jsonl --output_dir x\n"
    (tmp_path / "run.sh").write_text(script * 2)
    assert main(["import", "run.sh"]) == 0
    assert sorted(file.name for file in tmp_path.iterdir()) == ["run.sh", "x-2.yaml", "x.yaml"]
    assert capsys.readouterr().out.count("not imported: mkdir -p log") == 2
    (tmp_path / "page.md").write_text(f"Text with words.\n\n```bash\n{script}```\n")
    assert len(import_commands("page.md", {})[0]) == 1


def test_rows_of_local_files_are_counted(tmp_path):
    file = tmp_path / "rows.jsonl"
    file.write_text('{"messages": []}\n' * 100)
    text = f"python -m openrlhf.cli.train_sft --pretrain m --dataset {file} --train_batch_size 10 --max_epochs 2"
    recipe = one(text).recipe()
    assert recipe.optimizer.warmup_updates == 1  # 3% of 20 updates
    assert one(text, rows=1000).recipe().optimizer.warmup_updates == 6
    unknown = one(text.replace(str(file), "org/data"))
    assert [row.flag for row in unknown.missing] == ["--lr_warmup_ratio"]
    assert "--rows N" in unknown.missing[0].answer.note


def test_devices_of_a_launcher_count_in_the_arithmetic():
    text = "accelerate launch --num_processes 4 --mixed_precision bf16 dpo.py --model_name_or_path m --dataset_name d.jsonl"
    command = one(
        f"CUDA_VISIBLE_DEVICES=0,1,2,3 {text} --per_device_train_batch_size 2 --gradient_accumulation_steps 3"
    )
    recipe = command.recipe()
    assert (recipe.rows_per_update, recipe.hardware.processes) == (24, 4)
    flags = {row.flag: row.answer.note for row in command.rows}
    assert flags["--mixed_precision"] == "an option of the launcher"
    assert flags["CUDA_VISIBLE_DEVICES"] == "set it for `posttrain` too"


def test_batches_of_grpo():
    command = one(f"{GRPO} --max_steps 60 --per_device_train_batch_size 4 --gradient_accumulation_steps 8 "
                  "--steps_per_generation 16 --num_generations 16 --num_iterations 3 --loss_type dr_grpo --scale_rewards none")  # fmt: skip
    recipe = command.recipe()
    # A generation batch of 4 x 16 answers, updates of 4 x 8.
    assert (recipe.rollout.groups_per_step, recipe.rollout.episodes_per_group) == (4, 16)
    assert (recipe.learner.updates_per_step, recipe.learner.epochs_per_step) == (2, 3)
    assert recipe.steps == 10
    assert (recipe.loss.aggregation, recipe.loss.constant) == ("constant", 32 * 512)
    assert recipe.credit.type == "dr_grpo"
    assert recipe.environment.reward == "rewards:good"


def test_names_in_wandb_reach_the_recipe():
    command = one("python -m openrlhf.cli.train_sft --pretrain m --dataset x.jsonl --use_wandb KEY --wandb_project p "
                  "--wandb_org lab --wandb_group seeds --wandb_run_name third")  # fmt: skip
    recipe = command.recipe()
    assert recipe.sinks == ["wandb"]
    tracking = recipe.tracking
    assert (tracking.project, tracking.entity, tracking.group, tracking.run_name) == ("p", "lab", "seeds", "third")


def test_verl_and_later_versions_of_ragen():
    text = (
        "python3 -m verl.trainer.main_ppo algorithm.adv_estimator=grpo data.train_files=$HOME/gsm8k/train.parquet "
        "data.train_batch_size=1024 data.max_prompt_length=512 data.max_response_length=1024 "
        "actor_rollout_ref.model.path=Qwen/Qwen3-8B actor_rollout_ref.actor.ppo_mini_batch_size=256 "
        "actor_rollout_ref.actor.use_kl_loss=True actor_rollout_ref.actor.kl_loss_coef=0.001 "
        "actor_rollout_ref.actor.kl_loss_type=low_var_kl actor_rollout_ref.rollout.n=5 trainer.total_epochs=15 "
        'trainer.logger=\'["console","wandb"]\' trainer.test_freq=-1 $@'
    )
    recipe = one(text, rows=7473).recipe()
    assert (recipe.steps, recipe.rollout.groups_per_step, recipe.learner.updates_per_step) == (105, 1024, 4)
    assert (recipe.kl.coefficient, recipe.kl.estimator, recipe.kl.apply_to) == (0.001, "k3", "loss")
    assert (recipe.rollout.tokens_per_turn, recipe.rollout.tokens_per_episode) == (1024, 1536)
    assert (recipe.sinks, recipe.loss.dual_clip, recipe.evaluation.every) == (["wandb"], 3.0, 0)
    later = one("python train.py --config-name _2_sokoban es_manager.train.env_groups=4 "
                "actor_rollout_ref.rollout.rollout_filter_ratio=0.5 trainer.total_training_steps=50")  # fmt: skip
    recipe = later.recipe()
    assert (recipe.environment.type, recipe.steps, recipe.rollout.filter.type) == ("sokoban", 50, "uncertainty")
    assert recipe.learner.updates_per_step == 1  # 4 x 16 episodes, half of them kept, 32 an update


def test_markdown_of_a_table(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert main(["import", f"{GRPO} --max_steps 10", "--markdown"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "| flag | value | our key | our value | outcome | note |"
    assert "| `--max_steps` | 10 | `steps` | `10` | converted | 10 updates / 1 of a step |" in lines
    assert list(tmp_path.iterdir()) == []


def test_a_line_end_in_a_quotation_sets_no_key():
    found = one(
        "trl sft --model_name_or_path 'x\nsteps: 7\nreward: evil.py:own' --dataset_name rows.jsonl --max_steps 3"
    )
    written = yaml.safe_load(found.recipe_text())
    assert written["model"]["path"] == "x\nsteps: 7\nreward: evil.py:own"
    assert written["steps"] == 3
    assert "reward" not in written


@pytest.mark.timeout(20)
def test_a_deep_or_endless_number_stays_text_and_a_control_character_is_refused():
    for value in ("9" * 5_000, "[" * 3_000):
        assert literal(value) == value
    with pytest.raises(InputError, match="character"):
        one("trl sft --model_name_or_path 'x\x1b[2J'")


def test_a_script_that_the_command_runs_is_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "train_all.sh").write_text(TRAIN_ALL)
    found, others = import_commands("mkdir -p logs && bash train_all.sh", {})
    assert [command.name for command in found] == ["bandit-ppo", "sokoban-ppo"]
    assert [command.recipe().environment.type for command in found] == ["bandit", "sokoban"]
    assert [command.unknown for command in found] == [[], []]
    bandit = found[0].recipe()
    assert (bandit.environment.max_turns, bandit.environment.format.actions_per_turn) == (1, 1)
    assert (bandit.rollout.tokens_per_turn, bandit.evaluation.seeds.count) == (500, 512)
    assert [other.words[0] for other in others] == ["mkdir"]


def test_scripts_without_commands_and_scripts_that_run_each_other(tmp_path, monkeypatch):
    """One that prepares something is listed; a circle is an error that names the script."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "setup.sh").write_text("echo ready\n")
    (tmp_path / "all.sh").write_text(f"bash setup.sh\n{GRPO}\n")
    found, others = import_commands("all.sh", {})
    assert (len(found), [list(command.words) for command in others]) == (1, [["echo", "ready"]])
    for script, other in (("one", "two"), ("two", "one"), ("again", "again")):
        (tmp_path / f"{script}.sh").write_text(f"bash {other}.sh\n")
    for script in ("one", "again"):
        with pytest.raises(InputError, match="runs itself, directly or through another script"):
            import_commands(f"{script}.sh", {})


def test_no_flag_turns_off_a_switch_of_trl():
    script = "python examples/scripts/dpo.py --model_name_or_path m --dataset_name d.jsonl"
    kept, off = (
        one(f"{script} --gradient_checkpointing"),
        one(f"{script} --no_gradient_checkpointing --no_remove_unused_columns"),
    )
    assert off.unknown == []
    assert kept.recipe().model.gradient_checkpointing is True
    assert off.recipe().model.gradient_checkpointing is False
    (row,) = (row for row in off.rows if row.flag == "--no_gradient_checkpointing")
    assert (row.value, row.answer.keys) == ("set", {"model.gradient_checkpointing": False})
    assert [row.flag for row in one(f"{script} --no_learning_rate").unknown] == ["--no_learning_rate"]
    with pytest.raises(
        InputError, match=r"examples/scripts/kto.py has no importer; those of examples/scripts with one are sft.py"
    ):
        import_commands("python examples/scripts/kto.py --dataset_name d", {})


@pytest.mark.parametrize(
    ("prefix", "penalty", "normalizer"),
    [
        ("run", 0.0, "runs/rlhf-unit_reward"),
        ("run_m0d05", 0.05, "runs/rlhf-unit_reward"),
        ("no_normalization", 0.0, None),
    ],
)
def test_options_in_the_name_of_unit_level_ppo(prefix, penalty, normalizer):
    text = f"bash examples/scripts/train_ppo_segment.sh {prefix} qwen3 rationales 1 peak 1.5 avg segment_normalization 0.5 rationales 0.1"
    recipe = one(text).recipe()
    assert (recipe.rollout.missing_eos_penalty, recipe.unit_credit.normalizer) == (penalty, normalizer)
    assert recipe.reward.normalize == ("stored" if normalizer else "none")


def test_4bit_weights_are_imported():
    for command in (
        "trl sft --model_name_or_path m --dataset_name p.jsonl --use_peft --load_in_4bit --optim paged_adamw_8bit",
        "python -m openrlhf.cli.train_sft --pretrain m --dataset p.jsonl --lora_rank 16 --load_in_4bit --bf16",
    ):
        recipe = one(command, rows=100).recipe()
        assert recipe.model.load_in_4bit
        assert recipe.model.lora.rank == 16
