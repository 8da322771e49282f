"""`--dry-run` loads what a run loads before its model, and fails where the run fails, with the same sentence."""

import json
import socket
from pathlib import Path

import pytest

from posttrain.cli.main import main
from tests.evaluation.judge_server import serving
from tests.training.preferences import pair_rows, write_jsonl

ROOT = Path(__file__).parents[2]


def prompts(folder: Path, count: int = 300, **columns) -> str:
    rows = [{"prompt": f"Say word {n}.", "label": f"word {n}", **columns} for n in range(count)]
    return write_jsonl(folder / "prompts.jsonl", rows)


def words_for(tiny: Path, folder: Path, *more: str, **columns) -> list[str]:
    words = ["rl", "environment.type=text_task", f"environment.prompts={prompts(folder, **columns)}", "name=own"]
    return [*words, f"runs={folder}/runs", f"model.path={tiny}", "rollout.tokens_per_turn=4", *more]


def dry(words: list[str], capsys) -> tuple[int, str, str]:
    code = main([*words, "--dry-run"])
    said = capsys.readouterr()
    return code, " ".join(said.out.split()), said.err


def test_a_first_command_on_300_prompts_shows_how_they_are_divided(tiny_model, tmp_path, capsys):
    code, out, err = dry(words_for(tiny_model, tmp_path, "environment.reward=exact"), capsys)
    assert (code, err) == (0, "")
    assert "training on 240 tasks of environment.prompts, each used about 3.3 times" in out
    assert "30 episodes on 30 held-out tasks of environment.prompts, before, 9 times during and after training" in out
    assert "tasks of environment.prompts: 240 to train on, 30 for the learning curve, 30 for the final table" in out
    code, out, _ = dry(words_for(tiny_model, tmp_path, "environment.reward=exact", "evaluation.held_out=0.2"), capsys)
    assert "240 to train on, 30 for the learning curve, 30 for the final table" in out
    assert not (tmp_path / "runs").exists()
    (tmp_path / "runs" / "own").mkdir(parents=True)
    for more, noted in (([], True), (["--overwrite"], False)):
        code, out, _ = dry(words_for(tiny_model, tmp_path, "environment.reward=exact", *more), capsys)
        assert (code, f"note: {tmp_path}/runs/own exists" in out) == (0, noted)


def free_port() -> int:
    with socket.socket() as one:
        one.bind(("127.0.0.1", 0))
        return one.getsockname()[1]


def test_a_dry_run_fails_with_the_same_sentence_as_the_run(tiny_model, tmp_path, capsys):
    (tmp_path / "own.py").write_text(
        "def typo(answer, **row):\n    return float(answer == row['lable'])\n\n"
        "def nothing(answer):\n    return 'nothing'\n\n"
        "def column(answer, wanted):\n    return 1.0\n"
    )
    judge = ["environment.judge={model: m, rubric: x, retries: 0}"]
    judge += [f"environment.judge.url=http://127.0.0.1:{free_port()}/v1"]
    exact = "environment.reward=exact"
    cases = {
        "the last seed is 4859, but environment.prompts has 300 usable rows": [exact, "seeds={start: 0, count: 4860}"],
        "environment.prompts has 300 tasks": [exact, "evaluation.held_out=300"],
        "nowhere.jsonl": [exact, "environment.prompts=nowhere.jsonl"],
        "own.py has no function 'missing'": [f"environment.reward={tmp_path}/own.py:missing"],
        "raised KeyError on prompts.jsonl row": [f"environment.reward={tmp_path}/own.py:typo"],
        "nothing returned 'nothing' on prompts.jsonl row": [f"environment.reward={tmp_path}/own.py:nothing"],
        "column needs the column `wanted`": [f"environment.reward={tmp_path}/own.py:column"],
        "nothing scores the answers": [],
        "environment.judge.url: no server answers at http://127.0.0.1": judge,
        "there is no folder runs/not/here": [exact, "model.path=runs/not/here"],
        "a pattern of checkpoints needs `--all`": [exact, "model.path=runs/a/checkpoints/*"],
        f"reward.path: {tiny_model} is not a reward model: it has no head `score`": [
            exact,
            f"reward.path={tiny_model}",
        ],
        f"audit.path: {tiny_model} is not a reward model": [exact, f"audit.path={tiny_model}"],
        "audit.environment.reward: ": [exact, f"audit.environment.reward={tmp_path}/own.py:missing"],
        f"audit.environment.reward: {tmp_path}/own.py:nothing returned": [
            exact,
            f"audit.environment.reward={tmp_path}/own.py:nothing",
        ],
        "audit.environment.judge.url: no server": [
            exact,
            *(word.replace("environment.judge", "audit.environment.judge") for word in judge),
            "audit.environment.reward=null",
        ],
        "name a function in audit.environment.reward": [exact, "audit.environment.reward=null"],
        "evaluation.environment.reward: ": [exact, f"evaluation.environment.reward={tmp_path}/own.py:missing"],
        "seeds takes all 300 tasks": [exact, "seeds.start=0"],
        "model.chat_template: file not found": [exact, f"model.chat_template={tmp_path}/none.jinja"],
    }
    for expected, more in cases.items():
        words = words_for(tiny_model, tmp_path, *more)
        code, _, err = dry(words, capsys)
        assert (code, expected in err) == (2, True), (more, err)
        assert main(words) == 2, more
        assert capsys.readouterr().err == err, more


def test_a_function_that_cannot_score_one_answer_is_a_warning_and_a_judge_that_answers_is_enough(
    tiny_model, tmp_path, capsys
):
    (tmp_path / "own.py").write_text("def number(answer, **row):\n    return float(answer.split('=')[1])\n")
    code, out, _ = dry(words_for(tiny_model, tmp_path, f"environment.reward={tmp_path}/own.py:number"), capsys)
    assert code == 0
    assert "raised IndexError on prompts.jsonl row" in out
    assert "episodes that it cannot score fail" in out
    with serving(lambda frames, number: {}) as server:
        judge = ["environment.judge={model: m, rubric: x}", f"environment.judge.url={server.url}"]
        assert dry(words_for(tiny_model, tmp_path, *judge), capsys)[0] == 0
        assert server.requests == []


@pytest.mark.parametrize("key", ["model.path", "reward.path", "critic.path", "audit.path", "teacher.path"])
def test_a_model_that_cannot_be_loaded_is_named_by_its_own_key(key, tiny_model, tmp_path, capsys):
    """Each section has the same loader, which also reads folders whose names contain `model.path`."""
    broken = tmp_path / "my.model.path"
    broken.mkdir()
    (broken / "config.json").write_text('{"model_type": "llama", "hidden_size": 33, "num_attention_heads": 32}')
    credit = ["credit.type=gae"] if key == "critic.path" else []
    more = ["environment.reward=exact", *credit, f"{key}={broken}"]
    assert main(words_for(tiny_model, tmp_path, *more)) == 2
    problem = capsys.readouterr().err
    assert problem.startswith(f"posttrain: {key}: ")
    assert str(broken) in problem


def test_rows_are_counted_and_a_broken_column_is_named(tiny_model, tmp_path, capsys):
    path = write_jsonl(tmp_path / "pairs.jsonl", pair_rows(23))
    words = ["reward", f"data.train={path}", "data.held_out=0.2", f"data.cache={tmp_path}/cache"]
    words += [f"model.path={tiny_model}", f"runs={tmp_path}/runs"]
    code, out, _ = dry(words, capsys)
    assert code == 0
    assert "18 rows to train on, 2 updates an epoch; 3 for validation, 2 for the final table" in out
    for more in ([], ["model.path=nobody/has-this"]):
        code, out, err = dry([*words, "data.columns.chosen=good", *more], capsys)
        assert (code, "no usable row" in err) == (2, True)
    assert "not checked: the tokenizer of nobody/has-this, which is not on this machine yet" not in err


def test_a_placement_that_no_run_accepts_is_refused_and_a_model_larger_than_the_device_a_warning(capsys, monkeypatch):
    monkeypatch.chdir(ROOT)
    recipes = ["recipes/rlhf/ppo.yaml", "recipes/rlhf/ppo_8gpu_published.yaml"]
    code, out, err = dry(["rl", *recipes, "kl.coefficient=0"], capsys)
    assert code == 2
    assert "hardware.dedicated.reference: there is no KL penalty with a fixed reference model" in err
    assert "groups x 2 episodes" in out
    _, _, err = dry(["rl", *recipes], capsys)
    assert "hardware.dedicated" not in err
    words = ["rl", "recipes/ragen/sokoban.yaml", "model.path=Qwen/Qwen2.5-7B-Instruct"]
    _, out, _ = dry([*words, "--on", "h100"], capsys)
    assert "warning: the run needs an estimated" in out
    assert "GiB and h100 has" in out


def test_a_dry_run_of_a_pipeline_does_not_check_files_that_its_stages_write(tiny_model, tmp_path, capsys):
    pairs, rows = pair_rows(12), prompts(tmp_path, 12)
    data = {"train": write_jsonl(tmp_path / "pairs.jsonl", pairs), "held_out": 2, "cache": str(tmp_path / "cache")}
    model = {"path": str(tiny_model)}
    rl = {"name": "rl", "stage": "rl", "environment": {"type": "text_task", "prompts": rows}}
    stages = [
        {"name": "rm", "stage": "reward", "data": data, "model": model},
        rl | {"model": model, "reward": {"path": "stage:rm"}},
    ]
    file = tmp_path / "p.yaml"
    file.write_text(json.dumps({"stage": "pipeline", "name": "p", "runs": str(tmp_path / "runs"), "stages": stages}))
    code, out, err = dry(["pipeline", str(file)], capsys)
    assert (code, err) == (0, "")
    assert f"not checked: {tmp_path}/runs/p/rm/model is written by an earlier stage" in out
    code, out, err = dry(["pipeline", str(file), "stages.rl.environment.prompts=none.jsonl"], capsys)
    assert code == 2
    assert "stage rl: " in err
    assert "none.jsonl" in err


def test_a_dry_run_asks_the_server_that_answers(tmp_path, monkeypatch, capsys):
    words = ["generate", f"data.test={prompts(tmp_path)}", "engine.type=openai", "engine.model=m"]
    words += [f"runs={tmp_path}/runs"]
    port = f"engine.url=http://127.0.0.1:{free_port()}/v1"
    for expected, more in {
        "engine.url: no server answers at http://127.0.0.1": [],
        "NO_SUCH_KEY, which is not set": ["engine.api_key_variable=NO_SUCH_KEY"],
    }.items():
        code, _, err = dry([*words, port, *more], capsys)
        assert (code, expected in err) == (2, True), err
    with serving(lambda frames, number: {}) as server:
        code, out, err = dry([*words, f"engine.url={server.url}"], capsys)
    assert (code, err, "300 rows to answer" in out) == (0, "", True)
