"""`report.html`: one self-contained file about runs, without scripts or external resources."""

import base64
import json
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import NamedTuple

from matplotlib.figure import Figure
from matplotlib.transforms import ScaledTranslation

from posttrain.errors import InputError, PosttrainError
from posttrain.figures.draw import encode, entitle
from posttrain.figures.plots import Compared, compare, figures
from posttrain.figures.trajectories import draw, maker_of, row_of
from posttrain.rollout.store import StoredStep, read_episodes, stored_steps
from posttrain.runs.directory import RunDirectory, write_atomically
from posttrain.runs.panels import Sampling
from posttrain.runs.report import Report, Rows
from posttrain.runs.sources import Source, differing_keys, readable_sources
from posttrain.runs.tables import Table
from posttrain.view.episodes import (
    EpisodePage,
    Sample,
    episode_page,
    scale_of,
    shortened,
    token_decoder,
    unit_credit_recipe,
)
from posttrain.view.run_pages import paired
from posttrain.view.templates import templates

_KINDS = {"train": "training episodes", "evaluation": "held-out episodes", "final": "final held-out episodes"}
_NAMES = {0: (), 1: ("the only one",), 2: ("best", "worst"), 3: ("best", "median", "worst")}


class Image(NamedTuple):
    """A figure as a data URI."""

    title: str
    uri: str


@dataclass
class Section(Report):
    """The part of the page about one run."""

    images: list[Image] = field(default_factory=list)
    samples: list[tuple[str, list[EpisodePage]]] = field(default_factory=list)
    colored: bool = False
    """Whether any answer is colored by its credit."""
    environment: Rows = field(default_factory=list)
    packages: Rows = field(default_factory=list)


def section_of(source: Source) -> Section:
    """The section about one run. What cannot be read is listed in `missing`."""
    run = source.run
    assert run is not None
    section = Section(source.name, str(source.path))
    if failure := run.failure_text():
        section.missing.append(f"The run failed: {failure}")
    if not source.lines:
        section.missing.append("The run has no metrics yet.")
    section.read(run, source.lines)
    section.facts = [(key, shortened(value)) for key, value in section.facts]
    section.warnings = [shortened(warning) for warning in section.warnings]
    drawn = figures(source.name, source.lines, Sampling.of(source.recipe))
    section.images = [image(name, _narrow(figure)) for name, figure in drawn]
    section.samples = _samples(run, section.missing)
    pages = [page for _, pages in section.samples for page in pages]
    section.colored = any(message.pieces or message.units for page in pages for message in page.messages)
    try:
        values = run.load_environment()
        packages = values.pop("packages")
        rows = [(key, value if isinstance(value, str) else json.dumps(value)) for key, value in values.items()]
        section.environment = [(key, shortened(value)) for key, value in rows]
        section.packages = [(name, version or "not installed") for name, version in packages.items()]
    except PosttrainError as error:
        section.missing.append(str(error))
    section.missing = list(dict.fromkeys(section.missing))  # several parts may need the same damaged file
    return section


_DARK = {
    "#ffffff": "#16181b",
    "#000000": "#e8e8e8",
    "#222222": "#e8e8e8",
    "#e4e4e4": "#3c3f44",
    "#c4c4c4": "#6e6e6e",
    "#0072b2": "#4ba3db",
    "#6e6e6e": "#a8adb4",
    "#009e73": "#2cc295",
    "#d55e00": "#ff8a3d",
    "#1f3a5f": "#7cc4ff",
}
"""Colors of figures in light and in dark mode: ground, ink, grid, and those of curves that are dim on a dark ground."""


def image(title: str, figure: Figure) -> Image:
    """The figure as an SVG data URI, with colors for dark mode."""
    rules = (
        f'[style*="{what}: {light}"]{{{what}:{dark}!important}}'
        for light, dark in _DARK.items()
        for what in ("fill", "stroke")
    )
    style = f"@media (prefers-color-scheme: dark){{svg{{fill:#e8e8e8}}{''.join(rules)}}}</style>"
    content = base64.b64encode(encode(figure, "svg").replace(b"</style>", style.encode(), 1)).decode()
    return Image(title, f"data:image/svg+xml;base64,{content}")


def _narrow(figure: Figure) -> Figure:
    """Make the figure narrower, with the legends that are beside its axes below them, so that its text can be read on a page
    of 400 pixels. A figure with a legend beside all of its axes stays as it is."""
    if figure.legends:
        return figure
    figure.set_figwidth(6)
    entitle(figure, " ".join(figure.get_suptitle().split()), 52)
    for axes in figure.axes:
        legend = axes.get_legend()
        if legend is None or legend.get_bbox_to_anchor().width:  # inside of the axes
            continue
        legend.set_loc("upper left")
        axis = 0.5 if axes is figure.axes[-1] else 0.1  # height of its numbers and title, in inches
        below = ScaledTranslation(0, -axis, figure.dpi_scale_trans)
        legend.set_bbox_to_anchor((0, 0), axes.transAxes + below)
        figure.set_figheight(figure.get_figheight() + 0.2 * len(legend.get_texts()))
    return figure


def runs_table(sources: Sequence[Source]) -> Table:
    """A table with one row per run."""
    rows = []
    for source in sources:
        sections = [(source.recipe or {}).get(name) for name in ("model", "environment")]
        model, environment = (
            section.get(key, "–") if isinstance(section, dict) else "–"  # a foreign recipe may hold anything
            for section, key in zip(sections, ("path", "type"), strict=True)
        )
        steps = source.unfinished or (str(source.steps) if source.steps else "–")
        rows.append((source.name, *map(str, (source.stage, model, environment, source.seed)), steps))
    headings = ("run", "stage", "model", "environment", "seed", "steps")
    return Table("Runs", headings, rows, "", words=("run", "stage", "model", "environment"))


def _chosen(step: StoredStep, count: int) -> list[Sample]:
    """The best, the median (if `count` is 3) and the worst episode of a step by return, with their credit.

    Episodes without a return are considered only if there are no others. The result is shorter if there are fewer episodes.
    """
    stored = read_episodes(step.path)
    known = [i for i, one in enumerate(stored.episodes) if one.has_return] or list(range(len(stored.episodes)))
    order = sorted(known, key=lambda i: -stored.episodes[i].total_reward)
    places = dict.fromkeys([order[0], *([order[len(order) // 2]] if count == 3 else []), order[-1]] if order else [])
    advantages = None if stored.advantages is None else stored.advantages.values
    return [
        Sample(why, stored.episodes[i], None if advantages is None else advantages[i], stored.units[i])
        for why, i in zip(_NAMES[len(places)], places, strict=True)
    ]


def _samples(run: RunDirectory, missing: list[str]) -> list[tuple[str, list[EpisodePage]]]:
    """Pages of three held-out episodes of the last evaluation and of two of the last training step, with pictures where the
    environment has a grid. What cannot be read is added to `missing`."""
    selected: list[tuple[str, list[Sample]]] = []
    try:
        steps = list(stored_steps(run.episodes))
    except PosttrainError as error:
        missing.append(str(error))
        steps = []
    last = {step.split: step for step in steps}
    for step, count in ((last.get("evaluation") or last.get("final"), 3), (last.get("train"), 2)):
        if step is None:
            continue
        mean = "" if step.mean_return is None else f", mean return {step.mean_return:.3f}"
        failed = f", {step.failed} failed" if step.failed else ""
        try:
            title = f"Step {step.step}: {step.episodes} {_KINDS[step.split]}{mean}{failed}"
            selected += [(title, samples)] if (samples := _chosen(step, count)) else []
        except PosttrainError as error:
            missing.append(str(error))
    credit_known = any(one.advantages is not None or one.units is not None for _, group in selected for one in group)
    decode = token_decoder(run) if credit_known else None
    if credit_known and decode is None:
        missing.append("The tokenizer of the run cannot be loaded, so the credit of tokens is not shown.")
    credited = unit_credit_recipe(run)
    make = None
    with suppress(PosttrainError):
        make = maker_of(getattr(run.load_recipe(), "environment", None))

    def page_of(sample: Sample, scale: float) -> EpisodePage:
        page = episode_page(sample, scale, decode, credited, run.path)
        row = row_of(sample.episode, make, sample.why) if make is not None and not sample.episode.failure else None
        return page if row is None else replace(page, picture=image("trajectory", draw([row])).uri)

    return [(title, [page_of(one, scale_of(group, "advantage")) for one in group]) for title, group in selected]


def write_html(paths: Sequence[Path], out: Path | None = None) -> tuple[Path, list[str]]:
    """Write the report of the runs at `paths`; returns its path, and warnings about what it leaves out.

    `out` defaults to `report.html` in the directory of a single run, or in the working directory for several. Raises
    `InputError` if no path is a run, `RunError` if no metrics can be read, or if the file cannot be written.
    """
    sources, left_out = readable_sources(paths)
    logs = [str(source.path) for source in sources if source.run is None]
    if logs:
        raise InputError(f"{logs[0]} is a TensorBoard log, which has only curves; use `posttrain plot`")
    file = out or (sources[0].path / "report.html" if len(paths) == 1 else Path("report.html"))
    if file.is_dir():
        raise InputError(f"--out {file} is a directory; give the name of a file, for example {file / 'report.html'}")
    compared, sentence = Compared(), ""
    if len(sources) > 1 and any(source.lines for source in sources):
        compared = compare(sources)
        try:
            found = paired(sources)
            sentence = found.get("sentence", "")
            if "table" in found:
                compared.tables.insert(0, replace(found["table"], title="Paired differences"))
                compared.warnings += found["notes"]
        except PosttrainError as error:
            compared.warnings.append(f"no paired differences: {error}")
    sections = [section_of(source) for source in sources]
    page = templates().get_template("report.html.j2")
    text = page.render(
        title=" · ".join(source.name for source in sources[:4]) + (" …" if len(sources) > 4 else ""),
        compared=compared,
        sentence=sentence,
        images=[image(name, figure) for name, figure in compared.figures],
        runs=runs_table(sources),
        differing=differing_keys(sources),
        sections=sections,
    )
    write_atomically(file, text.lstrip().encode("utf-8", "backslashreplace"))
    missing = [f"{one.title}: {text}" for one in sections for text in one.missing]
    return file, [*left_out, *compared.warnings, *missing]
