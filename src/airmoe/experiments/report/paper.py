"""The paper's numbers beside ours, what differs between the two runs, and its claims about AIR.

paper.csv: its main table, dead experts and entropy from its appendix, and its ablations (of the
small model on WikiText-103; their AIR is another run than that of the main table).

The effect of a claim is the difference of log-perplexities of runs with the same seed, which start
from the same weights and read the same text: -1.6 % means that AIR's perplexity is 1.6 % lower. The
analysis is fixed before runs start: the interval is Student's if at least three seeds have both
runs; with fewer it comes from the spread between seeds in earlier runs.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from statistics import fmean, stdev
from typing import Literal

from airmoe.experiments.report import tables
from airmoe.experiments.report.groups import Group, text_of, title_of
from airmoe.experiments.report.record import Run
from airmoe.experiments.report.tables import (
    DASH,
    FUTURE_MARK,
    Cell,
    Metric,
    Summary,
    Table,
    note_on_test,
    sees_future,
    summarize,
    unit_of,
)
from airmoe.training.presets import WEB_STEPS

PRECISION = "fp16"
LARGE = "large-openwebtext2"  # which the preset `large` is
WIKITEXT_TOKENS = 10 * 121_000_000  # ten epochs
SAME_LENGTH = 0.02  # epochs end where the text does

CAPTION = (
    "Ours and the paper's, where it ran the same method and preset; the paper's are those of each "
    "method's best point."
)
# Title, field of the paper's cell, our column. The test text may be nearer to the paper's.
COMPARED: tuple[tuple[str, str, Metric], ...] = (
    ("perplexity", "perplexity", tables.PERPLEXITY),
    ("perplexity, test text", "perplexity", tables.TEST),
    ("FLOPs", "flops", tables.FLOPS),
    ("dead experts", "dead_experts", tables.DEAD),
    ("entropy, nats", "entropy", tables.ENTROPY),
    ("overlap", "overlap", tables.OVERLAP),
)

OURS = "air"
# 95 % of the differences of two single runs: 1.96 x sqrt(2) x 0.6 %, the pooled standard deviation
# of perplexity between seeds after one pass, widened for the few seeds that it comes from.
SINGLE_PAIR = 0.019
STUDENT = (4.303, 3.182, 2.776, 2.571, 2.447, 2.365, 2.306, 2.262)  # 97.5 %, from 2 degrees on
FEWEST_FOR_STUDENT = 3
NOTE = (
    "Effect: AIR's perplexity against the other's with the same seed. Interval: 95 %, Student's "
    f"from three seeds on; ±{100 * SINGLE_PAIR:.1f} % with one and "
    f"±{100 * SINGLE_PAIR / math.sqrt(2):.1f} % with two, from the spread between seeds of earlier "
    "runs. Holds: the whole interval lies on the paper's side of 0 (AIR ahead, where the paper has "
    "no number). Not seen: it lies on the other side, or contains 0 but not the paper's effect. "
    "Open: neither."
)
COLUMNS = ["AIR against", "the paper (%)", "effect (%)", "95 % interval (%)", "seeds", "verdict"]


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


def paper_cell(group: Group, variant: str) -> dict[str, float | None] | None:
    """The paper's run that this variant repeats, if it has one."""
    if group.suite == "ablations":
        return _cells().get(("ablations", variant)) if group.preset == "small" else None
    return _cells().get((LARGE if group.preset == "large" else group.preset, variant))


def paper_perplexity(group: Group, variant: str) -> float | None:
    cell = paper_cell(group, variant)
    return None if cell is None else cell["perplexity"]


def paper_runs(preset: str) -> tuple[str, int]:
    """Corpus and tokens of the runs that a preset stands for; tokens are inferred (flops.md)."""
    if preset in ("small", "medium"):
        return "wikitext103", WIKITEXT_TOKENS
    size, _, corpus = (LARGE if preset == "large" else preset).partition("-")
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
        if (cell := paper_cell(group, variant)) is not None
    }
    if not cells:
        return None
    titles, columns = ["method"], [[Cell(text=title_of(variant)) for variant in cells]]
    for title, name, metric in COMPARED:
        ours = [summarize(metric, group.variants[variant]) for variant in cells]
        papers = [cell[name] for cell in cells.values()]
        theirs = [None if one is None else Summary(one) for one in papers]
        if any(ours) and any(theirs):
            unit = unit_of(metric.kind, [one.mean for one in (*ours, *theirs) if one])
            shown = {unit.titled(title) + ": ours": ours, "paper": theirs}
            if metric is tables.TEST:  # its paper's number is that of the column before
                del shown["paper"]
            titles += shown
            columns += [
                [Cell(text=unit.written(one), value=one.mean if one else None) for one in found]
                for found in shown.values()
            ]
    rows = list(map(list, zip(*columns, strict=True)))
    runs = [run for variant in cells for run in group.variants[variant]]
    table = Table(caption=CAPTION, columns=titles, rows=rows, notes=note_on_test(runs))
    return Beside(table, _differences(runs[0]))


def _differences(run: Run) -> list[str]:
    """A line each for text, length and precision, where they differ."""
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


@dataclass(frozen=True, kw_only=True)
class Claim:
    """AIR against one other variant."""

    other: str
    paper: float | None  # the paper's effect, None where it states none
    effect: float
    half_width: float  # of the interval, as a share
    seeds: list[int]
    marked: bool  # the other sees later tokens

    @property
    def interval(self) -> tuple[float, float]:
        return self.effect - self.half_width, self.effect + self.half_width

    @property
    def verdict(self) -> Literal["holds", "not seen", "open"]:
        """By the paper's side of 0: it has exact routing, for example, ahead of AIR."""
        low, high = self.interval
        side = 1 if self.paper is not None and self.paper > 0 else -1
        if side * low > 0 and side * high > 0:
            return "holds"
        if side * low < 0 and side * high < 0:
            return "not seen"
        if self.paper is not None and not low <= self.paper <= high:
            return "not seen"
        return "open"


def claims(group: Group) -> list[Claim]:
    """AIR against every other variant that shares a seed with it."""
    ours = {run.seed: run.perplexity for run in group.variants.get(OURS, [])}
    found, our_paper = [], paper_perplexity(group, OURS)
    for other, runs in group.variants.items():
        pairs = {  # seed -> log of our perplexity over theirs, at each run's best evaluation
            run.seed: math.log(ours[run.seed] / run.perplexity) for run in runs if run.seed in ours
        }
        if other == OURS or not pairs:
            continue
        theirs = paper_perplexity(group, other)
        claim = Claim(
            other=other,
            paper=math.log(our_paper / theirs) if our_paper and theirs else None,
            effect=fmean(pairs.values()),
            half_width=half_width(list(pairs.values())),
            seeds=sorted(pairs),
            marked=sees_future(runs[0]),
        )
        found.append(claim)
    return found


def half_width(differences: Sequence[float]) -> float:
    """Half the width of the 95 % interval of their mean."""
    n = len(differences)
    if n < FEWEST_FOR_STUDENT:
        return SINGLE_PAIR / math.sqrt(n)
    quantile = STUDENT[min(n - FEWEST_FOR_STUDENT, len(STUDENT) - 1)]
    return quantile * stdev(differences) / math.sqrt(n)


def claims_table(group: Group) -> Table | None:
    """A row per claim; None where there is nothing to compare AIR with."""
    rows = [_row(claim) for claim in claims(group)]
    caption = "AIR against each of the others, beside what the paper claims."
    return Table(caption=caption, columns=COLUMNS, rows=rows, notes=[NOTE]) if rows else None


def _row(claim: Claim) -> list[Cell]:
    low, high = claim.interval
    paper = DASH if claim.paper is None else _per_cent(claim.paper)
    return [
        Cell(text=title_of(claim.other), mark=FUTURE_MARK if claim.marked else ""),
        Cell(text=paper, value=claim.paper),
        Cell(text=_per_cent(claim.effect), value=claim.effect),
        Cell(text=f"{_per_cent(low)} to {_per_cent(high)}", value=low),
        Cell(text=str(len(claim.seeds)), value=len(claim.seeds)),
        Cell(text=claim.verdict),
    ]


def _per_cent(log_ratio: float) -> str:
    """A difference of logarithms in per cent: -1.6."""
    return f"{100 * math.expm1(log_ratio):+.1f}"
