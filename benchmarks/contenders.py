"""The layers under test: how each is built, what a step of it is, what it is defined to be."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from airmoe import (
    AirRouter,
    GranularExperts,
    HierarchicalRouter,
    MoELayer,
    PeerRouter,
    Router,
    Routing,
    TopKRouter,
    load_balance_loss,
    track_optimizer,
)
from airmoe.experiments.bench.definitions import (
    InvertedIndex,
    Tables,
    clustered_scores,
    product_key_scores,
    unit,
)
from airmoe.experiments.bench.paper_listing import ListingLayer
from benchmarks.inputs import TokenSource
from benchmarks.peer_pytorch import PeerPytorch

Form = Literal["gelu", "swiglu"]


@dataclass(frozen=True)
class Answer:
    """Output of a layer and the experts behind it."""

    output: Tensor  # [T, D]
    expert_ids: Tensor  # [T, heads, K / heads]
    weights: Tensor | None = None  # as expert_ids, where the layer tells them


class Contender(ABC):
    """One layer, built once and stepped many times."""

    top_k: int
    jitter_std = 0.0  # of a logit in training mode

    @property
    @abstractmethod
    def module(self) -> nn.Module:
        """With the parameters that get gradients."""

    @abstractmethod
    def forward(self, hidden: Tensor) -> list[Tensor]:
        """What a training micro-batch does before its backward: output [T, D], then any losses."""

    @abstractmethod
    def answer(self, hidden: Tensor) -> Answer:
        """The layer with its choices, in evaluation mode: no jitter."""

    @abstractmethod
    def scores(self, hidden: Tensor) -> Tensor:
        """Its logits by definition, in hidden's dtype: [T, heads, E], -inf = no candidate."""

    @abstractmethod
    def tables(self) -> Tables: ...

    def inverted_index(self) -> InvertedIndex | None:
        """Where candidates come from, if from an index."""
        return None

    def post_norm(self, output: Tensor) -> Tensor:
        """What follows the experts, in output's dtype."""
        return output

    def jittered_answer(self, hidden: Tensor) -> Answer | None:
        """The same in training mode, before any post-norm; None where that cannot be compared."""
        return None

    def invalidate(self) -> None:
        """Do what an optimizer step does to caches."""
        raise NotImplementedError(f"{type(self).__name__} has no cache to refresh")


class Listing(Contender):
    """The paper's listing, given the codebook that AIR starts with."""

    def __init__(self, source: TokenSource, form: Form) -> None:
        shape = source.shape
        self.top_k = shape.top_k
        torch.manual_seed(source.seed)
        self.layer = ListingLayer(
            source.codebook().codewords,
            shape.num_experts,
            shape.top_k,
            shape.shortlist_size,
            form,
        )

    @property
    def module(self) -> ListingLayer:
        return self.layer

    def forward(self, hidden: Tensor) -> list[Tensor]:
        return [self.layer(hidden)]

    def answer(self, hidden: Tensor) -> Answer:
        routing = self.layer.route(hidden)
        output = self.layer.run_experts(hidden, routing)
        return Answer(output, routing.expert_ids.unsqueeze(1), routing.weights.unsqueeze(1))

    def inverted_index(self) -> InvertedIndex:
        layer = self.layer
        return InvertedIndex(layer.codewords, layer.shortlists, layer.centroids, project=False)

    def scores(self, hidden: Tensor) -> Tensor:
        return self.inverted_index().scores(hidden)

    def tables(self) -> Tables:
        return Tables(self.layer.gate, self.layer.up, self.layer.down)


class PeerPackage(Contender):
    """PyPI's PEER-pytorch."""

    def __init__(self, source: TokenSource) -> None:
        shape = source.shape
        self.top_k = shape.top_k
        torch.manual_seed(source.seed)
        self.layer = PeerPytorch(shape.dim, shape.num_experts, shape.top_k, shape.num_heads)

    @property
    def module(self) -> PeerPytorch:
        return self.layer

    def forward(self, hidden: Tensor) -> list[Tensor]:
        return [self.layer(hidden)]

    def answer(self, hidden: Tensor) -> Answer:
        return Answer(*self.layer.forward_with_ids(hidden))

    def scores(self, hidden: Tensor) -> Tensor:
        peer = self.layer.peer
        project = peer.to_queries[0]
        assert isinstance(project, nn.Linear)
        queries = hidden @ project.weight.to(hidden.dtype).T
        queries = queries.view(hidden.shape[0], 2, peer.heads, -1)  # halves come first
        first, second = torch.einsum(
            "tphd,hkpd->pthk", queries, peer.keys.to(hidden.dtype)
        )  # [T, heads, sqrt(E)] each
        return (first.unsqueeze(-1) + second.unsqueeze(-2)).flatten(2)

    def tables(self) -> Tables:
        peer = self.layer.peer
        return Tables(None, peer.weight_down_embed.weight, peer.weight_up_embed.weight)


class OwnLayer(Contender):
    """An airmoe layer: router, granular experts, post-norm, in training mode with jitter."""

    def __init__(self, source: TokenSource, form: Form, router: Router) -> None:
        shape = source.shape
        self.router, self.top_k = router, shape.top_k
        self.jitter_std = router.config.jitter_std
        self.experts = GranularExperts(shape.num_experts, shape.dim, activation=form)
        self.layer = MoELayer(router, self.experts)
        # Never stepped: its hook tells the router that caches last from one step to the next.
        self.optimizer = torch.optim.SGD(self.layer.parameters(), lr=0.0)
        track_optimizer(self.layer, self.optimizer)
        self.layer.train()

    @property
    def module(self) -> MoELayer:
        return self.layer

    def forward(self, hidden: Tensor) -> list[Tensor]:
        return [self.layer(hidden.unsqueeze(0)).squeeze(0)]

    def answer(self, hidden: Tensor) -> Answer:
        result = self.layer.forward_with_routing(hidden.unsqueeze(0))
        return self._answer(result.hidden.squeeze(0), result.routing)

    def jittered_answer(self, hidden: Tensor) -> Answer | None:
        routing = self.router(hidden)  # without `observe`: the state stays as it is
        return self._answer(self.experts(hidden, routing), routing)

    def _answer(self, output: Tensor, routing: Routing) -> Answer:
        listed = routing.to_token_routing()
        heads = (listed.num_tokens, getattr(self.router.config, "num_heads", 1), -1)
        return Answer(output, listed.expert_ids.view(heads), listed.weights.view(heads))

    def tables(self) -> Tables:
        return Tables(getattr(self.experts, "gate", None), self.experts.up, self.experts.down)

    def post_norm(self, output: Tensor) -> Tensor:
        norm = self.layer.post_norm
        assert isinstance(norm, nn.LayerNorm)
        weight, bias = norm.weight.to(output.dtype), norm.bias.to(output.dtype)
        return F.layer_norm(output, norm.normalized_shape, weight, bias, norm.eps)

    def invalidate(self) -> None:
        self.router.on_parameters_changed()


class AirLayer(OwnLayer):
    """AIR with a codebook that has seen tokens like those it is measured on."""

    router: AirRouter

    def __init__(self, source: TokenSource, form: Form, balance: bool = False) -> None:
        shape = source.shape
        torch.manual_seed(source.seed)
        config = AirRouter.Config(
            dim=shape.dim,
            num_experts=shape.num_experts,
            top_k=shape.top_k,
            num_codewords=shape.num_codewords,
            shortlist_size=shape.shortlist_size,
        )
        super().__init__(source, form, config.build())
        self.balance = balance
        *batches, last = source.warmup_batches()
        for batch in batches:
            self.router.codebook.update(batch)
        self.router.observe(last)  # which also builds the shortlists

    def forward(self, hidden: Tensor) -> list[Tensor]:
        result = self.layer.forward_with_routing(hidden.unsqueeze(0))
        output = result.hidden.squeeze(0)
        return [output, load_balance_loss(result.routing)] if self.balance else [output]

    def inverted_index(self) -> InvertedIndex:
        codewords, shortlists = self.router.codebook.codewords, self.router.shortlists()
        return InvertedIndex(codewords, shortlists, self.router.centroids, project=True)

    def scores(self, hidden: Tensor) -> Tensor:
        return self.inverted_index().scores(hidden)


class TopKLayer(OwnLayer):
    """Exact routing."""

    def __init__(self, source: TokenSource, form: Form) -> None:
        shape = source.shape
        torch.manual_seed(source.seed)
        config = TopKRouter.Config(dim=shape.dim, num_experts=shape.num_experts, top_k=shape.top_k)
        super().__init__(source, form, config.build())

    def scores(self, hidden: Tensor) -> Tensor:
        assert isinstance(self.router, TopKRouter)
        return (hidden @ unit(self.router.centroids, hidden.dtype).T).unsqueeze(1)


class HierarchicalLayer(OwnLayer):
    """Learned clusters, as many candidates as AIR."""

    def __init__(self, source: TokenSource, form: Form) -> None:
        shape = source.shape
        torch.manual_seed(source.seed)
        config = HierarchicalRouter.Config(
            dim=shape.dim,
            num_experts=shape.num_experts,
            top_k=shape.top_k,
            num_clusters=shape.num_codewords,
            num_selected_clusters=shape.num_selected_clusters,
        )
        super().__init__(source, form, config.build())

    def jittered_answer(self, hidden: Tensor) -> Answer | None:
        return None  # jitter moves its candidates too, so the definition would need the draws

    def scores(self, hidden: Tensor) -> Tensor:
        assert isinstance(self.router, HierarchicalRouter)
        router = self.router
        clusters = hidden @ unit(router.cluster_centroids, hidden.dtype).T  # [T, G]
        best = clusters.topk(router.config.num_selected_clusters, dim=-1).indices
        return clustered_scores(hidden, router.centroids, router.cluster_centroids, best)


class PeerLayer(OwnLayer):
    """Product keys, our own."""

    def __init__(self, source: TokenSource, form: Form) -> None:
        shape = source.shape
        torch.manual_seed(source.seed)
        config = PeerRouter.Config(
            dim=shape.dim,
            num_experts=shape.num_experts,
            top_k=shape.top_k,
            num_heads=shape.num_heads,
        )
        super().__init__(source, form, config.build())
        self.jitter_std *= 2**0.5  # a logit is the sum of two jittered scores

    def scores(self, hidden: Tensor) -> Tensor:
        assert isinstance(self.router, PeerRouter)
        return product_key_scores(hidden, self.router.query.weight, self.router.keys)
