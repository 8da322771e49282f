"""Runs that do not fit on their GPUs are refused, and gradients are reduced as the memory allows."""

import pytest
import torch

from posttrain.cli.main import main
from posttrain.errors import InputError
from posttrain.models import load
from posttrain.planning import memory as fit
from posttrain.planning.model_sizes import published_sizes
from posttrain.recipe.compose import load_recipe
from posttrain.recipe.plan import DEVICES, Device
from posttrain.stages import run_stage


@pytest.fixture(autouse=True)
def _published(monkeypatch):
    monkeypatch.setattr(fit, "sizes_at", published_sizes)


def sft(model, *words):
    return load_recipe([], [f"model.path=Qwen/{model}", "data.train=a.jsonl", *words], "sft")


@pytest.mark.parametrize(
    ("model", "words", "sync"),
    [
        ("Qwen3-1.7B", [], "per_update"),
        ("Qwen3-14B", [], "per_forward"),  # 56 GB of whole float32 gradients beside 21 GB of state
        ("Qwen3-14B", ["hardware.gradient_sync=per_forward"], "per_forward"),
        ("Qwen3-14B", ["model.lora={rank: 8}"], "per_update"),
        ("Qwen3-14B", ["hardware.offload=all"], "per_update"),  # it has no effect there
    ],
)
def test_gradients_are_whole_where_they_fit(model, words, sync):
    recipe = sft(model, "hardware.processes=8", "model.dtype=bfloat16", *words)
    chosen = fit.fitted(recipe, DEVICES["h100"]).hardware
    assert chosen.gradient_sync == sync
    assert chosen.reduces_per_forward == (sync == "per_forward" or recipe.hardware.offload == "all")


@pytest.mark.parametrize(
    ("words", "remedy"),
    [
        (["hardware.processes=8", "hardware.gradient_sync=per_update"], "fits with hardware.gradient_sync=per_forward"),
        ([], "it fits with "),
    ],
)
def test_tensors_that_do_not_fit_are_refused_with_a_remedy_that_fits(words, remedy):
    recipe = sft("Qwen3-14B", *words)
    with pytest.raises(InputError, match="the run needs an estimated") as refused:
        fit.fitted(recipe, DEVICES["h100"])
    assert remedy in str(refused.value)
    keys = str(refused.value).rpartition("it fits with ")[2].split()
    fit.fitted(sft("Qwen3-14B", *words, *keys), DEVICES["h100"])


def test_activations_alone_refuse_nothing():
    recipe = sft("Qwen3-1.7B", "data.max_tokens=32768", "learner.tokens_per_batch=32768", "model.dtype=bfloat16")
    needed = fit.at_peak(recipe, published_sizes("Qwen3-1.7B"), None)[0]
    device = Device("a GPU", sum(count for what, count in needed.items() if what != fit.ACTIVATIONS) + 1)
    assert sum(needed.values()) > device.memory
    fit.fitted(recipe, device)


def test_rows_that_are_too_long_for_one_gpu_fit_where_gpus_share_them():
    words = [
        "hardware.processes=8",
        "data.max_tokens=524288",
        "learner.tokens_per_batch=524288",
        "model.dtype=bfloat16",
    ]
    sizes, device = published_sizes("Qwen3-1.7B"), DEVICES["h100"]
    (sentence,) = fit.too_large(sft("Qwen3-1.7B", *words), sizes, device)
    keys = sentence.rpartition("it fits with ")[2].split()
    assert any(key.startswith("hardware.sequence_parallel=") for key in keys)
    assert fit.too_large(sft("Qwen3-1.7B", *words, *keys), sizes, device) == []


def test_a_run_is_refused_before_it_has_a_folder(tiny_model, tmp_path, monkeypatch):
    monkeypatch.undo()
    monkeypatch.setattr(load, "resolve_device", lambda name: torch.device("cuda"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "a thin GPU")
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: torch.tensor(0))
    monkeypatch.setattr(torch.Tensor, "total_memory", 1000, raising=False)
    recipe = load_recipe([], [f"model.path={tiny_model}", f"runs={tmp_path}", "environment.type=bandit"], "rl")
    with pytest.raises(InputError, match="and a thin GPU has"):
        run_stage(recipe)
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("memory", "words", "code"),
    [
        (8 << 30, [], 3),
        (8 << 30, ["model.lora=true"], 0),
        (1 << 30, ["model.lora=true"], 3),
        (None, [], 0),
        (1 << 30, ["--on", "h100"], 0),
    ],
)
def test_a_dry_run_refuses_what_is_larger_than_this_machine(memory, words, code, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr("posttrain.runs.machine.memory_of_processors", lambda: memory)
    monkeypatch.setattr("posttrain.planning.model_sizes.model_sizes", published_sizes)
    monkeypatch.chdir(tmp_path)
    asked = ["rl", "environment.type=bandit", "model.path=Qwen/Qwen3-0.6B", "rollout.tokens_per_turn=8", *words]
    assert main([*asked, "--dry-run"]) == code
    printed = capsys.readouterr()
    assert ("does not fit" in printed.err) == (code == 3)
    assert ("may need up to" in printed.out) == (memory == 8 << 30 and code == 0)


def rl(model, *words):
    words = ["environment.type=bandit", "hardware.processes=8", "model.dtype=bfloat16", *words]
    return load_recipe([], [f"model.path=Qwen/{model}", *words], "rl")


def test_the_moment_that_needs_the_most_without_activations_decides():
    """Activations of Qwen3-30B-A3B are larger than what sampling needs, and that does not fit either."""
    with pytest.raises(InputError, match="the run needs an estimated 77"):
        fit.fitted(rl("Qwen3-30B-A3B", "model.lora.rank=16", "engine.type=local"), DEVICES["h100"])


@pytest.mark.parametrize(
    ("words", "fits"),
    [
        (["engine.servers=8"], False),
        (["hardware.ray=auto", "hardware.engines.count=8", "hardware.engines.colocated=true"], False),
        (["engine.tensor_parallel=4", "engine.servers=2"], True),
        (["engine.gpu_memory_utilization=0.85"], True),
    ],
)
def test_an_engine_whose_weights_exceed_its_share_is_refused(words, fits):
    recipe = rl("Qwen3-32B", "model.lora.rank=16", "engine.type=vllm", *words)
    if fits:
        fit.fitted(recipe, DEVICES["h100"])
        return
    with pytest.raises(
        InputError, match=r"weights and a context need 61.*_utilization 0.5 of h100 is 37.3 GiB; raise it"
    ):
        fit.fitted(recipe, DEVICES["h100"])
