"""No process has a whole model in memory of its own: files are mapped, and each process copies its shards."""

import json
import re
import threading
import time
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from posttrain.models.policy import Policy
from tests.conftest import make_tokenizer, tiny_config

from . import together

MIB = 2**20


def private_memory():
    """Bytes of this process that are not backed by files."""
    return 1024 * int(re.search(r"RssAnon:\s+(\d+)", Path("/proc/self/status").read_text())[1])


def loaded(path, out):
    """The largest private memory while the model is loaded and sharded, and after."""
    from posttrain.distributed.world import current_world

    peak, done = [0], threading.Event()

    def watch():
        while not done.is_set():
            peak[0] = max(peak[0], private_memory())
            time.sleep(0.002)

    before = private_memory()
    thread = threading.Thread(target=watch)
    thread.start()
    policy = Policy(str(path), dtype="bfloat16", threads=1)
    done.set()
    thread.join()
    shards = sum(p.to_local().numel() * p.element_size() for p in policy.model.parameters())
    numbers = {"peak": peak[0] - before, "shards": shards}
    (Path(out) / f"{current_world().rank}.json").write_text(json.dumps(numbers))


@pytest.mark.slow
@pytest.mark.skipif(not Path("/proc/self/status").exists(), reason="memory is read from /proc")
def test_a_process_allocates_its_shards_alone(tmp_path):
    tokenizer = make_tokenizer()
    config = tiny_config("llama", len(tokenizer))
    config.update({"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 24})
    path = tmp_path / "model"
    AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16).save_pretrained(path)
    tokenizer.save_pretrained(path)
    whole = sum(p.numel() for p in Policy(str(path), dtype="bfloat16", threads=1).model.parameters())
    assert together.run(2, [{"call": loaded, "arguments": (path, tmp_path)}], tmp_path) == [[0, 0]], (
        tmp_path / "log-0.txt"
    ).read_text()
    for rank in range(2):
        numbers = json.loads((tmp_path / f"{rank}.json").read_text())
        assert numbers["shards"] == pytest.approx(4 * whole / 2, rel=0.02)
        assert numbers["peak"] < numbers["shards"] + 0.8 * 2 * whole, (numbers, whole)
