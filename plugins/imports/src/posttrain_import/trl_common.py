"""Flags that all trainers of TRL share: those of transformers, of the model, and of the script."""

from collections.abc import Iterator

from posttrain.recipe.foreign import NO_EFFECT, UNSUPPORTED
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
    switch,
    unsupported,
    warmup,
    without_effect,
)

_LOGS = "every step is in `metrics.jsonl`"


def devices(flags: Flags) -> int:
    """Number of processes that a launcher starts; 1 by default."""
    return flags.whole("num_processes", 1)


def _lora(key: str, words: bool = False) -> Rule:
    """A key of the adapters; no effect if they are not used."""

    def apply(value: str, flags: Flags) -> Answer:
        if not flags.on("use_peft"):
            return Answer("no effect", {}, "needs `--use_peft`")
        parts = value.split()
        return Answer("equal", {key: parts if words and parts != ["all-linear"] else literal(value)})

    return Rule(apply, many=words)


def _steps_of(key: str) -> Rule:
    """Steps between evaluations or checkpoints by the strategy: no, steps or epoch."""
    kind = "eval" if key.startswith("evaluation") else "save"

    def apply(_: str, flags: Flags) -> Answer:
        strategy = flags.text(f"{kind}_strategy")
        if strategy == "steps":
            every = flags.number(f"{kind}_steps", 500)
            if every < 1:
                return Answer("not supported", {}, f"a share of the steps; set `{key}` to a number of steps")
            return Answer("equal", {key: int(every)})
        if strategy == "epoch":
            return Answer("not supported", {}, f"once per epoch; set `{key}` to the steps of an epoch")
        if kind == "save":
            return Answer("converted", {key: 1000}, "never in the original; here at the end and of the best step too")
        return Answer("converted", {key: 0}, "never in the original; here only the final one, after training")

    return Rule(apply)


def _warmup(value: str, flags: Flags) -> Answer:
    number = flags.number("warmup_steps")
    if number >= 1 or number == 0:
        return Answer("equal", {"optimizer.warmup_updates": int(number)})
    return _ratio(number, flags)


def _ratio(ratio: float, flags: Flags) -> Answer:
    steps = flags.number("max_steps", -1)
    size = flags.whole("per_device_train_batch_size") * flags.whole("gradient_accumulation_steps") * devices(flags)
    if steps <= 0 and flags.rows is not None and "max_completion_length" not in flags.defaults:
        steps = -(-flags.rows // size) * flags.number("num_train_epochs")
    if steps <= 0:
        return Answer("not supported", {}, "a share of all updates; set `optimizer.warmup_updates` to their number")
    keys, note = warmup(steps, ratio)
    return Answer("converted", keys, note)


def _schedule(value: str, flags: Flags) -> Answer:
    kinds = {"linear": "linear", "cosine": "cosine", "constant": "constant", "constant_with_warmup": "constant"}
    if value not in kinds:
        return Answer("not supported", {}, "use linear, cosine or constant")
    keys: dict[str, object] = {"optimizer.schedule": kinds[value]}
    if kinds[value] != "constant":
        keys["optimizer.final_fraction"] = 0
    return Answer("converted" if len(keys) > 1 else "equal", keys, "to 0" if len(keys) > 1 else "")


def _betas(_: str, flags: Flags) -> Answer:
    betas = [flags.number("adam_beta1", 0.9), flags.number("adam_beta2", 0.999)]
    return Answer("converted", {"optimizer.betas": betas})


def _report(value: str, _: Flags) -> Answer:
    names = [name for name in value.split() if name not in ("none", "all")]
    known = [name for name in names if name in ("tensorboard", "wandb", "trackio")]
    if "all" in value.split():
        return Answer("not supported", {}, "name the sinks: `sinks=[tensorboard, wandb]`")
    if unknown := [name for name in names if name not in known]:
        return Answer(
            "not supported",
            {"sinks": known} if known else {},
            f"{', '.join(unknown)}: use one of tensorboard, wandb, trackio",
        )
    return Answer("equal", {"sinks": known}) if known else Answer("no effect", {}, _LOGS)


def _push(_: str, flags: Flags) -> Answer:
    name = flags.text("hub_model_id") or "USER/NAME"
    return Answer("not supported", {}, f"after the run: `posttrain push RUN {name}`")


_OFF: dict[str, tuple[str, ...]] = {
    "dataset_train_split": ("train",),
    "f_divergence_type": ("reverse_kl",),
    "train_sampling_strategy": ("random",),
}
_ALWAYS_OFF = ("false", "none", "null", "", "0", "0.0")
_FLAGS_ALONE = {
    "load_in_8bit", "use_rslora", "use_dora", "fp16", "dataloader_drop_last",
    "use_weighting",
}  # fmt: skip
_SWITCHES = {
    "do_train", "do_eval", "do_predict", "tf32", "torch_compile", "use_liger_kernel", "activation_offloading", "eval_on_start",
    "logging_first_step", "load_best_model_at_end", "full_determinism", "disable_tqdm", "group_by_length", "remove_unused_columns",
    "save_only_model", "overwrite_output_dir", "bf16_full_eval", "fp16_full_eval", "auto_find_batch_size", "hub_private_repo",
    "use_transformers_paged", "use_transformers_continuous_batching", "use_cache", "ignore_data_skip", "hub_always_push",
    "dataloader_pin_memory", "dataloader_persistent_workers", "log_on_each_node", "prediction_loss_only",
}  # fmt: skip
COMMON: dict[str, Rule] = {
    **{name: without_effect(reason, name in _SWITCHES) for name, reason in NO_EFFECT.items()},
    **{
        name: unsupported(remedy, name in _FLAGS_ALONE, (*_ALWAYS_OFF, *_OFF.get(name, ())))
        for name, remedy in UNSUPPORTED.items()
    },
    "num_processes": equal("hardware.processes"),
    "model_name_or_path": equal("model.path", words=True),
    "dtype": choice(
        "model.dtype", {"bfloat16": "bfloat16", "float32": "float32", "auto": "auto"}, "float32 master weights"
    ),
    "torch_dtype": choice(
        "model.dtype", {"bfloat16": "bfloat16", "float32": "float32", "auto": "auto"}, "float32 master weights"
    ),
    "trust_remote_code": switch("model.trust_remote_code"),
    "use_peft": converted(
        lambda flags: (
            (
                {"model.lora.rank": flags.whole("lora_r", 16)},
                "adapters; exported merged unless `model.lora.export=adapter`",
            )
            if flags.on("use_peft")
            else ({}, "off, as here")
        ),
        flag=True,
    ),
    "lora_r": _lora("model.lora.rank"),
    "lora_alpha": _lora("model.lora.alpha"),
    "lora_dropout": _lora("model.lora.dropout"),
    "lora_target_modules": _lora("model.lora.targets", True),
    "dataset_test_split": without_effect("name its file in `data.validation`, or hold rows out with `data.held_out`"),
    "output_dir": named("run"),
    "run_name": equal("tracking.run_name", words=True),
    "report_to": Rule(_report, many=True),
    "seed": equal("seed"),
    "bf16": converted(
        lambda flags: (
            {"model.dtype": "bfloat16" if flags.on("bf16") else "float32"},
            "float32 master weights" if flags.on("bf16") else "",
        ),
        flag=True,
    ),
    "use_cpu": switch("model.device", "cpu"),
    "no_cuda": switch("model.device", "cpu"),
    "gradient_checkpointing": switch("model.gradient_checkpointing"),
    "learning_rate": equal("optimizer.learning_rate"),
    "weight_decay": equal("optimizer.weight_decay"),
    "adam_beta1": Rule(_betas),
    "adam_beta2": Rule(_betas),
    "adam_epsilon": equal("optimizer.epsilon"),
    "max_grad_norm": equal("optimizer.max_gradient_norm"),
    "lr_scheduler_type": Rule(_schedule),
    "warmup_steps": Rule(_warmup),
    "warmup_ratio": Rule(lambda value, flags: _ratio(flags.number("warmup_ratio"), flags)),
    "optim": choice(
        "optimizer.type",
        {
            **{name: {} for name in ("adamw_torch_fused", "adamw_torch", "adamw_hf")},
            **dict.fromkeys(("adamw_8bit", "adamw_bnb_8bit", "paged_adamw_8bit"), "adamw_8bit"),
        },
        notes=dict.fromkeys(("adamw_torch_fused", "adamw_torch", "adamw_hf"), "AdamW in float32"),
    ),
    "load_in_4bit": switch("model.load_in_4bit"),
    "bnb_4bit_quant_type": choice("model", {"nf4": {}}),
    "bnb_4bit_quant_storage": without_effect("the numbers are stored as bytes"),
    "use_bnb_nested_quant": without_effect("scales are always quantized, too", flag=True),
    "eval_strategy": _steps_of("evaluation.every"),
    "evaluation_strategy": _steps_of("evaluation.every"),
    "eval_steps": _steps_of("evaluation.every"),
    "save_strategy": _steps_of("checkpoint.every"),
    "save_steps": _steps_of("checkpoint.every"),
    "save_total_limit": equal("checkpoint.keep"),
    "metric_for_best_model": choice(
        "evaluation.metric", {"loss": "loss", "eval_loss": "loss", "eval_accuracy": "accuracy"}
    ),
    "push_to_hub": Rule(_push, switch=True),
    "hub_model_id": without_effect("belongs to `--push_to_hub`"),
    "hub_token": Rule(lambda *_: Answer("no effect", {}, "log in with `hf auth login`"), secret=True),
}
"""Flag -> rule, for all trainers."""
COMMON_DEFAULTS = {
    "per_device_train_batch_size": "8",
    "gradient_accumulation_steps": "1",
    "weight_decay": "0.0",
    "max_grad_norm": "1.0",
    "lr_scheduler_type": "linear",
    "warmup_steps": "0",
    "eval_strategy": "no",
    "save_strategy": "steps",
    "gradient_checkpointing": "true",
    "lora_r": "16",
    "lora_alpha": "32",
    "lora_dropout": "0.05",
}


def optimizer_rows(flags: Flags) -> Iterator[Row]:
    """Rows for behavior of transformers and TRL that no flag changes."""
    yield Row("--adam_beta1, --adam_beta2", "0.9, 0.999", Answer("converted", {"optimizer.betas": [0.9, 0.999]}), True)
    if flags.on("use_peft"):
        targets = Answer(
            "converted", {"model.lora.targets": ["q_proj", "v_proj"]}, "PEFT's choice for most architectures"
        )
        yield Row("--lora_target_modules", "of PEFT", targets, True)
    yield Row(
        "--bf16",
        "true, where the device has it",
        Answer("converted", {"model.dtype": "bfloat16"}, "float32 master weights"),
        True,
    )
