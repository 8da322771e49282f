"""The generate stage: every row of a data set is answered, and the answers become a file of predictions."""

import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console

from posttrain.episode import CUT_OFF, Episode, Outcome
from posttrain.errors import InputError, RunError
from posttrain.evaluation.statistics import clustered_rate
from posttrain.recipe.generate import GenerateRecipe
from posttrain.rollout.driver import EpisodeRequest, run_episodes
from posttrain.runs import events
from posttrain.runs.answers import AnswerLog, Key, line_of, write_lines
from posttrain.runs.directory import RunDirectory, recipe_hash
from posttrain.runs.metrics import MetricsLog
from posttrain.runs.progress import Progress, duration
from posttrain.training.completers import Asked, LocalAnswerer, Outage, RemoteAnswerer
from posttrain.training.interrupts import Interrupts
from posttrain.training.questions import digest_of, key_of, prediction, read_questions

_SECONDS = 5.0
"""Between two lines of progress where there is no terminal."""


def run(recipe: GenerateRecipe, directory: RunDirectory, resume: bool, overwrite: bool, console: Console) -> None:
    """Answer what is not answered yet and write `recipe.predictions`, in the order of the data.

    Answers are kept in the run directory as they come, so a run that ends in any way goes on with `resume`. Raises
    RunError at the end if some answers could not be had; those are listed beside the predictions. A file of that name
    is replaced with `overwrite` only, unless all it holds is answers of this run: it is looked at before the first
    answer, and again when the last one is there.
    """
    if not (resume or overwrite) and recipe.predictions.exists():
        raise InputError(f"{recipe.predictions} exists; replace it with `--overwrite`, or choose another `out`")
    questions, problems = read_questions(recipe)
    answerer = RemoteAnswerer(recipe) if recipe.remote is not None else LocalAnswerer(recipe, questions)
    for line in [*problems.summary(), *answerer.remarks]:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    everything = [(question, sample) for question in questions for sample in range(recipe.samples)]
    wanted = [(question, sample) for question, sample in everything if question.number not in answerer.left_out]
    about = {"recipe": _hash(recipe), "data": digest_of(questions)}
    replaces = recipe.predictions if overwrite else None
    with AnswerLog(directory.checkpoints / "answers.jsonl", about, replaces) as log, Interrupts():
        if resume:
            log.check_overwritable(recipe.predictions)
        generation = _Generation(recipe, answerer, log, console)
        try:
            generation.play(wanted)
        except Outage as error:
            generation.stopped = str(error)
        except KeyboardInterrupt:
            console.print(f"{len(log)} of {len(wanted)} answers are kept; {_again(directory)}", soft_wrap=True)
            raise
        if len(log):
            log.publish(recipe.predictions, [key_of(*asked) for asked in wanted], overwrite)
        _finish(recipe, directory, everything, generation, console)


@dataclass
class _Generation:
    """The answering itself, and what came of it in this process."""

    recipe: GenerateRecipe
    answerer: LocalAnswerer | RemoteAnswerer
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
                    run_episodes(self.answerer.player(), _places(self.recipe, window), self._keeping(window, progress))
                    for message in events.drain():
                        progress.message(message)
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
    if len(log):  # a run that came to nothing, as without its server, leaves its name free
        with MetricsLog(directory, recipe.sinks) as metrics:
            metrics.write(len(log), "generated", values)
        lines.append(f"predictions: {recipe.predictions}")
    lines += [f"{len(missing)} could not be had and are listed in {listed}"] if missing else []
    for line in lines:
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
    """What the file holds, as metrics and in words. The share of answers cut off is a mean over rows with its 95% interval:
    answers to one row are alike.
    """
    rows: dict[int | str, list[bool]] = {}
    """Row -> which of its answers are cut off."""
    count, tokens, cut, thought, emptied, removed = 0, 0, 0, 0, 0, 0
    for row in generation.log.answers():
        count += 1
        tokens += row["tokens"] or 0
        is_cut = row["stop_reason"] in CUT_OFF
        rows.setdefault(row["id"], []).append(is_cut)
        cut += is_cut
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
        share = clustered_rate([sum(own) / len(own) for own in rows.values()], count)
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


def _places(recipe: GenerateRecipe, window: list[Asked]) -> list[EpisodeRequest]:
    return [question.place(recipe, sample) for question, sample in window]


def _hash(recipe: GenerateRecipe) -> str:
    """The recipe's hash; where the run is kept and what copies its metrics do not count."""
    return recipe_hash(recipe.model_copy(update={"runs": "runs", "name": "run", "sinks": []}))


def _again(directory: RunDirectory) -> str:
    return f"go on with `posttrain generate --resume {directory.path}`"
