"""One step of reinforcement learning: answers of groups, scores, update."""

import time
from collections.abc import Iterator, Sequence

import numpy as np
import torch

from accelerator.decoding import answers, engine_of, random_prompts
from accelerator.measuring import finish
from accelerator.rows import Row
from accelerator.shapes import Shape
from accelerator.training import Setting, Training
from posttrain.engines.protocol import Completion
from posttrain.episode import Stream
from posttrain.losses.policy import policy_loss
from posttrain.losses.surrogates import PpoLoss
from posttrain.models.forward import TokenScores
from posttrain.recipe.rollout import SamplingRecipe
from posttrain.seeds import random_stream
from posttrain.training.objectives import logprobs, token_batch
from posttrain.training.updater import Sample, Totals


class ClippedLoss:
    """PPO's clipped surrogate, a mean over the sampled tokens of the step."""

    recipe = PpoLoss()

    def weigh(self, samples: Sequence[Sample]) -> tuple[list[float], float]:
        return [1.0] * len(samples), float(sum(sample.sampled_tokens for sample in samples))

    def has_signal(self, sample: Sample) -> bool:
        return bool(np.any(sample.advantages != 0))

    def __call__(
        self, output: TokenScores, samples: Sequence[Sample], weights: Sequence[float]
    ) -> tuple[torch.Tensor, Totals]:
        return policy_loss(self.recipe, output.logprobs, token_batch(samples, weights, output.logprobs.device))


def learning(
    shape: Shape, device: torch.device, until: float, groups: int, members: int, prompt: int, tokens: int
) -> Iterator[Row]:
    """Steps of `groups` prompts with `members` answers each, on policy; the second step is measured.

    Scoring is a pass of the learner over the answers without gradient, as a reference model or a judge of ratios
    needs it. `mismatch` is the mean distance of its log-probabilities from those of the engine, in nats.
    """
    training = Training(shape, device, Setting(shape.tokens_per_batch))
    engine = engine_of(training.policy, groups * members)
    took: dict[str, float] = {}
    apart = 0.0
    for step in range(2):
        asked = [p for p in random_prompts(groups, prompt, shape.vocabulary, "step", step) for _ in range(members)]
        engine.load_weights(step)
        begun = _now(device)
        found = answers(engine, asked, tokens, SamplingRecipe(), "step", step)
        generated = _now(device)
        samples = [answer_sample(p, answer, step, i) for i, (p, answer) in enumerate(zip(asked, found, strict=True))]
        scores = logprobs(training.learner, samples)
        scored = _now(device)
        totals = training.learner.update(samples, ClippedLoss())
        took = {"generate": generated - begun, "score": scored - generated, "update": _now(device) - scored}
        behaviour = np.concatenate([sample.stream.rollout_logprobs[sample.stream.sampled] for sample in samples])
        apart = float(np.abs(np.concatenate(scores) - behaviour).mean())
        if totals["optimizer/skipped"][0]:
            raise RuntimeError("; ".join(training.learner.take_warnings()))
        if time.monotonic() > until:
            break
    total, count = sum(took.values()), groups * members
    parts = ", ".join(f"{name} {value:.2f} s" for name, value in took.items())
    case = f"{shape.name}, {groups} groups of {members}, {prompt} + {tokens} tokens"
    yield Row("RL step", case, count / total, "samples/s", note=f"local engine; {parts}; mismatch {apart:.4f} nats")


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
