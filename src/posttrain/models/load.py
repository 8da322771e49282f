"""Load models and tokenizers from `model.path`. Every problem raises InputError with a one-sentence message."""

import logging
import math
import os
import re
import struct
import time
import warnings
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from posttrain.data.rendering import end_token_of
from posttrain.data.templates import LONGEST, limit_chat_templates
from posttrain.errors import InputError
from posttrain.models import files
from posttrain.models.cpu.backend import bound_kept_kernels, onednn_multiplies, prepare_bfloat16
from posttrain.models.cuda.attention import use_flash_attention
from posttrain.models.cuda.four_bit import quantize
from posttrain.models.forward import base_decoder, path_of, use_float32_head
from posttrain.models.gate import choose_path, quiet_transformers
from posttrain.models.layers import (
    lengths_of,
    resolve_fused,
    use_fused_layers,
    use_layers_by_stream,
    use_positions_by_length,
)
from posttrain.models.routing import use_routing
from posttrain.models.sequence import refuse_undivided
from posttrain.plugins import model_family, require_module
from posttrain.recipe.model import SWITCHES, ModelRecipe, with_thinking
from posttrain.runs.directory import atomic_folder, cache_directory

logging.getLogger("bitsandbytes.backends.cpu.ops").setLevel(logging.ERROR)
"""peft imports bitsandbytes, which warns about a kernel for 4-bit models on CPUs that posttrain does not use."""

_MOST_METADATA = 1 << 23
"""Maximum number of values in the metadata of a GGUF file, of 128 bytes on average: a large vocabulary has two million."""


def converted_gguf(file: Path) -> Path:
    """A directory with the dequantized float32 model and tokenizer of a `.gguf` file, converted on first use. The
    directory's name contains a digest of the file, so another file of the same name gets its own directory. The
    conversion is written to a temporary directory and renamed, so an interrupted one is never used."""
    directory = files.conversion_of(file)
    if (directory / "config.json").is_file():
        return directory
    require_module("gguf", f"model.path: {file}")
    _require_small_metadata(file)
    from transformers import AutoModelForCausalLM, AutoTokenizer, GgufConfig
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()

    keywords: dict[str, Any] = {"gguf_file": file.name, "trust_remote_code": False}
    try:
        tokenizer = AutoTokenizer.from_pretrained(str(file.parent), **keywords)
        keywords |= {"quantization_config": GgufConfig(dequantize=True), "dtype": "float32"}
        model = AutoModelForCausalLM.from_pretrained(str(file.parent), **keywords)
    except Exception as error:
        raise InputError(
            f"model.path: {file} could not be read as a GGUF model ({type(error).__name__}: {error}); "
            "check that the file is complete and its architecture is supported by transformers"
        ) from error
    if hasattr(model.config, "quantization_config"):
        del model.config.quantization_config
    with suppress(InputError), atomic_folder(directory) as aside:  # another process may have converted it meanwhile
        model.save_pretrained(aside)
        tokenizer.save_pretrained(aside)
    return directory


def _require_small_metadata(file: Path) -> None:
    """InputError for a GGUF file whose metadata would fill the memory. The reader reports any other problem."""
    left, string, array = _MOST_METADATA, 8, 9
    sizes = {0: 1, 1: 1, 2: 2, 3: 2, 4: 4, 5: 4, 6: 4, 7: 1, 10: 8, 11: 8, 12: 8}  # of values, by type
    with file.open("rb") as opened, suppress(struct.error, KeyError, OSError, OverflowError):

        def read(form: str) -> tuple[int, ...]:
            return struct.unpack(form, opened.read(struct.calcsize(form)))

        def skip(values: int, size: int) -> None:
            nonlocal left
            left -= max(values, size >> 7)
            if left < 0:
                raise InputError(
                    f"model.path: the metadata of {file} has more than {_MOST_METADATA:,} values, so it is not a model; "
                    "use another file"
                )
            opened.seek(size, os.SEEK_CUR)

        opened.seek(16)  # after the magic, the version and the number of tensors
        for _ in range(*read("<Q")):
            skip(256, *read("<Q"))  # the key of one of some hundred entries
            (kind,), values = read("<I"), 1
            if kind == array:
                kind, values = read("<IQ")
            skip(values, 0 if kind == string else values * sizes[kind])
            for _ in range(values if kind == string else 0):
                skip(0, *read("<Q"))


def resolve_device(name: str) -> torch.device:
    """The device that `model.device` names on this machine. InputError for `cuda` without a GPU."""
    if name == "cuda" and not torch.cuda.is_available():
        raise InputError("model.device: torch finds no GPU for cuda; use auto or cpu, or install torch for CUDA")
    if name == "auto":
        name = "cuda" if torch.cuda.is_available() else "cpu"
    return torch.device(name)


def resolve_dtype(name: str | None, device: torch.device) -> torch.dtype:
    """The dtype that `model.dtype` names on `device`. `auto` is bfloat16 where the hardware computes it natively, and so is
    None on a GPU. Runs on a CPU replace `auto` by a measurement (`training.measured`)."""
    if name == "auto" or (name is None and device.type != "cpu"):
        return torch.bfloat16 if has_bfloat16(device) else torch.float32
    return {None: torch.float32, "float32": torch.float32, "bfloat16": torch.bfloat16}[name]


def has_bfloat16(device: torch.device) -> bool:
    """Whether the hardware of `device` multiplies bfloat16 numbers natively."""
    if device.type == "cuda":
        return torch.cuda.is_bf16_supported(including_emulation=False)
    # ONEDNN_MAX_CPU_ISA can hide instructions that the processor has.
    return torch.cpu._is_avx512_bf16_supported() and onednn_multiplies(torch.bfloat16)


def resolve_path(path: str) -> str:
    """A directory or hub id that transformers can load, for any form of `model.path`."""
    if path.startswith("packaged:"):
        return str(converted_gguf(files.packaged_file(path.removeprefix("packaged:"))))
    if path.endswith(".gguf"):
        files.require_model(path)
        return str(converted_gguf(Path(path)))
    local = files.local_directory(path)
    if local is None and not files.is_cached(path):
        from huggingface_hub import HfApi

        try:  # the loader itself would retry for a minute
            HfApi().model_info(path, timeout=10)
        except Exception as error:
            raise InputError(
                f"model.path: there is no folder {path}, it is not in the local cache, and the hub did not return it ({first_line(error)}); "
                "check the id and the network, or give a directory"
            ) from error
    return local or path


NO_REWARD_MODEL = "{path} is not a reward model: it has no head `score`; train one with `posttrain reward`"


def require_reward_model(path: str, key: str) -> None:
    """InputError, which names `key`, if the model at `path` is on disk and certainly has no head `score`."""
    if not files.on_disk(path, key) or not (directory := Path(path).expanduser()).is_dir() or files.is_adapter(path):
        return
    names = {name for file in directory.glob("*.safetensors") for name in files.tensors_of(file)}
    if names and "score.weight" not in names:
        raise InputError(f"{key}: {NO_REWARD_MODEL.format(path=path)}")


def load_config(recipe: ModelRecipe) -> Any:
    """The configuration of the recipe's model, or of its base model if the files are adapters. If
    `AutoModelForCausalLM` loads only the text part of a composite model, it is that of the part."""
    from transformers import AutoConfig, AutoModelForCausalLM

    path = resolve_path(recipe.path)
    if files.is_adapter(path) and not (Path(path) / "config.json").is_file():
        path = resolve_path(_adapter_config(path)["base_model_name_or_path"])
    config = AutoConfig.from_pretrained(path, trust_remote_code=recipe.trust_remote_code)
    whole = model_family(config.model_type, path) is not None
    decoder = None if whole else AutoModelForCausalLM._model_mapping.get(type(config), None)
    if decoder is None or getattr(decoder, "config_class", None) is not config.sub_configs.get("text_config"):
        return config
    part = config.get_text_config()
    if (quantization := getattr(config, "quantization_config", None)) is not None:
        part.quantization_config = quantization
    return part


def family_of(recipe: ModelRecipe) -> Any:
    """As `model_family`, for the model of the recipe."""
    try:
        config = load_config(recipe)
        return model_family(config.model_type, config.name_or_path)
    except InputError:
        raise
    except Exception:
        return None  # the loader of the model reports it


def policy_class(recipe: ModelRecipe) -> Any:
    """The class of transformers that loads the recipe's model as a policy."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM if (family := family_of(recipe)) is None else family.policy_class()


def load_tokenizer(recipe: ModelRecipe) -> Any:
    """The tokenizer of the recipe's model. InputError if there is none, or if it has no chat template."""
    from transformers import AutoTokenizer

    limit_chat_templates()
    path = resolve_path(recipe.path)
    try:
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=recipe.trust_remote_code)
    except Exception as error:
        raise InputError(f"model.path: no tokenizer could be loaded from {recipe.path}: {_reason(error)}") from error
    if (family := family_of(recipe)) is not None:
        tokenizer = family.tokenizer(tokenizer, path)
    if recipe.chat_template is not None:
        if not (file := Path(recipe.chat_template)).is_file():
            raise InputError(f"model.chat_template: file not found: {file}")
        try:
            with file.open(encoding="utf-8") as content:
                tokenizer.chat_template = content.read(LONGEST + 1)
        except (OSError, UnicodeDecodeError) as error:
            cause = f"cannot be read as UTF-8 ({error})"
            raise InputError(f"model.chat_template: {file} {cause}; name a Jinja file") from None
    if not tokenizer.chat_template:
        raise InputError(
            f"model.path: the tokenizer of {recipe.path} has no chat template; set model.chat_template to a Jinja file"
        )
    if recipe.thinking != "template":
        tokenizer.chat_template = _switched(tokenizer, recipe)
    _refuse_tokens_without_embedding(tokenizer, recipe)
    return tokenizer


def _refuse_tokens_without_embedding(tokenizer: Any, recipe: ModelRecipe) -> None:
    """InputError for token ids beyond the model's embedding, but for those of images and sound, which no text has."""
    try:
        rows = getattr(load_config(recipe).get_text_config(decoder=True), "vocab_size", None)
    except Exception:  # the loader of the model reports it
        return
    unused = {getattr(tokenizer, f"{medium}_token", None) for medium in ("image", "audio", "video")}
    names = {number: token for token, number in tokenizer.get_vocab().items() if token not in unused}
    beyond = [repr(names[number]) for number in sorted(names) if rows is not None and number >= rows]
    if beyond:
        tokens = ", ".join([*beyond[:5], *(["..."] if len(beyond) > 5 else [])])
        raise InputError(
            f"model.path: the tokenizer of {recipe.path} has {len(beyond)} tokens ({tokens}) beyond the {rows} rows of the "
            "model's embedding; remove them from the tokenizer, or resize the embedding with `resize_token_embeddings` of "
            "transformers, and save the model again"
        )


def _switched(tokenizer: Any, recipe: ModelRecipe) -> str:
    """The chat template with `model.thinking` as its default. InputError if thinking changes nothing in it."""
    template = tokenizer.get_chat_template()
    switched = with_thinking(template, recipe.thinking)
    messages, keywords = [{"role": "user", "content": "x"}], {"chat_template": template, "tokenize": False}
    keywords["add_generation_prompt"] = True
    switches = [dict.fromkeys(SWITCHES, thinking) for thinking in (True, False)]
    try:
        prompts = [tokenizer.apply_chat_template(messages, **keywords, **switch) for switch in switches]
    except Exception as error:  # templates raise errors of any type
        raise InputError(
            f"model.path: the chat template of {recipe.path} cannot render a prompt ({first_line(error)}); set another "
            "template in model.chat_template"
        ) from error
    if switched is None or prompts[0] == prompts[1]:
        lacks = f"the chat template of {recipe.path} has no switch for thinking"
        raise InputError(f"model.thinking: {lacks}; set it to template")
    return switched


def load_end_tokens(path: str, tokenizer: Any) -> frozenset[int]:
    """Token ids that end a completion of the model at `path`, as in `TrainedModel.end_tokens`, without loading the
    model: those of the tokenizer, of the generation configuration, and of the chat template. InputError if there is
    none, or if the model's configuration has something other than token ids."""
    from transformers import GenerationConfig

    try:
        configured = GenerationConfig.from_pretrained(resolve_path(path)).eos_token_id
    except OSError:
        configured = None
    except Exception as error:
        raise InputError(
            f"model.path: the generation configuration of {path} cannot be read ({first_line(error)}); correct its "
            "generation_config.json, or delete the file"
        ) from error
    listed = configured if isinstance(configured, list | tuple) else [configured]
    if not all(token is None or (isinstance(token, int) and not isinstance(token, bool)) for token in listed):
        raise InputError(
            f"model.path: {path} has an `eos_token_id` that is neither a token id nor a list of them; correct it in "
            "generation_config.json or config.json"
        )
    known = frozenset(token for token in [tokenizer.eos_token_id, *listed] if token is not None)
    return known | {end_token_of(tokenizer, known)}


def load_model(recipe: ModelRecipe, device: torch.device | None = None) -> torch.nn.Module:
    """The causal language model of the recipe in evaluation mode, without adapters, with packed attention. `device`
    replaces the recipe's device. A missing, damaged or incomplete model raises InputError; missing weights are never
    initialized at random."""
    model, missing = _load(recipe, policy_class(recipe), device)
    if missing:
        raise InputError(f"model.path: {recipe.path} lacks {len(missing)} weights, the first of them {missing[0]}")
    if recipe.head_dtype == "float32":
        use_float32_head(model)
    return model


def load_reward_model(
    recipe: ModelRecipe, head_seed: int | None, head_scale: float = 1.0, device: torch.device | None = None
) -> torch.nn.Module:
    """The recipe's model with a scalar head `score`, loaded as by `load_model`. A model without a head, such as a
    language model, gets one drawn from N(0, 1 / (hidden + 1)) with `head_seed` (the scale of Stiennon et al. 2020,
    arXiv 2009.01325), times `head_scale`. InputError if `head_seed` is None."""
    from transformers import AutoModelForSequenceClassification

    model, missing = _load(recipe, AutoModelForSequenceClassification, device)
    head = getattr(model, "score", None)
    others = [name for name in missing if name != "score.weight"]
    if not isinstance(head, torch.nn.Linear):
        raise InputError(
            f"model.path: {recipe.path} cannot be a reward model or a critic, because {type(model).__name__} of transformers "
            "has no linear head `score`; start from a decoder-only model"
        )
    if others:
        raise InputError(f"model.path: {recipe.path} lacks {len(others)} weights, the first of them {others[0]}")
    if missing and head_seed is None:
        raise InputError(NO_REWARD_MODEL.format(path=recipe.path))
    if missing and head_seed is not None:
        weights = torch.randn(head.weight.shape, generator=torch.Generator().manual_seed(head_seed))
        head.weight.data.copy_(head_scale * (weights / math.sqrt(head.in_features + 1)))
    return model


def _load(recipe: ModelRecipe, auto_class: Any, device_override: torch.device | None) -> tuple[Any, list[str]]:
    """The model that `auto_class` loads, with adapters of the files merged, and the names of missing weights."""
    from transformers import AutoModelForSequenceClassification
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()
    path, device = resolve_path(recipe.path), resolve_device(recipe.device)
    dtype = resolve_dtype(recipe.dtype, device)
    if device.type == "cpu" and dtype == torch.bfloat16:
        prepare_bfloat16()
    adapter = _adapter_config(path) if files.is_adapter(path) else None
    keywords: dict[str, Any] = {"trust_remote_code": recipe.trust_remote_code}
    base = resolve_path(adapter["base_model_name_or_path"]) if adapter is not None else path
    keywords |= {"dtype": dtype, "output_loading_info": True, "use_safetensors": True}
    try:
        if auto_class is AutoModelForSequenceClassification:
            # The same part of a composite model as the policy, with the statistics and units of a reward model.
            keywords["config"] = load_config(recipe)
            keywords["config"].num_labels = 1
        with quiet_transformers():  # the caller reports missing weights
            model, info = auto_class.from_pretrained(base, **keywords)
    except Exception as error:
        remedy = "check that the files are complete, or that the hub id is right and reachable"
        if "Unrecognized configuration class" in str(error):
            remedy = f"transformers has no {auto_class.__name__} for this type of model; choose another model"
        if "ignore_mismatched_sizes" in str(error):
            raise InputError(
                f"model.path: the shapes of the weights of {recipe.path} are not those of its config.json; restore both files "
                "from the same model"
            ) from error
        raise InputError(f"model.path: {recipe.path} could not be loaded ({_reason(error)}); {remedy}") from error
    missing = sorted(info["missing_keys"])
    if adapter is not None:
        model = _with_adapters(model, path)
        if adapter.get("modules_to_save"):
            missing = [name for name in missing if name.split(".")[0] not in adapter["modules_to_save"]]
    if type(model.config) not in auto_class._model_mapping and not recipe.trust_remote_code:
        raise InputError(
            f"model.path: transformers loads a part of {recipe.path} ({model.config.model_type}), and cannot load it again "
            "when it is exported; choose a text model"
        )
    if model.config.model_type == "rwkv":
        # Passes would change the weights in place, a guard against overflow in float16, and an export would contain them.
        model.config.rescale_every = 0
    if (family := family_of(recipe)) is not None:
        family.prepare(model, base)
    use_positions_by_length(base_decoder(model))
    use_layers_by_stream(model)
    use_fused_layers(model, resolve_fused(recipe.fused, device))
    use_flash_attention(recipe.attention, device)
    bound_kept_kernels()
    if recipe.load_in_4bit:
        quantize(model, device)
    try:
        model = model.to(device_override or device).eval()
        choose_path(model, cache_directory() / "gate")
        use_routing(model)
        refuse_undivided(model)
    except torch.OutOfMemoryError as error:
        raise InputError(
            f"model.path: {recipe.path} does not fit into the GPU's memory; set model.dtype to bfloat16 or model.device "
            "to cpu"
        ) from error
    if reason := path_of(model).reason:
        slower = f"{model.config.model_type} models are computed one by one, which is slower"
        warnings.warn(f"{slower}: {reason}", stacklevel=2)
    if (lengths := lengths_of(base_decoder(model))) is not None and lengths.each:
        warnings.warn(
            f"positions of this model depend on the length (rope_type dynamic): each token beyond {lengths.original} takes a "
            "forward pass of its whole sequence, which is slow",
            stacklevel=2,
        )
    return model, missing


def _adapter_config(path: str) -> dict[str, Any]:
    """The configuration of the adapters at `path`; InputError unless it names its base model."""
    file = Path(path) / "adapter_config.json"
    values = files.read_object(file)
    if not isinstance(values.get("base_model_name_or_path"), str):
        raise InputError(f"model.path: {file} has no text `base_model_name_or_path`; name the base model there")
    return values


def _with_adapters(model: Any, path: str) -> Any:
    """`model` with the adapters at `path` merged. Files that need pickle are refused, because unpickling can run
    code."""
    from peft import PeftConfig, PeftModel

    if not (Path(path) / "adapter_model.safetensors").is_file():
        raise InputError(
            f"model.path: {path} has no adapter_model.safetensors, and other formats of adapters can run code; convert "
            "them to safetensors with peft"
        )
    try:
        config = PeftConfig.from_pretrained(path)
        _bound_patterns(config, model)
        return PeftModel.from_pretrained(model, path, config=config).merge_and_unload()
    except InputError:
        raise
    except Exception as error:
        raise InputError(
            f"model.path: the adapters {path} could not be loaded ({first_line(error)}); check that they are complete "
            "and were trained on the base model that adapter_config.json names"
        ) from error


def _bound_patterns(config: Any, model: Any) -> None:
    """Replace regular expressions of an adapter's configuration by the names that they match, within two seconds. peft
    would match them without a limit of time. Those that it needs as patterns may have two repetitions, and no repeated
    group."""
    import regex  # type: ignore[import-untyped]

    ends = time.monotonic() + 2
    for key in ("target_modules", "exclude_modules"):
        pattern = getattr(config, key, None)
        if not isinstance(pattern, str) or pattern == "all-linear":
            continue
        try:
            compiled = regex.compile(pattern)
            names = [name for name, _ in model.named_modules()]
            found = {n for n in names if compiled.fullmatch(n, timeout=max(0.001, ends - time.monotonic()))}
        except (TimeoutError, regex.error) as error:
            raise InputError(
                f"model.path: {key} in adapter_config.json is a pattern that cannot be matched ({first_line(error)}); list the "
                "names of modules there"
            ) from None
        setattr(config, key, found)
    layers = getattr(config, "layers_pattern", None)
    patterns = layers if isinstance(layers, list) else [layers]
    for pattern in (
        *patterns,
        *(getattr(config, "rank_pattern", None) or ()),
        *(getattr(config, "alpha_pattern", None) or ()),
    ):
        if isinstance(pattern, str) and re.search(r"\)[*+{]|([*+{].*){3}", pattern):
            raise InputError(
                f"model.path: adapter_config.json has the pattern {pattern[:80]!r}, which may match without end; write names there"
            )


def _reason(error: BaseException) -> str:
    """The first line of `error`, or what to set where transformers refused to run a model's own code."""
    if "trust_remote_code" in str(error):
        return "its files contain Python code that must be executed; set model.trust_remote_code=true if you trust their authors"
    return first_line(error)


def first_line(error: BaseException) -> str:
    """The type of the error with its first line, and the second one if the first announces it with a colon."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    text = " ".join(lines[:2] if lines and lines[0].endswith(":") else lines[:1])
    return f"{type(error).__name__}: {text[:300]}" if text else type(error).__name__
