"""What a calibration found, layer by layer, and what it suggests."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

Criterion = Literal["overlap", "mass_recall"]


@dataclass(frozen=True)
class Trial:
    """One pair of sizes: means over activations that the codebook had not seen."""

    num_codewords: int
    shortlist_size: int
    overlap: float  # share of the exact top-K that is still chosen
    mass_recall: float  # share of the exact distribution on the candidates
    bound: float  # what Prop. 1 guarantees of the mass recall
    scored: int  # products per token: with the codewords, then with the candidates


def products(num_codewords: int, shortlist_size: int, num_experts: int) -> int:
    """Per token; where the shortlist holds every expert no codeword is compared."""
    whole = shortlist_size == num_experts
    return num_experts if whole else num_codewords + shortlist_size


@dataclass(frozen=True)
class LayerReport:
    """One router after calibration: what its own sizes keep, and what others would."""

    name: str
    num_experts: int
    num_codewords: int
    shortlist_size: int
    trials: tuple[Trial, ...]  # its own sizes among them
    wanted_recall: float
    criterion: Criterion  # what was wanted: this share of the top-K, or of the distribution

    @property
    def overlap(self) -> float:
        return self._own.overlap

    @property
    def mass_recall(self) -> float:
        return self._own.mass_recall

    @property
    def bound(self) -> float:
        return self._own.bound

    @property
    def scored(self) -> int:
        """Products per token, to be compared with `num_experts`."""
        return self._own.scored

    @property
    def _own(self) -> Trial:
        sizes = (self.num_codewords, self.shortlist_size)
        return next(t for t in self.trials if (t.num_codewords, t.shortlist_size) == sizes)

    @property
    def suggestion(self) -> Trial:
        """The cheapest tried sizes that reach the wanted recall, for this layer alone."""
        return cheapest(list(self.trials), self.wanted_recall, self.criterion)


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
        head = ("layer", "experts", "G", "M", "scored", "overlap", "mass recall", "bound")
        wanted = f"for {self._criterion} {self.wanted_recall:g}"
        rows = [(*head, wanted), *(_row(layer) for layer in self.layers)]
        widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
        lines = [
            f"Codebooks fitted on {self.num_fitted:,} tokens per layer, "
            f"measured on {self.num_measured:,} others."
        ]
        for row in rows:
            cells = [cell.rjust(width) for cell, width in zip(row[1:], widths[1:], strict=True)]
            lines.append("  ".join([row[0].ljust(widths[0]), *cells]))
        return "\n".join([*lines, self._advice(), *self._costs()])

    def _costs(self) -> list[str]:
        """What that costs in loss."""
        if self.losses is None:
            return []
        exact, named = self.losses.exact, {}
        named["suggested sizes"] = self.losses.suggested
        named["current sizes"] = self.losses.calibrated
        if self.losses.fewer is not None:
            named["exact routing with K - 1 experts"] = self.losses.fewer
        costs = ", ".join(f"{name} {loss - exact:+.4f}" for name, loss in named.items())
        return [f"Held-out loss {exact:.4f}; {costs}."]

    @property
    def _criterion(self) -> str:
        return self.criterion.replace("_", " ")

    def _advice(self) -> str:
        found = self.suggestion
        if found is None:
            return "No one pair of sizes was tried in all layers: see the last column."
        experts = self.layers[0].num_experts
        advice = (
            f"For {self._criterion} {self.wanted_recall:g} in every layer: num_codewords="
            f"{found.num_codewords}, shortlist_size={found.shortlist_size} (worst layer "
            f"{getattr(found, self.criterion):.3f}), {found.scored:,} products per token "
            f"instead of {experts:,}."
        )
        if found.scored >= experts:
            advice += " That saves nothing: for this recall the model has too few experts."
        return advice


def cheapest(trials: list[Trial], wanted: float, criterion: Criterion) -> Trial:
    """The fewest products among those that reach `wanted`; with all experts every one does."""
    enough = [trial for trial in trials if getattr(trial, criterion) >= wanted]
    return min(enough, key=lambda trial: (trial.scored, -getattr(trial, criterion)))


def _row(layer: LayerReport) -> tuple[str, ...]:
    found = layer.suggestion
    return (
        layer.name,
        f"{layer.num_experts:,}",
        f"{layer.num_codewords:,}",
        f"{layer.shortlist_size:,}",
        f"{layer.scored / layer.num_experts:.0%}",
        f"{layer.overlap:.3f}",
        f"{layer.mass_recall:.3f}",
        f"{layer.bound:.2g}",
        f"G={found.num_codewords} M={found.shortlist_size} ({getattr(found, layer.criterion):.3f})",
    )
