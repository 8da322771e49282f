"""`posttrain doctor`: facts, choices and remedies of this machine, and the measured speed."""

import os

import numpy as np
import pytest
import torch

import posttrain
from posttrain import doctor
from posttrain.cli.main import main
from posttrain.engines.local.cpu.kernel import decoding_kernel
from posttrain.episode import RewardStreams
from posttrain.errors import RunError
from posttrain.training.learner import Learner


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
        lines = list(doctor.report(speed=False))
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


def test_busy_processes_are_named(monkeypatch, tmp_path):
    ticks = os.sysconf("SC_CLK_TCK")

    def write(pid, name, seconds):
        (tmp_path / str(pid)).mkdir(exist_ok=True)
        times = f"{int(seconds * ticks)} 0"
        (tmp_path / str(pid) / "stat").write_text(f"{pid} ({name}) R 1 1 1 0 -1 0 0 0 0 0 {times} 0 0 20 0 1\n")

    def later(seconds):
        for pid, name, used in (
            (7, "some (job", 10.5),
            (8, "cc1plus", 11.0),
            (9, "idle", 5.0),
            (os.getpid(), "me", 3.0),
        ):
            write(pid, name, used)

    for pid, name, used in ((7, "some (job", 10.0), (8, "cc1plus", 10.0), (9, "idle", 5.0), (os.getpid(), "me", 1.0)):
        write(pid, name, used)
    monkeypatch.setattr(doctor.time, "sleep", later)
    assert doctor.busy_processes(tmp_path, 1.0) == ["cc1plus (8)", "some (job (7)"]
    assert doctor.busy_processes(tmp_path / "none", 1.0) == []


def test_remedies_follow_from_the_machine(monkeypatch):
    monkeypatch.setattr("posttrain.engines.local.cpu.kernel.compiler", lambda: None)
    monkeypatch.setattr("posttrain.models.load.has_bfloat16", lambda device: True)
    monkeypatch.setattr("posttrain.models.cpu.threads.busy_processors", lambda: 2.0)
    monkeypatch.setattr(doctor, "memory", lambda: (2**33, 2**30))
    monkeypatch.setattr(doctor, "busy_processes", lambda: ["cc1plus (8)"])
    sentences = " ".join(doctor.remedies())
    for text in (
        "install a C++ compiler",
        "model.dtype=auto",
        "end other busy processes: cc1plus (8)",
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


def test_the_demo_takes_its_limit_on_slow_machines():
    fast = doctor.Speed("bfloat16", 2, 32, 6, episodes=20.0, tokens=1000.0, updated=20.0)
    assert fast.demo_minutes() == pytest.approx((6.7 + 464 / 20 * 2.5 / 6 + 896 / 10 * 2.5 / 6) / 60)
    slow = doctor.Speed("float32", 1, 16, 2, episodes=1.0, tokens=100.0, updated=1.0)
    assert slow.demo_minutes() == pytest.approx(67 / 60 + 464 / 60 * 2.5 / 6 + 3)


@pytest.fixture
def updates(monkeypatch):
    """The episodes of every update that changed the weights, and whether each of their sampled tokens had credit."""
    original, done = Learner.update, []

    def update(learner, episodes, credit):
        version = learner.policy.version
        metrics = original(learner, episodes, credit)
        masks = [stream.sampled for episode in episodes for stream in episode.streams]
        values = [value for streams in credit.values for value in streams]
        assert all(np.array_equal(value != 0, mask) for value, mask in zip(values, masks, strict=True))
        assert metrics["optimizer/gradient_norm"] > 0
        assert learner.policy.version == version + 1
        done.append(episodes)
        return metrics

    monkeypatch.setattr(Learner, "update", update)
    return done


@pytest.fixture
def clock(monkeypatch):
    """`clock[0]`: the seconds that everything appears to take. It is done once."""
    state = [1.0]
    monkeypatch.setattr(doctor, "timed", lambda work, seconds: ([work(1)], state[0]))
    return state


def test_speed_is_measured_on_updates_that_train_every_episode(tiny_model, updates):
    speed = doctor.measure(str(tiny_model), seconds=0.1)
    assert speed.episodes > 0
    assert speed.tokens > speed.updated > 0
    assert len(updates) >= 2


def test_a_fast_machine_plays_whole_episodes_and_trains_on_all_of_them(tiny_model, updates, clock):
    clock[0] = 0.1
    speed = doctor.measure(str(tiny_model), seconds=2.0)
    assert (speed.in_flight, speed.turns) == (32, 6)
    assert len(updates[-1]) == 32
    assert speed.tokens == pytest.approx(doctor.computed_tokens(updates[-1]) / 0.1)
    turns = sum(len(episode.turns) for episode in updates[-1])
    assert speed.updated == pytest.approx(turns / 6 / 0.1)


def test_a_slow_machine_plays_few_turns_and_trains_on_two_episodes(tiny_model, updates, clock):
    clock[0] = 10.0
    speed = doctor.measure(str(tiny_model), seconds=2.0)
    assert (speed.in_flight, speed.turns) == (16, 2)
    assert [len(episodes) for episodes in updates] == [2, 2]
    turns = sum(len(episode.turns) for episode in updates[-1])
    assert speed.updated == pytest.approx(turns / 6 / 10)
    assert speed.episodes <= 16 * 2 / 6 / 10


def test_an_update_that_trains_nothing_is_an_error(tiny_model, monkeypatch):
    monkeypatch.setattr(doctor, "every_token", lambda episodes: posttrain.advantages(episodes, rewards=zeros(episodes)))
    with pytest.raises(RunError, match="skipped the measured update"):
        doctor.measure(str(tiny_model), seconds=0.1)


def zeros(episodes):
    return RewardStreams([[np.zeros(len(stream), dtype=np.float32) for stream in e.streams] for e in episodes])


def test_the_measurement_uses_the_threads_of_a_run(monkeypatch):
    monkeypatch.setattr("posttrain.models.cpu.threads.busy_processors", lambda: 3.0)
    monkeypatch.setattr("posttrain.models.cpu.threads.threads_beside", lambda busy: 1 if busy == 3.0 else None)
    monkeypatch.setattr("posttrain.models.load.resolve_device", lambda name: torch.device("cpu"))
    monkeypatch.setattr(doctor, "_measured", lambda model, seconds: torch.get_num_threads())
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    try:
        assert doctor.measure() == 1
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(before)


def test_the_report_announces_the_measurement_and_names_its_basis(monkeypatch):
    seen = []

    def measure():
        seen.append("measured")
        return doctor.Speed("float32", 1, 16, 2, episodes=0.5, tokens=31.0, updated=0.2)

    monkeypatch.setattr(doctor, "measure", measure)
    printed = "\n".join(doctor.report(announce=seen.append))
    assert "measuring" in seen[0]
    assert seen[1:] == ["measured"]
    assert "measuring" not in printed
    for text in (
        "float32 with 1 thread:",
        "16 in flight, extrapolated from episodes of 2 turns",
        "31 tokens per second",
    ):
        assert text in printed


def test_a_missing_model_is_named(monkeypatch):
    monkeypatch.setattr(doctor, "DEMO_MODEL", "packaged:none")
    monkeypatch.setattr(doctor.measure, "__defaults__", ("packaged:none", 1.0))
    (line,) = doctor._speed_lines()
    assert line.startswith("not measured: ")
