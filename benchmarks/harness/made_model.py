"""A small model that is trained on this machine, for benchmarks and tests of learning.

A decoder of 1.2 million weights is trained from scratch, in half a minute on one core, on episodes of the built-in
games in which every answer is random. It gives answers in the right format with the success rate of the random policy,
so any improvement was learned in the run that starts from it.

It is not a general language model: its training data has a few hundred words and only the settings of `GAMES`.
"""

import hashlib
import inspect
import json
import math
import sys
from collections.abc import Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from posttrain.environments.game import TAGS
from posttrain.environments.protocol import Environment, Message
from posttrain.errors import InputError
from posttrain.recipe.components import environment_class
from posttrain.runs.directory import atomic_folder, cache_directory
from posttrain.seeds import derive_seed, random_stream

GAMES: list[dict[str, Any]] = [
    {"type": "bandit"},
    {"type": "word_sort"},
    {"type": "frozen_lake", "slippery": False, "max_turns": 6, "observation": "local"},
    {"type": "frozen_lake", "slippery": True, "max_turns": 10, "observation": "local"},
    {"type": "sokoban", "max_turns": 6, "observation": "local"},
]
EPISODES = 400
"""Episodes of each game."""
PHASES = ((200, 12), (40, 8))
"""(updates, rows per update): first on excerpts of two turns, which are cheap, then on whole episodes."""
LEARNING_RATE, WARMUP_UPDATES = 3.0e-3, 15
HIDDEN, LAYERS, WIDTH_OF_HEAD, VOCABULARY, CONTEXT = 160, 3, 32, 640, 1024
MARKS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>", *TAGS]
"""Tokens that are never split, among them the tags of an answer."""
CHAT_TEMPLATE = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


def small(seed: int = 0) -> Path:
    """Return the directory of the model, which is trained on first use and stored in the cache directory.

    Its name contains a digest of this file and of the environments, so a change to either creates another model.
    A seed gives other initial weights, and processors round differently: what is
    claimed about learning should hold for several seeds.
    """
    files = [Path(__file__), *sorted(Path(inspect.getfile(Environment)).parent.glob("*.py"))]
    digest = hashlib.blake2b(b"".join(file.read_bytes() for file in files), digest_size=6).hexdigest()
    directory = cache_directory() / f"made-small-{digest}-{seed}"
    if (directory / "config.json").is_file():
        return directory
    print("training a small model, once; half a minute on an idle core", file=sys.stderr)
    with suppress(InputError), atomic_folder(directory) as aside:  # another process may have made it meanwhile
        _make(aside, seed)
    return directory


def _episodes() -> list[list[list[Message]]]:
    """The messages of random episodes, for each game."""
    kinds = [(environment_class(settings["type"]), settings) for settings in GAMES]
    environments = [kind(kind.Recipe.model_validate(settings)) for kind, settings in kinds]
    return [
        [random_episode(environment, seed, random_stream("made", "moves", seed)) for seed in seeds]
        for number, environment in enumerate(environments)
        for seeds in [[derive_seed("made", number, count) for count in range(EPISODES)]]
    ]


def random_episode(environment: Any, seed: int, draws: Any) -> list[Message]:
    """The messages of a random player of a game. Where the format has thinking, a thought names the move that follows it:
    it is the expert's, with another move in place of the best one.
    """
    messages = list(environment.reset(seed).messages)
    while True:
        answer = environment.random_answer(draws.random())
        if environment.format.thinking:
            best = environment.expert()
            played, right = (text.split("<answer>")[1].removesuffix("</answer>") for text in (answer, best))
            state, mark, plan = best.split("</think>")[0].removeprefix("<think>").rpartition("; ")
            answer = environment.format.render([played], state + mark + plan.replace(right, played))
        step = environment.step(answer)
        messages += [{"role": "assistant", "content": answer}, *step.messages]
        if step.terminated or step.truncated:
            return messages


def _make(directory: Path, seed: int) -> None:
    """Write the tokenizer and the trained model."""
    from transformers.utils import logging

    logging.disable_progress_bar()
    episodes = _episodes()
    tokenizer = _tokenizer(message for game in episodes for messages in game for message in messages)
    phases = [
        [[row for messages in game for row in rows(messages)] for game in episodes]
        for rows in (_excerpts, lambda messages: [messages])
    ]
    torch_state = torch.random.get_rng_state()
    model = _untrained(tokenizer, seed)
    _fit(model, tokenizer, phases)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    torch.random.set_rng_state(torch_state)


def write_untrained(
    directory: Path, seed: int, messages: Iterable[Message], marks: Sequence[str] = (), **size: int
) -> None:
    """Write a tokenizer made from `messages`, in which the texts `marks` are single tokens, and a model with random
    weights. `size`: `hidden` and `layers`.
    """
    tokenizer = _tokenizer(messages, marks)
    torch_state = torch.random.get_rng_state()
    _untrained(tokenizer, seed, **size).save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    torch.random.set_rng_state(torch_state)


def fine_tuned(
    directory: Path,
    seed: int,
    messages: Iterable[Message],
    keys: dict[str, Any],
    start: Path | None = None,
    **size: Any,
) -> Path:
    """Fine-tune with the keys of an SFT recipe, once, from `start` or from random weights and a tokenizer of `messages`.

    Returns the model, in `directory`. `size`: the other arguments of `write_untrained`.
    """
    import posttrain

    model = directory / "model"
    if not (model / "config.json").exists():
        if start is None:
            start = directory.with_name(f"{directory.name}-start")
            write_untrained(start, seed, messages, **size)
        evaluation = {"every": 0, "start": False, **({"final_seeds": {"count": 1}} if "environment" in keys else {})}
        common: dict[str, Any] = {
            "model": {"path": str(start), "threads": 1},
            "checkpoint": {"every": 100_000},
            "evaluation": evaluation,
        }
        posttrain.sft(keys, **common, name=directory.name, runs=str(directory.parent), seed=seed, overwrite=True)
    return model


def _untrained(tokenizer: Any, seed: int, hidden: int = HIDDEN, layers: int = LAYERS) -> Any:
    """A model with random weights. `hidden` is a multiple of `WIDTH_OF_HEAD`. Sets the seed of torch."""
    from transformers import AutoModelForCausalLM, LlamaConfig

    torch.manual_seed(seed)
    config = LlamaConfig(
        vocab_size=len(tokenizer),
        hidden_size=hidden,
        intermediate_size=3 * hidden,
        num_hidden_layers=layers,
        num_attention_heads=hidden // WIDTH_OF_HEAD,
        num_key_value_heads=hidden // WIDTH_OF_HEAD,
        max_position_embeddings=CONTEXT,
        # With one matrix for both and initial weights of 0.02, RL pauses for a number of steps that depends on the seed.
        tie_word_embeddings=False,
        initializer_range=0.08 * slower(hidden=hidden) ** 0.5,
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )
    return AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation="sdpa")


def slower(hidden: int = HIDDEN, **_: int) -> float:
    """Factor of the learning rates of a model: the usual width as a share of `hidden`, at most 1."""
    return min(1.0, HIDDEN / hidden)


def _tokenizer(messages: Iterable[Message], marks: Sequence[str] = ()) -> Any:
    from tokenizers import ByteLevelBPETokenizer, Tokenizer
    from transformers import PreTrainedTokenizerFast

    bpe = ByteLevelBPETokenizer()
    texts = (text for message in messages for text in (message["role"], message["content"]))
    bpe.train_from_iterator(texts, VOCABULARY, min_frequency=2, special_tokens=[*MARKS, *marks], show_progress=False)
    # Tokens that messages contain are no control tokens, which the renderer keeps out of messages.
    described = json.loads(bpe._tokenizer.to_str())
    for token in described["added_tokens"]:
        token["special"] = token["content"].startswith("<|")
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=Tokenizer.from_str(json.dumps(described)),
        eos_token="<|im_end|>",
        bos_token="<|im_start|>",
        pad_token="<|endoftext|>",
    )
    tokenizer.chat_template = CHAT_TEMPLATE
    return tokenizer


def _excerpts(messages: list[Message]) -> list[list[Message]]:
    """Two turns from each message of the user on."""
    return [messages[at : at + 4] for at, message in enumerate(messages[:-1]) if message["role"] == "user"]


def _ids(tokenizer: Any, messages: list[Message]) -> list[int]:
    ids: list[int] = tokenizer.apply_chat_template(messages, tokenize=True, return_dict=False)
    return ids


def _fit(model: Any, tokenizer: Any, phases: list[list[list[list[Message]]]]) -> None:
    """Train on all tokens of each phase's rows, drawn uniformly over games, with AdamW, linear warm-up, and cosine
    decay to 10% over both phases.
    """
    optimizer = torch.optim.AdamW(model.parameters(), lr=LEARNING_RATE, weight_decay=0.0)
    draws = random_stream("made", "batches")
    updates = sum(count for count, _ in PHASES)
    plan = [(games, size) for games, (count, size) in zip(phases, PHASES, strict=True) for _ in range(count)]
    model.train()
    for update, (games, size) in enumerate(plan):
        progress = max(0.0, (update - WARMUP_UPDATES) / (updates - WARMUP_UPDATES))
        factor = min(1.0, (update + 1) / WARMUP_UPDATES) * (0.55 + 0.45 * math.cos(math.pi * progress))
        for group in optimizer.param_groups:
            group["lr"] = LEARNING_RATE * factor
        chosen = [games[int(game)] for game in draws.integers(len(games), size=size)]
        batch = [torch.tensor(_ids(tokenizer, rows[int(draws.integers(len(rows)))])) for rows in chosen]
        ids = torch.nn.utils.rnn.pad_sequence(batch, batch_first=True)
        model(input_ids=ids, labels=ids.masked_fill(ids == 0, -100)).loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
    model.eval()
