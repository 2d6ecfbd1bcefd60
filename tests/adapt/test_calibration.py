"""Calibration: codebooks learn, weights do not move, and the report says what is measured."""

from __future__ import annotations

import copy
import functools
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import AutoModelForCausalLM

import airmoe
from airmoe import ConfigError, GranularExperts, MoELayer
from airmoe.adapt.fitting import AirLayer, fit
from tests.adapt.models import (
    BATCHES,
    BUILD,
    VOCAB,
    air,
    build,
    calibrated,
    fresh,
    granular,
    ids,
    logits_of,
    swap,
    swapped_routers,
)
from tests.model.common import build as own_model
from tests.state.common import assert_same

EXPERTS, SIZE, CODEWORDS, TOP_K = 64, 8, 16, 4  # M = E / 8


def sentences(seed: int, batch: int = 16, length: int = 24) -> Tensor:
    """Text with structure: a word is one of three that may follow the last, by a fixed table."""
    followers = torch.randint(VOCAB, (VOCAB, 3), generator=torch.Generator().manual_seed(7))
    generator = torch.Generator().manual_seed(seed)
    words = [torch.randint(VOCAB, (batch,), generator=generator)]
    for _ in range(length - 1):
        turn = torch.randint(3, (batch,), generator=generator)
        words.append(followers[words[-1], turn])
    return torch.stack(words, dim=1)


@functools.cache
def trained() -> Any:
    """A Qwen3-MoE of 64 experts that has read some of that text."""
    torch.manual_seed(0)
    sizes = {"num_experts": EXPERTS, "num_experts_per_tok": TOP_K}
    model = fresh("qwen3_moe", **sizes, output_router_logits=True)
    model.set_experts_implementation("batched_mm")
    optimizer = torch.optim.AdamW(model.parameters(), lr=5e-3)
    losses = []
    for step in range(120):
        text = sentences(100 + step)
        loss = model(text, labels=text).loss
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    assert losses[-1] < 0.6 * losses[0]
    return model.eval()


TEXT = [sentences(seed) for seed in range(8)]


@functools.cache
def report_of() -> tuple[Any, Any]:
    model = copy.deepcopy(trained())
    airmoe.swap_routers(model, num_codewords=CODEWORDS, shortlist_size=SIZE)
    return model, airmoe.calibrate(model, TEXT)


def seen_by(model: Any, router: nn.Module, text: Tensor) -> Tensor:
    seen: list[Tensor] = []
    with router.register_forward_pre_hook(lambda _module, args: seen.append(args[0])):
        logits_of(model, text)
    return seen[0].reshape(-1, seen[0].shape[-1])


@pytest.mark.slow
def test_a_trained_model_keeps_its_experts() -> None:
    """At least 3 times the overlap of random shortlists, on unseen text."""
    model, report = report_of()
    chance = SIZE / EXPERTS
    for layer, router in zip(report.layers, swapped_routers(model), strict=True):
        assert layer.overlap >= 3 * chance
        hidden = seen_by(model, router, sentences(60))
        exact = router.full_logits(hidden).topk(TOP_K).indices
        _, _, chosen = router(hidden)
        fresh = (exact[:, :, None] == chosen[:, None]).any(-1).float().mean()
        assert fresh >= 3 * chance
        assert float(fresh) == pytest.approx(layer.overlap, abs=0.1)
        assert 0 <= layer.bound <= layer.mass_recall <= 1


@pytest.mark.parametrize("family", BUILD)
def test_weights_and_modes_stay(family: str) -> None:
    model = swap(build(family)).train()
    model.model.layers[0].eval()
    flags = [module.training for module in model.modules()]
    before = {k: v.clone() for k, v in model.state_dict().items() if "codebook" not in k}
    random = torch.get_rng_state()
    airmoe.calibrate(model, BATCHES, passes=2)
    assert torch.equal(torch.get_rng_state(), random)
    assert_same({name: model.state_dict()[name] for name in before}, before)
    assert flags == [module.training for module in model.modules()]
    assert all(weight.grad is None for weight in model.parameters())
    assert all(router.codebook.initialized for router in swapped_routers(model))
    assert not any(router._forward_pre_hooks for router in swapped_routers(model))


def test_calibrating_again_gives_the_same() -> None:
    """The codebook is fitted to exact routing, whatever it was before."""
    model = calibrated("mixtral")
    before = copy.deepcopy(model.state_dict())
    airmoe.calibrate(model, iter(BATCHES), passes=3)  # an iterator is read once
    assert_same(model.state_dict(), before)


def test_suggestions_are_measured() -> None:
    """Each trial's recall is what a swap with these sizes then gives."""
    _, report = report_of()
    found = report.suggestion
    assert found is not None and found.overlap >= 0.95 and found.shortlist_size < EXPERTS
    assert {trial.num_codewords for trial in report.layers[0].trials} == {4, 8, 16, 32}
    model = copy.deepcopy(trained())
    airmoe.swap_routers(
        model, num_codewords=found.num_codewords, shortlist_size=found.shortlist_size
    )
    second = airmoe.calibrate(model, TEXT)
    now = [layer.overlap for layer in second.layers]
    assert min(now) == pytest.approx(found.overlap, abs=1e-5)
    for layer in report.layers:
        enough = [trial for trial in layer.trials if trial.overlap >= 0.95]
        assert layer.suggestion.scored == min(trial.scored for trial in enough)


def test_the_report_reads_well() -> None:
    model, report = report_of()
    text = str(report)
    assert "tokens per layer" in text and "model.layers.1.mlp.gate" in text
    assert report.num_fitted + report.num_measured == 8 * 16 * 24
    found = report.suggestion
    assert f"num_codewords={found.num_codewords}, shortlist_size={found.shortlist_size}" in text
    assert max(map(len, text.splitlines()[:-2])) <= 120
    strict: Any = airmoe.calibrate(copy.deepcopy(model), TEXT, criterion="mass_recall")
    assert strict.suggestion.shortlist_size > 0.9 * EXPERTS  # a flat distribution
    assert "for mass recall 0.95" in str(strict) and "saves nothing" in str(strict)


def test_layers_of_our_own() -> None:
    """In a model whose input has a name of its own."""
    sizes = {"num_experts": 40, "top_k": 4, "num_codewords": 5, "shortlist_size": 10}
    layers = [MoELayer(air(dim=16, **sizes).build(), GranularExperts(40, 16)) for _ in range(2)]
    model: Any = nn.Sequential(nn.Embedding(VOCAB, 16), *layers).eval()
    first, second = (layer.router for layer in model[1:])
    learned = torch.cat([batch for place, batch in enumerate(BATCHES) if place % 4 != 3])
    with torch.no_grad():
        states = model[:2](learned).reshape(-1, 16)
        expected = fit(AirLayer(second), states, 5, passes=10, seed=1).codewords
        codebook, seed = first.codebook, first.codebook.seed.clone()
    report = airmoe.calibrate(model, BATCHES, seed=1)
    assert [layer.name for layer in report.layers] == ["1.router", "2.router"]
    assert all(layer.overlap > 0.4 for layer in report.layers) and report.losses is None
    assert not first._forward_pre_hooks and codebook.initialized
    assert torch.equal(codebook.seed, seed)  # that of the noise
    torch.testing.assert_close(second.codebook.codewords, expected, rtol=0, atol=1e-4)
    moved = codebook.codewords.clone()
    airmoe.calibrate(model, BATCHES[:3])
    assert not torch.equal(codebook.codewords, moved)
    model.train()(BATCHES[0]).sum().backward()  # and training goes on from there
    assert codebook.updates > 0 and first.micro_batches == 1


def test_the_project_s_own_model() -> None:
    model = own_model("air", vocab_size=VOCAB)
    (layer,) = airmoe.calibrate(model, BATCHES).layers
    router: Any = model.get_submodule(layer.name)
    shortlist_size = router.config.shortlist_size
    assert router.codebook.initialized and layer.shortlist_size == shortlist_size
    assert layer.overlap > 0.3


def test_padding_in_swapped_networks() -> None:
    """Whatever the padding holds; calibration and layer leave it out by means of their own."""
    mask = torch.ones(8, 12, dtype=torch.int64)
    mask[:5, :4] = 0
    batches = [
        {"input_ids": ids(batch=8).masked_fill(mask == 0, filler), "attention_mask": mask}
        for filler in (0, 7)
    ]
    first, second = (airmoe.calibrate(granular(), [batch]) for batch in batches)
    assert first == second and first.num_fitted + first.num_measured == int(mask.sum())


@pytest.mark.parametrize(
    ("batches", "options", "match"),
    [
        ([], {}, "got \"0 tokens for 'model.layers.0.mlp.gate'"),
        ([torch.zeros(1, 40, dtype=torch.int64)], {}, "in two sequences or more"),
        ([torch.zeros(2, 4, dtype=torch.int64)], {}, "must show each router at least 26 tokens"),
        ([torch.zeros(4, dtype=torch.int64)], {}, r"shape \[batch, length\]"),
        ([["text"]], {}, "id tensors or dicts"),
        ({"input_ids": BATCHES[0]}, {}, r"got 'dict', must be a list .* pass \[batch\]"),
        (None, {}, "got 'NoneType', must be a list"),
        (BATCHES, {"wanted_recall": 1.5}, "wanted_recall: got 1.5"),
        (BATCHES, {"wanted_recall": 0.0}, "wanted_recall: got 0.0"),
        (BATCHES[0], {}, "got 'Tensor', must be a list"),
        (BATCHES, {"criterion": "recall"}, "criterion: got 'recall'"),
        (BATCHES, {"passes": 0}, "passes: got 0"),
        (BATCHES, {"max_tokens": -1}, "max_tokens: got -1"),
    ],
)
def test_bad_input_changes_nothing(batches: Any, options: Any, match: str) -> None:
    model = swap(build("mixtral"), num_codewords=16)
    before = copy.deepcopy(model.state_dict())
    with pytest.raises(ConfigError, match=match):
        airmoe.calibrate(model, batches, **options)
    assert_same(model.state_dict(), before)
    router = swapped_routers(model)[0]
    assert router.shortlist_size == 8 and not router._forward_pre_hooks


def test_a_model_without_codebooks() -> None:
    with pytest.raises(ConfigError, match="must have routers with a codebook"):
        airmoe.calibrate(build("mixtral"), BATCHES)


def test_each_router_needs_tokens_for_its_own_codewords() -> None:
    model = swap(build("deepseek_v3"))
    airmoe.swap_ffn(model, layers=[0], router=air(num_codewords=1000))
    with pytest.raises(ConfigError, match=r"216 tokens for 'model\.layers\.0\.mlp\.router'"):
        airmoe.calibrate(model, BATCHES)


def test_few_tokens_give_a_warning() -> None:
    model = swap(build("mixtral"), num_codewords=16)
    with pytest.warns(UserWarning, match=r"1\.5 tokens per codeword"):
        airmoe.calibrate(model, [ids(1)], passes=1)


def test_losses_are_those_of_the_model_with_these_sizes() -> None:
    """On the held-out text: exact, with one expert less, as it is, and as suggested."""
    _, report = report_of()
    held_out = torch.cat([TEXT[3], TEXT[7]])

    def loss(**sizes: Any) -> float:
        other = copy.deepcopy(trained())
        if "top_k" in sizes:
            for module in other.modules():
                if hasattr(module, "top_k"):
                    module.top_k = sizes["top_k"]
        elif sizes:
            airmoe.swap_routers(other, **sizes)
            airmoe.calibrate(other, TEXT)
        logits = logits_of(other, held_out)
        return float(
            nn.functional.cross_entropy(logits[:, :-1].flatten(0, 1), held_out[:, 1:].flatten())
        )

    sizes = report.suggestion
    assert report.losses is not None
    assert report.losses.exact == pytest.approx(loss(), abs=1e-4)
    assert report.losses.fewer == pytest.approx(loss(top_k=TOP_K - 1), abs=1e-4)
    assert report.losses.fewer != pytest.approx(report.losses.exact, abs=1e-4)
    now = loss(num_codewords=CODEWORDS, shortlist_size=SIZE)
    assert report.losses.calibrated == pytest.approx(now, abs=1e-4)
    suggested = loss(num_codewords=sizes.num_codewords, shortlist_size=sizes.shortlist_size)
    assert report.losses.suggested == pytest.approx(suggested, abs=1e-4)
    cost = f"suggested sizes {report.losses.suggested - report.losses.exact:+.4f}"
    assert cost in str(report) and "current sizes +" in str(report)
    assert "exact routing with K - 1 experts +" in str(report)


def test_offloaded_models_are_refused(tmp_path: Path) -> None:
    """Offloaded weights come back for a forward only, and buffers of a codebook never."""
    calibrated("mixtral").save_pretrained(tmp_path)
    parts = ("embed_tokens", "rotary_emb", "layers.1", "norm")
    places = {**{f"model.{part}": "cpu" for part in parts}, "lm_head": "cpu"}
    options: Any = {
        "device_map": {**places, "model.layers.0": "disk"},
        "offload_folder": tmp_path / "offloaded",
    }
    expected = logits_of(calibrated("mixtral"))
    model: Any = AutoModelForCausalLM.from_pretrained(tmp_path, **options)
    assert torch.equal(logits_of(model), expected)
    with pytest.raises(ConfigError, match=r"'model\.layers\.0\.mlp\.gate' on the meta device"):
        airmoe.calibrate(model, BATCHES)
    assert torch.equal(logits_of(model), expected)
    model = AutoModelForCausalLM.from_pretrained(tmp_path, offload_buffers=True, **options)
    with pytest.raises(ConfigError, match="without offload_buffers=True"):
        logits_of(model)
