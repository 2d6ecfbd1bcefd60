"""The paper's numbers: its main table, the metrics of its appendix, and its ablations."""

from __future__ import annotations

from dataclasses import dataclass

from airmoe.training.presets import WEB_STEPS

P, E = 1e15, 1e18


@dataclass(frozen=True)
class PaperCell:
    """One run of the paper; FLOPs are those of the main table, shares lie in [0, 1]."""

    perplexity: float
    flops: float
    dead_experts: float | None = None
    entropy: float | None = None
    overlap: float | None = None


@dataclass(frozen=True)
class PaperRuns:
    """What the runs of one size and corpus had in common. Tokens are ours to infer (flops.md)."""

    corpus: str
    tokens: int


DEVICES = 4
PRECISION = "fp16"
WIKITEXT_TOKENS = 10 * 121_000_000  # ten epochs


def _web(preset: str) -> PaperRuns:
    size, _, corpus = preset.partition("-")
    return PaperRuns(corpus, WEB_STEPS[preset] * (131_072 if size == "large" else 65_536))


# Our preset -> the paper's runs it stands for.
RUNS = {
    "small": PaperRuns("wikitext103", WIKITEXT_TOKENS),
    "medium": PaperRuns("wikitext103", WIKITEXT_TOKENS),
    "large": _web("large-openwebtext2"),
    **{preset: _web(preset) for preset in WEB_STEPS},
}

LARGE_OPENWEBTEXT2 = {
    "air": PaperCell(16.65, 11.2 * E, 0.0, 10.33),
    "peer": PaperCell(17.88, 11.2 * E, 0.0, 10.18),
    "hierarchical": PaperCell(18.17, 11.3 * E, 0.0, 11.01),
    "coarse": PaperCell(16.98, 11.3 * E, 0.0, 4.27),
}

# Preset -> method -> its row of the main table, dead experts and entropy from the appendix.
MAIN: dict[str, dict[str, PaperCell]] = {
    "small": {
        "air": PaperCell(21.82, 324.1 * P, 0.001, 10.78),
        "peer": PaperCell(22.25, 352.8 * P, 0.0, 10.76),
        "hierarchical": PaperCell(22.55, 350.4 * P, 0.0, 10.97),
        "exact": PaperCell(21.34, 467.5 * P),
        "coarse": PaperCell(23.84, 342.5 * P, 0.0, 4.28),
    },
    "small-c5": {
        "air": PaperCell(131.81, 625.5 * P, 0.001, 9.51),
        "peer": PaperCell(145.32, 626.3 * P, 0.0, 9.96),
        "hierarchical": PaperCell(147.99, 622.6 * P, 0.0, 10.15),
        "exact": PaperCell(132.34, 817.2 * P),
        "coarse": PaperCell(151.99, 611.7 * P, 0.0, 3.90),
    },
    "small-openwebtext2": {
        "air": PaperCell(32.14, 505.0 * P, 0.014, 10.02),
        "peer": PaperCell(33.10, 505.6 * P, 0.0, 10.25),
        "hierarchical": PaperCell(36.05, 502.6 * P, 0.0, 10.48),
        "exact": PaperCell(31.56, 648.3 * P),
        "coarse": PaperCell(36.05, 493.9 * P, 0.0, 4.11),
    },
    "medium": {
        "air": PaperCell(18.62, 755.9 * P, 0.0, 10.84),
        "peer": PaperCell(18.71, 751.0 * P, 0.0, 10.68),
        "hierarchical": PaperCell(19.27, 954.7 * P, 0.0, 11.04),
        "coarse": PaperCell(18.79, 836.7 * P, 0.0, 4.51),
    },
    "medium-c5": {
        "air": PaperCell(30.39, 4.1 * E, 0.0, 10.09),
        "peer": PaperCell(31.60, 4.1 * E, 0.0, 10.16),
        "hierarchical": PaperCell(33.08, 4.1 * E, 0.0, 11.04),
        "coarse": PaperCell(32.10, 4.0 * E, 0.0, 4.16),
    },
    "medium-openwebtext2": {
        "air": PaperCell(20.51, 3.6 * E, 0.0, 10.32),
        "peer": PaperCell(21.30, 3.5 * E, 0.0, 10.19),
        "hierarchical": PaperCell(23.07, 3.5 * E, 0.0, 11.00),
        "coarse": PaperCell(21.25, 3.5 * E, 0.0, 4.24),
    },
    "large-c5": {
        "air": PaperCell(41.25, 14.3 * E, 0.0, 9.98),
        "peer": PaperCell(45.37, 14.0 * E, 0.0, 9.95),
        "hierarchical": PaperCell(45.65, 14.4 * E, 0.0, 11.05),
        "coarse": PaperCell(43.13, 13.2 * E, 0.0, 4.16),
    },
    "large": LARGE_OPENWEBTEXT2,
    "large-openwebtext2": LARGE_OPENWEBTEXT2,
}

# Of the small model on WikiText-103. Its AIR is another run than that of the main table.
ABLATIONS = {
    "air": PaperCell(21.72, 324.1 * P, 0.0, 10.80, 0.64),
    "euclidean": PaperCell(21.83, 324.1 * P, 0.003, 10.81, 0.64),
    "expert_choice": PaperCell(22.77, 357.5 * P, 0.786, 9.53, 0.74),
    "no_projection": PaperCell(21.96, 324.1 * P, 0.007, 10.73, 0.66),
    "static": PaperCell(23.27, 360.1 * P, 0.424, 10.24, 0.07),
}


def paper_cell(suite: str | None, preset: str, variant: str) -> PaperCell | None:
    """The paper's run that this variant of a suite repeats, if it has one."""
    if suite == "ablations":
        return ABLATIONS.get(variant) if preset == "small" else None
    return MAIN.get(preset, {}).get(variant)
