"""The model card of a run: base model, data, training and results."""

import hashlib
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import yaml

from posttrain.errors import InputError
from posttrain.recipe.components import looking
from posttrain.recipe.compose import dump_recipe
from posttrain.runs.directory import RunDirectory
from posttrain.runs.metrics import read_metrics
from posttrain.runs.report import run_facts
from posttrain.runs.tables import headline, markdown_table, policy_tables, read_run_results

if TYPE_CHECKING:
    from posttrain.recipe.stages import Recipe

_PACKAGED = {"packaged:smollm2-135m": ("HuggingFaceTB/SmolLM2-135M-Instruct", "apache-2.0")}
"""Models that ship with packages -> their hub id and licence."""
_TAGS = {"rl": "reinforcement-learning", "reward": "reward-model", "distill": "distillation"}


@looking()
def model_card(run: RunDirectory, licence: str | None = None, target: str = "hf", address: str = "PATH") -> str:
    """The card as Markdown with the metadata that the hub reads.

    `licence`: an identifier such as `apache-2.0`; None: that of the base model, if known. `target`: the kind of export,
    whose use the card shows. `address`: where the model is.

    Raises:
        InputError: the run has not ended.
    """
    recipe = run.load_recipe()
    lines = read_metrics(run.metrics)
    if not (run.path / "results.json").is_file():
        raise InputError(f"{run.path} has no results yet; wait for its end, or continue it with --resume {run.path}")
    base, known = base_model(recipe)
    adapter = is_adapter(run.path / "model")
    metadata: dict[str, Any] = {
        "library_name": "gguf" if target == "gguf" else "peft" if adapter else "transformers",
        "pipeline_tag": "text-classification" if recipe.stage == "reward" else "text-generation",
        "tags": ["posttrain", recipe.stage, *([_TAGS[recipe.stage]] if recipe.stage in _TAGS else [])],
    }
    metadata |= {"base_model": base} if "/" in base and not base.startswith((".", "/")) else {}
    licence = licence or known
    rows = list(_sources(recipe.model_dump(mode="json")))
    if (environment := getattr(recipe, "environment", None)) is not None:
        rows.append(("environment", f"`{environment.type}`", "generated from seeds" if not rows else ""))
    data = markdown_table(("use", "source", "SHA-256"), rows) if rows else "None."
    metadata |= {"license": licence} if licence else {}
    results = read_run_results(run.path)
    tables = [*policy_tables(results.policies), *results.tables]
    sections = [
        f"---\n{yaml.safe_dump(metadata, sort_keys=False)}---",
        f"# {run.path.name}",
        f"Trained with posttrain, stage `{recipe.stage}`, from `{base}`.",
        headline(lines),
        "## Results",
        *(dict.fromkeys(table.markdown() for table in tables) or ["No held-out tasks were measured."]),
        "Intervals are 95%. Rows of baseline policies are of the same held-out tasks; `exact` values are computed.",
        "## Use",
        f"```\nllama-cli -m {run.path.name}.gguf\n```" if target == "gguf" else _use(recipe, adapter, address),
        "## Data",
        data,
        "## Training",
        markdown_table(("", ""), [fact for fact in run_facts(run, lines) if fact[0] not in ("command", "recipe")]),
        f"Recipe (`posttrain {recipe.stage} recipe.yaml` runs it again):",
        f"```yaml\n{dump_recipe(recipe).strip()}\n```",
        "## Licence",
        f"{licence}. The licences of the data apply as well."
        if licence
        else "Not stated: the licence of the base model and those of the data apply. `--licence NAME` states it.",
    ]
    return "\n\n".join(section.strip() for section in sections if section) + "\n"


def base_model(recipe: "Recipe") -> tuple[str, str | None]:
    """The model that the chain of runs started from, and its licence if known."""
    path = recipe.model.path
    for _ in range(20):
        before = Path(path).parent
        if Path(path).name != "model" or not (before / "recipe.yaml").is_file():
            break
        path = RunDirectory.open(before).load_recipe().model.path
    if path in _PACKAGED:
        return _PACKAGED[path]
    return path, _licence_in(Path(path) / "README.md")


def _licence_in(card: Path) -> str | None:
    """The licence that the card of a downloaded model states."""
    if not card.is_file():
        return None
    text = card.read_text(encoding="utf-8")
    if not text.startswith("---"):
        return None
    try:
        metadata = yaml.safe_load(text.split("---", 2)[1])
    except yaml.YAMLError:
        return None
    licence = metadata.get("license") if isinstance(metadata, dict) else None
    return licence if isinstance(licence, str) else None


def is_adapter(directory: Path) -> bool:
    """Whether the directory contains only adapters."""
    return (directory / "adapter_config.json").is_file()


def _use(recipe: "Recipe", adapter: bool, address: str) -> str:
    loader, imports = "AutoModelForCausalLM", []
    if recipe.stage == "reward":
        loader = "AutoModelForSequenceClassification"
    elif adapter:
        loader, imports = "AutoPeftModelForCausalLM", ["from peft import AutoPeftModelForCausalLM"]
    imports.append(f"from transformers import {'' if imports else f'{loader}, '}AutoTokenizer")
    lines = [
        f'model = {loader}.from_pretrained("{address}")',
        f'tokenizer = AutoTokenizer.from_pretrained("{address}")',
    ]
    return "\n".join(["```python", *imports, "", *lines, "```"])


def _sources(values: Mapping[str, Any], place: str = "") -> Iterator[tuple[str, str, str]]:
    """(use, path, hash) of every file or data set that the recipe names."""
    for key, value in values.items():
        path = f"{place}{key}"
        if isinstance(value, Mapping):
            yield from _sources(value, f"{path}.")
        elif isinstance(value, list):
            for item in value:
                if isinstance(item, Mapping) and isinstance(item.get("path"), str):
                    known, file = "data set of the hub, or no longer here", Path(item["path"]).expanduser()
                    if file.is_file():
                        with file.open("rb") as content:
                            known = f"`{hashlib.file_digest(content, 'sha256').hexdigest()}`"
                    yield f"`{path}`", f"`{item['path']}`", known
