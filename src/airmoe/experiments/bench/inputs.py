"""The tokens and the codebook that every contender of a case gets."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from airmoe.routers import Codebook

SEED = 0
NUM_BATCHES = 4  # steps cycle through them, so that no batch stays in a cache
SPREAD = 0.6  # a token's distance from its codeword's direction: cosine 0.86
CODEBOOK_UPDATES = 20  # of a codebook that learns, before it is used
CellSizes = Literal["even", "zipf", "topics"]
Dtype = Literal["float32", "float16", "bfloat16"]
Form = Literal["swiglu", "gelu"]


@dataclass(frozen=True)
class Shape:
    """Sizes of one comparison; the defaults are the paper's."""

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
    def sizes(self) -> dict[str, Any]:
        """What all granular routers have in common."""
        return {"dim": self.dim, "num_experts": self.num_experts, "top_k": self.top_k}

    def toy(self) -> Shape:
        return replace(
            self,
            num_tokens=min(self.num_tokens, max(64, self.num_tokens // 256)),
            dim=self.dim // 4,
            num_experts=max(256, self.num_experts // 64),
            top_k=32,
            num_codewords=max(16, self.num_codewords // 64),
            shortlist_size=128,
            num_heads=4,
            dtype="float32",
        )

    def __str__(self) -> str:
        return (
            f"T = {self.num_tokens:,}, D = {self.dim:,}, E = {self.num_experts:,}, "
            f"K = {self.top_k}, G = {self.num_codewords}, M = {self.shortlist_size}, "
            f"{self.dtype}, {self.activation}, cells {self.cells}"
        )


@dataclass(frozen=True)
class Inputs:
    """Tokens on the device under test."""

    shape: Shape
    batches: list[Tensor]  # [T, D] each, in the dtype of the shape
    cotangent: Tensor  # [T, D] gradient of a loss with respect to the output
    codewords: Tensor  # [G, D] float32, unit norm

    @property
    def device(self) -> torch.device:
        return self.cotangent.device

    @property
    def cell_sizes(self) -> Tensor:
        """[G] tokens of the first batch in each cell."""
        nearest = (self.batches[0].float() @ self.codewords.T).argmax(-1)
        return torch.bincount(nearest, minlength=self.shape.num_codewords)

    def codebook_state(self) -> dict[str, Tensor]:
        """A codebook as in mid-training, with the cells of the first batch."""
        sizes = self.cell_sizes.float()
        return {
            "codewords": self.codewords,
            "counts": sizes,
            "sums": self.codewords * sizes.unsqueeze(-1),
            "initialized": torch.tensor(True),
            "seed": torch.tensor(SEED),
            "updates": torch.tensor(CODEBOOK_UPDATES),
        }


def make_inputs(shape: Shape, device: torch.device, seed: int = SEED) -> Inputs:
    """Clustered tokens: the same ones for the same seed."""
    generator = torch.Generator(device).manual_seed(seed)
    cotangent = torch.randn(shape.num_tokens, shape.dim, generator=generator, device=device)
    centres = _directions(shape.num_codewords, shape.dim, generator)
    if shape.cells == "topics":  # in families of four, as many families as codewords: [4 G, D]
        children = _directions(4 * shape.num_codewords, shape.dim, generator)
        centres = F.normalize(centres.repeat_interleave(4, 0) + 0.4 * children, dim=-1)
    shares = _popularity(shape.cells, len(centres)).to(device)
    shares = shares[torch.randperm(len(centres), generator=generator, device=device)]

    def draw() -> Tensor:
        """[T, D] around the centres, of norm sqrt(D)."""
        owners = torch.multinomial(shares, shape.num_tokens, replacement=True, generator=generator)
        noise = _directions(shape.num_tokens, shape.dim, generator)
        hidden = F.normalize(centres[owners] + SPREAD * noise, dim=-1) * shape.dim**0.5
        return hidden.to(shape.torch_dtype)

    batches, codewords = [draw() for _ in range(NUM_BATCHES)], centres
    if shape.cells == "topics":
        torch.manual_seed(seed)
        with torch.device(device):
            codebook = Codebook(shape.num_codewords, shape.dim)
        for _ in range(CODEBOOK_UPDATES):
            codebook.update(draw())
        codewords = codebook.codewords.clone()
    return Inputs(shape, batches, cotangent.to(shape.torch_dtype), codewords)


def _directions(count: int, dim: int, generator: torch.Generator) -> Tensor:
    drawn = torch.randn(count, dim, generator=generator, device=generator.device)
    return F.normalize(drawn, dim=-1)


def _popularity(cells: CellSizes, count: int) -> Tensor:
    """The probability that a token belongs to each of `count` centres.

    "zipf" is 1 / rank with the last sixteenth left empty: of 1,024 cells the largest holds 137
    times the mean. "topics" are milder. A codebook that learns them has, like that of a trained
    model, cells of unequal size and a cosine of about 0.7 between a token and its codeword.
    """
    shares = torch.ones(count)
    if cells == "zipf":
        shares /= torch.arange(1, count + 1)
        shares[count - max(1, count // 16) :] = 0
    if cells == "topics":
        shares /= torch.arange(10, 10 + count).sqrt()
    return shares / shares.sum()


def summarize_cells(inputs: Inputs) -> dict[str, float]:
    """How a batch falls into cells."""
    sizes = inputs.cell_sizes
    cosines = F.normalize(inputs.batches[0].float(), dim=-1) @ inputs.codewords.T  # [T, G]
    return {
        "mean_cosine": cosines.amax(-1).mean().item(),  # of a token to its codeword
        "mean_size": sizes.float().mean().item(),
        "largest": int(sizes.max()),
        "empty": int((sizes == 0).sum()),
    }
