"""Flags that all programs of OpenRLHF share."""

from collections.abc import Mapping
from typing import Any

from posttrain_import.rows import (
    LONG,
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

ONE_DEVICE = "the recipe is for one device; `hardware.processes` divides the weights over several"
LOCAL = "the local engine samples from the weights that are trained; with `engine.type=vllm`: "
ALWAYS = "always here"
_SPEED = "affects speed or memory only, and has no counterpart here"
_SCHEDULES = {"cosine_with_min_lr": "cosine", "cosine": "cosine", "linear": "linear", "constant": "constant"}


def updates_of(flags: Flags) -> float | None:
    """Number of optimizer updates of a supervised run, including the incomplete last batch of an epoch."""
    if flags.rows is None:
        return None
    return flags.whole("max_epochs") * -(-flags.rows // flags.whole("train_batch_size"))


def answers_of(flags: Flags) -> int:
    return flags.whole("rollout_batch_size") * flags.whole("n_samples_per_prompt")


def updates_per_step(flags: Flags) -> int:
    return max(1, answers_of(flags) // flags.whole("train_batch_size"))


def _rl_updates(flags: Flags) -> float | None:
    """Number of updates in the learning rate schedule."""
    if flags.rows is None:
        return None
    answers = flags.rows * flags.whole("n_samples_per_prompt") // flags.whole("train_batch_size")
    return answers * flags.whole("num_episodes") * flags.whole("max_epochs")


def has_critic(flags: Flags) -> bool:
    return flags.text("advantage_estimator") == "gae"


def _optimizers(flags: Flags) -> tuple[str, ...]:
    played = "rollout_batch_size" in flags.defaults
    return ("optimizer", "critic.optimizer") if played and has_critic(flags) else ("optimizer",)


def _in_optimizers(key: str, text: str | None = None) -> Rule:
    """A key of every optimizer of the stage."""

    def apply(value: str, flags: Flags) -> Answer:
        return Answer("equal", {f"{name}.{key}": literal(text or value) for name in _optimizers(flags)})

    return Rule(apply)


def _betas(value: str, flags: Flags) -> Answer:
    betas = [literal(word) for word in value.split()]
    return Answer("equal", {f"{name}.betas": betas for name in _optimizers(flags)})


def _schedule(value: str, flags: Flags) -> Answer:
    if value not in _SCHEDULES:
        return Answer("not supported", {}, "use constant, linear or cosine")
    keys: dict[str, Any] = {}
    for name in _optimizers(flags):
        keys[f"{name}.schedule"] = _SCHEDULES[value]
        if _SCHEDULES[value] != "constant":
            keys[f"{name}.final_fraction"] = 0.1 if value == "cosine_with_min_lr" else 0
    return Answer("converted", keys, "to a tenth of the peak" if value == "cosine_with_min_lr" else "")


def _warmup(flags: Flags) -> tuple[Mapping[str, Any], str]:
    updates = _rl_updates(flags) if "rollout_batch_size" in flags.defaults else updates_of(flags)
    if updates is None:
        return {}, NO_ROWS.format("`optimizer.warmup_updates`")
    keys = [f"{name}.warmup_updates" for name in _optimizers(flags)]
    return warmup(updates, flags.number("lr_warmup_ratio"), keys)


def needs_rows(rule: Rule) -> Rule:
    """`rule`, which is not supported while the number of rows is unknown."""

    def apply(value: str, flags: Flags) -> Answer:
        answer = rule.apply(value, flags)
        return answer if flags.rows is not None else Answer("not supported", {}, answer.note)

    return Rule(apply)


def tokens_of(per_row: int) -> Rule:
    def make(flags: Flags) -> tuple[Mapping[str, Any], str]:
        rows, longest = flags.whole("micro_train_batch_size"), flags.whole("max_len")
        sides = " x 2 sides" if per_row == 2 else ""
        return {"learner.tokens_per_batch": rows * longest * per_row}, (
            f"{rows} rows{sides} x {longest} tokens; the split changes no gradient"
        )

    return converted(make)


def steps_between(key: str, end: str) -> Rule:
    """Steps between evaluations or checkpoints; -1 is `end`."""

    def apply(value: str, flags: Flags) -> Answer:
        steps = flags.whole("eval_steps" if "evaluation" in key else "save_steps")
        if steps > 0:
            return Answer("equal", {key: steps})
        if key == "checkpoint.every":
            return Answer("converted", {key: LONG}, "never in the original; here at the end and of the best step too")
        if end == "once per epoch" and flags.rows is not None:
            every = -(-flags.rows // flags.whole("train_batch_size"))
            return Answer("converted", {key: every}, f"once per epoch: {flags.rows} / {flags.text('train_batch_size')}")
        return Answer("converted", {key: 0}, f"{end} in the original; here only the final one, after training")

    return Rule(apply)


def _wandb(value: str, _: Flags) -> Answer:
    if value.lower() in ("false", ""):
        return Answer("no effect", {}, "off, as here")
    secret = value.lower() not in ("true", "set")
    return Answer("converted", {"sinks": ["wandb"]}, "set WANDB_API_KEY; the key is not stored" if secret else "")


def input_key(section: str) -> Rule:
    def apply(value: str, flags: Flags) -> Answer:
        chat = flags.on("apply_chat_template")
        column = ("context_messages" if section == "environment" else "messages") if chat else "prompt"
        note = "conversations, rendered by the chat template" if chat else "text"
        return Answer("equal", {f"{section}.columns.{column}": value}, note)

    return Rule(apply)


def _lora(value: str, flags: Flags) -> Answer:
    if flags.whole("lora_rank") == 0:
        return Answer("no effect", {}, "0: all weights are trained, as here without `model.lora`")
    return Answer("equal", {"model.lora.rank": literal(value)})


def _of_lora(key: str, list_of_words: bool = False) -> Rule:
    def apply(value: str, flags: Flags) -> Answer:
        if flags.number("lora_rank", 0) == 0:
            return Answer("no effect", {}, "needs `--lora_rank`")
        words = value.split()
        targets = words if list_of_words and words != ["all-linear"] else literal(value)
        return Answer("equal", {key: targets})

    return Rule(apply, many=list_of_words)


COMMON: dict[str, Rule] = {
    "pretrain": equal("model.path", words=True),
    "save_path": named("run"),
    "ckpt_path": without_effect("checkpoints are in `checkpoints/` of the run"),
    "save_steps": steps_between("checkpoint.every", "never"),
    "save_hf_ckpt": converted(
        lambda flags: (
            ({"checkpoint.keep": "all"}, "the policy of every checkpoint is kept in `checkpoints/step_N/policy`")
            if flags.whole("save_steps") > 0
            else ({}, "no effect in the original, which writes no checkpoints during training")
        ),
        flag=True,
    ),
    "disable_ds_ckpt": without_effect("a run keeps what it needs to resume", flag=True),
    "max_ckpt_num": equal("checkpoint.keep"),
    "max_ckpt_mem": unsupported("`checkpoint.keep` limits the number; `posttrain runs clean` frees disk space"),
    "load_checkpoint": without_effect("runs continue with `--resume RUN`", flag=True),
    "use_ds_universal_ckpt": without_effect("a checkpoint resumes on another number of processes", flag=True),
    "logging_steps": without_effect("every step is logged"),
    "eval_steps": steps_between("evaluation.every", "once per epoch"),
    "use_tensorboard": converted(lambda _: ({"sinks": ["tensorboard"]}, "in `logs/tensorboard` of the run")),
    "use_wandb": Rule(_wandb, secret=True),
    "wandb_project": equal("tracking.project", words=True),
    "wandb_org": equal("tracking.entity", words=True),
    "wandb_run_name": equal("tracking.run_name", words=True),
    "wandb_group": equal("tracking.group", words=True),
    "zero_stage": without_effect(ONE_DEVICE),
    "zpg": without_effect(ONE_DEVICE),
    "adam_offload": without_effect(
        "memory only: `hardware.offload=optimizer` keeps the optimizer in CPU memory", flag=True
    ),
    "bf16": switch("model.dtype", "bfloat16", "float32 master weights in both"),
    "param_dtype": choice("model.dtype", {"bf16": "bfloat16"}, "float32 master weights in both"),
    "flash_attn": without_effect("attention to packed rows needs no flag", flag=True),
    "attn_implementation": without_effect("attention to packed rows needs no flag"),
    "use_liger_kernel": without_effect("`model.fused` selects Liger's kernels on a GPU that has them", flag=True),
    "packing_samples": without_effect(ALWAYS, flag=True),
    "gradient_checkpointing": switch("model.gradient_checkpointing"),
    "gradient_checkpointing_use_reentrant": without_effect(_SPEED, flag=True),
    "grad_accum_dtype": without_effect("gradients are accumulated in float32"),
    "deepcompile": without_effect(_SPEED, flag=True),
    "overlap_comm": without_effect(_SPEED, flag=True),
    "disable_trace_cache": without_effect(_SPEED, flag=True),
    "disable_fast_tokenizer": unsupported("save the tokenizer that you need with the model", flag=True),
    "local_rank": without_effect("set by the launcher"),
    "seed": equal("seed"),
    "full_determinism": without_effect("always on a CPU; see `docs/concepts/exactness.md`", flag=True),
    "apply_chat_template": without_effect("always, for rows of messages", flag=True),
    "input_template": unsupported("write the text into the prompt column, or use rows of messages and a chat template"),
    "tokenizer_chat_template": unsupported("write the template to a file and set `model.chat_template`"),
    "use_ms": unsupported("download the model, then set `model.path`", flag=True),
    "perf": without_effect("times are in `metrics.jsonl`", flag=True),
    "max_norm": _in_optimizers("max_gradient_norm"),
    "l2": _in_optimizers("weight_decay"),
    "adam_betas": Rule(_betas, many=True),
    "lr_scheduler": Rule(_schedule),
    "lr_warmup_ratio": needs_rows(converted(_warmup)),
    "aux_loss_coef": unsupported("there is no balancing loss for mixtures of experts"),
    "ring_attn_size": unsupported(
        "there is no context parallelism; `learner.tokens_per_batch` bounds the memory", off=("1",)
    ),
    "ring_head_stride": without_effect("belongs to `--ring_attn_size`"),
    "ds_tensor_parallel_size": unsupported("`hardware.processes` divides the weights", off=("1",)),
    "load_in_4bit": switch("model.load_in_4bit"),
    "lora_rank": Rule(_lora),
    "lora_alpha": _of_lora("model.lora.alpha"),
    "lora_dropout": _of_lora("model.lora.dropout"),
    "target_modules": _of_lora("model.lora.targets", True),
}


def implied_row(name: str, value: str, keys: Mapping[str, Any], note: str = "") -> Row:
    return Row(name, value, Answer("converted", keys, note), True)


# Names since version 0.10.2, which groups flags by entity.
DOTTED = {
    "actor.model_name_or_path": "pretrain", "reward.model_name_or_path": "reward_pretrain",
    "critic.model_name_or_path": "critic_pretrain", "model.model_name_or_path": "pretrain",
    "actor.num_nodes": "actor_num_nodes", "actor.num_gpus_per_node": "actor_num_gpus_per_node",
    "ref.num_nodes": "ref_num_nodes", "ref.num_gpus_per_node": "ref_num_gpus_per_node",
    "reward.num_nodes": "reward_num_nodes", "reward.num_gpus_per_node": "reward_num_gpus_per_node",
    "critic.num_nodes": "critic_num_nodes", "critic.num_gpus_per_node": "critic_num_gpus_per_node",
    "vllm.num_engines": "vllm_num_engines", "vllm.tensor_parallel_size": "vllm_tensor_parallel_size",
    "vllm.gpu_memory_utilization": "vllm_gpu_memory_utilization", "vllm.enable_sleep": "vllm_enable_sleep",
    "vllm.sync_backend": "vllm_sync_backend", "vllm.enforce_eager": "enforce_eager",
    "vllm.enable_prefix_caching": "enable_prefix_caching",
    "train.colocate_all": "colocate_all_models", "train.batch_size": "train_batch_size",
    "train.micro_batch_size": "micro_train_batch_size", "train.max_epochs": "max_epochs",
    "train.num_episodes": "num_episodes", "train.async_enable": "async_train", "train.async_queue_size": "async_queue_size",
    "train.partial_rollout_enable": "partial_rollout", "train.seed": "seed",
    "rollout.batch_size": "rollout_batch_size", "rollout.micro_batch_size": "micro_rollout_batch_size",
    "rollout.n_samples_per_prompt": "n_samples_per_prompt", "rollout.max_new_tokens": "generate_max_len",
    "rollout.temperature": "temperature", "rollout.top_p": "top_p",
    "data.max_len": "max_len", "data.max_samples": "max_samples", "data.input_key": "input_key",
    "data.label_key": "label_key", "data.apply_chat_template": "apply_chat_template", "data.prompt_dataset": "prompt_data",
    "data.dataset": "dataset", "data.eval_dataset": "eval_dataset", "data.multiturn": "multiturn",
    "ckpt.output_dir": "save_path", "ckpt.path": "ckpt_path", "ckpt.save_hf": "save_hf_ckpt",
    "ckpt.save_steps": "save_steps", "ckpt.load_enable": "load_checkpoint", "ckpt.max_num": "max_ckpt_num",
    "eval.steps": "eval_steps", "logger.logging_steps": "logging_steps", "logger.wandb.key": "use_wandb",
    "logger.wandb.project": "wandb_project", "logger.tensorboard_dir": "use_tensorboard",
    "algo.kl.init_coef": "init_kl_coef", "algo.kl.target": "kl_target", "algo.kl.horizon": "kl_horizon",
    "algo.kl.estimator": "kl_estimator", "algo.kl.use_loss": "use_kl_loss",
    "algo.advantage.estimator": "advantage_estimator", "algo.advantage.gamma": "gamma", "algo.advantage.lambd": "lambd",
    "actor.eps_clip": "eps_clip", "actor.eps_clip_low_high": "eps_clip_low_high", "actor.dual_clip": "dual_clip",
    "actor.policy_loss_type": "policy_loss_type", "actor.entropy_coef": "entropy_loss_coef",
    "actor.gradient_checkpointing_enable": "gradient_checkpointing",
    "model.gradient_checkpointing_enable": "gradient_checkpointing",
    "actor.adam.lr": "actor_learning_rate", "critic.adam.lr": "critic_learning_rate", "adam.lr": "learning_rate",
    "reward.normalize_enable": "normalize_reward", "reward.clip_range": "reward_clip_range",
    "reward.remote_url": "remote_rm_url", "train.agent_func_path": "agent_func_path",
    "ds.zero_stage": "zero_stage", "ds.adam_offload": "adam_offload", "ds.param_dtype": "param_dtype",
    "ds.attn_implementation": "attn_implementation", "ds.use_liger_kernel": "use_liger_kernel",
    "ds.packing_samples": "packing_samples", "ds.enable_sleep": "deepspeed_enable_sleep",
    "ds.value_head_prefix": "value_head_prefix", "ds.ring_attn_size": "ring_attn_size", "ds.lora.rank": "lora_rank",
}  # fmt: skip
