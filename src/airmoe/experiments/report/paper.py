"""The paper's numbers beside ours, and what differs between the two runs.

paper.csv: its main table, dead experts and entropy from its appendix, and its ablations (of the
small model on WikiText-103; their AIR is another run than that of the main table).
"""

from __future__ import annotations

import csv
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from airmoe.experiments.report import metrics
from airmoe.experiments.report.groups import Group, text_of, title_of
from airmoe.experiments.report.metrics import Metric, Summary, summarize, unit_of, written
from airmoe.experiments.report.record import Run
from airmoe.experiments.report.tables import Cell, Table, note_on_test
from airmoe.training.presets import WEB_STEPS

PRECISION = "fp16"
WIKITEXT_TOKENS = 10 * 121_000_000  # ten epochs
SAME_LENGTH = 0.02  # epochs end where the text does

CAPTION = (
    "Ours and the paper's, where it ran the same method and preset; the paper's are those of each "
    "method's best point."
)
# Title, field of the paper's cell, our column. The test text may be nearer to the paper's.
COMPARED: tuple[tuple[str, str, Metric], ...] = (
    ("perplexity", "perplexity", metrics.PERPLEXITY),
    ("perplexity, test text", "perplexity", metrics.TEST),
    ("FLOPs", "flops", metrics.FLOPS),
    ("dead experts", "dead_experts", metrics.DEAD),
    ("entropy, nats", "entropy", metrics.ENTROPY),
    ("overlap", "overlap", metrics.OVERLAP),
)


@cache
def _cells() -> dict[tuple[str, str], dict[str, float | None]]:
    """(preset, or "ablations"; method) -> field -> the paper's number; shares lie in [0, 1]."""
    with Path(__file__).with_name("paper.csv").open(encoding="utf-8", newline="") as file:
        return {
            (row.pop("runs"), row.pop("method")): {
                name: float(text) if text else None for name, text in row.items()
            }
            for row in csv.DictReader(file)
        }


def paper_cell(suite: str | None, preset: str, variant: str) -> dict[str, float | None] | None:
    """The paper's run that this variant of a suite repeats, if it has one."""
    if suite == "ablations":
        return _cells().get(("ablations", variant)) if preset == "small" else None
    return _cells().get(("large-openwebtext2" if preset == "large" else preset, variant))


def paper_perplexity(group: Group, variant: str) -> float | None:
    cell = paper_cell(group.key.suite, group.key.preset, variant)
    return None if cell is None else cell["perplexity"]


def paper_runs(preset: str) -> tuple[str, int]:
    """Corpus and tokens of the runs that a preset stands for; tokens are inferred (flops.md)."""
    if preset in ("small", "medium"):
        return "wikitext103", WIKITEXT_TOKENS
    size, _, corpus = ("large-openwebtext2" if preset == "large" else preset).partition("-")
    tokens_per_step = 131_072 if size == "large" else 65_536
    return corpus, WEB_STEPS[f"{size}-{corpus}"] * tokens_per_step


@dataclass(frozen=True)
class Beside:
    """The table, and a line for everything that differs from the paper's runs."""

    table: Table
    differences: list[str]


def beside_paper(group: Group) -> Beside | None:
    """A table of the variants that the paper has too; None where it has none."""
    cells = {
        variant: cell
        for variant in group.variants
        if (cell := paper_cell(group.key.suite, group.key.preset, variant)) is not None
    }
    if not cells:
        return None
    columns = ["method"]
    rows = [[Cell(text=title_of(variant))] for variant in cells]
    for title, name, metric in COMPARED:
        papers = [cell[name] for cell in cells.values()]
        ours = [summarize(metric, group.variants[variant]) for variant in cells]
        theirs = [None if one is None else Summary(one) for one in papers]
        if not any(theirs) or not any(ours):
            continue
        unit = unit_of(metric.kind, [one.mean for one in (*ours, *theirs) if one])
        in_unit = f" ({unit.name})" if unit.name else ""
        shown = {f"{title}{in_unit}: ours": ours}
        if metric is not metrics.TEST:
            shown["paper"] = theirs
        for column, found in shown.items():
            columns.append(column)
            for row, one in zip(rows, found, strict=True):
                value = None if one is None else one.mean
                row.append(Cell(text=written(one, metric.kind, unit), value=value))
    runs = [run for variant in cells for run in group.variants[variant]]
    table = Table(caption=CAPTION, columns=columns, rows=rows, notes=note_on_test(runs))
    return Beside(table, _differences(runs[0]))


def _differences(run: Run) -> list[str]:
    """Text, length and precision, each in a line."""
    corpus, tokens = paper_runs(run.settings.preset)
    found, (text, _), precision = [], text_of(run), run.settings.training.precision
    if text != corpus:
        found.append(f"text: {text} (data hash {run.data_sha256[:12]}), the paper's {corpus}")
    if abs(run.tokens / tokens - 1) > SAME_LENGTH:
        share = f"{100 * run.tokens / tokens:.3g} %"
        found.append(f"length: {run.tokens:,} tokens, {share} of the paper's {tokens:,}")
    if precision != PRECISION:
        found.append(f"precision: {precision}, the paper's {PRECISION}")
    return found
