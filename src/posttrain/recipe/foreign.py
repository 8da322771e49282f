"""Names of keys in TRL, transformers, OpenRLHF and verl -> the keys here, for error messages."""

_BATCH = ("rows_per_update", "rollout.groups_per_step", "learner.tokens_per_batch")
_TURN = ("rollout.tokens_per_turn",)
_REWARD = ("environment.reward",)
_MODEL = ("model.path",)
_ROWS = ("data.train", "environment.prompts", "data.test")

FOREIGN_KEYS: dict[str, tuple[str, ...]] = {
    **dict.fromkeys(("lr", "learning_rate", "actor_learning_rate"), ("optimizer.learning_rate",)),
    "critic_learning_rate": ("critic.optimizer.learning_rate",),
    **dict.fromkeys(("batch_size", "per_device_train_batch_size", "train_batch_size"), _BATCH),
    "rollout_batch_size": ("rollout.groups_per_step",),
    "per_device_eval_batch_size": ("learner.tokens_per_batch",),
    **dict.fromkeys(("micro_train_batch_size", "gradient_accumulation_steps"), ("learner.tokens_per_batch",)),
    **dict.fromkeys(("max_length", "max_len", "max_seq_length", "max_seq_len"), ("data.max_tokens", *_TURN)),
    **dict.fromkeys(("max_prompt_length", "prompt_max_len"), ("rollout.tokens_per_episode", "data.max_tokens")),
    **dict.fromkeys(("max_completion_length", "max_new_tokens", "generate_max_len", "max_response_length"), _TURN),
    **dict.fromkeys(("response_length", "max_tokens"), _TURN),
    **dict.fromkeys(
        ("num_generations", "n_samples_per_prompt", "group_size"), ("rollout.episodes_per_group", "samples")
    ),
    **dict.fromkeys(("reward_funcs", "reward_func", "reward_fn", "reward_function"), _REWARD),
    "reward_weights": ("environment.reward", "credit.weights"),
    **dict.fromkeys(("reward_model", "reward_model_path", "reward_pretrain"), ("reward.path",)),
    **dict.fromkeys(("beta", "init_kl_coef", "kl_coef", "kl_loss_coef"), ("loss.beta", "kl.coefficient")),
    "kl_estimator": ("kl.estimator",),
    **dict.fromkeys(("eps_clip", "cliprange", "clip_range", "clip_ratio", "epsilon_low"), ("loss.clip_low",)),
    **dict.fromkeys(("epsilon_high", "eps_clip_high"), ("loss.clip_high",)),
    "loss_type": ("loss.type",),
    "label_smoothing": ("loss.label_smoothing",),
    **dict.fromkeys(("advantage_estimator", "adv_estimator"), ("credit.type",)),
    "scale_rewards": ("credit.divide_by_std",),
    **dict.fromkeys(("gamma", "discount"), ("credit.discount",)),
    **dict.fromkeys(("lam", "lambd", "gae_lambda"), ("credit.gae_lambda",)),
    **dict.fromkeys(("num_iterations", "num_ppo_epochs", "ppo_epochs"), ("learner.epochs_per_step",)),
    **dict.fromkeys(("num_train_epochs", "num_epochs", "max_epochs", "total_epochs"), ("epochs", "steps")),
    **dict.fromkeys(("max_steps", "num_steps", "total_steps"), ("steps",)),
    **dict.fromkeys(("max_grad_norm", "max_norm", "grad_clip"), ("optimizer.max_gradient_norm",)),
    **dict.fromkeys(("warmup_steps", "warmup_ratio", "lr_warmup_ratio"), ("optimizer.warmup_updates",)),
    **dict.fromkeys(("lr_scheduler_type", "lr_scheduler"), ("optimizer.schedule",)),
    **dict.fromkeys(("weight_decay", "l2"), ("optimizer.weight_decay",)),
    "adam_betas": ("optimizer.betas",),
    **dict.fromkeys(("model_name_or_path", "model_name", "pretrain", "model_id"), _MODEL),
    "ref_model": ("kl.reference.mix", "reference.mix"),
    "teacher_model_name_or_path": ("teacher.path",),
    "critic_pretrain": ("critic.path",),
    **dict.fromkeys(("output_dir", "save_path", "ckpt_path"), ("runs",)),
    "run_name": ("name",),
    "save_steps": ("checkpoint.every",),
    "save_total_limit": ("checkpoint.keep",),
    "eval_steps": ("evaluation.every",),
    **dict.fromkeys(("report_to", "use_wandb", "use_tensorboard"), ("sinks",)),
    "wandb_project": ("tracking.project",),
    **dict.fromkeys(("lora_r", "lora_rank"), ("model.lora.rank",)),
    "lora_alpha": ("model.lora.alpha",),
    "lora_dropout": ("model.lora.dropout",),
    "lora_target_modules": ("model.lora.targets",),
    **dict.fromkeys(("use_peft", "peft_config"), ("model.lora.rank",)),
    **dict.fromkeys(("bf16", "fp16", "torch_dtype", "param_dtype"), ("model.dtype",)),
    "gradient_checkpointing": ("model.gradient_checkpointing",),
    **dict.fromkeys(("use_vllm", "vllm_mode"), ("engine.type",)),
    "vllm_gpu_memory_utilization": ("engine.gpu_memory_utilization",),
    "vllm_num_engines": ("engine.servers",),
    "vllm_tensor_parallel_size": ("engine.tensor_parallel",),
    "temperature": ("rollout.sampling.temperature", "sampling.temperature"),
    "top_p": ("rollout.sampling.top_p", "sampling.top_p"),
    "top_k": ("rollout.sampling.top_k", "sampling.top_k"),
    **dict.fromkeys(("dataset", "dataset_name", "train_dataset", "train_file", "prompt_data"), _ROWS),
    **dict.fromkeys(("eval_dataset", "test_file"), ("data.validation", "evaluation.held_out")),
    "input_key": ("data.columns.prompt", "environment.columns.prompt"),
    **dict.fromkeys(("assistant_only_loss", "completion_only_loss"), ("loss_on",)),
    **dict.fromkeys(("entropy_coef", "entropy_loss_coef"), ("entropy.coefficient",)),
    "ptx_coef": ("ptx.coefficient",),
    **dict.fromkeys(("vf_coef", "value_loss_coef"), ("critic.coefficient",)),
}
"""Name in the other framework -> keys here. The message names the first key that the stage has."""

_REMARKS = {
    "rows_per_update": "the rows of one update; learner.tokens_per_batch bounds the memory",
    "rollout.groups_per_step": "the prompts of one step, each with rollout.episodes_per_group answers; "
    "learner.tokens_per_batch bounds the memory",
    "learner.tokens_per_batch": "the tokens of one forward pass, which change the memory and not the result",
    "data.max_tokens": "the tokens of a row",
    "rollout.tokens_per_turn": "the tokens of an answer",
    "rollout.tokens_per_episode": "the tokens of prompt and answers together",
    "environment.reward": "FILE.py:FUNCTION, or a list of them, with environment.type=text_task",
    "runs": "the folder of all runs; this one is runs/NAME",
    "model.lora.rank": "which turns LoRA on",
    "environment.prompts": "with environment.type=text_task",
}


def native_key(name: str, keys: list[str]) -> str | None:
    """The key among `keys` that TRL or OpenRLHF call `name`, with a note on its unit; None if there is none."""
    for native in FOREIGN_KEYS.get(name, ()):
        if native in keys:
            remark = f" ({_REMARKS[native]})" if native in _REMARKS else ""
            return f"{native}{remark}"
    return None
