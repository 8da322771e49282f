"""Chat with a checkpoint, or let it play an environment turn by turn, with the engine and the renderer of training."""

import asyncio
import re
import secrets
from collections import OrderedDict
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import RLock
from typing import TYPE_CHECKING, Any

import numpy as np

from posttrain.environments.protocol import Environment, EnvironmentFactory
from posttrain.episode import Episode, Outcome, StopReason
from posttrain.errors import InputError
from posttrain.recipe.compose import section
from posttrain.recipe.model import ModelRecipe
from posttrain.recipe.rollout import SamplingRecipe, evaluated_environment
from posttrain.recipe.trust import require_trust_of_run
from posttrain.runs.directory import RunDirectory
from posttrain.seeds import derive_seed
from posttrain.view.episodes import EpisodePage, Look, Sample, episode_page

if TYPE_CHECKING:
    from posttrain.data.rendering import Renderer
    from posttrain.engines.local.engine import LocalEngine
    from posttrain.models.policy import Policy
    from posttrain.rollout.transcript import TokenTranscript

_MOST_SESSIONS = 8
_POSITIONS = 512
"""Positions whose logits are in memory at a time, as tokens are scored."""


def checkpoints_of(run: RunDirectory) -> list[str]:
    """The models of a run: `model`, and the steps of its checkpoints, newest first."""
    found = ["model"] if (run.path / "model" / "config.json").is_file() or _is_adapter(run.path / "model") else []
    steps = sorted((path.parent.name for path in run.checkpoints.glob("step_*/policy")), reverse=True)
    return [*found, *steps]


def _is_adapter(path: Path) -> bool:
    return (path / "adapter_config.json").is_file()


@dataclass
class Loaded:
    """A model in memory."""

    path: Path
    policy: "Policy"
    engine: "LocalEngine"
    renderer: "Renderer"


@dataclass
class Session:
    """A conversation with a checkpoint."""

    key: str
    path: Path
    """Directory of the checkpoint."""
    checkpoint: str
    sampling: SamplingRecipe
    max_tokens: int
    seed: int
    environment: Environment | None = None
    """None in a chat."""
    transcript: "TokenTranscript | None" = None
    ending: str = ""

    @property
    def total(self) -> float:
        """The return so far."""
        return sum(turn.reward for turn in self.transcript.turns) if self.transcript else 0.0


class Player:
    """Loads one model at a time, and keeps the last conversations. Requests are served one at a time."""

    def __init__(self) -> None:
        self._loaded: Loaded | None = None
        self._sessions: OrderedDict[str, Session] = OrderedDict()
        self._lock = RLock()

    def begin(self, run: RunDirectory, checkpoint: str, played: bool, seed: int, temperature: float) -> Session:
        """Start a chat, or the task `seed` of the run's environment if `played`.

        InputError for an unknown checkpoint, or an environment that needs trust.
        """
        recipe = run.load_recipe()
        rollout = getattr(recipe, "rollout", None)
        trained = rollout.sampling.model_dump() if rollout is not None else {}
        sampling = section(SamplingRecipe, **{**trained, "temperature": temperature})
        longest = getattr(rollout, "tokens_per_turn", None) or 256
        path = _checkpoint(run, checkpoint)
        session = Session(secrets.token_urlsafe(9), path, checkpoint, sampling, longest, seed)
        with self._lock:
            if played:
                environment = evaluated_environment(recipe)
                if environment is None:
                    raise InputError(f"{run.path} has no environment; choose a chat")
                values = {"environment": environment.model_dump(mode="json")}
                require_trust_of_run(run.recipe_file, values, "rl")
                session.environment = EnvironmentFactory(environment)()
                seen = session.environment.reset(seed)
                primer = session.environment.primer
                session.transcript = self._transcript(session, seen.messages, primer, seen.state, seen.tools)
            self._sessions[session.key] = session
            while len(self._sessions) > _MOST_SESSIONS:
                self._sessions.popitem(last=False)
        return session

    def session(self, key: str) -> Session:
        """The conversation `key`; InputError if it is no longer kept."""
        if key not in self._sessions:
            raise InputError("this conversation is no longer kept; start another one")
        return self._sessions[key]

    def say(self, session: Session, text: str) -> None:
        """A message of the user in a chat, and the answer of the model."""
        with self._lock:
            message = {"role": "user", "content": text}
            if session.transcript is None:
                session.transcript = self._transcript(session, [message])
            else:
                session.transcript.observe([message])
            self._answer(session)

    def turn(self, session: Session, text: str = "") -> None:
        """The next turn in an environment: an answer of the model, or `text` in its place."""
        environment, transcript = session.environment, session.transcript
        assert environment is not None
        assert transcript is not None
        if session.ending:
            raise InputError("this episode has ended; start another one")
        with self._lock:
            if text:
                ids = transcript.written(transcript.primer + text)
                transcript.answer(ids, [0.0] * len(ids), StopReason.END_TOKEN)
            else:
                self._answer(session)
            step = environment.take(transcript.action)
            transcript.reward(step.reward, dict(step.info))
            if step.terminated or step.truncated:
                won = bool(step.info.get("success"))
                session.ending = "success" if won else "terminated" if step.terminated else "truncated"
            else:
                transcript.observe(step.messages, step.state, step.new_conversation)

    def page(self, session: Session) -> EpisodePage | None:
        """The conversation with the probability of each token; None before the first message."""
        transcript = session.transcript
        if transcript is None:
            return None
        outcome = Outcome.TRUNCATED if session.ending == "truncated" else Outcome.TERMINATED
        streams, messages = transcript.streams(), transcript.messages
        episode = Episode(session.seed, 0, 0, 0, streams, transcript.turns, outcome, None, messages)
        tokenizer = self._model(session.path).policy.tokenizer
        decode = partial(tokenizer.decode, clean_up_tokenization_spaces=False)
        with self._lock:
            return episode_page(Sample("", episode, None, None), Look(1.0, "log-probability", each=True), decode, None)

    def scores(
        self, run: RunDirectory, checkpoint: str, samples: list[Sample]
    ) -> list[list[tuple[np.ndarray, np.ndarray]]]:
        """Log-probability and entropy of every sampled token under a checkpoint: per episode and stream, [T] float32 each,
        zero for tokens that were not sampled. The temperature is that of the run's rollouts."""
        rollout = getattr(run.load_recipe(), "rollout", None)
        temperature = getattr(getattr(rollout, "sampling", None), "temperature", 1.0) or 1.0
        with self._lock:
            policy = self._model(_checkpoint(run, checkpoint)).policy
            scored = []
            for sample in samples:
                of_episode = []
                for stream in sample.episode.streams:
                    found = policy.score([stream.ids], [stream.sampled], temperature, _POSITIONS)
                    pair = np.zeros((2, len(stream)), np.float32)
                    pair[0, stream.sampled] = found.logprobs.detach().float().cpu().numpy()
                    pair[1, stream.sampled] = found.entropies.detach().float().cpu().numpy()
                    of_episode.append((pair[0], pair[1]))
                scored.append(of_episode)
        return scored

    def _answer(self, session: Session) -> None:
        loaded, transcript = self._model(session.path), session.transcript
        assert transcript is not None
        from posttrain.engines.protocol import Completion, Request

        seed = derive_seed(session.seed, "play", len(transcript.turns))
        request = Request(tuple(transcript.context), session.sampling, seed, session.max_tokens)

        async def generate() -> Completion:
            with loaded.engine.episode():
                return await loaded.engine.generate(request)

        done = asyncio.run(generate())
        transcript.answer(done.ids, done.logprobs, done.stop_reason, done.versions)

    def _transcript(
        self, session: Session, messages: Any, primer: str = "", state: str | None = None, tools: Any = ()
    ) -> "TokenTranscript":
        from posttrain.rollout.transcript import TokenTranscript

        return TokenTranscript(self._model(session.path).renderer, messages, primer, state, tools)

    def _model(self, path: Path) -> Loaded:
        with self._lock:
            if self._loaded is None or self._loaded.path != path:
                from posttrain.data.rendering import Renderer
                from posttrain.engines.local.engine import LocalEngine
                from posttrain.models.policy import Policy

                self._loaded = None  # before another model needs memory
                policy = Policy(section(ModelRecipe, path=str(path)), trained=False)
                renderer = Renderer(policy.tokenizer, policy.end_tokens)
                self._loaded = Loaded(path, policy, LocalEngine(policy, slots=8), renderer)
            return self._loaded


def _checkpoint(run: RunDirectory, name: str) -> Path:
    """The directory of a checkpoint; InputError if the run has none of that name."""
    if name not in checkpoints_of(run) or not re.fullmatch(r"model|step_\d+", name):
        raise InputError(f"{run.path} has no model {name!r}; wait for a checkpoint, or choose another one")
    return run.path / "model" if name == "model" else run.checkpoints / name / "policy"
