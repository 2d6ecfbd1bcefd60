"""Alg. 2 (codebook update) and Alg. 3 (training loop) as plain loops; see `tests/oracles.py`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from tests import oracles
from tests.oracles import Kind, nearest_codeword
from tests.tolerance import assert_close

# ---------------------------------------------------------------- codebook (Alg. 2)


@dataclass
class Codebook:
    codewords: Tensor  # [G, D]
    counts: Tensor  # [G]
    sums: Tensor  # [G, D]


def alg2_update(
    hidden: Tensor,
    state: Codebook,
    decay: float,
    dead_below: float,
    pick: Callable[[int], int] | None = None,
    kind: Kind = "spherical",
) -> Codebook:
    """Alg. 2. `pick(g)` is the token u that replaces the dead code g.

    The Euclidean variant does not project, assigns by L2, and sets c = m / n.
    """
    spherical = kind == "spherical"
    points = [h / h.norm() if spherical else h for h in hidden]
    codeword_ids = [nearest_codeword(h, state.codewords, kind) for h in points]
    codewords, counts, sums = [], [], []
    for g in range(len(state.codewords)):
        batch_count = 0.0
        batch_sum = torch.zeros_like(state.sums[g])
        for h, assigned in zip(points, codeword_ids, strict=True):
            if assigned == g:
                batch_count += 1.0
                batch_sum = batch_sum + h
        n = decay * state.counts[g] + (1 - decay) * batch_count
        m = decay * state.sums[g] + (1 - decay) * batch_sum
        if n < dead_below:
            assert pick is not None, f"code {g} died and no replacement was given"
            m = points[pick(g)]
            n = torch.ones_like(n)
        codewords.append(m / m.norm() if spherical else m / n)
        counts.append(n)
        sums.append(m)
    return Codebook(torch.stack(codewords), torch.stack(counts), torch.stack(sums))


def states_of(codebook: Any) -> tuple[Codebook, Codebook]:
    """The library's codebook in float64 and in float32."""
    parts = (codebook.codewords, codebook.counts, codebook.sums)
    exact, plain = (
        Codebook(*(part.detach().to(dtype, copy=True) for part in parts))
        for dtype in (torch.float64, torch.float32)
    )
    return exact, plain


def assert_state(codebook: Any, exact: Codebook, plain: Codebook, what: str) -> None:
    for name in ("counts", "sums", "codewords"):
        values = (getattr(of, name) for of in (codebook, exact, plain))
        assert_close(*values, what=f"{what}: {name}")


def replacement(codebook: Any, points: Tensor) -> Callable[[int], int]:
    """The token that the library took for a dead code: the one its new sum equals."""

    def pick(g: int) -> int:
        gaps = (points - codebook.sums[g].double()).norm(dim=1)
        assert gaps.min() < 1e-6, f"the sum of dead code {g} is no token of the batch"
        return int(gaps.argmin())

    return pick


def first_codebook(hidden: Tensor, drawn: list[int], kind: Kind = "spherical") -> Codebook:
    """The state before the first EMA step: c = a token, n = T/G, m = token x T/G."""
    share = len(hidden) / len(drawn)
    points = hidden[drawn]
    if kind == "spherical":
        points = torch.stack([h / h.norm() for h in points])
    return Codebook(points, torch.full_like(points[:, 0], share), points * share)


# ---------------------------------------------------------------- training (Alg. 3)


# theta of a one-layer model: h = A x, y = MoE(h), loss = mean squared error + balance. Named
# inputs, the matrix A [D, D], and centroids, gate, up, down [E, D].
Theta = dict[str, Tensor]


@dataclass
class Plan:
    """The settings of one run of Alg. 3."""

    shortlist_size: int
    top_k: int
    decay: float
    dead_below: float
    learning_rate: float
    momentum: float
    balance_weight: float


@dataclass
class MicroBatch:
    """What the router held and gave in one micro-batch."""

    codebook: Codebook
    codeword_ids: list[int]
    shortlists: list[list[int]]
    fresh_shortlists: list[list[int]]  # what a rebuild here would have given
    expert_ids: list[list[int]]
    output: Tensor
    loss: Tensor


@dataclass
class Run:
    micro_batches: list[MicroBatch] = field(default_factory=list)
    parameters: list[dict[str, Tensor]] = field(default_factory=list)  # after every optimizer step


def alg3_train(
    theta: Theta,
    codebook: Codebook,
    data: list[list[tuple[Tensor, Tensor]]],
    plan: Plan,
    dtype: torch.dtype = torch.float64,
) -> Run:
    """Alg. 3 over `data[step][accumulation] = (tokens, targets)`, both [T, D]; no jitter."""
    theta = {k: v.detach().to(dtype, copy=True).requires_grad_() for k, v in theta.items()}
    codebook = Codebook(*(t.to(dtype) for t in vars(codebook).values()))
    optimizer = torch.optim.SGD(list(theta.values()), lr=plan.learning_rate, momentum=plan.momentum)
    experts = oracles.Experts("swiglu", theta["gate"], theta["up"], theta["down"])
    centroids = theta["centroids"]
    cache: list[list[int]] | None = None
    run = Run()
    for accumulation in data:
        optimizer.zero_grad()
        for tokens, targets in accumulation:
            hidden = torch.stack([theta["inputs"] @ x for x in tokens.to(dtype)])
            codebook = alg2_update(hidden.detach(), codebook, plan.decay, plan.dead_below)
            fresh = oracles.build_shortlists(codebook.codewords, centroids, plan.shortlist_size)
            if cache is None:
                cache = fresh
            choices = oracles.air_route(hidden, codebook.codewords, cache, centroids, plan.top_k)
            output = oracles.moe_output(hidden, choices, experts)
            loss = ((output - targets.to(dtype)) ** 2).mean()
            balance = oracles.balance_loss(choices, len(centroids), hidden)
            loss = loss + plan.balance_weight * balance
            (loss / len(accumulation)).backward()
            run.micro_batches.append(
                MicroBatch(
                    codebook,
                    [nearest_codeword(h, codebook.codewords) for h in hidden],
                    cache,
                    fresh,
                    [choice[0].expert_ids for choice in choices],
                    output.detach(),
                    loss.detach(),
                )
            )
        optimizer.step()
        cache = None
        run.parameters.append({k: v.detach().clone() for k, v in theta.items()})
    return run
