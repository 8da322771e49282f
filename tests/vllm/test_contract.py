"""What posttrain uses of vLLM exists, with these parameters, in the installed vLLM and in the wheels of `POSTTRAIN_VLLM_WHEELS`.

Sources are read, not imported, so a wheel for GPUs is checked on any machine:
`pip download --no-deps --dest wheels vllm==0.33.0`, then `POSTTRAIN_VLLM_WHEELS=wheels pytest tests/vllm/test_contract.py`.
"""

import ast
import os
import re
import zipfile
from pathlib import Path

import pytest

from posttrain.engines.vllm.settings import Settings, engine_arguments
from tests.vllm.interpreter import vllm_python

READ = ("0.32", "0.33")
"""Minor versions whose wheels were checked."""
CLASSES = {
    ("v1/engine/async_llm.py", "AsyncLLM"): """
        from_engine_args(engine_args) collective_rpc(method args) errored() shutdown(timeout) abort(request_id)
        generate(prompt sampling_params request_id lora_request) init_weight_transfer_engine(request)
        start_weight_update() update_weights(request) finish_weight_update() pause_generation(mode clear_cache)
        resume_generation() reset_prefix_cache(reset_running_requests) reset_encoder_cache() sleep(level) wake_up(tags)
        add_lora(lora_request) list_loras() remove_lora(lora_id) get_num_unfinished_requests()""",
    ("distributed/weight_transfer/base.py", "WeightTransferEngine"): """
        __init__(config vllm_config device model) parse_update_info(update_dict) init_transfer_engine(init_info)
        start_weight_update() update_weights(update_info) receive_weights(update_info) finish_weight_update() shutdown()""",
    ("multimodal/inputs.py", "MultiModalKwargsItem"): "get_data()",
    ("multimodal/inputs.py", "MultiModalKwargsItems"): "from_hf_inputs(hf_inputs config_by_key)",
    ("multimodal/processing/processor.py", "BaseMultiModalProcessor"): (
        "_get_mm_fields_config(hf_inputs hf_processor_mm_kwargs)"
    ),
    ("renderers/base.py", "BaseRenderer"): "get_mm_processor()",
    ("distributed/weight_transfer/factory.py", "WeightTransferEngineFactory"): (
        "register_engine(name module_path_or_cls class_name)"
    ),
}
"""Module and class -> the methods that are called, each with all of its parameters that are given or required."""
FIELDS = {
    ("distributed/weight_transfer/base.py", "WeightTransferInitRequest"): ["init_info"],
    ("distributed/weight_transfer/base.py", "WeightTransferUpdateRequest"): ["update_info"],
    ("engine/arg_utils.py", "AsyncEngineArgs"): ["enable_log_requests"],
    ("engine/arg_utils.py", "EngineArgs"): sorted(
        {
            *engine_arguments(Settings("m", tensor_parallel=2), has_gpu=True),
            *engine_arguments(Settings("m", adapter_rank=8, router_replay=True, images=True), has_gpu=False),
        }
        - {"enable_log_requests"}
    ),
    ("multimodal/inputs.py", "PlaceholderRange"): ["offset", "length", "is_embed"],
    ("outputs.py", "CompletionOutput"): ["token_ids", "logprobs", "routed_experts"],
    ("sampling_params.py", "SamplingParams"): [
        *("temperature", "top_p", "top_k", "min_p", "seed", "max_tokens", "stop_token_ids", "ignore_eos"),
        *("logprobs", "detokenize", "output_kind"),
    ],
}
FUNCTIONS = {
    "model_executor/model_loader/reload/layerwise.py": [
        *("initialize_layerwise_reload", "finalize_layerwise_reload", "get_layerwise_info"),
    ],
    "inputs/engine.py": ["mm_input"],
    "lora/request.py": ["LoRARequest"],
    "model_executor/layers/vocab_parallel_embedding.py": ["VocabParallelEmbedding", "ParallelLMHead"],
}


def _places():
    """Folder of the package, or wheel, by name."""
    wheels = sorted(Path(os.environ.get("POSTTRAIN_VLLM_WHEELS", "/nowhere")).glob("vllm-*.whl"))
    python = vllm_python()
    installed = [] if python is None else sorted(Path(python).parent.parent.glob("lib/python3*/site-packages/vllm"))
    return [pytest.param(place, id=place.name) for place in (*installed, *wheels)]


def _definitions(place, path):
    """Top-level classes and functions of a module by name."""
    root = zipfile.Path(place, "vllm/") if place.suffix == ".whl" else place
    return {node.name: node for node in ast.parse((root / path).read_bytes()).body if hasattr(node, "name")}


def _missing(place):
    for (path, name), methods in CLASSES.items():
        found = {node.name: node for node in _definitions(place, path)[name].body if hasattr(node, "name")}
        for method, parameters in re.findall(r"(\w+)\(([\w ]*)\)", methods):
            wanted = parameters.split()
            if method not in found:
                yield f"{name}.{method}"
                continue
            arguments = found[method].args
            known = {one.arg for one in (*arguments.args, *arguments.kwonlyargs)}
            yield from (f"{name}.{method}({one})" for one in wanted if one not in known)
            # Nothing else may be required.
            required = {one.arg for one in arguments.args[1 : len(arguments.args) - len(arguments.defaults)]}
            yield from (f"{name}.{method} requires {one}" for one in required - set(wanted))
    for (path, name), wanted in FIELDS.items():
        body = _definitions(place, path)[name].body
        known = {node.target.id for node in body if isinstance(node, ast.AnnAssign)}
        yield from (f"{name}.{one}" for one in wanted if one not in known)
    for path, wanted in FUNCTIONS.items():
        yield from (one for one in wanted if one not in _definitions(place, path))


@pytest.mark.parametrize("place", _places() or [pytest.param(None, marks=pytest.mark.skip("vLLM is not installed"))])
def test_what_is_used_exists(place):
    assert list(_missing(place)) == []
