"""What is measured: shapes by name, and the toy sizes that show that everything runs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

import torch

CellSizes = Literal["even", "zipf", "captured"]
Dtype = Literal["float32", "float16", "bfloat16"]
Form = Literal["swiglu", "gelu"]
Phase = Literal["training", "decoding"]

DTYPES: dict[Dtype, torch.dtype] = {
    "float32": torch.float32,
    "float16": torch.float16,
    "bfloat16": torch.bfloat16,
}


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
        return DTYPES[self.dtype]

    @property
    def num_coarse_experts(self) -> int:
        """Experts of K neurons with as many parameters as E single neurons, rounded up."""
        return -(-self.num_experts // self.top_k)

    @property
    def num_selected_clusters(self) -> int | None:
        """Hierarchical routing with as many candidates as a shortlist; None if there is no such."""
        selected, rest = divmod(self.shortlist_size * self.num_codewords, self.num_experts)
        return None if rest or not selected else selected

    def __str__(self) -> str:
        return (
            f"T = {self.num_tokens:,}, D = {self.dim:,}, E = {self.num_experts:,}, "
            f"K = {self.top_k}, G = {self.num_codewords}, M = {self.shortlist_size}, "
            f"{self.dtype}, {self.activation}, cells {self.cells}"
        )


@dataclass(frozen=True)
class Case:
    """One table: a shape and who is measured at it (keys of `contenders.ENTRIES`)."""

    name: str
    shape: Shape
    contenders: tuple[str, ...]
    phase: Phase = "training"


ALL = (
    "air-triton",
    "air-reference",
    "coarse",
    "hierarchical",
    "exact",
    "peer",
    "exact-gathered",
    "peer-gathered",
    "listing",
)
OURS = ("air-triton", "coarse", "hierarchical", "exact", "peer")
PAPER = Shape()

CASES = {
    case.name: case
    for case in (
        Case("paper", PAPER, ALL),
        Case("paper-16k", replace(PAPER, num_tokens=16_384), OURS),
        Case("paper-768", replace(PAPER, dim=768), OURS),
        Case("paper-g256", replace(PAPER, num_codewords=256), OURS),
        Case("paper-zipf", replace(PAPER, cells="zipf"), OURS),
        Case("paper-captured", replace(PAPER, cells="captured"), OURS),
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
        num_codewords=shape.num_codewords // 64,
        shortlist_size=128,
        num_heads=4,
        dtype="float32",
    )
    # There may be no Triton where it runs, but AIR should be seen.
    contenders = tuple(dict.fromkeys((*case.contenders, "air-reference")))
    return replace(case, name=f"{case.name}-quick", shape=small, contenders=contenders)
