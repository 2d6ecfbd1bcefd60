"""The layers under test: how each is built and run, and what it is defined to compute.

Parameters and tokens have the dtype of the shape; none has a post-norm. Ours run as in training:
codebook update, jitter, and an optimizer that is never stepped, so that caches stay valid.
"""

from __future__ import annotations

import math
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from airmoe.experiments.bench.inputs import SEED, Inputs, Shape
from airmoe.losses import load_balance_loss
from airmoe.moe import CoarseExperts, GranularExperts, MoELayer
from airmoe.routers import (
    AirRouter,
    CellRouting,
    HierarchicalRouter,
    PeerRouter,
    RouterConfig,
    TopKRouter,
    track_optimizer,
)
from airmoe.routers.routing import by_token

ROWS = 65_536  # of a table in float64 at once
Role = Literal["air", "baseline", "coarse"]  # a coarse layer is no granular baseline
Values = dict[str, Tensor]  # parameters by name, in any dtype
# Parameters are called by the last part of their names, except for these.
NAMES = {
    "router.query.weight": "query",
    "to_queries.0.weight": "query",
    "weight_down_embed.weight": "up",  # the package PEER-pytorch calls them the other way round
    "weight_up_embed.weight": "down",
}


@dataclass(frozen=True)
class Answer:
    """Output of a layer and the choices behind it."""

    output: Tensor  # [T, D]
    expert_ids: Tensor  # [T, heads, K / heads]
    weights: Tensor | None = None  # as expert_ids, if the layer reports them
    cells: Tensor | None = None  # [T, R] the cells that candidates come from

    def rows(self, chosen: Tensor) -> Answer:
        """The answer for some tokens only, detached."""
        parts = {name: part for name, part in vars(self).items() if part is not None}
        return Answer(**{name: part.detach()[chosen] for name, part in parts.items()})


class Contender(ABC):
    """One layer, built once and stepped many times."""

    key: ClassVar[str]  # on the command line and in files
    name: ClassVar[str]  # in tables
    role: ClassVar[Role] = "baseline"
    plain: ClassVar[bool] = False  # PyTorch as other people write it, nothing of ours
    experts_times: ClassVar[int] = 1  # as many experts as the case has, times so many
    module: Any  # a torch module, with the parameters that get gradients

    def __init__(self, inputs: Inputs) -> None:
        count = self.experts_times * inputs.shape.num_experts
        shape = replace(inputs.shape, num_experts=count)
        self.inputs, self.config = replace(inputs, shape=shape), self.router_config(shape)
        self.num_heads = getattr(self.config, "num_heads", 1)
        self.neurons_per_expert = shape.top_k // self.config.top_k  # of a coarse expert K
        # The precision in which logits are meant to be computed.
        full = torch.promote_types(shape.torch_dtype, torch.float32)
        self.score_dtype = shape.torch_dtype if self.plain else full
        torch.manual_seed(SEED)
        with torch.device(inputs.device):
            self.module = self.make(shape).to(shape.torch_dtype)

    @staticmethod
    @abstractmethod
    def router_config(shape: Shape) -> RouterConfig:
        """Of its router; of other people's layers, of a router that costs the same FLOPs."""

    @abstractmethod
    def make(self, shape: Shape) -> nn.Module:
        """The layer, in float32."""

    def forward(self, hidden: Tensor) -> Tensor:
        """[T, D] -> [T, D]: in training mode everything a micro-batch does before its backward."""
        return self.module(hidden.unsqueeze(0)).squeeze(0)

    def backward(self, output: Tensor, cotangent: Tensor) -> None:
        output.backward(cotangent)

    def parameters(self) -> Values:
        """By names that all layers share: `centroids`, `query`, `keys`, `gate`, `up`, `down`."""
        named = self.module.named_parameters()
        return {NAMES.get(name) or name.rpartition(".")[2]: value for name, value in named}

    @abstractmethod
    def answer(self, hidden: Tensor) -> Answer:
        """A forward with its choices, in which no codebook learns."""

    @abstractmethod
    def scores(self, hidden: Tensor, values: Values, cells: Tensor | None) -> Tensor:
        """Its logits by definition, in hidden's dtype: [T, heads, E], -inf = no candidate."""

    def cell_scores(self, hidden: Tensor, values: Values) -> Tensor:
        """The scores that decide on a cell, if it has cells: [T, G]."""
        raise NotImplementedError(f"{type(self).__name__} has no cells")

    def apart(self) -> dict[str, Callable[[], Any]]:
        """Actions that belong to training but not to every forward: name -> function."""
        return {}


class Shortlisted(Contender):
    """Candidates come from an inverted index: codeword -> the M experts that score best with it."""

    config: AirRouter.Config

    @staticmethod
    def router_config(shape: Shape) -> AirRouter.Config:
        return AirRouter.Config(
            **shape.sizes,
            num_codewords=shape.num_codewords,
            shortlist_size=shape.shortlist_size,
            dead_below=0.0,  # empty cells stay empty while they are measured
        )

    @abstractmethod
    def index(self) -> tuple[Tensor, Tensor]:
        """Codewords [G, D] and shortlists [G, M] of expert ids."""

    def directions(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """Rows of the centroids as they enter scores."""
        return unit(rows, dtype) if self.config.normalize_centroids else rows.to(dtype)

    def cell_scores(self, hidden: Tensor, values: Values) -> Tensor:
        return hidden @ self.index()[0].to(hidden.dtype).T

    def codeword_scores(self, used: Tensor, values: Values, dtype: torch.dtype) -> Tensor:
        """<c_g, w_e> of some codewords with all experts, by which shortlists are made: [n, E]."""
        codewords, parts = self.index()[0][used].to(dtype), values["centroids"].split(ROWS)
        return torch.cat([codewords @ self.directions(rows, dtype).T for rows in parts], dim=-1)

    def scores(self, hidden: Tensor, values: Values, cells: Tensor | None) -> Tensor:
        """<h, w_e> for e in the shortlist of the token's cell."""
        assert cells is not None
        candidates = self.index()[1][cells.squeeze(-1)]  # [T, M]
        rows = self.directions(values["centroids"][candidates], hidden.dtype)  # [T, M, D]
        logits = (hidden.unsqueeze(1) @ rows.mT).squeeze(1)  # [T, M]
        everywhere = logits.new_full((len(hidden), self.config.num_experts), -torch.inf)
        return everywhere.scatter(1, candidates, logits).unsqueeze(1)


class OwnLayer(Contender):
    """An airmoe layer, in training mode unless told otherwise."""

    module: MoELayer

    def __init__(self, inputs: Inputs) -> None:
        super().__init__(inputs)
        self.router = self.module.router
        # Never stepped: with its hook the router knows that caches stay valid between steps.
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.0)
        track_optimizer(self.module, self.optimizer)
        self.module.train()

    def make(self, shape: Shape) -> nn.Module:
        dim, form, size = shape.dim, shape.activation, self.neurons_per_expert
        if size == 1:
            experts = GranularExperts(shape.num_experts, dim, activation=form)
        else:
            experts = CoarseExperts(self.config.num_experts, dim, size, activation=form)
        return MoELayer(self.config.build(), experts, post_norm="none")

    def answer(self, hidden: Tensor) -> Answer:
        result = self.module.forward_with_routing(hidden.unsqueeze(0), learn=False)
        routing = result.routing
        listed, cells = routing.to_token_routing(), None
        if isinstance(routing, CellRouting):
            cells = by_token(routing.cells.cell_of_row.unsqueeze(-1), routing.cells)
        shape = (listed.num_tokens, self.num_heads, -1)
        ids, weights = listed.expert_ids.view(shape), listed.weights.view(shape)
        return Answer(result.hidden.squeeze(0), ids, weights, cells)


class Air(OwnLayer, Shortlisted):
    """AIR, with the codebook of the inputs."""

    key, name, role = "air", "AIR", "air"
    router: AirRouter

    def __init__(self, inputs: Inputs) -> None:
        super().__init__(inputs)
        self.router.codebook.load_state_dict(inputs.codebook_state())
        self.router.observe(inputs.batches[-1])

    def index(self) -> tuple[Tensor, Tensor]:
        return self.router.codebook.codewords, self.router.shortlists()

    def apart(self) -> dict[str, Callable[[], Any]]:
        """The codebook update is in every forward too; the others belong to an optimizer step."""
        batch, dtype = self.inputs.batches[0], self.inputs.shape.torch_dtype
        masters = [parameter.detach().float() for parameter in self.module.parameters()]
        return {
            "codebook update": lambda: self.router.observe(batch),
            "refresh (1/|w|, shortlists, reverse index)": self.router.rebuild_shortlists,
            "casts from float32": lambda: [master.to(dtype) for master in masters],
        }


class Air16Times(Air):
    """With sixteen times as many experts."""

    key, name, experts_times = "air-16-times", "AIR, 16 E", 16


class BalancedAir(Air):
    """With the load balance loss."""

    key, name = "air-balanced", "AIR + balance loss"

    def forward(self, hidden: Tensor) -> Tensor:
        result = self.module.forward_with_routing(hidden.unsqueeze(0))
        self.loss = load_balance_loss(result.routing)
        return result.hidden.squeeze(0)

    def backward(self, output: Tensor, cotangent: Tensor) -> None:
        torch.autograd.backward([output, self.loss], [cotangent, None])
        self.loss = self.loss.detach()  # its graph would keep parameters on the stream of now


class Exact(OwnLayer):
    """The K best of all experts."""

    key, name = "exact", "exact"

    @staticmethod
    def router_config(shape: Shape) -> TopKRouter.Config:
        return TopKRouter.Config(**shape.sizes)

    def scores(self, hidden: Tensor, values: Values, cells: Tensor | None) -> Tensor:
        return (hidden @ unit(values["centroids"], hidden.dtype).T).unsqueeze(1)


class Coarse(Exact):
    """Experts of K neurons, one per token, with as many parameters as E single neurons."""

    key, name, role = "coarse", "coarse", "coarse"

    @staticmethod
    def router_config(shape: Shape) -> TopKRouter.Config:
        count = math.ceil(shape.num_experts / shape.top_k)
        return TopKRouter.Config(dim=shape.dim, num_experts=count, top_k=1)


class Hierarchical(OwnLayer):
    """Learned clusters, as many candidates as AIR."""

    key, name = "hierarchical", "hierarchical"

    @staticmethod
    def router_config(shape: Shape) -> HierarchicalRouter.Config:
        clusters = shape.num_codewords  # of E / G experts, which make M candidates
        selected = max(1, shape.shortlist_size * clusters // shape.num_experts)
        return HierarchicalRouter.Config(
            **shape.sizes, num_clusters=clusters, num_selected_clusters=selected
        )

    def cell_scores(self, hidden: Tensor, values: Values) -> Tensor:
        return hidden @ unit(values["cluster_centroids"], hidden.dtype).T

    def scores(self, hidden: Tensor, values: Values, cells: Tensor | None) -> Tensor:
        """Expert's + cluster's score where the cluster is chosen."""
        assert cells is not None
        clusters = self.cell_scores(hidden, values)  # [T, G]
        kept = torch.full_like(clusters, -torch.inf).scatter(1, cells, clusters.gather(1, cells))
        experts = hidden @ unit(values["centroids"], hidden.dtype).T  # [T, E]
        per_cluster = experts.shape[1] // clusters.shape[1]
        return (experts + kept.repeat_interleave(per_cluster, dim=-1)).unsqueeze(1)


class Peer(OwnLayer):
    """Product keys."""

    key, name = "peer", "PEER"

    @staticmethod
    def router_config(shape: Shape) -> PeerRouter.Config:
        return PeerRouter.Config(**shape.sizes, num_heads=shape.num_heads)

    def scores(self, hidden: Tensor, values: Values, cells: Tensor | None) -> Tensor:
        return product_key_scores(hidden, values["query"], values["keys"])


def product_key_scores(hidden: Tensor, query: Tensor, keys: Tensor) -> Tensor:
    """PEER: a_i + b_j. query [P * D, D], keys [P, 2, sqrt(E), D / 2] -> [T, P, E]."""
    queries = hidden @ query.to(hidden.dtype).T
    queries = queries.view(hidden.shape[0], keys.shape[0], 2, -1)
    first, second = torch.einsum("tphd,phsd->htps", queries, keys.to(hidden.dtype))
    return (first.unsqueeze(-1) + second.unsqueeze(-2)).flatten(2)


def unit(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows of norm 1 in another precision."""
    return F.normalize(rows.to(dtype), dim=-1)
