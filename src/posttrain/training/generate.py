"""The generate stage: completes every prompt of a data set and writes a file of predictions."""

import os
import time
from dataclasses import dataclass, field
from functools import partial
from typing import Any

from rich.console import Console

from posttrain.distributed.world import Interrupts
from posttrain.episode import CUT_OFF, Episode, Outcome
from posttrain.errors import InputError, RunError
from posttrain.recipe.run import LOGGED_IN
from posttrain.recipe.stages import GenerateRecipe
from posttrain.recipe.warnings import recipe_warnings
from posttrain.rollout.driver import run_episodes
from posttrain.runs.completions import CompletionLog, Key, line_of, write_lines
from posttrain.runs.directory import RunDirectory, recipe_hash
from posttrain.runs.intervals import clustered_rate
from posttrain.runs.metrics import SECONDS_PER_LINE, MetricsLog, Progress, duration, take_events
from posttrain.runs.tables import show_line
from posttrain.training.completers import (
    CompletionRequest,
    LocalCompleter,
    RemoteCompleter,
    ServerUnavailable,
    digest_of,
    key_of,
    prediction,
    read_prompts,
)


def run(recipe: GenerateRecipe, directory: RunDirectory, resume: bool, overwrite: bool, console: Console) -> None:
    """Complete the requests without a completion and write `recipe.predictions` in the order of the data.

    Completions are appended to a log in the run directory, so an interrupted run continues with `resume`. Failed
    requests are listed in a file beside the predictions. An existing file of that name is replaced only with
    `overwrite`, or if all its lines are of this run. This is checked before the first request and again before writing.

    Raises:
        InputError: the file of predictions exists, or the data is invalid.
        RunError: some requests failed; all other completions are written.
    """
    if not (resume or overwrite) and recipe.predictions.exists():
        raise InputError(f"{recipe.predictions} exists; replace it with `--overwrite`, or choose another `out`")
    above = next(folder for folder in recipe.predictions.absolute().parents if folder.exists())
    if not (above.is_dir() and os.access(above, os.W_OK)):
        raise InputError(
            f"{recipe.predictions} cannot be written: {above} is not a writable folder; choose another `out`"
        )
    rows, problems = read_prompts(recipe)
    completer = RemoteCompleter(recipe) if recipe.remote is not None else LocalCompleter(recipe, rows)
    for line in [*recipe_warnings(recipe), *problems.summary(), *completer.warnings]:
        show_line(console, line)
    all_requests = [(row, sample) for row in rows for sample in range(recipe.samples)]
    requests = [(row, sample) for row, sample in all_requests if row.number not in completer.skipped]
    # The recipe without the keys that determine where results are stored and logged.
    unlogged = {key: GenerateRecipe.model_fields[key].get_default() for key in ("name", *LOGGED_IN)}
    identity = {"recipe": recipe_hash(recipe.model_copy(update=unlogged)), "data": digest_of(rows)}
    replaced = recipe.predictions if overwrite else None
    with CompletionLog(directory.checkpoints / "completions.jsonl", identity, replaced) as log, Interrupts():
        if resume:
            log.check_overwritable(recipe.predictions)
        generation = _Generation(recipe, completer, log, console)
        try:
            generation.complete(requests)
        except ServerUnavailable as error:
            generation.stop_reason = str(error)
        except KeyboardInterrupt:
            console.print(f"{len(log)} of {len(requests)} answers are saved; {_resume(directory)}", soft_wrap=True)
            raise
        if len(log):
            log.publish(recipe.predictions, [key_of(*request) for request in requests], overwrite)
        _finish(recipe, directory, all_requests, generation, console)


@dataclass
class _Generation:
    """The completion of requests, and its counts in this process."""

    recipe: GenerateRecipe
    completer: LocalCompleter | RemoteCompleter
    log: CompletionLog
    console: Console
    failed: dict[Key, str] = field(default_factory=dict)
    """Failed requests with their reasons."""
    stop_reason: str | None = None
    """Why the requests ended early, if the server became unavailable."""
    answered: int = 0
    tokens: int = 0
    """Number of sampled tokens, if the engine reports it."""
    different: int = 0
    """Repeated completions that differ from those in the log."""
    seconds: float = 0.0

    def complete(self, requests: list[CompletionRequest]) -> None:
        """Complete the requests that are not in the log."""
        self._start = self._last_update = time.monotonic()
        title = f"{self.recipe.name}: answers"
        with Progress(len(requests), title, len(self.log), self.console, unit="answer") as progress:
            try:
                for window in self.completer.windows(requests, self.log):
                    episodes = [row.episode_request(self.recipe, sample) for row, sample in window]
                    run_episodes(self.completer.rollout_worker(), episodes, partial(self._on_episode, window, progress))
                    for message in take_events():
                        progress.message(message)
            finally:
                self.seconds = time.monotonic() - self._start
                self._update(progress, force=True)

    def _on_episode(self, window: list[CompletionRequest], progress: Progress, number: int, episode: Episode) -> None:
        """Store the finished episode of `window[number]`."""
        row, sample = window[number]
        key = key_of(row, sample)
        if episode.outcome is Outcome.FAILED:
            self.failed[key] = episode.failure or "unknown failure"
        else:
            answer = prediction(self.recipe, row, sample, episode, self.completer.renderer)
            self.tokens += answer["tokens"] or 0
            if key in self.log:
                self.different += self.log[key]["prediction"] != answer["prediction"]
            else:
                self.log.append(key, answer)
                self.answered += 1
        self._update(progress)

    def _update(self, progress: Progress, force: bool = False) -> None:
        now = time.monotonic()
        progress.step = len(self.log)
        if force or now - self._last_update >= SECONDS_PER_LINE:
            self._last_update = now
            speed = self.tokens / max(now - self._start, 1e-9)
            progress.update(len(self.log), {"speed/tokens_per_second": speed} if self.tokens else {})


def _finish(
    recipe: GenerateRecipe,
    directory: RunDirectory,
    requests: list[CompletionRequest],
    generation: _Generation,
    console: Console,
) -> None:
    """Write the list of missing answers, the metrics and the summary; RunError if a request failed."""
    log, skipped = generation.log, generation.completer.skipped
    missing = []
    for row, sample in requests:
        reason = skipped.get(row.number) or generation.failed.get(key_of(row, sample))
        if reason is not None:
            missing.append({**row.fields(recipe, sample), "error": reason, "origin": row.origin})
    failures = recipe.predictions.with_name(f"{recipe.predictions.name}.failed.jsonl")
    if missing:
        write_lines(failures, map(line_of, missing))
    else:
        failures.unlink(missing_ok=True)
    values, lines = _summary(recipe, generation, len(requests))
    if len(log):  # a run without any answer, for example without its server, can be repeated under its name
        with MetricsLog(directory, recipe.sinks) as metrics:
            metrics.write(len(log), "generated", values)
        lines.append(f"predictions: {recipe.predictions}")
    lines += [f"{len(missing)} answers are missing; see {failures}"] if missing else []
    for line in lines:
        console.print(line, highlight=False, markup=False, soft_wrap=True)
    if generation.stop_reason is not None:
        raise RunError(
            f"{generation.stop_reason}; {len(log)} of {len(requests)} answers are saved; when the server is available "
            f"again, {_resume(directory)}"
        )
    if generation.failed:
        first = next(row for row in missing if (row["id"], row["sample"]) in generation.failed)
        raise RunError(
            f"{len(generation.failed)} of {len(requests)} requests failed and are listed in {failures}, the first for "
            f"{first['origin']}: {first['error']}; {_resume(directory)} to repeat the failed requests"
        )


def _summary(recipe: GenerateRecipe, generation: _Generation, requested: int) -> tuple[dict[str, Any], list[str]]:
    """Return a summary of the log as metrics and as lines of text.

    The share of truncated answers is a mean over rows with its 95% interval, because answers to one row are correlated.
    """
    truncated_of: dict[int | str, list[bool]] = {}
    """Row id -> whether each answer is truncated."""
    count, tokens, truncated, with_thinking, thinking_only, removed = 0, 0, 0, 0, 0, 0
    for row in generation.log.answers():
        count += 1
        tokens += row["tokens"] or 0
        is_truncated = row["stop_reason"] in CUT_OFF
        truncated_of.setdefault(row["id"], []).append(is_truncated)
        truncated += is_truncated
        characters = row.get("thinking_characters", 0)
        with_thinking += characters > 0
        removed += row["thinking_tokens"] or 0 if characters else 0
        thinking_only += characters > 0 and not row["prediction"]
    speed = generation.tokens / generation.seconds if generation.seconds else 0.0
    values: dict[str, Any] = {
        "generate/rows": len(truncated_of),
        "generate/answers": count,
        "generate/missing": requested - count,
        "generate/tokens": tokens,
        "generate/truncated": truncated,
        "time/generate": round(generation.seconds, 3),
        "speed/tokens_per_second": speed,
    }
    earlier = count - generation.answered
    lines = [
        f"{count:,} answers to {len(truncated_of):,} rows, {tokens:,} tokens; {generation.answered:,} of them in "
        f"{duration(generation.seconds)}, {speed:,.0f} tokens/s"
        + (f"; {earlier:,} from earlier runs" if earlier else "")
    ]
    if count:
        share = clustered_rate([sum(flags) / len(flags) for flags in truncated_of.values()], count)
        values |= {
            "generate/truncated_share": share.value,
            "generate/truncated_low": share.low,
            "generate/truncated_high": share.high,
        }
        limit = f"rollout.tokens_per_turn = {recipe.rollout.tokens_per_turn}"
        interval = f"{share.value:.1%} [{share.low:.1%}, {share.high:.1%}]"
        lines.append(f"{truncated:,} of {count:,} truncated at {limit}: {interval}")
    if recipe.thinking == "remove":
        values |= {
            "generate/thinking": with_thinking,
            "generate/thinking_tokens": removed,
            "generate/thinking_only": thinking_only,
        }
        size = f", {removed:,} tokens" if recipe.remote is None else ""
        lines.append(f"thinking removed from {with_thinking:,} answers{size}; {thinking_only:,} had nothing else")
    if generation.different:
        lines.append(
            f"{generation.different:,} repeated answers differ from the saved ones: the machine, the model or a package has "
            "changed; the saved answers are kept"
        )
    return values, lines


def _resume(directory: RunDirectory) -> str:
    return f"continue with `posttrain generate --resume {directory.path}`"
