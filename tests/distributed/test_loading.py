"""No process has a whole model in memory of its own: files are mapped, each process copies its shards, and rank 0 writes files
tensor by tensor."""

import ctypes
import json
import re
import threading
import time
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3MoeConfig

from posttrain.distributed.world import current_world
from posttrain.models import writing
from posttrain.models.policy import Policy
from tests.conftest import make_tokenizer, tiny_config

from . import together

MIB = 2**20
_MMAP_THRESHOLD = -3
"""A setting of `mallopt`."""


def private_memory():
    """Bytes of this process that are not backed by files."""
    return 1024 * int(re.search(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())[1])


@contextmanager
def watched(numbers, name):
    """The largest private memory inside the block, beside that before."""
    peak, done = [0], threading.Event()

    def watch():
        while not done.is_set():
            peak[0] = max(peak[0], private_memory())
            time.sleep(0.002)

    before = private_memory()
    thread = threading.Thread(target=watch)
    thread.start()
    try:
        yield
    finally:
        done.set()
        thread.join()
        numbers[name] = peak[0] - before


def passed_through(path, out, dtype):
    """Load, save, restore and export a sharded model; files have 16 MiB."""
    writing.FILE_BYTES = 16 * MIB
    # The C library returns blocks of this size to the system when they are freed, as it does with those of large models.
    ctypes.CDLL(None).mallopt(_MMAP_THRESHOLD, MIB // 4)
    numbers = {}
    with watched(numbers, "load"):
        policy = Policy(str(path), dtype=dtype, threads=1)
    numbers["shards"] = sum(p.to_local().numel() * p.element_size() for p in policy.model.parameters())
    with watched(numbers, "save"):
        policy.save(Path(out) / "saved")
    with watched(numbers, "restore"):
        policy.restore(Path(out) / "saved")
    with watched(numbers, "export"):
        policy.export(Path(out) / "exported")
    (Path(out) / f"{current_world().rank}.json").write_text(json.dumps(numbers))


def save_model(path, family):
    tokenizer = make_tokenizer()
    if family == "llama":
        config = tiny_config("llama", len(tokenizer))
        config.update({"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 24})
    else:
        sizes = {"hidden_size": 512, "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 32}
        experts = {"num_experts": 8, "num_experts_per_tok": 2, "moe_intermediate_size": 512}
        config = Qwen3MoeConfig(vocab_size=len(tokenizer), num_hidden_layers=12, **sizes, **experts)
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(path)
    tokenizer.save_pretrained(path)


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
@pytest.mark.parametrize(("family", "dtype"), [("llama", "bfloat16"), ("qwen3_moe", "bfloat16"), ("llama", "float32")])
def test_a_process_allocates_its_shards_alone(tmp_path, family, dtype):
    """Also of experts, which are converted, and of weights in another dtype than that of the files."""
    path = tmp_path / "model"
    save_model(path, family)
    whole = Policy(str(path), dtype=dtype, threads=1).model  # which also measures its exactness
    count, size = (sum(map(of, whole.parameters())) for of in (torch.numel, lambda p: p.nbytes))
    job = {"call": passed_through, "arguments": (path, tmp_path, dtype)}
    together.succeed(2, [job], tmp_path)
    for rank in range(2):
        numbers = json.loads((tmp_path / f"{rank}.json").read_text())
        assert numbers["shards"] == pytest.approx(4 * count / 2, rel=0.02)
        assert numbers["load"] < numbers["shards"] + 0.3 * size, numbers
        assert max(numbers[what] for what in ("save", "restore", "export")) < 0.35 * size, numbers
    for folder in ("saved", "exported"):
        assert len(list((tmp_path / folder).glob("model-*-of-*.safetensors"))) > 3
        again = AutoModelForCausalLM.from_pretrained(tmp_path / folder, dtype=dtype).state_dict()
        assert all(torch.equal(tensor, again[name]) for name, tensor in whole.state_dict().items())


def test_files_of_a_sharded_model_are_small_and_have_an_index(tiny_model, tmp_path, monkeypatch):
    monkeypatch.setattr(writing, "FILE_BYTES", 20_000)
    policy = Policy(str(tiny_model), threads=1)
    writing.write_gathered(policy.model, tmp_path, policy.weights())()
    files = sorted(tmp_path.glob("*.safetensors"))
    assert len(files) > 2
    assert files[-1].name == f"model-{len(files):05}-of-{len(files):05}.safetensors"
    assert len(json.loads((tmp_path / "model.safetensors.index.json").read_text())["weight_map"]) > len(files)
    again = AutoModelForCausalLM.from_pretrained(tmp_path).state_dict()
    assert all(torch.equal(tensor, again[name]) for name, tensor in policy.model.state_dict().items())
