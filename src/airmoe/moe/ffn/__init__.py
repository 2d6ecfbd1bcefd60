"""Dense feed-forward networks of Hugging Face models replaced by mixtures of experts."""

from __future__ import annotations

from airmoe.moe.ffn.saving import load_swapped_ffn
from airmoe.moe.ffn.swap import FfnExperts, swap_ffn

__all__ = ["FfnExperts", "load_swapped_ffn", "swap_ffn"]
