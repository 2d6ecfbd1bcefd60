"""Ledgers as tables: one in detail, or several side by side."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rich.table import Table

from airmoe.metrics.flops.ledger import COLUMNS, PARTS, Cost, Ledger

MILLION = 1e6
UNITS = {1e18: "E", 1e15: "P", 1e12: "T"}


def detailed_table(title: str, ledger: Ledger, tokens: int | None) -> Table:
    """Parts of one ledger, forward and backward, in both columns."""
    table = _table(f"{title}: M FLOP per token", "part")
    for column in COLUMNS:
        for name in (f"{column}\nforward", "\nbackward", "\ntotal"):
            table.add_column(name, justify="right")
    for part in ledger.parts():
        table.add_row(part, *_cells(*(ledger.cost(column, part) for column in COLUMNS)))
    table.add_section()
    table.add_row("all", *_cells(*(ledger.cost(column) for column in COLUMNS)))
    if tokens is not None:
        runs = [_scaled(ledger.run(tokens, column)) for column in COLUMNS]
        table.add_row(_run_label(tokens), "", "", runs[0], "", "", runs[1])
    return table


def side_by_side(title: str, ledgers: Mapping[str, Ledger], tokens: int | None) -> Iterator[Table]:
    """A table for each column: parts down, methods across."""
    there = {part for ledger in ledgers.values() for part in ledger.parts()}
    for column in COLUMNS:
        table = _table(f"{title}, {column}: M FLOP per token", "part")
        for method in ledgers:
            table.add_column(method, justify="right")
        for part in filter(there.__contains__, PARTS):
            costs = [ledger.cost(column, part) for ledger in ledgers.values()]
            table.add_row(part, *(_million(cost.total) if cost.total else "-" for cost in costs))
        table.add_section()
        totals = (ledger.cost(column).total for ledger in ledgers.values())
        table.add_row("all", *(_million(total) for total in totals))
        if tokens is not None:
            runs = (_scaled(ledger.run(tokens, column)) for ledger in ledgers.values())
            table.add_row(_run_label(tokens), *runs)
        yield table


def _table(title: str, first: str) -> Table:
    table = Table(title=title, title_justify="left")
    table.add_column(first)
    return table


def _cells(*costs: Cost) -> Iterator[str]:
    for cost in costs:
        yield from (_million(cost.forward), _million(cost.backward), _million(cost.total))


def _million(flops: float) -> str:
    return f"{flops / MILLION:,.3f}"


def _scaled(flops: float) -> str:
    """With a unit, as the paper writes totals: 324.1 P."""
    unit = next((unit for unit in UNITS if flops >= unit), min(UNITS))
    return f"{flops / unit:,.1f} {UNITS[unit]}"


def _run_label(tokens: int) -> str:
    return f"run of {tokens:,} tokens"
