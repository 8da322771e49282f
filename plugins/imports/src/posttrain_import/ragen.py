"""RAGEN: `bash train.sh ENV key=value` of its first version, and `python train.py --config-name NAME key=value` of later ones."""

from collections.abc import Iterator, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from posttrain.errors import InputError
from posttrain_import import verl
from posttrain_import.programs import Program
from posttrain_import.rows import (
    Answer,
    Flags,
    Row,
    Rule,
    choice,
    converted,
    equal,
    literal,
    named,
    unsupported,
    without_effect,
)

_SEEDS = {"sokoban": (10000, 20000), "frozenlake": (100000, 110000), "two_armed_bandit": (100000, 110000)}
"""Environment -> first seed of training and of test."""
_TRAINING_SEEDS, _TEST_SEEDS = 10_000, 500
_ONE = "one device; `hardware.processes` divides the weights"


def _episode(flags: Flags) -> int:
    """Tokens of an episode: a prompt, an answer for each turn, and an observation after each but the last."""
    turns = flags.whole("training.max_turns")
    answers, observations = flags.whole("training.max_response_length"), flags.whole("training.max_obs_length")
    return flags.whole("training.max_start_length") + turns * answers + (turns - 1) * observations


def _lengths(flags: Flags) -> tuple[Mapping[str, Any], str]:
    turns = flags.whole("training.max_turns")
    note = f"{flags.text('training.max_start_length')} + {turns} x {flags.text('training.max_response_length')}"
    note += f" + {turns - 1} x {flags.text('training.max_obs_length')}"
    return {"environment.max_turns": turns, "rollout.tokens_per_episode": _episode(flags)}, f"tokens: {note}"


def _micro(flags: Flags) -> tuple[Mapping[str, Any], str]:
    rows = flags.whole("training.micro_batch_size")
    return {"learner.tokens_per_batch": rows * _episode(flags)}, f"{rows} episodes x {_episode(flags)} tokens"


def _updates(flags: Flags) -> tuple[Mapping[str, Any], str]:
    sampled = flags.whole("training.train_batch_size") * flags.whole("training.n_rollout")
    size = flags.whole("training.ppo_batch_size")
    return {"learner.updates_per_step": max(1, sampled // size)}, f"{sampled} episodes / {size}"


def _steps(value: str, flags: Flags) -> Answer:
    if flags.text("training.total_training_steps"):
        steps = flags.whole("training.total_training_steps") - 1
        return Answer("converted", {"steps": max(1, steps)}, "the original stops one update early")
    seeds = flags.whole("training.train_data_num", _TRAINING_SEEDS)
    epochs, groups = flags.whole("training.total_epochs"), flags.whole("training.train_batch_size")
    return Answer("converted", {"steps": epochs * (seeds // groups)}, f"{epochs} x {seeds} seeds / {groups}")


def _held_out(flags: Flags) -> tuple[Mapping[str, Any], str]:
    start = _SEEDS[flags.text("env")][1]
    count = flags.whole("training.val_data_num", _TEST_SEEDS)
    keys = {"evaluation.seeds.start": start, "evaluation.seeds.count": count}
    if count < _TEST_SEEDS:
        keys |= {"evaluation.final_seeds.start": start + count, "evaluation.final_seeds.count": _TEST_SEEDS - count}
        return keys, f"{count} test seeds for the curve, the other {_TEST_SEEDS - count} for the final table"
    # All seeds: a tenth of them is for the curve, so that the table is measured on others.
    return {
        "evaluation.seeds.start": start, "evaluation.seeds.count": 50,
        "evaluation.final_seeds.start": start + 50, "evaluation.final_seeds.count": 450,
    }, "all 500 test seeds: 50 for the curve, 450 for the final table"  # fmt: skip


def _environment(value: str, flags: Flags) -> Answer:
    keys: dict[str, Any] = {
        "sokoban": {"environment.type": "sokoban", "environment.dim_x": 6, "environment.dim_y": 6, "environment.num_boxes": 1,
                    "environment.search_depth": 30, "environment.format.penalty": -1},
        "frozenlake": {"environment.type": "frozen_lake", "environment.size": 4, "environment.frozen_probability": 0.8,
                       "environment.slippery": True, "environment.format.penalty": -1},
        "two_armed_bandit": {"environment.type": "bandit", "environment.low_risk.name": "phoenix",
                             "environment.high_risk.name": "dragon", "environment.format.penalty": 0},
    }[value]  # fmt: skip
    if flags.text("rl_or_sft") == "rl":
        keys = {
            **keys,
            "seeds.start": _SEEDS[value][0],
            "seeds.count": flags.whole("training.train_data_num", _TRAINING_SEEDS),
        }
    return Answer("converted", keys, "the constants of its configuration file")


def _thinking(value: str, flags: Flags) -> Answer:
    thinking = literal(value) is not True
    return Answer("converted", {"environment.format.thinking": thinking, "environment.format.prime": True},
                  f"the answer begins with `<{'think' if thinking else 'answer'}>`")  # fmt: skip


def _kl(flags: Flags) -> tuple[Mapping[str, Any], str]:
    kinds = {"low_var_kl": "k3", "kl": "k1", "mse": "k2"}
    return {
        "kl.coefficient": flags.number("optimization.kl_coef"),
        "kl.estimator": kinds[flags.text("optimization.kl_loss_type")],
        "kl.apply_to": "loss" if literal(flags.text("training.use_kl_loss")) else "reward",
    }, "added to the loss; the original subtracts it"


def _logging(value: str, _: Flags) -> Answer:
    sinks = [name for name in ("wandb",) if name in value]
    return Answer("equal", {"sinks": sinks}) if sinks else Answer("no effect", {}, "every line is printed and stored")


def _devices(value: str, _: Flags) -> Answer:
    count = int(literal(value))
    note = "all weights of a 7B model need more memory: add `model.lora.rank=64`" if count > 1 else ""
    return Answer("equal", {"hardware.processes": count}, note)


_COMMON: dict[str, Rule] = {
    "env": Rule(_environment),
    "rl_or_sft": choice("stage", {"rl": {}, "sft": {}}, "the stage of the recipe"),
    "system.cuda_visible_devices": without_effect("set CUDA_VISIBLE_DEVICES for `posttrain`"),
    "system.n_gpus": Rule(_devices),
    "system.multi_processing": without_effect("one process; `hardware.ray` runs on a cluster"),
    "system.vllm_attention_backend": without_effect("a setting of vLLM"),
    "training.max_start_length": without_effect("in `training.max_turns`"),
    "training.max_obs_length": without_effect("in `training.max_turns`"),
    "training.max_response_length": equal("rollout.tokens_per_turn"),
    "training.max_turns": converted(_lengths),
    "training.val_data_num": converted(_held_out),
    "training.val_batch_size": without_effect("the engine answers as many at a time as its cache allows"),
    "training.rollout_tp_size": without_effect(_ONE),
    "training.train_data_num": without_effect("in the seeds of the environment"),
    "logging.mode": Rule(_logging),
    **{f"logging.{name}": without_effect("`posttrain episodes RUN --draw FILE`") for name in (
        "log_images", "log_image_dir", "log_image_step_size", "log_n_image_per_batch",
    )},
    "trainer.val_before_train": equal("evaluation.start"),
    "trainer.val_only": unsupported("`posttrain evaluate RECIPE model.path=RUN/model`"),
    "trainer.default_hdfs_dir": without_effect("runs are directories"),
    "trainer.nnodes": without_effect(_ONE),
    "trainer.project_name": equal("tracking.project", words=True),
}  # fmt: skip
_RL: dict[str, Rule] = {
    **_COMMON,
    "model.base_model": equal("model.path", words=True),
    "model.experiment_name": named("ragen"),
    "model.gradient_checkpointing": equal("model.gradient_checkpointing"),
    "training.micro_batch_size": converted(_micro),
    "training.train_batch_size": equal("rollout.groups_per_step"),
    "training.ppo_batch_size": converted(_updates),
    "training.n_rollout": equal("rollout.episodes_per_group"),
    "training.total_epochs": Rule(_steps),
    "training.total_training_steps": Rule(_steps),
    "training.temperature": equal("rollout.sampling.temperature"),
    "training.use_kl_loss": without_effect("in `optimization.kl_coef`"),
    "training.no_think_rl": Rule(_thinking),
    "training.state_masking": without_effect("only sampled tokens have a loss, always"),
    **{f"training.{name}": without_effect("the original declares it but does not use it") for name in (
        "use_sft", "binary_reward", "mask_state", "length_penalty",
    )},
    "optimization.actor_lr": equal("optimizer.learning_rate"),
    "optimization.critic_lr": without_effect("no critic in the original"),
    "optimization.kl_coef": converted(_kl),
    "optimization.kl_loss_type": without_effect("in `optimization.kl_coef`"),
    "optimization.adv_estimator": choice("credit.type", {name: name for name in ("grpo", "brpo", "arpo", "gae")}),
    "optimization.gpu_memory_utilization": without_effect("a setting of vLLM"),
    "trainer.save_freq": equal("checkpoint.every"),
    "trainer.test_freq": equal("evaluation.every"),
}  # fmt: skip
_LENGTHS = {
    "training.max_start_length": "400",
    "training.max_response_length": "400",
    "training.max_obs_length": "200",
    "training.max_turns": "5",
}
_RL_DEFAULTS = {
    "rl_or_sft": "rl",
    **_LENGTHS,
    "model.base_model": "Qwen/Qwen2.5-0.5B-Instruct",
    "model.gradient_checkpointing": "true",
    "training.micro_batch_size": "1",
    "training.train_batch_size": "8",
    "training.ppo_batch_size": "128",
    "training.n_rollout": "16",
    "training.total_epochs": "5",
    "training.val_data_num": "50",
    "training.temperature": "0.7",
    "training.use_kl_loss": "true",
    "training.no_think_rl": "false",
    "optimization.actor_lr": "1e-6",
    "optimization.kl_coef": "0.001",
    "optimization.kl_loss_type": "low_var_kl",
    "optimization.adv_estimator": "grpo",
    "trainer.save_freq": "100",
    "trainer.test_freq": "100",
}


def _row(name: str, value: str, keys: Mapping[str, Any], note: str = "") -> Row:
    return Row(name, value, Answer("converted", keys, note), True)


def _of_rl(_: Flags) -> Iterator[Row]:
    """Rows for values that the trainer of the first version hard-codes."""
    yield _row("top_p", "0.95", {"rollout.sampling.top_p": 0.95})
    yield _row("end of an answer", "cut after </answer>", {"rollout.stop_strings": ["</answer>"]})
    yield _row(
        "clip_ratio",
        "0.2",
        {"loss.type": "ppo", "loss.clip_low": 0.2, "loss.clip_high": 0.2, "loss.aggregation": "token_mean"},
    )
    yield _row("entropy_coeff", "0.001", {"entropy.coefficient": 0.001})
    yield _row("AdamW", "betas 0.9, 0.999; decay 0.01; constant; clip 1.0", {
        "optimizer.betas": [0.9, 0.999], "optimizer.weight_decay": 0.01, "optimizer.schedule": "constant",
        "optimizer.max_gradient_norm": 1.0,
    })  # fmt: skip
    yield _row("precision", "bfloat16 autocast", {"model.dtype": "bfloat16"}, "float32 master weights")
    yield _row(
        "evaluation",
        "sampled, although greedy was intended",
        {"evaluation.sampling.temperature": 0},
        "greedy, each seed once",
    )


_MOVES = {"sokoban": 3.2, "frozenlake": 3.2, "two_armed_bandit": 1.0}
"""Mean number of moves in an expert's trace; in the original, each move is one training row."""


def _traces(flags: Flags) -> tuple[Mapping[str, Any], str]:
    train, test = flags.whole("sft.data_generation.train_size"), flags.whole("sft.data_generation.test_size")
    start = flags.whole("sft.data_generation.seed", 100_000)
    start += 20_000 if flags.text("env") == "frozenlake" else 0
    return {"experts.seeds.start": start, "experts.seeds.count": train + test, "experts.held_out": test}, (
        f"{train} + {test}" + ("; seeds that RL does not train on" if flags.text("env") == "frozenlake" else "")
    )


def _rows_per_update(flags: Flags) -> tuple[Mapping[str, Any], str]:
    moves, size = _MOVES[flags.text("env")], flags.whole("sft.training.train_batch_size")
    return {"rows_per_update": int(size / moves)}, f"traces: {size} single moves / {moves:g} moves of a trace"


def _sft_updates(flags: Flags) -> tuple[Mapping[str, Any], str]:
    rows = int(_rows_per_update(flags)[0]["rows_per_update"])
    each = -(-flags.whole("sft.data_generation.train_size") // rows)
    updates = each * flags.whole("sft.training.epochs")
    return {"epochs": flags.whole("sft.training.epochs"), "evaluation.every": each, "checkpoint.every": each,
            "optimizer.warmup_updates": updates // 10}, f"{updates} updates, {each} an epoch, a tenth of them for warm-up"  # fmt: skip


def _sft_name(value: str, flags: Flags) -> Answer:
    if "sft.training.experiment_name" in flags:
        return Answer("no effect", {}, "the model is in `<run>/model`")
    return named("ragen-sft").apply(value, flags)


_SFT: dict[str, Rule] = {
    **_COMMON,
    **{name: without_effect("for reinforcement learning") for name in _RL if name not in _COMMON},
    "training.n_rollout": equal("evaluation.episodes_per_seed"),
    "sft.output_dir": Rule(_sft_name),
    "sft.training.base_model": equal("model.path", words=True),
    "sft.training.experiment_name": named("ragen-sft"),
    "sft.data_generation.train_size": converted(_traces),
    "sft.data_generation.test_size": without_effect("in `sft.data_generation.train_size`"),
    "sft.data_generation.seed": without_effect("in `sft.data_generation.train_size`"),
    "sft.data_generation.algo": choice("experts.expert", {"bfs": "optimal"}),
    "sft.data_generation.bfs_max_depths": without_effect("the expert is exact"),
    "sft.data_generation.num_processes": without_effect("`environment.workers`"),
    "sft.data_generation.data_dir": without_effect("traces are made by the run"),
    "sft.data_generation.prefix": without_effect("rows are messages, rendered by the chat template"),
    "sft.training.micro_batch_size": converted(
        lambda flags: (
            {"learner.tokens_per_batch": flags.whole("sft.training.micro_batch_size") * _episode(flags)},
            f"{flags.text('sft.training.micro_batch_size')} traces x {_episode(flags)} tokens",
        )
    ),
    "sft.training.train_batch_size": converted(_rows_per_update),
    "sft.training.epochs": converted(_sft_updates),
    "sft.training.learning_rate": equal("optimizer.learning_rate"),
    "sft.training.lora_rank": equal("model.lora.rank"),
    "sft.training.lora_alpha": equal("model.lora.alpha"),
    "sft.training.target_modules": equal("model.lora.targets"),
    "sft.training.enable_gradient_checkpointing": equal("model.gradient_checkpointing"),
    "sft.training.max_length": without_effect("`rollout.tokens_per_episode`"),
    "sft.training.validate_before_training": equal("evaluation.start"),
    "sft.training.num_gpus": equal("hardware.processes"),
    "sft.training.project_name": equal("tracking.project", words=True),
    "sft.training.logger": Rule(_logging),
}
_SFT_DEFAULTS = {
    "rl_or_sft": "sft",
    **_LENGTHS,
    "sft.training.base_model": "Qwen/Qwen2.5-0.5B-Instruct",
    "sft.data_generation.train_size": "1000",
    "sft.data_generation.test_size": "100",
    "sft.data_generation.algo": "bfs",
    "sft.training.micro_batch_size": "4",
    "sft.training.train_batch_size": "128",
    "sft.training.epochs": "5",
    "sft.training.learning_rate": "1e-4",
    "sft.training.lora_rank": "64",
    "sft.training.lora_alpha": "32",
    "sft.training.target_modules": "all-linear",
    "training.val_data_num": "50",
}


def _of_sft(_: Flags) -> Iterator[Row]:
    yield _row("answers of the expert", "empty thinking", {"environment.format.thinking": False})
    yield _row("end of an answer", "</answer>", {"rollout.stop_strings": ["</answer>"]})
    yield _row("optimizer", "betas 0.9, 0.95; decay 0.01; cosine to 0; clip 1.0", {
        "optimizer.betas": [0.9, 0.95], "optimizer.weight_decay": 0.01, "optimizer.schedule": "cosine",
        "optimizer.final_fraction": 0, "optimizer.max_gradient_norm": 1.0,
    })  # fmt: skip
    yield _row("merge", "after training", {"model.lora.export": "merged"})
    yield _row("precision", "bfloat16 autocast", {"model.dtype": "bfloat16"}, "float32 master weights")
    yield _row(
        "evaluation",
        "sampled, although greedy was intended",
        {"evaluation.sampling.temperature": 0},
        "greedy, each seed once",
    )


FIRST = Program("RAGEN", "rl", _RL, _RL_DEFAULTS, _of_rl, prefix="")
FIRST_SFT = Program("RAGEN", "sft", _SFT, _SFT_DEFAULTS, _of_sft, prefix="")

_TAGS: dict[str, dict[str, Any]] = {
    "Bandit": {"environment.type": "bandit"},
    "SimpleSokoban": {"environment.type": "sokoban"},
    "CoordSokoban": {"environment.type": "sokoban"},
    "LargerSokoban": {"environment.type": "sokoban", "environment.dim_x": 8, "environment.dim_y": 8, "environment.num_boxes": 2},
    "FrozenLake": {"environment.type": "frozen_lake", "environment.frozen_probability": 0.9},
    "CoordFrozenLake": {"environment.type": "frozen_lake", "environment.observation": "coordinates"},
}  # fmt: skip
_FIRM = {**_TAGS["CoordFrozenLake"], "environment.slippery": False}
_NAMES = {"_1_bandit": _TAGS["Bandit"], "_2_sokoban": _TAGS["SimpleSokoban"], "_3_frozen_lake": _FIRM}
"""File of `--config-name` -> its environment."""
_OWN_DEFAULTS = {
    "_1_bandit": {
        "agent_proxy.max_turn": "1",
        "agent_proxy.max_actions_per_turn": "1",
        f"{verl.ROLLOUT}.response_length": "500",
        "es_manager.val.env_groups": "512",
    }
}
"""Other values that such a file sets."""


def _tags(value: str, _: Flags) -> Answer:
    given = literal(value)
    tags = [str(tag) for tag in given] if isinstance(given, list) else [str(given)]
    if len(tags) != 1 or tags[0] not in _TAGS:
        return Answer("not supported", {}, f"one environment of {', '.join(_TAGS)}; `posttrain env list` has all")
    return Answer("converted", _TAGS[tags[0]])


def _config_name(value: str, flags: Flags) -> Answer:
    if value not in _NAMES:
        return Answer("not supported", {}, f"the importer supports {', '.join(_NAMES)}; files of hydra are not read")
    if "es_manager.train.env_configs.tags" in flags:
        return Answer("no effect", {}, "`es_manager.train.env_configs.tags` wins")
    return Answer("converted", _NAMES[value])


def _later_updates(flags: Flags) -> tuple[Mapping[str, Any], str]:
    sampled = flags.whole("es_manager.train.env_groups") * flags.whole("es_manager.train.group_size")
    kept = flags.number(f"{verl.ROLLOUT}.rollout_filter_ratio", 1)
    size = flags.whole("ppo_mini_batch_size")
    return {
        "learner.updates_per_step": max(1, int(sampled * kept) // size)
    }, f"{sampled} episodes x {kept:g} kept / {size}"


def _later_micro(flags: Flags) -> tuple[Mapping[str, Any], str]:
    rows, longest = flags.whole("micro_batch_size_per_gpu"), flags.whole(f"{verl.ROLLOUT}.max_model_len")
    return {"learner.tokens_per_batch": rows * longest}, f"{rows} episodes x {longest} tokens"


def _filter(value: str, _: Flags) -> Answer:
    ratio = float(literal(value))
    if ratio >= 1:
        return Answer("no effect", {}, "all groups, as here")
    return Answer(
        "converted",
        {"rollout.filter.type": "uncertainty", "rollout.filter.keep": ratio},
        "groups with the largest spread of returns",
    )


def _bilevel(value: str, _: Flags) -> Answer:
    if literal(value) is True:
        return Answer("not supported", {}, "set `credit.type=bilevel_gae`")
    return Answer("no effect", {}, "off")


_LATER: dict[str, Rule] = {
    **verl.RULES,
    "--config-name": Rule(_config_name),
    "system.CUDA_VISIBLE_DEVICES": without_effect("set CUDA_VISIBLE_DEVICES for `posttrain`"),
    "model_path": equal("model.path", words=True),
    "seed.train": equal("seeds.start"),
    "seed.val": equal("evaluation.seeds.start"),
    "micro_batch_size_per_gpu": converted(_later_micro),
    "ppo_mini_batch_size": converted(_later_updates),
    f"{verl.ACTOR}.ppo_mini_batch_size": without_effect("`ppo_mini_batch_size`"),
    "enable_response_mask": without_effect("only sampled tokens have a loss, always"),
    "grpo_advantage_length_weight": unsupported("see `posttrain recipe credit`"),
    "lora.rank": equal("model.lora.rank"),
    "lora.alpha": equal("model.lora.alpha"),
    "lora.target_modules": equal("model.lora.targets"),
    "data.max_prompt_length": without_effect(f"`{verl.ROLLOUT}.max_model_len`"),
    f"{verl.ROLLOUT}.max_model_len": equal("rollout.tokens_per_episode"),
    f"{verl.ROLLOUT}.response_length": equal("rollout.tokens_per_turn"),
    f"{verl.ROLLOUT}.rollout_filter_ratio": Rule(_filter),
    f"{verl.ROLLOUT}.rollout_filter_type": choice("rollout.filter.type", {"std": {}}, "by the spread of returns"),
    f"{verl.ROLLOUT}.tp_size_check": without_effect(_ONE),
    f"{verl.ACTOR}.use_ref": without_effect("a reference model is used where `kl.coefficient` is above 0"),
    f"{verl.ACTOR}.grpo_advantage_length_weight": unsupported("see `posttrain recipe credit`"),
    "algorithm.bi_level_gae": Rule(_bilevel),
    "algorithm.high_level_gamma": without_effect("`credit.turn_discount` of `credit.type=bilevel_gae`"),
    "agent_proxy.max_turn": equal("environment.max_turns"),
    "agent_proxy.action_sep": equal("environment.format.separator", words=True),
    "agent_proxy.max_actions_per_turn": equal("environment.format.actions_per_turn"),
    "agent_proxy.enable_think": equal("environment.format.thinking"),
    "agent_proxy.use_turn_scores": without_effect("rewards are at the end of their turn, always"),
    "agent_proxy.max_context_window": unsupported("an episode keeps all of its turns", off=("-1",)),
    "agent_proxy.reward_normalization.method": choice("credit.type", {"identity": {}, "mean_std": "grpo"}),
    "agent_proxy.reward_normalization.grouping": without_effect("groups share a task"),
    "es_manager.format_penalty": equal("environment.format.penalty"),
    "es_manager.train.env_groups": equal("rollout.groups_per_step"),
    "es_manager.train.group_size": equal("rollout.episodes_per_group"),
    "es_manager.train.env_configs.tags": Rule(_tags),
    "es_manager.train.env_configs.n_groups": without_effect("`es_manager.train.env_groups`"),
    "es_manager.val.env_groups": equal("evaluation.seeds.count"),
    "es_manager.val.group_size": equal("evaluation.episodes_per_seed"),
    "es_manager.val.env_configs.tags": without_effect("`evaluation.environment`, where it differs"),
    "es_manager.val.env_configs.n_groups": without_effect("`es_manager.val.env_groups`"),
    "trainer.total_training_steps": equal("steps"),
    "trainer.validation_steps": without_effect("`evaluation.seeds.count`"),
    "trainer.generations_to_log_to_wandb.val": without_effect("every episode is in `episodes/`"),
    "trainer.generations_to_log_to_wandb.train": without_effect("every episode is in `episodes/`"),
    "trainer.local_log_dir": without_effect("runs are in `runs/`"),
}
_LATER_DEFAULTS = {
    "model_path": "Qwen/Qwen2.5-3B-Instruct",
    "micro_batch_size_per_gpu": "1",
    "ppo_mini_batch_size": "32",
    "es_manager.train.env_groups": "8",
    "es_manager.train.group_size": "16",
    "es_manager.format_penalty": "-0.1",
    f"{verl.ROLLOUT}.max_model_len": "3600",
    f"{verl.ROLLOUT}.response_length": "400",
    f"{verl.ROLLOUT}.rollout_filter_ratio": "0.25",
    f"{verl.ROLLOUT}.temperature": "1",
    f"{verl.ROLLOUT}.val_kwargs.temperature": "0.5",
    f"{verl.ACTOR}.clip_ratio_low": "0.2",
    f"{verl.ACTOR}.clip_ratio_high": "0.28",
    f"{verl.ACTOR}.entropy_coeff": "0.001",
    f"{verl.ACTOR}.use_kl_loss": "false",
    f"{verl.ACTOR}.optim.lr": "1e-6",
    f"{verl.ACTOR}.ppo_epochs": "1",
    "algorithm.adv_estimator": "gae",
    "algorithm.gamma": "1.0",
    "algorithm.lam": "1.0",
    "critic.optim.lr": "1e-5",
    "agent_proxy.max_turn": "5",
    "agent_proxy.max_actions_per_turn": "5",
    "agent_proxy.enable_think": "true",
    "trainer.total_training_steps": "200",
    "trainer.save_freq": "100",
    "trainer.test_freq": "10",
}


def _of_later(flags: Flags) -> Iterator[Row]:
    yield _row(
        "optimizer", "betas 0.9, 0.999; decay 0.01", {"optimizer.betas": [0.9, 0.999], "optimizer.weight_decay": 0.01}
    )
    if flags.text("algorithm.adv_estimator") == "gae":
        yield _row("GAE", "advantages whitened over the step", {"credit.whiten": True})
    yield _row("loss", "mean over tokens", {"loss.aggregation": "token_mean"})
    yield _row("precision", "bfloat16", {"model.dtype": "bfloat16"}, "float32 master weights")


LATER = Program("RAGEN", "rl", _LATER, _LATER_DEFAULTS, _of_later, prefix="")


def _later(after: list[str]) -> Program:
    """The program with the values of the file that `--config-name` names."""
    names = [following for word, following in zip(after, [*after[1:], ""], strict=True) if word == "--config-name"]
    names += [word.partition("=")[2] for word in after if word.startswith("--config-name=")]
    own = _OWN_DEFAULTS.get(names[-1], {}) if names else {}
    return replace(LATER, defaults={**_LATER_DEFAULTS, **own})


def find(word: str, after: list[str], before: list[str]) -> tuple[Program, list[str], list[tuple[str, str]]] | None:
    """The program that `word` names, with the environment as a flag."""
    name = Path(word).name
    if name == "train.sh":
        if not after or "=" in after[0]:
            environment, rest = "sokoban", after
        else:
            environment, *rest = after
        if environment not in _SEEDS:
            raise InputError(
                f"the environment {environment} has no importer; those of train.sh with one are {', '.join(_SEEDS)}; "
                "`posttrain env list` has all environments"
            )
        kind = next((one.partition("=")[2] for one in rest if one.startswith("rl_or_sft=")), "rl")
        if kind not in ("rl", "sft"):
            raise InputError(f"rl_or_sft={kind}; it must be rl or sft")
        return (FIRST if kind == "rl" else FIRST_SFT), rest, [("env", environment)]
    if name == "train.py" and any("=" in one or one.startswith("--config-name") for one in after):
        return _later(after), after, []
    return None
