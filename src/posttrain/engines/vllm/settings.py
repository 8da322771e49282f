"""Settings of a vLLM engine. Two interpreters import this module, so it imports only the standard library."""

import os
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)
"""Largest ranks of adapters that a vLLM engine can be started for."""
MOST_RANK = _RANKS[-1]
BACKEND = "posttrain"
"""Name of the trainer's way of sending weights in vLLM's registry."""
TOKEN = "POSTTRAIN_VLLM_TOKEN"
"""Environment variable with a server's token."""


@dataclass(frozen=True)
class Settings:
    """Settings of one engine. `model` is a directory or hub id that transformers can load."""

    model: str
    dtype: str = "auto"
    """`float32`, `bfloat16`, or `auto`: the dtype in the model's files."""
    max_model_len: int = 0
    """Maximum context length in tokens; 0: the limit in the model's files."""
    max_num_seqs: int = 256
    """Maximum number of requests in flight."""
    tokens_per_forward: int = 8192
    """Maximum number of tokens in one forward pass."""
    tensor_parallel: int = 1
    """Number of devices that the weights are sharded over."""
    gpu_memory_utilization: float = 0.5
    """On a GPU: share of its memory for weights and cache together."""
    cache_gigabytes: float = 0.0
    """Size of the key/value cache in GiB; 0: the memory that `gpu_memory_utilization` leaves, or 2 on a CPU."""
    eager: str = "auto"
    """Run without compilation and CUDA graphs: `yes`, `no`, or `auto` (no on a GPU, yes on a CPU)."""
    logprobs: str = "raw"
    """Log-probabilities before temperature and truncation (`raw`) or after both (`processed`)."""
    adapter_rank: int = 0
    """Rank of the LoRA adapters that will be sent; 0: whole weights are sent."""
    trust_remote_code: bool = False
    """Run the Python code in the model's files."""
    stream: bool = True
    """Return tokens as they are sampled, so that each gets the version of its weights, or complete answers only."""
    deterministic: bool = False
    """Sample each request independently of those in the same pass; on GPUs from the H100 on."""
    router_replay: bool = False
    """Return the experts of each token (`model.router_replay`)."""
    threads: int = 0
    """On a CPU: number of unbound threads; 0: one thread bound to each core."""
    images: bool = False
    """Accept images, whose encoder inputs the trainer makes."""


def engine_arguments(settings: Settings, has_gpu: bool) -> dict[str, Any]:
    """Keyword arguments of vLLM's engine for `settings`."""
    arguments: dict[str, Any] = {
        "model": settings.model,
        "trust_remote_code": settings.trust_remote_code,
        "dtype": settings.dtype,
        "max_num_seqs": settings.max_num_seqs,
        "max_num_batched_tokens": settings.tokens_per_forward,
        "tensor_parallel_size": settings.tensor_parallel,
        "enable_prefix_caching": True,
        "enforce_eager": settings.eager == "yes" or (settings.eager == "auto" and not has_gpu),
        "logprobs_mode": f"{settings.logprobs}_logprobs",
        "worker_extension_cls": "posttrain.engines.vllm.worker.WorkerExtension",
        # Requests and completions are token ids; no text is decoded.
        "skip_tokenizer_init": True,
        "generation_config": "vllm",
        "enable_log_requests": False,
        "disable_log_stats": True,
        # Of answers with stop strings, which are streamed: vLLM's front end cannot keep up with every token. Tokens after
        # the string are left out.
        "stream_interval": 1 if settings.stream else 8,
    }
    if settings.max_model_len:
        arguments["max_model_len"] = settings.max_model_len
    if settings.tensor_parallel > 1:
        # Inside a Ray actor vLLM would choose Ray, which finds no free GPU in the actor's placement group.
        arguments["distributed_executor_backend"] = "mp"
    if has_gpu:
        arguments["gpu_memory_utilization"] = settings.gpu_memory_utilization
        arguments["enable_sleep_mode"] = True
    else:
        # Small pages, so that prompts of about a hundred tokens are shared.
        arguments["block_size"] = 32
        # For a prompt prefilled in chunks, vLLM 0.32 rewinds the request's random generator, which CPU generators do
        # not support: the engine dies. So prompts are prefilled whole, and a pass has room for the longest context.
        arguments["enable_chunked_prefill"] = False
        if settings.max_model_len:
            arguments["max_num_batched_tokens"] = max(settings.tokens_per_forward, settings.max_model_len)
        else:
            del arguments["max_num_batched_tokens"]
    if settings.cache_gigabytes or not has_gpu:
        arguments["kv_cache_memory_bytes"] = int((settings.cache_gigabytes or 2.0) * 2**30)
    if settings.images:
        # Images arrive normalized, and a cache of processed ones would be a second one. vLLM's processor needs a tokenizer.
        arguments |= {"mm_device_do_normalize": False, "mm_processor_cache_gb": 0, "skip_tokenizer_init": False}
        arguments["skip_mm_profiling"] = not has_gpu
    if settings.router_replay:
        arguments["enable_return_routed_experts"] = True
    if settings.adapter_rank:
        arguments |= {
            "enable_lora": True,
            "max_lora_rank": next(rank for rank in _RANKS if rank >= settings.adapter_rank),
            "max_loras": 2,
            # A request in flight keeps its adapters until it ends, so adapters whose files are removed stay in memory.
            "max_cpu_loras": 16,
        }
    else:
        # The trainer sends weights before the first request.
        arguments |= {"load_format": "dummy", "weight_transfer_config": {"backend": BACKEND}}
    return arguments


def process_environment(settings: Settings) -> dict[str, str]:
    """Environment variables that vLLM reads on import."""
    variables = {"VLLM_NO_USAGE_STATS": "1", "TOKENIZERS_PARALLELISM": "false"}
    if settings.deterministic:
        variables["VLLM_BATCH_INVARIANT"] = "1"
    if settings.router_replay:
        # The older model runner, which is the default on a CPU, does not return experts.
        variables["VLLM_USE_V2_MODEL_RUNNER"] = "1"
    if settings.threads:
        # Bound threads of several engines would wait for each other on the same cores.
        return variables | {"VLLM_CPU_OMP_THREADS_BIND": "nobind", "OMP_NUM_THREADS": str(settings.threads)}
    cores = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else list(range(os.cpu_count() or 1))
    variables["VLLM_CPU_OMP_THREADS_BIND"] = "|".join(
        ",".join(map(str, cores[rank :: settings.tensor_parallel])) for rank in range(settings.tensor_parallel)
    )
    return {name: os.environ.get(name, value) for name, value in variables.items()}


def preloaded_libraries(python: str = sys.executable) -> dict[str, str]:
    """LD_PRELOAD for the interpreter `python`: the two libraries that vLLM recommends on a CPU, if they are in the
    `lib` folder of its environment."""
    library = Path(python).parent.parent / "lib"
    files = [library / name for name in ("libtcmalloc_minimal.so.4", "libiomp5.so")]
    named = [*(str(file) for file in files if file.exists()), *os.environ.get("LD_PRELOAD", "").split(":")]
    joined = ":".join(dict.fromkeys(name for name in named if name))
    return {"LD_PRELOAD": joined} if joined else {}
