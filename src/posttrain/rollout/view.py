"""Episodes as text that a person can read in a terminal."""

import sys
from collections.abc import Callable, Iterable

import numpy as np
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from posttrain.rollout.store import StoredStep
from posttrain.rollout.streams import Episode, Outcome, Turn
from posttrain.runs.directory import RunDirectory

ROLE_STYLES = {"system": "yellow", "user": "cyan", "assistant": "green"}


def view_steps(steps: Iterable[StoredStep]) -> Table:
    """The files of a store, one row each."""
    table = Table()
    for heading in ("step", "split", "episodes", "successes", "failed", "mean reward"):
        table.add_column(heading, justify="left" if heading == "split" else "right")
    for step in steps:
        paid = "–" if step.mean_return is None else f"{step.mean_return:.3f}"
        counts = (str(step.episodes), str(step.successes), str(step.failed))
        table.add_row(str(step.step), step.split, *counts, paid)
    return table


def view_episode(
    episode: Episode,
    advantages: list[np.ndarray] | None,
    decode: Callable[[int], str] | None = None,
    tokens: bool = False,
) -> RenderableType:
    """The conversation of one episode with reward, stop reason and credit under each answer.

    `advantages`: per stream [T] float32, None where the step has no credit. With `tokens` each answer is shown as its
    sampled tokens, coloured by advantage; `decode` turns a token id into text, without it ids are shown.
    """
    parts: list[RenderableType] = [Rule(_title(episode), align="left", style="bold")]
    scale = max((float(np.abs(a).max()) for a in advantages if len(a)), default=0.0) if advantages else 0.0
    waiting = list(enumerate(episode.turns))
    for message in episode.messages:
        is_answer = message["role"] == "assistant"
        number, turn = waiting.pop(0) if is_answer and waiting else (-1, None)
        parts.append(Text(message["role"], style=f"bold {ROLE_STYLES.get(message['role'], 'white')}"))
        parts.append(_body(message["content"], episode, turn, advantages, scale, decode, tokens))
        if turn is not None:
            parts.append(_turn_line(number, turn, advantages))
    for number, turn in waiting:
        parts.append(Text("assistant", style=f"bold {ROLE_STYLES['assistant']}"))
        parts.append(_body(turn.answer, episode, turn, advantages, scale, decode, tokens))
        parts.append(_turn_line(number, turn, advantages))
    if episode.failure is not None:
        parts.append(Text(f"failed: {visible(episode.failure)}", style="bold red"))
    return Group(*parts, Text())


def token_decoder(run: RunDirectory) -> Callable[[int], str] | None:
    """What turns a token id of this run into text; None, with a word on stderr, if its tokenizer cannot be loaded."""
    from posttrain.models.load import load_tokenizer

    try:
        tokenizer = load_tokenizer(run.load_recipe().model)
    except Exception as error:
        print(f"the tokenizer cannot be loaded, so token ids are shown: {error}", file=sys.stderr)
        return None
    return lambda token: tokenizer.decode([token])


def visible(text: str) -> str:
    """`text` with control characters written out, so that a sampled escape sequence cannot drive the terminal."""
    return "".join(c if c in "\n\t" or c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def _title(episode: Episode) -> Text:
    ending = "success" if episode.success else episode.outcome.value
    style = "green" if episode.success else "red" if episode.outcome is Outcome.FAILED else "yellow"
    return Text.assemble(
        f"group {episode.group} episode {episode.index} · seed {episode.seed} · version {episode.version} · ",
        (ending, style),
        f" · return {episode.total_reward:+.3f} · {episode.sampled_tokens} tokens",
    )


def _body(
    content: str,
    episode: Episode,
    turn: Turn | None,
    advantages: list[np.ndarray] | None,
    scale: float,
    decode: Callable[[int], str] | None,
    tokens: bool,
) -> Padding:
    if tokens and turn is not None:
        credit = None if advantages is None else advantages[turn.stream]
        return Padding(_tokens(episode, turn, credit, scale, decode), (0, 0, 0, 2))
    return Padding(Text(visible(content)), (0, 0, 0, 2))


def _tokens(
    episode: Episode, turn: Turn, credit: np.ndarray | None, scale: float, decode: Callable[[int], str] | None
) -> Text:
    text = Text()
    for position in range(turn.start, turn.stop):
        token = int(episode.streams[turn.stream].ids[position])
        shown = f"{token} " if decode is None else visible(decode(token)).replace("\n", "\\n\n")
        # Neighbours differ in underlining, so that the boundaries of tokens can be seen.
        line = "underline " if decode is not None and (position - turn.start) % 2 else ""
        text.append(shown, style=line + ("" if credit is None else _colour(float(credit[position]), scale)))
    return text


def _colour(advantage: float, scale: float) -> str:
    """Blue for positive, orange for negative, fading to grey at zero: told apart with any colour vision."""
    strength = min(1.0, abs(advantage) / scale) if scale > 0 else 0.0
    target = (86, 180, 233) if advantage > 0 else (230, 140, 0)
    red, green, blue = (round(150 + (end - 150) * strength) for end in target)
    return f"rgb({red},{green},{blue})"


def _turn_line(number: int, turn: Turn, advantages: list[np.ndarray] | None) -> Padding:
    line = Text(
        f"turn {number} · reward {turn.reward:+.3f} · {turn.stop - turn.start} tokens · {turn.stop_reason.value}", "dim"
    )
    if advantages is not None:
        credit = advantages[turn.stream][turn.start : turn.stop]
        if len(credit):
            low, high, middle = float(credit.min()), float(credit.max()), float(credit.mean())
            line.append(f" · credit {middle:+.3f}" + ("" if low == high else f" ({low:+.3f} to {high:+.3f})"))
    if turn.info.get("rejected"):
        line.append(f" · rejected: {visible(str(turn.info['rejected']))}", style="not dim red")
    return Padding(line, (0, 0, 0, 2))
