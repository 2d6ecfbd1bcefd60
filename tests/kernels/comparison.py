"""Comparing a kernel with its reference: no worse than twice the reference in the same dtype."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from torch import Tensor

from airmoe.kernels.backend import use_backend
from airmoe.kernels.cell_gates import cell_gates
from airmoe.kernels.cell_scores import cell_scores
from airmoe.kernels.cells import Cells, make_cells
from airmoe.kernels.noise import Noise, Stage, make_noise, normal
from airmoe.kernels.top_k import selection_keys
from airmoe.routers.routing import ScoredCells, Tokens

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
# The interpreter's bfloat16 is wrong, so on a CPU there is none.
DTYPES = [torch.float32, torch.float16] + ([torch.bfloat16] if DEVICE == "cuda" else [])
FLOOR = 2  # units in the last place of the largest entry: a lucky reference may round less
dtypes = pytest.mark.parametrize("dtype", DTYPES, ids=str)
Found = dict[str, Tensor]


def any_noise(rows: int, std: float = 0.3) -> Noise:
    keys = torch.randint(-(2**31), 2**31, (rows,), device=DEVICE).to(torch.int32)
    return Noise(keys, std)


@dataclass(frozen=True)
class CellCase:
    """Cells of given sizes; rows of one token each unless `rows_per_token` says otherwise."""

    sizes: tuple[int, ...]
    dim: int = 24
    experts: int = 70
    pool: int = 19
    rows_per_token: int = 1
    jitter: bool = True
    normalize: bool = True

    @property
    def num_tokens(self) -> int:
        return sum(self.sizes) // self.rows_per_token

    def cells(self) -> Cells:
        assignments = torch.arange(len(self.sizes)).repeat_interleave(torch.tensor(self.sizes))
        cell_ids = assignments[torch.randperm(assignments.numel())].view(-1, self.rows_per_token)
        pools = torch.rand(len(self.sizes), self.experts).argsort(-1)[:, : self.pool]
        return make_cells(cell_ids.to(DEVICE), pools.sort(-1).values.to(DEVICE))

    def some_valid(self) -> Tensor:
        """As a view that has gaps."""
        valid = (torch.rand(self.num_tokens, 2, device=DEVICE) > 0.15)[:, 0]
        valid[0] = True
        return valid

    def form(self, centroids: Tensor) -> dict[str, Any]:
        """The norms and the jitter of this case's scores."""
        seed = torch.full((), 5, device=DEVICE)  # no copy: a graph may hold it
        noise = make_noise(seed, Stage.TOKEN, self.num_tokens, 0.3) if self.jitter else None
        norms = (
            centroids.detach().to(torch.promote_types(centroids.dtype, torch.float32)).norm(dim=-1)
        )
        return {"inverse_norms": 1 / norms if self.normalize else None, "noise": noise}

    def scored(self, hidden: Tensor, centroids: Tensor, cells: Cells, valid: Tensor) -> ScoredCells:
        """The candidates of the definition."""
        hidden = hidden.masked_fill(~valid.unsqueeze(-1), 0)
        scores = cell_scores(hidden, centroids, cells, **self.form(centroids))
        return ScoredCells(Tokens(hidden, valid), cells, scores, self.experts)

    def gates(
        self,
        given: Found,
        cells: Cells,
        valid: Tensor,
        top_k: int | None = None,
        capacity: int | None = None,
    ) -> Found:
        """What the kernels choose, and its weights; without `top_k` experts choose."""
        hidden, centroids = given["hidden"].masked_fill(~valid.unsqueeze(-1), 0), given["centroids"]
        room = None if capacity is None else torch.full((), capacity, device=DEVICE)
        form = self.form(centroids)
        found = cell_gates(hidden, centroids, cells, valid, top_k, capacity=room, **form)
        return {"gates": found.gates, "log_z": found.log_z, "probs": found.expert_probs()}

    def defined_gates(
        self, given: Found, cells: Cells, valid: Tensor, taken: Tensor, top_k: int | None = None
    ) -> Found:
        """The definition, with the choice given (`taken` [N, M]): dtypes must not change it."""
        scored = self.scored(**given, cells=cells, valid=valid)
        log_z = scored.log_z()
        gates = scored.probs(log_z)
        if top_k not in (1, None):
            unused = ~taken & valid[cells.token_ids].unsqueeze(-1)  # no row without any: 0 / 0
            gates = scored.scores.masked_fill(unused, -torch.inf).softmax(-1)
        routing = scored.routing(gates * taken, None, lambda: log_z)
        return {
            "gates": routing.gates.to(given["hidden"].dtype),
            "log_z": torch.where(valid, log_z, 0.0)[cells.token_ids],
            "probs": routing.expert_probs,
        }


def results_and_grads(function: Callable[[Found], Found], inputs: Found, seed: int = 0) -> Found:
    """What `function` gives, and the gradients of all inputs of a fixed random functional of it."""
    leaves = {
        name: tensor.detach().requires_grad_(tensor.is_floating_point())
        for name, tensor in inputs.items()
    }
    results = function(leaves)
    random = torch.Generator().manual_seed(seed)
    upstream = [torch.randn(value.shape, generator=random).to(value) for value in results.values()]
    floats = {name: leaf for name, leaf in leaves.items() if leaf.requires_grad}
    grads = torch.autograd.grad(list(results.values()), list(floats.values()), upstream)
    found = {name: value.detach() for name, value in results.items()}
    return found | {f"grad of {name}": grad for name, grad in zip(floats, grads, strict=True)}


def doubles(given: Found) -> Found:
    """Those that are floating-point in float64."""
    return {k: v.double() if v.is_floating_point() else v for k, v in given.items()}


def assert_as_good(
    function: Callable[[Found], Found], inputs: Found, free: Iterable[str] | None = None
) -> None:
    """Triton's results and gradients, judged by the reference in float64 and in the same dtype.

    Of the inputs only those named in `free` get a gradient, if any are named.
    """
    names = inputs.keys() if free is None else free

    def run(given: Found) -> Found:
        return results_and_grads(
            lambda leaves: function(given | leaves), {name: given[name] for name in names}
        )

    with use_backend("reference"):
        exact, plain = run(doubles(inputs)), run(inputs)
    with use_backend("triton"):
        fast = run(inputs)
    assert_no_worse(fast, plain, exact)


def assert_no_worse(fast: Found, plain: Found, exact: Found) -> None:
    """No error against `exact` (float64) above twice that of `plain`, which has fast's dtype."""
    for name, wanted in exact.items():
        assert fast[name].dtype == plain[name].dtype, name
        assert fast[name].shape == wanted.shape, name
        if wanted.numel() == 0:
            continue
        assert fast[name].isfinite().all(), f"{name}: not finite"
        error, plain_error = (
            (found[name].double() - wanted).abs().max().item() for found in (fast, plain)
        )
        unit = torch.finfo(fast[name].dtype).eps * wanted.abs().max().item()
        bound = 2 * plain_error + FLOOR * unit
        assert error <= bound, f"{name}: error {error:.3e}, allowed {bound:.3e}"


def unit_rows(*shape: int) -> Tensor:
    return torch.nn.functional.normalize(torch.randn(*shape, device=DEVICE), dim=-1)


def logits_of(
    hidden: Tensor, experts: Tensor, noise: Noise | None, normalize: bool = False
) -> Tensor:
    """[T, E] by the formula; a zero row of experts has logits of 0."""
    logits = hidden @ experts.T
    if normalize:
        norms = experts.norm(dim=-1)
        logits = logits / norms.where(norms > 0, torch.inf)
    if noise is not None:
        columns = torch.arange(experts.shape[0], device=experts.device)
        logits = logits + normal(noise.row_keys.unsqueeze(-1), columns) * noise.std
    return logits


def chosen_mask(scores: Tensor, count: int) -> Tensor:
    """True at the `count` largest places of each row, ties to the lowest position."""
    keys = selection_keys(scores)
    return keys >= keys.topk(count, dim=-1).values[:, -1:]


def captured(
    step: Callable[[], list[Tensor]],
) -> tuple[list[Tensor], torch.cuda.CUDAGraph, list[Tensor]]:
    """(eager results, graph of the step, results that each replay of the graph fills).

    The eager step runs on a stream of its own, as torch wants it before a capture, and its results
    are detached. If they held on to their autograd graph, the nodes of the leaves would outlive the
    step, and with them its stream: a captured backward would make that stream wait for its own.
    """
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        eager = [tensor.detach() for tensor in step()]
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = step()
    return eager, graph, found
