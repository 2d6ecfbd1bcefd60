"""No time for a wrong answer: each layer against its own definition in float64.

The layer runs at its full size, so the kernels that are timed are those that are checked. Of its
output some tokens are looked at, and only they get a gradient, so that a definition of just these
tokens gives the gradients of all parameters. Output and gradients keep the rule of the tests:

    |fast - exact64| <= 2 x max |plain - exact64| + floor x max |exact64|

`plain` is the plain formula in the dtype of the fast one. The floor stands for sums taken in
another order: 8 eps in float32, and in half precision one rounding of the largest entry. Cells,
shortlists and experts must be the best up to ties: scores closer than the rounding of the plain
formula. That is without jitter (evaluation mode); in training mode the choices must lie within
reach of it, and the output fit its own weights.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor

from airmoe.experiments.bench.contenders import Answer, Contender, Values
from airmoe.experiments.bench.plain import mixture

MOST_TOKENS = 256
MOST_SCORES = {"cuda": 2**28, "cpu": 2**24}  # float64 numbers: 2 GiB, 128 MiB
ROWS = 65_536  # compared at once
JITTER_SIGMAS = 7.0  # no draw of a million lies further out


@dataclass(frozen=True)
class Deviation:
    """How far a result is from the definition in float64."""

    what: str
    error: float  # largest difference
    allowed: float
    size: float  # largest entry of the definition


@dataclass
class Check:
    """What was found; any problem means that the layer is wrong."""

    num_tokens: int = 0
    experts_per_token: int = 0
    deviations: list[Deviation] = field(default_factory=list)
    jitter_std: float | None = None  # measured in training mode
    problems: list[str] = field(default_factory=list)

    @property
    def worst_share(self) -> float:
        """The largest error as a share of the allowed one; 1 is the limit."""
        shares = [found.error / found.allowed for found in self.deviations if found.allowed]
        return max(shares, default=0.0)

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"worst_share": self.worst_share}

    def compare(self, what: str, fast: Tensor, exact: Tensor, plain: Tensor) -> None:
        """`fast` against `exact` (float64), allowed what `plain` makes likely."""
        low, high = exact.detach().aminmax()
        size = max(-low.item(), high.item())
        error, allowed = _distance(fast, exact), 2 * _distance(plain, exact)
        allowed += _floor(plain.dtype) * size
        self.deviations.append(Deviation(what, error, allowed, size))
        if not error <= allowed:  # nor is NaN
            self.problems.append(f"{what}: error {error:.2e}, allowed {allowed:.2e}")

    def compare_best(
        self, what: str, chosen: Tensor, exact: Tensor, plain: Tensor, slack: float = 0.0
    ) -> None:
        """`chosen` [..., K] are distinct and the K largest of `exact` [..., E] up to ties."""
        if (chosen.sort(-1).values.diff(dim=-1) == 0).any():
            self.problems.append(f"{what}: chosen twice")
            return
        count, finite = chosen.shape[-1], exact.isfinite()
        rounding = (plain.double() - exact)[finite].abs().max().item()
        slack += 4 * rounding + 2 * _floor(plain.dtype) * exact[finite].abs().max().item()
        last = exact.topk(count, dim=-1).values[..., -1:]
        worst = (last - exact.gather(-1, chosen)).max().item()
        if not worst <= slack:
            self.problems.append(f"{what}: one is {worst:.2e} below the last of the best {count}")


def check(
    contender: Contender, hidden: Tensor, cotangent: Tensor, *, gradients: bool = True
) -> Check:
    """Compare on some tokens of a batch [T, D]; without gradients, the forward in evaluation."""
    contender.module.eval()
    try:
        result, chosen = _check_evaluation(contender, hidden, cotangent, gradients)
    finally:
        contender.module.train()
    if not result.problems and gradients and contender.jitter_std:
        _check_jittered(result, contender, hidden, chosen)
    return result


def _check_evaluation(
    contender: Contender, hidden: Tensor, cotangent: Tensor, gradients: bool
) -> tuple[Check, Tensor]:
    """Choices, output and gradients, and which tokens were looked at."""
    result, named = Check(), dict(contender.module.named_parameters())
    fast = hidden.detach().clone().requires_grad_(gradients)
    with torch.set_grad_enabled(gradients):
        answer = contender.answer(fast)
    chosen = _spread(hidden, answer, contender)
    grads: Values = {}
    if gradients:
        sparse = torch.zeros_like(cotangent).index_copy(0, chosen, cotangent[chosen])
        grads = _gradients(answer.output, {"hidden": fast} | named, sparse)
    if not answer.output.isfinite().all():
        result.problems.append("output: not finite")
    answer, tokens = answer.rows(chosen), hidden[chosen]
    result.num_tokens, result.experts_per_token = len(chosen), answer.expert_ids[0].numel()
    _check_choices(result, contender, tokens, answer)
    if result.problems:  # the definition may not even exist at such choices
        return result, chosen
    definition = Definition(contender, tokens, answer)
    result.compare("output", answer.output, *definition.outputs())
    for name in list(grads):  # one at a time: in float64 they may be gigabytes
        exact, plain = definition.gradients(name, cotangent[chosen])
        if name == "hidden":  # the other tokens must have got nothing
            exact, plain = (
                grad.new_zeros(hidden.shape).index_copy(0, chosen, grad) for grad in (exact, plain)
            )
        result.compare(f"gradient of {name}", grads.pop(name), exact, plain)
    return result, chosen


def _spread(hidden: Tensor, answer: Answer, contender: Contender) -> Tensor:
    """Tokens from all over the batch, few enough for scores in float64."""
    num_tokens, heads = answer.expert_ids.shape[:2]
    num_experts = contender.tables(contender.values()).up.shape[0]
    most_scores = MOST_SCORES[hidden.device.type]
    most = min(MOST_TOKENS, max(8, num_tokens // 4), most_scores // (heads * num_experts))
    count = max(1, min(num_tokens, most))
    return torch.arange(count, device=hidden.device) * num_tokens // count


@dataclass(frozen=True)
class Definition:
    """The plain formula at the choices of an answer, in float64 and in the layer's own dtypes."""

    contender: Contender
    tokens: Tensor  # [T, D]
    answer: Answer

    @torch.no_grad()
    def outputs(self) -> tuple[Tensor, Tensor]:
        values = self.contender.values()
        return self._mix(self.tokens.double(), values), self._mix(self.tokens, values)

    def gradients(self, name: str, cotangent: Tensor) -> tuple[Tensor, Tensor]:
        """With respect to a parameter or "hidden"."""
        exact = self._gradient(self.tokens.double(), name, cotangent)
        return exact, self._gradient(self.tokens, name, cotangent)

    def _gradient(self, tokens: Tensor, name: str, cotangent: Tensor) -> Tensor:
        values = {"hidden": tokens} | self.contender.values()
        values[name] = values[name].to(tokens.dtype, copy=True).requires_grad_()
        output = self._mix(values["hidden"], values)
        return _gradients(output, {name: values[name]}, cotangent)[name]

    def _mix(self, tokens: Tensor, values: Values) -> Tensor:
        """The layer's output [T, D] in the dtype of the tokens."""
        contender, ids = self.contender, self.answer.expert_ids
        score_dtype = torch.promote_types(contender.score_dtype, tokens.dtype)
        logits = contender.scores(tokens.to(score_dtype), values, self.answer.cells)
        if ids.shape[-1] == 1:  # a single one keeps its probability among all (Switch)
            weights = logits.softmax(-1).gather(-1, ids)
        else:
            weights = logits.gather(-1, ids).softmax(-1)
        # [T, K * S] rows of the tables; an expert's weight is that of all its S neurons
        size, flat = contender.neurons_per_expert, ids.flatten(1).unsqueeze(-1)
        neurons = (flat * size + torch.arange(size, device=ids.device)).flatten(1)
        return mixture(tokens, neurons, weights, contender.tables(values))


def _gradients(output: Tensor, named: Values, cotangent: Tensor) -> Values:
    grads = torch.autograd.grad(
        output, list(named.values()), cotangent.to(output.dtype), materialize_grads=True
    )
    return dict(zip(named, grads, strict=True))


@torch.no_grad()
def _check_choices(
    result: Check, contender: Contender, hidden: Tensor, answer: Answer, slack: float = 0.0
) -> None:
    """Cells, shortlists and experts are the best ones, up to ties and `slack`."""
    if result.experts_per_token != contender.top_k:
        found = f"{result.experts_per_token} experts per token, expected {contender.top_k}"
        result.problems.append(found)
        return
    values, cells = contender.values(), answer.cells
    both = hidden.double(), hidden.to(contender.score_dtype)  # exact, plain
    if cells is not None:
        exact, plain = (contender.cell_scores(h, values) for h in both)
        result.compare_best("cells", cells, exact, plain)
    index = contender.inverted_index(values)
    if index is not None and cells is not None:
        used = cells.unique()
        exact, plain = (index.codeword_scores(used, h.dtype) for h in both)
        result.compare_best("shortlist", index.shortlists[used], exact, plain, slack)
    exact, plain = (contender.scores(h, values, cells) for h in both)
    result.compare_best("experts", answer.expert_ids, exact, plain, slack)


@torch.no_grad()
def _check_jittered(result: Check, contender: Contender, hidden: Tensor, chosen: Tensor) -> None:
    """Training mode: choices within reach of the jitter, output right for its own weights."""
    answer, tokens = contender.answer(hidden).rows(chosen), hidden[chosen]
    weights, std, values = answer.weights, contender.jitter_std, contender.values()
    assert weights is not None
    _check_choices(result, contender, tokens, answer, slack=2 * JITTER_SIGMAS * std)
    tables = contender.tables(values)
    exact, plain = (
        mixture(hidden, answer.expert_ids, weights, tables) for hidden in (tokens.double(), tokens)
    )
    result.compare("output with jitter", answer.output, exact, plain)
    logits = contender.scores(tokens.double(), values, answer.cells).gather(-1, answer.expert_ids)
    drawn = weights.double().log() - logits.log_softmax(-1)
    result.jitter_std = found = (drawn - drawn.mean(-1, keepdim=True)).std().item()
    if not 0.7 * std < found < 1.3 * std:
        result.problems.append(f"jitter {found:.2e}, expected {std:.2e}")


def _floor(dtype: torch.dtype) -> float:
    """Relative to the largest entry."""
    return max(8 * torch.finfo(torch.float32).eps, 0.5 * torch.finfo(dtype).eps)


def _distance(left: Tensor, right: Tensor) -> float:
    """Largest difference; NaN where one is. These may be gigabytes, hence the parts."""
    parts = zip(left.detach().split(ROWS), right.detach().split(ROWS), strict=True)
    return torch.stack([(one - other).abs().amax() for one, other in parts]).amax().item()
