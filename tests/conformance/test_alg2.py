"""The codebook against the float64 loops of Alg. 2."""

from __future__ import annotations

import pytest
import torch

from tests import oracles
from tests.conformance.common import Case, set_codebook, tokens
from tests.conformance.training_oracles import (
    Codebook,
    alg2_update,
    assert_state,
    first_codebook,
    replacement,
    states_of,
)
from tests.oracles import Kind
from tests.state.common import assert_same, snapshot

DIM, CODEWORDS = 10, 6


def router_with(
    kind: str = "spherical", decay: float = 0.9, dead_below: float = 0.0, seed: int = 0
):
    options = {
        "dim": DIM,
        "num_codewords": CODEWORDS,
        "codebook": kind,
        "codebook_decay": decay,
        "dead_below": dead_below,
    }
    return Case("air", options).build(seed)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("decay", [0.3, 0.5, 0.95])
@pytest.mark.parametrize("kind", ["spherical", "euclidean"])
def test_updates_follow_alg2(kind: Kind, decay: float, dtype: torch.dtype):
    """Five micro-batches of different sizes, tokens of very different length.

    In float32 whatever the model: tokens of half precision count as they are.
    """
    start = 0.5 * tokens(CODEWORDS, DIM, 1)
    router = router_with(kind, decay).to(dtype)
    set_codebook(router, oracles.project(start) if kind == "spherical" else start)
    codebook = router.codebook
    assert {codebook.codewords.dtype, codebook.counts.dtype, codebook.sums.dtype} == {torch.float32}
    exact, plain = states_of(codebook)
    for step, count in enumerate((61, 7, 128, 40, 53)):
        lengths = torch.linspace(0.2, 3.0, count)[:, None]
        hidden = (lengths * tokens(count, DIM, 10 + step)).to(dtype)
        codebook.update(hidden)
        exact = alg2_update(hidden.double(), exact, decay, 0.0, kind=kind)
        plain = alg2_update(hidden.float(), plain, decay, 0.0, kind=kind)
        assert_state(codebook, exact, plain, f"{kind}, micro-batch {step}")


@pytest.mark.parametrize("kind", ["spherical", "euclidean"])
def test_dead_codes_become_tokens_of_the_batch(kind: Kind):
    """Alg. 2, lines 11-14: n < tau after the EMA step; m = h'_u, n = 1, c = that token."""
    router = router_with(kind, decay=0.5, dead_below=1.0)
    codewords = torch.cat([torch.eye(DIM)[:4], -torch.eye(DIM)[:2]])
    set_codebook(router, codewords, torch.tensor([4.0, 2.0, 1.99, 0.5, 2.0, 0.0]))
    codebook = router.codebook
    states = states_of(codebook)
    hidden = tokens(9, DIM, 3).abs() + torch.eye(DIM)[0]  # everything sits near the first codeword
    codebook.update(hidden)
    points = oracles.project(hidden.double(), kind == "spherical")
    pick = replacement(codebook, points)
    died: list[int] = []

    def recorded(g: int) -> int:
        died.append(g)
        return pick(g)

    exact = alg2_update(hidden.double(), states[0], 0.5, 1.0, recorded, kind)
    plain = alg2_update(hidden, states[1], 0.5, 1.0, pick, kind)
    assert_state(codebook, exact, plain, kind)
    assert {2, 3, 5} <= set(died) and not {0} & set(died)
    assert 4 not in died  # 0.5 x 2 = 1 is not below 1


def test_replacements_reach_every_valid_token_and_no_other():
    """u ~ Unif([S]) over the tokens that count: masked and non-finite ones never come up."""
    router = router_with(decay=0.5, dead_below=1.0)
    hidden = tokens(8, DIM, 4).abs()
    hidden[6] = float("nan")
    mask = torch.ones(8, dtype=torch.bool)
    mask[2] = False
    drawn = []
    for _ in range(150):
        set_codebook(router, torch.eye(DIM)[:CODEWORDS], torch.tensor([9.0] * 5 + [0.0]))
        with torch.no_grad():  # nothing is near the last code
            router.codebook.codewords[5] = -torch.ones(DIM) / DIM**0.5
        router.codebook.update(hidden, mask)
        points = oracles.project(hidden[[0, 1, 3, 4, 5, 7]].double())
        drawn.append(replacement(router.codebook, points)(5))
    shares = torch.bincount(torch.tensor(drawn), minlength=6) / 150
    # Binomial(150, 1/6): standard deviation 0.030; five of them.
    assert ((shares - 1 / 6).abs() < 5 * 0.0305).all(), shares


def test_dead_codes_are_replaced_each_by_a_draw_of_its_own():
    """Of 64 tokens, five draws that agree are none: by chance once in 16 million updates."""
    router = router_with(decay=0.5, dead_below=1.0)
    hidden = tokens(64, DIM, 4).abs()
    codewords = -oracles.project(tokens(CODEWORDS, DIM, 5).abs())
    codewords[0] = oracles.project(torch.ones(1, DIM))
    set_codebook(router, codewords, torch.tensor([9.0] + [0.0] * (CODEWORDS - 1)))
    router.codebook.update(hidden)
    pick = replacement(router.codebook, oracles.project(hidden.double()))
    assert len({pick(code) for code in range(1, CODEWORDS)}) > 2


@pytest.mark.parametrize("kind", ["spherical", "euclidean"])
def test_the_first_update_starts_from_distinct_tokens(kind: Kind):
    """c = distinct tokens, n = T/G, m = token x T/G, then the ordinary EMA step."""
    router = router_with(kind, decay=0.99, dead_below=0.0)
    codebook = router.codebook
    hidden = 2 * tokens(50, DIM, 5)
    mask = torch.ones(50, dtype=torch.bool)
    mask[::7] = False
    valid = hidden[mask]
    codebook.update(hidden, mask)
    points = oracles.project(valid.double(), kind == "spherical")
    share = len(valid) / CODEWORDS
    # With decay 0.99 the sum is still next to the drawn token: find it, then demand equality.
    drawn = [
        int((points - s / (0.99 * share)).norm(dim=1).argmin()) for s in codebook.sums.double()
    ]
    assert len(set(drawn)) == CODEWORDS
    exact, plain = (
        alg2_update(h, first_codebook(h, drawn, kind), 0.99, 0.0, kind=kind)
        for h in (valid.double(), valid)
    )
    assert_state(codebook, exact, plain, kind)


@pytest.mark.parametrize("kind", ["spherical", "euclidean"])
def test_codes_without_tokens_keep_their_place_when_nothing_dies(kind: Kind):
    """dead_below = 0: a code nobody used keeps its direction (its mean), however long ago that was.

    Pi(m) does not depend on the length of m, nor m / n on a common factor, so neither may fade out.
    """
    far = torch.eye(DIM)[[0, 1, 2, 3]]
    for faded in (1e-3, 1e-14, 1e-30, 0.0):
        router = router_with(kind, decay=0.5, dead_below=0.0)
        set_codebook(router, torch.cat([far, -far[:2]]), torch.tensor([4.0] * 4 + [faded] * 2))
        router.codebook.update(tokens(20, DIM, 11).abs())
        old, new = -far[:2], router.codebook.codewords[4:]
        assert (new - old).abs().max() < 1e-6, f"sums faded to {faded}: {new.norm(dim=1)}"


def test_a_static_codebook_learns_once():
    router = router_with("static")
    before = router.codebook.codewords.clone()
    router.codebook.update(tokens(40, DIM, 6))
    first = snapshot(router.codebook)
    assert not torch.equal(router.codebook.codewords, before)
    router.codebook.update(tokens(40, DIM, 7))
    assert_same(snapshot(router.codebook), first)


def test_alg2_by_hand():
    """The oracle itself, against numbers computed by hand."""
    state = Codebook(
        torch.eye(3).double(), torch.tensor([4.0, 4.0, 1.0]).double(), 4 * torch.eye(3).double()
    )
    hidden = torch.tensor([[3.0, 4.0, 0.0], [5.0, 0.0, 0.0]]).double()
    new = alg2_update(hidden, state, 0.5, 1.0, pick=lambda g: 1)
    assert new.counts.tolist() == [2.5, 2.5, 1.0]  # 0.5 x 1 < 1: the third code died
    assert torch.allclose(new.sums[0], torch.tensor([2.5, 0.0, 0.0]).double())
    assert torch.allclose(new.sums[1], torch.tensor([0.3, 2.4, 0.0]).double())
    assert new.codewords[2].tolist() == [1.0, 0.0, 0.0]
    assert torch.allclose(new.codewords.norm(dim=1), torch.ones(3).double())
    flat = alg2_update(hidden, state, 0.5, 0.0, kind="euclidean")
    assert torch.allclose(flat.codewords[0], torch.tensor([4.5, 0.0, 0.0]).double() / 2.5)
