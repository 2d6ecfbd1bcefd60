"""A report before it has a format: headings, paragraphs, tables, figures. Texts are plain."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True, kw_only=True)
class Cell:
    """Text of a table, with the number to sort by."""

    text: str
    value: float | None = None
    bold: bool = False  # the best of its column
    grey: bool = False  # a reference, out of competition
    mark: str = ""  # of a footnote


@dataclass(frozen=True, kw_only=True)
class Table:
    """The first column holds names, the others numbers unless `words`."""

    caption: str
    columns: list[str]
    rows: list[list[Cell]]
    notes: list[str] = field(default_factory=list)
    words: bool = False


@dataclass(frozen=True, kw_only=True)
class Picture:
    """A figure by the name of its file, without ending."""

    name: str
    caption: str
    alt: str
    wide: bool = False  # of several panels: wants the room of two


@dataclass(frozen=True)
class Heading:
    level: int
    text: str
    anchor: str


@dataclass(frozen=True)
class Paragraph:
    text: str


@dataclass(frozen=True)
class Bullets:
    items: list[str]


@dataclass(frozen=True)
class Pictures:
    """Figures side by side where there is room."""

    pictures: list[Picture]


@dataclass(frozen=True)
class Details:
    """Folded away until wanted."""

    summary: str
    blocks: list[Block]


Block = Heading | Paragraph | Bullets | Table | Pictures | Details


@dataclass(frozen=True)
class Document:
    title: str
    blocks: list[Block]
