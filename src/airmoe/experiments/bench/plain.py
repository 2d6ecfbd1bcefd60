"""Layers as other people write them: the paper's listing, and the package PEER-pytorch."""

from __future__ import annotations

from importlib.util import find_spec

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from airmoe.errors import ConfigError
from airmoe.experiments.bench.cases import Inputs, Shape
from airmoe.experiments.bench.contenders import (
    Answer,
    Contender,
    Shortlisted,
    Values,
    product_key_scores,
)
from airmoe.routers import RouterConfig


class ListingLayer(nn.Module):
    """The paper's listing (App. C): VQ, shortlist, gathered [T, M, D] candidates, top-K.

    It does less than AIR: no jitter, no projection of the centroids, no codebook update. Rows are
    fetched by `F.embedding`, which beats the listing's own indexing by a quarter on a CPU.
    """

    codewords: Tensor  # [G, D], unit norm
    shortlists: Tensor  # [G, M]

    def __init__(self, shape: Shape, codewords: Tensor) -> None:
        super().__init__()
        size, std = (shape.num_experts, shape.dim), shape.dim**-0.5
        self.top_k = shape.top_k
        gated = shape.activation == "swiglu"
        self.gate = nn.Parameter(torch.randn(size) * std) if gated else None
        self.up = nn.Parameter(torch.randn(size) * std)
        self.down = nn.Parameter(torch.randn(size) * std)
        self.centroids = nn.Parameter(F.normalize(torch.randn(size), dim=-1))
        self.register_buffer("codewords", codewords.clone())

    @torch.no_grad()
    def refresh(self, shortlist_size: int) -> None:
        """Listing, step 2. Cached, as the paper's full version does."""
        scores = self.codewords @ self.centroids.T  # [G, E]
        self.shortlists = scores.topk(shortlist_size, dim=-1).indices

    def assign(self, hidden: Tensor) -> Tensor:
        """Listing, step 1: [T, D] -> [T]."""
        return (hidden.detach() @ self.codewords.T).argmax(-1)

    def route(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """Listing, steps 1 and 3 to 5: expert ids and weights [T, K]."""
        candidates = self.shortlists[self.assign(hidden)]  # [T, M]
        features = F.embedding(candidates, self.centroids)  # [T, M, D]
        best = torch.einsum("td,tmd->tm", hidden, features).topk(self.top_k, dim=-1)  # [T, K]
        return candidates.gather(1, best.indices), best.values.softmax(-1)

    def run_experts(self, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """[T, D] -> [T, D]; each token gathers its K experts."""
        active = torch.einsum("td,tkd->tk", hidden, F.embedding(ids, self.up))
        if self.gate is None:
            active = F.gelu(active)
        else:
            gate = torch.einsum("td,tkd->tk", hidden, F.embedding(ids, self.gate))
            active = F.silu(gate) * active
        return torch.einsum("tk,tkd->td", active * weights, F.embedding(ids, self.down))

    def forward(self, hidden: Tensor) -> Tensor:
        return self.run_experts(hidden, *self.route(hidden))


class Listing(Shortlisted):
    """The paper's listing."""

    module: ListingLayer

    def make(self, shape: Shape) -> nn.Module:
        return ListingLayer(shape, self.inputs.codewords)

    def __init__(self, inputs: Inputs, config: RouterConfig) -> None:
        super().__init__(inputs, config)
        self.module.refresh(inputs.shape.shortlist_size)

    @property
    def codewords(self) -> Tensor:
        return self.module.codewords

    @property
    def shortlists(self) -> Tensor:
        return self.module.shortlists

    def answer(self, hidden: Tensor) -> Answer:
        ids, weights = self.module.route(hidden)
        output, cells = self.module.run_experts(hidden, ids, weights), self.module.assign(hidden)
        return Answer(output, ids.unsqueeze(1), cells=cells.unsqueeze(-1))


class PeerPackage(Contender):
    """PyPI's PEER-pytorch, two matrices with GELU between them.

    `non_competing_scores=False` matters: the package's default takes one expert per head.
    """

    def make(self, shape: Shape) -> nn.Module:
        if find_spec("PEER_pytorch") is None:
            install = "Run: pip install -c constraints/cpu.txt 'airmoe[bench]'"
            raise ConfigError("python package", "PEER-pytorch", "is not installed", install)
        from PEER_pytorch import PEER

        return PEER(
            shape.dim,
            heads=shape.num_heads,
            num_experts=shape.num_experts,
            num_experts_per_head=shape.top_k // shape.num_heads,
            non_competing_scores=False,
        )

    def forward(self, hidden: Tensor) -> Tensor:
        return self.module(hidden.unsqueeze(0)).squeeze(0)

    def answer(self, hidden: Tensor) -> Answer:
        """With the expert ids as the package itself looks them up."""
        seen: list[Tensor] = []
        handle = self.module.weight_down_embed.register_forward_pre_hook(
            lambda _module, inputs: seen.append(inputs[0])
        )
        output = self.forward(hidden)
        handle.remove()
        return Answer(output, seen[0].squeeze(0))

    def scores(self, hidden: Tensor, values: Values, cells: Tensor | None) -> Tensor:
        keys = values["keys"].permute(0, 2, 1, 3)  # [P, 2, sqrt(E), D / 2]
        query = values["to_queries.0.weight"]  # [2 * P * D / 2, D]: halves come first
        query = query.unflatten(0, (2, len(keys), -1)).transpose(0, 1).flatten(0, 2)
        return product_key_scores(hidden, query, keys)

    def tables(self, values: Values) -> Values:
        """The package calls them the other way round."""
        return {"up": values["weight_down_embed.weight"], "down": values["weight_up_embed.weight"]}
