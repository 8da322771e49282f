"""The generate stage: every row of a data set is answered, and the answers become a file of predictions."""

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console

from posttrain.data.rendering import Renderer
from posttrain.environments.remote import chat_client
from posttrain.errors import InputError, RunError
from posttrain.evaluation.statistics import success_rate
from posttrain.recipe.generate import GenerateRecipe
from posttrain.recipe.rollout import EngineRecipe, RolloutRecipe
from posttrain.rollout.driver import EpisodePlayer, play_each
from posttrain.rollout.remote_player import RemotePlayer
from posttrain.rollout.streams import CUT_OFF, Episode, Outcome
from posttrain.runs.answers import AnswerLog, Key, line_of, write_lines
from posttrain.runs.directory import RunDirectory, recipe_hash
from posttrain.runs.metrics import MetricsLog
from posttrain.runs.progress import Progress, duration
from posttrain.training.interrupt import Interrupts
from posttrain.training.predictions import Question, key_of, prediction
from posttrain.training.questions import digest_of, read_questions, task_of, too_long

_FAILURES_IN_A_ROW = 16
"""Failed requests with no answer between them after which a server is taken to be down; twice `engine.workers` if more."""
_SECONDS = 5.0
"""Between two lines of progress where there is no terminal."""

Asked = tuple[Question, int]
"""A row, and which sample of its answers."""


class Outage(RunError):
    """The server answers nobody."""


def run(recipe: GenerateRecipe, directory: RunDirectory, resume: bool, console: Console) -> None:
    """Answer what is not answered yet and write `recipe.predictions`, in the order of the data.

    Answers are kept in the run directory as they come, so a run that ends in any way goes on with `resume`. Raises
    RunError at the end if some answers could not be had; those are listed beside the predictions.
    """
    if not resume and recipe.out is not None and recipe.predictions.exists():
        raise InputError(f"{recipe.predictions} exists; move it away, or choose another `out`")
    questions, problems = read_questions(recipe)
    answerer = _Remote(recipe) if recipe.remote is not None else _Local(recipe, questions)
    for line in [*problems.summary(), *answerer.remarks]:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    everything = [(question, sample) for question in questions for sample in range(recipe.samples)]
    wanted = [(question, sample) for question, sample in everything if question.number not in answerer.left_out]
    about = {"recipe": _hash(recipe), "data": digest_of(questions)}
    with AnswerLog(directory.checkpoints / "answers.jsonl", about) as log, Interrupts():
        generation = _Generation(recipe, answerer, log, console)
        try:
            generation.play(wanted)
        except Outage as error:
            generation.stopped = str(error)
        except KeyboardInterrupt:
            console.print(f"{len(log)} of {len(wanted)} answers are kept; {_again(directory)}", soft_wrap=True)
            raise
        log.publish(recipe.predictions, [key_of(*asked) for asked in wanted])
        _finish(recipe, directory, everything, generation, console)


class _Local:
    """The model of `model.path` answers, in this process."""

    def __init__(self, recipe: GenerateRecipe, questions: list[Question]) -> None:
        from posttrain.models.policy import Policy

        self.recipe = recipe
        self.policy = Policy(recipe.model, recipe.seed)
        self.renderer = Renderer(self.policy.tokenizer, self.policy.end_tokens)
        asked = recipe.rollout.tokens_per_episode
        self.most = min(asked, getattr(self.policy.model.config, "max_position_embeddings", None) or asked)
        self.left_out, problems = too_long(recipe, questions, self.renderer, self.most)
        self.remarks = [*self.renderer.remarks(), *problems.summary()]

    def windows(self, wanted: list[Asked], there: AnswerLog) -> Iterator[list[Asked]]:
        """Windows with something missing, whole: what is computed together must not depend on where a run was killed."""
        size = self.recipe.window
        for start in range(0, len(wanted), size):
            window = wanted[start : start + size]
            if any(key_of(*asked) not in there for asked in window):
                yield window

    def player(self) -> EpisodePlayer[Any]:
        """A player with an engine that has computed nothing yet."""
        from posttrain.engines.local import LocalEngine
        from posttrain.rollout.driver import Player

        assert isinstance(self.recipe.engine, EngineRecipe)
        return Player(
            engine=LocalEngine(self.policy, self.recipe.engine),
            renderer=self.renderer,
            environment=task_of(self.recipe),
            rollout=_limits(self.recipe, self.most),
            sampling=self.recipe.sampling,
            version=0,
        )


class _Remote:
    """The model behind a server answers. How many tokens its prompts have is the server's to know."""

    renderer = None

    def __init__(self, recipe: GenerateRecipe) -> None:
        assert recipe.remote is not None
        self.recipe, self.engine = recipe, recipe.remote
        how = (self.engine.url, self.engine.seconds, self.engine.retries, self.engine.api_key_variable)
        self.client = chat_client("engine", *how)
        self.left_out: dict[int, str] = {}
        self.remarks: list[str] = []

    def windows(self, wanted: list[Asked], there: AnswerLog) -> Iterator[list[Asked]]:
        """Everything that is missing, at once."""
        missing = [asked for asked in wanted if key_of(*asked) not in there]
        if missing:
            yield missing

    def player(self) -> EpisodePlayer[Any]:
        return RemotePlayer(
            client=self.client,
            engine=self.engine,
            faults=_Patience(max(_FAILURES_IN_A_ROW, 2 * self.engine.workers)),
            environment=task_of(self.recipe),
            rollout=_limits(self.recipe, self.recipe.rollout.tokens_per_episode),
            sampling=self.recipe.sampling,
        )


class _Patience:
    """Ends the asking after `most` failures in a row."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._failures = 0

    def count(self, episode: Episode) -> None:
        """Outage where this is the failure that is one too many."""
        self._failures = self._failures + 1 if episode.outcome is Outcome.FAILED else 0
        if self._failures >= self.most:
            raise Outage(f"{self._failures} requests in a row failed, the last one: {episode.failure}")


@dataclass
class _Generation:
    """The answering itself, and what came of it in this process."""

    recipe: GenerateRecipe
    answerer: _Local | _Remote
    log: AnswerLog
    console: Console
    failed: dict[Key, str] = field(default_factory=dict)
    stopped: str | None = None
    """Why no more was asked, where the server was down."""
    answered: int = 0
    tokens: int = 0
    """Sampled, as far as is known."""
    differing: int = 0
    """Answers that were computed anew and came out otherwise than they are kept."""
    seconds: float = 0.0

    def play(self, wanted: list[Asked]) -> None:
        """Answer what is missing of `wanted`."""
        self._begun = self._told = time.monotonic()
        title = f"{self.recipe.name}: answers"
        with Progress(len(wanted), title, len(self.log), self.console, unit="answer") as progress:
            try:
                for window in self.answerer.windows(wanted, self.log):
                    play_each(self.answerer.player(), _places(self.recipe, window), self._keeping(window, progress))
            finally:
                self.seconds = time.monotonic() - self._begun
                self._tell(progress, last=True)

    def _keeping(self, window: list[Asked], progress: Progress) -> Callable[[int, Episode], None]:
        """What becomes of an episode that ended."""

        def ended(number: int, episode: Episode) -> None:
            question, sample = window[number]
            if episode.outcome is Outcome.FAILED:
                self.failed[key_of(question, sample)] = episode.failure or "it failed"
            else:
                self._keep(prediction(self.recipe, question, sample, episode, self.answerer.renderer))
            self._tell(progress)

        return ended

    def _keep(self, row: dict[str, Any]) -> None:
        key = row["id"], row["sample"]
        self.tokens += row["tokens"] or 0
        if key in self.log:
            self.differing += self.log[key]["prediction"] != row["prediction"]
        else:
            self.log.append(key, row)
            self.answered += 1

    def _tell(self, progress: Progress, last: bool = False) -> None:
        now = time.monotonic()
        if last or self.console.is_terminal or now - self._told >= _SECONDS:
            self._told = now
            speed = self.tokens / max(now - self._begun, 1e-9)
            progress.update(len(self.log), {"speed/tokens_per_second": speed} if self.tokens else {})


def _finish(
    recipe: GenerateRecipe, directory: RunDirectory, everything: list[Asked], generation: _Generation, console: Console
) -> None:
    """Write what is missing and why, the metrics line and the summary; RunError if an answer could not be had."""
    log, left_out = generation.log, generation.answerer.left_out
    reasons = {**generation.failed}
    missing = []
    for question, sample in everything:
        reason = left_out.get(question.number) or reasons.get(key_of(question, sample))
        if reason is not None:
            missing.append({**question.asked(recipe, sample), "error": reason, "origin": question.origin})
    listed = recipe.predictions.with_name(f"{recipe.predictions.name}.failed.jsonl")
    if missing:
        write_lines(listed, map(line_of, missing))
    else:
        listed.unlink(missing_ok=True)
    values, lines = _summary(recipe, generation, len(everything))
    with MetricsLog(directory, recipe.sinks) as metrics:
        metrics.write(len(log), "generated", values)
    lines += [f"{len(missing)} are listed in {listed}"] if missing else []
    for line in [*lines, f"predictions: {recipe.predictions}"]:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    if generation.stopped is not None:
        told = f"{len(log)} of {len(everything)} answers are there, then {generation.stopped}"
        raise RunError(f"{told}; when the server is back, {_again(directory)}")
    if generation.failed:
        first = next(row for row in missing if (row["id"], row["sample"]) in generation.failed)
        raise RunError(
            f"{len(generation.failed)} of {len(everything)} answers could not be had and are listed in {listed}, the first "
            f"to {first['origin']}: {first['error']}; {_again(directory)}, which asks for those alone"
        )


def _summary(recipe: GenerateRecipe, generation: _Generation, wanted: int) -> tuple[dict[str, Any], list[str]]:
    """What the file holds, as metrics and in words. The share of answers cut off has its 95% interval."""
    rows, count, tokens, cut, thought, emptied, removed = set(), 0, 0, 0, 0, 0, 0
    for row in generation.log.answers():
        count += 1
        rows.add(row["id"])
        tokens += row["tokens"] or 0
        cut += row["stop_reason"] in CUT_OFF
        characters = row.get("thinking_characters", 0)
        thought += characters > 0
        removed += row["thinking_tokens"] or 0 if characters else 0
        emptied += characters > 0 and not row["prediction"]
    speed = generation.tokens / generation.seconds if generation.seconds else 0.0
    values: dict[str, Any] = {
        "generate/rows": len(rows),
        "generate/answers": count,
        "generate/missing": wanted - count,
        "generate/tokens": tokens,
        "generate/cut_off": cut,
        "time/generate": round(generation.seconds, 3),
        "speed/tokens_per_second": speed,
    }
    before = count - generation.answered
    lines = [
        f"{count:,} answers to {len(rows):,} rows, {tokens:,} tokens; {generation.answered:,} of them in "
        f"{duration(generation.seconds)}, {speed:,.0f} tokens/s" + (f"; {before:,} were there" if before else "")
    ]
    if count:
        share = success_rate(cut, count)
        values |= {
            "generate/cut_off_share": share.value,
            "generate/cut_off_low": share.low,
            "generate/cut_off_high": share.high,
        }
        limit = f"rollout.tokens_per_turn = {recipe.rollout.tokens_per_turn}"
        lines.append(f"{cut:,} of {count:,} cut off at {limit}: {share.value:.1%} [{share.low:.1%}, {share.high:.1%}]")
    if recipe.thinking == "remove":
        values |= {
            "generate/thinking": thought,
            "generate/thinking_tokens": removed,
            "generate/thinking_alone": emptied,
        }
        size = f", {removed:,} tokens" if recipe.remote is None else ""
        lines.append(f"thinking removed from {thought:,} answers{size}; nothing is left of {emptied:,}")
    if generation.differing:
        lines.append(
            f"{generation.differing:,} answers that were computed anew came out otherwise than they were kept: the machine, "
            "the model or a package has changed since; what was kept stays"
        )
    return values, lines


def _places(recipe: GenerateRecipe, window: list[Asked]) -> list[Any]:
    return [question.place(recipe, sample) for question, sample in window]


def _limits(recipe: GenerateRecipe, most: int) -> RolloutRecipe:
    return RolloutRecipe(**recipe.rollout.model_dump() | {"tokens_per_episode": most})


def _hash(recipe: GenerateRecipe) -> str:
    """The recipe's hash; where the run is kept and what copies its metrics do not count."""
    return recipe_hash(recipe.model_copy(update={"runs": "runs", "name": "run", "sinks": []}))


def _again(directory: RunDirectory) -> str:
    return f"go on with `posttrain generate --resume {directory.path}`"
