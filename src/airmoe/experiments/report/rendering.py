"""A report: a section per group of runs, then what was left out and why; and its files.

HTML, Markdown and LaTeX come from Jinja templates, which decide the order and the words around it.
"""

from __future__ import annotations

import importlib.util
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from airmoe.errors import ConfigError, visible
from airmoe.experiments.report.granularity import fit_in_words
from airmoe.experiments.report.groups import Group, group_runs, settings_of
from airmoe.experiments.report.paper import Beside, beside_paper, claims_table
from airmoe.experiments.report.reading import REPORT, read_all
from airmoe.experiments.report.record import Record, Run, read_record, write_record
from airmoe.experiments.report.tables import Cell, Table, group_table, settings_table
from airmoe.files import write_bytes

if TYPE_CHECKING:
    from airmoe.experiments.report.drawing import Drawing

TEMPLATES = Path(__file__).parent / "templates"
FORMATS = ("md", "tex", "html")
MARKDOWN_SPECIAL = re.compile(r"([\\`*_\[\]<>|#~$])")
TEX = {one: f"\\{one}" for one in "&%$#_{}"}
TEX |= {"~": r"\textasciitilde{}", "^": r"\textasciicircum{}", "\\": r"\textbackslash{}"}
# They change no result, and `auto` stands for another value on another machine.
SPEED_ONLY = ("training.compile", "training.cuda_graph")
SINGLE = "single"  # the folder of records of runs of no suite

NO_FIGURES = (
    "Figures: left out, because matplotlib is not installed. Run: pip install 'airmoe[plot]'"
)


@dataclass(frozen=True, kw_only=True)
class Section:
    """Everything about the runs of one table; parts that a group lacks are None or empty."""

    group: Group
    claims: Table | None
    table: Table
    fit: str | None  # of the granularity suite
    paper: Beside | None
    figures: dict[str, list[Drawing]]  # title -> those that belong together
    settings: Table


@dataclass(frozen=True, kw_only=True)
class Report:
    """Ready to be written in any format."""

    sections: list[Section]
    left_out: list[str]
    notes: list[str]

    @property
    def drawings(self) -> list[Drawing]:
        parts = (part for section in self.sections for part in section.figures.values())
        return [drawing for part in parts for drawing in part]

    @property
    def problems(self) -> list[str]:
        """Everything a reader must know, a line each."""
        return [*self.left_out, *self.notes]


@dataclass(frozen=True)
class Written:
    """The files that were written, and what a reader must know about them."""

    files: list[Path]  # without the figures
    runs: int
    problems: list[str]


def write_report(
    paths: Sequence[Path], out: Path | None = None, records: Path | None = None
) -> Written:
    """Report on everything under `paths`, in `out` or else in or beside the first of them.

    `records`: a folder that gets a file per run too.
    """
    record = read_all(paths)
    planned = {} if records is None else plan_records(record.runs, records)
    report = make_report(record)
    folder = out or default_folder(paths)
    figures = folder / "figures"
    (figures if report.drawings else folder).mkdir(parents=True, exist_ok=True)
    for drawing in report.drawings:
        write_bytes(figures / f"{drawing.name}.svg", drawing.svg.encode())
        write_bytes(figures / f"{drawing.name}.pdf", drawing.pdf)
    texts = {f"report.{ending}": render(report, ending) for ending in FORMATS}
    for name, text in texts.items():
        write_bytes(folder / name, text.encode(errors="backslashreplace"))  # records hold any text
    write_record(record, folder / REPORT)
    for path, run in planned.items():
        write_record(Record(runs=[run], problems=[]), path)
    files = [*(folder / name for name in (*texts, REPORT)), *planned]
    return Written(files, len(record.runs), report.problems)


def make_report(record: Record) -> Report:
    """Compare the runs of a record and draw them."""
    grouped, draws = group_runs(record.runs), can_draw()
    sections = [
        Section(
            group=group,
            claims=claims_table(group),
            table=group_table(group),
            fit=fit_in_words(group),
            paper=beside_paper(group),
            figures=_figures(group) if draws else {},
            settings=settings_table(group),
        )
        for group in grouped.groups
    ]
    left_out = [*record.problems, *grouped.left_out, *([] if draws else [NO_FIGURES])]
    return Report(sections=sections, left_out=left_out, notes=grouped.notes)


def can_draw() -> bool:
    return importlib.util.find_spec("matplotlib") is not None


def _figures(group: Group) -> dict[str, list[Drawing]]:
    from airmoe.experiments.report.figures import figures_of

    return figures_of(group)


def default_folder(paths: Sequence[Path]) -> Path:
    """`report/` in the first path that exists; where a report.json is, it is replaced."""
    first = next(path for path in paths if path.exists())
    if first.is_file():
        return first.parent if first.name == REPORT else first.parent / "report"
    return first / "report"


def plan_records(runs: Sequence[Run], folder: Path) -> dict[Path, Run]:
    """The file of each run; raises if two runs would share one, or if it holds another run."""
    planned: dict[Path, Run] = {}
    for run in runs:
        path = folder / (run.suite or SINGLE) / f"{Path(run.name).name}.json"
        before = read_record(path).runs if path.exists() else []
        for other in (*before, planned.setdefault(path, run)):
            if identity(other) != identity(run):
                rule = f"cannot take {run.name}: {other.name} has that name too, another run"
                remedy = "Rename one of the run folders, or give another folder for the records."
                raise ConfigError("records", str(path), rule, remedy)
    return planned


def identity(run: Run) -> tuple[Any, ...]:
    """What a repeated run has in common with the one before, whose record it may replace."""
    settings = settings_of(run, ignored=SPEED_ONLY)
    return run.suite, run.variant, run.seed, settings, run.data_sha256


def render(report: Report, ending: str) -> str:
    """The page of one format."""
    return environment(TEMPLATES).get_template(f"report.{ending}.j2").render(report=report)


def with_part(file: str, page: str, name: str, text: str) -> str:
    """The page of a file, with what is between `<!-- NAME: start -->` and its end replaced."""
    start, end = f"<!-- {name}: start -->", f"<!-- {name}: end -->"
    before, found, rest = page.partition(start)
    _, found_end, after = rest.partition(end)
    if not (found and found_end):
        rule = f"must have the lines {start} and {end}, in this order"
        raise ConfigError("page", file, rule, "Add them where the part belongs.")
    return f"{before}{start}\n{text}\n{end}{after}"


def environment(folder: Path) -> Environment:
    """Templates of a folder; HTML escapes by itself, the others with the filters `md` and `tex`."""
    made = Environment(
        loader=FileSystemLoader([folder, TEMPLATES]),
        autoescape=lambda name: name is not None and name.endswith(".html.j2"),
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
        keep_trailing_newline=True,
    )
    made.filters.update(md=markdown, md_cell=markdown_cell, tex=tex, tex_cell=tex_cell)
    return made


def markdown(text: str) -> str:
    """Text escaped for Markdown, in tables and on a terminal too."""
    words = visible(" ".join(text.split()))
    return MARKDOWN_SPECIAL.sub(r"\\\1", words).replace("&", "&amp;")


def tex(text: str) -> str:
    """Text escaped for LaTeX."""
    return "".join(TEX.get(one, one) for one in text)


def markdown_cell(cell: Cell) -> str:
    return _marked(cell, markdown(cell.text), "**{}**", "*{}*")


def tex_cell(cell: Cell) -> str:
    return _marked(cell, tex(cell.text), r"\textbf{{{}}}", r"\textit{{{}}}")


def _marked(cell: Cell, text: str, bold: str, italic: str) -> str:
    """The best is bold; the reference is in italics, because neither format has grey."""
    form = bold if cell.bold else italic if cell.grey else "{}"
    return form.format(text) + cell.mark
