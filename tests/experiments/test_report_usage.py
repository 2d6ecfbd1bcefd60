"""Usage maps: the number for their artefact, the scale of their colours, ranked codewords."""

from __future__ import annotations

import math

import numpy as np
import pytest

from airmoe.experiments.report.usage import (
    cell_usage,
    expert_map,
    grid_shape,
    relative_usage,
    structure,
)


def test_a_product_is_all_structure() -> None:
    rows, columns = np.array([1, 2, 8, 32]), np.array([1, 4, 5, 100, 7])
    assert structure(np.outer(rows, columns)) == pytest.approx(1.0)


def test_rows_alone_are_all_structure() -> None:
    assert structure(np.repeat([[1], [5], [9]], 7, axis=1)) == pytest.approx(1.0)


def test_what_rows_and_columns_cannot_explain_is_none() -> None:
    board = np.array([[1, 2, 1, 2], [2, 1, 2, 1], [1, 2, 1, 2], [2, 1, 2, 1]])
    assert structure(board) == pytest.approx(0.0)  # all means are equal
    assert structure(np.full((4, 4), 3)) is None  # nothing to explain


def test_dead_experts_count_as_half_a_token() -> None:
    assert structure(np.array([[0, 1], [2, 4]])) == pytest.approx(1.0)  # 1/2 1, 2 4: a product


def test_shuffled_experts_have_the_expected_structure() -> None:
    random = np.random.default_rng(0)
    counts = random.poisson(random.lognormal(3, 1, 12 * 20))
    shares = [structure(random.permutation(counts).reshape(12, 20)) for _ in range(2000)]
    found = np.array(shares, float)
    chance = expert_map(counts.reshape(12, 20)).structure_by_chance
    assert chance == (12 + 20 - 2) / (12 * 20 - 1)
    error = found.std() / math.sqrt(len(found))
    assert abs(found.mean() - chance) < 4 * error


@pytest.mark.parametrize(
    ("experts", "model", "shape"),
    [
        (4096, {"router": "peer"}, (64, 64)),
        (4096, {"router": "hierarchical", "router_options": {"num_clusters": 32}}, (32, 128)),
        (128, {"router": "topk"}, (8, 16)),
        (7, {"router": "air", "router_options": {}}, (1, 7)),
    ],
)
def test_grids(experts: int, model: dict, shape: tuple[int, int]) -> None:
    assert grid_shape(experts, model) == shape


def test_maps_come_back_within_a_level() -> None:
    grid = np.random.default_rng(1).poisson(50, (30, 40))
    grid[3, 4] = 0
    found = expert_map(grid)
    back = relative_usage(found)
    assert back.shape == (30, 40) and found.steps == [1, 1]
    assert np.isnan(back[3, 4]) and np.isnan(back).sum() == (grid == 0).sum()
    used = grid > 0
    ratio = back[used] / (grid[used] / grid.mean())
    assert abs(np.log10(ratio)).max() <= 3 / 254 + 1e-12  # half of 6 decades in 254 levels


def test_large_maps_keep_evenly_spaced_rows() -> None:
    grid = np.arange(1, 1024 * 64 + 1).reshape(1024, 64)
    found = expert_map(grid)
    assert (found.shape, found.steps) == ([1024, 64], [4, 1])
    back = relative_usage(found)
    assert back.shape == (256, 64)
    assert back[100, 7] == pytest.approx(grid[400, 7] / grid.mean(), rel=0.03)
    assert found.structure == structure(grid)  # of all of it


def test_a_single_row_has_no_structure() -> None:
    found = expert_map(np.array([[1, 2, 3]]))
    assert (found.structure, found.structure_by_chance) == (None, None)


def test_codewords_by_rank() -> None:
    found = cell_usage(np.array([10, 0, 60, 30]))
    entropy = -sum(share * math.log(share) for share in (0.6, 0.3, 0.1))
    assert found.perplexity == pytest.approx(math.exp(entropy))
    assert (found.total, found.ranks) == (4, [1, 2, 3, 4])
    assert found.shares == [0.6, 0.3, 0.1, 0.0]
    many = cell_usage(np.arange(1, 5001))
    assert len(many.ranks) <= 200 and (many.ranks[0], many.ranks[-1]) == (1, 5000)
    assert many.shares[-1] == 1 / (5000 * 5001 / 2)
