"""What other coarse stages would find: against the library's own metric, by hand, and in bounds."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from airmoe import AirRouter
from airmoe.experiments.recall_study import cells as cells_module
from airmoe.experiments.recall_study import overlap as overlap_module
from airmoe.experiments.recall_study import rankings
from airmoe.experiments.recall_study.cells import (
    OWN_WEIGHT,
    CellTokens,
    cell_spread,
    cell_tokens,
    fitted_codebook,
    pooled_spread,
)
from airmoe.experiments.recall_study.overlap import exact_choices, overlaps
from airmoe.experiments.recall_study.record import Row
from airmoe.experiments.recall_study.study import LayerStudy
from airmoe.metrics import routing_quality
from airmoe.routers.codebook import Codebook
from airmoe.routers.k_means import k_means

EXPERTS, DIM, TOP_K, CODEWORDS, SIZE = 96, 16, 4, 8, 12


def states(count: int, seed: int = 0) -> Tensor:
    """[T, D] around some centres, of different lengths."""
    random = torch.Generator().manual_seed(seed)
    centres = torch.randn(12, DIM, generator=torch.Generator().manual_seed(1))
    chosen = torch.randint(12, (count,), generator=random)
    lengths = 0.5 + torch.rand(count, 1, generator=random)
    return (centres[chosen] + 0.5 * torch.randn(count, DIM, generator=random)) * lengths


def trained_router(**options: Any) -> AirRouter:
    config = AirRouter.Config(
        **{
            "dim": DIM,
            "num_experts": EXPERTS,
            "top_k": TOP_K,
            "num_codewords": CODEWORDS,
            "shortlist_size": SIZE,
            **options,
        }
    )
    router = config.build()
    for seed in range(3):
        router.codebook.update(states(256, seed)[:, : config.dim])
    return router.eval()


def scale_rows(router: AirRouter) -> None:
    """Centroids as training leaves them: of other lengths than 1, which only directions undo."""
    with torch.no_grad():
        lengths = torch.rand(EXPERTS, 1, generator=torch.Generator().manual_seed(2)) + 0.2
        router.centroids.mul_(lengths)
    router.on_parameters_changed()


def study_of(router: AirRouter, fit: int = 600, **options: Any) -> LayerStudy:
    given = {"tokens_per_step": 512, "seed": 0, **options}
    return LayerStudy(router, states(fit, 5), states(200, 6), **given)


def measured(study: LayerStudy) -> list[Row]:
    return [row for stage in study.stages() for row in study.rows(stage)]


@pytest.mark.parametrize(
    "options",
    [
        {},
        {"probes": 2},
        {"probes": 3},
        {"codebook": "euclidean"},
        {"normalize_centroids": False, "centroid_init": "xavier"},
    ],
)
def test_the_router_as_it_is_comes_first_and_has_the_overlap_of_the_metric(
    options: dict[str, Any],
) -> None:
    router = trained_router(**options)
    if router.config.normalize_centroids:
        scale_rows(router)
    study = study_of(router)
    first = study.stages()[0]
    (row,) = (row for row in study.rows(first) if row.shortlist_size == SIZE)
    expected = routing_quality(router, study.held_out).overlap.double().mean()
    assert 0.2 < row.overlap < 0.95
    assert row.overlap == pytest.approx(float(expected), abs=1e-6)
    assert (row.stage, row.probes) == ("own", options.get("probes", 1))
    assert row.cosine is None or -1 <= row.cosine <= 1  # Euclidean codewords are longer than 1


def test_which_stages_are_measured() -> None:
    rows = measured(study_of(trained_router(), fit=4 * 16))
    assert sorted({row.shortlist_size for row in rows}) == [6, 12, 18, 19, 24]
    assert len(rows) == 5 * len({(row.stage, row.num_codewords, row.probes) for row in rows})
    assert [(r.stage, r.num_codewords, r.probes) for r in rows[::5]] == [
        *(("own", 8, 1), ("own", 8, 2), ("own", 8, 4)),
        *(("fitted", 2, 1), ("fitted", 4, 1), ("fitted", 8, 1)),
        *(("pooled_spread", 8, 1), ("cell_spread", 8, 1), ("used", 8, 1), ("used_batch", 8, 1)),
        ("fitted", 16, 1),  # twice as many would have 2 tokens each to fit
    ]
    few = study_of(trained_router(num_codewords=3, shortlist_size=60, top_k=40))
    assert few.sizes == [60, 90]  # neither below K nor above E
    assert [stage.probes for stage in few.stages() if stage.stage == "own"] == [1, 2]


def test_costs_are_those_of_the_suite_where_they_are_known() -> None:
    rows = {row.name: row for row in measured(study_of(trained_router(), tokens_per_step=192))}
    two = rows["own-g8-m24-p2"]  # E / tokens per step = 1/2
    assert two.products_every_step == 8 * (2 + 0.5) + 3 * 2 * 24
    assert two.products_every_16_steps == 8 * (2 + 0.5 / 16) + 3 * 2 * 24
    assert rows["fitted-g32-m6-p1"].products_every_step == 32 * 2.5 + 3 * 6
    for stage in ("pooled_spread", "cell_spread", "used", "used_batch"):
        row = rows[f"{stage}-g8-m12-p1"]
        assert row.products_every_step is None and row.products_every_16_steps is None
    all_listed = measured(study_of(trained_router(list_all=True), tokens_per_step=192))[1]
    assert all_listed.products_every_step == 8 * (2 + 2 * 0.5) + 3 * 12  # compares twice


def test_a_static_codebook_does_not_claim_the_cost_of_one_that_moves() -> None:
    for row in measured(study_of(trained_router(codebook="static"))):
        if row.stage == "own":
            assert row.products_every_step is None and row.products_every_16_steps is None
        else:
            assert (row.products_every_step is None) == (row.stage != "fitted")


def test_a_batch_has_as_many_tokens_per_cell_as_a_step_on_average(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[int] = []

    def by_soft_use(cells: CellTokens, *_: object, tokens: int) -> Tensor:
        asked.append(tokens)
        return torch.arange(24).expand(cells.num_cells, 24)

    monkeypatch.setattr(rankings, "by_soft_use", by_soft_use)
    for step in (512, 8 * 3 + 7, 5):
        study = study_of(trained_router(), tokens_per_step=step)
        (stage,) = (one for one in study.stages() if one.stage == "used_batch")
        study.rows(stage)
    assert asked == [64, 3, 1]


def test_more_candidates_and_probes_never_find_less() -> None:
    rows = measured(study_of(trained_router()))
    for first, second in pairwise(rows):
        if first.shortlist_size < second.shortlist_size:
            assert first.overlap <= second.overlap
            assert first.unlisted_experts >= second.unlisted_experts
    one, two, four = (
        next(r.overlap for r in rows if r.name == f"own-g8-m12-p{n}") for n in (1, 2, 4)
    )
    assert one < two < four < 1


def test_lists_of_all_experts_find_everything() -> None:
    rows = measured(study_of(trained_router(shortlist_size=EXPERTS // 2)))
    whole = [row for row in rows if row.shortlist_size == EXPERTS]
    assert len(whole) == len(rows) // 5
    assert all((row.overlap, row.unlisted_experts) == (1.0, 0.0) for row in whole)


def test_an_expert_of_two_lists_counts_once() -> None:
    lists = torch.tensor([[0, 1, 2], [2, 0, 3]])  # best first
    exact = torch.tensor([[0, 2, 3, 5], [3, 1, 4, 5]], dtype=torch.int32)
    both = torch.tensor([[0, 1], [1, 0]])
    # Of size 1: {0, 2} and {2, 0}; of size 2: {0, 1, 2}; of size 3: {0, 1, 2, 3}.
    assert overlaps(exact, both, lists, [1, 2, 3], 6) == [2 / 8, 3 / 8, 5 / 8]
    assert overlaps(exact, both[:, :1], lists, [1, 2, 3], 6) == [1 / 8, 1 / 8, 3 / 8]


def test_unlisted_experts_and_cosine_by_hand() -> None:
    router = trained_router(dim=2, num_experts=8, top_k=1, num_codewords=2, shortlist_size=2)
    angles = torch.tensor([0.0, 0.2, 0.4, 0.7, 0.9, 1.2, 1.4, 1.57])
    with torch.no_grad():
        router.centroids.copy_(torch.stack([angles.cos(), angles.sin()], dim=1))
        router.codebook.codewords.copy_(torch.tensor([[1.0, 0.0], [0.0, 1.0]]))
    held_out = 3 * torch.tensor([[1.0, 0.0], [0.6, 0.8]])
    study = LayerStudy(router, states(64)[:, :2], held_out, tokens_per_step=8, seed=0)
    one, two, three, four = study.rows(study.stages()[0])
    assert [r.shortlist_size for r in (one, two, three, four)] == [1, 2, 3, 4]
    assert [r.unlisted_experts for r in (one, two, three, four)] == [0.75, 0.5, 0.25, 0.0]
    # Expert 0 leads the first list; expert 4 (angle 0.9 of 0.927) is the fourth of the second.
    assert [r.overlap for r in (one, two, three, four)] == [0.5, 0.5, 0.5, 1.0]
    assert one.cosine == pytest.approx((1.0 + 0.8) / 2)
    assert study.rows(study.stages()[1])[0].cosine is None


@pytest.fixture(scope="module")
def cells() -> CellTokens:
    hidden = states(500, 7)
    return cell_tokens(fitted_codebook(hidden, CODEWORDS, 0), hidden)


@pytest.fixture(scope="module")
def experts() -> Tensor:
    drawn = torch.randn(EXPERTS, DIM, generator=torch.Generator().manual_seed(3))
    return torch.nn.functional.normalize(drawn, dim=1)


def test_a_fitted_codebook_is_a_fixed_point_of_k_means() -> None:
    """Three far groups, three codewords: each becomes the mean direction of its group."""
    random = torch.Generator().manual_seed(0)
    groups = [
        torch.eye(DIM)[axis] * 5 + 0.1 * torch.randn(40, DIM, generator=random) for axis in range(3)
    ]
    found = fitted_codebook(torch.cat(groups), 3, seed=0).codewords
    unit = torch.nn.functional.normalize
    wanted = torch.stack([unit(unit(group, dim=1).mean(0), dim=0) for group in groups])
    assert torch.allclose(found[(found @ wanted.T).argmax(0)], wanted, atol=1e-5)


def test_further_passes_would_gain_little() -> None:
    hidden = states(600, 7)

    def cosine(codebook: Codebook) -> float:
        unit = torch.nn.functional.normalize
        return float((unit(hidden, dim=1) @ unit(codebook.codewords, dim=1).T).amax(1).mean())

    longer = k_means(lambda: Codebook(CODEWORDS, DIM, decay=0.0), hidden, 48, seed=0)
    found = cosine(fitted_codebook(hidden, CODEWORDS, seed=0))
    assert found == pytest.approx(cosine(longer), abs=0.005)  # 2 passes: 0.06 less


def test_cells_hold_their_tokens(cells: CellTokens) -> None:
    for cell in range(CODEWORDS):
        tokens = cells.order[cells.starts[cell] : cells.starts[cell + 1]]
        assert tokens.tolist() == (cells.codeword_ids == cell).nonzero().squeeze(1).tolist()
        assert torch.allclose(cells.means[cell], cells.hidden[tokens].mean(0), atol=1e-5)
    assert cells.starts[-1] == 500


def test_an_empty_cell_ranks_by_its_codeword(experts: Tensor) -> None:
    codebook = Codebook(2, DIM)
    codebook.codewords.copy_(torch.eye(DIM)[:2])
    found = cell_tokens(codebook, torch.eye(DIM)[:1].expand(20, DIM) * 4)
    assert found.counts.tolist() == [20, 0]
    best = experts[:, 1].topk(9).indices.tolist()
    assert rankings.by_use(found, experts, TOP_K, 9)[1].tolist() == best
    pooled = pooled_spread(found)
    soft = rankings.by_soft_use(found, pooled, experts, TOP_K, 9, tokens=16)
    assert soft[1].tolist() == best


def test_no_list_per_cell_beats_use_on_the_tokens_it_was_made_from(
    cells: CellTokens, experts: Tensor
) -> None:
    exact = exact_choices(cells.hidden, experts, TOP_K)
    sizes, ids = [1, 3, 10, 30], cells.codeword_ids.unsqueeze(1)
    used = overlaps(exact, ids, rankings.by_use(cells, experts, TOP_K, 30), sizes, EXPERTS)
    counts = torch.zeros(CODEWORDS, EXPERTS)
    for cell, chosen in zip(cells.codeword_ids.tolist(), exact.tolist(), strict=True):
        counts[cell, chosen] += 1
    best = counts.sort(dim=1, descending=True).values
    assert used == [float(best[:, :size].sum()) / exact.numel() for size in sizes]
    pooled = pooled_spread(cells)
    for other in (
        rankings.by_codeword(cells.means, experts, 30),
        rankings.by_spread(cells, pooled, experts, TOP_K, 30),
        rankings.by_soft_use(cells, pooled, experts, TOP_K, 30, tokens=16),
    ):
        found = overlaps(exact, ids, other, sizes, EXPERTS)
        assert all(most > share for most, share in zip(used, found, strict=True))


def test_without_spread_chance_ranks_by_the_mean_state(experts: Tensor) -> None:
    hidden = states(CODEWORDS, 8).repeat_interleave(6, dim=0)  # all tokens of a cell are one
    found = cell_tokens(fitted_codebook(hidden, CODEWORDS, 0), hidden)
    pooled = pooled_spread(found)
    wanted = rankings.by_codeword(found.means, experts, EXPERTS // 2)
    for spread in (pooled, cell_spread(found, pooled)):
        ranked = rankings.by_spread(found, spread, experts, TOP_K, EXPERTS // 2)
        assert torch.equal(ranked, wanted)


def test_chance_is_that_of_the_definition(cells: CellTokens, experts: Tensor) -> None:
    """In float64, with whole covariance matrices, and a threshold found on a fine grid."""
    rest = (cells.hidden - cells.means[cells.codeword_ids]).double()
    covariance = rest.T @ rest / 500
    pooled = pooled_spread(cells)
    own = cell_spread(cells, pooled)
    by_pool = rankings.by_spread(cells, pooled, experts, TOP_K, SIZE)
    by_cell = rankings.by_spread(cells, own, experts, TOP_K, SIZE)
    basis = pooled.basis.double()
    for cell in range(CODEWORDS):
        mean = experts.double() @ cells.means[cell].double()
        along = (rest[cells.codeword_ids == cell] @ basis).square().mean(0)
        diagonal = (basis.T @ covariance @ basis).diagonal()
        mixed = basis @ torch.diag(OWN_WEIGHT * along + (1 - OWN_WEIGHT) * diagonal) @ basis.T
        for lists, matrix in ((by_pool, covariance), (by_cell, mixed)):
            deviations = ((experts.double() @ matrix) * experts.double()).sum(1).sqrt()
            grid = torch.linspace(float(mean.min()), float(mean.max()), 20001).double()
            passing = torch.special.ndtr((mean - grid[:, None]) / deviations).sum(1)
            threshold = grid[(passing - TOP_K).abs().argmin()]
            wanted = ((mean - threshold) / deviations).topk(SIZE).indices
            assert lists[cell].tolist() == wanted.tolist()
    assert not torch.equal(by_pool, by_cell)


def test_soft_use_is_that_of_the_definition(cells: CellTokens, experts: Tensor) -> None:
    pooled = pooled_spread(cells)
    rest = cells.hidden - cells.means[cells.codeword_ids]
    covariance = rest.T @ rest / 500
    width = ((experts @ covariance) * experts).sum(1).sqrt().mean()
    for tokens in (3, 100):  # fewer and more than the smallest cells have
        lists = rankings.by_soft_use(cells, pooled, experts, TOP_K, SIZE, tokens=tokens)
        for cell in range(CODEWORDS):
            mine = cells.hidden[cells.codeword_ids == cell][:tokens]
            scores = mine @ experts.T
            threshold = scores.sort(dim=1, descending=True).values[:, TOP_K - 1 : TOP_K]
            wanted = torch.sigmoid((scores - threshold) / width).sum(0).topk(SIZE).indices
            assert lists[cell].tolist() == wanted.tolist()
    assert int(cells.counts.min()) < 100


def test_small_memory_gives_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    router = trained_router()
    whole = measured(study_of(router))
    monkeypatch.setattr(overlap_module, "SCORES_AT_A_TIME", 3 * EXPERTS)
    monkeypatch.setattr(cells_module, "TOKENS_AT_A_TIME", 7)
    assert measured(study_of(router)) == whole


def test_the_seed_decides() -> None:
    router = trained_router()
    first, again, other = (measured(study_of(router, seed=seed)) for seed in (0, 0, 1))
    assert first == again != other
    assert first[0] == other[0]  # nothing is drawn for the own codebook
