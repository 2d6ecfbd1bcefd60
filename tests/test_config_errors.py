"""Impossible settings and inputs raise one error that names field, value, rule and remedy."""

from __future__ import annotations

import dataclasses
import pickle
from collections.abc import Callable
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

GOOD: dict[str, dict[str, Any]] = {
    "air": {"dim": 8, "num_experts": 36, "top_k": 4, "num_codewords": 3, "shortlist_size": 9},
    "peer": {"dim": 8, "num_experts": 36, "top_k": 4, "num_heads": 2},
    "hierarchical": {
        "dim": 8,
        "num_experts": 36,
        "top_k": 4,
        "num_clusters": 4,
        "num_selected_clusters": 2,
    },
    "topk": {"dim": 8, "num_experts": 36, "top_k": 4},
    "expert_choice": {"dim": 8, "num_experts": 36, "top_k": 4},
}
ROUTER_CLASSES: dict[str, Any] = dict(ROUTERS)
CONFIGS = {name: router.Config for name, router in ROUTER_CLASSES.items()}
NOT_COUNTS = [0, -1, 2.0, "4", None, True]
NOT_STDS = [-0.01, float("nan"), float("inf"), "0.1", None, True]


def build(name: str, **options: Any) -> Any:
    return CONFIGS[name](**{**GOOD[name], **options}).build()


def assert_explains(error: ConfigError, field: str, value: object, rule: str, remedy: str) -> None:
    """`field: got value, rule. Remedy.`, all four in the message and as attributes."""
    message = str(error)
    assert message.startswith(f"{field}: got {value!r}, "), message
    assert rule in error.rule and error.rule in message, message
    assert remedy in error.remedy and error.remedy in message, message
    assert error.field == field and repr(error.value) == repr(value)
    assert message.rstrip().endswith("."), message
    assert isinstance(error, ValueError)


@pytest.mark.parametrize("name", ROUTERS)
def test_the_good_settings_are_good(name: str) -> None:
    router = build(name)
    for field, value in GOOD[name].items():
        assert getattr(router.config, field) == value


# (router, options, field, value in the message, words of the rule, words of the remedy)
IMPOSSIBLE: list[tuple[str, dict[str, Any], str, object, str, str]] = [
    ("air", {"shortlist_size": 3}, "shortlist_size", 3, ">= top_k = 4", "Raise shortlist_size"),
    ("air", {"shortlist_size": 37}, "shortlist_size", 37, "<= num_experts = 36", "Lower"),
    ("air", {"codebook_decay": 1.0}, "codebook_decay", 1.0, "< 1.0", "inside that range"),
    ("air", {"codebook_decay": 1.5}, "codebook_decay", 1.5, "< 1.0", "inside that range"),
    ("air", {"codebook_decay": -0.1}, "codebook_decay", -0.1, ">= 0", "inside that range"),
    ("air", {"codebook_decay": float("nan")}, "codebook_decay", float("nan"), "finite", "range"),
    ("air", {"codebook_decay": "0.9"}, "codebook_decay", "0.9", "a number", "float"),
    ("air", {"dead_below": -1.0}, "dead_below", -1.0, ">= 0", "inside that range"),
    ("air", {"dead_below": float("inf")}, "dead_below", float("inf"), "finite", "range"),
    ("air", {"codebook": "sphere"}, "codebook", "sphere", "'euclidean'", "Choose"),
    ("air", {"gate": "tokens"}, "gate", "tokens", "'expert_choice'", "Choose"),
    ("air", {"normalize_centroids": 1}, "normalize_centroids", 1, "True or False", "bool"),
    ("air", {"centroid_init": "he"}, "centroid_init", "he", "'xavier'", "Choose"),
    ("air", {"capacity_factor": 2.0}, "capacity_factor", 2.0, "expert_choice", "gate"),
    (
        "air",
        {"gate": "expert_choice", "capacity_factor": 0.0},
        "capacity_factor",
        0.0,
        "> 0",
        "range",
    ),
    ("peer", {"num_experts": 35}, "num_experts", 35, "square", "25 or 36"),
    ("peer", {"dim": 7}, "dim", 7, "even", "even"),
    ("peer", {"top_k": 5}, "top_k", 5, "divisible by num_heads = 2", "multiple"),
    ("hierarchical", {"num_clusters": 5}, "num_clusters", 5, "divide num_experts = 36", "divisor"),
    ("hierarchical", {"num_clusters": 72}, "num_clusters", 72, "divide num_experts", "divisor"),
    (
        "hierarchical",
        {"num_selected_clusters": 5},
        "num_selected_clusters",
        5,
        "<= num_clusters = 4",
        "Lower",
    ),
    (
        "hierarchical",
        {"top_k": 19},
        "num_selected_clusters",
        2,
        "18 candidates, must be >= top_k = 19",
        "Raise num_selected_clusters",
    ),
    ("hierarchical", {"normalize_centroids": "yes"}, "normalize_centroids", "yes", "True", "bool"),
    ("hierarchical", {"centroid_init": ""}, "centroid_init", "", "'unit'", "Choose"),
    ("topk", {"normalize_centroids": None}, "normalize_centroids", None, "True or False", "bool"),
    ("topk", {"centroid_init": "zeros"}, "centroid_init", "zeros", "'unit'", "Choose"),
    ("expert_choice", {"capacity_factor": 0.0}, "capacity_factor", 0.0, "> 0", "range"),
    ("expert_choice", {"capacity_factor": -1}, "capacity_factor", -1, "> 0", "range"),
    (
        "expert_choice",
        {"capacity_factor": float("nan")},
        "capacity_factor",
        float("nan"),
        "finite",
        "range",
    ),
    ("expert_choice", {"normalize_centroids": 0}, "normalize_centroids", 0, "True", "bool"),
    ("expert_choice", {"centroid_init": 3}, "centroid_init", 3, "'unit'", "Choose"),
]


@pytest.mark.parametrize(
    ("name", "options", "field", "value", "rule", "remedy"),
    IMPOSSIBLE,
    ids=[f"{case[0]}-{case[1]}" for case in IMPOSSIBLE],
)
def test_impossible_settings_are_refused(
    name: str, options: dict[str, Any], field: str, value: object, rule: str, remedy: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        CONFIGS[name](**{**GOOD[name], **options})
    assert_explains(
        caught.value, f"{ROUTER_CLASSES[name].__name__}.Config.{field}", value, rule, remedy
    )


COUNTS = [
    (name, field)
    for name, options in GOOD.items()
    for field in [*options, *(["refresh_every"] if name == "air" else [])]
]


@pytest.mark.parametrize("value", NOT_COUNTS, ids=repr)
@pytest.mark.parametrize(("name", "field"), COUNTS)
def test_sizes_are_whole_numbers_of_at_least_one(name: str, field: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        CONFIGS[name](**{**GOOD[name], field: value})
    whole = isinstance(value, int) and not isinstance(value, bool)
    rule, remedy = (">= 1", "1 or more") if whole else ("whole number", "int")
    assert_explains(
        caught.value, f"{ROUTER_CLASSES[name].__name__}.Config.{field}", value, rule, remedy
    )


@pytest.mark.parametrize("value", NOT_STDS, ids=repr)
@pytest.mark.parametrize("name", ROUTERS)
def test_jitter_is_a_finite_number_of_at_least_zero(name: str, value: object) -> None:
    with pytest.raises(ConfigError) as caught:
        CONFIGS[name](**{**GOOD[name], "jitter_std": value})
    real = isinstance(value, float)
    rule, remedy = (">= 0", "range") if real else ("a number", "float")
    assert_explains(
        caught.value, f"{ROUTER_CLASSES[name].__name__}.Config.jitter_std", value, rule, remedy
    )


@pytest.mark.parametrize("name", ["air", "hierarchical", "topk", "expert_choice"])
def test_no_router_takes_more_experts_than_there_are(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        CONFIGS[name](**{**GOOD[name], "top_k": 37})
    assert_explains(
        caught.value,
        f"{ROUTER_CLASSES[name].__name__}.Config.top_k",
        37,
        "<= ",
        "Lower top_k or raise num_experts",
    )
    assert "36" in caught.value.rule


def test_peer_counts_its_experts_per_head() -> None:
    """A head may take up to E experts, so the total may exceed E; one head may not."""
    build("peer", num_experts=4, top_k=8, num_heads=2)
    with pytest.raises(ConfigError) as caught:
        build("peer", num_experts=4, top_k=10, num_heads=2)
    assert_explains(caught.value, "PeerRouter.Config.top_k", 10, "<= 8", "Lower top_k")


@pytest.mark.parametrize("name", ROUTERS)
def test_unknown_options_list_the_valid_ones(name: str) -> None:
    config = CONFIGS[name]
    with pytest.raises(ConfigError) as caught:
        config(**GOOD[name], shortlist=5)
    assert_explains(
        caught.value,
        f"{ROUTER_CLASSES[name].__name__}.Config.shortlist",
        5,
        "is not an option",
        "Valid options: ",
    )
    for field in dataclasses.fields(config):
        assert field.name in caught.value.remedy


@pytest.mark.parametrize("name", ROUTERS)
def test_missing_options_are_named(name: str) -> None:
    config = CONFIGS[name]
    for field in dataclasses.fields(config):
        if field.default is dataclasses.MISSING:
            options = {key: value for key, value in GOOD[name].items() if key != field.name}
            with pytest.raises(ConfigError) as caught:
                config(**options)
            assert_explains(
                caught.value,
                f"{ROUTER_CLASSES[name].__name__}.Config.{field.name}",
                None,
                "must be given",
                field.name,
            )


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
    copied = pickle.loads(pickle.dumps(error))
    assert_explains(copied, "air.top_k", 0, "must be >= 1", "Give 1 or more.")


# -- the same for codebook, experts and layer --------------------------------------------------

PARTS: list[tuple[Callable[[], object], str, object, str, str]] = [
    (lambda: Codebook(0, 8), "codebook.num_codewords", 0, ">= 1", "1 or more"),
    (lambda: Codebook(3, 8.0), "codebook.dim", 8.0, "whole number", "int"),  # type: ignore[arg-type]
    (lambda: Codebook(3, 8, "round"), "codebook.kind", "round", "'static'", "Choose"),  # type: ignore[arg-type]
    (lambda: Codebook(3, 8, decay=1.0), "codebook.decay", 1.0, "< 1.0", "range"),
    (lambda: Codebook(3, 8, decay=-0.5), "codebook.decay", -0.5, ">= 0", "range"),
    (lambda: Codebook(3, 8, dead_below=-1.0), "codebook.dead_below", -1.0, ">= 0", "range"),
    (lambda: GranularExperts(0, 8), "GranularExperts.num_experts", 0, ">= 1", "1 or more"),
    (lambda: GranularExperts(4, True), "GranularExperts.dim", True, "whole number", "int"),
    (
        lambda: GranularExperts(4, 8, "tanh"),  # type: ignore[arg-type]
        "GranularExperts.activation",
        "tanh",
        "'swiglu'",
        "Choose",
    ),
    (
        lambda: GranularExperts(4, 8, expert_size=0),
        "GranularExperts.expert_size",
        0,
        ">= 1",
        "1 or more",
    ),
    (
        lambda: CoarseExperts(4, 8, 2.5),  # type: ignore[arg-type]
        "CoarseExperts.expert_size",
        2.5,
        "whole number",
        "int",
    ),
    (
        lambda: CoarseExperts(4, 8, 2, "x"),  # type: ignore[arg-type]
        "CoarseExperts.activation",
        "x",
        "'gelu'",
        "Choose",
    ),
    (
        lambda: MoELayer(build("topk"), GranularExperts(35, 8)),
        "MoELayer.experts.num_experts",
        35,
        "router's num_experts = 36",
        "same sizes",
    ),
    (
        lambda: MoELayer(build("topk"), GranularExperts(36, 9)),
        "MoELayer.experts.dim",
        9,
        "router's dim = 8",
        "same sizes",
    ),
    (
        lambda: MoELayer(build("topk"), GranularExperts(36, 8), "rmsnorm"),  # type: ignore[arg-type]
        "MoELayer.post_norm",
        "rmsnorm",
        "'layernorm'",
        "Choose",
    ),
]


@pytest.mark.parametrize(("make", "field", "value", "rule", "remedy"), PARTS)
def test_impossible_parts_are_refused(
    make: Callable[[], object], field: str, value: object, rule: str, remedy: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        make()
    assert_explains(caught.value, field, value, rule, remedy)


# -- inputs -------------------------------------------------------------------------------------

BAD_DTYPES = [torch.int64, torch.bool, torch.complex64]


@pytest.mark.parametrize("call", ["forward", "observe"])
@pytest.mark.parametrize("name", ROUTERS)
def test_routers_refuse_hidden_states_of_another_width_or_rank(name: str, call: str) -> None:
    router = build(name)
    for shape in [(5, 7), (5, 9), (8,), (2, 5, 8)]:
        with pytest.raises(ConfigError) as caught:
            getattr(router, call)(torch.zeros(shape))
        assert_explains(
            caught.value, f"{ROUTER_CLASSES[name].__name__}.hidden", shape, "dim = 8", "Flatten"
        )


@pytest.mark.parametrize("dtype", BAD_DTYPES, ids=str)
@pytest.mark.parametrize("call", ["forward", "observe"])
@pytest.mark.parametrize("name", ROUTERS)
def test_routers_refuse_integers_and_complex_numbers(
    name: str, call: str, dtype: torch.dtype
) -> None:
    with pytest.raises(ConfigError) as caught:
        getattr(build(name), call)(torch.zeros(5, 8, dtype=dtype))
    assert_explains(
        caught.value, f"{ROUTER_CLASSES[name].__name__}.hidden", dtype, "floating point", "Cast"
    )


BAD_MASKS = {
    "short": torch.ones(4, dtype=torch.bool),
    "column": torch.ones(5, 1, dtype=torch.bool),
    "scalar": torch.ones((), dtype=torch.bool),
    "int64": torch.ones(5, dtype=torch.int64),
    "float": torch.ones(5),
}


@pytest.mark.parametrize("mask", BAD_MASKS)
@pytest.mark.parametrize("call", ["forward", "observe"])
@pytest.mark.parametrize("name", ROUTERS)
def test_routers_refuse_masks_of_another_shape_or_dtype(name: str, call: str, mask: str) -> None:
    bad = BAD_MASKS[mask]
    with pytest.raises(ConfigError) as caught:
        getattr(build(name), call)(torch.zeros(5, 8), bad)
    got = (tuple(bad.shape), bad.dtype)
    assert_explains(
        caught.value,
        f"{ROUTER_CLASSES[name].__name__}.mask",
        got,
        "bool tensor of shape [5]",
        "padding",
    )


@pytest.mark.parametrize("name", ROUTERS)
def test_a_refused_input_changes_nothing(name: str) -> None:
    router = build(name)
    before = {key: value.clone() for key, value in router.state_dict().items()}
    for bad in (torch.zeros(5, 7), torch.zeros(5, 8, dtype=torch.int64)):
        with pytest.raises(ConfigError):
            router.observe(bad)
    for key, value in router.state_dict().items():
        assert torch.equal(value, before[key]), key


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("name", ROUTERS)
def test_layers_refuse_bad_hidden_states(name: str, training: bool) -> None:
    layer = MoELayer(build(name), GranularExperts(36, 8)).train(training)
    for bad in (
        torch.zeros(2, 5, 7),
        torch.zeros(8),
        torch.zeros(2, 5, 8, dtype=torch.int32),
        torch.zeros(2, 5, 8, dtype=torch.complex64),
        torch.zeros(2, 5, 8, dtype=torch.bfloat16),  # the experts are float32
    ):
        with pytest.raises(ConfigError, match=r": got .*, must .*\. \w+"):
            layer(bad)


@pytest.mark.parametrize("training", [True, False])
@pytest.mark.parametrize("shape", [(10,), (5, 2), (2, 5, 1), (2, 4), (1, 5)])
def test_layers_refuse_masks_of_another_shape(shape: tuple[int, ...], training: bool) -> None:
    layer = MoELayer(build("air"), GranularExperts(36, 8)).train(training)
    with pytest.raises(ConfigError) as caught:
        layer(torch.zeros(2, 5, 8), torch.ones(shape, dtype=torch.bool))
    assert_explains(caught.value, "MoELayer.mask", shape, "(2, 5)", "mask")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_layers_refuse_additive_masks(dtype: torch.dtype) -> None:
    """0 and -inf as Hugging Face's attention has them would mean the opposite as booleans."""
    layer = MoELayer(build("air"), GranularExperts(36, 8))
    additive = torch.zeros(2, 5, dtype=dtype)
    additive[:, 3:] = -torch.inf
    with pytest.raises(ConfigError, match=r"MoELayer\.mask: got .*bool.*\. \w+"):
        layer(torch.randn(2, 5, 8), additive)


def test_one_thing_given_for_another() -> None:
    """Slips that are easily made get an answer, not an AttributeError."""
    router, experts = build("air"), GranularExperts(36, 8)
    wrongs: list[Any] = [router.config, experts, None]
    for wrong in wrongs:
        with pytest.raises(ConfigError) as caught:
            MoELayer(wrong, experts)
        name = type(wrong).__qualname__
        assert_explains(caught.value, "MoELayer.router", name, "must be a router", ".build()")
    wrongs = [torch.nn.Linear(8, 8), GranularExperts, None]
    for wrong in wrongs:
        with pytest.raises(ConfigError) as caught:
            MoELayer(router, wrong)
        name = type(wrong).__qualname__
        assert_explains(caught.value, "MoELayer.experts", name, "must be experts", "Granular")
    layer = MoELayer(router, experts).eval()
    given: Any = [[1] * 5] * 2
    with pytest.raises(ConfigError) as caught:
        layer(torch.randn(2, 5, 8), given)
    assert_explains(caught.value, "MoELayer.mask", "list", "must be a tensor", "torch.tensor")
    output: Any = layer.forward_with_routing(torch.randn(2, 5, 8))
    for loss in (load_balance_loss, router_z_loss):
        with pytest.raises(ConfigError) as caught:
            loss(output)
        field = f"{loss.__name__}.routing"
        assert_explains(caught.value, field, "MoEOutput", "must be a routing", ".routing")
    for count in (dead_experts, usage_entropy):
        with pytest.raises(ConfigError) as caught:
            count(output.routing)
        assert_explains(caught.value, "counts", "CellRouting", "must be", ".expert_counts")
    for metric in (overlap, mass_recall):
        with pytest.raises(ConfigError, match=r"got 'MoELayer', must be a router.* layer\.router"):
            metric(cast(Any, layer), torch.randn(5, 8))
    for change in (
        lambda model: swap_routers(model, num_codewords=4, shortlist_size=8),
        lambda model: swap_ffn(model, layers=[0]),
        lambda model: calibrate(model, []),
        restore_routers,
    ):
        with pytest.raises(ConfigError, match=r"\.model: got 'qwen', must be a model\. Load it"):
            change(cast(Any, "qwen"))


@pytest.mark.parametrize("experts", [GranularExperts(36, 8), CoarseExperts(36, 8, 2)])
def test_experts_refuse_another_routing(experts: GranularExperts | CoarseExperts) -> None:
    label = type(experts).__name__
    routing = build("topk")(torch.randn(5, 8))
    ids: Any = torch.zeros(5, 4, dtype=torch.int64)
    with pytest.raises(ConfigError) as caught:
        experts(torch.zeros(5, 8), ids)
    assert_explains(caught.value, f"{label}.routing", "Tensor", "must be a routing", "router(")
    for shape in [(4, 8), (5, 7), (5, 8, 1)]:
        with pytest.raises(ConfigError) as caught:
            experts(torch.zeros(shape), routing)
        assert_explains(caught.value, f"{label}.hidden", shape, "[5, 8]", "routed")
    with pytest.raises(ConfigError) as caught:
        experts(torch.zeros(5, 8, dtype=torch.float16), routing)
    assert_explains(caught.value, f"{label}.hidden", torch.float16, "torch.float32", "Cast")
    with pytest.raises(ConfigError):
        experts(torch.zeros(5, 8, dtype=torch.int64), routing)
    other = build("topk", num_experts=35)(torch.randn(5, 8))
    with pytest.raises(ConfigError) as caught:
        experts(torch.zeros(5, 8), other)
    assert_explains(caught.value, f"{label}.num_experts", 36, "router's num_experts = 35", "same")


@pytest.mark.parametrize("call", ["update", "assign"])
def test_codebooks_refuse_hidden_states_of_another_width_or_rank(call: str) -> None:
    codebook = Codebook(3, 8)
    for shape in [(16, 7), (16, 9), (8,), (2, 16, 8)]:
        with pytest.raises(ConfigError) as caught:
            getattr(codebook, call)(torch.ones(shape))
        assert_explains(caught.value, "codebook.hidden", shape, "8", "")


@pytest.mark.parametrize("dtype", BAD_DTYPES, ids=str)
@pytest.mark.parametrize("call", ["update", "assign"])
def test_codebooks_refuse_integers_and_complex_numbers(call: str, dtype: torch.dtype) -> None:
    with pytest.raises(ConfigError) as caught:
        getattr(Codebook(3, 8), call)(torch.ones(16, 8, dtype=dtype))
    assert_explains(caught.value, "codebook.hidden", dtype, "floating point", "")


@pytest.mark.parametrize("mask", BAD_MASKS)
def test_codebooks_refuse_masks_of_another_shape_or_dtype(mask: str) -> None:
    codebook = Codebook(1, 8)
    before = {key: value.clone() for key, value in codebook.state_dict().items()}
    with pytest.raises(ConfigError, match=r"codebook\.mask: got"):
        codebook.update(torch.randn(5, 8), BAD_MASKS[mask])
    for key, value in codebook.state_dict().items():
        assert torch.equal(value, before[key]), key
