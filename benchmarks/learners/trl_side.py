"""The side of TRL: its trainers with its configurations, as its documentation shows them.

The model is given as a path, so that TRL loads it as it likes. What the benchmark adds: a callback with a stopwatch, a
count of rows and tokens at `compute_loss`, and in RL a logits processor that ends answers at the lengths that
posttrain's answers have.
"""

import json
import sys
from pathlib import Path
from typing import Any

from harness.data import answer_lengths

from learners.job import KL, LEARNING_RATES, LONGEST_ANSWER, Job, of_completions, read_job
from learners.recording import Recorder
from posttrain.seeds import random_stream

PER_DEVICE = 8
"""Rows of a micro-batch: TRL's default."""


def main() -> None:
    """Run the job of the file in the first argument; the result goes to the second."""
    values = json.loads(Path(sys.argv[1]).read_text())
    job = read_job(values)
    import torch

    torch.set_num_threads(values["threads"])
    trainer = _trainer(job, values["place"], Recorder(job.warmup, job.steps, Path(sys.argv[2])))
    if job.stage in KL:
        _end_answers(trainer, job)
    trainer.train()


def _trainer(job: Job, place: str, recorder: Recorder) -> Any:
    import trl
    from datasets import Dataset

    names = {"sft": "SFT", "reward": "Reward", "dpo": "DPO", "rloo": "RLOO", "grpo": "GRPO"}
    micro = min(PER_DEVICE, job.rows_per_step)
    settings: dict[str, Any] = {
        "output_dir": f"{place}/trl",
        "use_cpu": True,
        "seed": job.seed,
        "learning_rate": LEARNING_RATES[job.stage],
        "lr_scheduler_type": "constant",
        "max_steps": job.warmup + job.steps,
        "train_sampling_strategy": "sequential",
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
        "report_to": "none",
        "per_device_train_batch_size": micro,
        "gradient_accumulation_steps": job.rows_per_step // micro,
    }
    rest: dict[str, Any] = {}
    if job.stage in KL:
        settings |= {"num_generations": job.group, "max_completion_length": LONGEST_ANSWER, "beta": KL[job.stage]}
        settings["shuffle_dataset"] = False
        rest["reward_funcs"] = of_completions
    rows = _in_our_order([json.loads(line) for line in Path(job.rows).read_text().splitlines()], job)
    grouped = job.settings.get("train_sampling_strategy") == "group_by_length"
    if grouped and job.stage != "sft":
        # Pairs can only be grouped by a column of lengths, which must be kept from being removed as unused.
        settings["remove_unused_columns"] = False
        rows = [row | {"length": _longer_answer(row)} for row in rows]
    config = getattr(trl, f"{names[job.stage]}Config")(**settings | job.settings)
    trainer_class = _watched(getattr(trl, f"{names[job.stage]}Trainer"), recorder, job, grouped)
    trainer = trainer_class(model=job.model, args=config, train_dataset=Dataset.from_list(rows), **rest)
    trainer.add_callback(_stopwatch(recorder))
    return trainer


def _in_our_order(rows: list[dict[str, Any]], job: Job) -> list[dict[str, Any]]:
    """The rows in the random order in which posttrain takes them, so that a step is the same rows on both sides."""
    from posttrain.training.rollouts import TaskOrder
    from posttrain.training.rows import EpochRows

    if job.stage in KL:
        groups = (job.warmup + job.steps) * (job.rows_per_step // job.group)
        return [rows[i] for i in TaskOrder(range(groups), job.seed).take(groups)]
    order: Any = EpochRows([rows], [1.0], job.rows_per_step, job.seed)  # type: ignore[list-item]
    return [row for step in range(order.updates_per_epoch) for row in order.batch(step)]


def _longer_answer(row: dict[str, Any]) -> int:
    """Characters of the prompt and the longer answer of a pair, which decide how far its batch is padded."""
    return len(row["prompt"][0]["content"]) + max(len(row[side][0]["content"]) for side in ("chosen", "rejected"))


def _watched(trainer: Any, recorder: Recorder, job: Job, grouped: bool) -> Any:
    """The class `trainer`, counting rows at the loss.

    `grouped`: take the batches of the length-grouping sampler in random order. It sorts the rows of fifty batches from long
    to short, so that in a short run the warm-up would be all the long rows and the measured steps the rest.
    """

    class Watched(trainer):
        def compute_loss(self, model: Any, inputs: Any, *arguments: Any, **keywords: Any) -> Any:
            recorder.saw(*_seen(inputs, job))
            return super().compute_loss(model, inputs, *arguments, **keywords)

        def _get_train_sampler(self, *arguments: Any) -> Any:
            sampler = super()._get_train_sampler(*arguments)
            if not grouped:
                return sampler
            order = list(sampler)
            batches = [order[start : start + job.rows_per_step] for start in range(0, len(order), job.rows_per_step)]
            shuffled = random_stream(job.seed, "benchmark batches").permutation(len(batches))
            return [row for number in shuffled for row in batches[number]]

    return Watched


def _stopwatch(recorder: Recorder) -> Any:
    """The callback that stamps the ends of steps."""
    from transformers import TrainerCallback

    class Stopwatch(TrainerCallback):
        def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **keywords: Any) -> None:
            # The log of a step follows its end, so it counts for the step.
            if "loss" in logs:
                recorder.finished_step(float(logs["loss"]))

    return Stopwatch()


def _seen(inputs: Any, job: Job) -> tuple[int, int]:
    """Rows and real tokens of a micro-batch."""
    if job.stage in KL:
        return len(inputs["prompt_ids"]), int(inputs["prompt_mask"].sum() + inputs["completion_mask"].sum())
    if "attention_mask" not in inputs:
        # Packed: every row begins at position 0.
        return int((inputs["position_ids"] == 0).sum()), inputs["input_ids"].numel()
    mask = inputs["attention_mask"]
    return len(mask) // (1 if job.stage == "sft" else 2), int(mask.sum())


def _end_answers(trainer: Any, job: Job) -> None:
    """Let the answers of each step end at the lengths of `answer_lengths`, and at no end token before."""
    import torch
    from transformers import LogitsProcessorList

    generate = trainer.model.generate
    end = trainer.processing_class.eos_token_id
    ends = torch.tensor(getattr(trainer, "eos_token_ids", [end]))
    step = 0

    def bounded(*arguments: Any, **keywords: Any) -> Any:
        nonlocal step
        prompt = keywords["input_ids"].shape[1]
        last = torch.tensor(answer_lengths(step, len(keywords["input_ids"]), seed=job.seed)) - 1
        step += 1

        def end_rows(ids: Any, scores: Any) -> Any:
            scores[:, ends] = -torch.inf
            over = last <= ids.shape[1] - prompt
            scores[over] = -torch.inf
            scores[over, end] = 0
            return scores

        return generate(*arguments, **keywords, logits_processor=LogitsProcessorList([end_rows]))

    trainer.model.generate = bounded


if __name__ == "__main__":
    main()
