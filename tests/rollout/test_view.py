"""Episodes in the terminal, turn by turn or unit by unit, and the command that shows them."""

import io
import re
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from posttrain.cli.runs import episodes
from posttrain.credit.units.mixing import UnitAdvantages, UnitRewards
from posttrain.credit.units.spans import Spans
from posttrain.episode import Advantages, Episode, StopReason, Stream, Turn
from posttrain.recipe.units import LeaveOneOutCredit
from posttrain.rollout.store import write_episodes
from posttrain.terminal import printable
from posttrain.view.terminal import view_episode
from tests.rollout.episodes import played

END = 256


def shown(*arguments: object, width: int = 160, **options: object) -> str:
    console = Console(width=width, record=True, file=io.StringIO())
    console.print(view_episode(*arguments, **options))  # type: ignore[arg-type]
    return console.export_text()


def credit(values: list[float]) -> list[np.ndarray]:
    return [np.array(values, np.float32)]


def test_a_conversation_has_reward_stop_reason_and_credit_under_each_answer() -> None:
    episode = played(5, (0.5, -1.0), group=3, index=2, rejected="no <answer> tag", success=False)
    text = shown(episode, credit([0, 0, 1, 1, 1, 0, 0, -1, 0, 0.5]))
    assert "group 3 episode 2 · seed 5" in text
    assert "return -0.500" in text
    order = [text.index(part) for part in ("question 0", "answer 0", "turn 0", "question 1", "answer 1", "turn 1")]
    assert order == sorted(order)
    assert "turn 0 · reward +0.500 · 3 tokens · end_token · advantage +1.000 · rejected: no <answer> tag" in text
    assert "turn 1 · reward -1.000 · 3 tokens · end_token · advantage -0.167 (-1.000 to +0.500)" in text
    # Answers missing in the conversation are shown from the turns.
    episode = played(0, (1.0, 0.0), messages=[{"role": "user", "content": "only [red]this"}])
    for turn, reason in zip(episode.turns, (StopReason.TURN_BUDGET, StopReason.EPISODE_BUDGET), strict=True):
        turn.stop_reason = reason
    text = shown(episode, None)
    for part in (
        "answer 0",
        "answer 1",
        "[red]this",
        "rollout.tokens_per_turn",
        "3 tokens · truncated at rollout.tokens_per_ep",
    ):
        assert part in text
    assert "advantage" not in text


def test_tokens_are_texts_or_ids_and_control_characters_cannot_drive_the_terminal() -> None:
    episode = played(0)
    assert "2 3 4" in shown(episode, credit([0, 0, 1, -1, 0]), None, True)
    text = shown(episode, None, lambda ids: "".join(f"<{token}>" + "\n" * (token == 3) for token in ids), True)
    assert [line.strip() for line in text.splitlines() if "<" in line] == ["<2><3>\\n", "<4>"]
    assert printable("a\x1b[2Jb\nc\r\x07é") == "a\\x1b[2Jb\nc\\r\\x07é"


# -- units -------------------------------------------------------------------------------------------------------------


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


def in_units(episode: Episode, units: UnitRewards | UnitAdvantages, width: int = 100, **options: object) -> list[str]:
    return shown(episode, None, decode, width=width, units=units, **options).splitlines()


def row(lines: list[str], text: str) -> list[str]:
    """The columns of the one line that has this text."""
    (line,) = [line for line in lines if text in line]
    return line.split()


def test_each_unit_has_its_credit_its_tokens_and_its_text() -> None:
    first, second, third = "Well.\n", "1. Say café.\n", "2. Go on."
    cuts = np.cumsum([0, len(first), len(second.encode()), len(third) + 1])
    units = UnitRewards(Spans(cuts, np.array([False, True, True])), np.array([0.1, -0.4, 0.8]), 0.7, 0.25)
    for width in (80, 120):
        lines = in_units(said(first + second + third), units, width, recipe=None)
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
    text = "\n".join(in_units(said("abc"), units, recipe=LeaveOneOutCredit(type="loo", beta=0.75)))
    assert "loo, an advantage · 0.75 × units + 0.25 × outcome" in text
    assert "– marks" not in text

    units = UnitRewards(Spans.from_cuts(4, np.zeros(0), is_unit=False), np.array([1.0]), 1.0, 0.0)
    assert "no units found" in "\n".join(in_units(said("abc"), units))


@pytest.mark.parametrize("ended", [True, False])
def test_a_character_divided_between_units_is_shown_whole_with_the_last_of_them(ended: bool) -> None:
    answer = "aéz"
    tokens = len(answer.encode()) + ended
    units = UnitRewards(Spans.from_cuts(tokens, np.arange(tokens)), np.linspace(-1, 1, tokens), 0.0, 0.0)
    lines = in_units(said(answer, ended=ended), units)
    texts = [line.split()[-1] for line in lines if re.match(r" *\d+ +[+-]\d", line)]
    assert texts == ["a", "…", "é", "z", "<end>"][:tokens]


def test_white_space_and_control_characters_are_written_out() -> None:
    units = UnitRewards(Spans.from_cuts(4, np.arange(4)), np.zeros(4), 0.0, 0.0)
    text = "\n".join(in_units(said("\n\x1bx"), units))
    assert "'\\n'" in text
    assert "\\x1b" in text
    assert "\x1b" not in text


def test_a_unit_of_two_answers_has_its_credit_once() -> None:
    units = UnitRewards(Spans.from_cuts(8, np.array([2])), np.array([0.25, 0.5]), 0.75, 0.0)
    lines = in_units(said("abc", "def"), units)
    assert row(lines, "ab")[:2] == ["1", "+0.250"]
    assert row(lines, "c <end>")[:2] == ["2", "+0.500"]
    assert row(lines, "def <end>") == ["…", "4", "def", "<end>"]


def test_tokens_are_shown_unit_by_unit() -> None:
    units = UnitRewards(Spans.from_cuts(4, np.array([2])), np.array([0.5, -0.5]), 0.0, 0.0)
    lines = in_units(said("a\nb"), units, tokens=True)
    assert row(lines, "+0.500")[-1] == "a\\n"
    place = next(number for number, line in enumerate(lines) if "+0.500" in line)
    assert lines[place + 1].split()[-1] == "b<end>"  # the next row, with no empty line between


# -- the command -------------------------------------------------------------------------------------------------------


@pytest.fixture
def run(tmp_path: Path) -> Path:
    """Six episodes, of which the second has units."""
    (tmp_path / "recipe.yaml").write_text("{}")
    (tmp_path / "environment.json").write_text('{"posttrain_run": 1}')
    made = [played(seed, group=seed, index=index) for seed in range(3) for index in range(2)]
    advantages = Advantages([credit([0, 0, 1, 1, 1]) for _ in made])
    units = UnitRewards(Spans.from_cuts(3, np.array([1])), np.array([0.5, -0.25]), 0.25, 0.0)
    write_episodes(tmp_path / "episodes", 4, "train", made, advantages, [None, units, *[None] * 4])
    write_episodes(tmp_path / "episodes", 4, "evaluation", made[:1], None)
    return tmp_path


def test_the_command_chooses_episodes(run: Path, capsys: pytest.CaptureFixture[str]) -> None:
    episodes(run, step=4, group=1)
    out = capsys.readouterr().out
    assert out.count("group 1 episode") == 2
    assert "group 0" not in out
    episodes(run, step=4, group=1, episode=1)
    assert capsys.readouterr().out.count("group 1 episode 1") == 1
    episodes(run, step=4, limit=2)
    assert "and 4 more; show them with --limit 6" in capsys.readouterr().out
    episodes(run, step=4, split="evaluation")
    captured = capsys.readouterr()
    assert "advantage" not in captured.out
    assert captured.err == ""


def test_the_command_shows_units_where_they_are_stored_and_ids_without_a_tokenizer(
    run: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    episodes(run, step=4, group=0)
    captured = capsys.readouterr()
    assert row(captured.out.splitlines(), "-0.250")[-2:] == ["3", "4"]
    assert captured.out.count("outcome +0.250") == 1
    assert "the tokenizer cannot be loaded" in captured.err
    episodes(run, step=4, group=0, episode=0, tokens=True)
    captured = capsys.readouterr()
    assert "2 3 4" in captured.out
    assert "the tokenizer cannot be loaded" in captured.err
