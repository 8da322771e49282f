"""A substitute for vLLM behind the engine's server; it starts at once because it does not import torch."""

import asyncio
import json
import threading
from pathlib import Path


class MadeHost:
    """Returns its requests."""

    dead = False

    def __init__(self):
        self.cancelled = threading.Event()
        self.loaded = {}

    async def info(self):
        return {"version": 7}

    async def generate(self, job):
        if job["seed"] < 0:
            raise ValueError("no such seed")
        try:
            await asyncio.sleep(job["seed"])
        except asyncio.CancelledError:
            self.cancelled.set()
            raise
        return {"ids": job["prompt_ids"]}

    async def receive_weights(self, path):
        from safetensors.torch import load_file  # imports torch, which most servers of the tests do not need

        self.loaded |= load_file(path)

    async def load_adapter(self, path, version):
        from safetensors.torch import load_file

        self.loaded["adapter"] = load_file(Path(path) / "adapter_model.safetensors")["w"]
        self.loaded["config"] = json.loads((Path(path) / "adapter_config.json").read_text())
        self.loaded["version"] = version

    def receive_image(self, key, content):
        self.loaded[key] = content

    def close(self):
        print("closed", flush=True)
