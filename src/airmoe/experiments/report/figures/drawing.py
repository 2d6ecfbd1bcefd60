"""A figure as SVG and PDF: text stays text, and the same data gives the same bytes."""

from __future__ import annotations

import importlib.util
import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cached_property
from html import escape
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

WIDTH, HEIGHT = 5.2, 3.7  # inches: on a phone the text keeps the size of the page's
FONTS = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
MEASURED = "DejaVu Sans"  # comes with matplotlib; as wide as any, so nothing overlaps
STYLE: dict[str, Any] = {
    "svg.fonttype": "none",
    "font.family": MEASURED,
    "font.size": 10,
    "axes.spines.top": False,
    "axes.spines.right": False,
    "axes.grid": True,
    "grid.color": "#e3e5e8",
    "axes.axisbelow": True,
    "legend.frameon": False,
    "legend.fontsize": 9,
    "lines.markersize": 5,
    "lines.linewidth": 1.6,
    "axes.formatter.useoffset": False,
}
HEADER = re.compile(r"^.*?(?=<svg)", re.DOTALL)
METADATA = re.compile(r"\s*<metadata>.*?</metadata>", re.DOTALL)


@dataclass(frozen=True)
class Drawing:
    """A figure and its two files, each made when it is asked for: most of the time goes there."""

    name: str  # of its files, without ending
    caption: str
    alt: str  # for those who cannot see it
    figure: Figure
    wide: bool = False  # of several panels: wants the room of two

    @cached_property
    def svg(self) -> str:
        """Ids get the figure's name, since a page holds many figures."""
        text = io.StringIO()
        with matplotlib_style(self.name):
            self.figure.savefig(text, format="svg", metadata={"Date": None})
        svg = METADATA.sub("", text.getvalue(), count=1)
        svg = svg.replace(f"'{MEASURED}'", FONTS)
        for before in (' id="', "url(#", 'href="#'):
            svg = svg.replace(before, f"{before}{self.name}-")
        return svg

    @cached_property
    def pdf(self) -> bytes:
        _ = self.svg  # decides the layout, which stays
        content = io.BytesIO()
        with matplotlib_style(self.name):
            self.figure.set_layout_engine("none")
            self.figure.savefig(content, format="pdf", metadata={"CreationDate": None})
        return content.getvalue()

    @property
    def inline(self) -> str:
        """The SVG as an element of a page: scales with it, and is named for screen readers."""
        element = HEADER.sub("", self.svg, count=1)
        opening, rest = element.split(">", 1)
        opening = re.sub(r'\s(width|height|version)="[^"]*"', "", opening)
        label = f' role="img" aria-label="{escape(self.alt)}"'
        return f"{opening}{label}>{rest}".strip()


def can_draw() -> bool:
    """Whether matplotlib is installed."""
    return importlib.util.find_spec("matplotlib") is not None


@contextmanager
def matplotlib_style(name: str) -> Iterator[None]:
    """matplotlib set up for these figures alone."""
    import matplotlib

    options: Any = STYLE | {"svg.hashsalt": name}
    with matplotlib.rc_context(options):
        yield


def legend(axes: Axes, entries: int, columns: int | None = None) -> None:
    """Below the axes, so that it covers no line; long entries want fewer `columns`."""
    columns = columns or (3 if entries > 4 else 2)
    axes.figure.legend(loc="outside lower center", ncols=min(columns, entries), handlelength=3.5)
