"""Who answers the rows of a generation: the model in this process, or one behind a server."""

from collections.abc import Iterator
from pathlib import Path

from posttrain.data.rendering import Renderer
from posttrain.engines.openai import chat_client
from posttrain.engines.protocol import Engine
from posttrain.episode import Episode, Outcome
from posttrain.errors import RunError
from posttrain.recipe.engines import OpenAIEngineRecipe
from posttrain.recipe.generate import GenerateRecipe
from posttrain.recipe.rollout import EngineRecipe, RolloutRecipe
from posttrain.rollout.driver import RolloutWorker
from posttrain.rollout.remote_worker import RemoteRolloutWorker
from posttrain.runs.answers import AnswerLog
from posttrain.training.questions import Question, key_of, task_of, too_long

_FAILURES_IN_A_ROW = 16
"""Failed requests with no answer between them after which a server is taken to be down; twice `engine.max_concurrent` if more."""

Asked = tuple[Question, int]
"""A row, and which sample of its answers."""


class Outage(RunError):
    """The server answers nobody."""


class LocalAnswerer:
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
        self._kept: Engine | None = None

    def windows(self, wanted: list[Asked], there: AnswerLog) -> Iterator[list[Asked]]:
        """Windows with something missing, whole: what is computed together must not depend on where a run was killed."""
        size = self.recipe.window
        for start in range(0, len(wanted), size):
            window = wanted[start : start + size]
            if any(key_of(*asked) not in there for asked in window):
                yield window

    def player(self) -> RolloutWorker:
        """A player with an engine that has computed nothing yet."""
        return RolloutWorker(
            engine=self._engine(),
            renderer=self.renderer,
            environment=task_of(self.recipe),
            rollout=_limits(self.recipe, self.most),
            sampling=self.recipe.sampling,
            version=0,
        )

    def _engine(self) -> Engine:
        """A new one in this process; vLLM is started once and forgets."""
        from posttrain.engines.factory import open_engine

        recipe = self.recipe
        assert not isinstance(recipe.engine, OpenAIEngineRecipe)
        if self._kept is None or isinstance(recipe.engine, EngineRecipe):
            logs = Path(recipe.runs) / recipe.name / "logs"
            self._kept = open_engine(self.policy, recipe.engine, self.most, recipe.sampling, logs)
        self._kept.load_weights(0)
        return self._kept


class RemoteAnswerer:
    """The model behind a server answers. How many tokens its prompts have is the server's to know."""

    renderer = None

    def __init__(self, recipe: GenerateRecipe) -> None:
        assert recipe.remote is not None
        self.recipe, self.engine = recipe, recipe.remote
        how = (self.engine.url, self.engine.timeout, self.engine.retries, self.engine.api_key_variable)
        self.client = chat_client("engine", *how)
        self.left_out: dict[int, str] = {}
        self.remarks: list[str] = []

    def windows(self, wanted: list[Asked], there: AnswerLog) -> Iterator[list[Asked]]:
        """Everything that is missing, at once."""
        missing = [asked for asked in wanted if key_of(*asked) not in there]
        if missing:
            yield missing

    def player(self) -> RemoteRolloutWorker:
        """A player that gives up where the server is down."""
        return RemoteRolloutWorker(
            client=self.client,
            engine=self.engine,
            failure_monitor=_Patience(max(_FAILURES_IN_A_ROW, 2 * self.engine.max_concurrent)),
            environment=task_of(self.recipe),
            rollout=_limits(self.recipe, self.recipe.rollout.tokens_per_episode),
            sampling=self.recipe.sampling,
        )


class _Patience:
    """Ends the asking after `most` failures in a row."""

    def __init__(self, most: int) -> None:
        self.most = most
        self._failures = 0

    def record(self, episode: Episode) -> None:
        """Outage where this is the failure that is one too many."""
        self._failures = self._failures + 1 if episode.outcome is Outcome.FAILED else 0
        if self._failures >= self.most:
            raise Outage(f"{self._failures} requests in a row failed, the last one: {episode.failure}")


def _limits(recipe: GenerateRecipe, most: int) -> RolloutRecipe:
    return RolloutRecipe(**recipe.rollout.model_dump() | {"tokens_per_episode": most})
