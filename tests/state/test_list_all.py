"""With `list_all` every expert is in a training shortlist, and so none is lost for good."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

import airmoe
from airmoe import ConfigError, load_balance_loss
from airmoe.routers.coverage import MOST_REPLACED, cover
from tests.state.common import air_of, batch, build_layer, build_router, plain_shortlists


def tables(codewords: int, experts: int, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(seed)
    both = (torch.randn(n, 8, generator=generator) for n in (codewords, experts))
    left, right = (torch.nn.functional.normalize(table, dim=-1) for table in both)
    return left, right


@pytest.mark.parametrize("seed", range(5))
def test_everybody_is_listed_by_the_nearest_codeword(seed: int) -> None:
    codewords, centroids = tables(12, 200, seed)
    scores = codewords @ centroids.T
    lists = scores.topk(50).indices.sort(-1).values
    unlisted = [e for e in range(200) if e not in set(lists.flatten().tolist())]
    assert unlisted
    found = cover(lists, codewords, centroids)
    assert set(found.flatten().tolist()) == set(range(200))
    for row, (before, after) in enumerate(zip(lists.tolist(), found.tolist(), strict=True)):
        assert after == sorted(set(after))  # ascending, nobody twice
        new = set(after) - set(before)
        assert new == {e for e in unlisted if int(scores[:, e].argmax()) == row}
        assert len(set(before) - set(after)) == len(new)


def test_the_worst_make_room() -> None:
    codewords, centroids = tables(12, 200)
    lengths = torch.linspace(0.5, 2.0, 200)
    scores = codewords @ centroids.T
    lists = scores.topk(24).indices.sort(-1).values
    found = cover(lists, codewords, centroids * lengths.unsqueeze(-1), 1 / lengths)
    spared: Counter[int] = Counter()
    for row, (before, after) in enumerate(zip(lists.tolist(), found.tolist(), strict=True)):
        gone, stayed = set(before) - set(after), set(before) & set(after)
        limit = max((float(scores[row, e]) for e in gone), default=-torch.inf)
        spared.update(e for e in stayed if scores[row, e] < limit)
    # Worse than one that made room: kept by one list, by no other.
    assert spared and set(spared.values()) == {1}


def test_nobody_falls_out_where_all_lists_make_room() -> None:
    """Experts that all codewords like best are in all lists, and every list has newcomers."""
    codewords = torch.nn.functional.normalize(tables(16, 1)[0] + 1.0, dim=-1)
    centroids = torch.cat([codewords.mean(0).expand(4, -1), tables(1, 400)[1]])
    lists = (codewords @ centroids.T).topk(40).indices.sort(-1).values
    found = cover(lists, codewords, centroids)
    assert ((lists < 4).sum(-1) == 4).all()  # the favourites
    before, after = set(lists.flatten().tolist()), set(found.flatten().tolist())
    assert before < after
    assert int((found < 4).sum()) == 16 * 4  # none of them made room


def test_where_there_is_no_room_the_rest_waits() -> None:
    codewords, centroids = tables(1, 100)
    alone = torch.arange(16).unsqueeze(0)  # nobody in it is listed elsewhere
    assert torch.equal(cover(alone, codewords, centroids), alone)
    twice = torch.arange(16).expand(2, -1)
    found = cover(twice, codewords.expand(2, -1), centroids)  # the first is nearest to all
    assert found[1].tolist() == list(range(16))
    new = set(found[0].tolist()) - set(range(16))
    assert new == set(range(16, 16 + 16 // MOST_REPLACED))


def test_nobody_missing_nothing_changes() -> None:
    codewords, centroids = tables(4, 20)
    lists = torch.arange(20).expand(4, -1)
    assert torch.equal(cover(lists, codewords, centroids), lists)


def test_training_lists_hold_all_and_those_of_evaluation_are_the_paper_s() -> None:
    layer = build_layer("air", jitter_std=0.0, list_all=True, num_experts=32, shortlist_size=12)
    router = air_of(layer)
    optimizer = torch.optim.AdamW(layer.parameters())  # a router forgets one that nobody keeps
    airmoe.track_optimizer(layer, optimizer)
    layer(batch(0))
    plain = plain_shortlists(router, router.codebook.codewords)
    assert len(plain.unique()) < 32
    assert len(router.shortlists().unique()) == 32
    layer.eval()
    assert torch.equal(router.shortlists(), plain)


@pytest.mark.parametrize("list_all", [False, True])
def test_the_unlisted_learn_from_the_balance_loss(list_all: bool) -> None:
    layer = build_layer("air", jitter_std=0.0, list_all=list_all, num_experts=32, shortlist_size=12)
    router = air_of(layer)
    optimizer = torch.optim.AdamW(layer.parameters())  # a router forgets one that nobody keeps
    airmoe.track_optimizer(layer, optimizer)
    output = layer.forward_with_routing(batch(0))
    load_balance_loss(output.routing).backward()
    plain = plain_shortlists(router, router.codebook.codewords)
    missing = [e for e in range(32) if e not in set(plain.flatten().tolist())]
    assert router.centroids.grad is not None
    moved = router.centroids.grad.abs().sum(-1)[missing] > 0
    used = set(router.codebook.nearest(batch(0).flatten(0, -2), 1).flatten().tolist())
    reached = [int(router.codebook.nearest(router.centroids[[e]], 1)) in used for e in missing]
    assert any(reached)
    assert moved.tolist() == (reached if list_all else [False] * len(missing))


@pytest.mark.parametrize("value", [1, None, "yes"])
def test_bad_values(value: object) -> None:
    with pytest.raises(ConfigError, match="list_all"):
        build_router("air", list_all=value)
