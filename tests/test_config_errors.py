"""Impossible settings and inputs raise one error that names field, value, rule and remedy."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Callable
from functools import partial
from typing import Any, cast

import pytest
import torch

from airmoe import (
    ROUTERS,
    CoarseExperts,
    Codebook,
    ConfigError,
    GranularExperts,
    MoELayer,
    calibrate,
    load_balance_loss,
    restore_routers,
    router_z_loss,
    swap_ffn,
    swap_routers,
)
from airmoe.metrics import dead_experts, mass_recall, overlap, usage_entropy

SIZES = {"dim": 8, "num_experts": 36, "top_k": 4}
GOOD: dict[str, dict[str, Any]] = {
    "air": {**SIZES, "num_codewords": 3, "shortlist_size": 9},
    "peer": {**SIZES, "num_heads": 2},
    "hierarchical": {**SIZES, "num_clusters": 4, "num_selected_clusters": 2},
    "topk": SIZES,
    "expert_choice": SIZES,
}
ROUTER_CLASSES: dict[str, Any] = dict(ROUTERS)
CONFIGS = {name: router.Config for name, router in ROUTER_CLASSES.items()}
NOT_COUNTS = [0, -1, 2.0, "4", None, True]
NOT_STDS = [-0.01, float("nan"), float("inf"), "0.1", None, True]
NAN, INF = float("nan"), float("inf")


def build(name: str, **options: Any) -> Any:
    return CONFIGS[name](**{**GOOD[name], **options}).build()


def assert_refused(
    job: Callable[[], object], field: str, value: object, rule: str, remedy: str
) -> ConfigError:
    """`job` fails with `field: got value, rule. Remedy.`, in the message and as attributes."""
    with pytest.raises(ConfigError) as caught:
        job()
    error = caught.value
    assert_explains(error, field, value, rule, remedy)
    return error


def assert_explains(error: ConfigError, field: str, value: object, rule: str, remedy: str) -> None:
    message = str(error)
    assert message.startswith(f"{field}: got {value!r}, "), message
    assert rule in error.rule and error.rule in message, message
    assert remedy in error.remedy and error.remedy in message, message
    assert error.field == field and repr(error.value) == repr(value)
    assert message.rstrip().endswith("."), message
    assert isinstance(error, ValueError)


def assert_option_refused(
    name: str, options: dict[str, Any], field: str, value: object, rule: str, remedy: str
) -> ConfigError:
    path = f"{ROUTER_CLASSES[name].__name__}.Config.{field}"
    return assert_refused(lambda: CONFIGS[name](**options), path, value, rule, remedy)


# (router, option, value, words of the rule, words of the remedy)
IMPOSSIBLE: list[tuple[str, str, object, str, str]] = [
    ("air", "shortlist_size", 3, ">= top_k = 4", "Raise shortlist_size"),
    ("air", "shortlist_size", 37, "<= num_experts = 36", "Lower"),
    ("air", "codebook_decay", 1.0, "< 1.0", "inside that range"),
    ("air", "codebook_decay", 1.5, "< 1.0", "inside that range"),
    ("air", "codebook_decay", -0.1, ">= 0", "inside that range"),
    ("air", "codebook_decay", NAN, "finite", "range"),
    ("air", "codebook_decay", "0.9", "a number", "float"),
    ("air", "dead_below", -1.0, ">= 0", "inside that range"),
    ("air", "dead_below", INF, "finite", "range"),
    ("air", "codebook", "sphere", "'euclidean'", "Choose"),
    ("air", "gate", "tokens", "'expert_choice'", "Choose"),
    ("air", "normalize_centroids", 1, "True or False", "bool"),
    ("air", "centroid_init", "he", "'xavier'", "Choose"),
    ("air", "capacity_factor", 2.0, "expert_choice", "gate"),
    ("peer", "num_experts", 35, "square", "25 or 36"),
    ("peer", "dim", 7, "even", "even"),
    ("peer", "top_k", 5, "divisible by num_heads = 2", "multiple"),
    ("hierarchical", "num_clusters", 5, "divide num_experts = 36", "divisor"),
    ("hierarchical", "num_clusters", 72, "divide num_experts", "divisor"),
    ("hierarchical", "num_selected_clusters", 5, "<= num_clusters = 4", "Lower"),
    ("hierarchical", "normalize_centroids", "yes", "True", "bool"),
    ("hierarchical", "centroid_init", "", "'unit'", "Choose"),
    ("topk", "normalize_centroids", None, "True or False", "bool"),
    ("topk", "centroid_init", "zeros", "'unit'", "Choose"),
    ("expert_choice", "capacity_factor", 0.0, "> 0", "range"),
    ("expert_choice", "capacity_factor", -1, "> 0", "range"),
    ("expert_choice", "capacity_factor", NAN, "finite", "range"),
    ("expert_choice", "normalize_centroids", 0, "True", "bool"),
    ("expert_choice", "centroid_init", 3, "'unit'", "Choose"),
    *(  # PEER's total may exceed E, because each head may take up to E experts
        (name, "top_k", 37, rule, "Lower top_k or raise num_experts")
        for name in ("air", "hierarchical", "topk", "expert_choice")
        for rule in ("<= ", "36")
    ),
]


@pytest.mark.parametrize(("name", "field", "value", "rule", "remedy"), IMPOSSIBLE)
def test_impossible_settings_are_refused(
    name: str, field: str, value: object, rule: str, remedy: str
) -> None:
    assert_option_refused(name, {**GOOD[name], field: value}, field, value, rule, remedy)


def test_settings_that_do_not_fit_together() -> None:
    options = {**GOOD["air"], "gate": "expert_choice", "capacity_factor": 0.0}
    assert_option_refused("air", options, "capacity_factor", 0.0, "> 0", "range")
    options, rule = GOOD["hierarchical"] | {"top_k": 19}, "18 candidates, must be >= top_k = 19"
    field = "num_selected_clusters"
    assert_option_refused("hierarchical", options, field, 2, rule, "Raise num_selected_clusters")
    build("peer", num_experts=4, top_k=8, num_heads=2)
    options = GOOD["peer"] | {"num_experts": 4, "top_k": 10}
    assert_option_refused("peer", options, "top_k", 10, "<= 8", "Lower top_k")


COUNTS = [
    (name, field)
    for name, options in GOOD.items()
    for field in [*options, *(["refresh_every"] if name == "air" else [])]
]


@pytest.mark.parametrize(("name", "field"), COUNTS)
def test_sizes_are_whole_numbers_of_at_least_one(name: str, field: str) -> None:
    for value in NOT_COUNTS:
        whole = isinstance(value, int) and not isinstance(value, bool)
        rule, remedy = (">= 1", "1 or more") if whole else ("whole number", "int")
        assert_option_refused(name, {**GOOD[name], field: value}, field, value, rule, remedy)


@pytest.mark.parametrize("name", ROUTERS)
def test_jitter_is_a_finite_number_of_at_least_zero(name: str) -> None:
    for value in NOT_STDS:
        rule, remedy = (">= 0", "range") if isinstance(value, float) else ("a number", "float")
        options = {**GOOD[name], "jitter_std": value}
        assert_option_refused(name, options, "jitter_std", value, rule, remedy)


@pytest.mark.parametrize("name", ROUTERS)
def test_names_of_options(name: str) -> None:
    unknown, rule = GOOD[name] | {"shortlist": 5}, "is not an option"
    error = assert_option_refused(name, unknown, "shortlist", 5, rule, "Valid options: ")
    for field in dataclasses.fields(CONFIGS[name]):
        assert field.name in error.remedy
        if field.default is dataclasses.MISSING:
            options = {key: value for key, value in GOOD[name].items() if key != field.name}
            rule = "must be given"
            assert_option_refused(name, options, field.name, None, rule, field.name)


@pytest.mark.parametrize("name", ROUTERS)
def test_settings_are_frozen_and_checked_again_by_replace(name: str) -> None:
    config = build(name).config
    with pytest.raises(dataclasses.FrozenInstanceError):
        config.top_k = 5
    with pytest.raises(ConfigError):
        dataclasses.replace(config, top_k=0)
    assert dataclasses.replace(config, jitter_std=0.5).jitter_std == 0.5


def test_errors_survive_a_process_boundary() -> None:
    error = ConfigError("air.top_k", 0, "must be >= 1", "Give 1 or more.")
    copy = pickle.loads(pickle.dumps(error))
    assert_explains(copy, "air.top_k", 0, "must be >= 1", "Give 1 or more.")


# -- the same for codebook, experts and layer --------------------------------------------------

# Types are what these calls get wrong.
codebook, granular, coarse = (cast(Any, one) for one in (Codebook, GranularExperts, CoarseExperts))
PARTS: list[tuple[Callable[[], object], str, object, str, str]] = [
    (lambda: codebook(0, 8), "codebook.num_codewords", 0, ">= 1", "1 or more"),
    (lambda: codebook(3, 8.0), "codebook.dim", 8.0, "whole number", "int"),
    (lambda: codebook(3, 8, "round"), "codebook.kind", "round", "'static'", "Choose"),
    (lambda: codebook(3, 8, decay=1.0), "codebook.decay", 1.0, "< 1.0", "range"),
    (lambda: codebook(3, 8, dead_below=-1.0), "codebook.dead_below", -1.0, ">= 0", "range"),
    (lambda: granular(0, 8), "GranularExperts.num_experts", 0, ">= 1", "1 or more"),
    (lambda: granular(4, True), "GranularExperts.dim", True, "whole number", "int"),
    (lambda: granular(4, 8, "tanh"), "GranularExperts.activation", "tanh", "'swiglu'", "Choose"),
    (
        lambda: granular(4, 8, expert_size=0),
        *("GranularExperts.expert_size", 0, ">= 1", "1 or more"),
    ),
    (lambda: coarse(4, 8, 2.5), "CoarseExperts.expert_size", 2.5, "whole number", "int"),
    (lambda: coarse(4, 8, 2, "x"), "CoarseExperts.activation", "x", "'gelu'", "Choose"),
    (
        lambda: MoELayer(build("topk"), granular(35, 8)),
        *("MoELayer.experts.num_experts", 35, "router's num_experts = 36", "same sizes"),
    ),
    (
        lambda: MoELayer(build("topk"), granular(36, 9)),
        *("MoELayer.experts.dim", 9, "router's dim = 8", "same sizes"),
    ),
    (
        lambda: MoELayer(build("topk"), granular(36, 8), cast(Any, "rmsnorm")),
        *("MoELayer.post_norm", "rmsnorm", "'layernorm'", "Choose"),
    ),
]


@pytest.mark.parametrize(("make", "field", "value", "rule", "remedy"), PARTS)
def test_impossible_parts_are_refused(
    make: Callable[[], object], field: str, value: object, rule: str, remedy: str
) -> None:
    assert_refused(make, field, value, rule, remedy)


# -- inputs -------------------------------------------------------------------------------------

BAD_DTYPES = [torch.int64, torch.bool, torch.complex64]
BAD_MASKS = {
    "short": torch.ones(4, dtype=torch.bool),
    "column": torch.ones(5, 1, dtype=torch.bool),
    "scalar": torch.ones((), dtype=torch.bool),
    "int64": torch.ones(5, dtype=torch.int64),
    "float": torch.ones(5),
}


@pytest.mark.parametrize("call", ["forward", "observe"])
@pytest.mark.parametrize("name", ROUTERS)
def test_routers_refuse_bad_inputs(name: str, call: str) -> None:
    """Before anything has changed: another width or rank, a dtype without gradients, a mask."""
    router = build(name)
    label, run = ROUTER_CLASSES[name].__name__, getattr(router, call)
    before = {key: value.clone() for key, value in router.state_dict().items()}
    for shape in [(5, 7), (5, 9), (8,), (2, 5, 8)]:
        bad = torch.zeros(shape)
        assert_refused(partial(run, bad), f"{label}.hidden", shape, "dim = 8", "Flatten")
    for dtype in BAD_DTYPES:
        bad = torch.zeros(5, 8, dtype=dtype)
        assert_refused(partial(run, bad), f"{label}.hidden", dtype, "floating point", "Cast")
    for mask in BAD_MASKS.values():
        got, rule = (tuple(mask.shape), mask.dtype), "bool tensor of shape [5]"
        job = partial(run, torch.zeros(5, 8), mask)
        assert_refused(job, f"{label}.mask", got, rule, "padding")
    assert all(torch.equal(value, before[key]) for key, value in router.state_dict().items())


@pytest.mark.parametrize("training", [True, False])
def test_layers_refuse_bad_hidden_states(training: bool) -> None:
    layer = MoELayer(build("air"), GranularExperts(36, 8)).train(training)
    for bad in (
        torch.zeros(2, 5, 7),
        torch.zeros(8),
        torch.zeros(2, 5, 8, dtype=torch.int32),
        torch.zeros(2, 5, 8, dtype=torch.complex64),
        torch.zeros(2, 5, 8, dtype=torch.bfloat16),  # the experts are float32
    ):
        with pytest.raises(ConfigError, match=r": got .*, must .*\. \w+"):
            layer(bad)
    job, rule = partial(layer, torch.zeros(2, 3, 9)), "must have width dim = 8"
    assert_refused(job, "MoELayer.x", (2, 3, 9), rule, "this width")


@pytest.mark.parametrize("training", [True, False])
def test_layers_refuse_bad_masks(training: bool) -> None:
    """0 and -inf, as Hugging Face's attention has them, would mean the opposite as booleans."""
    layer = MoELayer(build("air"), GranularExperts(36, 8)).train(training)
    hidden = torch.zeros(2, 5, 8)
    for shape in [(10,), (5, 2), (2, 5, 1), (2, 4), (1, 5)]:
        job = partial(layer, hidden, torch.ones(shape, dtype=torch.bool))
        assert_refused(job, "MoELayer.mask", shape, "(2, 5)", "mask")
    for dtype in (torch.float32, torch.bfloat16):
        additive = torch.zeros(2, 5, dtype=dtype)
        additive[:, 3:] = -torch.inf
        with pytest.raises(ConfigError, match=r"MoELayer\.mask: got .*bool.*\. \w+"):
            layer(hidden, additive)


def test_one_thing_given_for_another() -> None:
    router, experts = build("air"), GranularExperts(36, 8)
    layer: Any = MoELayer(router, experts).eval()
    hidden = torch.randn(2, 5, 8)
    output = layer.forward_with_routing(hidden)
    moe: Any = MoELayer
    for given in (router.config, experts, None):
        name = type(given).__qualname__
        job = partial(moe, given, experts)
        assert_refused(job, "MoELayer.router", name, "must be a router", ".build()")
    job = partial(moe, router, torch.nn.Linear(8, 8))
    assert_refused(job, "MoELayer.experts.dim", None, "router's dim", "same sizes")
    job = partial(layer, hidden, [[1] * 5] * 2)
    assert_refused(job, "MoELayer.mask", "list", "must be a tensor", "attention mask")
    for loss in (load_balance_loss, router_z_loss):
        job, field = partial(loss, output), f"{loss.__name__}.routing"
        assert_refused(job, field, "MoEOutput", "must be a routing", ".routing")
    for count in (dead_experts, usage_entropy):
        job = partial(count, output.routing)
        assert_refused(job, "counts", "CellRouting", "must be", ".expert_counts")
    for metric in (overlap, mass_recall):
        with pytest.raises(ConfigError, match=r"got 'MoELayer', must be a router.* layer\.router"):
            metric(layer, torch.randn(5, 8))
    for change in (
        lambda model: swap_routers(model, num_codewords=4, shortlist_size=8),
        lambda model: swap_ffn(model, layers=[0], router=cast(Any, None)),
        lambda model: calibrate(model, []),
        restore_routers,
    ):
        with pytest.raises(ConfigError, match=r"\.model: got 'qwen', must be a model\. Load it"):
            change(cast(Any, "qwen"))


@pytest.mark.parametrize("experts", [GranularExperts(36, 8), CoarseExperts(36, 8, 2)])
def test_experts_refuse_another_routing(experts: GranularExperts | CoarseExperts) -> None:
    label = type(experts).__name__
    routing, other = (build("topk", num_experts=count)(torch.randn(5, 8)) for count in (36, 35))
    ids: Any = torch.zeros(5, 4, dtype=torch.int64)
    half, zeros = torch.zeros(5, 8, dtype=torch.float16), torch.zeros
    cases = [
        (zeros(5, 8), ids, "routing", "Tensor", "must be a routing", "router("),
        *(
            (zeros(shape), routing, "hidden", shape, "[5, 8]", "routed")
            for shape in [(4, 8), (5, 7), (5, 8, 1)]
        ),
        (half, routing, "hidden", torch.float16, "torch.float32", "Cast"),
        (half.long(), routing, "hidden", torch.int64, "", ""),
        (zeros(5, 8), other, "num_experts", 36, "router's num_experts = 35", "same"),
    ]
    for hidden, given, field, value, rule, remedy in cases:
        assert_refused(partial(experts, hidden, given), f"{label}.{field}", value, rule, remedy)


def test_codebooks_refuse_bad_inputs() -> None:
    codebook = Codebook(3, 8)
    before = {key: value.clone() for key, value in codebook.state_dict().items()}
    for call in (codebook.update, codebook.assign):
        for shape in [(16, 7), (16, 9), (8,), (2, 16, 8)]:
            assert_refused(partial(call, torch.ones(shape)), "codebook.hidden", shape, "8", "")
        for dtype in BAD_DTYPES:
            bad = torch.ones(16, 8, dtype=dtype)
            assert_refused(partial(call, bad), "codebook.hidden", dtype, "floating point", "")
    for mask in BAD_MASKS.values():
        with pytest.raises(ConfigError, match=r"codebook\.mask: got"):
            codebook.update(torch.randn(5, 8), mask)
    assert all(torch.equal(value, before[key]) for key, value in codebook.state_dict().items())
