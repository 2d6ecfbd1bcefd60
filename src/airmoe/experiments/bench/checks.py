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

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from airmoe.experiments.bench.contenders import Answer, Contender, Values
from airmoe.experiments.bench.plain import mixture

MOST_TOKENS = 256
MOST_SCORES = {"cuda": 2**28, "cpu": 2**24}  # float64 numbers: 2 GiB, 128 MiB
ROWS = 65_536  # compared at once
JITTER_SIGMAS = 7.0  # no draw of a million lies further out


class WrongAnswerError(AssertionError):
    """A contender does not compute what it says; it gets no time."""


@dataclass(frozen=True)
class Deviation:
    """How far a result is from the definition in float64."""

    what: str
    error: float  # largest difference
    allowed: float
    size: float  # largest entry of the definition

    @property
    def share(self) -> float:
        """The error as a share of the allowed one; 1 is the limit."""
        return self.error / self.allowed if self.allowed else 0.0


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
        """The largest error as a share of the allowed one."""
        return max((found.share for found in self.deviations), default=0.0)

    def as_json(self) -> dict[str, Any]:
        return asdict(self) | {"worst_share": self.worst_share}

    def compare(self, what: str, fast: Tensor, exact: Tensor, plain: Tensor) -> None:
        """`fast` against `exact` (float64), allowed what `plain` makes likely."""
        low, high = exact.detach().aminmax()
        size = max(-low.item(), high.item())
        error, allowed = _distance(fast, exact), 2 * _distance(plain, exact)
        allowed += floor(plain.dtype) * size
        self.deviations.append(Deviation(what, error, allowed, size))
        if not error <= allowed:  # nor is NaN
            self.problems.append(f"{what}: error {error:.2e}, allowed {allowed:.2e}")

    def attempt(self, demand: Callable[[], Any]) -> Any:
        """A wrong part does not keep the others from being looked at."""
        try:
            return demand()
        except WrongAnswerError as error:
            self.problems.append(str(error))


def check(
    contender: Contender, hidden: Tensor, cotangent: Tensor, *, gradients: bool = True
) -> Check:
    """Compare on some tokens of a batch [T, D]; without gradients, the forward in evaluation."""
    result = Check()
    with _evaluation(contender.module):
        fast = hidden.detach().clone().requires_grad_(gradients)
        with torch.set_grad_enabled(gradients):
            answer = contender.answer(fast)
        chosen = _spread(hidden, answer, contender)
        grads: Values = {}
        if gradients:
            sparse = torch.zeros_like(cotangent).index_copy(0, chosen, cotangent[chosen])
            grads = _gradients(
                answer.output, {"hidden": fast} | dict(contender.module.named_parameters()), sparse
            )
        if not answer.output.isfinite().all():
            result.problems.append("output: not finite")
        answer, tokens = answer.rows(chosen), hidden[chosen]
        result.num_tokens, result.experts_per_token = len(chosen), answer.expert_ids[0].numel()
        _check_choices(result, contender, tokens, answer, slack=0.0)
        if result.problems:  # the definition may not even exist at such choices
            return result
        definition = Definition(contender, tokens, answer)
        result.compare("output", answer.output, *definition.outputs())
        for name in list(grads):  # one at a time: in float64 they may be gigabytes
            exact, plain = definition.gradients(name, cotangent[chosen])
            if name == "hidden":  # the other tokens must have got nothing
                exact, plain = (
                    grad.new_zeros(hidden.shape).index_copy(0, chosen, grad)
                    for grad in (exact, plain)
                )
            result.compare(f"gradient of {name}", grads.pop(name), exact, plain)
    if gradients and contender.jitter_std:
        _check_jittered(result, contender, hidden, chosen)
    return result


def _spread(hidden: Tensor, answer: Answer, contender: Contender) -> Tensor:
    """Tokens from all over the batch, few enough for scores in float64."""
    num_tokens, heads = answer.expert_ids.shape[:2]
    num_experts = contender.tables(dict(contender.module.named_parameters())).up.shape[0]
    most_scores = MOST_SCORES[hidden.device.type]
    most = min(MOST_TOKENS, max(8, num_tokens // 4), most_scores // (heads * num_experts))
    count = max(1, min(num_tokens, most))
    return torch.arange(count, device=hidden.device) * num_tokens // count


@contextmanager
def _evaluation(module: nn.Module) -> Iterator[None]:
    module.eval()
    try:
        yield
    finally:
        module.train()


@dataclass(frozen=True)
class Definition:
    """The plain formula at the choices of an answer, in float64 and in the layer's own dtypes."""

    contender: Contender
    tokens: Tensor  # [T, D]
    answer: Answer

    def outputs(self) -> tuple[Tensor, Tensor]:
        values = self._values()
        with torch.no_grad():
            return self._mix(self.tokens.double(), values), self._mix(self.tokens, values)

    def gradients(self, name: str, cotangent: Tensor) -> tuple[Tensor, Tensor]:
        """With respect to a parameter or "hidden"."""
        exact, plain = (
            self._gradient(tokens, name, cotangent)
            for tokens in (self.tokens.double(), self.tokens)
        )
        return exact, plain

    def _gradient(self, tokens: Tensor, name: str, cotangent: Tensor) -> Tensor:
        values = {"hidden": tokens} | self._values()
        values[name] = values[name].to(tokens.dtype, copy=True).requires_grad_()
        output = self._mix(values["hidden"], values)
        return _gradients(output, {name: values[name]}, cotangent)[name]

    def _values(self) -> Values:
        named = self.contender.module.named_parameters()
        return {name: value.detach() for name, value in named}

    def _mix(self, tokens: Tensor, values: Values) -> Tensor:
        """The layer's output [T, D] in the dtype of the tokens."""
        contender, ids = self.contender, self.answer.expert_ids
        score_dtype = torch.promote_types(contender.score_dtype, tokens.dtype)
        logits = contender.scores(tokens.to(score_dtype), values, self.answer.cells)
        if ids.shape[-1] == 1:  # a single one keeps its probability among all (Switch)
            weights = logits.softmax(-1).gather(-1, ids)
        else:
            weights = logits.gather(-1, ids).softmax(-1)
        return mixture(tokens, self._neurons(), weights, contender.tables(values))

    def _neurons(self) -> Tensor:
        """[T, K * S] rows of the tables; an expert's weight is that of all its neurons."""
        size, ids = self.contender.neurons_per_expert, self.answer.expert_ids.flatten(1)
        places = torch.arange(size, device=ids.device)
        return (ids.unsqueeze(-1) * size + places).flatten(1)


def _gradients(output: Tensor, named: Values, cotangent: Tensor) -> Values:
    grads = torch.autograd.grad(
        output, list(named.values()), cotangent.to(output.dtype), allow_unused=True
    )
    return {
        name: torch.zeros_like(named[name]) if grad is None else grad
        for name, grad in zip(named, grads, strict=True)
    }


@torch.no_grad()
def _check_choices(
    result: Check, contender: Contender, hidden: Tensor, answer: Answer, slack: float
) -> None:
    """Cells, shortlists and experts are the best ones, up to ties and `slack`."""
    if result.experts_per_token != contender.top_k:
        result.problems.append(
            f"{result.experts_per_token} experts per token, expected {contender.top_k}"
        )
        return
    values = {name: value.detach() for name, value in contender.module.named_parameters()}
    exact_hidden, plain_hidden = hidden.double(), hidden.to(contender.score_dtype)
    if answer.cells is not None:
        cells = answer.cells
        coarse = [contender.cell_scores(h, values) for h in (exact_hidden, plain_hidden)]
        result.attempt(lambda: demand_best("cells", cells, *coarse, slack=0.0))
    index = contender.inverted_index()
    if index is not None and answer.cells is not None:
        used = answer.cells.unique()
        lists = [index.codeword_scores(used, h.dtype) for h in (exact_hidden, plain_hidden)]
        shortlists = index.shortlists[used]
        result.attempt(lambda: demand_best("shortlist", shortlists, *lists, slack=slack))
    fine = [contender.scores(h, values, answer.cells) for h in (exact_hidden, plain_hidden)]
    result.attempt(lambda: demand_best("experts", answer.expert_ids, *fine, slack=slack))


@torch.no_grad()
def _check_jittered(result: Check, contender: Contender, hidden: Tensor, chosen: Tensor) -> None:
    """Training mode: choices within reach of the jitter, output right for its own weights."""
    answer, tokens = contender.answer(hidden).rows(chosen), hidden[chosen]
    weights = answer.weights
    assert weights is not None
    slack = 2 * JITTER_SIGMAS * contender.jitter_std
    _check_choices(result, contender, tokens, answer, slack)
    values = {name: value.detach() for name, value in contender.module.named_parameters()}
    exact, plain = (
        mixture(hidden, answer.expert_ids, weights, contender.tables(values))
        for hidden in (tokens.double(), tokens)
    )
    result.compare("output with jitter", answer.output, exact, plain)
    logits = contender.scores(tokens.double(), values, answer.cells).gather(-1, answer.expert_ids)
    result.jitter_std = result.attempt(lambda: demand_jitter(weights, logits, contender.jitter_std))


def floor(dtype: torch.dtype) -> float:
    """Relative to the largest entry."""
    return max(8 * torch.finfo(torch.float32).eps, 0.5 * torch.finfo(dtype).eps)


def _distance(left: Tensor, right: Tensor) -> float:
    """Largest difference; NaN where one is. These may be gigabytes, hence the parts."""
    parts = zip(left.detach().split(ROWS), right.detach().split(ROWS), strict=True)
    return torch.stack([(one - other).abs().amax() for one, other in parts]).amax().item()


def demand_best(
    what: str, chosen: Tensor, exact: Tensor, plain: Tensor, slack: float = 0.0
) -> None:
    """`chosen` [..., K] are distinct and the K largest of `exact` [..., E] up to ties."""
    count = chosen.shape[-1]
    if (chosen.sort(-1).values.diff(dim=-1) == 0).any():
        raise WrongAnswerError(f"{what}: chosen twice")
    finite = exact.isfinite()
    rounding = (plain.double() - exact)[finite].abs().max().item()
    slack += 4 * rounding + 2 * floor(plain.dtype) * exact[finite].abs().max().item()
    last = exact.topk(count, dim=-1).values[..., -1:]
    worst = (last - exact.gather(-1, chosen)).max().item()
    if not worst <= slack:
        raise WrongAnswerError(f"{what}: one is {worst:.2e} below the last of the best {count}")


def demand_jitter(weights: Tensor, logits: Tensor, std: float) -> float:
    """The jitter of weights [..., K] against jitter-free logits; raises where it is not `std`."""
    drawn = weights.double().log() - logits.log_softmax(-1)
    measured = (drawn - drawn.mean(-1, keepdim=True)).std().item()
    if not 0.7 * std < measured < 1.3 * std:
        raise WrongAnswerError(f"jitter {measured:.2e}, expected {std:.2e}")
    return measured
