"""`posttrain doctor`: facts, choices and remedies of this machine, and the measured speed."""

import os

import pytest
import torch

from posttrain import doctor
from posttrain.cli.main import main


def test_it_names_the_machine_and_the_choices(capsys, monkeypatch):
    monkeypatch.setenv("OMP_WAIT_POLICY", "passive")
    assert main(["doctor", "--quick"]) == 0
    printed = capsys.readouterr().out
    for text in (
        f"torch               {torch.__version__}",
        f"{os.cpu_count()} logical processors",
        "GiB free",
        "OMP_WAIT_POLICY=passive",
        "model.device",
        "model.dtype",
        "threads",
        "unset OMP_WAIT_POLICY",
    ):
        assert text in printed
    assert "Speed" not in printed


def test_remedies_follow_from_the_machine(monkeypatch):
    monkeypatch.setattr("posttrain.engines.local.cpu.kernel.compiler", lambda: None)
    monkeypatch.setattr("posttrain.models.load.has_bfloat16", lambda device: True)
    monkeypatch.setattr("posttrain.models.cpu.threads.busy_processors", lambda: 2.0)
    monkeypatch.setattr(doctor, "memory", lambda: (2**33, 2**30))
    sentences = " ".join(doctor.remedies())
    for text in ("install a C++ compiler", "model.dtype=auto", "end the other 2 busy threads", "1.0 GiB are left"):
        assert text in sentences
    monkeypatch.setattr("posttrain.engines.local.cpu.kernel.compiler", lambda: "g++")
    monkeypatch.setattr("posttrain.models.load.has_bfloat16", lambda device: False)
    monkeypatch.setattr("posttrain.models.cpu.threads.busy_processors", lambda: 0.0)
    monkeypatch.setattr(doctor, "memory", lambda: (2**33, 2**33))
    rest = " ".join(doctor.remedies())
    for text in ("compiler", "dtype", "busy threads", "are left"):
        assert text not in rest


def test_vector_units_and_memory_are_read(tmp_path):
    (tmp_path / "cpuinfo").write_text("processor : 0\nflags : fpu avx2 avx512f amx_bf16 sse\n")
    assert doctor.vector_units(tmp_path / "cpuinfo") == ["avx2", "avx512f", "amx_bf16"]
    (tmp_path / "meminfo").write_text("MemTotal: 2048 kB\nMemFree: 1 kB\nMemAvailable: 1024 kB\nHugePages_Total: 0\n")
    assert doctor.memory(tmp_path / "meminfo") == (2048 * 1024, 1024 * 1024)
    assert doctor.memory(tmp_path / "none") == (0, 0)


def test_the_demo_takes_its_limit_on_slow_machines():
    fast = doctor.Speed("bfloat16", episodes=20.0, tokens=1000.0, updated=20.0)
    assert fast.demo_minutes() == pytest.approx((11.75 + 592 / 20 + 1280 / 10) / 60)
    slow = doctor.Speed("float32", episodes=1.0, tokens=100.0, updated=1.0)
    assert slow.demo_minutes() == pytest.approx(117.5 / 60 + 592 / 60 + 5)


def test_speed_is_measured_on_the_real_path(tiny_model):
    speed = doctor.measure(str(tiny_model), seconds=0.1)
    assert speed.episodes > 0
    assert speed.tokens > speed.updated > 0


def test_a_missing_model_is_named(monkeypatch):
    monkeypatch.setattr(doctor, "DEMO_MODEL", "packaged:none")
    monkeypatch.setattr(doctor.measure, "__defaults__", ("packaged:none", 1.0))
    (line,) = doctor._speed_lines()
    assert line.startswith("not measured: ")
