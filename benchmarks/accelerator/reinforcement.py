"""One step of reinforcement learning: answers of groups, scores, update."""

import time
from collections.abc import Iterator
from contextlib import ExitStack
from statistics import median
from typing import Any
from unittest import mock

import numpy as np
import torch

from accelerator.decoding import all_answers, engine_of, random_prompts
from accelerator.measuring import finish
from accelerator.rows import Row
from accelerator.shapes import Shape
from accelerator.training import Training, fitting
from posttrain.engines.local.cuda import CudaGraphs, RecordedDecoder
from posttrain.engines.protocol import Completion
from posttrain.episode import Stream
from posttrain.losses.surrogates import PpoLoss
from posttrain.recipe.rollout import SamplingRecipe
from posttrain.seeds import random_stream
from posttrain.training.objectives import PolicyObjective, logprobs
from posttrain.training.updater import Sample


def learning(
    shape: Shape,
    device: torch.device,
    until: float,
    sizes: tuple[int, int, int, int],
    mode: str = "",
    ragged: bool = False,
) -> Iterator[Row]:
    """Steps on policy: `sizes` are groups, answers of each, and the tokens of a prompt and of an answer.

    The first of four steps is not measured. Scoring is a pass of the learner over the answers without gradient, as a
    reference model or a judge of ratios needs it. `mismatch` is the mean distance of its log-probabilities from those of the
    engine, in nats. `mode`: `lora`, or all weights. `ragged`: answers end after 1 to so many tokens, most of them early.
    """
    groups, members, prompt, tokens = sizes
    training = Training(shape, device, fitting(shape, device, mode))
    engine = engine_of(training.policy, groups * members)
    took: list[dict[str, float]] = []
    mismatches, written, passes = [], 0, Passes()
    for step in range(4):
        asked = [p for p in random_prompts(groups, prompt, shape.vocabulary, "step", step) for _ in range(members)]
        ends = [tokens] * len(asked)
        if ragged:
            drawn = np.exp(random_stream("benchmark lengths", step).standard_normal(len(asked)))
            ends = np.clip(drawn * tokens / 4, 1, tokens).astype(int).tolist()
        with passes:
            engine.load_weights(step)
            begun = _now(device)
            answers = all_answers(engine, list(zip(asked, ends, strict=True)), SamplingRecipe(), "step", step)
            engine.sleep()  # as in a run; on a GPU the next step makes the cache and its recordings again
            generated = _now(device)
        samples = [answer_sample(p, answer, step, i) for i, (p, answer) in enumerate(zip(asked, answers, strict=True))]
        scores = logprobs(training.learner, samples)
        scored = _now(device)
        totals = training.learner.update(samples, PolicyObjective(PpoLoss()))
        updated = _now(device)
        behaviour = np.concatenate([sample.stream.rollout_logprobs[sample.stream.sampled] for sample in samples])
        mismatches.append(float(np.abs(np.concatenate(scores) - behaviour).mean()))
        if totals["optimizer/skipped"][0]:
            raise RuntimeError("; ".join(training.learner.take_warnings()))
        took.append({"generate": generated - begun, "score": scored - generated, "update": updated - scored})
        written = sum(ends)
        if step and time.monotonic() > until:
            break
    rates = [len(asked) / sum(step.values()) for step in took[1:]]
    note = (
        f"local engine; {min(rates):.1f} to {max(rates):.1f} in {len(rates)} steps; mismatch {max(mismatches):.4f} nats"
    )
    kind = ("LoRA" if mode else "all weights") + (", ragged" if ragged else "")
    case = f"{shape.name}, {kind}, {groups} groups of {members}, {prompt} + {tokens} tokens"
    yield Row("RL step", case, median(rates), "samples/s", note=note)
    for phase in took[0]:
        yield Row("RL step", f"{shape.name}, {kind}, {phase}", median(step[phase] for step in took[1:]), "s")
    rate = written / took[-1]["generate"]
    yield Row("RL step", f"{shape.name}, {kind}, generated in the last step", rate, "tokens/s")
    if ragged and device.type == "cuda":
        note = f"{passes.captures} recordings in {passes.recording:.2f} s, {passes.eager} passes kernel by kernel"
        yield Row("RL step", f"{shape.name}, passes of {len(took)} steps", float(passes.all), "", note=note)


class Passes:
    """Counts of the decoder's passes in its blocks, and the seconds that recording them took."""

    def __init__(self) -> None:
        self.all = self.captures = self.eager = 0
        self.recording = 0.0

    def __enter__(self) -> None:
        replay, compute, record = RecordedDecoder.replayed, RecordedDecoder.hidden, CudaGraphs.__call__

        def replayed(decoder: Any, *inputs: Any) -> Any:
            out = replay(decoder, *inputs)
            self.all += out is not None
            return out

        def computed(decoder: Any, *inputs: Any) -> Any:
            self.all += 1
            self.eager += 1
            return compute(decoder, *inputs)

        def recorded(graphs: Any, run: Any) -> Any:
            begun = time.perf_counter()
            made = record(graphs, run)
            self.captures += 1
            self.recording += time.perf_counter() - begun
            return made

        self._held = ExitStack()
        self._held.enter_context(mock.patch.object(RecordedDecoder, "replayed", replayed))
        self._held.enter_context(mock.patch.object(RecordedDecoder, "hidden", computed))
        self._held.enter_context(mock.patch.object(CudaGraphs, "__call__", recorded))

    def __exit__(self, *error: object) -> None:
        self._held.close()


def _now(device: torch.device) -> float:
    finish(device)
    return time.perf_counter()


def answer_sample(prompt: tuple[int, ...], answer: Completion, step: int, index: int) -> Sample:
    """The answer with a random advantage."""
    ids = np.array([*prompt, *answer.ids], dtype=np.int64)
    sampled = np.arange(len(ids)) >= len(prompt)
    behaviour = np.zeros(len(ids), dtype=np.float32)
    behaviour[sampled] = answer.logprobs
    turn = np.where(sampled, 0, -1).astype(np.int32)
    advantage = float(random_stream("benchmark advantages", step, index).standard_normal())
    stream = Stream(ids, sampled, behaviour, np.zeros(len(ids), dtype=np.float32), turn, turn)
    return Sample(stream, f"answer {index}", np.full(len(answer.ids), advantage, dtype=np.float32))
