import io
import re
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from posttrain.cli.runs import episodes
from posttrain.credit.units.mixing import CreditedUnits, UnitAdvantages, UnitRewards
from posttrain.credit.units.spans import Spans
from posttrain.episode import Advantages, Episode, StopReason, Stream, Turn
from posttrain.recipe.units import LeaveOneOutCredit
from posttrain.rollout.store import write_episodes
from posttrain.view.terminal import view_episode
from tests.rollout.episodes import played

END = 256


def decode(ids: list[int]) -> str:
    """Bytes as tokens, and an end token."""
    text = b"".join(b"<end>" if token == END else bytes([token]) for token in ids)
    return text.decode("utf-8", "replace")


def said(*answers: str, ended: bool = True) -> Episode:
    """An episode whose answers are these bytes, each after a prompt of two tokens."""
    ids, turns = [], []
    for answer in answers:
        own = [*answer.encode(), *([END] if ended else [])]
        start = len(ids) + 2
        reason = StopReason.END_TOKEN if ended else StopReason.TURN_BUDGET
        turns.append(Turn(0, start, start + len(own), 1.0, reason, answer))
        ids += [0, 0, *own]
    turn = np.full(len(ids), -1, np.int32)
    for number, one in enumerate(turns):
        turn[one.start : one.stop] = number
    zeros = np.zeros(len(ids), np.float32)
    episode = played(0, messages=[{"role": "assistant", "content": answer} for answer in answers])
    episode.streams, episode.turns = [Stream(np.array(ids), turn >= 0, zeros, zeros, turn, np.minimum(turn, 0))], turns
    return episode


def shown(episode: Episode, units: CreditedUnits, width: int = 100, **options: object) -> list[str]:
    console = Console(width=width, file=io.StringIO(), record=True)
    console.print(view_episode(episode, None, decode, units=units, **options))  # type: ignore[arg-type]
    return console.export_text().splitlines()


def row(lines: list[str], text: str) -> list[str]:
    """The columns of the one line that has this text."""
    (line,) = [line for line in lines if text in line]
    return line.split()


def test_each_unit_has_its_credit_its_tokens_and_its_text() -> None:
    first, second, third = "Well.\n", "1. Say café.\n", "2. Go on."
    cuts = np.cumsum([0, len(first), len(second.encode()), len(third) + 1])
    units = UnitRewards(Spans(cuts, np.array([False, True, True])), np.array([0.1, -0.4, 0.8]), 0.7, 0.25)
    for width in (80, 120):
        lines = shown(said(first + second + third), units, width, recipe=None)
        assert max(map(len, lines)) <= width
        assert row(lines, "Well.") == ["–", "+0.100", "6", "Well."]
        assert row(lines, "Say café") == ["1", "-0.400", "14", "1.", "Say", "café."]
        assert row(lines, "Go on") == ["2", "+0.800", "10", "2.", "Go", "on.", "<end>"]
        text = "\n".join(lines)
        assert "outcome +0.700 = +0.250 empty answer  +0.500 units  -0.050 residual" in text
        assert "unit credit is a reward" in text
        assert "– marks text" in text


def test_the_channel_the_mixing_weight_and_an_answer_without_units_are_shown():
    units = UnitAdvantages(Spans.from_cuts(4, np.array([2])), np.array([0.5, 0.5]), 1.0, 0.0)
    text = "\n".join(shown(said("abc"), units, recipe=LeaveOneOutCredit(type="loo", beta=0.75)))
    assert "loo, an advantage · 0.75 × units + 0.25 × outcome" in text
    assert "– marks" not in text

    units = UnitRewards(Spans.from_cuts(4, np.zeros(0), is_unit=False), np.array([1.0]), 1.0, 0.0)
    assert "no units found" in "\n".join(shown(said("abc"), units))


@pytest.mark.parametrize("ended", [True, False])
def test_a_character_divided_between_units_is_shown_whole_with_the_last_of_them(ended: bool) -> None:
    answer = "aéz"
    tokens = len(answer.encode()) + ended
    units = UnitRewards(Spans.from_cuts(tokens, np.arange(tokens)), np.linspace(-1, 1, tokens), 0.0, 0.0)
    lines = shown(said(answer, ended=ended), units)
    texts = [line.split()[-1] for line in lines if re.match(r" *\d+ +[+-]\d", line)]
    assert texts == ["a", "…", "é", "z", "<end>"][:tokens]


def test_white_space_and_control_characters_are_written_out() -> None:
    units = UnitRewards(Spans.from_cuts(4, np.arange(4)), np.zeros(4), 0.0, 0.0)
    text = "\n".join(shown(said("\n\x1bx"), units))
    assert "'\\n'" in text
    assert "\\x1b" in text
    assert "\x1b" not in text


def test_a_unit_of_two_answers_has_its_credit_once() -> None:
    units = UnitRewards(Spans.from_cuts(8, np.array([2])), np.array([0.25, 0.5]), 0.75, 0.0)
    lines = shown(said("abc", "def"), units)
    assert row(lines, "ab")[:2] == ["1", "+0.250"]
    assert row(lines, "c <end>")[:2] == ["2", "+0.500"]
    assert row(lines, "def <end>") == ["…", "4", "def", "<end>"]


def test_tokens_are_shown_unit_by_unit() -> None:
    units = UnitRewards(Spans.from_cuts(4, np.array([2])), np.array([0.5, -0.5]), 0.0, 0.0)
    lines = shown(said("a\nb"), units, tokens=True)
    assert row(lines, "+0.500")[-1] == "a\\n"
    place = next(number for number, line in enumerate(lines) if "+0.500" in line)
    assert lines[place + 1].split()[-1] == "b<end>"  # the next row, with no empty line between


def test_the_command_shows_units_where_they_are_stored(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "recipe.yaml").write_text("{}")
    (tmp_path / "environment.json").write_text('{"posttrain_run": 1}')
    units = UnitRewards(Spans.from_cuts(3, np.array([1])), np.array([0.5, -0.25]), 0.25, 0.0)
    advantages = Advantages([[np.zeros(5, np.float32)], [np.zeros(5, np.float32)]])
    write_episodes(tmp_path / "episodes", 1, "train", [played(), played(index=1)], advantages, [units, None])
    episodes(tmp_path, step=1)
    captured = capsys.readouterr()
    assert row(captured.out.splitlines(), "-0.250")[-2:] == ["3", "4"]  # the ids: there is no tokenizer
    assert captured.out.count("outcome +0.250") == 1
    assert "the tokenizer cannot be loaded" in captured.err
    episodes(tmp_path, step=1, episode=1)
    captured = capsys.readouterr()
    assert "answer 0" in captured.out
    assert captured.err == ""
