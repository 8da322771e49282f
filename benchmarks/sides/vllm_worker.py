"""The side of vLLM. It runs in vLLM's own interpreter, which has no posttrain in it."""

import time
from statistics import median
from typing import Any

from sides.pipe import Answer, serve


def start(settings: dict[str, Any]) -> tuple[str, Answer]:
    """vLLM with `settings`, the keywords of `vllm.LLM`."""
    import vllm

    engine = vllm.LLM(dtype="bfloat16", disable_log_stats=False, **settings)

    def answer(job: dict[str, Any]) -> dict[str, Any]:
        parameters = [
            vllm.SamplingParams(temperature=job["temperature"], max_tokens=length, ignore_eos=True, detokenize=False)
            for length in job["lengths"]
        ]
        prompts = [{"prompt_token_ids": ids} for ids in job["prompts"]]
        begun = time.perf_counter()
        outputs = engine.generate(prompts, parameters, use_tqdm=False)
        seconds = time.perf_counter() - begun
        return {
            "seconds": seconds,
            "tokens": sum(len(output.outputs[0].token_ids) for output in outputs),
            "first": median(output.metrics.first_token_latency for output in outputs),
            "reused": sum(output.num_cached_tokens or 0 for output in outputs),
        }

    return vllm.__version__, answer


if __name__ == "__main__":
    serve(start)
