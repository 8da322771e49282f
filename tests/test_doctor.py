"""`posttrain doctor`: facts about this machine."""

import os
import subprocess
import sys

import torch

import posttrain
from posttrain import doctor
from posttrain.cli.main import main


def test_it_names_versions_devices_and_missing_extras(capsys, monkeypatch):
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    assert main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    facts = {name.strip(): fact.strip() for name, _, fact in (line.partition("  ") for line in lines)}
    assert posttrain.__version__ in facts["posttrain"]
    assert torch.__version__ in facts["torch"]
    assert str(os.cpu_count()) in facts["processor"]
    assert "OMP_WAIT_POLICY=passive" in facts["variables"]
    assert {"missing extras", "vector units", "GPU", "C++ compiler"} <= facts.keys()


def test_a_compiler_that_does_not_exist_is_reported_as_none():
    code = "import sys; from posttrain.cli.main import main; sys.exit(main(['doctor']))"
    command = [sys.executable, "-c", code]
    environment = os.environ | {"CXX": "nosuchcompiler"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=True)
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("C++ compiler")]
    assert line.split() == ["C++", "compiler", "none"]


def test_vector_units_are_read(tmp_path):
    (tmp_path / "cpuinfo").write_text("processor : 0\nflags : fpu avx2 avx512f amx_bf16 sse\n")
    assert doctor.vector_units(tmp_path / "cpuinfo") == ["avx2", "avx512f", "amx_bf16"]
    assert doctor.vector_units(tmp_path / "none") == []
