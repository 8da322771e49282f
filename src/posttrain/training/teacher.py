"""Teachers score the tokens that the policy sampled: a model, a server, or the policy itself with additional context."""

import math
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from posttrain.data.rendering import Renderer
from posttrain.distributed.world import current_world
from posttrain.engines.openai import ChatRequestError
from posttrain.engines.scoring import ScoredPrompt, ScoringServers
from posttrain.environments.protocol import Environment
from posttrain.episode import Episode
from posttrain.errors import InputError, RunError, naming
from posttrain.losses.distillation import TAIL_FLOOR, TeacherScores
from posttrain.models.forward import transformer
from posttrain.models.packing import prompt_length
from posttrain.models.policy import Policy
from posttrain.recipe.components import EnvironmentRecipe, environment_class
from posttrain.recipe.model import ModelRecipe
from posttrain.recipe.stages import DistillRecipe, RlRecipe
from posttrain.recipe.teacher import CONTEXT_FIELD, TeacherRecipe
from posttrain.training.updater import Sample, Samples, by_sample, in_batches

WHOLE = 0
"""`top_k` for the whole vocabulary."""
_OF_EPISODES = ("success", "feedback")
"""Fields of a context that come from the episodes of a step, not from the task."""


@dataclass
class ModelScorer:
    """A model in this process. All processes of a run compute all scores."""

    policy: Policy
    temperature: float
    positions_per_chunk: int
    tokens_per_batch: int
    vocabulary: int
    """Number of token ids in its distributions, from 0 on."""
    top_k: int | None
    """Number of most probable tokens to report; `WHOLE` for all tokens, None for none."""
    initial: bool = False
    """Whether to score with the initial weights of a policy that is being trained."""

    def score(self, samples: Samples) -> list[TeacherScores | ChatRequestError]:
        """Scores of the sampled tokens of each sample."""
        scoring: AbstractContextManager[None] = self.policy.as_reference() if self.initial else nullcontext()
        with scoring:
            return [*in_batches(samples, self.tokens_per_batch, "teacher.tokens_per_batch", self._score)]

    def _score(self, samples: Samples) -> list[TeacherScores]:
        ids, sampled = [s.stream.ids for s in samples], [s.stream.sampled for s in samples]
        tokens = self.policy.score(ids, sampled, self.temperature, self.positions_per_chunk).logprobs
        logprobs = by_sample(tokens.float(), samples)
        if self.top_k is None:
            return [TeacherScores(part) for part in logprobs]
        distribution, candidates = self.policy.distributions(
            ids, sampled, self.temperature, self.positions_per_chunk, self.vocabulary, self.top_k or None
        )
        if candidates is not None:
            distribution[:, -1] = np.maximum(distribution[:, -1], TAIL_FLOOR)
        chosen = [None] * len(samples) if candidates is None else by_sample(candidates, samples)
        columns = logprobs, chosen, by_sample(distribution, samples)
        return [TeacherScores(*parts) for parts in zip(*columns, strict=True)]


@dataclass
class ServerScorer:
    """A model behind servers. Rank 0 sends the requests."""

    servers: ScoringServers
    top_k: int | None
    """Number of most probable tokens to request; None for none."""

    def score(self, samples: Samples) -> list[TeacherScores | ChatRequestError]:
        """Scores of the sampled tokens of each sample, or the error of a failed request."""
        prompts = [sample.stream.ids.tolist() for sample in samples]
        answers = current_world().on_rank0(lambda: self.servers.score(prompts, self.top_k or 0))
        pairs = zip(answers, samples, strict=True)
        return [one if isinstance(one, ChatRequestError) else self._scores(one, sample) for one, sample in pairs]

    def _scores(self, answer: ScoredPrompt, sample: Sample) -> TeacherScores:
        places = np.flatnonzero(sample.stream.sampled)
        logprobs = np.array([answer.logprobs[place] for place in places], dtype=np.float32)
        if self.top_k is None:
            return TeacherScores(logprobs)
        candidates = np.empty((len(places), self.top_k), dtype=np.int32)
        distribution = np.empty((len(places), self.top_k + 1), dtype=np.float32)
        for row, place in enumerate(places):
            best = list(answer.top[place].items())[: self.top_k]
            candidates[row] = [token for token, _ in best]
            mass = math.fsum(math.exp(value) for _, value in best)
            tail = math.log1p(-mass) if mass < 1 else -math.inf
            distribution[row] = np.maximum([*(value for _, value in best), tail], TAIL_FLOOR)
        return TeacherScores(logprobs, candidates, distribution)


class PrivilegedContext:
    """Text that only the teacher sees, added to the last user message of an episode's first observation.

    The teacher scores the same sampled tokens after a different prompt. Sources: Zhao et al. 2026, "Self-distilled
    reasoner: on-policy self-distillation" (OPSD), arXiv 2601.18734, whose context is a reference solution; Hübotter et
    al. 2026, "Reinforcement learning via self-distillation" (SDPO), arXiv 2601.20802, whose context is feedback, or a
    successful answer of the same group.
    """

    def __init__(self, recipe: TeacherRecipe, environment: EnvironmentRecipe, renderer: Renderer, seed: int) -> None:
        """InputError if the task of the environment seed `seed` lacks a field of the context."""
        assert recipe.context is not None
        self.text, self.fields = recipe.context, recipe.fields
        self.environment, self.renderer = environment, renderer
        task = environment_class(environment.type)(environment)
        task.reset(seed)
        self.primer = task.primer
        known, row = self._of_task(seed), task.row()
        for name in self.fields:
            if name not in known and name not in _OF_EPISODES:
                others = ", ".join(sorted({"reference", *_OF_EPISODES, *row}))
                raise InputError(
                    f"teacher.context: {environment_class(environment.type).task_name(environment, seed)} has no {name}; use "
                    f"one of {others}"
                )

    def applied(self, episodes: Sequence[Episode], samples: Samples) -> list[Sample | None]:
        """The samples as the teacher reads them; None if the context of the episode lacks a field.

        `samples` are those of `samples_of_episodes`. `success` is the first answer of the first other success of the group.
        """
        tasks = {seed: self._of_task(seed) for seed in {episode.seed for episode in episodes}}
        remaining, results = iter(samples), list[Sample | None]()
        for episode in episodes:
            values = dict(tasks[episode.seed])
            if isinstance(feedback := episode.turns[-1].info.get("feedback"), str):
                values["feedback"] = feedback
            others = (e for e in episodes if e.group == episode.group and e.index != episode.index and e.success)
            if (success := next(others, None)) is not None:
                values["success"] = success.turns[0].answer
            text = None
            if all(name in values for name in self.fields):
                text = CONTEXT_FIELD.sub(lambda match: values[match[1]], self.text)  # noqa: B023
            for _ in episode.streams:
                sample = next(remaining)
                results.append(None if text is None else self._with_text(episode, sample, text))
        return results

    def _of_task(self, seed: int) -> dict[str, str]:
        """The fields that the task of `seed` has."""
        task: Environment = environment_class(self.environment.type)(self.environment)
        task.reset(seed)
        values = {name: str(value) for name, value in task.row().items() if value is not None}
        if "reference" in self.fields:
            try:
                values["reference"] = task.expert()
            except NotImplementedError:
                values.pop("reference", None)
        return {name: value for name, value in values.items() if name in self.fields}

    def _with_text(self, episode: Episode, sample: Sample, text: str) -> Sample:
        stream = sample.stream
        start = prompt_length(stream.sampled)
        turn = int(stream.turn[start])
        answers = [place for place, message in enumerate(episode.messages) if message["role"] == "assistant"]
        # Only the first observation may contain other answers, as examples.
        opening = answers[len(answers) - len(episode.turns)]
        messages = episode.messages[: answers[len(answers) - len(episode.turns) + turn]]
        if self.renderer.prompt(messages, self.primer) != stream.ids[:start].tolist():
            raise RunError(
                f"{sample.label} starts a new conversation in its turn {turn + 1}, where teacher.context has no place; use a "
                "teacher without context for this environment"
            )
        users = [place for place, message in enumerate(messages[:opening]) if message["role"] == "user"]
        if not users:
            raise RunError(f"{sample.label} begins without a user message, so teacher.context has no place; remove it")
        changed = list(messages)
        changed[users[-1]] = {**messages[users[-1]], "content": f"{messages[users[-1]]['content']}\n\n{text}"}
        prompt = np.array(self.renderer.prompt(changed, self.primer), dtype=np.int64)

        def behind_prompt(values: np.ndarray, fill: Any) -> np.ndarray:
            return np.concatenate([np.full(len(prompt), fill, dtype=values.dtype), values[start:]])

        longer = replace(
            stream,
            ids=np.concatenate([prompt, stream.ids[start:]]),
            sampled=behind_prompt(stream.sampled, False),
            rollout_logprobs=behind_prompt(stream.rollout_logprobs, 0),
            rewards=behind_prompt(stream.rewards, 0),
            turn=behind_prompt(stream.turn, -1),
            versions=behind_prompt(stream.versions, -1),
        )
        return replace(sample, stream=longer)


@dataclass
class Teacher:
    """A scorer, and the additional context that it sees."""

    scorer: ModelScorer | ServerScorer
    context: PrivilegedContext | None
    max_failed_share: float
    """Maximum share of the episodes of a step whose scoring may fail."""

    def score_episodes(
        self, episodes: Sequence[Episode], samples: Samples
    ) -> tuple[list[Episode], list[Sample], list[str], dict[str, float]]:
        """Set `teacher` of all samples that can be scored.

        Returns the episodes all of whose streams were scored, with their samples; warnings; and metrics. RunError if
        too many requests to servers failed.
        """
        read = list(samples) if self.context is None else self.context.applied(episodes, samples)
        failures = self._score(samples, read)
        owners = [episode for episode, each in enumerate(episodes) for _ in each.streams]
        lost = {owner for owner, sample in zip(owners, samples, strict=True) if sample.teacher is None}
        failed = {owners[place] for place in failures}
        warnings = []
        if failed:
            place, reason = next(iter(failures.items()))
            warnings.append(
                f"{len(failed)} of {len(episodes)} episodes have no scores of the teacher and are left out, the first "
                f"{samples[place].label}: {reason}"
            )
            if len(failed) > self.max_failed_share * len(episodes):
                raise RunError(
                    f"{warnings[0]}; that is more than rollout.failures.max_share = {self.max_failed_share}; correct the "
                    "server of teacher.urls, then resume the run"
                )
        kept = [episode for place, episode in enumerate(episodes) if place not in lost]
        scored = [sample for owner, sample in zip(owners, samples, strict=True) if owner not in lost]
        metrics = {"teacher/failed": float(len(failed))} if isinstance(self.scorer, ServerScorer) else {}
        if self.context is not None:
            metrics["teacher/without_context"] = float(len(lost - failed))
        return kept, scored, warnings, metrics

    def score_rows(self, samples: Samples) -> None:
        """Set `teacher` of the samples of rows. RunError if a request to a server failed."""
        failures = self._score(samples, samples)
        if failures:
            place, reason = next(iter(failures.items()))
            raise RunError(
                f"{len(failures)} of {len(samples)} rows have no scores of the teacher, the first {samples[place].label}: "
                f"{reason}; correct the server of teacher.urls, then resume the run"
            )

    def _score(self, samples: Samples, read: Sequence[Sample | None]) -> dict[int, str]:
        """Score `read`, the samples as the teacher reads them. Returns index -> reason of those that failed."""
        asked = [place for place, sample in enumerate(read) if sample is not None]
        scores = self.scorer.score([sample for sample in read if sample is not None]) if asked else []
        failures = {}
        for place, result in zip(asked, scores, strict=True):
            if isinstance(result, ChatRequestError):
                failures[place] = str(result)
            else:
                samples[place].teacher = result
        return failures


def reverse_kl(samples: Samples) -> dict[str, float]:
    """`teacher/reverse_kl`: the mean over sampled tokens of log policy - log teacher, in nats; empty without samples."""
    gaps = [sample.rollout_logprobs - sample.teacher.logprobs for sample in samples if sample.teacher is not None]
    return {"teacher/reverse_kl": float(np.concatenate(gaps).mean())} if gaps else {}


def open_teacher(
    recipe: RlRecipe | DistillRecipe, policy: Policy, renderer: Renderer, seed: int, top_k: int | None = None
) -> tuple[Teacher | None, list[str]]:
    """The teacher of a recipe of `rl` or `distill`, if it has one, and warnings about it. `policy`: the policy that is
    trained; the teacher's distributions use its sampling temperature. `seed`: an environment seed of training, on whose task
    the fields of a context are checked. `top_k`: as in `ModelScorer`. InputError if there is no such model or server, its
    tokenizer differs, or the task lacks a field of the context."""
    settings: TeacherRecipe | None = recipe.teacher
    if settings is None:
        return None, []
    warnings: list[str] = []
    vocabulary = int(transformer(policy.model).config.get_text_config().vocab_size)
    scorer: ModelScorer | ServerScorer
    if settings.urls:
        if top_k == WHOLE:
            raise InputError(
                "loss.top_k: servers report the most probable tokens, not the whole vocabulary; set a number"
            )
        servers = ScoringServers(settings)
        tokenizer = policy.tokenizer
        warnings += current_world().on_rank0(
            lambda: servers.check_tokenizer(lambda token: tokenizer.decode([token]), len(tokenizer))
        )
        scorer = ServerScorer(servers, top_k)
    else:
        teacher = policy
        if settings.path is not None:
            teacher = _load(settings, policy)
            vocabulary = min(vocabulary, int(transformer(teacher.model).config.get_text_config().vocab_size))
        temperature, chunk = recipe.rollout.sampling.temperature, recipe.learner.logits_per_chunk
        initial, budget = settings.policy == "initial", settings.tokens_per_batch
        scorer = ModelScorer(teacher, temperature, chunk, budget, vocabulary, top_k, initial)
    context = None
    if settings.context is not None:
        context = PrivilegedContext(settings, recipe.environment, renderer, seed)
    return Teacher(scorer, context, recipe.rollout.failures.max_share), warnings


def _load(recipe: TeacherRecipe, policy: Policy) -> Policy:
    """The model at `teacher.path`, on the policy's device. InputError if its tokenizer differs from the policy's."""
    assert recipe.path is not None
    same = policy.recipe.model_dump(include={"device", "threads", "chat_template"})
    with naming(path="teacher.path"):
        teacher = Policy(ModelRecipe(path=recipe.path, dtype=recipe.dtype, **same), trained=False)
    ours, theirs = policy.tokenizer.get_vocab(), teacher.tokenizer.get_vocab()
    if ours != theirs:
        different = next(token for token in [*ours, *theirs] if ours.get(token) != theirs.get(token))
        raise InputError(
            f"teacher.path: the teacher {recipe.path} does not have the vocabulary of the policy {policy.recipe.path} (token "
            f"{different!r} is {theirs.get(different, 'absent')} in the teacher's and {ours.get(different, 'absent')} in the "
            "policy's); distill from a teacher with the policy's tokenizer"
        )
    teacher.model.requires_grad_(False)
    return teacher
