"""The paper's numbers beside ours, and what differs between the two runs.

paper.csv: its main table, dead experts and entropy from its appendix, and its ablations (of the
small model on WikiText-103; their AIR is another run than that of the main table).
"""

from __future__ import annotations

import csv
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from airmoe.experiments.report import metrics
from airmoe.experiments.report.groups import Group, options_of
from airmoe.experiments.report.metrics import Metric, Summary, summarize, unit_of, written
from airmoe.experiments.report.names import corpus_of, known_text, title_of
from airmoe.experiments.report.record import Run
from airmoe.experiments.report.tables import Cell, Table, note_on_test
from airmoe.experiments.suites import SUITES
from airmoe.experiments.suites.folder import flat
from airmoe.training import preset
from airmoe.training.presets import WEB_STEPS

DEVICES = 4
PRECISION = "fp16"
WIKITEXT_TOKENS = 10 * 121_000_000  # ten epochs
SAME_LENGTH = 0.02  # epochs end where the text does

# Field of the paper's cell, our columns. The test text may be nearer to the paper's than ours is.
COMPARED: tuple[tuple[str, tuple[Metric, ...]], ...] = (
    ("perplexity", (metrics.PERPLEXITY, metrics.TEST)),
    ("flops", (metrics.FLOPS,)),
    ("dead_experts", (metrics.DEAD,)),
    ("entropy", (metrics.ENTROPY,)),
    ("overlap", (metrics.OVERLAP,)),
)
# Options with a line of their own, or of no influence on the result.
SAID = (
    *("data.corpus", "data.folder", "data.max_tokens", "training.steps", "training.epochs"),
    *("text.corpus", "text.split_rule", "text.max_tokens"),
    *("training.precision", "training.seed", "training.log_every"),
    *("training.save_every", "training.keep_checkpoints", "training.quality_tokens"),
    *("training.micro_batch_size", "training.compile", "training.cuda_graph"),
)


@dataclass(frozen=True, kw_only=True)
class PaperCell:
    """One run of the paper; FLOPs are those of the main table, shares lie in [0, 1]."""

    perplexity: float
    flops: float
    dead_experts: float | None
    entropy: float | None
    overlap: float | None


@cache
def _cells() -> dict[tuple[str, str], PaperCell]:
    """(preset, or "ablations"; method) -> the paper's run."""
    with Path(__file__).with_name("paper.csv").open(encoding="utf-8", newline="") as file:
        return {
            (row.pop("runs"), row.pop("method")): PaperCell(
                **{name: float(text) if text else None for name, text in row.items()}  # pyright: ignore
            )
            for row in csv.DictReader(file)
        }


def paper_cell(suite: str | None, preset: str, variant: str) -> PaperCell | None:
    """The paper's run that this variant of a suite repeats, if it has one."""
    if suite == "ablations":
        return _cells().get(("ablations", variant)) if preset == "small" else None
    return _cells().get(("large-openwebtext2" if preset == "large" else preset, variant))


@dataclass(frozen=True)
class PaperRuns:
    """What the runs of one size and corpus had in common. Tokens are ours to infer (flops.md)."""

    corpus: str
    tokens: int


def paper_runs(preset: str) -> PaperRuns:
    """Those that a preset stands for."""
    if preset in ("small", "medium"):
        return PaperRuns("wikitext103", WIKITEXT_TOKENS)
    size, _, corpus = ("large-openwebtext2" if preset == "large" else preset).partition("-")
    tokens_per_step = 131_072 if size == "large" else 65_536
    return PaperRuns(corpus, WEB_STEPS[f"{size}-{corpus}"] * tokens_per_step)


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
    for name, compared in COMPARED:
        papers = [_only(getattr(cell, name)) for cell in cells.values()]
        if not any(papers):
            continue
        ours = {
            metric: found
            for metric in compared
            if any(found := [summarize(metric, group.variants[variant]) for variant in cells])
            or not metric.optional
        }
        kind = compared[0].kind
        values = [one.mean for found in (*ours.values(), papers) for one in found if one]
        unit = unit_of(kind, values)
        in_unit = f" ({unit.name})" if unit.name else ""
        titled = [
            ("FLOPs" if metric is metrics.FLOPS else metric.title) + f"{in_unit}: ours"
            for metric in ours
        ]
        for title, found in zip([*titled, "paper"], [*ours.values(), papers], strict=True):
            columns.append(title)
            for row, one in zip(rows, found, strict=True):
                value = None if one is None else one.mean
                row.append(Cell(text=written(one, kind, unit), value=value))
    caption = (
        "Ours and the paper's, where it ran the same method and preset; the paper's are those of "
        "each method's best point."
    )
    runs = [run for variant in cells for run in group.variants[variant]]
    table = Table(caption=caption, columns=columns, rows=rows, notes=note_on_test(runs))
    return Beside(table, _differences(runs))


def _only(value: float | None) -> Summary | None:
    return None if value is None else Summary(value, None, 1)


def _differences(runs: Sequence[Run]) -> list[str]:
    """Text, length, devices, precision and settings, each in a line."""
    first = runs[0]
    paper, precision = paper_runs(first.config["preset"]), first.config["training"]["precision"]
    found = [_text_difference(first, paper.corpus)]
    if abs(first.tokens / paper.tokens - 1) > SAME_LENGTH:
        share = f"{100 * first.tokens / paper.tokens:.3g} %"
        found.append(f"length: {first.tokens:,} tokens, {share} of the paper's {paper.tokens:,}")
    devices = {_devices(run) for run in runs}
    if None not in devices:
        refresh = ", each of which refreshes the lists" if any(map(_has_air, runs)) else ""
        named = "; ".join(sorted(filter(None, devices)))
        found.append(f"devices: {named}; the paper had {DEVICES}{refresh}")
    if precision != PRECISION:
        found.append(f"precision: {precision}, the paper's is {PRECISION}")
    balanced = (
        title_of(run.variant)
        for run in runs
        if not _has_air(run) and run.config["model"].get("load_balance_weight")
    )
    if listed := ", ".join(dict.fromkeys(balanced)):
        found.append(f"load-balance loss: {listed}; the paper states one for AIR only")
    return [line for line in [*found, _changed_settings(runs)] if line]


def _has_air(run: Run) -> bool:
    return run.config["model"].get("router") == "air"


def _devices(run: Run) -> str | None:
    """Those that worked, where that is known: one visible GPU is one, of several some may rest.

    Without a GPU the count is one of threads.
    """
    name = str(run.machine.get("device"))
    alone = run.machine.get("count") == 1 and name.startswith("NVIDIA ")
    return f"1 {name}" if alone else None


def _text_difference(run: Run, corpus: str) -> str:
    options, known = options_of(run), known_text(run)
    keys = ("data.max_tokens", "text.max_tokens")
    keys = keys if known else ("data.folder", *keys)
    changed = [f"{key}={options[key]}" for key in keys if options.get(key)]
    if known is None and options.get("data.corpus") == corpus and not changed:
        return ""
    named = ", ".join([known.title if known else corpus_of(run), *changed])
    digest = (run.data_sha256 or "unknown")[:12]
    return f"text: {named} (data hash {digest}); the paper's is {corpus}"


def _changed_settings(runs: Sequence[Run]) -> str:
    """Options that are not those of the variant as the preset makes it, with their values."""
    suite = "ablations" if runs[0].suite == "ablations" else "main"
    paper = SUITES[suite].variants(preset(runs[0].config["preset"]))
    changed: dict[str, set[str]] = {}
    for run in runs:
        usual = flat(paper[run.variant].to_json())
        for key, value in options_of(run).items():
            if key not in SAID and value != usual.get(key):
                changed.setdefault(key, set()).add(str(value))
    listed = ", ".join(f"{key}={' or '.join(sorted(found))}" for key, found in changed.items())
    return f"settings: {listed}" if listed else ""
