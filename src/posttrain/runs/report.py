"""`report.md`: a summary of the run, its results, and how to use the model."""

import itertools
import json
import os
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from posttrain.recipe.base import BaseConfig
from posttrain.recipe.rollout import SeedRange, evaluated_environment
from posttrain.runs.directory import RunDirectory, write_atomically
from posttrain.runs.metrics import duration, read_metrics
from posttrain.runs.tables import UNIMPROVED, Table, headline, markdown_table, plain_numbers, score_table
from posttrain.terminal import printable

if TYPE_CHECKING:
    from posttrain.recipe.stages import Recipe


def write_report(
    run: RunDirectory,
    tables: Sequence[Table],
    *,
    title: str | None = None,
    model_directory: Path | None = None,
    warnings: Sequence[str] = (),
) -> Path:
    """Write `report.md` of the run and return its path.

    `tables`: the final results. `model_directory`: the exported model. `warnings`: added to those of the metrics log.
    The report links the plots in `run.plots`. Raises `RunError` if it cannot be written.
    """
    lines = read_metrics(run.metrics)
    parts = [
        f"# {title or run.path.resolve().name}",
        headline(lines) or _unfinished(run, lines),
        *(f"{table.markdown()}\n\n{table.note}" for table in tables),
        _by_checkpoint(lines),
        _plots(run),
        _checkpoint(model_directory, run.load_recipe(to_run=True).stage, is_unimproved(lines)),
        _episodes(run),
        _warnings(run_warnings(lines, warnings)),
        _changed(changed_rows(run)),
        "## The run\n\n" + markdown_table(("what", "value"), run_facts(run, lines)),
    ]
    write_atomically(run.report, printable("\n\n".join(part for part in parts if part)) + "\n")
    return run.report


def _unfinished(run: RunDirectory, lines: list[dict[str, Any]]) -> str:
    """Progress of a run that has no result yet."""
    done = max((line["step"] for line in lines if line["kind"] == "train"), default=0)
    return f"No result yet: {_of(done, getattr(run.load_recipe(), 'steps', None))} steps are done."


def _warnings(items: Sequence[str]) -> str:
    return "## Warnings and failures\n\n" + "\n".join(f"- {item}" for item in items) if items else ""


def changed_keys(part: BaseConfig, default: BaseConfig | None = None, prefix: str = "") -> dict[str, Any]:
    """Dotted key -> value where `part` differs from `default` (None: the schema's defaults), in schema order.

    A section whose type differs from the default, such as another loss, contributes its `type` and the keys that differ
    from the defaults of that type. For an environment whose code is not imported, all additional keys count.
    """
    changed: dict[str, Any] = {}
    for name, field in type(part).model_fields.items():
        value, key = getattr(part, name), f"{prefix}{name}"
        usual = field.get_default() if default is None else getattr(default, name)
        if not isinstance(value, BaseConfig):
            if value != usual:
                changed[key] = value
        elif type(value) is type(usual):
            changed |= changed_keys(value, usual, f"{key}.")
        else:
            kind = {f"{key}.type": value.type} if hasattr(value, "type") else {}
            changed |= kind | changed_keys(value, None, f"{key}.") or {key: "set, with its defaults"}
    return changed | {f"{prefix}{name}": value for name, value in (part.model_extra or {}).items()}


def run_facts(run: RunDirectory, lines: list[dict[str, Any]]) -> list[tuple[str, str]]:
    """Recipe, machine and progress of the run as (name, value) in Markdown; `lines` are its metrics."""
    recipe, machine = run.load_recipe(to_run=True), run.load_environment()
    packages = ", ".join(f"{name} {machine['packages'].get(name)}" for name in ("posttrain", "torch", "transformers"))
    done = max((line["step"] for line in lines if line["kind"] == "train"), default=0)
    seconds = max((line.get("time/run") or 0.0 for line in lines), default=0.0)
    return [
        ("stage", recipe.stage),
        ("model", _model(recipe)),
        *_data(recipe),
        ("run seed", str(recipe.seed)),
        ("steps", _of(done, getattr(recipe, "steps", None))),
        ("wall time", f"{duration(seconds)} (without pauses between sessions)"),
        ("machine", f"{machine['processor']}, {machine['cpus_allowed']} processors, {machine['platform']}"),
        ("software", f"Python {machine['python']}, {packages}" + _commit(machine["git"])),
        ("started", machine["started"]),
        ("command", f"`{machine['command']}`"),
        ("recipe", f"[recipe.yaml](recipe.yaml), hash {machine['recipe_hash']}"),
    ]


def _model(recipe: "Recipe") -> str:
    if (recipe.stage == "evaluate" or recipe.stage == "generate") and recipe.remote is not None:
        return f"`{recipe.remote.model}` at {recipe.remote.url}"
    dtype = f", {recipe.model.dtype}" if recipe.model.dtype else ""
    return f"`{recipe.model.path}`{dtype}" + (", LoRA" if recipe.model.lora else "")


def _of(done: int, steps: int | None) -> str:
    return str(done) if steps is None else f"{done} of {steps}"


def _data(recipe: Any) -> list[tuple[str, str]]:
    rows = []
    data = getattr(recipe, "data", None)
    if data is not None:
        for name in ("train", "validation", "test"):
            paths = ", ".join(f"`{source.path}`" for source in getattr(data, name, ()))
            rows += [(f"{name} rows", paths)] if paths else []
        if getattr(data, "held_out", None):
            names = "validation rows" if data.test or data.held_out == 1 else "validation and test rows"
            share = f"{100 * data.held_out:g}%" if isinstance(data.held_out, float) else str(data.held_out)
            rows.append((names, f"{share} held out of the training rows"))
    environment = evaluated_environment(recipe)
    if environment is None:
        return rows
    ranges = {"held-out seeds of the table": ("evaluation.final_seeds", recipe.evaluation.final_seeds)}
    if recipe.stage != "evaluate":
        ranges["held-out seeds of the curve"] = ("evaluation.seeds", recipe.evaluation.seeds)
    training, key = recipe.training_seeds
    if training is not None and data is None:
        ranges["training seeds"] = (key, training)
    trained = recipe.environment or environment
    keys = {"training seeds": trained.rows_key}
    seeds = [(name, _seeds(key, part, keys.get(name, environment.rows_key))) for name, (key, part) in ranges.items()]
    played = [("environment", f"`{trained.type}`")]
    if trained != environment:
        played.append(
            ("environment of the evaluations", f"`{environment.type}`, at most {environment.max_turns} turns")
        )
    return [*rows, *played, *_reward_model(recipe), *seeds]


def _seeds(key: str, seeds: SeedRange, rows_key: str | None) -> str:
    if rows_key is not None and seeds.start is None:
        return f"drawn from the rows of {rows_key}"
    if rows_key is not None and seeds.count is None:
        return f"{seeds.start} to the last row of {rows_key}"
    generated = seeds.of_generated(key)
    return f"{generated[0]} to {generated[-1]}"


def _reward_model(recipe: "Recipe") -> list[tuple[str, str]]:
    """The reward model, and the unit of the returns in tables and curves that follows from it."""
    source = getattr(recipe, "reward", None)
    if source is None:
        return []
    clipped = "" if source.clip is None else f", clipped to [-{source.clip:g}, {source.clip:g}]"
    units = {
        "stored": f"normalized with the mean and standard deviation stored with it{clipped}",
        "running": f"raw; only credit normalizes them, with the running statistics of training{clipped}",
        "none": f"raw{clipped}",
    }
    return [("reward model", f"`{source.path}`"), ("its rewards in returns", units[source.normalize])]


def _commit(git: dict[str, Any] | None) -> str:
    return "" if git is None else f", commit {git['commit'][:12]}" + (" with local changes" if git["modified"] else "")


def _by_checkpoint(lines: list[dict[str, Any]]) -> str:
    table = score_table(lines)
    return "" if table is None else f"## Scores by checkpoint\n\n{table.markdown()}\n\n{table.note}"


def changed_rows(run: RunDirectory) -> list[tuple[str, str]]:
    """(key, value) of the recipe keys that differ from their defaults, in Markdown."""
    changed = changed_keys(run.load_recipe(to_run=True))
    return [
        (f"`{key}`", f"`{plain_numbers(str(_written(value)))}`")
        for key, value in changed.items()
        if key not in ("name", "runs", "stage")
    ]


def _changed(rows: list[tuple[str, str]]) -> str:
    return "## Recipe keys that differ from the defaults\n\n" + (
        markdown_table(("key", "value"), rows) if rows else "None."
    )


def _written(value: Any) -> Any:
    """`value` with every nested section reduced to the keys that differ from the defaults."""
    if isinstance(value, BaseConfig):
        return {key: _written(member) for key, member in changed_keys(value).items()}
    if isinstance(value, list | tuple):
        return [_written(member) for member in value]
    return {True: "true", False: "false", None: "null"}[value] if value is None or isinstance(value, bool) else value


def _plots(run: RunDirectory) -> str:
    from posttrain.runs.panels import TITLES

    images = [
        f"![{title}](plots/{name}.png)"
        for name, title in {**TITLES, "trajectories": "Trajectories"}.items()
        if (run.plots / f"{name}.png").is_file()
    ]
    return "## Curves\n\n" + "\n\n".join(images) if images else ""


def is_unimproved(lines: Sequence[dict[str, Any]]) -> bool:
    """Whether the exported model is the starting model, because no later checkpoint was better."""
    return any(line.get("chosen") == UNIMPROVED for line in lines)


def _checkpoint(directory: Path | None, stage: str, unimproved: bool) -> str:
    if directory is None:
        return ""
    warning = f"\n\n{UNIMPROVED[0].upper()}{UNIMPROVED[1:]}." if unimproved else ""
    adapter = (directory / "adapter_config.json").is_file()
    note = (
        "\n\nThis is a LoRA adapter. transformers loads it with its base model if peft is installed." if adapter else ""
    )
    path = json.dumps(str(directory))
    loader = "AutoModelForSequenceClassification" if stage == "reward" else "AutoModelForCausalLM"
    return f"""## The trained model

`{directory}`{warning}{note}

```python
from transformers import {loader}, AutoTokenizer

model = {loader}.from_pretrained({path})
tokenizer = AutoTokenizer.from_pretrained({path})
```"""


def _episodes(run: RunDirectory) -> str:
    files = sorted(run.episodes.glob("*.jsonl.zst"))
    if not files:
        return ""
    return (
        f"## Episodes\n\n{len(files)} files in [episodes/](episodes/), with the log-probability, reward and credit "
        f"of every sampled token. Read them in the terminal with\n\n```\nposttrain episodes {os.fspath(run.path)}\n```"
    )


def run_warnings(lines: list[dict[str, Any]], warnings: Sequence[str] = ()) -> list[str]:
    """Counts of failures that occurred, then `warnings` and those in `lines`, with repeated ones counted."""
    train = [line for line in lines if line["kind"] == "train"]
    held_out = [line for line in lines if line["kind"] in ("evaluation", "baseline", "final")]
    counts = {"skipped updates": sum(line.get("optimizer/skipped") or 0 for line in train)}
    for name, key, rows in (
        ("failed training episodes", "rollout/failed", train),
        ("failed held-out episodes", "failed", held_out),
    ):
        if any(key in line for line in rows):
            counts[name] = sum(line.get(key) or 0 for line in rows)
    counts["lines with a value that is NaN or infinite"] = sum("nonfinite" in line for line in lines)
    logged = [f"step {line['step']}: {line.get('message', line)}" for line in lines if line["kind"] == "warning"]
    items = [f"{name}: {count:g}" for name, count in counts.items() if count]
    grouped = [(text, len(list(same))) for text, same in itertools.groupby([*warnings, *logged])]
    items += [text if count == 1 else f"{text} ({count} times)" for text, count in grouped]
    return items
