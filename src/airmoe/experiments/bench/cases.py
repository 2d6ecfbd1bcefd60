"""The cases: shapes by name, and what is compared at each."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

from airmoe.experiments.bench.contenders import (
    Air,
    Air16Times,
    BalancedAir,
    Coarse,
    Exact,
    Hierarchical,
    Peer,
)
from airmoe.experiments.bench.inputs import Shape
from airmoe.experiments.bench.measure import Phase
from airmoe.experiments.bench.plain import Listing, PeerPackage
from airmoe.experiments.bench.step import WAYS, StepShape


@dataclass(frozen=True)
class Case:
    """One table: a shape, a device, and its contenders."""

    name: str
    shape: Shape | StepShape
    contenders: tuple[Any, ...]  # subclasses of `Contender`; of whole steps, each a `Way`
    phase: Phase = "training"
    device: Literal["gpu", "cpu"] = "gpu"

    def toy(self) -> Case:
        """The case scaled down so that a CPU runs it in a second; its times mean nothing."""
        return replace(self, name=f"{self.name}-quick", shape=self.shape.toy())


OURS = (Air, Coarse, Hierarchical, Exact, Peer)
ON_CPU = (Air, Listing, PeerPackage, BalancedAir, Peer, Hierarchical, Exact)
PAPER = Shape()
CPU = Shape(
    num_tokens=4096,
    num_codewords=256,
    shortlist_size=1024,
    dtype="float32",
    activation="gelu",
    cells="topics",
)

CASES = {
    case.name: case
    for case in (
        Case("paper", PAPER, (*OURS, Listing)),
        Case("paper-16k", replace(PAPER, num_tokens=16_384), OURS),
        Case("paper-768", replace(PAPER, dim=768), OURS),
        Case("paper-g256", replace(PAPER, num_codewords=256), OURS),
        Case("paper-zipf", replace(PAPER, cells="zipf"), OURS),
        Case("cpu", CPU, ON_CPU, device="cpu"),
        Case("cpu-swiglu", replace(CPU, activation="swiglu"), (Air, Listing), device="cpu"),
        Case("cpu-growth", CPU, (Air, Air16Times), device="cpu"),
    )
}
SCALING = tuple(
    Case(f"scaling-{experts}", replace(PAPER, num_experts=experts), OURS)
    for experts in (4_096, 16_384, 65_536, 262_144, 1_048_576)
)
DECODE = tuple(
    Case(
        f"decode-{tokens}",
        replace(PAPER, num_tokens=tokens, dim=1024, num_experts=1_048_576),
        OURS,
        phase="decoding",
    )
    for tokens in (1, 8, 64)
)
STEP = Case("step", StepShape(), tuple(WAYS.values()), phase="step")
