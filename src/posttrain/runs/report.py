"""The report of a run: a summary, its results, and how to use the model; `report.md` is its Markdown form."""

import itertools
import json
import os
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, Template

from posttrain.errors import InputError, PosttrainError
from posttrain.recipe.base import BaseConfig
from posttrain.recipe.rollout import SeedRange, evaluated_environment
from posttrain.runs.directory import RunDirectory, write_atomically
from posttrain.runs.log import Line, Log, read_log
from posttrain.runs.metrics import duration
from posttrain.runs.panels import TITLES
from posttrain.runs.reader import is_file, read_text
from posttrain.runs.samples import RowSample, read_samples
from posttrain.runs.tables import (
    TASKS,
    Table,
    audit_file,
    audit_table,
    headline,
    markdown_table,
    plain_numbers,
    read_run_results,
    score_table,
)
from posttrain.terminal import printable

Rows = list[tuple[str, str]]


@dataclass
class Report:
    """What a report says about a run, a study or a pipeline, in Markdown and in HTML."""

    title: str
    path: str = ""
    headline: str = ""
    """The result in one sentence."""
    verdict: Sequence[str] = ()
    """Whether training changed the held-out measure, and the likely reasons if it did not."""
    tables: Sequence[Table] = ()
    """Final results."""
    scores: Table | None = None
    """Scores by checkpoint."""
    rows: Sequence[RowSample] = ()
    """Held-out rows with their scores."""
    warnings: Sequence[str] = ()
    """Warnings and failures."""
    facts: Rows = field(default_factory=list)
    """Recipe, machine and progress, in Markdown."""
    changed: Rows = field(default_factory=list)
    """Recipe keys that differ from their defaults, in Markdown."""
    recipe: str = ""
    missing: list[str] = field(default_factory=list)
    """What could not be read, and why."""

    def read(self, run: RunDirectory, lines: Sequence[Line], warnings: Sequence[str] = ()) -> None:
        """Fill in what the files of a run say. `warnings` are added to those of its log."""
        log = Log.of(lines)
        self.scores, self.warnings = score_table(log), run_warnings(log, warnings)
        audits = [line for line in log if line["kind"] == "audit" and "message" in line]
        evaluated = max((line["step"] for line in log if line["kind"] == "evaluation"), default=0)
        try:
            results = read_run_results(run.path)
            self.tables, verdict = results.tables, results.verdict
            self.rows = read_samples(run)
            self.verdict = [
                *(verdict.lines if verdict is not None else ()),
                *(
                    str(one["message"]) + (f"; no verdict after step {one['step']}" if one["step"] < evaluated else "")
                    for one in audits[-1:]
                    if verdict is None or one["message"] not in verdict.reasons
                ),
            ]
            audited = [one["step"] for one in audits[-1:] if is_file(audit_file(run.path, one["step"]))]
            self.tables = [*self.tables, *(audit_table(run.path, step) for step in audited)]
        except PosttrainError as error:
            self.missing.append(str(error))
        try:
            self.headline = headline(log) or f"No result yet: {_of(log.last_step, run.load_recipe())} steps are done."
            if any(one["alarm"] for one in audits[-1:]):
                self.headline += " In the audit, only the reward rose."
            self.facts = run_facts(run, log)
            changed = changed_keys(run.load_recipe(to_run=True))
            self.changed = [
                (f"`{key}`", f"`{plain_numbers(str(_written(value)))}`")
                for key, value in changed.items()
                if key not in ("name", "runs", "stage")
            ]
        except PosttrainError as error:
            self.headline = self.headline or headline(log)
            self.missing.append(str(error))
        try:
            self.recipe = read_text(run.recipe_file)
        except InputError as error:
            self.missing.append(str(error))

    def markdown(self, images: Sequence[tuple[str, str]] = (), **values: Any) -> str:
        """The report in Markdown. `images`: (title, file). `values`: further variables of the template."""
        text = _template().render(report=self, images=images, pairs=markdown_table, **values)
        return printable(re.sub(r"\n{3,}", "\n\n", text).strip()) + "\n"


@cache
def _template() -> Template:
    loader = PackageLoader("posttrain.runs", "pages")
    environment = Environment(loader=loader, trim_blocks=True, lstrip_blocks=True, autoescape=False)
    return environment.get_template("report.md.j2")


def write_report(run: RunDirectory, model_directory: Path | None = None, warnings: Sequence[str] = ()) -> Path:
    """Write `report.md` of the run, with the tables of `results.json`, and return its path.

    `model_directory`: the exported model. `warnings`: added to those of the metrics log. The report links the plots in
    `run.plots`. Raises `RunError` if it cannot be written.
    """
    recipe, report = run.load_recipe(to_run=True), Report(run.path.resolve().name, os.fspath(run.path))
    report.read(run, read_log(run.metrics), warnings)
    figures = {**TITLES, "trajectories": "Trajectories"}.items()
    reads_images = model_directory is not None and (model_directory / "preprocessor_config.json").is_file()
    loader = "AutoModelForImageTextToText" if reads_images else "AutoModelForCausalLM"
    loader = "AutoModelForSequenceClassification" if recipe.stage == "reward" else loader
    text = report.markdown(
        [(title, f"plots/{name}.png") for name, title in figures if (run.plots / f"{name}.png").is_file()],
        model=model_directory,
        quoted=json.dumps(str(model_directory)),
        adapter=model_directory is not None and (model_directory / "adapter_config.json").is_file(),
        loader=loader,
        episodes=len(list(run.episodes.glob("*.jsonl.zst"))),
    )
    write_atomically(run.report, text)
    return run.report


def changed_keys(part: BaseConfig, default: BaseConfig | None = None, prefix: str = "") -> dict[str, Any]:
    """Dotted key -> value where `part` differs from `default` (None: the schema's defaults), in schema order.

    A section whose type differs from the default, such as another loss, contributes its `type` and the keys that differ
    from the defaults of that type. For an environment whose code is not imported, all additional keys count.
    """
    changed: dict[str, Any] = {}
    for name, about in type(part).model_fields.items():
        value, key = getattr(part, name), f"{prefix}{name}"
        usual = about.get_default(call_default_factory=True) if default is None else getattr(default, name)
        if not isinstance(value, BaseConfig):
            if value != usual:
                changed[key] = value
        elif type(value) is type(usual):
            changed |= changed_keys(value, usual, f"{key}.")
        else:
            kind = {f"{key}.type": value.type} if hasattr(value, "type") else {}
            changed |= kind | changed_keys(value, None, f"{key}.") or {key: "set, with its defaults"}
    return changed | {f"{prefix}{name}": value for name, value in (part.model_extra or {}).items()}


def run_facts(run: RunDirectory, lines: Sequence[Line]) -> list[tuple[str, str]]:
    """Recipe, machine and progress of the run as (name, value) in Markdown; `lines` are its metrics."""
    recipe, machine = run.load_recipe(to_run=True), run.load_environment()
    packages = ", ".join(f"{name} {machine['packages'].get(name)}" for name in ("posttrain", "torch", "transformers"))
    log = Log.of(lines)
    seconds = max([line.get("time/run") or 0.0 for line in log] + log.trained("time/run")[1].tolist(), default=0.0)
    dtype = f", {recipe.model.dtype}" if recipe.model.dtype else ""
    model = f"`{recipe.model.path}`{dtype}" + (", LoRA" if recipe.model.lora else "")
    if (recipe.stage == "evaluate" or recipe.stage == "generate") and recipe.remote is not None:
        model = f"`{recipe.remote.model}` at {recipe.remote.url}"
    commit = ""
    if isinstance(git := machine.get("git"), dict):
        commit = f", commit {str(git.get('commit'))[:12]}" + (" with local changes" if git.get("modified") else "")
    return [
        ("stage", recipe.stage),
        ("model", model),
        *_data(recipe, read_run_results(run.path).tasks),
        ("run seed", str(recipe.seed)),
        ("steps", _of(log.last_step, recipe)),
        ("wall time", f"{duration(seconds)} (without pauses between sessions)"),
        ("machine", f"{machine['processor']}, {machine['cpus_allowed']} processors, {machine['platform']}"),
        ("software", f"Python {machine['python']}, {packages}{commit}"),
        ("started", machine["started"]),
        *(("checked before", str(line.get("message", line))) for line in log if line["kind"] == "preflight"),
        ("command", f"`{machine['command']}`"),
        ("recipe", f"[recipe.yaml](recipe.yaml), hash {machine['recipe_hash']}"),
    ]


def _of(done: int, recipe: object) -> str:
    steps = getattr(recipe, "steps", None)
    return str(done) if steps is None else f"{done} of {steps}"


def _data(recipe: Any, tasks: Mapping[str, str]) -> list[tuple[str, str]]:
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
    ranges = {"table": ("evaluation.final_seeds", recipe.evaluation.final_seeds)}
    if recipe.stage != "evaluate":
        ranges["curve"] = ("evaluation.seeds", recipe.evaluation.seeds)
    training, key = recipe.training_seeds
    if training is not None and data is None:
        ranges["training"] = (key, training)
    trained = recipe.environment or environment
    listed = []
    for part, (key, seeds) in ranges.items():
        rows_key = (trained if part == "training" else environment).rows_key
        if rows_key is None:
            generated = seeds.of_generated(key)
            listed.append((TASKS[part].format("seeds"), f"{generated[0]} to {generated[-1]}"))
        else:
            listed.append((TASKS[part].format("rows"), tasks.get(part) or _drawn(key, seeds, rows_key)))
    played = [("environment", f"`{trained.type}`")]
    if trained != environment:
        played.append(
            ("environment of the evaluations", f"`{environment.type}`, at most {environment.max_turns} turns")
        )
    if (source := getattr(recipe, "reward", None)) is not None:
        clipped = "" if source.clip is None else f", clipped to [-{source.clip:g}, {source.clip:g}]"
        units = {
            "stored": f"normalized with the mean and standard deviation stored with it{clipped}",
            "running": f"raw; only credit normalizes them, with the running statistics of training{clipped}",
            "none": f"raw{clipped}",
        }
        played += [("reward model", f"`{source.path}`"), ("its rewards in returns", units[source.normalize])]
    return [*rows, *played, *listed]


def _drawn(key: str, seeds: SeedRange, rows_key: str) -> str:
    """Tasks that are rows, before the end of a run lists them."""
    if seeds.start is None:
        return f"drawn from the rows of {rows_key}"
    last = "the last one" if seeds.count is None else str(seeds.of_generated(key)[-1])
    return f"tasks {seeds.start} to {last} of {rows_key}, counted from 0"


def _written(value: Any) -> Any:
    """`value` with every nested section reduced to the keys that differ from the defaults."""
    if isinstance(value, BaseConfig):
        return {key: _written(member) for key, member in changed_keys(value).items()}
    if isinstance(value, list | tuple):
        return [_written(member) for member in value]
    return {True: "true", False: "false", None: "null"}[value] if value is None or isinstance(value, bool) else value


def run_warnings(lines: Sequence[Line], warnings: Sequence[str] = ()) -> list[str]:
    """Counts of failures that occurred, then `warnings` and those in `lines`, with repeated ones counted."""
    log = Log.of(lines)
    held_out = [line for line in log if line["kind"] in ("evaluation", "baseline", "final")]
    counts = {
        "skipped updates": log.total("optimizer/skipped"),
        "failed training episodes": log.total("rollout/failed"),
        "failed held-out episodes": sum(line.get("failed") or 0 for line in held_out),
        "lines with a value that is NaN or infinite": len(log.nonfinite) + sum("nonfinite" in line for line in log),
    }
    logged = [f"step {line['step']}: {line.get('message', line)}" for line in log if line["kind"] == "warning"]
    items = [f"{name}: {count:g}" for name, count in counts.items() if count]
    grouped = [(text, len(list(same))) for text, same in itertools.groupby([*warnings, *logged])]
    items += [text if count == 1 else f"{text} ({count} times)" for text, count in grouped]
    return items
