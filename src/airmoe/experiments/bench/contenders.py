"""The layers under test: how each is built and run, and what it is defined to compute.

Parameters and tokens have the dtype of the shape; none has a post-norm. Ours run as in training:
codebook update, jitter, and an optimizer that is never stepped, so that caches stay valid.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from airmoe.experiments.bench.cases import SEED, Inputs, Shape
from airmoe.losses import load_balance_loss
from airmoe.moe import CoarseExperts, GranularExperts, MoELayer
from airmoe.routers import AirRouter, CellRouting, PeerRouter, RouterConfig, track_optimizer
from airmoe.routers.routing import by_token

ROWS = 65_536  # of a table in float64 at once
Values = dict[str, Tensor]  # the module's parameters by name, in any dtype


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

    module: Any  # a torch module, with the parameters that get gradients
    neurons_per_expert = 1

    def __init__(self, inputs: Inputs, config: RouterConfig) -> None:
        self.inputs, self.config = inputs, config
        self.num_heads = config.num_heads if isinstance(config, PeerRouter.Config) else 1
        self.score_dtype = inputs.shape.torch_dtype  # in which its logits are meant to be computed
        torch.manual_seed(SEED)
        with torch.device(inputs.device):
            self.module = self.make(inputs.shape).to(inputs.shape.torch_dtype)

    @abstractmethod
    def make(self, shape: Shape) -> nn.Module:
        """The layer, in float32."""

    def forward(self, hidden: Tensor) -> Tensor:
        """[T, D] -> [T, D]: in training mode everything a micro-batch does before its backward."""
        return self.module(hidden)

    def backward(self, output: Tensor, cotangent: Tensor) -> None:
        output.backward(cotangent)

    def values(self) -> Values:
        return {name: value.detach() for name, value in self.module.named_parameters()}

    @abstractmethod
    def answer(self, hidden: Tensor) -> Answer:
        """A forward with its choices, in which no codebook learns."""

    @abstractmethod
    def scores(self, hidden: Tensor, values: Values, cells: Tensor | None) -> Tensor:
        """Its logits by definition, in hidden's dtype: [T, heads, E], -inf = no candidate."""

    def tables(self, values: Values) -> Values:
        """Neurons, one row each [E, D]: `up`, `down`, and `gate` where experts are SwiGLU."""
        parts = {name.removeprefix("experts."): value for name, value in values.items()}
        return {n: parts[n].flatten(0, -2) for n in ("gate", "up", "down") if n in parts}

    def cell_scores(self, hidden: Tensor, values: Values) -> Tensor:
        """The scores that decide on a cell, if it has cells: [T, G]."""
        raise NotImplementedError(f"{type(self).__name__} has no cells")

    def apart(self) -> dict[str, Callable[[], Any]]:
        """Actions that belong to training but not to every forward: name -> function."""
        return {}


class Shortlisted(Contender):
    """Candidates come from an inverted index: codeword -> the M experts that score best with it."""

    centroids = "centroids"  # name of the parameter
    projects = False  # whether scores take w_e / |w_e|

    @property
    @abstractmethod
    def codewords(self) -> Tensor:
        """[G, D]."""

    @property
    @abstractmethod
    def shortlists(self) -> Tensor:
        """[G, M] expert ids."""

    def directions(self, rows: Tensor, dtype: torch.dtype) -> Tensor:
        """Rows of the centroids as they enter scores."""
        return unit(rows, dtype) if self.projects else rows.to(dtype)

    def cell_scores(self, hidden: Tensor, values: Values) -> Tensor:
        return hidden @ self.codewords.to(hidden.dtype).T

    def codeword_scores(self, used: Tensor, values: Values, dtype: torch.dtype) -> Tensor:
        """<c_g, w_e> of some codewords with all experts, by which shortlists are made: [n, E]."""
        codewords, parts = self.codewords[used].to(dtype), values[self.centroids].split(ROWS)
        return torch.cat([codewords @ self.directions(rows, dtype).T for rows in parts], dim=-1)

    def scores(self, hidden: Tensor, values: Values, cells: Tensor | None) -> Tensor:
        """<h, w_e> for e in the shortlist of the token's cell."""
        assert cells is not None
        candidates = self.shortlists[cells.squeeze(-1)]  # [T, M]
        rows = self.directions(values[self.centroids][candidates], hidden.dtype)  # [T, M, D]
        logits = (hidden.unsqueeze(1) @ rows.mT).squeeze(1)  # [T, M]
        everywhere = logits.new_full((len(hidden), self.config.num_experts), -torch.inf)
        return everywhere.scatter(1, candidates, logits).unsqueeze(1)


class OwnLayer(Contender):
    """An airmoe layer, in training mode unless told otherwise."""

    module: MoELayer

    def __init__(self, inputs: Inputs, config: RouterConfig) -> None:
        super().__init__(inputs, config)
        self.score_dtype = torch.promote_types(inputs.shape.torch_dtype, torch.float32)
        self.router = self.module.router
        # Never stepped: with its hook the router knows that caches stay valid between steps.
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.0)
        track_optimizer(self.module, self.optimizer)
        self.module.train()

    def make(self, shape: Shape) -> nn.Module:
        return MoELayer(self.config.build(), self.make_experts(shape), post_norm="none")

    def make_experts(self, shape: Shape) -> GranularExperts | CoarseExperts:
        return GranularExperts(shape.num_experts, shape.dim, activation=shape.activation)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.module(hidden.unsqueeze(0)).squeeze(0)

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

    router: AirRouter
    centroids, projects = "router.centroids", True

    def __init__(self, inputs: Inputs, config: RouterConfig) -> None:
        super().__init__(inputs, config)
        self.router.codebook.load_state_dict(inputs.codebook_state())
        self.router.observe(inputs.batches[-1])  # which also builds the shortlists

    @property
    def codewords(self) -> Tensor:
        return self.router.codebook.codewords

    @property
    def shortlists(self) -> Tensor:
        return self.router.shortlists()

    def apart(self) -> dict[str, Callable[[], Any]]:
        """The codebook update is in every forward too; the others belong to an optimizer step."""
        batch, dtype = self.inputs.batches[0], self.inputs.shape.torch_dtype
        masters = [parameter.detach().float() for parameter in self.module.parameters()]
        return {
            "codebook update": lambda: self.router.observe(batch),
            "refresh (1/|w|, shortlists, reverse index)": self.router.rebuild_shortlists,
            "casts from float32": lambda: [master.to(dtype) for master in masters],
        }


class BalancedAir(Air):
    """With the load balance loss."""

    def forward(self, hidden: Tensor) -> Tensor:
        result = self.module.forward_with_routing(hidden.unsqueeze(0))
        self.loss = load_balance_loss(result.routing)
        return result.hidden.squeeze(0)

    def backward(self, output: Tensor, cotangent: Tensor) -> None:
        torch.autograd.backward([output, self.loss], [cotangent, None])


class Exact(OwnLayer):
    def scores(self, hidden: Tensor, values: Values, cells: Tensor | None) -> Tensor:
        return (hidden @ unit(values["router.centroids"], hidden.dtype).T).unsqueeze(1)


class Coarse(Exact):
    """A few experts of K neurons, one per token: equal active parameters."""

    def make_experts(self, shape: Shape) -> CoarseExperts:
        self.neurons_per_expert = shape.top_k
        count, size = self.config.num_experts, shape.top_k
        return CoarseExperts(count, shape.dim, size, activation=shape.activation)


class Hierarchical(OwnLayer):
    """Learned clusters, as many candidates as AIR."""

    def cell_scores(self, hidden: Tensor, values: Values) -> Tensor:
        return hidden @ unit(values["router.cluster_centroids"], hidden.dtype).T

    def scores(self, hidden: Tensor, values: Values, cells: Tensor | None) -> Tensor:
        """Expert's + cluster's score where the cluster is chosen."""
        assert cells is not None
        clusters = self.cell_scores(hidden, values)  # [T, G]
        kept = torch.full_like(clusters, -torch.inf).scatter(1, cells, clusters.gather(1, cells))
        experts = hidden @ unit(values["router.centroids"], hidden.dtype).T  # [T, E]
        per_cluster = experts.shape[1] // clusters.shape[1]
        return (experts + kept.repeat_interleave(per_cluster, dim=-1)).unsqueeze(1)


class Peer(OwnLayer):
    """Product keys."""

    def scores(self, hidden: Tensor, values: Values, cells: Tensor | None) -> Tensor:
        return product_key_scores(hidden, values["router.query.weight"], values["router.keys"])


def product_key_scores(hidden: Tensor, query: Tensor, keys: Tensor) -> Tensor:
    """PEER: a_i + b_j. query [P * D, D], keys [P, 2, sqrt(E), D / 2] -> [T, P, E]."""
    queries = hidden @ query.to(hidden.dtype).T
    queries = queries.view(hidden.shape[0], keys.shape[0], 2, -1)
    first, second = torch.einsum("tphd,phsd->htps", queries, keys.to(hidden.dtype))
    return (first.unsqueeze(-1) + second.unsqueeze(-2)).flatten(2)


def unit(rows: Tensor, dtype: torch.dtype) -> Tensor:
    """Rows of norm 1 in another precision."""
    return F.normalize(rows.to(dtype), dim=-1)
