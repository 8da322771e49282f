"""The engine interface: token ids in, sampled token ids with log-probabilities out. No text and no environments."""

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
    """A request for one completion."""

    prompt_ids: tuple[int, ...]
    """Token ids of the prompt; at least one."""
    sampling: SamplingRecipe
    seed: int
    """Seed of the request's own random stream: the same request with the same seed draws the same numbers."""
    max_tokens: int
    """Maximum number of tokens to sample; at least one."""
    stop_strings: tuple[str, ...] = ()
    """Strings that end the completion as soon as its decoded tokens contain one of them."""


@dataclass(frozen=True)
class Completion:
    """A sampled completion. `ids` includes the token that ended it; `logprobs` are in nats, one per token.

    Log-probabilities are those of softmax(logits / temperature) over the whole vocabulary (temperature 1 when greedy),
    before top-p, top-k and min-p, as a learner computes them.
    """

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    """Weights version that sampled each token: the number of optimizer updates."""
    stop_reason: StopReason


@dataclass
class EngineCounters:
    """Work done so far, in tokens and forward passes."""

    sampled: int = 0
    """Tokens sampled."""
    prefilled: int = 0
    """Prompt tokens computed."""
    reused: int = 0
    """Prompt tokens found in the cache: earlier turns, and prompts shared within a group."""
    forwards: int = 0
    """Forward passes."""

    def since(self, before: "EngineCounters") -> "EngineCounters":
        """The work done since `before`."""
        now, then = asdict(self), asdict(before)
        return EngineCounters(**{name: now[name] - then[name] for name in now})


class SteppedEngine(Protocol):
    """An engine that computes in the caller's event loop, one forward pass after another."""

    before_forward: Callable[[], None] | None
    """Called before each forward pass, when every open episode waits for the engine. It may load weights and cancel
    requests. The same calls before the same passes give the same results, bit for bit."""


class Engine(Protocol):
    """Samples completions of token prompts."""

    policy: "Policy"
    """The policy whose weights `load_weights` takes."""
    counters: EngineCounters
    capacity: int
    """Maximum number of episodes in flight for which the cache keeps earlier turns."""

    async def generate(self, request: Request) -> Completion:
        """Sample one completion. Calls run concurrently; the engine batches them."""
        ...

    def episode(self, group: int = 0) -> AbstractContextManager[None]:
        """Keep an episode of `group` open inside the block; the engine may wait for its next request before a pass."""
        ...

    def load_weights(self, version: int) -> None:
        """Sample with the policy's current weights from now on; `version` is their version.

        Clears the caches of other weights and wakes a sleeping engine. Requests may be in flight: they continue, each
        token is sampled by one version of the weights (`Completion.versions`), and keys and values of earlier tokens are
        recomputed, so that a token's log-probability is that of its version given all tokens before it.
        """
        ...

    def sleep(self) -> None:
        """Free memory for the learner. No request may follow before the next `load_weights`."""
        ...
