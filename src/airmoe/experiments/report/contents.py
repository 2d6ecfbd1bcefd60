"""What a report says, in order: a section per group, then what was left out and why."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

from airmoe.errors import ConfigError
from airmoe.experiments.report.beside_paper import beside_paper
from airmoe.experiments.report.document import (
    Block,
    Bullets,
    Document,
    Heading,
    Paragraph,
    Pictures,
)
from airmoe.experiments.report.fair import fair_groups
from airmoe.experiments.report.figures import Drawing, can_draw
from airmoe.experiments.report.figures.curves import (
    perplexity_figures,
    quality_figures,
    reduction_figure,
)
from airmoe.experiments.report.figures.health import health_figures
from airmoe.experiments.report.figures.sweeps import codebook_figure, granularity_figure, losses
from airmoe.experiments.report.figures.usage_maps import codeword_figure, usage_figure
from airmoe.experiments.report.groups import Group, group_runs
from airmoe.experiments.report.names import codebook_of, granularity_of
from airmoe.experiments.report.record import Record
from airmoe.experiments.report.settings import settings
from airmoe.experiments.report.structure import structure_table
from airmoe.experiments.report.tables import (
    ablation_table,
    codebook_table,
    granularity_table,
    main_table,
)
from airmoe.experiments.scaling_law import ScalingLaw, fit_scaling_law

TITLE = "airmoe report"
NO_FIGURES = (
    "Figures: left out, because matplotlib is not installed. Run: pip install 'airmoe[plot]'"
)
INTRODUCTION = (
    "Every number is taken at the evaluation with the lowest validation loss. FLOPs are counted "
    "twice: algorithmic, in the paper's convention, and executed, what the kernels compute. Bold: "
    "the best of a column; where seeds move it, only if all have the same. Overlap: how many of "
    "the experts that exact routing would choose were chosen."
)


@dataclass
class Contents:
    """The document and its figures, as they grow."""

    blocks: list[Block] = field(default_factory=list)
    drawings: list[Drawing] = field(default_factory=list)
    draws: bool = True  # False without matplotlib

    def show(
        self, draw: Callable[[], Sequence[Drawing | None]], heading: Heading | None = None
    ) -> None:
        """Add what `draw` makes, under its heading if there is anything."""
        found = [drawing for drawing in draw() if drawing is not None] if self.draws else []
        if found:
            self.blocks += [heading] if heading else []
            self.drawings += found
            self.blocks.append(Pictures([drawing.picture for drawing in found]))


@dataclass(frozen=True)
class Report:
    """Ready to be written in any format."""

    document: Document
    drawings: list[Drawing]
    problems: list[str]  # everything a reader must know, a line each


def make_report(record: Record) -> Report:
    """Compare the runs of a record and draw them."""
    grouped = fair_groups(group_runs(record.runs))
    contents = Contents([Paragraph(INTRODUCTION)], draws=can_draw())
    for group in grouped.groups:
        _group_section(group, contents)
    left_out = [*record.problems, *grouped.left_out]
    if not contents.draws:
        left_out.append(NO_FIGURES)
    _problem_section(left_out, grouped.notes, contents)
    document = Document(TITLE, contents.blocks)
    return Report(document, contents.drawings, [*left_out, *grouped.notes])


def _group_section(group: Group, contents: Contents) -> None:
    contents.blocks.append(Heading(2, group.title, group.slug))
    if all(codebook_of(variant) is not None for variant in group.variants):
        contents.blocks.append(codebook_table(group))
        contents.show(lambda: [codebook_figure(group)])
    elif all(granularity_of(variant) is not None for variant in group.variants):
        _granularity(group, contents)
    else:
        _methods(group, contents)
    contents.blocks.append(settings(group))


def _granularity(group: Group, contents: Contents) -> None:
    contents.blocks.append(granularity_table(group))
    fit = _fitted(group)
    contents.blocks.append(Paragraph(fit.words))
    contents.show(lambda: [granularity_figure(group, fit.law), *perplexity_figures(group)])


@dataclass(frozen=True)
class Fit:
    """None where there are too few points; what to say of it in any case."""

    law: ScalingLaw | None
    words: str


def _fitted(group: Group) -> Fit:
    """The law of Eq. 3 and what to say about it."""
    found = losses(group)
    try:
        law = fit_scaling_law(list(found), [one.mean for one in found.values()])
    except ConfigError as error:
        return Fit(None, f"No fit of L(Q) = a / Q^b + c: {error}")
    words = (
        f"Fit of L(Q) = a / Q^b + c to {law.points} points: a = {law.a:.4g}, b = {law.b:.4g}, "
        f"c = {law.c:.4g}; root mean square distance {law.residual:.2g} nats."
    )
    return Fit(law, " ".join([words, *law.warnings]))


def _methods(group: Group, contents: Contents) -> None:
    """Methods, ablations or settings against each other."""
    table = ablation_table if group.key.suite == "ablations" else main_table
    contents.blocks.append(table(group))
    if compared := beside_paper(group):
        contents.blocks += [Heading(3, "The paper beside ours", f"{group.slug}-paper"), *compared]
    contents.show(
        lambda: [*perplexity_figures(group), reduction_figure(group)],
        Heading(3, "Perplexity through training", f"{group.slug}-curves"),
    )
    used = Heading(3, "Who is used", f"{group.slug}-used")
    contents.show(lambda: [usage_figure(group), codeword_figure(group)], used)
    contents.blocks += structure_table(group)
    quality = Heading(3, "Against exact routing", f"{group.slug}-quality")
    contents.show(lambda: quality_figures(group), quality)
    health = Heading(3, "Health of the router", f"{group.slug}-health")
    contents.show(lambda: health_figures(group), health)


def _problem_section(left_out: list[str], notes: list[str], contents: Contents) -> None:
    contents.blocks.append(Heading(2, "Left out, and why", "left-out"))
    contents.blocks.append(Bullets(left_out) if left_out else Paragraph("Nothing."))
    if notes:
        contents.blocks += [Heading(3, "To keep in mind", "notes"), Bullets(notes)]
