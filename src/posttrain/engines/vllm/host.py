"""vLLM's engine with weight updates, sleep and stop strings. Runs under the interpreter that has vLLM."""

import base64
import contextlib
import itertools
import os
from dataclasses import asdict
from typing import Any

from posttrain.engines.protocol import StopStrings
from posttrain.engines.vllm.settings import Settings, engine_arguments, preloaded_libraries, process_environment


class Host:
    """A vLLM engine whose weights the trainer sends. Use it in the event loop in which it was opened."""

    def __init__(self, settings: Settings, engine: Any, has_gpu: bool) -> None:
        self.settings = settings
        self.engine = engine
        self.has_gpu = has_gpu
        self.version = -1
        """Version of the current weights; -1 before the first update."""
        self._pending_version: Any = None
        """Version of the weights that are being received."""
        self._asleep = self._paused = False
        self._numbers = itertools.count()
        self._adapter: Any = None
        self._tokenizer: Any = None
        """The tokenizer of the model's files, loaded for the first request with stop strings."""
        self._images: Any = None
        """The images that were received, for a model that reads images."""

    @classmethod
    async def open(cls, settings: Settings) -> "Host":
        """Start vLLM, in a process that does nothing else. Errors of vLLM are not caught."""
        # Forked processes keep imported modules. A process with threads could not be forked.
        os.environ.update(
            process_environment(settings) | preloaded_libraries() | {"VLLM_WORKER_MULTIPROC_METHOD": "fork"}
        )
        from vllm.engine.arg_utils import AsyncEngineArgs
        from vllm.platforms import current_platform
        from vllm.v1.engine.async_llm import AsyncLLM

        has_gpu = bool(current_platform.is_cuda_alike())
        if settings.images:
            from posttrain.engines.vllm.images import ReceivedImages, check_packages

            check_packages(settings.model, settings.trust_remote_code)
        engine = AsyncLLM.from_engine_args(AsyncEngineArgs(**engine_arguments(settings, has_gpu)))
        host = cls(settings, engine, has_gpu)
        if settings.images:
            host._images = ReceivedImages(engine.renderer.get_mm_processor(), engine.model_config.dtype)
        await engine.collective_rpc("end_with_parent", args=(os.getpid(),))
        return host

    async def info(self) -> dict[str, Any]:
        """vLLM's version, the version of the weights, whether the engine sleeps, and its settings."""
        import vllm

        return {"vllm": vllm.__version__, "version": self.version, "asleep": self._asleep, **asdict(self.settings)}

    async def ping(self) -> None:
        """Return once the scheduler and all workers have responded, which they do between two forward passes."""
        await self.engine.collective_rpc("ping")

    @property
    def dead(self) -> bool:
        """Whether the engine has failed for good."""
        return bool(self.engine.errored)

    async def generate(self, job: dict[str, Any]) -> dict[str, Any]:
        """Sample one completion. Of images that were not received, only the keys are returned, as `missing`.

        `job`: `prompt_ids`, `seed`, `max_tokens`, `end_tokens`, `stop_strings` and the keys of the sampling settings;
        `images`: the key of each image in the prompt, and the spans [start, stop) of its placeholders.
        Returns `ids` including the stopping token, `logprobs` and weight `versions` per token, `stop_reason`, and
        `reused`, the number of prompt tokens found in the cache. With `router_replay` also `experts`: the shape of the experts of
        each token and layer, and their numbers as base64 of uint16; vLLM does not return those of an answer that a stop string
        ends. Raises ValueError if the context is too short.
        """
        from vllm import SamplingParams
        from vllm.sampling_params import RequestOutputKind

        streams = self.settings.stream or bool(job["stop_strings"])
        parameters = SamplingParams(
            **{key: job[key] for key in ("temperature", "top_p", "top_k", "min_p", "seed", "max_tokens")},
            stop_token_ids=job["end_tokens"],
            ignore_eos=True,
            logprobs=0,
            detokenize=False,
            # vLLM's front end cannot keep up with one message per token of every request in flight.
            output_kind=RequestOutputKind.DELTA if streams else RequestOutputKind.FINAL_ONLY,
        )
        if job["stop_strings"] and self._tokenizer is None:
            from transformers import AutoTokenizer

            self._tokenizer = AutoTokenizer.from_pretrained(
                self.settings.model, trust_remote_code=self.settings.trust_remote_code
            )
        stops = StopStrings(self._tokenizer, job["stop_strings"])
        name, adapter, version = f"request-{next(self._numbers)}", self._adapter, self.version
        ids, logprobs, versions = list[int](), list[float](), list[int]()
        reason, reused, experts, ends = None, 0, None, frozenset(job["end_tokens"])
        prompt: Any = {"prompt_token_ids": job["prompt_ids"]}
        if places := job.get("images"):
            if missing := self._images.missing(places):
                return {"missing": missing}
            prompt = self._images.prompt(job["prompt_ids"], places)
        async for output in self.engine.generate(prompt, parameters, name, lora_request=adapter):
            reused = max(reused, output.num_cached_tokens or 0)
            part = output.outputs[0]
            if part.routed_experts is not None:
                numbers = part.routed_experts.astype("<u2")
                experts = [list(numbers.shape), base64.b64encode(numbers.tobytes()).decode()]
            for token, known in zip(part.token_ids, part.logprobs or [], strict=True):
                ids.append(token)
                logprobs.append(known[token].logprob)
                # A request keeps the adapters that it started with.
                versions.append(version if adapter is not None else self.version)
                if token in ends:
                    reason = "end_token"
                elif stops.matched(ids):
                    reason = "stop_string"
                elif len(ids) >= job["max_tokens"]:
                    reason = "turn_budget"
                if reason is not None:
                    break
            if output.finished:
                break
            if reason is not None:
                await self.engine.abort(name)
                break
        if reason is None:
            raise ValueError(
                f"a completion reached the engine's maximum context after {len(ids)} tokens; raise engine.max_model_len"
            )
        known = {} if experts is None else {"experts": experts}
        return {"ids": ids, "logprobs": logprobs, "versions": versions, "stop_reason": reason, "reused": reused} | known

    def receive_image(self, key: str, content: bytes) -> None:
        """Keep an image for later requests. `content`: the inputs of the encoder as a safetensors file."""
        self._images.put(key, content)

    # -- weights ------------------------------------------------------------------------------------------------------

    async def begin_weights(self, version: int) -> None:
        """Prepare for whole weights of `version`. Requests in flight are paused and continue with the new weights."""
        await self._pause()
        if self._pending_version is not None:
            # A trainer that died left an update open, or ended it with a part that could not be loaded.
            with contextlib.suppress(Exception):
                await self.engine.finish_weight_update()
        self._pending_version = version
        await self.engine.start_weight_update()

    async def receive_weights(self, path: str) -> None:
        """Load the tensors of a safetensors file on this machine."""
        await self.receive_buffer({"path": path})

    async def join_transfer(self, address: str, port: int, first: int, size: int) -> None:
        """Let the workers join the learner's process group, from rank `first` of `size`."""
        from vllm.distributed.weight_transfer.base import WeightTransferInitRequest

        group = {"address": address, "port": port, "first": first, "size": size}
        await self.engine.init_weight_transfer_engine(WeightTransferInitRequest(init_info=group))

    async def receive_buffer(self, described: dict[str, Any]) -> None:
        """Load the tensors of a buffer that the learner shares or broadcasts: the fields of `receiver.Part`."""
        from vllm.distributed.weight_transfer.base import WeightTransferUpdateRequest

        await self.engine.update_weights(WeightTransferUpdateRequest(update_info=described))

    async def finish_weights(self) -> list[str]:
        """Sample with the new weights from now on. Returns the names of missing parameters; with any, requests stay
        paused."""
        missing = await self.engine.collective_rpc("missing_weights")
        names = sorted({name for worker in missing for name in worker})
        await self.engine.finish_weight_update()
        version, self._pending_version = self._pending_version, None
        if not names:
            await self._resume(version)
        return names

    async def load_adapter(self, path: str, version: int) -> None:
        """Sample with the adapters that peft wrote to the folder `path`, which must exist until the next are loaded."""
        from vllm.lora.request import LoRARequest

        await self._pause()
        number = 1 + next(self._numbers)
        adapter = LoRARequest(f"policy-{version}-{number}", number, path)
        await self.engine.add_lora(adapter)
        self._adapter = adapter
        for older in sorted(await self.engine.list_loras()):
            if older < number and self.engine.get_num_unfinished_requests() == 0:
                await self.engine.remove_lora(older)
        await self._resume(version)

    async def sleep(self) -> None:
        """Free memory. A GPU frees the cache and the weights (with adapters, weights move to CPU memory). A CPU clears
        the cache but keeps its memory."""
        if self._asleep:
            return
        if self.has_gpu:
            await self.engine.sleep(level=1 if self.settings.adapter_rank else 2)
        else:
            await self.engine.reset_prefix_cache()
        self._asleep = True

    async def _pause(self) -> None:
        """Pause requests in flight and those that arrive; wake a sleeping GPU for weights instead."""
        if self._asleep and self.has_gpu:
            await self.engine.wake_up(["weights"])
        else:
            await self.engine.pause_generation(mode="keep", clear_cache=False)
            self._paused = True

    async def _resume(self, version: int) -> None:
        if self._asleep and self.has_gpu:
            await self.engine.wake_up(["kv_cache"])
        self._asleep = False
        # Keys and values of the old weights are recomputed, including those of requests in flight.
        await self.engine.reset_prefix_cache(reset_running_requests=True)
        if self.settings.images:
            await self.engine.reset_encoder_cache()
            self._images.settle()
        self.version = version
        if self._paused:
            await self.engine.resume_generation()
            self._paused = False

    def close(self) -> None:
        """Stop vLLM's processes."""
        self.engine.shutdown()
        # vLLM would shut down again at interpreter exit and print errors.
        self.engine.shutdown = lambda timeout=None: None
