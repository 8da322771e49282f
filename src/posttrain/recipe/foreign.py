"""Names of keys in TRL, transformers, OpenRLHF and verl -> the keys here, for error messages and for `posttrain
import`.
"""

_BATCH = ("rows_per_update", "rollout.groups_per_step", "learner.tokens_per_batch")
_TURN = ("rollout.tokens_per_turn",)
_REWARD = ("environment.reward",)
_MODEL = ("model.path",)
_ROWS = ("data.train", "environment.prompts", "data.test")
_FILTER = ("rollout.filter.type",)
_CORRECTION = ("loss.correction.weights",)
_DEVICES = ("hardware.processes",)
_ONE = "affects speed or memory only, and has no counterpart here"
_LOADER = "rows are tokenized once and cached"
_PLACES = "`hardware.processes=N` divides weights and optimizer over N devices"
_LOGS = "every step is in `metrics.jsonl`"

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
    # OpenRLHF and verl. A name with dots is the end of a dotted key.
    **dict.fromkeys(("actor_lr", "peak_learning_rate"), ("optimizer.learning_rate",)),
    **dict.fromkeys(("critic_lr", "critic.optim.lr"), ("critic.optimizer.learning_rate",)),
    **dict.fromkeys(("base_model", "model_path", "model.path", "tokenizer_name_or_path"), _MODEL),
    **dict.fromkeys(("critic.model.path",), ("critic.path",)),
    **dict.fromkeys(("reward_model.model.path", "reward_model_name_or_path", "reward_model_name"), ("reward.path",)),
    **dict.fromkeys(("remote_rm_url", "custom_reward_function.path", "custom_reward_function.name"), _REWARD),
    **dict.fromkeys(("reward_manager", "agent_func_path", "reward_processing_classes"), _REWARD),
    **dict.fromkeys(("train_files", "train_path", "data_path", "train_data", "train_dataset_path"), _ROWS),
    **dict.fromkeys(
        ("val_files", "eval_data", "eval_file", "validation_file"), ("data.validation", "evaluation.held_out")
    ),
    **dict.fromkeys(("gen_batch_size", "generation_batch_size", "train_bs", "bs", "batch"), _BATCH),
    **dict.fromkeys(("ppo_mini_batch_size", "num_mini_batches", "steps_per_generation"), ("learner.updates_per_step",)),
    **dict.fromkeys(
        (
            "micro_batch_size",
            "micro_batch_size_per_gpu",
            "mini_batch_size",
            "ppo_micro_batch_size",
            "ppo_micro_batch_size_per_gpu",
            "ppo_max_token_len_per_gpu",
            "train_max_tokens_per_gpu",
            "eval_batch_size",
        ),
        ("learner.tokens_per_batch",),
    ),
    **dict.fromkeys(("micro_rollout_batch_size", "local_rollout_forward_batch_size"), ("engine.slots",)),
    **dict.fromkeys(("max_new_token", "max_output_length", "completion_length", "max_response_len"), _TURN),
    **dict.fromkeys(("max_model_length", "vllm_max_model_length"), ("engine.max_model_len",)),
    **dict.fromkeys(("seq_length", "sequence_length", "model_max_length", "cutoff_len"), ("data.max_tokens", *_TURN)),
    "truncation_mode": ("data.overlong",),
    "dataset_text_field": ("data.columns.text",),
    **dict.fromkeys(("output_key", "response_key"), ("data.columns.completion",)),
    "prompt_key": ("data.columns.prompt", "environment.columns.prompt"),
    "chosen_key": ("data.columns.chosen",),
    "rejected_key": ("data.columns.rejected",),
    "label_key": ("data.columns.label", "environment.columns.label"),
    **dict.fromkeys(("max_train_samples", "max_samples", "num_train_samples"), ("data.max_rows", "steps")),
    "dataset_streaming": ("data.streaming",),
    **dict.fromkeys(
        ("rollout.n", "n_rollout", "rloo_k", "num_return_sequences", "num_samples_per_prompt"),
        ("rollout.episodes_per_group", "samples"),
    ),
    **dict.fromkeys(
        ("eval_n_samples_per_prompt", "num_generations_eval", "val_kwargs.n"), ("evaluation.episodes_per_seed",)
    ),
    **dict.fromkeys(("eval_temperature", "val_kwargs.temperature"), ("evaluation.sampling.temperature",)),
    **dict.fromkeys(("eval_max_new_tokens",), _TURN),
    **dict.fromkeys(("stop", "stop_token", "stop_words"), ("rollout.stop_strings",)),
    "min_p": ("rollout.sampling.min_p", "sampling.min_p"),
    **dict.fromkeys(("kl_target", "target_kl"), ("kl.target",)),
    "kl_horizon": ("kl.horizon",),
    **dict.fromkeys(("kl_loss_type", "kl_penalty"), ("kl.estimator",)),
    **dict.fromkeys(("use_kl_loss", "use_kl_in_reward"), ("kl.apply_to",)),
    **dict.fromkeys(("kl_beta", "kl_penalty_coef", "kl_ctrl.kl_coef"), ("kl.coefficient",)),
    **dict.fromkeys(
        ("sync_ref_model", "ref_model_sync_steps"), ("kl.reference.update_every", "reference.update_every")
    ),
    "ref_model_mixup_alpha": ("kl.reference.mix", "reference.mix"),
    **dict.fromkeys(("clip_eps", "clip_epsilon", "epsilon", "eps_clip_low"), ("loss.clip_low",)),
    **dict.fromkeys(("clip_ratio_low",), ("loss.clip_low",)),
    **dict.fromkeys(("clip_ratio_high", "eps_clip_low_high"), ("loss.clip_high",)),
    **dict.fromkeys(("clip_ratio_c", "delta"), ("loss.dual_clip",)),
    **dict.fromkeys(("loss_agg_mode", "token_level_loss"), ("loss.aggregation",)),
    **dict.fromkeys(("policy_loss_type", "loss_mode", "importance_sampling_level", "algo"), ("loss.type",)),
    "mask_truncated_completions": ("loss.mask_truncated",),
    "sapo_temperature_pos": ("loss.positive_temperature",),
    "sapo_temperature_neg": ("loss.negative_temperature",),
    **dict.fromkeys(("vllm_importance_sampling_correction", "enable_vllm_is_correction", "rollout_is"), _CORRECTION),
    **dict.fromkeys(("vllm_importance_sampling_mode", "tis_imp_ratio_cap"), _CORRECTION),
    **dict.fromkeys(
        ("vllm_importance_sampling_cap", "vllm_importance_sampling_clip_max", "rollout_is_threshold"),
        ("loss.correction.cap",),
    ),
    "vllm_importance_sampling_clip_min": ("loss.correction.bounds",),
    "off_policy_mask_threshold": ("loss.off_policy_mask",),
    **dict.fromkeys(("nll_loss_coef", "rpo_alpha", "sft_coef"), ("nll_coefficient",)),
    **dict.fromkeys(("simpo_gamma", "gamma_beta_ratio"), ("loss.gamma",)),
    **dict.fromkeys(("desirable_weight",), ("loss.desirable_weight",)),
    "precompute_ref_log_probs": ("cache_ref_logprobs",),
    "margin_loss": ("loss.margin",),
    **dict.fromkeys(("normalize_advantages", "no_advantage_std_norm"), ("credit.divide_by_std",)),
    **dict.fromkeys(("norm_adv_by_std_in_grpo", "whiten_advantages", "multi_objective_aggregation"), ("credit.type",)),
    **dict.fromkeys(("normalize_reward", "whiten_rewards", "normalize_rewards"), ("reward.normalize",)),
    "reward_clip_range": ("reward.clip",),
    **dict.fromkeys(("value_clip", "cliprange_value"), ("critic.clip",)),
    **dict.fromkeys(("freezing_actor_steps", "critic_warmup"), ("critic.updates_before_policy",)),
    **dict.fromkeys(("dynamic_filtering", "filter_groups.enable", "dynamic_sampling", "rollout_filter_ratio"), _FILTER),
    "rollout_filter_type": _FILTER,
    **dict.fromkeys(("overlong_buffer_len", "overlong_buffer.len"), ("rollout.overlong_penalty.buffer",)),
    **dict.fromkeys(
        ("overlong_penalty_factor", "overlong_buffer.penalty_factor"), ("rollout.overlong_penalty.penalty",)
    ),
    **dict.fromkeys(("entropy_coeff", "ent_coef"), ("entropy.coefficient",)),
    "entropy_target": ("entropy.target",),
    "use_adaptive_entropy": ("entropy.target",),
    "entropy_coef_delta": ("entropy.step",),
    "entropy_coef_max": ("entropy.max_coefficient",),
    "top_entropy_quantile": ("entropy.top_share",),
    **dict.fromkeys(("total_epoch", "n_epochs", "epoch"), ("epochs", "steps")),
    **dict.fromkeys(("num_episodes", "total_training_steps", "total_episodes", "iterations", "max_iters"), ("steps",)),
    **dict.fromkeys(("lr_warmup_steps", "lr_warmup_steps_ratio", "num_warmup_steps"), ("optimizer.warmup_updates",)),
    **dict.fromkeys(("warmup_style", "scheduler", "lr_schedule"), ("optimizer.schedule",)),
    **dict.fromkeys(("lr_scheduler_kwargs", "min_lr", "min_lr_ratio"), ("optimizer.final_fraction",)),
    **dict.fromkeys(("adam_beta1", "adam_beta2"), ("optimizer.betas",)),
    **dict.fromkeys(("adam_epsilon", "adam_eps"), ("optimizer.epsilon",)),
    **dict.fromkeys(("optim", "optimizer_name"), ("optimizer.type",)),
    **dict.fromkeys(("default_local_dir", "output", "out_dir", "save_dir", "logging_dir"), ("runs",)),
    **dict.fromkeys(("experiment_name", "exp_name"), ("name",)),
    "wandb_run_name": ("tracking.run_name",),
    **dict.fromkeys(("project_name", "wandb_name", "trackio_project"), ("tracking.project",)),
    **dict.fromkeys(("wandb_org", "wandb_entity"), ("tracking.entity",)),
    "wandb_group": ("tracking.group",),
    **dict.fromkeys(("logger", "log_with"), ("sinks",)),
    **dict.fromkeys(("save_freq", "save_strategy", "save_interval"), ("checkpoint.every",)),
    **dict.fromkeys(("max_ckpt_num", "max_actor_ckpt_to_keep"), ("checkpoint.keep",)),
    **dict.fromkeys(("test_freq", "eval_strategy", "evaluation_strategy", "eval_interval"), ("evaluation.every",)),
    **dict.fromkeys(("val_before_train", "eval_delay", "eval_on_start"), ("evaluation.start",)),
    "metric_for_best_model": ("evaluation.metric",),
    **dict.fromkeys(("target_modules", "lora_target", "lora_targets"), ("model.lora.targets",)),
    **dict.fromkeys(("r", "peft", "use_lora"), ("model.lora.rank",)),
    "enable_gradient_checkpointing": ("model.gradient_checkpointing",),
    **dict.fromkeys(("load_in_8bit", "use_qlora", "qlora", "bits", "quantization"), ("model.load_in_4bit",)),
    "cast_lm_head_to_fp32": ("model.head_dtype",),
    **dict.fromkeys(("attn_implementation", "flash_attn", "use_flash_attention_2"), ("model.attention",)),
    **dict.fromkeys(("use_liger_kernel", "use_liger", "use_fused_kernels"), ("model.fused",)),
    **dict.fromkeys(("use_cpu", "no_cuda", "device_map"), ("model.device",)),
    "enable_thinking": ("model.thinking", "environment.format.thinking"),
    **dict.fromkeys(("chat_template_path", "tokenizer_chat_template", "input_template"), ("model.chat_template",)),
    "gpu_memory_utilization": ("engine.gpu_memory_utilization",),
    **dict.fromkeys(("tensor_model_parallel_size", "rollout_tp_size"), ("engine.tensor_parallel",)),
    **dict.fromkeys(("vllm_server_base_url", "vllm_server_host"), ("engine.urls",)),
    "enable_prefix_caching": ("engine.prefix_caching",),
    **dict.fromkeys(("num_processes", "n_gpus_per_node", "num_gpus", "world_size", "nproc_per_node"), _DEVICES),
    **dict.fromkeys(("actor_num_gpus_per_node", "zero_stage", "fsdp", "deepspeed"), _DEVICES),
    **dict.fromkeys(("param_offload", "optimizer_offload", "adam_offload"), ("hardware.offload",)),
    **dict.fromkeys(("async_train", "async_queue_size", "partial_rollout"), ("rollout.async_rollouts",)),
    **dict.fromkeys(("max_turn", "max_assistant_turns", "max_tool_calling_iterations"), ("environment.max_turns",)),
    **dict.fromkeys(("env", "env_name", "env_id", "environment_name"), ("environment.type",)),
    **dict.fromkeys(("adv", "advantage", "estimator"), ("credit.type",)),
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
    "learner.updates_per_step": "optimizer updates of a step, each on an equal part of its episodes",
    "engine.slots": "the episodes that are sampled at once",
    "hardware.processes": "the devices that share weights and optimizer",
}


NO_EFFECT: dict[str, str] = {
    **dict.fromkeys(
        ("logging_steps", "logging_strategy", "logging_first_step", "logging_dir", "log_level", "log_level_replica",
         "log_on_each_node", "logging_nan_inf_filter", "include_num_input_tokens_seen", "disable_tqdm", "debug",
         "skip_memory_metrics", "eval_on_start", "log_multimodal", "project", "trackio_space_id", "trackio_bucket_id",
         "trackio_static_space_id"), _LOGS),
    **dict.fromkeys(
        ("dataloader_num_workers", "dataloader_pin_memory", "dataloader_persistent_workers", "dataloader_prefetch_factor",
         "dataloader_multiprocessing_context", "dataloader_in_order", "dataset_num_proc", "remove_unused_columns",
         "length_column_name", "pad_to_multiple_of", "label_names", "dataset_kwargs", "group_by_length"), _LOADER),
    **dict.fromkeys(
        ("tf32", "torch_compile", "torch_compile_backend", "torch_compile_mode", "use_liger_kernel", "liger_kernel_config",
         "use_cache", "torch_empty_cache_steps", "activation_offloading", "activation_checkpointing",
         "activation_checkpointing_kwargs", "gradient_checkpointing_kwargs", "bf16_full_eval", "fp16_full_eval",
         "attn_implementation", "cache_implementation", "per_device_eval_batch_size", "eval_accumulation_steps",
         "batch_eval_metrics", "eval_do_concat_batches", "eval_use_gather_object", "auto_find_batch_size",
         "enable_jit_checkpoint", "ds3_gather_for_generation", "use_transformers_continuous_batching",
         "transformers_continuous_batching_config", "use_transformers_paged"), _ONE),
    **dict.fromkeys(
        ("ddp_find_unused_parameters", "ddp_bucket_cap_mb", "ddp_broadcast_buffers", "ddp_static_graph", "ddp_backend",
         "ddp_timeout", "fsdp", "fsdp_config", "deepspeed", "accelerator_config", "parallelism_config", "local_rank",
         "save_on_each_node"), _PLACES),
    **dict.fromkeys(
        ("do_train", "do_eval", "do_predict", "prediction_loss_only", "greater_is_better", "load_best_model_at_end",
         "include_for_metrics"), "the best checkpoint is always measured and exported; `export=last` takes the last one"),
    **dict.fromkeys(
        ("save_only_model", "ignore_data_skip", "restore_callback_states_from_checkpoint"),
        "checkpoints hold all that a run needs to resume to the same bits"),
    **dict.fromkeys(
        ("hub_strategy", "hub_always_push", "hub_revision", "hub_private_repo"), "belongs to `--push_to_hub`"),
    "full_determinism": "always on a CPU",
    "data_seed": "the order of rows follows from `seed`",
    "average_tokens_across_devices": "the divisor of the loss is always global",
    "dataset_config": "belongs to `--dataset_name`",
    "eval_delay": "`evaluation.start=false` leaves out the first one",
    "ignore_bias_buffers": "not needed",
    "lora_task_type": "follows from the stage",
    "resume_from_checkpoint": "runs continue with `--resume RUN`",
    "overwrite_output_dir": "`--overwrite` on the command line",
}  # fmt: skip
"""Name in TRL or transformers of a key that changes nothing here -> why."""
UNSUPPORTED: dict[str, str] = {
    "model_init_kwargs": "see `posttrain recipe model`",
    "model_revision": "download that revision and set `model.path` to its folder",
    "router_aux_loss_coef": "there is no balancing loss for mixtures of experts",
    "chat_template_path": "write the template to a file and set `model.chat_template`",
    "eos_token": "save the tokenizer that you need with the model",
    "pad_token": "batches have no padding",
    "optim_args": "see `posttrain recipe optimizer`",
    "optim_target_modules": "all weights, or adapters by `model.lora.targets`",
    "lr_scheduler_kwargs": "set `optimizer.final_fraction`",
    "label_smoothing_factor": "there is no label smoothing of next-token losses",
    "neftune_noise_alpha": "there is no noise on embeddings",
    "load_in_8bit": "load in 4 bits: `model.load_in_4bit=true`",
    "use_rslora": "set `model.lora.alpha` to alpha x sqrt(rank)",
    "use_dora": "there is plain LoRA only",
    "lora_modules_to_save": "heads of reward models and critics are trained and saved; other modules are not",
    "lora_target_parameters": "name modules in `model.lora.targets`",
    "fp16": "use bfloat16 or float32: `model.dtype`",
    "train_sampling_strategy": "rows are shuffled by the seed",
    "dataloader_drop_last": "the incomplete last batch is one more update",
    "dataset_train_split": "name the file of that split",
    "f_divergence_type": "the reverse KL divergence only",
    "f_alpha_divergence_coef": "the reverse KL divergence only",
    "ld_alpha": "see `posttrain recipe loss --stage dpo`",
    "loss_weights": "one loss at a time; `nll_coefficient` adds the likelihood of chosen answers",
    "use_weighting": "see `posttrain recipe loss --stage dpo`",
    "discopop_tau": "see `posttrain recipe loss --stage dpo`",
}
"""Name in TRL or transformers of a key without counterpart -> the remedy."""
_QUANTIZED = "4-bit weights are always nf4 with quantized scales: `model.load_in_4bit=true`"
_PACKED = "batches are always packed, without padding"
_ELSEWHERE = {
    **NO_EFFECT,
    **UNSUPPORTED,
    **dict.fromkeys(
        ("packing", "packing_samples", "padding_free", "eval_packing", "packing_strategy", "use_remove_padding"),
        _PACKED,
    ),
    **dict.fromkeys(("bnb_4bit_quant_type", "bnb_4bit_quant_storage", "use_bnb_nested_quant"), _QUANTIZED),
}


def native_key(name: str, keys: list[str]) -> str | None:
    """What to type for a dotted key of another framework, with a note on its unit; None if it is not known.

    `keys`: the keys of the stage. The longest end of `name` that is known counts.
    """
    parts = name.replace("-", "_").split(".")
    for start in range(len(parts)):
        end = ".".join(parts[start:])
        for native in FOREIGN_KEYS.get(end, ()):
            if native in keys:
                return f"use {native}" + (f" ({_REMARKS[native]})" if native in _REMARKS else "")
        if end in _ELSEWHERE:
            return f"it has no counterpart: {_ELSEWHERE[end]}"
    return None
