"""Small real models for the tests: random weights, a real tokenizer, a chat template."""

import functools
import gc
import logging
import os
import re
import tempfile
from pathlib import Path

import pytest
from hypothesis import settings

# Examples are not timed: on a busy machine any of them can take long.
settings.register_profile("untimed", deadline=None)
settings.load_profile("untimed")

# The tests compare numbers in the float32 of a processor; on a GPU, models would load in bfloat16.
os.environ["CUDA_VISIBLE_DEVICES"] = ""
_STATE = tempfile.TemporaryDirectory(prefix="posttrain-state-")
os.environ["XDG_STATE_HOME"] = _STATE.name  # what runs of the tests used is not remembered for those of the user
os.environ["POSTTRAIN_PLOTS"] = "0"  # figures take most of the time of a small run
logging.disable(logging.DEBUG)  # pytest would keep the hundred lines of torch for each checkpoint
os.fsync = lambda descriptor: None  # tests kill processes, never the machine, and a run waits for the disk fifty times

FOLDER = Path.cwd()
CHATML = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
CORPUS = [
    "You walk on a frozen lake. Reach the goal and keep off the holes.",
    "Answer with <answer>Up</answer>, <answer>Down</answer>, <answer>Left</answer> or <answer>Right</answer>.",
    "row column You Goal Holes 0 1 2 3 4 5 phoenix dragon arm reward user assistant system think",
]


def make_tokenizer():
    """A byte-level BPE tokenizer trained on a few lines, so that any text round-trips."""
    from tokenizers import ByteLevelBPETokenizer
    from transformers import PreTrainedTokenizerFast

    bpe = ByteLevelBPETokenizer()
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    bpe.train_from_iterator(CORPUS * 4, vocab_size=400, min_frequency=2, special_tokens=special, show_progress=False)
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe._tokenizer, eos_token="<|im_end|>", bos_token="<|im_start|>", pad_token="<|endoftext|>"
    )
    tokenizer.chat_template = CHATML
    return tokenizer


def tiny_config(architecture: str, vocabulary: int):
    """A two-layer decoder with grouped key heads."""
    from transformers import LlamaConfig, Qwen2Config, Qwen3Config

    classes = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}
    return classes[architecture](
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        max_position_embeddings=2048,
        tie_word_embeddings=architecture != "qwen2",
        bos_token_id=1,
        eos_token_id=2,
        pad_token_id=0,
    )


def save_tiny_model(directory: Path, architecture: str = "llama", seed: int = 0) -> Path:
    """Write a random model with its tokenizer to `directory`."""
    import torch
    from transformers import AutoModelForCausalLM

    tokenizer = make_tokenizer()
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(tiny_config(architecture, len(tokenizer)), dtype=torch.float32)
    model.save_pretrained(directory)
    tokenizer.save_pretrained(directory)
    return directory


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory) -> Path:
    """Directory of a tiny random Llama with a byte-level tokenizer and a ChatML template."""
    return save_tiny_model(tmp_path_factory.mktemp("models") / "tiny")


@pytest.fixture(scope="session")
def tiny_policy(tiny_model):
    """A policy over the tiny model. Tests that change its weights load their own."""
    from posttrain.models.policy import Policy
    from posttrain.recipe.model import ModelRecipe

    return Policy(ModelRecipe(path=str(tiny_model)))


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item):
    """A test that leaves another current folder fails: later tests may execute the Python files of this folder only."""
    yield
    left = Path.cwd()
    if left != FOLDER:
        os.chdir(FOLDER)
        pytest.fail(f"the test has left the current folder {left}")


@pytest.hookimpl(wrapper=True)
def pytest_collection():
    """Modules and collected tests live until the end, so the garbage collector need not search them again and again."""
    gc.disable()
    try:
        return (yield)
    finally:
        gc.freeze()
        gc.enable()


@pytest.fixture(autouse=True, scope="session")
def machine_read_once():
    """Describe the commit once: a run starts git three times for it."""
    from posttrain.runs import machine

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(machine, "_commit", functools.cache(machine._commit))
        yield


@pytest.fixture(autouse=True)
def memory_of_any_machine(monkeypatch):
    """Plans of large models do not depend on the memory of the machine that runs the tests."""
    monkeypatch.setattr("posttrain.runs.machine.memory_of_processors", lambda: None)


@pytest.fixture(autouse=True)
def figures(request, monkeypatch):
    """Draw the figures of runs in tests that are marked `figures`."""
    if request.node.get_closest_marker("figures"):
        monkeypatch.setenv("POSTTRAIN_PLOTS", "1")


LONG = ("cuda_fake", "distributed", "adversary", "vllm", "benchmarks", "journeys", "tune", "training")
"""Folders whose files take longest: they come first, so that no process ends long after the others."""


def pytest_collection_modifyitems(items):
    def place(item):
        tests = Path(__file__).parent
        folder = item.path.relative_to(tests).parts[0] if item.path.is_relative_to(tests) else ""
        return LONG.index(folder) if folder in LONG else len(LONG)

    items.sort(key=place)


def declared(key, metrics):
    """The metric of `metrics` that `key` is, or that it is a limit of an interval or a domain of; None if there is none.

    `validation/loss_low/medicine` is the lower limit of `validation/loss` in the domain `medicine`.
    """
    without_limit = re.sub(r"_(low|high)(?=/|$)", "", key)
    whole = "/".join(without_limit.split("/")[:2])
    metrics = list(metrics)
    for name in dict.fromkeys((key, without_limit, whole)):
        exact = [metric for metric in metrics if metric.name == name]
        for metric in [*exact, *(metric for metric in metrics if metric.matches(name))]:
            return metric
    return None
