"""Traces of experts: rows remember the settings of their environment, and held-out traces have a loss."""

import json
import re

import pytest
import torch

from posttrain.cli.main import main
from posttrain.data.files import write_rows
from posttrain.data.rendering import Renderer
from posttrain.errors import InputError
from posttrain.models.policy import Policy
from posttrain.recipe.components import environment_recipe
from posttrain.recipe.compose import load_recipe
from posttrain.recipe.data import SourceRecipe
from posttrain.rollout.store import episodes_file, read_episodes
from posttrain.runs.metrics import read_metrics
from posttrain.training.evaluators import EpisodeEvaluator
from posttrain.training.experts import SETTINGS_COLUMN, expert_episodes, settings_text, settings_warnings
from tests.training import small


def lake(**keys):
    return environment_recipe({"type": "frozen_lake", **keys})


@pytest.mark.parametrize("suffix", [".jsonl", ".parquet"])
def test_settings_that_differ_are_named(tmp_path, suffix):
    file = tmp_path / f"rows{suffix}"
    write_rows(file, [{"messages": [], SETTINGS_COLUMN: settings_text(lake(format={"thinking": True}))}] * 3)
    sources = [SourceRecipe(path=str(file))]
    assert settings_warnings(lake(format={"thinking": True}), sources) == []
    assert settings_warnings(lake(), sources) == [
        f"the rows of {file} were generated with environment.format.thinking true (here false), so training and evaluation "
        "differ; generate the rows again, or set these keys"
    ]
    many = lake(slippery=False, size=5, max_turns=7, format={"separator": "##"})
    (warning,) = settings_warnings(many, sources)
    assert warning.count("(here ") == 3
    assert " and 2 more, so" in warning
    assert settings_warnings(environment_recipe({"type": "bandit"}), sources) == []


def test_rows_without_settings_give_no_warning(tmp_path):
    file = tmp_path / "rows.jsonl"
    for cell in (None, 3, "no JSON", "[1]", json.dumps({"type": "frozen_lake", "gone": 1})):
        file.write_text("broken\n" + json.dumps({"messages": [], SETTINGS_COLUMN: cell}) + "\n")
        assert settings_warnings(lake(), [SourceRecipe(path=str(file)), SourceRecipe(path="some/hub-id")]) == []


HELD_OUT = ["environment.type=frozen_lake", "experts.seeds.count=10", "rows_per_update=3", "steps=3"]
HELD_OUT += ["rollout.tokens_per_episode=1500", "rollout.tokens_per_turn=4", "evaluation.every=2"]
HELD_OUT += ["evaluation.seeds.count=1", "evaluation.final_seeds.count=1"]


@pytest.mark.parametrize("metric", ["loss", "return"])
def test_the_loss_of_traces_that_are_not_trained_on_is_measured(metric, tiny_model, tmp_path):
    """It selects the checkpoint, also where all returns are equal."""
    words = [f"model.path={tiny_model}", f"runs={tmp_path}", "name=traces", "experts.held_out=4", *HELD_OUT]
    assert main(["sft", *words, "optimizer.learning_rate=1e-3", f"evaluation.metric={metric}"]) == 0
    run = tmp_path / "traces"
    trained = read_episodes(episodes_file(run / "episodes", 0, "train")).episodes
    assert [episode.seed for episode in trained] == list(range(200_000, 200_006))
    lines = read_metrics(run / "metrics.jsonl")
    losses = {line["step"]: line["validation/loss"] for line in lines if line["kind"] == "evaluation"}
    assert list(losses) == [0, 2, 3]
    assert losses[3] == min(losses.values()) < losses[0]
    assert [line["best_step"] for line in lines if line["kind"] == "final"] == [3]
    if metric == "return":
        assert len({line["return"] for line in lines if line["kind"] == "evaluation"}) == 1
        return
    start, end = (line for line in lines if "test/rows" in line)
    assert (start["test/rows"], end["test/loss"] < start["test/loss"]) == (4, True)
    # The same number by hand: the mean negative log-likelihood of the answers' tokens.
    policy = Policy(str(tiny_model))
    recipe = load_recipe([], words, "sft")
    held_out = expert_episodes(recipe, range(200_006, 200_010), Renderer(policy.tokenizer, policy.end_tokens))
    streams = [stream for episode in held_out for stream in episode.streams]
    with torch.no_grad():
        scores = policy.score([s.ids for s in streams], [s.sampled for s in streams], 1.0, 64)
    assert losses[0] == pytest.approx(-float(scores.logprobs.mean()), rel=1e-4)
    text = (run / "report.md").read_text()
    assert "perplexity" in text
    assert "which also chose the checkpoint" in text


def test_held_out_traces_may_select_the_checkpoint(tiny_model, tmp_path, capsys):
    words = [f"model.path={tiny_model}", f"runs={tmp_path}", "name=none", *HELD_OUT]
    assert load_recipe([], [*words, "experts.held_out=4", "evaluation.metric=loss"], "sft").chosen_by_loss
    with pytest.raises(InputError, match=r"experts\.held_out"):
        load_recipe([], [*words, "evaluation.metric=loss"], "sft")
    assert main(["sft", *words, "experts.held_out=10"]) == 2
    assert "so none is left to train on; raise experts.seeds.count" in capsys.readouterr().err
    assert main(["sft", *words, "experts.held_out=4", "--dry-run"]) == 0
    said = capsys.readouterr().out
    assert "6 traces of the optimal policy" in said
    assert "the last 4 for their loss alone" in said


def test_a_share_of_the_optimal_turns_is_random(tiny_model):
    """Of the first actions on 80 lakes."""

    def answers(share):
        words = ["environment.type=frozen_lake", "environment.slippery=false", f"experts.random_share={share}"]
        recipe = load_recipe([], [f"model.path={tiny_model}", *words, "rollout.tokens_per_episode=1500"], "sft")
        policy = Policy(recipe.model, 0)
        renderer = Renderer(policy.tokenizer, policy.end_tokens)
        return [e.turns[0].answer for e in expert_episodes(recipe, range(200_000, 200_080), renderer)]

    optimal, mixed = answers(0.0), answers(0.5)
    share = sum(a != b for a, b in zip(optimal, mixed, strict=True)) / 80
    assert 0.2 < share < 0.55  # half of the turns are random, and a random one of four moves is often the optimal one
    with pytest.raises(InputError, match="random_share"):
        load_recipe([], ["environment.type=bandit", "experts.expert=random", "experts.random_share=0.1"], "sft")


def test_the_random_traces_of_a_seed_take_each_action_once(tiny_model):
    words = [f"model.path={tiny_model}", "environment.type=bandit", "experts.expert=random"]
    recipe = load_recipe([], [*words, "experts.per_seed=2"], "sft")
    policy = Policy(recipe.model, 0)
    renderer, seeds = Renderer(policy.tokenizer, policy.end_tokens), range(200_000, 200_020)
    episodes = expert_episodes(recipe, seeds, renderer)
    for one, other in zip(episodes[::2], episodes[1::2], strict=True):
        assert one.seed == other.seed
        assert (one.index, other.index) == (0, 1)
        assert {"phoenix", "dragon"} == {re.sub("<.*?>", "", e.turns[0].answer) for e in (one, other)}
    # The first trace of each seed is the one it has alone, and both arms come first in some.
    single = expert_episodes(load_recipe([], words, "sft"), seeds, renderer)
    firsts = [e.turns[0].answer for e in episodes[::2]]
    assert firsts == [e.turns[0].answer for e in single]
    assert len(set(firsts)) == 2
    with pytest.raises(InputError, match="per_seed"):
        load_recipe([], ["environment.type=bandit", "experts.per_seed=2"], "sft")


def test_the_same_model_is_not_played_twice_on_the_same_seeds(tiny_model, tmp_path, capsys, monkeypatch):
    """Where everything that the episodes depend on is the same, the next run takes the rates of the run that made its model."""
    words = ["environment.type=bandit", "rollout.tokens_per_turn=4", f"runs={tmp_path}"]
    words += ["evaluation.final_seeds.count=3", "evaluation.seeds.count=1", "evaluation.every=1", "model.threads=1"]
    first = [f"model.path={tiny_model}", "name=a", "experts.seeds.count=4", "rows_per_update=4"]
    assert main(["sft", *words, *first]) == 0
    made = [*words, f"model.path={tmp_path / 'a' / 'model'}", "steps=1", "rollout.groups_per_step=1"]
    made += ["rollout.episodes_per_group=2"]
    capsys.readouterr()
    steps, play = [], EpisodeEvaluator.curve

    def noted(self, step, played):
        steps.append(step)
        return play(self, step, played)

    monkeypatch.setattr(EpisodeEvaluator, "curve", noted)
    for name, change, played in (("b", "seed=0", 1), ("c", "seed=1", 2), ("d", "rollout.tokens_per_turn=3", 2)):
        steps.clear()
        assert main(["rl", *made, change, f"name={name}"]) == 0
        assert capsys.readouterr().out.count("playing 3 held-out episodes") == played, change
        assert steps == [0, 1][2 - played :], change
    assert main(["rl", *made, "evaluation.start=false", "name=e"]) == 0
    assert "with the initial model" not in capsys.readouterr().out

    def rows(name):
        return {line["policy"]: line for line in read_metrics(tmp_path / name / "metrics.jsonl") if "policy" in line}

    assert "trained" in rows("e")
    assert "start of this run" not in rows("e")
    start, trained = rows("b")["start of this run"], rows("a")["trained"]
    assert all(start[key] == trained[key] for key in ("success", "return", "n"))

    def of_curve(name, step):
        (line,) = [one for one in small.lines(tmp_path / name, "evaluation") if one["step"] == step]
        stored = read_episodes(episodes_file(tmp_path / name / "episodes", step, "evaluation")).episodes
        values = {key: value for key, value in line.items() if key not in ("step", "time/run")}
        return values, [(e.seed, turn.answer, turn.reward) for e in stored for turn in e.turns]

    # The model of `a` is that of its only step.
    assert of_curve("b", 0) == of_curve("a", trained["best_step"])
