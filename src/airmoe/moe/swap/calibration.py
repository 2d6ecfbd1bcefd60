"""Fitting the codebooks of a model to its own activations."""

from __future__ import annotations

import math
import warnings
from collections.abc import Iterable

import torch
from torch import Tensor, nn

from airmoe.config import check_choice, check_count, check_number
from airmoe.distributed import all_reduce_sum
from airmoe.errors import ConfigError
from airmoe.moe.model_check import check_model
from airmoe.moe.swap.activations import Batch, collect
from airmoe.moe.swap.layers import Layer, find_layers
from airmoe.moe.swap.report import CalibrationReport, Criterion, LayerReport, Trial
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

HELD_OUT = 4  # every fourth token is kept for measuring


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
    once, without gradients, while its swapped routers score every expert; an even sample of at
    most `max_tokens` hidden states per router is kept. On three quarters of them each codebook
    is fitted by `passes` steps of k-means; the rest measures it, and tries other sizes: the report
    suggests those that keep `wanted_recall` of the exact top-K ("overlap") or of the whole routing
    distribution ("mass_recall", hard to keep where the distribution is flat). No weight is
    touched, and an error leaves the codebooks as they were. In a process group every rank must
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
    samples = collect(model, layers, batches, max_tokens, seed)
    _check_enough(layers, samples)
    wanted = (float(wanted_recall), criterion)
    reports, fitted = [], []
    for layer, sample in zip(layers, samples, strict=True):
        codebook, quality, trials = _calibrate(layer, sample, passes, seed)
        reports.append(_report(layer, quality, trials, *wanted))
        fitted.append(codebook)
    for layer, codebook in zip(layers, fitted, strict=True):
        layer.install(codebook)
    return CalibrationReport(tuple(reports), *_counts(layers[0], samples[0]), *wanted)


@torch.no_grad()
def _calibrate(
    layer: Layer, sample: Tensor, passes: int, seed: int
) -> tuple[Codebook, Quality, list[Trial]]:
    """The fitted codebook of the layer's own size, what it keeps, and what other sizes keep."""
    learned, measured = (part.to(_device(layer)) for part in _split(sample))
    trials, own = [], None
    for num_codewords in codewords_to_try(layer, _counts(layer, sample)[0]):
        codebook = fit(layer, learned, num_codewords, passes, seed)
        trials += recalls(layer, codebook, measured, sizes_to_try(layer))
        if num_codewords == layer.num_codewords:
            own = codebook
    assert own is not None
    return own, measure(layer, own, measured, layer.shortlist_size), trials


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


def _counts(layer: Layer, sample: Tensor) -> tuple[int, int]:
    """Tokens of all ranks (to learn from, to measure on)."""
    learned, measured = (over_ranks(part.shape[0], _device(layer)) for part in _split(sample))
    return learned, measured


def _split(sample: Tensor) -> tuple[Tensor, Tensor]:
    """(to learn from, to measure on)"""
    held_out = torch.arange(sample.shape[0]) % HELD_OUT == HELD_OUT - 1
    return sample[~held_out], sample[held_out]


def _check_enough(layers: list[Layer], samples: list[Tensor]) -> None:
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
