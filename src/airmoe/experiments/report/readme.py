"""The main results as a block of Markdown: what the README shows."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

from airmoe.experiments.report import metrics
from airmoe.experiments.report.document import Block, Cell, Paragraph, Table
from airmoe.experiments.report.fair import fair_groups
from airmoe.experiments.report.groups import Group, group_runs, machines, torch_versions
from airmoe.experiments.report.markdown import markdown_blocks
from airmoe.experiments.report.metrics import DASH
from airmoe.experiments.report.paper import RUNS, paper_cell
from airmoe.experiments.report.reading import read_all
from airmoe.experiments.report.tables import PERPLEXITIES, variant_table

RUNS_FOLDER = Path("wikipedia", "main")
MORE = "What differs from the paper's runs, what to keep in mind: [results](docs/results.md)."
CORPORA = {"wikitext103": "WikiText-103"}
COLUMNS = (
    *PERPLEXITIES,
    metrics.FLOPS,
    metrics.SECONDS,
    metrics.SPEED,
    metrics.MEMORY,
    metrics.DEAD,
    metrics.ENTROPY,
    metrics.OVERLAP,
)


def readme_block(results: Path) -> str:
    """A table per length that was run."""
    groups = fair_groups(group_runs(read_all([results / RUNS_FOLDER]).runs)).groups
    blocks: list[Block] = [block for group in groups for block in _of_group(group)]
    return f"{markdown_blocks(blocks)}\n\n{MORE}"


def _of_group(group: Group) -> list[Block]:
    table = _with_paper(variant_table(group, COLUMNS, ""), group)
    return [Paragraph(_about(group)), table, *_whole_time(group)]


def _whole_time(group: Group) -> list[Block]:
    """What somebody has to wait who repeats the run with AIR."""
    seconds = [run.whole_seconds for run in group.runs if run.variant == "air"]
    known = [one for one in seconds if one is not None]
    if not known:
        return []
    slowest = " at most" if len(known) > 1 else ""
    minutes = f"{max(known) / 60:.1f} min"
    text = (
        "From start to end, with compilers and evaluations but without preparing the text, AIR "
        f"took{slowest} {minutes}."
    )
    return [Paragraph(text)]


def _about(group: Group) -> str:
    """What all rows have in common."""
    first, key = group.runs[0], group.key
    parts = [
        f"Preset {key.preset}",
        key.corpus,
        f"{first.tokens:,} tokens",
        first.config["training"]["precision"],
        " or ".join(machines(group.runs)),
        f"torch {' or '.join(torch_versions(group.runs))}",
    ]
    text = f"{', '.join(parts)}. Perplexities are per token."
    paper = RUNS.get(key.preset)
    if paper is None:
        return text
    share = f"{100 * first.tokens / paper.tokens:.3g} %"
    return (
        f"{text} The paper's are those of {CORPORA.get(paper.corpus, paper.corpus)}, each at its "
        f"best point of {paper.tokens:,} tokens; ours had {share} of that length."
    )


def _with_paper(table: Table, group: Group) -> Table:
    """With the paper's perplexity behind ours."""
    at = 1 + max(
        table.columns.index(one.title) for one in PERPLEXITIES if one.title in table.columns
    )
    rows = [
        [*row[:at], _paper_cell(group, variant, grey=row[0].grey), *row[at:]]
        for variant, row in zip(group.variants, table.rows, strict=True)
    ]
    columns = [*table.columns[:at], "the paper's", *table.columns[at:]]
    return replace(table, columns=columns, rows=rows)


def _paper_cell(group: Group, variant: str, *, grey: bool) -> Cell:
    found = paper_cell(group.key.suite, group.key.preset, variant)
    return Cell(text=DASH if found is None else f"{found.perplexity:.2f}", grey=grey)
