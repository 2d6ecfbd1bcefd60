"""Fitting the codebooks of a model to its own hidden states, and the report of what they keep."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from operator import attrgetter
from typing import Any, Literal

import torch
from torch import Tensor, nn

from airmoe.adapt import fitting
from airmoe.adapt.activations import HELD_OUT, Batch, changed, collect, hold_out, next_token_loss
from airmoe.adapt.fitting import AirLayer, Trial
from airmoe.adapt.router_swap import check_is_model
from airmoe.config import check_choice, check_count, check_number
from airmoe.distributed import all_reduce_sum
from airmoe.errors import ConfigError
from airmoe.metrics.quality import mode_of
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
    k-means; the held-out ones measure it, and try other sizes: the report suggests the cheapest
    that keep `wanted_recall` of the exact top-K ("overlap") or of the whole routing distribution
    ("mass_recall", hard to keep where the distribution is flat). If all routers are swapped ones,
    the model reads the held-out batches four more times, for the losses in the report. No weight
    is touched, and an error leaves the codebooks as they were. In a process group every rank must
    call it, with text of its own: they learn from the tokens of all and get the same report.
    """
    check_is_model("calibrate.model", model)
    check_number("calibrate.wanted_recall", wanted_recall, strict=True)
    if wanted_recall > 1:
        rule = "must be <= 1, a share"
        raise ConfigError("calibrate.wanted_recall", wanted_recall, rule, "Lower it.")
    check_choice("calibrate.criterion", criterion, Criterion)
    check_count("calibrate.passes", passes)
    check_count("calibrate.max_tokens", max_tokens)
    check_count("calibrate.seed", seed, least=0)
    layers = fitting.find_layers(model)
    routers = [*layers.values()]
    learned_from, held_out = hold_out(batches)
    few = -(-max_tokens // HELD_OUT)
    with mode_of(model, training=False), torch.no_grad():
        learned = collect(model, routers, learned_from, max_tokens - few, seed)
        measured = collect(model, routers, held_out, few, seed)
        counts = _count_tokens(layers, learned, measured)
        fitted: list[dict[int, Codebook]] = []  # by number of codewords
        reports: list[LayerReport] = []
        for (name, router), ours, others, (num_tokens, _) in zip(
            layers.items(), learned, measured, counts, strict=True
        ):
            codebooks: dict[int, Codebook] = {}
            trials: list[Trial] = []
            for count in fitting.codewords_to_try(router.codebook.num_codewords, num_tokens):
                codebooks[count] = fitting.fit(router, ours, count, passes, seed)
                sizes = fitting.sizes_to_try(router)
                trials += fitting.measure(router, codebooks[count], others, sizes)
            fitted.append(codebooks)
            reports.append(_report_layer(name, router, trials, wanted_recall, criterion))
        num_fitted, num_measured = map(min, zip(*counts, strict=True))
        report = CalibrationReport(
            tuple(reports), num_fitted, num_measured, wanted_recall, criterion
        )
        report = replace(report, losses=_losses(model, routers, fitted, report, held_out))
    for router, codebooks in zip(routers, fitted, strict=True):
        codebook = router.codebook
        state = codebooks[codebook.num_codewords].state_dict()
        # The seed is that of the noise, which is not learned.
        codebook.load_state_dict({**state, "seed": codebook.seed.clone()})
    return report


def _report_layer(
    name: str, router: Any, trials: list[Trial], wanted: float, criterion: Criterion
) -> LayerReport:
    sizes = router.codebook.num_codewords, router.shortlist_size
    own = next(one for one in trials if (one.num_codewords, one.shortlist_size) == sizes)
    return LayerReport(
        **asdict(own),
        name=name,
        num_experts=router.num_experts,
        trials=tuple(trials),
        suggestion=cheapest(trials, wanted, criterion),
    )


def _count_tokens(
    routers: Mapping[str, Any], learned: Sequence[Tensor], measured: Sequence[Tensor]
) -> list[tuple[int, int]]:
    """(learned from, measured on): each router's tokens on all ranks, which must be enough."""
    device = next(iter(routers.values())).weight.device
    pairs = [(len(ours), len(others)) for ours, others in zip(learned, measured, strict=True)]
    counts = all_reduce_sum(torch.tensor(pairs, device=device)).tolist()
    shares = []  # tokens per codeword
    for (name, router), (ours, others) in zip(routers.items(), counts, strict=True):
        codewords = router.codebook.num_codewords
        if ours < codewords or others == 0:
            least = -(-codewords * HELD_OUT // (HELD_OUT - 1)) + HELD_OUT
            raise ConfigError(
                "calibrate.batches",
                f"{ours + others} tokens for {name!r}",
                f"must show each router at least {least} tokens, in two sequences or more",
                "Pass more text, raise max_tokens, or swap with fewer codewords. A copy that the "
                "model does not use (PEFT keeps some) must be merged first.",
            )
        shares.append(ours / codewords)
    if min(shares) < 4:
        warnings.warn(
            f"calibrate: {min(shares):.1f} tokens per codeword are few to learn from. Pass more "
            "text, or swap with fewer codewords.",
            stacklevel=3,
        )
    return counts


def _losses(
    model: nn.Module,
    routers: list[Any],
    fitted: list[dict[int, Codebook]],
    report: CalibrationReport,
    batches: list[dict[str, Any]],
) -> Losses | None:
    """Held-out loss of the model with each setting in turn; None where it can't be told."""
    if any(isinstance(router, AirLayer) for router in routers):
        return None

    def loss(**values: Any) -> Any:
        with changed(routers, **values):
            return next_token_loss(model, batches)

    everything = [router.num_experts for router in routers]
    fewer = [router.top_k - 1 for router in routers]
    now = [router.codebook.num_codewords for router in routers]
    found = [report.suggestion or layer.suggestion for layer in report.layers]
    present = [books[count] for books, count in zip(fitted, now, strict=True)]
    suggested = [books[one.num_codewords] for books, one in zip(fitted, found, strict=True)]
    exact = loss(shortlist_size=everything)
    if exact is None:
        return None
    return Losses(
        exact=exact,
        fewer=loss(shortlist_size=everything, top_k=fewer) if min(fewer) > 0 else None,
        calibrated=loss(codebook=present),
        suggested=loss(codebook=suggested, shortlist_size=[one.shortlist_size for one in found]),
    )


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
        tried: dict[tuple[int, int], list[Trial]] = {}
        for trial in (trial for layer in self.layers for trial in layer.trials):
            tried.setdefault((trial.num_codewords, trial.shortlist_size), []).append(trial)
        worst = [
            min(trials, key=attrgetter(self.criterion))
            for trials in tried.values()
            if len(trials) == len(self.layers)
        ]
        return cheapest(worst, self.wanted_recall, self.criterion)

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
        found, experts = self.suggestion, self.layers[0].num_experts
        if found is None:
            return "No one pair of sizes was tried in all layers: see the last column."
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


def cheapest(trials: Sequence[Trial], wanted: float, criterion: Criterion) -> Any:
    """The fewest products among those that reach `wanted`, as with all experts every one does."""
    enough = [trial for trial in trials if getattr(trial, criterion) >= wanted]
    return min(enough, key=lambda trial: (trial.scored, -getattr(trial, criterion)), default=None)
