"""What every contender is given: the shape of the problem and the same clustered tokens."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch
import torch.nn.functional as F
from torch import Tensor

from airmoe import Codebook

WARMUP_BATCH = 1_000  # batches from here on train the codebook, those before are measured


@dataclass(frozen=True)
class Shape:
    """Sizes of one comparison."""

    num_tokens: int = 4096
    dim: int = 256
    num_experts: int = 65_536
    top_k: int = 512
    num_codewords: int = 256
    shortlist_size: int = 1024
    num_heads: int = 8
    codebook_updates: int = 20

    @property
    def num_selected_clusters(self) -> int:
        """Hierarchical routing with as many candidates as a shortlist has."""
        return self.shortlist_size // (self.num_experts // self.num_codewords)


@dataclass(frozen=True)
class TokenSource:
    """Batches of tokens scattered around topics of unequal weight.

    To a codebook they look like the states of a trained model: cells of unequal size, and a
    cosine of about 0.7 between a token and its codeword.
    """

    shape: Shape
    seed: int

    def batch(self, index: int) -> Tensor:
        """hidden [T, D] of norm sqrt(D); the same for everybody who asks for this index."""
        topics = self._topics()
        weights = 1 / torch.arange(10, 10 + topics.shape[0]).float().sqrt()  # few large, many small
        drawn = torch.Generator().manual_seed(self.seed * 10_007 + index + 1)
        shape = (self.shape.num_tokens, self.shape.dim)
        chosen = torch.multinomial(weights, shape[0], replacement=True, generator=drawn)
        hidden = topics[chosen] + 0.6 * F.normalize(torch.randn(shape, generator=drawn), dim=-1)
        return F.normalize(hidden, dim=-1) * self.shape.dim**0.5

    def _topics(self) -> Tensor:
        """Directions in families of four, as many families as codewords: [4 G, D]."""
        fixed = torch.Generator().manual_seed(self.seed)
        families, dim = self.shape.num_codewords, self.shape.dim
        parents = F.normalize(torch.randn(families, 1, dim, generator=fixed), dim=-1)
        children = F.normalize(torch.randn(families, 4, dim, generator=fixed), dim=-1)
        topics = F.normalize(parents + 0.4 * children, dim=-1).flatten(0, 1)
        return topics[torch.randperm(4 * families, generator=fixed)]

    def warmup_batches(self) -> list[Tensor]:
        """Tokens for the codebook to learn from, none of which is measured."""
        return [self.batch(WARMUP_BATCH + i) for i in range(self.shape.codebook_updates)]

    def cotangent(self) -> Tensor:
        """Gradient of the loss with respect to the output, [T, D]."""
        generator = torch.Generator().manual_seed(self.seed + 1)
        return torch.randn(self.shape.num_tokens, self.shape.dim, generator=generator)

    def with_experts(self, num_experts: int) -> TokenSource:
        """The same tokens for another number of experts."""
        return replace(self, shape=replace(self.shape, num_experts=num_experts))

    def codebook(self) -> Codebook:
        """A codebook that has learned from tokens like these."""
        torch.manual_seed(self.seed)
        codebook = Codebook(self.shape.num_codewords, self.shape.dim)
        for batch in self.warmup_batches():
            codebook.update(batch)
        return codebook


@dataclass(frozen=True)
class CellSizes:
    """How a batch falls into cells."""

    mean_cosine: float  # of a token to its codeword
    mean_size: float
    largest: int
    empty: int


def describe_cells(source: TokenSource) -> CellSizes:
    """Cells of the first measured batch."""
    codebook, hidden = source.codebook(), source.batch(0)
    nearest = codebook.assign(hidden)
    sizes = torch.bincount(nearest, minlength=codebook.num_codewords)
    cosine = F.cosine_similarity(hidden, codebook.codewords[nearest])
    return CellSizes(
        mean_cosine=cosine.mean().item(),
        mean_size=sizes.float().mean().item(),
        largest=int(sizes.max()),
        empty=int((sizes == 0).sum()),
    )
