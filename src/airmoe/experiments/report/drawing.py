"""A figure as SVG and PDF: text stays text, and the same data gives the same bytes.

Lines differ in more than their colour.
"""

from __future__ import annotations

import io
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from itertools import count
from typing import Any

from matplotlib import rc_context
from matplotlib.axes import Axes
from matplotlib.axis import Axis
from matplotlib.figure import Figure
from matplotlib.ticker import FuncFormatter, NullFormatter

from airmoe.experiments.report.groups import ORDER, title_of

WIDTH, HEIGHT = 5.2, 3.7  # inches: on a phone the text keeps the size of the page's
FONTS = "system-ui, -apple-system, 'Segoe UI', Roboto, 'Helvetica Neue', Arial, sans-serif"
MEASURED = "DejaVu Sans"  # comes with matplotlib; as wide as any, so nothing overlaps
STYLE: Any = {
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
# Okabe and Ito's colours that are visible on white, then some of Tol's.
COLOURS = ("#0072B2", "#D55E00", "#009E73", "#000000", "#CC79A7", "#E69F00", "#56B4E9")
COLOURS += ("#882255", "#999933", "#332288")
DASHES: tuple[Any, ...] = ("-", (0, (5, 2)), (0, (1, 1.5)), (0, (6, 2, 1, 2)), (0, (8, 3)))
UNSAID = ("Date", "Creator", "Format", "Type")  # metadata that would differ, or say nothing
MARKERS = ("o", "s", "^", "D", "v", "P", "X", "<", ">", "p", "*", "h", "d", "8")
EXACT = {"color": "#767676", "linestyle": (0, (4, 1.5)), "marker": "x"}  # the paper greys it out


def styles_of(variants: Sequence[str]) -> dict[str, dict[str, Any]]:
    """Line styles: a known variant always has the same one, others take the remaining ones."""
    known = {one: ORDER.index(one) for one in variants if one in ORDER}
    free = (slot for slot in count() if slot not in known.values())
    cycles = {"color": COLOURS, "linestyle": DASHES, "marker": MARKERS}
    styles = {}
    for one in variants:
        slot = known[one] if one in known else next(free)
        styles[one] = {name: cycle[slot % len(cycle)] for name, cycle in cycles.items()}
    return styles | ({"exact": EXACT} if "exact" in styles else {})


def label_of(variant: str) -> str:
    """The title, with dollars escaped: they would begin a formula."""
    return title_of(variant).replace("$", r"\$")


@dataclass(frozen=True)
class Drawing:
    """A figure; its two files are made when asked for, because that takes most of the time."""

    name: str  # of its files, without ending
    caption: str
    alt: str  # for those who cannot see it
    figure: Figure
    wide: bool = False  # has several panels, and takes the room of two

    @cached_property
    def svg(self) -> str:
        """Ids get the figure's name, since a page holds many figures."""
        content = self._saved("svg", dict.fromkeys(UNSAID))
        svg = content.decode().replace(f"'{MEASURED}'", FONTS)
        return re.sub(r'( id="|url\(#|href="#)', rf"\g<1>{self.name}-", svg)

    @property
    def pdf(self) -> bytes:
        return self._saved("pdf", {"CreationDate": None})

    def _saved(self, kind: str, metadata: dict[str, None]) -> bytes:
        content, options = io.BytesIO(), STYLE | {"svg.hashsalt": self.name}
        with rc_context(options):
            self.figure.savefig(content, format=kind, metadata=metadata)
        return content.getvalue()


def new_plot() -> tuple[Figure, Axes]:
    """An empty plot of the usual size."""
    figure = Figure(figsize=(WIDTH, HEIGHT), layout="constrained")
    return figure, figure.add_subplot()


def plain_numbers(axis: Axis) -> None:
    """Write 1000 instead of a power of ten, and no numbers at minor ticks."""
    axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
    axis.set_minor_formatter(NullFormatter())


def legend(axes: Axes, entries: int) -> None:
    """Below the axes, so that it covers no line."""
    columns = 3 if entries > 4 else 2
    axes.figure.legend(loc="outside lower center", ncols=min(columns, entries), handlelength=3.5)
