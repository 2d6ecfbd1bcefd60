"""No time for a wrong answer: each layer against its own definition in float64.

The layer runs at its full size, so the kernels that are timed are those that are checked. Of its
output some tokens are looked at, and only they get a gradient, so that a definition of just these
tokens gives the gradients of all parameters. Cells, shortlists and experts must be the best up to
ties; output and gradients keep the rule of `compare.py`. That is without jitter (evaluation mode);
in training mode the choices must lie within reach of it, and the output fit its own weights.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from airmoe.experiments.bench.compare import (
    JITTER_SIGMAS,
    Deviation,
    WrongAnswerError,
    demand_best,
    demand_jitter,
    deviation,
)
from airmoe.experiments.bench.contenders import Answer, Contender, Values
from airmoe.experiments.bench.definitions import mixture

MOST_TOKENS = 256
MOST_SCORES = 2**28  # float64 numbers: 2 GiB


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

    def note(self, found: Deviation) -> None:
        self.deviations.append(found)
        if found.complaint is not None:
            self.problems.append(found.complaint)

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
        chosen, answer, fast = _run(contender, hidden, cotangent if gradients else None)
        result.num_tokens, result.experts_per_token = len(chosen), answer.expert_ids[0].numel()
        if fast.pop("finite") == 0:
            result.problems.append("output: not finite")
        tokens = hidden[chosen]
        _check_choices(result, contender, tokens, answer, slack=0.0)
        if result.problems:  # the definition may not even exist at such choices
            return result
        given = cotangent[chosen] if gradients else None
        exact = _by_definition(contender, tokens.double(), given, answer, torch.float64)
        plain = _by_definition(contender, tokens, given, answer, contender.score_dtype)
    result.note(deviation("output", answer.output, exact.pop("output"), plain.pop("output")))
    for name in exact:
        if name == "hidden":
            for grads in (exact, plain):  # the other tokens must have got nothing
                grads[name] = (
                    fast[name]
                    .new_zeros(fast[name].shape, dtype=grads[name].dtype)
                    .index_copy(0, chosen, grads[name])
                )
        result.note(deviation(f"gradient of {name}", fast[name], exact[name], plain[name]))
    if gradients and contender.jitter_std:
        _check_jittered(result, contender, hidden, chosen)
    return result


def _run(
    contender: Contender, hidden: Tensor, cotangent: Tensor | None
) -> tuple[Tensor, Answer, Values]:
    """(tokens to look at, their answers, gradients by name and whether all output is finite)."""
    fast = hidden.detach().clone().requires_grad_(cotangent is not None)
    with torch.set_grad_enabled(cotangent is not None):
        answer = contender.answer(fast)
    chosen = _spread(hidden, answer, contender)
    found = {"finite": answer.output.isfinite().all()}
    if cotangent is not None:
        sparse = torch.zeros_like(cotangent).index_copy(0, chosen, cotangent[chosen])
        named = {"hidden": fast} | dict(contender.module.named_parameters())
        found |= _gradients(answer.output, named, sparse)
    return chosen, answer.rows(chosen), found


def _spread(hidden: Tensor, answer: Answer, contender: Contender) -> Tensor:
    """Tokens from all over the batch, few enough for scores in float64."""
    num_tokens, heads = answer.expert_ids.shape[:2]
    num_experts = contender.tables(dict(contender.module.named_parameters())).up.shape[0]
    most = min(MOST_TOKENS, max(8, num_tokens // 4), MOST_SCORES // (heads * num_experts))
    count = max(1, min(num_tokens, most))
    return torch.arange(count, device=hidden.device) * num_tokens // count


@contextmanager
def _evaluation(module: nn.Module) -> Iterator[None]:
    module.eval()
    try:
        yield
    finally:
        module.train()


def _by_definition(
    contender: Contender,
    hidden: Tensor,
    cotangent: Tensor | None,
    answer: Answer,
    score_dtype: torch.dtype,
) -> Values:
    """Output and gradients of the plain formula in hidden's dtype, at the choices of `answer`."""
    named = {name: value.detach() for name, value in contender.module.named_parameters()}
    if cotangent is not None:
        named = {name: value.to(hidden.dtype).requires_grad_() for name, value in named.items()}
        hidden = hidden.clone().requires_grad_()
    with torch.set_grad_enabled(cotangent is not None):
        logits = contender.scores(hidden.to(score_dtype), named, answer.cells)  # [T, heads, E]
        weights = _weigh(logits, answer.expert_ids)
        output = mixture(hidden, _neurons(contender, answer), weights, contender.tables(named))
    found = {"output": output.detach()}
    if cotangent is not None:
        found |= _gradients(output, {"hidden": hidden} | named, cotangent)
    return found


def _weigh(logits: Tensor, ids: Tensor) -> Tensor:
    """Softmax over the chosen; a single one keeps its probability among all (Switch)."""
    if ids.shape[-1] == 1:
        return logits.softmax(-1).gather(-1, ids)
    return logits.gather(-1, ids).softmax(-1)


def _neurons(contender: Contender, answer: Answer) -> Tensor:
    """[T, K * S] rows of the tables; an expert's weight is that of all its neurons."""
    size = contender.neurons_per_expert
    ids = answer.expert_ids.flatten(1)
    if size == 1:
        return ids
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
    _check_choices(
        result, contender, tokens, answer, slack=2 * JITTER_SIGMAS * contender.jitter_std
    )
    values = {name: value.detach() for name, value in contender.module.named_parameters()}
    tables = contender.tables(values)
    exact = mixture(tokens.double(), answer.expert_ids, answer.weights, tables)
    plain = mixture(tokens, answer.expert_ids, answer.weights, tables)
    result.note(deviation("output with jitter", answer.output, exact, plain))
    logits = contender.scores(tokens.double(), values, answer.cells).gather(-1, answer.expert_ids)
    result.jitter_std = result.attempt(
        lambda: demand_jitter(answer.weights, logits, contender.jitter_std)
    )
