"""What a vLLM engine is started with. Written and read by two interpreters, so it needs nothing but Python."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

GIB = 2**30


@dataclass(frozen=True)
class Settings:
    """Of one engine; `model` is a directory or hub id that transformers loads."""

    model: str
    dtype: str = "auto"
    """`float32`, `bfloat16`, or `auto`: what the model's files say."""
    context: int = 0
    """Longest context in tokens; 0 is what the model's files say."""
    sequences: int = 256
    """Answers in flight at a time."""
    tokens_per_forward: int = 8192
    """Most tokens in one forward pass."""
    tensor_parallel: int = 1
    """Devices over which the weights are divided."""
    gpu_memory_utilization: float = 0.5
    """On a GPU: share of its memory for weights and cache."""
    cache_gigabytes: float = 0.0
    """Size of the key/value cache in GiB; 0 is what `gpu_memory_utilization` leaves, and 2 on a processor."""
    prefix_caching: bool = True
    """Keep what was computed for prompts and earlier turns until the weights change."""
    eager: str = "auto"
    """`yes`, `no`, or `auto`: no on a GPU, yes on a processor."""
    logprobs: str = "raw"
    """`raw`: before the temperature. `processed`: after temperature and truncation."""
    adapter_rank: int = 0
    """Rank of the adapters that will be sent; 0: whole weights will be."""
    threads: int = 0
    """On a processor: threads to compute with, wherever there is room; 0 is one bound to each core."""


def engine_arguments(settings: Settings, has_gpu: bool) -> dict[str, Any]:
    """The keywords of vLLM's engine for `settings`."""
    arguments: dict[str, Any] = {
        "model": settings.model,
        "dtype": settings.dtype,
        "max_num_seqs": settings.sequences,
        "max_num_batched_tokens": settings.tokens_per_forward,
        "tensor_parallel_size": settings.tensor_parallel,
        "enable_prefix_caching": settings.prefix_caching,
        "enforce_eager": settings.eager == "yes" or (settings.eager == "auto" and not has_gpu),
        "logprobs_mode": f"{settings.logprobs}_logprobs",
        "worker_extension_cls": "posttrain.engines.vllm.worker.WeightReceiver",
        # Token ids go in and come out, and nothing is turned into text.
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "enable_log_requests": False,
        "disable_log_stats": True,
    }
    if settings.context:
        arguments["max_model_len"] = settings.context
    if has_gpu:
        arguments["gpu_memory_utilization"] = settings.gpu_memory_utilization
        arguments["enable_sleep_mode"] = True
    else:
        # Prompts of a hundred tokens are shared only where pages are small.
        arguments["block_size"] = 32
        # vLLM 0.32 turns back the random numbers of a prompt that is read in pieces, which those of a processor cannot: it
        # dies. So a prompt is read whole, and a pass has room for the longest.
        arguments["enable_chunked_prefill"] = False
        if settings.context:
            arguments["max_num_batched_tokens"] = max(settings.tokens_per_forward, settings.context)
        else:
            del arguments["max_num_batched_tokens"]
    if settings.cache_gigabytes or not has_gpu:
        arguments["kv_cache_memory_bytes"] = int((settings.cache_gigabytes or 2.0) * GIB)
    if settings.adapter_rank:
        ranks = (1, 8, 16, 32, 64, 128, 256, 320, 512)
        arguments |= {
            "enable_lora": True,
            "max_lora_rank": next(rank for rank in ranks if rank >= settings.adapter_rank),
            "max_loras": 2,
            # An answer in flight keeps its adapters to its end; those whose files are gone must still be in memory.
            "max_cpu_loras": 16,
        }
    else:
        # The weights come before the first answer is asked for.
        arguments["load_format"] = "dummy"
    return arguments


def process_environment(settings: Settings) -> dict[str, str]:
    """Variables that vLLM reads when it is imported, for a process that computes with `settings`."""
    found = {"VLLM_NO_USAGE_STATS": "1", "TOKENIZERS_PARALLELISM": "false"}
    if settings.threads:
        # Bound ones of several engines would wait for each other on the same cores.
        return found | {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(settings.threads)}
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    found["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(
        ",".join(map(str, cores[rank :: settings.tensor_parallel])) for rank in range(settings.tensor_parallel)
    )
    return {name: os.environ.get(name, value) for name, value in found.items()}


def preloaded_libraries(python: str = sys.executable) -> dict[str, str]:
    """LD_PRELOAD for the interpreter `python`: the two libraries that vLLM asks for on a processor, where they lie in
    the `lib` of its environment."""
    library = Path(python).parent.parent / "lib"
    files = [library / name for name in ("libtcmalloc_minimal.so.4", "libiomp5.so")]
    named = [*(str(file) for file in files if file.exists()), *os.environ.get("LD_PRELOAD", "").split(":")]
    joined = ":".join(dict.fromkeys(name for name in named if name))
    return {"LD_PRELOAD": joined} if joined else {}
