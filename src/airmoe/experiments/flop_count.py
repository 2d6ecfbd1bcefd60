"""FLOPs of named runs, for the command `airmoe flops`."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from airmoe.data.tokenizer_choice import bpe_vocab_size, is_trained
from airmoe.errors import ConfigError
from airmoe.metrics.flops import COLUMNS, PARTS, Cost, Ledger, Workload, count_flops
from airmoe.training import RunConfig, method_run
from airmoe.training.config import workload_of

MILLION = 1e6
UNITS = {1e18: "E", 1e15: "P", 1e12: "T"}
PAPER_DEVICES = 4  # of all its runs
VOCABULARIES = {"llama-3": 128_256, "bytes": 257}  # known without reading the tokenizer


@dataclass(frozen=True)
class FlopCount:
    """The ledgers of some methods at one preset."""

    preset: str
    workload: Workload
    ledgers: dict[str, Ledger]
    tokens: int | None  # length of the run, where it is known

    def to_json(self) -> dict[str, Any]:
        """Every term with its formula."""
        methods = {name: ledger.to_json(self.tokens) for name, ledger in self.ledgers.items()}
        return {
            "preset": self.preset,
            "workload": dataclasses.asdict(self.workload),
            "methods": methods,
        }

    def show(self, console: Console) -> None:
        """One method part by part, or several side by side."""
        if len(self.ledgers) > 1:
            for table in side_by_side(self.preset, self.ledgers, self.tokens):
                console.print(table)
        else:
            for name, ledger in self.ledgers.items():
                console.print(detailed_table(f"{self.preset}, {name}", ledger, self.tokens))
        load = self.workload
        console.print(
            f"Blocks of {load.sequence_length:,} tokens; steps of {load.tokens_per_step:,} on "
            f"{load.devices} device(s), micro-batches of {load.tokens_per_micro_batch:,}.",
            highlight=False,
            soft_wrap=True,
        )


def count_preset(
    preset: str,
    methods: Sequence[str],
    overrides: Sequence[str],
    *,
    tokens: int | None,
    devices: int | None,
) -> FlopCount:
    """Count a preset; length and devices are its own (the paper's 4, or fewer) unless given."""
    runs = {name: method_run(preset, name, overrides) for name in methods}
    options = runs[methods[0]].training
    if devices is None:
        parts = options.batch_size // options.micro_batch_size
        devices = max(n for n in range(1, PAPER_DEVICES + 1) if parts % n == 0)
    workload = workload_of(runs[methods[0]], devices)
    if tokens is None and options.steps is not None:
        tokens = options.steps * workload.tokens_per_step
    ledgers = {name: _ledger(run, workload) for name, run in runs.items()}
    return FlopCount(preset, workload, ledgers, tokens)


def _ledger(run: RunConfig, workload: Workload) -> Ledger:
    name = run.data.tokenizer
    vocab_size = run.model.get("vocab_size") or VOCABULARIES.get(name)
    if vocab_size is None and is_trained(name):
        vocab_size = bpe_vocab_size(name)
    if vocab_size is None:
        raise ConfigError(
            "model.vocab_size",
            None,
            f"must be given with the tokenizer {name}, which is not opened here",
            "Add model.vocab_size=...",
        )
    return count_flops(run.model_config(vocab_size, eos_id=0), workload)


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
