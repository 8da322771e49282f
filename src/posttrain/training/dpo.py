"""Preference optimisation: DPO and its relatives on pairs, KTO on judged answers."""

import hashlib
import json
import os
from collections.abc import Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path

import numpy as np
import torch
from rich.console import Console

from posttrain.data.rendering import Renderer
from posttrain.distributed.sharding import full_tensor
from posttrain.distributed.world import current
from posttrain.episode import Stream
from posttrain.losses.preference import kto_kl
from posttrain.models.forward import TokenScores, transformer
from posttrain.models.policy import Policy
from posttrain.recipe.loss import KtoLoss
from posttrain.recipe.stages import DpoRecipe
from posttrain.recipe.warnings import notes
from posttrain.runs.directory import RunDirectory
from posttrain.training.batches import Sample
from posttrain.training.evaluators import PreferenceEvaluator, choice_of
from posttrain.training.objectives import PairObjective, VerdictObjective, logprobs, token_forward
from posttrain.training.optimizer import Optimizer
from posttrain.training.rows import load_data, samples_of_row, stream_of
from posttrain.training.supervised import Batches, train_on
from posttrain.training.trainer import Callback, LoopSettings, Trainer
from posttrain.training.updater import Updater


class References:
    """Gives samples their `reference`. The policy at its start is the reference model."""

    def __init__(self, recipe: DpoRecipe, policy: Policy, learner: Updater[TokenScores]) -> None:
        """Take it before the policy's weights change, or are restored."""
        self.policy = policy
        self.learner = learner
        self._known: dict[bytes, np.ndarray] = {}
        self._directory: Path | None = None
        if recipe.loss.needs_reference and recipe.cache_ref_logprobs:
            home = Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "posttrain"
            self._directory = Path(recipe.data.cache).parent if recipe.data.cache else home
            self._model = _digest_of(policy)

    def prepare(self, samples: Sequence[Sample]) -> None:
        """Compute the log-probabilities of `samples` that are not known, or read them from the disk.

        The policy must still be as it started: it is its own reference then, so no copy of its weights is needed.
        """
        assert self.policy.version == 0, "the policy has learned something already"
        names = [_name(sample.stream) for sample in samples]
        missing = sorted({name for name in names if name not in self._known})
        if not missing:
            return
        file = self._file(missing)
        if file is not None and self._found(file, samples, names):
            return
        left = {name: sample for name, sample in zip(names, samples, strict=True) if name not in self._known}
        found = logprobs(self.learner, [_alone(sample) for sample in left.values()])
        self._known |= dict(zip(left, found, strict=True))
        if file is not None and current().is_rank0:
            self._write(file, missing)

    def give(self, samples: Sequence[Sample]) -> None:
        """Set `reference` of each sample, computing what `prepare` has not seen."""
        names = [_name(sample.stream) for sample in samples]
        unknown = [_alone(s) for s, name in zip(samples, names, strict=True) if name not in self._known]
        if unknown:
            with self.policy.as_reference():
                found = logprobs(self.learner, unknown)
            once = dict(zip([_name(s.stream) for s in unknown], found, strict=True))
        for sample, name in zip(samples, names, strict=True):
            sample.ref_logprobs = self._known[name] if name in self._known else once[name]

    def _file(self, names: Sequence[bytes]) -> Path | None:
        if self._directory is None:
            return None
        rows = hashlib.blake2b(b"".join(names), digest_size=16).hexdigest()
        return self._directory / "references" / f"{self._model}.{rows}.npz"

    def _found(self, file: Path, samples: Sequence[Sample], names: Sequence[bytes]) -> bool:
        """Whether the file had what was missing, for all processes: the first one reads it."""
        before = set(self._known)
        if not current().on_rank0(lambda: self._read(file, samples, names)):
            return False
        read = {name: values for name, values in self._known.items() if name not in before}
        self._known |= current().broadcast(read)
        return True

    def _read(self, file: Path, samples: Sequence[Sample], names: Sequence[bytes]) -> bool:
        """Whether the file had what was missing."""
        lengths = {name: s.sampled_tokens for name, s in zip(names, samples, strict=True)}
        wanted = sorted({name for name in names if name not in self._known})
        try:
            with np.load(file) as stored:
                values = stored["logprobs"]
            ends = np.cumsum([lengths[name] for name in wanted])
            if values.shape != (ends[-1],) or values.dtype != np.float32:
                return False
        except Exception:  # damage has no one type: zip and npy each have theirs
            return False
        self._known |= dict(zip(wanted, np.split(values, ends[:-1]), strict=True))
        return True

    def _write(self, file: Path, names: Sequence[bytes]) -> None:
        """Keep them; a cache that cannot be written is no reason to stop."""
        aside = file.with_name(f"{file.stem}.{os.getpid()}.partial.npz")
        try:
            file.parent.mkdir(parents=True, exist_ok=True)
            np.savez(aside, logprobs=np.concatenate([self._known[name] for name in names]))
            aside.replace(file)
        except OSError:
            with suppress(OSError):
                aside.unlink()


def _alone(sample: Sample) -> Sample:
    """The sample without its pair, so that it may be packed with any other."""
    return Sample(sample.stream, sample.label, sample.advantages)


def _name(stream: Stream) -> bytes:
    digest = hashlib.blake2b(stream.ids.tobytes(), digest_size=16)
    digest.update(stream.sampled.tobytes())
    return digest.digest()


def _digest_of(policy: Policy) -> str:
    """Of all weights of the policy, bit for bit, and of how they are used."""
    digest = hashlib.blake2b(digest_size=16)
    settings = transformer(policy.model).config.to_dict()
    # Where the model lies changes nothing.
    digest.update(json.dumps({k: v for k, v in settings.items() if k != "_name_or_path"}, default=str).encode())
    for name, divided in sorted(policy.model.state_dict(keep_vars=True).items()):
        tensor = full_tensor(divided)
        digest.update(f"{name} {tensor.dtype} {tuple(tensor.shape)}".encode())
        digest.update(tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes())
    return digest.hexdigest()


def train(
    recipe: DpoRecipe, run: RunDirectory, resume: bool, console: Console, callbacks: Sequence[Callback] = ()
) -> None:
    """Fit the policy to the comparisons; one step is one update on `rows_per_update` rows."""
    policy = Policy(recipe.model, recipe.seed)
    renderer = Renderer(policy.tokenizer, policy.end_tokens)
    kind = "verdict" if recipe.loss.type == "kto" else "pair"
    data = load_data(kind, recipe.data, renderer, "assistant", recipe.rows_per_update, recipe.seed)  # type: ignore[arg-type]
    batches = Batches(data, lambda number, row: samples_of_row(row, number))
    total = recipe.steps or recipe.epochs * data.updates_per_epoch
    optimizer = Optimizer(policy.trainable(), recipe.optimizer, total)
    learner = Updater(policy, optimizer, recipe.learner, token_forward(policy, recipe.learner))
    references = References(recipe, policy, learner)
    rows = [*data.stored, *data.validation, *data.test]
    if recipe.loss.needs_reference:
        references.prepare([sample for number, row in enumerate(rows) for sample in samples_of_row(row, number)])
    objective_for = partial(_objective, recipe, learner, references)
    evaluator = PreferenceEvaluator(learner, data, recipe.name, objective_for, verdicts=kind == "verdict")
    trainer = Trainer(
        LoopSettings.of(recipe, total),
        run,
        policy,
        learner,
        evaluators=[evaluator] if data.validation or data.test else [],
        best_by=choice_of(recipe.evaluation.metric) if data.validation else None,
        warnings=[*notes(recipe), *data.problems.summary(), *renderer.remarks()],
        callbacks=callbacks,
    )
    train_on(trainer, batches, objective_for, resume, console)


def _objective(
    recipe: DpoRecipe, learner: Updater[TokenScores], references: References, samples: Sequence[Sample]
) -> PairObjective | VerdictObjective:
    """What to minimise on these samples, which get their reference log-probabilities where the loss needs them."""
    if recipe.loss.needs_reference:
        references.give(samples)
    if isinstance(recipe.loss, KtoLoss):
        return VerdictObjective(recipe.loss, _reference_point(learner, references, samples, recipe.data.max_tokens))
    return PairObjective(recipe.loss, recipe.nll_coefficient)


def _reference_point(
    learner: Updater[TokenScores], references: References, samples: Sequence[Sample], max_tokens: int
) -> torch.Tensor:
    """KTO's estimate of the KL: each prompt with the next row's answer. Over the whole step, so no micro-batch matters."""
    mismatched = [
        _with_answer_of(one, other, max_tokens) for one, other in zip(samples, [*samples[1:], samples[0]], strict=True)
    ]
    references.give(mismatched)
    ratios = []
    for sample, scores in zip(mismatched, logprobs(learner, mismatched), strict=True):
        assert sample.ref_logprobs is not None
        ratios.append(float(scores.sum(dtype="float64") - sample.ref_logprobs.sum(dtype="float64")))
    return kto_kl(torch.tensor(ratios, dtype=torch.float32))


def _with_answer_of(one: Sample, other: Sample, max_tokens: int) -> Sample:
    """The prompt of `one` and as much of the answer of `other` as fits."""
    prompt, start = int(np.argmax(one.stream.sampled)), int(np.argmax(other.stream.sampled))
    ids = np.concatenate([one.stream.ids[:prompt], other.stream.ids[start:]])[:max_tokens]
    trained = np.concatenate([np.zeros(prompt, dtype=bool), other.stream.sampled[start:]])[:max_tokens]
    return Sample(stream_of(ids, trained), f"{one.label} with the answer of {other.label}", other.advantages)
