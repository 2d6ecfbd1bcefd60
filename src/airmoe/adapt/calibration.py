"""Fitting the codebooks of a model to its own activations, and the report of what they keep."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

from torch import nn

from airmoe.adapt.activations import HELD_OUT, Batch, collect, hold_out, next_token_loss
from airmoe.adapt.checks import check_model
from airmoe.adapt.fitting import (
    AirLayer,
    CalibratedLayer,
    Trial,
    codewords_to_try,
    find_layers,
    fit,
    measure,
    sizes_to_try,
    sum_over_ranks,
)
from airmoe.config import check_choice, check_count, check_number
from airmoe.errors import ConfigError
from airmoe.routers.codebook import Codebook

Criterion = Literal["overlap", "mass_recall"]


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
        rule = "must be <= 1, a share"
        raise ConfigError("calibrate.wanted_recall", wanted_recall, rule, "Lower it.")
    check_choice("calibrate.criterion", criterion, Criterion)
    check_count("calibrate.passes", passes)
    check_count("calibrate.max_tokens", max_tokens)
    check_count("calibrate.seed", seed, least=0)
    layers = find_layers(model)
    learned_from, held_out = hold_out(batches)
    few = -(-max_tokens // HELD_OUT)
    learned = collect(model, layers, learned_from, max_tokens - few, seed)
    measured = collect(model, layers, held_out, few, seed)
    counts = [
        (sum_over_ranks(ours.shape[0], layer.device), sum_over_ranks(others.shape[0], layer.device))
        for layer, ours, others in zip(layers, learned, measured, strict=True)
    ]
    _check_enough(layers, counts)
    reports: list[LayerReport] = []
    fitted: list[dict[int, Codebook]] = []  # by number of codewords
    for layer, ours, others, (count, _) in zip(layers, learned, measured, counts, strict=True):
        to_fit, to_measure = ours.to(layer.device), others.to(layer.device)
        codebooks, trials = {}, []
        for num_codewords in codewords_to_try(layer, count):
            codebook = fit(layer, to_fit, num_codewords, passes, seed)
            trials += measure(layer, codebook, to_measure, sizes_to_try(layer))
            codebooks[num_codewords] = codebook
        sizes = layer.num_codewords, layer.shortlist_size
        own = next(t for t in trials if (t.num_codewords, t.shortlist_size) == sizes)
        suggestion = cheapest(trials, float(wanted_recall), criterion)
        about = {"name": layer.name, "num_experts": layer.num_experts, "trials": tuple(trials)}
        reports.append(LayerReport(**asdict(own), **about, suggestion=suggestion))
        fitted.append(codebooks)
    report = CalibrationReport(tuple(reports), *counts[0], float(wanted_recall), criterion)
    report = replace(report, losses=_losses(model, layers, fitted, report, held_out))
    for layer, codebooks in zip(layers, fitted, strict=True):
        layer.install(codebooks[layer.num_codewords])
    return report


def _check_enough(layers: list[CalibratedLayer], counts: list[tuple[int, int]]) -> None:
    fewest = float("inf")
    for layer, (learned, measured) in zip(layers, counts, strict=True):
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
    calibrated, suggested = [], []
    for layer, codebooks, setting, found in zip(layers, fitted, own, report.layers, strict=True):
        trial = report.suggestion or found.suggestion
        present = codebooks[layer.num_codewords].to(layer.device)
        proposed = codebooks[trial.num_codewords].to(layer.device)
        calibrated.append(replace(setting, codebook=present))
        suggested.append(Setting(proposed, trial.shortlist_size, setting.top_k))
    losses = []
    try:
        for settings in (exact, fewer, calibrated, suggested):
            _apply(settings, routers)
            losses.append(next_token_loss(model, batches))
    finally:
        _apply(own, routers)
    if None in losses:
        return None
    if any(setting.top_k == 1 for setting in own):
        losses[1] = None
    return Losses(*losses)


def _apply(settings: list[Setting], routers: list[Any]) -> None:
    for setting, router in zip(settings, routers, strict=True):
        router.codebook, router.top_k = setting.codebook, setting.top_k
        router.shortlist_size = setting.shortlist_size
        router.train(router.training)  # forgets the lists of another codebook


# -- the report -----------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class LayerReport(Trial):
    """One router after calibration: what its own sizes keep, and what others would."""

    name: str
    num_experts: int
    trials: tuple[Trial, ...]  # its own sizes among them
    suggestion: Trial  # the cheapest that reaches the wanted recall, for this layer alone


@dataclass(frozen=True)
class Losses:
    """Next-token loss of the model on the held-out text, by how all its layers route."""

    exact: float  # over all experts
    fewer: float | None  # exactly, with K - 1 experts per token, for comparison; None for K = 1
    calibrated: float  # with the sizes it has
    suggested: float  # with the suggested sizes, or each layer's own where there are none for all


@dataclass(frozen=True)
class CalibrationReport:
    """`str(report)` is a table."""

    layers: tuple[LayerReport, ...]
    num_fitted: int  # tokens per layer that the codebooks learned from
    num_measured: int  # tokens per layer that the numbers were measured on
    wanted_recall: float
    criterion: Criterion
    losses: Losses | None = None  # None where the model gives no logits or has AirRouters

    @property
    def suggestion(self) -> Trial | None:
        """The cheapest tried sizes that reach the wanted recall in every layer.

        None where the layers are not of one kind, so that no pair was tried in all of them.
        """
        common: dict[tuple[int, int], list[Trial]] = {}
        for layer in self.layers:
            for trial in layer.trials:
                sizes = (trial.num_codewords, trial.shortlist_size)
                common.setdefault(sizes, []).append(trial)
        worst = [
            min(trials, key=lambda trial: getattr(trial, self.criterion))
            for trials in common.values()
            if len(trials) == len(self.layers)
        ]
        reached = any(getattr(trial, self.criterion) >= self.wanted_recall for trial in worst)
        return cheapest(worst, self.wanted_recall, self.criterion) if reached else None

    def __str__(self) -> str:
        wanted = f"{self.criterion.replace('_', ' ')} {self.wanted_recall:g}"
        head = ("layer", "experts", "G", "M", "scored", "overlap", "mass recall", "bound")
        rows = [(*head, f"for {wanted}"), *(self._row(layer) for layer in self.layers)]
        widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
        lines = [
            f"Codebooks fitted on {self.num_fitted:,} tokens per layer, "
            f"measured on {self.num_measured:,} others."
        ]
        for name, *cells in rows:
            right = (cell.rjust(width) for cell, width in zip(cells, widths[1:], strict=True))
            lines.append("  ".join((name.ljust(widths[0]), *right)))
        return "\n".join((*lines, self._advice(wanted), *self._costs()))

    def _row(self, layer: LayerReport) -> tuple[str, ...]:
        found = layer.suggestion
        kept = getattr(found, self.criterion)
        return (
            layer.name,
            f"{layer.num_experts:,}",
            f"{layer.num_codewords:,}",
            f"{layer.shortlist_size:,}",
            f"{layer.scored / layer.num_experts:.0%}",
            f"{layer.overlap:.3f}",
            f"{layer.mass_recall:.3f}",
            f"{layer.bound:.2g}",
            f"G={found.num_codewords} M={found.shortlist_size} ({kept:.3f})",
        )

    def _advice(self, wanted: str) -> str:
        found = self.suggestion
        if found is None:
            return "No one pair of sizes was tried in all layers: see the last column."
        experts = self.layers[0].num_experts
        advice = (
            f"For {wanted} in every layer: num_codewords={found.num_codewords}, "
            f"shortlist_size={found.shortlist_size} (worst layer "
            f"{getattr(found, self.criterion):.3f}), {found.scored:,} products per token "
            f"instead of {experts:,}."
        )
        if found.scored >= experts:
            advice += " That saves nothing: for this recall the model has too few experts."
        return advice

    def _costs(self) -> list[str]:
        """What that costs in loss."""
        if self.losses is None:
            return []
        exact = self.losses.exact
        named = {"suggested sizes": self.losses.suggested, "current sizes": self.losses.calibrated}
        if self.losses.fewer is not None:
            named["exact routing with K - 1 experts"] = self.losses.fewer
        costs = ", ".join(f"{name} {loss - exact:+.4f}" for name, loss in named.items())
        return [f"Held-out loss {exact:.4f}; {costs}."]


def cheapest(trials: Sequence[Trial], wanted: float, criterion: Criterion) -> Trial:
    """The fewest products among those that reach `wanted`; with all experts every one does."""
    enough = [trial for trial in trials if getattr(trial, criterion) >= wanted]
    return min(enough, key=lambda trial: (trial.scored, -getattr(trial, criterion)))
