"""Flags of TRL 1.x: `trl sft|dpo|reward|grpo|rloo`, scripts of `examples/scripts`, and what transformers adds to them."""

import re
from collections.abc import Iterator, Mapping
from itertools import pairwise
from pathlib import Path
from typing import Any

from posttrain.errors import InputError
from posttrain_import import trl_rl
from posttrain_import.programs import Program
from posttrain_import.rows import Answer, Flags, Row, Rule, choice, converted, equal, switch, without_effect
from posttrain_import.trl_common import COMMON, COMMON_DEFAULTS, devices, optimizer_rows

_SCRIPTS = {
    "sft": "sft", "dpo": "dpo", "reward": "reward", "reward_modeling": "reward", "grpo": "grpo", "rloo": "rloo",
    "reward_model_training": "reward", "rloo_helpsteer_training": "rloo", "rloo_tldr": "rloo",
}  # fmt: skip
"""Name of a script -> its trainer. The HelpSteer3 scripts are TRL scripts with other defaults."""
PROCESSES = re.compile(r"--(?:num_processes|nproc[_-]per[_-]node|num_gpus)")
"""Options of launchers that set the number of processes."""
HELPSTEER = {"reward_model_training", "rloo_helpsteer_training"}


def _rows_per_update(flags: Flags) -> tuple[Mapping[str, Any], str]:
    each, passes, count = (
        flags.whole("per_device_train_batch_size"),
        flags.whole("gradient_accumulation_steps"),
        devices(flags),
    )
    return {"rows_per_update": each * passes * count}, f"{each} x {passes} accumulated x {count} devices"


def _tokens(sides: int) -> Rule:
    def make(flags: Flags) -> tuple[Mapping[str, Any], str]:
        if flags.text("max_length").lower() in ("none", "null"):
            return {}, "no limit of a row; `learner.tokens_per_batch` bounds the memory"
        each, longest = flags.whole("per_device_train_batch_size"), flags.whole("max_length")
        of_sides = " x 2 sides" if sides == 2 else ""
        size, _ = _rows_per_update(flags)
        return {**size, "learner.tokens_per_batch": each * longest * sides}, (
            f"{_rows_per_update(flags)[1]}; batches of {each} rows{of_sides} x {longest} tokens, which changes no gradient"
        )

    return converted(make)


def _max_length(overlong: str) -> Rule:
    def apply(value: str, _: Flags) -> Answer:
        if value.lower() in ("none", "null"):
            return Answer(
                "not supported", {}, "every row has a limit here; set `data.max_tokens` above the longest row"
            )
        note = (
            "longer rows are cut, as in TRL"
            if overlong == "truncate"
            else "a pair with a longer side is dropped in both"
        )
        return Answer("converted", {"data.max_tokens": int(value), "data.overlong": overlong}, note)

    return Rule(apply)


def _epochs(value: str, flags: Flags) -> Answer:
    if flags.number("max_steps", -1) > 0:
        return Answer("no effect", {}, "`--max_steps` wins, in both")
    epochs = flags.number("num_train_epochs")
    if epochs == int(epochs):
        return Answer("equal", {"epochs": int(epochs)})
    return Answer("not supported", {}, "epochs are whole numbers here; set `steps`")


def _dataset(value: str, flags: Flags) -> Answer:
    note = f"configuration {flags.text('dataset_config')}: name the files" if flags.text("dataset_config") else ""
    return Answer("equal", {"data.train": value}, note)


def _loss_on(flags: Flags) -> Iterator[Row]:
    if not flags.on("assistant_only_loss") and not flags.on("completion_only_loss"):
        answer = Answer(
            "converted",
            {"loss_on": "all"},
            "TRL trains on all tokens of rows with messages; for rows with prompt and completion, `loss_on=assistant`",
        )
        yield Row("--assistant_only_loss", "false", answer, True)


def _sync(prefix: str) -> dict[str, Rule]:
    return {
        "sync_ref_model": converted(
            lambda flags: (
                {
                    f"{prefix}.update_every": flags.whole("ref_model_sync_steps", 512),
                    f"{prefix}.mix": flags.number("ref_model_mixup_alpha", 0.6),
                },
                "",
            ),
            flag=True,
        ),
        "ref_model_mixup_alpha": without_effect("in `--sync_ref_model`"),
        "ref_model_sync_steps": without_effect("in `--sync_ref_model`"),
    }


_ROWS: dict[str, Rule] = {
    **COMMON,
    "dataset_name": Rule(_dataset),
    "num_train_epochs": Rule(_epochs),
    "max_steps": converted(
        lambda flags: ({"steps": flags.whole("max_steps")} if flags.whole("max_steps") > 0 else {}, "")
    ),
    "gradient_accumulation_steps": without_effect("in the rows of an update, above or below"),
    "dataset_streaming": switch("data.streaming"),
    "packing": without_effect("batches are always packed, without padding", flag=True),
    "packing_strategy": without_effect("batches are always packed, without padding"),
    "eval_packing": without_effect("batches are always packed, without padding", flag=True),
    "padding_free": without_effect("batches are always packed, without padding", flag=True),
    "truncation_mode": choice("data.overlong", {"keep_start": {"data.overlong": "truncate"}}),
    "disable_dropout": without_effect("dropout of the model is always off", flag=True),
}
_SFT: dict[str, Rule] = {
    **_ROWS,
    "per_device_train_batch_size": _tokens(1),
    "max_length": _max_length("truncate"),
    "max_seq_length": _max_length("truncate"),
    "dataset_text_field": equal("data.columns.text", words=True),
    "assistant_only_loss": switch("loss_on", "assistant"),
    "completion_only_loss": switch("loss_on", "assistant", "the tokens of the completion"),
    "loss_type": choice("loss.type", {"nll": "nll", "dft": "dft", "chunked_nll": "nll"}),
    "shuffle_dataset": without_effect("rows are always shuffled, by the seed", flag=True),
}
_DPO: dict[str, Rule] = {
    **_ROWS,
    **_sync("reference"),
    "per_device_train_batch_size": _tokens(2),
    "max_length": _max_length("truncate"),
    "beta": equal("loss.beta"),
    "label_smoothing": converted(
        lambda flags: (
            {"loss.type": "cdpo", "loss.label_smoothing": flags.number("label_smoothing")}
            if flags.number("label_smoothing")
            else {},
            "" if flags.number("label_smoothing") else "0, as here",
        )
    ),
    "loss_type": choice(
        "loss.type",
        {"sigmoid": "dpo", "ipo": "ipo", "apo_zero": "apo_zero", "apo_down": "apo_down", "bco_pair": "bco"},
    ),
    "precompute_ref_log_probs": without_effect(
        "log-probabilities of the reference model are computed once, always", flag=True
    ),
    "precompute_ref_batch_size": without_effect("`learner.tokens_per_batch` bounds it"),
}
_REWARD: dict[str, Rule] = {
    **_ROWS,
    "per_device_train_batch_size": _tokens(2),
    "max_length": _max_length("drop"),
    "center_rewards_coefficient": equal("loss.center_rewards_coefficient"),
}


def _of_sft(flags: Flags) -> Iterator[Row]:
    yield from _loss_on(flags)
    yield from optimizer_rows(flags)


def _of_rows(flags: Flags) -> Iterator[Row]:
    yield from optimizer_rows(flags)


def _of_reward(flags: Flags) -> Iterator[Row]:
    yield Row(
        "loss",
        "Bradley-Terry",
        Answer("equal", {"loss.type": "bradley_terry"}, "margins are used where rows have the column"),
        True,
    )
    yield from optimizer_rows(flags)


def _of_helpsteer_reward(flags: Flags) -> Iterator[Row]:
    """Rows for values that the reward script of the HelpSteer3 experiment hard-codes."""
    for name, value, keys, note in (
        ("model", "Qwen/Qwen3-8B", {"model.path": "Qwen/Qwen3-8B"}, ""),
        ("data", "nvidia/HelpSteer3, English", {"data.train": "runs/helpsteer3/data/pairs_train.jsonl"},
         "`posttrain pipeline helpsteer3/pipeline --only data` writes it"),
        ("eval_size", "1000", {"data.held_out": 1000}, "random rows here, the last ones in the original"),
        ("LoRA targets", "all seven matrices", {"model.lora.targets": list(trl_rl.MATRICES)} if flags.on("use_peft") else {}, ""),
        ("margin", "none", {"loss.type": "bradley_terry", "loss.margin": False}, ""),
        ("best model", "by evaluation loss", {"evaluation.metric": "loss"}, ""),
    ):  # fmt: skip
        if keys:
            yield Row(name, value, Answer("converted", keys, note), True)
    yield from optimizer_rows(flags)


_DEFAULTS = {**COMMON_DEFAULTS, "max_length": "1024", "num_train_epochs": "3"}


def _program(stage: str, rules: dict[str, Rule], rate: str, implied: Any, **more: str) -> Program:
    return Program(
        "TRL",
        stage,
        rules,
        {**_DEFAULTS, "learning_rate": rate, **more},
        implied,
        rows_of="dataset_name",
        negation=True,
    )


PROGRAMS = {
    "sft": _program("sft", _SFT, "2e-5", _of_sft),
    "dpo": _program("dpo", _DPO, "1e-6", _of_rows, beta="0.1", loss_type="sigmoid"),
    "reward": _program("reward", _REWARD, "1e-4", _of_reward),
    "reward_model_training": _program(
        "reward", _REWARD, "1e-5", _of_helpsteer_reward, per_device_train_batch_size="4", gradient_accumulation_steps="4",
        lora_dropout="0.1", warmup_steps="100", save_steps="500", eval_steps="500", eval_strategy="steps",
    ),
    **trl_rl.PROGRAMS,
}  # fmt: skip


def find(word: str, after: list[str], before: list[str]) -> tuple[Program, list[str], list[tuple[str, str]]] | None:
    """The trainer that `word` names: the subcommand of `trl`, or a script."""
    given = [("num_processes", count) for count in _processes(before)]
    if Path(word).name == "trl" and after and not word.endswith(".py"):
        if after[0] not in PROGRAMS:
            raise InputError(
                f"trl {after[0]} has no importer; those of TRL with one are sft, dpo, reward, grpo and rloo"
            )
        name, after = after[0], after[1:]
    elif (script := Path(word)).suffix == ".py" and script.stem in _SCRIPTS:
        name = script.stem if script.stem in HELPSTEER else _SCRIPTS[script.stem]
    elif "examples/scripts/" in word and word.endswith(".py"):
        raise InputError(
            f"{word} has no importer; those of examples/scripts with one are {', '.join(f'{one}.py' for one in _SCRIPTS)}"
        )
    else:
        return None
    config = _config(after)
    if name == "rloo" and trl_rl.OLD_NAMES & {
        flag.partition("=")[0].lstrip("-") for flag in after if flag.startswith("--")
    }:
        name = "old_rloo"
    return PROGRAMS[name], after, [*given, *config]


def _processes(before: list[str]) -> Iterator[str]:
    """The number of processes that a launcher starts."""
    for word, following in pairwise([*before, ""]):
        flag, equals, value = word.partition("=")
        if PROCESSES.fullmatch(flag):
            yield value if equals else following


def _config(after: list[str]) -> list[tuple[str, str]]:
    """The flags of the YAML file that `--config` names; removes it from the words."""
    for position, word in enumerate(after):
        if word == "--config" or word.startswith("--config="):
            path = word.partition("=")[2] or (after[position + 1] if position + 1 < len(after) else "")
            del after[position : position + (1 if "=" in word else 2)]
            from posttrain.recipe.sources import read_file

            return [(key, _words(value)) for key, value in read_file(path).values.items()]
    return []


def _words(value: Any) -> str:
    return " ".join(map(str, value)) if isinstance(value, list) else str(value)
