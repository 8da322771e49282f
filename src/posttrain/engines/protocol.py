"""What an engine is: token ids in, token ids and their log-probabilities out. It knows no text and no environment."""

from collections.abc import Callable
from contextlib import AbstractContextManager
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Protocol

from posttrain.episode import StopReason
from posttrain.recipe.rollout import SamplingRecipe

if TYPE_CHECKING:
    from posttrain.models.policy import Policy


@dataclass(frozen=True)
class Request:
    """One answer asked for."""

    prompt_ids: tuple[int, ...]
    """Token ids the answer continues; at least one."""
    sampling: SamplingRecipe
    seed: int
    """Names the request's own random stream: the same request with the same seed draws the same numbers."""
    max_tokens: int
    """Most tokens to sample; at least one."""
    stop_strings: tuple[str, ...] = ()
    """Texts that end the answer once its decoded tokens hold one of them."""


@dataclass(frozen=True)
class Completion:
    """One answer: `ids` as sampled, the stopping token included, with the log-probability of each in nats.

    Log-probabilities are those of softmax(logits / temperature) over the whole vocabulary (temperature 1 when greedy),
    before top-p, top-k and min-p, so that they equal what a learner computes.
    """

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    """Of the policy's weights that sampled each token: the number of optimizer updates they had seen."""
    stop_reason: StopReason


@dataclass
class EngineCounters:
    """Work done so far, in tokens."""

    sampled: int = 0
    """Tokens sampled."""
    prefilled: int = 0
    """Prompt tokens computed."""
    reused: int = 0
    """Prompt tokens taken from the cache: earlier turns, and prompts shared in a group."""
    forwards: int = 0
    """Forward passes."""

    def since(self, before: "EngineCounters") -> "EngineCounters":
        """The work done since the counters were as `before`."""
        now, then = asdict(self), asdict(before)
        return EngineCounters(**{name: now[name] - then[name] for name in now})


class SteppedEngine(Protocol):
    """An engine that computes in the event loop of those who ask, one forward pass after another."""

    before_forward: Callable[[], None] | None
    """Called before each forward pass, when every open episode waits for the engine. It may load weights, and it may
    cancel requests. What is computed after the same calls at the same passes is the same to the bit."""


class Engine(Protocol):
    """Turns token prompts into sampled tokens."""

    policy: "Policy"
    """Whose weights `load_weights` takes."""
    counters: EngineCounters
    capacity: int
    """Episodes to keep in flight at a time: as many as keep what was computed for their earlier turns."""

    async def generate(self, request: Request) -> Completion:
        """Sample one answer. Many calls are in flight at once; the engine batches them."""
        ...

    def episode(self, group: int = 0) -> AbstractContextManager[None]:
        """Open while an episode of `group` is played: the engine may wait for its next request before it decides what to compute."""
        ...

    def load_weights(self, version: int) -> None:
        """From now on sample with the policy's weights as they are now, which are those of `version`.

        What was computed with others is forgotten; an engine that sleeps wakes. It may be called while requests are in
        flight: they go on, each token is sampled with the weights of one version and `Completion.versions` tells which,
        and keys and values of earlier tokens are computed anew, so that a token's log-probability is that of its version
        given all tokens before it.
        """
        ...

    def sleep(self) -> None:
        """Nothing is asked of the engine until the next `load_weights`: give back the memory that the learner needs."""
        ...
