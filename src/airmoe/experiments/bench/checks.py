"""Checks each layer against its definition in float64; a wrong one gets no time.

The layer runs at full size, so that the kernels that are checked are those that are timed. Only a
sample of its tokens is compared, and only that gets a gradient: then the definition of the sample
alone gives the gradients of all parameters. Output and gradients must satisfy the tests' rule:

    |fast - exact64| <= 2 x max |plain - exact64| + floor x max |exact64|

`plain` is the plain formula in the layer's dtype. The floor allows for sums in another order: 8 eps
in float32, in half precision one rounding of the largest entry. Cells, shortlists and experts must
be the best ones up to ties: scores closer than the plain formula's rounding. This is in evaluation
mode, without jitter. In training mode the output must match the choices and weights that the layer
reports.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from airmoe.experiments.bench.contenders import Answer, Contender, Shortlisted, Values

MOST_TOKENS = 256
MOST_SCORES = {"cuda": 2**28, "cpu": 2**24}  # float64 numbers: 2 GiB, 128 MiB
ROWS = 65_536  # compared at once
Define = Callable[[Values, torch.dtype], Tensor]


@dataclass
class Check:
    """What a check found; any problem means that the layer is wrong."""

    num_tokens: int = 0
    experts_per_token: int = 0
    deviations: list[dict[str, Any]] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    @property
    def worst_share(self) -> float:
        """The largest error as a share of the allowed one; 1 is the limit."""
        shares = (found["error"] / found["allowed"] for found in self.deviations)
        return max(shares, default=0.0)

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"worst_share": self.worst_share}

    def compare(self, what: str, fast: Tensor, exact: Tensor, plain: Tensor) -> None:
        """Compare `fast` with `exact` (float64); the error of `plain` sets the allowed one."""
        low, high = exact.detach().aminmax()
        size = max(-low.item(), high.item())
        error, allowed = _distance(fast, exact), 2 * _distance(plain, exact)
        allowed += _floor(plain.dtype) * size
        self.deviations.append({"what": what, "error": error, "allowed": allowed, "size": size})
        if not error <= allowed:  # nor is NaN
            self.problems.append(f"{what}: error {error:.2e}, allowed {allowed:.2e}")

    def compare_best(self, what: str, chosen: Tensor, exact: Tensor, plain: Tensor) -> None:
        """`chosen` [..., K] are distinct and the K largest of `exact` [..., E] up to ties."""
        if (chosen.sort(-1).values.diff(dim=-1) == 0).any():
            self.problems.append(f"{what}: chosen twice")
            return
        count, finite = chosen.shape[-1], exact.isfinite()
        rounding = (plain.double() - exact)[finite].abs().max().item()
        slack = 4 * rounding + 2 * _floor(plain.dtype) * exact[finite].abs().max().item()
        last = exact.topk(count, dim=-1).values[..., -1:]
        worst = (last - exact.gather(-1, chosen)).max().item()
        if not worst <= slack:
            self.problems.append(f"{what}: one is {worst:.2e} below the last of the best {count}")


def check(
    contender: Contender, hidden: Tensor, cotangent: Tensor, *, gradients: bool = True
) -> Check:
    """Check some tokens of a batch [T, D]; without `gradients`, only the evaluation forward."""
    contender.module.eval()
    result, named = Check(), contender.parameters()
    fast = hidden.detach().clone().requires_grad_(gradients)
    with torch.set_grad_enabled(gradients):
        answer = contender.answer(fast)
    if not answer.output.isfinite().all():
        result.problems.append("output: not finite")
    chosen = _spread(hidden, contender)
    grads: Values = {}
    if gradients:
        sparse = torch.zeros_like(cotangent).index_copy(0, chosen, cotangent[chosen])
        grads = _gradients(answer.output, {"hidden": fast} | named, sparse)
    answer, tokens = answer.rows(chosen), hidden[chosen]
    values = {"hidden": tokens} | {name: value.detach() for name, value in named.items()}
    _check_choices(result, contender, values, answer)
    if result.problems:  # the definition may not exist for such choices
        return result
    define, dtypes = partial(_define, contender, answer), (torch.float64, tokens.dtype)
    with torch.no_grad():
        exact, plain = (define(values, dtype) for dtype in dtypes)
        result.compare("output", answer.output, exact, plain)
    for name in list(grads):  # one at a time: in float64 they may be gigabytes
        exact, plain = (
            _gradient(define, values, name, cotangent[chosen], dtype) for dtype in dtypes
        )
        if name == "hidden":  # the other tokens must get none
            exact, plain = (
                grad.new_zeros(hidden.shape).index_copy(0, chosen, grad) for grad in (exact, plain)
            )
        result.compare(f"gradient of {name}", grads.pop(name), exact, plain)
    if gradients:
        contender.module.train()
        with torch.no_grad():
            answer = contender.answer(hidden).rows(chosen)
        if answer.weights is not None:
            found = contender, answer.expert_ids, answer.weights, values
            exact, plain = (_mixture(h, *found) for h in (tokens.double(), tokens))
            result.compare("output with jitter", answer.output, exact, plain)
    return result


def _spread(hidden: Tensor, contender: Contender) -> Tensor:
    """Which tokens to check: spread over the batch, few enough for scores in float64."""
    num_tokens, most_scores = len(hidden), MOST_SCORES[hidden.device.type]
    most = most_scores // (contender.num_heads * contender.config.num_experts)
    count = max(1, min(num_tokens, MOST_TOKENS, max(8, num_tokens // 4), most))
    return torch.arange(count, device=hidden.device) * num_tokens // count


def _define(contender: Contender, answer: Answer, values: Values, dtype: torch.dtype) -> Tensor:
    """The layer's output [T, D] at the choices of an answer, by the plain formula."""
    tokens, ids = values["hidden"].to(dtype), answer.expert_ids
    score_dtype = torch.promote_types(contender.score_dtype, dtype)
    logits = contender.scores(tokens.to(score_dtype), values, answer.cells)
    if ids.shape[-1] == 1:  # a single one keeps its probability among all (Switch)
        weights = logits.softmax(-1).gather(-1, ids)
    else:
        weights = logits.gather(-1, ids).softmax(-1)
    return _mixture(tokens, contender, ids, weights, values)


def _mixture(
    hidden: Tensor, contender: Contender, ids: Tensor, weights: Tensor, values: Values
) -> Tensor:
    """sum over chosen e of weight_e act(<up_e, h>) down_e, gated where the experts are: [T, D]."""
    # [T, K * S] rows of the tables; an expert's weight is that of all its S neurons
    size, flat = contender.neurons_per_expert, ids.flatten(1).unsqueeze(-1)
    rows, dtype = (flat * size + torch.arange(size, device=ids.device)).flatten(1), hidden.dtype
    tables = {name: values[name] for name in ("gate", "up", "down") if name in values}
    found = {n: table.flatten(0, -2)[rows].to(dtype) for n, table in tables.items()}  # [T, K*S, D]
    active = torch.einsum("td,tkd->tk", hidden, found["up"])
    if "gate" in found:
        active = active * F.silu(torch.einsum("td,tkd->tk", hidden, found["gate"]))
    else:
        active = F.gelu(active)
    return torch.einsum("tk,tkd->td", active * weights.flatten(1).to(dtype), found["down"])


def _gradient(
    define: Define, values: Values, name: str, cotangent: Tensor, dtype: torch.dtype
) -> Tensor:
    """Of the definition, with respect to a parameter or "hidden"."""
    leaf = values[name].to(dtype, copy=True).requires_grad_()
    return _gradients(define(values | {name: leaf}, dtype), {name: leaf}, cotangent)[name]


def _gradients(output: Tensor, named: Values, cotangent: Tensor) -> Values:
    grads = torch.autograd.grad(
        output, list(named.values()), cotangent.to(output.dtype), materialize_grads=True
    )
    return dict(zip(named, grads, strict=True))


@torch.no_grad()
def _check_choices(result: Check, contender: Contender, values: Values, answer: Answer) -> None:
    """Cells, shortlists and experts are the best ones, up to ties."""
    found, wanted = answer.expert_ids[0].numel(), contender.config.top_k
    result.num_tokens, result.experts_per_token = len(values["hidden"]), found
    if found != wanted:
        result.problems.append(f"{found} experts per token, expected {wanted}")
        return
    cells, dtypes = answer.cells, (torch.float64, contender.score_dtype)
    both = [values["hidden"].to(dtype) for dtype in dtypes]  # exact, plain
    if cells is not None:
        exact, plain = (contender.cell_scores(h, values) for h in both)
        result.compare_best("cells", cells, exact, plain)
    if cells is not None and isinstance(contender, Shortlisted):
        used = cells.unique()
        exact, plain = (contender.codeword_scores(used, values, h.dtype) for h in both)
        result.compare_best("shortlist", contender.index()[1][used], exact, plain)
    exact, plain = (contender.scores(h, values, cells) for h in both)
    result.compare_best("experts", answer.expert_ids, exact, plain)


def _floor(dtype: torch.dtype) -> float:
    """The floor of the rule, relative to the largest entry."""
    return max(8 * torch.finfo(torch.float32).eps, 0.5 * torch.finfo(dtype).eps)


def _distance(left: Tensor, right: Tensor) -> float:
    """The largest difference, or NaN. Taken in parts, because tensors may have gigabytes."""
    parts = zip(left.detach().split(ROWS), right.detach().split(ROWS), strict=True)
    return torch.stack([(one - other).abs().amax() for one, other in parts]).amax().item()
