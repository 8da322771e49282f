"""`posttrain doctor`: facts, choices and remedies of this machine."""

import os

import torch

import posttrain
from posttrain import doctor
from posttrain.cli.main import main
from posttrain.engines.local.cpu.kernel import decoding_kernel


def test_it_names_the_machine_and_the_choices(capsys, monkeypatch):
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    assert main(["doctor"]) == 0
    printed = capsys.readouterr().out
    for text in (
        f"torch               {torch.__version__}",
        f"{os.cpu_count()} logical processors",
        "GiB free",
        "OMP_WAIT_POLICY=passive",
        "missing extras",
        "model.device",
        "model.dtype",
        "threads",
        "unset OMP_WAIT_POLICY",
    ):
        assert text in printed


def test_a_variable_that_posttrain_sets_is_marked(monkeypatch):
    monkeypatch.setenv("GOMP_SPINCOUNT", posttrain.SPIN_COUNT)
    assert "GOMP_SPINCOUNT=1000 (posttrain's default)" in dict(doctor.machine())["variables"]
    monkeypatch.setenv("GOMP_SPINCOUNT", "7")
    assert "posttrain's default" not in dict(doctor.machine())["variables"]


def test_a_compiler_that_does_not_exist_gives_one_remedy_and_no_warning(monkeypatch, recwarn):
    monkeypatch.setenv("CXX", "nosuchcompiler")
    monkeypatch.setattr("posttrain.models.load.resolve_device", lambda name: torch.device("cpu"))
    decoding_kernel.cache_clear()
    try:
        lines = list(doctor.report())
    finally:
        decoding_kernel.cache_clear()
    assert [line for line in lines if "C++ compiler" in line] == ["  C++ compiler        none"]
    assert sum("unset CXX, or install it" in line for line in lines) == 1
    assert not [warning for warning in recwarn if "CXX" in str(warning.message)]


def test_hidden_vector_units_have_a_remedy(monkeypatch):
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "DEFAULT")
    monkeypatch.setattr(doctor, "vector_units", lambda: ["avx2"])
    monkeypatch.setattr("posttrain.models.load.resolve_device", lambda name: torch.device("cpu"))
    monkeypatch.delenv("ATEN_CPU_CAPABILITY", raising=False)
    assert "ATEN_CPU_CAPABILITY" not in " ".join(doctor.remedies())
    monkeypatch.setenv("ATEN_CPU_CAPABILITY", "default")
    assert "unset ATEN_CPU_CAPABILITY" in " ".join(doctor.remedies())
    monkeypatch.setattr(torch.backends.cpu, "get_cpu_capability", lambda: "AVX2")
    assert "ATEN_CPU_CAPABILITY" not in " ".join(doctor.remedies())


def test_remedies_follow_from_the_machine(monkeypatch):
    monkeypatch.setattr("posttrain.engines.local.cpu.kernel.compiler", lambda: None)
    monkeypatch.setattr("posttrain.models.load.has_bfloat16", lambda device: True)
    monkeypatch.setattr("posttrain.models.cpu.threads.busy_processors", lambda: 2.0)
    monkeypatch.setattr(doctor, "memory", lambda: (2**33, 2**30))
    sentences = " ".join(doctor.remedies())
    for text in (
        "install a C++ compiler",
        "model.dtype=auto",
        "end other busy processes",
        "1.0 GiB are left",
    ):
        assert text in sentences
    monkeypatch.setattr("posttrain.engines.local.cpu.kernel.compiler", lambda: "g++")
    monkeypatch.setattr("posttrain.models.load.has_bfloat16", lambda device: False)
    monkeypatch.setattr("posttrain.models.cpu.threads.busy_processors", lambda: 0.0)
    monkeypatch.setattr(doctor, "memory", lambda: (2**33, 2**33))
    rest = " ".join(doctor.remedies())
    for text in ("compiler", "dtype", "busy processes", "are left"):
        assert text not in rest


def test_vector_units_and_memory_are_read(tmp_path):
    (tmp_path / "cpuinfo").write_text("processor : 0\nflags : fpu avx2 avx512f amx_bf16 sse\n")
    assert doctor.vector_units(tmp_path / "cpuinfo") == ["avx2", "avx512f", "amx_bf16"]
    (tmp_path / "meminfo").write_text("MemTotal: 2048 kB\nMemFree: 1 kB\nMemAvailable: 1024 kB\nHugePages_Total: 0\n")
    assert doctor.memory(tmp_path / "meminfo") == (2048 * 1024, 1024 * 1024)
    assert doctor.memory(tmp_path / "none") == (0, 0)
