"""The sides of transformers: `generate` over padded batches, and continuous batching."""

import time
from statistics import median
from typing import Any

from sides.pipe import Answer, serve


def start(settings: dict[str, Any]) -> tuple[str, Answer]:
    """The model in `settings["dtype"]`; `settings["way"]` is "generate" or "continuous"."""
    import torch
    import transformers

    torch.set_num_threads(settings["threads"])
    transformers.utils.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    model: Any = transformers.AutoModelForCausalLM.from_pretrained(
        settings["model"], dtype=settings["dtype"], attn_implementation="sdpa"
    ).eval()
    model.generation_config = transformers.GenerationConfig()
    way = _generate if settings["way"] == "generate" else _continuous
    return transformers.__version__, lambda job: way(model, job)


def _generate(model: Any, job: dict[str, Any]) -> dict[str, Any]:
    """Batches of `in_flight` requests padded on the left, each as long as its longest answer."""
    import torch

    torch.manual_seed(job["seed"])
    ends, tokens, computed = [], 0, 0
    begun = time.perf_counter()
    for first in range(0, len(job["prompts"]), job["in_flight"]):
        prompts = job["prompts"][first : first + job["in_flight"]]
        lengths = job["lengths"][first : first + job["in_flight"]]
        width = max(map(len, prompts))
        ids = torch.tensor([[0] * (width - len(prompt)) + prompt for prompt in prompts])
        mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
        with torch.no_grad():
            out = model.generate(
                ids,
                attention_mask=mask,
                max_new_tokens=max(lengths),
                do_sample=True,
                temperature=job["temperature"],
                top_k=0,
                pad_token_id=0,
                eos_token_id=None,
            )
        computed += (out.shape[1] - width) * len(prompts)
        tokens += sum(lengths)
        ends += [time.perf_counter()] * len(prompts)
    return {
        "seconds": time.perf_counter() - begun,
        "tokens": tokens,
        "first": median(end - begun for end in ends),
        "computed": computed,
        "reused": 0,
    }


def _continuous(model: Any, job: dict[str, Any]) -> dict[str, Any]:
    """Requests one by one to the manager, a new one as soon as one is answered."""
    from transformers import ContinuousBatchingConfig, GenerationConfig

    requests = list(zip(job["prompts"], job["lengths"], strict=True))
    longest = max(len(prompt) + length for prompt, length in requests)
    page = 64
    config = ContinuousBatchingConfig(
        page_size=page,
        # Prompts that are shared stay for later requests as well.
        num_blocks=job["in_flight"] * (longest // page + 2) + 16,
        max_batch_tokens=2048,
        max_requests_per_batch=job["in_flight"],
        seed=job["seed"] % 2**31,
    )
    sampling = GenerationConfig(
        do_sample=True, temperature=job["temperature"], top_k=0, top_p=1.0, max_new_tokens=max(job["lengths"])
    )
    ends, tokens = [], 0
    with model.continuous_batching_context_manager(
        generation_config=sampling, continuous_batching_config=config, warmup=False
    ) as manager:
        begun = time.perf_counter()
        sent = 0
        while len(ends) < len(requests):
            while sent < len(requests) and sent - len(ends) < job["in_flight"]:
                prompt, length = requests[sent]
                manager.add_request(prompt, max_new_tokens=length, eos_token_id=-1)
                sent += 1
            result = manager.get_result(timeout=120)
            if result is None or result.error:
                raise RuntimeError(f"continuous batching gave no answer: {result and result.error}")
            tokens += len(result.generated_tokens)
            ends.append(time.perf_counter())
        seconds = time.perf_counter() - begun
    return {"seconds": seconds, "tokens": tokens, "first": median(end - begun for end in ends), "reused": None}


if __name__ == "__main__":
    serve(start)
