"""FLOPs of named runs, for the command `airmoe flops`."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from rich.console import Console

from airmoe.data.tokenizer_choice import bpe_vocab_size, is_trained
from airmoe.errors import ConfigError
from airmoe.metrics.flops import Ledger, Workload, count_flops
from airmoe.metrics.flops.table import detailed_table, side_by_side
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
