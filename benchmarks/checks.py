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
import torch.nn.functional as F
from torch import Tensor

from benchmarks.contenders import Answer, Contender, InvertedIndex, unit

CHECKED_TOKENS = 16
FLOOR = 8 * torch.finfo(torch.float32).eps  # relative to the largest entry
JITTER_SIGMAS = 7.0  # no draw of a million lies further out
EXPERTS_AT_ONCE = 65_536


class WrongAnswerError(AssertionError):
    """A contender does not compute what it says; it gets no time."""


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
    output_error = _compare("output", answer.output, exact, plain)
    gradient_error = max(
        _compare(f"gradient {i}", *three)
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
    output = contender.post_norm(_mixture(contender, hidden, answer.expert_ids, logits.softmax(-1)))
    return output, _gradients(contender, hidden, output, cotangent)


def _mixture(contender: Contender, hidden: Tensor, ids: Tensor, weights: Tensor) -> Tensor:
    """sum over chosen e of weight_e act(<up_e, h>) down_e, gated where the experts are: [T, D]."""
    tables, ids, dtype = contender.tables(), ids.flatten(1), hidden.dtype
    active = (tables.up[ids].to(dtype) @ hidden.unsqueeze(-1)).squeeze(-1)  # [T, K]
    if tables.gate is None:
        active = F.gelu(active)
    else:
        active = active * F.silu((tables.gate[ids].to(dtype) @ hidden.unsqueeze(-1)).squeeze(-1))
    active = active * weights.flatten(1).to(dtype)
    return (active.unsqueeze(1) @ tables.down[ids].to(dtype)).squeeze(1)


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


def _compare(what: str, fast: Tensor, exact: Tensor, plain: Tensor) -> float:
    """Largest error as a share of the allowed one."""
    low, high = exact.detach().aminmax()
    allowed = 2 * _distance(plain, exact) + FLOOR * max(-low.item(), high.item())
    error = _distance(fast, exact)
    if not error <= allowed:  # NaN is wrong too
        raise WrongAnswerError(f"{what}: error {error:.2e}, allowed {allowed:.2e}")
    return error / allowed if allowed else 0.0


def _distance(left: Tensor, right: Tensor) -> float:
    """Largest difference; NaN where one is. These may be gigabytes, hence few temporaries."""
    low, high = (left.detach() - right.detach()).aminmax()
    return max(-low.item(), high.item())


def _check_choice(contender: Contender, hidden: Tensor, ids: Tensor, slack: float) -> None:
    """Distinct candidates of each head, none worse than the K-th best (up to `slack`)."""
    total = ids[0].numel()
    expected = contender.top_k
    if total != expected:
        raise WrongAnswerError(f"{total} experts per token, expected {expected}")
    with torch.no_grad():
        exact, plain = contender.scores(hidden.double()), contender.scores(hidden)
    _check_best("experts", ids, exact, plain, slack)


def _check_index(index: InvertedIndex | None, hidden: Tensor, slack: float) -> None:
    """The shortlists of these tokens hold the M best experts of their codewords."""
    if index is None:
        return
    used = index.assign(hidden.double()).unique()
    with torch.no_grad():
        exact, plain = (_codeword_scores(index, used, dtype) for dtype in (torch.float64, None))
    _check_best("shortlist", index.shortlists[used], exact, plain, slack)


def _codeword_scores(index: InvertedIndex, used: Tensor, dtype: torch.dtype | None) -> Tensor:
    """[codewords, E] in a dtype, or in the parameters' own."""
    codewords = index.codewords[used]
    dtype = dtype or codewords.dtype
    parts = [
        codewords.to(dtype) @ (unit(rows, dtype) if index.project else rows.to(dtype)).T
        for rows in index.centroids.detach().split(EXPERTS_AT_ONCE)
    ]
    return torch.cat(parts, dim=-1)


def _check_best(what: str, chosen: Tensor, exact: Tensor, plain: Tensor, slack: float) -> None:
    """`chosen` [..., K] are distinct and the K largest of `exact` [..., E] up to ties."""
    count = chosen.shape[-1]
    if (chosen.sort(-1).values.diff(dim=-1) == 0).any():
        raise WrongAnswerError(f"{what}: chosen twice")
    finite = exact.isfinite()
    rounding = (plain.double() - exact)[finite].abs().max().item()
    slack += 4 * rounding + 2 * FLOOR * exact[finite].abs().max().item()
    last = exact.topk(count, dim=-1).values[..., -1:]
    worst = (last - exact.gather(-1, chosen)).max().item()
    if not worst <= slack:
        raise WrongAnswerError(f"{what}: one is {worst:.2e} below the last of the best {count}")


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
        exact = _mixture(contender, hidden.double(), answer.expert_ids, answer.weights)
        plain = _mixture(contender, hidden, answer.expert_ids, answer.weights)
    _compare("output with jitter", answer.output, exact, plain)
    drawn = answer.weights.double().log() - logits.log_softmax(-1)
    measured = (drawn - drawn.mean(-1, keepdim=True)).std().item()
    if not 0.7 * contender.jitter_std < measured < 1.3 * contender.jitter_std:
        raise WrongAnswerError(f"jitter {measured:.2e}, expected {contender.jitter_std:.2e}")
    return measured
