"""Whole experiments: named runs."""

from __future__ import annotations

from airmoe.experiments.presets import PRESETS, preset

__all__ = ["PRESETS", "preset"]
