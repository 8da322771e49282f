"""`posttrain doctor`: facts about this machine."""

import os
import subprocess
import sys

import torch

import posttrain
from posttrain import doctor


def test_it_names_versions_devices_and_missing_extras():
    command = [sys.executable, "-c", "import sys; from posttrain.cli.main import main; sys.exit(main(['doctor']))"]
    variables = os.environ | {"CXX": "nosuchcompiler", "OMP_WAIT_POLICY": "passive"}
    done = subprocess.run(command, env=variables, capture_output=True, text=True, check=True)
    facts = {line.partition("  ")[0].strip(): line.partition("  ")[2].strip() for line in done.stdout.splitlines()}
    assert posttrain.__version__ in facts["posttrain"]
    assert torch.__version__ in facts["torch"]
    assert str(os.cpu_count()) in facts["processor"]
    assert "OMP_WAIT_POLICY=passive" in facts["variables"]
    assert facts["C++ compiler"] == "none"
    assert {"missing extras", "vector units", "GPU"} <= facts.keys()


def test_vector_units_are_read(tmp_path):
    (tmp_path / "cpuinfo").write_text("processor : 0\nflags : fpu avx2 avx512f amx_bf16 sse\n")
    assert doctor.vector_units(tmp_path / "cpuinfo") == ["avx2", "avx512f", "amx_bf16"]
    assert doctor.vector_units(tmp_path / "none") == []
