"""The paper's claims about AIR, each with our effect, its interval and a verdict.

The effect is the difference of log-perplexities of runs with the same seed, which start from the
same weights and read the same text: -1.6 % means that AIR's perplexity is 1.6 % lower. The analysis
is fixed before runs start: the interval is Student's if at least three seeds have both runs; with
fewer it comes from the spread between seeds in earlier runs.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Literal

from airmoe.experiments.report.groups import Group, title_of
from airmoe.experiments.report.metrics import DASH, sees_future
from airmoe.experiments.report.paper import paper_perplexity
from airmoe.experiments.report.tables import FUTURE_MARK, Cell, Table

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
    """Of the 95 % interval of their mean."""
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
    """A difference of logarithms as people read it: -1.6."""
    return f"{100 * math.expm1(log_ratio):+.1f}"
