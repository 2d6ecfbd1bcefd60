"""Fitting a codebook to a fixed set of states, outside of training."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import torch
from torch import Tensor

from airmoe.routers.codebook import Codebook


def k_means(new: Callable[[], Codebook], hidden: Tensor, passes: int, seed: int) -> Codebook:
    """k-means on hidden [T, D]: what `new` makes, learned in whole passes."""
    with torch.random.fork_rng(devices=[]), torch.device(hidden.device):
        torch.manual_seed(seed)
        codebook = new()
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # its advice is about micro-batches of training
        for _ in range(passes):
            codebook.update(hidden)
    return codebook
