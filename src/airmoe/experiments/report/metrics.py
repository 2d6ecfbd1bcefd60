"""The numbers of a table: how each is read from a run, summed up over seeds, and written."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from statistics import fmean, stdev
from typing import Literal

from airmoe.experiments.report.record import Run

Kind = Literal["flops", "seconds", "count", "share", "plain", "tiny"]
DASH = "–"
PREFIXES = ("", "k", "M", "G", "T", "P", "E", "Z")
DIGITS = {"flops": 4}  # of the largest number of a column; 3 of other kinds


@dataclass(frozen=True)
class Summary:
    """A number over the seeds that have it."""

    mean: float
    spread: float | None = None  # sample standard deviation; None with one seed


@dataclass(frozen=True)
class Unit:
    """Numbers of a column are divided by `factor` and written with so many decimals."""

    name: str
    factor: float = 1.0
    decimals: int | None = 2  # None: two digits of any number, over many orders of magnitude

    def titled(self, title: str) -> str:
        return f"{title} ({self.name})" if self.name else title

    def written(self, found: Summary | None) -> str:
        """`mean ± spread`; the mean alone where all seeds agree."""
        if found is None:
            return DASH
        mean, spread = found.mean / self.factor, (found.spread or 0.0) / self.factor
        if self.decimals is None:
            texts = f"{mean:.2g}", f"{spread:.1g}"
        else:
            texts = f"{mean:,.{self.decimals}f}", f"{spread:,.{self.decimals}f}"
        return " ± ".join(texts) if spread else texts[0]


@dataclass(frozen=True)
class Metric:
    """One column."""

    title: str
    kind: Kind
    read: Callable[[Run], float | None]
    better: Literal["low", "high"] | None = None
    ideal: Callable[[Run], float | None] | None = None  # written behind it: "7.9 of 8.3"


def best(field: str) -> Callable[[Run], float | None]:
    return lambda run: run.best.get(field)


def against_exact(field: str) -> Callable[[Run], float | None]:
    """For approximate routers only: one that scores every expert agrees with itself."""
    return lambda run: None if scores_every_expert(run) else run.best.get(field)


def scores_every_expert(run: Run) -> bool:
    return run.config["model"].get("router") == "topk"


def sees_future(run: Run) -> bool:
    """Whether experts choose tokens: then each token's routing depends on later ones."""
    model = run.config["model"]
    gate = (model.get("router_options") or {}).get("gate")
    return "expert_choice" in (model.get("router"), gate)


def most_entropy(run: Run) -> float | None:
    """ln E: every expert used equally."""
    experts = run.config["model"].get("num_experts")
    return math.log(experts) if experts and run.best.get("entropy") is not None else None


def perplexity_of_test(run: Run) -> float | None:
    return None if run.test is None else run.test["perplexity"]


PERPLEXITY = Metric("perplexity", "plain", best("perplexity"), "low")
TEST = Metric("perplexity, test text", "plain", perplexity_of_test, "low")
LOSS = Metric("loss, nats", "plain", best("loss"), "low")
FLOPS = Metric("FLOPs, algorithmic", "flops", best("flops"), "low")
EXECUTED = Metric("FLOPs, executed", "flops", best("executed_flops"), "low")
SECONDS = Metric("time", "seconds", best("seconds"), "low")
SPEED = Metric("tokens/s", "count", lambda run: run.tokens_per_second, "high")
MEMORY = Metric("peak memory (GiB)", "plain", lambda run: run.peak_memory_gib, "low")
TOTAL = Metric("parameters", "count", lambda run: run.parameters["total"])
ACTIVE = Metric("active", "count", lambda run: run.parameters["active"])
DEAD = Metric("dead experts", "share", best("dead_experts"), "low")
ENTROPY = Metric("entropy, nats", "plain", best("entropy"), "high", most_entropy)
OVERLAP = Metric("overlap", "plain", against_exact("overlap"), "high")
RECALL = Metric("mass recall", "plain", against_exact("mass_recall"), "high")
BOUND = Metric("its bound", "tiny", against_exact("mass_recall_bound"))


def summarize(metric: Metric, runs: Sequence[Run]) -> Summary | None:
    """Mean and spread over seeds; None where no run has it."""
    values = [value for run in runs if (value := metric.read(run)) is not None]
    if not values:
        return None
    return Summary(fmean(values), stdev(values) if len(values) > 1 else None)


def unit_of(kind: Kind, values: Sequence[float]) -> Unit:
    """One unit for a whole column or axis, so that its numbers compare at a glance."""
    largest = max((abs(value) for value in values), default=0.0)
    if kind == "share":
        return Unit("%", 0.01, 1)
    if kind in ("plain", "tiny"):
        return Unit("", decimals=2 if kind == "plain" else None)
    if kind == "seconds":
        units = (("h", 3600.0), ("min", 60.0))
        name, factor = next((one for one in units if largest >= 2 * one[1]), ("s", 1.0))
    else:
        power = min(int(math.log10(largest) // 3), len(PREFIXES) - 1) if largest >= 1 else 0
        name, factor = PREFIXES[power], 1000.0**power
    before = len(str(round(largest / factor)))
    return Unit(name, factor, max(DIGITS.get(kind, 3) - before, 0))
