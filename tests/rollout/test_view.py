import io
from pathlib import Path

import numpy as np
import pytest
from rich.console import Console

from posttrain.cli.runs import episodes
from posttrain.episode import Advantages, StopReason
from posttrain.rollout.store import write_episodes
from posttrain.runs.directory import RunDirectory
from posttrain.terminal import printable
from posttrain.view.terminal import view_episode
from tests.rollout.episodes import played


def shown(*arguments: object, **options: object) -> str:
    console = Console(width=160, record=True, file=io.StringIO())
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
    assert "advantage" not in shown(episode, None)


@pytest.mark.parametrize(
    ("reason", "words"),
    [
        (StopReason.TURN_BUDGET, "truncated at rollout.tokens_per_turn"),
        (StopReason.EPISODE_BUDGET, "truncated at rollout.tokens_per_episode"),
    ],
)
def test_an_answer_that_reached_a_limit_on_tokens_is_truncated(reason: StopReason, words: str) -> None:
    episode = played(0)
    episode.turns[0].stop_reason = reason
    assert f"3 tokens · {words}" in shown(episode, None)


def test_answers_missing_in_the_conversation_are_shown_from_the_turns() -> None:
    episode = played(0, (1.0, 0.0), messages=[{"role": "user", "content": "only this"}])
    text = shown(episode, None)
    assert "answer 0" in text
    assert "answer 1" in text


def test_tokens_are_texts_or_ids() -> None:
    episode = played(0)
    assert "2 3 4" in shown(episode, credit([0, 0, 1, -1, 0]), None, True)
    lines = shown(
        episode, None, lambda ids: "".join(f"<{token}>" + "\n" * (token == 3) for token in ids), True
    ).splitlines()
    assert [line.strip() for line in lines if "<" in line] == ["<2><3>\\n", "<4>"]


def test_sampled_control_characters_cannot_drive_the_terminal() -> None:
    assert printable("a\x1b[2Jb\nc\r\x07é") == "a\\x1b[2Jb\nc\\r\\x07é"
    assert "[red]" in shown(played(0, messages=[{"role": "user", "content": "[red]x"}]), None)


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    (tmp_path / "recipe.yaml").write_text("{}")
    (tmp_path / "environment.json").write_text('{"posttrain_run": 1}')
    made = [played(seed, group=seed, index=index) for seed in range(3) for index in range(2)]
    advantages = Advantages([credit([0, 0, 1, 1, 1]) for _ in made])
    write_episodes(tmp_path / "episodes", 4, "train", made, advantages)
    write_episodes(tmp_path / "episodes", 4, "evaluation", made[:1], None)
    return RunDirectory(tmp_path)


def test_the_command_chooses_episodes(run: RunDirectory, capsys: pytest.CaptureFixture[str]) -> None:
    episodes(run.path, step=4, group=1)
    out = capsys.readouterr().out
    assert out.count("group 1 episode") == 2
    assert "group 0" not in out
    episodes(run.path, step=4, group=1, episode=1)
    assert capsys.readouterr().out.count("group 1 episode 1") == 1
    episodes(run.path, step=4, limit=2)
    assert "and 4 more; show them with --limit 6" in capsys.readouterr().out
    episodes(run.path, step=4, split="evaluation")
    assert "advantage" not in capsys.readouterr().out


def test_ids_are_shown_when_the_tokenizer_cannot_be_loaded(
    run: RunDirectory, capsys: pytest.CaptureFixture[str]
) -> None:
    episodes(run.path, step=4, group=0, episode=0, tokens=True)
    captured = capsys.readouterr()
    assert "2 3 4" in captured.out
    assert "the tokenizer cannot be loaded" in captured.err
