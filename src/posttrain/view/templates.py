"""The templates of the report and of the live page. All values are escaped and their control characters made visible."""

import math
import re
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from posttrain.terminal import printable

_LINK = re.compile(r"\[([^\]]*)\]\([^)]*\)")
_CODE = re.compile(r"`([^`]*)`")
_STRONGEST = 0.5
"""Opacity of the color of the largest credit, low enough that text stays readable in light and dark mode."""


def css(strength: float) -> str:
    """CSS background: blue for positive strengths, orange for negative ones, which color-blind readers can tell apart."""
    hue = "86,180,233" if strength > 0 else "230,140,0"
    return f"background:rgba({hue},{_STRONGEST * abs(strength):.3f})"


@cache
def templates() -> Any:
    """The jinja environment of all pages; only `marked` makes markup from text."""
    from jinja2 import Environment, PackageLoader, StrictUndefined
    from markupsafe import Markup, escape

    def escaped(value: Any) -> Any:
        return printable(str(value)) if isinstance(value, str | Path) and not hasattr(value, "__html__") else value

    environment = Environment(
        loader=PackageLoader("posttrain.view", "pages"),
        autoescape=True,
        finalize=escaped,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )

    def short_number(value: float | None, percent: bool = False) -> str:
        """A number for a table: `45.3%` for rates, else four significant digits; a dash for None."""
        if value is None:
            return "–"
        return f"{100 * value:.1f}%" if percent else f"{value:.4g}"

    def marked(text: str) -> Any:
        """Markdown text as HTML: words in backticks become code, links become their text."""
        return Markup(_CODE.sub(r"<code>\1</code>", str(escape(printable(_LINK.sub(r"\1", text))))))

    def score(value: float | None) -> str:
        """A score with four decimals at most, without the noise of rounding around 0."""
        return short_number(None if value is None else round(value, 4) + 0.0)

    environment.filters |= {"marked": marked, "short": short_number, "score": score, "css": css}
    style = (files("posttrain.view") / "static" / "components.css").read_text(encoding="utf-8")
    environment.globals |= {"style": Markup(style), "inf": math.inf}
    return environment
