"""When shortlists are refreshed: after optimizer steps, in Alg. 3's order, at a fixed address."""

from __future__ import annotations

import copy
import gc
import warnings
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch import Tensor, nn

import airmoe
from airmoe import ConfigError, MoELayer
from airmoe.kernels.backend import use_backend
from airmoe.kernels.cells import make_reverse
from tests.state.common import (
    air_of,
    assert_same,
    batch,
    build_layer,
    build_router,
    plain_shortlists,
    snapshot,
    tracked_layer,
)

OPTIMIZERS: dict[str, dict[str, Any]] = {
    "plain": {"foreach": False},
    "foreach": {"foreach": True},
    "fused": {"fused": True},  # moves no version counter
}
every_optimizer = pytest.mark.parametrize("kind", OPTIMIZERS)


def adamw(model: nn.Module, kind: str = "plain") -> torch.optim.AdamW:
    return torch.optim.AdamW(model.parameters(), lr=0.3, **OPTIMIZERS[kind])


def backward(layer: MoELayer, index: int) -> None:
    layer(batch(index)).pow(3).sum().backward()


def train(layer: MoELayer, optimizer: torch.optim.Optimizer, index: int) -> None:
    backward(layer, index)
    optimizer.step()
    optimizer.zero_grad()


@pytest.mark.parametrize("normalize", [True, False])
@every_optimizer
def test_lists_are_rebuilt_after_a_step_from_the_updated_codebook(
    kind: str, normalize: bool
) -> None:
    options = {"normalize_centroids": normalize, "codebook_decay": 0.1}
    layer = build_layer("air", jitter_std=0.0, **options)
    router, optimizer = air_of(layer), adamw(layer, kind)
    airmoe.track_optimizer(layer, optimizer)
    layer(batch(0))
    address = router.shortlists().data_ptr()
    norms_address = router.training_lists.inverse_norms.data_ptr()
    for step in range(4):
        backward(layer, 2 * step)
        before, old_codewords = router.shortlists().clone(), router.codebook.codewords.clone()
        optimizer.step()
        optimizer.zero_grad()
        expected_codebook = copy.deepcopy(router.codebook)
        expected_codebook.update(batch(2 * step + 1, 22))
        layer(batch(2 * step + 1).view(22, -1))
        assert torch.equal(router.codebook.codewords, expected_codebook.codewords)
        expected = plain_shortlists(router)
        assert torch.equal(router.shortlists(), expected), "not the lists of Alg. 3's order"
        assert not torch.equal(expected, plain_shortlists(router, old_codewords))
        assert not torch.equal(expected, before), "the step was too small to test anything"
        assert router.shortlists().data_ptr() == address
        assert router.training_lists.inverse_norms.data_ptr() == norms_address
        if normalize:
            norms = router.centroids.detach().norm(dim=-1)
            torch.testing.assert_close(router.training_lists.inverse_norms, 1 / norms)


def test_wrapped_optimizers_are_looked_through() -> None:
    model: Any = build_layer("air", jitter_std=0.0)
    router = air_of(model)
    model, optimizer = Accelerator(cpu=True).prepare(model, adamw(model))
    airmoe.track_optimizer(model, optimizer)
    backward(model, 0)
    before = router.shortlists().clone()
    optimizer.step()
    model(batch(1))
    assert torch.equal(router.shortlists(), plain_shortlists(router))
    assert not torch.equal(router.shortlists(), before)


def test_an_optimizer_without_the_centroids_cannot_track_them() -> None:
    """Another optimizer moves the centroids then, and the lists would never be refreshed."""
    layer = build_layer("air")
    others = torch.optim.AdamW(layer.experts.parameters())
    with pytest.raises(ConfigError, match="optimizer"):
        airmoe.track_optimizer(layer, others)
    with pytest.raises(ConfigError, match=r"track_optimizer\.optimizer: got 'Linear'"):
        airmoe.track_optimizer(layer, nn.Linear(2, 2))
    with pytest.raises(ConfigError, match="must contain a router"):
        airmoe.track_optimizer(nn.Linear(2, 2), others)


@every_optimizer
@pytest.mark.parametrize("end", ["removed", "forgotten", "copied"])
def test_lists_stay_correct_when_tracking_ends(end: str, kind: str) -> None:
    """An EMA copy or a forked run has an optimizer of its own, which it does not track."""
    layer = build_layer("air", jitter_std=0.0)
    original, optimizer = air_of(layer), adamw(layer)
    handle = airmoe.track_optimizer(layer, optimizer)
    airmoe.track_optimizer(layer, optimizer).remove()
    assert original.tracked, "it ended what it did not begin"
    backward(layer, 0)
    if end == "removed":
        handle.remove()
    elif end == "forgotten":
        del optimizer
        gc.collect()
    else:
        layer = copy.deepcopy(layer)
        assert original.tracked
    router, untracked = air_of(layer), adamw(layer, kind)
    assert not router.tracked
    for index in range(1, 6):
        backward(layer, index)
        assert torch.equal(router.shortlists(), plain_shortlists(router))
        if index % 2:  # else only the codebook moves
            untracked.step()
            untracked.zero_grad()


def test_a_skipped_step_does_not_refresh() -> None:
    layer, router, optimizer = tracked_layer()
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0)
    scaler.scale(layer(batch(0)).sum()).backward()
    before, centroids = router.shortlists().clone(), router.centroids.detach().clone()
    assert router.centroids.grad is not None
    router.centroids.grad.fill_(torch.inf)
    scaler.step(optimizer)
    scaler.update()
    assert torch.equal(router.centroids, centroids), "the scaler should have skipped this step"
    layer(batch(1))
    assert torch.equal(router.shortlists(), before)
    optimizer.zero_grad()
    scaler.scale(layer(batch(2)).pow(3).sum()).backward()
    scaler.step(optimizer)
    layer(batch(3))
    assert not torch.equal(router.centroids, centroids)
    assert not torch.equal(router.shortlists(), before)


def test_a_routing_of_an_earlier_moment_refuses_to_be_read() -> None:
    layer, _, optimizer = tracked_layer()
    x = batch(0)
    output = layer.forward_with_routing(x)
    probs = output.routing.expert_probs.detach().clone()
    output.hidden.square().sum().backward()
    optimizer.step()
    layer(x)
    assert torch.equal(output.routing.expert_probs, probs)  # read in time, it stays
    with pytest.raises(RuntimeError, match="is stale"):
        output.routing.to_token_routing()
    with pytest.raises(RuntimeError, match="is stale"):
        _ = output.routing.expert_counts


# -- without tracking -----------------------------------------------------------------------


@every_optimizer
def test_untracked_equals_tracked_when_every_micro_batch_is_a_step(kind: str) -> None:
    def run(tracked: bool) -> dict[str, Tensor]:
        layer = build_layer("air")
        optimizer = adamw(layer, kind)
        if tracked:
            airmoe.track_optimizer(layer, optimizer)
        outputs = {}
        for index in range(5):
            output = outputs[f"output {index}"] = layer(batch(index))
            output.pow(3).sum().backward()
            optimizer.step()
            optimizer.zero_grad()
        lists = {"lists": air_of(layer).shortlists()}
        return snapshot(layer, derived=False) | lists | outputs

    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*without a tracked optimizer")
        found = run(tracked=False)
    assert_same(found, run(tracked=True))


@pytest.mark.parametrize(
    ("package", "remedy"),
    [
        ("tests.mine", "airmoe.track_optimizer(model, optimizer)"),
        ("transformers.trainer", "callbacks=[airmoe.TrackOptimizerCallback()]"),
        ("lightning.pytorch.loops.optimization", "airmoe.track_optimizer(self, self.optimizers())"),
        ("pytorch_lightning", "airmoe.track_optimizer(self, self.optimizers())"),
        ("transformers.trainers_of_mine", "airmoe.track_optimizer(model, optimizer)"),
    ],
)
def test_untracked_training_warns_once_with_the_remedy_of_its_loop(
    package: str, remedy: str
) -> None:
    loop = "def train(backward, layer):\n    for index in range(6): backward(layer, index)"
    exec(loop, module := {"__name__": package})
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        module["train"](backward, build_layer("air"))
    told = [str(w.message) for w in caught if "without a tracked optimizer" in str(w.message)]
    assert len(told) == 1 and remedy in told[0]


def test_tracked_training_evaluation_and_other_routers_do_not_warn() -> None:
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        tracked, _, _owner = tracked_layer()
        for layer in (tracked, build_layer("air").eval(), build_layer("topk")):
            for index in range(4):
                layer(batch(index))


@every_optimizer
def test_training_in_evaluation_mode_is_untracked_training(kind: str) -> None:
    """Fine-tuning with dropout off: nothing is observed, but the centroids move."""
    layer = build_layer("air", jitter_std=0.0).eval()
    router, optimizer = air_of(layer), adamw(layer, kind)
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        backward(layer, 0)
        assert caught == []
        for index in range(1, 4):
            optimizer.step()
            backward(layer, index)
            assert torch.equal(router.shortlists(), plain_shortlists(router))
    told = [w for w in caught if "trained without a tracked optimizer" in str(w.message)]
    assert len(told) == len(caught) == 1


# -- evaluation -----------------------------------------------------------------------------


@pytest.mark.parametrize(("tracked", "lifetime"), [(True, 1), (True, 100), (False, 1)])
@every_optimizer
def test_evaluation_after_a_step_sees_the_new_centroids(
    kind: str, tracked: bool, lifetime: int
) -> None:
    layer = build_layer("air", jitter_std=0.5, refresh_every=lifetime)
    router, optimizer = air_of(layer), adamw(layer, kind)
    if tracked:
        airmoe.track_optimizer(layer, optimizer)
    before = None
    for index in range(3):
        train(layer.train(), optimizer, index)
        layer.eval()
        layer(batch(90))
        now = router.shortlists().clone()
        assert torch.equal(now, plain_shortlists(router))
        assert before is None or not torch.equal(now, before)
        before = now


@pytest.mark.parametrize("what", ["centroids", "codewords", "codebook"])
def test_changes_by_hand_and_by_calibration_are_seen_in_evaluation(what: str) -> None:
    router = build_router("air").eval()
    router(batch(0, 22))
    before = router.shortlists().clone()
    if what == "codebook":
        router.codebook.update(batch(1, 22))
    else:
        with torch.no_grad():
            (router.centroids if what == "centroids" else router.codebook.codewords).neg_()
        assert not torch.equal(router.shortlists(), before)
    assert torch.equal(router.shortlists(), plain_shortlists(router))


def test_observing_in_evaluation_mode_leaves_the_training_lists_alone() -> None:
    layer, router, optimizer = tracked_layer(jitter_std=2.0)
    backward(layer, 0)
    lists = router.shortlists().clone()
    optimizer.step()  # the training lists are due now
    layer.eval()
    router.observe(batch(1, 22))
    assert torch.equal(router.training_lists.experts, lists), "evaluation replaced them"
    layer.train()
    layer(batch(2))
    without_jitter = plain_shortlists(router)
    assert not torch.equal(router.shortlists(), without_jitter), "training lists lost their jitter"


@pytest.mark.parametrize("training", [True, False])
def test_lists_of_one_backend_get_what_the_other_needs(training: bool) -> None:
    """Triton sums by expert through a reverse index; shortlists stay those of this mode."""
    layer, router, _owner = tracked_layer(jitter_std=2.0)
    layer(batch(0))
    layer.train(training)(batch(1))
    expected = router.shortlists().clone()
    with use_backend("triton"):
        assert router.lists_due == "norms"
        plan = router.plan(router.read(batch(1, 22)))
    assert torch.equal(plan.experts, expected)
    wanted = make_reverse(expected, router.config.num_experts)
    assert_same((plan.entries, plan.starts), (wanted.entries, wanted.starts))


def test_evaluation_in_inference_mode_leaves_training_possible() -> None:
    layer, _, _owner = tracked_layer()
    with torch.inference_mode():
        layer.eval()
        layer(batch(0))
    layer.train()
    backward(layer, 1)
    layer.eval()
    layer(batch(2)).sum().backward()
