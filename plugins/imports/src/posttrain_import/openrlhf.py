"""Flags of OpenRLHF 0.8 to 0.11: `openrlhf.cli.train_sft|train_rm|train_dpo|train_ppo_ray`, and `train_drca_ray`."""

from collections.abc import Iterator
from typing import Any

from posttrain_import.openrlhf_common import ALWAYS, COMMON, DOTTED, implied_row, input_key, tokens_of
from posttrain_import.openrlhf_rl import DRCA, PPO, PPO_DEFAULTS, of_ppo
from posttrain_import.programs import Program
from posttrain_import.rows import (
    Flags,
    Row,
    Rule,
    choice,
    converted,
    data,
    equal,
    switch,
    unsupported,
    without_effect,
)

_SUPERVISED: dict[str, Rule] = {
    **COMMON,
    "dataset": data("data.train"),
    "eval_dataset": data("data.validation"),
    "dataset_probs": unsupported("list the files; all rows of all files are used", off=("1.0", "1", "")),
    "train_split": without_effect("name a file, or `train` of a hub id is read"),
    "eval_split": without_effect("name a file of validation rows"),
    "dataset_split": without_effect("name a file, or `train` of a hub id is read"),
    "max_samples": equal("data.max_rows", note="training rows; the original limits validation rows too"),
    "max_len": converted(
        lambda flags: (
            {"data.max_tokens": flags.whole("max_len"), "data.overlong": "truncate"},
            "the original also overwrites the last token of a truncated row with an end token",
        )
    ),
    "max_epochs": equal("epochs"),
    "train_batch_size": equal("rows_per_update", note="the incomplete last batch is one more update here"),
    "learning_rate": equal("optimizer.learning_rate"),
}
_PAIRS: dict[str, Rule] = {
    **_SUPERVISED,
    "micro_train_batch_size": tokens_of(2),
    "chosen_key": equal("data.columns.chosen", words=True),
    "rejected_key": equal("data.columns.rejected", words=True),
    "prompt_key": equal("data.columns.prompt", words=True),
}
_SUPERVISED_DEFAULTS = {
    "train_batch_size": "128",
    "micro_train_batch_size": "8",
    "save_steps": "-1",
    "eval_steps": "-1",
    "max_norm": "1.0",
    "l2": "0.0",
    "adam_betas": "0.9 0.95",
    "lr_scheduler": "cosine_with_min_lr",
    "lr_warmup_ratio": "0.03",
    "lora_rank": "0",
}
_SFT: dict[str, Rule] = {
    **_SUPERVISED,
    "micro_train_batch_size": tokens_of(1),
    "input_key": input_key("data"),
    "output_key": equal("data.columns.completion", words=True),
    "multiturn": switch("loss_on", "assistant"),
    "pretrain_mode": switch("loss_on", "all"),
}
_DPO: dict[str, Rule] = {
    **_PAIRS,
    "beta": equal("loss.beta"),
    "label_smoothing": converted(
        lambda flags: (
            {"loss.type": "cdpo", "loss.label_smoothing": flags.number("label_smoothing")}
            if flags.number("label_smoothing")
            else {"loss.type": "dpo", "loss.label_smoothing": 0.0},
            "",
        )
    ),
    "ipo": switch("loss.type", "ipo", "the original uses sums of log-probabilities; here they are means per token"),
    "nll_loss_coef": equal("nll_coefficient"),
    "ref_pretrain": unsupported("the reference model is the model at the start; set `model.path`"),
    "ref_offload": without_effect("log-probabilities of the reference model are computed once and cached", flag=True),
}
_REWARD: dict[str, Rule] = {
    **_PAIRS,
    "loss": choice("loss.type", {"sigmoid": "bradley_terry"}),
    "margin_loss": switch("loss.margin"),
    "compute_fp32_loss": without_effect(ALWAYS, flag=True),
    "value_head_prefix": without_effect("the head is always `score`, which transformers loads"),
}


def _of_sft(flags: Flags) -> Iterator[Row]:
    yield implied_row("--multiturn", "off", {"loss_on": "last_assistant"}, "only the last answer is trained")
    yield from _of_supervised(flags)


def _of_supervised(flags: Flags) -> Iterator[Row]:
    if "eval_dataset" in flags:
        yield implied_row(
            "checkpoint",
            "the last weights",
            {"evaluation.metric": "loss"},
            "validation loss selects the checkpoint here",
        )


def _of_reward(flags: Flags) -> Iterator[Row]:
    yield implied_row(
        "loss",
        "no margin, no centering",
        {"loss.type": "bradley_terry", "loss.margin": False, "loss.center_rewards_coefficient": 0.0},
    )
    yield from _of_supervised(flags)


def _program(stage: str, rules: dict[str, Rule], defaults: dict[str, str], implied: Any) -> Program:
    place = "prompt_data" if stage == "rl" else "dataset"
    return Program("OpenRLHF", stage, rules, defaults, implied, DOTTED, place, "max_samples")


_RATES = {"sft": "5e-6", "dpo": "1e-5", "reward": "9e-6"}
PROGRAMS = {
    "train_sft": _program(
        "sft",
        _SFT,
        {**_SUPERVISED_DEFAULTS, "max_epochs": "2", "max_len": "2048", "learning_rate": _RATES["sft"]},
        _of_sft,
    ),
    "train_dpo": _program(
        "dpo",
        _DPO,
        {
            **_SUPERVISED_DEFAULTS,
            "max_epochs": "1",
            "max_len": "512",
            "learning_rate": _RATES["dpo"],
            "beta": "0.1",
            "label_smoothing": "0.0",
            "nll_loss_coef": "0.0",
        },
        _of_supervised,
    ),
    "train_rm": _program(
        "reward",
        _REWARD,
        {**_SUPERVISED_DEFAULTS, "max_epochs": "1", "max_len": "512", "learning_rate": _RATES["reward"]},
        _of_reward,
    ),
    "train_ppo_ray": _program("rl", PPO, PPO_DEFAULTS, of_ppo),
    "train_drca_ray": _program("rl", DRCA, PPO_DEFAULTS, of_ppo),
}
"""Module of `openrlhf.cli` -> its flags."""
