"""`report.html`: one file that shows runs to people, without any request to anywhere and without scripts."""

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from posttrain.errors import InputError
from posttrain.reports.sections import differing_keys, image, runs_table, section_of
from posttrain.rollout.view_tokens import visible
from posttrain.runs.files import storage_errors, write_atomically
from posttrain.runs.plot_files import Compared, compare
from posttrain.runs.sources import Source, open_sources

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
        loader=PackageLoader("posttrain.reports", ""),
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
