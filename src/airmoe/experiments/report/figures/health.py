"""How the routers fare through training: experts that rest, codewords in use, stale shortlists."""

from __future__ import annotations

from dataclasses import dataclass, replace

from airmoe.experiments.report.document import Picture
from airmoe.experiments.report.figures.curves import (
    TOKENS,
    Series,
    Source,
    alt_text,
    line_figure,
    series,
)
from airmoe.experiments.report.figures.drawing import Drawing
from airmoe.experiments.report.groups import Group


@dataclass(frozen=True, kw_only=True)
class Health:
    """One figure."""

    field: str
    source: Source
    label: str
    caption: str
    factor: float = 1.0


SHOWN = (
    Health(
        field="dead_experts",
        source="evaluations",
        label="dead experts (%)",
        caption="Experts without a token of the validation text, in per cent.",
        factor=100.0,
    ),
    Health(
        field="unlisted_experts",
        source="evaluations",
        label="unlisted experts (%)",
        caption="Experts that no shortlist holds, in per cent: no token can choose them.",
        factor=100.0,
    ),
    Health(
        field="codeword_perplexity",
        source="training",
        label="codewords in use",
        caption="Codewords (hierarchical: clusters) in use: how many, equally used, would be as "
        "even as those of one training step.",
    ),
    Health(
        field="staleness",
        source="training",
        label="stale shortlist entries (%)",
        caption="Entries of the shortlists that a rebuild would replace, in per cent. Lists that "
        "live several steps are of different age at the steps shown.",
        factor=100.0,
    ),
)


def health_figures(group: Group) -> list[Drawing]:
    """Of the variants that logged them; nothing where none did."""
    figures = []
    for health in SHOWN:
        found = series(group, TOKENS.field, health.field, health.source)
        if found:
            curves = [_scaled(one, health.factor) for one in found]
            name = f"{group.slug}-{health.field.replace('_', '-')}"
            alt = alt_text(health.caption, curves)
            picture = Picture(name=name, caption=health.caption, alt=alt)
            figures.append(line_figure(picture, curves, TOKENS, health.label, zero=True))
    return figures


def _scaled(one: Series, factor: float) -> Series:
    return replace(
        one, y=[factor * y for y in one.y], spread=[factor * spread for spread in one.spread]
    )
