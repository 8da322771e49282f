"""The side of posttrain: recipes through `run_stage`, as its command line runs them.

What the benchmark adds is put around the product here and changes nothing of what it computes: a stopwatch at the end
of each step, a count of rows and tokens at the learner, and in RL the lengths at which answers end.
"""

import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness.data import answer_lengths

from learners.job import KL, LEARNING_RATES, LONGEST, LONGEST_ANSWER, Job, read_job
from learners.recording import Recorder


def main(recorder_type: type[Recorder] = Recorder) -> None:
    """Run the job of the file in the first argument; the result goes to the second."""
    values = json.loads(Path(sys.argv[1]).read_text())
    job = read_job(values)
    recorder = recorder_type(job.warmup, job.steps, Path(sys.argv[2]))
    from posttrain.stages import run_stage

    recipe = _recipe(job, values["place"], values["threads"])
    _watch(recorder, pairs=job.stage in ("reward", "dpo"))
    if job.stage in KL:
        _end_answers(job)
    run_stage(recipe)


def _recipe(job: Job, place: str, threads: int) -> Any:
    """The recipe of the job: what it says, what its settings say over that, and defaults."""
    from posttrain.recipe.compose import load_recipe

    total = job.warmup + job.steps
    keys: dict[str, Any] = {
        "name": "benchmark",
        "runs": place,
        "seed": job.seed,
        "model.path": job.model,
        "model.device": "cpu",
        "model.threads": threads,
        "optimizer.learning_rate": LEARNING_RATES[job.stage],
        "steps": total,
        "checkpoint.every": 1_000_000,
        "evaluation.every": 0,
    }
    if job.stage in KL:
        keys |= _rl_keys(job, total)
    else:
        keys |= {
            "data.train": job.rows,
            "data.cache": f"{place}/tokens",
            "data.max_tokens": LONGEST,
            "rows_per_update": job.rows_per_step,
        }
    if job.stage == "dpo":
        keys["cache_ref_logprobs"] = False
    keys |= job.settings
    overrides = [f"{key}={json.dumps(value)}" for key, value in keys.items()]
    return load_recipe([], overrides, "rl" if job.stage in KL else job.stage)


def _rl_keys(job: Job, total: int) -> dict[str, Any]:
    groups = job.rows_per_step // job.group
    trained = groups * total
    return {
        "environment.type": "text_task",
        "environment.prompts": job.rows,
        "environment.reward": "learners.reward_rule:share_of_letters",
        "seeds.start": 0,
        "seeds.count": trained,
        "evaluation.seeds.start": trained,
        "evaluation.seeds.count": 1,
        "evaluation.final_seeds.start": trained + 1,
        "evaluation.final_seeds.count": 1,
        "rollout.groups_per_step": groups,
        "rollout.episodes_per_group": job.group,
        "rollout.tokens_per_turn": LONGEST_ANSWER,
        "rollout.tokens_per_episode": LONGEST,
        "credit.type": job.stage,
        "loss.type": "ppo",
        "kl.coefficient": KL[job.stage],
        **({"kl.estimator": "k1", "kl.apply_to": "reward"} if KL[job.stage] else {}),
    }


def _watch(recorder: Recorder, pairs: bool) -> None:
    """Count rows at the learner and stamp the ends of steps; reference log-probabilities count for their rows."""
    from posttrain.training.dpo import ReferenceLogprobs
    from posttrain.training.trainer import Trainer
    from posttrain.training.updater import Updater

    update, finish_step, prepare = Updater.update, Trainer.finish_step, ReferenceLogprobs.precompute

    def counted(self: Any, samples: Sequence[Any], objective: Any) -> Any:
        recorder.saw(len(samples) // (2 if pairs else 1), sum(len(sample.stream) for sample in samples))
        return update(self, samples, objective)

    def stamped(self: Any, metrics: dict[str, Any]) -> None:
        finish_step(self, metrics)
        recorder.dtype = str(next(self.model.model.parameters()).dtype).removeprefix("torch.")
        recorder.finished_step(metrics.get("loss/total", float("nan")))

    def timed(self: Any, samples: Sequence[Any]) -> None:
        begun = time.perf_counter()
        prepare(self, samples)
        recorder.extra_per_row = (time.perf_counter() - begun) / (len(samples) / 2)

    Updater.update, Trainer.finish_step, ReferenceLogprobs.precompute = counted, stamped, timed  # type: ignore[method-assign]


def _end_answers(job: Job) -> None:
    """Let the answers of each step end at the lengths of `answer_lengths`, and at no end token before."""
    from posttrain.engines.local.engine import LocalEngine
    from posttrain.training import rollouts

    generate, collect = LocalEngine.generate, rollouts.collect
    lengths: list[int] = []

    async def cut(self: Any, request: Any) -> Any:
        self.policy.end_tokens = frozenset()
        # Requests come in the order of places, as TRL's rows do. Evaluation, which is not measured, is kept short.
        return await generate(self, replace(request, max_tokens=lengths.pop(0) if lengths else 1))

    def with_lengths(worker: Any, tasks: Any, step: int, *rest: Any) -> Any:
        lengths[:] = answer_lengths(step - 1, job.rows_per_step, seed=job.seed)
        return collect(worker, tasks, step, *rest)

    LocalEngine.generate, rollouts.collect = cut, with_lengths  # type: ignore[method-assign]


if __name__ == "__main__":
    main()
