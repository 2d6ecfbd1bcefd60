"""The figures of a report, each drawn from what its record keeps."""

from __future__ import annotations

from airmoe.experiments.report.figures.drawing import Drawing, can_draw

__all__ = ["Drawing", "can_draw"]
