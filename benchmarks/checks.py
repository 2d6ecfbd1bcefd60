"""No time for a wrong answer: each layer against its own definition in float64.

The experts a layer chose must be the best K of its candidates up to ties, its output and gradients
those of the plain formula at these experts. As in the tests, an error may be twice that of the
plain formula in float32, plus a floor for sums taken in another order.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from airmoe.experiments.bench.compare import (
    JITTER_SIGMAS,
    WrongAnswerError,
    demand,
    demand_best,
    demand_jitter,
    deviation,
)
from airmoe.experiments.bench.definitions import InvertedIndex, mixture
from benchmarks.contenders import Answer, Contender

CHECKED_TOKENS = 16


@dataclass(frozen=True)
class Check:
    """What was found, for the record; errors are relative to what is allowed (1 = the limit)."""

    experts_per_token: int
    output_error: float
    gradient_error: float
    jitter_std: float | None  # measured in training mode


def check(contender: Contender, hidden: Tensor, cotangent: Tensor) -> Check:
    """Compare on the first tokens of a batch; raises WrongAnswerError."""
    hidden, cotangent = hidden[:CHECKED_TOKENS], cotangent[:CHECKED_TOKENS]
    with _evaluation(contender):
        fast = hidden.clone().requires_grad_()
        answer = contender.answer(fast)
        _check_index(contender.inverted_index(), hidden, slack=0.0)
        _check_choice(contender, hidden, answer.expert_ids, slack=0.0)
        fast_grads = _gradients(contender, fast, answer.output, cotangent)
        exact, exact_grads = _by_definition(contender, hidden.double(), cotangent, answer)
        plain, plain_grads = _by_definition(contender, hidden, cotangent, answer)
    output_error = demand(deviation("output", answer.output, exact, plain)).share
    gradient_error = max(
        demand(deviation(f"gradient {i}", *three)).share
        for i, three in enumerate(zip(fast_grads, exact_grads, plain_grads, strict=True))
    )
    jitter = _check_jittered(contender, hidden)
    return Check(answer.expert_ids[0].numel(), output_error, gradient_error, jitter)


@contextmanager
def _evaluation(contender: Contender) -> Iterator[None]:
    contender.module.eval()
    try:
        yield
    finally:
        contender.module.train()


def _by_definition(
    contender: Contender, hidden: Tensor, cotangent: Tensor, answer: Answer
) -> tuple[Tensor, list[Tensor]]:
    """(output, gradients) of the plain formula in hidden's dtype at the chosen experts."""
    hidden = hidden.clone().requires_grad_()
    logits = contender.scores(hidden).gather(-1, answer.expert_ids)  # [T, heads, K / heads]
    weights, tables = logits.softmax(-1), contender.tables()
    output = contender.post_norm(mixture(hidden, answer.expert_ids, weights, tables))
    return output, _gradients(contender, hidden, output, cotangent)


def _gradients(
    contender: Contender, hidden: Tensor, output: Tensor, cotangent: Tensor
) -> list[Tensor]:
    """With respect to hidden and every parameter."""
    inputs = [hidden, *contender.module.parameters()]
    grads = torch.autograd.grad(output, inputs, cotangent.to(output.dtype), allow_unused=True)
    return [
        torch.zeros_like(value) if grad is None else grad
        for value, grad in zip(inputs, grads, strict=True)
    ]


def _check_choice(contender: Contender, hidden: Tensor, ids: Tensor, slack: float) -> None:
    """Distinct candidates of each head, none worse than the K-th best (up to `slack`)."""
    total = ids[0].numel()
    expected = contender.top_k
    if total != expected:
        raise WrongAnswerError(f"{total} experts per token, expected {expected}")
    with torch.no_grad():
        exact, plain = contender.scores(hidden.double()), contender.scores(hidden)
    demand_best("experts", ids, exact, plain, slack)


def _check_index(index: InvertedIndex | None, hidden: Tensor, slack: float) -> None:
    """The shortlists of these tokens hold the M best experts of their codewords."""
    if index is None:
        return
    used = index.assign(hidden.double()).unique()
    with torch.no_grad():
        dtypes = (torch.float64, index.codewords.dtype)
        exact, plain = (index.codeword_scores(used, dtype) for dtype in dtypes)
    demand_best("shortlist", index.shortlists[used], exact, plain, slack)


def _check_jittered(contender: Contender, hidden: Tensor) -> float | None:
    """Training mode: choice within reach of the jitter, output right for its own weights."""
    slack = 2 * JITTER_SIGMAS * contender.jitter_std
    with torch.no_grad():
        answer = contender.jittered_answer(hidden)
        if answer is None or answer.weights is None:
            return None
        _check_index(contender.inverted_index(), hidden, slack)
        _check_choice(contender, hidden, answer.expert_ids, slack)
        logits = contender.scores(hidden.double()).gather(-1, answer.expert_ids)
        ids, weights, tables = answer.expert_ids, answer.weights, contender.tables()
        exact = mixture(hidden.double(), ids, weights, tables)
        plain = mixture(hidden, ids, weights, tables)
    demand(deviation("output with jitter", answer.output, exact, plain))
    return demand_jitter(answer.weights, logits, contender.jitter_std)
