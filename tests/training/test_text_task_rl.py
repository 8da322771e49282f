"""RL on prompts of a file, scored by a function or by a reward model; prompts that do not fit; a killed run."""

import json
from pathlib import Path

import numpy as np
import pytest

from posttrain.errors import InputError, RunError
from posttrain.rollout.store import episodes_file, read_episodes
from posttrain.runs.metrics import read_metrics
from posttrain.runs.report import write_report
from tests.training import small
from tests.training.preferences import write_jsonl

REWARD = '''def letters(answer, **row):
    """Half a point for every different letter of the word that is requested."""
    return 0.5 * len(set(answer) & set(row["word"]))
'''


def values(tiny: Path, folder: Path, long: int = 0, **changes) -> dict:
    """Two steps on 20 prompts, of which the first `long` do not fit."""
    (folder / "rewards.py").write_text(REWARD)
    rows = [{"prompt": f"Say {'very ' * 40 * (n < long)}word {n}.", "word": "Goal dragon"} for n in range(20)]
    environment = {"type": "text_task", "prompts": write_jsonl(folder / "prompts.jsonl", rows)}
    environment |= {"reward": f"{folder / 'rewards.py'}:letters", "success_reward": None}
    recipe = {"stage": "rl", "name": "text", "runs": str(folder), "model": {"path": str(tiny), "threads": 1}}
    recipe |= {"environment": environment, "steps": 2, "seeds": {"start": 0, "count": 10}}
    recipe["rollout"] = {"groups_per_step": 2, "episodes_per_group": 3}
    recipe["rollout"] |= {"tokens_per_turn": 8, "tokens_per_episode": 90}
    recipe["optimizer"] = {"learning_rate": 1e-3}
    held_out = {"seeds": {"start": 10, "count": 4}, "final_seeds": {"start": 14, "count": 6}}
    recipe["evaluation"] = held_out | {"every": 1, "sampling": {"temperature": 1.0}}
    recipe["checkpoint"] = {"every": 1, "keep_state": "always"}
    return recipe | changes


def run(recipe: dict):
    directory, _ = small.train(recipe)
    return directory, read_metrics(directory.metrics)


def test_a_reward_function_sets_the_reward_and_the_return_selects_the_best_checkpoint(tiny_model, tmp_path):
    """The numbers that it returns besides the reward are in the log and in the table."""
    given = values(tiny_model, tmp_path)
    reward = REWARD.replace("return 0.5 *", "return {'length': len(answer), 'score': 0.5 *").rstrip() + "}\n"
    (tmp_path / "rewards.py").write_text(reward)
    directory, lines = run(given)
    final = next(line for line in lines if line["kind"] == "final")
    assert final["n"] == 6
    # The range of an own function is unknown, and six returns do not show it.
    assert (final["return_low"], final["return_high"]) == (None, None)
    assert (final["score/length_low"], final["score/length_high"]) == (None, None)
    assert "success" not in final
    assert final["score/score"] == pytest.approx(final["return"])
    trained = next(line for line in lines if line["kind"] == "train")
    assert "rollout/success" not in trained
    assert trained["rollout/score/score"] == pytest.approx(trained["rollout/return"])
    policies, scores, *_ = json.loads((directory.path / "results.json").read_text())["tables"]
    assert [row[1] for row in policies["rows"]] == ["–", "–"]
    assert scores["rows"][-1][scores["headings"].index("length")].startswith(f"{final['score/length']:.3f}")
    curve = {line["step"]: line["return"] for line in lines if line["kind"] == "evaluation"}
    assert curve[final["best_step"]] == max(curve.values())
    report = directory.report.read_text()
    assert "| training rows | 10 of `prompts.jsonl` (rows 1-10) |" in report
    assert "| held-out rows of the curve | 4 of `prompts.jsonl` (rows 11-14) |" in report
    assert "| held-out rows of the table | 6 of `prompts.jsonl` (rows 15-20) |" in report
    assert "seeds |" not in report.split("## ")[0]


def own(tiny: Path, folder: Path, **changes) -> dict:
    """The recipe without any seeds: the 20 prompts are divided."""
    recipe = values(tiny, folder, **changes)
    del recipe["seeds"]
    recipe["evaluation"] = {"every": 1, "sampling": {"temperature": 1.0}}
    return recipe


def test_prompts_of_a_file_are_divided_without_any_seeds_and_a_run_keeps_its_tasks(tiny_model, tmp_path):
    recipe = own(tiny_model, tmp_path)
    directory, lines = run(recipe)
    assert [line["n"] for line in lines if line["kind"] == "evaluation"] == [2, 2, 2]
    assert next(line["n"] for line in lines if line["kind"] == "final") == 2
    played = {
        split: {
            e.seed for step in steps for e in read_episodes(episodes_file(directory.episodes, step, split)).episodes
        }
        for split, steps in (("train", (1, 2)), ("evaluation", (0, 1, 2)), ("final", (0,)))
    }
    assert [len(played[split]) for split in ("train", "evaluation", "final")] == [4, 2, 2]
    assert len(set().union(*played.values())) == 8
    report = directory.report.read_text()
    for name, split in (("held-out rows of the curve", "evaluation"), ("held-out rows of the table", "final")):
        (line,) = [line for line in report.splitlines() if line.startswith(f"| {name} |")]
        first, second = sorted(seed + 1 for seed in played[split])
        assert f"2 of `prompts.jsonl` (rows {first}{'-' if second == first + 1 else ', '}{second})" in line
    (directory.path / "results.json").unlink()
    assert "drawn from the rows of environment.prompts" in write_report(directory).read_text()
    with (tmp_path / "prompts.jsonl").open("a") as file:
        file.write(json.dumps({"prompt": "One more.", "word": "Goal"}) + "\n")
    with pytest.raises(InputError, match="the training tasks differ from those at the start of this run"):
        small.train(recipe | {"steps": 3}, resume=True)


def test_an_evaluation_in_which_every_episode_fails_stops_the_run_with_the_reason(tiny_model, tmp_path):
    recipe = own(tiny_model, tmp_path)
    (tmp_path / "rewards.py").write_text("def letters(answer, **row):\n    raise ValueError('no such answer')\n")
    with pytest.raises(RunError, match=r"^2 of 2 .* failed, the first on prompts\.jsonl row \d+: .*no such answer"):
        run(recipe)
    assert not (tmp_path / "text" / "model").exists()


def test_a_function_that_is_only_reported_needs_its_columns(tiny_model, reward_model, tmp_path):
    """For prompts without the column, it is not reported; as a reward, it stops the run."""
    recipe = own(tiny_model, tmp_path, reward={"path": str(reward_model)})
    recipe["environment"] |= {"reward": "contains", "score_weight": 0}
    directory, lines = run(recipe)
    said = small.messages(directory)
    assert any("contains is not reported" in line and "`label`" in line for line in said)
    final = next(line for line in lines if line["kind"] == "final")
    assert not {"success", "score/score", "failed"} & {key for key, value in final.items() if value}
    assert final["return"] != 0
    recipe["environment"]["score_weight"] = 1
    with pytest.raises(InputError, match=r"contains needs the column `label`, which prompts\.jsonl row \d+"):
        run(recipe | {"name": "paid"})


def test_gdpo_normalizes_the_scores_of_a_reward_function_and_needs_them(tiny_model, tmp_path):
    given = values(tiny_model, tmp_path, credit={"type": "gdpo", "weights": {"length": 1.0, "letters": 0.5}})
    reward = REWARD.replace("return 0.5 *", "return {'score': 0.0, 'length': len(answer), 'letters':").rstrip() + "}\n"
    (tmp_path / "rewards.py").write_text(reward)
    directory, lines = run(given)
    trained = [line for line in lines if line["kind"] == "train"]
    # All returns are 0, so only the scores give a gradient.
    assert all(line["rollout/return"] == 0 and line["optimizer/gradient_norm"] > 0 for line in trained)
    assert all(line["credit/zero_groups"] == 0 for line in trained)
    stored = read_episodes(episodes_file(directory.episodes, 1, "train"))
    pairs = zip(stored.episodes, stored.advantages.values, strict=True)
    credit = [streams[0][episode.streams[0].sampled][0] for episode, streams in pairs]
    assert np.mean(credit) == pytest.approx(0, abs=1e-6)
    assert np.std(credit, ddof=1) == pytest.approx(1, abs=1e-4)
    other = {"credit": {"type": "gdpo", "weights": {"format": 1.0}}, "name": "other"}
    with pytest.raises(RunError, match=r"no episode of the step has the score 'format'; .*\(.*return, score\)"):
        run(given | other)


def test_prompts_without_room_for_an_answer_are_left_out_and_those_in_both_splits_named(tiny_model, tmp_path):
    recipe = values(tiny_model, tmp_path, long=3)
    rows = [json.loads(line) for line in (tmp_path / "prompts.jsonl").read_text().splitlines()]
    write_jsonl(tmp_path / "prompts.jsonl", [*rows[:14], *rows[3:9]])
    directory, _ = run(recipe)
    told = small.messages(directory)
    assert any("6 held-out prompts are also training prompts" in text for text in told)
    (message,) = [text for text in told if "no room" in text]
    assert message.startswith("3 rows dropped: ")
    assert "rollout.tokens_per_episode = 90" in message
    assert "prompts.jsonl row 1, row 2, row 3" in message
    for step in (1, 2):
        episodes = read_episodes(episodes_file(directory.episodes, step, "train")).episodes
        assert len(episodes) == 6
        assert all(episode.seed >= 3 and episode.failure is None for episode in episodes)


def test_a_seed_without_a_row_stops_before_the_model_is_loaded(tiny_model, tmp_path):
    (tmp_path / "nothing").mkdir()
    (tmp_path / "nothing" / "config.json").write_text("{}")
    recipe = values(tiny_model, tmp_path, model={"path": str(tmp_path / "nothing")})
    recipe["evaluation"]["final_seeds"]["count"] = 7
    with pytest.raises(InputError, match=r"evaluation\.final_seeds: the last seed is 20, .*has 20 usable rows"):
        run(recipe)


@pytest.mark.parametrize("normalize", ["stored", "running", "none"])
def test_rewards_are_the_scores_of_the_reward_model(normalize, tiny_model, reward_model, tmp_path):
    recipe = values(tiny_model, tmp_path, reward={"path": str(reward_model), "normalize": normalize, "clip": None})
    del recipe["environment"]["reward"]
    directory, _ = run(recipe)
    paid = []
    for step in (1, 2):
        episodes = read_episodes(episodes_file(directory.episodes, step, "train")).episodes
        paid.append([episode.total_reward for episode in episodes])
        for episode in episodes:
            raw = episode.turns[-1].info["reward_model"]
            expected = (raw - 0.1) / 0.5 if normalize == "stored" else raw
            assert episode.total_reward == pytest.approx(expected, abs=1e-5)
    state = json.loads((sorted(directory.checkpoints.glob("step_*"))[-1] / "state.json").read_text())["reward"]
    assert state["count"] == (12 if normalize == "running" else 0)
    assert len({round(r, 6) for rewards in paid for r in rewards}) > 6
