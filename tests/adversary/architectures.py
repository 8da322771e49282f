"""Random architectures: whichever a model has, the engine, packed rows and rows alone agree, or it is refused by name."""

import asyncio
import random
import warnings
from pathlib import Path
from typing import Any

import numpy as np
import torch
from benchmarks.harness import tiny_families

from tests.conftest import make_tokenizer

LIMIT = 1e-3


def enlarge(model: torch.nn.Module) -> None:
    """Enlarge the matrices of a random model, so that mistakes show in its outputs."""
    with torch.no_grad():
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.mul_(12)


def rope(draw: random.Random, original: int, half: int) -> dict[str, Any]:
    """Rotary positions of a random kind, for `half` frequencies and the `original` length."""
    kind = draw.choice(["default", "linear", "dynamic", "longrope", "yarn"])
    values: dict[str, Any] = {"rope_type": kind, "rope_theta": 10_000.0}
    if kind == "longrope":
        values |= {"short_factor": [1.0] * half, "long_factor": [draw.uniform(1, 9) for _ in range(half)]}
    if kind in ("longrope", "yarn"):
        values["original_max_position_embeddings"] = original
    return values if kind == "default" else values | {"factor": draw.uniform(1.5, 8)}


def architecture(seed: int, folder: Path) -> None:
    """A random model: distances are below `LIMIT` nats per token in two turns of random lengths."""
    import transformers

    from posttrain.engines.local.engine import LocalEngine
    from posttrain.errors import InputError
    from posttrain.models.policy import Policy

    draw = random.Random(seed)
    tokenizer = make_tokenizer()
    original = draw.choice([24, 40, 64])
    if draw.random() < 0.5:
        kind = draw.choice(["llama", "qwen2", "qwen3", "mistral", "gemma2", "phi3"])
        heads = draw.choice([2, 4])
        keys = {"vocab_size": len(tokenizer), "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2}
        keys |= {"num_attention_heads": heads, "num_key_value_heads": draw.choice([1, heads]), "pad_token_id": 0}
        keys |= {"max_position_embeddings": original, "rope_parameters": rope(draw, original, 16 // heads)}
        if kind in ("gemma2", "qwen3"):
            keys["head_dim"] = 32 // heads
        if kind in ("mistral", "gemma2", "qwen2"):
            keys["sliding_window"] = draw.choice([7, 20, 512])
        config_class = transformers.CONFIG_MAPPING[kind]
        try:
            config = config_class(**keys)
        except Exception:  # transformers refuses some rope types for some models
            config = config_class(**(keys | {"rope_parameters": {"rope_type": "default", "rope_theta": 10_000.0}}))
        torch.manual_seed(seed)
        model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        enlarge(model)
        model.save_pretrained(folder)
    else:
        kind = draw.choice([name for name in tiny_families.model_types() if name not in tiny_families.UNBUILDABLE])
        tiny_families.save_tiny(kind, folder, len(tokenizer), seed)
    tokenizer.save_pretrained(folder)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            policy = Policy(str(folder))
            engine = LocalEngine(policy, slots=draw.randrange(1, 5), tokens_per_forward=draw.choice([16, 64, 2048]))
        except InputError as error:
            if "model.path" not in str(error):
                raise
            return
    engine.load_weights(0)
    streams, masks, logprobs = _turns(engine, draw, len(tokenizer))
    with torch.no_grad():
        packed = policy.score(streams, masks, 1.0, 512).logprobs.numpy()
        alone = [
            policy.score([ids], [mask], 1.0, 512).logprobs.numpy() for ids, mask in zip(streams, masks, strict=True)
        ]
    assert np.abs(packed - np.concatenate(alone)).max() < LIMIT, kind
    assert np.abs(packed - logprobs).max() < LIMIT, (kind, engine._parts.kind)


def _turns(engine: Any, draw: random.Random, vocabulary: int) -> tuple[list[np.ndarray], list[np.ndarray], np.ndarray]:
    """Streams, masks and the engine's log-probabilities of one and two turns of several conversations."""
    from posttrain.engines.protocol import Request
    from posttrain.recipe.rollout import SamplingRecipe

    def ids(count: int) -> tuple[int, ...]:
        return tuple(draw.randrange(vocabulary) for _ in range(count))

    async def played() -> list[tuple[tuple[int, ...], Any]]:
        turns: list[tuple[tuple[int, ...], Any]] = []
        first = ids(draw.randrange(1, 30))
        prompts = [first + ids(draw.randrange(1, 40)) for _ in range(3)]
        for turn in range(2):
            requests = [
                Request(prompt, SamplingRecipe(), 10 * turn + index, draw.randrange(1, 25))
                for index, prompt in enumerate(prompts)
            ]
            answers = await asyncio.gather(*(engine.generate(request) for request in requests))
            turns += zip(prompts, answers, strict=True)
            prompts = [p + a.ids + ids(draw.randrange(1, 9)) for p, a in zip(prompts, answers, strict=True)]
        return turns

    turns = asyncio.run(played())
    streams = [np.array(prompt + answer.ids) for prompt, answer in turns]
    masks = [np.arange(len(ids)) >= len(prompt) for ids, (prompt, _) in zip(streams, turns, strict=True)]
    return streams, masks, np.concatenate([np.array(answer.logprobs) for _, answer in turns])
