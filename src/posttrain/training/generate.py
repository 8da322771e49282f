"""The generate stage: completes every prompt of a data set and writes a file of predictions. The model is in this process or
behind a server."""

import hashlib
import json
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from rich.console import Console

from posttrain.credit.units.offsets import align
from posttrain.credit.units.segment import CLOSING, OPENING, thinking_tokens
from posttrain.data.convert import reference_answer
from posttrain.data.problems import Problems
from posttrain.data.rendering import Renderer
from posttrain.distributed.world import Interrupts
from posttrain.engines.openai import chat_client, for_servers
from posttrain.engines.protocol import Engine
from posttrain.environments.protocol import EnvironmentFactory
from posttrain.environments.text_task import TextTask, TextTaskRecipe, prompt_table
from posttrain.episode import CUT_OFF, Episode, Outcome, Turn
from posttrain.errors import InputError, RunError
from posttrain.recipe.data import TaskSourceRecipe
from posttrain.recipe.rollout import RolloutRecipe
from posttrain.recipe.run import LOGGED_IN
from posttrain.recipe.stages import GenerateRecipe
from posttrain.recipe.warnings import recipe_warnings
from posttrain.rollout.driver import EpisodeRequest, RolloutWorker, run_episodes
from posttrain.rollout.remote_worker import THOUGHTS, RemoteRolloutWorker, server_seed
from posttrain.runs.completions import CompletionLog, Key, line_of, write_lines
from posttrain.runs.directory import RunDirectory, recipe_hash
from posttrain.runs.intervals import clustered_rate
from posttrain.runs.metrics import SECONDS_PER_LINE, MetricsLog, Progress, duration, take_events
from posttrain.runs.tables import show_line

_FAILURES_IN_A_ROW = 16
"""Number of consecutive failed requests after which a server counts as down; twice `engine.max_concurrent` if larger.
"""
_PROMPT_TAIL = 16
"""Number of tokens at the end of a prompt that are searched for an opened thinking block."""


def run(recipe: GenerateRecipe, directory: RunDirectory, resume: bool, overwrite: bool, console: Console) -> None:
    """Complete the requests without a completion and write `recipe.predictions` in the order of the data.

    Completions are appended to a log in the run directory, so an interrupted run continues with `resume`. Failed
    requests are listed in a file beside the predictions. An existing file of that name is replaced only with
    `overwrite`, or if all its lines are of this run. This is checked before the first request and again before writing.
    InputError if the file of predictions exists, or the data is invalid. RunError if some requests failed;
    all other completions are written."""
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
    data = b"".join(line_of({"q": [row.id, row.messages, row.reference, row.kept]}) for row in rows)
    digest = hashlib.sha256(data).hexdigest()[:16]
    identity = {"recipe": recipe_hash(recipe.model_copy(update=unlogged)), "data": digest}
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
            log.publish(recipe.predictions, [(row.id, sample) for row, sample in requests], overwrite)
        generation.finish(directory, all_requests)


@dataclass(frozen=True)
class PromptRow:
    """A row to complete."""

    number: int
    """Index among the usable rows."""
    id: int | str
    messages: list[dict[str, Any]]
    """The prompt."""
    reference: str | None
    kept: dict[str, Any]
    """The columns of `keep_columns`."""
    origin: str

    def episode_request(self, recipe: GenerateRecipe, sample: int) -> EpisodeRequest:
        return EpisodeRequest(self.number, self.number, sample, (recipe.seed, "generate", self.number, sample))

    def fields(self, recipe: GenerateRecipe, sample: int) -> dict[str, Any]:
        """Return the fields of a prediction that do not depend on the answer. `seed` is null if the engine gets no
        seed."""
        request = self.episode_request(recipe, sample)
        seed: int | None = request.request_seed(0, 0)
        if recipe.remote is not None:
            sends_seed = recipe.remote.sends_seed and recipe.sampling.temperature > 0
            seed = server_seed(request, 0, 0) if sends_seed else None
        shown = list(map(for_servers, self.messages))  # with pictures that every reader of rows reads
        return {"id": self.id, "prompt": shown, "sample": sample, "seed": seed}


CompletionRequest = tuple[PromptRow, int]
"""A row and the index of a sample."""


def text_task(recipe: GenerateRecipe) -> TextTaskRecipe:
    """Return the environment that shows the rows: one turn each, without a reward."""
    data = recipe.data
    prompts = [TaskSourceRecipe(**source.model_dump()) for source in data.test]
    return TextTaskRecipe(prompts=prompts, columns=data.columns, system=recipe.system, strict=data.strict)


def read_prompts(recipe: GenerateRecipe) -> tuple[list[PromptRow], Problems]:
    """Return the usable rows, and the problems of the others. InputError if there is no usable row, a row lacks a
    column of `keep_columns` or `data.id`, or two rows have the same id (1 and "1" are the same)."""
    task = text_task(recipe)
    table = prompt_table(task)
    table.problems.raise_if(recipe.data.strict)
    environment = TextTask(task)
    rows: list[PromptRow] = []
    origins: dict[str, str] = {}
    for number, row in enumerate(table.rows[: recipe.data.max_rows]):
        row_id = number if recipe.data.id is None else row.row.get(recipe.data.id)
        if isinstance(row_id, bool) or not isinstance(row_id, int | str) or row_id == "":
            raise InputError(
                f"{row.origin}: `{recipe.data.id}` is {json.dumps(row_id, default=str)[:60]}, which is not an id; ids are "
                "text or whole numbers, so name another column in data.id, or remove data.id"
            )
        # Ids in prediction files are read as text, so 1 and "1" would identify the same row.
        if str(row_id) in origins:
            raise InputError(
                f"{row.origin}: the id {row_id!r} in `{recipe.data.id}` is also that of {origins[str(row_id)]}; name "
                "another column in data.id, or remove data.id"
            )
        origins[str(row_id)] = row.origin
        if missing := [name for name in recipe.keep_columns if name not in row.row]:
            columns = ", ".join(f"`{column}`" for column in list(row.row)[:8])
            raise InputError(f"{row.origin} has no column `{missing[0]}`, which `keep_columns` names; it has {columns}")
        kept = {name: row.row[name] for name in recipe.keep_columns}
        try:
            line_of(kept)
        except (TypeError, ValueError) as error:
            raise InputError(
                f"{row.origin}: a column of `keep_columns` cannot be written as JSON ({error}); remove it from "
                "`keep_columns`"
            ) from error
        reference = reference_answer(row, recipe.data.columns)
        messages = list(environment.reset(number).messages)
        rows.append(PromptRow(number, row_id, messages, reference, kept, row.origin))
    return rows, table.problems


def check_prompts(recipe: GenerateRecipe) -> list[str]:
    """Read the rows. Returns lines for `--dry-run`; errors as for `read_prompts`."""
    rows, problems = read_prompts(recipe)
    return [f"{len(rows):,} rows to answer", *problems.summary()]


def too_long(
    recipe: GenerateRecipe, rows: list[PromptRow], renderer: Renderer, max_tokens: int
) -> tuple[dict[int, str], Problems]:
    """Return the rows whose prompt leaves less than `tokens_per_turn` of `max_tokens` tokens, by number with the
    reason, and their problems. InputError if all rows are too long, or any row is and the data is `strict`."""
    answer_tokens, problems, reasons = recipe.rollout.tokens_per_turn, Problems(), {}
    for row in rows:
        tokens = len(renderer.prompt(row.messages))
        if tokens + answer_tokens > max_tokens:
            detail = f"{tokens} tokens, and rollout.tokens_per_turn = {answer_tokens} for the answer"
            category = f"prompt leaves no room for an answer within {max_tokens} tokens"
            reasons[row.number] = f"{category}: {detail}"
            problems.add(category, row.origin, detail)
    problems.raise_if(recipe.data.strict)
    if len(reasons) == len(rows):
        raise InputError(
            f"no prompt leaves room for rollout.tokens_per_turn = {answer_tokens} tokens within {max_tokens}; first: "
            f"{rows[0].origin}: {reasons[rows[0].number]}; lower rollout.tokens_per_turn, or raise "
            "rollout.tokens_per_episode if the model supports more"
        )
    return reasons, problems


class ServerUnavailable(RunError):
    """The server of the model does not respond."""


class LocalCompleter:
    """Completes prompts with the model of `model.path` in this process."""

    def __init__(self, recipe: GenerateRecipe, rows: list[PromptRow]) -> None:
        from posttrain.models.policy import Policy

        self.recipe = recipe
        self.policy = Policy(recipe.model, recipe.seed)
        self.renderer = Renderer(self.policy.tokenizer, self.policy.end_tokens)
        limit = recipe.rollout.tokens_per_episode
        self.max_tokens = min(limit, getattr(self.policy.model.config, "max_position_embeddings", None) or limit)
        self.skipped, problems = too_long(recipe, rows, self.renderer, self.max_tokens)
        """Row number -> reason."""
        self.warnings = [*self.renderer.warnings(), *problems.summary()]
        self._engine: Engine | None = None

    def rollout_worker(self) -> RolloutWorker:
        """Return a worker for the next window: with a new local engine, or with the one vLLM engine, which keeps its
        weights and cached prompts."""
        from posttrain.engines.factory import open_engine

        recipe = self.recipe
        assert recipe.engine.type != "openai"
        if self._engine is None or recipe.engine.type == "local":
            logs = Path(recipe.runs) / recipe.name / "logs"
            self._engine = open_engine(self.policy, recipe.engine, self.max_tokens, recipe.sampling, logs, False)
            self._engine.load_weights(0)
        return RolloutWorker(
            engine=self._engine,
            renderer=self.renderer,
            environment=EnvironmentFactory(text_task(self.recipe)),
            rollout=_rollout(self.recipe, self.max_tokens),
            sampling=self.recipe.sampling,
            version=0,
        )


class RemoteCompleter:
    """Completes prompts with a model behind a server, which enforces its own limit on prompt tokens."""

    renderer = None

    def __init__(self, recipe: GenerateRecipe) -> None:
        assert recipe.remote is not None
        self.recipe, self.engine = recipe, recipe.remote
        options = (self.engine.url, self.engine.timeout, self.engine.retries, self.engine.api_key_variable)
        self.client = chat_client("engine", *options)
        self.skipped: dict[int, str] = {}
        self.warnings: list[str] = []

    def rollout_worker(self) -> RemoteRolloutWorker:
        """Return a worker that raises ServerUnavailable after too many consecutive failures."""
        limit, failures = max(_FAILURES_IN_A_ROW, 2 * self.engine.max_concurrent), 0

        def record(episode: Episode) -> None:
            nonlocal failures
            failures = failures + 1 if episode.outcome is Outcome.FAILED else 0
            if failures >= limit:
                raise ServerUnavailable(f"{failures} consecutive requests failed, the last one: {episode.failure}")

        return RemoteRolloutWorker(
            client=self.client,
            engine=self.engine,
            record=record,
            environment=EnvironmentFactory(text_task(self.recipe)),
            rollout=_rollout(self.recipe, self.recipe.rollout.tokens_per_episode),
            sampling=self.recipe.sampling,
        )


def _rollout(recipe: GenerateRecipe, max_tokens: int) -> RolloutRecipe:
    return RolloutRecipe(**recipe.rollout.model_dump() | {"tokens_per_episode": max_tokens})


def prediction(
    recipe: GenerateRecipe, row: PromptRow, sample: int, episode: Episode, renderer: Renderer | None
) -> dict[str, Any]:
    """Return the prediction of an episode with one turn. `renderer` is that of the local engine, None for a server.

    `tokens` counts all sampled tokens, including thinking and the end token; null if a server does not report it. With
    `thinking: remove`, `thinking_tokens` and `thinking_characters` count the removed text; the tokens are null for a
    server, which returns no token ids.
    """
    fields, turn = row.fields(recipe, sample), episode.turns[0]
    text, removed = turn.answer, {}
    if recipe.thinking == "remove":
        parts = _without_thoughts(turn) if renderer is None else _without_thinking_tokens(turn, episode, renderer)
        text, tokens, characters = parts
        removed = {"thinking_tokens": tokens, "thinking_characters": characters}
    elif renderer is None:
        text = _with_thoughts(turn)
    sampled = turn.stop - turn.start
    return {
        "id": fields["id"],
        "prompt": fields["prompt"],
        "prediction": text,
        "reference": row.reference,
        "sample": sample,
        "seed": fields["seed"],
        "stop_reason": str(turn.stop_reason),
        "tokens": sampled if sampled or renderer is not None else None,
        **removed,
        **row.kept,
    }


def _without_thinking_tokens(turn: Turn, episode: Episode, renderer: Renderer) -> tuple[str, int, int]:
    """Return the text after the thinking tokens, and the number of thinking tokens and characters."""
    ids: Sequence[int] = episode.streams[turn.stream].ids.tolist()
    before, sampled = ids[max(0, turn.start - _PROMPT_TAIL) : turn.start], list(ids[turn.start : turn.stop])
    decode = partial(renderer.tokenizer.decode, clean_up_tokenization_spaces=False)
    if sampled and sampled[-1] in renderer.end_tokens:
        sampled.pop()
    answer = align(sampled, decode)
    thinking = thinking_tokens(answer, opened=decode(before).rstrip().endswith(OPENING))
    return answer.slice(thinking, len(sampled)), thinking, int(answer.offsets[thinking])


def _without_thoughts(turn: Turn) -> tuple[str, None, int]:
    """Return the text after a thinking block, and the number of thinking characters, including those that the server
    returns separately. A server may have opened the block in the prompt, so a closing tag alone ends a block too."""
    separate, text = str(turn.info.get(THOUGHTS, "")), turn.answer
    before, closing, after = text.partition(CLOSING)
    kept = "" if before.lstrip().startswith(OPENING) else before
    if closing:
        kept = after.lstrip()
    return kept, None, len(separate) + len(text) - len(kept)


def _with_thoughts(turn: Turn) -> str:
    """Return the text with separately returned thinking as a leading block, which stays open where a limit cut it off."""
    separate, text = str(turn.info.get(THOUGHTS, "")), turn.answer
    if not separate or text.lstrip().startswith(OPENING):
        return text
    closed = text or turn.stop_reason not in CUT_OFF
    return f"{OPENING}{separate}{CLOSING}{text}" if closed else f"{OPENING}{separate}"


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
        """Complete the requests that are not in the log.

        A local engine gets complete windows that have a missing completion, so that its batches do not depend on where an
        earlier run was killed.
        """
        self._start = self._last_update = time.monotonic()
        title, size = f"{self.recipe.name}: answers", self.recipe.window
        windows = [requests[start : start + size] for start in range(0, len(requests), size)]
        if isinstance(self.completer, RemoteCompleter):
            windows = [[(row, sample) for row, sample in requests if (row.id, sample) not in self.log]]
        with Progress(len(requests), title, len(self.log), self.console, unit="answer") as progress:
            try:
                for window in windows:
                    if all((row.id, sample) in self.log for row, sample in window):
                        continue
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
        key = row.id, sample
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

    def finish(self, directory: RunDirectory, requests: list[CompletionRequest]) -> None:
        """Write the list of missing answers, the metrics and the summary; RunError if a request failed."""
        recipe, log, skipped = self.recipe, self.log, self.completer.skipped
        missing = []
        for row, sample in requests:
            reason = skipped.get(row.number) or self.failed.get((row.id, sample))
            if reason is not None:
                missing.append({**row.fields(recipe, sample), "error": reason, "origin": row.origin})
        failures = recipe.predictions.with_name(f"{recipe.predictions.name}.failed.jsonl")
        if missing:
            write_lines(failures, map(line_of, missing))
        else:
            failures.unlink(missing_ok=True)
        values, lines = self._summary(len(requests))
        if len(log):  # a run without any answer, for example without its server, can be repeated under its name
            with MetricsLog(directory, recipe.sinks) as metrics:
                metrics.write(len(log), "generated", values)
            lines.append(f"predictions: {recipe.predictions}")
        lines += [f"{len(missing)} answers are missing; see {failures}"] if missing else []
        for line in lines:
            self.console.print(line, highlight=False, markup=False, soft_wrap=True)
        if self.stop_reason is not None:
            raise RunError(
                f"{self.stop_reason}; {len(log)} of {len(requests)} answers are saved; when the server is available "
                f"again, {_resume(directory)}"
            )
        if self.failed:
            first = next(row for row in missing if (row["id"], row["sample"]) in self.failed)
            raise RunError(
                f"{len(self.failed)} of {len(requests)} requests failed and are listed in {failures}, the first for "
                f"{first['origin']}: {first['error']}; {_resume(directory)} to repeat the failed requests"
            )

    def _summary(self, requested: int) -> tuple[dict[str, Any], list[str]]:
        """Return a summary of the log as metrics and as lines of text.

        The share of truncated answers is a mean over rows with its 95% interval, because answers to one row are correlated.
        """
        truncated_of: dict[int | str, list[bool]] = {}
        """Row id -> whether each answer is truncated."""
        count, tokens, truncated, with_thinking, thinking_only, removed = 0, 0, 0, 0, 0, 0
        for row in self.log.answers():
            count += 1
            tokens += row["tokens"] or 0
            is_truncated = row["stop_reason"] in CUT_OFF
            truncated_of.setdefault(row["id"], []).append(is_truncated)
            truncated += is_truncated
            characters = row.get("thinking_characters", 0)
            with_thinking += characters > 0
            removed += row["thinking_tokens"] or 0 if characters else 0
            thinking_only += characters > 0 and not row["prediction"]
        speed = self.tokens / self.seconds if self.seconds else 0.0
        values: dict[str, Any] = {
            "generate/rows": len(truncated_of),
            "generate/answers": count,
            "generate/missing": requested - count,
            "generate/tokens": tokens,
            "generate/truncated": truncated,
            "time/generate": round(self.seconds, 3),
            "speed/tokens_per_second": speed,
        }
        earlier = count - self.answered
        lines = [
            f"{count:,} answers to {len(truncated_of):,} rows, {tokens:,} tokens; {self.answered:,} of them in "
            f"{duration(self.seconds)}, {speed:,.0f} tokens/s" + (f"; {earlier:,} from earlier runs" if earlier else "")
        ]
        if count:
            share = clustered_rate([sum(flags) / len(flags) for flags in truncated_of.values()], count)
            values |= {
                "generate/truncated_share": share.value,
                "generate/truncated_low": share.low,
                "generate/truncated_high": share.high,
            }
            limit = f"rollout.tokens_per_turn = {self.recipe.rollout.tokens_per_turn}"
            interval = f"{share.value:.1%} [{share.low:.1%}, {share.high:.1%}]"
            lines.append(f"{truncated:,} of {count:,} truncated at {limit}: {interval}")
        if self.recipe.thinking == "remove":
            values |= {
                "generate/thinking": with_thinking,
                "generate/thinking_tokens": removed,
                "generate/thinking_only": thinking_only,
            }
            size = f", {removed:,} tokens" if self.recipe.remote is None else ""
            lines.append(f"thinking removed from {with_thinking:,} answers{size}; {thinking_only:,} had nothing else")
        if self.different:
            lines.append(
                f"{self.different:,} repeated answers differ from the saved ones: the machine, the model or a package has "
                "changed; the saved answers are kept"
            )
        return values, lines


def _resume(directory: RunDirectory) -> str:
    return f"continue with `posttrain generate --resume {directory.path}`"
