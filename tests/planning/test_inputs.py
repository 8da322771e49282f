"""A run whose files are not there says so before torch is imported."""

import json
import subprocess
import sys

import pytest

from posttrain.errors import InputError
from posttrain.planning.inputs import require_inputs
from posttrain.recipe.compose import load_recipe
from posttrain.recipe.stages import STAGES
from posttrain.runs.directory import RunDirectory

COMMANDS = """
import contextlib, io, json, sys
from posttrain.cli.main import main
for words in json.loads(sys.argv[1]):
    with contextlib.redirect_stderr(io.StringIO()) as written:
        code = main(words)
    print(json.dumps([code, written.getvalue(), len(sys.modules), sorted({"torch", "transformers", "numpy"} & {*sys.modules})]))
"""
ROWS = {
    "odd.jsonl": [{"question": "1 + 1?", "reply": "2"}],
    "pairs.jsonl": [{"prompt": "a", "chosen": "b", "rejected": "c"}],
    "prompts.jsonl": [{"prompt": prompt, "label": "b"} for prompt in "acd"],
}
FILES = {
    "score.py": "def score(prompt, answr):\n    return 1.0\ndef broken(prompt, answer, **row):\n    return row['x']\n"
}
PROMPTS = "rl environment.type=text_task environment.prompts=prompts.jsonl"
PLAYED = ["environment.type=bandit"]
DATA = ["data.train=pairs.jsonl"]
MISSING = {  # words -> what the message names
    "sft data.train=nosuch.jsonl": "nosuch.jsonl: no such file",
    "sft data.train=odd.jsonl": "needs `messages` or `prompt`, has `question`, `reply`",
    "sft data.train=pairs.jsonl data.columns.completion=answer": "`answer`",
    "sft data.trian=x": "there is no key data.trian; the nearest is data.train",
    "sft environment.type=bandt": "did you mean bandit?",
    "dpo data.train=. data.validation=nosuch/rows.parquet": "nosuch/rows.parquet: no such file",
    "dpo data.train=odd.jsonl": "needs `chosen`",
    "dpo data.train=pairs.jsonl los.beta=1": "the nearest is loss.beta",
    "reward data.train=nosuch.csv": "nosuch.csv: no such file",
    "reward data.train=odd.jsonl": "needs `chosen`",
    "rl environment.type=text_task environment.prompts=nosuch.csv": "nosuch.csv: no such file",
    "rl environment.type=text_task environment.prompts=odd.jsonl": "needs `prompt`",
    "rl environment.type=text_task environment.prompts=prompts.jsonl environment.reward=exakt": "did you mean exact?",
    "rl environment.type=text_task environment.prompts=prompts.jsonl environment.reward=no.py:f": "environment.reward: there is no file no.py",
    "rl environment.type=text_task environment.prompts=prompts.jsonl environment.reward=exact environment.tools=[no.py:f] environment.max_turns=2": "environment.tools.0: there is no file no.py",
    f"{PROMPTS} environment.reward=score.py:scor": "environment.reward: score.py has no function 'scor'; did you mean score.py:score?",
    f"{PROMPTS} environment.reward=score.py:score": "the reward score.py:score has no parameter `answer`",
    f"{PROMPTS} environment.reward=exact evaluation.held_out=5": "environment.prompts has 3 tasks",
    PROMPTS: "nothing scores the answers; name a function in environment.reward",
    f"{PROMPTS} environment.reward=score.py:broken": "score.py:broken raised KeyError on prompts.jsonl row",
    "dpo data.train=pairs.jsonl data.held_out=5": "data.held_out: 5 rows would leave none of the 1 usable rows to train on",
    "dpo data.train=pairs.jsonl data.held_out=0.9": "data.held_out: 1 rows would leave none of the 1 usable rows to train on",
    "sft data.train.path=pairs.jsonl data.train.wieght=2": "there is no key data.train.wieght; the nearest is data.train.weight",
    f"sft data.train=pairs.jsonl name={'x' * 201}": "it must be text of up to 200 letters",
    "chat runs/nosuch": "model.path: there is no folder runs/nosuch",
    "serve runs/nosuch --port 0": "model.path: there is no folder runs/nosuch",
    "data inspect nosuch.jsonl": "nosuch.jsonl: no such file",
    "data inspect odd.jsonl": "the columns question, reply are not those of",
    "data inspect odd.jsonl --kind pair": "needs `chosen`",
    "data inspect odd.jsonl model.path=runs/nosuch": "model.path: there is no folder runs/nosuch",
    "fit-normalizer runs/nosuch": "there is no run at runs/nosuch",
    "pipeline nosuch": "there is no recipe file nosuch",
    "recipe zzz": "stage rl has no key zzz; `posttrain recipe --stage rl` shows all",
    "rl environment.type=bandit runs=odd.jsonl": "odd.jsonl is a file; set `runs`",
    "rl loss.type=dpo": "run `posttrain dpo loss.type=dpo`",
    "serve model=x": "there is no folder model=x",
    "rl environment.type=bandit name=used": "the run runs/used exists; continue it with",
    "rl environment.type=bandit engine.type=vllm": "engine.type: vllm is not installed",
    "rl environment.type=bandit rollout.group_per_step=4": "the nearest is rollout.groups_per_step",
    "generate data.test=nosuch.jsonl": "nosuch.jsonl: no such file",
    **{f"{stage} nosuch.yaml": "there is no recipe file nosuch.yaml" for stage in STAGES},
    **{
        f"{stage} {' '.join(DATA if stage in ('dpo', 'reward') else PLAYED)} model.path={path}": f"model.path: there is no {what} {path}"
        for stage in ("rl", "sft", "dpo", "reward", "evaluate")
        for path, what in (("./nosuch", "folder"), ("runs/nosuch/model", "folder"), ("x.gguf", "file"))
    },
    "distill environment.type=bandit teacher.path=runs/nosuch/model": "teacher.path: there is no folder runs/nosuch/model",
    "rl environment.type=bandit model.path=packaged:smolm": "unknown packaged model 'smolm'",
    "rl environment.type=bandit model.path=here": "here is not a model directory: it has no config.json",
}


def test_what_is_missing_is_named_without_torch(tmp_path, monkeypatch):
    for name, rows in ROWS.items():
        (tmp_path / name).write_text("".join(json.dumps(row) + "\n" for row in rows))
    for name, text in FILES.items():
        (tmp_path / name).write_text(text)
    (tmp_path / "here").mkdir()
    monkeypatch.chdir(tmp_path)
    used = RunDirectory.create(load_recipe([], [*PLAYED, "name=used"], "rl"))
    used.metrics.write_text("{}\n")
    words = json.dumps([line.split() for line in MISSING])
    ended = subprocess.run([sys.executable, "-c", COMMANDS, words], cwd=tmp_path, capture_output=True, text=True)
    results = [json.loads(line) for line in ended.stdout.splitlines()]
    assert len(results) == len(MISSING), ended.stderr
    wrong = [
        (line, code, text)
        for (line, named), (code, text, _, _) in zip(MISSING.items(), results, strict=True)
        if code != 2 or named not in text
    ]
    assert wrong == []
    assert {"torch", "transformers"} & {name for *_, heavy in results for name in heavy} == set()
    assert results[0][3] == []
    # 0.4 s of processor time on the machine of the tests; numpy, 0.1 s more, comes with environments.
    assert results[0][2] < 450
    assert {path.name for path in tmp_path.iterdir()} - {"__pycache__"} == {"here", *ROWS, "runs", *FILES}


def test_vllm_of_another_interpreter_or_server_is_not_looked_for_here():
    for word in ("engine.python=/opt/vllm/bin/python", "engine.urls=[http://10.0.0.2:8700]"):
        require_inputs(load_recipe([], ["environment.type=bandit", "engine.type=vllm", word], "rl"))
    with pytest.raises(InputError):
        require_inputs(load_recipe([], ["environment.type=bandit", "engine.type=vllm"], "rl"))


@pytest.mark.parametrize(
    ("words", "package"),
    [(["sinks=[tensorboard, wandb]"], "wandb"), ([], None)],
)
def test_packages_of_sinks_are_looked_for(words, package, monkeypatch):
    recipe = load_recipe([], ["environment.type=bandit", *words], "rl")
    monkeypatch.setattr("posttrain.planning.inputs.find_spec", lambda name: None if name == package else object())
    if package is None:
        require_inputs(recipe)
    else:
        with pytest.raises(InputError, match=rf"needs the package {package}; run `pip install"):
            require_inputs(recipe)
