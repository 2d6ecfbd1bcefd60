"""FLOPs of named runs, for the command `airmoe flops`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console
from rich.table import Table

from airmoe.data.tokenizer_choice import bpe_vocab_size, is_trained
from airmoe.errors import ConfigError, say
from airmoe.flops import COLUMNS, PARTS, Column, Ledger, Workload, count_flops
from airmoe.training import RunConfig, method_run
from airmoe.training.config import workload_of

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
        methods = {name: ledger.to_json(self.tokens) for name, ledger in self.ledgers.items()}
        workload = dataclasses.asdict(self.workload)
        return {"preset": self.preset, "workload": workload, "methods": methods}

    def show(self, console: Console) -> None:
        """One method part by part, or several side by side."""
        if len(self.ledgers) == 1:
            ((method, ledger),) = self.ledgers.items()
            columns: list[tuple[str, Ledger, Column]] = [(name, ledger, name) for name in COLUMNS]
            console.print(self._table(method, columns, ("forward", "backward", "total")))
        else:
            for name in COLUMNS:
                columns = [(method, ledger, name) for method, ledger in self.ledgers.items()]
                console.print(self._table(name, columns, ("total",)))
        load = self.workload
        say(
            console,
            f"Blocks of {load.sequence_length:,} tokens; steps of {load.tokens_per_step:,} on "
            f"{load.devices} device(s), micro-batches of {load.tokens_per_micro_batch:,}.",
        )

    def _table(
        self, title: str, columns: Sequence[tuple[str, Ledger, Column]], fields: Sequence[str]
    ) -> Table:
        """Parts down, (heading, ledger, column) across, with these fields of a cost."""
        table = Table(title=f"{self.preset}, {title}: M FLOP per token", title_justify="left")
        table.add_column("part")
        for heading, *_ in columns:
            for field in fields:
                name = heading if field == "total" else f"{heading}\n{field}"
                table.add_column(name, justify="right")

        there = {part for _, ledger, _ in columns for part in ledger.parts()}
        for part in (*filter(there.__contains__, PARTS), None):
            costs = [ledger.cost(name, part) for _, ledger, name in columns]
            cells = [f"{getattr(one, field) / 1e6:,.3f}" for one in costs for field in fields]
            if part is None:
                table.add_section()
            table.add_row(part or "all", *cells)
        if self.tokens is not None:
            padding = [""] * (len(fields) - 1)  # a run has only a total
            runs = [_scaled(ledger.run(self.tokens, name)) for _, ledger, name in columns]
            cells = [cell for run in runs for cell in (*padding, run)]
            table.add_row(f"run of {self.tokens:,} tokens", *cells)
        return table


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
        parts = options.batch_size
        if options.micro_batch_size != "auto":
            parts //= options.micro_batch_size
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
        rule = f"must be given with the tokenizer {name}, which is not opened here"
        raise ConfigError("model.vocab_size", None, rule, "Add model.vocab_size=...")
    return count_flops(run.model_config(vocab_size, eos_id=0), workload)


def _scaled(flops: float) -> str:
    """With a unit, as the paper writes totals: 324.1 P."""
    for unit, name in ((1e18, "E"), (1e15, "P")):
        if flops >= unit:
            return f"{flops / unit:,.1f} {name}"
    return f"{flops / 1e12:,.1f} T"
