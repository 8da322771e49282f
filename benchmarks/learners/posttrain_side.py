"""The side of posttrain: its public functions, with a callback that counts rows and tokens and stamps the end of each step.

In RL, an engine ends answers at given lengths.
"""

import json
import sys
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from harness.data import answer_lengths
from harness.models import computing_dtype

import posttrain
from learners.job import KL, LEARNING_RATES, LONGEST, LONGEST_ANSWER, Job, read_job
from learners.recording import Recorder
from posttrain.runs.directory import RunDirectory


def main(recorder_type: type[Recorder] = Recorder) -> None:
    """Run the job of the file in the first argument; the result goes to the second."""
    values = json.loads(Path(sys.argv[1]).read_text())
    job = read_job(values)
    recorder = recorder_type(job.warmup, job.steps, Path(sys.argv[2]))
    lengths: list[int] = []
    watch = [Watcher(job, values["place"], recorder, lengths)]
    keys = _keys(job, values["place"], values["threads"])
    if job.stage in KL:
        posttrain.rl(engine=_engine_with(lengths), callbacks=watch, **keys)
    else:
        getattr(posttrain, job.stage)(callbacks=watch, **keys)


def _keys(job: Job, place: str, threads: int) -> dict[str, Any]:
    """The keys of the recipe: those of the job, and over them its settings."""
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
    return keys | job.settings


def _rl_keys(job: Job, total: int) -> dict[str, Any]:
    groups = job.rows_per_step // job.group
    trained = groups * total
    return {
        "environment.type": "text_task",
        "environment.prompts": job.rows,
        "environment.reward": "learners.job:share_of_letters",
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


class Watcher(posttrain.Callback):
    """Records steps. In RL it also puts the lengths of the next step's answers in `lengths`."""

    def __init__(self, job: Job, place: str, recorder: Recorder, lengths: list[int]) -> None:
        self.job, self.place, self.recorder, self.lengths = job, place, recorder, lengths
        self.in_rl = job.stage in KL

    def on_episodes(self, step: int, episodes: Sequence[Any]) -> None:
        self.recorder.saw(len(episodes), sum(len(stream) for episode in episodes for stream in episode.streams))

    def on_step(self, step: int, metrics: Mapping[str, Any]) -> None:
        job, recorder = self.job, self.recorder
        if recorder.dtype is None:  # `auto` is what the run has chosen
            run = RunDirectory.open(f"{self.place}/benchmark")
            recorder.dtype = computing_dtype(run.load_recipe().model.dtype)
        if not self.in_rl:
            recorder.saw(job.rows_per_step, int(metrics["tokens/trained"]))
        if "time/reference" in metrics:
            recorder.extra_per_row = metrics["time/reference"] / (job.rows_per_step * (job.warmup + job.steps))
        self._next_lengths(step + 1)
        recorder.finished_step(metrics.get("loss/total", float("nan")))

    def on_evaluation(self, step: int, values: Mapping[str, Any]) -> None:
        self._next_lengths(step + 1)

    def _next_lengths(self, step: int) -> None:
        if self.in_rl:
            self.lengths[:] = answer_lengths(step - 1, self.job.rows_per_step, seed=self.job.seed)


def _engine_with(lengths: list[int]) -> Any:
    """A function that makes an engine whose answers have the given lengths, and end at no end token before."""

    class Cut(posttrain.LocalEngine):
        async def generate(self, request: Any) -> Any:
            # Requests come in the order of episodes, as TRL's rows do. Evaluation, which is not measured, is kept short.
            return await super().generate(replace(request, max_tokens=lengths.pop(0) if lengths else 1))

    def made(policy: Any, recipe: Any) -> Any:
        # None that is sampled. The reference model, which is loaded later, needs one.
        policy.end_tokens = frozenset({-1})
        return Cut(policy, recipe)

    return made


if __name__ == "__main__":
    main()
