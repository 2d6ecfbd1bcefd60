"""The layers under test: how each is built, run, and what it is defined to be.

Parameters and tokens have the dtype of the shape; none has a post-norm. Ours run as in training:
codebook update, jitter, and an optimizer that is never stepped, so that caches last.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from airmoe.experiments.bench.definitions import (
    InvertedIndex,
    Tables,
    clustered_scores,
    product_key_scores,
    unit,
)
from airmoe.experiments.bench.gathered import GatheredExact, GatheredLayer, GatheredPeer
from airmoe.experiments.bench.inputs import Inputs
from airmoe.experiments.bench.paper_listing import ListingLayer
from airmoe.moe import CoarseExperts, GranularExperts, MoELayer
from airmoe.routers import (
    AirRouter,
    CellRouting,
    HierarchicalRouter,
    PeerRouter,
    Router,
    Routing,
    TopKRouter,
    track_optimizer,
)
from airmoe.routers.routing import by_token

Values = dict[str, Tensor]  # the module's parameters by name, in any dtype


@dataclass(frozen=True)
class Answer:
    """Output of a layer and the choices behind it."""

    output: Tensor  # [T, D]
    expert_ids: Tensor  # [T, heads, K / heads]
    weights: Tensor  # the same
    cells: Tensor | None = None  # [T, R] the cells that candidates come from

    def rows(self, chosen: Tensor) -> Answer:
        """Of some tokens only, and without their graph."""
        parts = (self.output, self.expert_ids, self.weights)
        output, ids, weights = (part.detach()[chosen] for part in parts)
        return Answer(output, ids, weights, None if self.cells is None else self.cells[chosen])


class NotHereError(RuntimeError):
    """A contender cannot be built at this shape; the message says why."""


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

    def apart(self) -> dict[str, Any]:
        """Actions that belong to training but not to every forward: name -> function."""
        return {}


class Listing(Contender):
    """The paper's listing."""

    def __init__(self, inputs: Inputs) -> None:
        shape = inputs.shape
        self.top_k, self.score_dtype = shape.top_k, shape.torch_dtype
        torch.manual_seed(inputs.seed)
        with torch.device(inputs.device):
            layer = ListingLayer(
                inputs.codewords,
                shape.num_experts,
                shape.top_k,
                shape.shortlist_size,
                shape.activation,
            )
        self.module = self.layer = layer.to(shape.torch_dtype)
        layer.refresh()

    def answer(self, hidden: Tensor) -> Answer:
        routing = self.layer.route(hidden)
        return Answer(
            self.layer.run_experts(hidden, routing),
            routing.expert_ids.unsqueeze(1),
            routing.weights.unsqueeze(1),
            self.layer.assign(hidden).unsqueeze(-1),
        )

    def inverted_index(self, centroids: Tensor | None = None) -> InvertedIndex:
        layer = self.layer
        centroids = layer.centroids if centroids is None else centroids
        return InvertedIndex(layer.codewords, layer.shortlists, centroids, project=False)

    def cell_scores(self, hidden: Tensor, values: Values) -> Tensor:
        return hidden @ self.layer.codewords.to(hidden.dtype).T

    def scores(self, hidden: Tensor, values: Values, cells: Tensor | None) -> Tensor:
        assert cells is not None
        return self.inverted_index(values["centroids"]).scores(hidden, cells.squeeze(-1))

    def tables(self, values: Values) -> Tables:
        return Tables(values.get("gate"), values["up"], values["down"])


class Gathered(Contender):
    """PEER or exact top-K with rows gathered per token."""

    def __init__(self, inputs: Inputs, kind: type[GatheredLayer]) -> None:
        self.top_k, self.score_dtype = inputs.shape.top_k, inputs.shape.torch_dtype
        torch.manual_seed(inputs.seed)
        with torch.device(inputs.device):
            self.layer = kind(inputs.shape).to(inputs.shape.torch_dtype)
        self.module = self.layer

    def answer(self, hidden: Tensor) -> Answer:
        lists = self.layer.route(hidden)
        return Answer(self.layer.run_experts(hidden, lists), lists.expert_ids, lists.weights)

    def scores(self, hidden: Tensor, values: Values, cells: Tensor | None) -> Tensor:
        if isinstance(self.layer, GatheredPeer):
            return product_key_scores(hidden, values["query"], values["keys"])
        return (hidden @ values["centroids"].to(hidden.dtype).T).unsqueeze(1)

    def tables(self, values: Values) -> Tables:
        return Tables(values.get("gate"), values["up"], values["down"])


def gathered_peer(inputs: Inputs) -> Gathered:
    return Gathered(inputs, GatheredPeer)


def gathered_exact(inputs: Inputs) -> Gathered:
    return Gathered(inputs, GatheredExact)


class OwnLayer(Contender):
    """An airmoe layer in training mode, with jitter."""

    def __init__(
        self, inputs: Inputs, router: Router, experts: GranularExperts | CoarseExperts
    ) -> None:
        self.inputs, self.router, self.experts = inputs, router, experts
        self.top_k, self.jitter_std = router.config.top_k, router.config.jitter_std
        dtype = inputs.shape.torch_dtype
        self.score_dtype = torch.promote_types(dtype, torch.float32)  # whatever the parameters are
        self.module = self.layer = MoELayer(router, experts, post_norm="none").to(dtype)
        # Never stepped: its hook tells the router that caches last from one step to the next.
        self.optimizer = torch.optim.SGD(self.layer.parameters(), lr=0.0)
        track_optimizer(self.layer, self.optimizer)
        self.layer.train()

    def forward(self, hidden: Tensor) -> Tensor:
        return self.layer(hidden.unsqueeze(0)).squeeze(0)

    def answer(self, hidden: Tensor) -> Answer:
        if self.layer.training:
            routing = self.router(hidden)  # without `observe`: the state stays as it is
            output = self.experts(hidden, routing)
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
    return by_token(cells.cell_of_row().unsqueeze(-1), cells)


def _granular(inputs: Inputs) -> GranularExperts:
    shape = inputs.shape
    return GranularExperts(shape.num_experts, shape.dim, activation=shape.activation)


class Air(OwnLayer):
    """AIR, with the codebook that everybody is given."""

    router: AirRouter

    def __init__(self, inputs: Inputs) -> None:
        shape = inputs.shape
        config = AirRouter.Config(
            dim=shape.dim,
            num_experts=shape.num_experts,
            top_k=shape.top_k,
            num_codewords=shape.num_codewords,
            shortlist_size=shape.shortlist_size,
            dead_below=0.0,  # or empty cells would be filled while they are measured
        )
        torch.manual_seed(inputs.seed)
        with torch.device(inputs.device):
            super().__init__(inputs, config.build(), _granular(inputs))
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

    def apart(self) -> dict[str, Any]:
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


class Exact(OwnLayer):
    """Exact routing, our own."""

    def __init__(self, inputs: Inputs) -> None:
        shape = inputs.shape
        config = TopKRouter.Config(dim=shape.dim, num_experts=shape.num_experts, top_k=shape.top_k)
        torch.manual_seed(inputs.seed)
        with torch.device(inputs.device):
            super().__init__(inputs, config.build(), _granular(inputs))

    def scores(self, hidden: Tensor, values: Values, cells: Tensor | None) -> Tensor:
        return (hidden @ unit(values["router.centroids"], hidden.dtype).T).unsqueeze(1)


class Coarse(Exact):
    """Few experts of K neurons, of which a token takes one: as many active parameters."""

    def __init__(self, inputs: Inputs) -> None:
        shape = inputs.shape
        count, size = shape.num_coarse_experts, shape.top_k
        config = TopKRouter.Config(dim=shape.dim, num_experts=count, top_k=1)
        torch.manual_seed(inputs.seed)
        with torch.device(inputs.device):
            experts = CoarseExperts(count, shape.dim, size, activation=shape.activation)
            OwnLayer.__init__(self, inputs, config.build(), experts)
        self.neurons_per_expert = size
        self.jitter_std = 0.0  # one weight among all experts shows no jitter


class Hierarchical(OwnLayer):
    """Learned clusters, as many candidates as AIR."""

    def __init__(self, inputs: Inputs) -> None:
        shape = inputs.shape
        selected = shape.num_selected_clusters
        if selected is None:
            raise NotHereError("clusters of E / G experts do not add up to M candidates")
        config = HierarchicalRouter.Config(
            dim=shape.dim,
            num_experts=shape.num_experts,
            top_k=shape.top_k,
            num_clusters=shape.num_codewords,
            num_selected_clusters=selected,
        )
        torch.manual_seed(inputs.seed)
        with torch.device(inputs.device):
            super().__init__(inputs, config.build(), _granular(inputs))
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
        shape = inputs.shape
        config = PeerRouter.Config(
            dim=shape.dim,
            num_experts=shape.num_experts,
            top_k=shape.top_k,
            num_heads=shape.num_heads,
        )
        torch.manual_seed(inputs.seed)
        with torch.device(inputs.device):
            super().__init__(inputs, config.build(), _granular(inputs))
        self.jitter_std *= 2**0.5  # a logit is the sum of two jittered scores

    def scores(self, hidden: Tensor, values: Values, cells: Tensor | None) -> Tensor:
        return product_key_scores(hidden, values["router.query.weight"], values["router.keys"])
