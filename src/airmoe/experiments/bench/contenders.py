"""The layers under test: how each is built, run, and what it is defined to be.

Parameters and tokens have the dtype of the shape; none has a post-norm. Ours run as in training:
codebook update, jitter, and an optimizer that is never stepped, so that caches last.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass, replace
from importlib.util import find_spec
from typing import Any, ClassVar

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
    Tables,
    clustered_scores,
    product_key_scores,
    unit,
)
from airmoe.losses import load_balance_loss
from airmoe.moe import CoarseExperts, GranularExperts, MoELayer
from airmoe.routers import AirRouter, CellRouting, RouterConfig, track_optimizer
from airmoe.routers.routing import by_token

Values = dict[str, Tensor]  # the module's parameters by name, in any dtype


class NotHereError(RuntimeError):
    """A contender cannot be built here; the message says why."""


@dataclass(frozen=True)
class Answer:
    """Output of a layer and the choices behind it."""

    output: Tensor  # [T, D]
    expert_ids: Tensor  # [T, heads, K / heads]
    weights: Tensor | None = None  # as expert_ids, where the layer tells them
    cells: Tensor | None = None  # [T, R] the cells that candidates come from

    def rows(self, chosen: Tensor) -> Answer:
        """Of some tokens only, and without their graph."""
        parts = {name: part for name, part in vars(self).items() if part is not None}
        return Answer(**{name: part.detach()[chosen] for name, part in parts.items()})


class Contender(ABC):
    """One layer, built once and stepped many times."""

    module: Any  # a torch module, with the parameters that get gradients
    neurons_per_expert = 1
    jitter_std = 0.0  # of a logit in training mode; 0 where jitter cannot be compared

    def __init__(self, inputs: Inputs, make: Callable[[], nn.Module]) -> None:
        self.inputs, self.top_k = inputs, inputs.shape.top_k
        self.score_dtype = inputs.shape.torch_dtype  # in which its logits are meant to be computed
        torch.manual_seed(inputs.seed)
        with torch.device(inputs.device):
            self.module = make().to(inputs.shape.torch_dtype)

    def forward(self, hidden: Tensor) -> Tensor:
        """[T, D] -> [T, D]: in training mode all that a micro-batch does before its backward."""
        return self.module(hidden)

    def backward(self, output: Tensor, cotangent: Tensor) -> None:
        output.backward(cotangent)

    def values(self) -> Values:
        return {name: value.detach() for name, value in self.module.named_parameters()}

    @abstractmethod
    def answer(self, hidden: Tensor) -> Answer:
        """The layer with its choices, as its mode (training or evaluation) has it."""

    @abstractmethod
    def scores(self, hidden: Tensor, values: Values, cells: Tensor | None) -> Tensor:
        """Its logits by definition, in hidden's dtype: [T, heads, E], -inf = no candidate."""

    @abstractmethod
    def tables(self, values: Values) -> Tables:
        """The experts, a row per neuron."""

    def cell_scores(self, hidden: Tensor, values: Values) -> Tensor:
        """By which cells are chosen: [T, G]."""
        raise NotImplementedError(f"{type(self).__name__} has no cells")

    def inverted_index(self, values: Values) -> InvertedIndex | None:
        """Where candidates come from, if from an index."""
        return None

    def apart(self) -> dict[str, Callable[[], Any]]:
        """Actions that belong to training but not to every forward: name -> function."""
        return {}


class Gathered(Contender):
    """A layer that gathers the rows of each token."""

    kind: ClassVar[type[GatheredLayer]]

    def __init__(self, inputs: Inputs) -> None:
        super().__init__(inputs, lambda: self.kind(inputs))

    def answer(self, hidden: Tensor) -> Answer:
        lists = self.module.route(hidden)
        return Answer(self.module.run_experts(hidden, *lists), *lists)

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

    kind = ListingLayer
    module: ListingLayer

    def __init__(self, inputs: Inputs) -> None:
        super().__init__(inputs)
        self.module.refresh()

    def answer(self, hidden: Tensor) -> Answer:
        return replace(super().answer(hidden), cells=self.module.assign(hidden).unsqueeze(-1))

    def inverted_index(self, values: Values) -> InvertedIndex:
        layer = self.module
        return InvertedIndex(layer.codewords, layer.shortlists, values["centroids"], project=False)

    def cell_scores(self, hidden: Tensor, values: Values) -> Tensor:
        return hidden @ self.module.codewords.to(hidden.dtype).T

    def scores(self, hidden: Tensor, values: Values, cells: Tensor | None) -> Tensor:
        assert cells is not None
        return self.inverted_index(values).scores(hidden, cells.squeeze(-1))


class PeerPackage(Contender):
    """PyPI's PEER-pytorch, two matrices with GELU between them.

    `non_competing_scores=False` matters: the package's default takes one expert per head.
    """

    def __init__(self, inputs: Inputs) -> None:
        if find_spec("PEER_pytorch") is None:
            raise NotHereError(
                "PEER-pytorch is not installed. It is needed for this comparison only: "
                "pip install -c constraints/cpu.txt 'airmoe[bench]'"
            )
        from PEER_pytorch import PEER

        shape = inputs.shape
        sizes = {
            "heads": shape.num_heads,
            "num_experts": shape.num_experts,
            "num_experts_per_head": shape.top_k // shape.num_heads,
        }
        super().__init__(inputs, lambda: PEER(shape.dim, **sizes, non_competing_scores=False))

    def forward(self, hidden: Tensor) -> Tensor:
        return self.module(hidden.unsqueeze(0)).squeeze(0)

    def answer(self, hidden: Tensor) -> Answer:
        """With the expert ids as the package itself looks them up."""
        seen: list[Tensor] = []
        handle = self.module.weight_down_embed.register_forward_pre_hook(
            lambda _module, inputs: seen.append(inputs[0])
        )
        try:
            output = self.forward(hidden)
        finally:
            handle.remove()
        (ids,) = seen
        return Answer(output, ids.squeeze(0))

    def scores(self, hidden: Tensor, values: Values, cells: Tensor | None) -> Tensor:
        keys = values["keys"].permute(0, 2, 1, 3)  # [P, 2, sqrt(E), D / 2]
        query = values["to_queries.0.weight"]  # [2 * P * D / 2, D]: halves come first
        query = query.unflatten(0, (2, len(keys), -1)).transpose(0, 1).flatten(0, 2)
        return product_key_scores(hidden, query, keys)

    def tables(self, values: Values) -> Tables:
        up, down = (values[f"weight_{name}_embed.weight"] for name in ("down", "up"))
        return Tables(None, up, down)


class OwnLayer(Contender):
    """An airmoe layer in training mode, with jitter."""

    module: MoELayer

    def __init__(self, inputs: Inputs, config: RouterConfig) -> None:
        super().__init__(
            inputs,
            lambda: MoELayer(config.build(), self.make_experts(inputs.shape), post_norm="none"),
        )
        self.top_k, self.jitter_std = config.top_k, config.jitter_std
        self.score_dtype = torch.promote_types(inputs.shape.torch_dtype, torch.float32)
        self.router = self.module.router
        # Never stepped: its hook tells the router that caches last from one step to the next.
        self.optimizer = torch.optim.SGD(self.module.parameters(), lr=0.0)
        track_optimizer(self.module, self.optimizer)
        self.module.train()

    def make_experts(self, shape: Shape) -> GranularExperts | CoarseExperts:
        return GranularExperts(shape.num_experts, shape.dim, activation=shape.activation)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.module(hidden.unsqueeze(0)).squeeze(0)

    def answer(self, hidden: Tensor) -> Answer:
        if self.module.training:
            routing = self.router(hidden)  # without `observe`: the state stays as it is
            output = self.module.experts(hidden, routing)
        else:
            result = self.module.forward_with_routing(hidden.unsqueeze(0))
            routing, output = result.routing, result.hidden.squeeze(0)
        listed = routing.to_token_routing()
        heads = (listed.num_tokens, getattr(self.router.config, "num_heads", 1), -1)
        found = Answer(output, listed.expert_ids.view(heads), listed.weights.view(heads))
        if not isinstance(routing, CellRouting):
            return found
        return replace(
            found, cells=by_token(routing.cells.cell_of_row.unsqueeze(-1), routing.cells)
        )

    def tables(self, values: Values) -> Tables:
        gate = values.get("experts.gate")
        up, down = (values[f"experts.{name}"].flatten(0, -2) for name in ("up", "down"))
        return Tables(None if gate is None else gate.flatten(0, -2), up, down)


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

    def inverted_index(self, values: Values) -> InvertedIndex:
        codewords, shortlists = self.router.codebook.codewords, self.router.shortlists()
        return InvertedIndex(codewords, shortlists, values["router.centroids"], project=True)

    def cell_scores(self, hidden: Tensor, values: Values) -> Tensor:
        return hidden @ unit(self.router.codebook.codewords, hidden.dtype).T

    def scores(self, hidden: Tensor, values: Values, cells: Tensor | None) -> Tensor:
        assert cells is not None
        return self.inverted_index(values).scores(hidden, cells.squeeze(-1))

    def apart(self) -> dict[str, Callable[[], Any]]:
        """The codebook update is in every forward too; the others belong to an optimizer step."""
        batch, parameters = self.inputs.batches[0], list(self.module.parameters())
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
        result = self.module.forward_with_routing(hidden.unsqueeze(0))
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
