"""Committed records -> docs/results.md, its figures and the README's table: `make results`.

Numbers are never typed: the templates beside this file name them, and a test compares. Figures need
the extra `plot`.
"""

from __future__ import annotations

import shutil
from dataclasses import replace
from pathlib import Path
from typing import Any

from airmoe.experiments.report import tables
from airmoe.experiments.report.drawing import Drawing
from airmoe.experiments.report.groups import Group, machines, text_of, torch_versions
from airmoe.experiments.report.paper import paper_perplexity, paper_runs
from airmoe.experiments.report.reading import read_all
from airmoe.experiments.report.rendering import Report, environment, make_report, with_part
from airmoe.experiments.report.tables import DASH, Cell, Table, variant_table

ROOT = Path(__file__).parents[1]
RECORDS = Path("results", "wikipedia")
FIGURES = Path("docs", "figures", "results")
SHOWN = ("perplexity-seconds", "perplexity-flops", "reduction", "overlap", "dead-experts", "usage")
PART = "quality"  # of the README
README_COLUMNS = (tables.PERPLEXITY, tables.FLOPS, tables.SECONDS, tables.DEAD, tables.OVERLAP)


def figures(report: Report) -> dict[str, list[Drawing]]:
    """Those of the page, each in a list of its own, under the end of its name."""
    slug = report.sections[0].group.slug
    named = {one.name.removeprefix(f"{slug}-"): one for one in report.drawings}
    return {name: [replace(named[name], name=name)] if name in named else [] for name in SHOWN}


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
    """Write page, README and figures as they should be."""
    report = make_report(read_all([root / RECORDS]))
    found, templates = figures(report), environment(ROOT / "docs")
    section = report.sections[0]
    group, (_, tokens) = section.group, paper_runs(section.group.preset)
    context: dict[str, Any] = {variant: runs[0] for variant, runs in group.variants.items()}
    page = templates.get_template("results.md.j2").render(**context, section=section, figures=found)
    block = templates.get_template("readme_results.md.j2").render(
        group=group,
        first=group.runs[0],
        text=text_of(group.runs[0])[0],
        machines=machines(group.runs),
        torch=torch_versions(group.runs),
        paper_tokens=tokens,
        readme=readme_table(group),
    )
    readme = root / "README.md"
    text = with_part(readme.name, readme.read_text(encoding="utf-8"), PART, block.strip())
    readme.write_text(text, encoding="utf-8")
    (root / "docs" / "results.md").write_text(page, encoding="utf-8")
    shutil.rmtree(root / FIGURES, ignore_errors=True)
    (root / FIGURES).mkdir(parents=True)
    drawings = [drawing for drawings in found.values() for drawing in drawings]
    for drawing in drawings:
        (root / FIGURES / f"{drawing.name}.svg").write_text(drawing.svg, encoding="utf-8")
    print(f"docs/results.md, README.md and {len(drawings)} figures")


if __name__ == "__main__":
    main()
