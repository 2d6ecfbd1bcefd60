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
from dataclasses import asdict, dataclass, field, replace
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from airmoe.experiments.bench.contenders import Answer, Contender, Shortlisted, Values

MOST_TOKENS = 256
MOST_SCORES = {"cuda": 2**28, "cpu": 2**24}  # float64 numbers: 2 GiB, 128 MiB
ROWS = 65_536  # compared at once
Define = Callable[[torch.dtype], Tensor]  # what something should be, computed in a precision


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

    def compare(self, what: str, fast: Tensor, define: Define) -> None:
        """Compare `fast` with float64; the error of its own dtype sets the allowed one."""
        exact, plain = define(torch.float64), define(fast.dtype)
        low, high = exact.detach().aminmax()
        size = max(-low.item(), high.item())
        error, allowed = _distance(fast, exact), 2 * _distance(plain, exact)
        allowed += _floor(plain.dtype) * size
        self.deviations.append({"what": what, "error": error, "allowed": allowed, "size": size})
        if not error <= allowed:  # nor is NaN
            self.problems.append(f"{what}: error {error:.2e}, allowed {allowed:.2e}")

    def compare_best(self, what: str, chosen: Tensor, define: Define, dtype: torch.dtype) -> None:
        """`chosen` [..., K] are distinct and have the K largest scores [..., E] up to ties."""
        if (chosen.sort(-1).values.diff(dim=-1) == 0).any():
            self.problems.append(f"{what}: chosen twice")
            return
        exact, plain = define(torch.float64), define(dtype)
        count, finite = chosen.shape[-1], exact.isfinite()
        rounding = (plain.double() - exact)[finite].abs().max().item()
        slack = 4 * rounding + 2 * _floor(dtype) * exact[finite].abs().max().item()
        last = exact.topk(count, dim=-1).values[..., -1:]
        worst = (last - exact.gather(-1, chosen)).max().item()
        if not worst <= slack:
            self.problems.append(f"{what}: one is {worst:.2e} below the last of the best {count}")


@dataclass(frozen=True)
class Definition:
    """What a contender should compute for some rows of a batch, given its choices there."""

    contender: Contender
    values: Values  # parameters, and the batch as "hidden" [T, D]
    rows: Tensor  # [n]
    answer: Answer  # of these rows

    def tokens(self, dtype: torch.dtype) -> Tensor:
        return self.values["hidden"][self.rows].to(dtype)

    def cell_scores(self, dtype: torch.dtype) -> Tensor:
        return self.contender.cell_scores(self.tokens(dtype), self.values)

    def scores(self, dtype: torch.dtype) -> Tensor:
        return self.contender.scores(self.tokens(dtype), self.values, self.answer.cells)

    def output(self, dtype: torch.dtype) -> Tensor:
        """[n, D]"""
        logits = self.scores(torch.promote_types(self.contender.score_dtype, dtype))
        ids = self.answer.expert_ids
        if ids.shape[-1] == 1:  # a single one keeps its probability among all (Switch)
            return self.mixture(logits.softmax(-1).gather(-1, ids), dtype)
        return self.mixture(logits.gather(-1, ids).softmax(-1), dtype)

    def mixture(self, weights: Tensor, dtype: torch.dtype) -> Tensor:
        """sum over chosen e of weight_e act(<up_e, h>) down_e, gated where the experts are."""
        # [n, K * S] rows of the tables; an expert's weight is that of all its S neurons
        size, ids = self.contender.neurons_per_expert, self.answer.expert_ids.flatten(1)
        rows = (ids.unsqueeze(-1) * size + torch.arange(size, device=ids.device)).flatten(1)
        tables = {name: self.values[name] for name in ("gate", "up", "down") if name in self.values}
        found = {name: table.flatten(0, -2)[rows].to(dtype) for name, table in tables.items()}
        hidden = self.tokens(dtype)
        active = torch.einsum("td,tkd->tk", hidden, found["up"])
        if "gate" in found:
            active = active * F.silu(torch.einsum("td,tkd->tk", hidden, found["gate"]))
        else:
            active = F.gelu(active)
        return torch.einsum("tk,tkd->td", active * weights.flatten(1).to(dtype), found["down"])

    def gradient(self, name: str, cotangent: Tensor, dtype: torch.dtype) -> Tensor:
        """With respect to a parameter or "hidden"; cotangent [n, D]."""
        leaf = self.values[name].to(dtype, copy=True).requires_grad_()
        output = replace(self, values=self.values | {name: leaf}).output(dtype)
        return _gradients(output, {name: leaf}, cotangent)[name]


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
    rows, grads = _spread(hidden, contender), {}
    if gradients:
        sparse = torch.zeros_like(cotangent).index_copy(0, rows, cotangent[rows])
        grads = _gradients(answer.output, {"hidden": fast} | named, sparse)
    values = {"hidden": hidden} | {name: value.detach() for name, value in named.items()}
    definition = Definition(contender, values, rows, answer.rows(rows))
    with torch.no_grad():
        _check_choices(result, definition)
        if result.problems:  # the definition may not exist for such choices
            return result
        result.compare("output", definition.answer.output, definition.output)
    for name in list(grads):  # one at a time: in float64 they may be gigabytes
        gradient = partial(definition.gradient, name, cotangent[rows])
        result.compare(f"gradient of {name}", grads.pop(name), gradient)
    if gradients:
        contender.module.train()
        with torch.no_grad():
            answer = contender.answer(hidden).rows(rows)
        if answer.weights is not None:
            mixture = partial(replace(definition, answer=answer).mixture, answer.weights)
            result.compare("output with jitter", answer.output, mixture)
    return result


def _spread(hidden: Tensor, contender: Contender) -> Tensor:
    """Which tokens to check: spread over the batch, few enough for scores in float64."""
    num_tokens, most_scores = len(hidden), MOST_SCORES[hidden.device.type]
    most = most_scores // (contender.num_heads * contender.config.num_experts)
    count = max(1, min(num_tokens, MOST_TOKENS, max(8, num_tokens // 4), most))
    return torch.arange(count, device=hidden.device) * num_tokens // count


def _check_choices(result: Check, definition: Definition) -> None:
    """Cells, shortlists and experts are the best ones, up to ties."""
    contender, answer = definition.contender, definition.answer
    found, wanted = answer.expert_ids[0].numel(), contender.config.top_k
    result.num_tokens, result.experts_per_token = len(definition.rows), found
    if found != wanted:
        result.problems.append(f"{found} experts per token, expected {wanted}")
        return
    dtype = contender.score_dtype
    if answer.cells is not None:
        result.compare_best("cells", answer.cells, definition.cell_scores, dtype)
    if answer.cells is not None and isinstance(contender, Shortlisted):
        used = answer.cells.unique()
        scores = partial(contender.codeword_scores, used, definition.values)
        result.compare_best("shortlist", contender.index()[1][used], scores, dtype)
    result.compare_best("experts", answer.expert_ids, definition.scores, dtype)


def _gradients(output: Tensor, named: Values, cotangent: Tensor) -> Values:
    grads = torch.autograd.grad(
        output, list(named.values()), cotangent.to(output.dtype), materialize_grads=True
    )
    return dict(zip(named, grads, strict=True))


def _floor(dtype: torch.dtype) -> float:
    """The floor of the rule, relative to the largest entry."""
    return max(8 * torch.finfo(torch.float32).eps, 0.5 * torch.finfo(dtype).eps)


def _distance(left: Tensor, right: Tensor) -> float:
    """The largest difference, or NaN. Taken in parts, because tensors may have gigabytes."""
    parts = zip(left.detach().split(ROWS), right.detach().split(ROWS), strict=True)
    return torch.stack([(one - other).abs().amax() for one, other in parts]).amax().item()
