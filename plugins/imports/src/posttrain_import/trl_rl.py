"""Flags of TRL's GRPO and RLOO trainers, and of RLOO up to TRL 0.21."""

from collections.abc import Iterator, Mapping
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
    switch,
    unsupported,
    without_effect,
)
from posttrain_import.trl_common import COMMON, COMMON_DEFAULTS, devices, optimizer_rows

MATRICES = ("q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj")
PROMPT = 512
"""Number of prompt tokens that an imported recipe allows, if the command sets no limit."""
OLD_NAMES = {
    "rloo_k", "total_episodes", "num_ppo_epochs", "num_mini_batches", "local_rollout_forward_batch_size", "kl_coef", "cliprange",
    "missing_eos_penalty", "response_length", "reward_model_path",
}  # fmt: skip
"""Flags of RLOO that later versions do not have."""


def _micro(flags: Flags) -> int:
    return flags.whole("per_device_train_batch_size") * flags.whole("gradient_accumulation_steps") * devices(flags)


def _sampled(flags: Flags) -> int:
    """Answers of one generation batch."""
    if flags.text("generation_batch_size"):
        return flags.whole("generation_batch_size")
    each = flags.whole("per_device_train_batch_size") * devices(flags)
    return each * flags.whole("steps_per_generation", flags.whole("gradient_accumulation_steps"))


def _sizes(flags: Flags) -> tuple[Mapping[str, Any], str]:
    answers, group, update = _sampled(flags), flags.whole("num_generations"), _micro(flags)
    note = f"{answers} answers of a generation batch / {group} = {answers // group} prompts; {answers} / {update} an update"
    if answers % group or answers % update:
        note += ", rounded down"
    return {
        "rollout.groups_per_step": max(1, answers // group),
        "learner.updates_per_step": max(1, answers // update),
    }, note


def _batch(flags: Flags) -> tuple[Mapping[str, Any], str]:
    sizes, note = _sizes(flags)
    answer, each = flags.whole("max_completion_length"), flags.whole("per_device_train_batch_size")
    prompt = flags.whole("max_prompt_length", PROMPT)
    return {
        **sizes,
        "learner.tokens_per_batch": each * (prompt + answer),
    }, f"{note}; {each} answers x {prompt + answer} tokens"


def _lengths(flags: Flags) -> tuple[Mapping[str, Any], str]:
    answer, prompt = flags.whole("max_completion_length"), flags.whole("max_prompt_length", PROMPT)
    has_limit = "max_prompt_length" in flags
    return {"rollout.tokens_per_turn": answer, "rollout.tokens_per_episode": prompt + answer}, (
        f"prompts of at most {prompt} tokens; longer ones are left out and counted"
        + ("" if has_limit else ". TRL has no limit: set `rollout.tokens_per_episode` for longer ones")
    )


def _steps(value: str, flags: Flags) -> Answer:
    per_step = _sizes(flags)[0]["learner.updates_per_step"] * flags.whole("num_iterations")
    limit = flags.number("max_steps", -1)
    if limit > 0:
        return Answer(
            "converted", {"steps": max(1, int(limit) // per_step)}, f"{int(limit)} updates / {per_step} of a step"
        )
    if flags.rows is None:
        return Answer("not supported", {}, NO_ROWS.format("`steps`"))
    prompts, epochs = _sizes(flags)[0]["rollout.groups_per_step"], flags.number("num_train_epochs")
    steps = max(1, int(epochs * flags.rows) // prompts)
    return Answer("converted", {"steps": steps}, f"{epochs:g} x {flags.rows} prompts / {prompts}")


def _epochs(value: str, flags: Flags) -> Answer:
    return Answer("no effect", {}, "`--max_steps` wins") if flags.number("max_steps", -1) > 0 else _steps(value, flags)


def _rewards(value: str, _: Flags) -> Answer:
    names = value.split()
    known = {"accuracy_reward": "final_number"}
    functions = [known.get(name, name if ":" in name else ":".join(name.rsplit(".", 1))) for name in names]
    without_module = [
        name for name, function in zip(names, functions, strict=True) if ":" not in function and name not in known
    ]
    if without_module:
        remedy = f"write {', '.join(without_module)} as `reward(prompt, answer, **row)` and set `environment.reward=FILE.py:NAME`"
        return Answer("not supported", {}, remedy)
    note = (
        "`final_number` compares the last number"
        if "final_number" in functions
        else "called as `reward(prompt, answer, **row)` for each answer"
    )
    return Answer("converted", {"environment.reward": functions[0] if len(functions) == 1 else functions}, note)


def _reward_weights(value: str, flags: Flags) -> Answer:
    names = flags.text("reward_funcs").split()
    if len(names) != len(value.split()):
        return Answer("not supported", {}, "one weight for each of `--reward_funcs`")
    functions = _rewards(flags.text("reward_funcs"), flags).keys.get("environment.reward")
    if not isinstance(functions, list):
        return Answer("no effect", {}, "there is one reward")
    sections = [
        {"function": name, "weight": literal(weight)} for name, weight in zip(functions, value.split(), strict=True)
    ]
    return Answer("not supported", {}, f"write environment.reward: {sections}")


def _loss_type(value: str, flags: Flags) -> Answer:
    kinds: dict[str, dict[str, Any]] = {
        "dapo": {"loss.aggregation": "token_mean"},
        "bnpo": {"loss.aggregation": "token_mean"},
        "grpo": {"loss.aggregation": "sequence_mean"},
        "dr_grpo": {
            "loss.aggregation": "constant",
            "loss.constant": _micro(flags) * flags.whole("max_completion_length"),
        },
        "cispo": {"loss.type": "cispo", "loss.aggregation": "token_mean"},
        "sapo": {"loss.type": "sapo", "loss.aggregation": "sequence_mean"},
    }
    if value not in kinds:
        return Answer("not supported", {}, f"use {', '.join(kinds)}; see `posttrain recipe loss`")
    note = "answers x longest answer" if value == "dr_grpo" else "the divisor is global over the update"
    return Answer("converted", kinds[value], note)


def _scale(value: str, _: Flags) -> Answer:
    kinds = {"group": "grpo", "true": "grpo", "none": "dr_grpo", "false": "dr_grpo"}
    if value.lower() in kinds:
        return Answer("converted", {"credit.type": kinds[value.lower()]})
    return Answer(
        "not supported",
        {"credit.type": "grpo"},
        "standard deviations are of the group here; of the batch is `brpo`, with the mean of the batch",
    )


def _clip(key: str) -> Rule:
    def apply(value: str, flags: Flags) -> Answer:
        if flags.text("loss_type") == "sapo":
            return Answer("no effect", {}, "`sapo` does not clip")
        both = key == "loss.clip_low" and not flags.text("epsilon_high")
        if flags.text("loss_type") == "cispo" and key == "loss.clip_low":
            return Answer("no effect", {}, "`cispo` clips above only")
        return Answer("equal", dict.fromkeys((key, "loss.clip_high") if both else (key,), literal(value)))

    return Rule(apply)


def _level(value: str, _: Flags) -> Answer:
    if value == "sequence":
        return Answer("converted", {"loss.type": "gspo", "loss.aggregation": "sequence_mean"})
    return Answer("no effect", {}, "a ratio of each token, as here")


def _beta(value: str, flags: Flags) -> Answer:
    keys: dict[str, Any] = {"kl.coefficient": literal(value)}
    if literal(value):
        old = "num_generations" in flags.defaults and flags.defaults.get("loss_type") is None
        keys |= (
            {"kl.estimator": "k1", "kl.apply_to": "reward"} if old else {"kl.estimator": "k3", "kl.apply_to": "loss"}
        )
    return Answer("converted" if len(keys) > 1 else "equal", keys)


def _correction(value: str, flags: Flags) -> Answer:
    if not flags.on("use_vllm") or value.lower() == "false":
        return Answer("no effect", {}, "without vLLM engine and learner compute the same policy")
    mode = flags.text("vllm_importance_sampling_mode", "sequence_mask")
    high = flags.number("vllm_importance_sampling_clip_max", 3.0)
    level, _, what = mode.partition("_")
    if what == "mask":
        low = flags.number("vllm_importance_sampling_clip_min", 1e-6)
        keys = {"loss.correction.weights": level, "loss.correction.cap": high, "loss.correction.reject": level}
        return Answer("converted", {**keys, "loss.correction.bounds": [low, high]})
    return Answer("converted", {"loss.correction.weights": level, "loss.correction.cap": high})


def _vllm(value: str, flags: Flags) -> Answer:
    return (
        Answer("equal", {"engine.type": "vllm"})
        if flags.on("use_vllm")
        else Answer("no effect", {}, "the local engine")
    )


def _of_vllm(key: str) -> Rule:
    def apply(value: str, flags: Flags) -> Answer:
        return (
            Answer("equal", {key: literal(value)})
            if flags.on("use_vllm")
            else Answer("no effect", {}, "needs `--use_vllm`")
        )

    return Rule(apply)


_RL: dict[str, Rule] = {
    **COMMON,
    "dataset_name": converted(
        lambda flags: (
            {"environment.type": "text_task", "environment.prompts": [flags.text("dataset_name")]},
            "rows with a column `prompt`",
        )
    ),
    "dataset_streaming": unsupported("prompts are read whole", True),
    "reward_model_name_or_path": converted(
        lambda flags: (
            {"reward.path": flags.text("reward_model_name_or_path"), "reward.normalize": "none", "reward.clip": None},
            "",
        )
    ),
    "reward_funcs": Rule(_rewards, many=True),
    "reward_weights": Rule(_reward_weights, many=True),
    "per_device_train_batch_size": converted(_batch),
    "gradient_accumulation_steps": without_effect("in the prompts of a step, see `--per_device_train_batch_size`"),
    "steps_per_generation": without_effect("in the updates of a step, see `--per_device_train_batch_size`"),
    "generation_batch_size": without_effect("in the prompts of a step, see `--per_device_train_batch_size`"),
    "num_generations": equal("rollout.episodes_per_group"),
    "num_generations_eval": equal("evaluation.episodes_per_seed"),
    "num_iterations": equal("learner.epochs_per_step"),
    "num_train_epochs": Rule(_epochs),
    "max_steps": Rule(_steps),
    "max_completion_length": converted(_lengths),
    "max_prompt_length": without_effect("in `rollout.tokens_per_episode`"),
    "temperature": equal("rollout.sampling.temperature"),
    "top_p": equal("rollout.sampling.top_p"),
    "top_k": equal("rollout.sampling.top_k"),
    "min_p": equal("rollout.sampling.min_p"),
    "repetition_penalty": unsupported("sampling has temperature, top_p, top_k and min_p", off=("1.0", "1")),
    "generation_kwargs": unsupported("see `posttrain recipe rollout.sampling`"),
    "chat_template_kwargs": unsupported("the switch of thinking is `model.thinking`"),
    "shuffle_dataset": without_effect("prompts are always shuffled, by the seed", flag=True),
    "disable_dropout": without_effect("dropout of the model is always off", flag=True),
    "cast_lm_head_to_fp32": switch("model.head_dtype", "float32"),
    "use_vllm": Rule(_vllm, switch=True),
    "vllm_mode": converted(
        lambda flags: (
            ({}, "vLLM is always a server process, which may be on the GPU of the learner")
            if flags.on("use_vllm")
            else ({}, "needs `--use_vllm`")
        )
    ),
    "vllm_gpu_memory_utilization": _of_vllm("engine.gpu_memory_utilization"),
    "vllm_tensor_parallel_size": _of_vllm("engine.tensor_parallel"),
    "vllm_max_model_length": _of_vllm("engine.max_model_len"),
    "vllm_enable_sleep_mode": without_effect("memory only", flag=True),
    "vllm_structured_outputs_regex": unsupported("there is no constrained sampling"),
    **{
        name: without_effect("servers are started by the run, or named by `engine.urls`")
        for name in (
            "vllm_server_base_url",
            "vllm_server_host",
            "vllm_server_port",
            "vllm_server_timeout",
            "vllm_group_port",
            "vllm_model_impl",
        )
    },
    "vllm_importance_sampling_correction": Rule(_correction, switch=True),
    "vllm_importance_sampling_mode": without_effect("in `--vllm_importance_sampling_correction`"),
    "vllm_importance_sampling_clip_max": without_effect("in `--vllm_importance_sampling_correction`"),
    "vllm_importance_sampling_clip_min": without_effect("in `--vllm_importance_sampling_correction`"),
    "vllm_importance_sampling_cap": without_effect("in `--vllm_importance_sampling_correction`"),
    "beta": Rule(_beta),
    "epsilon": _clip("loss.clip_low"),
    "epsilon_high": _clip("loss.clip_high"),
    "delta": equal("loss.dual_clip", note="for negative advantages; positive ones are clipped before it"),
    "mask_truncated_completions": switch("loss.mask_truncated"),
    "sync_ref_model": converted(
        lambda flags: (
            {
                "kl.reference.update_every": flags.whole("ref_model_sync_steps", 512),
                "kl.reference.mix": flags.number("ref_model_mixup_alpha", 0.6),
            },
            "",
        ),
        flag=True,
    ),
    "ref_model_mixup_alpha": without_effect("in `--sync_ref_model`"),
    "ref_model_sync_steps": without_effect("in `--sync_ref_model`"),
    "log_completions": without_effect(
        "every episode is in `episodes/`; `posttrain episodes RUN` shows them", flag=True
    ),
    "num_completions_to_print": without_effect("`posttrain episodes RUN --limit N`"),
    "log_unique_prompts": without_effect("`posttrain episodes RUN`", flag=True),
    "log_completions_hub_repo": unsupported("episodes are files in `episodes/` of the run"),
    "max_tool_calling_iterations": unsupported("`environment.max_turns` of an environment with tools"),
}
_GRPO: dict[str, Rule] = {
    **_RL,
    "loss_type": Rule(_loss_type),
    "scale_rewards": Rule(_scale),
    "importance_sampling_level": Rule(_level),
    "multi_objective_aggregation": choice("credit.type", {"sum_then_normalize": {}, "normalize_then_sum": "gdpo"}),
    "top_entropy_quantile": equal("entropy.top_share"),
    "entropy_coef": equal("entropy.coefficient"),
    "use_adaptive_entropy": converted(
        lambda flags: (
            {"entropy.target": flags.number("entropy_target", 0.2), "entropy.step": flags.number("entropy_coef_delta", 0.005),
             "entropy.max_coefficient": flags.number("entropy_coef_max", 1.0)} if flags.on("use_adaptive_entropy") else {}, "",
        ),
        flag=True,
    ),
    **{name: without_effect("in `--use_adaptive_entropy`") for name in ("entropy_target", "entropy_coef_delta", "entropy_coef_max")},
    "entropy_coef_min": unsupported("the smallest coefficient is 0", off=("0.0", "0")),
    "sapo_temperature_neg": equal("loss.negative_temperature"),
    "sapo_temperature_pos": equal("loss.positive_temperature"),
    **{name: unsupported("`vespo` is not offered; see `posttrain recipe loss`") for name in (
        "vespo_k_pos", "vespo_lambda_pos", "vespo_k_neg", "vespo_lambda_neg",
    )},
    "off_policy_mask_threshold": equal("loss.off_policy_mask"),
    "use_bias_correction_kl": switch("kl.importance_weighted"),
}  # fmt: skip
_RLOO: dict[str, Rule] = {
    **_RL,
    "normalize_advantages": unsupported(
        "`credit.type=brpo` normalizes over the batch, without the leave-one-out baseline", True
    ),
    "reward_clip_range": unsupported("`reward.clip` limits rewards of a reward model, by one number for both signs"),
}
_DEFAULTS = {
    **COMMON_DEFAULTS,
    "learning_rate": "1e-6",
    "num_train_epochs": "3",
    "num_iterations": "1",
    "max_completion_length": "512",
    "temperature": "1.0",
    "top_p": "1.0",
    "epsilon": "0.2",
}


def _row(name: str, value: str, keys: Mapping[str, Any], note: str = "") -> Row:
    return Row(name, value, Answer("converted", keys, note), True)


def _of_grpo(flags: Flags) -> Iterator[Row]:
    yield from _without_reward(flags)
    yield from optimizer_rows(flags)


def _of_rloo(flags: Flags) -> Iterator[Row]:
    yield _row("RLOO", "leave one out", {"credit.type": "rloo"})
    update = _micro(flags)
    yield _row(
        "loss",
        "mean over answers",
        {"loss.type": "ppo", "loss.aggregation": "constant", "loss.constant": update},
        f"the sum over an answer's tokens, a mean over {update} answers; the clip is per token here, and of the product in TRL",
    )
    yield from _without_reward(flags)
    yield from optimizer_rows(flags)


def _without_reward(flags: Flags) -> Iterator[Row]:
    if not any(flags.text(name) for name in ("reward_funcs", "reward_model_name_or_path", "reward_model_path")):
        yield Row(
            "reward", "in the script", Answer("not supported", {}, "set `environment.reward` or `reward.path`"), True
        )


def _old_sizes(flags: Flags) -> tuple[Mapping[str, Any], str]:
    batch, group, parts = _old_batch(flags), flags.whole("rloo_k"), flags.whole("num_mini_batches")
    each, prompt = flags.whole("per_device_train_batch_size"), flags.whole("max_prompt_length", PROMPT)
    longest = prompt + flags.whole("response_length")
    return (
        {
            "rollout.groups_per_step": max(1, batch // group),
            "learner.updates_per_step": parts,
            "learner.tokens_per_batch": each * longest,
        },
        f"{each} x {batch // each} = {batch} answers a step / {group} answers to a prompt; {each} answers x {longest} tokens",
    )


def _old_batch(flags: Flags) -> int:
    return _micro(flags) * flags.whole("num_mini_batches")


def _old_steps(flags: Flags) -> tuple[Mapping[str, Any], str]:
    total, batch = flags.whole("total_episodes"), _old_batch(flags)
    return {"steps": -(-total // batch)}, f"answers, not prompts: {total} / {batch}"


_OLD: dict[str, Rule] = {
    **_RLOO,
    "per_device_train_batch_size": converted(_old_sizes),
    "rloo_k": equal("rollout.episodes_per_group"),
    "total_episodes": converted(_old_steps),
    "num_ppo_epochs": equal("learner.epochs_per_step"),
    "num_mini_batches": without_effect("in the updates of a step, see `--per_device_train_batch_size`"),
    "local_rollout_forward_batch_size": converted(
        lambda flags: (
            {
                "reward.tokens_per_batch": flags.whole("local_rollout_forward_batch_size")
                * (PROMPT + flags.whole("response_length"))
            },
            "answers x tokens of full length; no effect on the result",
        )
    ),
    "missing_eos_penalty": equal("rollout.missing_eos_penalty", note="subtracted from the raw score, in both"),
    "kl_coef": converted(
        lambda flags: ({"kl.coefficient": flags.number("kl_coef"), "kl.estimator": "k1", "kl.apply_to": "reward"}, "")
    ),
    "cliprange": equal("loss.clip_low", "loss.clip_high"),
    "response_length": converted(
        lambda flags: (
            {
                "rollout.tokens_per_turn": flags.whole("response_length"),
                "rollout.tokens_per_episode": PROMPT + flags.whole("response_length"),
            },
            f"after prompts of at most {PROMPT} tokens. The original samples on after the end token",
        )
    ),
    "reward_model_path": converted(
        lambda flags: (
            {"reward.path": flags.text("reward_model_path"), "reward.normalize": "none", "reward.clip": None},
            "the raw score",
        )
    ),
    "sft_model_path": equal("model.path", words=True),
    "normalize_reward": unsupported("`reward.normalize=stored` uses statistics that the reward model keeps", True),
    "whiten_rewards": without_effect("the original parses it but does not use it", flag=True),
    "token_level_kl": without_effect("the sum over an answer is the same", flag=True),
    "stop_token": unsupported("an answer ends at the end token; other texts are `rollout.stop_strings`"),
    "num_sample_generations": without_effect("`evaluation.every` measures held-out prompts"),
}
_OLD_DEFAULTS = {
    **COMMON_DEFAULTS,
    "learning_rate": "1e-6",
    "rloo_k": "2",
    "num_ppo_epochs": "4",
    "num_mini_batches": "1",
    "kl_coef": "0.05",
    "cliprange": "0.2",
    "response_length": "53",
    "temperature": "0.7",
}


def _of_helpsteer(flags: Flags) -> Iterator[Row]:
    """Rows for values that the RLOO script of the HelpSteer3 experiment hard-codes."""
    yield _row("model", "Qwen/Qwen3-8B", {"model.path": "Qwen/Qwen3-8B"}, "the reference model is the same one")
    yield _row(
        "prompts",
        "nvidia/HelpSteer3, English, at most 512 tokens",
        {"environment.type": "text_task", "environment.prompts": ["runs/helpsteer3/data/prompts.jsonl"]},
        "`posttrain pipeline helpsteer3/pipeline --only data` writes it",
    )
    yield from _of_rloo(flags)


PROGRAMS = {
    "grpo": Program(
        "TRL", "rl", _GRPO,
        {**_DEFAULTS, "num_generations": "8", "beta": "0.0", "loss_type": "dapo", "scale_rewards": "group"},
        _of_grpo, rows_of="dataset_name", negation=True,
    ),
    "rloo": Program(
        "TRL", "rl", _RLOO, {**_DEFAULTS, "num_generations": "2", "beta": "0.05"}, _of_rloo, rows_of="dataset_name",
        negation=True,
    ),
    "old_rloo": Program("TRL", "rl", _OLD, _OLD_DEFAULTS, _of_rloo, negation=True),
    "rloo_helpsteer_training": Program(
        "TRL", "rl", _OLD, {**_OLD_DEFAULTS, "save_steps": "500"}, _of_helpsteer, negation=True,
    ),
}  # fmt: skip
