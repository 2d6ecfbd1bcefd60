"""Exact top-K on Triton: the reference's experts in the reference's order, up to ties."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from airmoe.kernels.backend import use_backend
from airmoe.kernels.best_experts import best_experts
from airmoe.kernels.noise import Noise, normal
from tests.tolerance import score_slack

pytest.importorskip("triton")
from airmoe.kernels.best_experts_triton import best_experts_op
from airmoe.kernels.stream_triton import can_stream

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
STREAM = "airmoe.kernels.shortlist_triton"
LISTS = "airmoe.kernels.stream_triton"


@pytest.fixture
def small_segments(monkeypatch: pytest.MonkeyPatch) -> None:
    """Several levels of thinning and several pieces of everything, at sizes a test can pay for."""
    monkeypatch.setattr(f"{STREAM}.SEGMENT", 64)
    monkeypatch.setattr(f"{STREAM}.ROWS", 4)
    monkeypatch.setattr(f"{STREAM}.SCORE_ELEMENTS", 500)
    monkeypatch.setattr("airmoe.kernels.best_experts_triton.SORT_ELEMENTS", 20)


@pytest.fixture
def short_lists(monkeypatch: pytest.MonkeyPatch) -> None:
    """Streams with several launches, thinned many times, at sizes a test can pay for."""
    monkeypatch.setattr(f"{LISTS}.LEAST_ROWS", 1)
    monkeypatch.setattr("airmoe.kernels.best_experts_triton.NORM_TOKENS", 1)
    monkeypatch.setattr(f"{LISTS}.SPAN", 128)
    monkeypatch.setattr(f"{LISTS}.ROW_BLOCKS", 1)
    monkeypatch.setattr(f"{LISTS}.THIN_ELEMENTS", 4096)


def any_noise(rows: int) -> Noise:
    keys = torch.randint(-(2**31), 2**31, (rows,), device=DEVICE).to(torch.int32)
    return Noise(keys, 0.3)


def logits_of(
    hidden: Tensor, experts: Tensor, noise: Noise | None, normalize: bool = False
) -> Tensor:
    logits = hidden @ experts.T
    if normalize:
        norms = experts.norm(dim=-1)
        logits = logits / norms.where(norms > 0, torch.inf)
    if noise is None:
        return logits
    columns = torch.arange(experts.shape[0], device=DEVICE)
    return logits + normal(noise.row_keys.unsqueeze(-1), columns) * noise.std


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


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize(
    ("tokens", "experts", "dim", "count"), [(1, 16, 16, 16), (6, 150, 24, 20), (17, 70, 33, 1)]
)
def test_one_segment(dtype: torch.dtype, tokens: int, experts: int, dim: int, count: int) -> None:
    hidden = torch.randn(tokens, dim, device=DEVICE).to(dtype)
    table = torch.randn(experts, dim, device=DEVICE).to(dtype)
    check(hidden, table, count)
    check(hidden, table, count, any_noise(tokens))


def test_float32_tokens_and_bfloat16_experts() -> None:
    hidden, table = torch.randn(6, 24, device=DEVICE), torch.randn(150, 24, device=DEVICE)
    check(hidden, table.bfloat16(), 20)


@pytest.mark.usefixtures("small_segments")
@pytest.mark.parametrize("count", [1, 16])
def test_many_segments(count: int) -> None:
    hidden, table = torch.randn(5, 20, device=DEVICE), torch.randn(400, 20, device=DEVICE)
    check(hidden, table, count, any_noise(5))


@pytest.mark.usefixtures("small_segments")
@pytest.mark.parametrize("dim", [16, 40])
def test_both_tables_in_three_parts(dim: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("airmoe.kernels.best_experts_triton.SPLIT_TOKENS", 1)
    hidden, table = torch.randn(5, dim, device=DEVICE), torch.randn(150, dim, device=DEVICE)
    check(hidden, table, 9, any_noise(5))


@pytest.mark.usefixtures("small_segments")
def test_ties_go_to_the_lowest_id() -> None:
    hidden = torch.eye(8, device=DEVICE)[:3]
    hidden[2] = 0
    table = torch.randint(-1, 2, (200, 8), device=DEVICE).float()
    ids = check(hidden, table, 30)
    with use_backend("reference"):
        assert torch.equal(ids, best_experts(hidden, table, 30))
    assert ids[2].tolist() == list(range(30))


@pytest.mark.usefixtures("small_segments")
def test_a_list_too_long_for_the_kernel_is_the_references() -> None:
    check(torch.randn(3, 16, device=DEVICE), torch.randn(200, 16, device=DEVICE), 50)


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
            ascending = best_experts(hidden, table, 7, normalize=True, ordered=False)
        exact = logits_of(hidden.double(), table.double(), None, normalize=True)
        slack = score_slack(exact, logits_of(hidden.float(), table.float(), None, normalize=True))
        assert ((exact.gather(-1, ids) - exact.topk(7, dim=-1).values).abs() <= slack).all()
        assert torch.equal(ascending, ids.sort(-1).values)


@mixed
@pytest.mark.usefixtures("short_lists")
def test_a_stream(hidden_dtype: torch.dtype, table_dtype: torch.dtype) -> None:
    assert can_stream(9, 900, 20)
    hidden = torch.randn(9, 24, device=DEVICE).to(hidden_dtype)
    check(hidden, scaled_rows(900, 24).to(table_dtype), 20, any_noise(9), normalize=True)


@pytest.mark.usefixtures("short_lists")
def test_a_stream_in_several_launches_and_groups(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(f"{LISTS}.THIN_ELEMENTS", 1024)
    hidden = torch.randn(70, 16, device=DEVICE, dtype=torch.float16)
    check(hidden, torch.randn(640, 16, device=DEVICE, dtype=torch.float16), 20)


@pytest.mark.usefixtures("short_lists")
@pytest.mark.parametrize(("count", "dim"), [(1, 16), (100, 300)])
def test_streams_of_other_sizes(count: int, dim: int) -> None:
    """With 300 columns the depth is cut into steps."""
    hidden = torch.randn(9, dim, device=DEVICE, dtype=torch.float16)
    check(hidden, scaled_rows(1030, dim).half(), count, any_noise(9), normalize=True)


@pytest.mark.usefixtures("short_lists")
def test_a_stream_of_rising_scores_and_of_ties() -> None:
    """Every score passes the floor of those before it; all are equal; few values."""
    table = torch.zeros(1100, 16, device=DEVICE)
    table[:, 0] = torch.arange(1100) / 1024
    table[:, 1] = torch.randint(-1, 2, (1100,))
    hidden = torch.eye(16, device=DEVICE)[:4]
    hidden[3] = -hidden[0]
    ids = check(hidden, table, 50)
    with use_backend("reference"):
        assert torch.equal(ids, best_experts(hidden, table, 50))
    assert ids[2].tolist() == list(range(50))


@pytest.mark.usefixtures("short_lists")
def test_a_token_that_is_not_finite_leaves_the_others_of_a_stream_alone() -> None:
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


@pytest.mark.parametrize("streamed", [False, True])
def test_ids_that_ascend(streamed: bool, request: pytest.FixtureRequest) -> None:
    if streamed:
        request.getfixturevalue("short_lists")
    hidden, table = torch.randn(5, 16, device=DEVICE), torch.randn(600, 16, device=DEVICE)
    with use_backend("triton"):
        ids = best_experts(hidden, table, 20, normalize=True, ordered=False)
        best_first = best_experts(hidden, table, 20, normalize=True)
    assert ids.dtype == torch.int64 and torch.equal(ids, best_first.sort(-1).values)


def test_lists_too_long_to_rank_are_sorted(monkeypatch: pytest.MonkeyPatch) -> None:
    hidden, table = torch.randn(5, 16, device=DEVICE), torch.randn(90, 16, device=DEVICE)
    ranked = check(hidden, table, 40)
    monkeypatch.setattr("airmoe.kernels.best_experts_triton.LARGEST_RANKED", 1)
    assert torch.equal(check(hidden, table, 40), ranked)


def test_no_tokens() -> None:
    with use_backend("triton"):
        ids = best_experts(torch.empty(0, 16, device=DEVICE), torch.randn(30, 16, device=DEVICE), 4)
    assert ids.shape == (0, 4)


def test_the_operator_is_registered_completely() -> None:
    arguments = (torch.randn(3, 16, device=DEVICE), torch.randn(30, 16, device=DEVICE), 4)
    tests = ("test_schema", "test_faketensor")
    torch.library.opcheck(best_experts_op, (*arguments, None, 0.0, True, True), test_utils=tests)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize(
    ("tokens", "experts", "dim", "count"),
    [
        (2000, 65_536, 256, 512),
        (777, 20_001, 100, 300),
        (8, 1_000_003, 64, 512),
        (1, 40_000, 1024, 1),
        (33, 5000, 4096, 64),
    ],
)
def test_large_odd_shapes(
    dtype: torch.dtype, tokens: int, experts: int, dim: int, count: int
) -> None:
    hidden = torch.randn(tokens, dim, device=DEVICE, dtype=dtype)
    table = torch.nn.functional.normalize(torch.randn(experts, dim, device=DEVICE), dim=-1)
    check(hidden, table.to(dtype), count, any_noise(tokens))
    if dtype == torch.bfloat16:
        check(hidden.float(), table.to(dtype), count)


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
def test_large_streams(
    hidden_dtype: torch.dtype,
    table_dtype: torch.dtype,
    tokens: int,
    experts: int,
    dim: int,
    count: int,
) -> None:
    assert can_stream(tokens, experts, count)
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
def test_streams_hold_little_memory() -> None:
    hidden = torch.randn(65_536, 64, device=DEVICE, dtype=torch.bfloat16)
    table = torch.randn(65_536, 64, device=DEVICE, dtype=torch.bfloat16)
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    best_experts(hidden, table, 512, normalize=True, ordered=False)
    # The ids are 256 MiB, the lists of 132 blocks of 128 rows 264 MiB.
    assert torch.cuda.max_memory_allocated() - before <= 540 << 20


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
