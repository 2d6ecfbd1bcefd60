"""What besides the model decides how much a token costs: lengths, batches, devices, losses."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

from airmoe.config import check_count, config
from airmoe.errors import ConfigError


@config
class Workload:
    """One optimizer step. Work done once per step or micro-batch is shared by its tokens."""

    label: ClassVar[str] = "workload"

    sequence_length: int
    tokens_per_step: int  # the effective batch, over all devices and micro-batches
    tokens_per_micro_batch: int  # of one device
    devices: int = 1  # each refreshes its own shortlists

    def check(self) -> None:
        for name in ("sequence_length", "tokens_per_step", "tokens_per_micro_batch", "devices"):
            check_count(f"workload.{name}", getattr(self, name))
        together = self.tokens_per_micro_batch * self.devices
        if self.tokens_per_step % together:
            raise ConfigError(
                "workload.tokens_per_step",
                self.tokens_per_step,
                f"must be a multiple of tokens_per_micro_batch x devices = {together}",
                "Change one of them.",
            )

    @property
    def steps_per_token(self) -> float:
        """Of all devices: each does for itself what is done once per step."""
        return self.devices / self.tokens_per_step

    @property
    def micro_batches_per_token(self) -> float:
        return 1 / self.tokens_per_micro_batch


@dataclass(frozen=True)
class RouterLosses:
    """Which of the router losses have a weight, and so are computed."""

    load_balance: bool = False
    shortlist_balance: bool = False
    router_z: bool = False
