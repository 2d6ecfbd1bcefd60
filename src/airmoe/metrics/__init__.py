"""Routing metrics: quality against exact routing, usage, and a meter over batches and ranks."""

from airmoe.metrics.quality import mass_recall, mass_recall_bound, overlap, routing_quality
from airmoe.metrics.usage import (
    RoutingMeter,
    dead_experts,
    shortlist_staleness,
    unlisted_experts,
    usage_entropy,
)

__all__ = [
    "RoutingMeter",
    "dead_experts",
    "mass_recall",
    "mass_recall_bound",
    "overlap",
    "routing_quality",
    "shortlist_staleness",
    "unlisted_experts",
    "usage_entropy",
]
