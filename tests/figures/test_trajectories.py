"""Pictures of trajectories: the states are those that the environment was in, in figures, files and reports."""

import re
from dataclasses import replace

import numpy as np
import pytest
from matplotlib.image import imread

from posttrain.environments import frozen_lake, sokoban
from posttrain.environments.game import drawing
from posttrain.environments.make import make_env
from posttrain.episode import Episode, Outcome, StopReason, Stream, Turn
from posttrain.figures.trajectories import draw_run, maker_of, row_of
from posttrain.recipe.compose import load_recipe
from posttrain.rollout.store import write_episodes
from posttrain.runs.directory import RunDirectory
from posttrain.runs.metrics import MetricsLog
from posttrain.view.report import write_html


def episode_of(make, seed, answers=None):
    """The expert's episode of a seed, or one with these answers, without tokens."""
    environment = make()
    environment.reset(seed)
    turns, step = [], None
    for _ in range(environment.recipe.max_turns if answers is None else len(answers)):
        answer = environment.expert() if answers is None else answers[len(turns)]
        step = environment.step(answer)
        turns.append(Turn(0, len(turns), len(turns) + 1, step.reward, StopReason.END_TOKEN, answer, dict(step.info)))
        if step.terminated or step.truncated:
            break
    zeros, ids = np.zeros(len(turns), np.float32), np.arange(len(turns))
    stream = Stream(ids, ids >= 0, zeros, zeros, ids.astype(np.int32), zeros.astype(np.int32))
    outcome = Outcome.TERMINATED if step.terminated else Outcome.TRUNCATED
    return Episode(seed, 0, 0, 0, [stream], turns, outcome, None, [])


@pytest.mark.parametrize("name", ["sokoban", "frozen_lake"])
@pytest.mark.parametrize("observation", ["grid", "coordinates"])
def test_the_frames_are_the_states_of_the_episode(name, observation):
    make, drawn = make_env(name, observation=observation), make_env(name)
    symbols = {"sokoban": sokoban, "frozen_lake": frozen_lake}[name].SYMBOLS
    for seed in range(3):
        episode = episode_of(make, seed)
        row = row_of(episode, make, "first")
        environment = drawn()
        shown = environment.reset(seed).messages[-1]["content"]
        assert drawing(row.frames[0].cells, symbols) == shown
        assert len(row.frames) == len(episode.turns) + 1
        for turn, frame in zip(episode.turns, row.frames[1:], strict=True):
            step = environment.step(turn.answer)
            assert step.messages[-1]["content"].endswith(drawing(frame.cells, symbols))
            assert f"{turn.info['actions'][0]} {step.reward:+.1f}" in frame.caption
        assert f"seed {seed}" in row.title


def test_a_rejected_answer_leaves_the_state_and_only_grid_games_are_drawn():
    make = make_env("sokoban")
    row = row_of(episode_of(make, 1, ["no answer"] * 5), make, "rejected")
    assert all(frame.cells == row.frames[0].cells for frame in row.frames)
    assert "rejected" in row.frames[1].caption
    assert maker_of(None) is None
    assert maker_of(make_env("bandit").recipe) is None
    make = make_env("frozen_lake", slippery=False)
    turns = episode_of(make, 3).turns
    too_long = replace(episode_of(make, 3), turns=[*turns, *turns])
    assert row_of(too_long, make, "of another version of the environment") is None


@pytest.mark.figures
def test_the_run_has_one_picture_with_a_row_for_each_step(tmp_path):
    recipe = load_recipe([], ["environment.type=sokoban", f"runs={tmp_path}", "name=rooms"], "rl")
    run = RunDirectory.create(recipe)
    make = make_env("sokoban")
    for step, answers in ((0, ["<answer>Up</answer>"] * 5), (10, None)):
        write_episodes(run.episodes, step, "evaluation", [episode_of(make, 20_001, answers)])
    with MetricsLog(run, []) as log:
        log.write(0, "evaluation", {"success": 0.0, "return": -0.5, "n": 1})
    (file,) = draw_run(run, run.load_recipe().environment)
    assert file == run.plots / "trajectories.png"
    pixels = imread(file)
    height, width = pixels.shape[:2]
    assert width / 150 == pytest.approx(6 * 1.22 + 0.12, abs=0.02)
    assert height / 150 == pytest.approx(0.35 + 2 * 1.62, abs=0.02)
    player = np.abs(pixels[:, :, :3] - np.array([0xE6, 0x7E, 0x22]) / 255).max(-1) < 0.02
    assert player.any(axis=1)[: height // 2].any()
    assert player.any(axis=1)[height // 2 :].any()
    # The report has a picture with the episode.
    page = write_html([run.path])[0].read_text()
    assert len(re.findall(r'<img src="data:image/svg\+xml;base64,[^"]+" alt="States of the episode">', page)) == 1
