"""Fitting the codebooks of a model to its own activations."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from airmoe.config import check_choice, check_count, check_number
from airmoe.distributed import all_reduce_sum
from airmoe.errors import ConfigError
from airmoe.moe.model_check import check_model
from airmoe.moe.swap.activations import HELD_OUT, Batch, collect, hold_out, next_token_loss
from airmoe.moe.swap.layers import Layer, SwappedLayer, find_layers
from airmoe.moe.swap.report import (
    CalibrationReport,
    Criterion,
    LayerReport,
    Losses,
    Trial,
)
from airmoe.moe.swap.trials import (
    Quality,
    codewords_to_try,
    fit,
    measure,
    over_ranks,
    recalls,
    sizes_to_try,
)
from airmoe.routers.codebook import Codebook

Split = tuple[Tensor, Tensor]  # hidden states [n, D] to learn from, and to measure on


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
    few = -(-max_tokens // HELD_OUT)
    learned, held_out = hold_out(batches)
    parts = ((learned, max_tokens - few), (held_out, few))
    samples = list(zip(*(collect(model, layers, *part, seed) for part in parts), strict=True))
    _check_enough(layers, samples)
    wanted = (float(wanted_recall), criterion)
    reports, fitted = [], []
    for layer, sample in zip(layers, samples, strict=True):
        codebooks, quality, trials = _calibrate(layer, sample, passes, seed)
        reports.append(_report(layer, quality, trials, *wanted))
        fitted.append(codebooks)
    report = CalibrationReport(tuple(reports), *_counts(layers[0], samples[0]), *wanted)
    report = replace(report, losses=_losses(model, layers, fitted, report, held_out))
    for layer, codebooks in zip(layers, fitted, strict=True):
        layer.install(codebooks[layer.num_codewords])
    return report


def _losses(
    model: nn.Module,
    layers: list[Layer],
    fitted: list[dict[int, Codebook]],
    report: CalibrationReport,
    batches: list[Batch],
) -> Losses | None:
    """Of the model itself with each setting in turn, which is taken back again."""
    routers = [layer.module for layer in layers if isinstance(layer, SwappedLayer)]
    if len(routers) < len(layers):
        return None
    own = [(router.codebook, router.shortlist_size, router.top_k) for router in routers]

    def loss(settings: list[tuple[Any, int, int]]) -> float | None:
        for router, setting in zip(routers, settings, strict=True):
            router.codebook, router.shortlist_size, router.top_k = setting
            router.eval()  # lists of another codebook are not this one's
        return next_token_loss(model, batches)

    def with_sizes(trials: list[Trial]) -> list[tuple[Any, int, int]]:
        return [
            (books[trial.num_codewords].to(_device(layer)), trial.shortlist_size, top_k)
            for layer, books, trial, (_, _, top_k) in zip(layers, fitted, trials, own, strict=True)
        ]

    flags = [router.training for router in routers]
    suggestions = [report.suggestion or layer.suggestion for layer in report.layers]
    present = [Trial(layer.num_codewords, layer.shortlist_size, 0, 0, 0) for layer in report.layers]
    everything = [
        (book, router.num_experts, top_k)
        for router, (book, _, top_k) in zip(routers, own, strict=True)
    ]
    fewer = [(book, size, max(1, top_k - 1)) for book, size, top_k in everything]
    try:
        settings = (everything, fewer, with_sizes(present), with_sizes(suggestions))
        found = [loss(setting) for setting in settings]
    finally:
        for router, setting, flag in zip(routers, own, flags, strict=True):
            router.codebook, router.shortlist_size, router.top_k = setting
            router.train(flag)
    exact, one_less, calibrated, suggested = found
    if exact is None or calibrated is None or suggested is None:
        return None
    single = any(top_k == 1 for _, _, top_k in own)
    return Losses(exact, None if single else one_less, calibrated, suggested)


@torch.no_grad()
def _calibrate(
    layer: Layer, sample: Split, passes: int, seed: int
) -> tuple[dict[int, Codebook], Quality, list[Trial]]:
    """Fitted codebooks by size, what that of the layer's own keeps, and what other sizes keep."""
    learned, measured = (part.to(_device(layer)) for part in sample)
    trials: list[Trial] = []
    codebooks: dict[int, Codebook] = {}
    for num_codewords in codewords_to_try(layer, _counts(layer, sample)[0]):
        codebook = fit(layer, learned, num_codewords, passes, seed)
        trials += recalls(layer, codebook, measured, sizes_to_try(layer))
        codebooks[num_codewords] = codebook
    own = codebooks[layer.num_codewords]
    return codebooks, measure(layer, own, measured, layer.shortlist_size), trials


def _report(
    layer: Layer, quality: Quality, trials: list[Trial], wanted_recall: float, criterion: Criterion
) -> LayerReport:
    return LayerReport(
        name=layer.name,
        num_experts=layer.num_experts,
        num_codewords=layer.num_codewords,
        shortlist_size=layer.shortlist_size,
        overlap=_mean(quality.overlap),
        mass_recall=_mean(quality.mass_recall),
        bound=_mean(quality.bound),
        trials=tuple(trials),
        wanted_recall=wanted_recall,
        criterion=criterion,
    )


def _mean(values: Tensor) -> float:
    """Over the tokens of all ranks."""
    total = all_reduce_sum(values.sum(dtype=torch.float64))
    return float(total / over_ranks(values.shape[0], values.device))


def _device(layer: Layer) -> torch.device:
    return next(layer.module.parameters()).device


def _counts(layer: Layer, sample: Split) -> tuple[int, int]:
    """Tokens of all ranks (to learn from, to measure on)."""
    learned, measured = (over_ranks(part.shape[0], _device(layer)) for part in sample)
    return learned, measured


def _check_enough(layers: list[Layer], samples: list[Split]) -> None:
    tightest = math.inf
    for layer, sample in zip(layers, samples, strict=True):
        learned, measured = _counts(layer, sample)
        if learned < layer.num_codewords or measured == 0:
            least = -(-layer.num_codewords * HELD_OUT // (HELD_OUT - 1)) + HELD_OUT
            raise ConfigError(
                "calibrate.batches",
                f"{learned + measured} tokens for {layer.name!r}",
                f"must show each router at least {least} tokens, more than one per codeword",
                "Pass more text, raise max_tokens, or swap with fewer codewords.",
            )
        tightest = min(tightest, learned / layer.num_codewords)
    if tightest < 4:
        warnings.warn(
            f"calibrate: {tightest:.1f} tokens per codeword are few to learn from. Pass more "
            "text, or swap with fewer codewords.",
            stacklevel=3,
        )
