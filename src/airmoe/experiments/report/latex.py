r"""A document as LaTeX: pdflatex, with packages that every distribution has."""

from __future__ import annotations

import unicodedata

from airmoe.experiments.report.document import (
    Block,
    Bullets,
    Cell,
    Details,
    Document,
    Heading,
    Paragraph,
    Picture,
    Pictures,
    Table,
)

ESCAPES = str.maketrans(
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
        "§": r"\S{}",
    }
)
# What T1 fonts have besides ASCII; anything else stops pdflatex.
SETTABLE = frozenset(
    "ÀÁÂÃÄÅÆÇÈÉÊËÌÍÎÏÐÑÒÓÔÕÖØÙÚÛÜÝÞßàáâãäåæçèéêëìíîïðñòóôõöøùúûüýþÿ"
    "ĂăĄąĆćČčĎďĐđĘęĚěĞğİıĹĺĽľŁłŃńŇňŊŋŐőŒœŔŕŘřŚśŞşŠšŢţŤťŮůŰűŸŹźŻżŽž‘’“”—"
)
LONG_WORD = 32
SECTIONS = {2: "section", 3: "subsection"}
HEAD = r"""\documentclass{article}
\usepackage[T1]{fontenc}
\usepackage[margin=2cm]{geometry}
\usepackage{booktabs,float,graphicx,longtable,xcolor}
\begin{document}
"""


def latex(document: Document) -> str:
    title = f"\\title{{{escaped(document.title)}}}\n\\date{{}}\n\\maketitle"
    body = "\n\n".join([title, *(_block(block) for block in document.blocks)])
    return f"{HEAD}{body}\n\\end{{document}}\n"


def escaped(text: str) -> str:
    words = unicodedata.normalize("NFC", " ".join(text.split()))
    return "".join(map(_settable, words)).translate(ESCAPES)


def _settable(character: str) -> str:
    """The character, or its number where pdflatex knows no glyph for it."""
    ascii_glyph = character.isascii() and character.isprintable()
    if ascii_glyph or character in SETTABLE or ord(character) in ESCAPES:
        return character
    return f"U+{ord(character):04X}"


def _block(block: Block) -> str:
    match block:
        case Heading(level, text, _):
            return f"\\{SECTIONS.get(level, 'paragraph')}{{{escaped(text)}}}"
        case Paragraph(text):
            return escaped(text)
        case Bullets(items):
            listed = "\n".join(f"\\item {escaped(item)}" for item in items)
            return f"\\begin{{itemize}}\n{listed}\n\\end{{itemize}}"
        case Table():
            return _word_table(block) if block.words else _number_table(block)
        case Pictures(pictures):
            return "\n\n".join(_picture(one) for one in pictures)
        case Details(summary, blocks):
            inner = "\n\n".join(_block(one) for one in blocks)
            return f"\\paragraph{{{escaped(summary)}}}\n\n{inner}"


def _number_table(table: Table) -> str:
    """Shrunk to the page where it is wider, never enlarged."""
    columns = "l" + "r" * (len(table.columns) - 1)
    rows = "\n".join(_row([_cell(cell) for cell in row]) for row in table.rows)
    head = _row([_stacked(column) for column in table.columns])
    notes = "".join(f"\n\n{{\\footnotesize {escaped(note)}}}" for note in table.notes)
    return (
        f"\\begin{{table}}[H]\n\\centering\n\\caption{{{escaped(table.caption)}}}\n"
        f"\\sbox0{{\\begin{{tabular}}{{{columns}}}\n\\toprule\n{head}\n\\midrule\n{rows}\n"
        "\\bottomrule\n\\end{tabular}}\n"
        "\\ifdim\\wd0>\\textwidth\\resizebox{\\textwidth}{!}{\\usebox0}\\else\\usebox0\\fi"
        f"{notes}\n\\end{{table}}"
    )


def _word_table(table: Table) -> str:
    """One pair of setting and value per line; a table of many columns is turned on its side."""
    if len(table.columns) == 2:
        return _pairs(table.caption, [[cell.text for cell in row] for row in table.rows])
    names = [row[0].text for row in table.rows]
    pairs = [
        [f"{column}, {name}", row[index].text]
        for index, column in enumerate(table.columns)
        if index
        for name, row in zip(names, table.rows, strict=True)
    ]
    return _pairs(table.caption, pairs)


def _pairs(caption: str, pairs: list[list[str]]) -> str:
    rows = "\n".join(_row([_breakable(text) for text in pair]) for pair in pairs)
    return (
        "{\\footnotesize\\begin{longtable}{p{0.55\\textwidth}p{0.4\\textwidth}}\n"
        f"\\caption{{{escaped(caption)}}}\\\\\n\\toprule\n{rows}\n\\bottomrule\n\\end{{longtable}}}}"
    )


def _breakable(text: str) -> str:
    """Hashes have no place where a line could end."""
    words = []
    for word in text.split():
        pieces = [word[at : at + LONG_WORD] for at in range(0, len(word), LONG_WORD)]
        words.append(r"\allowbreak ".join(escaped(piece) for piece in pieces))
    return " ".join(words)


def _stacked(title: str) -> str:
    """A heading of several lines: at commas and before units."""
    parts = title.replace(" (", "\n(").replace(", ", ",\n").split("\n")
    if len(parts) == 1:
        return escaped(title)
    inner = r" \\ ".join(escaped(part) for part in parts)
    return f"\\begin{{tabular}}[b]{{@{{}}r@{{}}}}{inner}\\end{{tabular}}"


def _row(cells: list[str]) -> str:
    return " & ".join(cells) + r" \\"


def _cell(cell: Cell) -> str:
    text = escaped(cell.text)
    if cell.bold:
        text = f"\\textbf{{{text}}}"
    if cell.grey:
        text = f"\\textcolor{{gray}}{{{text}}}"
    return f"{text}{escaped(cell.mark)}"


def _picture(picture: Picture) -> str:
    return (
        "\\begin{figure}[H]\n\\centering\n"
        f"\\includegraphics[width=0.7\\textwidth]{{figures/{picture.name}.pdf}}\n"
        f"\\caption{{{escaped(picture.caption)}}}\n\\end{{figure}}"
    )
