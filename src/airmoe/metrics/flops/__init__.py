"""The FLOP ledger: what one token costs, operator by operator, counted twice.

*Algorithmic* is the paper's convention: M candidates scored, K experts run. *Executed* is what our
kernels compute: where tokens share a pool, all experts of that pool. Everything follows from the
settings; no model is built, so a large one needs neither memory nor time.
"""

from airmoe.flops import COLUMNS, PARTS, Column, Cost, Workload
from airmoe.metrics.flops.ledger import Ledger, count_flops, count_layer

__all__ = [
    "COLUMNS",
    "PARTS",
    "Column",
    "Cost",
    "Ledger",
    "Workload",
    "count_flops",
    "count_layer",
]
