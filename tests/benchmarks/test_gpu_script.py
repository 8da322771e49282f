"""The GPU benchmark on a processor with tiny models: every part gives numbers, and one that fails stops no other."""

import argparse
import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

sys.path.insert(0, str(Path(__file__).parents[2] / "benchmarks"))

import gpu
from accelerator.bare import BaseModel, _field
from accelerator.measuring import Limits
from accelerator.rows import Row, table
from accelerator.shapes import SHAPES, TINY, RandomPolicy, random_model
from accelerator.training import samples_of

from posttrain.losses.policy import nll
from posttrain.recipe.model import LearnerRecipe
from posttrain.training.objectives import token_batch, token_forward

LIMITS = {"products": 1e11, "copying": 1e10}
QUICK = argparse.Namespace(device="cpu", tiny=True)


@pytest.mark.parametrize(
    ("part", "rows"),
    [
        *(("device", 2), ("limits", 2), ("parity", 6), ("agree-0.5B", 2), ("log-probabilities", 2)),
        *(("sft-4B", 1), ("decode-0.5B", 3), ("rl-0.5B", 1), ("offload-4B", 1)),
    ],
)
def test_every_part_prints_numbers(part, rows):
    found = list(gpu.measure(part, "cpu", True, LIMITS, 20))
    assert len(found) == rows
    assert all(math.isfinite(row.value) for row in found)
    if part in ("sft-4B", "decode-0.5B"):
        assert all(row.share is not None and row.share > 0 for row in found)
    if part == "parity":
        assert all(row.value < 1e-4 for row in found[:-1])
        assert found[-1].value == 100
    if part == "agree-0.5B":
        assert [row.value for row in found] == [0, 0], "the same numbers on a processor"


def test_parts_pass_by_their_criteria():
    rows = [Row("parity", "a", 0.001, "relative"), Row("parity", "b", 0.019, "relative"), Row("parity", "c", 90, "%")]
    assert gpu.judged("parity", rows)[0].check == "passed: distances below 0.02, gradients included"
    assert gpu.judged("parity", [*rows, Row("parity", "d", 0.02, "relative")])[0].check.startswith("FAILED: ")
    assert gpu.judged("parity", [*rows, Row("parity", "", math.nan, "")])[0].check.startswith("FAILED: ")
    assert gpu.judged("sft-4B", [Row("SFT", "a", 1.0, "", share=0.29)])[0].check.startswith("FAILED: ")
    assert gpu.judged("sft-4B", [Row("SFT", "a", 1.0, "", share=0.31)])[0].check.startswith("passed: ")
    assert gpu.judged("limits", rows) == rows


def test_finished_parts_are_not_run_again_and_failed_ones_are(tmp_path, monkeypatch, capsys):
    ran = []

    def part(name, chosen, limits, budget):
        ran.append(name)
        return [Row(name, "x", math.nan if name == "parity" and ran.count("parity") == 1 else 1.0, "relative")]

    monkeypatch.setattr(gpu, "in_a_process", part)
    arguments = ["--parts", "limits,parity,rl-0.5B", "--json", str(tmp_path / "rows.json"), "--device", "cpu"]
    assert gpu.main(arguments) == 0
    assert gpu.main(arguments) == 0
    assert ran == ["limits", "parity", "rl-0.5B", "parity"]
    assert gpu.main([*arguments, "--minutes", "0.1"]) == 0
    assert "not run" not in capsys.readouterr().out


def test_a_failing_part_is_one_line(capsys):
    (row,) = gpu.attempt("decode-9B", lambda: gpu.measure("decode-9B", "cpu", True, LIMITS, 1))
    assert math.isnan(row.value)
    assert "KeyError" in row.note
    assert "failed" in table([row])


def test_a_slow_part_is_stopped_and_reported():
    (row,) = gpu.in_a_process("parity", QUICK, None, 0.05)
    assert "stopped after" in row.note


@pytest.mark.slow
def test_a_part_in_a_separate_process_returns_its_rows():
    rows = gpu.in_a_process("limits", QUICK, None, 200)
    assert [row.case for row in rows] == ["products", "copying"]
    assert Limits(**gpu.limits_of(rows)).products == rows[0].value * 1e12


def test_a_part_whose_library_is_missing_is_not_run():
    def missing():
        raise ModuleNotFoundError("No module named 'trl'", name="trl")
        yield

    (row,) = gpu.attempt("trl-0.5B", missing)
    assert row.note == "not run: trl is not installed"


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


def test_the_substitute_for_pydantic_has_defaults_and_fields():
    class Part(BaseModel):
        first: int = _field(ge=0)
        second: float = _field(2.0, gt=0)

    class More(Part):
        third: str = "x"

    assert vars(More(first=1)) == {"first": 1, "second": 2.0, "third": "x"}
    with pytest.raises(TypeError, match="needs first"):
        More()
    with pytest.raises(TypeError, match="has no fourth"):
        More(first=1, fourth=2)


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


def test_the_table_shows_missing_values_as_dashes():
    text = table([Row("a", "b", 1234.5, "tokens/s", share=float("nan"), memory=float("nan"))])
    assert "nan" not in text
    assert "1,234 tokens/s" in text


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
    assert done.returncode == 0, done.stderr[-2000:]
    parts = json.loads(file.read_text())
    assert set(parts) == set(gpu.BUDGETS)
    failed = {name for name, rows in parts.items() if any(math.isnan(row["value"]) for row in rows)}
    # Beside other work, compiling takes longer than a GPU machine is given for it.
    late = {name for name in failed if parts[name][-1]["note"].startswith("stopped after")}
    for name in ("server-killed-4B", "ray-gspo-8", "sft-4B-liger"):
        assert parts[name][0]["note"].startswith(("not run: it needs vLLM on a GPU", "InputError: model.fused liger"))
    needs_more = {"server-killed-4B", "ray-gspo-8", "sft-4B-liger"}
    assert failed <= {"trl-0.5B", "trl-grpo-0.5B"} | needs_more | late, {name: parts[name] for name in failed}
    assert late <= {"sft-4B-compiled", "trl-0.5B", "trl-grpo-0.5B"}
    assert all(parts[name][0]["check"].startswith("passed") for name in ("run-killed", "gpus-2", "ray-8"))
    assert parts["run-vllm"][0]["check"].startswith("passed")
