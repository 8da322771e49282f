"""Scripts of the four experiments: units, pipelines, searches, evaluation and plots.

Most of them become a command of this package. Those that train with positional arguments become a recipe of this
package with other keys.
"""

import re
import shlex
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from posttrain.errors import InputError
from posttrain_import.programs import Program
from posttrain_import.rows import (
    Answer,
    Flags,
    Row,
    Rule,
    choice,
    converted,
    equal,
    named,
    run_name,
    without_effect,
)


@dataclass(frozen=True)
class Script:
    """A script: the command of this package that replaces it, or the recipes that its arguments change.

    `positions`: names of positional arguments. Keys of the rules are options (`--workers`), arguments (`FILE`) or
    recipe keys.
    """

    program: Program
    command: str = ""
    files: tuple[str, ...] = ()
    positions: tuple[str, ...] = ()

    def flags(self, words: list[str]) -> list[tuple[str, str]]:
        """Positional words with their names."""
        if len(words) > len(self.positions):
            raise InputError(
                f"the script has {len(self.positions)} arguments, and the command {len(words)}; remove the others"
            )
        return list(zip(self.positions, words, strict=False))

    def replacement(self, rows: Iterable[Row]) -> str:
        """The command with the options and keys of the rows; empty if a recipe is made."""
        if not self.command:
            return ""
        values = {key: value for row in rows for key, value in row.answer.keys.items()}
        words = [self.command, *(shlex.quote(str(value)) for key, value in values.items() if key.isupper())]
        for key, value in values.items():
            text = value if isinstance(value, str) else str(value).lower() if isinstance(value, bool) else str(value)
            if key.startswith("--"):
                words += [key, shlex.quote(text)] if text else [key]
            elif not key.isupper():
                words.append(shlex.quote(f"{key}={text}"))
        return " ".join(words)


def _results(option: str, suffix: str) -> Rule:
    """The file of results: a separate one for each command, in the folder of the model."""

    def apply(value: str, _: Flags) -> Answer:
        return Answer(
            "converted", {option: f"{Path(value).with_suffix('')}/{suffix}"}, "each command has its own file here"
        )

    return Rule(apply)


def _run_of(value: str) -> str:
    """`./checkpoint/NAME/final` -> `runs/NAME/model`."""
    return f"runs/{named('run').apply(value, Flags({})).keys['name']}/model"


def _model(key: str) -> Rule:
    return Rule(lambda value, _: Answer("converted", {key: _run_of(value)}, "the exported model of the run"))


def _fixed(keys: Mapping[str, Any], name: str, value: str, note: str = "") -> Row:
    return Row(name, value, Answer("converted", keys, note), True)


def _evaluation(stage: str, rules: dict[str, Rule], implied: Any = lambda _: ()) -> Program:
    return Program("the rationales' evaluation", stage, rules, {}, implied)


_ONE_DEVICE = "CUDA_VISIBLE_DEVICES chooses the devices"
_INFERENCE = Script(
    Program(
        "the rationales' evaluation",
        "generate",
        {
            "model": _model("model.path"),
            "data": equal("data.test", words=True, note="the last answer of a conversation is the reference"),
            "predictions": equal("out", words=True, note="one line per row, in the order of the data"),
            "gpus": converted(
                lambda flags: (
                    {"engine.type": "vllm", "engine.servers": flags.whole("gpus")} if flags.whole("gpus") > 1 else {}, ""
                )
            ),
            "system": converted(lambda flags: ({"system": flags.text("system")} if flags.on("system") else {}, "none")),
            "tokens": equal("rollout.tokens_per_turn"),
        },
        {},
        lambda _: (
            _fixed({"thinking": "remove"}, "thinking", "removed"),
            _fixed({"model.dtype": "bfloat16"}, "precision", "bfloat16"),
        ),
        prefix="",
    ),
    "posttrain generate",
    positions=("model", "data", "predictions", "gpus", "system", "tokens"),
)  # fmt: skip
_TEXT = Script(
    _evaluation(
        "evaluate",
        {
            "predictions_file": equal("FILE", words=True),
            "output_file": _results("--out", "automated.json"),
            "num_gpus": equal("--processes"),
            "batch_size": converted(
                lambda _: ({"--tokens-per-batch": 8192}, "tokens instead of rows; no effect on the numbers")
            ),
        },
        lambda _: (
            _fixed({"--metrics": "bleu,bertscore,perplexity"}, "metrics", "SacreBLEU, BERTScore, perplexity"),
            _fixed({"--encoder": "FacebookAI/roberta-large"}, "BERTScore", "its English encoder"),
            _fixed({"--model": "Qwen/Qwen3-4B", "--dtype": "bfloat16"}, "perplexity", "the base model"),
        ),
    ),
    "posttrain evaluate text",
)
_REWARD = Script(
    _evaluation(
        "evaluate",
        {
            "model_path": _model("--model"),
            "data_path": equal("FILE", words=True),
            "output_path": _results("--out", "reward.json"),
        },
        lambda _: (_fixed({"--dtype": "bfloat16"}, "precision", "bfloat16"),),
    ),
    "posttrain evaluate reward",
)
_BASELINE = Script(
    _evaluation(
        "generate",
        {"input": equal("data.test", words=True)},
        lambda _: (
            _fixed(
                {"engine.type": "openai", "engine.url": "https://api.anthropic.com/v1/", "engine.model": "claude-sonnet-5",
                 "engine.api_key_variable": "ANTHROPIC_API_KEY", "engine.extra_body.temperature": None},
                "model", "Claude 3.7 Sonnet", "retired on 2026-02-19; any OpenAI-compatible server works",
            ),
            _fixed({"rollout.tokens_per_turn": 2048, "thinking": "remove"}, "answers", "2048 tokens, without thinking"),
            _fixed({"out": "evaluation/generated_data/claude.jsonl"}, "output", "evaluation/generated_data"),
        ),
    ),
    "posttrain generate",
)  # fmt: skip


def _judge(metric: str) -> Script:
    rules = {
        "input": equal("FILE", words=True),
        "output": _results("--out", f"{metric}.jsonl"),
        "workers": equal("--workers"),
        "max_samples": equal("--max-samples"),
    }
    rows = (
        _fixed({"--rubric": metric}, "rubric", metric, "our own: the original prompts are not published"),
        _fixed(
            {"judge.url": "http://localhost:8000/v1", "judge.model": "JUDGE"},
            "judge",
            "not known",
            "any OpenAI-compatible server",
        ),
    )
    return Script(_evaluation("evaluate", rules, lambda _: rows), "posttrain evaluate judge")


def _study(kind: str) -> Script:
    recipe = {"rm": "reward"}.get(kind, kind)
    return Script(_evaluation("tune", {}), f"posttrain tune rlhf/tune_{recipe}")


_SEGMENTS = "stored with the reward model"


def _segments(section: str) -> dict[str, Rule]:
    return {
        "method": choice(
            f"{section}.type",
            {"peak": {f"{section}.type": "entropy"}},
            "the published `peak` is a plain threshold",
        ),
        "threshold": equal(
            f"{section}.threshold", note="nats, of the fine-tuned model at temperature 1; 1000 is one unit per answer"
        ),
    }


_UNIT_NAMES = ("prefix", "model", "data set", "epochs", "method", "threshold", "aggregate", "entropy_coefficient")
_OTHERS = "the script sets all other values; the recipe has those of the commands before it, or of DenseRewardRLHF-PPO"
_QWEN = choice(
    "model.path", {"qwen3": {"model.path": "runs/rlhf-sft/model"}}, "the fine-tuned model; in the pipeline `from: sft`"
)
_RATIONALES = choice("data", {"rationales": {}}, "the files of the recipe")
_UNIT_REWARD = Script(
    Program(
        "DenseRewardRLHF-PPO",
        "reward",
        {
            "prefix": named("unit-reward"),
            "model": _QWEN,
            "data set": _RATIONALES,
            "epochs": equal("epochs"),
            **_segments("units.segmenter"),
            "aggregate": choice("units.aggregate", {"avg": "mean"}, "of the unit rewards of an answer"),
            "entropy_coefficient": converted(
                lambda flags: (
                    {
                        "units.entropy_coefficient": flags.number("entropy_coefficient"),
                        "units.entropy_form": "published",
                    },
                    "the published script ignores it and trains with 0.1; we recommend `units.entropy_form=length_fair`",
                )
            ),
        },
        {},
        lambda _: (Row("other values", "of the script", Answer("no effect", {}, _OTHERS), True),),
        prefix="",
    ),
    files=("rlhf/unit_reward",),
    positions=_UNIT_NAMES,
)


def _reward_kind(value: str, flags: Flags) -> Answer:
    if value == "segment_normalization":
        return Answer(
            "converted",
            {"unit_credit.type": "unit_rewards", "unit_credit.beta": 1.0, "unit_credit.placement": "even"},
            "split evenly over the tokens of the unit, as published; the return of a token then lacks the shares before it, so we "
            "recommend `unit_credit.placement=end`",
        )
    if value == "segment_last_avg":
        normalize = "none" if "no_normalization" in flags.text("prefix") else "stored"
        return Answer("converted", {"reward.normalize": normalize}, "one reward at the end token")
    return Answer("not supported", {}, "use segment_normalization or segment_last_avg")


_PPO_NAMES = (*_UNIT_NAMES[:7], "reward type", "value clip", "data set of the fit", "lambda_reg")


def _ppo_prefix(value: str, _: Flags) -> Answer:
    """The published script reads options from the name of the run."""
    name = run_name(value, "unit-ppo")
    keys: dict[str, Any] = {"name": name}
    if any(option in value for option in ("m0d05", "end_penalty")):
        keys["rollout.missing_eos_penalty"] = 0.05
    if "no_normalization" in value:
        keys |= {"unit_credit.normalizer": None, "reward.normalize": "none"}
    note = "with `m0d05` or `end_penalty` in it, answers without an end have the penalty 0.05; `no_normalization` turns it off"
    return Answer("converted", keys, note)


_PPO_RULES: dict[str, Rule] = {
    "prefix": Rule(_ppo_prefix),
    "model": _QWEN,
    "data set": _RATIONALES,
    "epochs": converted(
        lambda flags: (
            {"steps": 5 * flags.whole("epochs")},
            f"{flags.text('epochs')} x 5 steps of 1024 prompts are 5000 prompts, and 120 again",
        )
    ),
    "method": without_effect(_SEGMENTS),
    "threshold": without_effect(_SEGMENTS),
    "aggregate": without_effect(_SEGMENTS),
    "reward type": Rule(_reward_kind),
    "value clip": equal("critic.clip"),
    "data set of the fit": converted(
        lambda flags: (
            ({}, "the prefix turns normalization off")
            if "no_normalization" in flags.text("prefix")
            else ({"unit_credit.normalizer": "runs/rlhf-unit_reward"}, "the run that fitted it")
        )
    ),
    "lambda_reg": converted(
        lambda _: ({"reward.path": "runs/rlhf-unit_reward/model"}, "only selects the reward model")
    ),
}


def _ppo_others(_: Any) -> tuple[Row, ...]:
    return (Row("other values", "of the script", Answer("no effect", {}, _OTHERS), True),)


_UNIT_PPO = Script(
    Program("DenseRewardRLHF-PPO", "rl", _PPO_RULES, {}, _ppo_others, prefix=""),
    files=("rlhf/unit_ppo",),
    positions=_PPO_NAMES,
)
_OUTCOME = Script(
    Program(
        "DenseRewardRLHF-PPO",
        "rl",
        {
            **_PPO_RULES,
            "threshold": converted(
                lambda _: (
                    {"reward.path": "runs/rlhf-reward/model"},
                    "one unit, which is a reward model of whole answers",
                )
            ),
            "data set of the fit": without_effect("not used by this reward type"),
        },
        {},
        _ppo_others,
        prefix="",
    ),
    files=("rlhf/unit_ppo_outcome",),
    positions=_PPO_NAMES,
)
_FIT = Script(
    Program(
        "DenseRewardRLHF-PPO",
        "fit-normalizer",
        {
            "model": Rule(
                lambda value, _: Answer(
                    "converted", {"RUN": _run_of(value).removesuffix("/model")}, "the run of the reward model"
                )
            ),
            **{name: without_effect(_SEGMENTS) for name in ("method", "threshold", "aggregate")},
        },
        prefix="",
    ),
    "posttrain fit-normalizer",
    positions=("model", "method", "threshold", "aggregate"),
)


def _game(value: str, _: Flags) -> Answer:
    games = {"two_armed_bandit": "bandit.yaml", "frozenlake": "frozen_lake.yaml", "sokoban": "sokoban.yaml"}
    if value not in games:
        return Answer("not supported", {}, f"use {', '.join(games)}")
    return Answer("converted", {"recipe": games[value]})


def _workers(flags: Flags) -> tuple[Mapping[str, Any], str]:
    return {"workers": flags.whole("n_gpus", 1)}, "a run on each device; add `devices=['0','1']`"


_SEARCH = Script(
    Program(
        "RAGEN",
        "tune",
        {
            "env_name": Rule(_game),
            "exp_base_name": equal("name", words=True),
            "search_group": equal("--group"),
            "micro_batch_size": converted(
                lambda flags: (
                    {"keys.learner.tokens_per_batch": flags.whole("micro_batch_size") * 3200},
                    f"{flags.text('micro_batch_size')} episodes x 3200 tokens",
                )
            ),
            "n_gpus": without_effect("in `--parallel`; a trial sees all devices"),
            "parallel": Rule(lambda _, flags: Answer("converted", *_workers(flags)), switch=True),
            "dry_run": Rule(lambda *_: Answer("converted", {"--dry-run": ""}), switch=True),
            "train_batch_size": equal("keys.rollout.groups_per_step"),
            "n_rollout": equal("keys.rollout.episodes_per_group"),
            "actor_lr": equal("keys.optimizer.learning_rate"),
            "kl_coef": equal("keys.kl.coefficient"),
            "max_turns": equal("keys.environment.max_turns"),
            "temperature": equal("keys.rollout.sampling.temperature"),
            "ppo_batch_size": without_effect("one update per step"),
        },
    ),
    "posttrain tune ragen/search",
)


def _updates_of_pipeline(prefix: str, key: str) -> Rule:
    def make(flags: Flags) -> tuple[Mapping[str, Any], str]:
        size = flags.whole(f"{prefix}_batch_size", 4 if prefix == "reward" else 2)
        passes = flags.whole(f"{prefix}_grad_accum", 4 if prefix == "reward" else 8)
        if prefix == "reward":
            return {key: size * passes}, f"{size} x {passes} pairs"
        group = flags.whole("rloo_k", 4)
        return {key: size * passes // group}, f"{size} x {passes} answers / {group} to a prompt"

    return converted(make)


def _episodes(flags: Flags) -> tuple[Mapping[str, Any], str]:
    batch = flags.whole("rloo_batch_size", 2) * flags.whole("rloo_grad_accum", 8)
    return {
        "stages.rl.steps": -(-flags.whole("total_episodes") // batch)
    }, f"{flags.text('total_episodes')} answers / {batch}"


_PIPELINE = Script(
    Program(
        "the HelpSteer3 experiment",
        "pipeline",
        {
            "reward_batch_size": _updates_of_pipeline("reward", "stages.reward.rows_per_update"),
            "reward_grad_accum": _updates_of_pipeline("reward", "stages.reward.rows_per_update"),
            "reward_epochs": equal("stages.reward.epochs"),
            "reward_lr": equal("stages.reward.optimizer.learning_rate"),
            "max_length": equal("stages.reward.data.max_tokens"),
            "warmup_steps": equal("stages.reward.optimizer.warmup_updates"),
            "eval_size": equal("stages.reward.data.held_out"),
            "use_peft": without_effect(
                "on in the recipe; `stages.reward.model.lora=null` trains all weights", flag=True
            ),
            "lora_r": equal("stages.reward.model.lora.rank"),
            "lora_alpha": equal("stages.reward.model.lora.alpha"),
            "lora_dropout": equal("stages.reward.model.lora.dropout"),
            "rloo_batch_size": _updates_of_pipeline("rloo", "stages.rl.rollout.groups_per_step"),
            "rloo_grad_accum": _updates_of_pipeline("rloo", "stages.rl.rollout.groups_per_step"),
            "rloo_k": equal("stages.rl.rollout.episodes_per_group"),
            "rloo_lr": equal("stages.rl.optimizer.learning_rate"),
            "eos_penalty": equal("stages.rl.rollout.missing_eos_penalty"),
            "total_episodes": converted(_episodes),
            "reward_model_only": Rule(
                lambda *_: Answer("converted", {"--only": "reward"}, "after `--only data`"), switch=True
            ),
            "rloo_only": Rule(lambda *_: Answer("converted", {"--from": "rl"}), switch=True),
            "reward_model_dir": converted(
                lambda flags: (
                    {"stages.rl.reward.path": flags.text("reward_model_dir")} if flags.on("rloo_only") else {},
                    "the reward model" if flags.on("rloo_only") else "the model is in `runs/helpsteer3/reward/model`",
                )
            ),
            "rloo_output_dir": without_effect("the model is in `runs/helpsteer3/rl/model`"),
        },
    ),
    "posttrain pipeline helpsteer3/pipeline",
)
_PLOTS = Script(Program("the experiment", "plot", {}), "posttrain plot RUN")
_INCLUDED = Script(
    _evaluation("evaluate", {"input": without_effect("the file that the judge wrote")}),
    "posttrain compare NAME=FOLDER",
)
_SCRIPTS = {
    "run_multigpu_inference.sh": _INFERENCE,
    "compute_all_metrics.py": _TEXT,
    "reward_metric.py": _REWARD,
    "generate_baseline_rationales.py": _BASELINE,
    "train_seg_rm.sh": _UNIT_REWARD,
    "run_fit_function.sh": _FIT,
    "hyperparam_search.sh": _SEARCH,
    "hyperparam_search.py": _SEARCH,
    "train_pipeline.py": _PIPELINE,
    "plot_logs.py": _PLOTS,
    "plot_logfit_function_sklearn.py": Script(
        Program("DenseRewardRLHF-PPO", "fit-normalizer", {}), "posttrain fit-normalizer RUN"
    ),
}


def find(word: str, after: list[str]) -> Script | None:
    """The script that `word` names."""
    name = Path(word).name
    if name == "train_ppo_segment.sh":
        return _OUTCOME if len(after) > 7 and after[7] == "segment_last_avg" else _UNIT_PPO
    if match := re.fullmatch(r"optuna_(sft|dpo|rm|ppo)_tuning\.py", name):
        return _study(match[1])
    if match := re.fullmatch(r"aggregate_(\w+)\.py", name):
        return _INCLUDED
    if match := re.fullmatch(r"(factual_accuracy|logical_soundness|efficiency)_judge\.py", name):
        return _judge(match[1])
    return _SCRIPTS.get(name)
