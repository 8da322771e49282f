"""The side of vLLM. It runs in vLLM's own interpreter, which has no posttrain in it."""

import time
from collections.abc import Mapping
from itertools import count
from statistics import median
from typing import Any

from sides.pipe import Answer, serve


def start(settings: dict[str, Any]) -> tuple[str, Answer]:
    """vLLM with `settings`, the keywords of `vllm.LLM`."""
    import vllm
    from vllm.sampling_params import RequestOutputKind

    engine = vllm.LLM(disable_log_stats=False, **settings)
    names = map(str, count())

    def answer(job: dict[str, Any]) -> dict[str, Any]:
        requests = [
            (
                next(names),
                {"prompt_token_ids": ids},
                vllm.SamplingParams(
                    temperature=job["temperature"],
                    max_tokens=length,
                    ignore_eos=True,
                    detokenize=False,
                    # As `LLM.generate` asks for: nothing is handed out before an answer is whole.
                    output_kind=RequestOutputKind.FINAL_ONLY,
                ),
            )
            for ids, length in zip(job["prompts"], job["lengths"], strict=True)
        ]
        begun = time.perf_counter()
        outputs = answer_all(engine.llm_engine, requests, job["in_flight"])
        seconds = time.perf_counter() - begun
        return {
            "seconds": seconds,
            "tokens": sum(len(output.outputs[0].token_ids) for output in outputs),
            "first": median(output.metrics.first_token_latency for output in outputs),
            "reused": sum(output.num_cached_tokens or 0 for output in outputs),
        }

    return vllm.__version__, answer


def answer_all(engine: Any, requests: list[tuple[str, Mapping[str, Any], Any]], in_flight: int) -> list[Any]:
    """What vLLM's engine answers to `requests` (name, prompt, parameters), at most `in_flight` of them at a time.

    `LLM.generate` would hand it all of them, and as many as its largest batch allows would run together.
    """
    outputs: list[Any] = []
    sent = 0
    while len(outputs) < len(requests):
        while sent < len(requests) and sent - len(outputs) < in_flight:
            engine.add_request(*requests[sent])
            sent += 1
        outputs += [output for output in engine.step() if output.finished]
    return outputs


if __name__ == "__main__":
    serve(start)
