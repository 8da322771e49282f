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
from accelerator.measuring import Limits
from accelerator.processes import is_alive
from accelerator.rows import PLAN, WEIGHTS, Row, ratios
from accelerator.shapes import SHAPES, TINY, RandomPolicy, random_model
from accelerator.training import Setting, planned_bytes, samples_of, settings_of, supervised

from posttrain.losses.policy import nll
from posttrain.recipe.compose import load_recipe
from posttrain.recipe.model import LearnerRecipe
from posttrain.training.objectives import token_batch, token_forward

LIMITS = {"products": 1e11, "copying": 1e10}
QUICK = argparse.Namespace(device="cpu", tiny=True)


@pytest.mark.parametrize(
    ("part", "rows"),
    [
        *(("device", 2), ("limits", 2), ("parity", 7), ("agree-0.5B", 3), ("log-probabilities", 4)),
        *(("sft-4B", 1), ("decode-0.5B", 3), ("rl-4B-lora", 2), ("ragged-4B", 2), ("offload-4B", 1)),
        *(("attention", 5), ("optimizers", 2), ("profile-4B", 18), ("lora-8B", 1)),
    ],
)
def test_every_part_prints_numbers(part, rows):
    found = list(gpu.measure(part, "cpu", True, LIMITS, 20))
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


def test_parts_pass_by_their_criteria():
    rows = [Row("parity", "a", 0.001, "relative"), Row("parity", "b", 0.019, "relative"), Row("parity", "c", 90, "%")]
    rows.append(Row("parity", "d", 0.049, "nats"))
    assert gpu.judged("parity", rows)[0].check.startswith("passed: distances below 0.02")
    assert gpu.judged("parity", [*rows, Row("parity", "e", 0.051, "nats")])[0].check.startswith("FAILED: ")
    assert gpu.judged("parity", [*rows, Row("parity", "d", 0.02, "relative")])[0].check.startswith("FAILED: ")
    assert gpu.judged("parity", [*rows, Row("parity", "", math.nan, "")])[0].check.startswith("FAILED: ")
    assert gpu.judged("trl-0.5B", rows) == rows


def verdict(part, *rows, tiny=False):
    return gpu.judged(part, rows, tiny)[0].check.partition(":")[0]


def test_training_passes_by_its_share_of_the_peak_and_its_planned_memory():
    rate, plan = Row("SFT", "a", 1.0, "tokens/s", share=0.31), Row("SFT", "b", 1.09, PLAN)
    assert verdict("sft-4B", rate, plan) == "passed"
    assert verdict("sft-4B-compiled", rate, plan) == "FAILED", "30% is not enough for fused layers"
    assert verdict("sft-4B", replace(rate, share=0.29), plan) == "FAILED"
    assert verdict("sft-4B", rate, replace(plan, value=0.89)) == "FAILED"
    assert verdict("sft-4B", rate) == "FAILED", "a GPU always has a planned peak"
    assert verdict("sft-4B", replace(rate, share=0.01), tiny=True) == "passed"


def test_runs_pass_by_mismatch_even_memory_and_time_of_the_weights():
    mismatch, weights = Row("run", "a", 0.04, "nats"), Row("run", WEIGHTS, 2.9, "s")
    memory = Row("run", "b", 1.0, "times")
    assert verdict("run-vllm", mismatch, weights, memory) == "passed"
    assert verdict("run-vllm", mismatch, weights) == "FAILED"
    assert verdict("run-vllm", mismatch, weights, tiny=True) == "passed"
    assert verdict("run-vllm", mismatch, memory) == "FAILED"
    assert verdict("run-vllm", mismatch, weights, replace(memory, value=1.03)) == "FAILED"
    steps = Row("ray", "steps", 3.0, "")
    assert verdict("ray-gspo-8", weights, steps) == "passed"
    assert verdict("ray-gspo-8", replace(weights, value=3.1), steps) == "FAILED"
    assert verdict("ray-8", weights, replace(steps, value=2.0)) == "FAILED"


def test_a_killed_run_has_to_end_with_the_same_bits():
    plain, exact = Row("run", "losses", 0.009, "relative"), Row("run", "losses", 0.0, "relative")
    assert verdict("run-killed", plain, exact) == "passed"
    assert verdict("run-killed", plain, replace(exact, value=1e-9)) == "FAILED"
    assert verdict("run-killed", replace(plain, value=0.011), exact) == "FAILED"
    assert verdict("run-killed", exact) == "FAILED"


def test_decoding_passes_by_its_share_at_32_in_flight():
    rows = [Row("decoding", f"4B, {n} in flight, engine", 1.0, "tokens/s", share=s) for n, s in ((1, 0.3), (32, 0.61))]
    assert verdict("decode-4B", *rows) == "passed"
    assert verdict("decode-4B", rows[0], replace(rows[1], share=0.59)) == "FAILED"
    assert verdict("decode-4B", rows[0]) == "FAILED"


def test_rates_are_compared_with_the_best_of_trl():
    parts = {
        "sft-0.5B": [Row("SFT", "0.5B", 300.0, "tokens/s"), Row("SFT", "peak", 1.0, PLAN)],
        "trl-0.5B": [Row("TRL SFT", name, rate, "tokens/s") for name, rate in (("padded", 100.0), ("packing", 200.0))],
        "rl-0.5B": [Row("RL step", "0.5B", 5.0, "samples/s", note="local engine; generate 1 s")],
        "trl-grpo-0.5B": [Row("trl-grpo-0.5B", "", math.nan, "", note="not run: trl is not installed")],
    }
    (row,) = ratios(parts)
    assert (row.value, row.unit) == (1.5, "times")
    assert "packing" in row.note
    parts["trl-grpo-0.5B"] = [Row("TRL GRPO", "0.5B", 10.0, "samples/s", note="with vLLM in the same process")]
    assert ratios(parts)[1].value == 0.5
    assert "ours: 0.5B, local engine; TRL's best: 0.5B, with vLLM" in ratios(parts)[1].note


def test_a_model_too_large_for_adamw_trains_with_8_bit_moments_or_with_adamw_in_cpu_memory(monkeypatch):
    device, shape, memory = torch.device("cuda"), SHAPES["4B"], 75 * 2**30

    def first():
        return next(s for s in settings_of(shape, device) if planned_bytes(shape, s) < memory)

    monkeypatch.setattr("accelerator.training.find_spec", lambda name: object())
    assert "8-bit AdamW" in str(first())
    monkeypatch.setattr("accelerator.training.find_spec", lambda name: None)
    memory = 60 * 2**30
    assert "AdamW in CPU memory" in str(first())
    memory = 138 * 2**30
    assert first() == Setting(shape.tokens_per_batch)
    assert settings_of(shape, torch.device("cpu")) == [Setting(shape.tokens_per_batch)]


def test_gradient_checkpointing_trains():
    shape, device = TINY["4B"], torch.device("cpu")
    (row,) = supervised(shape, device, Limits(**LIMITS), 0, Setting(shape.tokens_per_batch, checkpointing=True))
    assert row.value > 0
    assert "gradient checkpointing" in row.case


def test_finished_parts_are_not_run_again_and_failed_ones_are(tmp_path, monkeypatch, capsys):
    ran = []

    def part(name, chosen, limits, budget):
        ran.append(name)
        return [Row(name, "x", math.nan if name == "parity" and ran.count("parity") == 1 else 0.01, "relative")]

    monkeypatch.setattr(gpu, "in_a_process", part)
    arguments = ["--parts", "limits,parity,rl-0.5B", "--json", str(tmp_path / "rows.json"), "--device", "cpu"]
    assert gpu.main(arguments) == 1, "a check failed"
    assert gpu.main(arguments) == 0
    assert ran == ["limits", "parity", "rl-0.5B", "parity"]
    assert gpu.main([*arguments, "--minutes", "0.1"]) == 0
    assert "not run" not in capsys.readouterr().out


def test_rows_of_another_device_are_refused(tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(gpu, "in_a_process", lambda name, *_: [Row(name, "x", 0.5, "relative")])
    file = tmp_path / "rows.json"
    arguments = ["--parts", "limits,parity", "--json", str(file), "--device", "cpu"]
    assert gpu.main(arguments) == 1
    document = json.loads(file.read_text())
    assert document["device"] == "a processor"
    assert document["calls"][0]["versions"]["torch"] == torch.__version__
    assert document["calls"][0]["date"].startswith("20")
    assert set(document["parts"]) == {"limits", "parity"}
    capsys.readouterr()
    assert gpu.main([*arguments, "--tiny"]) == 2
    assert capsys.readouterr().err == (
        f"{file} has rows of a processor, and this is a processor with tiny models; name another file with --json\n"
    )


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
    (row,) = gpu.in_a_process("run-vllm", QUICK, None, 6)
    assert row.note == "stopped after 6 s"
    pids = (tmp_path / "pids").read_text().split()
    assert len(pids) == 2
    assert not any(is_alive(pid) for pid in pids), "a server in another session, and one whose parent has ended"
    assert (tmp_path / "cleaned").exists()
    assert not Path((tmp_path / "temporary").read_text()).exists()


@pytest.mark.skipif(sys.platform != "linux", reason="processes are found in /proc")
def test_a_run_that_takes_too_long_is_killed_with_its_server(tmp_path):
    code = (
        "import subprocess, time; server = subprocess.Popen(['sleep', '600'], start_new_session=True); "
        "print(server.pid, flush=True); time.sleep(600)"
    )
    with runs.Run([], tmp_path, time.monotonic() + 3) as run:
        run._words = [sys.executable, "-c", code]
        run.start("rl")
        with pytest.raises(RuntimeError, match=r"the time was over after 0 steps; last line: \d+"):
            run.wait()
    assert not is_alive((tmp_path / "log.txt").read_text().strip())


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


def test_a_part_says_why_it_is_not_run(monkeypatch):
    def note(part, device):
        return next(gpu.attempt(part, lambda: gpu.measure(part, device, True, LIMITS, 1))).note

    assert note("sft-4B-liger", "cpu") == "not run: Liger's kernels need a GPU"
    monkeypatch.setattr("harness.made_model.small", lambda: "not trained for this")
    assert note("offload-8B", "cpu") == "not run: it needs a GPU"
    monkeypatch.setattr(gpu, "find_spec", lambda name: None)
    (row,) = gpu.attempt("sft-4B-liger", lambda: gpu.require_liger("cuda"))
    assert row.note == "not run: liger-kernel is not installed"


def test_a_slow_part_is_stopped_and_reported():
    (row,) = gpu.in_a_process("parity", QUICK, None, 0.05)
    assert "stopped after" in row.note


@pytest.mark.slow
def test_a_part_in_a_separate_process_returns_its_rows():
    rows = gpu.in_a_process("limits", QUICK, None, 200)
    assert [row.case for row in rows] == ["products", "copying"]
    assert Limits(**gpu.limits_of(rows)).products == rows[0].value * 1e12


@pytest.mark.parametrize(("name", "billions"), [("0.5B", 0.49), ("1.5B", 1.54), ("4B", 4.02)])
def test_the_shapes_are_those_of_their_names_and_their_work_is_that_of_their_weights(name, billions):
    shape = SHAPES[name]
    model = random_model(shape, torch.device("meta"))
    linear = [m for m in model.model.modules() if isinstance(m, torch.nn.Linear)]
    assert sum(m.weight.numel() for m in linear) == shape.body
    assert model.lm_head.weight.numel() == shape.head
    assert sum(p.numel() for p in model.parameters()) / 1e9 == pytest.approx(billions, abs=0.01)


def test_flops_count_the_attended_tokens():
    shape = TINY["0.5B"]
    one, apart = shape.training_flops([100], 40), shape.training_flops([50, 50], 40)
    assert one - apart == 12 * shape.layers * shape.heads * shape.head_size * (100 * 101 - 2 * 50 * 51) / 2
    assert apart - shape.training_flops([50, 50], 30) == 60 * shape.head


def test_a_step_takes_at_least_the_longer_of_reading_and_computing():
    limits = Limits(products=10.0, copying=2.0)
    assert limits.decoding_seconds(bytes_read=8, flops=10) == 4
    assert limits.decoding_seconds(bytes_read=8, flops=100) == 10
    shape = TINY["4B"]
    cached = shape.decoding_bytes([10, 30]) - shape.decoding_bytes([])
    assert cached == 40 * shape.layers * 2 * shape.key_heads * shape.head_size * 2


@pytest.mark.slow
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
    # Beside other work, compiling takes longer than a GPU machine is given for it.
    late = {name for name in failed if parts[name][-1]["note"].startswith("stopped after")}
    needs_more = {"server-killed-4B", "ray-gspo-8", "sft-4B-liger", "offload-8B"}
    assert all(parts[name][0]["note"].startswith("not run: ") for name in needs_more)
    assert failed <= {"trl-0.5B", "trl-grpo-0.5B"} | needs_more | late, {name: parts[name] for name in failed}
    assert late <= {"sft-4B-compiled", "trl-0.5B", "trl-grpo-0.5B"}
    assert all(parts[name][0]["check"].startswith("passed") for name in ("run-killed", "gpus-2", "ray-8"))
    assert parts["run-vllm"][0]["check"].startswith("passed")
    checks = [rows[0]["check"] for rows in parts.values()]
    assert done.returncode == any(check.startswith("FAILED") for check in checks), done.stderr[-2000:]
