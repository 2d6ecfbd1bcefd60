"""What a report says, as plain data: a section per group, then what was left out and why.

The templates decide the order and the words around it.
"""

from __future__ import annotations

from dataclasses import dataclass

from airmoe.experiments.report.curves import (
    HEALTH,
    PERPLEXITY,
    QUALITY,
    curve_figures,
    reduction_figure,
)
from airmoe.experiments.report.drawing import Drawing, can_draw
from airmoe.experiments.report.granularity import fit_in_words, granularity_figure
from airmoe.experiments.report.groups import Group, granularity_of, group_runs
from airmoe.experiments.report.paper import Beside, beside_paper, claims_table
from airmoe.experiments.report.record import Record
from airmoe.experiments.report.tables import Table, group_table, settings_table
from airmoe.experiments.report.usage import usage_figure

NO_FIGURES = (
    "Figures: left out, because matplotlib is not installed. Run: pip install 'airmoe[plot]'"
)


@dataclass(frozen=True, kw_only=True)
class Section:
    """Everything about the runs of one table; parts that a group lacks are None or empty."""

    group: Group
    claims: Table | None
    table: Table
    fit: str | None  # of the granularity suite
    paper: Beside | None
    figures: dict[str, list[Drawing]]  # title -> those that belong together
    settings: Table


@dataclass(frozen=True, kw_only=True)
class Report:
    """Ready to be written in any format."""

    sections: list[Section]
    left_out: list[str]
    notes: list[str]

    @property
    def drawings(self) -> list[Drawing]:
        parts = (part for section in self.sections for part in section.figures.values())
        return [drawing for part in parts for drawing in part]

    @property
    def problems(self) -> list[str]:
        """Everything a reader must know, a line each."""
        return [*self.left_out, *self.notes]


def make_report(record: Record) -> Report:
    """Compare the runs of a record and draw them."""
    grouped, draws = group_runs(record.runs), can_draw()
    return Report(
        sections=[_section(group, draws=draws) for group in grouped.groups],
        left_out=[*record.problems, *grouped.left_out, *([] if draws else [NO_FIGURES])],
        notes=grouped.notes,
    )


def _section(group: Group, *, draws: bool) -> Section:
    is_sweep = all(granularity_of(variant) is not None for variant in group.variants)
    return Section(
        group=group,
        claims=claims_table(group),
        table=group_table(group),
        fit=fit_in_words(group) if is_sweep else None,
        paper=beside_paper(group),
        figures=_figures(group, is_sweep=is_sweep) if draws else {},
        settings=settings_table(group),
    )


def _figures(group: Group, *, is_sweep: bool) -> dict[str, list[Drawing]]:
    perplexity = curve_figures(group, PERPLEXITY)
    if is_sweep:
        return {"Granularity": [granularity_figure(group), *perplexity]}
    parts = {
        "Perplexity through training": [*perplexity, *reduction_figure(group)],
        "Expert usage": usage_figure(group),
        "Against exact routing": curve_figures(group, QUALITY),
        "Router health": curve_figures(group, HEALTH),
    }
    return {title: drawings for title, drawings in parts.items() if drawings}
