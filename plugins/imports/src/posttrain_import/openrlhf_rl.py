"""Flags of OpenRLHF's `train_ppo_ray`, and of the fork `train_drca_ray`."""

from collections.abc import Iterator, Mapping
from typing import Any

from posttrain_import.openrlhf_common import (
    ALWAYS,
    COMMON,
    LOCAL,
    ONE_DEVICE,
    answers_of,
    has_critic,
    implied_row,
    input_key,
    needs_rows,
    updates_per_step,
)
from posttrain_import.rows import (
    NO_ROWS,
    Answer,
    Flags,
    Row,
    Rule,
    choice,
    converted,
    data_path,
    equal,
    literal,
    switch,
    unsupported,
    without_effect,
)

_AGENT = "the environment that replaces the agent reads its own tasks"


def _prompts(value: str, flags: Flags) -> Answer:
    if flags.text("agent_func_path"):
        return Answer("not supported", {}, _AGENT)
    path = data_path(value)
    return Answer(
        "converted",
        {"environment.type": "text_task", "environment.prompts": path if isinstance(path, list) else [path]},
    )


def _columns(value: str, flags: Flags) -> Answer:
    if flags.text("agent_func_path"):
        return Answer("no effect", {}, _AGENT)
    return input_key("environment").apply(value, flags)


def _label(value: str, flags: Flags) -> Answer:
    if flags.text("agent_func_path"):
        return Answer("no effect", {}, _AGENT)
    return Answer("equal", {"environment.columns.label": value})


def _lengths(flags: Flags) -> tuple[Mapping[str, Any], str]:
    prompt, answer = flags.whole("prompt_max_len"), flags.whole("generate_max_len")
    return {"rollout.tokens_per_episode": prompt + answer}, (
        f"{prompt} + {answer}; a longer prompt is left out and counted, the original cuts its beginning"
    )


def _per_step(flags: Flags) -> tuple[Mapping[str, Any], str]:
    sampled, size = answers_of(flags), flags.whole("train_batch_size")
    note = f"{flags.text('rollout_batch_size')} x {flags.text('n_samples_per_prompt')} answers / {size}"
    if sampled % size:
        note += ", rounded down"
    return {"learner.updates_per_step": max(1, sampled // size)}, note


def _micro(flag: str, key: str) -> Rule:
    def make(flags: Flags) -> tuple[Mapping[str, Any], str]:
        if key.startswith("reward.") and not flags.text("reward_pretrain"):
            return {}, "the engine batches as its cache allows"
        longest = flags.whole("prompt_max_len") + flags.whole("generate_max_len")
        rows = flags.whole(flag)
        return {key: rows * longest}, f"{rows} answers x {longest} tokens; no effect on the result"

    return converted(make)


def _steps(flags: Flags) -> tuple[Mapping[str, Any], str]:
    if flags.rows is None:
        return {}, NO_ROWS.format("`steps`")
    prompts, passes = flags.whole("rollout_batch_size"), flags.whole("num_episodes")
    return {"steps": max(1, passes * (flags.rows // prompts))}, (
        f"{passes} x {flags.rows} prompts / {prompts}, incomplete batches dropped"
    )


def _discount(value: str, flags: Flags) -> Answer:
    if flags.text("advantage_estimator") in ("gae", "reinforce"):
        return Answer("equal", {"credit.discount": literal(value)})
    return Answer("no effect", {}, "no effect in the original: this estimator sets it to 1")


def _gae(key: str) -> Rule:
    """A key that applies to GAE only."""

    def apply(value: str, flags: Flags) -> Answer:
        if has_critic(flags):
            return Answer("equal", {key: literal(value)})
        return Answer("no effect", {}, "this estimator has no critic")

    return Rule(apply)


def _value_clip(value: str, flags: Flags) -> Answer:
    if not has_critic(flags):
        return Answer("no effect", {}, "this estimator has no critic")
    if updates_per_step(flags) * flags.whole("max_epochs") == 1:
        return Answer("no effect", {}, "with one update per step values have not changed yet")
    return Answer("equal", {"critic.clip": literal(value)})


def _critic_path(value: str, flags: Flags) -> Answer:
    return Answer("equal", {"critic.path": value}) if has_critic(flags) else Answer("no effect", {}, "no critic")


def _reward_path(value: str, flags: Flags) -> Answer:
    keys = {"reward.path": value}
    if has_critic(flags) and "critic_pretrain" not in flags:
        return Answer("converted", {**keys, "critic.path": value}, "the critic starts from the reward model, in both")
    return Answer("equal", keys)


def _remote_reward(value: str, _: Flags) -> Answer:
    if value.endswith(".py"):
        return Answer(
            "converted",
            {"environment.reward": f"{value}:reward_func"},
            "change its signature to `reward(prompt, answer, **row) -> float`, called for each answer",
        )
    return Answer(
        "not supported", {}, "write a function that calls the server, and set `environment.reward=FILE.py:FUNCTION`"
    )


def _normalized(value: str, flags: Flags) -> Answer:
    if not flags.text("reward_pretrain"):
        return Answer("no effect", {}, "no effect in the original without a reward model")
    off = value.lower() == "false"
    note = "" if off else "by mean and standard deviation of the validation rewards, which the reward model stores"
    return Answer("converted", {"reward.normalize": "none" if off else "stored"}, note)


def _reward_clip(value: str, flags: Flags) -> Answer:
    if not flags.text("reward_pretrain"):
        return Answer("no effect", {}, "rewards of functions and environments are not clipped here")
    low, high = (float(literal(word)) for word in value.split())
    if low != -high:
        return Answer("not supported", {}, "`reward.clip` is one number for both signs")
    return Answer("converted", {"reward.clip": high}, "")


def _clip(value: str, flags: Flags) -> Answer:
    note = ""
    if flags.text("policy_loss_type") == "gspo":
        note = (
            "the ratio of a stream stays near 1, so a clip of this size has no effect; GSPO's paper has 3e-4 and 4e-4"
        )
    return Answer("equal", {"loss.clip_low": literal(value), "loss.clip_high": literal(value)}, note)


def _clips(value: str, _: Flags) -> Answer:
    low, high = value.split()
    return Answer("equal", {"loss.clip_low": literal(low), "loss.clip_high": literal(high)})


def _kl_place(value: str, flags: Flags) -> Answer:
    return Answer("converted", {"kl.apply_to": "reward" if value.lower() == "false" else "loss"})


def _vllm(key: str) -> Rule:
    return without_effect(LOCAL + f"`{key}`")


_ESTIMATORS = {
    "gae": "gae",
    "rloo": "rloo",
    "group_norm": "grpo",
    "dr_grpo": "dr_grpo",
    "reinforce": "reinforce_pp",
    "reinforce_baseline": "reinforce_pp_baseline",
}
PPO: dict[str, Rule] = {
    **COMMON,
    **{
        f"{role}_{what}": without_effect(ONE_DEVICE)
        for role in ("ref", "reward", "critic", "actor")
        for what in ("num_nodes", "num_gpus_per_node")
    },
    **{
        name: without_effect("all models share one device", flag=True)
        for name in (
            "colocate_all_models",
            "colocate_actor_ref",
            "colocate_critic_reward",
            "ref_reward_offload",
            "actor_init_on_gpu",
        )
    },
    "vllm_num_engines": _vllm("engine.servers"),
    "vllm_tensor_parallel_size": _vllm("engine.tensor_parallel"),
    "vllm_gpu_memory_utilization": _vllm("engine.gpu_memory_utilization"),
    "vllm_sync_backend": without_effect("no effect in the original without `--vllm_sync_with_ray`"),
    "vllm_sync_with_ray": without_effect("weights need no copy", flag=True),
    "vllm_enable_sleep": without_effect("engine and learner share the weights", flag=True),
    "vllm_generate_batch_size": without_effect("the engine batches as its cache allows"),
    "rollout_tasks_per_gpu": without_effect("the engine batches as its cache allows"),
    "enable_prefix_caching": without_effect(ALWAYS, flag=True),
    "enforce_eager": without_effect("affects speed only", flag=True),
    "deepspeed_enable_sleep": without_effect("affects memory only", flag=True),
    "use_dynamic_batch": without_effect("batches are always filled by tokens", flag=True),
    "train_max_tokens_per_gpu": equal("learner.tokens_per_batch"),
    "rollout_max_tokens_per_gpu": without_effect("the engine batches as its cache allows"),
    "async_train": switch("rollout.async_rollouts", 1),
    "async_queue_size": equal("rollout.async_rollouts"),
    "partial_rollout": switch("rollout.on_new_weights", "continue"),
    "enable_ema": unsupported(
        "`kl.reference` follows the policy; the exported model is the best checkpoint", flag=True
    ),
    "ema_beta": without_effect("belongs to `--enable_ema`"),
    "reward_pretrain": Rule(_reward_path),
    "critic_pretrain": Rule(_critic_path),
    "remote_rm_url": Rule(_remote_reward),
    "agent_func_path": unsupported(
        "write the agent as an environment (`reset`, `step`) and set `environment.type=FILE.py`"
    ),
    "value_head_prefix": without_effect("the head is always `score`"),
    "save_value_network": without_effect("checkpoints hold the critic", flag=True),
    "rollout_batch_size": equal("rollout.groups_per_step", note="prompts of a step"),
    "n_samples_per_prompt": equal("rollout.episodes_per_group", note="answers to a prompt"),
    "train_batch_size": converted(_per_step),
    "micro_train_batch_size": _micro("micro_train_batch_size", "learner.tokens_per_batch"),
    "micro_rollout_batch_size": _micro("micro_rollout_batch_size", "reward.tokens_per_batch"),
    "max_epochs": equal("learner.epochs_per_step", note="passes over the answers of a step"),
    "num_episodes": needs_rows(converted(_steps)),
    "max_samples": without_effect("all prompts are used; it limits the steps above"),
    "prompt_max_len": converted(_lengths),
    "generate_max_len": equal("rollout.tokens_per_turn"),
    "max_len": equal("rollout.tokens_per_episode"),
    "actor_learning_rate": equal("optimizer.learning_rate"),
    "critic_learning_rate": _gae("critic.optimizer.learning_rate"),
    "init_kl_coef": equal("kl.coefficient"),
    "kl_target": equal("kl.target"),
    "kl_horizon": converted(
        lambda flags: (
            ({"kl.horizon": flags.number("kl_horizon")}, "") if flags.text("kl_target") else ({}, "needs `--kl_target`")
        )
    ),
    "kl_estimator": equal("kl.estimator"),
    "use_kl_loss": Rule(_kl_place, switch=True),
    "advantage_estimator": choice("credit.type", _ESTIMATORS),
    "gamma": Rule(_discount),
    "lambd": _gae("credit.gae_lambda"),
    "no_advantage_std_norm": unsupported(
        "`credit.whiten=false` neither centers nor scales; only `gae` and REINFORCE++ whiten", flag=True
    ),
    "value_clip": Rule(_value_clip),
    "freezing_actor_steps": converted(
        lambda flags: (
            {"critic.updates_before_policy": max(0, flags.whole("freezing_actor_steps"))} if has_critic(flags) else {},
            "" if has_critic(flags) else "no critic",
        )
    ),
    "policy_loss_type": choice("loss.type", {"ppo": "ppo", "gspo": "gspo"}),
    "eps_clip": Rule(_clip),
    "eps_clip_low_high": Rule(_clips, many=True),
    "dual_clip": equal("loss.dual_clip"),
    "entropy_loss_coef": equal("entropy.coefficient"),
    "ptx_coef": without_effect(
        "no effect in the original, which parses it but does not use it; see `posttrain recipe ptx`"
    ),
    "normalize_reward": Rule(_normalized, switch=True),
    "reward_clip_range": Rule(_reward_clip, many=True),
    "temperature": equal("rollout.sampling.temperature"),
    "top_p": equal("rollout.sampling.top_p"),
    "prompt_data": Rule(_prompts),
    "prompt_data_probs": unsupported("list the files; all prompts of all files are used"),
    "prompt_split": without_effect("name a file, or `train` of a hub id is read"),
    "eval_dataset": unsupported("add `{path: FILE, use: validation}` to `environment.prompts`"),
    "eval_split": without_effect("belongs to `--eval_dataset`"),
    "eval_temperature": equal("evaluation.sampling.temperature"),
    "eval_n_samples_per_prompt": equal("evaluation.episodes_per_seed"),
    "input_key": Rule(_columns),
    "label_key": Rule(_label),
    "dynamic_filtering": switch("rollout.filter.type", "dynamic", "groups with equal returns are replaced"),
    "dynamic_filtering_reward_range": without_effect(
        "groups with equal returns are dropped for any return",
    ),
    "overlong_buffer_len": converted(
        lambda flags: (
            {
                "rollout.overlong_penalty.limit": flags.whole("generate_max_len"),
                "rollout.overlong_penalty.buffer": flags.whole("overlong_buffer_len"),
                "rollout.overlong_penalty.penalty": flags.number("overlong_penalty_factor", 1),
            },
            "",
        )
    ),
    "overlong_penalty_factor": without_effect("in `rollout.overlong_penalty`"),
    "enable_vllm_is_correction": switch("loss.correction.weights", "token"),
    "vllm_is_truncated_threshold": equal("loss.correction.cap"),
}
PPO_DEFAULTS = {
    "save_steps": "-1",
    "train_batch_size": "128",
    "micro_train_batch_size": "4",
    "micro_rollout_batch_size": "8",
    "rollout_batch_size": "1024",
    "n_samples_per_prompt": "1",
    "max_epochs": "1",
    "num_episodes": "1",
    "prompt_max_len": "1024",
    "generate_max_len": "1024",
    "actor_learning_rate": "1e-6",
    "critic_learning_rate": "9e-6",
    "init_kl_coef": "0.01",
    "kl_estimator": "k1",
    "use_kl_loss": "false",
    "advantage_estimator": "gae",
    "gamma": "1.0",
    "lambd": "1.0",
    "value_clip": "0.5",
    "freezing_actor_steps": "-1",
    "policy_loss_type": "ppo",
    "eps_clip": "0.2",
    "normalize_reward": "false",
    "reward_clip_range": "-10 10",
    "temperature": "1.0",
    "top_p": "1.0",
    "max_norm": "1.0",
    "l2": "0.0",
    "adam_betas": "0.9 0.95",
    "lr_scheduler": "cosine_with_min_lr",
    "lr_warmup_ratio": "0.03",
}


def of_ppo(flags: Flags) -> Iterator[Row]:
    if has_critic(flags):
        yield implied_row("GAE", "advantages whitened over the step", {"credit.whiten": True})
    if flags.text("policy_loss_type") == "ppo":
        yield implied_row(
            "loss", "mean over tokens", {"loss.aggregation": "token_mean"}, "the divisor is global over the update here"
        )
    yield implied_row("entropy bonus", "none", {"entropy.coefficient": 0.0})
    if flags.on("bf16") or flags.text("param_dtype"):
        keys = {"reward.dtype": "bfloat16"} if flags.text("reward_pretrain") else {}
        keys |= {"critic.dtype": "bfloat16"} if has_critic(flags) else {}
        if keys:
            yield implied_row("--bf16", "of the other models", keys)
    if not flags.text("reward_pretrain") and not flags.text("remote_rm_url") and not flags.text("agent_func_path"):
        yield Row("reward", "none", Answer("not supported", {}, "set `environment.reward` or `reward.path`"), True)


def _unit_kind(value: str, _: Flags) -> Answer:
    kinds = {"regex": "steps", "entropy": "entropy"}
    if value not in kinds:
        return Answer("not supported", {}, "use regex or entropy")
    return Answer("converted", {"unit_credit.segmenter.type": kinds[value]}, "labels must count A, B, C or 1, 2, 3")


DRCA: dict[str, Rule] = {
    **PPO,
    "max_units_per_sequence": converted(
        lambda flags: (
            {"unit_credit.segmenter.max_units": flags.whole("max_units_per_sequence")},
            "the last unit has the rest, in both",
        )
    ),
    "drca_beta": converted(
        lambda flags: (
            {"unit_credit.type": "drca_published", "unit_credit.beta": flags.number("drca_beta")},
            "as published, which counts later steps several times; we recommend `unit_credit.type=prefix`",
        )
    ),
    "unit_extraction": Rule(_unit_kind),
    "entropy_threshold": equal("unit_credit.segmenter.threshold"),
}
