"""Examples as tokens: rendered, held to the token limit, and kept on disk by content."""

import hashlib
import json
import os
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from posttrain.data.examples import Example, read_examples
from posttrain.data.messages import Conversation, Pair, Verdict
from posttrain.data.problems import Problems
from posttrain.data.rendering import LossOn, Renderer, TokenStream, render_conversation
from posttrain.errors import InputError
from posttrain.recipe.data import DataRecipe, SourceRecipe

Kind = Literal["conversation", "pair", "verdict"]
VERSION = 2
"""Of the rendering and of the file; another version is computed anew."""


@dataclass(frozen=True)
class TokenRow:
    """One row as tokens: the streams of a conversation, the chosen and the rejected answer, or one judged answer."""

    streams: list[TokenStream]
    origin: str
    domain: str | None = None
    margin: float = 0.0
    good: bool = True
    asked: str = ""
    """Digest of the messages before the first answer, where their tokens are trained too (`loss_on: all`)."""

    @property
    def tokens(self) -> int:
        """Tokens of all streams."""
        return sum(len(stream.ids) for stream in self.streams)

    @property
    def prompt(self) -> bytes:
        """The same for rows with the same prompt: the tokens before the first trained one, or what `asked` says."""
        if self.asked:
            return self.asked.encode()
        first = self.streams[0]
        return first.ids[: int(np.argmax(first.trained))].tobytes()


def load_rows(
    kind: Kind,
    recipe: DataRecipe,
    sources: list[SourceRecipe],
    max_rows: int | None,
    renderer: Renderer,
    loss_on: LossOn,
    problems: Problems,
) -> list[list[TokenRow]]:
    """The usable rows of each source, `max_rows` of it at most, tokenised, from the cache where the same rows were
    tokenised before.

    What cannot be used is counted in `problems`, which says so of a cached row as well.
    """
    cache = Path(
        recipe.cache or Path(os.environ.get("XDG_CACHE_HOME", Path.home() / ".cache")) / "posttrain" / "tokens"
    )
    found = []
    for source in sources:
        examples = list(read_examples(kind, [source], recipe.columns, problems, max_rows))
        file = cache / f"{_digest(examples, recipe, renderer, loss_on)}.npz"
        stored = _read(file)
        if stored is None:
            own = Problems()
            rows = list(tokenise(examples, recipe, renderer, loss_on, own))
            stored = rows, own
            _write(file, rows, own)
        found.append(stored[0])
        problems.include(stored[1])
    return found


def tokenise(
    examples: Iterable[Example], recipe: DataRecipe, renderer: Renderer, loss_on: LossOn, problems: Problems
) -> Iterator[TokenRow]:
    """The examples that fit, in their order."""
    for example in examples:
        try:
            row = _row(example, renderer, loss_on)
        except InputError as error:
            problems.add("the chat template refuses the conversation", example.origin, str(error))
            continue
        fitting = _fit(row, recipe, problems, compared=not isinstance(example, Conversation))
        if fitting is None:
            continue
        if isinstance(example, Pair) and _alike(*fitting.streams):
            problems.add(
                "chosen and rejected have the same tokens", example.origin, f"within {recipe.max_tokens} tokens"
            )
            continue
        if fitting is not row:
            problems.note("cut to data.max_tokens", row.origin)
        yield fitting


def _row(example: Example, renderer: Renderer, loss_on: LossOn) -> TokenRow:
    if isinstance(example, Conversation):
        streams = render_conversation(renderer, example.messages, loss_on, example.tools)
        asked = _asked(example) if loss_on == "all" else ""
        return TokenRow(streams, example.origin, example.domain, asked=asked)
    if isinstance(example, Verdict):
        streams = _answers(renderer, example.prompt, example.completion, example.tools)
        return TokenRow(streams, example.origin, example.domain, good=example.good)
    assert isinstance(example, Pair)
    streams = [
        stream
        for side in (example.chosen, example.rejected)
        for stream in _answers(renderer, example.prompt, side, example.tools)
    ]
    return TokenRow(streams, example.origin, example.domain, margin=example.margin or 0.0)


def _asked(example: Conversation) -> str:
    first = next(place for place, message in enumerate(example.messages) if message["role"] == "assistant")
    return hashlib.blake2b(json.dumps([example.messages[:first], example.tools]).encode(), digest_size=16).hexdigest()


def _answers(
    renderer: Renderer, prompt: list[Any], completion: list[Any], tools: list[Any] | None
) -> list[TokenStream]:
    streams = render_conversation(renderer, [*prompt, *completion], "assistant", tools, first=len(prompt))
    if len(streams) != 1:
        raise InputError(
            "the chat template rewrites earlier answers, so an answer of several turns is not one text; keep its last turn"
        )
    return streams


def _fit(row: TokenRow, recipe: DataRecipe, problems: Problems, compared: bool) -> TokenRow | None:
    """The row within the token limit; None, and counted, where nothing of it can be used.

    `compared`: every stream is an answer that is needed. The later streams of a conversation, each with its history,
    may be left out.
    """
    long = [stream for stream in row.streams if len(stream.ids) > recipe.max_tokens]
    if not row.streams:
        problems.add("nothing is trained", row.origin, "no answer of the conversation carries loss")
        return None
    if long and recipe.overlong == "drop":
        longest = max(len(stream.ids) for stream in long)
        problems.add("longer than data.max_tokens", row.origin, f"{longest} tokens, more than {recipe.max_tokens}")
        return None
    if not long:
        return row
    cut = [stream.cut(recipe.max_tokens) for stream in row.streams]
    left = [stream for stream in cut if stream.trained.any()]
    if not left or (compared and len(left) < len(cut)):
        problems.add("prompt longer than data.max_tokens", row.origin, "cutting it leaves nothing of an answer")
        return None
    return replace(row, streams=left)


def _alike(chosen: TokenStream, rejected: TokenStream) -> bool:
    return np.array_equal(chosen.ids, rejected.ids)


def _digest(examples: list[Example], recipe: DataRecipe, renderer: Renderer, loss_on: LossOn) -> str:
    """Of everything that the tokens depend on."""
    tokenizer = renderer.tokenizer
    digest = hashlib.blake2b(digest_size=16)
    settings = [VERSION, recipe.max_tokens, recipe.overlong, loss_on, sorted(renderer.end_tokens)]
    # Templates read the special tokens, and keys of tools in the order in which they stand.
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    for part in (settings, special, tokenizer.chat_template, tokenizer.backend_tokenizer.to_str()):
        digest.update(json.dumps(part).encode())
    for example in examples:
        digest.update(json.dumps(asdict(example)).encode())
    return digest.hexdigest()


def _write(file: Path, rows: list[TokenRow], problems: Problems) -> None:
    """Keep the rows; a cache that cannot be written is no reason to stop."""
    streams = [stream for row in rows for stream in row.streams]
    heads = [[row.origin, row.domain, row.margin, row.good, row.asked, len(row.streams)] for row in rows]
    arrays: dict[str, Any] = {
        "ids": np.concatenate([s.ids for s in streams]) if streams else np.zeros(0, dtype=np.int64),
        "trained": np.concatenate([s.trained for s in streams]) if streams else np.zeros(0, dtype=bool),
        "lengths": np.array([len(s.ids) for s in streams], dtype=np.int64),
        "heads": np.frombuffer(json.dumps([heads, problems.state()]).encode(), dtype=np.uint8),
    }
    aside = file.with_name(f"{file.stem}.{os.getpid()}.partial.npz")
    try:
        file.parent.mkdir(parents=True, exist_ok=True)
        np.savez(aside, **arrays)
        aside.replace(file)
    except OSError:
        with suppress(OSError):
            aside.unlink()


def _read(file: Path) -> tuple[list[TokenRow], Problems] | None:
    """What `_write` kept; None where there is nothing whole, whatever else stands there."""
    try:
        with np.load(file) as stored:
            ids, trained, lengths = stored["ids"], stored["trained"], stored["lengths"]
            heads, state = json.loads(stored["heads"].tobytes())
        if (ids.dtype, trained.dtype) != (np.int64, bool) or not len(ids) == len(trained) == lengths.sum():
            return None
        ends = np.cumsum(lengths)[:-1]
        streams = [TokenStream(*pieces) for pieces in zip(np.split(ids, ends), np.split(trained, ends), strict=True)]
        rows, place = [], 0
        for origin, domain, margin, good, asked, count in heads:
            rows.append(TokenRow(streams[place : place + count], origin, domain, margin, good, asked))
            place += count
        return rows, Problems.from_state(state)
    except Exception:  # damage has no one type: zip, npy and JSON each have theirs
        return None
