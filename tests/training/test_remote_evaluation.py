"""`posttrain evaluate` with a remote model, from the command line to the table, the report and the stored episodes."""

import json
import subprocess
import sys

import pytest

from posttrain.cli.main import main
from posttrain.rollout.store import read_episodes
from posttrain.runs.intervals import success_rate
from posttrain_memory.environment import Memory
from posttrain_memory.recipe import MemoryRecipe
from tests.rollout.chat_server import Reply, scripted, serving

WORLDS = {"notes": 4, "filler": (0, 0), "retrieval": 1, "update": 1, "clarification": 1, "filter": 1}
SEEDS = range(100, 112)


@pytest.fixture(autouse=True)
def _wide(monkeypatch, tmp_path):
    monkeypatch.setenv("COLUMNS", "250")
    monkeypatch.chdir(tmp_path)


def words(url, *more):
    worlds = [f"environment.worlds.{key}={json.dumps(value)}" for key, value in WORLDS.items()]
    seeds = [f"evaluation.final_seeds.start={SEEDS.start}", f"evaluation.final_seeds.count={len(SEEDS)}"]
    engine = ["engine.type=openai", f"engine.url={url}", "engine.model=some-model", "engine.retries=0"]
    return ["evaluate", "environment.type=memory", *worlds, *seeds, *engine, "name=remote", *more]


def solver(fails=()):
    """The scripted solution; the server is down for the seeds `fails`, and seed 103 gets a wrong reply."""
    recipe = MemoryRecipe.model_validate({"worlds": WORLDS})
    questions = {Memory(recipe).reset(seed).messages[-1]["content"]: seed for seed in SEEDS}
    assert len(questions) == len(SEEDS)
    solution = scripted(Memory, recipe, SEEDS)

    def model(request):
        seed = questions[request["messages"][1]["content"]]
        if seed in fails:
            return Reply(status=500, body='{"error": "down"}')
        return Reply("<think>t</think><reply>Bananas.</reply>" if seed == 103 else solution(request), tokens=21)

    return model


def test_the_table_lists_a_remote_model_between_random_and_optimal(tmp_path, capsys):
    with serving(solver()) as server:
        assert main(words(server.url)) == 0
        used = len(server.asked)
        said = capsys.readouterr().out
        assert main(["episodes", "runs/remote", "--step", "0", "--split", "final", "--limit", "1"]) == 0
        shown = capsys.readouterr().out
        assert main(["episodes", "runs/remote", "--step", "0", "--split", "final", "--tokens"]) == 2
        assert "--tokens" in capsys.readouterr().err
        assert main(words(server.url)) == 2
        assert len(server.asked) == used, "a used name is refused before anything is asked"
    rows = {row["policy"]: row for row in json.loads((tmp_path / "runs/remote/results.json").read_text())["policies"]}
    ours, rate = rows["some-model"], success_rate(11, 12)
    assert (ours["success"], ours["interval"], ours["n"]) == (rate.value, [rate.low, rate.high], 12)
    assert rows["optimal policy"]["success"] == 1
    assert rows["random policy"]["success"] < ours["success"]
    assert ours["note"] == ""
    line, by_kind = [line for line in said.splitlines() if "some-model" in line]
    assert "91.7%" in line
    assert "%" not in by_kind, "what the environment reports besides stands in a table of its own"
    assert "12" in line
    report = (tmp_path / "runs/remote/report.md").read_text()
    assert f"`some-model` at {server.url}" in report
    assert "smollm2" not in report.split("## Recipe keys")[0]
    assert "21 tokens · end_token" in shown
    final = [json.loads(line) for line in (tmp_path / "runs/remote/metrics.jsonl").read_text().splitlines()][-1]
    assert (final["kind"], final["failed"], final["tokens_per_answer"]) == ("final", 0, 21)


def test_failed_episodes_are_counted_beside_the_rate(tmp_path, capsys):
    with serving(solver(fails=(104, 105))) as server:
        assert main(words(server.url)) == 0
    assert "2 of 12 episodes failed" in capsys.readouterr().out
    rows = json.loads((tmp_path / "runs/remote/results.json").read_text())["policies"]
    (ours,) = [row for row in rows if row["policy"] == "some-model"]
    assert (ours["success"], ours["note"]) == (9 / 12, "2 of 12 episodes failed")
    stored = read_episodes(tmp_path / "runs/remote/episodes/step_000000.final.jsonl.zst").episodes
    assert [episode.seed for episode in stored if episode.failure] == [104, 105]


def test_a_server_that_is_down_ends_the_run_and_leaves_its_name_free(tmp_path, capsys):
    with serving(solver(fails=SEEDS)) as server:
        assert main(words(server.url)) == 1
        told = capsys.readouterr()
        assert "episodes failed, the first on environment seed" in told.err
        assert len(told.err.splitlines()) == 1
        assert "%" not in told.out
        assert not (tmp_path / "runs/remote/results.json").exists()
    with serving(solver()) as server:
        assert main(words(server.url)) == 0
    # Answers without room are reported.
    with serving(lambda request: Reply("<think>so", "length")) as server:
        assert main(words(server.url, "environment.max_turns=2", "name=cut")) == 0
    assert "24 of 24 answers are truncated at rollout.tokens_per_turn = 64" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("key", "said"),
    [
        ("evaluation.sampling.top_k=5", "engine.extra_body.top_k=5"),
        ("evaluation.sampling.min_p=0.1", "engine.extra_body.min_p=0.1"),
        ("reward.path=somewhere", "remove `reward`"),
        ("engine.extra_body.seed=1", "remove it"),
        ("engine.extra_body.stream=true", "must be a single text"),
        ("engine.slots=4", "engine.type local, not openai"),
        ("environment.opened_by=environment", "set environment.opened_by=policy"),
    ],
)
def test_keys_that_a_server_does_not_support_are_refused_in_one_sentence(key, said, capsys):
    with serving(solver()) as server:
        assert main(words(server.url, "evaluation.sampling.temperature=1", key)) == 2
    told = capsys.readouterr().err
    assert said in told
    assert len(told.splitlines()) == 1
    assert not server.asked
    assert main(["rl", "engine.type=openai", "engine.url=http://x", "engine.model=m", "--dry-run"]) == 2
    assert "engine.type" in capsys.readouterr().err


def test_no_torch_is_loaded():
    with serving(solver()) as server:
        run = f"import sys; from posttrain.cli.main import main; assert main({words(server.url)!r}) == 0; "
        code = run + "print('loaded:', [name for name in ('torch', 'transformers') if name in sys.modules])"
        done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "loaded: []" in done.stdout
