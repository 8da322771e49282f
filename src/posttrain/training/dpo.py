"""Preference optimization: DPO and its variants on pairs, KTO on unpaired answers."""

import hashlib
import json
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np
import torch
from rich.console import Console

from posttrain.data.rendering import Renderer
from posttrain.data.tokens import TokenRow
from posttrain.distributed.sharding import full_tensor
from posttrain.distributed.world import current_world
from posttrain.episode import Stream
from posttrain.errors import RunError
from posttrain.losses.preference import RewardShift, kto_kl
from posttrain.models.forward import TokenScores, transformer
from posttrain.models.load import require_reward_model
from posttrain.models.policy import Policy
from posttrain.recipe.loss import BcoLoss, KtoLoss
from posttrain.recipe.stages import DpoRecipe
from posttrain.recipe.warnings import recipe_warnings
from posttrain.runs.directory import RunDirectory, atomic_file, cache_directory
from posttrain.seeds import random_stream
from posttrain.training.auditor import AnswerAuditor
from posttrain.training.evaluators import choice_of
from posttrain.training.objectives import PairObjective, UnpairedObjective, logprobs, token_forward
from posttrain.training.optimizer import Optimizer
from posttrain.training.reference import MovingReference
from posttrain.training.row_evaluators import PreferenceEvaluator
from posttrain.training.rows import check_rows, load_data, samples_of_compared, samples_of_row, stream_of, train_on
from posttrain.training.trainer import Callbacks, Trainer
from posttrain.training.updater import Sample, Samples, Totals, Updater


class ReferenceLogprobs:
    """Sets `ref_logprobs` of samples. `precompute` scores samples with the initial policy and caches the result on
    disk."""

    def __init__(
        self, recipe: DpoRecipe, policy: Policy, learner: Updater[TokenScores], moving: MovingReference | None = None
    ) -> None:
        """Create it before the policy's weights change or are restored from a checkpoint.

        With `moving`, the reference model changes, and nothing is stored on disk or in memory.
        """
        self.policy, self.learner, self.moving = policy, learner, moving
        self._known: dict[bytes, np.ndarray] = {}
        self._directory: Path | None = None
        if recipe.loss.needs_reference and recipe.cache_ref_logprobs and moving is None:
            self._directory = Path(recipe.data.cache).parent if recipe.data.cache else cache_directory()
            self._model = _digest_of(policy)

    @property
    def is_policy(self) -> bool:
        """Whether the reference model has the weights of the policy."""
        return self.policy.version == 0 if self.moving is None else self.moving.is_policy

    def precompute(self, samples: Samples) -> None:
        """Compute the log-probabilities of `samples`, or read them from the cache.

        The policy must still have its initial weights. It then equals the reference model, so no copy of the weights is
        needed.
        """
        assert self.policy.version == 0, "the policy was already trained"
        assert self.moving is None, "the reference model changes"
        names = [_name(sample.stream) for sample in samples]
        unknown = {name: sample for name, sample in zip(names, samples, strict=True) if name not in self._known}
        if not unknown:
            return
        file, lengths = None, {name: unknown[name].sampled_tokens for name in sorted(unknown)}
        if self._directory is not None:
            rows = hashlib.blake2b(b"".join(lengths), digest_size=16).hexdigest()
            file = self._directory / "references" / f"{self._model}.{rows}.npz"
            if stored := current_world().on_rank0(partial(self._read, file, lengths)):
                self._known |= stored
                return
        computed = logprobs(self.learner, [_unpaired(sample) for sample in unknown.values()])
        self._known |= dict(zip(unknown, computed, strict=True))
        if file is not None and current_world().is_rank0:
            with suppress(RunError), atomic_file(file) as opened:  # the cache may be on a disk that is full
                np.savez(opened, logprobs=np.concatenate([self._known[name] for name in lengths]))

    def assign(self, samples: Samples) -> None:
        """Set `ref_logprobs` of each sample. Values that `precompute` did not compute are computed now."""
        names = [_name(sample.stream) for sample in samples]
        unknown = [_unpaired(s) for s, name in zip(samples, names, strict=True) if name not in self._known]
        if unknown:
            with self.policy.as_reference():
                computed = logprobs(self.learner, unknown)
            temporary = dict(zip([_name(s.stream) for s in unknown], computed, strict=True))
        for sample, name in zip(samples, names, strict=True):
            sample.ref_logprobs = self._known[name] if name in self._known else temporary[name]

    def _read(self, file: Path, lengths: Mapping[bytes, int]) -> dict[bytes, np.ndarray]:
        """The stored values of the names in `lengths`, of these numbers of tokens; empty unless the file has them."""
        ends = np.cumsum(list(lengths.values()))
        with suppress(Exception):  # damaged files raise zip and npy errors of many types
            with np.load(file) as stored:
                values = stored["logprobs"]
            if values.shape == (ends[-1],) and values.dtype == np.float32:
                return dict(zip(lengths, np.split(values, ends[:-1]), strict=True))
        return {}


def _unpaired(sample: Sample) -> Sample:
    """Return the sample without its pair, so that it can be packed with any other."""
    return Sample(sample.stream, sample.label, sample.advantages)


def _name(stream: Stream) -> bytes:
    digest = hashlib.blake2b(stream.ids.tobytes(), digest_size=16)
    digest.update(stream.sampled.tobytes())
    return digest.digest()


def _digest_of(policy: Policy) -> str:
    """Return a digest of the policy's weights and of its configuration."""
    digest = hashlib.blake2b(digest_size=16)
    settings = transformer(policy.model).config.to_dict()
    # The path of the model does not matter.
    digest.update(json.dumps({k: v for k, v in settings.items() if k != "_name_or_path"}, default=str).encode())
    for name, sharded in sorted(policy.model.state_dict(keep_vars=True).items()):
        tensor = full_tensor(sharded)
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def train(recipe: DpoRecipe, run: RunDirectory, resume: bool, console: Console, callbacks: Callbacks = ()) -> None:
    """Train the policy; one step is one update on `rows_per_update` rows."""
    policy = Policy(recipe.model, recipe.seed)
    renderer = Renderer(policy.tokenizer, policy.end_tokens)
    data = load_data(recipe.kind, recipe.data, renderer, "assistant", recipe.rows_per_update, recipe.seed)
    total = recipe.steps or recipe.epochs * data.updates_per_epoch
    optimizer = Optimizer(policy.trainable(), recipe.optimizer, total)
    learner = Updater(policy, optimizer, recipe.learner, token_forward(policy, recipe.learner))
    reference = ReferenceLogprobs(recipe, policy, learner)
    pool = data.stored if isinstance(recipe.loss, KtoLoss) else []
    warnings = [*recipe_warnings(recipe), *data.problems.summary(), *renderer.warnings()]
    row_warnings = check_rows(recipe, data)
    if pool and all(row.prompt == pool[0].prompt for row in pool):
        row_warnings.insert(
            0, "all training rows have the same prompt, so KTO's KL estimate has no mismatched answers and is 0"
        )
    shift = RewardShift() if isinstance(recipe.loss, BcoLoss) and recipe.loss.shift else None
    held_out = partial(_objective, recipe, learner, reference, pool, shift)
    evaluator = PreferenceEvaluator(learner, data, recipe.name, held_out, unpaired=recipe.kind == "unpaired")
    moving = MovingReference(recipe.reference, policy, optimizer) if recipe.moves_reference else None
    current = reference if moving is None else ReferenceLogprobs(recipe, policy, learner, moving)
    auditor = None
    if recipe.audit is not None and recipe.audit.path is not None:
        require_reward_model(recipe.audit.path, "audit.path")
        auditor = AnswerAuditor(recipe, policy, run, total, data.validation, lambda: evaluator.margins)
    trainer = Trainer(
        recipe,
        total,
        run,
        policy,
        learner,
        evaluators=[evaluator] if data.validation or data.test else [],
        best_by=choice_of(recipe.evaluation.metric) if data.validation else None,
        warnings=[*warnings, *row_warnings, *recipe.too_few(len(data.final))],
        stateful={"shift": shift} if shift is not None else {},
        checkpointables={"reference": moving} if moving is not None else {},
        callbacks=callbacks,
        auditor=auditor,
    )
    if recipe.loss.needs_reference:
        parts = [samples_of_compared(rows) for rows in (data.validation, data.test)]
        with trainer.phase("reference"):
            known = [sample for part in parts for sample in part]
            if moving is None:
                known = [*samples_of_compared(data.stored), *known]
            elif recipe.loss.type == "kto":
                known += [
                    other for part in parts if part for other in mismatched_samples(part, pool, recipe.data.max_tokens)
                ]
            reference.precompute(known)

    def learned(totals: Totals) -> None:
        if shift is not None:
            shift.update(totals)
        if moving is not None:
            moving.follow()
            totals["reference/updates"] = (float(moving.updates), 1.0)

    objective_for = partial(_objective, recipe, learner, current, pool, shift)
    train_on(
        trainer, data, lambda step: samples_of_compared(data.train.batch(step)), objective_for, resume, console, learned
    )


def _objective(
    recipe: DpoRecipe,
    learner: Updater[TokenScores],
    reference: ReferenceLogprobs,
    pool: Sequence[TokenRow],
    shift: RewardShift | None,
    samples: Samples,
) -> PairObjective | UnpairedObjective:
    """Return the objective of these samples, after setting their reference log-probabilities if the loss needs them and
    they are not those of the policy.

    `pool`: rows whose answers KTO's KL estimate uses if all samples have the same prompt.
    """
    # Log-probabilities of another batch would differ by rounding, which would decide which answer has the larger reward.
    if recipe.loss.needs_reference and not reference.is_policy:
        reference.assign(samples)
    if isinstance(recipe.loss, KtoLoss):
        mismatched = mismatched_samples(samples, pool, recipe.data.max_tokens)
        ratios = torch.zeros(len(mismatched))
        if not reference.is_policy:
            reference.assign(mismatched)
            for place, scores in enumerate(logprobs(learner, mismatched)):
                references = mismatched[place].ref_logprobs
                assert references is not None
                ratios[place] = float(scores.sum(dtype="float64") - references.sum(dtype="float64"))
        # Over the whole step, so that the estimate does not depend on the micro-batches.
        return UnpairedObjective(recipe.loss, kto_kl(ratios), len(mismatched))
    return PairObjective(recipe.loss, recipe.nll_coefficient, shift.value if shift is not None else None)


def mismatched_samples(samples: Samples, pool: Sequence[TokenRow], max_tokens: int) -> list[Sample]:
    """Return each sample's prompt with an answer to another prompt, truncated to `max_tokens`: one per sample.

    The answers come from `samples`. If all samples have the same prompt, as in a last update of one row, the answers
    come from rows of `pool` with other prompts, chosen by a draw that depends on the prompt. The result is empty if
    there are none.

    Source: the mismatched pairs (x, y') of Ethayarajh et al. 2024, "KTO", arXiv 2402.01306, section 4.1. An answer to
    the same prompt is not mismatched: training changes its probability, and with it the estimate.
    """
    by_prompt: dict[bytes, list[int]] = {}
    for index, sample in enumerate(samples):
        by_prompt.setdefault(_prompt(sample), []).append(index)
    if len(by_prompt) == 1:
        prompt, count = _prompt(samples[0]), len(samples)
        other_rows = [row for row in pool if row.prompt != prompt]
        draws = random_stream("mismatched answers", prompt.hex())
        others = []
        if other_rows:
            places = draws.choice(len(other_rows), count, replace=len(other_rows) < count).tolist()
            others = [samples_of_row(other_rows[place])[0] for place in places]
        return [_mismatched(one, other, max_tokens) for one, other in zip(samples, others, strict=False)]
    order = [index for indices in by_prompt.values() for index in indices]
    donors: dict[int, int] = {}
    start = 0
    for indices in by_prompt.values():
        start += len(indices)
        rest = [*order[start:], *order[: start - len(indices)]]
        donors |= {index: rest[place % len(rest)] for place, index in enumerate(indices)}
    return [_mismatched(sample, samples[donors[index]], max_tokens) for index, sample in enumerate(samples)]


def _prompt(sample: Sample) -> bytes:
    return sample.stream.ids[: int(np.argmax(sample.stream.sampled))].tobytes()


def _mismatched(one: Sample, other: Sample, max_tokens: int) -> Sample:
    """Return the prompt of `one` with the answer of `other`, truncated to `max_tokens`."""
    prompt, start = int(np.argmax(one.stream.sampled)), int(np.argmax(other.stream.sampled))
    ids = np.concatenate([one.stream.ids[:prompt], other.stream.ids[start:]])[:max_tokens]
    trained = np.concatenate([np.zeros(prompt, dtype=bool), other.stream.sampled[start:]])[:max_tokens]
    return Sample(stream_of(ids, trained), f"{one.label} with the answer of {other.label}", other.advantages)
