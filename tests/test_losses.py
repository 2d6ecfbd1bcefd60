"""Router losses against closed forms, float64 formulas, micro-batches and ranks."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from transformers.models.mixtral.modeling_mixtral import load_balancing_loss_func

from airmoe import (
    ROUTERS,
    Router,
    TokenRouting,
    TopKRouter,
    load_balance_loss,
    router_z_loss,
    shortlist_balance_loss,
)
from tests.conformance.common import SIZES, Case, all_logits, candidates, leaves
from tests.distributed.launch import WORLD, run_all
from tests.tolerance import FLOOR, assert_close

Loss = Callable[..., Tensor]

DIM, NUM_EXPERTS, TOP_K = SIZES["dim"], SIZES["num_experts"], SIZES["top_k"]
LOSSES: list[Loss] = [load_balance_loss, router_z_loss, shortlist_balance_loss]


def build(name: str) -> Router:
    return Case(name).build().eval()


def pairs(*names: str) -> list[Any]:
    """Every loss with every router (or those named) that has it."""
    return [
        pytest.param(name, loss, id=f"{name}-{loss.__name__}")
        for name in names or ROUTERS
        for loss in LOSSES
        if loss is not shortlist_balance_loss or name in ("air", "hierarchical")
    ]


def token_routing(probs: Tensor, expert_ids: Tensor, log_z: Tensor, valid: Tensor) -> TokenRouting:
    return TokenRouting(
        num_tokens=expert_ids.shape[0],
        num_experts=probs.shape[0],
        valid=valid,
        expert_ids=expert_ids,
        weights=torch.full(expert_ids.shape, 0.5),
        lazy_expert_probs=lambda: probs,
        lazy_log_z=lambda: log_z,
    )


def choosing(probs: list[float], expert_ids: list[list[int]]) -> TokenRouting:
    ids = torch.tensor(expert_ids)
    everyone = torch.ones(ids.shape[0], dtype=torch.bool)
    return token_routing(torch.tensor(probs), ids, torch.zeros(ids.shape[0]), everyone)


def gradients(loss: Tensor, router: Router, *hidden: Tensor) -> list[Tensor]:
    """Of the token states, then of every parameter (0 where the loss does not reach it)."""
    wanted = [*hidden, *router.parameters()]
    return list(torch.autograd.grad(loss, wanted, materialize_grads=True))


# -- closed forms ---------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("probs", "expert_ids", "expected"),
    [
        ([0.25] * 4, [[0, 1], [2, 3]], 2.0),  # uniform use: the choices per token
        ([0.0, 1.0, 0.0, 0.0, 0.0], [[1], [1], [1]], 5.0),  # one has all: their number
        # f = (2, 1, 1) / 2 tokens: 3 * (0.5 + 0.15 + 0.1)
        ([0.5, 0.3, 0.2], [[0, 1], [2, 0]], 2.25),
    ],
)
def test_balance_by_hand(probs: list[float], expert_ids: list[list[int]], expected: float) -> None:
    routing = choosing(probs, expert_ids)
    assert load_balance_loss(routing).item() == pytest.approx(expected, rel=1e-6)


def test_z_loss_by_hand() -> None:
    log_z = torch.tensor([1.0, torch.nan, -3.0], requires_grad=True)
    valid = torch.tensor([True, False, True])
    loss = router_z_loss(token_routing(torch.ones(1), torch.zeros(3, 1).long(), log_z, valid))
    loss.backward()
    assert loss.item() == pytest.approx(5.0)
    assert log_z.grad is not None and log_z.grad.tolist() == [1.0, 0.0, -3.0]


# -- the plain formulas in float64 ----------------------------------------------------------


def plain_loss(
    loss: Loss,
    case: Case,
    router: Any,
    hidden: Tensor,
    params: dict[str, Tensor],
    half: bool = False,
) -> Tensor:
    """The formula over a full softmax; with `half`, log Z is held fixed in the gradient."""
    outside, count = ~candidates(case, router, hidden), TOP_K
    logits = all_logits(case, hidden, params).masked_fill(outside, -torch.inf)
    if loss is router_z_loss:
        return logits.logsumexp(1).square().mean()
    if loss is shortlist_balance_loss and case.name == "air":
        codewords = F.normalize(router.codebook.codewords.to(hidden), dim=1)
        logits, count = F.normalize(hidden, dim=1) @ codewords.T, 1
    elif loss is shortlist_balance_loss:
        logits = hidden @ F.normalize(params["cluster_centroids"], dim=1).T
        count = router.config.num_selected_clusters
    log_z = logits.logsumexp(1, keepdim=True)
    probs = (logits - (log_z.detach() if half else log_z)).exp().mean(0)
    chosen = logits.topk(count, dim=1).indices
    choices = chosen.flatten().bincount(minlength=probs.numel()) / len(chosen)  # per token
    return probs.numel() * (choices.to(probs) * probs).sum()


@pytest.mark.parametrize(("name", "loss"), pairs())
def test_float64_throughout(name: str, loss: Loss) -> None:
    router, hidden = build(name), torch.randn(37, DIM)
    wanted = loss(router(hidden))
    found = loss(router.double()(hidden.double()))
    assert found.dtype == torch.float64
    torch.testing.assert_close(found.float(), wanted, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(("name", "loss"), pairs("topk", "air", "hierarchical"))
def test_value_and_gradient_of_the_plain_formula(name: str, loss: Loss) -> None:
    router = build(name)
    hidden = torch.randn(37, DIM) * 2

    def by_formula(dtype: torch.dtype, order: Tensor, half: bool = False) -> list[Tensor]:
        tokens = hidden.detach().to(dtype).requires_grad_()
        params = leaves(router, dtype)
        value = plain_loss(loss, Case(name), router, tokens[order], params, half)
        wanted = [tokens, *params.values()]
        return [value, *torch.autograd.grad(value, wanted, materialize_grads=True)]

    hidden.requires_grad_()
    value = loss(router(hidden))
    actual = [value, *gradients(value, router, hidden)]
    names = ["loss", "hidden", *(name for name, _ in router.named_parameters())]
    exact = by_formula(torch.float64, torch.arange(37))
    # The gradient of a balance is the small difference of two terms; they set its rounding error.
    terms = by_formula(torch.float64, torch.arange(37), half=loss is not router_z_loss)
    # In one order of the tokens float32 may round luckily: the worst of several is typical.
    plains = [by_formula(torch.float32, torch.randperm(37)) for _ in range(4)]
    for place, what in enumerate(names):
        error = torch.stack([(plain[place] - exact[place]).abs().max() for plain in plains]).max()
        error = error + FLOOR * terms[place].abs().max()
        assert_close(actual[place], exact[place], exact[place] + error, what)
    assert exact[1].abs().max() > 1e-4  # a loss that ignores its tokens would prove nothing


def test_peer_balance_is_the_plain_formula_per_head() -> None:
    router: Any = build("peer")
    hidden = torch.randn(23, DIM) * 2
    heads = router.full_logits(hidden).detach().double()  # [T, P, E]
    chosen = heads.topk(TOP_K // 2, dim=2).indices.flatten()
    choices = chosen.bincount(minlength=NUM_EXPERTS) / len(hidden)  # both heads' of a token
    expected = NUM_EXPERTS * (choices * heads.softmax(2).mean((0, 1))).sum()
    assert load_balance_loss(router(hidden)).item() == pytest.approx(expected.item(), rel=1e-5)


def test_expert_choice_has_the_choices_of_its_capacity() -> None:
    routing = build("expert_choice")(torch.randn(20, DIM))  # every expert takes 20 * 4 / 16
    assert routing.expert_counts.tolist() == [5] * NUM_EXPERTS
    assert load_balance_loss(routing).item() == pytest.approx(TOP_K, rel=1e-6)


# -- what others compute --------------------------------------------------------------------


@pytest.mark.parametrize("masked", [False, True])
@pytest.mark.parametrize("top_k", [1, 2, 3, 8, NUM_EXPERTS])
def test_exact_routing_has_the_balance_loss_of_transformers(top_k: int, masked: bool) -> None:
    torch.manual_seed(top_k)
    router = TopKRouter.Config(dim=DIM, num_experts=NUM_EXPERTS, top_k=top_k).build().eval()
    hidden = (2 * torch.randn(41, DIM) + 1).requires_grad_()  # experts on one side get more
    mask = torch.arange(41) % 3 > 0 if masked else None
    logits = hidden @ F.normalize(router.centroids, dim=1).T
    theirs = load_balancing_loss_func((logits,), NUM_EXPERTS, top_k, mask)
    assert isinstance(theirs, Tensor)
    ours = load_balance_loss(router(hidden, mask))
    wanted = [theirs, *gradients(theirs, router, hidden)]
    torch.testing.assert_close([ours, *gradients(ours, router, hidden)], wanted)
    # With all experts chosen nothing can be balanced; else uneven use costs more than K.
    assert ours.item() == pytest.approx(top_k) if top_k == NUM_EXPERTS else ours > 1.02 * top_k


# -- tokens that do not count ---------------------------------------------------------------


@pytest.mark.parametrize(("name", "loss"), pairs())
def test_masked_and_non_finite_tokens_leave_no_trace(name: str, loss: Loss) -> None:
    router = build(name)
    hidden = torch.randn(12, DIM)
    mask = torch.ones(12, dtype=torch.bool)
    mask[[0, 5]] = False
    hidden[3, 1], hidden[5, 0], hidden[9, 2] = torch.nan, torch.inf, -torch.inf
    counted = mask & hidden.isfinite().all(1)
    assert counted.sum() == 8
    clean = hidden[counted].requires_grad_()
    hidden.requires_grad_()

    value, expected = loss(router(hidden, mask)), loss(router(clean))
    torch.testing.assert_close(value, expected)
    grad_hidden, *grads = gradients(value, router, hidden)
    grad_clean, *grads_wanted = gradients(expected, router, clean)
    assert (grad_hidden[~counted] == 0).all()
    torch.testing.assert_close(grad_hidden[counted], grad_clean)
    constant = name == "expert_choice" and loss is load_balance_loss  # balanced by construction
    assert constant or grad_clean.abs().max() > 1e-4
    torch.testing.assert_close(grads, grads_wanted)


@pytest.mark.parametrize("tokens", ["masked", "nan", "none"])
@pytest.mark.parametrize(("name", "loss"), pairs())
def test_no_valid_token_is_zero_without_nan(name: str, loss: Loss, tokens: str) -> None:
    router = build(name)
    hidden = torch.full((0 if tokens == "none" else 4, DIM), torch.nan if tokens == "nan" else 1.0)
    hidden.requires_grad_()  # a rank without tokens still takes part in the backward pass
    mask = torch.zeros(4, dtype=torch.bool) if tokens == "masked" else None
    for total_tokens in (None, 0, 7):
        value = loss(router(hidden, mask), total_tokens=total_tokens)
        assert value.item() == 0.0
        for grad in gradients(value, router, hidden):
            assert (grad == 0).all()


@pytest.mark.parametrize(("name", "loss"), pairs())
def test_autocast_changes_nothing(name: str, loss: Loss) -> None:
    """Trainers compute losses inside autocast; routing statistics are float32 all the same."""
    router, hidden = build(name), torch.randn(200, DIM, requires_grad=True)
    expected = loss(router(hidden))
    with torch.autocast("cpu", torch.bfloat16):
        value = loss(router(hidden))
    assert value.dtype == torch.float32
    torch.testing.assert_close(value, expected)
    torch.testing.assert_close(
        gradients(value, router, hidden), gradients(expected, router, hidden)
    )


# -- normaliser -----------------------------------------------------------------------------


@pytest.mark.parametrize("as_tensor", [False, True])
@pytest.mark.parametrize(("name", "loss"), pairs())
def test_micro_batches_sum_to_the_token_weighted_mean(
    name: str, loss: Loss, as_tensor: bool
) -> None:
    router = build(name)
    parts = [torch.randn(size, DIM) for size in (5, 1, 9)]
    parts[2][4] = torch.nan  # 8 valid ones remain
    for part in parts:
        part.requires_grad_()
    sizes = [5, 1, 8]
    total = torch.tensor(sum(sizes)) if as_tensor else sum(sizes)

    shares = sum((loss(router(part), total_tokens=total) for part in parts), torch.zeros(()))
    losses = [loss(router(part)) for part in parts]
    mean = sum((size * value for size, value in zip(sizes, losses, strict=True)), torch.zeros(()))
    mean = mean / sum(sizes)
    torch.testing.assert_close(shares, mean)
    if name != "expert_choice":  # there every balance loss is K, or the capacity's rounding
        assert (shares - torch.stack(losses).mean()).abs().item() > 1e-4  # not the plain mean
    torch.testing.assert_close(gradients(shares, router, *parts), gradients(mean, router, *parts))


@pytest.mark.parametrize("total_tokens", [-1, True, 2.5, torch.ones(2)])
@pytest.mark.parametrize("loss", [load_balance_loss, router_z_loss])
def test_impossible_total_tokens_are_refused(loss: Loss, total_tokens: object) -> None:
    routing = choosing([0.5, 0.5], [[0], [1]])
    with pytest.raises(ValueError, match="total_tokens: got"):
        loss(routing, total_tokens=total_tokens)


def test_shortlist_balance_needs_shortlists() -> None:
    routing: Any = choosing([0.5, 0.5], [[0], [1]])
    with pytest.raises(TypeError, match="TokenRouting, needs a CellRouting"):
        shortlist_balance_loss(routing)


# -- ranks ----------------------------------------------------------------------------------

# Tokens of each rank, of which rank 1's first is masked where it has any.
SPLITS = [(7, 3), (10, 0), (0, 10), (5, 5)]
WINDOW = 25  # any number above 9 tells the two normalisers apart


def global_batch() -> tuple[Tensor, Tensor]:
    torch.manual_seed(3)
    return torch.randn(10, DIM), torch.arange(10) != 7


def measure(router: Router, hidden: Tensor, mask: Tensor) -> dict[str, list[Tensor]]:
    """Value and gradients (token states first) of every loss under both normalisers."""
    found = {}
    hidden = hidden.clone().requires_grad_()
    for loss in LOSSES:
        for total_tokens in (None, WINDOW):
            value = loss(router(hidden, mask), total_tokens=total_tokens)
            key = f"{loss.__name__}-{total_tokens}"
            found[key] = [value.detach(), *gradients(value, router, hidden)]
    return found


def measure_this_rank(rank: int, join: Callable[[], None]) -> list[dict[str, list[Tensor]]]:
    join()
    hidden, mask = global_batch()
    results = []
    for split in SPLITS:
        start = sum(split[:rank])
        rows = slice(start, start + split[rank])
        for name in ("air", "hierarchical"):
            results.append(measure(build(name), hidden[rows], mask[rows]))
    return results


@pytest.mark.slow
def test_mean_over_ranks_is_the_global_loss(tmp_path: Path) -> None:
    first, second = run_all({"losses": measure_this_rank}, tmp_path)["losses"]
    for index, name in enumerate(("air", "hierarchical") * len(SPLITS)):
        expected = measure(build(name), *global_batch())
        for key, (value, grad_hidden, *grads) in expected.items():
            assert value > 0.05, key
            here, there = first[index][key], second[index][key]
            torch.testing.assert_close((here[0] + there[0]) / WORLD, value, msg=key)
            # Each rank's tokens are its own, so their gradients are not averaged but joined.
            torch.testing.assert_close(torch.cat([here[1], there[1]]) / WORLD, grad_hidden)
            sums = [got + other for got, other in zip(here[2:], there[2:], strict=True)]
            torch.testing.assert_close([total / WORLD for total in sums], grads)
