"""Figures as PNG and SVG files."""

import io
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal, get_args

import matplotlib
from matplotlib.figure import Figure
from matplotlib.text import Text

from posttrain.runs.drawing import STYLE
from posttrain.runs.files import storage_errors, write_atomically

Format = Literal["png", "svg"]
FORMATS: tuple[Format, ...] = get_args(Format)
_SVG: dict[Any, Any] = {
    "svg.fonttype": "none",  # text stays text, which can be searched and edited
    "svg.hashsalt": "posttrain",  # and the same figure is the same file
}


def entitle(figure: Figure, title: str) -> None:
    """The title above all panels."""
    figure.suptitle(title, x=0.012, ha="left", fontweight="bold", fontsize=12)


def plain(text: str, longest: int = 120) -> str:
    """What can be drawn of a name that somebody gave: no control characters, and not too long for a figure."""
    shown = "".join(c if c.isprintable() or c == "\n" else "\ufffd" for c in text)
    return shown if len(shown) <= longest else f"{shown[: longest - 1]}…"


def encode(figure: Figure, form: Format) -> bytes:
    """The content of a file. Dollar signs in names are no mathematics."""
    content = io.BytesIO()
    numbers = {
        id(label)
        for axes in figure.axes
        for label in (*axes.get_xticklabels(which="both"), *axes.get_yticklabels(which="both"))
    }
    for text in figure.findobj(Text):
        if isinstance(text, Text) and id(text) not in numbers:
            text.set_parse_math(False)
            text.set_text(plain(text.get_text()))
    with matplotlib.rc_context(STYLE | _SVG):
        figure.savefig(content, format=form, metadata={"Date": None} if form == "svg" else None)
    return content.getvalue()


def save(figure: Figure, directory: Path, name: str, forms: Sequence[Format]) -> list[Path]:
    """Write the figure to `directory`, once in each form; `RunError` when the disk refuses."""
    with storage_errors(directory):
        directory.mkdir(parents=True, exist_ok=True)
    paths = []
    for form in forms:
        path = directory / f"{name}.{form}"
        write_atomically(path, encode(figure, form))
        paths.append(path)
    return paths
