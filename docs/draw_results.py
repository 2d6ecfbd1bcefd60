"""Committed records -> docs/results.md, its figures and the README's table: `make results`.

Numbers are never typed: the templates beside this file name them, and a test compares. Figures need
the extra `plot`.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from airmoe.experiments.report import metrics
from airmoe.experiments.report.drawing import Drawing
from airmoe.experiments.report.groups import Group, machines, text_of, torch_versions
from airmoe.experiments.report.metrics import DASH
from airmoe.experiments.report.paper import paper_perplexity, paper_runs
from airmoe.experiments.report.reading import read_all
from airmoe.experiments.report.record import Run
from airmoe.experiments.report.rendering import Report, environment, make_report, with_part
from airmoe.experiments.report.tables import Cell, Table, variant_table

ROOT = Path(__file__).parents[1]
RECORDS = Path("results", "wikipedia")
FIGURES = Path("docs", "figures", "results")
SHOWN = ("perplexity-seconds", "perplexity-flops", "reduction", "overlap", "dead-experts", "usage")
PART = "quality"  # of the README
README_COLUMNS = (metrics.PERPLEXITY, metrics.FLOPS, metrics.SECONDS, metrics.DEAD, metrics.OVERLAP)


@dataclass(frozen=True)
class Made:
    """What the records give."""

    page: str
    readme: str
    figures: list[Drawing]


def make(root: Path = ROOT) -> Made:
    """Page, README and figures, as they should be."""
    report = make_report(read_all([root / RECORDS]))
    found = figures(report)
    templates = environment(ROOT / "docs")
    section = report.sections[0]
    context: dict[str, Any] = {variant: runs[0] for variant, runs in section.group.variants.items()}
    page = templates.get_template("results.md.j2").render(
        **context,
        section=section,
        figures=found,
        minutes=minutes,
        per_cent=per_cent,
        perplexity=perplexity,
    )
    block = templates.get_template("readme_results.md.j2").render(
        about=about(section.group), readme=readme_table(section.group)
    )
    text = (root / "README.md").read_text(encoding="utf-8")
    readme = with_part("README.md", text, PART, block.strip())
    return Made(page, readme, [one for drawings in found.values() for one in drawings])


def figures(report: Report) -> dict[str, list[Drawing]]:
    """Those of the page, each in a list of its own, under the end of its name."""
    slug = report.sections[0].group.slug
    named = {one.name.removeprefix(f"{slug}-"): one for one in report.drawings}
    return {name: [replace(named[name], name=name)] if name in named else [] for name in SHOWN}


def minutes(run: Run) -> str:
    return f"{(run.best['seconds'] or 0.0) / 60:.1f} min"


def per_cent(share: float) -> str:
    return f"{100 * share:.1f} %"


def perplexity(run: Run) -> str:
    return f"{run.perplexity:.2f}"


def about(group: Group) -> str:
    """What all rows have in common."""
    first, (_, tokens) = group.runs[0], paper_runs(group.key.preset)
    seeds = sorted({run.seed for run in group.runs})
    parts = [
        f"Preset {group.key.preset}",
        text_of(first)[0],
        f"{first.tokens:,} tokens",
        f"seed {', '.join(map(str, seeds))}",
        first.config["training"]["precision"],
        " or ".join(machines(group.runs)),
        f"torch {' or '.join(torch_versions(group.runs))}",
    ]
    share = 100 * first.tokens / tokens
    return (
        f"{', '.join(parts)}. Perplexities are per token; the paper's are those of WikiText-103 "
        f"after {tokens:,} tokens, ours had {share:.3g} % of that."
    )


def readme_table(group: Group) -> Table:
    """Seven columns: without the seeds, which stand above it, and with the paper's perplexity."""
    table = variant_table(group, README_COLUMNS, "")
    method, _, ours, *others = table.columns
    rows = []
    for variant, (name, _, perplexity, *rest) in zip(group.variants, table.rows, strict=True):
        found = paper_perplexity(group, variant)
        paper = Cell(text=DASH if found is None else f"{found:.2f}", grey=name.grey)
        rows.append([name, perplexity, paper, *rest])
    return replace(table, columns=[method, ours, "the paper's", *others], rows=rows)


def main(root: Path = ROOT) -> None:
    made = make(root)
    (root / "docs" / "results.md").write_text(made.page, encoding="utf-8")
    (root / "README.md").write_text(made.readme, encoding="utf-8")
    shutil.rmtree(root / FIGURES, ignore_errors=True)
    (root / FIGURES).mkdir(parents=True)
    for drawing in made.figures:
        (root / FIGURES / f"{drawing.name}.svg").write_text(drawing.svg, encoding="utf-8")
    print(f"docs/results.md, README.md and {len(made.figures)} figures")


if __name__ == "__main__":
    main()
