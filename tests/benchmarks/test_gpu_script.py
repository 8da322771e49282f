"""The GPU benchmark on a processor with tiny models: every part gives numbers, and one that fails stops no other."""

import argparse
import json
import math
import os
import subprocess
import sys
import time
from dataclasses import replace
from pathlib import Path

import gpu
import pytest
import torch
from accelerator import runs
from accelerator.processes import is_alive
from accelerator.rows import PLAN, WEIGHTS, Row, spread
from accelerator.shapes import SHAPES, TINY, RandomPolicy, random_model
from accelerator.training import Setting, planned_bytes, samples_of, settings_of

from posttrain.losses.policy import nll
from posttrain.recipe.compose import load_recipe
from posttrain.recipe.model import LearnerRecipe
from posttrain.training.objectives import token_batch, token_forward

LIMITS = {"products": 1e11, "copying": 1e10}
QUICK = argparse.Namespace(device="cpu", tiny=True)


@pytest.mark.parametrize(
    ("part", "rows"),
    [
        *(("parity", 7), ("agree-0.5B", 3), ("sft-4B", 1), ("decode-0.5B", 3), ("rl-4B-lora", 5)),
        *(
            pytest.param(part, rows, marks=pytest.mark.slow)
            for part, rows in (
                *(("device", 2), ("limits", 2), ("log-probabilities", 4), ("ragged-4B", 5), ("offload-4B", 1)),
                *(("attention", 5), ("optimizers", 2), ("profile-4B", 18), ("lora-8B", 1)),
            )
        ),
    ],
)
def test_every_part_prints_numbers(part, rows):
    found = list(gpu.measure(part, "cpu", True, LIMITS, 120))
    assert len(found) == rows
    assert all(math.isfinite(row.value) for row in found)
    if part in ("sft-4B", "decode-0.5B"):
        assert all(row.share is not None and row.share > 0 for row in found)
    if part == "parity":
        assert all(row.value < 1e-4 for row in found if row.unit != "%")
        assert [row.value for row in found if row.unit == "%"] == [100]
    if part == "agree-0.5B":
        in_float32, in_bfloat16, again = (row.value for row in found)
        assert in_float32 == again == 0, "the same numbers on a processor"
        assert 0 < in_bfloat16 < 0.01


PEAK, MISMATCH, MEMORY = Row("", "", 1.09, PLAN), Row("", "", 0.04, "nats"), Row("", "", 1.0, "times")
TIME, STEPS = Row("", WEIGHTS, 2.9, "s"), Row("", "steps", 3.0, "")
PLAIN, EXACT = Row("", "losses", 0.009, "relative"), Row("", "losses", 0.0, "relative")


def speed(share, case="4B, 32 in flight, engine"):
    return Row("", case, 1.0, "tokens/s", share=share)


@pytest.mark.parametrize(
    ("part", "passing", "changed"),
    [
        ("parity", [PLAIN, replace(MISMATCH, value=0.049)], (0.019, 0.051)),
        ("parity", [PLAIN], (math.nan,)),
        ("sft-4B", [speed(0.31), PEAK], (1.09, 0.89)),
        ("run-vllm", [MISMATCH, TIME, MEMORY], (0.04, 2.9, 1.03)),
        ("ray-gspo-8", [TIME, STEPS], (3.1, 3.0)),
        ("ray-8", [TIME, STEPS], (2.9, 2.0)),
        # A killed run has to end with the same bits.
        ("run-killed", [PLAIN, EXACT], (0.009, 1e-9)),
        ("run-killed", [PLAIN, EXACT], (0.011, 0.0)),
    ],
)
def test_parts_pass_by_their_criteria(part, passing, changed):
    failing = [replace(row, value=value) for row, value in zip(passing, changed, strict=False)]
    assert gpu.judged(part, passing)[0].check.startswith("passed")
    assert gpu.judged(part, failing)[0].check.startswith("FAILED")


@pytest.mark.parametrize(("part", "least"), [("sft-4B", 0.3), ("sft-4B-liger", 0.4), ("decode-4B", 0.6)])
def test_parts_pass_by_their_share_of_the_machine(part, least):
    for share, verdict in ((least + 0.01, "passed"), (least - 0.01, "FAILED")):
        assert gpu.judged(part, [speed(share), PEAK])[0].check.startswith(verdict)


def test_a_model_too_large_for_adamw_trains_with_8_bit_moments_or_with_adamw_in_cpu_memory():
    device, shape, memory = torch.device("cuda"), SHAPES["4B"], 75 * 2**30

    def first():
        return next(s for s in settings_of(shape, device) if planned_bytes(shape, s) < memory)

    assert "8-bit AdamW" in str(first())
    memory = 36 * 2**30
    assert "AdamW in CPU memory" in str(first())
    memory = 138 * 2**30
    assert first() == Setting(shape.tokens_per_batch)
    assert settings_of(shape, torch.device("cpu")) == [Setting(shape.tokens_per_batch)]


SLOW_PART = """
import signal, subprocess, sys, tempfile, time
from pathlib import Path
sys.path.insert(0, {benchmarks!r})
import gpu
signal.signal(signal.SIGTERM, gpu.stop)
folder = Path({folder!r})
child = "from subprocess import DEVNULL, Popen; "
child += "print(Popen(['sleep', '600'], stdout=DEVNULL, start_new_session=True).pid)"
orphan = subprocess.run([sys.executable, "-c", child], stdout=subprocess.PIPE, text=True)
server = subprocess.Popen(["sleep", "600"], start_new_session=True)
(folder / "temporary").write_text(tempfile.mkdtemp())
(folder / "pids").write_text(f"{{orphan.stdout.strip()}} {{server.pid}}")
try:
    time.sleep(600)
finally:
    (folder / "cleaned").touch()
"""


@pytest.mark.skipif(sys.platform != "linux", reason="processes are found in /proc")
def test_all_that_a_slow_part_started_ends_with_it(tmp_path, monkeypatch):
    script = tmp_path / "part.py"
    script.write_text(SLOW_PART.format(benchmarks=str(Path(gpu.__file__).parent), folder=str(tmp_path)))
    monkeypatch.setattr(gpu, "__file__", str(script))
    (row,) = gpu.in_a_process("run-vllm", QUICK, None, 4)
    assert row.note == "stopped after 4 s"
    pids = (tmp_path / "pids").read_text().split()
    assert len(pids) == 2
    assert not any(is_alive(pid) for pid in pids), "a server in another session, and one whose parent has ended"
    assert (tmp_path / "cleaned").exists()
    assert not Path((tmp_path / "temporary").read_text()).exists()


@pytest.mark.parametrize("part", ["ray-8", "ray-gspo-8"])
def test_the_shipped_placements_accept_the_overrides(part, tmp_path, monkeypatch):
    started = []

    class Run(runs.Run):
        def start(self, *words):
            started.append((self._words[4:], words))
            raise RuntimeError("not started")

    monkeypatch.setattr(runs, "Run", Run)
    monkeypatch.setattr(runs, "require_gpus", lambda count: None)
    monkeypatch.setattr(runs, "_written", lambda shape, folder, make: str(folder))
    monkeypatch.setitem(sys.modules, "vllm", object())
    with pytest.raises(RuntimeError, match="not started"):
        list(gpu.whole_run(part, "cuda", False, time.monotonic() + 60))
    ((recipes, words),) = started
    recipe = load_recipe(recipes, list(words), "rl")
    assert (recipe.steps, recipe.hardware.processes, recipe.engine.type) == (3, 8, "vllm")
    assert recipe.hardware.engines.count * recipe.hardware.engines.devices == 8


@pytest.mark.parametrize("name", ["0.5B", "1.5B", "4B"])
def test_a_random_model_has_the_published_weights(name):
    shape, model = SHAPES[name], random_model(SHAPES[name], torch.device("meta"))
    linear = [m for m in model.model.modules() if isinstance(m, torch.nn.Linear)]
    assert sum(m.weight.numel() for m in linear) == shape.layers * shape.layer
    assert model.lm_head.weight.numel() == shape.head
    assert sum(p.numel() for p in model.parameters()) == pytest.approx(shape.parameters, rel=2e-4)


def test_rows_of_several_runs_have_their_spread(monkeypatch, capsys):
    """The table of one-GPU GRPO: samples/s, seconds of each phase, and tokens/s, of three processes."""
    numbers = iter([30.0, 2.0, 36.0, 3.0, 33.0, 1.0])

    def run(name, *_):
        if name == "limits":
            return [Row("limits", "products", 1.0, "TFLOP/s")]
        return [Row("RL step", "0.5B", next(numbers), "samples/s", note="local"), Row("", "update", next(numbers), "s")]

    monkeypatch.setattr(gpu, "in_a_process", run)
    assert gpu.main(["--device", "cpu", "--tiny", "--parts", "rl-0.5B", "--runs", "3"]) == 0
    lines = [[cell.strip() for cell in line.split("|")] for line in capsys.readouterr().out.splitlines()]
    found = {line[2]: (line[3], line[7]) for line in lines if len(line) > 7}
    assert found["0.5B"] == ("33 samples/s", "30 to 36 in 3 runs; local")
    assert found["update"] == ("2 s", "1 to 3 in 3 runs")
    assert found["products"] == ("1 TFLOP/s", "1 to 1 in 3 runs")
    failed = [Row("rl-0.5B", "", math.nan, "", note="stopped")]
    assert spread([[speed(1.0)], failed]) == failed


def test_a_bare_checkout_is_enough(tmp_path):
    """In an interpreter that finds neither pydantic nor what else posttrain wants beside torch and transformers."""
    (tmp_path / "sitecustomize.py").write_text(
        "import sys\n"
        "from importlib.machinery import PathFinder\n"
        "absent = {'pydantic', 'pydantic_core', 'rich', 'datasets', 'trl', 'peft', 'accelerate', 'scipy', 'ray', 'optuna'}\n"
        "find = PathFinder.find_spec\n"
        "class Without(PathFinder):\n"
        "    @classmethod\n"
        "    def find_spec(cls, name, path=None, target=None):\n"
        "        return None if name.split('.')[0] in absent else find(name, path, target)\n"
        "sys.meta_path[:] = [Without if finder is PathFinder else finder for finder in sys.meta_path]\n"
    )
    command = [sys.executable, gpu.__file__, "--part", "rl-0.5B", "--device", "cpu", "--tiny", "--limits"]
    environment = {**os.environ, "PYTHONPATH": str(tmp_path)}
    done = subprocess.run([*command, json.dumps(LIMITS)], env=environment, capture_output=True, text=True, check=False)
    row = json.loads(done.stdout.splitlines()[-1])
    assert row["value"] > 0, (row["note"], done.stderr[-2000:])


def test_a_whole_forward_pass_stays_on_the_gpu(monkeypatch):
    """On the meta device, which like a GPU refuses tensors of the processor, through the GPU's attention."""
    monkeypatch.setattr("posttrain.models.packing.supports", lambda *arguments: True)
    device = torch.device("meta")
    policy = RandomPolicy(TINY["4B"], device)
    policy.model.to(torch.bfloat16)
    samples = samples_of([30, 40, 25], 0.3, 500, 0)
    samples.append(samples[0])
    scores = token_forward(policy, LearnerRecipe(logits_per_chunk=16))(samples)
    nll(scores.logprobs, token_batch(samples, [1.0] * 4, device)).backward()
    assert scores.logprobs.device == device
    assert all(parameter.grad is not None for parameter in policy.model.parameters())
    with pytest.raises(RuntimeError):
        torch.zeros(3, device=device) + torch.zeros(3)


def test_the_parts_of_one_gpu_fit_into_the_time():
    assert sum(seconds for part, seconds in gpu.BUDGETS.items() if part not in gpu.MORE_GPUS) <= 60 * gpu.MINUTES


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_the_whole_script_runs_on_a_processor(tmp_path):
    file = tmp_path / "rows.json"
    command = [sys.executable, str(Path(gpu.__file__)), "--device", "cpu", "--tiny", "--json", str(file)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=1700, check=False)
    parts = json.loads(file.read_text())["parts"]
    assert set(parts) == set(gpu.BUDGETS)
    failed = {name for name, rows in parts.items() if any(math.isnan(row["value"]) for row in rows)}
    needs_more = {"server-killed-4B", "ray-gspo-8", "sft-4B-liger", "offload-8B"}
    assert all(parts[name][0]["note"].startswith("not run: ") for name in needs_more)
    assert failed <= {"trl-0.5B", "trl-grpo-0.5B"} | needs_more, {name: parts[name] for name in failed}
    assert all(parts[name][0]["check"].startswith("passed") for name in ("run-killed", "run-vllm", "gpus-2", "ray-8"))
    checks = [rows[0]["check"] for rows in parts.values()]
    assert done.returncode == any(check.startswith("FAILED") for check in checks), done.stderr[-2000:]
