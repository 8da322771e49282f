"""`report.html`: one file that shows runs to people, without any request to anywhere and without scripts."""

import base64
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

from matplotlib.figure import Figure

from posttrain.credit.units.offsets import Decode
from posttrain.errors import InputError, PosttrainError
from posttrain.recipe.model import ModelRecipe
from posttrain.rollout.view import token_decoder, unit_credit, visible
from posttrain.runs.directory import RunDirectory
from posttrain.runs.figures import encode
from posttrain.runs.files import storage_errors, write_atomically
from posttrain.runs.plots import Compared, compare, figures
from posttrain.runs.report import changed_rows, facts, trouble
from posttrain.runs.scores import score_table
from posttrain.runs.sources import Source, open_sources
from posttrain.runs.tables import Table
from posttrain.view.episodes import EpisodePage, episode_page, largest_advantage, samples_of

Rows = list[tuple[str, ...]]


@dataclass(frozen=True)
class Image:
    """A figure inside the page."""

    title: str
    uri: str


@dataclass
class Section:
    """One run."""

    name: str
    path: str
    facts: Rows = field(default_factory=list)
    tables: list[Table] = field(default_factory=list)
    scores: Table | None = None
    images: list[Image] = field(default_factory=list)
    samples: list[tuple[str, list[EpisodePage]]] = field(default_factory=list)
    coloured: bool = False
    """Whether any answer is coloured by its credit."""
    changed: Rows = field(default_factory=list)
    recipe: str = ""
    environment: Rows = field(default_factory=list)
    packages: Rows = field(default_factory=list)
    trouble: list[str] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    """What is missing from the section, and why."""


def section_of(source: Source) -> Section:
    """All that is told of one run. What cannot be read is left out and noted."""
    run = source.run
    assert run is not None
    section = Section(source.name, str(source.path))
    if not source.lines:
        section.notes.append("The run has no metrics yet.")
    elif source.unfinished:
        section.notes.append(f"The run has done {source.unfinished}: what follows is how far it has come.")
    try:
        section.facts = list(facts(run, source.lines))
        section.changed = list(changed_rows(run))
    except PosttrainError as error:
        section.notes.append(str(error))
    section.tables = _tables(run, section)
    section.scores = score_table(source.lines)
    section.images = [image(name, figure) for name, figure in figures(source.name, source.lines)]
    section.samples, notes = _samples(run)
    pages = [page for _, pages in section.samples for page in pages]
    section.coloured = any(message.pieces or message.units for page in pages for message in page.messages)
    section.notes += notes
    try:
        section.recipe = run.recipe_file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        section.notes.append(f"{run.recipe_file} cannot be read ({error})")
    section.environment, section.packages = _environment(run, section)
    section.trouble = trouble(source.lines)
    return section


def image(title: str, figure: Figure) -> Image:
    """The figure as SVG inside an address."""
    content = base64.b64encode(encode(figure, "svg")).decode()
    return Image(title, f"data:image/svg+xml;base64,{content}")


def runs_table(sources: Sequence[Source]) -> Table:
    """A row for each run."""
    rows = []
    for source in sources:
        recipe = source.recipe or {}
        model = (recipe.get("model") or {}).get("path", "–")
        environment = (recipe.get("environment") or {}).get("type", "–")
        steps = source.unfinished or (str(source.steps) if source.steps else "–")
        rows.append((source.name, *map(str, (source.stage, model, environment, source.seed)), steps))
    headings = ("run", "stage", "model", "environment", "seed", "steps")
    return Table("Runs", headings, rows, "", words=("run", "stage", "model", "environment"))


def differing_keys(sources: Sequence[Source]) -> Table | None:
    """Recipe keys in which runs differ, those of runs of another stage left out; None where there are none."""
    flat = [dict(_flat(source.recipe or {})) for source in sources]
    everywhere = set.intersection(*(set(keys) for keys in flat)) if flat else set()
    stages = {source.stage for source in sources}
    keys = [
        key
        for key in dict.fromkeys(key for one in flat for key in one)
        if (len(stages) == 1 or key in everywhere) and len({one.get(key, "–") for one in flat}) > 1
    ]
    keys = [key for key in keys if key not in ("name", "runs", "stage")]
    if not keys:
        return None
    rows = [(key, *(one.get(key, "–") for one in flat)) for key in keys]
    names = tuple(source.name for source in sources)
    note = "" if len(stages) == 1 else "Only keys that the recipes of all these stages have."
    return Table("Recipe keys that differ", ("key", *names), rows, note, words=("key", *names))


def _flat(values: Mapping[str, Any], prefix: str = "") -> list[tuple[str, str]]:
    found = []
    for key, value in values.items():
        if isinstance(value, dict):
            found += _flat(value, f"{prefix}{key}.")
        else:
            found.append((f"{prefix}{key}", json.dumps(value, ensure_ascii=False, default=str)))
    return found


def _tables(run: RunDirectory, section: Section) -> list[Table]:
    from posttrain.training.results import read_tables

    file = run.path / "results.json"
    if not file.is_file():
        return []
    try:
        return read_tables(run.path)
    except (OSError, ValueError, KeyError, TypeError) as error:
        section.notes.append(f"{file} cannot be read ({error}), so the final tables are missing")
        return []


def _samples(run: RunDirectory) -> tuple[list[tuple[str, list[EpisodePage]]], list[str]]:
    found, notes = samples_of(run)
    credit_known = any(one.advantages is not None or one.units is not None for some in found for one in some.samples)
    decode = _decoder(run) if credit_known else None
    if credit_known and decode is None:
        notes.append("The tokenizer of the run cannot be loaded, so the credit of single tokens is not shown.")
    credited = unit_credit(run)
    scales = [largest_advantage(some.samples) for some in found]
    return [
        (some.title, [episode_page(one, scale, decode, credited) for one in some.samples])
        for some, scale in zip(found, scales, strict=True)
    ], notes


def _decoder(run: RunDirectory) -> Decode | None:
    """With the tokenizer that the run saved itself, as the model it began with may be gone; else with that one's."""
    from posttrain.models.load import load_tokenizer

    saved = [run.path / "model", *sorted(run.checkpoints.glob("step_*/policy"))[::-1]]
    for directory in saved:
        if (directory / "tokenizer.json").is_file():
            try:
                tokenizer = load_tokenizer(ModelRecipe(path=str(directory)))
            except Exception:  # of whatever kind: one that is damaged is as good as none
                continue
            return partial(tokenizer.decode, clean_up_tokenization_spaces=False)
    return token_decoder(run)


def _environment(run: RunDirectory, section: Section) -> tuple[Rows, Rows]:
    try:
        values = run.load_environment()
    except PosttrainError as error:
        section.notes.append(str(error))
        return [], []
    packages = [(name, version or "not installed") for name, version in values.pop("packages", {}).items()]
    rows = [(str(key), value if isinstance(value, str) else json.dumps(value)) for key, value in values.items()]
    return list(rows), list(packages)


_LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")
_CODE = re.compile(r"`([^`]*)`")


def write_html(paths: Sequence[Path], out: Path | None = None) -> tuple[Path, list[str]]:
    """Write the report of the runs at `paths`; returns its path, and what was left out.

    Without `out` it is `report.html` in the directory of the one run, or in the working folder. `InputError` for what
    is not a run, `RunError` for damaged metrics and a disk that refuses.
    """
    sources = open_sources(paths)
    logs = [str(source.path) for source in sources if source.run is None]
    if logs:
        raise InputError(
            f"{logs[0]} is a log of TensorBoard, of which there is nothing but curves; use `posttrain plot`"
        )
    file = out or (sources[0].path / "report.html" if len(sources) == 1 else Path("report.html"))
    if file.is_dir():
        raise InputError(f"--out {file} is a directory; give the name of a file, for example {file / 'report.html'}")
    compared = _compared(sources)
    sections = [section_of(source) for source in sources]
    text = _template().render(
        title=" · ".join(source.name for source in sources[:4]) + (" …" if len(sources) > 4 else ""),
        compared=compared,
        images=[image(name, figure) for name, figure in compared.figures],
        runs=runs_table(sources) if len(sources) > 1 else None,
        differing=differing_keys(sources) if len(sources) > 1 else None,
        sections=sections,
    )
    with storage_errors(file):
        file.parent.mkdir(parents=True, exist_ok=True)
    write_atomically(file, text.lstrip().encode("utf-8", "backslashreplace"))
    return file, [*compared.notes, *(f"{one.name}: {note}" for one in sections for note in one.notes)]


def _compared(sources: Sequence[Source]) -> Compared:
    """Several runs side by side; nothing for one, or for runs that have measured nothing."""
    if len(sources) < 2 or not any(source.lines for source in sources):
        return Compared()
    return compare(sources)


def _template() -> Any:
    """Whatever is put into the page is text: escaped, and its control characters written out. `_marked` alone makes
    markup."""
    from jinja2 import Environment, PackageLoader, StrictUndefined

    environment = Environment(
        loader=PackageLoader("posttrain.view", ""),
        autoescape=True,
        finalize=_visible,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )
    environment.filters["marked"] = _marked
    return environment.get_template("report.html.j2")


def _visible(value: Any) -> Any:
    return visible(value) if type(value) is str else value


def _marked(text: str) -> Any:
    """Text of the Markdown report as HTML: words in backticks are code, of links the words are left."""
    from markupsafe import Markup, escape

    return Markup(_CODE.sub(r"<code>\1</code>", str(escape(visible(_LINK.sub(r"\1", text))))))
