"""A figure as SVG and PDF: text stays text, and the same data gives the same bytes."""

from __future__ import annotations

import io
import re
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from html import escape
from typing import TYPE_CHECKING, Any

from airmoe.errors import ConfigError
from airmoe.experiments.report.document import Picture

if TYPE_CHECKING:
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
    """A picture with its two files."""

    picture: Picture
    svg: str
    pdf: bytes

    @property
    def inline(self) -> str:
        """The SVG as an element of a page: scales with it, and is named for screen readers."""
        element = HEADER.sub("", self.svg, count=1)
        opening, rest = element.split(">", 1)
        opening = re.sub(r'\s(width|height|version)="[^"]*"', "", opening)
        label = f' role="img" aria-label="{escape(self.picture.alt)}"'
        return f"{opening}{label}>{rest}".strip()


@contextmanager
def matplotlib_style(name: str) -> Iterator[None]:
    """matplotlib set up for these figures alone."""
    try:
        import matplotlib
    except ModuleNotFoundError:
        raise ConfigError(
            "report", name, "needs matplotlib for its figures", "Run: pip install 'airmoe[plot]'"
        ) from None
    options: Any = STYLE | {"svg.hashsalt": name}
    with matplotlib.rc_context(options):
        yield


def drawn(figure: Figure, picture: Picture) -> Drawing:
    """Save a finished figure; ids get the picture's name, since a page holds many figures."""
    text, pdf = io.StringIO(), io.BytesIO()
    figure.savefig(text, format="svg", metadata={"Date": None})
    figure.set_layout_engine("none")  # what it decided stays
    figure.savefig(pdf, format="pdf", metadata={"CreationDate": None})
    svg = METADATA.sub("", text.getvalue(), count=1)
    svg = svg.replace(f"'{MEASURED}'", FONTS)
    for before in (' id="', "url(#", 'href="#'):
        svg = svg.replace(before, f"{before}{picture.name}-")
    return Drawing(picture, svg, pdf.getvalue())
