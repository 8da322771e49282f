"""Who speaks for the memory agent: a model in this process, or one behind an OpenAI-compatible server."""

import asyncio
from collections.abc import Sequence
from typing import Any, Protocol

from posttrain.engines.openai import ChatRequestError, chat_client, complete
from posttrain.environments.protocol import Message
from posttrain.errors import InputError, RunError
from posttrain.recipe.model import ModelRecipe
from posttrain.recipe.rollout import EngineRecipe, SamplingRecipe
from posttrain.seeds import derive_seed

STOPS = ("<result>",)
"""Texts that end an answer: from there on, a model only makes up what its code would have returned."""


class ContextFull(RunError):
    """The conversation leaves no room for an answer. A new one has room again."""


class Speaker(Protocol):
    """One conversation at a time with a language model."""

    def begin(self, messages: Sequence[Message], primer: str) -> None:
        """Forget what was said and begin with `messages`; `primer` is put in the model's mouth before each answer."""
        ...

    def answer(self) -> str:
        """The model's next message, the primer in front. Raises RunError where there is none."""
        ...

    def observe(self, messages: Sequence[Message]) -> None:
        """What the model is told next, after an answer of its own."""
        ...

    def close(self) -> None:
        """Give back what the speaker holds."""
        ...


class LocalSpeaker:
    """A model in this process. Its conversation is that of a rollout: tokens are sampled and appended, never re-encoded."""

    def __init__(
        self,
        model: ModelRecipe,
        sampling: SamplingRecipe,
        tokens_per_turn: int = 1_024,
        tokens_per_episode: int = 8_192,
        stop_strings: Sequence[str] = STOPS,
        seed: int = 0,
    ) -> None:
        """Loads `model`; InputError where it cannot be. `tokens_per_turn`: most tokens of an answer.

        `tokens_per_episode`: most tokens of a conversation, lowered to what the model can read. `seed` names the
        random numbers of a `sampling` that is not greedy: the same questions then get the same answers.
        """
        from posttrain.data.rendering import Renderer
        from posttrain.engines.local.engine import LocalEngine
        from posttrain.models.policy import Policy
        from posttrain.rollout.transcript import TokenTranscript

        policy = Policy(model)
        self.renderer = Renderer(policy.tokenizer, policy.end_tokens)
        self.engine: Any = LocalEngine(policy, EngineRecipe(slots=2))
        self.sampling = sampling
        self.tokens_per_turn = tokens_per_turn
        readable = getattr(policy.model.config, "max_position_embeddings", None) or tokens_per_episode
        self.tokens_per_episode = min(tokens_per_episode, readable)
        self.conversation: TokenTranscript | None = None
        self._stops = tuple(stop_strings)
        self._seed = seed
        self._begun = 0

    def begin(self, messages: Sequence[Message], primer: str) -> None:
        from posttrain.rollout.transcript import TokenTranscript

        self.conversation = TokenTranscript(self.renderer, messages, primer)
        self._begun += 1

    def answer(self) -> str:
        """The next answer; ContextFull where the conversation has no room for one."""
        from posttrain.engines.protocol import Request

        conversation = self.conversation
        assert conversation is not None, "begin comes first"
        room = self.tokens_per_episode - len(conversation.context)
        if room <= 0 and not conversation.turns:
            raise RunError(
                f"the question has {len(conversation.context)} tokens with all that stands before it, and the model may "
                f"read {self.tokens_per_episode}; ask a shorter one, or take the brief prompt"
            )
        if room <= 0:
            raise ContextFull(
                f"the conversation has {len(conversation.context)} tokens and the model may read {self.tokens_per_episode}"
            )
        request = Request(
            prompt_ids=tuple(conversation.context),
            sampling=self.sampling,
            seed=derive_seed("memory agent", self._seed, self._begun, len(conversation.turns)),
            max_tokens=min(self.tokens_per_turn, room),
            stop_strings=self._stops,
        )
        completion = asyncio.run(self.engine.generate(request))
        return conversation.answer(completion.ids, completion.logprobs, completion.stop_reason, completion.versions)

    def observe(self, messages: Sequence[Message]) -> None:
        assert self.conversation is not None, "begin comes first"
        self.conversation.observe(messages)

    def close(self) -> None:
        self.conversation = None


class RemoteSpeaker:
    """A model behind an OpenAI-compatible server, which gets the whole conversation with every question.

    What the server gives as thinking apart from the text (`reasoning_content`) is put back in front of it as the
    `<think>` block that the format asks for, where there is none and the format has `thinking`.
    """

    def __init__(
        self,
        url: str,
        model: str,
        key_variable: str | None = None,
        temperature: float | None = None,
        tokens_per_turn: int = 4_096,
        thinking: bool = True,
        seconds: float = 300.0,
        retries: int = 2,
    ) -> None:
        """`key_variable`: environment variable that holds the key. `temperature` None: the server's own.

        `seconds` limits a call; after a fault that may pass, the client asks `retries` times more.
        """
        self.model = model
        self._client = chat_client("the memory agent", url, seconds, retries, key_variable)
        self._temperature, self._most, self._thinking = temperature, tokens_per_turn, thinking
        self._messages: list[Message] = []

    def begin(self, messages: Sequence[Message], primer: str) -> None:
        if primer:
            raise InputError(
                f"a server lets nobody write the beginning of an answer ({primer}); choose another `opened_by`"
            )
        self._messages = list(messages)

    def answer(self) -> str:
        """The next answer; RunError where the server gives none."""
        try:
            written = complete(
                "the model",
                self._client,
                self.model,
                self._messages,
                temperature=self._temperature,
                max_tokens=self._most,
                stop=STOPS,
            )
        except ChatRequestError as failure:
            raise RunError(f"{failure}; check that the server runs, the address and the name of the model") from None
        text = written.text
        if self._thinking and written.reasoning and not text.lstrip().startswith("<think>"):
            text = f"<think>{written.reasoning}</think>{text}"
        self._messages.append({"role": "assistant", "content": text})
        return text

    def observe(self, messages: Sequence[Message]) -> None:
        self._messages.extend(messages)

    def close(self) -> None:
        self._messages = []
