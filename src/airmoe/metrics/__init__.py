"""Routing metrics: quality against exact routing, usage, and meters over batches and ranks."""

from airmoe.metrics.quality import (
    RoutingQuality,
    mass_recall,
    mass_recall_bound,
    overlap,
    routing_quality,
)
from airmoe.metrics.streaming import RoutingMeter, RoutingReport
from airmoe.metrics.usage import (
    CodewordUsage,
    codeword_usage,
    dead_experts,
    shortlist_staleness,
    unlisted_experts,
    usage_entropy,
)

__all__ = [
    "CodewordUsage",
    "RoutingMeter",
    "RoutingQuality",
    "RoutingReport",
    "codeword_usage",
    "dead_experts",
    "mass_recall",
    "mass_recall_bound",
    "overlap",
    "routing_quality",
    "shortlist_staleness",
    "unlisted_experts",
    "usage_entropy",
]
