"""vLLM under one interpreter with posttrain, adapters sent alone, log-probabilities at another temperature."""

import json
import os
import subprocess

import pytest

from tests.vllm.interpreter import ROOT, needs_vllm, vllm_python
from tests.vllm.models import save_model

pytestmark = [needs_vllm, pytest.mark.slow, pytest.mark.timeout(900)]


def test_adapters_take_effect_under_one_interpreter(tmp_path):
    model = save_model(tmp_path / "tiny", "qwen2", tied=False)
    environment = os.environ | {"PYTHONPATH": f"{ROOT / 'src'}{os.pathsep}{ROOT}"}
    command = [vllm_python(), "-m", "tests.vllm.inside", str(model), str(tmp_path / "told.json")]
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=800, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    assert "Error" not in done.stdout
    told = json.loads((tmp_path / "told.json").read_text())
    assert [step["versions"] for step in told] == [[0], [1], [2]]
    for step in told:
        assert step["ids"] == step["local"]
        assert step["distance"] < 1e-4
    assert told[0]["ids"] != told[1]["ids"] != told[2]["ids"]
