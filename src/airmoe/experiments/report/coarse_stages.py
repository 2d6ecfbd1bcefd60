"""Studies of `airmoe recall` as blocks of a report: a table per layer, a row per coarse stage."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table as ConsoleTable

from airmoe.experiments.recall_study.record import (
    LayerRows,
    RecallStudy,
    Row,
    Stage,
    batch_tokens,
)
from airmoe.experiments.report.corpora import corpus_title
from airmoe.experiments.report.document import Block, Cell, Heading, Paragraph, Table
from airmoe.experiments.report.metrics import DASH
from airmoe.experiments.suites.recall import PER_CANDIDATE

TITLES: dict[Stage, str] = {
    "own": "own codebook",
    "fitted": "fitted codebook",
    "pooled_spread": "ranked by chance, pooled",
    "cell_spread": "ranked by chance, per cell",
    "used": "ranked by use",
    "used_batch": "ranked by use, one batch's tokens",
}
NOTES = [
    "Fitted: spherical k-means on training states; its lists are ranked by the codeword, as AIR's. "
    "Other lists of the same cells are ranked by chance, that a token has the expert among its K "
    "best if scores are normal around the cell's mean state, with one covariance for all cells "
    "(pooled) or variances of each; or by use, how many training tokens of the cell have it there "
    "(one batch's: a sigmoid over the first so many). On the tokens it is made from no other list "
    "per cell holds more than the one by use: with many tokens per cell it shows about the most "
    "that a ranking can give on other text.",
    "A dash in products: what building such lists would cost has not been worked out; or the own "
    "codebook is static, which saves the update that these costs hold.",
]


def study_blocks(studies: Sequence[RecallStudy]) -> list[Block]:
    """A section per study."""
    blocks: list[Block] = []
    for number, study in enumerate(studies, 1):
        title = f"What other coarse stages would find: {study.run}"
        blocks += [Heading(2, title, f"recall-{number}"), Paragraph(_about(study))]
        for one in study.layers:
            blocks.append(layer_table(study, one))
    return blocks


def _about(study: RecallStudy) -> str:
    text = f"{corpus_title(study)}, data hash {study.data_sha256[:12]}"
    where = f"{study.machine.get('device')}, torch {study.versions.get('torch')}"
    return (
        f"Measured in the trained model ({study.checkpoint}, preset {study.settings.preset}): "
        "other codebooks and lists in front of the same experts, none of them trained. Experts "
        "would follow a router that is trained: this shows what is worth training, not its result. "
        f"{study.tokens:,} tokens of the validation text, codebooks fitted to {study.fit_tokens:,} "
        f"of the training text: {text}; {where}. "
        f"Repeat with: airmoe recall RUN{_other_text(study)} --fit-tokens {study.fit_tokens} "
        f"--tokens {study.tokens}"
    )


def _other_text(study: RecallStudy) -> str:
    return "" if study.data is None else f" --data {study.data}"


def layer_table(study: RecallStudy, one: LayerRows) -> Table:
    """Sizes of shortlists as columns; everything else at the run's own."""
    per_probe = f"each candidate more costs {PER_CANDIDATE} per probe"
    return Table(
        caption=(
            f"Layer {one.layer}: share of exact routing's {one.top_k:,} experts of "
            f"{one.num_experts:,} that the lists hold (overlap), by length M of a list. The first "
            f"row at M = {one.shortlist_size:,} is the router as it is. Behind it, at that M: "
            "experts in no list, mean cosine of token and nearest codeword, and products of length "
            f"D per training token with lists built every step or every 16 ({per_probe})."
        ),
        columns=[
            *("coarse stage", "codewords", "probes"),
            *(f"M = {size:,}" for size in one.sizes),
            *("unlisted (%)", "cosine", "products", "every 16"),
        ],
        rows=[_cells(rows, one, study.tokens_per_step) for rows in one.stages()],
        notes=[*NOTES, _tokens_per_cell(study, one)],
    )


def _tokens_per_cell(study: RecallStudy, one: LayerRows) -> str:
    num_codewords = one.rows[0].num_codewords
    mean = study.fit_tokens // num_codewords
    return f"Training tokens per cell with {num_codewords:,} codewords: {mean:,} on average."


def _cells(rows: list[Row], layer: LayerRows, tokens_per_step: int) -> list[Cell]:
    """The rows of one stage, by size, as one of a table."""
    by_size = {row.shortlist_size: row for row in rows}
    one = by_size[layer.shortlist_size]
    return [
        Cell(text=_title(one, tokens_per_step)),
        _number(one.num_codewords, "{:,}".format),
        _number(one.probes, str),
        *(_number(by_size[size].overlap, "{:.3f}".format) for size in layer.sizes),
        _number(100 * one.unlisted_experts, "{:.1f}".format),
        _number(one.cosine, "{:.3f}".format),
        _number(one.products_every_step, "{:,.0f}".format),
        _number(one.products_every_16_steps, "{:,.0f}".format),
    ]


def _title(row: Row, tokens_per_step: int) -> str:
    if row.stage != "used_batch":
        return TITLES[row.stage]
    return f"{TITLES[row.stage]} ({batch_tokens(tokens_per_step, row.num_codewords):,})"


def _number(value: float | None, write: Callable[[float], str]) -> Cell:
    return Cell(text=DASH if value is None else write(value), value=value)


def show_study(study: RecallStudy, console: Console) -> None:
    """The same tables on a console."""
    for one in study.layers:
        table = layer_table(study, one)
        shown = ConsoleTable(
            caption=" ".join([table.caption, *table.notes]),
            caption_justify="left",
            box=SIMPLE_HEAD,
            padding=0,  # without a terminal whole headings have room
        )
        for place, title in enumerate(table.columns):
            justify = "right" if place else "left"
            shown.add_column(title, justify=justify, overflow="fold")  # narrow: no digit is lost
        for row in table.rows:
            shown.add_row(*(cell.text for cell in row))
        console.print(shown)
