"""A document as one HTML page that needs nothing else: styles, script and figures are inside."""

from __future__ import annotations

from collections.abc import Mapping
from html import escape
from pathlib import Path

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

HERE = Path(__file__).parent
# Nothing may be fetched, even if an escape were forgotten.
POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'unsafe-inline'"


def html(document: Document, drawings: Mapping[str, str]) -> str:
    """The page; `drawings` are the SVG elements by the names of the pictures."""
    style = (HERE / "page.css").read_text(encoding="utf-8")
    script = (HERE / "page.js").read_text(encoding="utf-8")
    body = "\n".join(_block(block, drawings) for block in document.blocks)
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="{POLICY}">
<meta name="viewport" content="width=device-width, initial-scale=1">
<link rel="icon" href="data:,">
<title>{escape(document.title)}</title>
<style>
{style}</style>
</head>
<body>
<header><h1>{escape(document.title)}</h1></header>
{_contents(document)}
<main>
{body}
</main>
<script>
{script}</script>
</body>
</html>
"""


def _contents(document: Document) -> str:
    links = "\n".join(
        f'<li><a href="#{escape(block.anchor)}">{escape(block.text)}</a></li>'
        for block in document.blocks
        if isinstance(block, Heading) and block.level == 2
    )
    return f'<nav aria-label="Contents"><ul>\n{links}\n</ul></nav>'


def _block(block: Block, drawings: Mapping[str, str]) -> str:
    match block:
        case Heading(level, text, anchor):
            return f'<h{level} id="{escape(anchor)}">{escape(text)}</h{level}>'
        case Paragraph(text):
            return f"<p>{escape(text)}</p>"
        case Bullets(items):
            return f"<ul>{''.join(f'<li>{escape(item)}</li>' for item in items)}</ul>"
        case Table():
            return _table(block)
        case Pictures(pictures):
            inner = "\n".join(_picture(one, drawings[one.name]) for one in pictures)
            return f'<div class="figures">\n{inner}\n</div>'
        case Details(summary, blocks):
            inner = "\n".join(_block(one, drawings) for one in blocks)
            return f"<details><summary>{escape(summary)}</summary>\n{inner}\n</details>"


def _table(table: Table) -> str:
    """In a box that scrolls by itself; headings are buttons that sort."""
    heads = "".join(
        f'<th scope="col" aria-sort="none"><button type="button">{escape(column)}</button></th>'
        for column in table.columns
    )
    rows = "\n".join(
        f"<tr>{''.join(_cell(cell, first=not index) for index, cell in enumerate(row))}</tr>"
        for row in table.rows
    )
    notes = "".join(f'<p class="note">{escape(note)}</p>' for note in table.notes)
    kind = "words" if table.words else "numbers"
    label = escape(table.caption)
    return (
        f'<p class="caption">{label}</p>\n'
        f'<div class="scroll" role="region" tabindex="0" aria-label="{label}">\n'
        f'<table class="{kind}" aria-label="{label}">\n<thead><tr>{heads}</tr></thead>\n'
        f"<tbody>\n{rows}\n</tbody>\n</table>\n</div>{notes}"
    )


def _cell(cell: Cell, *, first: bool) -> str:
    tag, scope = ("th", ' scope="row"') if first else ("td", "")
    value = "" if cell.value is None else f' data-value="{cell.value!r}"'
    grey = ' class="reference"' if cell.grey else ""
    text = f"<strong>{escape(cell.text)}</strong>" if cell.bold else escape(cell.text)
    mark = f"<sup>{escape(cell.mark)}</sup>" if cell.mark else ""
    return f"<{tag}{scope}{grey}{value}>{text}{mark}</{tag}>"


def _picture(picture: Picture, drawing: str) -> str:
    wide = ' class="wide"' if picture.wide else ""
    return (
        f'<figure id="figure-{escape(picture.name)}"{wide}>\n{drawing}\n'
        f"<figcaption>{escape(picture.caption)}</figcaption>\n</figure>"
    )
