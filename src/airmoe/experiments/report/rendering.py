"""A report as HTML, Markdown and LaTeX: Jinja templates, each with the escapes of its format."""

from __future__ import annotations

import re
import unicodedata
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from airmoe.errors import ConfigError, visible
from airmoe.experiments.report.contents import Report
from airmoe.experiments.report.tables import Cell

TEMPLATES = Path(__file__).parent / "templates"
FORMATS = ("md", "tex", "html")
MARKDOWN_SPECIAL = re.compile(r"([\\`*_\[\]<>|#~$])")
TEX = str.maketrans(
    {
        "\\": r"\textbackslash{}",
        "{": r"\{",
        "}": r"\}",
        "$": r"\$",
        "&": r"\&",
        "#": r"\#",
        "%": r"\%",
        "_": r"\_",
        "^": r"\textasciicircum{}",
        "~": r"\textasciitilde{}",
        "<": r"\textless{}",
        ">": r"\textgreater{}",
        "|": r"\textbar{}",
        '"': r"\textquotedbl{}",
        "±": r"$\pm$",
        "×": r"$\times$",
        "−": r"$-$",
        "√": r"$\surd$",
        "–": "--",
        "†": r"$\dagger$",
        "‡": r"$\ddagger$",
    }
)
# What T1 fonts have besides ASCII; anything else stops pdflatex.
TEX_LETTERS = frozenset(
    "ÀÁÂÃÄÅÆÇÈÉÊËÌÍÎÏÐÑÒÓÔÕÖØÙÚÛÜÝÞßàáâãäåæçèéêëìíîïðñòóôõöøùúûüýþÿ"
    "ĂăĄąĆćČčĎďĐđĘęĚěĞğİıĹĺĽľŁłŃńŇňŊŋŐőŒœŔŕŘřŚśŞşŠšŢţŤťŮůŰűŸŹźŻżŽž‘’“”—"
)
LONGEST_WORD = 32  # a hash has no place to break a line


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
    filters: dict[str, Any] = {
        "md": markdown,
        "md_cell": markdown_cell,
        "tex": tex,
        "tex_cell": tex_cell,
        "tex_head": tex_head,
        "breakable": breakable,
    }
    made.filters.update(filters)
    return made


def markdown(text: str) -> str:
    """Text escaped for Markdown, in tables and on a terminal too."""
    words = visible(" ".join(text.split()))
    return MARKDOWN_SPECIAL.sub(r"\\\1", words).replace("&", "&amp;")


def markdown_cell(cell: Cell) -> str:
    """Markdown has no grey: the reference is in italics."""
    text = markdown(cell.text)
    text = f"**{text}**" if cell.bold else f"*{text}*" if cell.grey and text else text
    return text + cell.mark


def tex(text: str) -> str:
    """Text escaped for LaTeX; a character without a glyph becomes its number."""
    words = unicodedata.normalize("NFC", " ".join(text.split()))
    return "".join(map(_settable, words)).translate(TEX)


def _settable(character: str) -> str:
    ascii_glyph = character.isascii() and character.isprintable()
    if ascii_glyph or character in TEX_LETTERS or ord(character) in TEX:
        return character
    return f"U+{ord(character):04X}"


def breakable(text: str) -> str:
    """LaTeX that may break long words."""
    words = []
    for word in text.split():
        pieces = [word[at : at + LONGEST_WORD] for at in range(0, len(word), LONGEST_WORD)]
        words.append(r"\allowbreak ".join(tex(piece) for piece in pieces))
    return " ".join(words)


def tex_cell(cell: Cell) -> str:
    """Bold or grey, with the mark of its footnote."""
    text = tex(cell.text)
    if cell.bold:
        text = f"\\textbf{{{text}}}"
    if cell.grey:
        text = f"\\textcolor{{gray}}{{{text}}}"
    return text + tex(cell.mark)


def tex_head(title: str) -> str:
    """A heading of several lines, broken at commas and before units: tables are wide."""
    parts = title.replace(" (", "\n(").replace(", ", ",\n").split("\n")
    if len(parts) == 1:
        return tex(title)
    inner = r" \\ ".join(tex(part) for part in parts)
    return f"\\begin{{tabular}}[b]{{@{{}}r@{{}}}}{inner}\\end{{tabular}}"
