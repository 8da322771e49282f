"""Preference optimisation: DPO and its relatives on pairs, KTO on judged answers."""

from collections.abc import Sequence
from functools import partial

import numpy as np
import torch
from rich.console import Console

from posttrain.data.rendering import Renderer
from posttrain.losses.preference import kto_kl
from posttrain.models.forward import TokenScores
from posttrain.models.policy import Policy
from posttrain.recipe.preference import KtoLoss
from posttrain.recipe.stages import DpoRecipe
from posttrain.runs.directory import RunDirectory
from posttrain.training.batches import Sample
from posttrain.training.comparisons import PairObjective, VerdictObjective
from posttrain.training.forward import logprobs, token_forward
from posttrain.training.learner import Learner
from posttrain.training.preference_measure import PreferenceMeasure, choice_of
from posttrain.training.references import References
from posttrain.training.rows import load_data, samples_of_row, stream_of
from posttrain.training.supervised import Batches, train_on
from posttrain.training.trainer import Trainer


def train(recipe: DpoRecipe, run: RunDirectory, resume: bool, console: Console) -> None:
    """Fit the policy to the comparisons; one step is one update on `rows_per_update` rows."""
    policy = Policy(recipe.model, recipe.seed)
    renderer = Renderer(policy.tokenizer, policy.end_tokens)
    kind = "verdict" if recipe.loss.type == "kto" else "pair"
    data = load_data(kind, recipe.data, renderer, "assistant", recipe.rows_per_update, recipe.seed)  # type: ignore[arg-type]
    batches = Batches(data, lambda number, row: samples_of_row(row, number))
    total = recipe.steps or recipe.epochs * data.updates_per_epoch
    trainer: Trainer[TokenScores] = Trainer(recipe, run, policy, token_forward(policy, recipe.learner), total, total)
    trainer.messages = [*data.problems.summary(), *renderer.remarks()]
    references = References(recipe, policy, trainer.learner)
    rows = [*data.stored, *data.validation, *data.test]
    if recipe.loss.needs_reference:
        references.prepare([sample for number, row in enumerate(rows) for sample in samples_of_row(row, number)])
    objective_for = partial(_objective, recipe, trainer.learner, references)
    if data.validation or data.test:
        trainer.measures.append(PreferenceMeasure(trainer.learner, recipe, data, objective_for))
    if data.validation:
        trainer.choice = choice_of(recipe.evaluation.metric)
    train_on(trainer, batches, objective_for, resume, console)


def _objective(
    recipe: DpoRecipe, learner: Learner[TokenScores], references: References, samples: Sequence[Sample]
) -> PairObjective | VerdictObjective:
    """What to minimise on these samples, which get their reference log-probabilities where the loss needs them."""
    if recipe.loss.needs_reference:
        references.give(samples)
    if isinstance(recipe.loss, KtoLoss):
        return VerdictObjective(recipe.loss, _reference_point(learner, references, samples, recipe.data.max_tokens))
    return PairObjective(recipe.loss, recipe.supervised)


def _reference_point(
    learner: Learner[TokenScores], references: References, samples: Sequence[Sample], max_tokens: int
) -> torch.Tensor:
    """KTO's estimate of the KL: each prompt with the next row's answer. Over the whole step, so no micro-batch matters."""
    mismatched = [
        _with_answer_of(one, other, max_tokens) for one, other in zip(samples, [*samples[1:], samples[0]], strict=True)
    ]
    references.give(mismatched)
    ratios = []
    for sample, scores in zip(mismatched, logprobs(learner, mismatched), strict=True):
        assert sample.reference is not None
        ratios.append(float(scores.sum(dtype="float64") - sample.reference.sum(dtype="float64")))
    return kto_kl(torch.tensor(ratios, dtype=torch.float32))


def _with_answer_of(one: Sample, other: Sample, max_tokens: int) -> Sample:
    """The prompt of `one` and as much of the answer of `other` as fits."""
    prompt, start = int(np.argmax(one.stream.sampled)), int(np.argmax(other.stream.sampled))
    ids = np.concatenate([one.stream.ids[:prompt], other.stream.ids[start:]])[:max_tokens]
    trained = np.concatenate([np.zeros(prompt, dtype=bool), other.stream.sampled[start:]])[:max_tokens]
    return Sample(stream_of(ids, trained), f"{one.label} with the answer of {other.label}", other.advantages)
