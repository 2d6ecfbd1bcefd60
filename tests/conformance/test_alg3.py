"""The training loop of Alg. 3, with gradient accumulation, against its float64 loop."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import airmoe
from tests import oracles
from tests.conformance.common import Case, granular, set_codebook, tokens
from tests.conformance.training_oracles import (
    Codebook,
    MicroBatch,
    Plan,
    Run,
    Theta,
    alg3_train,
    assert_state,
)
from tests.state.common import assert_same
from tests.tolerance import assert_close

DIM, EXPERTS, CODEWORDS, STEPS, ACCUMULATION = 8, 20, 4, 4, 3
PLAN = Plan(
    shortlist_size=8,
    top_k=3,
    decay=0.6,
    dead_below=0.0,
    learning_rate=0.3,
    momentum=0.9,
    balance_weight=0.05,
)


class Model(nn.Module):
    """The model of `Theta`, made of library parts."""

    def __init__(self, theta: Theta, codewords: Tensor, jitter_std: float = 0.0):
        super().__init__()
        options = {
            "dim": DIM,
            "num_experts": EXPERTS,
            "top_k": PLAN.top_k,
            "num_codewords": CODEWORDS,
            "shortlist_size": PLAN.shortlist_size,
            "codebook_decay": PLAN.decay,
            "dead_below": PLAN.dead_below,
            "jitter_std": jitter_std,
        }
        router = Case("air", options).build()
        experts = granular(num_experts=EXPERTS, dim=DIM, activation="swiglu")
        self.layer: Any = airmoe.MoELayer(router, experts, post_norm="none")
        self.inputs = nn.Parameter(torch.empty(DIM, DIM))
        set_codebook(router, codewords)
        for name, parameter in self.tensors().items():
            parameter.data.copy_(theta[name])
        router.on_parameters_changed()

    def tensors(self) -> dict[str, Tensor]:
        experts = self.layer.experts
        return {
            "inputs": self.inputs,
            "centroids": self.layer.router.centroids,
            "gate": experts.gate,
            "up": experts.up,
            "down": experts.down,
        }

    def forward(self, x: Tensor):
        return self.layer.forward_with_routing((x @ self.inputs.T)[None])


def setting():
    theta = {
        "inputs": torch.eye(DIM) + 0.2 * tokens(DIM, DIM, 0),
        "centroids": oracles.project(tokens(EXPERTS, DIM, 1)),
        "gate": 0.5 * tokens(EXPERTS, DIM, 2),
        "up": 0.5 * tokens(EXPERTS, DIM, 3),
        "down": 0.5 * tokens(EXPERTS, DIM, 4),
    }
    codewords = oracles.project(tokens(CODEWORDS, DIM, 5))
    sizes = [[11, 23, 17], [9, 16, 12], [25, 8, 13], [10, 14, 7]]
    data = [
        [
            (tokens(n, DIM, 100 + 10 * s + a), tokens(n, DIM, 200 + 10 * s + a))
            for a, n in enumerate(row)
        ]
        for s, row in enumerate(sizes)
    ]
    return theta, codewords, data


def codebook_of(codewords: Tensor) -> Codebook:
    counts = torch.full((CODEWORDS,), 4.0)
    return Codebook(codewords, counts, codewords * counts[:, None])


def train(model: Model, data) -> Run:
    """The library's side of Alg. 3."""
    optimizer = torch.optim.SGD(
        list(model.tensors().values()), lr=PLAN.learning_rate, momentum=PLAN.momentum
    )
    airmoe.track_optimizer(model, optimizer)
    model.train()
    router, run = model.layer.router, Run()
    for accumulation in data:
        optimizer.zero_grad()
        for x, targets in accumulation:
            result = model(x)
            loss = ((result.hidden[0] - targets) ** 2).mean()
            loss = loss + PLAN.balance_weight * airmoe.load_balance_loss(result.routing)
            (loss / len(accumulation)).backward()
            book = router.codebook
            hidden = (x @ model.inputs.T).detach()
            run.micro_batches.append(
                MicroBatch(
                    Codebook(book.codewords.clone(), book.counts.clone(), book.sums.clone()),
                    book.assign(hidden).tolist(),
                    router.shortlists().tolist(),
                    router.rebuild_shortlists().tolist(),
                    result.routing.to_token_routing().expert_ids.tolist(),
                    result.hidden[0].detach(),
                    loss.detach(),
                )
            )
        optimizer.step()
        run.parameters.append({k: v.detach().clone() for k, v in model.tensors().items()})
    return run


def assert_same_run(mine: Run, exact: Run, plain: Run) -> None:
    for step, (a, b, c) in enumerate(
        zip(mine.micro_batches, exact.micro_batches, plain.micro_batches, strict=True)
    ):
        what = f"micro-batch {step}"
        assert a.codeword_ids == b.codeword_ids, what
        assert a.shortlists == b.shortlists, what
        assert a.fresh_shortlists == b.fresh_shortlists, what
        assert a.expert_ids == b.expert_ids == c.expert_ids, what
        assert_state(a.codebook, b.codebook, c.codebook, what)
        assert_close(a.output, b.output, c.output, f"{what}: output")
        assert_close(a.loss, b.loss, c.loss, f"{what}: loss")
    for step, values in enumerate(
        zip(mine.parameters, exact.parameters, plain.parameters, strict=True)
    ):
        for name in values[0]:
            assert_close(*(v[name] for v in values), what=f"step {step}: {name}")


def test_the_whole_loop_with_accumulation():
    theta, codewords, data = setting()
    start = codebook_of(codewords)
    exact, plain = (alg3_train(theta, start, data, PLAN, t) for t in (torch.float64, torch.float32))
    assert_same_run(train(Model(theta, codewords), data), exact, plain)
    # A rebuild at any other moment would show: later in a step, or before the codebook's update.
    for i, now in enumerate(exact.micro_batches):
        assert (now.shortlists == now.fresh_shortlists) == (i % ACCUMULATION == 0)
    for step in range(1, STEPS):
        book = exact.micro_batches[step * ACCUMULATION - 1].codebook.codewords
        weights = exact.parameters[step - 1]["centroids"]
        before = oracles.build_shortlists(book, weights, PLAN.shortlist_size)
        assert before != exact.micro_batches[step * ACCUMULATION].shortlists


def test_evaluation_between_steps_changes_nothing():
    """Validation inside an accumulation window leaves the run as it was, bit for bit."""
    theta, codewords, data = setting()
    undisturbed = train(Model(theta, codewords, jitter_std=0.1), data)
    model = Model(theta, codewords, jitter_std=0.1)

    def validate(module: nn.Module, args: object) -> None:
        if model.training:
            model.eval()
            with torch.no_grad():
                model(tokens(19, DIM, 77))
            model.train()

    model.register_forward_pre_hook(validate)
    disturbed = train(model, data)
    for a, b in zip(disturbed.micro_batches, undisturbed.micro_batches, strict=True):
        assert a.shortlists == b.shortlists and a.expert_ids == b.expert_ids
        assert torch.equal(a.output, b.output)
    assert_same(disturbed.parameters, undisturbed.parameters)
