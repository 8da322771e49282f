"""Load a recipe: merge files left to right, apply overrides, and validate against the schema of the stage."""

import json
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, TypeVar, cast

from pydantic import ValidationError

from posttrain.errors import InputError, require_type
from posttrain.recipe.base import BaseConfig
from posttrain.recipe.components import environment_class, register_environment
from posttrain.recipe.evaluate import NOT_EVALUATED, EvaluateRecipe
from posttrain.recipe.reference import either, sections_of, tags_of
from posttrain.recipe.registry import REGISTRIES, Registry
from posttrain.recipe.sources import Layer, dump_values, merge, read_file, read_overrides, required_keys
from posttrain.recipe.stages import STAGES, Recipe
from posttrain.recipe.validation import nearest_type, validation_errors

LORA_RATE = 10
"""How many times larger the default learning rate is with `model.lora`."""
P = TypeVar("P", bound=BaseConfig)


def load_recipe(sources: list[str], overrides: list[str], stage: str) -> Recipe:
    """The recipe of one stage from YAML files and overrides (`a.b=c`, `--a.b=c`, or `--a.b`, `c`; `key=null`).

    Missing keys have the defaults of the schema. If a later file or override changes the `type` of a section, the keys
    that only the old type has are dropped. Raises `InputError` with one sentence per problem, which names the file and
    line, or the override, that caused it.
    """
    return typed_recipe(merge_typed([*map(read_file, sources), *read_overrides(overrides)], stage), stage)


def section(part: type[P], value: "P | Mapping[str, Any] | None" = None, /, **keywords: Any) -> P:
    """A section of a recipe from plain arguments: `value` unchanged, or keys of it by name.

    Raises:
        InputError: a key does not exist or its value is not allowed; one sentence per problem, as for recipe files.
        TypeError: both a typed `value` and keywords are given.
    """
    if isinstance(value, part):
        if keywords:
            raise TypeError(f"{type(value).__name__} is complete; pass it alone, or pass its keys by name")
        return value
    keys: Mapping[str, Any] = {} if value is None else cast(Mapping[str, Any], value)
    require_type(part.__name__, keys, Mapping)
    return checked(Layer(plain_values({**keys, **keywords})), part)


def chosen(kinds: Registry, value: str | BaseConfig | Mapping[str, Any], /, **keywords: Any) -> Any:
    """A section of one of several kinds from plain arguments: the name of a kind and its keys, or its settings.

    InputError as `section`, also for a kind that does not exist.
    """
    if isinstance(value, BaseConfig):
        return section(type(value), value, **keywords)
    require_type(str(kinds.key), value, str, Mapping)
    values = {"type": value} if isinstance(value, str) else dict(value)
    name, known = str(values.get("type")), kinds.names()
    if (kind := kinds.find(name)) is None:
        raise InputError(f"there is no {kinds.key} {name!r}{nearest_type(name, known)}; use one of {', '.join(known)}")
    return section(kind, values, **keywords)


def plain_values(value: Any, name: str = "recipe") -> Any:
    """`value` in its YAML form: paths as text, typed sections as mappings, tuples as lists, dotted keys nested, and the
    class of an environment as the `type` that names it. InputError, which names the key (of the whole: `name`), for a value
    that YAML does not have."""
    if isinstance(value, BaseConfig):
        return value.model_dump(mode="json")
    if isinstance(value, Path):
        return str(value)
    if any(f"{kind.__module__}.{kind.__name__}" == "numpy.generic" for kind in type(value).__mro__):
        return value.item()
    if isinstance(value, type):
        return register_environment(value)
    if isinstance(value, list | tuple):
        return [plain_values(item, name) for item in value]
    if not isinstance(value, Mapping):
        require_type(name, value, str, bool, int, float, type(None))
        return value
    plain: dict[str, Any] = {}
    for key, inner in value.items():
        *sections, last = str(key).split(".")
        inside = plain
        for name in sections:
            inside = inside.setdefault(name, {})
        inner = plain_values(inner, str(key))
        inside[last] = {**inside[last], **inner} if isinstance(inner, dict) and last in inside else inner
    return plain


def merge_typed(layers: list[Layer], stage: str) -> Layer:
    """Merge the layers left to right. Where a later layer changes the `type` of a section, keys of the old type are
    dropped.

    One recipe can therefore serve several algorithms: `credit.type=rloo` over a file with `credit: {type: gae,
    gae_lambda: 0.95}`. `evaluate` accepts a recipe of any stage and drops the keys that an evaluation does not use. A
    file without a `stage` continues the recipe of the previous file.
    """
    merged = Layer({})
    if stage == "evaluate":
        layers = _as_evaluations(layers)
    for layer in layers:
        kept = _without_old_keys(merged.values, layer.values, STAGES[stage])
        merged = merge([Layer(kept, merged.origins), layer])
    return merged


def _as_evaluations(layers: list[Layer]) -> list[Layer]:
    """The layers, with recipes of other stages as recipes of `evaluate`. InputError if these have no environment."""
    converted, before = [], "evaluate"
    for layer in layers:
        trained = layer.values.get("stage", before if layer.file else "evaluate")
        before = trained if layer.file else before
        schema = STAGES.get(trained)
        if trained == "evaluate" or schema is None:
            converted.append(layer)
            continue
        environment = schema.model_fields.get("environment")
        default = environment is not None and environment.default is not None
        if not default and not any(isinstance(one.values.get("environment"), dict) for one in layers):
            raise InputError(
                f"{layer.origin(('stage',))}: the recipe is for stage {trained} and has no environment to evaluate in; set "
                "environment.type, or answer rows with `posttrain generate`"
            )
        values = {}
        for key, value in layer.values.items():
            if isinstance(value, dict):
                value = {name: kept for name, kept in value.items() if name not in NOT_EVALUATED.get(key, ())}
            if key in EvaluateRecipe.model_fields or key not in schema.model_fields:
                values[key] = value
        if "stage" not in layer.values:
            converted.append(Layer(values, layer.origins))
            continue
        if default or trained == "sft":
            # Use the tasks of the training run's final table, even if they are drawn from rows.
            values["evaluation"] = {"held_out": None, **values.get("evaluation", {})}
        place = {"stage": "evaluate", "name": f"{values.get('name', schema.model_fields['name'].default)}-evaluation"}
        converted.append(Layer(values | place, layer.origins))
    return converted


def _without_old_keys(values: dict[str, Any], later: dict[str, Any], part: type[BaseConfig]) -> dict[str, Any]:
    """`values` without the keys that have no meaning after `later` is merged into them."""
    kept = dict(values)
    for key, change in later.items():
        info, earlier = part.model_fields.get(key), values.get(key)
        if info is None or not isinstance(earlier, dict) or not isinstance(change, dict):
            continue
        if info.annotation in REGISTRIES:
            for section in (earlier, change):
                REGISTRIES[info.annotation].find(str(section.get("type")))
        sections = sections_of(info.annotation)
        tags = {tag: section for section in sections for tag in tags_of(section)}
        default = getattr(info.get_default(call_default_factory=True), "type", None)
        before = earlier.get("type", default)
        old = tags.get(str(before))
        new = tags.get(str(change.get("type", before)), sections[0] if len(sections) == 1 else old)
        if old is not None and new is not None and old is not new:
            gone = old.model_fields.keys() - new.model_fields.keys()
            earlier = {name: value for name, value in earlier.items() if name not in gone}
        kept[key] = earlier if new is None else _without_old_keys(earlier, change, new)
    return kept


def typed_recipe(given: Layer, stage: str) -> Recipe:
    """The values `given` as a typed recipe of `stage`; `InputError` as in `load_recipe`."""
    schema, audit = STAGES[stage], given.values.get("audit")
    require_stage(given, stage)
    if isinstance(audit, dict) and audit.get("environment") and "environment" not in schema.model_fields:
        where = given.origin(("audit", "environment"))
        raise InputError(f"{where}: this stage plays no environment; set audit.path to a reward model instead")
    missing = []
    for path, remedy in required_keys(given.values).items():
        start, dotted = f"{given.origin(path)}: " if given.origin(path) else "", ".".join(path)
        remedy = remedy or f"set it in the recipe, or add {dotted}=VALUE"
        missing.append(f"{start}{dotted} is required and has no value; {remedy}")
    if missing:
        raise InputError("\n".join(missing))
    values = {"stage": stage, **_with_defaults(schema, None, _with_rate(_with_evaluated(given.values, schema), schema))}
    return checked(Layer(values, given.origins), schema)


def require_stage(given: Layer, stage: str) -> None:
    """InputError if the recipe `given` says that it is for another stage than `stage`, or than `pipeline` or `tune`."""
    declared = given.values.get("stage", stage)
    if declared == stage:
        return
    known = [*STAGES, "pipeline", "tune"]
    message = f"the recipe is for stage {declared}, not {stage}; run it with `posttrain {declared}`"
    if declared not in known:
        message = f"stage is {json.dumps(declared)}{nearest_type(str(declared), known)}; it must be {either(known)}"
    raise InputError(f"{given.origin(('stage',))}: {message}")


def checked(given: Layer, schema: type[P]) -> P:
    """The values `given` as a typed `schema`; `InputError` as in `load_recipe`."""
    try:
        return schema.model_validate_json(json.dumps(given.values), strict=True)
    except ValidationError as error:
        raise InputError("\n".join(validation_errors(error, schema, given))) from None


def dump_recipe(recipe: Recipe) -> str:
    """The recipe as YAML with every key. `load_recipe` of it returns an equal recipe."""
    return dump_values(recipe.model_dump(mode="json"))


def _with_defaults(part: type[BaseConfig], default: BaseConfig | None, values: dict[str, Any]) -> dict[str, Any]:
    """`values`, completed by the section's own default where it differs from the defaults of its keys.

    For example, `evaluation.seeds.count=64` keeps the default start, `evaluation.sampling.top_p=0.9` stays greedy, and
    `loss.clip_high` alone applies to the default loss. A section whose `type` was changed keeps no keys of the old
    type.
    """
    kept = {key: getattr(default, key) for key in default.model_fields_set} if default is not None else {}
    filled = {key: value for key, value in kept.items() if not isinstance(value, BaseConfig)} | values
    for key, value in values.items():
        info = part.model_fields.get(key)
        inner = kept.get(key, info.get_default(call_default_factory=True) if info is not None else None)
        if not isinstance(value, dict) or not isinstance(inner, BaseConfig):
            continue
        own_type = getattr(inner, "type", None)
        if "type" not in value or value["type"] == own_type:
            filled[key] = ({} if own_type is None else {"type": own_type}) | _with_defaults(type(inner), inner, value)
    return filled


def _with_rate(values: dict[str, Any], schema: type[BaseConfig]) -> dict[str, Any]:
    """`values` with `LORA_RATE` times the default learning rate, if adapters are trained and no rate is set.

    Adapters learn best at about ten times the rate of full training (Schulman et al. 2025, "LoRA without regret").
    """
    model, optimizer, info = values.get("model"), values.get("optimizer", {}), schema.model_fields.get("optimizer")
    adapted = isinstance(model, dict) and (model.get("lora") is True or isinstance(model.get("lora"), dict))
    if info is None or not adapted or not isinstance(optimizer, dict) or "learning_rate" in optimizer:
        return values
    rate = float(f"{LORA_RATE * info.get_default(call_default_factory=True).learning_rate:.6g}")
    return {**values, "optimizer": {**optimizer, "learning_rate": rate}}


def _with_evaluated(values: dict[str, Any], schema: type[BaseConfig]) -> dict[str, Any]:
    """`values` with complete environments of `evaluation` and `audit`: their keys over those of `environment`, or of
    `evaluation.environment` for an audit, unless they have another `type`.

    In a recipe of `evaluate`, which has only one environment, that of `evaluation` becomes `environment`.
    """
    about = schema.model_fields.get("environment")
    default = None if about is None else about.get_default(call_default_factory=True)
    for name in ("evaluation", "audit"):
        section = values.get(name)
        changes = section.get("environment") if isinstance(section, dict) else None
        if not isinstance(section, dict) or not isinstance(changes, dict):
            continue
        evaluation = values.get("evaluation")
        played = evaluation.get("environment") if name == "audit" and isinstance(evaluation, dict) else None
        base = played or values.get("environment") or (default.model_dump(mode="json") if default is not None else {})
        if isinstance(base, dict) and changes.get("type", base.get("type")) == base.get("type"):
            kept = base
            with suppress(InputError):
                kept = _without_old_keys(base, changes, environment_class(str(base.get("type"))).Recipe)
            changes = merge([Layer(kept), Layer(changes)]).values
        if schema is EvaluateRecipe and name == "evaluation":
            rest = {key: value for key, value in section.items() if key != "environment"}
            values = {**values, "environment": changes, name: rest}
        else:
            values = {**values, name: {**section, "environment": changes}}
    return values
