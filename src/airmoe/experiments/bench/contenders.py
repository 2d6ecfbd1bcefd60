"""The layers under test: how each is built, run, and what it is defined to be.

Parameters and tokens have the dtype of the shape; none has a post-norm. Ours run as in training:
codebook update, jitter, and an optimizer that is never stepped, so that caches last.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, ClassVar, TypeVar

import torch
from torch import Tensor, nn

from airmoe.experiments.bench.cases import Shape
from airmoe.experiments.bench.inputs import Inputs
from airmoe.experiments.bench.plain import (
    GatheredExact,
    GatheredLayer,
    GatheredPeer,
    InvertedIndex,
    ListingLayer,
    PeerPytorch,
    Tables,
    clustered_scores,
    product_key_scores,
    unit,
)
from airmoe.losses import load_balance_loss
from airmoe.moe import CoarseExperts, GranularExperts, MoELayer
from airmoe.routers import AirRouter, CellRouting, RouterConfig, Routing, track_optimizer
from airmoe.routers.routing import by_token

Module = TypeVar("Module", bound=nn.Module)
Values = dict[str, Tensor]  # the module's parameters by name, in any dtype


@dataclass(frozen=True)
class Answer:
    """Output of a layer and the choices behind it."""

    output: Tensor  # [T, D]
    expert_ids: Tensor  # [T, heads, K / heads]
    weights: Tensor | None = None  # as expert_ids, where the layer tells them
    cells: Tensor | None = None  # [T, R] the cells that candidates come from

    def rows(self, chosen: Tensor) -> Answer:
        """Of some tokens only, and without their graph."""
        parts = (self.output, self.expert_ids, self.weights, self.cells)
        return Answer(*(None if part is None else part.detach()[chosen] for part in parts))  # pyright: ignore[reportArgumentType]


class Contender(ABC):
    """One layer, built once and stepped many times."""

    module: nn.Module  # with the parameters that get gradients
    top_k: int
    score_dtype: torch.dtype  # in which its logits are meant to be computed
    neurons_per_expert = 1
    jitter_std = 0.0  # of a logit in training mode; 0 where jitter cannot be compared

    def forward(self, hidden: Tensor) -> Tensor:
        """[T, D] -> [T, D]: in training mode all that a micro-batch does before its backward."""
        return self.module(hidden)

    def backward(self, output: Tensor, cotangent: Tensor) -> None:
        output.backward(cotangent)

    @abstractmethod
    def answer(self, hidden: Tensor) -> Answer:
        """The layer with its choices, as its mode (training or evaluation) has it."""

    @abstractmethod
    def scores(self, hidden: Tensor, values: Values, cells: Tensor | None) -> Tensor:
        """Its logits by definition, in hidden's dtype: [T, heads, E], -inf = no candidate."""

    @abstractmethod
    def tables(self, values: Values) -> Tables: ...

    def cell_scores(self, hidden: Tensor, values: Values) -> Tensor:
        """By which cells are chosen: [T, G]."""
        raise NotImplementedError(f"{type(self).__name__} has no cells")

    def inverted_index(self, centroids: Tensor | None = None) -> InvertedIndex | None:
        """Where candidates come from, if from an index; other centroids have gradients."""
        return None

    def apart(self) -> dict[str, Callable[[], Any]]:
        """Actions that belong to training but not to every forward: name -> function."""
        return {}


def _built(inputs: Inputs, make: Callable[[], Module]) -> Module:
    """A module with the parameters of the seed, on the device and in the dtype of the inputs."""
    torch.manual_seed(inputs.seed)
    with torch.device(inputs.device):
        return make().to(inputs.shape.torch_dtype)


class Gathered(Contender):
    """A layer that gathers the rows of each token."""

    kind: ClassVar[type[GatheredLayer]]

    def __init__(self, inputs: Inputs) -> None:
        self.top_k, self.score_dtype = inputs.shape.top_k, inputs.shape.torch_dtype
        self.module = self.layer = _built(inputs, lambda: self.make(inputs))

    def make(self, inputs: Inputs) -> GatheredLayer:
        return self.kind(inputs.shape)

    def answer(self, hidden: Tensor) -> Answer:
        lists = self.layer.route(hidden)
        return Answer(self.layer.run_experts(hidden, lists), lists.expert_ids, lists.weights)

    def tables(self, values: Values) -> Tables:
        return Tables(values.get("gate"), values["up"], values["down"])


class PlainExact(Gathered):
    kind = GatheredExact

    def scores(self, hidden: Tensor, values: Values, cells: Tensor | None) -> Tensor:
        return (hidden @ values["centroids"].to(hidden.dtype).T).unsqueeze(1)


class PlainPeer(Gathered):
    kind = GatheredPeer

    def scores(self, hidden: Tensor, values: Values, cells: Tensor | None) -> Tensor:
        return product_key_scores(hidden, values["query"], values["keys"])


class Listing(Gathered):
    """The paper's listing."""

    layer: ListingLayer

    def __init__(self, inputs: Inputs) -> None:
        super().__init__(inputs)
        self.layer.refresh()  # centroids have another dtype now

    def make(self, inputs: Inputs) -> ListingLayer:
        return ListingLayer(inputs.shape, inputs.codewords)

    def answer(self, hidden: Tensor) -> Answer:
        lists = self.layer.route(hidden)
        output, cells = self.layer.run_experts(hidden, lists), self.layer.assign(hidden)
        return Answer(output, lists.expert_ids, lists.weights, cells.unsqueeze(-1))

    def inverted_index(self, centroids: Tensor | None = None) -> InvertedIndex:
        layer = self.layer
        centroids = layer.centroids if centroids is None else centroids
        return InvertedIndex(layer.codewords, layer.shortlists, centroids, project=False)

    def cell_scores(self, hidden: Tensor, values: Values) -> Tensor:
        return hidden @ self.layer.codewords.to(hidden.dtype).T

    def scores(self, hidden: Tensor, values: Values, cells: Tensor | None) -> Tensor:
        assert cells is not None
        return self.inverted_index(values["centroids"]).scores(hidden, cells.squeeze(-1))


class PeerPackage(Contender):
    """PyPI's PEER-pytorch."""

    def __init__(self, inputs: Inputs) -> None:
        self.top_k, self.score_dtype = inputs.shape.top_k, inputs.shape.torch_dtype
        self.module = self.layer = _built(inputs, lambda: PeerPytorch(inputs.shape))

    def answer(self, hidden: Tensor) -> Answer:
        return Answer(*self.layer.forward_with_ids(hidden))

    def scores(self, hidden: Tensor, values: Values, cells: Tensor | None) -> Tensor:
        keys = values["peer.keys"].permute(0, 2, 1, 3)  # [P, 2, sqrt(E), D / 2]
        query = values["peer.to_queries.0.weight"]  # [2 * P * D / 2, D]: halves come first
        query = query.unflatten(0, (2, len(keys), -1)).transpose(0, 1).flatten(0, 2)
        return product_key_scores(hidden, query, keys)

    def tables(self, values: Values) -> Tables:
        up, down = (values[f"peer.weight_{name}_embed.weight"] for name in ("down", "up"))
        return Tables(None, up, down)


class OwnLayer(Contender):
    """An airmoe layer in training mode, with jitter."""

    def __init__(self, inputs: Inputs, config: RouterConfig) -> None:
        self.inputs = inputs
        self.top_k, self.jitter_std = config.top_k, config.jitter_std
        self.score_dtype = torch.promote_types(inputs.shape.torch_dtype, torch.float32)
        self.module = self.layer = _built(
            inputs,
            lambda: MoELayer(config.build(), self.make_experts(inputs.shape), post_norm="none"),
        )
        self.router = self.layer.router
        # Never stepped: its hook tells the router that caches last from one step to the next.
        self.optimizer = torch.optim.SGD(self.layer.parameters(), lr=0.0)
        track_optimizer(self.layer, self.optimizer)
        self.layer.train()

    def make_experts(self, shape: Shape) -> GranularExperts | CoarseExperts:
        return GranularExperts(shape.num_experts, shape.dim, activation=shape.activation)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.layer(hidden.unsqueeze(0)).squeeze(0)

    def answer(self, hidden: Tensor) -> Answer:
        if self.layer.training:
            routing = self.router(hidden)  # without `observe`: the state stays as it is
            output = self.layer.experts(hidden, routing)
        else:
            result = self.layer.forward_with_routing(hidden.unsqueeze(0))
            routing, output = result.routing, result.hidden.squeeze(0)
        listed = routing.to_token_routing()
        heads = (listed.num_tokens, getattr(self.router.config, "num_heads", 1), -1)
        ids, weights = listed.expert_ids.view(heads), listed.weights.view(heads)
        return Answer(output, ids, weights, _cells_of(routing))

    def tables(self, values: Values) -> Tables:
        gate, up, down = (values.get(f"experts.{name}") for name in ("gate", "up", "down"))
        rows = [None if table is None else table.flatten(0, -2) for table in (gate, up, down)]
        return Tables(*rows)  # pyright: ignore[reportArgumentType]


def _cells_of(routing: Routing) -> Tensor | None:
    """[T, R] the cells of each token, where there are cells."""
    if not isinstance(routing, CellRouting):
        return None
    cells = routing.cells
    return by_token(cells.cell_of_row.unsqueeze(-1), cells)


class Air(OwnLayer):
    """AIR, with the codebook that everybody is given."""

    router: AirRouter

    def __init__(self, inputs: Inputs) -> None:
        super().__init__(inputs, inputs.shape.air())
        if inputs.centroids is not None:
            with torch.no_grad():
                self.router.centroids.copy_(inputs.centroids)
        self.router.codebook.load_state_dict(inputs.codebook_state())
        self.router.observe(inputs.batches[-1])  # which also builds the shortlists

    def inverted_index(self, centroids: Tensor | None = None) -> InvertedIndex:
        codewords, shortlists = self.router.codebook.codewords, self.router.shortlists()
        centroids = self.router.centroids if centroids is None else centroids
        return InvertedIndex(codewords, shortlists, centroids, project=True)

    def cell_scores(self, hidden: Tensor, values: Values) -> Tensor:
        return self.inverted_index().cosines(hidden)

    def scores(self, hidden: Tensor, values: Values, cells: Tensor | None) -> Tensor:
        assert cells is not None
        index = self.inverted_index(values["router.centroids"])
        return index.scores(hidden, cells.squeeze(-1))

    def apart(self) -> dict[str, Callable[[], Any]]:
        """The codebook update is in every forward too; the others belong to an optimizer step."""
        batch, parameters = self.inputs.batches[0], list(self.layer.parameters())
        masters = [parameter.detach().float() for parameter in parameters]

        def cast() -> None:
            for master in masters:
                master.to(self.inputs.shape.torch_dtype)

        def make_gradients() -> None:
            for parameter in parameters:
                torch.zeros_like(parameter)

        return {
            "codebook update": lambda: self.router.observe(batch),
            "refresh (1/|w|, shortlists, reverse index)": self.router.rebuild_shortlists,
            "casts from float32": cast,
            "zeroed gradient buffers": make_gradients,
        }


class BalancedAir(Air):
    """With the load balance loss."""

    def forward(self, hidden: Tensor) -> Tensor:
        result = self.layer.forward_with_routing(hidden.unsqueeze(0))
        self.loss = load_balance_loss(result.routing)
        return result.hidden.squeeze(0)

    def backward(self, output: Tensor, cotangent: Tensor) -> None:
        torch.autograd.backward([output, self.loss], [cotangent, None])


class Exact(OwnLayer):
    """Exact routing, our own."""

    def __init__(self, inputs: Inputs) -> None:
        super().__init__(inputs, inputs.shape.exact())

    def scores(self, hidden: Tensor, values: Values, cells: Tensor | None) -> Tensor:
        return (hidden @ unit(values["router.centroids"], hidden.dtype).T).unsqueeze(1)


class Coarse(Exact):
    """Few experts of K neurons, of which a token takes one: as many active parameters."""

    def __init__(self, inputs: Inputs) -> None:
        OwnLayer.__init__(self, inputs, inputs.shape.coarse())
        self.neurons_per_expert = inputs.shape.top_k
        self.jitter_std = 0.0  # one weight among all experts shows no jitter

    def make_experts(self, shape: Shape) -> CoarseExperts:
        count, size = shape.num_coarse_experts, shape.top_k
        return CoarseExperts(count, shape.dim, size, activation=shape.activation)


class Hierarchical(OwnLayer):
    """Learned clusters, as many candidates as AIR."""

    def __init__(self, inputs: Inputs) -> None:
        super().__init__(inputs, inputs.shape.hierarchical())
        self.jitter_std = 0.0  # it moves the candidates too, so the definition would need the draws

    def cell_scores(self, hidden: Tensor, values: Values) -> Tensor:
        return hidden @ unit(values["router.cluster_centroids"], hidden.dtype).T

    def scores(self, hidden: Tensor, values: Values, cells: Tensor | None) -> Tensor:
        assert cells is not None
        centroids = values["router.centroids"]
        return clustered_scores(hidden, centroids, values["router.cluster_centroids"], cells)


class Peer(OwnLayer):
    """Product keys, our own."""

    def __init__(self, inputs: Inputs) -> None:
        super().__init__(inputs, inputs.shape.peer())
        self.jitter_std *= 2**0.5  # a logit is the sum of two jittered scores

    def scores(self, hidden: Tensor, values: Values, cells: Tensor | None) -> Tensor:
        return product_key_scores(hidden, values["router.query.weight"], values["router.keys"])
