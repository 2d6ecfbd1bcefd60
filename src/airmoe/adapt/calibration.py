"""Fitting the codebooks of a model to its own activations."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from airmoe.adapt.activations import HELD_OUT, Batch, collect, hold_out, next_token_loss
from airmoe.adapt.checks import check_model
from airmoe.adapt.layers import AirLayer, CalibratedLayer, find_layers
from airmoe.adapt.report import CalibrationReport, Criterion, LayerReport, Losses, Trial
from airmoe.adapt.trials import (
    codewords_to_try,
    fit,
    measure,
    sizes_to_try,
    sum_over_ranks,
)
from airmoe.config import check_choice, check_count, check_number
from airmoe.errors import ConfigError
from airmoe.routers.codebook import Codebook


@dataclass(frozen=True)
class Activations:
    """The hidden states one router got."""

    learned: Tensor  # [n, D], to fit the codebook
    measured: Tensor  # [m, D], to measure it

    def counts(self, layer: CalibratedLayer) -> tuple[int, int]:
        """(n, m) over all ranks."""
        learned, measured = self.learned.shape[0], self.measured.shape[0]
        return sum_over_ranks(learned, layer.device), sum_over_ranks(measured, layer.device)


def calibrate(
    model: nn.Module,
    batches: Iterable[Batch],
    *,
    wanted_recall: float = 0.95,
    criterion: Criterion = "overlap",
    passes: int = 10,
    max_tokens: int = 16_384,
    seed: int = 0,
) -> CalibrationReport:
    """Fit every codebook of a model (swapped routers, AirRouters) and report what it keeps.

    `batches` are id tensors [batch, length] or dicts of the model's inputs. The model reads them
    without gradients, while its swapped routers score every expert; an even sample of at most
    `max_tokens` hidden states per router is kept. Every fourth batch is held out (of a single
    batch every fourth sequence): on the others each codebook is fitted by `passes` steps of
    k-means; the held-out ones measure it, and try other sizes: the report suggests those that
    keep `wanted_recall` of the exact top-K ("overlap") or of the whole routing distribution
    ("mass_recall", hard to keep where the distribution is flat). If all routers are swapped ones,
    the model reads the held-out batches four more times, for the losses in the report. No weight
    is touched, and an error leaves the codebooks as they were. In a process group every rank must
    call it, with text of its own: they learn from the tokens of all and get the same report.
    """
    check_model("calibrate.model", model)
    check_number("calibrate.wanted_recall", wanted_recall, strict=True)
    if wanted_recall > 1:
        raise ConfigError(
            "calibrate.wanted_recall", wanted_recall, "must be <= 1, a share", "Lower it."
        )
    check_choice("calibrate.criterion", criterion, Criterion)
    check_count("calibrate.passes", passes)
    check_count("calibrate.max_tokens", max_tokens)
    check_count("calibrate.seed", seed, least=0)
    layers = find_layers(model)
    wanted = (float(wanted_recall), criterion)
    few = -(-max_tokens // HELD_OUT)
    learned, held_out = hold_out(batches)
    parts = ((learned, max_tokens - few), (held_out, few))
    samples = zip(*(collect(model, layers, *part, seed) for part in parts), strict=True)
    activations = [Activations(*sample) for sample in samples]
    _check_enough(layers, activations)
    reports, fitted = [], []
    for layer, states in zip(layers, activations, strict=True):
        codebooks, trials = _fit_layer(layer, states, passes, seed)
        sizes = (layer.num_experts, layer.num_codewords, layer.shortlist_size)
        reports.append(LayerReport(layer.name, *sizes, trials, *wanted))
        fitted.append(codebooks)
    report = CalibrationReport(tuple(reports), *activations[0].counts(layers[0]), *wanted)
    report = replace(report, losses=_losses(model, layers, fitted, report, held_out))
    for layer, codebooks in zip(layers, fitted, strict=True):
        layer.install(codebooks[layer.num_codewords])
    return report


@torch.no_grad()
def _fit_layer(
    layer: CalibratedLayer, states: Activations, passes: int, seed: int
) -> tuple[dict[int, Codebook], tuple[Trial, ...]]:
    """Fitted codebooks by size, and what each keeps with every size of shortlist."""
    learned, measured = states.learned.to(layer.device), states.measured.to(layer.device)
    trials: list[Trial] = []
    codebooks: dict[int, Codebook] = {}
    for num_codewords in codewords_to_try(layer, states.counts(layer)[0]):
        codebook = fit(layer, learned, num_codewords, passes, seed)
        trials += measure(layer, codebook, measured, sizes_to_try(layer))
        codebooks[num_codewords] = codebook
    return codebooks, tuple(trials)


def _check_enough(layers: list[CalibratedLayer], activations: list[Activations]) -> None:
    fewest = float("inf")
    for layer, states in zip(layers, activations, strict=True):
        learned, measured = states.counts(layer)
        if learned < layer.num_codewords or measured == 0:
            least = -(-layer.num_codewords * HELD_OUT // (HELD_OUT - 1)) + HELD_OUT
            raise ConfigError(
                "calibrate.batches",
                f"{learned + measured} tokens for {layer.name!r}",
                f"must show each router at least {least} tokens, more than one per codeword",
                "Pass more text, raise max_tokens, or swap with fewer codewords.",
            )
        fewest = min(fewest, learned / layer.num_codewords)
    if fewest < 4:
        warnings.warn(
            f"calibrate: {fewest:.1f} tokens per codeword are few to learn from. Pass more "
            "text, or swap with fewer codewords.",
            stacklevel=3,
        )


# -- what it costs in loss ------------------------------------------------------------------------


@dataclass(frozen=True)
class Setting:
    """How one swapped router routes."""

    codebook: Any
    shortlist_size: int
    top_k: int


def _losses(
    model: nn.Module,
    layers: list[CalibratedLayer],
    fitted: list[dict[int, Codebook]],
    report: CalibrationReport,
    batches: list[Batch],
) -> Losses | None:
    """Held-out loss of the model with each setting in turn; None where it can't be told."""
    if any(isinstance(layer, AirLayer) for layer in layers):
        return None
    routers = [layer.router for layer in layers]
    own = [Setting(router.codebook, router.shortlist_size, router.top_k) for router in routers]
    exact = [
        replace(setting, shortlist_size=layer.num_experts)
        for setting, layer in zip(own, layers, strict=True)
    ]
    fewer = [replace(setting, top_k=max(1, setting.top_k - 1)) for setting in exact]

    def with_sizes(sizes: Iterable[tuple[int, int]]) -> list[Setting]:
        return [
            Setting(codebooks[count].to(layer.device), size, setting.top_k)
            for layer, codebooks, setting, (count, size) in zip(
                layers, fitted, own, sizes, strict=True
            )
        ]

    suggestions = [report.suggestion or layer.suggestion for layer in report.layers]
    settings = (
        exact,
        fewer,
        with_sizes((layer.num_codewords, layer.shortlist_size) for layer in layers),
        with_sizes((trial.num_codewords, trial.shortlist_size) for trial in suggestions),
    )
    losses = []
    for setting in settings:
        with _routing(routers, setting):
            losses.append(next_token_loss(model, batches))
    if None in losses:
        return None
    if any(setting.top_k == 1 for setting in own):
        losses[1] = None
    return Losses(*losses)


@contextmanager
def _routing(routers: list[Any], settings: list[Setting]) -> Iterator[None]:
    """Route by these settings for a while."""
    own = [Setting(router.codebook, router.shortlist_size, router.top_k) for router in routers]
    flags = [router.training for router in routers]
    try:
        _apply(routers, settings)
        yield
    finally:
        _apply(routers, own)
        for router, flag in zip(routers, flags, strict=True):
            router.train(flag)


def _apply(routers: list[Any], settings: list[Setting]) -> None:
    for router, setting in zip(routers, settings, strict=True):
        router.codebook, router.top_k = setting.codebook, setting.top_k
        router.shortlist_size = setting.shortlist_size
        router.eval()  # forgets the lists of another codebook
