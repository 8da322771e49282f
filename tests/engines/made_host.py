"""A substitute for vLLM behind the engine's server; it starts at once because it does not import torch."""

import asyncio
import threading


class MadeHost:
    """Returns its requests."""

    dead = False

    def __init__(self):
        self.cancelled = threading.Event()
        self.loaded = {}

    def info(self):
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

    def close(self):
        print("closed", flush=True)
