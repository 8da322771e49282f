"""Examples as tokens: rendering, the token limit, and a cache on disk by content."""

import hashlib
import json
from collections.abc import Iterable, Iterator
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any, Literal

import numpy as np

from posttrain.data.examples import Example, read_examples
from posttrain.data.messages import ConversationExample, PairExample, TextExample, UnpairedExample
from posttrain.data.problems import Problems
from posttrain.data.rendering import LossOn, Renderer, TokenStream, render_conversation
from posttrain.errors import InputError, RunError
from posttrain.recipe.data import DataRecipe, SourceRecipe
from posttrain.runs.directory import atomic_file, cache_directory

Kind = Literal["conversation", "pair", "unpaired"]
VERSION = 5
"""Version of the rendering and of the cache files. Files of other versions are not read."""


@dataclass(frozen=True)
class TokenRow:
    """A row as tokens: the streams of a conversation, the chosen and the rejected answer, or one labeled answer."""

    streams: list[TokenStream]
    origin: str
    domain: str | None = None
    margin: float = 0.0
    chosen: bool = True
    """The label of an unpaired answer."""
    prompt_digest: str = ""
    """Digest of the messages before the first answer to them, where tokens of these are trained too (`loss_on: all`, or
    an answer opens the conversation), or of plain text."""
    weight: float = 1.0
    """Weight of the row in the training loss."""

    @property
    def tokens(self) -> int:
        """Number of tokens of all streams."""
        return sum(len(stream.ids) for stream in self.streams)

    @property
    def prompt(self) -> bytes:
        """A value that rows with the same prompt share: the tokens before the first trained one, or `prompt_digest`."""
        if self.prompt_digest:
            return self.prompt_digest.encode()
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
    """Return the tokenized usable rows of each source, at most `max_rows` per source, from the cache where possible.

    Unusable rows are counted in `problems`, even if the tokens come from the cache.
    """
    cache = Path(recipe.cache or cache_directory() / "tokens")
    rows_of_sources = []
    for source in sources:
        examples = list(read_examples(kind, [source], recipe.columns, problems, max_rows))
        file = cache / f"{_digest(examples, recipe, renderer, loss_on)}.npz"
        stored = _read(file)
        if stored is None:
            source_problems = Problems()
            rows = list(tokenize(examples, recipe, renderer, loss_on, source_problems))
            stored = rows, source_problems
            _write(file, rows, source_problems)
        rows_of_sources.append(stored[0])
        problems.include(stored[1].state())
    return rows_of_sources


def tokenize(
    examples: Iterable[Example], recipe: DataRecipe, renderer: Renderer, loss_on: LossOn, problems: Problems
) -> Iterator[TokenRow]:
    """Yield the rows of the examples that fit into the token limit, in order."""
    for example in examples:
        try:
            row = _row(example, renderer, loss_on)
        except InputError as error:
            problems.add("the chat template refuses the conversation", example.origin, str(error))
            continue
        fitted = _fit(row, recipe, problems, all_needed=not isinstance(example, ConversationExample))
        if fitted is None:
            continue
        if isinstance(example, PairExample) and np.array_equal(fitted.streams[0].ids, fitted.streams[1].ids):
            same = "chosen and rejected have the same tokens"
            problems.add(same, example.origin, f"within {recipe.max_tokens} tokens")
            continue
        if fitted is not row:
            problems.note("cut to data.max_tokens", row.origin)
        if any(stream.incomplete for stream in row.streams):
            problems.note("without a text of a message, which the chat template leaves out", row.origin)
        for note in _notes(example, renderer):
            problems.note(note, row.origin)
        yield fitted


def _notes(example: Example, renderer: Renderer) -> list[str]:
    """How the row differs from its file, or from `model.thinking`."""
    if isinstance(example, TextExample):
        return []
    if isinstance(example, ConversationExample):
        answers = example.messages
    elif isinstance(example, UnpairedExample):
        answers = example.completion
    else:
        assert isinstance(example, PairExample)
        answers = [*example.chosen, *example.rejected]
    prompt = getattr(example, "prompt", [])
    problem = renderer.thinking_problem(answers)
    return [*renderer.notes([*prompt, *answers], example.tools or []), *([problem] if problem else [])]


def _row(example: Example, renderer: Renderer, loss_on: LossOn) -> TokenRow:
    more: dict[str, Any] = {}
    if isinstance(example, ConversationExample):
        streams = render_conversation(renderer, example.messages, loss_on, example.tools)
        # The answer that opens a conversation has the same tokens before it in every row.
        if loss_on == "all" or example.messages[0]["role"] == "assistant":
            roles = [message["role"] for message in example.messages]
            prompt = example.messages[: roles.index("assistant", 1)]
            more["prompt_digest"] = _hash(json.dumps([prompt, example.tools]))
    elif isinstance(example, TextExample):
        ids = [*renderer.document(example.text), renderer.tokenizer.eos_token_id]
        streams = [TokenStream(np.array(ids, dtype=np.int64), np.arange(len(ids)) > 0)]
        more["prompt_digest"] = _hash(example.text)
    elif isinstance(example, UnpairedExample):
        streams = _answers(renderer, example.prompt, example.completion, example.tools)
        more["chosen"] = example.label
    else:
        assert isinstance(example, PairExample)
        sides = (_answers(renderer, example.prompt, side, example.tools) for side in (example.chosen, example.rejected))
        streams = [stream for side in sides for stream in side]
        more["margin"] = example.margin or 0.0
    return TokenRow(streams, example.origin, example.domain, weight=example.weight, **more)


def _hash(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _answers(
    renderer: Renderer, prompt: list[Any], completion: list[Any], tools: list[Any] | None
) -> list[TokenStream]:
    streams = render_conversation(renderer, [*prompt, *completion], "assistant", tools, first=len(prompt))
    if len(streams) != 1:
        raise InputError(
            "the chat template rewrites earlier answers, so an answer of several turns is not one stream; keep its last turn"
        )
    return streams


def _fit(row: TokenRow, recipe: DataRecipe, problems: Problems, all_needed: bool) -> TokenRow | None:
    """Return the row within the token limit. If nothing is left of it, count the problem in `problems` and return None.

    `all_needed`: the row is useless without one of its streams (the two answers of a pair). Later streams of a
    conversation may be dropped.
    """
    too_long = [stream for stream in row.streams if len(stream.ids) > recipe.max_tokens]
    if not row.streams:
        problems.add("nothing is trained", row.origin, "no answer of the conversation has a loss")
        return None
    if too_long and recipe.overlong == "drop":
        longest = max(len(stream.ids) for stream in too_long)
        problems.add("longer than data.max_tokens", row.origin, f"{longest} tokens, more than {recipe.max_tokens}")
        return None
    if not too_long:
        return row
    cut = [stream.cut(recipe.max_tokens) for stream in row.streams]
    kept = [stream for stream in cut if stream.trained.any()]
    if not kept or (all_needed and len(kept) < len(cut)):
        problems.add("prompt longer than data.max_tokens", row.origin, "cutting leaves no token of an answer")
        return None
    return replace(row, streams=kept)


def _digest(examples: list[Example], recipe: DataRecipe, renderer: Renderer, loss_on: LossOn) -> str:
    """Return a digest of everything that the tokens depend on."""
    tokenizer = renderer.tokenizer
    digest = hashlib.blake2b(digest_size=16)
    settings = [VERSION, recipe.max_tokens, recipe.overlong, loss_on, sorted(renderer.end_tokens)]
    # Templates read the special tokens, and the keys of tools in their order.
    special = {name: str(token) for name, token in tokenizer.special_tokens_map.items()}
    special["images"] = repr(getattr(tokenizer, "images", ""))
    for part in (settings, special, tokenizer.chat_template, tokenizer.backend_tokenizer.to_str()):
        digest.update(json.dumps(part).encode())
    for example in examples:
        digest.update(json.dumps(asdict(example)).encode())
    return digest.hexdigest()


def _write(file: Path, rows: list[TokenRow], problems: Problems) -> None:
    """Write the rows to the cache. Write errors are ignored."""
    streams = [stream for row in rows for stream in row.streams]
    heads = [
        [row.origin, row.domain, row.margin, row.chosen, row.prompt_digest, row.weight, len(row.streams)]
        for row in rows
    ]
    arrays: dict[str, Any] = {
        "ids": np.concatenate([s.ids for s in streams]) if streams else np.zeros(0, dtype=np.int64),
        "trained": np.concatenate([s.trained for s in streams]) if streams else np.zeros(0, dtype=bool),
        "lengths": np.array([len(s.ids) for s in streams], dtype=np.int64),
        "heads": np.frombuffer(json.dumps([heads, problems.state()]).encode(), dtype=np.uint8),
    }
    with suppress(RunError), atomic_file(file) as opened:
        np.savez(opened, **arrays)


def _read(file: Path) -> tuple[list[TokenRow], Problems] | None:
    """Return the contents of a cache file; None if it is missing, damaged or in another format."""
    try:
        with np.load(file) as stored:
            ids, trained, lengths = stored["ids"], stored["trained"], stored["lengths"]
            heads, state = json.loads(stored["heads"].tobytes())
        if (ids.dtype, trained.dtype) != (np.int64, bool) or not len(ids) == len(trained) == lengths.sum():
            return None
        ends = np.cumsum(lengths)[:-1]
        streams = [TokenStream(*pieces) for pieces in zip(np.split(ids, ends), np.split(trained, ends), strict=True)]
        rows, start = [], 0
        for *head, count in heads:
            origin, *rest = head
            rows.append(TokenRow(streams[start : start + count], origin, *rest))
            start += count
        problems = Problems()
        problems.include(state)
        return rows, problems
    except Exception:  # damaged files raise zip, npy and JSON errors
        return None
