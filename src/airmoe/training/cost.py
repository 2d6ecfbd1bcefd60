"""What a run costs in FLOPs: its settings handed to the ledger."""

from __future__ import annotations

from airmoe.errors import ConfigError
from airmoe.metrics.flops import Ledger, Workload, count_flops
from airmoe.model import AirMoeConfig
from airmoe.training.config import RunConfig


def workload_of(run: RunConfig, devices: int) -> Workload:
    """One optimizer step of a run on so many devices."""
    options, block = run.training, run.data.block_size
    options.accumulation_steps(devices)  # refuses what does not divide
    return Workload(
        sequence_length=block,
        tokens_per_step=options.batch_size * block,
        tokens_per_micro_batch=options.micro_batch_size * block,
        devices=devices,
    )


def flops_per_token(run: RunConfig, model: AirMoeConfig, devices: int) -> dict[str, float]:
    """By field of a log line; empty for a router that the ledger cannot count."""
    try:
        ledger: Ledger = count_flops(model, workload_of(run, devices))
    except ConfigError as error:
        if error.field != "flops.router":
            raise
        return {}
    return {
        "flops": ledger.cost("algorithmic").total,
        "executed_flops": ledger.cost("executed").total,
    }
