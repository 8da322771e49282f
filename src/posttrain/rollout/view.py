"""Episodes rendered for the terminal."""

import sys
from collections.abc import Callable, Iterable, Iterator
from functools import lru_cache, partial
from itertools import groupby
from pathlib import Path

import numpy as np
from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.rule import Rule
from rich.table import Table
from rich.text import Text

from posttrain.credit.units.mixing import CreditedUnits, UnitAdvantages
from posttrain.credit.units.offsets import Decode, align
from posttrain.episode import Episode, Outcome, StopReason, Stream, Turn
from posttrain.errors import InputError
from posttrain.images import decoding, readable
from posttrain.recipe.model import ModelRecipe
from posttrain.recipe.units import UnitCreditRecipe
from posttrain.rollout.store import StoredStep
from posttrain.runs.directory import RunDirectory
from posttrain.runs.reader import is_file, read_bytes
from posttrain.terminal import printable

_LARGEST_TOKENIZER = 256 << 20
"""Bytes of a tokenizer.json."""


def judge_verdict(turn: Turn) -> str:
    """Score and reason of a judge as the environment stored them; empty if there are none, or if their form is unknown."""
    match turn.info.get("judge"):
        case {"score": int() | float() as score, "reason": str(reason)}:
            return f"judge {score:.2f}: {reason}"
    return ""


def color(value: float, scale: float) -> str:
    """Blue for positive and orange for negative values, grey at zero. Safe for color-blind readers."""
    strength = min(1.0, abs(value) / scale) if scale > 0 else 0.0
    target = (86, 180, 233) if value > 0 else (230, 140, 0)
    red, green, blue = (round(150 + (end - 150) * strength) for end in target)
    return f"rgb({red},{green},{blue})"


def token_text(
    stream: Stream, start: int, stop: int, advantages: np.ndarray | None, scale: float, decode: Decode | None
) -> Text:
    """The tokens from `start` to `stop`, colored by `advantages` [T]. Without `decode`, their ids.

    `scale`: the advantage that gets the full color.
    """
    text = Text()
    for position in range(start, stop):
        token = int(stream.ids[position])
        shown = f"{token} " if decode is None else printable(decode([token])).replace("\n", "\\n\n")
        # Every other token is underlined to show token boundaries.
        line = "underline " if decode is not None and (position - start) % 2 else ""
        text.append(shown, style=line + ("" if advantages is None else color(float(advantages[position]), scale)))
    if text.plain.endswith("\n"):
        text.right_crop(1)
    return text


UnitText = Callable[[int, int], Text]
"""(start, stop) -> the text of these tokens; positions in the stream of the turn."""


def view_units(episode: Episode, turn: Turn, units: CreditedUnits, text: UnitText) -> Table:
    """One row per unit of the answer of `turn`: number, credit, tokens, text.

    Colors are scaled by the episode's largest credit. The credit of a unit that starts in an earlier answer is shown with
    that answer.
    """
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, header_style="dim")
    table.add_column("unit", justify="right", style="dim", no_wrap=True)
    table.add_column("credit", justify="right", no_wrap=True)
    table.add_column("tokens", justify="right", style="dim", no_wrap=True)
    table.add_column("", overflow="fold")
    scale = float(np.abs(units.credits).max(initial=0.0))
    numbers = np.cumsum(units.spans.is_unit)
    for unit, start, stop, continued in units_in_turn(episode, turn, units):
        credit, is_unit = float(units.credits[unit]), bool(units.spans.is_unit[unit])
        content = text(start, stop)
        if not is_unit:
            content.stylize_before("dim")
        table.add_row(
            "…" if continued else str(numbers[unit]) if is_unit else "–",
            "" if continued else Text(f"{credit:+z.3f}", style=color(credit, scale)),
            str(stop - start),
            content,
        )
    return table


def unit_summary(units: CreditedUnits, recipe: UnitCreditRecipe | None) -> Text:
    """How the credits of an episode sum to its outcome, and how they are used. `recipe` is None if unknown."""
    parts = [(units.empty_value, "empty answer"), (float(units.credits.sum()), "units"), (units.residual, "residual")]
    scale = max(abs(units.outcome), float(np.abs(units.credits).max(initial=0.0)))
    line = Text("outcome ", style="dim")
    line.append(f"{units.outcome:+z.3f}", style=f"not dim {color(units.outcome, scale)}")
    line.append(" = " + "  ".join(f"{value:+z.3f} {name}" for value, name in parts) + "\n")
    channel = "an advantage" if isinstance(units, UnitAdvantages) else "a reward"
    if recipe is None:
        line.append(f"unit credit is {channel}")
    else:
        line.append(f"{recipe.type}, {channel} · {recipe.beta:g} × units + {1 - recipe.beta:g} × outcome")
    if not units.has_units:
        line.append("\nno units found; all credit is that of the outcome", style="not dim yellow")
    elif not units.spans.is_unit.all():
        line.append("\n– marks text outside the segmenter's units")
    return line


def unit_text(episode: Episode, turn: Turn, decode: Decode | None) -> UnitText:
    """A function that returns the text of a unit by exact offsets, so no character at its ends is lost or split.
    Without `decode`, it returns token ids."""
    ids = episode.streams[turn.stream].ids
    if decode is None:
        return lambda start, stop: Text(" ".join(map(str, ids[start:stop].tolist())))
    body = turn.stop - (turn.stop_reason is StopReason.END_TOKEN)
    aligned = align(ids[turn.start : body].tolist(), decode)
    ending = printable(decode(ids[body : turn.stop].tolist()))

    def text_between(start: int, stop: int) -> Text:
        exact = aligned.slice(start - turn.start, min(stop, body) - turn.start) if start < body else ""
        shown = Text(printable(exact).strip())
        if exact and not shown:
            shown.append(repr(exact), style="dim")
        if stop > body:
            shown.append(f" {ending}" if shown else ending, style="dim")
        return shown or Text("…", style="dim")  # the first bytes of a character that is completed in the next unit

    return text_between


def units_in_turn(episode: Episode, turn: Turn, units: CreditedUnits) -> Iterator[tuple[int, int, int, bool]]:
    """(unit, start, stop, continued) of each unit of `turn`. Positions are in the turn's stream; `continued` units
    start in an earlier answer."""
    streams = episode.streams
    before = sum(int(stream.sampled.sum()) for stream in streams[: turn.stream])
    first = before + int(streams[turn.stream].sampled[: turn.start].sum())
    for unit, (start, stop) in enumerate(units.spans):
        low, high = max(start, first), min(stop, first + turn.stop - turn.start)
        if low < high:
            yield unit, turn.start + low - first, turn.start + high - first, start < first


ROLE_STYLES = {"system": "yellow", "user": "cyan", "assistant": "green"}


def view_steps(steps: Iterable[StoredStep]) -> Table:
    """One row per file of the store."""
    table = Table()
    for heading in ("step", "split", "episodes", "successes", "failed", "mean reward"):
        table.add_column(heading, justify="left" if heading == "split" else "right")
    for step in steps:
        mean_return = "–" if step.mean_return is None else f"{step.mean_return:.3f}"
        counts = (str(step.episodes), str(step.successes), str(step.failed))
        table.add_row(str(step.step), step.split, *counts, mean_return)
    return table


def view_episode(
    episode: Episode,
    advantages: list[np.ndarray] | None,
    decode: Decode | None = None,
    tokens: bool = False,
    units: CreditedUnits | None = None,
    recipe: UnitCreditRecipe | None = None,
) -> RenderableType:
    """The conversation of one episode with reward, stop reason and advantages under each answer.

    `advantages`: per stream [T] float32, or None if the step has none. With `units`, each answer is shown unit by unit
    with its credit; `recipe` is the recipe of that credit, or None if unknown. With `tokens`, answers are shown as
    sampled tokens colored by advantage. `decode` turns token ids into text; without it, ids are shown.
    """
    scale = max((float(np.abs(a).max()) for a in advantages if len(a)), default=0.0) if advantages else 0.0

    def token_view(turn: Turn) -> UnitText:
        values = None if advantages is None else advantages[turn.stream]
        return lambda start, stop: token_text(episode.streams[turn.stream], start, stop, values, scale, decode)

    def answer(content: str, turn: Turn) -> RenderableType:
        if units is not None:
            text = token_view(turn) if tokens else unit_text(episode, turn, decode)
            return view_units(episode, turn, units, text)
        return token_view(turn)(turn.start, turn.stop) if tokens else Text(printable(content))

    parts: list[RenderableType] = [Rule(_title(episode), align="left", style="bold")]
    turns = iter(enumerate(episode.turns))
    shown = [
        (message["role"], message.get("content") or "", next(turns, None) if message["role"] == "assistant" else None)
        for message in episode.messages
    ]
    shown += [("assistant", turn.answer, (number, turn)) for number, turn in turns]
    for role, content, numbered in shown:
        parts.append(Text(printable(role), style=f"bold {ROLE_STYLES.get(role, 'white')}"))
        if numbered is None:
            parts.append(_inset(Text(printable(readable(content)))))
        else:
            parts += [_inset(answer(content, numbered[1])), _turn_line(episode, *numbered, advantages)]
    if units is not None:
        parts.append(_inset(unit_summary(units, recipe)))
    if episode.failure is not None:
        parts.append(Text(f"failed: {printable(episode.failure)}", style="bold red"))
    return Group(*parts, Text())


def token_decoder(run: RunDirectory) -> Decode | None:
    """The decoder of the run's tokenizer; None, with a message on stderr, if the tokenizer cannot be loaded.

    The tokenizer saved in the run is tried first, because the initial model may no longer exist. Code that belongs to a
    model is never executed.
    """
    for directory in (run.path / "model", *sorted(run.checkpoints.glob("step_*/policy"))[::-1]):
        if (decode := _decoder_in(directory, run.path)) is not None:
            return decode
    try:
        model = run.load_recipe().model.model_copy(update={"trust_remote_code": False})
        return _decoder_in(Path(model.path)) or _loaded_decoder(model.model_dump_json())
    except Exception as error:
        print(printable(f"showing token ids because the tokenizer cannot be loaded: {error}"), file=sys.stderr)
        return None


def _decoder_in(directory: Path, run: Path | None = None) -> Decode | None:
    """The decoder of the `tokenizer.json` in a directory, of a run or elsewhere; None if there is none, or it is damaged."""
    file = directory / "tokenizer.json" if run else (directory / "tokenizer.json").resolve()
    # The time of the last change of the inode: another file may have the same time of modification.
    return _saved_decoder(file, run, file.stat().st_ctime_ns) if is_file(file) else None


@lru_cache(maxsize=4)
def _loaded_decoder(model: str) -> Decode:
    """The decoder of the model of a recipe, given as JSON. InputError if the model is not on this machine."""
    from posttrain.models.files import on_disk

    recipe = ModelRecipe.model_validate_json(model)
    if not on_disk(recipe.path):  # looking at a run downloads nothing that it names, and imports no torch to say so
        raise InputError(f"{recipe.path} is not on this machine")
    from posttrain.models.load import load_tokenizer

    tokenizer = load_tokenizer(recipe)
    return decoding(partial(tokenizer.decode, clean_up_tokenization_spaces=False))


@lru_cache(maxsize=4)
def _saved_decoder(file: Path, run: Path | None, changed: int) -> Decode | None:
    """The decoder of a `tokenizer.json` as it was at time `changed`, without torch and transformers; None if it is damaged."""
    from tokenizers import Tokenizer

    try:
        tokenizer = Tokenizer.from_buffer(read_bytes(file, _LARGEST_TOKENIZER, run))
        return decoding(partial(tokenizer.decode, skip_special_tokens=False))
    except Exception:  # a damaged tokenizer counts as missing, for any error
        return None


def unit_credit_recipe(run: RunDirectory) -> UnitCreditRecipe | None:
    """The `unit_credit` section of the run's recipe; None if it has none or cannot be read."""
    try:
        return getattr(run.load_recipe(), "unit_credit", None)
    except InputError:
        return None


def _title(episode: Episode) -> Text:
    ending = "success" if episode.success else episode.outcome.value
    style = "green" if episode.success else "red" if episode.outcome is Outcome.FAILED else "yellow"
    tokens = sum(turn.stop - turn.start for turn in episode.turns)
    total = f" · {tokens} tokens" if len(episode.turns) > 1 else ""  # a single turn shows its own count
    versions = episode.versions
    mixed = len(versions) and versions.min() != versions.max()
    version = f"versions {versions.min()} to {versions.max()}" if mixed else f"version {episode.version}"
    return Text.assemble(
        f"group {episode.group} episode {episode.index} · seed {episode.seed} · ",
        (ending, style),
        f" · return {episode.total_reward:+.3f}{total} · {version}",
    )


def _inset(content: RenderableType) -> Padding:
    return Padding(content, (0, 0, 0, 2))


def _turn_line(episode: Episode, number: int, turn: Turn, advantages: list[np.ndarray] | None) -> Padding:
    line = Text(
        f"turn {number} · reward {turn.reward:+.3f} · {turn.stop - turn.start} tokens · {turn.stop_reason.words}", "dim"
    )
    if len(set(episode.versions.tolist())) > 1:
        versions = groupby(episode.streams[turn.stream].versions[turn.start : turn.stop].tolist())
        line.append(" · " + ", ".join(f"{len(list(run))} by version {version}" for version, run in versions))
    if advantages is not None:
        values = advantages[turn.stream][turn.start : turn.stop]
        if len(values):
            low, high, mean = float(values.min()), float(values.max()), float(values.mean())
            line.append(f" · advantage {mean:+.3f}" + ("" if low == high else f" ({low:+.3f}…{high:+.3f})"))
    if turn.info.get("rejected"):
        line.append(f" · rejected: {printable(str(turn.info['rejected']))}", style="not dim red")
    if verdict := judge_verdict(turn):
        line.append(f" · {printable(verdict)}", style="not dim")
    return _inset(line)
