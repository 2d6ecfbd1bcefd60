"""What is measured: shapes by name, and the toy sizes that show that everything runs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch

from airmoe.errors import ConfigError
from airmoe.routers import AirRouter, HierarchicalRouter, PeerRouter, TopKRouter

CellSizes = Literal["even", "zipf", "topics", "captured"]
Dtype = Literal["float32", "float16", "bfloat16"]
Form = Literal["swiglu", "gelu"]
Phase = Literal["training", "decoding"]


@dataclass(frozen=True)
class Shape:
    """Sizes of one comparison; as they stand here, the paper's."""

    num_tokens: int = 65_536
    dim: int = 256
    num_experts: int = 65_536
    top_k: int = 512
    num_codewords: int = 1024
    shortlist_size: int = 2048
    num_heads: int = 8  # of PEER
    dtype: Dtype = "bfloat16"  # of parameters and tokens
    activation: Form = "swiglu"
    cells: CellSizes = "even"

    @property
    def torch_dtype(self) -> torch.dtype:
        return getattr(torch, self.dtype)

    @property
    def num_coarse_experts(self) -> int:
        """Experts of K neurons with as many parameters as E single neurons, rounded up."""
        return -(-self.num_experts // self.top_k)

    @property
    def num_selected_clusters(self) -> int | None:
        """Hierarchical routing with as many candidates as a shortlist; None if there is no such."""
        selected, rest = divmod(self.shortlist_size * self.num_codewords, self.num_experts)
        return None if rest or not selected else selected

    def air(self) -> AirRouter.Config:
        return AirRouter.Config(
            dim=self.dim,
            num_experts=self.num_experts,
            top_k=self.top_k,
            num_codewords=self.num_codewords,
            shortlist_size=self.shortlist_size,
            dead_below=0.0,  # or empty cells would be filled while they are measured
        )

    def listing(self) -> AirRouter.Config:
        """What the paper's listing leaves out of AIR."""
        return replace(self.air(), codebook="static", jitter_std=0.0, normalize_centroids=False)

    def exact(self) -> TopKRouter.Config:
        return TopKRouter.Config(dim=self.dim, num_experts=self.num_experts, top_k=self.top_k)

    def coarse(self) -> TopKRouter.Config:
        """Few experts of K neurons, of which a token takes one: as many active parameters."""
        return TopKRouter.Config(dim=self.dim, num_experts=self.num_coarse_experts, top_k=1)

    def hierarchical(self) -> HierarchicalRouter.Config:
        selected = self.num_selected_clusters
        if selected is None:
            rule = "clusters of E / G experts do not add up to M candidates"
            raise ConfigError("bench.shape", str(self), rule, "Make E / G a divisor of M.")
        return HierarchicalRouter.Config(
            dim=self.dim,
            num_experts=self.num_experts,
            top_k=self.top_k,
            num_clusters=self.num_codewords,
            num_selected_clusters=selected,
        )

    def peer(self) -> PeerRouter.Config:
        return PeerRouter.Config(
            dim=self.dim, num_experts=self.num_experts, top_k=self.top_k, num_heads=self.num_heads
        )

    def __str__(self) -> str:
        return (
            f"T = {self.num_tokens:,}, D = {self.dim:,}, E = {self.num_experts:,}, "
            f"K = {self.top_k}, G = {self.num_codewords}, M = {self.shortlist_size}, "
            f"{self.dtype}, {self.activation}, cells {self.cells}"
        )


@dataclass(frozen=True)
class Case:
    """One table: a shape, a device, and who is measured there (keys of `entries.ENTRIES`)."""

    name: str
    shape: Shape
    contenders: tuple[str, ...]
    phase: Phase = "training"
    device: Literal["gpu", "cpu"] = "gpu"


OURS = ("air-triton", "coarse", "hierarchical", "exact", "peer")
ALL = (OURS[0], "air-reference", *OURS[1:], "exact-gathered", "peer-gathered", "listing")
ON_CPU = ("air", "listing", "peer-pytorch", "air-balanced", "peer", "hierarchical", "exact")
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
        Case("paper", PAPER, ALL),
        Case("paper-16k", replace(PAPER, num_tokens=16_384), OURS),
        Case("paper-768", replace(PAPER, dim=768), OURS),
        Case("paper-g256", replace(PAPER, num_codewords=256), OURS),
        Case("paper-zipf", replace(PAPER, cells="zipf"), OURS),
        Case("paper-captured", replace(PAPER, cells="captured"), OURS),
        Case("cpu", CPU, ON_CPU, device="cpu"),
        Case("cpu-swiglu", replace(CPU, activation="swiglu"), ("air", "listing"), device="cpu"),
        Case("cpu-growth", CPU, ("air", "air-16-times"), device="cpu"),
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


def toy(case: Case) -> Case:
    """The same case in a size that a CPU runs in a second; its times mean nothing."""
    shape = case.shape
    small = replace(
        shape,
        num_tokens=min(shape.num_tokens, max(64, shape.num_tokens // 256)),
        dim=shape.dim // 4,
        num_experts=max(256, shape.num_experts // 64),
        top_k=32,
        num_codewords=max(16, shape.num_codewords // 64),
        shortlist_size=128,
        num_heads=4,
        dtype="float32",
    )
    contenders = case.contenders
    if "air-triton" in contenders:  # there may be no Triton where it runs, but AIR should be seen
        contenders = tuple(dict.fromkeys((*contenders, "air-reference")))
    return replace(case, name=f"{case.name}-quick", shape=small, contenders=contenders)
