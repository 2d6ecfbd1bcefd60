"""Layers as other people write them: the paper's listing, and the package PEER-pytorch."""

from __future__ import annotations

from dataclasses import replace

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from airmoe.errors import require
from airmoe.experiments.bench.contenders import (
    Answer,
    Contender,
    Peer,
    Shortlisted,
    Values,
    product_key_scores,
)
from airmoe.experiments.bench.inputs import Inputs, Shape
from airmoe.routers import AirRouter, PeerRouter


class Listing(Shortlisted):
    """The paper's listing (App. C): VQ, shortlist, gathered [T, M, D] candidates, top-K.

    It does less than AIR: no jitter, no projection of the centroids, no codebook update. Rows are
    fetched by `F.embedding`, which beats the listing's own indexing by a quarter on a CPU.
    """

    key, name, plain = "listing", "paper's listing", True

    @staticmethod
    def router_config(shape: Shape) -> AirRouter.Config:
        config = Shortlisted.router_config(shape)
        return replace(config, codebook="static", jitter_std=0.0, normalize_centroids=False)

    def __init__(self, inputs: Inputs) -> None:
        """With step 2 of the listing, the shortlists: cached, as in the paper's full version."""
        super().__init__(inputs)
        self.codewords = inputs.codewords.to(inputs.shape.torch_dtype)
        scores = self.codewords @ self.module["centroids"].detach().T  # [G, E]
        self.shortlists = scores.topk(inputs.shape.shortlist_size, dim=-1).indices

    def index(self) -> tuple[Tensor, Tensor]:
        return self.codewords, self.shortlists

    def make(self, shape: Shape) -> nn.Module:
        size, std = (shape.num_experts, shape.dim), shape.dim**-0.5
        names = ("gate", "up", "down") if shape.activation == "swiglu" else ("up", "down")
        tables = {name: torch.randn(size) * std for name in names}
        return nn.ParameterDict(tables | {"centroids": F.normalize(torch.randn(size), dim=-1)})

    def route(self, hidden: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """Steps 1 and 3 to 5: cells [T], expert ids and weights [T, K]."""
        cells = (hidden.detach() @ self.codewords.T).argmax(-1)
        candidates = self.shortlists[cells]  # [T, M]
        features = F.embedding(candidates, self.module["centroids"])  # [T, M, D]
        scores = torch.einsum("td,tmd->tm", hidden, features)
        best = scores.topk(self.config.top_k, dim=-1)  # [T, K]
        return cells, candidates.gather(1, best.indices), best.values.softmax(-1)

    def run_experts(self, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
        """[T, D] -> [T, D]; each token gathers its K experts."""
        tables = self.module
        active = torch.einsum("td,tkd->tk", hidden, F.embedding(ids, tables["up"]))
        if "gate" in tables:
            gate = torch.einsum("td,tkd->tk", hidden, F.embedding(ids, tables["gate"]))
            active = F.silu(gate) * active
        else:
            active = F.gelu(active)
        return torch.einsum("tk,tkd->td", active * weights, F.embedding(ids, tables["down"]))

    def answer(self, hidden: Tensor) -> Answer:
        cells, ids, weights = self.route(hidden)
        output = self.run_experts(hidden, ids, weights)
        return Answer(output, ids.unsqueeze(1), cells=cells.unsqueeze(-1))

    def forward(self, hidden: Tensor) -> Tensor:
        return self.answer(hidden).output


class PeerPackage(Contender):
    """PyPI's PEER-pytorch, two matrices with GELU between them.

    `non_competing_scores=False` matters: the package's default takes one expert per head.
    """

    key, name, plain = "peer-pytorch", "PEER-pytorch", True

    @staticmethod
    def router_config(shape: Shape) -> PeerRouter.Config:
        return Peer.router_config(shape)

    def make(self, shape: Shape) -> nn.Module:
        package = require("PEER_pytorch", "to be measured", "bench")
        return package.PEER(
            shape.dim,
            heads=shape.num_heads,
            num_experts=shape.num_experts,
            num_experts_per_head=shape.top_k // shape.num_heads,
            non_competing_scores=False,
        )

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
        query = values["query"]  # [2 * P * D / 2, D]: halves come first
        query = query.unflatten(0, (2, len(keys), -1)).transpose(0, 1).flatten(0, 2)
        return product_key_scores(hidden, query, keys)
