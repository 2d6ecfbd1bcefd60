"""Committed result files -> docs/results.md and its figures: `python docs/draw_results.py`.

Reads results/*/report.json, which `airmoe report` wrote. Numbers are never typed by hand: a test
compares. Figures need the extra `plot`.
"""

from __future__ import annotations

import shutil
from pathlib import Path

from airmoe.experiments.report.contents import Report, make_report
from airmoe.experiments.report.document import Document, Paragraph
from airmoe.experiments.report.markdown import markdown
from airmoe.experiments.report.reading import read_all

ROOT = Path(__file__).parents[1]
RESULTS = ROOT / "results"
PAGE = ROOT / "docs" / "results.md"
FIGURES = ROOT / "docs" / "figures" / "results"
REPEAT = (
    "Made from results/*/report.json by docs/draw_results.py. The tiny runs are those of make "
    "report: short ones on a CPU, to see that everything works, not to rank methods. How to read "
    "tables and figures: report.md."
)


def report() -> Report:
    """Everything committed, as one report."""
    return make_report(read_all(sorted(RESULTS.glob("*/report.json"))))


def page(made: Report) -> str:
    """The Markdown of docs/results.md."""
    document = Document("Results", [Paragraph(REPEAT), *made.document.blocks])
    return markdown(document).replace("](figures/", "](figures/results/")


def main() -> None:
    made = report()
    PAGE.write_text(page(made), encoding="utf-8")
    shutil.rmtree(FIGURES, ignore_errors=True)
    FIGURES.mkdir(parents=True)
    for drawing in made.drawings:
        (FIGURES / f"{drawing.picture.name}.svg").write_text(drawing.svg, encoding="utf-8")
    print(PAGE.relative_to(ROOT), f"and {len(made.drawings)} figures")


if __name__ == "__main__":
    main()
