"""Routing -> output: experts and the layer that joins them to a router."""

from __future__ import annotations

from airmoe.moe.experts import CoarseExperts, GranularExperts
from airmoe.moe.layer import MoELayer, MoEOutput

__all__ = ["CoarseExperts", "GranularExperts", "MoELayer", "MoEOutput"]
