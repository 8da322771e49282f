"""Requests, completers and predictions of the generate stage: the model in this process, or one behind a server."""

import hashlib
import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

from posttrain.credit.units.offsets import align
from posttrain.credit.units.segment import CLOSING, OPENING, thinking_tokens
from posttrain.data.convert import reference_answer
from posttrain.data.messages import PromptExample
from posttrain.data.problems import Problems
from posttrain.data.rendering import Renderer
from posttrain.engines.openai import chat_client, for_servers
from posttrain.engines.protocol import Engine
from posttrain.environments.protocol import EnvironmentFactory
from posttrain.environments.text_task import TextTask, TextTaskRecipe, prompt_table
from posttrain.episode import CUT_OFF, Episode, Outcome, Turn
from posttrain.errors import InputError, RunError
from posttrain.recipe.data import TaskSourceRecipe
from posttrain.recipe.rollout import RolloutRecipe
from posttrain.recipe.stages import GenerateRecipe
from posttrain.rollout.driver import EpisodeRequest, RolloutWorker
from posttrain.rollout.remote_worker import THOUGHTS, RemoteRolloutWorker, server_seed
from posttrain.runs.completions import CompletionLog, Key, line_of

_FAILURES_IN_A_ROW = 16
"""Number of consecutive failed requests after which a server counts as down; twice `engine.max_concurrent` if larger.
"""
_PROMPT_TAIL = 16
"""Number of tokens at the end of a prompt that are searched for an opened thinking block."""


# -- prompts and requests ---------------------------------------------------------------------------------------------


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
        """Return the request of the episode of a sample."""
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


def key_of(row: PromptRow, sample: int) -> Key:
    """Return the key of a completion in the answer log."""
    return row.id, sample


def text_task(recipe: GenerateRecipe) -> TextTaskRecipe:
    """Return the environment that shows the rows: one turn each, without a reward."""
    data = recipe.data
    prompts = [TaskSourceRecipe(**source.model_dump()) for source in data.test]
    return TextTaskRecipe(prompts=prompts, columns=data.columns, system=recipe.system, strict=data.strict)


def read_prompts(recipe: GenerateRecipe) -> tuple[list[PromptRow], Problems]:
    """Return the usable rows, and the problems of the others.

    Raises:
        InputError: there is no usable row, a row lacks a column of `keep_columns` or `data.id`, or two rows have the
            same id (1 and "1" are the same).
    """
    task = text_task(recipe)
    table = prompt_table(task)
    table.problems.raise_if(recipe.data.strict)
    environment = TextTask(task)
    rows: list[PromptRow] = []
    origins: dict[str, str] = {}
    for number, row in enumerate(table.rows[: recipe.data.max_rows]):
        row_id = _id(recipe, row, number)
        # Ids in prediction files are read as text, so 1 and "1" would identify the same row.
        if str(row_id) in origins:
            raise InputError(
                f"{row.origin}: the id {row_id!r} in `{recipe.data.id}` is also that of {origins[str(row_id)]}; name "
                "another column in data.id, or remove data.id"
            )
        origins[str(row_id)] = row.origin
        reference = reference_answer(row, recipe.data.columns)
        messages = list(environment.reset(number).messages)
        rows.append(PromptRow(number, row_id, messages, reference, _kept(recipe, row), row.origin))
    return rows, table.problems


def check_prompts(recipe: GenerateRecipe) -> list[str]:
    """Read the rows. Returns lines for `--dry-run`; errors as for `read_prompts`."""
    rows, problems = read_prompts(recipe)
    return [f"{len(rows):,} rows to answer", *problems.summary()]


def _id(recipe: GenerateRecipe, row: PromptExample, number: int) -> int | str:
    if recipe.data.id is None:
        return number
    value = row.row.get(recipe.data.id)
    if isinstance(value, bool) or not isinstance(value, int | str) or value == "":
        raise InputError(
            f"{row.origin}: `{recipe.data.id}` is {json.dumps(value, default=str)[:60]}, which is not an id; ids are text "
            "or whole numbers, so name another column in data.id, or remove data.id"
        )
    return value


def _kept(recipe: GenerateRecipe, row: PromptExample) -> dict[str, Any]:
    for name in recipe.keep_columns:
        if name not in row.row:
            columns = ", ".join(f"`{column}`" for column in list(row.row)[:8])
            raise InputError(f"{row.origin} has no column `{name}`, which `keep_columns` names; it has {columns}")
    kept = {name: row.row[name] for name in recipe.keep_columns}
    try:
        line_of(kept)
    except (TypeError, ValueError) as error:
        raise InputError(
            f"{row.origin}: a column of `keep_columns` cannot be written as JSON ({error}); remove it from `keep_columns`"
        ) from error
    return kept


def digest_of(rows: list[PromptRow]) -> str:
    """Return 16 hexadecimal digits that depend on the rows, their order, and their kept columns."""
    digest = hashlib.sha256()
    for row in rows:
        digest.update(line_of({"q": [row.id, row.messages, row.reference, row.kept]}))
    return digest.hexdigest()[:16]


def too_long(
    recipe: GenerateRecipe, rows: list[PromptRow], renderer: Renderer, max_tokens: int
) -> tuple[dict[int, str], Problems]:
    """Return the rows whose prompt leaves less than `tokens_per_turn` of `max_tokens` tokens, by number with the
    reason, and their problems.

    Raises:
        InputError: all rows are too long, or any row is and the data is `strict`.
    """
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


# -- completers -------------------------------------------------------------------------------------------------------


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

    def windows(self, requests: list[CompletionRequest], log: CompletionLog) -> Iterator[list[CompletionRequest]]:
        """Yield complete windows that have a missing completion.

        Windows are complete so that the batches of the engine do not depend on where an earlier run was killed.
        """
        size = self.recipe.window
        for start in range(0, len(requests), size):
            window = requests[start : start + size]
            if any(key_of(*request) not in log for request in window):
                yield window

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

    def windows(self, requests: list[CompletionRequest], log: CompletionLog) -> Iterator[list[CompletionRequest]]:
        """Yield all missing requests in one window."""
        missing = [request for request in requests if key_of(*request) not in log]
        if missing:
            yield missing

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


# -- predictions ------------------------------------------------------------------------------------------------------


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
