"""The engine interface: token ids in, sampled token ids with log-probabilities out. No environments.

The vLLM server imports this module in another interpreter, so at run time it imports only the standard library.
"""

from collections.abc import Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

if TYPE_CHECKING:
    import numpy as np

    from posttrain.episode import StopReason
    from posttrain.models.policy import Policy
    from posttrain.recipe.rollout import SamplingRecipe


@dataclass(frozen=True)
class Request:
    """A request for one completion."""

    prompt_ids: tuple[int, ...]
    """Token ids of the prompt; at least one."""
    sampling: "SamplingRecipe"
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
    before top-p, top-k and min-p, as a learner computes them. The exception is vLLM with both a temperature and
    truncation, which returns log-probabilities of the truncated distribution.
    """

    ids: tuple[int, ...]
    logprobs: tuple[float, ...]
    versions: tuple[int, ...]
    """Weights version that sampled each token: the number of optimizer updates."""
    stop_reason: "StopReason"
    experts: "np.ndarray | None" = None
    """[n, R, k]: the experts of the first n tokens of prompt and completion, all but the last, at each of R routers of a policy
    with `model.router_replay`. None if the engine does not know them."""


@dataclass
class EngineCounters:
    """Work done so far, in tokens, forward passes and seconds."""

    sampled: int = 0
    """Tokens sampled."""
    prefilled: int = 0
    """Prompt tokens computed."""
    reused: int = 0
    """Prompt tokens found in the cache: earlier turns, and prompts shared within a group."""
    forwards: int = 0
    """Forward passes."""
    cache_bytes: int = 0
    """Largest number of bytes that the local engine's key/value cache has occupied."""
    prompt_seconds: float = 0.0
    """The local engine's time on prompt tokens: of each pass, their share of its tokens."""
    decoding_seconds: float = 0.0
    """The rest of the time of its passes, sampling included."""


class Engine(Protocol):
    """Samples completions of token prompts."""

    policy: "Policy"
    """The policy that the engine samples for."""
    counters: EngineCounters
    capacity: int
    """Maximum number of episodes in flight for which the cache keeps earlier turns."""

    async def generate(self, request: Request) -> Completion:
        """Sample one completion. Calls run concurrently; the engine batches them."""
        ...

    def episode(self, group: int = 0) -> AbstractContextManager[None]:
        """Keep an episode of `group` open inside the block; the engine may wait for its next request before a pass."""
        ...

    def load_weights(self, version: int, source: "Policy | None" = None) -> None:
        """Sample with the current weights of `source` (default: `policy`) from now on. `version` is their version.

        A `source` is a replica of `policy` (`Policy.replica`), such as the one of async rollouts.
        Clears the caches of other weights and wakes a sleeping engine. Requests may be in flight: they continue, each
        token is sampled by one version of the weights (`Completion.versions`), and keys and values of earlier tokens
        are recomputed, so that a token's log-probability is that of its version given all tokens before it.
        """
        ...

    def sleep(self) -> None:
        """Free memory for the learner. No request may follow before the next `load_weights`."""
        ...


@dataclass(frozen=True)
class StopStrings:
    """Strings that end a completion as soon as its decoded tokens contain one of them."""

    tokenizer: Any
    texts: Sequence[str]

    def matched(self, ids: Sequence[int]) -> bool:
        """Whether the completion `ids` ends here. Call it once for each sampled token."""
        if not self.texts:
            return False
        # A stop string of n bytes ends within the last n tokens, each of at least one byte; some do not end at a character.
        tail = max(len(text.encode()) for text in self.texts) + 8
        text = self.tokenizer.decode(list(ids[-tail:]))
        return any(stop in text for stop in self.texts)
