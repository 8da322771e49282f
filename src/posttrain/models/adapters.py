"""LoRA adapters (peft): the matrices that targets name, checks of targets, and weights with adapters merged.

transformers fuses the experts of a layer into one parameter per projection, and models exist where one target names both
experts and linear modules. peft finds the experts of some families only, and then not the linear modules of the same name,
such as those of shared experts. So targets are resolved here, to full names of modules and parameters.
"""

import copy
import re
import warnings
from collections.abc import Iterable, Iterator, Sequence
from difflib import get_close_matches
from typing import Any

import torch
from torch.nn.utils.stateless import _reparametrize_module

from posttrain.distributed.sharding import full_tensor, is_sharded
from posttrain.errors import InputError
from posttrain.models.cuda.four_bit import dequantized
from posttrain.models.forward import transformer
from posttrain.models.load import first_line, load_config, policy_class
from posttrain.recipe.model import LoraRecipe, ModelRecipe


def add_adapters(model: torch.nn.Module, lora: LoraRecipe, task: str) -> torch.nn.Module:
    """`model` with new LoRA adapters. Only they are trainable, and for `task` SEQ_CLS the head. InputError for a target
    that names nothing, and for one whose weight is shared with another module."""
    from peft import LoraConfig, get_peft_model

    config = LoraConfig(r=lora.rank, lora_alpha=lora.alpha, lora_dropout=lora.dropout, task_type=task)
    try:
        _set_targets(config, model, lora.targets)
        if config.target_parameters and lora.dropout > 0:
            raise InputError("model.lora.dropout: adapters of experts have no dropout; set it to 0")
        with warnings.catch_warnings():
            # peft uses deprecated names of transformers, and reports patterns of ranks of adapted parameters as unused.
            warnings.simplefilter("ignore")
            return get_peft_model(model, config, autocast_adapter_dtype=False)
    except ValueError as error:
        raise InputError(f"model.lora.targets: {first_line(error)}") from error


def check_targets(recipe: ModelRecipe, reward: bool) -> list[str]:
    """What `add_adapters` would raise, and `coverage_warnings`, for a model on disk, without loading its weights.
    `reward`: whether the model becomes a reward model."""
    from transformers import AutoModelForSequenceClassification

    assert recipe.lora is not None
    auto_class: Any = AutoModelForSequenceClassification if reward else policy_class(recipe)
    try:
        with torch.device("meta"):
            model = auto_class.from_config(load_config(recipe), trust_remote_code=recipe.trust_remote_code)
    except Exception as error:
        return [
            f"not checked: model.lora.targets, because the model's configuration is not usable ({first_line(error)})"
        ]
    with torch.device("meta"):
        return coverage_warnings(add_adapters(model, recipe.lora, "SEQ_CLS" if reward else "CAUSAL_LM"))


def coverage_warnings(model: torch.nn.Module) -> list[str]:
    """A sentence if most weights of a model's experts have no adapters."""
    base = transformer(model)
    adapted = _adapted(base)
    factors = _factor_ids(adapted)
    experts = {_base_name(name): matrix.numel() for name, matrix in _expert_matrices(base) if id(matrix) not in factors}
    covered = sum(count for name, count in experts.items() if name in adapted)
    if 2 * covered >= sum(experts.values()):
        return []
    left = dict.fromkeys(name.removesuffix(".weight").rpartition(".")[2] for name in experts if name not in adapted)
    return [
        f"model.lora.targets adapts {covered / sum(experts.values()):.0%} of the experts' weights, so most of the model does "
        f"not learn; add {', '.join(left)}, or use all-linear"
    ]


def adapted_beside_layers(model: torch.nn.Module) -> list[str]:
    """Names of adapted parameters of experts, of embeddings, of the output projection and of an encoder of images."""
    base = transformer(model)
    inside = {id(module) for module in base.get_decoder().modules() if module is not base.get_input_embeddings()}
    return [
        name for name, module in _adapted(base).items() if hasattr(module, "parameter_name") or id(module) not in inside
    ]


# -- targets ----------------------------------------------------------------------------------------------------------


def _set_targets(config: Any, model: Any, targets: str | list[str]) -> None:
    """Set the modules and parameters of peft's `config` that `targets` names in `model`, by their full names."""
    from transformers.pytorch_utils import Conv1D

    kinds = (torch.nn.Linear, torch.nn.Embedding, Conv1D)
    modules = {name: module for name, module in model.named_modules() if isinstance(module, kinds) and name != "score"}
    names = [*modules, *(name for name, matrix in _expert_matrices(model) if matrix.ndim == 3)]
    if isinstance(targets, str) and targets.lower() != "all-linear":
        chosen = _matching(targets, names)
    else:
        # peft knows the names of earlier versions of transformers, which had linear modules for each expert.
        old = _converted(config, model, targets)
        config.rank_pattern, config.alpha_pattern = old.rank_pattern, old.alpha_pattern
        chosen = {name for name, _ in model.named_parameters() if _ends(name, old.target_parameters or ())}
        if isinstance(targets, str):
            head = model.get_output_embeddings()
            apart = {name for name, one in modules.items() if one is head or isinstance(one, torch.nn.Embedding)}
            chosen |= set(names) - apart
        else:
            chosen |= {name for name in names if _ends(name.removesuffix(".weight"), targets)}
            renamed = set(targets) - set(old.target_modules)
            if not targets:
                raise _no_match("an empty list adapts nothing", "", names)
            for target in targets:
                if target not in renamed and not any(_ends(name.removesuffix(".weight"), [target]) for name in chosen):
                    raise _no_match(_unadapted(model, target), target, names)
    # State space layers read the weights of some of their modules instead of calling them, so adapters have no effect.
    spaces = {name for name, module in model.named_modules() if hasattr(module, "A_log")}
    read = {name for name in chosen if name.rpartition(".")[0] in spaces and _leaf(name) in ("dt_proj", "out_proj")}
    if read and not (isinstance(targets, str) and targets.lower() == "all-linear"):
        raise InputError(
            f"model.lora.targets: {min(read)} cannot have adapters, because its layer reads the weight itself; remove it"
        )
    chosen -= read
    _refuse_shared(model, chosen)
    linear = {name for name in chosen if name in modules}
    # peft takes these names for those of experts, also if they are modules.
    leaves = {leaf for leaf in set(map(_leaf, linear)) if _is_taken(config, model, leaf)}
    # peft would replace the forward pass of these linear modules, such as routers.
    special = {name for name in linear if type(modules[name]).__module__.startswith("transformers.models.")}
    config.target_modules = {name for name in linear - special if _leaf(name) not in leaves}
    config.target_parameters = {f"{name}.weight" if name in linear else name for name in chosen - config.target_modules}
    packed = [name for name in linear - config.target_modules if not modules[name].weight.is_floating_point()]
    if packed:
        raise InputError(
            f"model.load_in_4bit: peft cannot adapt the 4-bit module {packed[0]} of a model with experts; adapt other "
            "modules in model.lora.targets, or remove load_in_4bit"
        )


def _matching(pattern: str, names: Sequence[str]) -> set[str]:
    """The names that match the regular expression as a whole. InputError if there are none."""
    try:
        chosen = {name for name in names if re.fullmatch(pattern, name)}
    except re.error as error:
        raise InputError(f"model.lora.targets: invalid regular expression {pattern!r}: {error}") from error
    if not chosen:
        what = f"a text is all-linear or a regular expression of whole names, and none matches {pattern!r}"
        raise _no_match(what, pattern, names)
    return chosen


def _unadapted(model: torch.nn.Module, target: str) -> str:
    """Why no adapter belongs to `target`."""
    for name, part in (*model.named_modules(), *model.named_parameters()):
        if _ends(name, [target]):
            return (
                f"{target!r} is of type {type(part).__name__}, and only linear modules, embeddings and matrices of experts can "
                "have adapters"
            )
    return f"no linear module, embedding or matrix of experts is named {target!r}"


def _no_match(what: str, target: str, names: Sequence[str]) -> InputError:
    leaves = list(dict.fromkeys(_leaf(name.removesuffix(".weight")) for name in names))
    near = get_close_matches(_leaf(target), leaves, n=3)
    remedy = f"did you mean [{', '.join(near)}]?" if near else f"the model has {', '.join(leaves)}"
    return InputError(f"model.lora.targets: {what}; {remedy}")


def _refuse_shared(model: torch.nn.Module, chosen: set[str]) -> None:
    """InputError if the weight of a chosen matrix has a second name: merging an adapter would change both modules."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    names: dict[int, list[str]] = {}
    for name, parameter in parameters.items():
        names.setdefault(id(parameter), []).append(name.removesuffix(".weight"))
    for name in sorted(chosen):
        tied = names[id(parameters[name if name in parameters else f"{name}.weight"])]
        if len(tied) > 1:
            raise InputError(
                f"model.lora.targets: {' and '.join(map(_leaf, tied))} share one weight in this model (tied embeddings), "
                f"which an adapter would separate; remove {_leaf(name)} from the targets"
            )


def _converted(config: Any, model: torch.nn.Module, targets: str | Iterable[str]) -> Any:
    """A copy of peft's `config` with `targets` as peft translates them for `model`."""
    from peft.utils.transformers_weight_conversion import convert_peft_config_for_transformers

    converted = copy.deepcopy(config)
    converted.target_modules = targets if isinstance(targets, str) else set(targets)
    convert_peft_config_for_transformers(converted, model, None)
    return converted


def _is_taken(config: Any, model: torch.nn.Module, name: str) -> bool:
    try:
        return name not in _converted(config, model, [name]).target_modules
    except ValueError:  # experts have two of these matrices in one parameter
        return True


def _expert_matrices(model: torch.nn.Module) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """The matrices of experts: [experts, ...] where a parameter has those of all experts of a layer."""
    for owner, module in model.named_modules():
        if "Experts" in type(module).__name__ or ".experts." in owner:
            for name, parameter in module.named_parameters(owner, recurse=False):
                if parameter.ndim == 3 or (parameter.ndim == 2 and ".experts." in owner):
                    yield name, parameter


def _ends(name: str, endings: Iterable[str]) -> bool:
    return any(f".{name}".endswith(f".{ending}") for ending in endings)


def _leaf(name: str) -> str:
    return name.rpartition(".")[2]


# -- merged weights ---------------------------------------------------------------------------------------------------


def merged_parameters(model: torch.nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Names and whole parameters and stored buffers of the base model; adapted ones include the contribution of their adapters."""
    base = transformer(model)
    adapted = _adapted(base)
    factors = _factor_ids(adapted)
    for name, parameter in base.named_parameters():
        if id(parameter) in factors or ".original_module." in name:
            continue
        name, tensor = _base_name(name), full_tensor(dequantized(parameter)).detach()
        if (module := adapted.get(name)) is not None:
            matrices = _factors(module)
            sharded = any(map(is_sharded, matrices.values()))
            whole = {name: full_tensor(factor) for name, factor in matrices.items()} if sharded else {}
            with _reparametrize_module(module, whole):
                for adapter in module.active_adapters:
                    tensor = tensor + module.get_delta_weight(adapter)
        yield name, tensor
    for owner, module in base.named_modules():
        for name, buffer in module.named_buffers(owner, recurse=False):
            if _leaf(name) not in module._non_persistent_buffers_set:
                yield _base_name(name), buffer


def _adapted(base: torch.nn.Module) -> dict[str, Any]:
    """The modules of peft by the name of the parameter that each adapts. Modules of several parameters are nested."""
    return {
        f"{_base_name(name)}.{getattr(module, 'parameter_name', 'weight')}": module
        for name, module in base.named_modules()
        if hasattr(module, "base_layer") and hasattr(module, "get_delta_weight")
    }


def _base_name(name: str) -> str:
    """The name that a module or parameter has without adapters."""
    name = re.sub(r"\.modules_to_save\.[^.]+", "", name)  # a head that is trained beside adapters
    return ".".join(part for part in name.split(".") if part != "base_layer")


def _factors(module: torch.nn.Module) -> dict[str, torch.nn.Parameter]:
    """The parameters of the adapter `module` itself."""
    return {name: factor for name, factor in module.named_parameters() if not name.startswith("base_layer.")}


def _factor_ids(adapted: dict[str, Any]) -> set[int]:
    return {id(factor) for module in adapted.values() for factor in _factors(module).values()}
