"""A document as Markdown, for GitHub and for docs/results.md."""

from __future__ import annotations

import re
from collections.abc import Sequence

from airmoe.experiments.report.document import (
    Block,
    Bullets,
    Cell,
    Details,
    Document,
    Heading,
    Paragraph,
    Pictures,
    Table,
)

SPECIAL = re.compile(r"([\\`*_\[\]<>|#~$])")


def markdown(document: Document) -> str:
    return f"# {escaped(document.title)}\n\n{markdown_blocks(document.blocks)}\n"


def markdown_blocks(blocks: Sequence[Block]) -> str:
    """A part of a page."""
    return "\n\n".join(_block(block) for block in blocks)


def escaped(text: str) -> str:
    """Text that means itself, in a table too."""
    return SPECIAL.sub(r"\\\1", " ".join(text.split())).replace("&", "&amp;")


def _block(block: Block) -> str:
    match block:
        case Heading(level, text, _):
            return f"{'#' * level} {escaped(text)}"
        case Paragraph(text):
            return escaped(text)
        case Bullets(items):
            return "\n".join(f"- {escaped(item)}" for item in items)
        case Table():
            return _table(block)
        case Pictures(pictures):
            return "\n\n".join(
                f"![{escaped(one.alt)}](figures/{one.name}.svg)\n\n{escaped(one.caption)}"
                for one in pictures
            )
        case Details(summary, blocks):
            inner = "\n\n".join(_block(one) for one in blocks)
            return f"<details><summary>{escaped(summary)}</summary>\n\n{inner}\n\n</details>"


def _table(table: Table) -> str:
    rest = ":---" if table.words else "---:"
    lines = [
        _line([escaped(column) for column in table.columns]),
        _line([":---", *[rest] * (len(table.columns) - 1)]),
        *(_line([_cell(cell) for cell in row]) for row in table.rows),
    ]
    notes = "  \n".join(escaped(note) for note in table.notes)
    return "\n\n".join(filter(None, [escaped(table.caption), "\n".join(lines), notes]))


def _line(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


def _cell(cell: Cell) -> str:
    """Markdown has no grey: the reference is in italics."""
    text = escaped(cell.text)
    text = f"**{text}**" if cell.bold else f"*{text}*" if cell.grey and text else text
    return text + cell.mark
