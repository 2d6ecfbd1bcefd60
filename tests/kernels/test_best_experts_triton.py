"""The best experts of tokens and codewords on Triton: the reference's, up to ties."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
import torch
from torch import Tensor

from airmoe.kernels.backend import use_backend
from airmoe.kernels.best_experts import best_experts, top_m
from airmoe.kernels.noise import Noise
from tests.kernels.comparison import DEVICE, any_noise, logits_of, unit_rows
from tests.tolerance import score_slack

pytest.importorskip("triton")
from airmoe.kernels.best_columns_triton import BLOCK_COLUMNS, best_columns, pieces_of
from airmoe.kernels.best_experts_triton import exact_tables

COLUMNS = "airmoe.kernels.best_columns_triton"
LISTS = "airmoe.kernels.row_lists_triton"


@pytest.fixture(params=[2048, 8192], ids=["pieces", "long pieces"])
def small_pieces(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    """Lists thinned many times, at sizes a test can pay for.

    Either there are several pieces of everything, the first of which fits into registers, or
    floors are guessed, for one or two rows in parts.
    """
    monkeypatch.setattr("airmoe.kernels.best_experts.LONGEST_LIST", 48)
    monkeypatch.setattr(f"{COLUMNS}.LONGEST_ROW", 128)
    monkeypatch.setattr(f"{LISTS}.LONGEST_ROW", 128)
    monkeypatch.setattr(f"{LISTS}.LEAST_CAPACITY", 64)
    monkeypatch.setattr(f"{COLUMNS}.ROWS", 4)
    monkeypatch.setattr(f"{COLUMNS}.SCORE_ELEMENTS", request.param)
    monkeypatch.setattr(f"{LISTS}.SELECT_TILE", 32)
    monkeypatch.setattr(f"{LISTS}.MOST_WORDS", 2)
    monkeypatch.setattr("airmoe.kernels.best_experts_triton.SORT_ELEMENTS", 20)


def check(
    hidden: Tensor,
    experts: Tensor,
    count: int,
    noise: Noise | None = None,
    normalize: bool = False,
) -> Tensor:
    with use_backend("triton"):
        ids = best_experts(hidden, experts, count, noise, normalize=normalize)
    assert ids.shape == (hidden.shape[0], count) and ids.dtype == torch.int64
    assert (ids.sort(-1).values.diff(dim=-1) > 0).all()  # distinct
    exact = logits_of(hidden.double(), experts.double(), noise, normalize)
    plain = logits_of(hidden.float(), experts.float(), noise, normalize)
    slack = score_slack(exact, plain)
    best = exact.topk(count, dim=-1).values
    assert ((exact.gather(-1, ids) - best).abs() <= slack).all()  # the best ones, best first
    return ids


def check_shortlists(
    codewords: Tensor, centroids: Tensor, size: int, noise: Noise | None = None
) -> Tensor:
    """Ascending, distinct, and the best ones; of unit-norm centroids where there is noise."""
    scale = None if noise is None else 1 / centroids.float().norm(dim=-1)
    with use_backend("triton"):
        out = top_m(codewords, centroids, size, inverse_norms=scale, noise=noise)
    assert (out.diff(dim=-1) > 0).all() and out.min() >= 0 and out.max() < centroids.shape[0]
    unit = noise is not None
    exact = logits_of(codewords.double(), centroids.double(), noise, unit)
    plain = logits_of(codewords.float(), centroids.float(), noise, unit)
    best = exact.topk(size, dim=-1).values
    found = exact.gather(-1, out).sort(-1, descending=True).values
    assert ((found - best).abs() <= score_slack(exact, plain)).all()
    return out


either = pytest.mark.parametrize("find", [check, check_shortlists])
dtypes = pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])


@either
@dtypes
@pytest.mark.parametrize(
    ("rows", "experts", "dim", "count"),
    [(1, 16, 16, 16), (6, 150, 24, 20), (5, 200, 24, 30), (17, 70, 33, 1)],
)
def test_one_segment(
    find: Any, dtype: torch.dtype, rows: int, experts: int, dim: int, count: int
) -> None:
    hidden = torch.randn(rows, dim, device=DEVICE).to(dtype if find is check else torch.float32)
    table = torch.randn(experts, dim, device=DEVICE).to(dtype)
    find(hidden, table, count)
    find(hidden, table, count, any_noise(rows))


@either
@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("count", [1, 7, 16, 48])
def test_many_pieces(find: Any, count: int) -> None:
    hidden, table = torch.randn(5, 20, device=DEVICE), torch.randn(900, 20, device=DEVICE)
    assert len(pieces_of(16, 900)) > 1
    find(hidden, table, count, any_noise(5))
    find(hidden[:2], table, count, any_noise(2))


@either
@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("slope", [1, -1, 0])
def test_rising_falling_and_equal_scores(find: Any, slope: int) -> None:
    """Of rising ones all pass the floor of those before them, of the others none."""
    row, table = torch.full((1, 16), slope / 256, device=DEVICE), torch.zeros(300, 16)
    table[:, 0] = torch.arange(300)
    ids = find(row, table.to(DEVICE), 20)
    expected = range(280, 300) if slope > 0 else range(20)
    assert ids[0].sort().values.tolist() == list(expected)


@either
@pytest.mark.usefixtures("small_pieces")
def test_best_ones_that_a_sample_misses(find: Any) -> None:
    """The floor that is guessed is too low, or so high that hardly any or none are above."""
    rows, table = torch.eye(16, device=DEVICE)[:4], torch.zeros(400, 16, device=DEVICE)
    place = torch.arange(400, device=DEVICE)
    table[:, 0] = (place % 100 >= 60) * (1 + place / 1024)
    table[:, 1] = (place % 100 < 10) * (1 + place / 1024)
    table[:, 2] = -(place % 16 < 8).float()
    find(rows, table, 30)
    find(rows[:2], table, 30)


@pytest.mark.usefixtures("small_pieces")
def test_minus_infinity_is_chosen_last() -> None:
    rows, table = torch.eye(16, device=DEVICE)[:2], torch.full((400, 16), 0.0, device=DEVICE)
    rows[:] = torch.tensor([1.0, 0.0] * 8, device=DEVICE)
    table[:, 0] = -torch.inf
    table[200:210, 0] = 1
    with use_backend("triton"):
        ids = top_m(rows, table, 20)
    assert (ids.diff(dim=-1) > 0).all() and ids.min() >= 0 and ids.max() < 400
    assert all(set(range(200, 210)) <= set(found) for found in ids.tolist())


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("dim", [16, 40])
def test_both_tables_in_three_parts(dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("airmoe.kernels.best_experts_triton.SPLIT_TOKENS", 1)
    hidden, table = torch.randn(5, dim, device=DEVICE), torch.randn(150, dim, device=DEVICE)
    check(hidden, table, 9, any_noise(5))


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("count", [1, 25])
def test_ties_go_to_the_lowest_id(count: int) -> None:
    rows = torch.eye(8, device=DEVICE)[:3]
    table = torch.randint(-1, 2, (200, 8), device=DEVICE).float()
    table[:, 2] = 0  # all alike
    ids, shortlists = check(rows, table, count), check_shortlists(rows, table, count)
    with use_backend("reference"):
        assert torch.equal(ids, best_experts(rows, table, count))
        assert torch.equal(shortlists, top_m(rows, table, count))
    assert ids[2].tolist() == shortlists[2].tolist() == list(range(count))


MIXED = [
    (torch.bfloat16, torch.bfloat16),
    (torch.float16, torch.float16),
    (torch.float32, torch.float32),
    (torch.float32, torch.bfloat16),
    (torch.bfloat16, torch.float32),
    (torch.float16, torch.float32),
]
mixed = pytest.mark.parametrize(("hidden_dtype", "table_dtype"), MIXED, ids=str)


def scaled_rows(rows: int, dim: int) -> Tensor:
    """Rows of norms between 1/8 and 8, of which one is zero."""
    table = torch.randn(rows, dim, device=DEVICE) * 2.0 ** torch.randint(-3, 4, (rows, 1)).to(
        DEVICE
    )
    table[rows // 2] = 0
    return table


@mixed
@pytest.mark.parametrize("norm_tokens", [1, 1000], ids=["measured before", "in the product"])
def test_unit_norm_experts(
    hidden_dtype: torch.dtype,
    table_dtype: torch.dtype,
    norm_tokens: int,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("airmoe.kernels.best_experts_triton.NORM_TOKENS", norm_tokens)
    hidden = torch.randn(6, 24, device=DEVICE).to(hidden_dtype)
    table = scaled_rows(150, 24).to(table_dtype)
    check(hidden, table, 20, normalize=True)
    check(hidden, table, 150, any_noise(6), normalize=True)  # the zero row among them


def test_the_reference_of_unit_norm_experts_takes_all_dtypes() -> None:
    for hidden_dtype, table_dtype in MIXED:
        hidden, table = torch.randn(5, 12).to(hidden_dtype), scaled_rows(40, 12).to(table_dtype)
        table = table.cpu()
        with use_backend("reference"):
            ids = best_experts(hidden, table, 7, normalize=True)
        exact = logits_of(hidden.double(), table.double(), None, normalize=True)
        slack = score_slack(exact, logits_of(hidden.float(), table.float(), None, normalize=True))
        assert ((exact.gather(-1, ids) - exact.topk(7, dim=-1).values).abs() <= slack).all()


@pytest.mark.usefixtures("small_pieces")
def test_a_token_that_is_not_finite_leaves_the_others_alone() -> None:
    hidden = torch.randn(5, 16, device=DEVICE)
    table = torch.randn(700, 16, device=DEVICE)
    expected = check(hidden, table, 20, normalize=True)
    for value in (torch.nan, torch.inf):
        hidden[2, 3] = value
        with use_backend("triton"):
            ids = best_experts(hidden, table, 20, normalize=True)
        others = torch.arange(5, device=DEVICE) != 2
        assert torch.equal(ids[others], expected[others])
        assert (ids[2].sort().values.diff() > 0).all()  # distinct
        assert ids.min() >= 0 and ids.max() < 700


def test_lists_too_long_to_rank_are_sorted(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, table = torch.randn(5, 16, device=DEVICE), torch.randn(90, 16, device=DEVICE)
    ranked = check(hidden, table, 40)
    monkeypatch.setattr("airmoe.kernels.best_experts_triton.LARGEST_RANKED", 1)
    assert torch.equal(check(hidden, table, 40), ranked)


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("row", [0, 5])
def test_a_codeword_that_is_not_finite_leaves_the_others_alone(row: int) -> None:
    codewords, centroids = unit_rows(6, 16), torch.randn(150, 16, device=DEVICE)
    expected = check_shortlists(codewords, centroids, 10)
    for value in (torch.nan, torch.inf):
        codewords[row, 3] = value
        with use_backend("triton"):
            out = top_m(codewords, centroids, 10)
        others = torch.arange(6, device=DEVICE) != row
        assert torch.equal(out[others], expected[others])
        assert out.min() >= 0 and out.max() < 150  # nobody may be led outside the tables


@pytest.mark.usefixtures("small_pieces")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_codewords_of_16_bits(dtype: torch.dtype) -> None:
    centroids = torch.randn(200, 24, device=DEVICE).to(dtype)
    for size in (20, 50):  # by the kernels, and too long for them
        check_shortlists(unit_rows(6, 24).to(dtype), centroids, size)


@pytest.mark.usefixtures("small_pieces")
def test_a_list_too_long_for_the_kernel_is_the_references() -> None:
    codewords, centroids = unit_rows(3, 16), torch.randn(200, 16, device=DEVICE)
    check_shortlists(codewords, centroids, 50)
    check(codewords, centroids, 50)


@pytest.mark.parametrize("rows", [16, 32, 128, 512])
@pytest.mark.parametrize("columns", [16_384, 16_385, 70_001, 999_999, 1 << 22])
def test_pieces_of_large_tables(rows: int, columns: int) -> None:
    pieces = pieces_of(rows, columns)
    assert pieces[0].start == 0 and pieces[-1].stop == columns
    assert pieces[0].stop >= 16_384  # as long as the longest list
    for piece, after in pairwise(pieces):
        assert piece.stop == after.start and piece.stop % BLOCK_COLUMNS == 0
    assert all(0 < (piece.stop - piece.start) * rows <= 1 << 24 for piece in pieces)


@pytest.mark.gpu
def test_memory_does_not_grow_with_codewords() -> None:
    centroids = torch.randn(65_536, 64, device=DEVICE, dtype=torch.bfloat16)
    codewords = unit_rows(2048, 64)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    with use_backend("triton"):
        top_m(codewords, centroids, 2048)
    assert torch.cuda.max_memory_allocated() - before <= (96 + 32) << 20  # 32 are the lists


@pytest.mark.gpu
@either
@dtypes
@pytest.mark.parametrize(
    ("rows", "experts", "dim", "count"),
    [
        (2000, 65_536, 256, 512),
        (777, 20_001, 100, 300),
        (8, 1_000_003, 64, 512),
        (1, 40_000, 1024, 1),
        (33, 5000, 4096, 64),
        (1024, 65_536, 256, 2048),
        (77, 50_001, 100, 1000),
        (13, 16_385, 1024, 4096),
        (600, 3000, 65, 2999),
        (3, 300_000, 64, 512),
    ],
)
def test_large_odd_shapes(
    find: Any, dtype: torch.dtype, rows: int, experts: int, dim: int, count: int
) -> None:
    hidden = unit_rows(rows, dim).to(dtype if find is check else torch.float32)
    table = torch.randn(experts, dim, device=DEVICE)
    table = torch.nn.functional.normalize(table, dim=-1).to(dtype)
    find(hidden, table, count, any_noise(rows))
    if dtype == torch.bfloat16:
        find(hidden.float(), table, count)


@pytest.mark.gpu
@mixed
@pytest.mark.parametrize(
    ("tokens", "experts", "dim", "count"),
    [
        (5000, 20_001, 256, 512),
        (4097, 9000, 100, 64),
        (4200, 17_000, 333, 2000),
        (20_000, 8192, 64, 1),
    ],
)
def test_many_tokens(
    hidden_dtype: torch.dtype,
    table_dtype: torch.dtype,
    tokens: int,
    experts: int,
    dim: int,
    count: int,
) -> None:
    hidden = torch.randn(tokens, dim, device=DEVICE, dtype=hidden_dtype)
    table = scaled_rows(experts, dim).to(table_dtype)
    check(hidden, table, count, any_noise(tokens), normalize=True)
    check(hidden, table, count)


@pytest.mark.gpu
@pytest.mark.parametrize("order", ["random", "rising", "equal"])
def test_both_ways_of_storing_agree(order: str, monkeypatch: pytest.MonkeyPatch) -> None:
    hidden = torch.randn(5000, 128, device=DEVICE, dtype=torch.bfloat16)
    table = torch.randn(16_000, 128, device=DEVICE, dtype=torch.bfloat16)
    if order == "rising":  # for every other token; for the rest it falls
        hidden[:] = torch.arange(5000, device=DEVICE).unsqueeze(-1) % 2 * 2 - 1
        table[:] = torch.arange(16_000, device=DEVICE).unsqueeze(-1)
    if order == "equal":
        table[:] = table[0].clone()
    found = check(hidden, table, 500)
    if order == "equal":
        assert (found == torch.arange(500, device=DEVICE)).all()
    monkeypatch.setattr(f"{LISTS}.DIRECT_STORES", False)
    assert torch.equal(check(hidden, table, 500), found)


@pytest.mark.gpu
def test_many_tokens_take_little_memory() -> None:
    hidden = torch.randn(65_536, 64, device=DEVICE, dtype=torch.bfloat16)
    table = torch.randn(65_536, 64, device=DEVICE, dtype=torch.bfloat16)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    ids = torch.empty(65_536, 512, dtype=torch.int64, device=DEVICE)
    best_columns(exact_tables(hidden, table, normalize=True), ids)
    # The ids are 256 MiB, the scores of some rows 64, and their lists a few more.
    assert torch.cuda.max_memory_allocated() - before <= 384 << 20


@pytest.mark.gpu
@pytest.mark.parametrize("tokens", [8, 5000])
def test_can_be_captured_in_a_graph(tokens: int) -> None:
    hidden = torch.randn(tokens, 64, device=DEVICE)
    table = torch.randn(100_000, 64, device=DEVICE)
    expected = best_experts(hidden, table, 100, normalize=True)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        ids = best_experts(hidden, table, 100, normalize=True)
    graph.replay()
    assert torch.equal(ids, expected)
