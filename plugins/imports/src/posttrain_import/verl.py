"""Overrides of verl's `python -m verl.trainer.main_ppo`."""

from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from posttrain_import.programs import Program
from posttrain_import.rows import (
    NO_ROWS,
    Answer,
    Flags,
    Row,
    Rule,
    choice,
    converted,
    equal,
    literal,
    named,
    switch,
    unsupported,
    warmup,
    without_effect,
)

ACTOR, ROLLOUT, REF = "actor_rollout_ref.actor", "actor_rollout_ref.rollout", "actor_rollout_ref.ref"
_SPEED = "affects speed or memory only, and has no counterpart here"
_ENGINE = "the engine batches as its cache allows"
_ONE = "the recipe is for one device; `hardware.processes` divides the weights"


def _sampled(flags: Flags) -> int:
    return flags.whole("data.train_batch_size") * flags.whole(f"{ROLLOUT}.n")


def _updates(flags: Flags) -> tuple[Mapping[str, Any], str]:
    prompts, size = flags.whole("data.train_batch_size"), flags.whole(f"{ACTOR}.ppo_mini_batch_size")
    note = f"{prompts} / {size} prompts" + ("" if prompts % size == 0 else ", rounded down")
    return {"learner.updates_per_step": max(1, prompts // size)}, note


def _lengths(flags: Flags) -> tuple[Mapping[str, Any], str]:
    prompt, answer = flags.whole("data.max_prompt_length"), flags.whole("data.max_response_length")
    return {"rollout.tokens_per_turn": answer, "rollout.tokens_per_episode": prompt + answer}, f"{prompt} + {answer}"


def _micro(flags: Flags) -> tuple[Mapping[str, Any], str]:
    name = next(
        (one for one in (f"{ACTOR}.ppo_micro_batch_size_per_gpu", f"{ACTOR}.ppo_micro_batch_size") if one in flags),
        f"{ACTOR}.ppo_micro_batch_size_per_gpu",
    )
    if literal(flags.text(f"{ACTOR}.use_dynamic_bsz", "false")) is True or not flags.text(name):
        return {}, "`ppo_max_token_len_per_gpu` counts"
    rows, longest = flags.whole(name), flags.whole("data.max_prompt_length") + flags.whole("data.max_response_length")
    return {"learner.tokens_per_batch": rows * longest}, f"{rows} answers x {longest} tokens; changes no gradient"


def _steps(value: str, flags: Flags) -> Answer:
    if flags.text("trainer.total_training_steps", "null") != "null":
        return Answer("equal", {"steps": flags.whole("trainer.total_training_steps")})
    if flags.rows is None:
        return Answer("not supported", {}, NO_ROWS.format("`steps`"))
    epochs, prompts = flags.whole("trainer.total_epochs"), flags.whole("data.train_batch_size")
    return Answer(
        "converted",
        {"steps": max(1, epochs * (flags.rows // prompts))},
        f"{epochs} x {flags.rows} prompts / {prompts}, incomplete batches dropped",
    )


def _kl(value: str, flags: Flags) -> Answer:
    if literal(value) is not True:
        return Answer("no effect", {}, "off")
    kinds = {"kl": "k1", "k1": "k1", "low_var_kl": "k3", "k3": "k3", "mse": "k2", "k2": "k2", "abs": None}
    kind = kinds.get(flags.text(f"{ACTOR}.kl_loss_type", "low_var_kl").rstrip("+"))
    if kind is None:
        return Answer("not supported", {}, "use kl, low_var_kl or mse")
    return Answer("converted", {
        "kl.coefficient": flags.number(f"{ACTOR}.kl_loss_coef", 0.001), "kl.estimator": kind, "kl.apply_to": "loss",
    })  # fmt: skip


def _kl_in_reward(value: str, flags: Flags) -> Answer:
    if literal(value) is not True:
        return Answer("no effect", {}, "off")
    keys: dict[str, Any] = {
        "kl.coefficient": flags.number("algorithm.kl_ctrl.kl_coef", 0.001), "kl.estimator": "k1", "kl.apply_to": "reward",
    }  # fmt: skip
    if flags.text("algorithm.kl_ctrl.type") == "adaptive":
        keys |= {"kl.target": flags.number("algorithm.kl_ctrl.target_kl", 0.1)}
        keys |= {"kl.horizon": flags.number("algorithm.kl_ctrl.horizon", 10000)}
    return Answer("converted", keys)


def _has_critic(flags: Flags) -> bool:
    return flags.text("algorithm.adv_estimator") == "gae"


def _of_critic(key: str) -> Rule:
    def apply(value: str, flags: Flags) -> Answer:
        if _has_critic(flags):
            return Answer("equal", {key: literal(value)})
        return Answer("no effect", {}, "this estimator has no critic")

    return Rule(apply)


def _gamma(value: str, flags: Flags) -> Answer:
    if flags.text("algorithm.adv_estimator") in ("gae", "reinforce_plus_plus"):
        return Answer("equal", {"credit.discount": literal(value)})
    return Answer("no effect", {}, "this estimator does not discount")


def _std(value: str, flags: Flags) -> Answer:
    if flags.text("algorithm.adv_estimator") == "grpo" and literal(value) is False:
        return Answer("no effect", {}, "in `credit.type`")
    return Answer("no effect", {}, "on, as with `credit.type=grpo`")


def _estimator(value: str, flags: Flags) -> Answer:
    if value == "grpo" and literal(flags.text("algorithm.norm_adv_by_std_in_grpo", "true")) is False:
        return Answer("converted", {"credit.type": "dr_grpo"}, "without the standard deviation")
    kinds: dict[str, str] = {
        "gae": "gae", "grpo": "grpo", "rloo": "rloo", "remax": "remax", "opo": "opo",
        "reinforce_plus_plus": "reinforce_pp", "reinforce_plus_plus_baseline": "reinforce_pp_baseline",
        "grpo_passk": "pass_at_k", "gdpo": "gdpo", "brpo": "brpo", "arpo": "arpo", "bi_level_gae": "bilevel_gae",
    }  # fmt: skip
    if value not in kinds:
        return Answer("not supported", {}, f"use {', '.join(kinds)}; see `posttrain recipe credit`")
    outcome = "equal" if kinds[value] == value else "converted"
    return Answer("equal" if outcome == "equal" else "converted", {"credit.type": kinds[value]})


def _aggregation(value: str, flags: Flags) -> Answer:
    answers = flags.whole(f"{ACTOR}.ppo_mini_batch_size") * flags.whole(f"{ROLLOUT}.n")
    if value == "token-mean":
        return Answer("converted", {"loss.aggregation": "token_mean"}, "global over the update here")
    if value == "seq-mean-token-mean":
        return Answer("converted", {"loss.aggregation": "sequence_mean"})
    if value == "seq-mean-token-sum":
        return Answer(
            "converted", {"loss.aggregation": "constant", "loss.constant": answers}, f"{answers} answers of an update"
        )
    if value == "seq-mean-token-sum-norm":
        longest = flags.whole("data.max_response_length")
        return Answer(
            "converted",
            {"loss.aggregation": "constant", "loss.constant": answers * longest},
            f"{answers} answers x {longest} tokens",
        )
    return Answer("not supported", {}, "use token-mean, seq-mean-token-mean or a sum")


def _clip(value: str, flags: Flags) -> Answer:
    keys = [f"loss.clip_{end}" for end in ("low", "high") if f"{ACTOR}.clip_ratio_{end}" not in flags]
    return Answer("equal", dict.fromkeys(keys, literal(value)))


def _paths(value: str) -> list[str]:
    parts = literal(value) if value.startswith("[") else value.split(",")
    return [str(part).strip() for part in parts]


def _mode(value: str, _: Flags) -> Answer:
    kinds = {"vanilla": {}, "gspo": {"loss.type": "gspo"}, "gpg": {"loss.type": "reinforce"}, "cispo": {"loss.type": "cispo"},
             "gmpo": {"loss.type": "gmpo"}, "geo_mean": {"loss.type": "gmpo"}, "sapo": {"loss.type": "sapo"},
             "clip_cov": {"entropy.covariance.type": "clip_cov"}, "kl_cov": {"entropy.covariance.type": "kl_cov"}}  # fmt: skip
    if value not in kinds:
        return Answer("not supported", {}, "see `posttrain recipe loss`")
    return Answer(
        "converted" if kinds[value] else "no effect", kinds[value], "" if kinds[value] else "PPO's loss, as here"
    )


def _every(key: str) -> Rule:
    def apply(value: str, _: Flags) -> Answer:
        steps = int(literal(value))
        if steps > 0:
            return Answer("equal", {key: steps})
        none = 1000 if key == "checkpoint.every" else 0
        return Answer(
            "converted",
            {key: none},
            "never in the original; here " + ("at the end" if none else "only the final one, after training"),
        )

    return Rule(apply)


def _logger(value: str, _: Flags) -> Answer:
    given = literal(value)
    names = [str(name) for name in (given if isinstance(given, list) else [given])]
    known = [name for name in names if name in ("wandb", "tensorboard", "trackio")]
    others = [name for name in names if name not in known and name not in ("console", "file")]
    if others:
        return Answer(
            "not supported",
            {"sinks": known} if known else {},
            f"{', '.join(others)}: use wandb, tensorboard or trackio",
        )
    return (
        Answer("converted", {"sinks": known}, "every line is printed and stored too")
        if known
        else Answer("no effect", {}, "always")
    )


def _ratio(value: str, flags: Flags) -> Answer:
    updates = None
    if flags.text("trainer.total_training_steps", "null") != "null":
        updates = flags.whole("trainer.total_training_steps")
    elif flags.rows is not None:
        updates = flags.whole("trainer.total_epochs") * (flags.rows // flags.whole("data.train_batch_size"))
    if float(literal(value)) <= 0:
        return Answer("no effect", {}, "no warm-up, as here")
    if updates is None:
        return Answer("not supported", {}, NO_ROWS.format("`optimizer.warmup_updates`"))
    keys, note = warmup(updates * _updates(flags)[0]["learner.updates_per_step"], float(literal(value)))
    return Answer("converted", keys, note)


def _filter(value: str, _: Flags) -> Answer:
    if literal(value) is not True:
        return Answer("no effect", {}, "off, as here")
    return Answer("converted", {"rollout.filter.type": "dynamic"}, "groups with equal returns are replaced")


def _reward_function(flags: Flags) -> tuple[Mapping[str, Any], str]:
    path, name = flags.text("custom_reward_function.path"), flags.text("custom_reward_function.name", "compute_score")
    if path in ("", "null"):
        return {}, "the function of the data's `data_source`"
    return {"environment.reward": f"{path}:{name}"}, "change its signature to `reward(prompt, answer, **row)`"


def _devices(flags: Flags) -> tuple[Mapping[str, Any], str]:
    count = flags.whole("trainer.n_gpus_per_node", 1) * flags.whole("trainer.nnodes", 1)
    return {
        "hardware.processes": count
    }, "learner processes; over several machines add `hardware.ray`" if count > 1 else ""


def _engine(value: str, _: Flags) -> Answer:
    if value == "vllm":
        return Answer("converted", {"engine.type": "vllm"})
    return Answer("not supported", {}, f"{value} is not offered; the local engine or `engine.type=vllm`")


def _of_vllm(key: str) -> Rule:
    def apply(value: str, flags: Flags) -> Answer:
        if flags.text(f"{ROLLOUT}.name") == "vllm":
            return Answer("equal", {key: literal(value)})
        return Answer("no effect", {}, f"the local engine; with `engine.type=vllm`: `{key}`")

    return Rule(apply)


def _schedule(value: str, _: Flags) -> Answer:
    kinds: dict[str, dict[str, Any]] = {
        "constant": {"optimizer.schedule": "constant"},
        "cosine": {"optimizer.schedule": "cosine", "optimizer.final_fraction": 0},
    }
    return (
        Answer("converted", kinds[value]) if value in kinds else Answer("not supported", {}, "use constant or cosine")
    )


def _both(*names: str) -> list[str]:
    return [name.format(size) for name in names for size in ("micro_batch_size", "micro_batch_size_per_gpu")]


RULES: dict[str, Rule] = {
    "data.train_files": converted(
        lambda flags: (
            {"environment.type": "text_task", "environment.prompts": _paths(flags.text("data.train_files"))},
            "rows with a column `prompt`",
        )
    ),
    "data.val_files": unsupported("add `{path: FILE, use: validation}` to `environment.prompts`"),
    "data.prompt_key": equal("environment.columns.context_messages", words=True, note="a list of messages in verl"),
    "data.reward_fn_key": without_effect("the reward function is one of the recipe"),
    "data.train_batch_size": equal("rollout.groups_per_step", note="prompts of a step"),
    "data.gen_batch_size": without_effect("`rollout.filter` samples as many prompts as it needs"),
    "data.val_batch_size": without_effect(_ENGINE),
    "data.max_prompt_length": converted(_lengths),
    "data.max_response_length": without_effect("in the lengths of `data.max_prompt_length`"),
    "data.truncation": without_effect("longer prompts are left out and counted"),
    "data.filter_overlong_prompts": without_effect("always; they are counted"),
    "data.shuffle": without_effect("prompts are always shuffled, by the seed"),
    "data.seed": equal("seed"),
    "data.return_raw_chat": without_effect("episodes have their messages"),
    "data.trust_remote_code": switch("model.trust_remote_code"),
    "actor_rollout_ref.model.path": equal("model.path", words=True),
    "actor_rollout_ref.model.trust_remote_code": switch("model.trust_remote_code"),
    "actor_rollout_ref.model.use_remove_padding": without_effect("batches are always packed, without padding"),
    "actor_rollout_ref.model.enable_gradient_checkpointing": equal("model.gradient_checkpointing"),
    "actor_rollout_ref.model.enable_activation_offload": without_effect(_SPEED),
    "actor_rollout_ref.model.use_liger": without_effect("`model.fused` selects Liger's kernels on a GPU that has them"),
    "actor_rollout_ref.model.use_fused_kernels": without_effect("log-probabilities are computed without full logits"),
    "actor_rollout_ref.model.lora_rank": converted(
        lambda flags: (
            {"model.lora.rank": flags.whole("actor_rollout_ref.model.lora_rank")}
            if flags.whole("actor_rollout_ref.model.lora_rank")
            else {},
            "" if flags.whole("actor_rollout_ref.model.lora_rank") else "0: all weights, as here",
        )
    ),
    "actor_rollout_ref.model.lora_alpha": equal("model.lora.alpha"),
    "actor_rollout_ref.model.target_modules": equal("model.lora.targets"),
    "actor_rollout_ref.hybrid_engine": without_effect("engine and learner share the weights"),
    f"{ACTOR}.strategy": without_effect("FSDP2, where there are several processes"),
    f"{ACTOR}.ppo_mini_batch_size": converted(_updates),
    f"{ACTOR}.ppo_micro_batch_size_per_gpu": converted(_micro),
    f"{ACTOR}.ppo_micro_batch_size": converted(_micro),
    f"{ACTOR}.use_dynamic_bsz": without_effect("batches are always filled by tokens"),
    f"{ACTOR}.ppo_max_token_len_per_gpu": equal("learner.tokens_per_batch"),
    f"{ACTOR}.ppo_epochs": equal("learner.epochs_per_step"),
    f"{ACTOR}.shuffle": without_effect("always, by the seed"),
    f"{ACTOR}.grad_clip": equal("optimizer.max_gradient_norm"),
    f"{ACTOR}.clip_ratio": Rule(_clip),
    f"{ACTOR}.clip_ratio_low": equal("loss.clip_low"),
    f"{ACTOR}.clip_ratio_high": equal("loss.clip_high"),
    f"{ACTOR}.clip_ratio_c": equal("loss.dual_clip"),
    f"{ACTOR}.loss_agg_mode": Rule(_aggregation),
    f"{ACTOR}.policy_loss.loss_mode": Rule(_mode),
    f"{ACTOR}.entropy_coeff": equal("entropy.coefficient"),
    f"{ACTOR}.use_kl_loss": Rule(_kl),
    f"{ACTOR}.kl_loss_coef": without_effect("in `use_kl_loss`"),
    f"{ACTOR}.kl_loss_type": without_effect("in `use_kl_loss`"),
    f"{ACTOR}.use_torch_compile": without_effect(_SPEED),
    f"{ACTOR}.ulysses_sequence_parallel_size": unsupported("there is no sequence parallelism", off=("1",)),
    f"{ACTOR}.optim.lr": equal("optimizer.learning_rate"),
    f"{ACTOR}.optim.weight_decay": equal("optimizer.weight_decay"),
    f"{ACTOR}.optim.betas": equal("optimizer.betas"),
    f"{ACTOR}.optim.lr_warmup_steps": converted(
        lambda flags: ({"optimizer.warmup_updates": max(0, flags.whole(f"{ACTOR}.optim.lr_warmup_steps"))}, "")
    ),
    f"{ACTOR}.optim.lr_warmup_steps_ratio": Rule(_ratio),
    f"{ACTOR}.optim.warmup_style": Rule(_schedule),
    f"{ACTOR}.optim.lr_scheduler_type": Rule(_schedule),
    f"{ACTOR}.fsdp_config.param_offload": without_effect("memory only: `hardware.offload`"),
    f"{ACTOR}.fsdp_config.optimizer_offload": without_effect("memory only: `hardware.offload`"),
    f"{ACTOR}.fsdp_config.fsdp_size": without_effect(_ONE),
    f"{REF}.fsdp_config.param_offload": without_effect("memory only: `hardware.offload`"),
    **{name: without_effect(_ENGINE) for name in (
        *_both(f"{REF}.log_prob_{{}}", f"{ROLLOUT}.log_prob_{{}}", "critic.forward_{}", "reward_model.{}"),
        f"{REF}.log_prob_use_dynamic_bsz", f"{ROLLOUT}.log_prob_use_dynamic_bsz", f"{REF}.log_prob_max_token_len_per_gpu",
        f"{ROLLOUT}.log_prob_max_token_len_per_gpu", f"{ROLLOUT}.max_num_batched_tokens", f"{ROLLOUT}.enable_chunked_prefill",
        f"{ROLLOUT}.free_cache_engine", f"{ROLLOUT}.disable_log_stats", f"{ROLLOUT}.load_format", f"{ROLLOUT}.layered_summon",
        f"{ROLLOUT}.mode", f"{ROLLOUT}.prompt_length", f"{ROLLOUT}.response_length",
    )},
    f"{ROLLOUT}.name": Rule(_engine),
    f"{ROLLOUT}.n": equal("rollout.episodes_per_group"),
    f"{ROLLOUT}.temperature": equal("rollout.sampling.temperature"),
    f"{ROLLOUT}.top_p": equal("rollout.sampling.top_p"),
    f"{ROLLOUT}.top_k": converted(
        lambda flags: ({"rollout.sampling.top_k": max(0, flags.whole(f"{ROLLOUT}.top_k"))}, "-1 is 0 here")
    ),
    f"{ROLLOUT}.dtype": _of_vllm("engine.dtype"),
    f"{ROLLOUT}.tensor_model_parallel_size": _of_vllm("engine.tensor_parallel"),
    f"{ROLLOUT}.gpu_memory_utilization": _of_vllm("engine.gpu_memory_utilization"),
    f"{ROLLOUT}.enforce_eager": _of_vllm("engine.enforce_eager"),
    f"{ROLLOUT}.max_model_len": _of_vllm("engine.max_model_len"),
    f"{ROLLOUT}.max_num_seqs": _of_vllm("engine.max_num_seqs"),
    f"{ROLLOUT}.val_kwargs.temperature": equal("evaluation.sampling.temperature"),
    f"{ROLLOUT}.val_kwargs.top_p": equal("evaluation.sampling.top_p"),
    f"{ROLLOUT}.val_kwargs.top_k": converted(
        lambda flags: ({"evaluation.sampling.top_k": max(0, flags.whole(f"{ROLLOUT}.val_kwargs.top_k"))}, "-1 is 0 here")
    ),
    f"{ROLLOUT}.val_kwargs.do_sample": without_effect("in `val_kwargs.temperature`; 0 is greedy"),
    f"{ROLLOUT}.val_kwargs.n": equal("evaluation.episodes_per_seed"),
    f"{ROLLOUT}.multi_turn.enable": unsupported("set `environment.type` to an environment with several turns"),
    f"{ROLLOUT}.multi_turn.max_assistant_turns": equal("environment.max_turns"),
    f"{ROLLOUT}.multi_turn.tool_config_path": unsupported("write the tools as an environment, `environment.type=FILE.py`"),
    "algorithm.adv_estimator": Rule(_estimator),
    "algorithm.norm_adv_by_std_in_grpo": Rule(_std),
    "algorithm.gamma": Rule(_gamma),
    "algorithm.lam": _of_critic("credit.gae_lambda"),
    "algorithm.use_kl_in_reward": Rule(_kl_in_reward),
    "algorithm.kl_penalty": without_effect("k1, the only estimator that is a penalty in the reward"),
    **{f"algorithm.kl_ctrl.{name}": without_effect("in `use_kl_in_reward`") for name in ("type", "kl_coef", "target_kl", "horizon")},
    "algorithm.filter_groups.enable": Rule(_filter),
    "algorithm.filter_groups.metric": without_effect("groups are compared by their returns"),
    "algorithm.filter_groups.max_num_gen_batches": equal("rollout.filter.max_rounds"),
    "algorithm.rollout_correction.rollout_is": choice(
        "loss.correction.weights", {"token": "token", "sequence": "sequence", "null": {}}
    ),
    "algorithm.rollout_correction.rollout_is_threshold": equal("loss.correction.cap"),
    "algorithm.rollout_correction.rollout_rs": choice(
        "loss.correction.reject", {"token": "token", "sequence": "sequence", "geometric": "geometric", "null": {}}
    ),
    "critic.model.path": _of_critic("critic.path"),
    "critic.optim.lr": _of_critic("critic.optimizer.learning_rate"),
    "critic.optim.betas": _of_critic("critic.optimizer.betas"),
    "critic.optim.weight_decay": _of_critic("critic.optimizer.weight_decay"),
    "critic.optim.lr_warmup_steps_ratio": without_effect("set `critic.optimizer.warmup_updates`"),
    "critic.cliprange_value": _of_critic("critic.clip"),
    "critic.ppo_epochs": without_effect("`learner.epochs_per_step`, as the policy"),
    **{f"critic.{name}": without_effect("as the policy") for name in (
        "ppo_mini_batch_size", "ppo_micro_batch_size", "ppo_micro_batch_size_per_gpu", "ppo_max_token_len_per_gpu",
        "use_dynamic_bsz", "strategy", "grad_clip", "model.use_remove_padding", "model.enable_gradient_checkpointing",
        "model.fsdp_config.param_offload", "model.fsdp_config.optimizer_offload", "model.tokenizer_path",
        "model.trust_remote_code", "loss_agg_mode", "model.lora_rank", "model.lora_alpha", "model.target_modules",
    )},
    "reward_model.enable": without_effect("follows from `reward_model.model.path`"),
    "reward_model.model.path": equal("reward.path", words=True),
    "reward_model.reward_manager": without_effect("rewards are functions of an answer"),
    "reward_model.overlong_buffer.enable": converted(
        lambda flags: (
            {
                "rollout.overlong_penalty.limit": flags.whole("data.max_response_length"),
                "rollout.overlong_penalty.buffer": flags.whole("reward_model.overlong_buffer.len"),
                "rollout.overlong_penalty.penalty": flags.number("reward_model.overlong_buffer.penalty_factor", 1),
            }
            if literal(flags.text("reward_model.overlong_buffer.enable")) is True
            else {},
            "",
        )
    ),
    "reward_model.overlong_buffer.len": without_effect("in `overlong_buffer.enable`"),
    "reward_model.overlong_buffer.penalty_factor": without_effect("in `overlong_buffer.enable`"),
    "reward_model.overlong_buffer.log": without_effect("always"),
    "custom_reward_function.path": converted(_reward_function),
    "custom_reward_function.name": without_effect("in `custom_reward_function.path`"),
    "trainer.total_epochs": Rule(_steps),
    "trainer.total_training_steps": Rule(_steps),
    "trainer.n_gpus_per_node": converted(_devices),
    "trainer.nnodes": without_effect("in `trainer.n_gpus_per_node`"),
    "trainer.save_freq": _every("checkpoint.every"),
    "trainer.test_freq": _every("evaluation.every"),
    "trainer.val_before_train": equal("evaluation.start"),
    "trainer.val_only": unsupported("`posttrain evaluate RECIPE`"),
    "trainer.critic_warmup": _of_critic("critic.updates_before_policy"),
    "trainer.logger": Rule(_logger),
    "trainer.project_name": equal("tracking.project", words=True),
    "trainer.experiment_name": named("run"),
    "trainer.default_local_dir": without_effect("checkpoints are in `checkpoints/` of the run"),
    "trainer.default_hdfs_dir": without_effect("runs are directories"),
    "trainer.resume_mode": without_effect("runs continue with `--resume RUN`"),
    "trainer.max_actor_ckpt_to_keep": equal("checkpoint.keep"),
    "trainer.max_critic_ckpt_to_keep": without_effect("checkpoints hold the critic"),
    "trainer.balance_batch": without_effect("batches are filled by tokens"),
    "trainer.log_val_generations": without_effect("every episode is in `episodes/`"),
    "trainer.rollout_data_dir": without_effect("every episode is in `episodes/`"),
    "trainer.device": without_effect("`model.device`"),
    "ray_init.num_cpus": without_effect("Ray counts them"),
    "ray_kwargs.ray_init.num_cpus": without_effect("Ray counts them"),
    "--config-name": unsupported("name the overrides; files of hydra are not read", off=("ppo_trainer", "ppo_trainer.yaml")),
    "--config-path": unsupported("name the overrides; files of hydra are not read"),
}  # fmt: skip
DEFAULTS = {
    "data.train_batch_size": "1024",
    "data.max_prompt_length": "512",
    "data.max_response_length": "512",
    f"{ACTOR}.ppo_mini_batch_size": "256",
    f"{ACTOR}.ppo_epochs": "1",
    f"{ACTOR}.grad_clip": "1.0",
    f"{ACTOR}.clip_ratio": "0.2",
    f"{ACTOR}.clip_ratio_c": "3.0",
    f"{ACTOR}.loss_agg_mode": "token-mean",
    f"{ACTOR}.entropy_coeff": "0",
    f"{ACTOR}.use_kl_loss": "false",
    f"{ACTOR}.optim.lr": "1e-6",
    f"{ACTOR}.optim.weight_decay": "0.01",
    f"{ACTOR}.optim.lr_warmup_steps_ratio": "0",
    f"{ROLLOUT}.n": "1",
    f"{ROLLOUT}.temperature": "1.0",
    f"{ROLLOUT}.top_p": "1",
    "algorithm.adv_estimator": "gae",
    "algorithm.gamma": "1.0",
    "algorithm.lam": "1.0",
    "critic.optim.lr": "1e-5",
    "critic.cliprange_value": "0.5",
    "trainer.total_epochs": "30",
}


def _implied(flags: Flags) -> Iterator[Row]:
    def row(name: str, value: str, keys: Mapping[str, Any], note: str = "") -> Row:
        return Row(name, value, Answer("converted", keys, note), True)

    yield row("AdamW", "betas 0.9, 0.999", {"optimizer.betas": [0.9, 0.999]})
    if _has_critic(flags):
        yield row("GAE", "advantages whitened over the step", {"credit.whiten": True})
        yield row("AdamW of the critic", "betas 0.9, 0.999; decay 0.01", {
            "critic.optimizer.betas": [0.9, 0.999], "critic.optimizer.weight_decay": 0.01,
        })  # fmt: skip
    yield row("precision", "bfloat16, float32 master weights", {"model.dtype": "bfloat16"})
    if not any(name in flags for name in ("reward_model.model.path", "custom_reward_function.path")):
        yield Row(
            "reward",
            "by the data's `data_source`",
            Answer("not supported", {}, "set `environment.reward`, such as `final_number`"),
            True,
        )


PPO = Program("verl", "rl", RULES, DEFAULTS, _implied, rows_of="data.train_files", prefix="")


def find(word: str, after: list[str], before: list[str]) -> tuple[Program, list[str], list[tuple[str, str]]] | None:
    """The program that `word` names: verl's trainer of policies."""
    if word == "verl.trainer.main_ppo" or Path(word).name == "main_ppo.py":
        return PPO, after, []
    return None
