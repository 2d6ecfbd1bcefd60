"""What a report suggests, from trials whose outcome is written by hand."""

from __future__ import annotations

from dataclasses import asdict
from typing import Any

from airmoe.adapt import CalibrationReport, LayerReport, Trial
from airmoe.adapt.calibration import cheapest

OWN = (8, 16)


def trial(sizes: tuple[int, int], overlap: float, mass_recall: float = 0.5) -> Trial:
    return Trial(*sizes, overlap, mass_recall, bound=0.1, scored=sum(sizes))


def report(*trials: tuple[Trial, ...], criterion: Any = "overlap") -> CalibrationReport:
    layers = [
        LayerReport(
            **asdict(trial(OWN, 0.8)),
            name=f"layer {number}",
            num_experts=64,
            trials=(*tried, trial(OWN, 0.8)),
            suggestion=cheapest(tried, 0.9, criterion),
        )
        for number, tried in enumerate(trials)
    ]
    return CalibrationReport(tuple(layers), 30, 10, 0.9, criterion)


FIRST = (trial((4, 8), 0.95), trial((4, 16), 0.97, 0.92), trial((8, 32), 1.0, 0.99))
SECOND = (trial((4, 8), 0.7), trial((4, 16), 0.91, 0.8), trial((8, 32), 0.99, 0.98))


def test_the_worst_layer_decides() -> None:
    both = report(FIRST, SECOND)
    assert both.layers[0].suggestion is FIRST[0] and both.layers[1].suggestion is SECOND[1]
    assert both.suggestion is SECOND[1]
    assert "num_codewords=4, shortlist_size=16 (worst layer 0.910), 20 products" in str(both)
    assert report(FIRST, SECOND, criterion="mass_recall").suggestion is SECOND[2]


def test_sizes_that_were_not_tried_everywhere_are_not_suggested() -> None:
    assert report(FIRST, SECOND[2:]).suggestion is SECOND[2]
    unlike = report(FIRST, (trial((2, 5), 1.0),))
    assert unlike.suggestion is None
    assert "No one pair of sizes was tried in all layers" in str(unlike)
