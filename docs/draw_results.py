"""Committed result files -> docs/results.md, its figures, the README's table:
`python docs/draw_results.py`.

Reads everything under results/, a section per folder: what `airmoe report --records` wrote. A test
compares. Figures need the extra `plot`.
"""

from __future__ import annotations

import shutil
from dataclasses import dataclass, replace
from pathlib import Path

from airmoe.experiments.marked import with_part
from airmoe.experiments.report.contents import INTRODUCTION, Report, make_report
from airmoe.experiments.report.document import Block, Heading, Paragraph
from airmoe.experiments.report.markdown import markdown_blocks
from airmoe.experiments.report.reading import NEVER_RUNS, read_all
from airmoe.experiments.report.readme import readme_block

ROOT = Path(__file__).parents[1]
PART = "quality"  # of the README
ABOUT = (
    "Made by `docs/draw_results.py` from the files in `results/`; `airmoe report results/` makes "
    "one page of them. [How to read tables and figures](report.md)."
)


@dataclass(frozen=True)
class Section:
    """A folder of results/ and its report."""

    name: str
    report: Report

    @property
    def text(self) -> str:
        """Its Markdown."""
        blocks = [_lowered(block) for block in self.report.document.blocks]
        tables = markdown_blocks([one for one in blocks if one != Paragraph(INTRODUCTION)])
        figures = tables.replace("](figures/", f"](figures/results/{self.name}/")
        return f"## {self.name.capitalize()}\n\n{figures}"


def _lowered(block: Block) -> Block:
    """Below the heading of the section."""
    return replace(block, level=block.level + 1) if isinstance(block, Heading) else block


def sections(root: Path = ROOT) -> list[Section]:
    """Everything committed."""
    folders = [path for path in (root / "results").iterdir() if path.is_dir()]
    folders = [path for path in folders if path.name not in NEVER_RUNS]
    return [Section(path.name, make_report(read_all([path]))) for path in sorted(folders)]


def page(made: list[Section]) -> str:
    """The Markdown of docs/results.md."""
    head = ["# Results", ABOUT, markdown_blocks([Paragraph(INTRODUCTION)])]
    return "\n\n".join([*head, *(section.text for section in made)]) + "\n"


def readme(root: Path = ROOT) -> str:
    """The README, as it should read."""
    text = (root / "README.md").read_text(encoding="utf-8")
    return with_part("README.md", text, PART, readme_block(root / "results"))


def main(root: Path = ROOT) -> None:
    made, figures = sections(root), root / "docs" / "figures" / "results"
    pages = {root / "docs" / "results.md": page(made), root / "README.md": readme(root)}
    for file, text in pages.items():  # when both could be made
        file.write_text(text, encoding="utf-8")
    shutil.rmtree(figures, ignore_errors=True)
    for section in made:
        (figures / section.name).mkdir(parents=True)
        for drawing in section.report.drawings:
            file = figures / section.name / f"{drawing.picture.name}.svg"
            file.write_text(drawing.svg, encoding="utf-8")
    count = sum(len(section.report.drawings) for section in made)
    print(f"docs/results.md, README.md and {count} figures")


if __name__ == "__main__":
    main()
