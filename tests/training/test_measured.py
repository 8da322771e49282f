"""The precision and threads that are chosen by measurement, and how runs keep them."""

import io
import json
from types import SimpleNamespace

import pytest
import torch
from rich.console import Console
from transformers import MambaConfig, Qwen3Config

from posttrain.models.load import load_config
from posttrain.recipe.model import ModelRecipe, RewardSource
from posttrain.recipe.rl import RlRecipe
from posttrain.runs.directory import RunDirectory
from posttrain.training import measured
from posttrain.training.stage import with_begun, with_measured


def test_other_busy_processes_are_counted(monkeypatch, tmp_path):
    file = tmp_path / "loadavg"
    file.write_text("0.20 0.18 0.12 4/80 11206\n")
    monkeypatch.setattr(measured, "RUNNING", file)
    monkeypatch.setattr(measured, "INTERVAL", 0.0)
    assert measured.busy_processors() == 3
    file.unlink()
    assert measured.busy_processors() == 0


def test_halves_of_the_threads_and_the_free_processors_are_compared(monkeypatch):
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    for threads, busy, counts in [
        *((1, 0, [1]), (2, 0, [2, 1]), (12, 0, [12, 6, 3, 1])),
        *((12, 2, [12, 10, 6, 3, 1]), (2, 9, [2, 1])),
    ]:
        monkeypatch.setattr(torch, "get_num_threads", lambda threads=threads: threads)
        monkeypatch.setattr(measured, "usable_processors", lambda threads=threads: list(range(threads)))
        assert measured.thread_counts(busy) == counts
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    assert measured.thread_counts(busy) == [threads]


# -- choices from given times ------------------------------------------------------------------------------------------

AVX2 = {("float32", 2): 2.0, ("float32", 1): 3.9, ("bfloat16", 2): 40.0, ("bfloat16", 1): 80.0}
AMX = {("float32", 2): 2.0, ("float32", 1): 3.9, ("bfloat16", 2): 0.7, ("bfloat16", 1): 1.1}
SMALL_ON_AMX = {("float32", 2): 1.0, ("float32", 1): 0.8, ("bfloat16", 2): 1.2, ("bfloat16", 1): 1.0}
ALIKE = {("float32", 2): 1.0, ("float32", 1): 1.9, ("bfloat16", 2): 0.99, ("bfloat16", 1): 1.8}


@pytest.fixture
def machine(monkeypatch, tmp_path):
    """A machine with two processors whose candidates take the seconds of `times`; `timed` lists those that were timed."""
    found = SimpleNamespace(times=dict(AVX2), timed=[], threads=2, multiplies=True, cache=tmp_path / "cache")

    class Passes:
        def __init__(self, model, config, dtype, learns, samples):
            self.dtype = str(dtype).removeprefix("torch.")

        def seconds(self, tokens):
            found.timed.append((self.dtype, found.threads, tokens))
            return found.times[self.dtype, found.threads] * (1.5 if tokens == measured.SIZES[0] else 1.0)

    monkeypatch.setattr(measured, "Passes", Passes)
    monkeypatch.setattr(measured, "multiplies_bfloat16", lambda: found.multiplies)
    monkeypatch.setattr(measured, "busy_processors", lambda: 0.0)
    monkeypatch.setattr(measured, "usable_processors", lambda: [0, 1])
    monkeypatch.setattr(torch, "set_num_threads", lambda count: setattr(found, "threads", count))
    monkeypatch.setattr(torch, "get_num_threads", lambda: found.threads)
    monkeypatch.setenv("POSTTRAIN_CACHE", str(found.cache))
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    return found


def choose(path, dtype="auto", counts=(2, 1), **more):
    model = ModelRecipe(path=str(path), device="cpu", dtype=dtype)
    chosen = measured.choose(model, list(counts), True, False, **more)
    return chosen["dtype"], chosen["threads"]


@pytest.mark.parametrize(
    ("times", "chosen"),
    [(AVX2, ("float32", 2)), (AMX, ("bfloat16", 2)), (SMALL_ON_AMX, ("float32", 1)), (ALIKE, ("float32", 2))],
)
def test_the_fastest_precision_and_number_of_threads_are_chosen(times, chosen, machine, tiny_model):
    machine.times = times
    assert choose(tiny_model) == chosen
    assert times[chosen] <= 1.05 * min(times[dtype, 2] for dtype in ("float32", "bfloat16"))
    assert machine.threads == 2  # torch's number is restored
    if times is AVX2:  # a far slower precision is not timed at full size
        assert ("float32", 2, measured.SIZES[1]) in machine.timed
        assert {tokens for dtype, _, tokens in machine.timed if dtype == "bfloat16"} == {measured.SIZES[0]}


def test_a_precision_that_is_given_is_kept_and_products_that_fail_are_not_tried(machine, tiny_model):
    machine.times = AMX
    assert choose(tiny_model, dtype="float32") == ("float32", 2)
    assert choose(tiny_model, dtype=None, counts=[2]) == ("float32", 2)
    assert choose(tiny_model, dtype="bfloat16") == ("bfloat16", 2)
    machine.multiplies = False
    machine.timed.clear()
    assert choose(tiny_model, keep=False) == ("float32", 2)
    assert {dtype for dtype, _, _ in machine.timed} == {"float32"}


def test_choices_are_stored_by_machine_limits_and_shapes(machine, tiny_model, tmp_path, monkeypatch):
    assert choose(tiny_model) == ("float32", 2)
    machine.times = AMX
    assert choose(tiny_model) == ("float32", 2), "a later run of this model makes the same choice"
    for name, value in (("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_AMX"), ("ATEN_CPU_CAPABILITY", "default")):
        monkeypatch.setenv(name, value)
        assert choose(tiny_model) == ("bfloat16", 2)
        monkeypatch.delenv(name)
    assert choose(tiny_model) == ("float32", 2)
    monkeypatch.setattr(measured, "usable_processors", lambda: [0, 1, 2])
    assert choose(tiny_model) == ("bfloat16", 2)
    monkeypatch.setattr(measured, "usable_processors", lambda: [0, 1])
    other = tmp_path / "other"
    other.mkdir()
    values = json.loads((tiny_model / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(values))
    assert choose(other) == ("float32", 2), "the same shapes in another place"
    (other / "config.json").write_text(json.dumps(values | {"intermediate_size": 96}))
    assert choose(other) == ("bfloat16", 2)
    machine.timed.clear()
    assert choose(tiny_model, keep=False) == ("bfloat16", 2)
    assert machine.timed


def test_a_damaged_choice_is_measured_again_and_one_that_cannot_be_stored_is_made(machine, tiny_model):
    stored = {"dtype": "float32", "threads": 2, "seconds": {}}
    damaged = [json.dumps(stored | one) for one in ({"dtype": "int8"}, {"threads": 64}, {"seconds": 1})]
    for text in ("", "[]", "{", *damaged):
        machine.times = AVX2
        assert choose(tiny_model) == ("float32", 2)
        (file,) = (machine.cache / "measured").iterdir()
        file.write_text(text)
        machine.times = AMX
        assert choose(tiny_model) == ("bfloat16", 2)
        assert json.loads(file.read_text())["dtype"] == "bfloat16"
        file.unlink()
    (machine.cache / "measured").rmdir()
    machine.cache.rmdir()
    machine.cache.write_text("a file in place of the directory")
    assert choose(tiny_model) == ("bfloat16", 2)


# -- runs --------------------------------------------------------------------------------------------------------------


def recipe_of(path, runs, **model):
    return RlRecipe(
        environment={"type": "bandit"}, name="run", runs=str(runs), model={"path": str(path), "device": "cpu"} | model
    )


def test_a_run_stores_its_choice_and_resumes_with_it(machine, tiny_model, tmp_path):
    machine.times = SMALL_ON_AMX | {("bfloat16", 2): 0.5, ("bfloat16", 1): 0.4}
    printed = io.StringIO()
    recipe = recipe_of(tiny_model, tmp_path, dtype="auto", head_dtype="float32")
    begun = with_measured(recipe, Console(file=printed, width=300))
    assert (begun.model.dtype, begun.model.threads, begun.model.head_dtype) == ("bfloat16", 1, "float32")
    assert printed.getvalue().count("\n") == 1
    assert "model.dtype is bfloat16, model.threads is 1" in printed.getvalue()
    assert "1 s in float32 with 2 threads" in printed.getvalue()
    run = RunDirectory.create(begun)
    machine.times = AVX2
    for file in (machine.cache / "measured").iterdir():
        file.unlink()
    resumed = with_begun(recipe, run.load_recipe())
    assert resumed.model == begun.model
    assert with_begun(begun, run.load_recipe()) == begun
    given = recipe_of(tiny_model, tmp_path, dtype="float32", threads=4)
    assert with_begun(given, run.load_recipe()) == given


def test_a_run_in_float32_drops_the_precision_of_the_head(machine, tiny_model, tmp_path):
    recipe = recipe_of(tiny_model, tmp_path, dtype="auto", head_dtype="float32")
    begun = with_measured(recipe, Console(file=io.StringIO()))
    assert (begun.model.dtype, begun.model.head_dtype) == ("float32", "model")
    assert RunDirectory.create(begun).load_recipe() == begun, "the stored recipe can be read"


def test_all_models_with_auto_are_measured(machine, tiny_model, tmp_path):
    machine.times = AMX
    recipe = recipe_of(tiny_model, tmp_path, threads=1)
    source = RewardSource(path=str(tiny_model), dtype="auto")
    begun = with_measured(recipe.model_copy(update={"reward": source}), Console(file=io.StringIO()))
    assert (begun.reward.dtype, begun.model) == ("bfloat16", recipe.model)


@pytest.mark.parametrize("reason", ["deterministic", "ray", "given", "variable", "failing"])
def test_what_is_not_measured_keeps_its_recipe(reason, machine, tiny_model, tmp_path, monkeypatch):
    recipe = recipe_of(tiny_model, tmp_path, dtype="auto")
    if reason in ("deterministic", "ray"):
        value = {"deterministic": True}.get(reason, "auto")
        recipe = recipe.model_copy(update={"hardware": recipe.hardware.model_copy(update={reason: value})})
    elif reason == "given":
        recipe = recipe_of(tiny_model, tmp_path, dtype="float32", threads=2)
    elif reason == "variable":
        monkeypatch.setenv("OMP_NUM_THREADS", "2")
        recipe = recipe_of(tiny_model, tmp_path)
    else:
        recipe = recipe_of("/nowhere", tmp_path, dtype="auto")
    assert with_measured(recipe, Console()) is recipe
    assert not machine.timed


def test_failures_to_measure_are_said_and_choices_beside_busy_processes_are_not_stored(
    machine, tiny_model, tmp_path, monkeypatch
):
    def refuse(*settings, **keys):
        raise RuntimeError("no such layer\nmore")

    printed, recipe = io.StringIO(), recipe_of(tiny_model, tmp_path, dtype="auto")
    with monkeypatch.context() as patch:
        patch.setattr(measured, "choose", refuse)
        assert with_measured(recipe, Console(file=printed, width=300)) is recipe
    assert "RuntimeError: no such layer)" in printed.getvalue()
    monkeypatch.setattr(measured, "busy_processors", lambda: 1.0)
    machine.times = SMALL_ON_AMX
    assert with_measured(recipe_of(tiny_model, tmp_path), Console(file=printed, width=300)).model.threads == 1
    assert "beside 1 busy" in printed.getvalue()
    assert not (machine.cache / "measured").exists()


# -- real passes -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("lora", [None, {"rank": 2}])
def test_passes_of_the_run_are_timed_and_change_no_random_state(dtype, lora, tiny_model):
    model = ModelRecipe(path=str(tiny_model), lora=lora)
    before = torch.random.get_rng_state()
    config = load_config(model)
    config.num_hidden_layers = 8
    with torch.random.fork_rng(devices=[]):
        passes = measured.Passes(model, config, dtype, True, True)
    least = min(passes.seconds(tokens) for tokens in measured.SIZES)
    assert 0 < least < float("inf")
    assert passes.layers == 8
    assert all(bool(torch.isfinite(p).all()) for p in passes.model.parameters())
    assert torch.equal(torch.random.get_rng_state(), before)


def test_estimates_are_of_the_whole_model(tiny_model, monkeypatch):
    config = Qwen3Config(
        vocab_size=50_000, hidden_size=32, intermediate_size=64, num_hidden_layers=10, num_attention_heads=2,
        num_key_value_heads=1, head_dim=16, tie_word_embeddings=False,
    )  # fmt: skip
    passes = measured.Passes(ModelRecipe(path=str(tiny_model)), config, torch.float32, True, False)
    monkeypatch.setattr(passes, "_update", lambda tokens: (1.0, 2.0, 0.0))
    updates = measured.UPDATE / 512
    assert passes.seconds(512) == pytest.approx(updates * (10 * 1.0 + 50_000 / measured.VOCABULARY * 2.0))
    from transformers import Qwen3ForCausalLM

    with torch.device("meta"):
        whole = sum(p.numel() for p in Qwen3ForCausalLM(config).parameters())
    part = sum(p.numel() for p in passes.model.parameters())
    assert passes.weights * part == pytest.approx(whole, rel=1e-3)


def test_models_whose_layers_are_not_packed_are_not_timed(tiny_model):
    config = MambaConfig(vocab_size=64, hidden_size=16, state_size=4, num_hidden_layers=2)
    with pytest.raises(Exception, match=r".+"):
        measured.Passes(ModelRecipe(path=str(tiny_model)), config, torch.float32, True, False)
