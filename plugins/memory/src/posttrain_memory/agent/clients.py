"""Chat clients of the memory agent: a model in this process, or one behind an OpenAI-compatible server."""

import asyncio
from collections.abc import Sequence
from typing import Any

from posttrain.engines.openai import ChatRequestError, chat_client, complete
from posttrain.environments.protocol import Message
from posttrain.errors import InputError, RunError
from posttrain.recipe.engines import LocalEngineRecipe
from posttrain.recipe.model import ModelRecipe
from posttrain.recipe.rollout import SamplingRecipe
from posttrain.seeds import derive_seed

STOPS = ("<result>",)
"""Stop strings: a model that continues past this tag invents the result of its code."""


class ContextFull(RunError):
    """The conversation has no room for another answer; start a new one."""


class LocalChatClient:
    """A model in this process. Tokens are sampled and appended as in a rollout, and never re-encoded."""

    def __init__(
        self,
        model: ModelRecipe,
        sampling: SamplingRecipe,
        tokens_per_turn: int = 1_024,
        tokens_per_episode: int = 8_192,
        seed: int = 0,
    ) -> None:
        """Load `model`; raises InputError if that fails.

        `tokens_per_turn`: maximum number of tokens of an answer. `tokens_per_episode`: of a conversation, at most the
        model's context length. `seed`: of random answers.
        """
        from posttrain.data.rendering import Renderer
        from posttrain.engines.local.engine import LocalEngine
        from posttrain.models.policy import Policy
        from posttrain.rollout.transcript import TokenTranscript

        policy = Policy(model)
        self.renderer = Renderer(policy.tokenizer, policy.end_tokens)
        self.engine: Any = LocalEngine(policy, LocalEngineRecipe(slots=2))
        self.sampling = sampling
        self.tokens_per_turn = tokens_per_turn
        readable = getattr(policy.model.config, "max_position_embeddings", None) or tokens_per_episode
        self.tokens_per_episode = min(tokens_per_episode, readable)
        self.conversation: TokenTranscript | None = None
        self._seed = seed
        self._begun = 0

    def begin(self, messages: Sequence[Message], primer: str) -> None:
        """Start a new conversation with `messages`. Every answer begins with `primer`."""
        from posttrain.rollout.transcript import TokenTranscript

        self.conversation = TokenTranscript(self.renderer, messages, primer)
        self._begun += 1

    def answer(self) -> str:
        """The next answer. Raises ContextFull if the conversation has no room for one."""
        from posttrain.engines.protocol import Request

        conversation = self.conversation
        assert conversation is not None, "begin comes first"
        room = self.tokens_per_episode - len(conversation.context)
        if room <= 0 and not conversation.turns:
            raise RunError(
                f"the question has {len(conversation.context)} tokens including the prompt, but the limit is "
                f"{self.tokens_per_episode}; ask a shorter question, or use --prompt brief"
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
            stop_strings=STOPS,
        )
        completion = asyncio.run(self.engine.generate(request))
        return conversation.answer(completion.ids, completion.logprobs, completion.stop_reason, completion.versions)

    def observe(self, messages: Sequence[Message]) -> None:
        """Add the messages that follow the model's last answer."""
        assert self.conversation is not None, "begin comes first"
        self.conversation.observe(messages)


class RemoteChatClient:
    """A model behind an OpenAI-compatible server, which receives the whole conversation with every question.

    If the format has `thinking` and the server returns the thinking separately (`reasoning_content`), it is put back
    in front of the text as a `<think>` block.
    """

    def __init__(
        self,
        url: str,
        model: str,
        key_variable: str | None = None,
        temperature: float | None = None,
        tokens_per_turn: int = 4_096,
        thinking: bool = True,
        retries: int = 2,
    ) -> None:
        """`key_variable`: environment variable with the API key. `temperature` None: the server's default."""
        self.model = model
        self._client = chat_client("the memory agent", url, 300.0, retries, key_variable)
        self._temperature, self._most, self._thinking = temperature, tokens_per_turn, thinking
        self._messages: list[Message] = []

    def begin(self, messages: Sequence[Message], primer: str) -> None:
        if primer:
            raise InputError(
                f"a server cannot continue a prefilled answer ({primer}); set `opened_by` to policy or template"
            )
        self._messages = list(messages)

    def answer(self) -> str:
        """The next answer. Raises RunError if the server gives none."""
        try:
            limits: dict[str, Any] = {"temperature": self._temperature, "max_tokens": self._most, "stop": STOPS}
            written = complete("the model", self._client, self.model, self._messages, **limits)
        except ChatRequestError as failure:
            raise RunError(f"{failure}; check that the server is running, its address, and the model's name") from None
        text = written.text
        if self._thinking and written.reasoning and not text.lstrip().startswith("<think>"):
            text = f"<think>{written.reasoning}</think>{text}"
        self._messages.append({"role": "assistant", "content": text})
        return text

    def observe(self, messages: Sequence[Message]) -> None:
        self._messages.extend(messages)


ChatClient = LocalChatClient | RemoteChatClient
"""One conversation at a time with a language model."""
