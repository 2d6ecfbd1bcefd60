"""One number for the artefact in usage maps, beside what shuffled experts would give."""

from __future__ import annotations

from airmoe.experiments.report.document import Block, Cell, Table
from airmoe.experiments.report.groups import Group
from airmoe.experiments.report.metrics import Summary, summary, unit_of, written
from airmoe.experiments.report.names import title_of
from airmoe.experiments.report.record import Run
from airmoe.experiments.report.usage import ExpertMap

CAPTION = "How much of the variance of log usage rows and columns of the map explain."
NOTE = (
    "A product of sub-keys gives 100 %, a router without structure what shuffled experts give: "
    "(rows + columns - 2) / (rows x columns - 1)."
)


def structure_table(group: Group) -> list[Block]:
    """A row per variant with a map."""
    rows = []
    for variant, runs in group.variants.items():
        maps = _maps(runs)
        if maps and runs[0].method != "coarse":
            rows.append(_row(variant, maps, grey=runs[0].method == "exact"))
    if not rows:
        return []
    columns = ["method", "rows x columns", "explained (%)", "shuffled (%)"]
    return [Table(caption=CAPTION, columns=columns, rows=rows, notes=[NOTE])]


def _row(variant: str, maps: list[ExpertMap], *, grey: bool) -> list[Cell]:
    explained = summary([one.structure for one in maps if one.structure is not None])
    chance = summary([one.structure_by_chance for one in maps[:1] if one.structure_by_chance])
    height, width = maps[0].shape
    return [
        Cell(text=title_of(variant), grey=grey),
        Cell(text=f"{height} x {width}", value=height * width, grey=grey),
        _share(explained, grey=grey),
        _share(chance, grey=grey),
    ]


def _share(found: Summary | None, *, grey: bool) -> Cell:
    text = written(found, "share", unit_of("share", []))
    return Cell(text=text, value=None if found is None else found.mean, grey=grey)


def _maps(runs: list[Run]) -> list[ExpertMap]:
    return [run.usage.experts for run in runs if run.usage is not None]
